"""Several engines as one: each on devices of its own, with a copy of the weights and slots of its own.

A request stays with those that begin as it does (`Request.home`), so that prefixes are still shared. The
engines decode side by side, one thread each: no device waits for another one's host work.
"""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Sequence

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import engine
from memrl_jax.sampling import requests as requests_lib


class Replicas:
  """What an `engine.Engine` is to its one caller, over `views`, the weights as each of them has them."""

  def __init__(
    self, cfg: DecoderConfig, views: Sequence[policy.Params], config: engine.EngineConfig
  ):
    """`config.slots` are those of each."""
    self.cfg, self.config = cfg, config
    self._engines = [engine.Engine(cfg, view, config) for view in views]
    self._threads = concurrent.futures.ThreadPoolExecutor(len(views), "engine")
    self._tickets: dict[tuple[int, int], int] = {}  # (engine, its ticket) -> ours
    self._count = 0
    self._homes: collections.OrderedDict[int, int] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._engines)

  @property
  def pending(self) -> int:
    """Requests that wait or run."""
    return sum(one.pending for one in self._engines)

  @property
  def stats(self) -> engine.Stats:
    """The sum of what all have counted; `rounds` and `steps` are those of the busiest."""
    counts = [one.stats for one in self._engines]
    total = engine.Stats(*map(sum, zip(*counts, strict=True)))
    return total._replace(
      steps=max(one.steps for one in counts), rounds=max(one.rounds for one in counts)
    )

  @property
  def version(self) -> int:
    """Counts the weights, as `Engine.version`."""
    return self._engines[0].version

  def set_params(self, views: Sequence[policy.Params]) -> None:
    """Other weights from now on, one view an engine; ValueError while requests run."""
    for one, view in zip(self._engines, views, strict=True):
      one.set_params(view)
    self._homes.clear()

  def warmup(self) -> None:
    """Compiles every shape for the devices of every engine; the first one alone.

    On GPU the others then find its programs in jax's compilation cache.
    """
    self._engines[0].warmup()
    list(self._threads.map(lambda one: one.warmup(), self._engines[1:]))

  def submit(self, request: engine.Request) -> int:
    """Queues a request; its ticket comes back from `run_round` with the completion."""
    number = self._place(request.home)
    ticket = self._engines[number].submit(request)
    self._count += 1
    self._tickets[number, ticket] = self._count - 1
    return self._count - 1

  def generate(self, requests: Sequence[engine.Request]) -> list[engine.Completion]:
    """Completes all requests, in their order."""
    return requests_lib.generate(self, requests)

  def run_round(self) -> list[tuple[int, engine.Completion]]:
    """One round of every engine that has something to do; what has finished comes back."""
    busy = [number for number, one in enumerate(self._engines) if one.pending]
    rounds = self._threads.map(lambda number: self._engines[number].run_round(), busy)
    return [
      (self._tickets.pop((number, ticket)), done)
      for number, finished in zip(busy, rounds, strict=True)
      for ticket, done in finished
    ]

  def _place(self, home: int) -> int:
    """The engine that has seen this home, or the idlest; another one while it would only wait there."""
    loads = [one.pending for one in self._engines]
    idlest = loads.index(min(loads))
    known = self._homes.setdefault(home, idlest)
    return known if loads[known] < self.config.slots else idlest
