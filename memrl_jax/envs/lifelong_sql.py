"""The database of a DB task: one table, statements with their printed results, and the hash of its state.

SQLite is the default, in memory. It reads MySQL's quotes and divides as MySQL does; text compares without
regard to case. Syntax that only MySQL has is an error there (SHOW, DESCRIBE, UPDATE ... LIMIT, most functions).
A statement cannot leave its database: no files, no pragmas, limited time, limited size.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

FETCHED_ROWS, FETCHED_CHARS = 1000, 200_000  # of a result; the rest is left out
VALUE_CHARS, COLUMNS = 100_000, 200  # longest text that a statement may make, widest result
PAGES = 4096  # of 4 KiB: largest database
_OPERATIONS = 20_000  # of SQLite's machine between two looks at the clock


class Table(NamedTuple):
  """`columns` are (name, type); the published tables have INT and TEXT."""

  name: str
  columns: tuple[tuple[str, str], ...]
  rows: tuple[tuple[Any, ...], ...]


class Reply(NamedTuple):
  """What a client shows of the last statement: its rows as Python writes them, or the error."""

  text: str
  failed: bool


class Database(Protocol):
  """A fresh table in a database of its own. Nothing is left of it after `close`."""

  def execute(self, sql: str) -> Reply:
    """Runs statements one after another, each of them committed; an error ends the sequence."""

  def rows(self, sql: str) -> list[tuple[Any, ...]] | None:
    """What the last statement of a sequence returns; None where it fails."""

  def state(self) -> str:
    """The hash of the table (`state_of`), an error text where the table is gone."""

  def close(self) -> None:
    """Removes it; may be called twice."""


def state_of(rows: Iterable[Sequence[Any]]) -> str:
  """md5 over the sorted first 5 hex digits of the md5 of every row; "None" for an empty table.

  Equals the release's `md5(group_concat(h order by h))` of `substring(md5(concat_ws(',', columns)), 1, 5)`, which
  skips NULL. Two tables with equal hashes may differ: 20 bits are kept of a row.
  """
  hashes = sorted(
    hashlib.md5(",".join(_plain(v) for v in row if v is not None).encode()).hexdigest()[:5]
    for row in rows
  )
  return hashlib.md5(",".join(hashes).encode()).hexdigest() if hashes else "None"


def _plain(value: Any) -> str:
  """A value as concat_ws writes it."""
  return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def fetched(cursor: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
  """The first rows of a result."""
  found, size = [], 0
  for row in cursor:
    found.append(row)
    size += _length(row)
    if len(found) == FETCHED_ROWS or size > FETCHED_CHARS:
      break
  return found


def is_cut(found: list[tuple[Any, ...]]) -> bool:
  """Whether `fetched` may have left rows out."""
  return len(found) == FETCHED_ROWS or sum(map(_length, found)) > FETCHED_CHARS


def _length(row: tuple[Any, ...]) -> int:
  return sum(len(value) for value in row if isinstance(value, str | bytes))


# Statements.

_PIECE = re.compile(
  r"""(?P<text>'(?:[^'\\]|''|\\.)*'|"(?:[^"\\]|""|\\.)*")"""
  r"""|(?P<name>`[^`]*`)|(?P<remark>--[^\n]*|\#[^\n]*|/\*.*?\*/)|(?P<end>;)|(?P<divide>/)""",
  re.DOTALL,
)


def statements(sql: str, *, for_sqlite: bool = False) -> list[str]:
  """The statements of a text, split at semicolons outside quotes; on request in SQLite's words.

  For SQLite a double-quoted text is a text and no column, a backslash escapes, and `a / b` of whole numbers is
  no whole number.
  """
  parts, place = [""], 0
  for piece in _PIECE.finditer(sql):
    parts[-1] += sql[place : piece.start()]
    place = piece.end()
    if piece["end"]:
      parts.append("")
    elif piece["remark"]:
      parts[-1] += " "
    elif for_sqlite and piece["divide"]:
      parts[-1] += " * 1.0 / "
    elif for_sqlite and piece["text"]:
      parts[-1] += _literal(piece["text"])
    else:
      parts[-1] += piece[0]
  parts[-1] += sql[place:]
  return [part.strip() for part in parts if part.strip()]


def _literal(quoted: str) -> str:
  quote, body = quoted[0], quoted[1:-1]
  body = re.sub(r"\\(.)", r"\1", body.replace(quote * 2, quote), flags=re.DOTALL)
  return "'" + body.replace("'", "''") + "'"


# SQLite.

_PERMITTED = frozenset(
  getattr(sqlite3, f"SQLITE_{name}")
  for name in (
    *("SELECT", "READ", "INSERT", "UPDATE", "DELETE", "FUNCTION", "RECURSIVE", "TRANSACTION"),
    *("SAVEPOINT", "CREATE_TABLE", "CREATE_INDEX", "CREATE_VIEW", "CREATE_TEMP_TABLE"),
    *("CREATE_TEMP_INDEX", "CREATE_TEMP_VIEW", "DROP_TABLE", "DROP_INDEX", "DROP_VIEW"),
    *("DROP_TEMP_TABLE", "DROP_TEMP_INDEX", "DROP_TEMP_VIEW", "ALTER_TABLE", "REINDEX"),
  )
)


class Sqlite:
  """In memory. `seconds` limits every call."""

  def __init__(self, table: Table, seconds: float):
    self._table, self._seconds, self._deadline = table, seconds, float("inf")
    self._base = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    columns = ", ".join(f"{quoted(name)} {_declared(kind)}" for name, kind in table.columns)
    self._base.execute(f"CREATE TABLE {quoted(table.name)} ({columns})")
    marks = ", ".join("?" * len(table.columns))
    self._base.executemany(f"INSERT INTO {quoted(table.name)} VALUES ({marks})", table.rows)
    self._base.execute(f"PRAGMA max_page_count = {PAGES}")
    self._base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, VALUE_CHARS)
    self._base.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, COLUMNS)
    self._base.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    self._base.set_authorizer(_authorize)
    self._base.set_progress_handler(lambda: time.monotonic() > self._deadline, _OPERATIONS)

  def execute(self, sql: str) -> Reply:
    try:
      return Reply(str(self._run(statements(sql, for_sqlite=True))), False)
    except (sqlite3.Error, sqlite3.Warning, OverflowError, UnicodeError, MemoryError) as error:
      late = f"the statement took more than {self._seconds:g} seconds and was stopped"
      return Reply(late if str(error) == "interrupted" else str(error), True)

  def rows(self, sql: str) -> list[tuple[Any, ...]] | None:
    try:
      return self._run(statements(sql, for_sqlite=True))
    except (sqlite3.Error, sqlite3.Warning):
      return None

  def state(self) -> str:
    columns = ", ".join(quoted(name) for name, _ in self._table.columns)
    self._deadline = time.monotonic() + self._seconds
    try:
      return state_of(self._base.execute(f"SELECT {columns} FROM {quoted(self._table.name)}"))
    except sqlite3.Error as error:
      return str(error)

  def close(self) -> None:
    self._base.close()

  def _run(self, given: list[str]) -> list[tuple[Any, ...]]:
    self._deadline = time.monotonic() + self._seconds
    found: list[tuple[Any, ...]] = []
    try:
      for statement in given:
        found = fetched(self._base.execute(statement))
    finally:
      if self._base.in_transaction:
        self._base.commit()
    return found


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
  loads = action == sqlite3.SQLITE_FUNCTION and second == "load_extension"
  return sqlite3.SQLITE_OK if action in _PERMITTED and not loads else sqlite3.SQLITE_DENY


def quoted(name: str) -> str:
  """A name of a table or column, in backticks."""
  return "`" + name.replace("`", "``") + "`"


def _declared(kind: str) -> str:
  """A column's type; text compares as in MySQL's usual collations, without regard to case."""
  return f"{kind} COLLATE NOCASE" if re.search("char|text", kind, re.IGNORECASE) else kind
