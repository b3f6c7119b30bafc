"""decode_attention: hand numbers, ragged rows equal ref, and parts of a context add up to the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memrl_kernels.decode_attention import decode_attention, merge

from tests.kernels import tpu

# A full row, an empty one, one whose window has passed its end, and two that are cut at both ends.
LENGTH_R = np.array([21, 0, 5, 9, 16], np.int32)
START_R = np.array([10, 0, 5, -3, 4], np.int32)
R, C = 5, 21


def cache(K=2, G=3, d=8, dtype=jnp.float32, rows=R, columns=C):
  rng = np.random.default_rng(0)
  shapes = ((rows, K, G, d), (rows, K, d, columns), (rows, K, columns, d))
  return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def dead():
  column_C = np.arange(C)
  return (column_C < START_R[:, None]) | (column_C >= LENGTH_R[:, None])


def poisoned(query, key, value):
  """NaN in every column that must not be seen."""
  mask = jnp.asarray(dead())
  return (
    query,
    jnp.where(mask[:, None, None, :], np.nan, key).astype(key.dtype),
    jnp.where(mask[:, None, :, None], np.nan, value).astype(value.dtype),
  )


def run(impl, **options):
  def go(*arrays):
    return decode_attention(*arrays, LENGTH_R, START_R, **(dict(scale=0.4, impl=impl) | options))

  return go


def assert_close(got, expected, **tolerance):
  for x, y in zip(got, expected, strict=True):
    np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), **tolerance)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_by_hand(impl):
  # Keys log 1, log 2, log 5 and a query of 1: weights 1/8, 2/8, 5/8 of the values 8, 16, 32, which
  # is 1 + 4 + 20 = 25, and log-sum-exp log 8. Of the second row only the first two columns count:
  # (8 + 2 * 16) / 3 = 40/3 and log 3.
  key = jnp.log(jnp.array([1.0, 2.0, 5.0])).reshape(1, 1, 1, 3)
  value = jnp.array([8.0, 16.0, 32.0]).reshape(1, 1, 3, 1)
  out, lse = decode_attention(
    jnp.ones((2, 1, 1, 1)),
    jnp.repeat(key, 2, axis=0),
    jnp.repeat(value, 2, axis=0),
    jnp.array([3, 2]),
    scale=1.0,
    impl=impl,
  )
  np.testing.assert_allclose(out.reshape(-1), [25, 40 / 3], rtol=1e-5)
  np.testing.assert_allclose(lse.reshape(-1), np.log([8, 3]), rtol=1e-5)


@pytest.mark.parametrize("block, soft_cap", [(1, None), (8, 0.7), (7, None), (None, 0.7)])
def test_blocks_equal_ref_whatever_lies_beyond_the_length(block, soft_cap):
  got = jax.jit(run("xla", block=block, soft_cap=soft_cap))(*poisoned(*cache()))
  expected = jax.jit(run("ref", soft_cap=soft_cap))(*cache())
  assert_close(got, expected, rtol=1e-5, atol=1e-6)
  assert_close(jax.jit(run("ref", soft_cap=soft_cap))(*poisoned(*cache())), expected, rtol=0)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_a_row_without_context_is_zero_and_minus_infinity(impl):
  out, lse = jax.jit(run(impl))(*cache())
  assert np.all(np.asarray(out)[[1, 2]] == 0) and np.all(np.asarray(lse)[[1, 2]] == -np.inf)
  assert np.all(np.isfinite(np.asarray(lse)[[0, 3, 4]]))


def test_lengths_beyond_the_cache_are_its_size():
  arrays = cache()
  long, full = (
    decode_attention(*arrays, jnp.full(R, length), scale=0.4, block=8) for length in (99, C)
  )
  assert_close(long, full, rtol=0)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_parts_of_a_cache_merge_to_the_whole(impl):
  # Cut at columns that leave some rows without anything in some parts, or in all.
  query, key, value = cache()
  parts = []
  for first, last in ((0, 6), (6, 7), (7, 21)):
    parts.append(
      decode_attention(
        query,
        key[..., first:last],
        value[:, :, first:last],
        jnp.asarray(LENGTH_R - first),
        jnp.asarray(START_R - first),
        scale=0.4,
        impl=impl,
      )
    )
  assert_close(merge(parts), run("ref")(query, key, value), rtol=1e-5, atol=1e-6)


def test_a_prompt_that_rows_share_is_one_row_with_their_queries_as_its_group():
  # Four rows: a prompt of 9 columns, the same for all, then 3 of their own.
  query, key, value = cache(rows=4, columns=12)
  K, G, d = query.shape[1:]
  key = key.at[..., :9].set(key[:1, ..., :9])
  value = value.at[:, :, :9].set(value[:1, :, :9])
  length = jnp.array([12, 11, 10, 9])
  whole = decode_attention(query, key, value, length, scale=0.4)

  together = query.transpose(1, 0, 2, 3).reshape(1, K, 4 * G, d)
  prompt = decode_attention(together, key[:1, ..., :9], value[:1, :, :9], jnp.array([9]), scale=0.4)
  prompt = jax.tree.map(lambda x: x.reshape(K, 4, G, *x.shape[3:]).swapaxes(0, 1), prompt)
  own = decode_attention(query, key[..., 9:], value[:, :, 9:], length - 9, scale=0.4)
  assert_close(merge([prompt, own]), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["ref", "xla", "pallas"])
def test_each_query_of_a_group_may_have_bounds_of_its_own(impl):
  # Query g of row r is query g of a call in which all of them have its bounds.
  query, key, value = cache()
  length = jnp.array([[21, 0, 7], [0, 0, 0], [3, 9, 21], [9, 8, 7], [16, 1, 20]], jnp.int32)
  start = jnp.array([[10, 0, 7], [0, 0, 0], [0, 8, 19], [-3, 8, 0], [4, 0, 11]], jnp.int32)
  options = dict(scale=0.4, soft_cap=0.7)

  def run(*arrays):
    return decode_attention(*arrays, length, start, block=8, impl=impl, **options)

  got = tpu.interpret(run, query, key, value) if impl == "pallas" else run(query, key, value)
  for g in range(3):
    alone = decode_attention(query, key, value, length[:, g], start[:, g], impl="ref", **options)
    want = tuple(x[:, :, g] for x in alone)
    assert_close([x[:, :, g] for x in got], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["ref", "xla", "pallas"])
@pytest.mark.parametrize("d", [8, 128])  # the kernel reads narrow heads transposed
def test_rows_read_any_line_of_a_larger_cache_in_place(impl, d):
  # Row 1 and row 4 read the same line, and nobody reads the lines 1, 3 and 5, which are NaN.
  query, _, _ = cache(d=d)
  _, key, value = cache(d=d, rows=7)
  slot = jnp.array([6, 2, 4, 0, 2], jnp.int32)
  unread = jnp.zeros((7, 1, 1, 1), bool).at[jnp.array([1, 3, 5])].set(True)
  options = dict(scale=0.4, block=8)

  def run(*arrays):
    return decode_attention(*arrays, LENGTH_R, START_R, slot, impl=impl, **options)

  arrays = query, jnp.where(unread, jnp.nan, key), jnp.where(unread, jnp.nan, value)
  got = tpu.interpret(run, *arrays) if impl == "pallas" else run(*arrays)
  want = decode_attention(
    query,
    key[slot],
    value[slot],
    jnp.asarray(LENGTH_R),
    jnp.asarray(START_R),
    impl="ref",
    **options,
  )
  assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_bfloat16_comes_out_in_float32():
  arrays = cache(dtype=jnp.bfloat16)
  got = run("xla", block=8)(*arrays)
  assert got.out_RKGd.dtype == got.lse_RKG.dtype == jnp.float32
  exact = run("ref")(*(x.astype(jnp.float32) for x in arrays))
  assert_close(got, exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
  "dtype, d, tolerance, soft_cap",
  [(jnp.float32, 8, 1e-5, 0.7), (jnp.bfloat16, 128, 0.03, None)],
)
def test_the_kernel_equals_ref_whatever_lies_beyond_the_length(dtype, d, tolerance, soft_cap):
  # Heads of 128 are read as they lie, narrower ones transposed.
  arrays = cache(dtype=dtype, d=d)
  got = tpu.interpret(run("pallas", block=8, soft_cap=soft_cap, scale=d**-0.5), *poisoned(*arrays))
  exact = run("ref", soft_cap=soft_cap, scale=d**-0.5)(*(x.astype(jnp.float32) for x in arrays))
  assert_close(got, exact, rtol=tolerance, atol=tolerance)


def test_the_kernel_stops_at_the_longest_row():
  # 512 columns in blocks of 8, the longest row has 9 of them: 2 steps a row, not 64.
  arrays = cache(rows=2, columns=512, K=1, G=1)
  steps = []

  def record(token, point, core):
    steps.append(point)
    return token

  out, _ = tpu.interpret(
    lambda *x: decode_attention(
      *x, jnp.array([9, 0], jnp.int32), scale=0.4, block=8, impl="pallas"
    ),
    *arrays,
    grid_point_recorder=record,
  )
  assert len(steps) == 2 * 2
  assert np.all(np.isfinite(out))


def test_gpu_programs_hold_a_loop_and_no_tpu_kernel():
  text = tpu.lower_for_gpu(run("auto"), *cache())
  assert "stablehlo.while" in text and "tpu_custom_call" not in text


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(impl="pallas"), "TPU only and this is cpu"),
    (dict(impl="cuda"), "cuda"),
    (dict(block=0), "block=0"),
    (dict(key_RKdC=jnp.zeros((R, 2, C, 8))), "transposed"),
    (dict(query_RKGd=jnp.zeros((R, 2, 3, 8), jnp.bfloat16)), "type of the cache"),
    (dict(length_RX=jnp.zeros(R)), "float32"),
    (dict(start_RX=jnp.zeros(4, jnp.int32)), "5 rows"),
    (dict(slot_R=jnp.zeros(4, jnp.int32)), "slot_R int32"),
  ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(change, message):
  query, key, value = cache()
  arguments = dict(
    query_RKGd=query, key_RKdC=key, value_RKCd=value, length_RX=jnp.asarray(LENGTH_R), scale=1.0
  )
  with pytest.raises((ValueError, NotImplementedError), match=message):
    decode_attention(**(arguments | change))
