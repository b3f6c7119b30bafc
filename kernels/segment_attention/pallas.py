"""segment_attention on TPU: online softmax over the blocks of keys that a block of queries can see.

Scores are held transposed, [keys, queries]: the running maximum and sum of each query are then rows
[1, queries], reduced along sublanes, and the log-sum-exp is stored without padding. The G query
heads of a key-value head are done in one grid step: they share keys, values and the mask. Nothing
of size T x T exists; the backward pass computes the scores again from the log-sum-exp.

Letters: see `ref`; N tokens of a block, n the visit in the list of a block (`blocks.Visits`).
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import target
from . import blocks
from .ref import HIDDEN

_LANES = 128
_BLOCKS = (512, 256, 128)  # not measured on a device yet

# Where a running maximum starts: below every score and far above HIDDEN, so that what is hidden has
# weight exp(HIDDEN - LOWEST) = 0 also in a row that has seen nothing yet.
LOWEST = -1e29

_NT = (((1,), (1,)), ((), ()))  # contract both last axes
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


def fit(T: int, G: int, d: int, dtype, block: int | None) -> tuple[int, int]:
  """Tokens of a block and width of a head to use: what the hardware's tiles and memory allow."""
  width = _up(d, _LANES)
  if block is not None and block % _LANES and not target.interpreted():
    raise ValueError(
      f"segment_attention's Pallas kernel got block={block}; a TPU needs a multiple of {_LANES}"
    )
  sizes = _BLOCKS if block is None else (block,)
  for most in sizes:
    N = _up(-(-T // -(-T // most)), min(most, _LANES))  # equal blocks: little padding
    if _fits(N, G, width, dtype):
      return N, width
  raise ValueError(
    f"segment_attention's Pallas kernel keeps {sizes[-1]} tokens of {G} heads of {d} in fast memory "
    f'({target.fast_memory() >> 20} MiB) and they do not fit; use impl="xla"'
  )


def fits(T: int, G: int, d: int, dtype, block: int | None) -> bool:
  """Whether `fit` finds a block."""
  most = block or _BLOCKS[-1]
  return _fits(_up(-(-T // -(-T // most)), min(most, _LANES)), G, _up(d, _LANES), dtype)


def _fits(N: int, G: int, width: int, dtype) -> bool:
  return _bytes(N, G, width, dtype) <= 0.75 * target.fast_memory()


def _up(size: int, multiple: int) -> int:
  return -(-size // multiple) * multiple


def _bytes(N: int, G: int, d: int, dtype) -> int:
  """Fast memory of the largest of the kernels; blocks count twice, the next one comes in meanwhile."""
  wide = jnp.dtype(dtype).itemsize
  queries = 3 * 2 * N * G * d * wide + N * G * d * 4
  keys = 4 * 2 * N * d * wide + 2 * N * d * 4
  columns = 2 * N * _LANES * 4
  return queries + keys + columns + 6 * N * N * 4


def _params() -> pltpu.CompilerParams:
  return pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
    vmem_limit_bytes=int(0.875 * target.fast_memory()),
  )


def _like(array, shape, dtype) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type)


def forward(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  geometry: blocks.Geometry,
  seen: jax.Array,
  *,
  scale: float,
  soft_cap: float | None,
  block: int,
) -> tuple[jax.Array, jax.Array]:
  """Attention [B, T, K, G, d] and the log-sum-exp [B, K, G, T] of each query's scores."""
  B, T, K, G, d = query.shape
  N, steps = block, T // block
  visits = blocks.visits(seen)
  body = functools.partial(_forward_kernel, scale=scale, soft_cap=soft_cap, groups=G)
  own, other = _specs(N, G, d, steps)
  out, lse = pl.pallas_call(
    body,
    out_shape=[
      _like(query, (B, T, K * G * d), query.dtype),
      _like(query, (B, K, G, T), jnp.float32),
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, K, steps, steps),
      in_specs=[own.queries, other.keys, other.keys, own.row, other.column],
      out_specs=[own.queries, own.sums],
      scratch_shapes=[
        pltpu.VMEM((G, N), jnp.float32),
        pltpu.VMEM((G, N), jnp.float32),
        pltpu.VMEM((G, d, N), jnp.float32),
      ],
    ),
    compiler_params=_params(),
    name="segment_attention",
  )(
    visits.other.reshape(-1),
    visits.count.reshape(-1),
    query.reshape(B, T, K * G * d),
    key.reshape(B, T, K * d),
    value.reshape(B, T, K * d),
    *_sides(geometry),
  )
  return out.reshape(query.shape), lse


def backward(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  geometry: blocks.Geometry,
  seen: jax.Array,
  out: jax.Array,
  lse: jax.Array,
  d_out: jax.Array,
  *,
  scale: float,
  soft_cap: float | None,
  block: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of queries, keys and values, from what `forward` returned.

  p_ij = exp(z_ij - lse_i),  dv_j = sum_i p_ij do_i,  dz_ij = p_ij (do_i . v_j - do_i . out_i)
  """
  B, T, K, G, d = query.shape
  N, steps = block, T // block
  options = dict(scale=scale, soft_cap=soft_cap, groups=G)
  delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
  arrays = (
    query.reshape(B, T, K * G * d),
    key.reshape(B, T, K * d),
    value.reshape(B, T, K * d),
    d_out.reshape(B, T, K * G * d),
    lse,
    delta.transpose(0, 2, 3, 1),
    *_sides(geometry),
  )

  by_query = blocks.visits(seen)
  own, other = _specs(N, G, d, steps)
  d_query = pl.pallas_call(
    functools.partial(_query_kernel, **options),
    out_shape=_like(query, (B, T, K * G * d), query.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, K, steps, steps),
      in_specs=[
        own.queries,
        other.keys,
        other.keys,
        own.queries,
        own.sums,
        own.sums,
        own.row,
        other.column,
      ],
      out_specs=own.queries,
      scratch_shapes=[pltpu.VMEM((N, G * d), jnp.float32)],
    ),
    compiler_params=_params(),
    name="segment_attention_dq",
  )(by_query.other.reshape(-1), by_query.count.reshape(-1), *arrays)

  by_key = blocks.visits(seen.swapaxes(1, 2))
  d_key, d_value = pl.pallas_call(
    functools.partial(_key_kernel, **options),
    out_shape=[
      _like(key, (B, T, K * d), key.dtype),
      _like(value, (B, T, K * d), value.dtype),
    ],
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(B, K, steps, steps),
      in_specs=[
        other.queries,
        own.keys,
        own.keys,
        other.queries,
        other.sums,
        other.sums,
        other.row,
        own.column,
      ],
      out_specs=[own.keys, own.keys],
      scratch_shapes=[pltpu.VMEM((N, d), jnp.float32), pltpu.VMEM((N, d), jnp.float32)],
    ),
    compiler_params=_params(),
    name="segment_attention_dkv",
  )(by_key.other.reshape(-1), by_key.count.reshape(-1), *arrays)
  return d_query.reshape(query.shape), d_key.reshape(key.shape), d_value.reshape(value.shape)


class _Side:
  """Block specs of one side of the visit (b, k, i, n): of the block i itself, or of the visited."""

  def __init__(self, N, G, d, block_index):
    def spec(shape, place):
      def index(b, k, i, n, other, count):
        return place(b, k, block_index(b, i, n, other))

      return pl.BlockSpec(shape, index)

    self.queries = spec((1, N, G * d), lambda b, k, at: (b, at, k))
    self.keys = spec((1, N, d), lambda b, k, at: (b, at, k))
    self.sums = spec((1, 1, G, N), lambda b, k, at: (b, k, 0, at))
    self.row = spec((1, 2, N), lambda b, k, at: (b, 0, at))
    self.column = spec((1, N, 3), lambda b, k, at: (b, at, 0))


def _specs(N: int, G: int, d: int, steps: int) -> tuple[_Side, _Side]:
  own = _Side(N, G, d, lambda b, i, n, other: i)
  return own, _Side(N, G, d, lambda b, i, n, other: other[(b * steps + i) * steps + n])


def _sides(shape: blocks.Geometry) -> tuple[jax.Array, jax.Array]:
  """What queries bring to the mask as rows [B, 2, T], and keys as columns [B, T, 3]."""
  queries = jnp.stack([shape.enter_BT, shape.low_BT], axis=1)
  return queries, jnp.stack([shape.begin_BT, shape.end_BT, shape.position_BT], axis=2)


def _visible(row, column, query_block, key_block):
  """[keys, queries] of a pair of blocks."""
  (enter, low), (begin, end, position) = (
    (row[0, 0:1, :], row[0, 1:2, :]),
    (column[0, :, 0:1], column[0, :, 1:2], column[0, :, 2:3]),
  )
  shape = (begin.shape[0], enter.shape[1])
  key_T = key_block * shape[0] + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
  query_T = query_block * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  return (begin <= enter) & (enter < end) & (position > low) & (key_T <= query_T)


def _dot(left, right, contract):
  """In float32; operands of float32 are not rounded to bfloat16 first."""
  exact = left.dtype == jnp.float32
  return jax.lax.dot_general(
    left,
    right,
    contract,
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def _scores(key, query, scale, soft_cap):
  score = scale * _dot(key, query, _NT)
  return score if soft_cap is None else soft_cap * jnp.tanh(score / soft_cap)


def _visit(other, count):
  """This step's place: the block i, the visited block, and whether the step has anything to do."""
  b, i, n = pl.program_id(0), pl.program_id(2), pl.program_id(3)
  line = b * pl.num_programs(2) + i
  return i, other[line * pl.num_programs(3) + n], n < count[line]


def _first():
  return pl.program_id(3) == 0


def _last():
  return pl.program_id(3) == pl.num_programs(3) - 1


def _forward_kernel(
  other,
  count,
  query,
  key,
  value,
  row,
  column,
  out,
  lse,
  top,
  total,
  sums,
  *,
  scale,
  soft_cap,
  groups,
):
  i, j, busy = _visit(other, count)
  d = key.shape[2]

  @pl.when(_first())
  def _():
    top[...] = jnp.full_like(top, LOWEST)
    total[...] = jnp.zeros_like(total)
    sums[...] = jnp.zeros_like(sums)

  @pl.when(busy)
  def _():
    see = _visible(row, column, i, j)
    for g in range(groups):
      score = _scores(key[0], query[0, :, g * d : (g + 1) * d], scale, soft_cap)
      score = jnp.where(see, score, HIDDEN)
      before = top[g : g + 1, :]
      after = jnp.maximum(before, jnp.max(score, axis=0, keepdims=True))
      weight, shrink = jnp.exp(score - after), jnp.exp(before - after)
      top[g : g + 1, :] = after
      total[g : g + 1, :] = shrink * total[g : g + 1, :] + jnp.sum(weight, axis=0, keepdims=True)
      sums[g] = shrink * sums[g] + _dot(value[0], weight.astype(value.dtype), _TN)

  @pl.when(_last())
  def _():
    empty = total[...] == 0
    some = jnp.where(empty, 1.0, total[...])
    lse[0, 0] = jnp.where(empty, 0.0, top[...] + jnp.log(some))
    for g in range(groups):
      mean = sums[g] / some[g : g + 1, :]
      out[0, :, g * d : (g + 1) * d] = mean.T.astype(out.dtype)


def _gradient(see, key, value, query, d_out, lse, delta, scale, soft_cap):
  """Weights and the gradient of the scores before scale, [keys, queries], of one query head."""
  score = _scores(key, query, scale, soft_cap)
  weight = jnp.exp(jnp.where(see, score, HIDDEN) - lse)
  d_score = scale * weight * (_dot(value, d_out, _NT) - delta)
  if soft_cap is not None:
    d_score = d_score * (1 - (score / soft_cap) ** 2)
  return weight, d_score


def _query_kernel(
  other,
  count,
  query,
  key,
  value,
  d_out,
  lse,
  delta,
  row,
  column,
  d_query,
  sums,
  *,
  groups,
  **options,
):
  i, j, busy = _visit(other, count)
  d = key.shape[2]

  @pl.when(_first())
  def _():
    sums[...] = jnp.zeros_like(sums)

  @pl.when(busy)
  def _():
    see = _visible(row, column, i, j)
    for g in range(groups):
      head, line = slice(g * d, (g + 1) * d), slice(g, g + 1)
      _, d_score = _gradient(
        see, key[0], value[0], query[0, :, head], d_out[0, :, head],
        lse[0, 0, line, :], delta[0, 0, line, :], **options,
      )  # fmt: skip
      sums[:, head] += _dot(d_score.astype(key.dtype), key[0], _TN)

  @pl.when(_last())
  def _():
    d_query[0] = sums[...].astype(d_query.dtype)


def _key_kernel(
  other, count, query, key, value, d_out, lse, delta, row, column, d_key, d_value, key_sums,
  value_sums, *, groups, **options,
):  # fmt: skip
  j, i, busy = _visit(other, count)
  d = key.shape[2]

  @pl.when(_first())
  def _():
    key_sums[...] = jnp.zeros_like(key_sums)
    value_sums[...] = jnp.zeros_like(value_sums)

  @pl.when(busy)
  def _():
    see = _visible(row, column, i, j)
    for g in range(groups):
      head, line = slice(g * d, (g + 1) * d), slice(g, g + 1)
      weight, d_score = _gradient(
        see, key[0], value[0], query[0, :, head], d_out[0, :, head],
        lse[0, 0, line, :], delta[0, 0, line, :], **options,
      )  # fmt: skip
      value_sums[...] += _dot(weight.astype(value.dtype), d_out[0, :, head], _NN)
      key_sums[...] += _dot(d_score.astype(key.dtype), query[0, :, head], _NN)

  @pl.when(_last())
  def _():
    d_key[0] = key_sums[...].astype(d_key.dtype)
    d_value[0] = value_sums[...].astype(d_value.dtype)
