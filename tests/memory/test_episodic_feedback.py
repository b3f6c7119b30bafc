"""What feedback does to the Q-values of an episodic memory: updates worked by hand, races, what is told twice."""

import math

import numpy as np
import pytest

from memrl_jax.memory.episodic import Feedback
from memrl_jax.ops import utility
from tests.memory import episodes_by_hand
from tests.memory.episodes_by_hand import pay, put, q_of, set_q

make = episodes_by_hand.make


def test_ema_by_hand(make):
  # From 0 to a reward of 1 at alpha .3, the rest of the way is .70, .49, .34, .17 (n=5), .08 (7), .01 (13).
  memory, left = make(), []
  (id,) = put(memory, "0.8")
  for _ in range(13):
    left.append(1 - pay(memory, id, 1.0).q[id][1])
  got = [round(left[n - 1], 2) for n in (1, 2, 3, 5, 7, 13)]
  assert got == [0.70, 0.49, 0.34, 0.17, 0.08, 0.01]
  assert memory.memory.get("a", [id])[0].data["visits"] == 13


def test_mean_and_variance_of_q():
  """Stationary: mean beta, variance alpha/(2-alpha) Var(r): .1765 for +-1, so SD .420; 0/1: SD .210."""
  rng = np.random.default_rng(0)
  for reward_N in (rng.choice([-1.0, 1.0], 100_000), rng.choice([0.0, 1.0], 100_000)):
    q, path = 0.0, []
    for reward in reward_N:
      q += utility.td(q, reward, 0.0, step=0.3, gamma=0.0)
      path.append(q)
    path = np.array(path[100:])
    # Neighbours correlate by .7: (1 + .7) / (1 - .7) = 5.7 times fewer independent values.
    se = np.std(path) / math.sqrt(len(path) / 5.7)
    assert abs(path.mean() - reward_N.mean()) < 3 * se
    assert path.var() == pytest.approx(0.3 / 1.7 * reward_N.var(), rel=0.03)
  # While it converges: E Q_n = 1 - .7^n, and the spread comes from 0.
  q_R = np.zeros(50_000)
  for n in range(1, 5):
    q_R += utility.td(q_R, rng.choice([0.0, 1.0], 50_000, p=[0.2, 0.8]), 0.0, step=0.3, gamma=0.0)
    assert q_R.mean() == pytest.approx(0.8 * (1 - 0.7**n), abs=3 * 0.4 / math.sqrt(50_000))


def test_duplicates_compound_in_order_and_one_step_is_one_commit(make):
  memory = make()
  a, b = put(memory, "0.8", "0.7")
  version = memory.memory.version
  both = ((a, version), (b, version))
  paid = memory.feedback(
    "a", [Feedback("1", True, both), Feedback("2", False, both[:1]), Feedback("3", True, both[:1])]
  )
  assert paid.q[a] == (0.0, pytest.approx(((0.3 * 0.7 - 0.3) * 0.7) + 0.3))  # .3, -.09, .237
  assert paid.q[b] == (0.0, 0.3) and paid.version == version + 1
  entry = memory.memory.get("a", [a])[0]
  assert (entry.data["visits"], entry.data["wins"], entry.data["last"]) == (3, 2, 1.0)
  lineage = memory.memory.store.lineage(a)
  assert [outcome.reward for _, outcome in lineage.reads] == [1.0, -1.0, 1.0]


def test_floor_and_plain_mean_and_rewards_of_the_config(make):
  floored = make(q_success=0.5, q_floor=0.0, reward_failure=-1.0)
  (id,) = put(floored, "0.8")
  read = ((id, floored.memory.version),)
  assert floored.feedback("a", [Feedback("x", False, read)]).q[id] == (0.5, pytest.approx(0.05))
  assert floored.feedback("a", [Feedback("y", False, read)]).q[id][1] == 0.0
  mean = make(step="1/n", q_success=0.9)
  (id,) = put(mean, "0.8")
  pay(mean, id, 1.0, -1.0, 0.5, 1.0)
  assert q_of(mean, id) == [pytest.approx(1.5 / 4)]  # the first value is forgotten
  still = make(alpha=0.0)
  (id,) = put(still, "0.8")
  assert pay(still, id, 1.0).q[id] == (0.0, 0.0)


def test_the_next_state_is_worth_its_best_memory(make):
  memory = make(gamma=0.5, k1=2, delta=0.3)
  a, b, c = put(memory, "0.8", "0.7", "0.6")
  set_q(memory, {b: 0.4, c: 9.0})
  # The pool of "q" is a and b (k1): max Q' = .4; Q = 0 + .3 (1 + .5 * .4).
  assert pay(memory, a, 1.0, next_query="q").q[a][1] == pytest.approx(0.36)
  assert pay(memory, b, 0.0).q[b][1] == pytest.approx(0.4 * 0.7)  # the task is over
  # An empty next pool is worth nothing.
  assert pay(memory, c, 1.0, next_query="nowhere").q[c][1] == pytest.approx(9 + 0.3 * (1 - 9))


def test_credit_reaches_those_it_was_written_with(make):
  # d was written with b and c in view, those with a: a diamond. gamma lambda = .9 * .5 = .45.
  memory = make(gamma=0.9, trace=0.5, alpha=0.1, k1=9)
  (a,) = put(memory, "0.9")
  (b,) = put(memory, "0.8", reads=((a, 1),))
  (c,) = put(memory, "0.7", reads=((a, 1), (b, 2)))  # so b is one and two generations from d
  (d,) = put(memory, "0.6", reads=((b, 2), (c, 3), (999, 1)))
  paid = pay(memory, d, 1.0)
  assert {id: round(q, 6) for id, (_, q) in paid.q.items()} == {
    d: 0.1, b: 0.045, c: 0.045, a: 0.02025  # a once, not once a path
  }  # fmt: skip
  visits = {entry.id: entry.data["visits"] for entry in memory.memory.entries("a")}
  assert visits == {a: 0, b: 0, c: 0, d: 1}
  # One that was shown itself is updated as such, and not as an ancestor too.
  paid = memory.feedback("a", [Feedback("z", False, ((d, 4), (b, 4)), reward=0.0)])
  assert paid.q[b][1] == pytest.approx(0.045 * 0.9) and paid.q[c][1] < 0.045


def test_feedback_twice_unknown_removed_or_of_another_tenant(make):
  memory = make()
  a, b = put(memory, "0.8", "0.7")
  (theirs,) = put(memory, "0.8", tenant="b")
  version = memory.memory.version
  reads = (
    (a, version), (b, version), (theirs, version), (a, version + 9), (77, version), (a, 0), (0, 1),
    (-1, 1), (2**70, 1), (True, 1), ("1", 1), (None, None), (1.0, 1),
  )  # fmt: skip
  memory.memory.remove("a", [b])
  item = Feedback("x", True, reads)
  paid = memory.feedback("a", [item, item])
  assert (paid.unknown, paid.gone, paid.repeated) == (11, 1, 1) and list(paid.q) == [a]
  again = memory.feedback("a", [item])
  assert again == (paid.version, {}, 0, 0, 1) and memory.memory.version == paid.version
  assert q_of(memory, theirs, tenant="b") == [0.0] and memory.stats("a")["unknown"] == 11
  # The same name in another tenant is another feedback, and the tenants' lineages do not mix.
  memory.feedback("b", [Feedback("x", False, ((theirs, version),))])
  outcomes = [memory.memory.store.lineage(id).mean_reward for id in (a, theirs)]
  assert outcomes == [1.0, -1.0]
  for wrong in (Feedback("", True), Feedback("n", True, (), math.nan), Feedback("\ud800", True)):
    with pytest.raises(ValueError, match="give a"):
      memory.feedback("a", [wrong])


def test_a_failed_write_changes_nothing_and_can_be_repeated(make, monkeypatch):
  memory = make()
  (id,) = put(memory, "0.8")
  item = Feedback("x", True, ((id, 1),))
  with monkeypatch.context() as patch:
    patch.setattr(
      memory.memory.store, "commit", lambda *_, **__: (_ for _ in ()).throw(OSError(28))
    )
    with pytest.raises(OSError):
      memory.feedback("a", [item])
  assert q_of(memory, id) == [0.0] and memory.stats("a")["feedback"] == 0
  assert memory.feedback("a", [item]).q == {id: (0.0, 0.3)}


def test_a_change_made_meanwhile_is_not_written_over(make, monkeypatch):
  memory = make()
  (id,) = put(memory, "0.8")
  commit = memory.memory.commit

  def late(ops=(), **how):
    monkeypatch.undo()
    memory.memory.change("a", id, score=0.5)
    return commit(ops, **how)

  monkeypatch.setattr(memory.memory, "commit", late)
  paid = memory.feedback("a", [Feedback("x", True, ((id, 1),))])
  assert paid.q == {id: (0.5, pytest.approx(0.5 + 0.3 * 0.5))} and q_of(memory, id) == [0.65]


def test_a_useful_failure_rises_above_a_useless_success(make):
  memory = make(k1=2, k2=1, lambda_=0.6)  # at .5 two that disagree tie
  (useless,) = put(memory, "0.71")
  (lesson,) = put(memory, "0.7", success=False)
  assert memory.suggest("a", "q")[0].id == useless
  for _ in range(5):
    pay(memory, useless, -1.0)
    pay(memory, lesson, 1.0)
  (best,) = memory.suggest("a", "q")
  assert best.id == lesson and not best.success and best.q == pytest.approx(0.83, abs=0.01)
