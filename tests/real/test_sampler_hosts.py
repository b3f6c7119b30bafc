"""Sampler processes beside the learner's: the run of one process, also after the first of them is killed.

LaMer on Dark Room, rollouts one update ahead, on two servers of which one dies, then the other.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from experiments import run
from memrl_jax.training import metrics, runs
from tests.sampling.tiny_engine import settings
from tests.training.test_remote_loop import ids_of

ROOT = pathlib.Path(__file__).parents[2]
UPDATES = 5


def flags(place, *more):
  return [
    "--config=experiments/lamer_darkroom.py:smoke", f"--workdir={place}", "--config.eval.tasks=4",
    "--config.engine.slots=8", "--config.eval.at_start=false", f"--config.train.updates={UPDATES}",
    "--config.train.max_lag=1", "--config.loss.old_logps=trainer", "--config.train.rollouts_every=1",
    *more,
  ]  # fmt: skip


@contextlib.contextmanager
def servers():
  """(process, address) of three, started together; what they compile was compiled before, if it can be."""
  buckets = ",".join(map(str, settings().engine.buckets))
  command = [
    sys.executable, "-m", "memrl_jax.sampling.serve", "--checkpoint=tiny:darkroom", "--port=0", "--slots=8",
    f"--buckets={buckets}",
  ]  # fmt: skip
  started = [
    subprocess.Popen(
      command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    for _ in range(3)
  ]
  try:
    lines = [process.stdout.readline() for process in started]
    yield [
      (p, line.split(" at ")[1].split("/v1")[0]) for p, line in zip(started, lines, strict=True)
    ]
  finally:
    for process in started:
      process.kill()
      process.wait()


def test_a_run_outlives_one_server_and_is_resumed_after_the_last(tmp_path, monkeypatch):
  here, away = tmp_path / "here", tmp_path / "away"
  assert run.main(flags(here)) == 0
  with servers() as three:
    (first, one), (second, other), (_, spare) = three
    learn = runs.Run.learn

    def killing(self, update, trials):
      for process in {1: [first], 3: [second]}.get(update, []):
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
      return learn(self, update, trials)

    quick = ["--config.remote.retries=1", f"--config.remote.weights={tmp_path / 'weights'}"]
    with monkeypatch.context() as patch:
      patch.setattr(runs.Run, "learn", killing)
      assert run.main(flags(away, f"--config.remote.url={one},{other}", *quick)) == 3
    manifest = (away / "manifest.json").read_text()
    assert "no server took new weights: no server answers at" in manifest or "is left" in manifest
    (*_, last) = metrics.read(away / "timing.jsonl")
    assert (
      last["remote/lost"] >= 1 and last["remote/failed"] == 0 and last["remote/pushed_bytes"] > 0
    )
    assert last["seconds/push"] > 0
    assert 3 <= len(metrics.read(away / "metrics.jsonl")) < UPDATES
    assert run.main(flags(away, f"--config.remote.url={spare}", *quick, "--resume")) == 0
  for update in range(1, UPDATES + 1):
    assert ids_of(away, update) == ids_of(here, update), update
  for near, far in zip(
    metrics.read(here / "metrics.jsonl"), metrics.read(away / "metrics.jsonl"), strict=True
  ):
    assert far["train/lag"] == near["train/lag"] == min(far["step"] - 1, 1)
    assert far["rollout/void"] == 0
    for name in ("train/entropy", "train/logp_gap", "train/logp_gap_max"):
      assert far[name] == pytest.approx(near[name], abs=1e-4)
