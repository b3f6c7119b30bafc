"""The second model of Complementary RL: it answers jobs of the bank, is trained, and hands itself over.

    launch()                  before a rollout: what waits is given to the extractor
    settle(update, remember)  after an update: `remember` queues its trials, and what the extractor has
                              finished is applied to the bank

The extractor works in rounds: one update of its weights, where a batch waits, and an answer to every job,
with the weights that served when the round began.

  interleaved   a round is done inside `settle`, and its answers guide the next rollout. One thread.
  pipelined     a round is done by a thread while the actor plays and learns; its answers guide the rollout
                after. The bank changes in `settle` alone, so this repeats bit for bit, too.
  async         a thread works on without rounds; `settle` applies what is there and waits for nothing.

Complementary RL (2603.17621), section 3.1. The fence between all of them is `memory.manager`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from memrl_jax.memory import manager as managers
from memrl_jax.memory.experience import Shown
from memrl_jax.memory.records import Entry
from memrl_jax.ops import subgroups
from memrl_jax.rollout import policies
from memrl_jax.sampling import engine
from memrl_jax.sampling.requests import Sampler
from memrl_jax.training import learner
from memrl_jax.training.settings import Settings
from memrl_jax.types import Message, Sample, Turn

ANSWER, SHUFFLE = 21, 22  # streams of randomness under the run's seed
COUNTS = ("answered", "written", "invalid", "stale", "too_long", "dropped")
_IDLE_S = 0.005  # how long a free extractor waits before it looks for jobs again


class Extractor:
  """The model behind an `ExperienceManager`, and the thread that works for it, if any."""

  def __init__(
    self,
    settings: Settings,
    manager: managers.ExperienceManager,
    merge: Callable[..., list[Message]],
  ):
    """`merge` writes the prompt about a chunk of entries (envs.base.Extract)."""
    self.settings, self.config, self.manager = settings, settings.extractor, manager
    self._ask_to_merge = merge
    self.free = self.config.schedule == "async"
    self.model = learner.Learner(
      self.config,
      seed=settings.seed,
      total=settings.train.updates,
      frozen=not self.config.train,
      keep=True,  # a checkpoint may be written while the next update is computed
    )
    self._handed: tuple[int, Any] = (0, self.model.params)  # version, weights that serve
    self._sampling = self.config.sampling
    self._advisor: Sampler | None = None
    if settings.method.questions:
      self._advisor = self.model.sampler(self.model.params)
    self._consistent = threading.Lock()  # around weights and their version
    self._stop, self._merges = threading.Event(), threading.Event()
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None
    self._round: concurrent.futures.Future | None = None
    self._training: managers.Training | None = None
    self._merged: dict[int, Sequence[int]] = {}
    self._numbers: dict[str, float] = {}
    self._counts: collections.Counter = collections.Counter()
    self._waits: dict[str, float] = {}
    self.seconds = 0.0  # spent by the extractor since the last `timing`

  def warmup(self) -> None:
    """Compiles what sampling needs."""
    self.model.engine.warmup()
    if self._advisor is not None:
      self._advisor.warmup()

  def advisor(self) -> policies.LanguagePolicy | None:
    """Who answers the actor's questions in the next rollout, if any are asked."""
    if self._advisor is None:
      return None
    self.manager.advising, params = self._handed
    self.model.hand(self._advisor, params)
    return self.model.policy(self._sampling, self._advisor)

  # --- the schedule -------------------------------------------------------------------------------

  def launch(self) -> None:
    """Gives what waits to the extractor, unless it works inside `settle`."""
    if self.config.schedule == "interleaved":
      return
    if self._thread is None:
      self._thread = concurrent.futures.ThreadPoolExecutor(1, "extractor")
    if not self.free:
      self._training = self._begin()
      self._round = self._thread.submit(self._work, self._training)
    elif self._round is None:
      self._round = self._thread.submit(self._go_on)

  def settle(self, update: int, remember: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Ends an update: `remember()` pays generations and queues trials; returns all metrics.

    A round that is under way ends first: when trials are queued, nothing else waits.
    """
    due = self.manager.bank.merge_due(update + 1)
    if self.config.schedule == "interleaved":
      numbers = remember()
      self._training = self._begin()
      self._hand_over(self._work(self._training))
    elif not self.free:
      if self._round is not None:
        self._hand_over(self._round.result())
        self._round = None
    elif self._round is not None and self._round.done():
      self._round.result()  # raises what has ended the thread
    self._flush()
    if due and self.free:
      self._merges.set()
    elif due:
      self._merge()
    if self.config.schedule != "interleaved":
      numbers = remember()
    return numbers | self._metrics()

  def _metrics(self) -> dict[str, float]:
    stats = self.manager.stats()
    self._waits = {"seconds/search": stats.pop("search_s"), "seconds/lock": stats.pop("wait_s")}
    counts, self._counts = self._counts, collections.Counter()
    trained, self._numbers = self._numbers, {}
    numbers = {f"bank/{name}": float(value) for name, value in stats.items()}
    numbers |= {f"extractor/{name}": float(counts[name]) for name in COUNTS}
    return numbers | {f"extractor/{name}": value for name, value in trained.items()}

  def timing(self) -> dict[str, float]:
    """Seconds since the last call: the extractor's work, the slowest search, the longest wait for a lock."""
    spent, self.seconds = self.seconds, 0.0
    return {"seconds/extractor": spent, **self._waits}

  def close(self) -> None:
    """Waits for the thread's present piece of work, and applies no more of it."""
    self._stop.set()
    if self._thread is not None:
      self._thread.shutdown(wait=True, cancel_futures=True)
      self._thread = None

  # --- the work -----------------------------------------------------------------------------------

  def _begin(self) -> managers.Training | None:
    return self.manager.begin() if self.config.train else None

  def _work(self, training: managers.Training | None) -> Any:
    """A round: an update of the weights, then answers with those that serve; the new state, if any."""
    began = time.perf_counter()
    state = None if training is None else self._train(training)
    self._answer(self._jobs())
    self.seconds += time.perf_counter() - began
    return state

  def _hand_over(self, state: Any) -> None:
    """The updated weights serve from now on."""
    training, self._training = self._training, None
    if training is None:
      return
    with self._consistent:
      self.model.state = state
      self.manager.done(training)
    version = self.manager.sync(training)
    self._handed = (version, self.model.params)

  def _go_on(self) -> None:
    """The life of a free extractor."""
    while not self._stop.is_set():
      began = time.perf_counter()
      self._training = self._begin()
      if self._training is not None:
        self._hand_over(self._train(self._training))
      jobs = self._jobs(self.config.engine.slots)
      self._answer(jobs)
      if self._merges.is_set():
        self._merges.clear()
        self._merge()
      if jobs:
        self.seconds += time.perf_counter() - began
      else:
        self._stop.wait(_IDLE_S)

  def _jobs(self, most: int | None = None) -> list[managers.Ticket]:
    """The jobs that wait; beyond `max_queue` the oldest are given up."""
    jobs: list[managers.Ticket] = []
    while (most is None or len(jobs) < most) and (job := self.manager.next()) is not None:
      if self.manager.waiting() >= self.config.max_queue and job.kind == "distill":
        self.manager.fail(job)
        self._counts["dropped"] += 1
      else:
        jobs.append(job)
    return jobs

  def _answer(self, jobs: Sequence[managers.Ticket]) -> None:
    """Asks the serving weights about all jobs, and hands in what they say in the jobs' order."""
    if not jobs:
      return
    version, params = self._handed
    self.model.hand(self.model.engine, params)
    budget, requests, asked = self._sampling.reflect_tokens, [], []
    for job in jobs:
      messages = [Message(*message) for message in job.payload["messages"]]
      prompt = self.model.chat.encode(messages)
      if len(prompt) + budget > self.model.context:
        self.manager.fail(job)
        self._counts["too_long"] += 1
        continue
      asked.append(job)
      requests.append(self._request(prompt, budget, (ANSWER, job.number)))
    for job, request, done in zip(
      asked, requests, self.model.engine.generate(requests), strict=True
    ):
      text = self.model.chat.decode(done.ids)
      sample = Sample(
        text, request.prompt, done.ids, done.logps, done.finish, self._sampling.temperature
      )
      self.manager.finish(job, sample, extractor=version)
    self._counts["answered"] += len(asked)

  def _request(self, prompt: np.ndarray, budget: int, path: Sequence[int]) -> engine.Request:
    s = self._sampling
    key = np.random.SeedSequence([self.settings.seed, *path]).generate_state(2, np.uint32)
    return engine.Request(
      key, prompt, budget, s.temperature, s.top_p, s.top_k, self.model.chat.stop_ids
    )

  def _train(self, training: managers.Training) -> Any:
    """The state after one update with this batch; `model.state` itself changes at the hand-over."""
    batch = training.batch
    n, full_N = len(batch.samples), np.ones(len(batch.samples), bool)
    advantage_N = np.asarray(subgroups.extractor(batch.reward_N, batch.weight_N, full_N))
    rows = [row(g.sample, float(a)) for g, a in zip(batch.samples, advantage_N, strict=True)]
    rng = np.random.default_rng([self.settings.seed, SHUFFLE, training.base])
    after, numbers = self.model.advanced(self.model.state, rows, 1, rng)
    numbers = {name.removeprefix("train/"): value for name, value in numbers.items()}
    numbers |= {
      "updates": training.base + 1,
      "reward": float(batch.reward_N.mean()),
      "pairs": float(batch.pairs_N.mean()),
      "weight": float(batch.weight_N.mean()),
      "version_lag": float(np.mean([training.base - g.extractor for g in batch.samples])),
      "step_lag": float(np.mean([self.manager.step - g.step for g in batch.samples])),
      "samples": n,
    }
    self._numbers |= numbers
    return after

  def _flush(self) -> None:
    for job, applied in self.manager.flush():
      self._counts["written"] += len(applied.ids)
      self._counts["stale"] += applied.stale
      self._counts["invalid"] += bool(applied.reason) and not applied.stale
      if job.kind == "merge":
        self._merged[job.number] = applied.ids

  def _merge(self) -> None:
    """Shows all entries in chunks; what a chunk is merged into goes on to the next of its chain.

    A scope is dealt to `merge_lanes` chains; all chains ask at once.
    """
    bank, lanes = self.manager.bank, range(self.manager.bank.config.merge_lanes)
    chains = {
      (scope, lane): ((), 0) for scope in sorted(bank.memory.store.tenants()) for lane in lanes
    }
    while chains:
      asked = {}
      for (scope, lane), (merged, after) in chains.items():
        chunk = bank.chunk(scope, merged, after, lane)
        if chunk:
          asked[scope, lane] = (self._submit_merge(scope, chunk), max(entry.id for entry in chunk))
      self._answer(self._jobs())
      self._flush()
      chains = {
        chain: (self._merged.pop(job.number, ()), max(after, chains[chain][1]))
        for chain, (job, after) in asked.items()
      }

  def _submit_merge(self, scope: str, chunk: Sequence[Entry]) -> managers.Ticket:
    messages = self._ask_to_merge([entry.text for entry in chunk])
    return self.manager.submit(
      "merge",
      scope,
      [Shown(entry.id, entry.version) for entry in chunk],
      payload={"messages": [[message.role, message.content] for message in messages]},
    )

  # --- checkpoints --------------------------------------------------------------------------------

  @contextlib.contextmanager
  def consistent(self) -> Iterator[None]:
    """Weights and the manager's record of their version belong together inside."""
    with self._consistent:
      yield

  def loaded(self) -> None:
    """After `model.load` and the manager's: what serves is what was loaded."""
    self._handed = (self.manager.serving, self.model.params)


def row(sample: Sample, advantage: float) -> Turn:
  """A generation as a row of training."""
  return Turn(0, "advise", 0, [], sample, "", True, 0.0, "", advantage=advantage)
