"""Mem-pi over real web pages: a run that is killed goes on, ends, and leaves no browser behind.

Needs a Chromium, `pip install browsergym-miniwob` and `pip install --no-deps miniwob`.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from memrl_jax.envs import browser_engine
from memrl_jax.training import metrics

pytest.importorskip(
  "browsergym.miniwob", reason="packages: pip install browsergym-miniwob; --no-deps miniwob"
)
try:
  browser_engine.executable("")
except ValueError as error:
  pytest.skip(str(error), allow_module_level=True)
ROOT = pathlib.Path(__file__).resolve().parents[2]
WAIT_S = 600  # for an update on a crowded machine; a free one takes a minute
# 21 tasks, each shown in half the room, so that prompts take half the columns.
SMALL = (
  "train.groups=7", "train.updates=4", "method.distil=1", "eval.tasks=2", "env.page_chars=300",
  "pack.length=1536", "engine.buckets=(1536,)", "agent.engine.buckets=(1536,)",
)  # fmt: skip


def ours(mark):
  """Ids of the processes whose environment has this mark: the run, its workers, drivers and browsers."""
  found = set()
  for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
      if f"MEMRL_TEST_RUN={mark}".encode() in path.read_bytes().split(b"\0"):
        found.add(int(path.parent.name))
    except OSError:  # gone meanwhile, or not ours to read
      continue
  return found


def start(path, scratch, *more):
  return subprocess.Popen(
    [
      sys.executable, "experiments/run.py", "--config=experiments/mempi_miniwob.py:smoke",
      f"--workdir={path}", *(f"--config.{change}" for change in SMALL), *more,
    ],
    cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    env=os.environ | {"MEMRL_TEST_RUN": str(path), "TMPDIR": scratch},
  )  # fmt: skip


def written(path):
  return metrics.read(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []


def soon(what, process=None):
  """Waits until a function gives something true; fails if a process ends before."""
  deadline = time.monotonic() + WAIT_S
  while not what():
    assert time.monotonic() < deadline
    assert process is None or process.poll() is None, process.stdout.read()
    time.sleep(0.1)


def test_a_run_over_twenty_tasks_that_was_killed_ends_after_resuming_and_leaves_no_browser(
  tmp_path,
):
  path = tmp_path / "run"
  with tempfile.TemporaryDirectory(prefix="m") as scratch:  # its name is short enough for a socket
    killed = start(path, scratch)
    soon(lambda: len(written(path)) >= 2, killed)
    soon(lambda: browser_engine.running(scratch), killed)
    assert len(ours(path)) > 1
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = start(path, scratch, "--resume")
    text, _ = resumed.communicate(timeout=2 * WAIT_S)
    assert resumed.returncode == 0, text
    records = written(path)
    assert [one["step"] for one in records] == [1, 2, 3, 4]
    played = [one for one in records if "rollout/void" in one]
    assert len(played) == 3 and all(one["rollout/void"] == 0 for one in played)
    assert records[0]["bank/hints"] > 0 and "mempi/alone" in records[3]
    trials = [
      one for step in (1, 3, 4) for one in metrics.read(path / f"rollouts/{step:06d}.jsonl")
    ]
    assert len({one["task"].partition("/")[0] for one in trials}) >= 20
    ends = {one["label"]: one["arms"] for one in metrics.read(path / "eval.jsonl")}
    assert ends.keys() == {"anchor", "final"}
    assert all(ends["final"][arm]["trials"] == 2 for arm in ("none", "rag", "memory"))
    soon(lambda: not ours(path))
    assert not browser_engine.running(scratch)
