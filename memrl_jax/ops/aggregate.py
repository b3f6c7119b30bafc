"""From losses per token to one open mean, which micro-batches and devices add and divide once.

Letters: B rows (one sampled sequence each), T tokens. A row without tokens is padding: it adds to
no total and to no count.
"""

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks


def token_mean(loss_BT: jax.Array, mask_BT: jax.Array) -> masks.Open:
  """Every token weighs the same, long rows weigh more: sum L / sum mask.  DAPO (2503.14476)."""
  chex.assert_rank(loss_BT, 2)
  return masks.open_sum(loss_BT, mask_BT)


def sequence_mean(loss_BT: jax.Array, mask_BT: jax.Array) -> masks.Open:
  """Every row weighs the same: mean over rows of (sum_t L / |y|).  GRPO (2402.03300) Eq. 3."""
  chex.assert_rank(loss_BT, 2)
  row_B = jnp.sum(masks.keep(loss_BT, mask_BT), axis=1) / jnp.maximum(jnp.sum(mask_BT, axis=1), 1)
  return masks.open_sum(row_B, jnp.any(mask_BT, axis=1))


def dr_grpo(loss_BT: jax.Array, mask_BT: jax.Array, *, max_tokens: int) -> masks.Open:
  """Divided by a constant, so that neither length nor brevity is favoured.

      sum L / (rows * max_tokens)

  Dr. GRPO (2503.20783): max_tokens is the response budget, the same in every micro-batch.
  """
  chex.assert_rank(loss_BT, 2)
  rows = jnp.sum(jnp.any(mask_BT, axis=1), dtype=jnp.float32)
  return masks.Open(masks.open_sum(loss_BT, mask_BT).total, rows * max_tokens)
