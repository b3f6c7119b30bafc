"""Definition of segment_attention: the whole [T, T] array of scores, written as the equation.

Letters: B rows, T tokens of a row, K key-value heads, G query heads per key-value head, d head
width, S + 1 segment ids of a row (0 is padding); i is the token that looks, j the one that is seen.
"""

import jax
import jax.numpy as jnp

HIDDEN = -1e30  # the score of what is not seen: exp gives exactly 0, and it is finite


def ancestors(parent_BS: jax.Array) -> jax.Array:
  """see[b, s, a]: a is s itself or an ancestor of s, at any depth; never true of the id 0.

  Pointer doubling: after r rounds see holds the nearest 2^r segments of every chain.
  """
  segments = parent_BS.shape[1]
  see = jnp.broadcast_to(jnp.eye(segments, dtype=bool), (*parent_BS.shape, segments))
  jump_BS = parent_BS.at[:, 0].set(0)
  for _ in range(max(1, (segments - 1).bit_length())):
    see = see | jnp.take_along_axis(see, jump_BS[:, :, None], axis=1)
    jump_BS = jnp.take_along_axis(jump_BS, jump_BS, axis=1)
  real_S = jnp.arange(segments) > 0
  return see & (real_S[:, None] & real_S[None, :])[None]


def visible(
  segment_BT: jax.Array,
  parent_BS: jax.Array | None,
  position_BT: jax.Array,
  sliding_window: int | jax.Array | None,
) -> jax.Array:
  """see[b, i, j] = j <= i, seg_j is seg_i or an ancestor of it, and pos_i - pos_j < window."""
  T = segment_BT.shape[1]
  if parent_BS is None:
    see_BTT = (segment_BT[:, :, None] == segment_BT[:, None, :]) & (segment_BT[:, :, None] > 0)
  else:
    kin_BTS = jnp.take_along_axis(ancestors(parent_BS), segment_BT[:, :, None], axis=1)
    see_BTT = jnp.take_along_axis(kin_BTS, segment_BT[:, None, :], axis=2)
  see_BTT &= jnp.tril(jnp.ones((T, T), bool))[None]
  if sliding_window is not None:
    see_BTT &= position_BT[:, :, None] - position_BT[:, None, :] < sliding_window
  return see_BTT


def segment_attention(
  query_BTKGd: jax.Array,
  key_BTKd: jax.Array,
  value_BTKd: jax.Array,
  see_BTT: jax.Array,
  *,
  scale: float,
  soft_cap: float | None,
) -> jax.Array:
  """Softmax attention of token i over the tokens j that it may see.

      z_ij = scale * q_i . k_j,   z <- cap tanh(z / cap),   out_i = sum_j softmax_j(z_ij) v_j

  The matmuls run in the dtype of the queries and add in float32; the softmax is float32. A token
  that sees nothing gets 0.
  """
  see = see_BTT[:, None, None]
  score = scale * jnp.einsum(
    "bikgd,bjkd->bkgij", query_BTKGd, key_BTKd, preferred_element_type=jnp.float32
  )
  if soft_cap is not None:
    score = soft_cap * jnp.tanh(score / soft_cap)
  weight = jax.nn.softmax(jnp.where(see, score, HIDDEN), axis=-1)
  weight = jnp.where(see, weight, 0.0).astype(value_BTKd.dtype)
  out = jnp.einsum("bkgij,bjkd->bikgd", weight, value_BTKd, preferred_element_type=jnp.float32)
  return out.astype(query_BTKGd.dtype)
