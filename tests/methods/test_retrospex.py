"""Retrospex-like re-scoring: choice by hand, what is remembered, and a run that repeats itself."""

import json

import numpy as np
import pytest

from experiments import base, recipes
from memrl_jax.envs import pool
from memrl_jax.memory import embed
from memrl_jax.methods import retrospex
from memrl_jax.rollout import collect
from memrl_jax.rollout.trial import Answer
from memrl_jax.training import checkpoint, folder, loop, metrics
from memrl_jax.types import Memo, Sample, Trial
from tests.rollout import games


def test_the_weight_of_the_model_falls_to_its_floor():
  found = [retrospex.alpha(t, floor=0.5, decay=0.9) for t in (0, 1, 3, 10)]
  np.testing.assert_allclose(found, [1.0, 0.9, 0.729, 0.5])  # .9^10 = .349 is below the floor


def test_scores_by_hand():
  logp_C, q_C = np.log([0.3, 0.1]), np.array([2.0, 4.0])  # p = .75 .25 of the two, Q = 0 1
  np.testing.assert_allclose(retrospex.rescore(logp_C, q_C, 0.75), [0.5625, 0.4375])
  np.testing.assert_allclose(retrospex.rescore(logp_C, q_C, 0.5), [0.375, 0.625])
  same = retrospex.rescore(logp_C - 900.0, 100 * q_C - 7, 0.5)  # only ratios and ranges count
  np.testing.assert_allclose(same, [0.375, 0.625])
  np.testing.assert_allclose(retrospex.rescore(logp_C, q_C * 0, 0.5), [0.375, 0.125])


def test_what_a_response_says():
  assert retrospex.action("I think <action>Open  Jar</action>.") == "open jar"
  assert retrospex.action(" Open\n jar") == "open jar"


# Choosing, with a policy that answers by its key and a memory that knows what answers are worth.


class Keyed:
  """Answers "0" to "3" by the request's key; keeps every key, request and sample."""

  def __init__(self):
    self.asked, self.waiting = [], []

  def submit(self, trial, request, key):
    number = int(key[0] % 4)
    logps = np.array([-0.5 * (number + 1), -0.25], np.float32)  # "0" is the likeliest
    ids = np.array([number, 9], np.int32)
    sample = Sample(str(number), np.array([1], np.int32), ids, logps)
    self.asked.append((trial.name, request, tuple(key), sample))
    answer = Answer(sample, request.build(request.view), request.view)
    self.waiting.append((len(self.asked), answer))
    return len(self.asked)

  def poll(self):
    answers, self.waiting = self.waiting, []
    return answers


class Worth:
  """A higher number is worth more."""

  def recall(self, asks):
    return [(Memo(0, 1, ask.query, float(ask.query), 1.0),) for ask in asks]


def play(program, memory=None, trials=6):
  policy = Keyed()
  options = games.Options(target=2, turns=4)
  envs = pool.EnvPool(games.FAMILY, options, isolation="inline")
  played = collect.collect(
    [Trial("game", seed, seed, 0) for seed in range(trials)], program,
    lambda trial, request: policy, envs, games.FAMILY.prompts(options),
    horizon=4, seed=(7,), memory=memory,
  )  # fmt: skip
  envs.close()
  assert not any(trial.void for trial in played)
  by_turn = {}
  for name, request, key, sample in policy.asked:
    by_turn.setdefault((name, request.turn), []).append((key, sample))
  return played, by_turn


def test_candidates_have_their_own_keys_and_the_chosen_turn_has_what_was_sampled():
  config = retrospex.RetrospexConfig(floor=0.0, decay=0.0)  # from turn 1 on the critic alone
  arms = [retrospex.trial(config, attempts=1, rescored=on) for on in (True, False)]
  (rescored, asked), (plain, first) = play(arms[0], Worth()), play(arms[1], Worth())
  changed = 0
  for trial in rescored:
    for turn in trial.turns:
      keys, samples = zip(*asked[trial.name, turn.index], strict=True)
      assert len(set(keys)) == config.candidates == len(keys)
      rank = (lambda s: s.logps.sum()) if turn.index == 0 else (lambda s: float(s.text))
      assert turn.sample.text == max(samples, key=rank).text
      assert any(turn.sample is sample for sample in samples)  # ids and log-probs untouched
      likeliest = max(samples, key=lambda s: s.logps.sum()).text
      assert turn.advantage_terms["changed"] == (turn.sample.text != likeliest)
      assert turn.advantage_terms["candidates"] == len({sample.text for sample in samples})
      changed += turn.advantage_terms["changed"]
  assert changed > 3
  turns = sum(len(trial.turns) for trial in rescored)
  assert retrospex.summary(rescored) == {"changed": changed / turns}
  assert retrospex.summary(plain) == {}
  path = [
    7,
    3,
    0,
    0,
    0,
    1,
  ]  # seed, group, index, attempt, playing, turn: as before there were draws
  assert first["0.3.0", 1][0][0] == tuple(np.random.SeedSequence(path).generate_state(2, np.uint32))
  for where, found in first.items():  # the plain arm gets the first of the candidates
    assert found[0][0] == asked.get(where, found)[0][0] and len(found) == 1


def test_one_candidate_or_no_critic_leaves_the_model_alone():
  alone, _ = play(
    retrospex.trial(retrospex.RetrospexConfig(candidates=1), attempts=1, rescored=True), Worth()
  )
  plain, _ = play(retrospex.trial(retrospex.RetrospexConfig(), attempts=1, rescored=False))
  said = [[turn.action for turn in trial.turns] for trial in plain]
  assert [[turn.action for turn in trial.turns] for trial in alone] == said
  blind, _ = play(retrospex.trial(retrospex.RetrospexConfig(), attempts=1, rescored=True))
  assert retrospex.summary(blind) == {"changed": 0.0}


# Remembering.


def remembered(**changes):
  config = retrospex.RetrospexConfig(
    **{"steps": 2, "hidden": 8, "batch": 8, "capacity": 64} | changes
  )
  return retrospex.Remembered(config, embed.Hash(16), seed=0, updates=3)


def test_transitions_by_hand_void_trials_never_and_the_oldest_go_first():
  trials, _ = play(retrospex.trial(retrospex.RetrospexConfig(), attempts=2, rescored=False))
  kept = remembered(fit_every=9)
  trials[0].void = "broken"
  numbers = kept.write(trials)
  turns = [turn for trial in trials[1:] for turn in trial.turns]
  assert numbers["memory/transitions"] == len(turns) and "memory/q_loss" not in numbers
  vectors = embed.Hash(16).embed
  arrays, _ = kept.state()
  state_N, action_N, next_N, over_N = arrays["links"].T
  np.testing.assert_array_equal(arrays["texts"][state_N], vectors([turn.key for turn in turns]))
  np.testing.assert_array_equal(arrays["texts"][action_N], vectors([turn.action for turn in turns]))
  np.testing.assert_array_equal(arrays["rewards"], [turn.reward for turn in turns])
  ends = [turn.reward == 1.0 or turn.index == 3 for turn in turns]  # won, or out of turns
  np.testing.assert_array_equal(over_N.astype(bool), ends)
  after = [turns[n + 1].key for n, end in enumerate(ends) if not end]
  np.testing.assert_array_equal(arrays["texts"][next_N[~np.array(ends)]], vectors(after))

  small = remembered(capacity=5, fit_every=9)
  small.write(trials)
  newest, _ = small.state()
  for column in range(3):
    mine, whole = newest["links"][:, column], arrays["links"][-5:, column]
    rows = newest["links"][:, 3] == 0 if column == 2 else slice(None)
    np.testing.assert_array_equal(newest["texts"][mine[rows]], arrays["texts"][whole[rows]])
  assert len(newest["texts"]) < len(arrays["texts"])


def config(**changes):
  out = base.new("retrospex", "darkroom")
  recipes.darkroom(out, "smoke")
  recipes.retrospex(out, "smoke")
  out.train.updates = 3
  out.eval.tasks = 4
  out.engine.slots = 8
  out.method.steps = 5
  out.method.hidden = 8
  out.method.fit_every = 2
  base.override(out, [f"{key}={value}" for key, value in changes.items()])
  return out


def run(path, resume=False, **changes):
  made = config(**changes)
  with folder.RunFolder.create(path, made.to_dict(), resume) as place:
    loop.train(base.settings(made, "retrospex_darkroom", "smoke"), place, quiet=True)
  return place


def kept(place):
  with checkpoint.Checkpoints(place.checkpoints, keep=9, keep_every=None) as saved:
    step, arrays, host = saved.restore(None, {"frozen": np.zeros(1)})
    return step, arrays, host, saved.extra(step)


def test_a_run_remembers_trains_nothing_and_killed_and_resumed_equals_itself(tmp_path, monkeypatch):
  whole = run(tmp_path / "whole")
  real = loop._reason_to_stop

  def killed(run, update, trials, numbers):
    if update == 2:  # its transitions are kept, its checkpoint is not written
      raise KeyboardInterrupt
    return real(run, update, trials, numbers)

  monkeypatch.setattr(loop, "_reason_to_stop", killed)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / "run")
  monkeypatch.setattr(loop, "_reason_to_stop", real)
  again = run(tmp_path / "run", resume=True)

  assert again.metrics.read_bytes() == whole.metrics.read_bytes()
  assert again.eval.read_bytes() == whole.eval.read_bytes()
  (step, arrays, host, extra), (_, _, other_host, other) = kept(whole), kept(again)
  assert step == 3 and set(arrays) == {"frozen"} and host == other_host
  assert all(np.array_equal(extra[name], other[name]) for name in extra | other)
  numbers = metrics.read(whole.metrics)
  played = np.cumsum([n["rollout/episodes"] * n["rollout/turns"] for n in numbers])
  np.testing.assert_allclose([n["memory/transitions"] for n in numbers], played)
  assert ["memory/q_loss" in n for n in numbers] == [
    False,
    True,
    True,
  ]  # every second, and the last
  assert not any(name.startswith("train/") for name in numbers[-1])

  record = json.loads(whole.eval.read_text("utf-8").splitlines()[-1])
  assert 0 <= record["arms"]["memory"]["changed"] <= 1 and "changed" not in record["arms"]["none"]


@pytest.mark.parametrize(
  "change,words",
  [
    ({"candidates": 0}, "candidates must be at least 1"),
    ({"attempts": 2}, "1 attempt"),
    ({"expectile": 1.0}, "config.method.expectile"),
    ({"floor": 1.5}, "config.method.floor"),
    ({"likelihood": "char"}, "sequence, token"),
    ({"fit_every": -1}, "fit_every"),
  ],
)
def test_a_wrong_value_is_named(change, words):
  with pytest.raises(ValueError, match=words):
    retrospex.RetrospexConfig(**change)
