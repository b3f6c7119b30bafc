"""The live entries of a store in memory, with a search index for each tenant.

The mirror stands at one version and moves from one to the next as a whole, by the store's own diff,
so that evictions, merges and rollbacks arrive like any other change. Readers meet a writer only in
the moment of that step; nobody embeds, trains or waits for a disk behind the gate.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.memory import ann, embed, gate, index, index_file
from memrl_jax.memory.records import Diff, Entry, Manifest, StoreError, Where
from memrl_jax.memory.store import Store

_STEPS = 64  # versions that are followed one by one; what is further off is read anew


class Hit(NamedTuple):
  """An entry that a search found in the memory as of `version` (for `records.Read`).

  `entry.vector` is empty: the vectors are in the index, and in `Store.get`.
  """

  id: int
  version: int
  similarity: float
  entry: Entry


@dataclasses.dataclass
class Tenant:
  """One tenant's entries, without their vectors, and the index of the vectors."""

  index: index.Index
  entries: dict[int, Entry] = dataclasses.field(default_factory=dict)


class Mirror:
  """Entries and indices as of `version`, with vectors that `embedder` made."""

  def __init__(self, store: Store, embedder: embed.Embedder, policy: ann.Policy):
    self._store, self.policy = store, policy
    self._gate = gate.Gate()
    self._moving = threading.Lock()  # one thread at a time moves the mirror
    self._building = threading.Lock()
    self._thread: threading.Thread | None = None
    self.load(embedder)

  def load(self, embedder: embed.Embedder) -> None:
    """Everything from the store; inverted files from their own file where it mirrors the store."""
    with self._moving:
      self._load(embedder)

  def _load(self, embedder: embed.Embedder) -> None:
    version = self._store.version
    mark = self._store.fingerprint(version)
    width, tenants = embedder.dimension, {}
    for name, entries in by_tenant(self._store.entries(None, version)).items():
      mine = tenants[name] = Tenant(index.Index(width, self.policy))
      mine.index.add([entry.id for entry in entries], _vectors(entries, width))
      mine.entries = {entry.id: light(entry) for entry in entries}
    indices = {name: mine.index for name, mine in tenants.items()}
    index_file.load(self._store.path, indices, version, mark)
    with self._gate.writing():
      self.tenants, self.version, self.embedder, self._mark = tenants, version, embedder, mark

  # --- reading ------------------------------------------------------------------------------------

  def longest_wait(self) -> float:
    """Seconds that a reader or a writer waited for the other, at most, since the last call."""
    return self._gate.longest_wait()

  def search(
    self,
    embedder: embed.Embedder,
    tenant: str,
    vectors_QD: np.ndarray,
    k: int | None,
    min_similarity: float | None,
  ) -> list[list[Hit]] | None:
    """As `Memory.search_vectors`; None where another embedder has taken over since."""
    with self._gate.reading():
      if embedder is not self.embedder:
        return None
      mine, version = self.tenants.get(tenant), self.version
      if mine is None:
        return [[] for _ in vectors_QD]
      return [
        [
          Hit(number, version, similarity, mine.entries[number])
          for number, similarity in zip(found.ids.tolist(), found.similarity.tolist(), strict=True)
        ]
        for found in mine.index.search_batch(vectors_QD, k, min_similarity)
      ]

  def get(self, tenant: str, ids: Iterable[int] | None = None) -> list[Entry]:
    """The live entries of a tenant with these ids, in their order; None: all, by id."""
    with self._gate.reading():
      entries = self.tenants[tenant].entries if tenant in self.tenants else {}
      ids = sorted(entries) if ids is None else ids
      return [entries[number] for number in ids if number in entries]

  def differences(self) -> list[str]:
    """The tenants whose entries or vectors are not, bit for bit, those of the store."""
    with self._moving:
      truth = by_tenant(self._store.entries(None, self.version))
      return [
        f"the index of tenant {name!r} differs from the store"
        for name in sorted(truth.keys() | self.tenants.keys())
        if not _equal(self.tenants.get(name), truth.get(name, []))
      ]

  def indices(self) -> dict[str, tuple[str, int, int]]:
    """By tenant: kind of index, newest entries looked at, those with a near duplicate."""
    with self._gate.reading():
      return {
        name: (mine.index.ann.kind if mine.index.ann else "exact", *_near(mine.index.vectors))
        for name, mine in self.tenants.items()
      }

  # --- moving -------------------------------------------------------------------------------------

  def follow(self) -> None:
    """Up to the newest version of the store; the tenants that changed may get a new index."""
    touched: set[str] = set()
    with self._moving:
      newest, made = self._store.version, self._store.manifest
      if (made.embedder, made.dimension) != (self.embedder.name, self.embedder.dimension):
        return  # embedded anew; a `load` with the new embedder is on its way
      if newest - self.version > _STEPS:
        self._load(self.embedder)
      while self.version < newest:  # one by one: a diff over several hides what came and went back
        touched |= self._apply(self._store.diff(self.version, self.version + 1), self.version + 1)
    for name in touched:
      self.maintain(name)

  def renew(self, version: int) -> None:
    """After the rollback that made `version`: it writes equal states anew, which no diff shows."""
    with self._moving:
      while True:
        newest = self._store.version
        age = newest - version
        ids = {name: self._store.select(Where(name, max_age=age)) for name in self.tenants}
        if self._store.version == newest:
          break  # nobody has written since, so the age was right
      entries = [
        light(entry)
        for name, numbers in ids.items()
        for entry in self._store.get(name, numbers, self.version)
      ]
      with self._gate.writing():
        for entry in entries:
          self.tenants[entry.tenant].entries[entry.id] = entry

  def refresh(self, manifest: Manifest) -> None:
    """`follow` a store that another process writes, where versions may also be taken back."""
    if self._store.fingerprint() == self._mark:
      return
    if self._store.manifest != manifest:
      raise StoreError(
        f"the memory {self._store.path} was embedded anew, by {self._store.manifest.embedder}; "
        "open it again with that embedder."
      )
    same_past = self._store.version >= self.version
    if same_past and self._store.fingerprint(self.version) == self._mark:
      self.follow()
    else:
      self.load(self.embedder)
    self._mark = self._store.fingerprint(self.version)

  def _apply(self, diff: Diff, version: int) -> set[str]:
    moved = [new for old, new in diff.changed if new.vector != old.vector]
    gone, come = by_tenant(diff.removed), by_tenant([*diff.added, *moved])
    with self._gate.writing():
      for name, entries in gone.items():
        mine = self.tenants[name]
        mine.index.remove([entry.id for entry in entries])
        for entry in entries:
          del mine.entries[entry.id]
      for name, entries in come.items():
        if name not in self.tenants:
          self.tenants[name] = Tenant(index.Index(self.embedder.dimension, self.policy))
        width = self.embedder.dimension
        self.tenants[name].index.add([entry.id for entry in entries], _vectors(entries, width))
      for entry in [*diff.added, *(new for _, new in diff.changed)]:
        self.tenants[entry.tenant].entries[entry.id] = light(entry)
      for name in gone:
        if not self.tenants[name].entries:
          del self.tenants[name]
      self.version = version
    return gone.keys() | come.keys()

  # --- inverted files -----------------------------------------------------------------------------

  def maintain(self, tenant: str) -> None:
    """Builds an inverted file where one is due: in a thread, one at a time, or here and now."""
    mine = self.tenants.get(tenant)
    kind = mine.index.due() if mine else None
    if kind is None or not self._building.acquire(blocking=False):
      return
    if not self.policy.background:
      self._build(mine.index, kind)
      return
    self._thread = threading.Thread(target=self._build, args=(mine.index, kind), daemon=True)
    self._thread.start()

  def _build(self, mine: index.Index, kind: str) -> None:
    try:
      with self._gate.reading():  # keeps writers away
        copies = mine.begin()
      built = None
      try:
        built = ann.Ann.build(kind, *copies, self.policy)
      finally:
        with self._gate.writing():
          mine.swap(built)
    finally:
      self._building.release()

  def wait(self) -> None:
    """Until no inverted file is being built."""
    if self._thread is not None:
      self._thread.join()

  def save(self) -> None:
    """The inverted files into their file beside the store."""
    with self._moving:
      indices = {name: mine.index for name, mine in self.tenants.items()}
      mark = self._store.fingerprint(self.version)
      index_file.save(self._store.path, indices, self.version, mark)


def by_tenant(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
  found: dict[str, list[Entry]] = {}
  for entry in entries:
    found.setdefault(entry.tenant, []).append(entry)
  return found


def light(entry: Entry) -> Entry:
  """An entry without its vector."""
  return dataclasses.replace(entry, vector=b"")


def _vectors(entries: Sequence[Entry], width: int) -> np.ndarray:
  return np.frombuffer(b"".join(entry.vector for entry in entries), "<f4").reshape(-1, width)


def _equal(mine: Tenant | None, truth: Sequence[Entry]) -> bool:
  if mine is None or not truth:
    return mine is None and not truth
  vectors, built, fresh = mine.index.vectors, mine.index.ann, mine.index.fresh
  return (
    mine.entries == {entry.id: light(entry) for entry in truth}
    and vectors.rows.keys() == mine.entries.keys()
    and all(
      vectors.matrix_ND[vectors.rows[entry.id]].astype("<f4").tobytes() == entry.vector
      for entry in truth
    )
    and (built is None or len(built) + len(fresh) == len(truth))
  )


def _near(vectors: index.Vectors) -> tuple[int, int]:
  """How many of the newest are looked at; how many of them have another within `index.NEAR`."""
  most = min(2000, 20_000_000 // max(1, len(vectors)))  # half a second at any size
  rows_ND = vectors.matrix_ND[-max(50, most) :]
  if len(rows_ND) < 2:
    return len(rows_ND), 0
  found = vectors.nearest(rows_ND, 2)
  return len(rows_ND), sum(int(best.similarity[1] > index.NEAR) for best in found)
