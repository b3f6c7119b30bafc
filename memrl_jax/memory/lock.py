"""Who may write a memory: one process at a time, told by a file lock that dies with its holder."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import pathlib
import weakref

from memrl_jax.memory import records

_HELD: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
  """An flock on a file, exclusive or shared, never waited for; close() or death lets it go.

  The holder of an exclusive lock leaves its pid and the time in the file, for the message.
  """

  def __init__(self, path: pathlib.Path, *, exclusive: bool):
    self.path, self._exclusive = path, exclusive
    self._fd = -1
    self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
      fcntl.flock(self._fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
      self._drop()
      raise records.Locked(f"{path.parent} is in use by {holder(path)}") from None
    if exclusive:
      since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
      os.ftruncate(self._fd, 0)
      os.pwrite(self._fd, json.dumps({"pid": os.getpid(), "since": since}).encode(), 0)
    _HELD.add(self)

  def close(self) -> None:
    if self._fd >= 0 and self._exclusive:
      os.ftruncate(self._fd, 0)
    self._drop()

  def __del__(self):
    self.close()

  def _drop(self) -> None:
    if self._fd >= 0:
      os.close(self._fd)
      self._fd = -1


def holder(path: pathlib.Path) -> str:
  """ "process 123 since 2026-01-02T03:04:05+00:00", or "another process" while that is written."""
  try:
    found = json.loads(path.read_text())
    return f"process {found['pid']} since {found['since']}"
  except (OSError, ValueError, KeyError, TypeError):
    return "another process"


def _forget() -> None:
  # A forked child would otherwise keep its parent's locks alive after the parent's death.
  for lock in list(_HELD):
    lock._drop()


os.register_at_fork(after_in_child=_forget)
