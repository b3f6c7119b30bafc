"""Many environments behind one call, so that one crash or hang costs one trial and no run.

A batch of calls is cut into one chunk per worker, and a chunk travels once: cheap environments cost
microseconds a call. A worker publishes which call of its chunk it serves; when that number stands
still for `timeout_s`, or the worker is gone, that call fails, the worker is replaced, and the rest
of the chunk is served by the replacement.

A process takes its environments with it when it dies. Environments replay exactly, so the pool keeps
what each was told since its last reset and tells it again in the new process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from memrl_jax.envs import base

ISOLATION = ("inline", "thread", "process")


class Call(NamedTuple):
  """One request: "reset" with a seed, "retry" with None, or "step" with a response."""

  handle: int
  method: str
  argument: Any = None


@dataclasses.dataclass(frozen=True)
class Failure:
  """Why a call has no answer. `kind` is "crash", "timeout" or "nonsense"; its handle is dead."""

  kind: str
  text: str


Answer = base.Observation | base.StepResult | Failure
Job = tuple[Call, list[Call]]  # a call, and what its environment must be told first when it is new


# What runs inside a worker.


def serve(make: Callable[[], base.Environment], environments: dict[int, Any], job: Job) -> Any:
  """One call on its environment, which is made on first use; failures come back as values.

  This is the border to foreign code, so every exception is caught here and nowhere else. A failed
  environment is closed and leaves None in its place.
  """
  call, journal = job
  try:
    if call.method == "close":
      environment = environments.pop(call.handle, None)
      if environment is not None:
        environment.close()
      return None
    if call.handle not in environments:
      environments[call.handle] = make()
      for earlier in journal:
        _tell(environments[call.handle], earlier)
    if environments[call.handle] is None:
      return Failure("crash", "the environment failed earlier in this batch")
    answer = _tell(environments[call.handle], call)
  except (Exception, SystemExit) as error:
    answer = Failure("crash", f"{type(error).__name__}: {error}")
  fault = _fault(call, answer)
  answer = Failure("nonsense", fault) if fault else answer
  if isinstance(answer, Failure) and call.method != "close":
    serve(make, environments, (Call(call.handle, "close"), []))
    environments[call.handle] = None
  return answer


def _tell(environment: base.Environment, call: Call) -> Any:
  if call.method == "retry":
    return environment.retry()
  return getattr(environment, call.method)(call.argument)


def _fault(call: Call, answer: Any) -> str:
  """What is wrong with an answer, as a sentence; "" when nothing is."""
  if isinstance(answer, Failure):
    return ""
  wanted = base.StepResult if call.method == "step" else base.Observation
  if not isinstance(answer, wanted):
    return f"{call.method} returned {type(answer).__name__}, not {wanted.__name__}"
  seen = answer.observation if call.method == "step" else answer
  if not (isinstance(seen, base.Observation) and isinstance(seen.text, str)):
    return f"{call.method} returned an observation without text: {seen!r}"
  if call.method == "step":
    for name, value in (("reward", answer.reward), ("score", answer.score)):
      try:
        finite = math.isfinite(value)
      except TypeError:
        finite = False
      if not finite:
        return f"step returned {name} {value!r}, not a finite number"
  return ""


class _Thread:
  """A daemon thread with its inbox. Abandoned, it drops what it has when its call comes back."""

  def __init__(self, make: Callable[[], base.Environment], environments: dict[int, Any]):
    self._make, self._environments = make, environments
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._lock, self._abandoned = threading.Lock(), False
    self._answers: list[Any] = []
    self._idle = threading.Event()
    threading.Thread(target=self._work, daemon=True).start()

  def send(self, jobs: Sequence[Job]) -> None:
    self._answers, self._count = [], len(jobs)
    self._idle.clear()
    self._inbox.put(jobs)

  def wait(self, seconds: float) -> bool:
    return self._idle.wait(seconds)

  def progress(self) -> int:
    return len(self._answers)

  def alive(self) -> bool:
    return True

  def answers(self) -> list[Any]:
    return self._answers

  def abandon(self) -> list[Any]:
    """Stops listening to the thread, unless it is through; the answers it gave before."""
    with self._lock:
      self._abandoned = len(self._answers) < self._count
      return list(self._answers)

  def stop(self) -> None:
    self._inbox.put(None)

  def _work(self) -> None:
    while (jobs := self._inbox.get()) is not None:
      for job in jobs:
        answer = serve(self._make, self._environments, job)
        with self._lock:
          if self._abandoned:
            return
          self._answers.append(answer)
      self._idle.set()


class _Process:
  """A spawned process with its pipe. It ends with its parent, however that ends."""

  def __init__(self, make: Callable[[], base.Environment], environments: dict[int, Any]):
    context = multiprocessing.get_context("spawn")  # never fork: the parent may hold JAX threads
    self._served = context.RawValue("q", 0)
    self._pipe, child = context.Pipe()
    self._process = context.Process(target=_work, args=(child, self._served, make), daemon=True)
    self._process.start()
    child.close()
    try:
      self._pipe.recv()  # "ready": imports are not part of a call's time
    except EOFError:
      raise RuntimeError(
        "an environment process ended while it started (its error is printed above); start from a script "
        'with `if __name__ == "__main__":` and an importable family, or choose isolation "thread" '
        "(config.env.isolation)"
      ) from None
    self._answers: list[Any] = []

  def send(self, jobs: Sequence[Job]) -> None:
    self._served.value = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died idle: see alive()
      self._pipe.send(list(jobs))

  def wait(self, seconds: float) -> bool:
    if self._pipe in multiprocessing.connection.wait([self._pipe, self._process.sentinel], seconds):
      with contextlib.suppress(EOFError, ConnectionResetError):
        self._answers = self._pipe.recv()
        return True
      self._process.join(seconds)
    return False

  def progress(self) -> int:
    return self._served.value

  def alive(self) -> bool:
    return self._process.is_alive()

  def answers(self) -> list[Any]:
    return self._answers

  def abandon(self) -> list[Any]:
    """Kills the process; its answers are lost with it."""
    self._process.kill()
    self._process.join()
    self._pipe.close()
    return []

  def stop(self) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
      self._pipe.send(None)
    self._process.join(1.0)
    self.abandon()


def _work(pipe: Any, served: Any, make: Callable[[], base.Environment]) -> None:
  """The main loop of a worker process."""
  parent = multiprocessing.parent_process()
  if parent is not None:
    threading.Thread(target=_die_with, args=(parent.sentinel,), daemon=True).start()
  environments: dict[int, Any] = {}
  pipe.send("ready")
  while (jobs := pipe.recv()) is not None:
    answers = []
    for job in jobs:
      answers.append(serve(make, environments, job))
      served.value += 1
    pipe.send(answers)


def _die_with(sentinel: int) -> None:
  multiprocessing.connection.wait([sentinel])
  os._exit(1)


class _Inline:
  """No isolation: calls run in the caller's thread and cannot be interrupted."""

  def __init__(self, make: Callable[[], base.Environment], environments: dict[int, Any]):
    self._make, self._environments = make, environments

  def answer(self, jobs: Sequence[Job], timeout_s: float) -> list[Any]:
    """All answers; one that came later than `timeout_s` counts as a timeout all the same."""
    answers = []
    for job in jobs:
      begun = time.monotonic()
      answer = serve(self._make, self._environments, job)
      if time.monotonic() - begun > timeout_s:
        answer = _timeout(job[0], timeout_s)
        serve(self._make, self._environments, (Call(job[0].handle, "close"), []))
      answers.append(answer)
    return answers

  def stop(self) -> None:
    """Nothing runs."""


def _timeout(call: Call, timeout_s: float) -> Failure:
  return Failure("timeout", f"{call.method} gave no answer in {timeout_s:g} s")


class EnvPool:
  """Opens environments of one family and serves batches of calls on them.

  isolation "inline" runs in the caller; "thread" survives exceptions and hangs; "process" also
  survives segmentation faults and memory kills, and needs a family and options that pickle.
  Results do not depend on the number of workers. One caller at a time. `failures` counts by kind.
  """

  def __init__(
    self,
    family: base.Family,
    options: Any,
    *,
    workers: int = 2,
    timeout_s: float = 60.0,
    isolation: str = "thread",
  ):
    if isolation not in ISOLATION:
      raise ValueError(
        f"isolation {isolation!r} is not known; choose one of {', '.join(ISOLATION)} (config.env.isolation)"
      )
    if workers < 1 or not timeout_s > 0:
      raise ValueError(
        f"{workers} workers with {timeout_s:g} s a call cannot serve anything; choose at least 1 worker "
        "and a positive time (config.env.workers, config.env.timeout_s)"
      )
    self._make = _Maker(family.make, options)
    self._kind = {"inline": _Inline, "thread": _Thread, "process": _Process}[isolation]
    self._timeout_s = timeout_s
    self._environments: list[dict[int, Any]] = [{} for _ in range(workers)]
    self._workers: list[Any] = [None] * workers
    self._told: list[set[int]] = [set() for _ in range(workers)]  # handles its present worker knows
    self._home: dict[int, int] = {}  # open handle -> worker
    self._journal: dict[int, list[Call]] = {}
    self._dead: dict[int, Failure] = {}
    self._next = 0
    self.failures: collections.Counter[str] = collections.Counter()

  def open(self) -> int:
    """A handle on a new environment, which its worker makes at the first call."""
    loads = collections.Counter(self._home.values())
    handle, self._next = self._next, self._next + 1
    self._home[handle] = min(range(len(self._workers)), key=lambda worker: loads[worker])
    self._journal[handle] = []
    return handle

  def run(self, calls: Sequence[Call]) -> list[Answer]:
    """The answers in the order of the calls; calls on one handle are served in order.

    A handle is dead after a Failure: later calls on it give that Failure again.

    Raises:
      ValueError: a handle is not open, or a method is not reset, retry or step.
    """
    for call in calls:
      if call.handle not in self._home:
        raise ValueError(
          f"handle {call.handle} is not open; call open() first, and not after release()"
        )
      if call.method not in ("reset", "retry", "step"):
        raise ValueError(f"method {call.method!r} is not known; choose reset, retry or step")
    return self._run(calls)

  def release(self, handle: int) -> None:
    """Closes an environment and forgets its handle."""
    if handle not in self._home:
      raise ValueError(f"handle {handle} is not open; it was never opened, or released before")
    self._run([Call(handle, "close")] if self._lives(handle) else [])
    worker = self._home.pop(handle)
    self._told[worker].discard(handle)
    del self._journal[handle]
    self._dead.pop(handle, None)

  def close(self) -> None:
    """Closes every environment and ends every worker; hung threads are daemons and end with us."""
    self._run([Call(handle, "close") for handle in self._home if self._lives(handle)])
    for worker in self._workers:
      if worker is not None:
        worker.stop()
    self._workers = [None] * len(self._workers)
    for record in (self._home, self._journal, self._dead, *self._environments, *self._told):
      record.clear()

  def __enter__(self) -> EnvPool:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def _lives(self, handle: int) -> bool:
    return handle not in self._dead and handle in self._told[self._home[handle]]

  def _run(self, calls: Sequence[Call]) -> list[Any]:
    """Sends every worker its chunk, then collects; the answers in the order of the calls."""
    answers: list[Any] = [None] * len(calls)
    pending: list[list[int]] = [[] for _ in self._workers]
    for index, call in enumerate(calls):
      pending[self._home[call.handle]].append(index)
    while any(pending):
      sent = [
        (worker, self._send(worker, calls, indices, answers))
        for worker, indices in enumerate(pending)
        if indices
      ]
      pending = [[] for _ in self._workers]
      for worker, (indices, jobs) in sent:
        if jobs:
          pending[worker] = self._collect(worker, indices, jobs, answers)
    return answers

  def _send(self, worker: int, calls, indices, answers) -> tuple[list[int], list[Job]]:
    """Starts a worker on the calls whose handles live; dead handles are answered at once."""
    if self._workers[worker] is None:
      self._workers[worker] = self._kind(self._make, self._environments[worker])
    alive, jobs = [], []
    for index in indices:
      call = calls[index]
      if call.handle in self._dead:
        answers[index] = self._dead[call.handle]
        continue
      new = call.handle not in self._told[worker]
      self._told[worker].add(call.handle)
      alive.append(index)
      jobs.append((call, list(self._journal[call.handle]) if new else []))
    if jobs and self._kind is not _Inline:
      self._workers[worker].send(jobs)
    return alive, jobs

  def _collect(self, worker: int, indices: list[int], jobs: list[Job], answers) -> list[int]:
    """Waits for a chunk and records its answers; what a replacement must serve, as indices."""
    served = self._workers[worker]
    if self._kind is _Inline:
      given, failure = served.answer(jobs, self._timeout_s), None
    else:
      given, failure = self._wait(served, jobs)
    for index, (call, _), answer in zip(indices, jobs, given, strict=False):
      answers[index] = self._record(call, answer)
    if failure is None:
      return []
    stopped, reason = failure
    answers[indices[stopped]] = self._record(jobs[stopped][0], reason)
    self._replace(worker, jobs[stopped][0].handle)
    return [index for at, index in enumerate(indices) if at >= len(given) and at != stopped]

  def _wait(self, served: Any, jobs: list[Job]) -> tuple[list[Any], tuple[int, Failure] | None]:
    """The answers of one chunk, and which call of it stopped the worker, if one did."""
    seen, since, last = 0, time.monotonic(), len(jobs) - 1
    while not served.wait(min(self._timeout_s / 4, 0.05)):
      now, progress = time.monotonic(), served.progress()
      if progress != seen:
        seen, since = progress, now
      if not served.alive():
        reason = Failure("crash", "the environment's process died")
        return served.abandon(), (min(served.progress(), last), reason)
      if now - since > self._timeout_s:
        given = served.abandon()
        if len(given) == len(jobs):  # it came through just now
          return given, None
        stopped = min(max(progress, len(given)), last)
        return given, (stopped, _timeout(jobs[stopped][0], self._timeout_s))
    return served.answers(), None

  def _record(self, call: Call, answer: Any) -> Any:
    """Keeps the journal of a living environment, the obituary of a dead one."""
    if call.handle in self._dead:  # died earlier in this batch
      return self._dead[call.handle]
    if isinstance(answer, Failure):
      self.failures[answer.kind] += 1
      self._dead[call.handle] = answer
    elif call.method == "reset":
      self._journal[call.handle] = [call]
    elif call.method == "retry":
      self._journal[call.handle] = [*self._journal[call.handle][:1], call]
    elif call.method == "step":
      self._journal[call.handle].append(call)
    return answer

  def _replace(self, worker: int, handle: int) -> None:
    """Forgets an abandoned worker; the next send starts a fresh one."""
    self._workers[worker] = None
    self._environments[worker].pop(handle, None)
    if self._kind is _Process:
      self._told[worker].clear()


class _Maker:
  """`make()` of one environment; pickles when the family's function and the options do."""

  def __init__(self, make: Callable[[Any], base.Environment], options: Any):
    self._make, self._options = make, options

  def __call__(self) -> base.Environment:
    return self._make(self._options)
