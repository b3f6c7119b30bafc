"""Everything that can be asked of a memory without changing it, from any thread or process.

Each call sees one committed version as a whole, whatever a writer does meanwhile.
"""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import json
import os
import pathlib
import sqlite3
from typing import Any

from memrl_jax.memory import schema
from memrl_jax.memory.records import (
  Diff,
  Entry,
  Lineage,
  Manifest,
  Outcome,
  Read,
  StoreError,
  Where,
)

ENTRY = (
  "SELECT s.entry, s.tenant, s.born, c.key, c.text, s.score, s.data, c.vector"
  " FROM states s CROSS JOIN contents c ON c.content = s.content "
)
ALIVE = "s.born <= :at AND (s.died IS NULL OR s.died > :at)"
LIVE = "s.died IS NULL"  # the same for the newest version, by an index of its own


def entry(row: tuple) -> Entry:
  return Entry(*row[:6], data=json.loads(row[6]), vector=row[7])


class Reader:
  """The reading half of a Store. `tenant=None` means every tenant, and only where it says so."""

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path).expanduser().absolute()
    self._pool: list[sqlite3.Connection] = []
    self._open = True
    self._pid = os.getpid()

  def close(self) -> None:
    self._open = False
    while self._pool:
      self._pool.pop().close()

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()

  @contextlib.contextmanager
  def _translated(self):
    """sqlite's errors (full disk, damage, a trigger) as one sentence that names the memory."""
    if not self._open:
      raise StoreError(f"the memory {self.path} is closed here; open it again.")
    if self._pid != os.getpid():  # neither a connection nor a lock survives a fork
      raise StoreError(f"process {self._pid} opened the memory {self.path}; open it in this one.")
    try:
      yield
    except sqlite3.Error as error:
      raise StoreError(
        f"the memory {self.path} answered: {error}; nothing was written. If this stays, run "
        f"`python -m memrl_jax.memory verify {self.path}`."
      ) from error

  @contextlib.contextmanager
  def _reading(self):
    """A connection inside a read transaction, from a pool: threads never wait for each other."""
    with self._translated():
      try:
        db = self._pool.pop()
      except IndexError:
        db = schema.connect(self.path, write=False)
      try:
        db.execute("BEGIN")
        yield db
      finally:
        if db.in_transaction:
          db.execute("ROLLBACK")
        if self._open:
          self._pool.append(db)
        else:
          db.close()

  @property
  def version(self) -> int:
    """The newest committed version."""
    with self._reading() as db:
      return resolve(db, None)

  @property
  def manifest(self) -> Manifest:
    """What made the vectors of the newest version."""
    return self.manifest_at(None)

  def manifest_at(self, version: int | None) -> Manifest:
    with self._reading() as db:
      return schema.read_manifest(db, resolve(db, version))

  def fingerprint(self, at: int | None = None) -> str:
    """Names the whole history up to a version: equal exactly when every commit up to it is equal.

    A cache keeps (version, fingerprint): after `discard_after` a version number can come again.
    """
    with self._reading() as db:
      query = "SELECT digest FROM versions WHERE version=?"
      return db.execute(query, (resolve(db, at),)).fetchone()[0].hex()

  def next_id(self, at: int | None = None) -> int:
    """The least id that no entry has had up to a version."""
    with self._reading() as db:
      query = "SELECT next_id FROM versions WHERE version=?"
      return db.execute(query, (resolve(db, at),)).fetchone()[0]

  def get(
    self, tenant: str, ids: collections.abc.Iterable[int], at: int | None = None
  ) -> list[Entry]:
    """The entries of a tenant with these ids, in this order; those that are not live are left out."""
    alive = LIVE if at is None else ALIVE
    query = ENTRY + f"WHERE s.entry = :id AND s.tenant = :tenant AND {alive}"
    found = []
    with self._reading() as db:
      at = resolve(db, at)
      for number in ids:
        row = db.execute(query, {"id": int(number), "tenant": tenant, "at": at}).fetchone()
        if row:
          found.append(entry(row))
    return found

  def entries(self, tenant: str | None, at: int | None = None) -> list[Entry]:
    """The live entries of a tenant (None: of all) by id, as of a version."""
    query = ENTRY + f"WHERE {LIVE if at is None else ALIVE}"
    query += " AND s.tenant = :tenant" if tenant is not None else ""
    query += " ORDER BY s.entry"
    with self._reading() as db:
      rows = db.execute(query, {"tenant": tenant, "at": resolve(db, at)})
      return [entry(row) for row in rows]

  def count(self, tenant: str | None, at: int | None = None) -> int:
    """Number of live entries of a tenant (None: of all)."""
    query = f"SELECT count(*) FROM states s WHERE {LIVE if at is None else ALIVE}"
    query += " AND s.tenant = :tenant" if tenant is not None else ""
    with self._reading() as db:
      return db.execute(query, {"tenant": tenant, "at": resolve(db, at)}).fetchone()[0]

  def tenants(self, at: int | None = None) -> list[str]:
    """Tenants that have live entries."""
    alive = LIVE if at is None else ALIVE
    query = f"SELECT DISTINCT tenant FROM states s WHERE {alive} ORDER BY tenant"
    with self._reading() as db:
      return [row[0] for row in db.execute(query, {"at": resolve(db, at)})]

  def history(self, id: int) -> list[tuple[Entry, int | None]]:
    """Every state of an entry, oldest first, with the version that ended it (None: it lives)."""
    query = ENTRY.replace("c.vector", "c.vector, s.died") + "WHERE s.entry=? ORDER BY s.born"
    with self._reading() as db:
      return [(entry(row), row[8]) for row in db.execute(query, (id,))]

  def lineage(self, id: int) -> Lineage:
    """Which trial wrote an entry, which read it, and their rewards."""
    states = self.history(id)
    if not states:
      raise StoreError(f"no entry {id} was ever written here.")
    with self._reading() as db:
      read = db.execute(
        "SELECT trial, step, entry, seen FROM reads WHERE entry=? ORDER BY rowid", (id,)
      )
      reads = [Read(*row) for row in read]
      outcomes = {name: _outcome(db, name) for name in {read.trial for read in reads}}
    rewards = [outcome.reward for outcome in outcomes.values() if outcome]
    return Lineage(
      id=id,
      writer=states[0][0].data.get("trial"),
      reads=[(read, outcomes[read.trial]) for read in reads],
      mean_reward=sum(rewards) / len(rewards) if rewards else None,
    )

  def diff(self, a: int, b: int | None = None, tenant: str | None = None) -> Diff:
    """What changes from version `a` to `b` (default: the newest), for a tenant or for all.

    It costs what lies between the two versions, so a cache can follow with it.
    """
    with self._reading() as db:
      a, b = resolve(db, a), resolve(db, b)
      low, high = min(a, b), max(a, b)
      query = (
        ENTRY
        + f"WHERE {ALIVE} AND s.rowid IN (SELECT rowid FROM states WHERE born > :low AND born <= :high"
        " UNION SELECT rowid FROM states WHERE died > :low AND died <= :high)"
      )
      query += " AND s.tenant = :tenant" if tenant is not None else ""
      names = {"low": low, "high": high, "tenant": tenant}
      before, after = (
        {row[0]: entry(row) for row in db.execute(query, names | {"at": at})} for at in (a, b)
      )
    return Diff(
      added=[after[id] for id in sorted(after.keys() - before.keys())],
      removed=[before[id] for id in sorted(before.keys() - after.keys())],
      changed=[
        (before[id], after[id])
        for id in sorted(before.keys() & after.keys())
        if not same(before[id], after[id])
      ],
    )

  def select(self, where: Where) -> list[int]:
    """Ids of the live entries that meet every condition."""
    with self._reading() as db:
      return select(db, where)

  def versions(self) -> list[dict[str, Any]]:
    """One record a version, oldest first: version, why, and its counts."""
    with self._reading() as db:
      rows = db.execute("SELECT version, why, counts FROM versions ORDER BY version").fetchall()
    return [{"version": row[0], "why": row[1], **json.loads(row[2])} for row in rows]

  def stats(self) -> dict[str, Any]:
    """Sizes and totals over all versions.

    near_duplicate_rate is the share of offered adds that were identical to a live entry
    (repeated), too near to one (as the caller reported), or merged away under a cap.
    """
    total: collections.Counter = collections.Counter()
    for record in self.versions():
      total.update({name: n for name, n in record.items() if name not in ("version", "why")})
    near = total["repeated"] + total["near_duplicates"] + total["merged"]
    offered = total["added"] + total["repeated"] + total["near_duplicates"]
    with self._reading() as db:
      sizes = {
        table: db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("states", "reads", "outcomes")
      }
      live = db.execute(
        "SELECT tenant, count(*) FROM states WHERE died IS NULL GROUP BY tenant ORDER BY tenant"
      ).fetchall()
    files = self.path.glob(schema.FILE + "*")
    return {
      "version": self.version,
      "entries": sum(n for _, n in live),
      "tenants": dict(live),
      **{name: total[name] for name in COUNTS},
      "near_duplicate_rate": near / offered if offered else 0.0,
      **sizes,
      "bytes": sum(file.stat().st_size for file in files),
    }


COUNTS = ("added", "changed", "removed", "evicted", "merged", "repeated", "near_duplicates")


def same(a: Entry, b: Entry) -> bool:
  """Equal but for the version that wrote them, as after a rollback."""
  names = ("id", "tenant", "key", "text", "score", "data", "vector")
  return all(getattr(a, name) == getattr(b, name) for name in names)


def select(db: sqlite3.Connection, where: Where) -> list[int]:
  """Ids of live entries that meet `where`, in the transaction of the caller."""
  query = """
    SELECT entry, data FROM states WHERE died IS NULL AND tenant = :tenant
      AND (:min_score IS NULL OR score >= :min_score) AND (:max_score IS NULL OR score <= :max_score)
      AND (:min_age IS NULL OR :now - born >= :min_age)
      AND (:max_age IS NULL OR :now - born <= :max_age) ORDER BY entry"""
  names = {name: getattr(where, name) for name in ("tenant", "min_score", "max_score")}
  names |= {"min_age": where.min_age, "max_age": where.max_age, "now": resolve(db, None)}
  rows = db.execute(query, names)
  if not where.data:
    return [id for id, _ in rows]
  wanted = where.data.items()
  found = ((id, json.loads(data)) for id, data in rows)
  return [id for id, data in found if all(k in data and data[k] == v for k, v in wanted)]


def resolve(db: sqlite3.Connection, version: int | None) -> int:
  (newest,) = db.execute("SELECT max(version) FROM versions").fetchone()
  if version is None:
    return newest
  if not 0 <= version <= newest:
    raise StoreError(f"there is no version {version}; this memory has 0 to {newest}.")
  return version


def _outcome(db: sqlite3.Connection, trial: str) -> Outcome | None:
  row = db.execute(
    "SELECT trial, reward, success FROM outcomes WHERE trial=? ORDER BY rowid DESC LIMIT 1",
    (trial,),
  ).fetchone()
  return Outcome(row[0], row[1], bool(row[2])) if row else None
