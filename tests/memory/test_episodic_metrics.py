"""What is reported of a run of MemRL, by hand."""

import numpy as np
import pytest

from memrl_jax.memory import episodic_metrics as metrics

RUN_ET = np.array(
  [[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 0], [1, 0, 1, 0]], bool
)  # 4 epochs, 4 tasks


def test_success_and_forgetting_by_hand():
  assert metrics.last_epoch_accuracy(RUN_ET) == 0.5
  np.testing.assert_allclose(metrics.cumulative_success(RUN_ET), [0.5, 0.75, 0.75, 0.75])
  np.testing.assert_allclose(metrics.forgetting(RUN_ET), [0.25, 0.25, 0.0])  # tasks 2, 1, none
  assert metrics.forgetting_rate(RUN_ET) == pytest.approx(1 / 6)
  assert np.isnan(metrics.forgetting_rate(RUN_ET[:1]))
  rng = np.random.default_rng(0)
  for _ in range(20):
    run_ET = rng.random((6, 9)) < 0.4
    csr_E = metrics.cumulative_success(run_ET)
    assert (np.diff(csr_E) >= 0).all() and csr_E[-1] >= metrics.last_epoch_accuracy(run_ET)
  # Transfer: held-out success of the first of the epochs that validation likes best.
  assert metrics.transfer(RUN_ET, np.array([0.1, 0.6, 0.6, 0.2])) == 0.5
  assert metrics.transfer(RUN_ET, np.array([0.1, 0.2, 0.6, 0.2])) == 0.25
  for wrong in (RUN_ET.astype(float), RUN_ET[0], RUN_ET[:0]):
    with pytest.raises(ValueError, match="give booleans"):
      metrics.last_epoch_accuracy(wrong)
  with pytest.raises(ValueError, match="give one an epoch"):
    metrics.transfer(RUN_ET, np.array([1.0]))


def test_q_against_success_by_hand():
  q_N = np.array([-0.9, -0.1, 0.1, 0.4, 0.9, 1.0])
  success_N = np.array([0, 0, 1, 0, 1, 1], bool)
  worked_N = np.array([0, 1, 1, 0, 1, 1], bool)
  found = metrics.by_q(q_N, success_N, worked_N, np.array([-1.0, 0.0, 0.5, 1.0]))
  np.testing.assert_array_equal(found.count_B, [2, 2, 2])  # 1.0 is in the last
  np.testing.assert_allclose(found.success_B, [0, 0.5, 1])
  np.testing.assert_allclose(found.failed_B, [0.5, 0.5, 0])
  # Middles -.5, .25, .75 against 0, .5, 1: r = .625 / sqrt(.79167 * .5) = .9934.
  assert found.pearson == pytest.approx(0.99340, abs=1e-4)
  # Raw values: means .2333, .5; r = 1.6 / sqrt(2.4933... * 1.5), from the sums of squares.
  assert metrics.pearson(q_N, success_N) == pytest.approx(
    np.sum((q_N - q_N.mean()) * (success_N - 0.5)) / np.sqrt(np.sum((q_N - q_N.mean()) ** 2) * 1.5)
  )
  assert metrics.pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1.0)
  assert np.isnan(metrics.pearson([1, 1], [0, 1])) and np.isnan(metrics.pearson([], []))
  empty = metrics.by_q(q_N[:0], success_N[:0], worked_N[:0], np.array([-1.0, 0.0, 1.0]))
  assert empty.count_B.tolist() == [0, 0] and np.isnan(empty.pearson)
