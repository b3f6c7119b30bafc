"""Many readers or one writer; a writer that waits goes before readers that come later."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator


class Gate:
  """A readers-writer lock. Not re-entrant: who reads must not read or write again inside."""

  def __init__(self):
    self._change = threading.Condition()
    self._readers, self._writing, self._waiting = 0, False, 0
    self._longest_s = 0.0

  def longest_wait(self) -> float:
    """Seconds that a reader or a writer stood before the gate, at most, since the last call."""
    with self._change:
      longest, self._longest_s = self._longest_s, 0.0
      return longest

  def _wait(self, shut: Callable[[], bool]) -> None:
    if shut():
      began = time.perf_counter()
      self._change.wait_for(lambda: not shut())
      self._longest_s = max(self._longest_s, time.perf_counter() - began)

  @contextlib.contextmanager
  def reading(self) -> Iterator[None]:
    with self._change:
      self._wait(lambda: self._writing or self._waiting > 0)
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
        self._wait(lambda: self._writing or self._readers > 0)
      finally:
        self._waiting -= 1
      self._writing = True
    try:
      yield
    finally:
      with self._change:
        self._writing = False
        self._change.notify_all()
