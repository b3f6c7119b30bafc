"""Requests that wait for somebody slow, many at a time: every ticket gets exactly one answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Desk:
  """Up to `most` threads a lane call `answer(ticket, request)`; `poll` hands out what they return.

  A lane is a queue of its own: who waits in one holds up nobody in another. An exception of `answer` comes out
  of `poll`.
  """

  def __init__(self, answer: Callable[[int, Any], Any], most: int, lanes: int = 1):
    self._answer, self._most = answer, most
    self._inboxes: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in range(lanes)]
    self._outbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
    self._threads = [0] * lanes
    self._waiting = [0] * lanes  # asked, not yet answered
    self._lock = threading.Lock()
    self._tickets = self._pending = 0

  @property
  def pending(self) -> int:
    """Requests whose answer `poll` has not handed out."""
    return self._pending

  def ticket(self) -> int:
    """A number that nobody else has."""
    with self._lock:
      self._tickets += 1
      return self._tickets

  def submit(self, request: Any, lane: int = 0) -> int:
    """Its ticket comes back from `poll` with the answer."""
    ticket = self.ticket()
    self._pending += 1
    with self._lock:
      self._waiting[lane] += 1
      more = self._threads[lane] < min(self._waiting[lane], self._most)
      self._threads[lane] += more
    if more:
      threading.Thread(target=self._work, args=(lane,), daemon=True).start()
    self._inboxes[lane].put((ticket, request))
    return ticket

  def poll(self) -> list[tuple[int, Any]]:
    """Waits for an answer and returns it with all others that are there; none without requests."""
    done: list[tuple[int, Any]] = []
    while self._pending and (not done or not self._outbox.empty()):
      ticket, answer = self._outbox.get()
      self._pending -= 1
      if isinstance(answer, Exception):
        raise answer
      done.append((ticket, answer))
    return done

  def close(self, why: Exception) -> None:
    """Ends the threads after their present piece of work; who waits in `poll` hears `why` at once."""
    with self._lock:
      for inbox, threads in zip(self._inboxes, self._threads, strict=True):
        for _ in range(threads):
          inbox.put(None)
    self._outbox.put((0, why))

  def _work(self, lane: int) -> None:
    while (item := self._inboxes[lane].get()) is not None:
      ticket, request = item
      try:
        answer = self._answer(ticket, request)
      except Exception as error:  # a bug of ours: poll raises it where it can be seen
        answer = error
      with self._lock:
        self._waiting[lane] -= 1
      self._outbox.put((ticket, answer))
