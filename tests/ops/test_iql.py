"""Implicit Q-learning: its losses by hand, and a chain where the data policy prefers the worse action."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import iql, masks


def test_expectile_by_hand_and_what_is_masked_changes_nothing():
  # .7 * 2^2 above, (1 - .7) * 1^2 below; the third does not count.
  error_B, mask_B = jnp.array([2.0, -1.0, jnp.nan]), jnp.array([True, True, False])
  total, count = iql.expectile(error_B, mask_B, tau=0.7)
  np.testing.assert_allclose([total, count], [0.7 * 4 + 0.3, 2], rtol=1e-6)
  grad_B = jax.grad(lambda e: iql.expectile(e, mask_B, tau=0.7).total)(error_B)
  np.testing.assert_allclose(grad_B, [2 * 0.7 * 2, -2 * 0.3, 0], rtol=1e-6)


@pytest.mark.parametrize("tau", [0.5, 0.7, 0.9])
def test_the_expectile_of_zero_and_one_is_tau(tau):
  # Where the slope is zero: tau (1 - v) = (1 - tau) v, so v = tau.
  sample_B, mask_B = jnp.array([0.0, 1.0]), jnp.ones(2, bool)
  slope = jax.grad(lambda v: masks.close(iql.expectile(sample_B - v, mask_B, tau=tau)))
  assert abs(slope(tau)) < 1e-6
  assert slope(tau - 0.1) < -0.05 and slope(tau + 0.1) > 0.05


def test_the_target_ends_with_the_attempt():
  reward_B, next_B = jnp.array([1.0, 2.0]), jnp.array([5.0, jnp.nan])
  done_B = jnp.array([False, True])
  np.testing.assert_allclose(iql.target(reward_B, next_B, done_B, gamma=0.5), [3.5, 2.0])


def test_the_q_loss_is_a_mean_over_twins_and_transitions():
  q_HB, target_B = jnp.array([[1.0, 7.0], [3.0, 7.0]]), jnp.array([0.0, jnp.nan])
  total, count = iql.q_loss(q_HB, target_B, jnp.array([True, False]))
  assert (total, count) == (1.0 + 9.0, 2.0)


# Two states: in the first, "stay" ends with .3 and "go" leads to the second, where "stay" ends with 0
# and "go" with 1. The data start in both, and go one time in ten.
FIRST, SECOND, STAY, GO = range(4)
GAMMA = 0.9
CHAIN = (
  [(FIRST, STAY, 0, 0.3, True)] * 9
  + [(FIRST, GO, SECOND, 0.0, False)]
  + [(SECOND, STAY, 0, 0.0, True)] * 9
  + [(SECOND, GO, 0, 1.0, True)]
)


def fitted(tau, pad=(0.0, 0), steps=1200):
  """Q of (first, stay), (first, go), (second, stay), (second, go); `pad` fills rows that do not count."""
  state, action, after, reward, done = (np.array(column) for column in zip(*CHAIN, strict=True))
  junk, row = pad
  fill = lambda column, value: np.concatenate([column, np.full(4, value, column.dtype)])  # noqa: E731
  data = iql.Transitions(
    np.eye(4, dtype=np.float32),
    fill(state, row),
    fill(action, row),
    fill(after, row),
    fill(reward.astype(np.float32), junk),
    fill(done, False),
  )
  critic = iql.init(jax.random.key(0), 4, 16)
  critic, loss = iql.fit(
    critic, data, len(CHAIN), jax.random.key(1),
    steps=steps, batch=24, tau=tau, gamma=GAMMA, learning_rate=5e-3, polyak=0.05,
  )  # fmt: skip
  pairs = np.array([(s, a) for s in (FIRST, SECOND) for a in (STAY, GO)])
  return np.asarray(iql.score(critic, data.table_UD[pairs[:, 0]], data.table_UD[pairs[:, 1]])), loss


def test_the_fit_ranks_the_better_action_first_although_the_data_prefer_the_other():
  # V(second) is the expectile of 0 (.9 of the data) and 1 (.1): tau .1 (1 - v) = (1 - tau) .9 v, so
  # v = .5 at tau = .9 and v = .1, the mean, at tau = .5. Hence Q(first, go) = .45 > .3, or .09 < .3.
  q, loss = fitted(0.9)
  np.testing.assert_allclose(q, [0.3, GAMMA * 0.5, 0.0, 1.0], atol=0.02)
  assert loss < 1e-3
  q, _ = fitted(0.5)
  np.testing.assert_allclose(q, [0.3, GAMMA * 0.1, 0.0, 1.0], atol=0.02)


def test_rows_that_do_not_count_change_nothing():
  np.testing.assert_array_equal(fitted(0.9, steps=5)[0], fitted(0.9, (np.nan, 3), steps=5)[0])
