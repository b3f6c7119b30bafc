"""Killed in the middle of feedback: what was acknowledged is there, once, and Q equals the replayed log."""

import pathlib
import random
import signal
import subprocess
import sys
import time

from memrl_jax.memory import check, embed
from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig, Feedback

ROOT = pathlib.Path(__file__).parents[2]
KILLS = 6
CONFIG = EpisodicConfig(delta=0.0, build="trajectory", update="vanilla")

# Feedback n pays both memories +1 or -1, says so, and remembers an episode now and then.
WRITER = """
import os, sys
from memrl_jax.memory import embed
from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig, Feedback
with Episodic.open(sys.argv[1], embed.Hash(32), EpisodicConfig(
    delta=0.0, build="trajectory", update="vanilla")) as memory:
  n = int(sys.argv[2])
  os.write(1, b"open\\n")
  while True:
    reads = ((1, 1), (2, 1))
    memory.feedback("a", [Feedback(str(n), n % 3 > 0, reads)])
    os.write(1, b"%d\\n" % n)
    memory.remember("a", [Episode(f"e{n}", f"task {n}", f"text {n}", True)])
    n += 1
"""


def test_feedback_acknowledged_is_feedback_kept_once(tmp_path):
  with Episodic.open(tmp_path, embed.Hash(32), CONFIG) as memory:
    memory.remember("a", [Episode(f"s{n}", f"start {n}", f"t{n}", True) for n in range(2)])
  rng, number, torn = random.Random(0), 0, 0
  for _ in range(KILLS):
    child = subprocess.Popen(
      [sys.executable, "-c", WRITER, tmp_path, str(number)],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      text=True,
    )
    for _ in range(2 + rng.randrange(4)):
      child.stdout.readline()
    time.sleep(rng.uniform(0, 0.01))
    child.send_signal(signal.SIGKILL)
    lines = child.stdout.read().split()
    child.wait()
    child.stdout.close()
    assert check.verify(tmp_path) == []
    with Episodic.open(tmp_path, embed.Hash(32), CONFIG) as memory:
      paid = memory.memory.get("a", [1])[0].data["visits"]
      if lines:
        number = int(lines[-1]) + 1
      assert paid >= number, "an acknowledged feedback is lost"
      # A client that had no answer sends again: what is there is not paid twice.
      again = [Feedback(str(n), n % 3 > 0, ((1, 1), (2, 1))) for n in range(paid + 1)]
      done = memory.feedback("a", again)
      assert done.repeated == paid
      torn, number = torn + (paid > number), paid + 1
      q = 0.0
      for n in range(number):
        q += 0.3 * ((1.0 if n % 3 else -1.0) - q)
      entries = memory.memory.get("a", [1, 2])
      assert [entry.score for entry in entries] == [q, q]
      assert {entry.data["visits"] for entry in entries} == {number}
      assert memory.memory.store.lineage(1).mean_reward is not None
  assert number > KILLS
