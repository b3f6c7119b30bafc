"""The runtime that plays trials: it resumes coroutines, batches their requests, keeps failures apart.

Scheduling is deterministic: all environment calls that wait are answered, in the order of their
trials, before the policy runs its next round. So a rollout is a function of its seeds alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np

from memrl_jax.envs import base, pool
from memrl_jax.rollout.trial import Answer, Context, EnvCall, Generate, Program, VoidTrial
from memrl_jax.types import Memo, Recall, Trial


class Policy(Protocol):
  """Whatever answers prompts: a language model, a scripted player, a mock."""

  def submit(self, trial: Trial, request: Generate, key: np.ndarray) -> int:
    """Queues one request; returns its ticket. Raises VoidTrial when it can never be answered."""

  def poll(self) -> list[tuple[int, Answer]]:
    """Runs one bounded round and returns the answers that are complete."""


class Memory(Protocol):
  """What trials may read; nothing writes to it while they play."""

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    """An answer for each of `asks`, best memory first."""


Route = Callable[[Trial, Generate], Policy]
PHASES = ("play", "reflect", "judge", "advise")  # the order is part of the keys


def request_key(seed: Sequence[int], trial: Trial, request: Generate) -> np.ndarray:
  """Raw PRNG key of one request, uint32[2]: a function of who asks, never of the batch it runs in."""
  phase = PHASES.index(request.phase)
  path = [*seed, trial.group, trial.index, request.attempt, phase, request.turn]
  path += [request.draw] if request.draw else []
  return np.random.SeedSequence(path).generate_state(2, np.uint32)


def collect(
  trials: Sequence[Trial],
  program: Program,
  route: Route,
  envs: pool.EnvPool,
  prompts: base.Prompts,
  *,
  horizon: int,
  seed: Sequence[int],
  concurrency: int = 256,
  memory: Memory | None = None,
) -> list[Trial]:
  """Plays every trial with `program` and returns them, filled in, in the given order.

  Args:
    trials: empty records; (group, index) must be unique, it is part of the sampling key.
    route: which policy answers a request.
    seed: non-negative integers that name this rollout, e.g. (run seed, update).
    concurrency: trials alive at once; more only changes speed.
    memory: what `ctx.recall` reads; without one it finds nothing.
  """
  return _Collector(trials, program, route, envs, prompts, horizon, seed, concurrency, memory).run()


class _Collector:
  """The bookkeeping of one `collect` call."""

  def __init__(self, trials, program, route, envs, prompts, horizon, seed, concurrency, memory):
    self.trials, self.program, self.route, self.envs = list(trials), program, route, envs
    self.prompts, self.horizon, self.seed, self.concurrency = prompts, horizon, seed, concurrency
    self.memory = memory
    self.live: dict[int, Coroutine] = {}
    self.handles: dict[int, int] = {}
    self.calls: list[tuple[int, EnvCall]] = []
    self.recalls: list[tuple[int, Recall]] = []
    self.tickets: dict[tuple[int, int], int] = {}  # (id of policy, ticket) -> trial
    self.policies: dict[int, Policy] = {}
    self.next = 0

  def run(self) -> list[Trial]:
    try:
      while self.live or self.next < len(self.trials):
        self._start()
        if self.calls:
          self._step_envs()
        elif self.recalls:
          self._recall()
        elif self.tickets:
          self._poll()
    finally:  # also after Ctrl-C: no environment is left open
      for coroutine in self.live.values():
        coroutine.close()
      for handle in self.handles.values():
        self.envs.release(handle)
    return self.trials

  def _start(self) -> None:
    while self.next < len(self.trials) and len(self.live) < self.concurrency:
      number, self.next = self.next, self.next + 1
      self.handles[number] = self.envs.open()
      context = Context(self.trials[number], self.prompts, self.horizon)
      self.live[number] = self.program(context)
      self._resume(number, None)

  def _resume(self, number: int, value: Any, error: str | None = None) -> None:
    """Sends `value` (or throws VoidTrial) into a trial and queues what it asks for next."""
    coroutine, trial = self.live[number], self.trials[number]
    try:
      request = coroutine.send(value) if error is None else coroutine.throw(VoidTrial(error))
      if isinstance(request, EnvCall):
        self.calls.append((number, request))
        return
      if isinstance(request, Recall):
        self.recalls.append((number, request))
        return
      policy = self.route(trial, request)
      ticket = policy.submit(trial, request, request_key(self.seed, trial, request))
      self.policies[id(policy)] = policy
      self.tickets[id(policy), ticket] = number
    except StopIteration:
      self._finish(number)
    except VoidTrial as failure:
      trial.void = str(failure)
      self._finish(number)

  def _finish(self, number: int) -> None:
    self.live.pop(number).close()
    self.envs.release(self.handles.pop(number))

  def _step_envs(self) -> None:
    waiting, self.calls = self.calls, []
    calls = [
      pool.Call(self.handles[number], call.method, call.argument) for number, call in waiting
    ]
    for (number, _), result in zip(waiting, self.envs.run(calls), strict=True):
      if isinstance(result, pool.Failure):
        self._resume(number, None, error=f"environment {result.kind}: {result.text}")
      else:
        self._resume(number, result)

  def _recall(self) -> None:
    """All that wait are answered at once, so that their queries are embedded in one batch."""
    waiting, self.recalls = self.recalls, []
    asks = [ask for _, ask in waiting]
    found = self.memory.recall(asks) if self.memory is not None else [()] * len(asks)
    for (number, _), memos in zip(waiting, found, strict=True):
      self._resume(number, memos)

  def _poll(self) -> None:
    for owner, policy in list(self.policies.items()):
      if any(who == owner for who, _ in self.tickets):
        for ticket, answer in policy.poll():
          self._resume(self.tickets.pop((owner, ticket)), answer)
