"""When an index becomes approximate, and the FAISS inverted file (IVF) it then asks for candidates.

What FAISS 1.15 does that a caller must know: an IVF index has ids of its own and is never wrapped in
IDMap (ids shift after a delete); `add_with_ids` with our ids, and a hashtable as its direct map, make
removal O(1); training needs 39 points a list; PQ scores are too coarse to rank by, so candidates are
always scored again from the stored vectors (`index.Vectors.similarity`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import faiss
import numpy as np

KINDS = ("ivf_flat", "ivf_sq8", "ivf_pq")
_POINTS = 39  # k-means wants at least so many training points a list
_ROUNDS = 8  # of k-means


@dataclasses.dataclass(frozen=True)
class Policy:
  """When a tenant's index stops being exact. At the default a memory below 50,000 entries never does.

  min_size      entries below which the scan stays, however slow it is measured
  budget_ms     the 95th percentile of a query's time above which the scan is too slow; 0: by size
                alone, so that two runs of the same calls switch at the same call
  kind          "auto": ivf_sq8 (a quarter of the memory, the same recall after re-scoring), and
                ivf_pq above `pq_above` entries; or one of KINDS; "exact": never switch
  lists         of the inverted file; 0: 4 sqrt(N), at most N/39
  recall        of the 10 best, without which nothing is switched, over `samples` stored vectors and
                over the last queries; as many lists are read as it takes to reach it in both
  growth        rebuilt when the index has grown so many times ...
  imbalance     ... or when its lists are so uneven (1 = even), because the topics have moved; where
                they were at the start, half as much again
  background    build in a thread; False: in the call that found it due
  mapped_above  entries above which the stored vectors live in a mapped file instead of memory
  """

  min_size: int = 50_000
  budget_ms: float = 10.0
  kind: str = "auto"
  lists: int = 0
  recall: float = 0.95
  samples: int = 200
  growth: float = 3.0
  imbalance: float = 3.0
  background: bool = True
  pq_above: int = 2_000_000
  mapped_above: int = 2_000_000

  def __post_init__(self):
    if self.kind not in ("auto", "exact", *KINDS):
      raise ValueError(f"index kind {self.kind!r}; choose auto, exact or one of {', '.join(KINDS)}")
    if not 0 < self.recall <= 1 or self.growth <= 1 or self.imbalance <= 1 or self.samples < 1:
      raise ValueError("recall must be in (0, 1], growth and imbalance above 1, samples >= 1")
    if self.budget_ms < 0 or self.lists < 0 or self.min_size < 0:
      raise ValueError("budget_ms, lists and min_size must be >= 0")

  def lists_for(self, size: int) -> int:
    return self.lists or max(1, min(int(4 * size**0.5), size // _POINTS))

  def kind_for(self, size: int, seconds: Collection[float]) -> str | None:
    """The kind to build for an exact index of this size whose queries took these seconds; or None."""
    if self.kind == "exact" or size < max(self.min_size, _POINTS * self.lists_for(size), 1):
      return None
    if self.budget_ms and (
      len(seconds) < 32 or 1e3 * np.percentile(list(seconds), 95) <= self.budget_ms
    ):
      return None
    if self.kind != "auto":
      return self.kind
    return "ivf_pq" if size > self.pq_above else "ivf_sq8"


class Ann:
  """An inverted file over (id, vector), trained and verified; knows the size it was made at."""

  def __init__(self, index: faiss.IndexIVF, kind: str, built_at: int):
    self.index, self.kind = index, kind
    self.built_at = built_at
    self.uneven = 1.0  # imbalance when it was built

  @classmethod
  def build(
    cls,
    kind: str,
    ids: np.ndarray,
    vectors_ND: np.ndarray,
    queries_QD: np.ndarray,
    policy: Policy,
  ) -> Ann | None:
    """Trains, fills and verifies; None where no number of lists read reaches the recall wanted.

    One thread, fixed seeds: the same vectors in the same order give the same inverted file.
    """
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)  # of this thread only
    try:
      built = cls(_train(kind, vectors_ND, policy), kind, len(ids))
      built.add(ids, vectors_ND)
      built.uneven = built.imbalance()
      picked = np.random.default_rng(len(ids)).permutation(len(ids))[: policy.samples]
      built.index.nprobe = max(
        built._probes(ids, vectors_ND, asked_QD, policy.recall)
        for asked_QD in (vectors_ND[picked], queries_QD)
        if len(asked_QD)
      )
      return built if built.index.nprobe <= built.index.nlist else None
    finally:
      faiss.omp_set_num_threads(threads)

  def __len__(self) -> int:
    return self.index.ntotal

  def add(self, ids: np.ndarray, vectors_ND: np.ndarray) -> None:
    self.index.add_with_ids(vectors_ND, ids)

  def remove(self, ids: np.ndarray) -> None:
    """Removes those that are here."""
    self.index.remove_ids(ids)

  def imbalance(self) -> float:
    """1 where the lists are even; the factor by which a query reads more than then."""
    return self.index.invlists.imbalance_factor()

  def candidates(self, queries_QD: np.ndarray, k: int) -> np.ndarray:
    """Ids [Q, m] that the k best are likely among, -1 where there are no more."""
    wanted = max(10 * k, 100) if self.kind == "ivf_pq" else max(3 * k, k + 22)
    return self.index.search(queries_QD, wanted)[1]

  def _probes(self, ids, vectors_ND, queries_QD, recall: float, k: int = 10) -> int:
    """The least power of two of lists to read that reaches the recall; above nlist: none does."""
    k = min(k, len(ids))
    _, exact_QK = faiss.knn(queries_QD, vectors_ND, k, metric=faiss.METRIC_INNER_PRODUCT)
    row_of = dict(zip(ids.tolist(), range(len(ids)), strict=True))
    probes = 1
    while probes <= self.index.nlist:
      self.index.nprobe = probes
      found = []
      for query_D, named in zip(queries_QD, self.candidates(queries_QD, k), strict=True):
        near = np.array([row_of[number] for number in named.tolist() if number >= 0], np.int64)
        found.append(near[np.argsort(-(vectors_ND[near] @ query_D), kind="stable")[:k]])
      if overlap(exact_QK, found) >= recall:
        break
      probes = 2 * probes if probes == self.index.nlist else min(2 * probes, self.index.nlist)
    return probes

  def dump(self) -> np.ndarray:
    """All of it as bytes."""
    return faiss.serialize_index(self.index)

  def state(self) -> dict[str, Any]:
    """What `load` needs beside the bytes."""
    return {name: getattr(self, name) for name in ("kind", "built_at", "uneven")}

  @classmethod
  def load(cls, data: np.ndarray, state: dict[str, Any]) -> Ann:
    """What `dump` and `state` gave. FAISS does not see a flipped byte: check a digest first."""
    made = cls(faiss.deserialize_index(data), state["kind"], state["built_at"])
    made.uneven = state["uneven"]
    return made


def overlap(exact: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
  """Mean share of each row of `exact` that stands in the same row of `found`."""
  pairs = zip(exact, found, strict=True)
  return float(
    np.mean([len(np.intersect1d(want, have)) / max(1, len(want)) for want, have in pairs])
  )


def _train(kind: str, vectors_ND: np.ndarray, policy: Policy) -> faiss.IndexIVF:
  size, width = vectors_ND.shape
  lists = policy.lists_for(size)
  parts = next(n for n in range(max(1, width // 8), 0, -1) if width % n == 0)
  code = {"ivf_flat": "Flat", "ivf_sq8": "SQ8", "ivf_pq": f"PQ{parts}np"}[kind]
  index = faiss.index_factory(width, f"IVF{lists},{code}", faiss.METRIC_INNER_PRODUCT)
  if kind == "ivf_pq":
    index.pq.cp.niter = _ROUNDS
  index.cp.niter = _ROUNDS
  index.cp.max_points_per_centroid = 2 * _POINTS
  index.set_direct_map_type(faiss.DirectMap.Hashtable)
  index.train(vectors_ND)
  return index
