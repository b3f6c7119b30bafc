"""Which tokens see which, in the form that a blocked attention can afford, and which blocks to visit.

A row's segments are a forest. Numbered in depth-first order, the segments at and below `a` are an
interval [enter_a, exit_a), so that "seg_j is seg_i or an ancestor of it" is two comparisons,
whatever the number and the depth of the segments:

    enter_j <= enter_i < exit_j

Letters: B rows, T tokens, S + 1 segment ids, Q and P blocks of queries and of keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from . import ref

FAR = 2**30  # beyond every number of a segment and every position


class Geometry(NamedTuple):
  """Token i sees token j if j <= i, begin_j <= enter_i < end_j and position_j > low_i. int32."""

  enter_BT: jax.Array
  low_BT: jax.Array
  begin_BT: jax.Array
  end_BT: jax.Array
  position_BT: jax.Array


PADDING = Geometry(enter_BT=-1, low_BT=FAR, begin_BT=FAR, end_BT=-1, position_BT=-FAR)


class Visits(NamedTuple):
  """For each block of one side the blocks of the other to visit: the first `count` entries.

  Those after repeat the last one, so that a pipeline has nothing to load for them.
  """

  other: jax.Array  # [B, blocks, blocks] int32
  count: jax.Array  # [B, blocks] int32


def intervals(parent_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
  """enter and exit [B, S + 1] of each segment in a depth-first numbering of its row's forest.

  size_a = |{s : a is s or above it}|,    exit_a = enter_a + size_a
  enter_s = sum over a at or above s of (1 + sizes of the siblings of a with a smaller id) - 1
  """
  see = ref.ancestors(parent_BS)
  index_S = jnp.arange(parent_BS.shape[1])
  size_BS = see.sum(axis=1, dtype=jnp.int32)
  later = index_S[:, None] > index_S[None, :]
  elder = (parent_BS[:, :, None] == parent_BS[:, None, :]) & later[None]
  before_BS = jnp.sum(jnp.where(elder, size_BS[:, None, :], 0), axis=2)
  enter_BS = jnp.sum(jnp.where(see, 1 + before_BS[:, None, :], 0), axis=2) - 1
  return enter_BS, enter_BS + size_BS


def geometry(
  segment_BT: jax.Array,
  parent_BS: jax.Array | None,
  position_BT: jax.Array,
  sliding_window: int | jax.Array | None,
) -> Geometry:
  enter_BT, exit_BT = segment_BT, segment_BT + 1  # no parents: ids are as good as numbers
  if parent_BS is not None:
    enter_BS, exit_BS = intervals(parent_BS)
    enter_BT = jnp.take_along_axis(enter_BS, segment_BT, axis=1)
    exit_BT = jnp.take_along_axis(exit_BS, segment_BT, axis=1)
  low_BT = jnp.full_like(position_BT, -FAR)
  if sliding_window is not None:
    low_BT = position_BT - sliding_window
  shape = Geometry(enter_BT, low_BT, enter_BT, exit_BT, position_BT)
  return jax.tree.map(lambda x, padding: jnp.where(segment_BT > 0, x, padding), shape, PADDING)


def seen(shape: Geometry, block: int) -> jax.Array:
  """Whether a block of queries may see something of a block of keys: [B, Q, P].

  Never False where it does. True in vain only where the bounds of the blocks' numbers or positions
  overlap without a pair that does, which needs segments that are not in depth-first order.
  """

  def split(x_BT):
    return x_BT.reshape(x_BT.shape[0], -1, block)

  def of_queries(x_BQ):
    return x_BQ[:, :, None]

  def of_keys(x_BP):
    return x_BP[:, None, :]

  enter = split(shape.enter_BT)
  least_enter = jnp.where(enter < 0, FAR, enter).min(axis=2)
  see = of_keys(split(shape.begin_BT).min(axis=2)) <= of_queries(enter.max(axis=2))
  see &= of_queries(least_enter) < of_keys(split(shape.end_BT).max(axis=2))
  see &= of_keys(split(shape.position_BT).max(axis=2)) > of_queries(split(shape.low_BT).min(axis=2))
  return see & jnp.tril(jnp.ones(see.shape[1:], bool))[None]


def visits(seen_BQP: jax.Array) -> Visits:
  count = seen_BQP.sum(axis=2, dtype=jnp.int32)
  order = jnp.argsort(~seen_BQP, axis=2, stable=True).astype(jnp.int32)
  place = jnp.minimum(jnp.arange(order.shape[2])[None, None], jnp.maximum(count[..., None] - 1, 0))
  return Visits(jnp.take_along_axis(order, place, axis=2), count)
