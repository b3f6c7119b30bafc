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

from memrl_jax.memory import ann, index

NAME = "index.cache"


def save(folder: pathlib.Path, indices: Mapping[str, index.Index], version: int, mark: str) -> None:
  """Writes the file anew and whole, or takes it away where there is nothing to keep."""
  path = folder / NAME
  built = {tenant: mine for tenant, mine in indices.items() if mine.ann is not None}
  if not built:
    path.unlink(missing_ok=True)
    return
  parts = {tenant: mine.ann.dump() for tenant, mine in built.items()}
  table = [
    {
      "tenant": tenant,
      "bytes": len(parts[tenant]),
      "fresh": mine.fresh.ids_N.tolist(),
      **mine.ann.state(),
    }
    for tenant, mine in built.items()
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


def load(folder: pathlib.Path, indices: Mapping[str, index.Index], version: int, mark: str) -> None:
  """Gives each index its inverted file; none where the file is damaged or of another state."""
  path = folder / NAME
  if not path.exists() or problem(folder):
    return
  data = path.read_bytes()
  end = data.index(b"\n", 65) + 1
  head = json.loads(data[65:end])
  if (head["version"], head["fingerprint"]) != (version, mark):
    return
  for part in head["parts"]:
    built = ann.Ann.load(np.frombuffer(data, np.uint8, part["bytes"], end), part)
    end += part["bytes"]
    mine = indices[part["tenant"]]
    if len(built) + len(part["fresh"]) == len(mine):
      mine.restore(built, part["fresh"])
