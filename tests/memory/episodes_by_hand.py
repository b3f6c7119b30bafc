"""Episodic memories whose similarities are made by hand, and what tests do with them."""

import contextlib
import math
import pathlib
import tempfile
import zlib

import numpy as np
import pytest

from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig, Feedback

FAST = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None


class Dial:
  """ "q" is a direction; the text "0.8 anything" is at cosine .8 to it, each text in a plane of its own."""

  name, dimension, truncated = "dial", 400, 0

  def embed(self, texts):
    rows = np.zeros((len(texts), self.dimension), np.float32)
    for row, text in zip(rows, texts, strict=True):
      word = text.split()[0]
      with contextlib.suppress(ValueError):
        row[0] = float(word)
      row[0] = 1.0 if word == "q" else row[0]
      row[self._plane(text)] = math.sqrt(max(0.0, 1 - float(row[0]) ** 2))
    return rows

  def _plane(self, text):
    return 1 + zlib.crc32(text.encode()) % (self.dimension - 1)


@pytest.fixture
def make(monkeypatch):
  """Memories that go with the test."""
  monkeypatch.setattr(tempfile, "tempdir", FAST)
  made = []

  def one(path=None, embedder=None, **options):
    options = {"delta": 0.0, "build": "trajectory", "update": "vanilla"} | options
    made.append(Episodic.open(path, embedder or Dial(), EpisodicConfig(**options)))
    return made[-1]

  yield one
  for memory in made:
    memory.close()


def put(memory, *tasks, success=True, tenant="a", **fields):
  """One memory a task; their ids."""
  first = memory.memory.version
  episodes = [
    Episode(f"{first}.{n}", task, f"did {task} {first}.{n}", success, **fields)
    for n, task in enumerate(tasks)
  ]
  return [kept.id for kept in memory.remember(tenant, episodes)]


def pay(memory, id, *rewards, tenant="a", **fields):
  """Feedback with these rewards, one after the other; the last answer."""
  for reward in rewards:
    read = (id, memory.memory.version)
    name = f"f{memory.memory.version}"
    paid = memory.feedback(tenant, [Feedback(name, reward > 0, (read,), reward, **fields)])
  return paid


def q_of(memory, *ids, tenant="a"):
  return [entry.score for entry in memory.memory.get(tenant, ids)]


def set_q(memory, values, tenant="a"):
  for id, q in values.items():
    memory.memory.change(tenant, id, score=q)
