"""Boolean masks and open means.

Letters: B rows, T tokens of a row. A mask is boolean and True counts.
A mean stays open, as (total, count), until every micro-batch and device has spoken: the mean of
means of unequal parts is a different number. A masked value is replaced *before* it enters any
arithmetic, so that NaN in padding reaches neither the value nor the gradient.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


class Open(NamedTuple):
  """A mean that has not been divided yet; add the parts with `add`, divide once with `close`."""

  total: jax.Array
  count: jax.Array


def keep(value: jax.Array, mask: jax.Array, *, fill: float = 0.0) -> jax.Array:
  """`value` where the mask is True, else `fill`; what was masked has no gradient, not even NaN."""
  chex.assert_equal_shape([value, mask])
  chex.assert_type(mask, bool)
  return jnp.where(mask, value, fill)


def open_sum(value_BT: jax.Array, mask_BT: jax.Array) -> Open:
  """Sum and number of the values that count, any rank: (sum_{mask} x, sum mask)."""
  total = jnp.sum(keep(value_BT, mask_BT), dtype=jnp.float32)
  return Open(total, jnp.sum(mask_BT, dtype=jnp.float32))


def add(a: Open, b: Open) -> Open:
  """The open mean of both parts together."""
  return Open(a.total + b.total, a.count + b.count)


def close(mean: Open) -> jax.Array:
  """total / count, and 0 where nothing was counted."""
  return jnp.where(mean.count > 0, mean.total / jnp.maximum(mean.count, 1.0), 0.0)


def likely(logp_BT: jax.Array, mask_BT: jax.Array, *, floor: float) -> jax.Array:
  """Tokens whose log-prob is at least `floor` nats, sg[1[log pi >= floor]]; False where masked.

  EMPO2 (2602.23008) Eq. 2: the gradient of log pi explodes on tokens that the policy hardly ever says.
  """
  logp_BT = jax.lax.stop_gradient(keep(logp_BT, mask_BT))
  return (logp_BT >= floor) & mask_BT


def likely_rows(logp_BT: jax.Array, mask_BT: jax.Array, *, floor: float) -> jax.Array:
  """Rows all of whose tokens are `likely`, at each of their tokens: what EMPO2's release masks by."""
  unlikely_BT = mask_BT & ~likely(logp_BT, mask_BT, floor=floor)
  return mask_BT & ~jnp.any(unlikely_BT, axis=1, keepdims=True)
