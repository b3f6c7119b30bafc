"""A memory out of its folder and back: snapshots that are whole or not there, and JSON lines."""

from __future__ import annotations

import base64
import collections.abc
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import sqlite3

from memrl_jax.memory import check, lock, reader, records, schema
from memrl_jax.memory.records import Add, Commit, Locked, Manifest, StoreError
from memrl_jax.memory.store import Store

FORMAT = 1  # of the JSON lines


def snapshot(store: reader.Reader, folder: str | os.PathLike) -> int:
  """Copies the memory as it is now, with its history, to a new folder; returns the version.

  Written next to it and renamed when all bytes are on disk: a snapshot is whole or not there.
  Writing goes on meanwhile.
  """
  folder = pathlib.Path(folder).expanduser().absolute()
  if folder.exists():
    raise StoreError(f"{folder} exists already; name a new folder for the snapshot.")
  partial = folder.parent / f".{folder.name}.{os.getpid()}.partial"
  shutil.rmtree(partial, ignore_errors=True)
  try:
    partial.mkdir(parents=True)
    with store._reading() as db:
      version = reader.resolve(db, None)
      copy = sqlite3.connect(partial / schema.FILE, isolation_level=None)
      try:
        db.backup(copy)
        copy.execute("PRAGMA journal_mode=DELETE")  # one file, and reading it writes nothing
      finally:
        copy.close()
    _sync(partial / schema.FILE)
    listed = {"version": version, "files": {schema.FILE: check.sha256(partial / schema.FILE)}}
    (partial / check.SNAPSHOT).write_text(json.dumps(listed, indent=2) + "\n")
    _sync(partial / check.SNAPSHOT)
    _sync(partial)
    partial.rename(folder)
    _sync(folder.parent)
  except OSError as error:
    raise StoreError(f"no snapshot was made in {folder}: {error}.") from error
  finally:
    shutil.rmtree(partial, ignore_errors=True)
  return version


def restore(saved: str | os.PathLike, folder: str | os.PathLike) -> pathlib.Path | None:
  """Puts a verified snapshot in the place of the memory in `folder`, which nobody may have open.

  What was there is kept first, in `folder`/before-restore-N (a snapshot, or where it was damaged
  the bare files); returns that path, or None where there was nothing.
  """
  saved, folder = (pathlib.Path(path).expanduser().absolute() for path in (saved, folder))
  problems = check.verify(saved)
  if not (saved / check.SNAPSHOT).exists():
    problems.append(f"it has no {check.SNAPSHOT}")
  if problems:
    raise StoreError(f"{saved} cannot be restored: {problems[0]}; take another snapshot.")
  folder.mkdir(parents=True, exist_ok=True)
  with contextlib.ExitStack() as stack:
    for name in ("writer.lock", "readers.lock"):
      try:
        stack.callback(lock.Lock(folder / name, exclusive=True).close)
      except Locked as error:
        raise Locked(f"{error}; close it first.") from None
    kept = _keep(folder) if (folder / schema.FILE).exists() else None
    fresh = folder / f"{schema.FILE}.restore"
    shutil.copyfile(saved / schema.FILE, fresh)
    _sync(fresh)
    for end in ("-wal", "-shm"):  # of the old database; folded into it, or kept beside it, above
      (folder / f"{schema.FILE}{end}").unlink(missing_ok=True)
    fresh.replace(folder / schema.FILE)
    _sync(folder)
  return kept


def _keep(folder: pathlib.Path) -> pathlib.Path:
  n = 1
  while (folder / f"before-restore-{n}").exists():
    n += 1
  kept = folder / f"before-restore-{n}"
  if not check.verify(folder):
    with reader.Reader(folder) as old:
      snapshot(old, kept)
    db = schema.connect(folder, write=True)  # its last close folds the log into memory.db
    db.close()
    return kept
  kept.mkdir()
  for file in folder.glob(schema.FILE + "*"):
    shutil.copyfile(file, kept / file.name)
    _sync(kept / file.name)
  _sync(kept)
  return kept


def export_lines(
  store: reader.Reader, tenant: str | None = None, at: int | None = None
) -> collections.abc.Iterator[str]:
  """The state of a tenant (None: of all) at a version as JSON lines: a head, then entries by id.

  Equal states give equal bytes. History, reads and outcomes are in snapshots only.
  """
  at = store.version if at is None else at
  manifest = dataclasses.asdict(store.manifest_at(at))
  del manifest["schema"]
  head = {"memory": FORMAT, **manifest}
  if tenant is None:
    head["next_id"] = store.next_id(at)  # the ids of removed entries stay taken after an import
  yield records.canonical(head) + "\n"
  for entry in store.entries(tenant, at):
    fields = dataclasses.asdict(entry)
    del fields["version"]
    fields["vector"] = base64.b64encode(entry.vector).decode()
    yield records.canonical(fields) + "\n"


def export_jsonl(
  store: reader.Reader, path: str | os.PathLike, tenant: str | None = None, at: int | None = None
) -> None:
  """`export_lines` as a file, which is whole or not there."""
  path = pathlib.Path(path)
  partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
  try:
    with partial.open("w", encoding="utf-8", newline="\n") as file:
      file.writelines(export_lines(store, tenant, at))
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  except OSError as error:
    raise StoreError(f"{path} was not written: {error}.") from error
  finally:
    partial.unlink(missing_ok=True)


def import_lines(
  store: Store, lines: collections.abc.Iterable[str], *, new_ids: bool = False
) -> Commit:
  """Adds what `export_lines` gave, as one commit; `new_ids` where the memory is not empty."""
  lines = iter(lines)
  manifest, next_id = read_head(next(lines, ""))
  if dataclasses.replace(manifest, schema=store.manifest.schema) != store.manifest:
    raise StoreError(
      f"the export was embedded by {manifest.embedder} ({manifest.dimension} numbers) and this "
      f"memory is by {store.manifest.embedder} ({store.manifest.dimension}); import it into a new "
      "folder and reindex that."
    )
  ops = [_add(line, number, new_ids) for number, line in enumerate(lines, 2) if line.strip()]
  return store.commit(ops, reserve=0 if new_ids else next_id, why="import")


def import_jsonl(store: Store, path: str | os.PathLike, *, new_ids: bool = False) -> Commit:
  """`import_lines` from a file."""
  return import_lines(store, read_lines(path), new_ids=new_ids)


def read_entries(path: str | os.PathLike) -> list[Add]:
  """The entries of an exported memory, to be added to another one under new ids."""
  lines = read_lines(path)
  read_head(lines[0] if lines else "")
  return [_add(line, number, True) for number, line in enumerate(lines[1:], 2) if line.strip()]


def read_lines(path: str | os.PathLike) -> list[str]:
  try:
    with pathlib.Path(path).open(encoding="utf-8", newline="\n") as file:
      return list(file)
  except (OSError, UnicodeDecodeError) as error:
    raise StoreError(f"{path} cannot be read: {error}.") from error


def read_head(line: str) -> tuple[Manifest, int]:
  """Manifest and next id of an export, from its first line."""
  try:
    head = json.loads(line)
    if head["memory"] != FORMAT:
      raise StoreError(f"the export has format {head['memory']}, not {FORMAT}.")
    manifest = Manifest(head["embedder"], head["dimension"], head["normalised"])
    return manifest, head.get("next_id", 0)
  except (ValueError, KeyError, TypeError) as error:
    if isinstance(error, StoreError):
      raise
    raise StoreError(
      "line 1 is not the head of an exported memory; is it the right file?"
    ) from None


def _add(line: str, number: int, new_ids: bool) -> Add:
  try:
    fields = json.loads(line)
    fields["vector"] = base64.b64decode(fields["vector"], validate=True)
    if new_ids:
      fields["id"] = None
    return Add(**fields)
  except (ValueError, KeyError, TypeError) as error:
    raise StoreError(f"line {number} is not an exported entry: {error}.") from None


def _sync(path: pathlib.Path) -> None:
  """Onto the disk, file or folder."""
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
