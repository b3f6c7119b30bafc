"""An open mean adds up over any split, and what is masked has neither value nor gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import masks


def test_mean_of_parts_is_the_mean_of_the_whole_and_not_the_mean_of_means():
  value_BT = jnp.array([[1.0, 2.0, 3.0], [10.0, 0.0, 0.0]])
  mask_BT = jnp.array([[True, True, True], [True, False, False]])
  first = masks.open_sum(value_BT[:1], mask_BT[:1])
  second = masks.open_sum(value_BT[1:], mask_BT[1:])
  # (1 + 2 + 3 + 10) / 4 = 4; the mean of means would be (2 + 10) / 2 = 6.
  assert masks.close(masks.add(first, second)) == pytest.approx(4.0)
  assert masks.close(masks.open_sum(value_BT, mask_BT)) == pytest.approx(4.0)
  assert (masks.close(first) + masks.close(second)) / 2 == pytest.approx(6.0)


def test_nothing_counted_is_zero_with_zero_gradient():
  def mean(value_BT):
    return masks.close(masks.open_sum(value_BT, jnp.zeros((2, 2), bool)))

  value, gradient_BT = jax.value_and_grad(mean)(jnp.full((2, 2), jnp.nan))
  assert value == 0.0
  np.testing.assert_array_equal(gradient_BT, np.zeros((2, 2)))


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e30])
def test_poison_behind_the_mask_reaches_neither_value_nor_gradient(poison):
  mask_BT = jnp.array([[True, False]])

  def mean_exp(value_BT):
    return masks.close(masks.open_sum(jnp.exp(masks.keep(value_BT, mask_BT)), mask_BT))

  value, gradient_BT = jax.jit(jax.value_and_grad(mean_exp))(jnp.array([[1.0, poison]]))
  assert value == pytest.approx(np.e, rel=1e-6)
  np.testing.assert_allclose(gradient_BT, [[np.e, 0.0]], rtol=1e-6)


def test_bfloat16_parts_are_added_in_float32():
  # 1 + 1/512 is not a bfloat16 number, 512 ones and 1/512 is lost in a bfloat16 sum.
  value_BT = jnp.concatenate([jnp.ones((1, 512)), jnp.full((1, 512), 1 / 512)], 1)
  total = masks.open_sum(value_BT.astype(jnp.bfloat16), jnp.ones((1, 1024), bool)).total
  assert float(total) == 513.0


def test_a_mask_of_numbers_is_refused():
  with pytest.raises(AssertionError):
    masks.open_sum(jnp.ones((1, 2)), jnp.ones((1, 2)))
