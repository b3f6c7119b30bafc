"""The net effect of one commit, worked out in full before any of it is written."""

from __future__ import annotations

import dataclasses
import math
import sqlite3

from memrl_jax.memory import reader, records, schema
from memrl_jax.memory.records import Add, Change, Conflict, Entry, Limits, Op, Remove, StoreError


class Draft:
  """Operations applied to the live entries, in a transaction that the caller has begun.

  `before` and `after` hold the touched entries by id; None: not there. Several operations on one
  entry end as one new state.
  """

  def __init__(self, db: sqlite3.Connection, next_id: int, dimension: int, *, once: bool = False):
    self.db, self.dimension, self.once = db, dimension, once
    self.first_id = self.next_id = next_id
    self.before: dict[int, Entry] = {}
    self.after: dict[int, Entry | None] = {}
    self.new: dict[int, Entry] = {}  # what was added, also if it did not stay
    self.embedded: set[int] = set()
    self.ids: list[int] = []
    self.repeated = 0
    self._contents: dict[int, int] = {}
    self._words: dict[tuple[str, bytes], int] = {}

  def apply(self, op: Op) -> None:
    match op:
      case Add():
        self._add(op)
      case Change():
        self._change(op)
      case Remove():
        self._current(op)
        self.after[op.id] = None
      case _:
        raise StoreError(f"{op!r} is no operation; give Add, Change or Remove.")

  def _add(self, op: Add) -> None:
    entry = self._checked(
      Entry(0, op.tenant, 0, op.key, op.text, op.score, op.data, op.vector)  # version: when sealed
    )
    if self.once:
      words = schema.words_digest(entry.key, entry.text)
      twin = self._words.get((entry.tenant, words)) or self._twin(entry, words)
      if twin is not None:
        self.ids.append(twin)
        self.repeated += 1
        return
      self._words[entry.tenant, words] = self.next_id
    if op.id is not None:
      if op.id < self.next_id:
        raise StoreError(
          f"an import wants id {op.id}, and ids below {self.next_id} were given before; import "
          "with new ids, or into an empty memory."
        )
      self.next_id = op.id
    entry = dataclasses.replace(entry, id=self.next_id)
    self.next_id += 1
    self.ids.append(entry.id)
    self.new[entry.id] = self.after[entry.id] = entry
    self.embedded.add(entry.id)

  def _change(self, op: Change) -> None:
    old = self._current(op)
    if self.dimension and op.key is not None and op.key != old.key and op.vector is None:
      raise StoreError(f"entry {op.id} gets a new key and no vector; embed the key and give both.")
    names = ("key", "text", "score", "data", "vector")
    fields = {name: getattr(op, name) for name in names if getattr(op, name) is not None}
    self.after[op.id] = self._checked(dataclasses.replace(old, **fields), old)
    if op.vector is not None:
      self.embedded.add(op.id)

  def _current(self, op: Change | Remove) -> Entry:
    """The entry as the operations before this one have left it."""
    if op.id not in self.after:
      self._load(op.tenant, op.id)
    found = self.after.get(op.id)
    if found is None or found.tenant != op.tenant:
      raise (StoreError if op.expect is None else Conflict)(
        f"entry {op.id} is not in tenant {op.tenant!r}; it was removed, or belongs to another one."
      )
    if op.expect is not None and op.expect != found.version:
      raise Conflict(
        f"entry {op.id} was read at version {op.expect} and is now of version {found.version}; "
        "read it again and repeat the change."
      )
    return found

  def _load(self, tenant: str, id: int) -> None:
    query = reader.ENTRY.replace("c.vector", "c.vector, s.content")
    query += "WHERE s.tenant=? AND s.entry=? AND s.died IS NULL"
    row = self.db.execute(query, (tenant, id)).fetchone()
    if row:
      self.before[id] = self.after[id] = reader.entry(row)
      self._contents[id] = row[8]

  def _checked(self, entry: Entry, old: Entry | None = None) -> Entry:
    """The entry in the form that is stored; raises for what no database should hold."""
    if not entry.tenant:
      raise StoreError("an entry has no tenant; name whose memory it is.")
    for name in ("tenant", "key", "text"):
      try:
        getattr(entry, name).encode()
      except (UnicodeEncodeError, AttributeError):
        raise StoreError(
          f"{name} is not Unicode text ({getattr(entry, name)!r:.60}); clean it first."
        ) from None
    if not math.isfinite(entry.score):
      raise StoreError(f"the score {entry.score} is not finite; look at what computed it.")
    if not isinstance(entry.data, dict):
      raise StoreError(f"data is a {type(entry.data).__name__}; give a dict of plain JSON.")
    if old is None or entry.vector is not old.vector:
      entry = dataclasses.replace(entry, vector=records.blob(entry.vector, self.dimension))
    return dataclasses.replace(entry, score=float(entry.score) + 0.0)  # sqlite has no -0.0

  def _twin(self, entry: Entry, words: bytes) -> int | None:
    """The live entry of this tenant with the same key and text, unless this draft removes it."""
    query = (
      "SELECT s.entry FROM contents c CROSS JOIN states s ON s.content = c.content"
      " WHERE c.words=? AND s.tenant=? AND s.died IS NULL ORDER BY s.entry"
    )
    for (id,) in self.db.execute(query, (words, entry.tenant)):
      now = self.after.get(id, entry)
      if now is not None and (now.key, now.text) == (entry.key, entry.text):
        return id
    return None

  def merge(self, ops: list[Op], versions: dict[int, int]) -> tuple[int, ...]:
    """Applies what a merge hook returned, all or nothing; returns the ids that it removed.

    `versions` are those of the entries it was shown; negative ids count the Adds from -1 down.
    Nothing is applied where an entry has changed since.
    """
    touched = set(self.after)
    kept = self.next_id, dict(self.after), dict(self.new)
    adds, removed = len(self.ids), []
    try:
      for op in ops:
        if not isinstance(op, Add):
          if op.id < 0:
            op = dataclasses.replace(op, id=self.ids[-op.id - 1])
            if op.id < self.first_id:  # somebody has added the identical entry meanwhile
              raise Conflict("repeated")
          elif op.id in touched:
            raise Conflict("changed by this very commit")
          elif op.id not in versions:
            raise StoreError(
              f"merge names entry {op.id}, which it was not shown; correct the hook."
            )
          elif op.id not in self.after:
            op = dataclasses.replace(op, expect=versions[op.id])
        self.apply(op)
        if isinstance(op, Remove):
          removed.append(op.id)
    except Conflict:
      self.next_id, self.after, self.new = kept
      removed = []
    del self.ids[adds:]  # the caller counts its own Adds
    return tuple(removed)

  def evict(self, tenant: str, limits: Limits) -> tuple[int, ...]:
    """Removes what is over the cap; returns the ids."""
    mine = {
      id: now for id, now in self.after.items() if _tenant(now, self.before.get(id)) == tenant
    }
    live = "FROM states WHERE tenant=? AND died IS NULL"
    (stored,) = self.db.execute(f"SELECT count(*) {live}", (tenant,)).fetchone()
    over = stored - len(mine.keys() & self.before.keys()) - limits.max_entries
    over += sum(now is not None for now in mine.values())
    if over <= 0:
      return ()
    order = "entry" if limits.evict == "fifo" else "score, entry"
    rows = self.db.execute(
      f"SELECT entry, score {live} ORDER BY {order} LIMIT ?", (tenant, over + len(mine))
    )
    known = [(id, score) for id, score in rows if id not in mine]
    known += [(id, now.score) for id, now in mine.items() if now is not None]
    known.sort(key=lambda pair: pair[0] if limits.evict == "fifo" else (pair[1], pair[0]))
    evicted = tuple(id for id, _ in known[:over])
    for id in evicted:
      if id not in self.after:
        self._load(tenant, id)
      self.after[id] = None
    return evicted

  def write(self, version: int) -> dict[str, int]:
    """Writes the new states, born at `version`; returns how many were added, changed, removed."""
    (content,) = self.db.execute("SELECT coalesce(max(content), 0) FROM contents").fetchone()
    counts = {"added": len(self.new), "changed": 0, "removed": 0}
    contents, states, ended = [], [], []
    for id, after in self.after.items():
      before = self.before.get(id)
      if after == before and id not in self.new:
        continue
      if before is not None:
        counts["removed" if after is None else "changed"] += 1
        ended.append((version, before.tenant, id))
      died = None
      if after is None:
        if before is not None:
          continue
        after, died = self.new[id], version  # added and removed at once: history, never state
        counts["removed"] += 1
      words = (after.key, after.text, after.vector)
      if before is not None and words == (before.key, before.text, before.vector):
        number = self._contents[id]
      else:
        content = number = content + 1
        digests = (schema.words_digest(*words[:2]), schema.content_digest(*words))
        contents.append((number, *digests, *words))
      data = records.canonical(after.data)
      states.append((id, after.tenant, number, after.score, data, version, died))
    end = "UPDATE states SET died=? WHERE tenant=? AND entry=? AND died IS NULL"
    self.db.executemany(end, ended)
    self.db.executemany("INSERT INTO contents VALUES(?, ?, ?, ?, ?, ?)", contents)
    self.db.executemany("INSERT INTO states VALUES(?, ?, ?, ?, ?, ?, ?)", states)
    return counts


def _tenant(*entries: Entry | None) -> str | None:
  return next((entry.tenant for entry in entries if entry is not None), None)
