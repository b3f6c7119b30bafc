"""What was suggested, and what came of it: the table between a suggestion and its feedback, on the disk.

An outcome is written here first, then it moves the memory; whoever dies between the two goes on where it
stopped, because both know a suggestion by its id. A row's state:

  OPEN     suggested        TOLD  its outcome is on the disk, the memory does not know yet
  SETTLED  nothing is left  PAID  Q has moved, the episode waits for the language model that sums it up
  GIVEN_UP the language model failed too often; Q has moved, the episode is no memory
"""

from __future__ import annotations

import json
import os
import pathlib
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

FILE = "suggestions.db"
OPEN, TOLD, PAID, SETTLED, GIVEN_UP = range(5)
_SWEEP = 256  # suggestions between two looks for old ones

_TABLE = """
CREATE TABLE IF NOT EXISTS suggestions(
  n INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, state INTEGER NOT NULL, task TEXT NOT NULL,
  reads TEXT NOT NULL, trajectory TEXT, reward REAL, success INTEGER, tries INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS waiting ON suggestions(state, tries, n);
"""
_ROW = "SELECT id, state, task, reads, trajectory, reward, success, tries FROM suggestions "


class Row(NamedTuple):
  """One suggestion. reads: (id, version) of the memories that were shown, the best first."""

  id: str
  state: int
  task: str
  reads: tuple[tuple[int, int], ...]
  trajectory: str | None
  reward: float | None
  success: bool | None
  tries: int


class Outcome(NamedTuple):
  """What a client says of a suggestion; trajectory None: what was seen of it (`saw`), if anything."""

  id: str
  reward: float
  success: bool
  trajectory: str | None


class Asked:
  """The table of one memory; threads may share it."""

  def __init__(self, folder: str | os.PathLike, keep: int):
    self._keep, self._since = keep, 0
    self._lock = threading.Lock()
    path = pathlib.Path(folder) / FILE
    self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
    self._db.execute("PRAGMA journal_mode=WAL")
    # A suggestion survives the death of the process; only outcomes are worth a wait for the disk.
    self._db.execute("PRAGMA synchronous=NORMAL")
    self._db.executescript(_TABLE)

  def close(self) -> None:
    with self._lock:
      self._db.close()

  def add(self, id: str, task: str, reads: Sequence[tuple[int, int]]) -> None:
    with self._lock:
      values = (id, OPEN, task, json.dumps([list(map(int, read)) for read in reads]))
      self._db.execute(
        "INSERT INTO suggestions(id, state, task, reads, tries) VALUES(?, ?, ?, ?, 0)", values
      )
      self._since += 1
      if self._since >= _SWEEP:
        self._since = 0
        self._db.execute(
          "DELETE FROM suggestions WHERE state NOT IN (?, ?)"
          " AND n <= (SELECT max(n) FROM suggestions) - ?",
          (TOLD, PAID, self._keep),
        )

  def saw(self, id: str, trajectory: str) -> None:
    """What happened after a suggestion, as a proxy saw it; of a suggestion whose end is known: nothing."""
    with self._lock:
      query = "UPDATE suggestions SET trajectory=? WHERE id=? AND state=?"
      self._db.execute(query, (trajectory, id, OPEN))

  def tell(self, outcomes: Iterable[Outcome]) -> None:
    """Writes outcomes of open suggestions, onto the disk when it returns."""
    rows = [(TOLD, o.reward, o.success, o.trajectory, o.id, OPEN) for o in outcomes]
    with self._lock:
      self._db.execute("PRAGMA synchronous=FULL")
      try:
        self._many(
          "UPDATE suggestions SET state=?, reward=?, success=?, trajectory=coalesce(?, trajectory)"
          " WHERE id=? AND state=?",
          rows,
        )
      finally:
        self._db.execute("PRAGMA synchronous=NORMAL")

  def paid(self, ids: Iterable[str]) -> None:
    with self._lock:
      self._many("UPDATE suggestions SET state=? WHERE id=?", [(PAID, id) for id in ids])

  def settled(self, ids: Iterable[str], state: int = SETTLED) -> None:
    """Nothing more will be done about these; their texts are dropped."""
    with self._lock:
      query = "UPDATE suggestions SET state=?, task='', trajectory=NULL WHERE id=?"
      self._many(query, [(state, id) for id in ids])

  def failed(self, id: str) -> None:
    with self._lock:
      self._db.execute("UPDATE suggestions SET tries=tries+1 WHERE id=?", (id,))

  def get(self, id: str) -> Row | None:
    with self._lock:
      row = self._db.execute(_ROW + "WHERE id=?", (id,)).fetchone()
    return _row(row) if row else None

  def waiting(self, state: int, most: int = -1) -> list[Row]:
    """Rows in the state TOLD or PAID, the oldest first."""
    with self._lock:
      query = _ROW + f"WHERE state={int(state)} ORDER BY tries, n LIMIT ?"
      return [_row(row) for row in self._db.execute(query, (most,))]

  def counts(self) -> dict[str, int]:
    """How many suggestions are in each state."""
    with self._lock:
      rows = self._db.execute("SELECT state, count(*) FROM suggestions GROUP BY state").fetchall()
    names = ("open", "told", "paid", "settled", "given_up")
    return dict.fromkeys(names, 0) | {names[state]: n for state, n in rows}

  def _many(self, query: str, rows: list[tuple]) -> None:
    self._db.execute("BEGIN IMMEDIATE")
    try:
      self._db.executemany(query, rows)
      self._db.execute("COMMIT")
    finally:
      if self._db.in_transaction:
        self._db.execute("ROLLBACK")


def _row(row: tuple) -> Row:
  success = None if row[6] is None else bool(row[6])
  return Row(*row[:3], tuple(map(tuple, json.loads(row[3]))), *row[4:6], success, row[7])
