"""Advantages of flat rows: how much better a row did than those it may be compared with.

Letters: N rows (a turn or a reflection each), K context lengths; groups, trajectories and clusters
are int ids of each row, counted from 0. Ids below `num_*` may be absent; those of masked rows are
not read. Every result has a value per row, 0 in masked rows. Weights say how a row enters a mean
(`trajectory_weights`, `row_weights`); both make the total weight of a cluster the number of
trajectories or rows in it, which is what the unbiased std divides by, less one.

A cluster whose values are all equal carries no signal: its advantages are exactly 0, whatever
rounding does to the mean, and so are those of a cluster of one.
"""

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks

# Spread below this share of the largest magnitude is float32 rounding of sums, not signal.
RELATIVE_SPREAD = 1e-5


def row_weights(mask_N: jax.Array) -> jax.Array:
  """Each row weighs 1, so long trajectories weigh more (what LaMer's release does)."""
  chex.assert_rank(mask_N, 1)
  chex.assert_type(mask_N, bool)
  return mask_N.astype(jnp.float32)


def trajectory_weights(
  trajectory_N: jax.Array, mask_N: jax.Array, *, num_trajectories: int
) -> jax.Array:
  """Each trajectory weighs 1 in total: w = 1 / (rows of the row's trajectory that count)."""
  rows_N = _mass(row_weights(mask_N), trajectory_N, mask_N, num_trajectories)
  return masks.keep(1.0 / jnp.maximum(rows_N, 1.0), mask_N)


def cluster_mean(
  value_N: jax.Array,
  cluster_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_clusters: int,
) -> jax.Array:
  """Weighted mean of each row's cluster, m = sum w x / sum w, gathered back to the rows."""
  chex.assert_rank(value_N, 1)
  chex.assert_equal_shape([value_N, cluster_N, weight_N, mask_N])
  total_N = _mass(weight_N * value_N, cluster_N, mask_N, num_clusters)
  mass_N = _mass(weight_N, cluster_N, mask_N, num_clusters)
  return total_N / jnp.where(mass_N > 0, mass_N, 1.0)


def cluster_std(
  value_N: jax.Array,
  cluster_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_clusters: int,
) -> jax.Array:
  """Population std of each row's cluster, sqrt(sum w (x - m)^2 / sum w)."""
  mean_N = cluster_mean(value_N, cluster_N, weight_N, mask_N, num_clusters=num_clusters)
  square_N = jnp.square(value_N - mean_N)
  return jnp.sqrt(cluster_mean(square_N, cluster_N, weight_N, mask_N, num_clusters=num_clusters))


def cluster_std_unbiased(
  value_N: jax.Array,
  cluster_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_clusters: int,
) -> jax.Array:
  """Sample std of each row's cluster, sqrt(sum w (x - m)^2 / (sum w - 1)); 0 if sum w is 1."""
  std_N = cluster_std(value_N, cluster_N, weight_N, mask_N, num_clusters=num_clusters)
  mass_N = _mass(weight_N, cluster_N, mask_N, num_clusters)
  several_N = mass_N > 1.001  # three weights of 1/3 do not add to exactly 1
  correction_N = jnp.where(several_N, mass_N / jnp.where(several_N, mass_N - 1.0, 1.0), 0.0)
  return std_N * jnp.sqrt(correction_N)


def zero_spread(
  score_N: jax.Array, group_N: jax.Array, mask_N: jax.Array, *, num_groups: int
) -> jax.Array:
  """Which groups carry no signal, bool [num_groups]: all scores equal, up to rounding.

      max - min <= RELATIVE_SPREAD * max |score|

  A group of one is one of them; a group without rows is not.
  """
  chex.assert_rank(score_N, 1)
  chex.assert_equal_shape([score_N, group_N, mask_N])
  high_G = jax.ops.segment_max(masks.keep(score_N, mask_N, fill=-jnp.inf), group_N, num_groups)
  low_G = jax.ops.segment_min(masks.keep(score_N, mask_N, fill=jnp.inf), group_N, num_groups)
  magnitude_G = jnp.maximum(jnp.abs(high_G), jnp.abs(low_G))
  return (high_G >= low_G) & (high_G - low_G <= RELATIVE_SPREAD * magnitude_G)


def group_mean(
  score_N: jax.Array,
  group_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
) -> jax.Array:
  """Score above the group's mean, A = x - m.  Dr. GRPO (2503.20783); LaMer's `mean_norm`."""
  mean_N = cluster_mean(score_N, group_N, weight_N, mask_N, num_clusters=num_groups)
  return _signal(score_N - mean_N, score_N, group_N, mask_N, num_groups)


def group_mean_std(
  score_N: jax.Array,
  group_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  eps: float,
) -> jax.Array:
  """Score above the group's mean in units of its sample std, A = (x - m) / (std + eps).

  GRPO (2402.03300) section 4.1.2, with the unbiased std of the releases (LaMer: eps 1e-6).
  """
  advantage_N = group_mean(score_N, group_N, weight_N, mask_N, num_groups=num_groups)
  std_N = cluster_std_unbiased(score_N, group_N, weight_N, mask_N, num_clusters=num_groups)
  return _divide(advantage_N, std_N, eps)


def group_mean_std_population(
  score_N: jax.Array,
  group_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  eps: float,
) -> jax.Array:
  """`group_mean_std` with the population std, which divides by all weights.

  Complementary RL (2603.17621) Eq. 5, where a group is the guided or the free half of one.
  """
  advantage_N = group_mean(score_N, group_N, weight_N, mask_N, num_groups=num_groups)
  std_N = cluster_std(score_N, group_N, weight_N, mask_N, num_clusters=num_groups)
  return _divide(advantage_N, std_N, eps)


def leave_one_out(
  score_N: jax.Array,
  group_N: jax.Array,
  trajectory_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  num_trajectories: int,
) -> jax.Array:
  """Score above the mean of the group's *other* trajectories; a group of one gets 0.

      A = x - (S_group - S_own) / (W_group - W_own),   S = sum w x,  W = sum w

  RLOO (2402.14740), for trajectories of one row or many.
  """
  chex.assert_rank(score_N, 1)
  chex.assert_equal_shape([score_N, group_N, trajectory_N, weight_N, mask_N])

  def others(value_N):
    return _mass(value_N, group_N, mask_N, num_groups) - _mass(
      value_N, trajectory_N, mask_N, num_trajectories
    )

  mass_N = others(weight_N)
  alone_N = mass_N <= 1e-5 * _mass(weight_N, group_N, mask_N, num_groups)  # 0 up to rounding
  advantage_N = score_N - others(weight_N * score_N) / jnp.where(alone_N, 1.0, mass_N)
  advantage_N = jnp.where(alone_N, 0.0, advantage_N)
  return _signal(advantage_N, score_N, group_N, mask_N, num_groups)


def step_term(
  return_N: jax.Array, anchor_N: jax.Array, mask_N: jax.Array, *, num_clusters: int
) -> jax.Array:
  """Return above the mean of the rows that stood before the same anchor, A = G - m.

  GiGPO (2505.10978) without the std; each row weighs the same, a cluster of one gets 0.
  """
  weight_N = row_weights(mask_N)
  return group_mean(return_N, anchor_N, weight_N, mask_N, num_groups=num_clusters)


def step_term_mean_std(
  return_N: jax.Array, anchor_N: jax.Array, mask_N: jax.Array, *, num_clusters: int, eps: float
) -> jax.Array:
  """`step_term` in units of the cluster's sample std, A = (G - m) / (std + eps)."""
  weight_N = row_weights(mask_N)
  return group_mean_std(return_N, anchor_N, weight_N, mask_N, num_groups=num_clusters, eps=eps)


def gigpo(
  score_N: jax.Array,
  return_N: jax.Array,
  group_N: jax.Array,
  anchor_N: jax.Array,
  weight_N: jax.Array,
  episode_mask_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  num_clusters: int,
  step_weight: float,
) -> jax.Array:
  """Group-in-group advantage without std: the episode's in its group plus the step's in its anchor.

      A = (score - m_group) + step_weight (G - m_anchor)

  GiGPO (2505.10978), `mean_norm` in LaMer. `episode_mask_N` says which rows have an episode
  term: leave reflections out of it (their score is no score), or pass `mask_N` for what LaMer's
  release does. Make `weight_N` with that same mask.
  """
  episode_N = group_mean(score_N, group_N, weight_N, episode_mask_N, num_groups=num_groups)
  step_N = step_term(return_N, anchor_N, mask_N, num_clusters=num_clusters)
  return masks.keep(episode_N + step_weight * step_N, mask_N)


def gigpo_mean_std(
  score_N: jax.Array,
  return_N: jax.Array,
  group_N: jax.Array,
  anchor_N: jax.Array,
  weight_N: jax.Array,
  episode_mask_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  num_clusters: int,
  step_weight: float,
  eps: float,
) -> jax.Array:
  """`gigpo` with each term in units of its own sample std (`mean_std_norm`; eps 1e-6)."""
  episode_N = group_mean_std(
    score_N, group_N, weight_N, episode_mask_N, num_groups=num_groups, eps=eps
  )
  step_N = step_term_mean_std(return_N, anchor_N, mask_N, num_clusters=num_clusters, eps=eps)
  return masks.keep(episode_N + step_weight * step_N, mask_N)


def hgpo(
  return_N: jax.Array,
  anchor_KN: jax.Array,
  mask_N: jax.Array,
  *,
  num_clusters: int,
  alpha: float,
  eps: float,
) -> jax.Array:
  """Mean of the step's advantages in clusters of k = 1..K equal last anchors, longer ones heavier.

      A = sum_k (k+1)^alpha A_k / sum_{k: A_k != 0} (k+1)^alpha,   A_k = (G - m_k) / (std_k + eps)

  HGPO, population std; row k-1 of `anchor_KN` is context length k (`anchors.context_clusters`).
  A row that is alone, or equal to the others, in every cluster gets 0.
  """
  advantage_KN = _context_advantages(return_N, anchor_KN, mask_N, num_clusters, eps)
  length_K = jnp.arange(1, anchor_KN.shape[0] + 1)
  return _mean_of_nonzero(advantage_KN, length_K, alpha)


def hgpo_with_base(
  score_N: jax.Array,
  group_N: jax.Array,
  return_N: jax.Array,
  anchor_KN: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  num_clusters: int,
  alpha: float,
  eps: float,
) -> jax.Array:
  """`hgpo` with the trajectory's advantage in its group as the item k = 0, of weight 1."""
  base_N = group_mean_std_population(
    score_N, group_N, weight_N, mask_N, num_groups=num_groups, eps=eps
  )
  context_KN = _context_advantages(return_N, anchor_KN, mask_N, num_clusters, eps)
  advantage_KN = jnp.concatenate([base_N[None], context_KN])
  return _mean_of_nonzero(advantage_KN, jnp.arange(advantage_KN.shape[0]), alpha)


def gae(
  reward_NT: jax.Array, value_NT: jax.Array, mask_NT: jax.Array, *, gamma: float, lam: float
) -> jax.Array:
  """Generalised advantage estimate over the T turns (or tokens) of N trajectories.

      A_t = delta_t + gamma lam A_{t+1},   delta_t = r_t + gamma V_{t+1} - V_t

  GAE (1506.02438) Eq. 16. V is 0 after the last played turn. The value target is A + V.
  """
  return gae_discounted(reward_NT, value_NT, jnp.full(reward_NT.shape, gamma), mask_NT, lam=lam)


def gae_discounted(
  reward_NT: jax.Array,
  value_NT: jax.Array,
  discount_NT: jax.Array,
  mask_NT: jax.Array,
  *,
  lam: float,
) -> jax.Array:
  """`gae` with a discount of its own from each turn to the next played one.

  For credit across attempts, take the discounts from `returns.attempt_discounts`.
  """
  chex.assert_rank(reward_NT, 2)
  chex.assert_equal_shape([reward_NT, value_NT, discount_NT, mask_NT])
  columns = [masks.keep(column, mask_NT).T for column in (reward_NT, value_NT, discount_NT)]

  def step(later, turn):
    advantage_N, next_value_N = later
    reward_N, value_N, discount_N, mask_N = turn
    delta_N = reward_N + discount_N * next_value_N - value_N
    advantage_N = jnp.where(mask_N, delta_N + discount_N * lam * advantage_N, advantage_N)
    return (advantage_N, jnp.where(mask_N, value_N, next_value_N)), advantage_N

  zero_N = jnp.zeros_like(reward_NT[:, 0])
  _, advantage_TN = jax.lax.scan(step, (zero_N, zero_N), (*columns, mask_NT.T), reverse=True)
  return masks.keep(advantage_TN.T, mask_NT)


def _mass(weight_N, cluster_N, mask_N, num_clusters):
  """Sum over each row's cluster, gathered back. A valid row with an id out of range becomes NaN.

  All statistics go through here, so this is where masked values, weights and ids are dropped.
  """
  mass_C = jax.ops.segment_sum(masks.keep(weight_N, mask_N), cluster_N, num_clusters)
  return masks.keep(jnp.take(mass_C, cluster_N, mode="fill", fill_value=jnp.nan), mask_N)


def _signal(advantage_N, score_N, group_N, mask_N, num_groups):
  """The advantage, and exactly 0 in groups that carry no signal."""
  flat_G = zero_spread(score_N, group_N, mask_N, num_groups=num_groups)
  flat_N = jnp.take(flat_G, group_N, mode="fill", fill_value=False)
  return jnp.where(mask_N & ~flat_N, advantage_N, 0.0)


def _divide(advantage_N, std_N, eps):
  """advantage / (std + eps); 0 where there is no std, instead of a difference divided by eps."""
  return jnp.where(std_N == 0, 0.0, advantage_N / jnp.where(std_N == 0, 1.0, std_N + eps))


def _context_advantages(return_N, anchor_KN, mask_N, num_clusters, eps):
  chex.assert_rank(anchor_KN, 2)
  weight_N = row_weights(mask_N)
  return jax.vmap(
    lambda anchor_N: group_mean_std_population(
      return_N, anchor_N, weight_N, mask_N, num_groups=num_clusters, eps=eps
    )
  )(anchor_KN)


def _mean_of_nonzero(advantage_KN, length_K, alpha):
  weight_KN = jnp.where(advantage_KN != 0, ((length_K + 1.0) ** alpha)[:, None], 0.0)
  mass_N = jnp.sum(weight_KN, axis=0)
  return jnp.sum(weight_KN * advantage_KN, axis=0) / jnp.where(mass_N > 0, mass_N, 1.0)
