"""One tenant's search index: exact top-k by inner product, approximate (FAISS IVF) when large.

An index is a cache of the store. `Vectors` holds every vector in one growing array, searched with
FAISS's exact kernel where the array lies; `ann.Ann` is an inverted file beside it, asked for
candidates only. Entries that came after it was built are scanned until they are a tenth of it; then
they go into it, if it finds them. A similarity is always computed from the stored vector in one way,

    similarity = float32( sum_d float64(query_d) * float64(vector_d) )

so it is the same number whichever path found the entry, and an absolute threshold means the same to
all of them. Results: by (-similarity, id), no id twice, k of them whenever k are live.

Not safe by itself: `bank.Memory` keeps writers away from readers. Letters: N vectors, D width.
"""

from __future__ import annotations

import collections
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import faiss
import numpy as np

from memrl_jax.memory import ann as ann_lib

NEAR = 0.95  # cosine above which two entries say the same
_SPARE = 8  # candidates beyond k: nearly always enough to see that the k-th is certain
_FRESH = 0.1  # share of the inverted file that is scanned beside it
_SLACK = 2e-5  # float32 inner products of unit vectors are this exact, in any order of summation
_CHUNK = 4096  # rows turned into float64 at a time


class Found(NamedTuple):
  """What one query found, best first."""

  ids: np.ndarray  # int64
  similarity: np.ndarray  # float32


class Vectors:
  """Vectors with ids, in no order: a removed row is filled with one from the end."""

  def __init__(self, dimension: int, mapped_above: int):
    """Above `mapped_above` rows the array is in an unnamed file, which the system may page out."""
    self.dimension, self.size, self._mapped_above = dimension, 0, mapped_above
    self.rows: dict[int, int] = {}
    self._ids, self._matrix = np.empty(0, np.int64), np.empty((0, dimension), np.float32)

  def __len__(self) -> int:
    return self.size

  @property
  def ids_N(self) -> np.ndarray:
    return self._ids[: self.size]

  @property
  def matrix_ND(self) -> np.ndarray:
    return self._matrix[: self.size]

  def add(self, ids: np.ndarray, vectors_ND: np.ndarray) -> None:
    start, end = self.size, self.size + len(ids)
    if end > len(self._ids):
      self._reserve(max(end, 2 * len(self._ids), 64))
    self._ids[start:end], self._matrix[start:end] = ids, vectors_ND
    self.rows.update(zip(ids.tolist(), range(start, end), strict=True))
    self.size = end

  def remove(self, ids: np.ndarray) -> None:
    gone = np.sort(np.array([self.rows.pop(number) for number in ids.tolist()], np.int64))
    end = self.size - len(gone)
    holes = gone[gone < end]
    movers = np.setdiff1d(np.arange(end, self.size), gone, assume_unique=True)
    self._ids[holes], self._matrix[holes] = self._ids[movers], self._matrix[movers]
    self.rows.update(zip(self._ids[holes].tolist(), holes.tolist(), strict=True))
    self.size = end

  def _reserve(self, rows: int) -> None:
    shape = (rows, self.dimension)
    if rows > self._mapped_above:
      with tempfile.TemporaryFile(prefix="memrl_vectors_") as file:
        matrix = np.memmap(file, np.float32, "w+", shape=shape)
    else:
      matrix = np.empty(shape, np.float32)
    ids = np.empty(rows, np.int64)
    ids[: self.size], matrix[: self.size] = self.ids_N, self.matrix_ND
    self._ids, self._matrix = ids, matrix

  def similarity(self, query_D: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The similarity of this module's first lines, for these rows."""
    query_D = query_D.astype(np.float64)
    parts = [
      np.einsum("nd,d->n", self._matrix[rows[i : i + _CHUNK]].astype(np.float64), query_D)
      for i in range(0, len(rows), _CHUNK)
    ]
    return np.concatenate(parts or [np.zeros(0)]).astype(np.float32)

  def ranked(self, query_D: np.ndarray, rows: np.ndarray) -> Found:
    """These rows, best first."""
    similarity, ids = self.similarity(query_D, rows), self._ids[rows]
    order = np.lexsort((ids, -similarity))
    return Found(ids[order], similarity[order])

  def nearest(self, queries_QD: np.ndarray, k: int) -> list[Found]:
    """The exact k best of each query; FAISS scans, we score and settle ties."""
    fetch = min(self.size, k + _SPARE)
    if fetch < 1 or k < 1:
      return [Found(np.zeros(0, np.int64), np.zeros(0, np.float32)) for _ in queries_QD]
    scores_QF, rows_QF = faiss.knn(
      queries_QD, self.matrix_ND, fetch, metric=faiss.METRIC_INNER_PRODUCT
    )
    found = []
    for query_D, scores_F, rows_F in zip(queries_QD, scores_QF, rows_QF, strict=True):
      best = self.ranked(query_D, rows_F)
      if fetch < self.size and best.similarity[k - 1] <= scores_F[-1] + _SLACK:
        best = self.above(query_D, best.similarity[k - 1] - _SLACK)  # a tie may be outside
      found.append(Found(best.ids[:k], best.similarity[:k]))
    return found

  def above(self, query_D: np.ndarray, least: float) -> Found:
    """Every vector that may be more similar than `least`, best first."""
    return self.ranked(query_D, np.flatnonzero(self.matrix_ND @ query_D > least - _SLACK))


class Index:
  """The index of one tenant."""

  def __init__(self, dimension: int, policy: ann_lib.Policy):
    self.policy, self.vectors = policy, Vectors(dimension, policy.mapped_above)
    self.ann: ann_lib.Ann | None = None
    self.exact_seconds: collections.deque[float] = collections.deque(maxlen=256)  # a query each
    self.recent: collections.deque[np.ndarray] = collections.deque(maxlen=policy.samples)
    self.fresh = Vectors(dimension, policy.mapped_above)  # what the inverted file has not
    self._since: set[int] | None = None  # ids that changed while an inverted file is built
    self._refused_at = 0  # size at which an inverted file was built and missed the recall

  def __len__(self) -> int:
    return self.vectors.size

  def add(self, ids: Sequence[int], vectors_ND: np.ndarray) -> None:
    """Adds or replaces; a replaced vector is gone.

    Raises:
      ValueError: an id is given twice, or a vector has another width or is not finite.
    """
    ids = np.asarray(ids, np.int64)
    vectors_ND = np.ascontiguousarray(vectors_ND, np.float32)
    if vectors_ND.shape != (len(ids), self.vectors.dimension):
      raise ValueError(
        f"{len(ids)} entries came with vectors of shape {vectors_ND.shape}; this index takes "
        f"[{len(ids)}, {self.vectors.dimension}]"
      )
    if not np.isfinite(vectors_ND).all():
      raise ValueError("a vector holds NaN or infinity; look at what embedded it")
    if len(set(ids.tolist())) != len(ids):
      raise ValueError("an id was given twice in one call; add each entry once")
    self.remove([number for number in ids.tolist() if number in self.vectors.rows])
    self.vectors.add(ids, vectors_ND)
    if self._since is not None:
      self._since.update(ids.tolist())
    if self.ann is not None:
      self.fresh.add(ids, vectors_ND)
      if len(self.fresh) > _FRESH * len(self.ann):
        self._fold()

  def remove(self, ids: Sequence[int]) -> None:
    """Removes those that are here; the others are nobody's loss."""
    ids = np.array([number for number in dict.fromkeys(ids) if number in self.vectors.rows], "i8")
    if not len(ids):
      return
    self.vectors.remove(ids)
    if self._since is not None:
      self._since.update(ids.tolist())
    if self.ann is not None:
      fresh = np.array([number in self.fresh.rows for number in ids.tolist()])
      self.fresh.remove(ids[fresh])
      self.ann.remove(ids[~fresh])

  def search_batch(
    self, queries_QD: np.ndarray, k: int | None, min_similarity: float | None = None
  ) -> list[Found]:
    """For each query the k best above `min_similarity` (strictly); k=None: all above it, exactly."""
    queries_QD = np.ascontiguousarray(queries_QD, np.float32)
    if queries_QD.ndim != 2 or queries_QD.shape[1] != self.vectors.dimension:
      raise ValueError(
        f"the queries have shape {queries_QD.shape}; this index takes [Q, {self.vectors.dimension}]"
      )
    if not np.isfinite(queries_QD).all():
      raise ValueError("a query holds NaN or infinity; look at what embedded it")
    start = time.perf_counter()
    if k is None:
      least = -np.inf if min_similarity is None else min_similarity
      found = [self.vectors.above(query_D, least) for query_D in queries_QD]
    elif self.ann is not None:
      found = self._nearest(queries_QD, k)
    else:
      found = self.vectors.nearest(queries_QD, k)
    if self.ann is None and len(queries_QD):
      self.exact_seconds.append((time.perf_counter() - start) / len(queries_QD))
    if len(self) >= self.policy.min_size // 2:  # it may be switched one day
      self.recent.extend(queries_QD.copy())
    if min_similarity is None:
      return found
    keep = [best.similarity > np.float32(min_similarity) for best in found]
    return [Found(best.ids[k], best.similarity[k]) for best, k in zip(found, keep, strict=True)]

  def _nearest(self, queries_QD: np.ndarray, k: int) -> list[Found]:
    """Candidates of the inverted file and the fresh ones, scored; too few, and all are scanned."""
    fresh = self.fresh.nearest(queries_QD, k)
    found = []
    for query_D, old, new in zip(
      queries_QD, self.ann.candidates(queries_QD, k), fresh, strict=True
    ):
      ids = [number for number in old.tolist() if number >= 0] + new.ids.tolist()
      if len(ids) < min(k, len(self)):
        found += self.vectors.nearest(query_D[None], k)
      else:
        best = self.vectors.ranked(query_D, np.array([self.vectors.rows[n] for n in ids], np.int64))
        found.append(Found(best.ids[:k], best.similarity[:k]))
    return found

  # --- switching: due() -> begin() -> Ann.build(...) with no lock -> swap() -----------------------

  def due(self) -> str | None:
    """The kind of inverted file that should be built now, if any."""
    if self.ann is not None or self._since is not None:
      return None
    if len(self) < self.policy.growth * self._refused_at:
      return None  # was tried at about this size, in vain
    return self.policy.kind_for(len(self), self.exact_seconds)

  def begin(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies (ids, vectors, last queries) to build from; from here on changes are noted for `swap`."""
    self._since = set()
    queries_QD = np.array(self.recent.copy(), np.float32).reshape(-1, self.vectors.dimension)
    return self.vectors.ids_N.copy(), np.array(self.vectors.matrix_ND), queries_QD

  def swap(self, built: ann_lib.Ann | None) -> bool:
    """Puts an inverted file that was verified in place, less what changed since `begin`; None: none."""
    since, self._since = self._since, None
    if built is None:
      self._refused_at = len(self)
      return False
    built.remove(np.array(sorted(since), np.int64))
    self.restore(built, [number for number in sorted(since) if number in self.vectors.rows])
    return True

  def restore(self, built: ann_lib.Ann, fresh: Sequence[int]) -> None:
    """Takes an inverted file that holds all but the fresh entries."""
    self.ann, self._refused_at = built, 0
    self._fresh_from(fresh)
    self.exact_seconds.clear()

  def _fresh_from(self, ids: Sequence[int]) -> None:
    self.fresh = Vectors(self.vectors.dimension, self.policy.mapped_above)
    rows = [self.vectors.rows[number] for number in ids]
    self.fresh.add(np.array(ids, np.int64), self.vectors.matrix_ND[rows])

  def _fold(self) -> None:
    """The fresh entries into the inverted file; an end of it where it is lopsided or finds them badly."""
    built, queries_QD = self.ann, self.fresh.matrix_ND[-32:].copy()
    built.add(self.fresh.ids_N, self.fresh.matrix_ND)
    self._fresh_from([])
    if (
      len(self) > self.policy.growth * built.built_at
      or built.imbalance() > max(self.policy.imbalance, 1.5 * built.uneven)
      or self.recall(queries_QD) < self.policy.recall
    ):
      self.ann = None  # exact until a new one is ready

  def recall(self, queries_QD: np.ndarray, k: int = 10) -> float:
    """Share of the exact k best that the inverted file finds; 1 without one."""
    if self.ann is None or not len(self):
      return 1.0
    exact, found = self.vectors.nearest(queries_QD, k), self._nearest(queries_QD, k)
    return ann_lib.overlap([best.ids for best in exact], [best.ids for best in found])
