"""An episodic memory over time: its cap, pruning and merging, tenants, and its life after a restart."""

import json

import numpy as np
import pytest

from memrl_jax.memory import embed, episodic, episodic_write
from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig, Feedback
from memrl_jax.memory.records import StoreError
from tests.memory import episodes_by_hand
from tests.memory.episodes_by_hand import Dial, pay, put, q_of, set_q

make = episodes_by_hand.make


# --- looking after it ----------------------------------------------------------------------------


def test_the_cap_holds_and_the_useful_and_every_key_stay(make):
  memory = make(capacity=20, delta=0.9995)  # no query finds two of these keys
  tasks = [f"0.{10 + 5 * n}" for n in range(5)]
  useful = put(memory, *tasks)
  for id in useful:
    pay(memory, id, 1.0)
  pay(memory, *put(memory, "0.95"), -1.0)  # worth least, and all that is known about its task
  for _ in range(5):
    put(memory, *tasks)
    assert memory.memory.store.count("a") <= 20
  entries = memory.memory.entries("a")
  assert {entry.key for entry in entries} == {*tasks, "0.95"}
  assert set(useful) <= {entry.id for entry in entries} and memory.memory.verify() == []


def test_few_visits_are_not_held_against_a_memory(make):
  # n = 0: 0 + .5; n = 8 at .1: .1 + .5 / 3 = .27. Without the bonus the second is worth more.
  for bonus, stays in ((0.5, 1), (0.0, 2)):
    memory = make(prune_bonus=bonus)
    put(memory, "0.8", "0.8")
    tried = memory.memory.entries("a")[1]
    memory.memory.change("a", 2, score=0.1, data=tried.data | {"visits": 8, "wins": 8})
    memory.prune("a", 1)
    assert [entry.id for entry in memory.memory.entries("a")] == [stays]


def test_prune_keeps_the_best_of_each_key_and_removes_what_failed(make):
  memory = make(prune_bonus=0.0, delta=0.995)
  put(memory, "0.8", "0.8", "0.8", "0.7", "0.7", "0.6")
  set_q(memory, {1: 0.2, 2: 0.9, 3: 0.5, 4: -0.5, 5: 0.1, 6: 0.0})
  # Best of the keys: 2 (.9), 5 (.1), 6 (0); then 3 (.5) before 4.
  assert memory.prune("a", 4) == 2 and [e.id for e in memory.memory.entries("a")] == [2, 3, 5, 6]
  pay(memory, 6, -1.0)
  assert memory.prune("a", 9, below=0.0) == 1  # 6 was tried and is at -.3
  assert memory.prune("a", 9) == 0 and memory.prune("nobody", 0) == 0
  assert put(memory, "0.9") == [7]  # ids never come again


def test_pruning_takes_keys_that_are_found_together_for_one(make):
  memory = make(
    prune_bonus=0.0, delta=0.5
  )  # the cosine of 0.80 and 0.75 is .6, of 0.10 and the others .08
  put(memory, "0.80", "0.75", "0.10")
  set_q(memory, {1: 0.9, 2: 0.8, 3: -0.5})
  memory.prune("a", 2)
  assert [entry.id for entry in memory.memory.entries("a")] == [1, 3]


def test_what_was_only_shown_beside_a_good_memory_goes_first(make):
  memory = make(prune_bonus=0.5)
  put(memory, "0.8", "0.8")
  entries = memory.memory.entries("a")
  memory.memory.change("a", 1, score=1.0, data=entries[0].data | {"visits": 40, "wins": 40})
  beside = entries[1].data | {"visits": 6, "wins": 6, "success": False}
  memory.memory.change("a", 2, score=1.0, data=beside)
  memory.prune("a", 1)
  assert [entry.id for entry in memory.memory.entries("a")] == [1]


def test_near_duplicates_become_one_with_the_evidence_of_all(make):
  memory = make(embedder=embed.Hash(256), build="script", merge_above=0.8)
  texts = (
    "open the fridge, take the apple, wash it in the sink",
    "open the fridge, take an apple, wash it in the sink",
    "walk north until the river, then build a raft",
  )
  ids = [
    memory.remember("a", [Episode(text, "wash the apple", "x", True, note=text)])[0].id
    for text in texts
  ]
  pay(memory, ids[0], 1.0)
  pay(memory, ids[1], 1.0, -1.0, 1.0)
  q = q_of(memory, *ids)
  assert memory.merge("a") == 1
  left = {entry.id: entry for entry in memory.memory.entries("a")}
  # Worth: .3 + .5 / sqrt 2 = .65 of the first against .237 + .5 / 2 = .49 of the second.
  assert left.keys() == {ids[0], ids[2]} and "the apple" in left[ids[0]].text
  assert left[ids[0]].score == pytest.approx((q[0] + 3 * q[1]) / 4)
  assert (left[ids[0]].data["visits"], left[ids[0]].data["wins"]) == (4, 3)
  assert memory.merge("a") == 0
  # Over the cap they are merged before anything is lost: the raft is the oldest, and stays.
  capped = make(embedder=embed.Hash(256), build="script", merge_above=0.8, capacity=2)
  for text in reversed(texts):
    capped.remember("a", [Episode(text, "wash the apple", "x", True, note=text)])
  left = [entry.text for entry in capped.memory.entries("a")]
  assert len(left) == 2 and "raft" in left[0] and "apple, wash" in left[1]


def test_a_key_keeps_its_best(make):
  memory = make(per_key=2, prune_bonus=0.0)
  put(memory, "0.8", "0.8")
  set_q(memory, {1: 0.5, 2: -0.2})
  assert put(memory, "0.8") == [3]  # at 0 it is worth more than -.2
  kept = memory.remember("a", [Episode(f"e{n}", "0.8", f"{n}", True) for n in range(3)])
  assert [one.id for one in kept] == [4, None, None]  # 4 for 3, of equals the later; then no room
  assert [entry.id for entry in memory.memory.entries("a")] == [1, 4]


def test_tenants_do_not_meet(make):
  memory = make(capacity=5)
  for tenant in ("a", "b"):
    put(memory, "0.8", "0.7", tenant=tenant)
  mine = [one.id for one in memory.suggest("a", "q")]
  assert mine == [1, 2] and [one.id for one in memory.suggest("b", "q")] == [3, 4]
  version, theirs = memory.memory.version, memory.memory.entries("b")
  paid = memory.feedback("a", [Feedback("x", True, ((3, version), (1, version)))])
  assert paid.unknown == 1 and memory.memory.entries("b") == theirs
  put(memory, *[f"0.{n}" for n in range(50, 60)])  # over the cap of "a"
  memory.prune("a", 0)
  assert memory.memory.entries("a") == [] and memory.memory.entries("b") == theirs
  assert put(memory, "0.8")  # empty, and open for more


# --- life ----------------------------------------------------------------------------------------


def live(memory, start, stop):
  """A life, each step a function of its number; what was shown."""
  seen = []
  for step in range(start, stop):
    rng = np.random.default_rng([5, step])
    found = memory.suggest("a", "q")
    reads = tuple(one.read for one in found)
    success = bool(rng.integers(2))
    memory.feedback("a", [Feedback(f"f{step}", success, reads)])
    task = f"0.{rng.integers(50, 99)}"
    memory.remember("a", [Episode(f"e{step}", task, f"t{step}", success, reads)])
    seen.append([(one.id, one.q, one.score) for one in found])
  return seen


def test_a_resumed_memory_goes_on_as_if_nothing_had_happened(tmp_path):
  config = EpisodicConfig(
    delta=0.0, build="trajectory", update="vanilla", explore="thompson", explore_rate=1.0, capacity=8,
    gamma=0.5, trace=0.5,
  )  # fmt: skip
  with Episodic.open(tmp_path, Dial(), config) as memory:
    live(memory, 0, 12)
    arrays, rest = memory.state()
    rest = json.loads(json.dumps(rest))
    after = live(memory, 12, 22)
    expected = memory.memory.store.fingerprint(), memory.state()
    live(memory, 22, 24)
  with Episodic.open(tmp_path, Dial(), config) as memory:
    memory.load(arrays, rest)
    assert live(memory, 12, 22) == after and any(after)
    assert (memory.memory.store.fingerprint(), memory.state()) == expected
    memory.reset()
    assert memory.suggest("a", "q") == [] and memory.state()[1]["version"] == 0
    assert put(memory, "0.8") == [1]


def test_names_survive_a_restart_and_rollback_restores_retrieval(tmp_path):
  config = EpisodicConfig(delta=0.0, build="trajectory", update="vanilla")
  item, episode = Feedback("x", True, ((1, 1),)), Episode("e", "0.8", "t", True)
  with Episodic.open(tmp_path, Dial(), config) as memory:
    memory.remember("a", [episode])
    memory.feedback("a", [item])
    then = memory.suggest("a", "q", frozen=True)
  with Episodic.open(tmp_path, Dial(), config) as memory:
    assert memory.suggest("a", "q", frozen=True) == then
    assert memory.feedback("a", [item]).repeated == 1
    assert memory.remember("a", [episode])[0].reason == episodic_write.BEFORE
    version = memory.memory.version
    pay(memory, 1, -1.0, -1.0)
    put(memory, "0.9")
    memory.memory.rollback(version)
    assert [(one.id, one.q) for one in memory.suggest("a", "q")] == [(1, 0.3)]
    memory.feedback("a", [Feedback("y", True, ((1, version),))])
    assert q_of(memory, 1) == [pytest.approx(0.51)]
  with pytest.raises(StoreError, match="reindex"):
    Episodic.open(tmp_path, embed.Hash(400), config)  # same width, other embedder
  other = tmp_path / "other"
  with episodic.bank.Memory.open(other, Dial()) as memory:
    memory.add("a", [("0.8", "a tip")])
  with pytest.raises(StoreError, match="not written by an episodic memory"):
    Episodic.open(other, Dial(), config)


def test_used_reports_q_as_it_was_then(make):
  memory = make()
  (id,) = put(memory, "0.8")
  (lesson,) = put(memory, "0.7", success=False)
  pay(memory, id, 1.0, -1.0)
  pay(memory, lesson, 1.0)
  q_N, success_N, worked_N = memory.used("a")
  assert q_N.tolist() == [0.0, 0.3, 0.0]
  assert success_N.tolist() == [True, False, True] and worked_N.tolist() == [True, True, False]
  assert [len(x) for x in memory.used("nobody")] == [0, 0, 0]
