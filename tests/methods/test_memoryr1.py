"""The manager: what each operation leaves for the agent and the bank, who is paid how, and that it learns from that."""

import contextlib

import numpy as np
import pytest

from experiments import base, run
from memrl_jax.envs import hints, hints_world, pool
from memrl_jax.memory import bank, embed
from memrl_jax.memory.records import Add
from memrl_jax.methods import memoryr1
from memrl_jax.methods.memoryr1_config import MemoryR1Config
from memrl_jax.rollout import collect, policies
from memrl_jax.training import runs
from memrl_jax.types import Attempt, Recall, Sample, Story, Trial, Turn

OPTIONS = hints.Options(reported=0)
SEED = 5
GOAL = hints.goal(OPTIONS, hints_world.draw(OPTIONS, SEED))
KNOWN = ("near", "far")


@pytest.fixture
def facts():
  """Two facts, "near" about the task of SEED and "far" about another."""
  made = memoryr1.Facts(MemoryR1Config(), bank.Memory.open(None, embed.Hash(64)))
  keys = (GOAL, "goal open black drawer at attic")
  for key, text in zip(keys, KNOWN, strict=True):  # versions of their own
    made.memory.commit([Add(memoryr1.TENANT, key, text)])
  with contextlib.closing(made):
    yield made


def texts(facts):
  return [entry.text for entry in facts.memory.entries(memoryr1.TENANT)]


def played(facts, mode, said=""):
  """A trial whose agent writes the fact "new"; the manager's answer is `said` where it decides by itself."""

  def answer(trial, request, key):
    if request.phase == "reflect":
      return "<remark>new</remark>"
    if request.phase == "advise":
      assert request.build(request.view)[0].content.count("tip ") == len(KNOWN)
      return "" if request.whole else said
    return "<action>use pen</action>"

  one = Trial("hints", SEED, 0, int(mode != memoryr1.FREE), mode=mode)
  envs = pool.EnvPool(hints.FAMILY, OPTIONS, isolation="inline")
  who = policies.TextPolicy(answer)
  collect.collect(
    [one], memoryr1.trial(MemoryR1Config()), lambda *_: who, envs, hints.FAMILY.prompts(OPTIONS),
    horizon=OPTIONS.turns, seed=(0,), memory=facts,
  )  # fmt: skip
  envs.close()
  assert one.void is None and len(one.attempts) == 2
  before, after = (
    {t.memory for t in one.turns if t.phase == "play" and t.attempt == n} for n in (0, 1)
  )
  assert before == {KNOWN}
  (shown,) = after
  return one, shown


LEAVES = {
  "add": (("new", "near", "far"), ["near", "far", "new"]),
  "update": (("new", "far"), ["new", "far"]),
  "delete": (("far",), ["far"]),
  "noop": (KNOWN, list(KNOWN)),
}


@pytest.mark.parametrize("kind", memoryr1.KINDS)
def test_the_agent_is_shown_what_the_operation_leaves_and_the_bank_keeps_it(kind, facts):
  word = dict(zip(memoryr1.KINDS, ("<remark>", "<action>", "lost", "keep"), strict=True))[kind]
  forced, shown = played(facts, kind)
  assert shown == LEAVES[kind][0]
  (turn,) = (turn for turn in forced.turns if turn.anchor == "operation")
  assert turn.sample.text == word and turn.trained and not turn.sampled
  facts.remember([forced])  # what was put into its mouth is tried, and not kept
  assert texts(facts) == list(KNOWN)
  free, shown = played(facts, memoryr1.FREE, word)
  assert shown == LEAVES[kind][0]
  facts.remember([free])
  assert texts(facts) == LEAVES[kind][1]
  (memos,) = facts.recall(
    [Recall(memoryr1.TENANT, GOAL)]
  )  # and another trial finds what this one was shown
  assert sorted(memo.text for memo in memos) == sorted(shown)


def test_an_answer_that_cannot_be_read_changes_nothing(facts):
  one, shown = played(facts, memoryr1.FREE, "who knows")
  assert shown == KNOWN and facts.remember([one])["bank/facts"] == 2
  (turn,) = (turn for turn in one.turns if turn.anchor == "operation")
  assert not turn.valid and not turn.trained


def test_of_two_decisions_about_one_memory_the_first_counts_and_a_fact_is_kept_once(facts):
  ((id, version),) = [
    (e.id, e.version) for e in facts.memory.entries(memoryr1.TENANT) if e.text == "near"
  ]

  def decided(index, kind, tip):
    one = Trial("hints", SEED, index, 0, mode=memoryr1.FREE, tip=tip)
    one.story = Story(memoryr1.TENANT, GOAL, ((id, version),), [], kind)
    return one

  facts.remember([decided(0, "update", "b"), decided(1, "delete", "c"), decided(2, "add", "d"),
                  decided(3, "add", "d")])  # fmt: skip
  assert texts(facts) == ["b", "far", "d"]
  state = facts.state()
  facts.remember([decided(4, "add", "e")])
  facts.load(*state)
  assert texts(facts) == ["b", "far", "d"]
  facts.reset()
  assert texts(facts) == []


# Credit.


def member(index, kind, success, logp=-1.0, void=None, tokens=1):
  sample = Sample("", np.array([1]), np.arange(tokens), np.full(tokens, logp / tokens, np.float32))
  turn = Turn(0, "advise", 0, [], sample, kind, True, 0.0, "operation", sampled=kind == "free")
  attempts = [Attempt(False, 0.0, 0.0, 1), Attempt(success, float(success), 0.0, 1)]
  return Trial("hints", 1, 0, index, [turn], attempts, void, mode=kind, update=3)


def paid(trials, **options):
  numbers = memoryr1.credit(MemoryR1Config(**options), trials)
  return [one.turns[0].advantage for one in trials], numbers


def test_operations_are_paid_against_the_mean_operation():
  # Means .5, 1, 1, of two members, one and one: baseline 5/6. r = 1 0 1 1, std sqrt(3)/4. Of 4 tokens in all a mean
  # over 3 operations: the two adds weigh 4 / (3 * 2) each, the others 4 / 3.
  group = [member(0, "free", True), member(1, "add", True), member(2, "add", False),
           member(3, "update", True), member(4, "noop", True)]  # fmt: skip
  rows, numbers = paid(group)
  assert rows[0] is None
  good, bad = (1 / 6) / (3**0.5 / 4), (-5 / 6) / (3**0.5 / 4)
  wanted = [good * 4 / 6, bad * 4 / 6, good * 4 / 3, good * 4 / 3]
  np.testing.assert_allclose(rows[1:], wanted, rtol=1e-5)
  assert numbers["memoryr1/paid_add"] == 0.5 and numbers["memoryr1/degenerate"] == 0


def test_words_of_more_tokens_do_not_weigh_more():
  rows, _ = paid([member(1, "add", True, tokens=3), member(2, "noop", False)])
  assert rows[0] * 3 == pytest.approx(-rows[1])


def test_equal_rewards_and_void_trials_and_what_is_settled_teach_nothing():
  assert paid([member(1, "add", True), member(2, "noop", True)])[0] == [None, None]
  rows, _ = paid([member(1, "add", True), member(2, "noop", False, void="lost")])
  assert rows == [None, None]
  for settled, pushed in ((0.01, False), (0.0, True)):
    rows, _ = paid([member(1, "add", True, -9.0), member(2, "noop", False, -9.0)], settled=settled)
    assert rows[0] > 0 and (rows[1] is not None) == pushed


def test_while_the_words_are_taught_all_operations_are_as_good():
  group = [member(1, "add", True), member(2, "add", False), member(3, "noop", False, -9.0)]
  rows, _ = paid(group, teach=4)  # these are of update 3
  np.testing.assert_allclose(rows, [3 / 4, 3 / 4, 3 / 2])
  assert paid(group, teach=3)[0][1] < 0


# The whole of it.


@pytest.mark.slow
def test_it_learns_the_operation_that_pays():
  """A run in which a mock of the agent fails with anything but a fact that was added; 20 updates teach the words."""
  taught, updates = 20, 28
  words = [f"method.teach={taught}", "method.teach_rate=1e-3", f"train.updates={updates}"]
  made = run.load("experiments/memoryr1_hints.py:smoke", [*words, "env.isolation=inline"])
  whole = runs.Run(base.settings(made.config))
  envs = pool.EnvPool(whole.family, whole.settings.env.options, isolation="inline")
  chances = []  # of each operation, by update
  for update in range(updates):
    trials = whole.rollout(update, envs)
    for one in trials:
      if len(one.attempts) == 2:
        one.attempts[1].success = one.mode == memoryr1.ADD
    numbers = whole.learn(update, trials)
    said = {kind: [] for kind in memoryr1.KINDS}
    for one in trials:
      for turn in one.turns:
        if not turn.sampled:
          said[one.mode].append(np.exp(turn.sample.logps.sum()))
    chances.append({kind: float(np.mean(values)) for kind, values in said.items()})
    whole.remember(update, trials)
  envs.close()
  whole.close()
  first, words, last = chances[0], chances[taught], chances[-1]
  assert first["add"] < 0.01 < words["add"] and numbers["train/finite"] == 1
  assert last["add"] > 2 * words["add"]  # more than the words alone
  assert max(last, key=last.get) == "add" != max(words, key=words.get)


@pytest.mark.parametrize(
  "override,said",
  [
    ("method.attempts=1", r"leave it 2 \(config.method.attempts\)"),
    ("method.reward=all", r"choose one of success, score \(config.method.reward\)"),
    ("method.settled=.3", r"\(config.method.settled\)"),
    ("eval.arms=rag,none", "memoryr1 has no arm rag"),
    ("credit.gamma_step=.5", "memoryr1 pays by config.method"),
  ],
)
def test_what_does_not_go_together_is_refused(override, said):
  made = run.load("experiments/memoryr1_hints.py:smoke", [override])
  with pytest.raises(ValueError, match=said):
    base.settings(made.config)
