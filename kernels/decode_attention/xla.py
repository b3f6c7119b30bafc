"""decode_attention in plain JAX, for CPU and GPU: a loop over blocks of columns up to the longest row.

Rows and key-value heads are one batch axis of the matmuls. The values of a block are cleaned of
what lies beyond a row's length while they are at hand: over the whole cache that would cost as much
as the attention.

Letters: see `ref`; N columns of a block, X = R * K.
"""

import jax
import jax.numpy as jnp

from .. import target
from .pallas import HIDDEN, LOWEST
from .ref import Part


def fit(key: jax.Array, block: int | None) -> int:
  return min(block or (256 if target.platform() == "cpu" else 1024), key.shape[-1])


def decode_attention(
  query, key, value, length, start, slot=None, *, scale, soft_cap, block
) -> Part:
  R, K, G, d = query.shape
  C, N, X = key.shape[-1], block, R * K
  merged = query.reshape(X, G, d)

  def spread(see):
    return jnp.broadcast_to(see[:, None], (R, K, *see.shape[1:])).reshape(X, *see.shape[1:])

  def columns(array, at, axis):
    if slot is None:
      return jax.lax.dynamic_slice_in_dim(array, at, N, axis)
    sizes = (1, *array.shape[1:axis], N, *array.shape[axis + 1 :])
    first = [at if one == axis else 0 for one in range(1, 4)]
    return jax.vmap(lambda s: jax.lax.dynamic_slice(array, (s, *first), sizes)[0])(slot)

  def visit(n, sums):
    top, total, sums = sums
    at = jnp.minimum(n * N, C - N)  # the last block may overlap the one before
    column_11N = at + jnp.arange(N)[None, None]
    see = (jnp.maximum(start, n * N)[..., None] <= column_11N) & (column_11N < length[..., None])
    see, some = spread(see), spread(see.any(axis=1))
    keys = columns(key, at, axis=3).reshape(X, d, N)
    values = columns(value, at, axis=2).reshape(X, N, d)
    score = scale * jnp.einsum("xgd,xdn->xgn", merged, keys, preferred_element_type=jnp.float32)
    if soft_cap is not None:
      score = soft_cap * jnp.tanh(score / soft_cap)
    score = jnp.where(see, score, HIDDEN)
    after = jnp.maximum(top, score.max(axis=-1, keepdims=True))
    weight, shrink = jnp.exp(score - after), jnp.exp(top - after)
    total = shrink * total + weight.sum(axis=-1, keepdims=True)
    values = jnp.where(some[:, :, None], values, 0)
    mean = jnp.einsum(
      "xgn,xnd->xgd", weight.astype(value.dtype), values, preferred_element_type=jnp.float32
    )
    return after, total, shrink * sums + mean

  column = jnp.zeros((X, G, 1))
  begin = (jnp.full_like(column, LOWEST), column, jnp.zeros((X, G, d)))
  first, last = start.min() // N, (length.max() + N - 1) // N
  top, total, sums = jax.lax.fori_loop(first, last, visit, target.like(query, begin))
  some = jnp.where(total == 0, 1.0, total)
  lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(some))
  return Part((sums / some).reshape(R, K, G, d), lse.reshape(R, K, G))
