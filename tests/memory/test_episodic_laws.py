"""Any life of an episodic memory against a few lines of plain Python, and many threads at once."""

import math
import pathlib
import statistics
import tempfile
import threading

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig, Feedback
from memrl_jax.memory.episodic_prompt import Suggestion, blocks

FAST = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None


class Angle:
  """ "12 x" is the direction at 12 degrees."""

  name, dimension, truncated = "angle", 2, 0

  def embed(self, texts):
    angles = [math.radians(int(text.split()[0])) for text in texts]
    return np.array([[math.cos(a), math.sin(a)] for a in angles], np.float32).reshape(-1, 2)


def cosine(a, b):
  (x, y) = Angle().embed([a, b]).astype(np.float64)
  return float(np.float32(x @ y))


class Oracle:
  """The definition, slowly: lists, sorted, statistics."""

  def __init__(self, config):
    self.config, self.rows, self.done = config, [], set()

  def remember(self, task, text, success):
    nearest = max(self.rows, key=lambda row: (cosine(row["key"], task), -row["id"]), default=None)
    near = nearest and cosine(nearest["key"], task) >= np.float32(self.config.add_similarity)
    key = nearest["key"] if near else task
    q = self.config.q_success if success else self.config.q_failure
    self.rows.append({"id": len(self.rows) + 1, "key": key, "text": text, "q": q, "n": 0})

  def suggest(self, query):
    c = self.config
    near = [(cosine(row["key"], query), row) for row in self.rows]
    near = [(s, row) for s, row in near if s > np.float32(c.delta)]
    near.sort(key=lambda pair: (-pair[0], pair[1]["id"]))
    keys = list(dict.fromkeys(row["key"] for _, row in near))[: c.k1]
    pool = [(s, row) for s, row in near if row["key"] in keys]
    if c.count == "memories":
      pool = near[: c.k1]
    if not pool:
      return []
    columns = [s for s, _ in pool], [row["q"] for _, row in pool]
    z = []
    for values in columns:
      mean, spread = statistics.fmean(values), statistics.pstdev(values)
      z.append([(v - mean) / spread if spread > 1e-6 else 0.0 for v in values])
    scores = [
      (1 - c.lambda_) * a + c.lambda_ * max(-c.q_clip, min(c.q_clip, b))
      for a, b in zip(*z, strict=True)
    ]
    order = sorted(range(len(pool)), key=lambda n: (-round(scores[n], 9), n))
    return [pool[n][1]["id"] for n in order][: c.k2]

  def feedback(self, name, ids, reward):
    if name in self.done:
      return
    self.done.add(name)
    for id in ids:
      row = self.rows[id - 1]
      step = self.config.alpha if self.config.step == "constant" else 1 / (row["n"] + 1)
      row["q"] = (1 - step) * row["q"] + step * reward
      row["n"] += 1


STEP = st.one_of(
  st.tuples(st.just("remember"), st.integers(0, 60), st.booleans()),
  st.tuples(st.just("suggest"), st.integers(0, 60), st.sampled_from([-1.0, 0.0, 1.0])),
  st.tuples(st.just("again"), st.integers(0, 9), st.sampled_from([-1.0, 1.0])),
)
CONFIG = st.fixed_dictionaries(
  {
    "delta": st.sampled_from([0.0, 0.9, 0.97, 0.999]),
    "k1": st.integers(1, 4),
    "k2": st.integers(1, 4),
    "lambda_": st.sampled_from([0.0, 0.5, 0.7, 1.0]),
    "count": st.sampled_from(["keys", "memories"]),
    "step": st.sampled_from(["constant", "1/n"]),
    "add_similarity": st.sampled_from([0.99, 0.9999, 1.0]),
    "q_clip": st.sampled_from([0.5, 3.0]),
    "q_success": st.sampled_from([0.0, 0.5]),
  }
)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(CONFIG, st.lists(STEP, max_size=25))
def test_any_life_equals_the_definition(options, steps):
  config = EpisodicConfig(build="trajectory", update="vanilla", **options)
  old, tempfile.tempdir = tempfile.tempdir, FAST
  try:
    with Episodic.open(None, Angle(), config) as memory:
      oracle = Oracle(config)
      for n, (what, number, value) in enumerate(steps):
        if what == "remember":
          memory.remember("a", [Episode(f"e{n}", f"{number}", f"did {n}", value)])
          memory.remember("b", [Episode(f"e{n}", f"{number}", f"not yours {n}", value)])
          oracle.remember(f"{number}", f"did {n}", value)
          # Two tenants, one counter of ids: those of "a" are odd.
          continue
        if what == "suggest":
          found = memory.suggest("a", f"{number}")
          ids = [(one.id + 1) // 2 for one in found]
          assert ids == oracle.suggest(f"{number}")
          name, reads = f"f{n % 10}", [one.read for one in found]
        else:
          name, ids, reads = f"f{number}", [], []
        memory.feedback("a", [Feedback(name, value > 0, tuple(reads), value)])
        oracle.feedback(name, ids, value)
        q = {(entry.id + 1) // 2: entry.score for entry in memory.memory.entries("a")}
        assert q == pytest.approx({row["id"]: row["q"] for row in oracle.rows}, abs=1e-9)
      assert {entry.data["visits"] for entry in memory.memory.entries("b")} <= {0}
      assert memory.memory.verify() == []
  finally:
    tempfile.tempdir = old


def test_8_readers_and_writers_lose_no_update(tmp_path):
  """4 threads pay each memory 10 times, each its own reward: the plain mean is then theirs, 1.5."""
  config = EpisodicConfig(
    delta=0.0, build="trajectory", update="vanilla", step="1/n", k1=9, k2=9, lambda_=1.0
  )
  with Episodic.open(tmp_path, Angle(), config) as memory:
    memory.remember("a", [Episode(f"{n}", f"{20 * n}", f"t{n}", True) for n in range(3)])
    stop, wrong = threading.Event(), []

    def read():
      last = 0
      while not stop.is_set():
        found = memory.suggest("a", "20")
        ns, versions = {one.visits for one in found}, {one.version for one in found}
        if (
          len(versions) != 1 or min(versions) < last or len(ns) != 1
        ):  # half a feedback, or back in time
          wrong.append(found)
        last = max(versions)
        stop.wait(0.005)  # or they leave the writers nothing of the interpreter

    def pay(thread):
      for n in range(10):
        reads = tuple((id, 1) for id in (1, 2, 3))
        memory.feedback("a", [Feedback(f"{thread}.{n}", True, reads, float(thread))])

    def grow():
      for n in range(10):
        memory.remember("b", [Episode(f"{n}", f"{n}", f"b{n}", True)])

    readers = [threading.Thread(target=read) for _ in range(8)]
    writers = [threading.Thread(target=pay, args=(n,)) for n in range(4)]
    writers.append(threading.Thread(target=grow))
    for thread in (*readers, *writers):
      thread.start()
    for thread in writers:
      thread.join()
    stop.set()
    for thread in readers:
      thread.join()
    assert not wrong
    for entry in memory.memory.entries("a"):
      assert entry.data["visits"] == 40 and entry.score == pytest.approx(1.5)
    assert memory.stats("b")["memories"] == 10 and memory.memory.verify() == []


# --- prompts -------------------------------------------------------------------------------------


def one(id, learned, rest, *, success=True, score=0.0):
  text = f"{learned}\n{rest}"
  return Suggestion(id, 1, "k", text, success, 0.5, 0.0, 0, 0.0, 0.0, score, len(learned))


def test_successes_first_failures_as_a_caution_and_budgets_in_any_unit():
  found = [one(2, "good", "y" * 50, score=1.0), one(1, "bad", "x", success=False, score=2.0)]
  wide = blocks(found, memory_budget=1000, total_budget=1000)
  assert len(wide) == 2 and wide[0].startswith("What worked") and "good\n" + "y" * 50 in wide[0]
  assert wide[1].startswith("What failed") and "bad\nx" in wide[1]
  # A memory loses its trajectory first, and what was learned last.
  (follow,) = blocks(found[:1], memory_budget=20, total_budget=1000)
  assert f"good\n{'y' * 9} [cut]\n" in follow  # 4 + 1 + 9 + 6 = 20
  (follow,) = blocks(found[:1], memory_budget=8, total_budget=1000)
  assert "\ngo [cut]\n" in follow
  # Too little for both: the better score has it, and no heading stands over nothing.
  assert blocks(found, memory_budget=99, total_budget=130)[0].startswith("What failed")
  assert blocks(found, memory_budget=99, total_budget=20) == ()
  # Tokens: here words.
  found[0] = one(2, "good", "y " * 50, score=1.0)
  words = blocks(found, memory_budget=4, total_budget=99, count=lambda text: len(text.split()))
  assert "good\ny y [cut]\n" in words[0] and "bad\nx\n" in words[1]
  only = blocks(found, memory_budget=99, total_budget=999, failed_trajectory=False)
  assert "bad\n</memory>" in only[1] and "y y" in only[0]


@hypothesis.settings(max_examples=100, deadline=None)
@hypothesis.given(
  st.lists(
    st.tuples(st.text(max_size=30), st.text(max_size=60), st.booleans(), st.integers(0, 3)),
    max_size=4,
  ),
  st.integers(1, 80),
  st.integers(1, 400),
)
def test_no_budget_is_exceeded_and_no_text_gets_out_of_its_tag(rows, per, total):
  found = [
    one(n, learned, rest, success=success, score=score)
    for n, (learned, rest, success, score) in enumerate(rows)
  ]
  shown = blocks(found, memory_budget=per, total_budget=total)
  whole = "\n\n".join(shown)
  assert len(whole) <= total and len(shown) <= 2
  assert whole.count("</memory>") == whole.count("<memory number=")
  for part in whole.split('<memory number="')[1:]:
    assert len(part.split("\n", 1)[1].split("\n</memory>")[0]) <= per
