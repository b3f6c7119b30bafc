"""Returns against the worked example of both readings of LaMer's Eq. 4, and their limit cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import returns

EAGER = [returns.cross_episode_returns_paper, returns.cross_episode_returns_recursive]
READINGS = PAPER, RECURSIVE = [jax.jit(reading) for reading in EAGER]

# Attempts with rewards [0, 0, 0], [0, 0], [0, 10].
REWARD_NAT = jnp.array([[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 10.0, 0.0]]])
MASK_NAT = jnp.array([[[True, True, True], [True, True, False], [True, True, False]]])


def random_trials(seed):
  """Trials of 1 to 4 attempts with 1 to 5 turns each."""
  rng = np.random.default_rng(seed)
  N, A, T = 6, 4, 5
  attempts_N = rng.integers(1, A + 1, N)
  turns_NA = rng.integers(1, T + 1, (N, A))
  mask_NAT = np.arange(T) < turns_NA[:, :, None]
  mask_NAT &= (np.arange(A) < attempts_N[:, None])[:, :, None]
  return rng.normal(size=(N, A, T)).astype(np.float32), mask_NAT


def test_return_to_go_by_hand():
  # 1 + .5 (2 + .5 * 4) = 3,  2 + .5 * 4 = 4,  4;  and 3 alone.
  reward_NT = jnp.array([[1.0, 2.0, 4.0], [3.0, 7.0, 7.0]])
  mask_NT = jnp.array([[True, True, True], [True, False, False]])
  return_NT = returns.discounted_returns(reward_NT, mask_NT, gamma=0.5)
  np.testing.assert_allclose(return_NT, [[3.0, 4.0, 4.0], [3.0, 0.0, 0.0]])


def test_a_masked_turn_is_passed_over_without_a_discount():
  reward_NT = jnp.array([[1.0, 99.0, 2.0]])
  mask_NT = jnp.array([[True, False, True]])
  return_NT = returns.discounted_returns(reward_NT, mask_NT, gamma=0.5)
  np.testing.assert_allclose(return_NT, [[2.0, 0.0, 2.0]])


def test_worked_example_of_the_paper_reading():
  # Attempt 2 starts with .95 * 10 = 9.5; attempt 1 gets .6 * 9.5 = 5.7 on each turn;
  # attempt 0 gets .6 * 0 + .36 * 9.5 = 3.42 on each turn.
  cross = PAPER(REWARD_NAT, MASK_NAT, gamma_step=0.95, gamma_traj=0.6)
  expected = [[3.42, 3.42, 3.42], [5.70, 5.70, 0.0], [9.5, 10.0, 0.0]]
  np.testing.assert_allclose(cross.play_NAT[0], expected, rtol=1e-5)
  np.testing.assert_allclose(cross.reflect_NA[0], [5.70, 9.5, 0.0], rtol=1e-5)


def test_worked_example_of_the_recursive_reading():
  # Attempt 1: .6 * 9.5 = 5.7, .95 * 5.7 = 5.415; attempt 0: .6 * 5.415 = 3.249, 3.08655, 2.93222.
  cross = RECURSIVE(REWARD_NAT, MASK_NAT, gamma_step=0.95, gamma_traj=0.6)
  expected = [[2.9322225, 3.08655, 3.249], [5.415, 5.7, 0.0], [9.5, 10.0, 0.0]]
  np.testing.assert_allclose(cross.play_NAT[0], expected, rtol=1e-5)
  np.testing.assert_allclose(cross.reflect_NA[0], [5.415, 9.5, 0.0], rtol=1e-5)


def test_both_readings_agree_without_a_discount_inside_attempts():
  reward_NAT, mask_NAT = random_trials(0)
  paper, recursive = [f(reward_NAT, mask_NAT, gamma_step=1.0, gamma_traj=0.7) for f in READINGS]
  np.testing.assert_allclose(paper.play_NAT, recursive.play_NAT, rtol=1e-4, atol=1e-5)
  np.testing.assert_allclose(paper.reflect_NA, recursive.reflect_NA, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reading", READINGS)
def test_no_credit_crosses_attempts_at_gamma_traj_zero(reading):
  reward_NAT, mask_NAT = random_trials(1)
  cross = reading(reward_NAT, mask_NAT, gamma_step=0.9, gamma_traj=0.0)
  own_NT = returns.discounted_returns(reward_NAT.reshape(24, 5), mask_NAT.reshape(24, 5), gamma=0.9)
  np.testing.assert_allclose(cross.play_NAT.reshape(24, 5), own_NT, rtol=1e-5, atol=1e-6)
  # A reflection still answers for the attempt that it opens.
  np.testing.assert_allclose(cross.reflect_NA[:, :-1], cross.play_NAT[:, 1:, 0])


@pytest.mark.parametrize("reading", READINGS)
def test_a_reflection_has_the_return_of_the_next_attempts_first_turn(reading):
  reward_NAT, mask_NAT = random_trials(2)
  cross = reading(reward_NAT, mask_NAT, gamma_step=0.9, gamma_traj=0.6)
  np.testing.assert_allclose(cross.reflect_NA[:, :-1], cross.play_NAT[:, 1:, 0], rtol=1e-6)
  last_N = mask_NAT[:, :, 0].sum(1) - 1
  np.testing.assert_array_equal(cross.reflect_NA[np.arange(6), last_N], np.zeros(6))


def test_paper_reading_equals_the_sum_of_its_equation():
  reward_NAT, mask_NAT = random_trials(3)
  cross = PAPER(reward_NAT, mask_NAT, gamma_step=0.9, gamma_traj=0.6)
  N, A, T = reward_NAT.shape
  for n, a, t in np.ndindex(N, A, T):
    if not mask_NAT[n, a, t]:
      continue
    later = range(a + 1, A)
    own = sum(0.9 ** (u - t) * reward_NAT[n, a, u] * mask_NAT[n, a, u] for u in range(t, T))
    rest = sum(
      0.6 ** (b - a) * sum(0.9**u * reward_NAT[n, b, u] * mask_NAT[n, b, u] for u in range(T))
      for b in later
    )
    np.testing.assert_allclose(cross.play_NAT[n, a, t], own + rest, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reading", EAGER)
def test_padding_changes_nothing_and_jit_agrees(reading):
  reward_NAT, mask_NAT = random_trials(4)
  reading = functools.partial(reading, gamma_step=0.9, gamma_traj=0.6)
  clean = reading(reward_NAT, mask_NAT)
  poisoned = jax.jit(reading)(np.where(mask_NAT, reward_NAT, np.nan), mask_NAT)
  np.testing.assert_allclose(poisoned.play_NAT, clean.play_NAT, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(poisoned.reflect_NA, clean.reflect_NA, rtol=1e-5, atol=1e-6)
  wide = reading(
    np.pad(reward_NAT, ((0, 0), (0, 1), (0, 2)), constant_values=5.0),
    np.pad(mask_NAT, ((0, 0), (0, 1), (0, 2))),
  )
  np.testing.assert_allclose(wide.play_NAT[:, :-1, :-2], clean.play_NAT, rtol=1e-5, atol=1e-6)


def test_attempt_discounts_by_hand():
  discount_NAT = returns.attempt_discounts(MASK_NAT, gamma_step=0.95, gamma_traj=0.6)
  expected = [[0.95, 0.95, 0.6], [0.95, 0.6, 0.0], [0.95, 0.6, 0.0]]
  np.testing.assert_allclose(discount_NAT[0], expected)
