"""segment_attention in plain JAX, for CPU, GPU, and under GSPMD: a loop over pairs of blocks.

A pair is visited if any row of the batch needs it; all rows and heads of a pair are done at once.
Queries of a group become rows of one matrix, and batch and key-value heads one batch axis of the
matmuls: on CPU that is several times faster than an einsum over four axes.

Letters: see `ref`; N tokens of a block, X = B * K, M = N * G.
"""

import jax
import jax.numpy as jnp

from .. import target
from . import blocks, ref

LOWEST = -1e29  # see `pallas.LOWEST`


def fit(T: int, G: int, d: int, dtype, block: int | None) -> tuple[int, int]:
  """Tokens of a block and width of a head to use."""
  block = block or (64 if target.platform() == "cpu" else 256)
  return -(-T // -(-T // block)), d


def forward(query, key, value, shape, seen, *, scale, soft_cap, block):
  """See `pallas.forward`; the log-sum-exp comes as [T / N, X, M, 1]."""
  keys, values = _split_keys(key, block), _split_keys(value, block)
  see = _Mask(shape, query.shape, block)

  def attend(of_block):
    i, query, other, count = of_block
    column = jnp.zeros((*query.shape[:2], 1))
    start = (jnp.full_like(column, LOWEST), column, jnp.zeros(query.shape, jnp.float32))

    def visit(n, sums):
      top, total, sums = sums
      j = other[n]
      score = see(_scores(query, keys[j], scale, soft_cap), i, j)
      after = jnp.maximum(top, score.max(axis=-1, keepdims=True))
      weight, shrink = jnp.exp(score - after), jnp.exp(top - after)
      total = shrink * total + weight.sum(axis=-1, keepdims=True)
      return (
        after,
        total,
        shrink * sums + _dot("xmn,xnd->xmd", weight.astype(value.dtype), values[j]),
      )

    top, total, sums = jax.lax.fori_loop(0, count, visit, target.like(query, start))
    some = jnp.where(total == 0, 1.0, total)
    return (sums / some).astype(query.dtype), jnp.where(total == 0, 0.0, top + jnp.log(some))

  queries = _split_queries(query, block)
  out, lse = jax.lax.map(attend, (jnp.arange(queries.shape[0]), queries, *_visits(seen)))
  return _join_queries(out, query), lse


def backward(query, key, value, shape, seen, out, lse, d_out, *, scale, soft_cap, block):
  """See `pallas.backward`."""
  keys, values = _split_keys(key, block), _split_keys(value, block)
  see = _Mask(shape, query.shape, block)
  delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1, keepdims=True)

  def attend(d_pairs, of_block):
    i, query, d_out, lse, delta, other, count = of_block

    def visit(n, sums):
      d_query, d_keys, d_values = sums
      j = other[n]
      score = _scores(query, keys[j], scale, soft_cap)
      weight = jnp.exp(see(score, i, j) - lse)
      d_score = scale * weight * (_dot("xmd,xnd->xmn", d_out, values[j]) - delta)
      if soft_cap is not None:
        d_score = d_score * (1 - (score / soft_cap) ** 2)
      d_score, weight = d_score.astype(query.dtype), weight.astype(query.dtype)
      d_query = d_query + _dot("xmn,xnd->xmd", d_score, keys[j])
      d_keys = d_keys.at[j].add(_dot("xmn,xmd->xnd", d_score, query))
      return d_query, d_keys, d_values.at[j].add(_dot("xmn,xmd->xnd", weight, d_out))

    start = target.like(query, jnp.zeros(query.shape, jnp.float32))
    d_query, *d_pairs = jax.lax.fori_loop(0, count, visit, (start, *d_pairs))
    return tuple(d_pairs), d_query.astype(query.dtype)

  zeros = target.like(query, jnp.zeros(keys.shape, jnp.float32))
  queries, d_outs = _split_queries(query, block), _split_queries(d_out, block)
  deltas = _split_queries(delta, block)
  every = (jnp.arange(queries.shape[0]), queries, d_outs, lse, deltas, *_visits(seen))
  (d_keys, d_values), d_queries = jax.lax.scan(attend, (zeros, zeros), every)
  return (
    _join_queries(d_queries, query),
    _join_keys(d_keys, key).astype(key.dtype),
    _join_keys(d_values, value).astype(value.dtype),
  )


class _Mask:
  """Hides the scores [X, M, N] of a pair of blocks that `Geometry` does not allow."""

  def __init__(self, shape: blocks.Geometry, of_query, block: int):
    B, _, K, G, _ = of_query
    self.wide = (B, K, block, G, block)
    self.shape = jax.tree.map(lambda x: x.reshape(B, -1, block).swapaxes(0, 1), shape)

  def __call__(self, score, i, j):
    shape, N = self.shape, self.wide[-1]
    enter, low = shape.enter_BT[i][:, :, None], shape.low_BT[i][:, :, None]
    begin, end = shape.begin_BT[j][:, None, :], shape.end_BT[j][:, None, :]
    see = (begin <= enter) & (enter < end) & (shape.position_BT[j][:, None, :] > low)
    index_N = jnp.arange(N)
    see &= (j * N + index_N[None, :] <= i * N + index_N[:, None])[None]
    bias = jnp.where(see, 0.0, ref.HIDDEN)[:, None, :, None, :]
    return score + jnp.broadcast_to(bias, self.wide).reshape(score.shape)


def _visits(seen):
  union = blocks.visits(seen.any(axis=0, keepdims=True))
  return union.other[0], union.count[0]


def _dot(equation, left, right):
  return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _scores(query, key, scale, soft_cap):
  score = scale * _dot("xmd,xnd->xmn", query, key)
  return score if soft_cap is None else soft_cap * jnp.tanh(score / soft_cap)


def _split_queries(x, N):
  """[B, T, K, G, d] to [T / N, X, M, d]."""
  B, T, K, G, d = x.shape
  return x.reshape(B, T // N, N, K, G, d).transpose(1, 0, 3, 2, 4, 5).reshape(-1, B * K, N * G, d)


def _join_queries(x, like):
  B, T, K, G, d = like.shape
  return x.reshape(x.shape[0], B, K, -1, G, d).transpose(1, 0, 3, 2, 4, 5).reshape(B, T, K, G, d)


def _split_keys(x, N):
  """[B, T, K, d] to [T / N, X, N, d]."""
  B, T, K, d = x.shape
  return x.reshape(B, T // N, N, K, d).transpose(1, 0, 3, 2, 4).reshape(-1, B * K, N, d)


def _join_keys(x, like):
  B, T, K, d = like.shape
  return x.reshape(x.shape[0], B, K, -1, d).transpose(1, 0, 3, 2, 4).reshape(B, T, K, d)
