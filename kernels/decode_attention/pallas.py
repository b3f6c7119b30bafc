"""decode_attention on TPU: online softmax over the blocks of columns that hold a row's context.

The grid ends with the longest row, and a shorter row loads nothing after its own last block. All
heads of a row are done in one step: one large read of keys and one of values, which is what limits
this operation.

Letters: see `ref`; N columns of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import target
from .ref import Part

# Scores of what is hidden, and where a running maximum starts: exp(HIDDEN - LOWEST) is exactly 0,
# also in a row that has seen nothing yet.
HIDDEN, LOWEST = -1e30, -1e29

_LANES = 128
_BLOCKS = (512, 256, 128)  # not measured on a device yet


def fit(key: jax.Array, block: int | None) -> int:
  """Columns of a block: as many as fast memory holds, twice, as the next one comes in meanwhile."""
  _, K, d, C = key.shape
  if block is not None and block % _LANES and block < C and not target.interpreted():
    raise ValueError(
      f"decode_attention's Pallas kernel got block={block}; a TPU needs a multiple of {_LANES}"
    )
  for N in _sizes(block):
    if _fits(key, N):
      return min(N, C)
  raise ValueError(
    f"decode_attention's Pallas kernel keeps {_LANES} columns of {K} heads of {d} in fast memory "
    f'({target.fast_memory() >> 20} MiB) and they do not fit; split the heads over devices, or use impl="xla"'
  )


def fits(key: jax.Array, block: int | None) -> bool:
  """Whether `fit` finds a block."""
  return _fits(key, _sizes(block)[-1])


def _sizes(block: int | None) -> tuple[int, ...]:
  return _BLOCKS if block is None else (block,)


def _fits(key: jax.Array, N: int) -> bool:
  _, K, d, _ = key.shape
  return 2 * 2 * K * d * N * key.dtype.itemsize <= 0.5 * target.fast_memory()


def decode_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  length: jax.Array,
  start: jax.Array,
  slot: jax.Array | None = None,
  *,
  scale: float,
  soft_cap: float | None,
  block: int,
) -> Part:
  R, K, G, d = query.shape
  N, X = block, start.shape[1]
  bounds = jnp.stack([start, length], axis=2)
  start, length = start.min(axis=1), length.max(axis=1)  # of all queries of a row
  _, count = _blocks(start, length, N)
  if slot is None:
    slot = target.like(start, jnp.arange(R, dtype=jnp.int32))
  # Heads narrower than a line of lanes: XLA keeps such values with the columns last, so that this
  # is no copy, and handing them over with the heads last would be one of the whole cache.
  narrow = d % _LANES != 0
  if narrow:
    value = value.swapaxes(2, 3)

  def line(r, c, start, length, slot):
    first, count = _blocks(start[r], length[r], N)
    return slot[r], first + jnp.minimum(c, jnp.maximum(count - 1, 0))

  def keys_at(*step):
    s, n = line(*step)
    return s, 0, 0, n

  def values_at(*step):
    s, n = line(*step)
    return s, 0, n, 0

  def like(shape):
    kind = jax.typeof(query).manual_axis_type
    return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=kind)

  heads = pl.BlockSpec((1, K, G, d), lambda r, c, *_: (r, 0, 0, 0))
  sums = pl.BlockSpec((1, K, G, 1), lambda r, c, *_: (r, 0, 0, 0))
  keys = pl.BlockSpec((1, K, d, N), keys_at)
  out, lse = pl.pallas_call(
    functools.partial(_kernel, scale=scale, soft_cap=soft_cap, narrow=narrow),
    out_shape=[like((R, K, G, d)), like((R, K, G, 1))],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(R, jnp.maximum(count.max(), 1)),
      in_specs=[
        pl.BlockSpec((1, X, 2), lambda r, c, *_: (r, 0, 0)),
        heads,
        keys,
        keys if narrow else pl.BlockSpec((1, K, N, d), values_at),
      ],
      out_specs=[heads, sums],
      scratch_shapes=[
        pltpu.VMEM((K, G, 1), jnp.float32),
        pltpu.VMEM((K, G, 1), jnp.float32),
        pltpu.VMEM((K, G, d), jnp.float32),
      ],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=int(0.875 * target.fast_memory()),
    ),
    name="decode_attention",
  )(start, length, slot, bounds, query, key, value)
  return Part(out, lse[..., 0])


def _blocks(start, length, N):
  """The first block with a column to see, and how many to visit from there."""
  first = start // N
  return jnp.where(start < length, first, 0), jnp.where(
    start < length, (length + N - 1) // N - first, 0
  )


def _kernel(
  start,
  length,
  _,
  bounds,
  query,
  key,
  value,
  out,
  lse,
  top,
  total,
  sums,
  *,
  scale,
  soft_cap,
  narrow,
):
  r, c = pl.program_id(0), pl.program_id(1)
  N = key.shape[3]
  first, count = _blocks(start[r], length[r], N)

  @pl.when(c == 0)
  def _():
    top[...] = jnp.full_like(top, LOWEST)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)

  def see(axis, shape, low, high):
    column = (first + c) * N + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return (low <= column) & (column < high)

  @pl.when(c < count)
  def _():
    score = scale * _dot(query[0], key[0], 1)
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score / soft_cap)
    low, high = bounds[0, :, 0:1][None], bounds[0, :, 1:2][None]
    score = jnp.where(see(2, score.shape, low, high), score, HIDDEN)
    after = jnp.maximum(top[...], jnp.max(score, axis=2, keepdims=True))
    weight, shrink = jnp.exp(score - after), jnp.exp(top[...] - after)
    top[...] = after
    total[...] = shrink * total[...] + jnp.sum(weight, axis=2, keepdims=True)
    axis = 2 if narrow else 1
    inside = see(axis, value.shape[1:], start[r], length[r])
    seen = jnp.where(inside, value[0], 0)  # what lies beyond may be NaN
    sums[...] = shrink * sums[...] + _dot(weight.astype(value.dtype), seen, axis)

  @pl.when(c == pl.num_programs(1) - 1)
  def _():
    some = jnp.where(total[...] == 0, 1.0, total[...])
    out[0] = sums[...] / some
    lse[0] = jnp.where(total[...] == 0, -jnp.inf, top[...] + jnp.log(some))


def _dot(left, right, axis):
  """[K, G, x] times [K, x, y] (axis 1) or [K, y, x] (axis 2) in float32; operands of float32 are not rounded to bfloat16 first."""
  exact = left.dtype == jnp.float32
  return jax.lax.dot_general(
    left,
    right,
    (((2,), (axis,)), ((0,), (0,))),
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )
