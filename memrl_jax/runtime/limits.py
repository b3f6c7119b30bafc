"""How much a tenant may ask: a bucket of requests that refills, and a most of requests under way."""

from __future__ import annotations

import threading


class Limits:
  """For each name a token bucket and a counter. Times are seconds of any clock that does not run back."""

  def __init__(self, *, rate: float, burst: int, inflight: int):
    self._rate, self._burst, self._most = rate, burst, inflight
    self._lock = threading.Lock()
    self._buckets: dict[str, tuple[float, float]] = {}  # what is left, when that was
    self._inflight: dict[str, int] = {}

  def enter(self, name: str, now: float) -> float:
    """Lets a request in and returns 0; or the seconds after which it may be tried again.

    Whoever was let in must `leave`.
    """
    with self._lock:
      if self._inflight.get(name, 0) >= self._most:
        return 1.0
      left, then = self._buckets.get(name, (float(self._burst), now))
      left = min(self._burst, left + (now - then) * self._rate)
      if left < 1:
        self._buckets[name] = left, now
        return (1 - left) / self._rate
      self._buckets[name] = left - 1, now
      self._inflight[name] = self._inflight.get(name, 0) + 1
      return 0.0

  def leave(self, name: str) -> None:
    with self._lock:
      self._inflight[name] -= 1
