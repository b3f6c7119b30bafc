"""Importance ratios between two policies' log-probs of the same sampled tokens.

Letters: B rows (one sampled sequence each), T tokens. Log-probs in nats. Ratios are 1 in masked
places: the log-ratio is masked before `exp`, or padding leaks into gradients.
"""

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks

# Log-ratios are held within +-20 nats (a ratio of 5e8), far outside every clip range: exp stays
# finite in float32, and an advantage of 0 times the ratio stays 0 instead of NaN.
LOG_RATIO_BOUND = 20.0


def log_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """log pi - sg[log pi_old] in nats, 0 in masked places, held within +-LOG_RATIO_BOUND."""
  chex.assert_rank(logp_BT, 2)
  chex.assert_equal_shape([logp_BT, old_logp_BT])
  logp_BT = masks.keep(logp_BT, mask_BT)
  old_logp_BT = jax.lax.stop_gradient(masks.keep(old_logp_BT, mask_BT))
  return jnp.clip(logp_BT - old_logp_BT, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Ratio of each token, rho_t = pi(y_t) / pi_old(y_t).  PPO (1707.06347) Eq. 6."""
  return jnp.exp(log_ratio(logp_BT, old_logp_BT, mask_BT))


def sequence_ratio(logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Length-normalised ratio of the whole row, the same at each of its tokens.

      s = (pi(y) / pi_old(y))^(1/|y|) = exp(mean_t log rho_t)

  GSPO (2507.18071) Eq. 7. A row without tokens has ratio 1.
  """
  log_ratio_BT = log_ratio(logp_BT, old_logp_BT, mask_BT)
  count_B1 = jnp.maximum(jnp.sum(mask_BT, axis=1, keepdims=True), 1)
  ratio_B1 = jnp.exp(jnp.sum(log_ratio_BT, axis=1, keepdims=True) / count_B1)
  return masks.keep(jnp.broadcast_to(ratio_B1, mask_BT.shape), mask_BT, fill=1.0)


def whole_sequence_ratio(
  logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """Ratio of the whole row, the same at each of its tokens, s = pi(y) / pi_old(y) = exp(sum_t log rho_t).

  Complementary RL (2603.17621) Eq. 5 by its text. Long rows leave any clip range at once.
  """
  total_B1 = jnp.sum(log_ratio(logp_BT, old_logp_BT, mask_BT), axis=1, keepdims=True)
  ratio_B1 = jnp.exp(jnp.clip(total_B1, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
  return masks.keep(jnp.broadcast_to(ratio_B1, mask_BT.shape), mask_BT, fill=1.0)


def sequence_ratio_token(
  logp_BT: jax.Array, old_logp_BT: jax.Array, mask_BT: jax.Array
) -> jax.Array:
  """The row's ratio in value, with each token's own gradient, so that advantages may differ in it.

      s_t = sg[s] * pi(y_t) / sg[pi(y_t)]

  GSPO-token (2507.18071, section 4.3).
  """
  ratio_BT = jax.lax.stop_gradient(sequence_ratio(logp_BT, old_logp_BT, mask_BT))
  return ratio_BT * token_ratio(logp_BT, logp_BT, mask_BT)


def truncated_importance_weight(
  trainer_logp_BT: jax.Array, sampler_logp_BT: jax.Array, mask_BT: jax.Array, *, cap: float
) -> jax.Array:
  """Constant weight that corrects for a sampler that is not the policy of before the update.

      w_t = sg[min(pi_trainer(y_t) / pi_sampler(y_t), cap)]

  Truncated importance sampling (Ionides 2008). The weights are the same where only the numbers of two programs
  differ, and the sampler's are older where rollouts run ahead. A surrogate of pi / pi_trainer times w is then
  decoupled PPO (2110.00641 Eq. 7; AReaL 2505.24298 Eq. 5): clipping is about the trainer's policy of before the update.
  """
  ratio_BT = token_ratio(trainer_logp_BT, sampler_logp_BT, mask_BT)
  return jax.lax.stop_gradient(jnp.minimum(ratio_BT, cap))
