"""Rollouts beside the learner: who samples and who trains need not wait for each other.

    trials of update u  ~  pi(weights after max(0, u - max_lag) updates)

A thread plays one update after the other, up to `max_lag` ahead of the learner. Whose weights an update is
sampled with is a function of its number, never of who was faster, so the run repeats bit for bit. What it
costs: the last `max_lag` weights (or adapters) stay on the learner's devices and go into every checkpoint,
with which a resumed run plays again what was under way. An evaluation waits for what is under way.
On several hosts up to `max_lag` weights more wait where they are sampled (`_hand` says why).

`max_lag` 1 hides the shorter of rollout and training behind the longer; more evens out how long rollouts take.
The surrogate's pi_old is then another policy than the one that sampled: config.loss.old_logps "trainer" has the
weights before the update as pi_old, and weighs by them over the sampler's (ops.ratios). Servers of several
hosts begin each rollout together, so there more than 1 hides nothing more.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memrl_jax.envs import pool
from memrl_jax.rollout import collect
from memrl_jax.rollout.trial import Answer, Generate
from memrl_jax.sampling import engine, remote
from memrl_jax.training import hosts
from memrl_jax.types import Trial

if TYPE_CHECKING:
  from memrl_jax.training import runs


class Kept:
  """The trained weights after updates that a rollout to come is sampled with: the last `lag`."""

  def __init__(self, lag: int):
    self._lag = lag
    self._after: dict[int, Any] = {}

  def keep(self, updates: int, trained: Any) -> None:
    """A copy of the weights after so many updates; those that no rollout wants any more are let go."""
    self._after[updates] = jax.tree.map(jnp.copy, trained)
    for earlier in [known for known in self._after if known < updates - self._lag]:
      del self._after[earlier]

  def of(self, update: int) -> Any:
    """What the trials of this update are sampled with."""
    return self._after[max(0, update - self._lag)]

  def saved(self, updates: int) -> list[Any]:
    """What a checkpoint after so many updates holds: the weights of the rollouts that may be under way."""
    return [self.of(update) for update in range(updates, updates + self._lag)]

  def like(self, trained: Any) -> list[Any]:
    """What `saved` gives, in shapes."""
    return [trained] * self._lag

  def load(self, updates: int, saved: list[Any]) -> None:
    """Back to what `saved` gave."""
    self._after = {max(0, updates - self._lag + i): trained for i, trained in enumerate(saved)}


class Played(NamedTuple):
  """The trials of one update, how many updates their weights are behind, and what it took."""

  trials: list[Trial]
  lag: int
  timing: dict[str, float]


class Rollouts:
  """Plays the updates of a run from number `start` on, in their order.

  Use it as a context manager: nothing is under way behind it.
  """

  def __init__(self, run: runs.Run, envs: pool.EnvPool, start: int):
    self._run, self._envs, self._next = run, envs, start
    self._lag = run.settings.train.max_lag
    # No server keeps two weights, so hosts hand them over when all have ended the rollout before.
    self._meets = hosts.count() > 1 and run.client is not None
    self._handed: tuple[Any, Any] = None, None  # (weights, what gives who samples these)
    self._thread = concurrent.futures.ThreadPoolExecutor(1, "rollouts") if self._lag else None
    self._under_way: dict[int, concurrent.futures.Future] = {}
    self._given_up = threading.Event()

  def __enter__(self) -> Rollouts:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def take(self, update: int) -> Played:
    """The trials of this update, which the weights of now belong to; starts what these weights allow."""
    if self._thread is None:
      return self._play(update)
    self._run.kept.keep(update, self._run.actor.trained)
    self._start(update if self._meets else update + self._lag)
    began = time.perf_counter()
    played = self._under_way.pop(update).result()
    waited = {"seconds/wait": time.perf_counter() - began}
    return played._replace(timing=played.timing | waited)

  def met(self, update: int) -> None:
    """All hosts have played this update: their servers may have the weights of the next."""
    if self._thread is not None and self._meets:
      self._start(update + 1)

  def _start(self, last: int) -> None:
    """Starts the rollouts up to this one."""
    kept, updates = self._run.kept, self._run.settings.train.updates
    while self._next <= min(last, updates - 1):
      pushed = self._run.client.push_s if self._meets else None
      try:
        hand = self._hand(kept.of(self._next))
      except remote.RemoteError as error:  # on all hosts; `take` of this update says so
        job: concurrent.futures.Future = concurrent.futures.Future()
        job.set_exception(error)
      else:
        job = self._thread.submit(self._play, self._next, hand, pushed)
      self._under_way[self._next] = job
      self._next += 1

  def _hand(self, trained: Any) -> Callable[[], None]:
    """What gives who samples these weights, in the thread.

    Programs of several hosts must be launched in one order on all: so here, in the thread that trains, at a place
    of the schedule that no clock decides. What the thread launches is of this host alone. Among the learner's
    programs it may come anywhere in a device's queue: it waits for no other host, so it ends, and they go on.
    """
    if hosts.count() == 1:
      return lambda: self._run.actor.sync(trained)
    if self._meets or trained is not self._handed[0]:  # the first rollouts have the same weights
      self._handed = trained, self._run.actor.handed(trained)
    return self._handed[1]

  def wait(self) -> None:
    """Until nothing is under way: who samples is free, for an evaluation."""
    concurrent.futures.wait(self._under_way.values())

  def close(self) -> None:
    """Gives up what is under way, and waits until its environments are left."""
    if self._thread is None:
      return
    self._given_up.set()
    if self._run.client is not None and not all(job.done() for job in self._under_way.values()):
      self._run.client.close()  # the thread may be waiting for an answer
    self._thread.shutdown(wait=True, cancel_futures=True)

  def _play(
    self, update: int, hand: Callable[[], None] | None = None, pushed: float | None = None
  ) -> Played:
    run = self._run
    sampler = run.actor.engine  # None where a server samples
    before, began = sampler and sampler.stats, time.perf_counter()
    if sampler is None and pushed is None:
      pushed = run.client.push_s
    trials = run.rollout(update, self._envs, hand, self._on_leash)
    seconds = time.perf_counter() - began
    timing = {"seconds/rollout": seconds}
    if sampler is not None:
      timing |= _engine_timing(before, sampler.stats, seconds)
    else:
      counts = dataclasses.asdict(run.client.counts)
      timing |= {f"remote/{name}": count for name, count in counts.items()}
      timing["seconds/push"] = run.client.push_s - pushed
    return Played(trials, min(update, self._lag), timing)

  def _on_leash(self, policy: collect.Policy) -> collect.Policy:
    return policy if self._thread is None else _Leashed(policy, self._given_up.is_set)


class _GivenUp(Exception):
  """Nobody waits for this rollout any more."""


class _Leashed:
  """A policy that answers until its rollout is given up."""

  def __init__(self, policy: collect.Policy, given_up: Callable[[], bool]):
    self._policy, self._given_up = policy, given_up

  def submit(self, trial: Trial, request: Generate, key: np.ndarray) -> int:
    return self._policy.submit(trial, request, key)

  def poll(self) -> list[tuple[int, Answer]]:
    if self._given_up():
      raise _GivenUp
    return self._policy.poll()


def _engine_timing(before: engine.Stats, after: engine.Stats, seconds: float) -> dict[str, float]:
  """What the sampler did in one rollout; reuse is the share of prompt tokens that were cached."""
  done = engine.Stats(*(b - a for a, b in zip(before, after, strict=True)))
  return {
    "engine/reused": done.reused / max(done.reused + done.prefilled, 1),
    "engine/prefilled": done.prefilled,
    "engine/tokens_saved": done.reused,
    "engine/tokens_in_place": done.in_place,
    "engine/steps": done.steps,
    "engine/tokens_per_second": done.sampled / max(seconds, 1e-9),
  }
