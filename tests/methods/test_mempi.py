"""Mem-pi: who is asked what, which rows are paid how, and that silence leaves no trace."""

import concurrent.futures
import contextlib
import copy
import dataclasses
import json
import threading

import numpy as np
import pytest

from experiments import base
from experiments import run as command
from memrl_jax.envs import hints, hints_world, pool
from memrl_jax.memory import embed, hintbank
from memrl_jax.methods import mempi
from memrl_jax.methods.mempi_config import MempiConfig
from memrl_jax.rollout import collect, lessons, policies
from memrl_jax.training import hosts, runs
from memrl_jax.types import Attempt, Memo, Recall, Sample, Story, Trial, Turn


@pytest.fixture(scope="module")
def run():
  made = command.load(
    "experiments/mempi_hints.py:smoke", ["train.groups=3", "env.isolation=inline", "method.show=2"]
  )
  run = runs.Run(base.settings(made.config))
  yield run
  run.close()


@pytest.fixture(scope="module")
def envs(run):
  envs = pool.EnvPool(run.family, run.settings.env.options, isolation="inline")
  yield envs
  envs.close()


@pytest.fixture(scope="module")
def trials(run, envs):
  """Three groups of stage 2, with the log-probs of forced decisions."""
  trials = run.rollout(run.method.anchors, envs)
  run.learn(run.method.anchors - 1, trials)  # scores and credits; stage 1 trains nothing of it
  return trials


def test_one_member_is_silent_and_the_others_speak_from_the_same_prompt(run, trials):
  hinting = run.prompts.extract.hinting
  for group in range(3):
    members = [one for one in trials if one.group == group]
    silent, *speaking = members
    assert [one.mode for one in members] == ["abstain", "speak", "speak", "speak"]
    (decision,) = mempi._asides(silent)  # an abstention has no content
    assert decision.sample.text == hinting.abstain == "keep" and len(decision.sample.ids) == 1
    for one in speaking:
      decided, hint = mempi._asides(one)
      assert decided.sample.text == hinting.speak
      np.testing.assert_array_equal(decided.prompt_ids, decision.prompt_ids)
      np.testing.assert_array_equal(
        hint.prompt_ids, np.concatenate([decided.prompt_ids, decided.sample.ids])
      )
      assert 0 < len(hint.sample.ids) <= run.settings.sampling.reflect_tokens
      assert all(turn.trained is not None for turn in one.turns)


def test_forced_decisions_have_the_log_probs_of_the_weights(run, trials):
  logps = {one.mode: mempi._asides(one)[0].sample.logps.sum() for one in trials if one.group == 0}
  assert all(np.isfinite(value) for value in logps.values())
  assert 0 < np.exp(logps["abstain"]) + np.exp(logps["speak"]) <= 1 + 1e-6
  prompt = mempi._asides(trials[0])[0].messages
  for mode in ("abstain", "speak"):  # and they are those of imitating the same words
    words = getattr(run.prompts.extract.hinting, mode)
    row = lessons.rows(
      [lessons.Lesson(prompt, "", words, "d", ends=False)], run.actor.chat, {"d": 1.0}
    )
    run.actor.rescore(row)
    np.testing.assert_allclose(row[0].sample.logps.sum(), logps[mode], atol=1e-5)


def on_two_hosts(monkeypatch, work):
  """What `work()` gives on each of two hosts, which are threads of this process."""
  me, said, met = threading.local(), {}, threading.Barrier(2)

  class Job:
    count = 2
    index = property(lambda self: me.index)

  def gather(own, what):
    said[me.index] = list(own)
    met.wait(60)
    both = [*said[0], *said[1]]
    met.wait(60)
    return both

  def on(host):
    me.index = host
    return work()

  with monkeypatch.context() as patch, concurrent.futures.ThreadPoolExecutor(2) as threads:
    patch.setattr(hosts, "gather", gather)
    patch.setattr(hosts, "_job", Job())
    return list(threads.map(on, range(2)))


def test_two_hosts_that_each_have_half_of_the_trials_pay_as_one_that_has_all(
  run, trials, monkeypatch
):
  def paid():
    played = hosts.exchange(copy.deepcopy(trials), "the trials")
    asides = [turn for one in played for turn in mempi._asides(one)]
    run.actor.rescore([turn for turn in asides if not turn.sampled])
    return [turn.here for turn in asides], run.method.credit(played), [t.advantage for t in asides]

  (here, numbers, advantages), (there, *others) = on_two_hosts(monkeypatch, paid)
  assert np.logical_xor(here, there).all() and 0 < sum(here) < len(here)
  assert [numbers, advantages] == others  # to the last bit, or the hosts would part
  run.method.credit(alone := copy.deepcopy(trials))
  asides = [turn for one in alone for turn in mempi._asides(one)]
  found = [turn.advantage is not None for turn in asides]
  assert any(found) and found == [one is not None for one in advantages]
  for turn, advantage in zip(asides, advantages, strict=True):
    np.testing.assert_allclose(turn.advantage or 0.0, advantage or 0.0, atol=1e-6)


def test_every_row_of_stage_1_is_scored_and_trained_on_one_of_two_hosts(run, monkeypatch):
  monkeypatch.setattr(run.actor, "advanced", lambda state, *rest: (state, {}))

  def imitated():
    hints = [hint(f"goal {number}", "gold key") for number in range(5)]
    made = list(told(run, hints).values())
    rows = lessons.rows(made, run.actor.chat, run.method.terms)
    run.actor.study(rows, 1, np.random.default_rng(0))
    scored = [bool(np.isfinite(row.sample.logps).all()) for row in rows]
    assert scored == [row.here for row in rows]
    return scored

  first, second = on_two_hosts(monkeypatch, imitated)
  assert np.logical_xor(first, second).all() and abs(sum(first) - sum(second)) <= 1


def test_an_agent_that_is_given_nothing_reads_the_prompts_of_one_without_memory(run, envs, trials):
  def played(program, mode):
    (one,) = runs.plan(run.settings, run.method.anchors)[:1]
    one.mode = mode
    policy, advisor = run._route(run.settings.sampling)
    collect.collect(
      [one], program, lambda t, request: advisor if request.phase == "advise" else policy, envs,
      run.prompts, horizon=run.horizon, seed=(0,), memory=run.reader,
    )  # fmt: skip
    return [turn for turn in one.turns if turn.phase == "play"]

  bare = played(run.method.arms["none"], "")
  silent = played(run.method.trial, "abstain")
  assert [t.messages for t in silent] == [t.messages for t in bare]
  for mine, theirs in zip(silent, bare, strict=True):
    np.testing.assert_array_equal(mine.sample.prompt_ids, theirs.sample.prompt_ids)
    np.testing.assert_array_equal(mine.sample.ids, theirs.sample.ids)
  speaking = played(run.method.trial, "speak")
  assert any("tip:" in message.content for turn in speaking for message in turn.messages)


def scripted(config, mode):
  """A trial of the hints by scripted answers, which open the container; what was asked, by phase."""
  options, asked = hints.Options(reported=0), []

  def answer(trial, request, key):
    asked.append(request.phase)
    if request.phase == "reflect":
      return "<remark>go</remark>"
    if request.phase == "advise":
      return "" if request.whole else f"go {len(asked)}</remark>"
    tool, digit = hints_world.draw(options, 5).kin.procedure
    return f"<action>{f'enter {digit}' if ' with' in request.view.current.now.anchor else f'use {tool}'}</action>"

  one = Trial("hints", 5, 0, 1, mode=mode)
  envs = pool.EnvPool(hints.FAMILY, options, isolation="inline")
  who = policies.TextPolicy(answer)
  collect.collect(
    [one], mempi.trial(config, attempts=config.episodes), lambda *_: who, envs,
    hints.FAMILY.prompts(options), horizon=options.turns, seed=(0,),
  )  # fmt: skip
  envs.close()
  assert one.void is None
  return one, asked


def test_it_is_asked_once_an_episode_or_before_every_step():
  once, asked = scripted(MempiConfig(episodes=2), "speak")
  assert asked[0] == "advise" and asked.count("advise") == 1  # one hint for both episodes
  assert len(once.attempts) == 2
  shown = [turn.memory for turn in once.turns if turn.phase == "play"]
  assert set(shown) == {("go 1",)}
  each, asked = scripted(MempiConfig(invocation="step"), "speak")
  played = [turn for turn in each.turns if turn.phase == "play"]
  assert asked.count("advise") == len(played) == 2 and len({turn.memory for turn in played}) == len(
    played
  )
  silent, _ = scripted(MempiConfig(invocation="step"), "abstain")
  assert not any(turn.memory for turn in silent.turns)


def test_a_bank_for_every_step_has_what_was_seen_at_each_of_them():
  """A container is opened in two turns; the hint stood in the prompts of both."""
  states = {}
  for invocation in ("episode", "step"):
    config = MempiConfig(gather=1, invocation=invocation, hints=64, decisions=0.0, smoothing=0.0)
    one, _ = scripted(config, "gather")
    one.attempts[0].success = False  # the agent alone fails
    bank = mempi.experience(config, [one])
    assert {(h.hint, h.goal, h.alone, h.hinted) for h in bank} == {("go", bank[0].goal, 0.0, 1.0)}
    states[invocation] = [h.seen for h in bank]
    hinting = hints.FAMILY.prompts(hints.Options()).extract.hinting
    told = mempi.lessons(config, hinting, bank, np.random.default_rng(0))
    assert {m.messages[0].content for m in told} == {
      hinting.hint(h.goal, h.seen)[0].content for h in bank
    }
  (first,), steps = states["episode"], states["step"]
  assert len(steps) == 2 and steps[0] == first
  tool, _ = hints_world.draw(hints.Options(reported=0), 5).kin.procedure
  assert steps[1].endswith(f" with {tool}") and " with" not in first


# Credit.


def member(index, success, tokens, mode=None, void=None):
  sample = Sample("", np.array([1]), np.arange(1), np.zeros(1, np.float32))
  content = sample._replace(ids=np.arange(tokens), logps=np.zeros(tokens, np.float32))
  mode = mode or ("abstain" if index == 0 else "speak")
  said = [(sample, "decision", mode)] + [(content, "hint", "go")] * (mode == "speak")
  turns = [Turn(0, "advise", 0, [], s, action, True, 0.0, anchor) for s, anchor, action in said]
  return Trial(
    "hints", 1, 0, index, turns, [Attempt(success, float(success), 0.0, 1)], void, mode=mode
  )


def paid(trials, **options):
  config = MempiConfig(**{"brevity": 0.0} | options)
  numbers = mempi.credit(config, trials, longest=10)
  return [[turn.advantage for turn in one.turns] for one in trials], numbers


def test_rows_of_a_group_by_hand():
  # r = 0; 1, 1, 0. A_d = 4/3, A_c = .707, .707, -1.414; 4 decisions of 1 token, hints of 2, 4 and 4: 14 tokens.
  trials = [member(0, False, 0), member(1, True, 2), member(2, True, 4), member(3, False, 4)]
  rows, numbers = paid(trials)
  half = 14 / 2
  np.testing.assert_allclose(rows[0], [-4 / 3 * half], rtol=1e-4)
  for row, content in zip(rows[1:], (2**-0.5, 2**-0.5, -(2**0.5)), strict=True):
    np.testing.assert_allclose(row, [4 / 3 * half / 3, content * 14 / 10], rtol=1e-4)
  assert numbers["mempi/delta"] == pytest.approx(2 / 3)
  assert numbers["mempi/hint_tokens"] == pytest.approx(10 / 3)


def test_content_is_not_in_the_batch_where_hints_do_not_help():
  rows, numbers = paid([member(0, True, 0), member(1, True, 2), member(2, False, 4)])
  assert [len(row) for row in rows] == [1, 2, 2]
  assert all(row[0] is not None for row in rows)
  assert rows[1][1] is None and rows[2][1] is None and numbers["mempi/open"] == 0


def test_equal_rewards_and_void_members_teach_nothing():
  rows, numbers = paid([member(0, True, 0), member(1, True, 2), member(2, True, 4)])
  assert rows == [[None], [None, None], [None, None]] and numbers["mempi/degenerate"] == 1
  without_base = [member(0, False, 0, void="lost"), member(1, True, 2), member(2, False, 4)]
  assert all(advantage is None for row in paid(without_base)[0] for advantage in row)
  rows, _ = paid([member(0, False, 0), member(1, True, 2), member(2, False, 4, void="lost")])
  assert rows[2] == [None, None] and rows[1][0] > 0


@pytest.mark.parametrize("settled,pushed", [(0.0, True), (0.01, False)])
def test_a_decision_that_is_never_taken_is_not_pushed_down_further(settled, pushed):
  trials = [member(0, False, 0), member(1, True, 2), member(2, False, 4)]
  trials[0].turns[0].sample.logps[:] = -9.0
  rows, _ = paid(trials, settled=settled)
  assert (rows[0] != [None]) == pushed and rows[1][0] > 0
  trials[0].attempts[0].success, trials[1].attempts[0].success = True, False
  rows, _ = paid(trials, settled=settled)  # silence wins: it is taken up again, however unlikely
  assert rows[0][0] > 0 and rows[1][0] < 0


def test_of_two_hints_that_work_the_shorter_is_paid_more():
  rows, _ = paid([member(0, False, 0), member(1, True, 2), member(2, True, 9)], brevity=0.1)
  assert rows[1][1] > 0 > rows[2][1]


# Stage 1.


def hint(goal, text, alone=None, hinted=None, seen="here"):
  return hintbank.Hint(goal, seen, text, alone, hinted)


def told(run, hints, **options):
  config = MempiConfig(gather=1, hints=len(hints) * 50, **options)
  hinting = run.prompts.extract.hinting
  made = mempi.lessons(config, hinting, hints, np.random.default_rng(0))
  return {(one.messages[0].content.split("\n")[0], one.text): one for one in made}


def test_labels_of_decisions_and_what_is_imitated(run):
  hints = [hint("a", "x", 0.0, 1.0), hint("b", "y", 1.0, 1.0), hint("c", "z")]
  got = told(run, hints)
  weights = {key: round(one.weight, 3) for key, one in got.items() if one.term == "decision"}
  assert weights == {
    ("a", "<remark>"): 0.9, ("a", "keep"): 0.1, ("b", "<remark>"): 0.1, ("b", "keep"): 0.9,
    ("c", "<remark>"): 0.9, ("c", "keep"): 0.1,
  }  # fmt: skip
  assert {key for key, one in got.items() if one.term == "content"} == {
    ("a", "x</remark>"), ("b", "y</remark>"), ("c", "z</remark>"),
  }  # fmt: skip
  assert all(one.begun == "<remark>" for one in got.values() if one.term == "content")
  assert ("b", "y</remark>") not in told(run, hints, keep="helped")
  always = told(run, hints, decisions=0.0, smoothing=0.0)
  assert ("b", "keep") not in always and always["b", "<remark>"].weight == 1


def test_each_term_is_a_weighted_mean_over_its_tokens(run):
  chat = run.actor.chat
  made = [
    lessons.Lesson([], "", " red box", "content"),
    lessons.Lesson([], "", "keep", "decision", 0.9, ends=False),
    lessons.Lesson([], "", "<remark>", "decision", 0.1, ends=False),
  ]
  rows = lessons.rows(made, chat, {"content": 1.0, "decision": 0.5})
  count = [len(row.sample.ids) for row in rows]
  assert count == [3, 1, 1]  # an end where the answer ends
  total = sum(count)
  np.testing.assert_allclose(
    [row.advantage for row in rows], [total / 3, 0.5 * 0.9 * total, 0.5 * 0.1 * total]
  )


@pytest.mark.parametrize("longest,kept", [(None, [4, 3, 1]), (3, [3, 1]), (2, [1]), (0, [])])
def test_a_lesson_of_more_tokens_than_the_policy_may_say_is_left_out(run, longest, kept):
  """And the mean is over what is left: the token that counts .5 makes half of its term, however few there are."""
  made = [
    lessons.Lesson([], "", " red box at", "content"),  # three words and the end
    lessons.Lesson([], "", " red box", "content"),
    lessons.Lesson([], "", "keep", "decision", 0.5, ends=False),
  ]
  terms = {"content": 1.0, "decision": 2.0}
  rows = lessons.rows(made, run.actor.chat, terms, longest=longest)
  assert [len(row.sample.ids) for row in rows] == kept
  whole, content = sum(kept), sum(n for n in kept if n > 1)
  for row, count in zip(rows, kept, strict=True):
    assert row.advantage == pytest.approx(whole / content if count > 1 else 2.0 * whole)


# The bank.


def test_a_hint_is_judged_by_success_or_by_score_whatever_the_run_is_paid_for():
  attempts = [Attempt(False, score, 0.0, 1) for score in (0.25, 0.5)]
  one = Trial(
    "lab",
    1,
    0,
    0,
    [],
    attempts,
    mode="gather",
    task="t",
    tip="go",
    story=Story("goal", "seen", (), []),
  )
  for options, helped in (({}, False), ({"reward": "score"}, False), ({"judge": "score"}, True)):
    (made,) = mempi.experience(MempiConfig(gather=1, **options), [one])
    assert made.helped is helped


def test_the_agent_alone_is_judged_by_all_trials_of_its_task():
  def one(index, seed, alone, hinted, tip="go", void=None):
    wins = [Attempt(won, float(won), 0.0, 1) for won in (alone, hinted)]
    made = Trial(
      "hints", seed, seed, index, [], wins, void, mode="gather", task=f"t{seed}", tip=tip
    )
    made.story = Story("goal", "seen", (), [])
    return made

  trials = [one(0, 1, True, True), one(1, 1, False, True), one(2, 1, False, False),
            one(0, 2, False, True, tip=""), one(0, 3, False, True, void="lost")]  # fmt: skip
  made = mempi.experience(MempiConfig(gather=1), trials)
  assert [(h.goal, h.seen, round(h.alone, 2), h.hinted, h.helped) for h in made] == [
    ("goal", "seen", 0.33, 1.0, True), ("goal", "seen", 0.33, 1.0, True),
    ("goal", "seen", 0.33, 0.0, False),
  ]  # fmt: skip


def test_the_bank_gives_near_contexts_different_hints_and_only_such_as_helped():
  hints = [
    hint("open red box", "a", 0, 1), hint("open red box", "a", 0, 1), hint("open red box", "b"),
    hint("open red box", "c", 1, 1), hint("sail the sea", "d", 0, 1),
  ]  # fmt: skip
  with hintbank_of("helped", 2, hints) as bank:
    (memos,) = bank.recall([Recall(hintbank.TENANT, "open red box\nhere")])
    assert [memo.text for memo in memos] == ["a", "b"] and isinstance(memos[0], Memo)
    assert bank.hints() == hints
  with hintbank_of("all", 3, hints) as bank:
    (memos,) = bank.recall([Recall(hintbank.TENANT, "open red box\nhere")])
    assert [memo.text for memo in memos] == ["a", "b", "c"]


def test_the_bank_is_silent_where_no_context_is_near():
  hints = [hint("open red box", "a", 0, 1), hint("open blue jar", "b", 0, 1)]
  with hintbank_of("helped", 3, hints) as bank:
    (memos,) = bank.recall([Recall(hintbank.TENANT, "open red box\nhere")])
    assert memos[0].similarity == pytest.approx(1) and 0 < memos[1].similarity < 0.99
  with hintbank_of("helped", 3, hints, near=0.99) as bank:
    same, other = bank.recall([
      Recall(hintbank.TENANT, "open red box\nhere"), Recall(hintbank.TENANT, "open green box\nhere")
    ])  # fmt: skip
    assert [memo.text for memo in same] == ["a"] and other == ()


def hintbank_of(keep, show, hints, near=-1.0):
  bank = hintbank.HintBank.open(None, embed.Hash(64), show=show, keep=keep, near=near)
  bank.add(hints)
  return contextlib.closing(bank)


def test_a_file_of_hints(tmp_path):
  path = tmp_path / "bank.jsonl"
  one = hint("a", "x", 0.0, 1.0)
  path.write_text(json.dumps(dataclasses.asdict(one)) + "\n\n")
  assert hintbank.read(path) == [one]
  for line in ("{}", "[]", "x", '{"goal": "a", "seen": "b", "hint": ""}',
               '{"goal": "a", "seen": "b", "hint": "c", "alone": 2}'):  # fmt: skip
    path.write_text(f"{json.dumps(dataclasses.asdict(one))}\n{line}\n")
    with pytest.raises(ValueError, match=r"bank.jsonl, line 2 is no hint; write an object"):
      hintbank.read(path)
  with pytest.raises(ValueError, match=r"there is no bank of hints .*config.method.bank"):
    hintbank.read(tmp_path / "nothing")


@pytest.mark.parametrize(
  "override,said",
  [
    ("credit.gamma_step=.5", "leave that section as it is"),
    ("loss.aggregate=sequence_mean", "set config.loss.aggregate to token_mean"),
    ("remote.url=http://127.0.0.1:1/v1", "config.agent.remote.url"),
    ("method.gate=on", r"choose one of group, rollout, soft, off \(config.method.gate\)"),
    ("method.judge=reward", r"choose one of success, score \(config.method.judge\)"),
    ("method.near=2", r"a cosine lies in \[-1, 1\] \(config.method.near\)"),
    ("method.gather=0", "stage 1 needs a bank, or gather"),
    ("train.group_size=1", "raise config.train.group_size"),
  ],
)
def test_what_does_not_go_together_is_refused(override, said):
  made = command.load("experiments/mempi_hints.py:smoke", [override])
  with pytest.raises(ValueError, match=said):
    base.settings(made.config)
