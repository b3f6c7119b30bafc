"""Split comparisons of Complementary RL against its hand vectors, and their limit cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import advantages, aggregate, masks, ratios, subgroups, surrogates

# Two groups of eight, the first four of each guided. Guided of group 0 {1,1,1,0}, free {0,0,0,1}: mean
# .75, population std sqrt(.75 * .25) = .4330, so .25/.4330 = .5774 and -.75/.4330 = -1.7321, and the
# free half mirrored. Group 1 is the same with its guided half all solved, which says nothing.
SCORE_N = jnp.array([1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1], jnp.float32)
GROUP_N = jnp.repeat(jnp.arange(2), 8)
GUIDED_N = jnp.tile(jnp.arange(8) < 4, 2)
A, B = 0.5773503, 1.7320508


def all_of(score_N):
  return jnp.ones_like(score_N), jnp.ones(score_N.shape, bool)


def test_each_half_is_compared_with_itself():
  run = jax.jit(subgroups.split_mean_std, static_argnames=("num_groups", "eps"))
  split_N = run(SCORE_N, GROUP_N, GUIDED_N, *all_of(SCORE_N), num_groups=2, eps=0.0)
  free = [-A, -A, -A, B]
  np.testing.assert_allclose(split_N, [A, A, A, -B, *free, 0, 0, 0, 0, *free], rtol=1e-5)
  mean_N = subgroups.split_mean(SCORE_N, GROUP_N, GUIDED_N, *all_of(SCORE_N), num_groups=2)
  free = [-0.25, -0.25, -0.25, 0.75]
  np.testing.assert_allclose(mean_N, [0.25] * 3 + [-0.75, *free, 0, 0, 0, 0, *free], rtol=1e-6)
  # Pooled, group 0 is balanced (mean .5, std .5): +-1 by success alone, so being guided is paid.
  pooled_N = subgroups.pooled_mean_std(SCORE_N, GROUP_N, *all_of(SCORE_N), num_groups=2, eps=0.0)
  np.testing.assert_allclose(pooled_N[:8], [1, 1, 1, -1, -1, -1, -1, 1], rtol=1e-5)


def test_the_other_half_and_masked_rows_change_nothing():
  mask_N = jnp.arange(16) != 3  # guided {1,1,1,-}: nothing left to tell them apart
  score_N = jnp.where(GUIDED_N, SCORE_N, 7.0 * SCORE_N).at[3].set(jnp.nan)
  weight_N = jnp.ones(16).at[3].set(jnp.nan)
  arguments = (score_N, GROUP_N, GUIDED_N, weight_N, mask_N)
  split_N = subgroups.split_mean_std(*arguments, num_groups=2, eps=0.0)
  free = [-A, -A, -A, B]  # a factor of all scores of a half cancels
  np.testing.assert_allclose(split_N, [0, 0, 0, 0, *free, 0, 0, 0, 0, *free], rtol=1e-5)


def opened(loss, count):
  return masks.Open(jnp.float32(loss), jnp.float32(count))


@pytest.mark.parametrize(
  "guided,free,expected",
  [
    # 30 tokens of loss 1 beside 2 of loss 3: (1 + 3) / 2; one mean would say 36 / 32.
    (opened(30, 30), opened(6, 2), 2.0),
    (opened(30, 30), opened(0, 0), 1.0),
    (opened(0, 0), opened(6, 2), 3.0),
    (opened(0, 0), opened(0, 0), 0.0),
  ],
)
def test_half_and_half_whatever_their_lengths(guided, free, expected):
  np.testing.assert_allclose(subgroups.balanced(subgroups.Halves(guided, free)), expected)


@pytest.mark.parametrize("guided", [(True, True, False, False), (True,) * 4, (False,) * 4])
@pytest.mark.parametrize("mean", [aggregate.token_mean, aggregate.sequence_mean])
def test_factors_of_advantages_give_the_balanced_loss_and_gradient(mean, guided):
  rng = np.random.default_rng(1)
  logp_BT = jnp.asarray(-rng.uniform(0.1, 2, (4, 6)), jnp.float32)
  old_BT = logp_BT + jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
  mask_BT = jnp.asarray(np.arange(6) < np.array([6, 1, 2, 3])[:, None])
  advantage_B, guided_B = jnp.asarray(rng.normal(size=4), jnp.float32), jnp.array(guided)

  def loss(logp_BT, factor_B):
    ratio_BT = ratios.token_ratio(logp_BT, old_BT, mask_BT)
    scaled_BT = jnp.broadcast_to((factor_B * advantage_B)[:, None], mask_BT.shape)
    return surrogates.ppo_clip(ratio_BT, scaled_BT, mask_BT, eps_low=0.2, eps_high=0.3).loss_BT

  def by_halves(x):
    one_B = jnp.ones(4)
    opens = [mean(loss(x, one_B), part) for part in subgroups.halves(mask_BT, guided_B)]
    return subgroups.balanced(subgroups.Halves(*opens))

  count_B = jnp.sum(mask_BT, axis=1) if mean is aggregate.token_mean else jnp.ones(4)
  factor_B = subgroups.balance(count_B, guided_B, jnp.ones(4, bool))
  by_factor = jax.value_and_grad(lambda x: masks.close(mean(loss(x, factor_B), mask_BT)))
  for got, expected in zip(by_factor(logp_BT), jax.value_and_grad(by_halves)(logp_BT), strict=True):
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_the_extractor_is_paid_above_the_mean_of_those_that_train():
  # Means over the three with w > 0: (1 - 1 + .5) / 3 = 1/6. The cooled-down -1 and NaN padding are out.
  reward_N = jnp.array([1.0, -1.0, 0.5, -1.0, jnp.nan])
  weight_N = jnp.array([1.0, 0.5, 1.0, 0.0, jnp.nan])
  mask_N = jnp.array([True, True, True, True, False])
  advantage_N = jax.jit(subgroups.extractor)(reward_N, weight_N, mask_N)
  np.testing.assert_allclose(advantage_N, [5 / 6, -7 / 12, 1 / 3, 0, 0], rtol=1e-5)
  # No std: a batch with little spread is not blown up; one of equals teaches nothing.
  full_N = jnp.ones(3, bool)
  small_N = subgroups.extractor(jnp.array([0.1, 0.1, 0.1]), jnp.ones(3), full_N)
  np.testing.assert_allclose(small_N, 0, atol=1e-7)


@pytest.mark.parametrize("ratio,weight", [(1.5, 1.1), (1.05, 1.05), (0.5, 0.9)])
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_keeps_the_gradient_of_every_token(ratio, weight, advantage):
  # With eps .1 the weight is clip(rho) on either sign of A, and never 0: that would be PPO.
  old_BT, mask_BT = jnp.array([[-1.0, -2.0]]), jnp.ones((1, 2), bool)
  logp_BT = old_BT + np.log(ratio)

  def loss(x):
    rho_BT = ratios.token_ratio(x, old_BT, mask_BT)
    wanted_BT = jnp.full((1, 2), advantage)
    parts = surrogates.cispo(rho_BT, x, wanted_BT, mask_BT, eps_low=0.1, eps_high=0.1)
    return masks.close(aggregate.token_mean(parts.loss_BT, mask_BT))

  np.testing.assert_allclose(jax.grad(loss)(logp_BT), -weight * advantage / 2, rtol=1e-5)


def test_row_weights_reach_the_halves():
  # One guided trajectory of two rows (score 1) and one of one row (0): each counts once, mean .5.
  score_N, group_N = jnp.array([1.0, 1.0, 0.0]), jnp.zeros(3, jnp.int32)
  full_N = jnp.ones(3, bool)
  weight_N = advantages.trajectory_weights(jnp.array([0, 0, 1]), full_N, num_trajectories=2)
  split_N = subgroups.split_mean(score_N, group_N, full_N, weight_N, full_N, num_groups=1)
  np.testing.assert_allclose(split_N, [0.5, 0.5, -0.5])
