"""segment_attention and decode_attention by the real TPU compiler, at the shapes of real models."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from memrl_kernels.decode_attention import decode_attention
from memrl_kernels.segment_attention import segment_attention

from tests.kernels import tpu

pytest.importorskip("libtpu", reason="compiling for TPU needs the libtpu wheel")

SHARDED = dict(shape=(2, 2), names=("data", "tensor"))
GENERATIONS = list(tpu.TOPOLOGIES)
MIB = 2**20


def compile_segments(generation, *, K, G, d, T=4096, B=4, dtype=jnp.bfloat16, **options):
  """Value and gradient of rows over "data" and key-value heads over "tensor"; bytes are per chip."""

  def pulled(query, key, value, segment, parent, position, d_out):
    run = functools.partial(segment_attention, scale=d**-0.5, **options)
    out, back = jax.vjp(lambda *x: run(*x, segment, parent, position), query, key, value)
    return out, back(d_out)

  query, head = (jax.ShapeDtypeStruct((B, T, K, *rest), dtype) for rest in ((G, d), (d,)))
  token, parent = (jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (T, 33))
  split = P("data", None, "tensor" if K > 1 else None)
  rows = P("data")
  return tpu.compile(
    pulled, query, head, head, token, parent, token, query, generation=generation,
    in_specs=(split, split, split, rows, rows, rows, split), out_specs=split, **SHARDED,
  )  # fmt: skip


def kernels(compiled):
  return compiled.as_text().count('custom_call_target="tpu_custom_call"')


def report(name, compiled):
  memory = compiled.memory_analysis()
  print(
    f"\n{name}: arguments {memory.argument_size_in_bytes / MIB:.1f} MiB, "
    f"temporaries {memory.temp_size_in_bytes / MIB:.2f} MiB a chip"
  )
  return memory.temp_size_in_bytes


@pytest.mark.parametrize("generation", GENERATIONS)
def test_segment_attention_compiles_without_an_array_of_tokens_times_tokens(generation):
  # Qwen3-8B's heads, impl="auto": two rows and four key-value heads a chip. The scores of one row
  # would be 4 * 4 * 4096^2 = 2^28 numbers, 512 MiB even in bfloat16; inputs are 76 MiB.
  compiled = compile_segments(generation, K=8, G=4, d=128)
  assert kernels(compiled) == 3  # forward, dq, and dk with dv
  assert report(f"segment_attention {generation}", compiled) < 200 * MIB


@pytest.mark.parametrize(
  "model, heads",
  [
    ("Qwen2.5-7B", dict(K=4, G=7, d=128)),
    ("Llama-3.2-1B", dict(K=8, G=4, d=64, T=1000)),
    ("Gemma 3 270M, local layer", dict(K=1, G=4, d=256, sliding_window=512, soft_cap=50.0)),
    ("float32", dict(K=8, G=4, d=128, T=2048, dtype=jnp.float32)),
  ],
)
def test_segment_attention_compiles_for_the_heads_of_other_models(model, heads):
  compiled = compile_segments("v5e", **heads)
  assert kernels(compiled) == 3
  report(model, compiled)


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("heads", [dict(K=8, G=4, d=128), dict(K=4, G=7, d=64, soft_cap=30.0)])
def test_decode_attention_compiles_and_copies_nothing_of_the_cache(generation, heads):
  K, G, d, R, C = heads["K"], heads["G"], heads["d"], 32, 8192
  shapes = (R, K, G, d), (R, K, d, C), (R, K, C, d)
  arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
  length = jax.ShapeDtypeStruct((R,), jnp.int32)
  split, rows = P("data", "tensor"), P("data")
  compiled = tpu.compile(
    functools.partial(decode_attention, scale=d**-0.5, soft_cap=heads.get("soft_cap")),
    *arrays, length, length, generation=generation,
    in_specs=(split, split, split, rows, rows), out_specs=split, **SHARDED,
  )  # fmt: skip
  assert kernels(compiled) == 1
  assert report(f"decode_attention {generation} {heads}", compiled) < MIB
