"""The whole training step and a round of decoding through the real TPU compiler, kernels and all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config
from jax.sharding import NamedSharding, PartitionSpec

from memrl_jax.models import decoder, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.sampling import engine
from memrl_jax.training import mesh, objective, step
from tests.kernels import tpu

pytest.importorskip("libtpu", reason="compiling for TPU needs the libtpu wheel: pip install libtpu")

CFG = DecoderConfig.tiny(
  512, dim=256, layers=3, heads=4, kv_heads=2, head_dim=64, mlp_dim=256, sliding_window=64,
  global_every=3,
)  # fmt: skip
PACK = pack.PackConfig(sequences=4, length=256, rows=4, response=16)
SHAPES = {"one chip": (1, 1, 1), "data2 tensor2": (2, 1, 2), "fsdp4": (1, 4, 1)}


def grid(generation, shape):
  chips = tpu.mesh(generation).devices.reshape(-1)
  return mesh.make(mesh.MeshConfig(*shape), list(chips[: int(np.prod(shape))]))


def placed(tree, shardings):
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    tree, shardings,
  )  # fmt: skip


def text_of(lowered):
  with config.enable_compilation_cache(False):  # a program for an absent chip cannot be loaded
    return lowered.compile().as_text()


CASES = [("v5e", "data2 tensor2"), ("v5p", "fsdp4"), ("v6e", "data2 tensor2"), ("v5p", "one chip")]


@pytest.mark.parametrize("generation, shape", CASES)
def test_the_gradient_of_a_packed_batch_holds_every_kernel(generation, shape):
  chips = grid(generation, SHAPES[shape])
  tx = step.optimiser(step.OptimConfig(), 10)
  one = step.Trainer(CFG, objective.LossConfig(kl_coef=0.1), tx, chips, max_tokens=16, remat="some")
  params = {"policy": policy.shapes(CFG)}
  rows = NamedSharding(chips, PartitionSpec(("data", "fsdp")))
  batch = pack.empty(PACK)
  lowered = one.lower(
    placed(params, mesh.param_shardings(chips, params)),
    placed(batch, jax.tree.map(lambda _: rows, batch)),
  )
  text = text_of(lowered)
  for kernel in ("segment_attention", "segment_attention_dq", "segment_attention_dkv",
                 "token_logprob_forward", "token_logprob_backward"):  # fmt: skip
    assert f"/{kernel}" in text, kernel
  # The forward kernel once: with its result kept, recomputing a layer does not run it again.
  assert text.count('custom_call_target="tpu_custom_call"') == 5


@pytest.mark.parametrize("generation, shape", CASES)
def test_a_round_of_decoding_reads_both_parts_of_the_cache_by_kernel(generation, shape):
  chips = grid(generation, SHAPES[shape])
  R, W, steps, columns = 8, 4, 8, 256
  everywhere = NamedSharding(chips, PartitionSpec())

  def whole(tree):
    return placed(tree, jax.tree.map(lambda _: everywhere, tree))

  params = policy.shapes(CFG)
  params = placed(params, mesh.param_shardings(chips, params))
  weights = jax.eval_shape(functools.partial(policy.decode_weights, cfg=CFG), params)

  def number(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)

  i32, f32 = functools.partial(number, jnp.int32), functools.partial(number, jnp.float32)
  rows = engine._Rows(
    i32(R), i32(R), i32(R), i32(R), number(jnp.uint32, R, 2), f32(R), f32(R), i32(R), i32(R, 4)
  )
  own, common = (
    jax.eval_shape(lambda rows=rows: policy.empty_kv(CFG, rows, columns)) for rows in (R, R // W)
  )
  shared = policy.Shared(common, decoder.Lanes(i32(R // W, W), i32(R)), i32(R), i32(R))
  arguments = whole((own, rows, f32(R, steps, 2), i32(), i32(), shared))
  lowered = engine._round.lower(whole(weights), CFG, *arguments, mesh=chips)
  text = text_of(lowered)
  assert "/decode_attention" in text
  assert text.count('custom_call_target="tpu_custom_call"') == 2 * CFG.layers


def test_tokens_split_over_tensor_and_the_hosts_memory_leave_a_chip_less_to_hold():
  """What a gradient keeps of L layers, of N tokens of width D, as the compiler counts it."""
  cfg = DecoderConfig.tiny(
    512, dim=512, layers=16, heads=4, kv_heads=4, head_dim=128, mlp_dim=512, tie_embeddings=False
  )
  packing = pack.PackConfig(sequences=1, length=2048, rows=4, response=16)

  def program(name, remat=True, **options):
    layout = mesh.MeshConfig(tensor=4, **options)
    chips = mesh.make(layout, grid("v5e", (1, 1, 4)).devices.reshape(-1).tolist())
    tx = step.optimiser(step.OptimConfig(), 10)
    one = step.Trainer(
      cfg, objective.LossConfig(), tx, chips, max_tokens=16, remat=remat, layout=layout
    )
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), pack.empty(packing))
    lowered = one.lowered(one.init(policy.shapes(cfg), None), batch)[name]
    with config.enable_compilation_cache(False):
      return lowered.compile().memory_analysis()

  inputs = 4 * cfg.layers * 2048 * cfg.dim  # bytes, and a chip's heads of attention a quarter more
  whole = program("accumulate")
  away = program("accumulate", sequence=True, remat="offload")
  print(f"temporaries {whole.temp_size_in_bytes}, split and away {away.temp_size_in_bytes}")
  assert whole.temp_size_in_bytes - away.temp_size_in_bytes > 0.9 * 1.25 * inputs
  assert away.host_temp_size_in_bytes >= 2 * inputs / 4
  # Two moments lie there, weights and gradients here.
  apply = program("apply", offload=("moments",))
  assert apply.host_argument_size_in_bytes == pytest.approx(apply.argument_size_in_bytes, rel=0.02)
