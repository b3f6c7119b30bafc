"""The training step on eight devices, split in every way, is that of one device."""

import functools
import re

import jax
import numpy as np
import pytest

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.training import mesh, objective, step
from tests.training import test_step as one_device

DEVICES = 8
CFG = DecoderConfig.tiny(64, dim=32, layers=2, heads=8, kv_heads=8, head_dim=8, mlp_dim=48)
PACK = pack.PackConfig(sequences=8, length=56, rows=6, response=5)
LOSS = objective.LossConfig(entropy_coef=0.01, kl_coef=0.1)
SPLITS = [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 1, 8)]
pytestmark = pytest.mark.skipif(
  jax.device_count() < DEVICES,
  reason=f"needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count={DEVICES}",
)


OPTIM = step.OptimConfig(learning_rate=1e-2, critic_learning_rate=1e-2, eps=1e-3)


@functools.cache
def batches():
  """Two micro-batches of families that share beginnings, of 2 to 12 rows, and sequences without a row.

  Of the first, two sequences have only masked rows: on eight shards, all that two devices have.
  """
  turns = [turn for n in range(9) for turn in one_device.family(1 + n % 3, 2 + n % 3, seed=n)]
  first, second = pack.pack(turns, PACK)
  mask_BSK = first.mask_BSK.copy()
  assert mask_BSK.any((1, 2)).all() and not second.mask_BSK[-1].any()
  mask_BSK[[2, 5]] = False
  return first._replace(mask_BSK=mask_BSK), second


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  """Programs that run once: not optimised, they compile in two thirds of the time."""
  monkeypatch.setattr(mesh, "CPU_OPTIONS", {"xla_backend_optimization_level": 0})


@functools.cache
def weights():
  """Of the policy, and of a critic whose value head is not zero: that sends nothing down."""
  params = policy.init(jax.random.key(0), CFG)
  head = jax.random.normal(jax.random.key(1), (CFG.dim,))
  return params, step.init_critic(params, CFG) | {"value": head}


@functools.cache
def trained(split, critic=True, remat=True, compute="", sequence=False, offload=()):
  """The trainer and its state; gradient, weights after a step of AdamW, and metrics."""
  layout = mesh.MeshConfig(*split, sequence=sequence, offload=offload)
  one = step.Trainer(
    CFG, LOSS, step.optimiser(OPTIM, 10), mesh.make(layout, jax.devices()[: np.prod(split)]),
    max_tokens=PACK.response, remat=remat, compute=compute, layout=layout,
  )  # fmt: skip
  params, value = weights()
  state = one.init(params, value if critic else None)
  grads = jax.device_get(one.gradients(state.params, batches()))
  state, metrics = one.update(state, batches())
  return one, state, jax.device_get({"grads": grads, "weights": state.params, "metrics": metrics})


@pytest.mark.parametrize(
  "split, how, bound",
  [
    ((8, 1, 1), {"critic": False}, 1e-5),
    ((2, 4, 1), {"critic": True, "remat": "some"}, 1e-5),
    ((2, 2, 2), {"critic": False, "sequence": True}, 1e-5),
    ((1, 1, 8), {"critic": False, "remat": "offload", "offload": ("moments",)}, 1e-5),
    pytest.param(
      (2, 2, 2),
      {"critic": False, "compute": "bfloat16", "sequence": True},
      0.05,
      marks=pytest.mark.slow,
    ),
  ],
  ids=["data8", "data2 fsdp4, critic", "all 2, sequence", "tensor8, offload", "all 2, bfloat16"],
)
def test_loss_gradient_and_weights_on_eight_devices_are_those_on_one(split, how, bound, uncached):
  one, state, got = trained(split, **how)
  _, _, want = trained((1, 1, 1))  # its critic does not move the policy
  far = {}
  for part in ("grads", "weights"):
    for name, mine in got[part].items():
      far[part, name] = max(jax.tree.leaves(jax.tree.map(apart, mine, want[part][name])))
  far |= {name: apart(value, want["metrics"][name]) for name, value in got["metrics"].items()}
  print(far)
  assert max(far.values()) < bound
  moments = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}
  assert moments == {mesh.HOST if "offload" in how else mesh.DEVICE}
  if how["critic"]:
    # The weights lie where they were put, or the next step would be another program.
    before = one.compiled()
    one.update(state, batches())
    assert one.compiled() == before


def test_no_device_makes_an_array_of_all_tokens(uncached):
  """A layer's matmuls and the choice of sampled tokens keep to the sequences of their shard."""
  layout = mesh.MeshConfig(2, 2, 2, sequence=True)
  one = step.Trainer(
    CFG, LOSS, step.optimiser(OPTIM, 10), mesh.make(layout, jax.devices()),
    max_tokens=PACK.response, layout=layout,
  )  # fmt: skip
  state = one.init(policy.shapes(CFG), None)
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches()[0])
  text = one.lowered(state, batch)["accumulate"].compile().as_text()
  shapes = {tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", text)}
  tokens, sampled = PACK.sequences * PACK.length, PACK.sequences * PACK.rows * PACK.response
  assert (tokens // 4, CFG.dim) in shapes and (sampled // 4, CFG.dim) in shapes
  assert not [shape for shape in shapes if tokens in shape or sampled in shape]


def apart(mine, theirs):
  """The largest difference, relative to the largest number of the array."""
  return float(np.abs(mine - theirs).max() / max(np.abs(theirs).max(), 1e-3))
