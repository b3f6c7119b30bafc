"""Killed while many threads give feedback: what was acknowledged is there, once, and Q is its replay."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from memrl_jax import runtime
from memrl_jax.memory import check, embed
from memrl_jax.memory.episodic import EpisodicConfig

ROOT = pathlib.Path(__file__).parents[2]
KILLS = 3
CONFIG = runtime.RuntimeConfig(
  episodic=EpisodicConfig(delta=0.0, build="trajectory", update="vanilla", k1=1)
)

# Four threads: every acknowledged feedback is a line "ID", every unanswered one is "?ID" alone.
WORKER = """
import os, sys, threading
from memrl_jax import runtime
from memrl_jax.memory import embed
from memrl_jax.memory.episodic import EpisodicConfig
config = runtime.RuntimeConfig(
  episodic=EpisodicConfig(delta=0.0, build="trajectory", update="vanilla", k1=1))
memory = runtime.open(sys.argv[1], config, embedder=embed.Hash(32))
def work():
  while True:
    id = memory.suggest("start").id
    os.write(1, f"?{id}\\n".encode())
    memory.feedback(id, 1.0)
    os.write(1, f"!{id}\\n".encode())
for _ in range(4):
  threading.Thread(target=work).start()
"""


def test_acknowledged_is_kept_once_through_kills(tmp_path):
  with runtime.open(tmp_path, CONFIG, embedder=embed.Hash(32)) as memory:
    memory.feedback(memory.suggest("start").id, 1.0, "go")
  rng, acknowledged, unanswered = random.Random(0), set(), set()
  for _ in range(KILLS):
    child = subprocess.Popen(
      [sys.executable, "-c", WORKER, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    lines = [child.stdout.readline() for _ in range(8 + rng.randrange(30))]
    time.sleep(rng.uniform(0, 0.01))
    os.kill(child.pid, signal.SIGKILL)
    lines += child.stdout.readlines()
    child.wait()
    child.stdout.close()
    asked = {line[1:].strip() for line in lines if line[0] == "?" and line.endswith("\n")}
    done = {line[1:].strip() for line in lines if line[0] == "!" and line.endswith("\n")}
    acknowledged |= done
    unanswered |= asked - done
    assert check.verify(tmp_path) == []
  with runtime.open(tmp_path, CONFIG, embedder=embed.Hash(32)) as memory:
    assert len(acknowledged) > KILLS and unanswered
    entry = memory.show(1)
    assert entry["visits"] >= len(acknowledged), "an acknowledged feedback is lost"
    assert all(memory.feedback(id, 1.0).repeated for id in acknowledged)
    for id in unanswered:  # a client without an answer sends again; each counts once in the end
      memory.feedback(id, 1.0)
    entry = memory.show(1)
    assert entry["visits"] == len(acknowledged) + len(unanswered)
    assert entry["q"] == pytest.approx(1 - 0.7 ** entry["visits"])
