"""Adapters on a mesh: the gradient is that of one device, over any base."""

import functools

import jax
import numpy as np
import pytest

from memrl_jax.models import lora, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.training import mesh, objective, step
from tests.models.test_attention import tree_batch

CFG = DecoderConfig.tiny(
  64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=32, tie_embeddings=False
)


def gradients(kind, shape, devices):
  """The gradient of the adapters, and the weights that are sampled from."""
  config = lora.LoraConfig(rank=4, alpha=6.0, targets=lora.TARGETS, base=kind, block=8)
  weights = policy.init(jax.random.key(0), CFG)
  rng = np.random.default_rng(0)
  fresh = jax.eval_shape(lambda: lora.init(jax.random.key(1), CFG, config))
  trained = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), fresh)
  chips = mesh.make(shape, jax.devices()[:devices])
  base = lora.quantize(mesh.place_params(chips, weights), config)
  join = functools.partial(lora.attach, cfg=CFG, config=config)
  one = step.Trainer(
    CFG, objective.LossConfig(entropy_coef=0.01), step.optimiser(step.OptimConfig(), 10), chips,
    max_tokens=3, base=base, join=join,
  )  # fmt: skip
  placed = mesh.place_params(chips, {"policy": trained})
  merged = jax.jit(functools.partial(lora.merge, cfg=CFG, config=config))(base, placed["policy"])
  return jax.device_get((one.gradients(placed, [tree_batch(K=2)]), merged))


@pytest.mark.parametrize(
  "kind", ["float", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "nf4"))]
)
def test_the_gradient_of_adapters_on_four_devices_is_that_on_one(kind, uncached):
  if kind != "float":
    pytest.importorskip("qwix", reason="a quantized base needs qwix: pip install qwix")
  want = gradients(kind, mesh.MeshConfig(), 1)
  got = gradients(kind, mesh.MeshConfig(fsdp=2, tensor=2), 4)
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5, rtol=1e-4), got, want)
