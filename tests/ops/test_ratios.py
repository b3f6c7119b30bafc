"""Ratios and KL estimators: hand numbers, gradients, and log-probs that only padding holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import divergence, ratios

LOG2 = np.log(2.0)
MASK_BT = jnp.array([[True, True, False], [True, False, False], [False, False, False]])
LOGP_BT = jnp.array([[LOG2, 3 * LOG2, 9.0], [LOG2, 9.0, 9.0], [9.0, 9.0, 9.0]])
OLD_BT = jnp.zeros((3, 3))


def test_token_ratio_by_hand():
  ratio_BT = ratios.token_ratio(LOGP_BT, OLD_BT, MASK_BT)
  np.testing.assert_allclose(
    ratio_BT, [[2.0, 8.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]], rtol=1e-6
  )


def test_sequence_ratio_is_the_geometric_mean_of_the_rows_tokens():
  # sqrt(2 * 8) = 4; the row of one token keeps its own 2; the row without tokens is 1.
  for ratio in (ratios.sequence_ratio, ratios.sequence_ratio_token):
    ratio_BT = ratio(LOGP_BT, OLD_BT, MASK_BT)
    np.testing.assert_allclose(
      ratio_BT, [[4.0, 4.0, 1.0], [2.0, 1.0, 1.0], [1.0, 1.0, 1.0]], rtol=1e-6
    )


def test_gradients_of_the_two_sequence_ratios():
  # ds/dlogp_t = s / |y|, so the sum over the row's tokens has gradient s = 4 at each token; the
  # token form has ds_t/dlogp_t = s and nothing across tokens. The first token alone tells them
  # apart: 4 / 2 at both tokens against 4 at the first.
  def first(ratio):
    return jax.grad(lambda logp_BT: ratio(logp_BT, OLD_BT, MASK_BT)[0, 0])(LOGP_BT)[0]

  np.testing.assert_allclose(first(ratios.sequence_ratio), [2.0, 2.0, 0.0], rtol=1e-6)
  np.testing.assert_allclose(first(ratios.sequence_ratio_token), [4.0, 0.0, 0.0], rtol=1e-6)


def test_truncation_caps_from_above_only_and_is_constant():
  def weight(logp_BT):
    return ratios.truncated_importance_weight(logp_BT, OLD_BT, MASK_BT, cap=3.0)

  np.testing.assert_allclose(weight(LOGP_BT)[0], [2.0, 3.0, 1.0], rtol=1e-6)
  np.testing.assert_allclose(weight(-LOGP_BT)[0], [0.5, 0.125, 1.0], rtol=1e-6)
  gradient_BT = jax.grad(lambda logp_BT: weight(logp_BT).sum())(LOGP_BT)
  np.testing.assert_array_equal(gradient_BT, np.zeros((3, 3)))


def test_kl_estimators_by_hand():
  # d = log 2: k1 = .693147, k2 = .693147^2 / 2 = .240227, k3 = 1/2 - 1 + .693147 = .193147.
  logp_BT, ref_BT, mask_BT = jnp.full((1, 1), LOG2), jnp.zeros((1, 1)), jnp.ones((1, 1), bool)
  for estimator, value in (
    (divergence.k1, 0.693147),
    (divergence.k2, 0.240227),
    (divergence.k3, 0.193147),
  ):
    np.testing.assert_allclose(estimator(logp_BT, ref_BT, mask_BT), [[value]], rtol=1e-5)


def test_k1_and_k3_are_unbiased_and_k2_is_not():
  # pi = (.7, .3), ref = (.4, .6): KL = .7 log(7/4) + .3 log(1/2) = .183790. The expectation is
  # taken exactly, by weighing the two tokens with pi.
  pi, reference = np.array([[0.7, 0.3]]), np.array([[0.4, 0.6]])
  mask_BT = jnp.ones((1, 2), bool)

  def expectation(estimator):
    return float(jnp.sum(pi * estimator(jnp.log(pi), jnp.log(reference), mask_BT)))

  assert expectation(divergence.k1) == pytest.approx(0.183790, abs=1e-5)
  assert expectation(divergence.k3) == pytest.approx(0.183790, abs=1e-5)
  assert abs(expectation(divergence.k2) - 0.183790) > 1e-3


def test_equal_policies_are_at_zero_with_zero_gradient_of_k2_and_k3():
  logp_BT, mask_BT = jnp.array([[-0.3, -2.0]]), jnp.ones((1, 2), bool)
  for estimator in (divergence.k2, divergence.k3):
    gradient_BT = jax.grad(lambda x, f=estimator: f(x, logp_BT, mask_BT).sum())(logp_BT)
    np.testing.assert_allclose(gradient_BT, np.zeros((1, 2)), atol=1e-7)


EVERY = [
  ratios.token_ratio,
  ratios.sequence_ratio,
  ratios.sequence_ratio_token,
  divergence.k1,
  divergence.k2,
  divergence.k3,
]


@pytest.mark.parametrize("function", EVERY)
@pytest.mark.parametrize("poison", [np.nan, 1e30, -np.inf])
def test_poison_behind_the_mask_changes_neither_value_nor_gradient(function, poison):
  def total(logp_BT, old_BT):
    return jnp.sum(jnp.where(MASK_BT, function(logp_BT, old_BT, MASK_BT), 0.0))

  run = jax.jit(jax.value_and_grad(total))
  clean_value, clean_BT = run(LOGP_BT, OLD_BT)
  value, gradient_BT = run(jnp.where(MASK_BT, LOGP_BT, poison), jnp.where(MASK_BT, OLD_BT, jnp.nan))
  np.testing.assert_array_equal(value, clean_value)
  np.testing.assert_array_equal(gradient_BT, clean_BT)
  assert np.all(np.isfinite(gradient_BT)) and np.all(np.asarray(gradient_BT)[~MASK_BT] == 0)


@pytest.mark.parametrize("function", EVERY)
def test_the_old_policy_is_a_constant(function):
  gradient_BT = jax.grad(lambda old_BT: function(LOGP_BT, old_BT, MASK_BT).sum())(OLD_BT)
  np.testing.assert_array_equal(gradient_BT, np.zeros((3, 3)))


def test_a_huge_log_ratio_stays_finite():
  # exp(1000) is inf in float32, and 0 * inf is NaN: an advantage of 0 must stay harmless.
  ratio_BT = ratios.token_ratio(
    jnp.zeros((1, 1)), jnp.full((1, 1), -1000.0), jnp.ones((1, 1), bool)
  )
  assert np.isfinite(ratio_BT).all() and float(0.0 * ratio_BT[0, 0]) == 0.0


def test_the_ratio_of_a_whole_row_is_the_product_of_its_tokens():
  old_BT = jnp.log(jnp.array([[0.5, 0.5, 0.9], [0.5, 0.2, 0.9]]))
  logp_BT = jnp.log(jnp.array([[0.6, 0.4, 0.1], [0.25, 0.1, 0.1]]))
  mask_BT = jnp.array([[True, True, False], [True, True, False]])
  ratio_BT = ratios.whole_sequence_ratio(logp_BT, old_BT, mask_BT)
  np.testing.assert_allclose(ratio_BT, [[0.96, 0.96, 1.0], [0.25, 0.25, 1.0]], rtol=1e-5)
  # The length-normalised one is its root.
  normal_BT = ratios.sequence_ratio(logp_BT, old_BT, mask_BT)
  np.testing.assert_allclose(ratio_BT[:, 0], normal_BT[:, 0] ** 2, rtol=1e-5)
  # Each token's slope is the ratio itself: d s / d log pi(y_t) = s.
  slope_BT = jax.grad(lambda x: ratios.whole_sequence_ratio(x, old_BT, mask_BT)[:, 0].sum())(
    logp_BT
  )
  np.testing.assert_allclose(slope_BT, [[0.96, 0.96, 0.0], [0.25, 0.25, 0.0]], rtol=1e-5)
