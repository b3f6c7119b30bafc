"""The whole training step and a round of decoding through the real TPU compiler, kernels and all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import config as config_lib
from jax.sharding import NamedSharding, PartitionSpec

from memrl_jax.models import decoder, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.sampling import cache, programs, requests
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
  with config_lib.enable_compilation_cache(False):  # a program for an absent chip cannot be loaded
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


def everywhere(chips, tree):
  return placed(tree, jax.tree.map(lambda _: NamedSharding(chips, PartitionSpec()), tree))


def weights_on(chips, cfg, dtype=jnp.float32):
  params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), policy.shapes(cfg))
  return placed(params, mesh.param_shardings(chips, params))


def i32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize("generation, shape", CASES)
def test_a_round_of_decoding_reads_both_parts_of_the_cache_by_kernel(generation, shape):
  chips = grid(generation, SHAPES[shape])
  R, W, steps = 8, 4, 8
  config = requests.EngineConfig(slots=16, buckets=(248,), round_steps=steps)
  params = weights_on(chips, CFG)
  kept = programs.resident(CFG, params, config)

  def number(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)

  f32 = functools.partial(number, jnp.float32)
  rows = programs.Rows(
    i32(R), i32(R), i32(R), i32(R), number(jnp.uint32, R, 2), f32(R), f32(R), i32(R), i32(R, 4)
  )
  common = programs.Common(i32(R // W), decoder.Lanes(i32(R // W, W), i32(R)), i32(R))
  arguments = everywhere(chips, (i32(R), rows, f32(R, steps, 2), i32(), i32(), common))
  lowered = programs.decode_in_place.lower(kept.weights, CFG, kept.cache, *arguments, mesh=chips)
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
    with config_lib.enable_compilation_cache(False):
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


def chip_bytes(tree):
  return sum(
    np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
  )


def test_the_sampler_of_a_4b_model_needs_little_beside_its_cache_and_one_copy_of_its_weights():
  # Two layers of Qwen3-4B on four chips: 32 contexts of 4096 tokens, prefill of 4 x 512.
  cfg = DecoderConfig(
    vocab=151936, dim=2560, layers=2, heads=32, kv_heads=8, head_dim=128, mlp_dim=9728,
    rope_theta=1e6, qk_norm=True, tie_embeddings=True,
  )  # fmt: skip
  chips = grid("v5e", (1, 1, 4))
  config = requests.EngineConfig(
    slots=32, buckets=(4096,), prefill_rows=(4,), prefill_chunks=(512,), round_steps=8
  )
  params = weights_on(chips, cfg, jnp.bfloat16)
  kept = programs.resident(cfg, params, config)
  weights, cached = chip_bytes(kept.weights), chip_bytes(kept.cache)
  # Keys and values of 2 of 8 heads, in 33 tiles of 128 columns; a quarter of the weights but norms.
  assert cached == 2 * 32 * 2 * 2 * 128 * (33 * 128) * 2
  assert weights == pytest.approx(chip_bytes(params), rel=1e-6)
  with config_lib.enable_compilation_cache(False):
    made = {n: low.compile() for n, low in programs.lowered(cfg, params, config).items()}
    new = jax.eval_shape(lambda: policy.empty_kv(cfg, 32, 8, jnp.bfloat16))
    split = NamedSharding(chips, PartitionSpec(None, "tensor"))
    new = placed(new, jax.tree.map(lambda _: split, new))
    rows = everywhere(chips, (i32(32), i32(32), i32()))
    where = kept.cache[0].key_BKdS.sharding
    made["store"] = cache._store.lower(kept.cache, *rows, new, where=where).compile()
    moves = everywhere(chips, (i32(32, 4), i32()))
    made["clone"] = cache._clone.lower(kept.cache, *moves, 4096, where=where).compile()
  uses = {name: program.memory_analysis() for name, program in made.items()}
  for name in ("prefill", "decode"):
    assert uses[name].argument_size_in_bytes == pytest.approx(weights + cached, rel=0.01), name
  assert uses["decode"].temp_size_in_bytes < 0.02 * cached
  # What is bounded whatever the context: the scores alone would be 4 x 512 x 4608 x 8 heads x 4 bytes.
  assert uses["prefill"].temp_size_in_bytes < 100e6 < 4 * 512 * 4608 * 8 * 4
  for name in ("store", "clone"):  # where the cache is
    assert uses[name].alias_size_in_bytes == cached, name
    assert uses[name].temp_size_in_bytes < 0.1 * cached, name
