"""A memory as its users see it: the store (the truth), the mirror (entries and indices), the embedder.

Texts are embedded before any lock is taken. A write is committed to the store first, then the mirror
moves to that version; so a search sees one version as a whole, and what `add` wrote as soon as it has
returned.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.memory import ann, check, embed, index, index_file, mirror, transfer
from memrl_jax.memory.mirror import Hit
from memrl_jax.memory.records import (
  Add,
  Change,
  Commit,
  Entry,
  Limits,
  Manifest,
  Op,
  Outcome,
  Read,
  Remove,
  StoreError,
  Where,
)
from memrl_jax.memory.store import Store

__all__ = ["Hit", "Item", "Limits", "Memory", "merge_near_duplicates", "open_reading", "reindex"]


class Item(NamedTuple):
  """What `add` takes: `key` is embedded and searched, `text` is shown."""

  key: str
  text: str
  score: float = 0.0
  data: dict[str, Any] = {}  # noqa: RUF012 (never changed)


class Memory:
  """One memory, open in this process; threads may share it. Make one with `Memory.open`."""

  def __init__(
    self, store: Store, embedder: embed.Embedder, policy: ann.Policy, temporary: Any = None
  ):
    self.store, self._temporary = store, temporary
    self._mirror = mirror.Mirror(store, embedder, policy)
    self._seconds = {name: collections.deque(maxlen=1024) for name in ("search", "commit")}

  @classmethod
  def open(
    cls,
    path: str | os.PathLike | None,
    embedder: embed.Embedder,
    *,
    limits: Limits | None = None,
    policy: ann.Policy | None = None,
    read_only: bool = False,
  ) -> Memory:
    """The memory in a folder, made if there is none; path=None: one that goes with this object.

    Raises:
      StoreError: another embedder made its vectors (by name, dimension or normalisation, also where
        it is empty); the sentence names the command that embeds it anew.
    """
    temporary = tempfile.TemporaryDirectory(prefix="memrl_memory_") if path is None else None
    store = Store(
      temporary.name if temporary else path, _manifest(embedder), read_only=read_only, limits=limits
    )
    try:
      return cls(store, embedder, policy or ann.Policy(), temporary)
    except BaseException:
      store.close()
      raise

  # --- reading ------------------------------------------------------------------------------------

  @property
  def version(self) -> int:
    """The version that a search sees now."""
    return self._mirror.version

  @property
  def embedder(self) -> embed.Embedder:
    return self._mirror.embedder

  def search(
    self, tenant: str, texts: Sequence[str], k: int | None, min_similarity: float | None = None
  ) -> list[list[Hit]]:
    """For each text the k entries with the nearest keys, by (-cosine, id); k=None: no limit.

    Only cosines above `min_similarity`, strictly. A tenant that does not exist has no entries.
    """
    if isinstance(texts, str):
      raise ValueError("search takes a list of texts; write search(tenant, [text], k)")
    while True:
      embedder = self.embedder
      hits = self._search(embedder, tenant, embedder.embed(texts), k, min_similarity)
      if hits is not None:
        return hits

  def search_vectors(
    self, tenant: str, vectors_QD: np.ndarray, k: int | None, min_similarity: float | None = None
  ) -> list[list[Hit]]:
    """`search` for unit vectors that `embedder` has made before."""
    return self._search(self.embedder, tenant, vectors_QD, k, min_similarity)

  def _search(self, embedder, tenant, vectors_QD, k, min_similarity) -> list[list[Hit]] | None:
    if k is not None and k < 1:
      raise ValueError(f"k is {k}; ask for at least one entry, or k=None for all above a threshold")
    self._refresh()
    start = time.perf_counter()
    hits = self._mirror.search(embedder, tenant, vectors_QD, k, min_similarity)
    self._seconds["search"].append(time.perf_counter() - start)
    self._mirror.maintain(tenant)
    return hits

  def get(self, tenant: str, ids: Iterable[int]) -> list[Entry]:
    """The live entries of a tenant with these ids, in this order, without their vectors."""
    self._refresh()
    return self._mirror.get(tenant, ids)

  def entries(self, tenant: str) -> list[Entry]:
    """All live entries of a tenant by id, without their vectors."""
    self._refresh()
    return self._mirror.get(tenant)

  def _refresh(self) -> None:
    if self.store.read_only:
      self._mirror.refresh(_manifest(self.embedder))

  # --- writing ------------------------------------------------------------------------------------

  def add(self, tenant: str, items: Iterable[Item | tuple], *, once: bool = False) -> list[int]:
    """Adds entries in one commit; returns their ids, in order. once: see `Store.commit`."""
    return list(self.commit([Add(tenant, *Item(*item)) for item in items], once=once).ids)

  def change(
    self,
    tenant: str,
    id: int,
    *,
    key: str | None = None,
    text: str | None = None,
    score: float | None = None,
    data: dict[str, Any] | None = None,
    expect: int | None = None,
  ) -> Commit:
    """Changes what is given of an entry; `expect` as in records.Change."""
    return self.commit([Change(tenant, id, key, text, score, data, None, expect)])

  def update(self, tenant: str, ids: Iterable[int], change: Callable[[Entry], Entry]) -> Commit:
    """Read, change and write so that no update is lost (`Store.update`); keys stay as they are."""
    return self._then(lambda: self.store.update(tenant, ids, change))

  def remove(self, tenant: str, what: Iterable[int] | Where) -> Commit:
    """Removes entries by id, or all that meet a filter, in one commit."""
    if not isinstance(what, Where):
      return self.commit([Remove(tenant, number) for number in what])
    if what.tenant != tenant:
      raise StoreError(f"the filter is for {what.tenant!r}, not for {tenant!r}; name one tenant.")
    return self._then(lambda: self.store.remove_where(what))

  def wipe(self, tenant: str) -> Commit:
    """Removes every entry of a tenant."""
    return self._then(lambda: self.store.wipe(tenant))

  def commit(
    self,
    ops: Iterable[Op] = (),
    *,
    reads: Iterable[Read] = (),
    outcomes: Iterable[Outcome] = (),
    once: bool = False,
    near_duplicates: int = 0,
    why: str = "",
  ) -> Commit:
    """`Store.commit`, with vectors for the keys that come without one."""
    ops, made = _embedded(list(ops), self.embedder)
    return self._then(
      lambda: self.store.commit(
        ops,
        reads=reads,
        outcomes=outcomes,
        once=once,
        near_duplicates=near_duplicates,
        manifest=made,  # refuses vectors that a `reindex` has overtaken
        why=why,
      )
    )

  def rollback(self, version: int, tenant: str | None = None) -> Commit:
    """A new version whose state, of one tenant or all, is that of an old one; ids come back."""
    self._same_embedder(version)
    done = self._then(lambda: self.store.rollback(version, tenant))
    self._mirror.renew(done.version)
    return done

  def discard_after(self, version: int, *, force: bool = False) -> None:
    """Forgets every later version as if it had never been (`Store.discard_after`)."""
    self._same_embedder(version)
    self.store.discard_after(version, force=force)
    self._mirror.load(self.embedder)

  def reindex(self, embedder: embed.Embedder) -> Commit:
    """Embeds every live entry anew from its key, as one version; then `embedder` is this memory's."""
    done = reindex(self.store, embedder)
    self._mirror.load(embedder)
    return done

  def snapshot(self, folder: str | os.PathLike) -> int:
    """A copy of the memory with its history in a new folder, whole or not there; its version."""
    return transfer.snapshot(self.store, folder)

  def close(self) -> None:
    """Waits for an index that is being built, saves what took long to make, closes the store."""
    self._mirror.wait()
    if not self.store.read_only and self._temporary is None:
      self._mirror.save()
    self.store.close()
    if self._temporary is not None:
      self._temporary.cleanup()

  def __enter__(self) -> Memory:
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  # --- looking after it ---------------------------------------------------------------------------

  def verify(self, repair: bool = True) -> list[str]:
    """What is wrong, in sentences: the store (`check.verify`), the indices, their file; [] if nothing.

    The indices and the file are made anew from the store where they differ and `repair` is set.
    """
    problems = check.verify(self.store.path)
    wrong = self._mirror.differences()
    if wrong and repair:
      self._mirror.load(self.embedder)
    damaged = index_file.problem(self.store.path)
    if damaged and repair and not self.store.read_only:
      self._mirror.save()
    return problems + wrong + ([damaged] if damaged else [])

  def stats(self) -> dict[str, Any]:
    """The store's sizes and totals, and of what is live: indices, near duplicates, milliseconds.

    live_near_duplicate_rate: share of entries (the newest of a tenant: 2,000, fewer where it has
    over 10,000) that have another one of their tenant within a cosine of .95.
    """
    self._refresh()
    indices = self._mirror.indices()
    seen, near = (sum(row[column] for row in indices.values()) for column in (1, 2))
    return self.store.stats() | {
      "embedder": self.embedder.name,
      "dimension": self.embedder.dimension,
      "truncated": self.embedder.truncated,
      "index": {tenant: row[0] for tenant, row in indices.items()},
      "live_near_duplicate_rate": near / max(1, seen),
      "ms": {
        name: {f"p{p}": float(1e3 * np.percentile(list(kept), p)) for p in (50, 95)}
        for name, kept in self._seconds.items()
        if kept
      },
    }

  def longest_wait(self) -> float:
    """Seconds that a search or a write waited for the other, at most, since the last call."""
    return self._mirror.longest_wait()

  def _then(self, write: Callable[[], Commit]) -> Commit:
    """Writes to the store, then moves the mirror there (or further, if others have written)."""
    start = time.perf_counter()
    done = write()
    self._mirror.follow()
    self._seconds["commit"].append(time.perf_counter() - start)
    return done

  def _same_embedder(self, version: int) -> None:
    then = self.store.manifest_at(version)
    if then != self.store.manifest:
      raise StoreError(
        f"version {version} was embedded by {then.embedder} ({then.dimension} numbers), and this "
        f"memory is open with {self.embedder.name}; roll back the store itself, then open it with "
        f"{then.embedder}."
      )


def open_reading(
  folder: str | os.PathLike, *, directory: str | os.PathLike | None = None
) -> Memory:
  """A memory for reading, with the embedder that its manifest names; `directory`: of MiniLM's weights.

  Raises:
    StoreError: that embedder cannot be made from its name.
  """
  with Store(folder, read_only=True) as store:
    manifest = store.manifest
  if manifest.embedder == embed.Hash.name:
    embedder: embed.Embedder = embed.Hash(manifest.dimension)
  elif manifest.embedder.startswith("minilm:") and directory is not None:
    embedder = embed.MiniLM(directory)
  else:
    how = (
      "give the directory of its weights"
      if manifest.embedder.startswith("minilm:")
      else "open it in Python with Memory.open and that embedder"
    )
    raise StoreError(f"{folder} was embedded by {manifest.embedder}; to search it, {how}.")
  return Memory.open(folder, embedder, read_only=True)


def reindex(store: Store, embedder: embed.Embedder, *, batch: int = 1024) -> Commit:
  """Embeds every live entry of a store anew from its key, as one version with the new manifest.

  No lock is held while it embeds; where the memory has changed meanwhile, it starts again.
  """
  while True:
    version, entries = store.version, store.entries(None)
    ops: list[Op] = []
    for start in range(0, len(entries), batch):
      part = entries[start : start + batch]
      vectors_ND = embedder.embed([entry.key for entry in part])
      ops += [
        Change(entry.tenant, entry.id, vector=vector_D, expect=entry.version)
        for entry, vector_D in zip(part, vectors_ND, strict=True)
      ]
    try:
      why = f"reindex with {embedder.name}"
      return store.commit(ops, manifest=_manifest(embedder), why=why)
    except StoreError:
      if store.version == version:
        raise


def merge_near_duplicates(entries: Sequence[Entry], *, above: float = index.NEAR) -> list[Op]:
  """For `Limits.merge`: of entries with a cosine above `above` one stays, the oldest.

  It keeps its key and its id and takes text, score and data of the best of them (ties: the newest).
  Beyond 2,000 entries only those about to be added are compared with all before them.
  """
  vectors_ND = np.stack([np.frombuffer(entry.vector, "<f4") for entry in entries])
  first = 0 if len(entries) <= 2000 else next(n for n, e in enumerate(entries) if e.id < 0)
  twin_of = np.arange(len(entries))
  for n in range(max(1, first), len(entries)):
    near = np.flatnonzero(vectors_ND[:n] @ vectors_ND[n] > above)
    near = near[twin_of[near] == near]  # those that stay
    if len(near):
      twin_of[n] = near[0]
  ops: list[Op] = []
  for leader in np.unique(twin_of[twin_of != np.arange(len(entries))]).tolist():
    group = np.flatnonzero(twin_of == leader).tolist()
    best = entries[max(group, key=lambda n: (entries[n].score, n))]
    kept = entries[leader]
    if best is not kept:
      ops.append(Change(kept.tenant, kept.id, None, best.text, best.score, best.data))
    ops += [Remove(entries[n].tenant, entries[n].id) for n in group if n != leader]
  return ops


def _manifest(embedder: embed.Embedder) -> Manifest:
  return Manifest(embedder.name, embedder.dimension, normalised=True)


def _embedded(ops: list[Op], embedder: embed.Embedder) -> tuple[list[Op], Manifest | None]:
  """The operations, with vectors for the keys that have none; what made those, if any."""
  bare = [n for n, op in enumerate(ops) if _bare(op)]
  if not bare:
    return ops, None
  vectors_ND = embedder.embed([ops[n].key for n in bare])
  for n, vector_D in zip(bare, vectors_ND, strict=True):
    ops[n] = dataclasses.replace(ops[n], vector=vector_D)
  return ops, _manifest(embedder)


def _bare(op: Op) -> bool:
  if isinstance(op, Add):
    return len(op.vector) == 0
  return isinstance(op, Change) and op.key is not None and op.vector is None
