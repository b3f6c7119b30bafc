"""Who did what when: one JSON line a request, only ever appended. No texts, and no keys but their ids.

The file is opened for each line, so it may be moved away at any time; a line is written at once and whole.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from typing import Any


class Audit:
  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)

  def write(self, who: str, key: str, what: str, **more: Any) -> None:
    """who: a tenant, "operator" at the command line, or "" for somebody without a good key."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    line = json.dumps({"time": now, "who": who, "key": key, "what": what, **more}) + "\n"
    fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
      os.write(fd, line.encode())
    finally:
      os.close(fd)
