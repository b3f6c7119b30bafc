"""Many readers or one writer; a writer that waits goes before readers that come later."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
  """A readers-writer lock. Not re-entrant: who reads must not read or write again inside."""

  def __init__(self):
    self._change = threading.Condition()
    self._readers, self._writing, self._waiting = 0, False, 0

  @contextlib.contextmanager
  def reading(self) -> Iterator[None]:
    with self._change:
      while self._writing or self._waiting:
        self._change.wait()
      self._readers += 1
    try:
      yield
    finally:
      with self._change:
        self._readers -= 1
        if not self._readers:
          self._change.notify_all()

  @contextlib.contextmanager
  def writing(self) -> Iterator[None]:
    with self._change:
      self._waiting += 1
      try:
        while self._writing or self._readers:
          self._change.wait()
      finally:
        self._waiting -= 1
      self._writing = True
    try:
      yield
    finally:
      with self._change:
        self._writing = False
        self._change.notify_all()
