"""The inverted files of a memory in one file beside the store, so that opening it trains nothing.

  line 1   sha256 of all that follows
  line 2   JSON: the version and fingerprint of the store that it mirrors, and a table of parts
  then     the FAISS bytes of each tenant's inverted file

It is a cache: whatever is wrong with it, it is not used, and the caller builds anew. The vectors
themselves are read from the store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping

import numpy as np

from memrl_jax.memory import ann

NAME = "index.cache"


def save(folder: pathlib.Path, built: Mapping[str, ann.Ann], version: int, mark: str) -> None:
  """Writes the file anew and whole, or takes it away where there is nothing to keep."""
  path = folder / NAME
  if not built:
    path.unlink(missing_ok=True)
    return
  parts = {tenant: made.dump() for tenant, made in built.items()}
  table = [
    {"tenant": tenant, "bytes": len(parts[tenant]), **made.state()}
    for tenant, made in built.items()
  ]
  head = json.dumps({"version": version, "fingerprint": mark, "parts": table}).encode() + b"\n"
  total = hashlib.sha256(head)
  for data in parts.values():
    total.update(data)
  partial = folder / f".{NAME}.{os.getpid()}.partial"
  try:
    with partial.open("wb") as file:
      file.write(total.hexdigest().encode() + b"\n" + head)
      for data in parts.values():
        file.write(data)
      file.flush()
      os.fsync(file.fileno())
    partial.replace(path)
  finally:
    partial.unlink(missing_ok=True)


def problem(folder: pathlib.Path) -> str | None:
  """Why the file cannot be what was written; None where it is whole, or not there."""
  path = folder / NAME
  with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
    named = file.readline(80).strip()
    if hashlib.file_digest(file, "sha256").hexdigest().encode() != named:
      return f"{path} is not the file that was saved: its sha256 differs"
  return None


def load(folder: pathlib.Path, version: int, mark: str) -> dict[str, ann.Ann]:
  """The inverted files by tenant; none where the file is damaged or of another state of the store."""
  path = folder / NAME
  if not path.exists() or problem(folder):
    return {}
  data = path.read_bytes()
  end = data.index(b"\n", 65) + 1
  head = json.loads(data[65:end])
  if (head["version"], head["fingerprint"]) != (version, mark):
    return {}
  built = {}
  for part in head["parts"]:
    part_bytes = np.frombuffer(data, np.uint8, part["bytes"], end)
    built[part["tenant"]] = ann.Ann.load(part_bytes, part)
    end += part["bytes"]
  return built
