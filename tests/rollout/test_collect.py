"""The runtime: trials as coroutines, deterministic, and failures that cost one trial only."""

import numpy as np
import pytest

from memrl_jax.envs import pool
from memrl_jax.methods import baselines, lamer
from memrl_jax.rollout import collect, policies
from memrl_jax.rollout.trial import VoidTrial
from memrl_jax.types import Trial
from tests.rollout import games


def reply(messages, rng):
  text = messages[0].content
  return "note tried" if text.startswith("reflect") else str(rng.integers(3))


def run(program, seeds=range(6), policy=None, options=None, concurrency=256, workers=2, seed=(0,)):
  options = options or games.Options()
  policy = policy or policies.mock(reply)
  envs = pool.EnvPool(games.FAMILY, options, workers=workers, timeout_s=0.5, isolation="thread")
  try:
    return collect.collect(
      [Trial("game", s, g, 0) for g, s in enumerate(seeds)],
      program,
      lambda trial, request: policy,
      envs,
      games.FAMILY.prompts(options),
      horizon=options.turns,
      seed=seed,
      concurrency=concurrency,
    )
  finally:
    envs.close()


def record(trials):
  return [trial.to_json() for trial in trials]


def shape(trial):
  return [(turn.attempt, turn.phase) for turn in trial.turns]


def test_lamer_plays_reflects_plays_and_stops_at_the_first_success():
  never = policies.mock(lambda m, rng: "note tried" if m[0].content.startswith("reflect") else "9")
  (lost,) = run(lamer.trial(lamer.LamerConfig(attempts=3)), [1], never)
  one = [(0, "play")] * 3 + [(0, "reflect")] + [(1, "play")] * 3 + [(1, "reflect")]
  assert shape(lost) == one + [(2, "play")] * 3
  assert [a.success for a in lost.attempts] == [False] * 3
  second = policies.mock(
    lambda m, rng: (
      "1"
      if m[0].content.startswith("[tried]")
      else reply(m, rng)
      if m[0].content.startswith("reflect")
      else "9"
    )
  )
  (won,) = run(lamer.trial(lamer.LamerConfig(attempts=3)), [1], second)
  assert shape(won) == [(0, "play")] * 3 + [(0, "reflect"), (1, "play")]
  assert won.success_by(2) and not won.success_by(1)
  assert won.turns[-1].memory == ("tried",)


def test_history_only_writes_no_reflections():
  never = policies.mock(lambda m, rng: "9")
  (trial,) = run(lamer.trial(lamer.LamerConfig(memory="history_only")), [1], never)
  assert all(turn.phase == "play" for turn in trial.turns)
  assert trial.turns[-1].memory == ("9 | 9 | 9", "9 | 9 | 9")


def test_a_baseline_sees_the_prompts_of_a_first_attempt_in_every_attempt():
  never = policies.mock(lambda m, rng: "9")
  (trial,) = run(baselines.trial(3), [1], never)
  first, *others = ([turn.messages for turn in trial.turns if turn.attempt == a] for a in range(3))
  assert others == [first, first]


def test_rollouts_depend_on_the_seed_and_not_on_batching():
  program = lamer.trial(lamer.LamerConfig())
  base = record(run(program))
  assert record(run(program, concurrency=2, workers=3)) == base
  assert record(run(program, seed=(1,))) != base


@pytest.mark.parametrize(
  ("fault", "kind"),
  [("raise", "crash"), ("hang", "timeout"), ("nonsense", "nonsense"), ("nan", "nonsense")],
)
def test_a_broken_environment_voids_its_trial_and_no_other(fault, kind):
  never = policies.mock(lambda m, rng: "9")
  healthy = record(run(baselines.trial(1), [1, 2, 3], never))
  options = games.Options(fault=fault, faulty_seed=2)
  trials = run(baselines.trial(1), [1, 2, 3], never, options)
  assert [trial.void is None for trial in trials] == [True, False, True]
  assert kind in trials[1].void
  assert record(trials)[0::2] == healthy[0::2]


def test_a_request_that_can_never_be_answered_voids_its_trial():
  class Refusing(policies.TextPolicy):
    def submit(self, trial, request, key):
      if trial.seed == 2:
        raise VoidTrial("prompt of 900 tokens does not fit 64")
      return super().submit(trial, request, key)

  trials = run(baselines.trial(1), [1, 2], Refusing(lambda t, r, k: "9"))
  assert [trial.void for trial in trials] == [None, "prompt of 900 tokens does not fit 64"]


def test_request_keys_differ_wherever_the_asker_differs():
  from memrl_jax.rollout.trial import Generate

  def key(seed=(0,), group=0, index=0, phase="play", attempt=0, turn=0):
    request = Generate(phase, attempt, turn, None, None)
    return tuple(collect.request_key(seed, Trial("game", 5, group, index), request))

  changes = [
    {},
    {"seed": (1,)},
    {"group": 1},
    {"index": 1},
    {"phase": "reflect"},
    {"attempt": 1},
    {"turn": 1},
  ]
  assert len({key(**change) for change in changes}) == len(changes)
  assert (
    np.dtype(np.uint32)
    == collect.request_key((0,), Trial("g", 0, 0, 0), Generate("play", 0, 0, None, None)).dtype
  )
