"""The loop as a whole: same seed same run, killed and resumed equals uninterrupted, failures counted."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from experiments import base, lamer_darkroom
from experiments import run as experiment
from memrl_jax.envs import darkroom
from memrl_jax.training import checkpoint, evaluate, folder, loop, metrics, runs

ROOT = pathlib.Path(__file__).parents[2]
UPDATES = 4


def config(**changes):
  out = lamer_darkroom.get_config("smoke")
  out.train.updates = UPDATES
  out.train.eval_every = 2
  out.eval.tasks = 8
  out.engine.slots = 8
  out.engine.prefill_rows = (8,)
  base.override(out, [f"{key}={value}" for key, value in changes.items()])
  return out


def run(path, resume=False, **changes):
  made = config(**changes)
  settings = base.settings(made, "lamer_darkroom", "smoke")
  with folder.RunFolder.create(path, made.to_dict(), resume) as place:
    status = loop.train(settings, place, quiet=True)
  return place, status


def files(place):
  rollouts = {path.name: path.read_bytes() for path in sorted(place.rollouts.glob("*.jsonl"))}
  return place.metrics.read_bytes(), place.eval.read_bytes(), rollouts


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  place, status = run(tmp_path_factory.mktemp("whole") / "run")
  assert status == "finished"
  return place


def test_the_same_seed_gives_identical_files_and_another_seed_does_not(whole, tmp_path):
  again, _ = run(tmp_path / "again")
  other, _ = run(tmp_path / "other", seed=1)
  assert files(again) == files(whole)
  assert all(a != b for a, b in zip(files(other), files(whole), strict=True))


def test_sampler_and_trainer_agree_in_every_update(whole):
  gaps = [record["train/logp_gap_max"] for record in metrics.read(whole.metrics)]
  assert len(gaps) == UPDATES and max(gaps) < 1e-4


def test_every_sampled_token_of_the_rollouts_was_recorded_with_its_log_prob(whole):
  for trial in metrics.read(whole.rollout(1)):
    for turn in trial["turns"]:
      assert len(turn["ids"]) == len(turn["logps"]) > 0
      assert turn["finish"] == "length" or turn["ids"][-1] == 2  # <|end|> is kept
      assert max(turn["logps"]) <= 0


def arrays(place):
  settings = base.settings(config(), "lamer_darkroom", "smoke")
  like = runs.Run(settings).actor.saved()
  with checkpoint.Checkpoints(place.checkpoints, keep=9, keep_every=None) as saved:
    step, found, host = saved.restore(None, like)
  import jax

  return step, host, [np.asarray(leaf) for leaf in jax.tree.leaves(found)]


def flags(path, *more):
  return [
    "--config=experiments/lamer_darkroom.py:smoke", f"--workdir={path}",
    f"--config.train.updates={UPDATES}", "--config.train.eval_every=2", "--config.eval.tasks=8",
    "--config.engine.slots=8", "--config.engine.prefill_rows=(8,)", *more,
  ]  # fmt: skip


def start_and_signal(path, number, after):
  """Starts a run and sends it a signal once `after` updates are written; returns its exit code."""
  command = [sys.executable, "experiments/run.py", *flags(path)]
  process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
  written = pathlib.Path(path) / "metrics.jsonl"
  deadline = time.time() + 240
  while not (written.exists() and written.read_bytes().count(b"\n") >= after):
    assert process.poll() is None and time.time() < deadline
    time.sleep(0.02)
  os.kill(process.pid, number)
  return process.wait(timeout=120)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_stopped_and_resumed_equals_an_uninterrupted_one(whole, tmp_path, number):
  path = tmp_path / "run"
  start_and_signal(path, number, after=2)
  if number == signal.SIGTERM:
    with checkpoint.Checkpoints(path / "checkpoints", keep=9, keep_every=None) as saved:
      assert saved.latest() == len(metrics.read(path / "metrics.jsonl"))
  assert experiment.main(flags(path, "--resume")) == 0
  place = folder.RunFolder(path)
  assert files(place) == files(whole)
  (step, host, found), (whole_step, whole_host, wanted) = arrays(place), arrays(whole)
  assert (step, host) == (whole_step, whole_host)
  for a, b in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(a, b)


def test_void_trials_do_not_stop_the_run_and_stand_in_the_report(tmp_path, monkeypatch):
  broken = {"count": 0}
  step = darkroom.Darkroom.step

  def fails_sometimes(self, response):
    broken["count"] += 1
    if broken["count"] % 17 == 0:
      raise OSError("simulator lost")
    return step(self, response)

  monkeypatch.setattr(darkroom.Darkroom, "step", fails_sometimes)
  place, status = run(
    tmp_path / "run", **{"guard.max_void": 1.0, "env.workers": 1, "eval.at_start": False}
  )
  assert status == "finished"
  records = metrics.read(place.metrics)
  assert max(record["rollout/void"] for record in records) > 0
  assert "simulator lost" in place.report.read_text()
  final = metrics.read(place.eval)[-1]["arms"]["memory"]
  assert final["void"] > 0 and final["void"] + final["trials"] == 8


def test_the_guard_stops_a_collapsed_run_with_its_reason(tmp_path):
  changes = {"guard.min_entropy": 9.0, "guard.patience": 2, "eval.at_start": False}
  place, status = run(tmp_path / "run", **changes)
  assert "collapse guard" in status and "entropy" in status
  assert len(metrics.read(place.metrics)) == 2
  assert json.loads(place.manifest.read_text())["sessions"][-1]["status"] == status


def test_wilson_interval_by_hand():
  # p = .5, n = 100, z = 1.96: centre .5; half = 1.96 sqrt(.0025 + .000096) / 1.0384 = .0962
  low, high = evaluate.wilson(50, 100)
  assert low == pytest.approx(0.4038, abs=1e-4) and high == pytest.approx(0.5962, abs=1e-4)
  assert evaluate.wilson(0, 10)[0] == 0.0 and evaluate.wilson(0, 0) == (0.0, 1.0)


def test_trajectory_entropy_by_hand():
  from tests.rollout import trials as make

  # Task 0: three a's and one b: -(3/4 ln 3/4 + 1/4 ln 1/4) = .5623; task 1: always the same: 0.
  def one(group, index, action):
    trial = make.trial(group, index, [[0.0]])
    trial.turns[0] = dataclasses.replace(trial.turns[0], action=action)
    return trial

  found = [one(0, i, a) for i, a in enumerate("aaab")] + [one(1, i, "c") for i in range(4)]
  assert evaluate.trajectory_entropy(found) == pytest.approx(0.5623 / 2, abs=1e-4)


def test_evaluation_plays_swap_and_harder_arms_and_measures_diversity(tmp_path):
  place, _ = run(
    tmp_path / "run",
    **{
      "train.updates": 1,
      "eval.tasks": 16,
      "eval.swap": "random,base",
      "eval.harder.turns6.turns": 6,
      "eval.diversity_tasks": 2,
      "eval.diversity_samples": 8,
    },
  )
  start, final = metrics.read(place.eval)
  names = {"memory", "none", "swap random", "swap base", "memory, turns6", "none, turns6"}
  assert set(final["arms"]) == names
  # Before training the base policy is the policy: the same keys, so the very same trials.
  assert start["arms"]["swap base"] == start["arms"]["memory"] | {"diversity": None}
  assert start["arms"]["swap random"]["pass"] != start["arms"]["memory"]["pass"]
  assert 0 < final["arms"]["memory"]["diversity"] <= np.log(8)
  assert len(final["arms"]["none, turns6"]["pass"]) == 3


def test_nothing_is_compiled_after_the_first_update():
  from memrl_jax.envs import pool
  from memrl_jax.sampling import engine

  run_ = runs.Run(base.settings(config(), "lamer_darkroom", "smoke"))
  run_.warmup()
  compiled = engine.compiled()
  with pool.EnvPool(run_.family, run_.settings.env.options) as envs:
    run_.learn(0, run_.rollout(0, envs))
    trained = run_.actor.trainer.compiled()
    for update in (1, 2):
      run_.learn(update, run_.rollout(update, envs))
  assert engine.compiled() == compiled
  assert run_.actor.trainer.compiled() == trained
