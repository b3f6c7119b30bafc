"""Tasks that look alike, of whose memories one helps and four mislead: what each method makes of them."""

import pathlib
import tempfile
import zlib

import numpy as np
import pytest

from memrl_jax.memory import episodic_metrics
from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig, Feedback

FAST = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None
FAMILIES, TASKS, EPOCHS, SEEDS = 4, 6, 12, range(5)
SUCCESS = {True: 0.9, False: 0.15}  # with the memory that helps in the prompt, and with another one


class Families:
  """ "2 anything" is near direction 2; what is nearest inside a family is chance."""

  name, dimension, truncated = "families", 24, 0

  def embed(self, texts):
    rows = np.zeros((len(texts), self.dimension), np.float32)
    for row, text in zip(rows, texts, strict=True):
      rng = np.random.default_rng(zlib.crc32(text.encode()))
      row[:] = 0.12 * rng.normal(size=self.dimension)
      row[int(text.split()[0])] += 1
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def success(seed, **options):
  """Which task succeeded in which epoch, and the memory's own account of it."""
  config = EpisodicConfig(
    delta=0.4,
    k1=5,
    k2=1,
    build="trajectory",
    update="vanilla",
    add_similarity=1.0,
    seed=seed,
    **options,
  )
  rng, success_ET = np.random.default_rng(seed), np.zeros((EPOCHS, FAMILIES * TASKS), bool)
  with Episodic.open(None, Families(), config) as memory:
    episodes = [
      Episode(
        f"{f}.{n}", f"{f} memory {n} {seed}", "helps" if n == seed % 5 else f"misleads {n}", True
      )
      for f in range(FAMILIES)
      for n in range(5)
    ]
    memory.remember("a", episodes)
    queries = [f"{f} task {n} {seed}" for f in range(FAMILIES) for n in range(TASKS)]
    for epoch in range(EPOCHS):
      given = []
      for t, found in enumerate(memory.suggest_many("a", queries)):
        (one,) = found
        success_ET[epoch, t] = rng.random() < SUCCESS["helps" in one.text]
        given.append(Feedback(f"{epoch}.{t}", bool(success_ET[epoch, t]), (one.read,)))
      memory.feedback("a", given)
    return success_ET, memory.used("a")


@pytest.fixture(scope="module")
def runs():
  old, tempfile.tempdir = tempfile.tempdir, FAST
  methods = {
    "memrl": {},
    "similarity": {"lambda_": 0.0},
    "memp": {"lambda_": 0.0, "alpha": 0.0},
  }
  yield {name: [success(seed, **how) for seed in SEEDS] for name, how in methods.items()}
  tempfile.tempdir = old


def mean(runs, method, number):
  return float(np.mean([number(success_ET) for success_ET, _ in runs[method]]))


def test_utility_beats_similarity_among_distractors_and_forgets_no_more(runs):
  last = {
    name: mean(runs, name, lambda success_ET: success_ET[-4:].mean())  # 480 trials: SE .02
    for name in runs
  }
  assert last["memrl"] > 1.1 * last["similarity"] and last["memrl"] > 0.6
  assert (
    abs(last["similarity"] - last["memp"]) < 0.08
  )  # learning that nobody looks at changes nothing
  forgets = {name: mean(runs, name, episodic_metrics.forgetting_rate) for name in runs}
  assert forgets["memrl"] <= forgets["similarity"]


def test_q_foretells_success(runs):
  q_N, success_N, worked_N = (
    np.concatenate(x) for x in zip(*(u for _, u in runs["memrl"]), strict=True)
  )
  found = episodic_metrics.by_q(q_N, success_N, worked_N, np.linspace(-1, 1, 9))
  assert episodic_metrics.pearson(q_N, success_N) > 0.4 and found.pearson > 0.8
  assert found.count_B.sum() == len(q_N) == len(SEEDS) * EPOCHS * FAMILIES * TASKS
