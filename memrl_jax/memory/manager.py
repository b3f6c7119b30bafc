"""Between many players who read the experience bank and one extractor that writes it and is trained.

Complementary RL (2603.17621), section 3.1 and appendix. Reading goes on at any time; all writing passes a
fence, where what comes late, twice, or from before a resume is refused:

    submit -> next -> finish -> flush         a finished trial, read by the extractor, applied to the bank
    begin -> done -> sync                     a batch of samples, trained on, its weights handed over

Between `begin` and `sync` the bank is not written: `finish` still takes replies, `flush` applies none.
The manager has no thread of its own; whoever calls does the work.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.memory import gate, replies, samples
from memrl_jax.memory.experience import Applied, Asides, Counts, ExperienceBank, Shown
from memrl_jax.memory.records import StoreError
from memrl_jax.types import Memo, Recall, Sample


@dataclasses.dataclass(frozen=True)
class ManagerConfig:
  """batch, wait_s: queries are gathered until there are so many, or so many seconds have passed.

  deterministic: no query waits for another, and updates are applied in the order of their tickets, a
  later one never before an earlier one. The same calls then give the same bank, bit for bit.
  """

  batch: int = 16
  wait_s: float = 0.001
  deterministic: bool = True

  def __post_init__(self):
    if self.batch < 1 or not 0 <= self.wait_s <= 1:
      raise ValueError(
        f"queries are gathered in batches of {self.batch} for {self.wait_s} s; choose at least 1 and at "
        "most 1 s (config.manager.batch, config.manager.wait_s)"
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
  """One job of the extractor, "distill" a trial or "merge" a chunk, with the entries that it is shown.

  It is this very object that the fence knows, so that no reply from before a resume can pass for it.
  `payload` is JSON-ready: what the caller needs to write the prompt (again, after a resume).
  """

  number: int
  kind: str
  scope: str
  shown: tuple[Shown, ...]
  query: str
  trial: str
  payload: dict[str, Any]


class Update(NamedTuple):
  """What the extractor answered to a ticket."""

  ticket: Ticket
  generation: samples.Generation
  parsed: replies.Parsed


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
  """One update of the extractor, from version `base` of its weights to the next one."""

  batch: samples.Batch
  base: int


class Reader(NamedTuple):
  """The bank as trials read it (rollout.collect.Memory); with `scratch` counts go there and leave no trace.

  What trials ask first, one after the other, is counted at once; what they ask later stands in `asides`.
  """

  manager: ExperienceManager
  scratch: Counts | None
  asides: Asides

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    later = [ask for ask in asks if is_later(ask)]
    found = iter(self.manager.recall([ask for ask in asks if not is_later(ask)], self.scratch))
    aside = iter(self.manager.recall_aside(later, self.asides, self.scratch))
    return [next(aside if is_later(ask) else found) for ask in asks]


def is_later(ask: Recall) -> bool:
  """Whether its trial has asked before."""
  return bool(ask.draw) and ask.draw[-1] > 0


class ExperienceManager:
  """Readers, tickets and training of one bank. `step` is the actor's; the caller moves it."""

  def __init__(self, config: ManagerConfig, bank: ExperienceBank):
    self.config, self.bank = config, bank
    # Searches against a resume or the end. Against a writer they have the gate of the memory's mirror,
    # which is shut only while it moves to a new version; here it would be shut while a disk writes.
    self._gate = gate.Gate()
    self._fence = threading.RLock()
    self._arrived = threading.Condition()
    self._asked: list[tuple[list[Recall], Counts | None, concurrent.futures.Future]] = []
    self._gathering = False
    self._search_s = 0.0
    self._forget()

  def _forget(self) -> None:
    self.step, self.refused, self._next = 0, 0, 1
    self.serving = self.weights = 0  # version of the extractor that answers, and of the trained one
    self.advising = 0  # version that answers the questions of the rollout under way
    self._queue: collections.deque[Ticket] = collections.deque()
    self._taken: dict[int, Ticket] = {}
    self._pending: dict[int, Update] = {}
    self._training: Training | None = None
    self._trained = False

  # --- reading ------------------------------------------------------------------------------------

  def reader(self, *, count: bool) -> Reader:
    """For training, or (count=False) for one evaluation, which begins with the counts as they are."""
    return Reader(self, None if count else {}, {})

  def recall(self, asks: Sequence[Recall], scratch: Counts | None = None) -> list[tuple[Memo, ...]]:
    """Experiences for each ask, best first. Threads that ask at about the same time share a search."""
    if self.config.deterministic:
      return self._search(list(asks), scratch)
    mine: concurrent.futures.Future = concurrent.futures.Future()
    with self._arrived:
      self._asked.append((list(asks), scratch, mine))
      leads, self._gathering = not self._gathering, True
      self._arrived.notify_all()
    if leads:
      self._lead()
    return mine.result()

  def recall_aside(
    self, asks: Sequence[Recall], asides: Asides, scratch: Counts | None = None
  ) -> list[tuple[Memo, ...]]:
    """`recall` for what is asked in the middle of trials (`ExperienceBank.search_aside`)."""
    return self._search(list(asks), scratch, asides)

  def count_asides(self, asides: Asides) -> None:
    """Counts the asks of this step that wait in `asides`, and forgets them there."""
    self.bank.count_asides(asides, self.step)
    asides.clear()

  def _enough(self) -> bool:
    return sum(len(asks) for asks, _, _ in self._asked) >= self.config.batch

  def _lead(self) -> None:
    """The first one waits for others, and then searches for all of them."""
    batch: list[tuple[list[Recall], Counts | None, concurrent.futures.Future]] = []
    try:
      with self._arrived:
        try:
          self._arrived.wait_for(self._enough, self.config.wait_s)
        finally:
          batch, self._asked, self._gathering = self._asked, [], False
      for into in {id(scratch): scratch for _, scratch, _ in batch}.values():
        mine = [(asks, future) for asks, scratch, future in batch if scratch is into]
        found = iter(self._search([ask for asks, _ in mine for ask in asks], into))
        for asks, future in mine:
          future.set_result([next(found) for _ in asks])
    except BaseException as error:  # also Ctrl-C: who waits for this search would wait for ever
      for _, _, future in batch:
        if not future.done():
          future.set_exception(error)

  def _search(
    self, asks: list[Recall], scratch: Counts | None, asides: Asides | None = None
  ) -> list[tuple[Memo, ...]]:
    if not asks:
      return []
    start = time.perf_counter()
    places: dict[str, list[int]] = {}
    for place, ask in enumerate(asks):
      places.setdefault(ask.scope, []).append(place)
    found: list[tuple[Memo, ...]] = [()] * len(asks)
    with self._gate.reading():
      for scope, mine in places.items():
        queries = [asks[place].query for place in mine]
        if asides is None:
          hits = self.bank.search(scope, queries, self.step, scratch=scratch)
        else:
          draws = [asks[place].draw for place in mine]
          hits = self.bank.search_aside(scope, queries, self.step, draws, asides, scratch=scratch)
        for place, near in zip(mine, hits, strict=True):
          found[place] = tuple(
            Memo(hit.id, hit.version, hit.entry.text, hit.entry.score, hit.similarity)
            for hit in near
          )
    self._search_s = max(self._search_s, time.perf_counter() - start)
    return found

  # --- what the extractor writes ------------------------------------------------------------------

  def submit(
    self,
    kind: str,
    scope: str,
    shown: Sequence[Shown] = (),
    *,
    query: str = "",
    trial: str = "",
    payload: dict[str, Any] | None = None,
  ) -> Ticket:
    """Queues a job for the extractor; `shown` are the entries that its prompt will number."""
    if kind not in ("distill", "merge"):
      raise ValueError(f'a job is "distill" or "merge", not {kind!r}')
    with self._fence:
      number, self._next = self._next, self._next + 1
      ticket = Ticket(number, kind, scope, tuple(shown), query, trial, payload or {})
      self._queue.append(ticket)
      return ticket

  def waiting(self) -> int:
    """Jobs that nobody has taken yet."""
    return len(self._queue)

  def next(self) -> Ticket | None:
    """The oldest job that waits, for whoever asks the extractor; None where none does."""
    with self._fence:
      if not self._queue:
        return None
      ticket = self._queue.popleft()
      self._taken[ticket.number] = ticket
      return ticket

  def finish(self, ticket: Ticket, sample: Sample, *, extractor: int) -> None:
    """The extractor's answer, made by version `extractor` of its weights; applied by a `flush`.

    Raises:
      StoreError: the ticket is not out (finished before, failed, or from before a resume), or no such
        weights were ever handed over.
    """
    parsed = self._parse(ticket, sample.text)
    by_entry = self.bank.config.key == "entry"
    self.bank.prepare(o.text if by_entry else ticket.query for o in parsed.operations)
    with self._fence:
      self._out(ticket)
      if not 0 <= extractor <= self.serving:
        self.refused += 1
        raise StoreError(
          f"job {ticket.number} was answered by version {extractor} of the extractor, and version "
          f"{self.serving} is the newest that serves; pass the version that sampled."
        )
      del self._taken[ticket.number]
      generation = samples.Generation(sample, extractor, self.step)
      self._pending[ticket.number] = Update(ticket, generation, parsed)

  def fail(self, ticket: Ticket) -> None:
    """No answer will come: the job is given up. Raises as `finish`."""
    with self._fence:
      self._out(ticket)
      del self._taken[ticket.number]

  def _out(self, ticket: Ticket) -> None:
    if self._taken.get(ticket.number) is not ticket:
      self.refused += 1
      raise StoreError(
        f"job {ticket.number} is not out: it was finished, has failed, or was made before a resume; "
        "take what `next` gives."
      )

  def flush(self) -> list[tuple[Ticket, Applied]]:
    """Applies the answers that wait, in the order of their tickets, each once, as a version of its own.

    None while an update of the extractor is under way.
    """
    applied = []
    with self._fence:
      for update in self._ready():
        applied.append((update.ticket, self._apply(update)))
        del self._pending[update.ticket.number]  # only now: what met a full disk still waits
    return applied

  def _ready(self) -> list[Update]:
    if self.suspended:
      return []
    earlier = [ticket.number for ticket in self._queue] + list(self._taken)
    first = min(earlier, default=self._next) if self.config.deterministic else self._next
    return [self._pending[number] for number in sorted(self._pending) if number < first]

  def _parse(self, ticket: Ticket, reply: str) -> replies.Parsed:
    config = self.bank.config
    if ticket.kind == "merge":
      return replies.parse_merge(reply, len(ticket.shown), chars=config.chars)
    return replies.parse(reply, len(ticket.shown), max_ops=config.max_ops, chars=config.chars)

  def _apply(self, update: Update) -> Applied:
    ticket, (sample, extractor, step), parsed = update
    if not parsed.operations:
      return Applied(reason=parsed.reason)
    number = self.bank.record(sample, extractor=extractor, step=step)
    arguments = (ticket.scope, parsed, ticket.shown, number)
    if ticket.kind == "merge":
      return self.bank.merge(*arguments, trial=ticket.trial)
    return self.bank.apply(*arguments, query=ticket.query, trial=ticket.trial)

  # --- what trains the extractor ------------------------------------------------------------------

  @property
  def suspended(self) -> bool:
    """Whether an update of the extractor is under way, so that nothing is written."""
    return self._training is not None

  def begin(self) -> Training | None:
    """Applies what waits, stops writing and takes a batch; None where the bank is not `ready`."""
    with self._fence:
      if self.suspended:
        return None
      self.flush()
      batch = self.bank.take()
      if batch is not None:
        self._training = Training(batch, self.weights)
      return self._training

  def done(self, training: Training) -> int:
    """The weights of version `base` have been updated once with this batch; their new version.

    Raises:
      StoreError: this is not the update under way (done, given up, or from before a resume): throw its
        weights away.
    """
    with self._fence:
      self._under_way(training, trained=False)
      self.bank.trained(training.batch)
      self.weights, self._trained = training.base + 1, True
      return self.weights

  def sync(self, training: Training) -> int:
    """The new weights answer from now on; writing goes on. Raises as `done`."""
    with self._fence:
      self._under_way(training, trained=True)
      self.serving, self._training, self._trained = self.weights, None, False
      return self.serving

  def abandon(self, training: Training) -> None:
    """The update failed: its samples wait again, writing goes on. Raises as `done`."""
    with self._fence:
      self._under_way(training, trained=False)
      self.bank.give_back(training.batch)
      self._training = None

  def _under_way(self, training: Training, *, trained: bool) -> None:
    if training is not self._training or trained is not self._trained:
      self.refused += 1
      raise StoreError(
        f"the update of the extractor from version {training.base} is not at this point: it is begin, "
        "done, sync, each once, and nothing of it outlives a resume; take what `begin` gives."
      )

  # --- looking after it ---------------------------------------------------------------------------

  def stats(self) -> dict[str, float]:
    """Sizes and waits for metrics.

    lag: versions between the extractor's weights and those that wrote the oldest waiting sample.
    search_s, wait_s: the longest search since the last call, and the longest wait of a reader for a writer
    or the other way round.
    """
    with self._fence:
      slowest, self._search_s = self._search_s, 0.0
      oldest = self.bank.oldest()
      return {
        **self.bank.stats(),
        "queue": len(self._queue),
        "out": len(self._taken),
        "pending": len(self._pending),
        "refused": self.refused,
        "serving": self.serving,
        "lag": 0 if oldest is None else self.weights - oldest,
        "search_s": slowest,
        "wait_s": self.bank.memory.longest_wait(),
      }

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, JSON-ready rest) for a checkpoint, together with the trained weights.

    Jobs that are out are saved as jobs that wait, an update under way as one that has not begun, or,
    once `done`, as handed over: who resumes serves the weights it has loaded.
    """
    with self._fence:
      arrays, rest = self.bank.state()
      updates = list(self._pending.values())
      packed, listed = samples.pack((u.ticket.number, u.generation) for u in updates)
      arrays |= {f"pending_{name}": value for name, value in packed.items()}
      jobs = sorted([*self._taken.values(), *self._queue], key=lambda ticket: ticket.number)
      return arrays, {
        "bank": rest,
        "step": self.step,
        "next": self._next,
        "refused": self.refused,
        "weights": self.weights,
        "jobs": [_listed(ticket) for ticket in jobs],
        "pending": [_listed(update.ticket) for update in updates],
        "generations": listed,
      }

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    """Back to what `state` gave; tickets and updates that are out are refused from now on."""
    with self._fence, self._gate.writing():
      self.bank.load(arrays, rest["bank"])
      self._forget()
      self.step, self._next, self.refused = rest["step"], rest["next"], rest["refused"]
      self.serving = self.weights = rest["weights"]
      self._queue.extend(_ticket(job) for job in rest["jobs"])
      packed = {name: arrays[f"pending_{name}"] for name in samples.ARRAYS}
      made = dict(samples.unpack(packed, rest["generations"]))
      for job in rest["pending"]:
        ticket = _ticket(job)
        generation = made[ticket.number]
        parsed = self._parse(ticket, generation.sample.text)
        self._pending[ticket.number] = Update(ticket, generation, parsed)

  def reset(self) -> None:
    """Back to nothing."""
    with self._fence, self._gate.writing():
      self.bank.reset()
      self._forget()

  def close(self) -> None:
    """Lets go of the store."""
    with self._fence, self._gate.writing():
      self.bank.close()


def _listed(ticket: Ticket) -> dict[str, Any]:
  fields = {field.name: getattr(ticket, field.name) for field in dataclasses.fields(ticket)}
  return fields | {"shown": [list(one) for one in ticket.shown]}


def _ticket(job: dict[str, Any]) -> Ticket:
  return Ticket(**job | {"shown": tuple(Shown(*one) for one in job["shown"])})
