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

On several hosts all take the same batches and jobs, and apply the same answers in the same order, so that their
banks are one. The model lies on the devices of all, and each host answers its share and trains on its rows, in
the actor's thread; or on some of the first host, which does a round alone, beside the actor where the schedule says
so, while the others hear in `settle` what came of it. Then `async` has rounds, too, and `settle` passes by one
that is under way.

Complementary RL (2603.17621), section 3.1. The fence between all of them is `memory.manager`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.memory import manager as managers
from memrl_jax.memory.experience import Shown
from memrl_jax.memory.records import Entry
from memrl_jax.ops import subgroups
from memrl_jax.rollout import policies
from memrl_jax.sampling import engine
from memrl_jax.sampling.requests import Sampler
from memrl_jax.training import hosts, learner, lodged, mesh
from memrl_jax.training.settings import Settings
from memrl_jax.types import Message, Sample, Turn

ANSWER, SHUFFLE = 21, 22  # streams of randomness under the run's seed
COUNTS = ("answered", "written", "invalid", "stale", "too_long", "dropped")
_IDLE_S = 0.005  # how long a free extractor waits before it looks for jobs again


class Round(NamedTuple):
  """What the extractor is at work on; `result` waits for it: the new state, metrics and, on the first of several
  hosts, the answers."""

  training: managers.Training | None
  jobs: list[managers.Ticket]
  result: Callable[[], tuple[Any, dict[str, float], list[engine.Completion]]]
  done: Callable[[], bool]


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
    owners = {device.process_index for device in mesh.make(self.config.mesh).devices.flat}
    self.lodged = hosts.count() > len(owners)  # see hosts.check
    self.free = self.config.schedule == "async" and not self.lodged
    how = {
      "seed": settings.seed,
      "total": settings.train.updates,
      "frozen": not self.config.train,
      "keep": True,  # a checkpoint may be written while the next update is computed
    }
    self.model: learner.Learner | lodged.Elsewhere
    if self.lodged:
      self.model = lodged.make(self.config, answers=bool(settings.method.questions), **how)
    else:
      self.model = learner.Learner(self.config, **how)
    self._handed: tuple[int, Any] = (0, self.model.params)  # version, weights that serve
    self._advice: tuple[Any, Any] = (None, None)  # those weights, and what of them is on this host
    self._sampling = self.config.sampling
    self._advisor: Sampler | None = None
    if settings.method.questions:
      self._advisor = self.model.sampler(self.model.params)
    self._consistent = threading.Lock()  # around weights and their version
    self._stop, self._merges = threading.Event(), threading.Event()
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None
    self._life: concurrent.futures.Future | None = None  # of a free extractor
    self._round: Round | None = None
    self._merge_due = False
    self._merged: dict[int, Sequence[int]] = {}
    self._numbers: dict[str, float] = {}
    self._counts: collections.Counter = collections.Counter()
    self._waits: dict[str, float] = {}
    self.seconds = 0.0  # spent by the extractor since the last `timing`

  def warmup(self) -> None:
    """Compiles what sampling needs."""
    self.model.warmup()
    if self._advisor is not None:
      self._advisor.warmup()

  def advisor(self) -> policies.LanguagePolicy | None:
    """Who answers the actor's questions in the next rollout, if any are asked."""
    if self._advisor is None:
      return None
    self.manager.advising, params = self._handed
    if self.lodged and self._advice[0] is not self._handed:
      self._advice = self._handed, self.model.shared(params)
    if self.lodged:
      params = self._advice[1]
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
      self._round = self._round or self._begin_round()
    elif self._life is None:
      self._life = self._thread.submit(self._go_on)

  def settle(self, update: int, remember: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Ends an update: `remember()` pays generations and queues trials; returns all metrics.

    A round that is under way ends first: when trials are queued, nothing else waits.
    """
    due = self.manager.bank.merge_due(update + 1)
    if self.config.schedule == "interleaved":
      numbers = remember()
      self._end_round(self._begin_round())
    elif not self.free:
      if self._round is not None and self._ends(self._round):
        self._end_round(self._round)
        self._round = None
    elif self._life is not None and self._life.done():
      self._life.result()  # raises what has ended the thread
    self._flush()
    if due and self.free:
      self._merges.set()
    self._merge_due |= due and not self.free
    if self._merge_due and self._round is None:
      self._merge_due = False
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

  def _begin_round(self) -> Round:
    """An update of the weights, then answers with those that serve; in the thread, if there is one."""
    training, jobs = self._begin(), self._jobs()
    if self._thread is None:
      return Round(training, jobs, lambda: self._work(training, jobs), lambda: True)
    if self.lodged and not hosts.first():
      return Round(training, jobs, lambda: (None, {}, []), lambda: True)
    future = self._thread.submit(self._work, training, jobs)
    return Round(training, jobs, future.result, future.done)

  def _work(
    self, training: managers.Training | None, jobs: list[managers.Ticket]
  ) -> tuple[Any, dict[str, float], list[engine.Completion]]:
    began, said = time.perf_counter(), []
    state, numbers = (None, {}) if training is None else self._train(training)
    if self.lodged:  # handed in by all hosts at once
      said = self._generate(list(filter(None, map(self._request, jobs))))
    else:
      self._answer(jobs)
    self.seconds += time.perf_counter() - began
    return state, numbers, said

  def _ends(self, one: Round) -> bool:
    """Whether a round is over; only "async" passes by one that is not."""
    if self.config.schedule != "async":
      return True
    return hosts.of_first(one.done, "whether the extractor is ready")

  def _end_round(self, one: Round) -> None:
    """What came of a round, on every host."""
    state = None

    def result() -> tuple[dict[str, float], list[engine.Completion]]:
      nonlocal state
      state, numbers, said = one.result()
      return numbers, said

    if self.lodged:
      numbers, said = hosts.of_first(result, "the extractor on host 0")
      self._answer(one.jobs, said)
    else:
      numbers, _ = result()
    self._numbers |= numbers
    self._hand_over(one.training, state)

  def _hand_over(self, training: managers.Training | None, state: Any) -> None:
    """The updated weights serve from now on."""
    if training is None:
      return
    with self._consistent:
      if state is not None:  # it is here
        self.model.state = state
      self.manager.done(training)
    version = self.manager.sync(training)
    self._handed = (version, self.model.params)

  def _go_on(self) -> None:
    """The life of a free extractor."""
    while not self._stop.is_set():
      began = time.perf_counter()
      training = self._begin()
      if training is not None:
        state, numbers = self._train(training)
        self._numbers |= numbers
        self._hand_over(training, state)
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

  def _answer(
    self, jobs: Sequence[managers.Ticket], said: Sequence[engine.Completion] | None = None
  ) -> None:
    """Asks the serving weights about all jobs, and hands in what they say (or have `said`) in the jobs' order."""
    version, _ = self._handed
    asked, requests = [], []
    for job in jobs:
      request = self._request(job)
      if request is None:
        self.manager.fail(job)
        self._counts["too_long"] += 1
      else:
        asked.append(job)
        requests.append(request)
    if not asked:
      return
    if said is None:
      said = self._ask(requests)
    for job, request, done in zip(asked, requests, said, strict=True):
      text = self.model.chat.decode(done.ids)
      sample = Sample(
        text, request.prompt, done.ids, done.logps, done.finish, self._sampling.temperature
      )
      self.manager.finish(job, sample, extractor=version)
    self._counts["answered"] += len(asked)

  def _ask(self, requests: Sequence[engine.Request]) -> list[engine.Completion]:
    """What the serving weights answer: each host asks about its share, or the one that has them about all."""
    if self.lodged:
      return hosts.of_first(lambda: self._generate(requests), "the extractor on host 0")
    return hosts.gather(self._generate(hosts.mine(requests)), "the extractor's answers")

  def _generate(self, requests: Sequence[engine.Request]) -> list[engine.Completion]:
    self.model.hand(self.model.engine, self._handed[1])
    return self.model.engine.generate(requests)

  def _request(self, job: managers.Ticket) -> engine.Request | None:
    """What to ask about a job; None where its prompt is too long."""
    s, budget = self._sampling, self._sampling.reflect_tokens
    prompt = self.model.chat.encode([Message(*message) for message in job.payload["messages"]])
    if len(prompt) + budget > self.model.context:
      return None
    path = [self.settings.seed, ANSWER, job.number]
    key = np.random.SeedSequence(path).generate_state(2, np.uint32)
    return engine.Request(
      key, prompt, budget, s.temperature, s.top_p, s.top_k, self.model.chat.stop_ids
    )

  def _train(self, training: managers.Training) -> tuple[Any, dict[str, float]]:
    """The state after one update with this batch, and metrics; `model.state` itself changes at the hand-over."""
    batch = training.batch
    n, full_N = len(batch.samples), np.ones(len(batch.samples), bool)
    advantage_N = np.asarray(subgroups.extractor(batch.reward_N, batch.weight_N, full_N))
    mine = range(n) if self.lodged else hosts.share(n)
    rows = [
      row(g.sample, float(a), here=i in mine)
      for i, (g, a) in enumerate(zip(batch.samples, advantage_N, strict=True))
    ]
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
    return after, numbers

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


def row(sample: Sample, advantage: float, here: bool = True) -> Turn:
  """A generation as a row of training; `here`: of those that this host trains on."""
  return Turn(0, "advise", 0, [], sample, "", True, 0.0, "", advantage=advantage, here=here)
