"""Returns: what each turn is credited with, inside an attempt and across attempts of a trial.

Letters: N trials, A attempts of a trial, T turns of an attempt. The mask is True where a turn was
played: a prefix of the turns of each attempt and a prefix of the attempts of each trial.
Masked places return 0.
"""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks


class CrossReturns(NamedTuple):
  """Credit of every played turn, and of the reflection written after attempt a (0 if none follows)."""

  play_NAT: jax.Array
  reflect_NA: jax.Array


def discounted_returns(reward_NT: jax.Array, mask_NT: jax.Array, *, gamma: float) -> jax.Array:
  """Return to go, G_t = r_t + gamma G_{t+1}, over the turns that were played."""
  return varying_returns(reward_NT, jnp.full(reward_NT.shape, gamma), mask_NT)


def varying_returns(reward_NT: jax.Array, discount_NT: jax.Array, mask_NT: jax.Array) -> jax.Array:
  """Return to go with a discount of its own at each turn, G_t = r_t + discount_t G_{t+1}.

  G_{t+1} belongs to the next *played* turn: a masked turn is passed over without a discount.
  """
  chex.assert_rank(reward_NT, 2)
  chex.assert_equal_shape([reward_NT, discount_NT, mask_NT])
  reward_NT = masks.keep(reward_NT, mask_NT)
  discount_NT = masks.keep(discount_NT, mask_NT)

  def step(later_N, turn):
    reward_N, discount_N, mask_N = turn
    return_N = jnp.where(mask_N, reward_N + discount_N * later_N, later_N)
    return return_N, return_N

  turns = (reward_NT.T, discount_NT.T, mask_NT.T)
  _, return_TN = jax.lax.scan(step, jnp.zeros_like(reward_NT[:, 0]), turns, reverse=True)
  return masks.keep(return_TN.T, mask_NT)


def attempt_discounts(mask_NAT: jax.Array, *, gamma_step: float, gamma_traj: float) -> jax.Array:
  """Discount from each turn to the next played one of the trial, 0 in masked places.

      gamma_step inside an attempt, gamma_traj from the last turn of an attempt to the next attempt

  For `varying_returns` and `advantages.gae_discounted` on a trial laid out as [N, A*T].
  """
  chex.assert_rank(mask_NAT, 3)
  chex.assert_type(mask_NAT, bool)
  last_NAT = mask_NAT & ~jnp.pad(mask_NAT[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
  return masks.keep(jnp.where(last_NAT, gamma_traj, gamma_step), mask_NAT)


def cross_episode_returns_paper(
  reward_NAT: jax.Array, mask_NAT: jax.Array, *, gamma_step: float, gamma_traj: float
) -> CrossReturns:
  """An attempt's turns share one bonus, the later attempts' returns discounted by attempt only.

      play[a, t] = G[a, t] + sum_{b > a} gamma_traj^(b-a) G[b, 0],   G[a, t] inside attempt a
      reflect[a] = play[a+1, 0] = sum_{b > a} gamma_traj^(b-a-1) G[b, 0]

  LaMer (2512.16848) Eq. 4; the reflection's line is our reading (the paper gives turns only).
  """
  chex.assert_rank(reward_NAT, 3)
  chex.assert_equal_shape([reward_NAT, mask_NAT])
  N, A, T = reward_NAT.shape
  own_NT = discounted_returns(
    reward_NAT.reshape(N * A, T), mask_NAT.reshape(N * A, T), gamma=gamma_step
  )
  own_NAT = own_NT.reshape(N, A, T)
  first_NA = own_NAT[:, :, 0]
  trial_NA = discounted_returns(first_NA, mask_NAT[:, :, 0], gamma=gamma_traj)
  reflect_NA = _next_attempt(trial_NA)
  play_NAT = own_NAT + gamma_traj * reflect_NA[:, :, None]
  return CrossReturns(masks.keep(play_NAT, mask_NAT), reflect_NA)


def cross_episode_returns_recursive(
  reward_NAT: jax.Array, mask_NAT: jax.Array, *, gamma_step: float, gamma_traj: float
) -> CrossReturns:
  """One running return through the whole trial: later attempts are discounted by turns as well.

      play[a, t] = r[a, t] + gamma_step play[a, t+1]       inside an attempt
      play[a, last] = r[a, last] + gamma_traj play[a+1, 0]
      reflect[a] = play[a+1, 0]

  What LaMer's release computes (papers differ from code here: the bonus shrinks with the number
  of turns before the end of the attempt, and with the length of later attempts).
  """
  chex.assert_rank(reward_NAT, 3)
  chex.assert_equal_shape([reward_NAT, mask_NAT])
  N, A, T = reward_NAT.shape
  discount_NAT = attempt_discounts(mask_NAT, gamma_step=gamma_step, gamma_traj=gamma_traj)
  play_NT = varying_returns(
    reward_NAT.reshape(N, A * T), discount_NAT.reshape(N, A * T), mask_NAT.reshape(N, A * T)
  )
  play_NAT = play_NT.reshape(N, A, T)
  return CrossReturns(play_NAT, _next_attempt(play_NAT[:, :, 0]))


def _next_attempt(value_NA: jax.Array) -> jax.Array:
  """Attempt a+1's value at attempt a, 0 at the last one."""
  return jnp.pad(value_NA[:, 1:], ((0, 0), (0, 1)))
