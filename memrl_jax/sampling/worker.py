"""The thread that drives the engine of a server, and what was asked before.

Requests that arrive together are sampled together: what waits joins the engine's next round.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from memrl_jax.sampling import engine

_REMEMBERED = 4096  # answers kept for requests that are sent again


class Refusal(Exception):
  """An answer other than 200; the message is one sentence."""

  def __init__(self, code: int, message: str):
    super().__init__(message)
    self.code = code


class Answer(NamedTuple):
  """A completion and the version of the weights that sampled it."""

  done: engine.Completion
  version: int


class _Job(NamedTuple):
  request: engine.Request
  future: concurrent.futures.Future


class _Update(NamedTuple):
  params: Any
  version: int
  future: concurrent.futures.Future


@dataclasses.dataclass
class Counts:
  """Since the server started: requests sampled and their ids; requests answered from memory."""

  sampled: int = 0
  ids: int = 0
  repeated: int = 0


class Worker:
  """The one thread that drives the engine. New weights wait until what is half sampled has ended."""

  def __init__(self, sampler: engine.Engine):
    self._engine = sampler
    self._inbox: queue.Queue[_Job | _Update | None] = queue.Queue()
    self._jobs: dict[int, _Job] = {}
    self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
    self._lock = threading.Lock()  # nothing is put into the inbox after it was emptied for good
    self.counts = Counts()
    self.version = 0
    self.broken = ""  # why nothing can be sampled any more

  def start(self) -> None:
    self._thread.start()

  def stop(self) -> None:
    """Ends the thread after its current round; whoever still waits is refused."""
    self.broken = self.broken or "the server is stopping"
    self._inbox.put(None)
    self._thread.join()

  def sample(self, request: engine.Request) -> concurrent.futures.Future:
    """A future Answer."""
    return self._put(lambda future: _Job(request, future))

  def update(self, params: Any, version: int) -> concurrent.futures.Future:
    """A future that is done once these weights sample."""
    return self._put(lambda future: _Update(params, version, future))

  def _put(self, make: Callable[[concurrent.futures.Future], Any]) -> concurrent.futures.Future:
    future: concurrent.futures.Future = concurrent.futures.Future()
    with self._lock:
      if self.broken:
        raise Refusal(503, self.broken)
      self._inbox.put(make(future))
    return future

  def _run(self) -> None:
    update: _Update | None = None
    try:
      while not self.broken:
        if update is None:
          update = self._admit(wait=not self._engine.pending)
        if self._engine.pending:
          self._round()
        elif update is not None:
          self._load(update)
          update = None
    except Exception as error:  # the engine's state is not to be trusted after this
      traceback.print_exc()
      self.broken = f"the engine failed ({type(error).__name__}: {error}); restart the server"
    self._refuse_all(update)

  def _admit(self, wait: bool) -> _Update | None:
    """Gives the engine what has arrived, up to the next update; waits for something if told to."""
    while True:
      try:
        item = self._inbox.get(block=wait)
      except queue.Empty:
        return None
      if item is None or isinstance(item, _Update):
        return item
      wait = False
      try:
        self._jobs[self._engine.submit(item.request)] = item
      except ValueError as error:
        item.future.set_exception(Refusal(400, str(error)))

  def _round(self) -> None:
    for ticket, done in self._engine.run_round():
      self.counts.sampled += 1
      self.counts.ids += len(done.ids)
      self._jobs.pop(ticket).future.set_result(Answer(done, self.version))

  def _load(self, update: _Update) -> None:
    try:
      if update.version < self.version:
        raise Refusal(
          409, f"weights {update.version} are older than {self.version}, which this server has"
        )
      self._engine.set_params(update.params)
      self.version = update.version
      update.future.set_result(None)
    except (Refusal, ValueError) as error:
      update.future.set_exception(error)

  def _refuse_all(self, update: _Update | None) -> None:
    waiting: list[Any] = [*self._jobs.values(), update]
    with self._lock, contextlib.suppress(queue.Empty):
      while True:
        waiting.append(self._inbox.get_nowait())
    for item in waiting:
      if item is not None:
        item.future.set_exception(Refusal(503, self.broken))


class Memory:
  """What was asked under which request id, so that a repeated request is not sampled again."""

  def __init__(self, counts: Counts):
    self._counts = counts
    self._lock = threading.Lock()
    self._kept: collections.OrderedDict[str, tuple[bytes, concurrent.futures.Future]] = (
      collections.OrderedDict()
    )

  def future(
    self, name: str, body: bytes, start: Callable[[], concurrent.futures.Future]
  ) -> concurrent.futures.Future:
    """The future of the first request of this id, or a new one; one that failed may be tried again."""
    if not name:
      return start()
    digest = hashlib.sha256(body).digest()
    with self._lock:
      if name in self._kept:
        known, future = self._kept[name]
        if known != digest:
          raise Refusal(409, f"another request was already sent as X-Request-Id {name}")
        if not (future.done() and future.exception()):
          self._counts.repeated += 1
          return future
      future = start()
      self._kept[name] = (digest, future)
      while len(self._kept) > _REMEMBERED:
        self._kept.popitem(last=False)
      return future
