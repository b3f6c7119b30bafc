"""The balance of Complementary RL's halves and the pay of its extractor, against hand vectors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import aggregate, masks, ratios, subgroups, surrogates


def half_and_half(opens):
  """Each half's mean first, then the mean of those that are not empty."""
  means = [masks.close(one) for one in opens if one.count > 0]
  return sum(means) / max(len(means), 1)


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
    halves = (mask_BT & guided_B[:, None], mask_BT & ~guided_B[:, None])
    return half_and_half([mean(loss(x, jnp.ones(4)), half) for half in halves])

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
