"""segment_attention: who sees whom, by hand and by walking parents; blocks equal ref; no [T, T]."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memrl_kernels.segment_attention import blocks, ref, segment_attention

from tests.kernels import tpu

# Row 0: segment 2 continues 1, segment 3 continues 2, 4 continues 1. Row 1: not in depth-first
# order, padding in front, 1 continues 2 and 4 continues 1, 5 continues 3. Row 2: padding alone.
SEGMENT_BT = np.array(
  [
    [1] * 5 + [2] * 4 + [3] * 3 + [4] * 5 + [0] * 4,
    [0] * 2 + [2] * 3 + [1] * 6 + [3] * 2 + [5] * 4 + [4] * 4,
    [0] * 21,
  ],
  np.int32,
)
PARENT_BS = np.array([[0, 0, 1, 2, 1, 0], [0, 2, 0, 0, 1, 3], [0] * 6], np.int32)
T = SEGMENT_BT.shape[1]


def chain(parent_S, segment):
  """The segment and all it continues, walked one by one."""
  while segment:
    yield segment
    segment = int(parent_S[segment])


def positions(segment_BT, parent_BS):
  """Count tokens along a branch; those of padding are far off."""
  position_BT = np.full(segment_BT.shape, 10**6, np.int32)
  for b, (segment_T, parent_S) in enumerate(zip(segment_BT, parent_BS, strict=True)):
    for i, segment in enumerate(segment_T):
      if segment:
        position_BT[b, i] = np.isin(segment_T[:i], list(chain(parent_S, segment))).sum()
  return position_BT


POSITION_BT = positions(SEGMENT_BT, PARENT_BS)


def heads(rows=3, tokens=T, K=2, G=3, d=8, seed=0, dtype=jnp.float32):
  rng = np.random.default_rng(seed)
  shapes = ((rows, tokens, K, G, d), (rows, tokens, K, d), (rows, tokens, K, d))
  return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


def pulled(impl, segment_BT=SEGMENT_BT, parent_BS=PARENT_BS, position_BT=POSITION_BT, **options):
  """A function of queries, keys and values: the output, and gradients of a generic loss of it."""

  def loss(query, key, value):
    out = segment_attention(
      query, key, value, jnp.asarray(segment_BT), as_array(parent_BS), as_array(position_BT),
      **(dict(scale=0.4, impl=impl) | options),
    )  # fmt: skip
    weight = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    return jnp.sum(weight * out.astype(jnp.float32)), out

  def run(*arrays):
    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return out, *gradients

  return run


def as_array(x):
  return None if x is None else jnp.asarray(x)


def assert_close(got, expected, **tolerance):
  for name, x, y in zip(("out", "query", "key", "value"), got, expected, strict=True):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    np.testing.assert_allclose(x, y, err_msg=name, **tolerance)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_by_hand(impl):
  # Queries of 0: every visible value counts alike. Segment 1 is [1, 2], 2 continues it with [4, 8],
  # 3 continues 1 with [16], 4 continues 2 with [32]; token by token, what is seen:
  #   1; 1 2; 1 2 4; 1 2 4 8; 1 2 16; 1 2 4 8 32
  value_T = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
  out = segment_attention(
    jnp.zeros((1, 6, 1, 1, 1)),
    jnp.ones((1, 6, 1, 1)),
    jnp.reshape(jnp.array(value_T), (1, 6, 1, 1)),
    jnp.array([[1, 1, 2, 2, 3, 4]]),
    jnp.array([[0, 0, 1, 1, 2]]),
    scale=1.0,
    impl=impl,
    block=2,
  )
  np.testing.assert_allclose(out.reshape(-1), [1, 3 / 2, 7 / 3, 15 / 4, 19 / 3, 47 / 5], rtol=1e-6)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_the_window_counts_positions_along_the_branch(impl):
  # As above, window 2: only the token itself and the one before it on its branch. Segment 3 starts
  # at position 2, right after the 2 of segment 1, though two other tokens lie between.
  out = segment_attention(
    jnp.zeros((1, 6, 1, 1, 1)),
    jnp.ones((1, 6, 1, 1)),
    jnp.reshape(jnp.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]), (1, 6, 1, 1)),
    jnp.array([[1, 1, 2, 2, 3, 4]]),
    jnp.array([[0, 0, 1, 1, 2]]),
    jnp.array([[0, 1, 2, 3, 2, 4]]),
    scale=1.0,
    sliding_window=2,
    impl=impl,
    block=2,
  )
  np.testing.assert_allclose(out.reshape(-1), [1, 3 / 2, 6 / 2, 12 / 2, 18 / 2, 40 / 2], rtol=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_ancestors_and_intervals_are_those_of_a_walk(seed):
  rng = np.random.default_rng(seed)
  order = 1 + rng.permutation(12)  # a parent may have the larger id
  parent_S = np.zeros(13, np.int32)
  for place, segment in enumerate(order[1:], 1):
    parent_S[segment] = rng.choice([0, *order[max(0, place - 2) : place]])  # deep chains
  walked = np.zeros((13, 13), bool)
  for segment in range(13):
    walked[segment, list(chain(parent_S, segment))] = True
  np.testing.assert_array_equal(ref.ancestors(jnp.asarray(parent_S)[None])[0], walked)
  enter, leave = (np.asarray(x[0]) for x in blocks.intervals(jnp.asarray(parent_S)[None]))
  inside = (enter[None, :] <= enter[:, None]) & (enter[:, None] < leave[None, :])
  np.testing.assert_array_equal(inside[1:, 1:], walked[1:, 1:])


@pytest.mark.parametrize(
  "options",
  [
    dict(block=4),
    dict(block=8, soft_cap=0.7),
    dict(block=4, sliding_window=5),
    dict(parent_BS=None),
  ],
  ids=str,
)
def test_blocks_equal_ref_in_value_and_gradient(options):
  same = {name: x for name, x in options.items() if name != "block"}
  got = jax.jit(pulled("xla", **options))(*heads())
  assert_close(got, jax.jit(pulled("ref", **same))(*heads()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_a_shared_prefix_equals_separate_rows(impl):
  # One row of prefix, left branch, right branch against two rows of prefix and a branch.
  query, key, value = heads(rows=1, tokens=14)
  prefix, left, right = np.arange(6), np.arange(6, 10), np.arange(10, 14)
  packed = dict(
    segment_BT=np.array([[1] * 6 + [2] * 4 + [3] * 4], np.int32),
    parent_BS=np.array([[0, 0, 1, 1]], np.int32),
    position_BT=None,
    block=4,
  )
  out, *gradients = jax.jit(pulled_of_branches(impl, packed, [prefix, left, right]))(
    query, key, value
  )
  rows = [np.concatenate([prefix, branch]) for branch in (left, right)]
  apart = dict(segment_BT=np.ones((2, 10), np.int32), parent_BS=None, position_BT=None, block=4)
  split = [jnp.concatenate([x[:, row] for row in rows]) for x in (query, key, value)]
  out_apart, *gradients_apart = jax.jit(
    pulled_of_branches(impl, apart, [np.arange(6), np.arange(6, 10)])
  )(*split)
  for b, row in enumerate(rows):
    np.testing.assert_allclose(out[0, row], out_apart[b], rtol=1e-5, atol=1e-6)
  for got, each in zip(gradients, gradients_apart, strict=True):
    whole = np.zeros(got.shape, np.float32)
    for b, row in enumerate(rows):
      whole[0, row] += each[b]
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-5)


def pulled_of_branches(impl, layout, parts):
  """Like `pulled`, with a loss of what the branches put out: nothing of the prefix, which one row
  has once and two rows have twice."""
  layout = dict(layout)
  position, segment = layout.pop("position_BT"), jnp.asarray(layout.pop("segment_BT"))
  parent = as_array(layout.pop("parent_BS"))

  def loss(*arrays):
    out = segment_attention(*arrays, segment, parent, position, scale=0.4, impl=impl, **layout)
    branches = [out[b, part] for b in range(out.shape[0]) for part in parts[1:]]
    return sum(jnp.sum(jnp.sin(3.0 * branch)) for branch in branches), out

  def run(*arrays):
    (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return out, *gradients

  return run


def poisoned(arrays, poison=np.nan):
  padding = jnp.asarray(SEGMENT_BT == 0)
  return [
    jnp.where(padding.reshape(padding.shape + (1,) * (x.ndim - 2)), jnp.asarray(poison, x.dtype), x)
    for x in arrays
  ]


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_padding_is_zero_and_changes_nothing(impl):
  run = jax.jit(pulled(impl, sliding_window=7))
  dirty, clean = run(*poisoned(heads())), run(*poisoned(heads(), 0.0))
  for got, expected in zip(dirty, clean, strict=True):
    np.testing.assert_array_equal(got, expected)
    assert np.all(np.asarray(got)[SEGMENT_BT == 0] == 0)
    assert np.all(np.asarray(got)[0, 1:17] != 0)


def test_a_gradient_that_is_nan_in_padding_stays_there():
  query, key, value = heads()
  segment = jnp.asarray(SEGMENT_BT)

  def loss(query):
    out = segment_attention(query, key, value, segment, scale=1.0, impl="xla")
    return jnp.sum(out * jnp.where(segment > 0, 1.0, jnp.nan)[..., None, None, None])

  assert np.all(np.isfinite(jax.jit(jax.grad(loss))(query)))


def test_an_id_without_a_parent_entry_is_loud():
  segment = jnp.where(jnp.asarray(SEGMENT_BT) == 3, 6, jnp.asarray(SEGMENT_BT))
  out = segment_attention(*heads(), segment, jnp.asarray(PARENT_BS), scale=1.0)
  lost = np.isnan(np.asarray(out)).all(axis=(2, 3, 4))
  np.testing.assert_array_equal(lost, np.asarray(segment) == 6)


def test_layers_of_a_scan_can_have_windows_of_their_own():
  def layer(carry, window):
    return carry, segment_attention(
      *heads(), jnp.asarray(SEGMENT_BT), jnp.asarray(PARENT_BS), jnp.asarray(POSITION_BT),
      scale=0.4, sliding_window=window, block=4,
    )  # fmt: skip

  _, (near, far) = jax.lax.scan(layer, None, jnp.array([3, 2**30]))
  for got, window in ((near, 3), (far, None)):
    expected = jax.jit(pulled("ref", sliding_window=window))(*heads())[0]
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_only_pairs_of_blocks_that_see_each_other_are_visited():
  # A prefix of 4 blocks and 6 branches of 2, block 4: each branch visits the prefix and itself.
  # Pairs: the prefix 1+2+3+4 = 10, each branch (4 + 1) + (4 + 2) = 11; 76 of 16 * 17 / 2 = 136.
  segment = jnp.asarray(np.repeat([1, 2, 3, 4, 5, 6, 7], [16, 8, 8, 8, 8, 8, 8])[None])
  parent = jnp.array([[0, 0, 1, 1, 1, 1, 1, 1]])
  shape = blocks.geometry(segment, parent, jnp.zeros_like(segment), None)
  seen = blocks.seen(shape, 4)
  visits = blocks.visits(seen)
  assert visits.count.sum() == 10 + 6 * 11
  np.testing.assert_array_equal(visits.other[0, 15, :7], [0, 1, 2, 3, 14, 15, 15])


@pytest.mark.parametrize("window", [None, 4])
def test_no_pair_that_sees_anything_is_left_out(window):
  args = jnp.asarray(SEGMENT_BT), jnp.asarray(PARENT_BS), jnp.asarray(POSITION_BT), window
  see = np.asarray(ref.visible(*args))
  pairs = see.reshape(3, 7, 3, 7, 3).any(axis=(2, 4))
  assert not np.any(pairs & ~np.asarray(blocks.seen(blocks.geometry(*args), 3)))


def test_no_array_of_tokens_times_tokens_in_forward_or_backward():
  tokens = 512
  arrays = heads(rows=1, tokens=tokens, K=1, G=1, d=4)
  segment = np.ones((1, tokens), np.int32)

  def largest(impl, **options):
    run = pulled(impl, segment_BT=segment, parent_BS=None, position_BT=None, **options)
    text = jax.jit(run).lower(*arrays).compile().as_text()
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)

  assert largest("ref") >= tokens * tokens
  assert largest("xla", block=32) <= tokens * 32


def test_bfloat16_is_as_near_to_float32_as_ref_is():
  arrays = heads(dtype=jnp.bfloat16)
  exact = jax.jit(pulled("ref"))(*(x.astype(jnp.float32) for x in arrays))
  for got, whole, best in zip(
    jax.jit(pulled("xla", block=4))(*arrays), jax.jit(pulled("ref"))(*arrays), exact, strict=True
  ):
    assert got.dtype == jnp.bfloat16
    error, allowed = (np.abs(np.asarray(x, np.float32) - best).max() for x in (got, whole))
    assert error <= 3 * allowed


def test_the_kernel_equals_ref_in_value_and_gradient():
  # Everything at once, since interpreting is slow: a tree, a window, a soft cap, rows and heads that
  # fill no block, a row of padding alone, and NaN wherever padding is.
  rows = np.array([0, 2])
  layout = dict(
    segment_BT=SEGMENT_BT[rows], parent_BS=PARENT_BS[rows], position_BT=POSITION_BT[rows]
  )
  options = dict(**layout, sliding_window=9, soft_cap=0.7)
  arrays = [x[rows] for x in heads(K=1, G=2)]
  dirty = [x[rows] for x in poisoned(heads(K=1, G=2))]
  got = tpu.interpret(pulled("pallas", block=8, **options), *dirty)
  assert_close(got, jax.jit(pulled("ref", **options))(*arrays), rtol=1e-5, atol=1e-5)


def test_the_kernel_in_bfloat16_with_branches_out_of_order():
  arrays = [x[1:2] for x in heads(K=1, G=1, dtype=jnp.bfloat16)]
  layout = dict(segment_BT=SEGMENT_BT[1:2], parent_BS=PARENT_BS[1:2], position_BT=None)
  got = tpu.interpret(pulled("pallas", block=16, **layout), *arrays)
  assert all(x.dtype == jnp.bfloat16 for x in got)
  exact = jax.jit(pulled("ref", **layout))(*(x.astype(jnp.float32) for x in arrays))
  assert_close(got, exact, atol=0.03, rtol=0.03)


def test_gpu_programs_hold_loops_and_no_tpu_kernel():
  arrays = heads()
  text = tpu.lower_for_gpu(pulled("auto"), *arrays)
  assert "stablehlo.while" in text and "tpu_custom_call" not in text


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(impl="pallas"), "TPU only and this is cpu"),
    (dict(impl="cuda"), "cuda"),
    (dict(block=0), "block=0"),
    (dict(sliding_window=4), "without position_BT"),
    (dict(query=jnp.zeros((3, T, 6, 8))), "K groups of G"),
    (dict(key=jnp.zeros((3, T, 2, 8), jnp.bfloat16)), "one type"),
    (dict(segment_BT=jnp.zeros((3, T))), "float32"),
    (dict(parent_BS=jnp.zeros((2, 4), jnp.int32)), "3 rows"),
  ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(change, message):
  query, key, value = heads()
  arguments = dict(query=query, key=key, value=value, segment_BT=jnp.asarray(SEGMENT_BT), scale=1.0)
  arguments |= change
  names = dict(query="query_BTKGd", key="key_BTKd", value="value_BTKd")
  with pytest.raises((ValueError, NotImplementedError), match=message):
    segment_attention(**{names.get(name, name): x for name, x in arguments.items()})
