"""Credit: from rewards of trials to advantages of turns."""

import dataclasses

import numpy as np
import pytest

from memrl_jax.rollout import credit
from tests.rollout import trials as make

SHAPE = credit.Shape(4, 3, 3)
PLAIN = credit.CreditConfig(
  gamma_step=0.95, gamma_traj=0.6, batch_scale=False, invalid_penalty=0.5, weighting="row"
)
# experiments/lamer.md 1.4: attempts with rewards [0,0,0], [0,0], [0,10].
TABLE = ([0, 0, 0], [0, 0], [0, 10])
PAPER = [3.42, 3.42, 3.42, 5.70, 5.70, 5.70, 9.5, 9.5, 10]
RECURSIVE = [2.932, 3.087, 3.249, 5.415, 5.415, 5.700, 9.5, 9.5, 10]


def advantages(trials, config=PLAIN):
  metrics = credit.make(config, SHAPE)(trials)
  return [[turn.advantage for turn in trial.turns] for trial in trials], metrics


@pytest.mark.parametrize(("reading", "expected"), [("paper", PAPER), ("recursive", RECURSIVE)])
def test_reinforce_advantage_is_the_table_of_both_readings(reading, expected):
  config = dataclasses.replace(PLAIN, estimator="reinforce", cross_return=reading)
  (row,), _ = advantages([make.trial(0, 0, TABLE)], config)
  np.testing.assert_allclose(row, expected, atol=6e-4)


def test_gigpo_adds_own_attempt_against_the_group_and_return_against_the_anchor():
  # Two trials of one attempt, one turn, same anchor: rewards 10 and 0.
  # Episode: 10 - 5 = 5 and -5. Step: the same again. Total +-10.
  rows, _ = advantages([make.trial(0, 0, [[10]], [["s"]]), make.trial(0, 1, [[0]], [["s"]])])
  np.testing.assert_allclose(rows, [[10], [-10]])
  # Different anchors: a cluster of one gives no step term.
  rows, _ = advantages([make.trial(0, 0, [[10]], [["s"]]), make.trial(0, 1, [[0]], [["t"]])])
  np.testing.assert_allclose(rows, [[5], [-5]])


def test_a_reflection_is_paid_by_the_next_attempt_in_its_own_cluster():
  # Reflections of slot 0: returns 10 and 0 (the next attempt's), so +5 and -5 and no episode term.
  # Attempt 0 earned 0 in both, so its episode term is 0 - mean(0, 10, 0, 0) = -2.5; its step term
  # compares cross returns .6 * 10 = 6 and 0 at one anchor: +3 and -3.
  pair = [make.trial(0, i, [[0], [r]], [["s"], ["s"]]) for i, r in enumerate((10, 0))]
  rows, _ = advantages(pair)
  np.testing.assert_allclose(rows[0], [-2.5 + 3, 5, 7.5 + 5], atol=1e-5)
  np.testing.assert_allclose(rows[1], [-2.5 - 3, -5, -2.5 - 5], atol=1e-5)
  assert "episode" in pair[0].turns[1].advantage_terms
  assert pair[0].turns[1].advantage_terms["episode"] == 0.0


def test_released_reflections_carry_the_negative_offset_that_the_paper_does_not_ask_for():
  # Scored 0 in statistics over all rows: mean of (0, 0r, 10, 0, 0r, 0) = 10/6.
  pair = [make.trial(0, i, [[0], [r]], [["s"], ["s"]]) for i, r in enumerate((10, 0))]
  advantages(pair, dataclasses.replace(PLAIN, reflections="released", anchors="state"))
  for trial in pair:
    np.testing.assert_allclose(trial.turns[1].advantage_terms["episode"], -10 / 6, rtol=1e-5)


def test_gamma_traj_zero_cuts_credit_across_attempts_but_still_pays_the_reflection():
  pair = [make.trial(0, i, [[0], [r]], [["s"], ["s"]]) for i, r in enumerate((10, 0))]
  advantages(pair, dataclasses.replace(PLAIN, gamma_traj=0.0))
  assert pair[0].turns[0].advantage_terms["step"] == 0.0
  np.testing.assert_allclose(pair[0].turns[1].advantage_terms["step"], 5.0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_group_estimators_see_the_cross_episode_return(estimator):
  # The release trains them on per-attempt rewards alone (experiments/lamer.md 6.3). Attempt 0 earned 0 in
  # both trials; its cross-episode returns are 6 and 0. GRPO: +-3; leave-one-out: +-6.
  pair = [make.trial(0, i, [[0], [r]]) for i, r in enumerate((10, 0))]
  rows, _ = advantages(pair, dataclasses.replace(PLAIN, estimator=estimator))
  first = 3.0 if estimator == "grpo" else 6.0
  np.testing.assert_allclose([rows[0][0], rows[1][0]], [first, -first], atol=1e-5)


def test_ppo_is_gae_over_turns_with_gamma_traj_at_the_crossing():
  # lambda 1, values 0: advantage = discounted return. Attempt 0: one turn, then its reflection,
  # then 10. First turn: gamma_traj * 10 = 6 (paid once); the reflection: 10; the last turn: 10.
  single = make.trial(0, 0, [[0], [10]])
  config = dataclasses.replace(PLAIN, estimator="ppo", gae_lambda=1.0)
  (row,), _ = advantages([single], config)
  np.testing.assert_allclose(row, [6, 10, 10], atol=1e-5)
  # A critic that knows the returns leaves nothing; the target stays the return.
  for turn, value in zip(single.turns, (6.0, 10.0, 10.0), strict=True):
    turn.value = value
  (row,), _ = advantages([single], config)
  np.testing.assert_allclose(row, [0, 0, 0], atol=1e-5)
  np.testing.assert_allclose([t.value_target for t in single.turns], [6, 10, 10], atol=1e-5)


def test_a_group_without_spread_is_left_out_and_counted():
  even = [make.trial(0, i, [[1.0, 2.0]], [["s", "t"]]) for i in range(2)]
  spread = [make.trial(1, i, [[float(i)]], [["s"]]) for i in range(2)]
  rows, metrics = advantages(even + spread)
  assert rows[0] == rows[1] == [None, None]
  assert all(value != 0 for row in rows[2:] for value in row)
  assert metrics["credit/zero_spread"] == 0.5


def test_a_void_trial_changes_nothing_for_the_others():
  pair = [make.trial(0, 0, [[10]], [["s"]]), make.trial(0, 1, [[0]], [["s"]])]
  void = make.trial(0, 2, [[1000]], [["s"]])
  void.void = "environment crash"
  rows, _ = advantages([pair[0], void, pair[1]])
  np.testing.assert_allclose(rows[0] + rows[2], [10, -10])
  assert void.turns[0].advantage is None


def test_trajectory_weighting_counts_a_long_attempt_once():
  # Scores 3 (three turns) and 1 (one turn). Trajectories: mean 2. Rows: (3*3 + 1)/4 = 2.5.
  def pair():
    return [make.trial(0, 0, [[1, 1, 1]]), make.trial(0, 1, [[1]])]

  by_row, by_trajectory = pair(), pair()
  advantages(by_row)
  advantages(by_trajectory, dataclasses.replace(PLAIN, weighting="trajectory"))
  assert by_row[1].turns[0].advantage_terms["episode"] == pytest.approx(1 - 2.5)
  assert by_trajectory[1].turns[0].advantage_terms["episode"] == pytest.approx(1 - 2)


def test_an_invalid_response_is_penalised_in_both_terms():
  # Equal rewards; only the penalty .5 differs: +-.25 in the episode term and in the step term.
  pair = [make.trial(0, i, [[1.0]], [["s"]]) for i in range(2)]
  pair[1].turns[0].valid = False
  rows, _ = advantages(pair)
  np.testing.assert_allclose(rows, [[0.5], [-0.5]], atol=1e-6)


@pytest.mark.parametrize("estimator", ["gigpo", "hgpo", "grpo", "rloo"])
def test_order_of_trials_does_not_matter(estimator):
  rng = np.random.default_rng(0)

  def build():
    r = np.random.default_rng(1)
    return [
      make.trial(
        i % 2, i, [list(r.normal(size=2)), list(r.normal(size=3))], [["s", "t"], ["s", "u", "t"]]
      )
      for i in range(4)
    ]

  config = dataclasses.replace(PLAIN, estimator=estimator, batch_scale=True)
  first, second = build(), build()
  advantages(first, config)
  order = rng.permutation(4)
  advantages([second[i] for i in order], config)
  for a, b in zip(first, second, strict=True):
    np.testing.assert_allclose(
      [t.advantage for t in a.turns], [t.advantage for t in b.turns], atol=1e-5
    )


def test_similar_anchors_share_a_cluster():
  pair = [
    make.trial(0, i, [[float(i)]], [[anchor]])
    for i, anchor in enumerate(("a" * 40, "a" * 39 + "b"))
  ]
  rows, _ = advantages(pair, dataclasses.replace(PLAIN, anchors="similar", similarity=0.9))
  np.testing.assert_allclose(rows, [[-1.0], [1.0]], atol=1e-6)


@pytest.mark.parametrize(
  ("field", "value"), [("estimator", "gipo"), ("gamma_traj", 1.5), ("anchors", "none")]
)
def test_a_wrong_option_is_named_with_its_choices(field, value):
  with pytest.raises(ValueError, match=field):
    dataclasses.replace(PLAIN, **{field: value})
