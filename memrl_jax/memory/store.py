"""The truth of a memory: an append-only log of versions in SQLite. One writer, many readers.

  memory.db     states and versions (see `schema`)
  writer.lock   held by the process that writes
  readers.lock  shared by everybody who opened it to read

The store keeps vectors and never makes or compares them. A caller thinks (embeds, asks a language
model) outside of it: no lock is held between two calls, and `Change(..., expect=entry.version)`,
or `update`, tells whether the world has moved meanwhile.
"""

from __future__ import annotations

import collections.abc
import contextlib
import os
import sqlite3
import threading

from memrl_jax.memory import check, lock, reader, records, schema
from memrl_jax.memory.draft import Draft
from memrl_jax.memory.records import (
  Add,
  Change,
  Commit,
  Conflict,
  Entry,
  Limits,
  Locked,
  Manifest,
  Op,
  Outcome,
  Read,
  Remove,
  StoreError,
  Where,
)


class Store(reader.Reader):
  """The memory in folder `path`; reading methods are those of `reader.Reader`.

  A new folder takes `manifest`; an old one refuses another than its own. Threads may share a
  Store; a forked child must open its own. `limits` hold for each tenant by itself.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    manifest: Manifest | None = None,
    *,
    read_only: bool = False,
    limits: Limits | None = None,
  ):
    super().__init__(path)
    self.read_only, self.limits = read_only, limits
    self._mutex = threading.Lock()
    self._writer: sqlite3.Connection | None = None
    if not (self.path / schema.FILE).exists() and read_only:
      raise StoreError(f"there is no memory in {self.path}; check the path.")
    if (self.path / check.SNAPSHOT).exists() and not read_only:
      raise StoreError(f"{self.path} is a snapshot; restore it to another folder and write there.")
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = self._acquire()
    try:
      with self._translated():
        self._start(manifest)
    except BaseException:
      self.close()
      raise

  def _acquire(self) -> lock.Lock | None:
    if self.read_only:
      try:
        return lock.Lock(self.path / "readers.lock", exclusive=False)
      except Locked as error:
        raise Locked(f"{error}, which discards versions; try again in a moment.") from None
      except PermissionError:  # a folder that nobody here may write
        return None
    try:
      return lock.Lock(self.path / "writer.lock", exclusive=True)
    except Locked as error:
      raise Locked(f"{error}; wait for it, or open the memory with read_only=True.") from None
    except PermissionError:
      raise StoreError(f"you may not write {self.path}; open it with read_only=True.") from None

  def _start(self, manifest: Manifest | None) -> None:
    db = schema.connect(self.path, write=not self.read_only, create=not self.read_only)
    if self.read_only:
      self._pool.append(db)
    else:
      self._writer = db
    found = schema.version_of(db)
    if self.read_only and found != records.SCHEMA:
      raise StoreError(
        f"{self.path} has schema {found}, not {records.SCHEMA}; open it once for writing, which "
        "brings it up to date."
      )
    if found == 0:
      schema.create(db, manifest or Manifest())
    else:
      schema.migrate(db)
    mine = self.manifest
    if manifest is not None and manifest != mine:
      raise StoreError(
        f"the memory {self.path} was embedded by {mine.embedder} ({mine.dimension} numbers, "
        f"normalised: {mine.normalised}), not by {manifest.embedder} ({manifest.dimension}, "
        f"{manifest.normalised}); to embed it anew run `python -m memrl_jax.memory reindex "
        f"{self.path} --embedder {manifest.embedder} --dimension {manifest.dimension}`."
      )

  def close(self) -> None:
    """Ends this use of the memory; the log is folded into the one file memory.db."""
    with self._mutex:
      super().close()
      if self._writer is not None:
        self._writer.close()
        self._writer = None
      if getattr(self, "_lock", None) is not None:
        self._lock.close()

  @contextlib.contextmanager
  def _writing(self):
    """The one connection that writes, in a transaction: all of the block, or nothing of it.

    Gives the newest version, the next free id and the manifest as well.
    """
    if self.read_only:
      raise StoreError(f"the memory {self.path} is open for reading only; open it to write.")
    with self._mutex, self._translated():
      db = self._writer
      db.execute("BEGIN IMMEDIATE")
      try:
        version, next_id = db.execute(
          "SELECT version, next_id FROM versions ORDER BY version DESC LIMIT 1"
        ).fetchone()
        yield db, version, next_id, schema.read_manifest(db, version)
        db.execute("COMMIT")
      finally:
        if db.in_transaction:
          db.execute("ROLLBACK")

  def commit(
    self,
    ops: collections.abc.Iterable[Op] = (),
    *,
    reads: collections.abc.Iterable[Read] = (),
    outcomes: collections.abc.Iterable[Outcome] = (),
    once: bool = False,
    near_duplicates: int = 0,
    manifest: Manifest | None = None,
    reserve: int = 0,
    why: str = "",
  ) -> Commit:
    """All of it as one new version, or nothing of it.

    once: an Add whose (tenant, key, text) is live gives that entry's id and adds nothing.
    near_duplicates: how many the caller has dropped before, for `stats`.
    manifest: from another embedder; every live entry must get its new vector in this commit.
    reserve: ids below it are never given from now on; for imports.
    """
    ops = list(ops)
    proposed, shown = self._merges(ops, once)
    with self._writing() as (db, version, next_id, old):
      kept = manifest or old
      draft = Draft(db, next_id, kept.dimension, once=once)
      for op in ops:
        draft.apply(op)
      ids = tuple(draft.ids)
      merged = draft.merge(proposed, shown) if proposed else ()
      evicted = ()
      if self.limits is not None:
        for tenant in sorted({entry.tenant for entry in draft.new.values()}):
          evicted += draft.evict(tenant, self.limits)
      if kept != old:
        _all_embedded(db, draft)
      counts = draft.write(version + 1) | {
        "evicted": len(evicted),
        "merged": len(merged),
        "repeated": draft.repeated,
        "near_duplicates": near_duplicates,
      }
      counts |= self._record(db, version + 1, reads, outcomes)
      _seal(db, version + 1, max(draft.next_id, reserve), kept, why, counts)
    return Commit(version + 1, ids, evicted, merged)

  def _merges(self, ops: list[Op], once: bool) -> tuple[list[Op], dict[int, int]]:
    """What the merge hook proposes for tenants that `ops` would push over the cap; no lock held."""
    if self.limits is None or self.limits.merge is None:
      return [], {}
    proposed: list[Op] = []
    shown: dict[int, int] = {}
    adds = [op for op in ops if isinstance(op, Add)]
    for tenant in sorted({op.tenant for op in adds}):
      gone = sum(op.tenant == tenant for op in ops if isinstance(op, Remove))
      most = self.limits.max_entries + gone
      if self.count(tenant) + sum(op.tenant == tenant for op in adds) <= most:
        continue  # without loading anything
      live = self.entries(tenant)
      known = {(entry.key, entry.text) for entry in live}
      pending = []
      for i, op in enumerate(adds):
        if op.tenant == tenant and not (once and (op.key, op.text) in known):
          known.add((op.key, op.text))
          pending.append(
            Entry(-1 - i, tenant, 0, op.key, op.text, op.score, op.data, bytes(op.vector))
          )
      if len(live) + len(pending) > most:
        proposed += self.limits.merge(live + pending)
        shown |= {entry.id: entry.version for entry in live}
    return proposed, shown

  def _record(self, db, version, reads, outcomes) -> dict[str, int]:
    rows = [(version, r.trial, int(r.step), int(r.id), int(r.version)) for r in reads]
    for _, trial, _, id, seen in rows:
      found = db.execute(
        "SELECT 1 FROM states WHERE entry=? AND born<=? AND (died IS NULL OR died>?)",
        (id, seen, seen),
      ).fetchone()
      if not found or seen >= version:
        raise StoreError(
          f"trial {trial!r} says it read entry {id} at version {seen}, where it was not live; "
          "record the version that the search reported."
        )
    db.executemany("INSERT INTO reads VALUES(?, ?, ?, ?, ?)", rows)
    ends = [(version, o.trial, float(o.reward), int(o.success)) for o in outcomes]
    db.executemany("INSERT INTO outcomes VALUES(?, ?, ?, ?)", ends)
    return {"reads": len(rows), "outcomes": len(ends)}

  def record_reads(self, reads: collections.abc.Iterable[Read]) -> Commit:
    """Who was shown what; a version of its own, so that `discard_after` takes it back."""
    return self.commit(reads=reads, why="reads")

  def record_outcomes(self, outcomes: collections.abc.Iterable[Outcome]) -> Commit:
    """How trials ended, which gives the entries they read their rewards; a version of its own."""
    return self.commit(outcomes=outcomes, why="outcomes")

  def update(
    self,
    tenant: str,
    ids: collections.abc.Iterable[int],
    change: collections.abc.Callable[[Entry], Entry],
    *,
    why: str = "update",
  ) -> Commit:
    """Read, change, write, and again where somebody else was faster: no update is lost.

    `change` gets a fresh entry and returns it with key, text, score, data or vector replaced. It
    may be called several times and holds no lock. Entries that are gone are left out.
    """
    ids = list(ids)
    while True:
      ops = []
      for old in self.get(tenant, ids):
        new = change(old)
        vector = None if new.vector is old.vector else new.vector
        ops.append(
          Change(tenant, old.id, new.key, new.text, new.score, new.data, vector, old.version)
        )
      with contextlib.suppress(Conflict):
        return self.commit(ops, why=why)

  def remove_where(self, where: Where, *, why: str = "") -> Commit:
    """Removes all entries of a tenant that meet every condition, in one commit.

    Without any condition it is refused: `wipe` says what that means.
    """
    if where == Where(where.tenant):
      raise StoreError(f"no condition is given; wipe({where.tenant!r}) removes the whole tenant.")
    return self._remove(where, why or "remove where")

  def wipe(self, tenant: str) -> Commit:
    """Removes every entry of a tenant and nothing else; a rollback brings it back."""
    return self._remove(Where(tenant), f"wipe {tenant}")

  def _remove(self, where: Where, why: str) -> Commit:
    with self._writing() as (db, version, next_id, manifest):
      ids = reader.select(db, where)
      db.executemany(
        "UPDATE states SET died=? WHERE tenant=? AND entry=? AND died IS NULL",
        [(version + 1, where.tenant, id) for id in ids],
      )
      _seal(db, version + 1, next_id, manifest, why, {"removed": len(ids)})
    return Commit(version + 1)

  def rollback(self, version: int, tenant: str | None = None) -> Commit:
    """A new version whose state (of one tenant, or of all) equals that of an old one.

    Entries come back with their ids; one that equals its old state already is left alone. Reads and
    outcomes are facts and stay.
    """
    with self._writing() as (db, newest, next_id, manifest):
      old = schema.read_manifest(db, reader.resolve(db, version))
      if tenant is not None and old != manifest:
        raise StoreError(
          f"version {version} was embedded by {old.embedder} and the memory is by "
          f"{manifest.embedder} now; roll all tenants back, or none."
        )
      names = {"at": version, "now": newest + 1, "tenant": tenant}
      mine = (
        "(:tenant IS NULL OR s.tenant = :tenant) AND s.entry IN (SELECT entry FROM states WHERE"
        " born > :at UNION SELECT entry FROM states WHERE died > :at)"  # touched since
      )
      # A plus keeps sqlite from the index on `died`, which would list every live entry.
      equal = "o.content = s.content AND o.score = s.score AND o.data = s.data"
      then = reader.ALIVE.replace("s.", "o.")
      removed = db.execute(
        f"UPDATE states AS s SET died = :now WHERE +{reader.LIVE} AND {mine} AND NOT EXISTS"
        f" (SELECT 1 FROM states o WHERE o.entry = s.entry AND {then} AND {equal})",
        names,
      ).rowcount
      added = db.execute(
        "INSERT INTO states SELECT entry, tenant, content, score, data, :now, NULL FROM states s"
        f" WHERE {reader.ALIVE} AND {mine} AND NOT EXISTS"
        " (SELECT 1 FROM states n WHERE n.entry = s.entry AND +n.died IS NULL)",
        names,
      ).rowcount
      of = "" if tenant is None else f" of {tenant}"
      counts = {"restored": added, "removed": removed}
      _seal(db, newest + 1, next_id, old, f"rollback{of} to {version}", counts)
    return Commit(newest + 1)

  def discard_after(self, version: int, *, force: bool = False) -> None:
    """Forgets every later version, with its reads and outcomes, as if they had never been.

    For a run that resumes from an older checkpoint: ids and version numbers come again. Readers
    would see time run backwards, so they must be gone; `force` does it under their eyes.
    """
    with contextlib.ExitStack() as stack:
      if not force:
        stack.callback(self._alone().close)
      with self._writing() as (db, newest, _, _):
        reader.resolve(db, version)
        if version < newest:
          names = (version,)
          db.execute("DELETE FROM states WHERE born > ?", names)
          db.execute("UPDATE states SET died = NULL WHERE died > ?", names)
          db.execute(
            "DELETE FROM contents WHERE content > (SELECT coalesce(max(content), 0) FROM states)"
          )
          for table in ("versions", "reads", "outcomes"):
            db.execute(f"DELETE FROM {table} WHERE version > ?", names)

  def _alone(self) -> lock.Lock:
    """A lock that says no other process or Store reads this memory."""
    try:
      return lock.Lock(self.path / "readers.lock", exclusive=True)
    except Locked:
      raise Locked(
        f"somebody reads the memory {self.path} now; close that reader, or use force=True."
      ) from None


def _all_embedded(db: sqlite3.Connection, draft: Draft) -> None:
  rows = db.execute("SELECT entry FROM states WHERE died IS NULL")
  left = [id for (id,) in rows if id not in draft.embedded and draft.after.get(id, True)]
  if left:
    raise StoreError(
      f"a new embedder must embed every entry, and {len(left)} have no new vector (first: id "
      f"{left[0]}); give a Change with a vector for each in the same commit."
    )


def _seal(db, version: int, next_id: int, manifest: Manifest, why: str, counts: dict) -> None:
  """The row of a new version, with the checksum over all that this transaction wrote."""
  counts = {name: n for name, n in counts.items() if n}
  db.execute(
    "INSERT INTO versions VALUES(?, ?, ?, ?, ?, x'')",
    (version, next_id, schema.manifest_text(manifest), why, records.canonical(counts)),
  )
  schema.seal(db, version)
