"""Is a memory, or a snapshot of one, still what was written? Every byte of the payload is looked at."""

from __future__ import annotations

import collections.abc
import hashlib
import json
import os
import pathlib
import sqlite3

from memrl_jax.memory import schema

SNAPSHOT = "snapshot.json"  # in a snapshot: its version, and the sha256 of every file
AT_MOST = 20  # problems that are listed; one flipped page can break thousands of rows

# What the code can never write; (claim, query of the offenders).
LAWS = (
  (
    "versions are not 0, 1, 2, ... without a gap",
    "SELECT max(version) FROM versions HAVING max(version) != count(*) - 1 OR min(version) != 0",
  ),
  (
    "an entry has a state without contents",
    "SELECT entry FROM states WHERE content NOT IN (SELECT content FROM contents)",
  ),
  (
    "contents belong to no entry",
    "SELECT content FROM contents WHERE content NOT IN (SELECT content FROM states)",
  ),
  (
    "an entry has two states at once",
    "SELECT entry FROM (SELECT entry, died, lead(born) OVER (PARTITION BY entry ORDER BY born) AS"
    " next FROM states) WHERE next IS NOT NULL AND (died IS NULL OR died > next)",
  ),
  (
    "an entry has a state outside of all versions",
    "SELECT entry FROM states WHERE born < 1 OR died < born"
    " OR max(born, coalesce(died, 0)) > (SELECT max(version) FROM versions)",
  ),
  (
    "an entry has an id that was never given",
    "SELECT entry FROM states WHERE entry >= (SELECT max(next_id) FROM versions) OR entry < 1",
  ),
)
LINEAGE_LAWS = (
  (
    "a read names an entry that never was",
    "SELECT entry FROM reads WHERE entry NOT IN (SELECT entry FROM states)",
  ),
  (
    "a read is outside of all versions",
    "SELECT version FROM reads WHERE version NOT IN (SELECT version FROM versions)",
  ),
  (
    "an outcome is outside of all versions",
    "SELECT version FROM outcomes WHERE version NOT IN (SELECT version FROM versions)",
  ),
)


def verify(folder: str | os.PathLike) -> list[str]:
  """What is wrong with the memory or snapshot in `folder`, in sentences; [] if nothing is."""
  folder = pathlib.Path(folder)
  if not (folder / schema.FILE).exists():
    return [f"there is no memory in {folder}"]
  found = []
  try:
    found += list(_files(folder))
    db = schema.connect(folder, write=False)
    db.text_factory = lambda text: text.decode(errors="replace")  # damage may be no UTF-8
    try:
      db.execute("BEGIN")
      found += list(_database(db))
    finally:
      db.close()
  except (sqlite3.Error, OSError, ValueError) as error:  # ValueError: a message that is no UTF-8
    found.append(f"{schema.FILE} cannot be read: {error}")
  return found[:AT_MOST] + [f"and {n} more" for n in [len(found) - AT_MOST] if n > 0]


def sha256(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: pathlib.Path) -> collections.abc.Iterator[str]:
  """A snapshot's files against its list."""
  if not (folder / SNAPSHOT).exists():
    return
  try:
    files = json.loads((folder / SNAPSHOT).read_text())["files"]
    for name, sum in files.items():
      if not (folder / name).exists():
        yield f"{name} is missing from the snapshot"
      elif sha256(folder / name) != sum:
        yield f"{name} is not the file that was saved: its sha256 differs"
  except (ValueError, KeyError, AttributeError):
    yield f"{SNAPSHOT} is damaged"


def _database(db: sqlite3.Connection) -> collections.abc.Iterator[str]:
  number = schema.version_of(db)
  for (answer,) in db.execute(f"PRAGMA integrity_check({AT_MOST})"):
    if answer != "ok":
      yield f"sqlite: {answer}"
  for claim, query in LAWS + (LINEAGE_LAWS if number >= 2 else ()):
    for (who,) in db.execute(query):
      yield f"{claim}: {who}"
  yield from _contents(db)
  for (version,) in db.execute("SELECT version FROM versions ORDER BY version").fetchall():
    try:
      (kept,) = db.execute("SELECT digest FROM versions WHERE version=?", (version,)).fetchone()
      right = schema.digest(db, version) == kept
    except (sqlite3.Error, ValueError, TypeError):
      right = False
    if not right:
      yield f"version {version} is not what was committed: its checksum differs"


def _contents(db: sqlite3.Connection) -> collections.abc.Iterator[str]:
  query = "SELECT content, digest, words, key, text, vector FROM contents"
  for number, digest, words, key, text, vector in db.execute(query):
    try:
      right = digest == schema.content_digest(key, text, vector)
      right = right and words == schema.words_digest(key, text)
    except TypeError:  # a flipped type
      right = False
    if not right:
      who = db.execute("SELECT entry FROM states WHERE content=?", (number,)).fetchone()
      yield f"the words or the vector of entry {who[0] if who else '?'} have changed on disk"
