"""Comparisons inside the guided and the free part of a group, and for the model that writes experience.

Complementary RL (2603.17621): of the K trials of a group one half plays with an experience in its
prompt (guided), the other without (free). Compared with each other, the guided half would be paid for
being guided; so each half is compared with itself and weighs one half of the loss.

Letters: N rows, B rows of a micro-batch, T tokens. `guided_N` is boolean, and so are masks. The weights
of how retrieval chooses and how often a sample may train are in `memory.retrieval`.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import advantages, masks


class Halves(NamedTuple):
  """Something for the guided and for the free rows: masks, or open means of a loss."""

  guided: jax.Array | masks.Open
  free: jax.Array | masks.Open


def ids(group_N: jax.Array, guided_N: jax.Array) -> jax.Array:
  """The subgroup of each row, 2 group + [guided]: there are 2 num_groups of them."""
  chex.assert_equal_shape([group_N, guided_N])
  chex.assert_type(guided_N, bool)
  return 2 * group_N + guided_N.astype(group_N.dtype)


def pooled_mean_std(
  score_N: jax.Array,
  group_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  eps: float,
) -> jax.Array:
  """Score above the mean of the whole group in units of its population std, A = (x - m) / (std + eps).

  The baseline of Complementary RL (Fig. 3b-d), which collapses; 0 where all scores are equal.
  """
  arguments = (score_N, group_N, weight_N, mask_N)
  advantage_N = advantages.group_mean(*arguments, num_groups=num_groups)
  std_N = advantages.cluster_std(*arguments, num_clusters=num_groups)
  return jnp.where(std_N == 0, 0.0, advantage_N / jnp.where(std_N == 0, 1.0, std_N + eps))


def split_mean_std(
  score_N: jax.Array,
  group_N: jax.Array,
  guided_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
  eps: float,
) -> jax.Array:
  """Score above the row's own half of the group, A_c = (x - m_c) / (std_c + eps), c: guided or free.

  Complementary RL (2603.17621) Eq. 5, population std.
  """
  arguments = (score_N, ids(group_N, guided_N), weight_N, mask_N)
  return pooled_mean_std(*arguments, num_groups=2 * num_groups, eps=eps)


def split_mean(
  score_N: jax.Array,
  group_N: jax.Array,
  guided_N: jax.Array,
  weight_N: jax.Array,
  mask_N: jax.Array,
  *,
  num_groups: int,
) -> jax.Array:
  """`split_mean_std` without the std, A_c = x - m_c: what the release is configured to do."""
  arguments = (score_N, ids(group_N, guided_N), weight_N, mask_N)
  return advantages.group_mean(*arguments, num_groups=2 * num_groups)


def halves(mask_BT: jax.Array, guided_B: jax.Array) -> Halves:
  """The mask of the guided rows' tokens, and that of the free ones; aggregate the loss under each."""
  chex.assert_shape(guided_B, mask_BT.shape[:1])
  chex.assert_type([mask_BT, guided_B], bool)
  return Halves(mask_BT & guided_B[:, None], mask_BT & ~guided_B[:, None])


def balanced(loss: Halves) -> jax.Array:
  """Each half's mean first, then half and half; a half that is empty leaves all to the other.

      L = 1/2 mean_guided + 1/2 mean_free

  Complementary RL (2603.17621) Eq. 5. Call it once, with the open means of all micro-batches: uneven
  lengths, or a trial that fell out, do not tilt it.
  """
  present_C = jnp.stack([mean.count > 0 for mean in loss]).astype(jnp.float32)
  mean_C = jnp.stack([masks.close(mean) for mean in loss])
  return jnp.sum(present_C * mean_C) / jnp.maximum(jnp.sum(present_C), 1.0)


def balance(count_N: jax.Array, guided_N: jax.Array, mask_N: jax.Array) -> jax.Array:
  """Factors of the rows' advantages that make one mean over the whole batch the `balanced` one.

      f_c = sum n / (C sum_c n),   C: halves that are not empty

  `count_N` is what a row counts in that mean: its tokens (`aggregate.token_mean`) or 1
  (`aggregate.sequence_mean`). Exact for every surrogate, all of which are linear in A > 0 and in A < 0.
  """
  chex.assert_equal_shape([count_N, guided_N, mask_N])
  count_N = masks.keep(count_N.astype(jnp.float32), mask_N)
  guided, whole = jnp.sum(masks.keep(count_N, guided_N)), jnp.sum(count_N)
  own_N = jnp.where(guided_N, guided, whole - guided)
  number = jnp.maximum((guided > 0).astype(jnp.float32) + (whole > guided), 1.0)
  return masks.keep(whole / (number * jnp.where(own_N > 0, own_N, 1.0)), mask_N)


def extractor(reward_N: jax.Array, weight_N: jax.Array, mask_N: jax.Array) -> jax.Array:
  """How much better a piece of experience guided than the others of its batch, A = w (r - mean r).

  Complementary RL (2603.17621) Eq. 3 and 7: no std, w = `retrieval.weight` after the mean is taken
  off. A row with w = 0 is cooling down and does not enter the mean.
  """
  chex.assert_rank(reward_N, 1)
  chex.assert_equal_shape([reward_N, weight_N, mask_N])
  weight_N = masks.keep(weight_N, mask_N)
  counts_N = weight_N > 0
  mean = masks.close(masks.open_sum(reward_N, counts_N))
  return weight_N * (masks.keep(reward_N, counts_N) - mean)
