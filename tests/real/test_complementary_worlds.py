"""Complementary RL on real environments: a run that is killed goes on, ends, and leaves nothing behind."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from memrl_jax.training import metrics

ROOT = pathlib.Path(__file__).parents[2]
WORLDS = {"minihack": "minihack", "alfworld": "alfworld"}  # experiment -> package


def ours(path):
  """Ids of the processes whose command line names this run."""
  found = set()
  for line in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
      if f"MEMRL_TEST_RUN={path}".encode() in line.read_bytes().split(b"\0"):
        found.add(int(line.parent.name))
    except OSError:  # gone meanwhile, or not ours to read
      continue
  return found


def start(world, path, *more):
  return subprocess.Popen(
    [
      sys.executable, "experiments/run.py", f"--config=experiments/complementary_{world}.py:smoke",
      f"--workdir={path}", "--config.train.updates=3", "--config.env.turns=4",
      "--config.env.isolation=process", *more,
    ],
    cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    env=os.environ | {"MEMRL_TEST_RUN": str(path), "TMPDIR": str(path.parent / "tmp")},
  )  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_a_run_that_was_killed_ends_after_resuming_and_leaves_no_process(world, tmp_path):
  pytest.importorskip(WORLDS[world], reason=f"needs the game: pip install -e .[{world}]")
  path, scratch = tmp_path / "run", tmp_path / "tmp"
  scratch.mkdir()
  killed = start(world, path)
  written = path / "metrics.jsonl"
  deadline = time.time() + 400
  while not (written.exists() and written.read_bytes().count(b"\n") >= 1):
    assert killed.poll() is None, killed.stdout.read()
    assert time.time() < deadline
    time.sleep(0.1)
  os.kill(killed.pid, signal.SIGKILL)
  killed.wait()
  resumed = start(world, path, "--resume")
  text, _ = resumed.communicate(timeout=400)
  assert resumed.returncode == 0, text
  records = metrics.read(written)
  assert [record["step"] for record in records] == [1, 2, 3]
  assert all(record["rollout/void"] == 0 for record in records)
  assert records[-1]["rollout/guided_trials"] == records[-1]["rollout/free_trials"] > 0
  assert all(record["extractor/answered"] > 0 for record in records)
  (record,) = [r for r in metrics.read(path / "eval.jsonl") if r["label"] == "final"]
  assert record["arms"]["none"]["trials"] == record["arms"]["memory"]["trials"] == 4
  deadline = time.time() + 20  # workers of the killed run end a moment after it
  while ours(path) and time.time() < deadline:
    time.sleep(0.2)
  assert not ours(path)
