"""EMPO2 on the real ScienceWorld: a run that is killed goes on, and leaves no simulator behind."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from memrl_jax.training import metrics

pytest.importorskip("scienceworld", reason="needs the simulator: pip install scienceworld==1.2.3")
pytestmark = pytest.mark.skipif(
  shutil.which("java") is None, reason="needs Java: apt-get install openjdk-17-jre-headless"
)
ROOT = pathlib.Path(__file__).parents[2]
WAIT_S = 600  # for an update on a crowded machine
# One task in both updates, so that the second reads what the first wrote.
SMALL = (
  "method.p_memory=1.0", "train.updates=2", "env.variations=1", "env.max_calls=4", "pack.sequences=1",
)  # fmt: skip


def simulators():
  """Ids of the Java processes that run ScienceWorld."""
  found = set()
  for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      words = path.read_bytes().split(b"\0")
    except OSError:  # gone meanwhile
      continue
    if words[0].endswith(b"java") and any(b"scienceworld" in word for word in words):
      found.add(int(path.parent.name))
  return found


def start(path, *more):
  return subprocess.Popen(
    [
      sys.executable, "experiments/run.py", "--config=experiments/empo2_scienceworld.py:smoke",
      f"--workdir={path}", *(f"--config.{change}" for change in SMALL), *more,
    ],
    cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
  )  # fmt: skip


def test_a_run_that_was_killed_ends_after_resuming_and_leaves_no_simulator(tmp_path):
  before, path = simulators(), tmp_path / "run"
  killed = start(path)
  written = path / "metrics.jsonl"
  deadline = time.time() + WAIT_S
  while not (written.exists() and written.read_bytes().count(b"\n") >= 1):
    assert killed.poll() is None and time.time() < deadline
    time.sleep(0.1)
  assert simulators() - before
  os.kill(killed.pid, signal.SIGKILL)
  killed.wait()
  resumed = start(path, "--resume")
  text, _ = resumed.communicate(timeout=WAIT_S)
  assert resumed.returncode == 0, text
  assert [record["step"] for record in metrics.read(written)] == [1, 2]
  records = metrics.read(written)
  assert all(record["rollout/void"] == 0 for record in records)
  assert records[0]["memory/shown"] == 0 < records[-1]["memory/shown"]
  (record,) = [r for r in metrics.read(path / "eval.jsonl") if r["label"] == "final"]
  assert record["arms"]["none"]["trials"] == 4
  deadline = time.time() + 20  # a Java process dies a moment after its parent
  while simulators() - before and time.time() < deadline:
    time.sleep(0.2)
  assert not simulators() - before
