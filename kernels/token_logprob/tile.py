"""The arithmetic of one tile of the vocabulary, shared by the XLA loop and the Pallas kernels.

Letters: N rows, D features, W vocabulary entries of a tile. `_N1` is a column: one number a row.
With s = cap(h E^T) / T and p = softmax(s), three numbers a row are enough:

    normaliser = log sum_v exp s_v      chosen = s[label]      entropy = - sum_v p_v log p_v
    logp = chosen - normaliser

They are summed up tile by tile as in online softmax (1805.02867), scores counted from the running
maximum, so that a small entropy is no difference of large numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

LEAST = -1e30  # a running maximum below every score; finite, or its difference with itself is NaN


class Sums(NamedTuple):
  """What is known of each row after some tiles."""

  maximum_N1: jax.Array
  total_N1: jax.Array  # sum exp(s - maximum)
  chosen_N1: jax.Array  # s[label], 0 until its tile came
  weighted_N1: jax.Array | None  # sum exp(s - maximum) (s - maximum); None: no entropy asked for


class Statistics(NamedTuple):
  normaliser_N1: jax.Array
  chosen_N1: jax.Array  # 0 where the label is not in this vocabulary
  entropy_N1: jax.Array | None


class Pull(NamedTuple):
  """The gradient on a row's scores: ds_v = p_v (level + slope log p_v) + [v = label] chosen."""

  normaliser_N1: jax.Array
  level_N1: jax.Array
  slope_N1: jax.Array | None
  chosen_N1: jax.Array


def nothing(like_N1: jax.Array, *, entropy: bool) -> Sums:
  zero_N1 = jnp.zeros_like(like_N1)
  least_N1 = jnp.full_like(like_N1, LEAST)
  return Sums(least_N1, zero_N1, zero_N1, zero_N1 if entropy else None)


def scores(hidden_ND, part_WD, temperature_N1, soft_cap: float | None) -> jax.Array:
  """s = cap tanh(h E^T / cap) / T, [N, W] float32; the matmul runs in the dtype of `hidden_ND`."""
  score_NW = jax.lax.dot_general(
    hidden_ND,
    part_WD.astype(hidden_ND.dtype),
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )
  if soft_cap is not None:
    score_NW = soft_cap * jnp.tanh(score_NW / soft_cap)
  return score_NW / temperature_N1


def add(sums: Sums, score_NW: jax.Array, chosen_N1: jax.Array) -> Sums:
  """One more tile; `chosen_N1` is the label's score in it, 0 if the label is elsewhere.

  A score of -inf is a column that does not exist.
  """
  maximum_N1 = jnp.maximum(sums.maximum_N1, jnp.max(score_NW, axis=1, keepdims=True))
  shrink_N1 = jnp.exp(sums.maximum_N1 - maximum_N1)
  weight_NW = jnp.exp(score_NW - maximum_N1)
  total_N1 = shrink_N1 * sums.total_N1 + jnp.sum(weight_NW, axis=1, keepdims=True)
  weighted_N1 = None
  if sums.weighted_N1 is not None:
    below_NW = jnp.where(score_NW == -jnp.inf, 0.0, score_NW - maximum_N1)
    moved_N1 = sums.weighted_N1 + (sums.maximum_N1 - maximum_N1) * sums.total_N1
    weighted_N1 = shrink_N1 * moved_N1 + jnp.sum(weight_NW * below_NW, axis=1, keepdims=True)
  return Sums(maximum_N1, total_N1, sums.chosen_N1 + chosen_N1, weighted_N1)


def finish(sums: Sums) -> Statistics:
  log_N1 = jnp.log(sums.total_N1)
  entropy_N1 = None if sums.weighted_N1 is None else log_N1 - sums.weighted_N1 / sums.total_N1
  return Statistics(sums.maximum_N1 + log_N1, sums.chosen_N1, entropy_N1)


def pull(statistics: Statistics, cotangent: Statistics) -> Pull:
  """From d normaliser / ds_v = p_v and d entropy / ds_v = - p_v (log p_v + entropy)."""
  level_N1, slope_N1 = cotangent.normaliser_N1, None
  if statistics.entropy_N1 is not None:
    slope_N1 = -cotangent.entropy_N1
    level_N1 = level_N1 + slope_N1 * statistics.entropy_N1
  return Pull(statistics.normaliser_N1, level_N1, slope_N1, cotangent.chosen_N1)


def gradient(
  score_NW, hit_NW, exists_NW, temperature_N1, pulled: Pull, soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
  """Gradients of the logits h E^T [N, W] and this tile's part of the temperature's [N, 1], float32.

  `hit_NW` marks the label, `exists_NW` (None: all) the columns that are not padding.
  """
  log_p_NW = score_NW - pulled.normaliser_N1
  level_NW = pulled.level_N1
  if pulled.slope_N1 is not None:
    level_NW = level_NW + pulled.slope_N1 * log_p_NW
  pull_NW = jnp.exp(log_p_NW) * level_NW
  pull_NW += jnp.where(hit_NW, pulled.chosen_N1, 0.0)
  if exists_NW is not None:
    pull_NW = jnp.where(exists_NW, pull_NW, 0.0)
    score_NW = jnp.where(exists_NW, score_NW, 0.0)
  temperature_grad_N1 = -jnp.sum(pull_NW * score_NW, axis=1, keepdims=True) / temperature_N1
  pull_NW /= temperature_N1
  if soft_cap is not None:
    pull_NW *= 1 - (score_NW * temperature_N1 / soft_cap) ** 2
  return pull_NW, temperature_grad_N1


def push(pull_NW, hidden_ND, part_WD) -> tuple[jax.Array, jax.Array]:
  """Gradients of the hidden states [N, D] and of the tile's embeddings [W, D], float32 sums."""
  pull_NW = pull_NW.astype(hidden_ND.dtype)
  hidden_grad_ND = jnp.matmul(
    pull_NW, part_WD.astype(hidden_ND.dtype), preferred_element_type=jnp.float32
  )
  part_grad_WD = jnp.matmul(pull_NW.T, hidden_ND, preferred_element_type=jnp.float32)
  return hidden_grad_ND, part_grad_WD
