"""What a memory costs by its size: add, search, change, remove, rollback; recall after a switch and drift.

    taskset -c 1 python experiments/bench/memory.py --sizes 1000,10000,100000

Entries have clustered unit vectors (d = 384, a topic for every 50 entries) that an embedder with a
table hands out, so that no embedding is timed; `embed` is the hash embedder by itself. The bare FAISS
Flat search runs in the same process in turn with ours, on the same vectors. Each case is a line of
JSON, milliseconds.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import faiss
import numpy as np

from memrl_jax.memory import ann, bank, embed, index

WIDTH, PER_TOPIC, SPREAD = 384, 50, 0.06  # cosine of two entries of a topic: about 0.42


class Table:
  """An embedder that knows its texts "vector N" beforehand."""

  name, dimension, truncated = "table", WIDTH, 0

  def __init__(self, vectors_ND: np.ndarray):
    self.vectors_ND = vectors_ND

  def embed(self, texts):
    return self.vectors_ND[[int(text.split()[1]) for text in texts]]


def clustered(size: int, seed: int, topics: int | None = None) -> np.ndarray:
  rng = np.random.default_rng(seed)
  topics = topics or max(2, size // PER_TOPIC)
  centres = rng.normal(size=(topics, WIDTH)) / WIDTH**0.5
  made = centres[rng.integers(topics, size=size)] + SPREAD * rng.normal(size=(size, WIDTH))
  return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


class Taken(list):
  """Wall milliseconds of each call; `cpu` has this thread's own."""

  def __init__(self):
    self.cpu: list[float] = []


def timed(call: Callable, args: Iterable, into: Taken | None = None) -> Taken:
  """Times call(arg) for each arg."""
  taken = Taken() if into is None else into
  for arg in args:
    start, cpu = time.perf_counter(), time.thread_time()
    call(arg)
    taken.cpu.append(1e3 * (time.thread_time() - cpu))
    taken.append(1e3 * (time.perf_counter() - start))
  return taken


def show(case: str, size: int, taken: Taken, per: int = 1, **more) -> None:
  figures = {f"p{p}": round(float(np.percentile(taken, p)) / per, 4) for p in (50, 99)}
  figures["cpu_p50"] = round(float(np.median(taken.cpu)) / per, 4)
  print(json.dumps({"case": case, "size": size, "n": len(taken), **figures, **more}), flush=True)


def calls(size: int, searches: int) -> None:
  """Every operation at one size."""
  vectors_ND = clustered(size + 2000, seed=size)
  items = [
    (f"vector {n}", f"text of entry {n}, about a hundred characters " + "x" * 50)
    for n in range(len(vectors_ND))
  ]
  queries_QD = clustered(searches, seed=size, topics=max(2, (size + 2000) // PER_TOPIC))
  with tempfile.TemporaryDirectory() as folder:
    exact = ann.Policy(kind="exact")
    memory = bank.Memory.open(folder, Table(vectors_ND), policy=exact)
    taken = timed(lambda n: memory.add("a", items[n : n + 100]), range(0, size, 100))
    show("add, batches of 100, an entry", size, taken, per=100)
    bare = faiss.IndexFlatIP(WIDTH)
    bare.add(vectors_ND[:size])
    ours, theirs = Taken(), Taken()
    for query_D in queries_QD:  # in turn, so that a busy machine slows both
      timed(lambda q: bare.search(q, 10), [query_D[None]], theirs)
      timed(lambda q: memory.search_vectors("a", q, 10), [query_D[None]], ours)
    show("bare FAISS Flat search, k 10", size, theirs)
    ratio = {
      "ratio": round(float(np.median(ours) / np.median(theirs)), 3),
      "cpu_ratio": round(float(np.median(ours.cpu) / np.median(theirs.cpu)), 3),
    }
    show("search, k 10", size, ours, **ratio)
    show(
      "search, all above .3",
      size,
      timed(lambda q: memory.search_vectors("a", q, None, 0.3), queries_QD[:, None]),
    )
    batch = timed(lambda n: memory.search_vectors("a", queries_QD[:64], 10), range(10))
    show("search in batches of 64, a query", size, batch, per=64)
    show("add of one", size, timed(lambda n: memory.add("a", [items[n]]), range(size, size + 200)))
    version = memory.version
    show(
      "change of a score", size, timed(lambda n: memory.change("a", n, score=1.0), range(1, 201))
    )
    show(
      "change of a key",
      size,
      timed(lambda n: memory.change("a", n, key=items[n + size][0]), range(1, 201)),
    )
    show("remove of one", size, timed(lambda n: memory.remove("a", [n]), range(1, 101)))
    show(
      "remove of 500 at once, an entry",
      size,
      timed(lambda n: memory.remove("a", range(n, n + 500)), [101]),
      per=500,
    )
    show("rollback over all that", size, timed(memory.rollback, [version]))
    memory.close()
    opened: list[bank.Memory] = []
    table = Table(vectors_ND)
    taken = timed(lambda _: opened.append(bank.Memory.open(folder, table, policy=exact)), [0])
    bytes_ = sum(file.stat().st_size for file in pathlib.Path(folder).iterdir())
    show("open", size, taken, megabytes_on_disk=round(bytes_ / 1e6))
    opened[0].close()


def recall_above(built: index.Index, queries_QD: np.ndarray, above: float = 0.3) -> float:
  """Share of the exact 10 best above a cosine that a search finds."""
  exact = [best.ids[best.similarity > above] for best in built.vectors.nearest(queries_QD, 10)]
  found = [best.ids for best in built.search_batch(queries_QD, 10, above)]
  return sum(len(np.intersect1d(*pair)) for pair in zip(exact, found, strict=True)) / max(
    1, sum(map(len, exact))
  )


def approximate(size: int, kind: str) -> None:
  """Recall and time after the switch, and after as many entries again on topics that are new."""
  first_ND, moved_ND = clustered(size, seed=1), clustered(size, seed=2)
  policy = ann.Policy(kind=kind, min_size=size, budget_ms=0, background=False)
  with bank.Memory.open(None, Table(np.concatenate([first_ND, moved_ND])), policy=policy) as memory:
    start = time.perf_counter()
    memory.add("a", [(f"vector {n}", "t") for n in range(size)])
    built = memory._mirror.tenants["a"].index
    seconds = time.perf_counter() - start
    for case, queries_QD in (
      ("switch", clustered(200, seed=1, topics=size // PER_TOPIC)),
      ("drift", clustered(200, seed=2, topics=size // PER_TOPIC)),
    ):
      if case == "drift":
        start, least = time.perf_counter(), 1.0
        for n in range(size, 2 * size, size // 20):
          memory.add("a", [(f"vector {m}", "t") for m in range(n, n + size // 20)])
          least = min(least, recall_above(built, queries_QD[:50]))
        seconds = time.perf_counter() - start
      taken = timed(lambda q: memory.search_vectors("a", q, 10), queries_QD[:, None])
      more = {"least_recall_above_.3_on_the_way": round(least, 3)} if case == "drift" else {}
      show(
        f"{kind} after {case}",
        len(built),
        taken,
        recall=round(built.recall(queries_QD), 3),
        lists_read=built.ann and int(built.ann.index.nprobe),
        lists=built.ann and built.ann.index.nlist,
        seconds=round(seconds, 1),
        **more,
      )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--sizes", default="1000,10000,100000")
  parser.add_argument("--searches", type=int, default=500)
  parser.add_argument(
    "--approximate", type=int, default=50_000, help="entries at the switch; 0: none"
  )
  args = parser.parse_args()
  faiss.omp_set_num_threads(1)
  print(
    json.dumps(
      {
        "python": platform.python_version(),
        "faiss": faiss.__version__,
        "numpy": np.__version__,
        "cpus": len(os.sched_getaffinity(0)),
      }
    )
  )
  words = [f"word{n % 997} of text {n % 89}" for n in range(20_000)]
  texts = [" ".join(words[n : n + 12])[:200] for n in range(2000)]
  hashed = embed.Hash()
  show("hash embedding of 200 characters", 1, timed(lambda t: hashed.embed([t]), texts))
  show(
    "the same in batches of 100, a text",
    100,
    timed(lambda n: hashed.embed(texts[n : n + 100]), range(0, 2000, 100)),
    per=100,
  )
  for size in map(int, filter(None, args.sizes.split(","))):
    calls(size, args.searches)
  for kind in ann.KINDS if args.approximate else ():
    approximate(args.approximate, kind)


if __name__ == "__main__":
  main()
