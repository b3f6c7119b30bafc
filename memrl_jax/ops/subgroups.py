"""What the two models of Complementary RL (2603.17621) are paid, beside the comparison in a group.

Of the K trials of a group one half plays with an experience in its prompt (guided), the other without
(free). Compared with each other, the guided half would be paid for being guided; so each half is
compared with itself (`rollout.credit` with `trial.subgroup`) and weighs one half of the loss.

Letters: N rows. `guided_N` is boolean, and so are masks. The weights of how retrieval chooses and how
often a sample may train are in `memory.retrieval`.
"""

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks


def balance(count_N: jax.Array, guided_N: jax.Array, mask_N: jax.Array) -> jax.Array:
  """Factors of the rows' advantages that make one mean over the whole batch the mean of both halves.

      L = 1/C sum_c mean_c,   f_c = sum n / (C sum_c n),   C: halves that are not empty

  Complementary RL Eq. 5: uneven lengths, or a trial that fell out, do not tilt it. `count_N` is what a row counts in that mean: its tokens (`aggregate.token_mean`) or 1
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

  Eq. 3 and 7: no std, w = `retrieval.weight` after the mean is taken
  off. A row with w = 0 is cooling down and does not enter the mean.
  """
  chex.assert_rank(reward_N, 1)
  chex.assert_equal_shape([reward_N, weight_N, mask_N])
  weight_N = masks.keep(weight_N, mask_N)
  counts_N = weight_N > 0
  mean = masks.close(masks.open_sum(reward_N, counts_N))
  return weight_N * (masks.keep(reward_N, counts_N) - mean)
