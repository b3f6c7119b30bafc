"""The SQLite layout of a memory, the checksum chain over its versions, and migrations.

An entry's life is a list of states [born, died): the commit that wrote the state, and the one that
replaced or removed it (NULL: it lives). The memory at version v is every state with born <= v < died.
States share `contents` (key, text, vector), so that a change of score costs no vector.

    digest(v) = sha256(digest(v-1), the row of v, states born at v, entries died at v, reads, outcomes)

Any byte of the payload that flips breaks the chain, as in Git.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import sqlite3
import urllib.parse

from memrl_jax.memory import records

FILE = "memory.db"

LINEAGE = """
CREATE TABLE reads(
  version INTEGER NOT NULL, trial TEXT NOT NULL, step INTEGER NOT NULL, entry INTEGER NOT NULL,
  seen INTEGER NOT NULL);
CREATE INDEX reads_entry ON reads(entry);
CREATE INDEX reads_version ON reads(version);
CREATE TABLE outcomes(
  version INTEGER NOT NULL, trial TEXT NOT NULL, reward REAL NOT NULL, success INTEGER NOT NULL);
CREATE INDEX outcomes_trial ON outcomes(trial);
CREATE INDEX outcomes_version ON outcomes(version);
"""
STATES = """
CREATE TABLE versions(
  version INTEGER PRIMARY KEY, next_id INTEGER NOT NULL, manifest TEXT NOT NULL, why TEXT NOT NULL,
  counts TEXT NOT NULL, digest BLOB NOT NULL);
CREATE TABLE contents(
  content INTEGER PRIMARY KEY, words BLOB NOT NULL, digest BLOB NOT NULL, key TEXT NOT NULL,
  text TEXT NOT NULL, vector BLOB NOT NULL);
CREATE INDEX contents_words ON contents(words);
CREATE TABLE states(
  entry INTEGER NOT NULL, tenant TEXT NOT NULL, content INTEGER NOT NULL, score REAL NOT NULL,
  data TEXT NOT NULL, born INTEGER NOT NULL, died INTEGER);
CREATE UNIQUE INDEX states_entry ON states(entry, born);
CREATE UNIQUE INDEX states_live ON states(tenant, entry) WHERE died IS NULL;
CREATE INDEX states_score ON states(tenant, score, entry) WHERE died IS NULL;
CREATE INDEX states_content ON states(content);
CREATE INDEX states_born ON states(born);
CREATE INDEX states_died ON states(died);
"""
TABLES = STATES + LINEAGE
CHAIN = (  # what a version's checksum covers
  "SELECT version, next_id, manifest, why, counts FROM versions WHERE version=?",
  "SELECT entry, tenant, score, data, hex(digest) FROM states LEFT JOIN contents"
  " USING(content) WHERE born=? ORDER BY entry",
  "SELECT entry FROM states WHERE died=? ORDER BY entry",
  "SELECT trial, step, entry, seen FROM reads WHERE version=? ORDER BY rowid",
  "SELECT trial, reward, success FROM outcomes WHERE version=? ORDER BY rowid",
)


def connect(folder: pathlib.Path, *, write: bool, create: bool = False) -> sqlite3.Connection:
  """A connection in autocommit mode; transactions are begun by hand. Readers cannot write."""
  mode = "rwc" if create else "rw"
  if not write and not os.access(folder, os.W_OK):
    # sqlite would write its shared memory beside a file in WAL mode. Where no log is left there is
    # nothing to share: on a read-only medium, or a folder of somebody who has closed it.
    mode = "ro" if (folder / f"{FILE}-wal").exists() else "ro&immutable=1"
  path = urllib.parse.quote(str((folder / FILE).absolute()))
  db = sqlite3.connect(
    f"file:{path}?mode={mode}",
    uri=True,
    isolation_level=None,
    check_same_thread=False,
    timeout=30,
  )
  if write:
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
  else:
    db.execute("PRAGMA query_only=1")
  return db


def create(db: sqlite3.Connection, manifest: records.Manifest) -> None:
  """Makes an empty memory, version 0, in one transaction."""
  db.executescript(f"BEGIN IMMEDIATE; {TABLES} PRAGMA user_version={records.SCHEMA};")
  db.execute(
    "INSERT INTO versions VALUES(0, 1, ?, 'created', '{}', x'')", (manifest_text(manifest),)
  )
  seal(db, 0)
  db.execute("COMMIT")


def manifest_text(manifest: records.Manifest) -> str:
  fields = dataclasses.asdict(manifest)
  del fields["schema"]  # that of the file, in user_version, whatever the version looked at
  return records.canonical(fields)


def words_digest(key: str, text: str) -> bytes:
  """Finds entries with identical words through an index."""
  return hashlib.sha256(f"{len(key)}:{key}{text}".encode()).digest()[:16]


def content_digest(key: str, text: str, vector: bytes) -> bytes:
  words = f"{len(key)}:{len(text)}:{key}{text}".encode()
  return hashlib.sha256(words + vector).digest()


def digest(db: sqlite3.Connection, version: int) -> bytes:
  """The checksum of a version, from what the database holds and the checksum before it."""
  before = db.execute("SELECT digest FROM versions WHERE version=?", (version - 1,)).fetchone()
  total = hashlib.sha256(before[0] if before else b"")
  lineage = db.execute("PRAGMA user_version").fetchone()[0] >= 2
  for number, query in enumerate(CHAIN):
    rows = db.execute(query, (version,)).fetchall() if number < 3 or lineage else []
    if rows:  # so that a new table leaves the checksums of older versions as they are
      total.update(f"{number}{json.dumps(rows)}".encode())
  return total.digest()


def seal(db: sqlite3.Connection, version: int) -> None:
  """Writes the checksum of the version that this transaction makes."""
  db.execute("UPDATE versions SET digest=? WHERE version=?", (digest(db, version), version))


def _add_lineage(db: sqlite3.Connection) -> None:
  """1 -> 2: who read which entry, and how trials ended."""
  for statement in LINEAGE.split(";"):
    db.execute(statement)


MIGRATIONS = {1: _add_lineage}  # from that schema to the next


def migrate(db: sqlite3.Connection) -> int:
  """Brings an older layout up to `records.SCHEMA` in one transaction; returns the old number."""
  found = version_of(db)
  if found < records.SCHEMA:
    db.execute("BEGIN IMMEDIATE")
    try:
      for step in range(found, records.SCHEMA):
        MIGRATIONS[step](db)
      db.execute(f"PRAGMA user_version={records.SCHEMA}")
      db.execute("COMMIT")
    except BaseException:
      db.execute("ROLLBACK")
      raise
  return found


def version_of(db: sqlite3.Connection) -> int:
  """The schema number of a database; raises where it is newer than this code."""
  (found,) = db.execute("PRAGMA user_version").fetchone()
  if found > records.SCHEMA:
    raise records.StoreError(
      f"this memory has schema {found} and this memrl_jax knows up to {records.SCHEMA}; "
      "upgrade memrl_jax."
    )
  return found


def read_manifest(db: sqlite3.Connection, version: int) -> records.Manifest:
  (text,) = db.execute("SELECT manifest FROM versions WHERE version=?", (version,)).fetchone()
  return records.Manifest(**json.loads(text), schema=version_of(db))
