"""token_logprob and memory_topk through the real TPU compiler, inside shard_map, for three chips."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from memrl_kernels import memory_topk, token_logprob

from tests.kernels import tpu

pytest.importorskip("libtpu", reason="compiling for TPU needs the libtpu wheel: pip install libtpu")


def shape(*dims, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(dims, dtype)


def gradients(score, hidden_ND, embedding_VD, label_N, mask_N, temperature_N):
  def total(hidden_ND, embedding_VD):
    scored = score(
      hidden_ND, embedding_VD, label_N, mask_N, temperature_N=temperature_N, entropy=True
    )
    return jnp.sum(scored.logp_N) + jnp.sum(scored.entropy_N)

  return jax.value_and_grad(total, argnums=(0, 1))(hidden_ND, embedding_VD)


def rows(N, V, D, dtype=jnp.bfloat16):
  return (
    shape(N, D, dtype=dtype),
    shape(V, D, dtype=dtype),
    shape(N, dtype=jnp.int32),
    shape(N, dtype=bool),
    shape(N),
  )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("generation", tpu.TOPOLOGIES)
def test_token_logprob_compiles_and_auto_chooses_the_kernels(generation, dtype):
  # 1300 rows, 5003 entries and 200 features a chip fill no block. Nobody asks for impl="pallas".
  score = functools.partial(token_logprob.token_logprob, soft_cap=30.0)

  def run(*arrays):
    value, (hidden_ND, embedding_VD) = gradients(score, *arrays)
    return jax.lax.psum(value, "data"), hidden_ND, jax.lax.psum(embedding_VD, "data")

  compiled = tpu.compile(
    run,
    *rows(tpu.CHIPS * 1300, 5003, 200, dtype),
    generation=generation,
    in_specs=(P("data"), P(), P("data"), P("data"), P("data")),
    out_specs=(P(), P("data"), P()),
  )
  text = compiled.as_text()
  assert "token_logprob_forward" in text and "token_logprob_backward" in text


def test_a_vocabulary_split_over_chips_compiles():
  score = functools.partial(token_logprob.token_logprob_split, axis="tensor", impl="pallas")

  def run(*arrays):
    value, (hidden_ND, embedding_WD) = gradients(score, *arrays)
    return jax.lax.psum(value, "data"), hidden_ND, jax.lax.psum(embedding_WD, "data")

  compiled = tpu.compile(
    run,
    *rows(512, 8192, 256),
    generation="v5p",
    in_specs=(P("data"), P("tensor"), P("data"), P("data"), P("data")),
    out_specs=(P(), P("data"), P("tensor")),
    shape=(2, 2),
    names=("data", "tensor"),
  )
  assert "token_logprob_forward" in compiled.as_text()


@pytest.mark.parametrize("impl, most", [("pallas", 256), ("xla", 1280)])
def test_qwen3_4b_rows_need_no_logits(impl, most):
  # 4096 rows a chip, V = 151,936, D = 2560, bfloat16: logits are 2374 MiB in float32. The kernels
  # hold the gradient of a slice of them, [4096, 18944] bfloat16 (148 MiB), the float32 gradient of
  # the hidden states (40 MiB) and little else. The XLA loop holds [4096, 18992] float32 (297 MiB)
  # and the embedding once more (742 MiB), laid out so that it can be cut into interleaved tiles.
  N, V, D = 4096, 151_936, 2560
  score = functools.partial(token_logprob.token_logprob, impl=impl)
  compiled = tpu.compile(
    functools.partial(_of_one_chip, score),
    *rows(tpu.CHIPS * N, V, D),
    generation="v5p",
    in_specs=(P("data"), P(), P("data"), P("data"), P("data")),
    out_specs=P("data"),
  )
  analysis = compiled.memory_analysis()
  print(f"{impl}: {analysis.temp_size_in_bytes / 2**20:.0f} MiB of temporaries a chip")
  assert analysis.temp_size_in_bytes < most * 2**20 < N * V * 4


def _of_one_chip(score, *arrays):
  value, (hidden_ND, embedding_VD) = gradients(score, *arrays)
  return value[None], hidden_ND, embedding_VD


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("generation", tpu.TOPOLOGIES)
def test_memory_topk_compiles_and_auto_chooses_the_kernel(generation, dtype):
  run = functools.partial(
    memory_topk.memory_topk, k=8, threshold=0.3, similarity_weight=0.5, utility_weight=0.5
  )
  compiled = tpu.compile(
    run,
    shape(tpu.CHIPS * 130, 384, dtype=dtype),
    shape(10_001, 384, dtype=dtype),
    shape(10_001),
    shape(10_001, dtype=bool),
    generation=generation,
    in_specs=(P("data"), P(), P(), P()),
    out_specs=P("data"),
  )
  assert "memory_topk" in compiled.as_text()
  assert compiled.memory_analysis().temp_size_in_bytes < 520 * 10_001 * 4 / 2  # no scores
