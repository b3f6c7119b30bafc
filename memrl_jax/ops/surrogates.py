"""Policy losses per token, to be minimised; `aggregate` turns them into one number.

Letters: B rows, T tokens. Advantages and old log-probs are constants: no gradient flows into them.
Masked places have loss 0 and are never counted as clipped.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks, ratios


class Surrogate(NamedTuple):
  """Loss of each token, and where the clip acts on it (its share is a health metric)."""

  loss_BT: jax.Array
  clipped_BT: jax.Array


def reinforce(logp_BT: jax.Array, advantage_BT: jax.Array, mask_BT: jax.Array) -> Surrogate:
  """Score-function loss, L_t = - A_t log pi(y_t); nothing is clipped.  Williams (1992)."""
  chex.assert_equal_shape([logp_BT, advantage_BT, mask_BT])
  logp_BT, advantage_BT = masks.keep(logp_BT, mask_BT), _constant(advantage_BT, mask_BT)
  return Surrogate(-advantage_BT * logp_BT, jnp.zeros_like(mask_BT))


def ppo_clip(
  ratio_BT: jax.Array,
  advantage_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
) -> Surrogate:
  """Clipped surrogate: no gain from moving the ratio further than the clip range.

      L_t = - min(rho A, clip(rho, 1-eps_low, 1+eps_high) A)

  PPO (1707.06347) Eq. 7; DAPO (2503.14476) Eq. 10 with eps_high > eps_low ("clip-higher").
  Clipped = the clipped branch is the smaller one, where the gradient is 0.
  """
  chex.assert_equal_shape([ratio_BT, advantage_BT, mask_BT])
  ratio_BT = masks.keep(ratio_BT, mask_BT, fill=1.0)
  advantage_BT = _constant(advantage_BT, mask_BT)
  inside_BT = jnp.clip(ratio_BT, 1.0 - eps_low, 1.0 + eps_high)
  free_BT, held_BT = ratio_BT * advantage_BT, inside_BT * advantage_BT
  return Surrogate(-jnp.minimum(free_BT, held_BT), held_BT < free_BT)


def dual_clip(
  ratio_BT: jax.Array,
  advantage_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
  bound: float,
) -> Surrogate:
  """`ppo_clip` whose loss is bounded for bad tokens that the policy now likes much more.

      L_t = min(L_ppo, - bound A)   where A < 0,   L_ppo elsewhere

  Dual-clip PPO (1912.09729); bound > 1 + eps_high. Clipped = by either clip.
  """
  ppo = ppo_clip(ratio_BT, advantage_BT, mask_BT, eps_low=eps_low, eps_high=eps_high)
  advantage_BT = _constant(advantage_BT, mask_BT)
  ceiling_BT = jnp.where(advantage_BT < 0, -bound * advantage_BT, jnp.inf)
  loss_BT = jnp.minimum(ppo.loss_BT, ceiling_BT)
  return Surrogate(loss_BT, ppo.clipped_BT | (ceiling_BT < ppo.loss_BT))


def gspo(
  logp_BT: jax.Array,
  old_logp_BT: jax.Array,
  advantage_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
) -> Surrogate:
  """Clipping by sequence: all tokens of a row share one length-normalised ratio.

      L = - min(s A, clip(s, 1-eps_low, 1+eps_high) A),   s = exp(mean_t log rho_t)

  GSPO (2507.18071) Eq. 5-7 (eps there is about 3e-4). Meant for `aggregate.sequence_mean`.
  """
  ratio_BT = ratios.sequence_ratio(logp_BT, old_logp_BT, mask_BT)
  return ppo_clip(ratio_BT, advantage_BT, mask_BT, eps_low=eps_low, eps_high=eps_high)


def cispo(
  ratio_BT: jax.Array,
  logp_BT: jax.Array,
  advantage_BT: jax.Array,
  mask_BT: jax.Array,
  *,
  eps_low: float,
  eps_high: float,
) -> Surrogate:
  """Clipped importance sampling: clipping scales the gradient and never stops it.

      L_t = - sg[clip(rho, 1-eps_low, 1+eps_high)] A log pi(y_t)

  MiniMax-M1 (2506.13585) Eq. 4-5; used by Complementary RL for the extractor.
  """
  chex.assert_equal_shape([ratio_BT, logp_BT, advantage_BT, mask_BT])
  ratio_BT = jax.lax.stop_gradient(masks.keep(ratio_BT, mask_BT, fill=1.0))
  weight_BT = jnp.clip(ratio_BT, 1.0 - eps_low, 1.0 + eps_high)
  loss_BT = reinforce(logp_BT, weight_BT * _constant(advantage_BT, mask_BT), mask_BT).loss_BT
  return Surrogate(loss_BT, weight_BT != ratio_BT)


def _constant(advantage_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  return jax.lax.stop_gradient(masks.keep(advantage_BT, mask_BT))
