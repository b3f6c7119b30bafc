"""The experience bank of Complementary RL: what the extractor wrote, who was guided by it, what trains.

"Complementary RL" (2603.17621), sections 2-3, appendix B. The extractor reads a finished trial and the
entries that guided it, and answers with operations; what guided trials earn trains the extractor.

  entry        one experience in the bank.Memory; an Update or a Merge keeps its id and its history.
  generation   one response of the extractor (`replies`), as it was sampled; the unit that trains (`samples`).
  pair         (entry, trial that was shown it), worth +1 where the trial succeeded and -1 where not (or what
               the trial says).
"""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.memory import bank, embed, replies, retrieval, samples
from memrl_jax.memory.experience_config import ExperienceConfig
from memrl_jax.memory.records import Add, Change, Entry, Op, Outcome, Read, Remove, StoreError
from memrl_jax.types import Sample

Counts = dict[int, tuple[int, int | None]]  # entry: times shown, and at which step last
# By who asked in the middle of a trial (Recall.draw): the (entry, generation) that were shown.
Asides = dict[tuple[int, ...], tuple[tuple[int, int], ...]]


class Shown(NamedTuple):
  """An entry as it was shown, and a version of the memory at which it stood so.

  That of a hit (`Hit.version`), or of an entry that was just read (`Entry.version`).
  """

  id: int
  version: int


class Ended(NamedTuple):
  """A finished trial: which entries it was shown, and which generations answered its questions.

  `pay` is what each pair of it is worth, by default +1 or -1 by success.
  """

  scope: str
  outcome: Outcome
  reads: tuple[Read, ...] = ()
  asked: tuple[int, ...] = ()
  pay: float | None = None


class Applied(NamedTuple):
  """What became of operations: the ids they wrote; `stale` found their entry changed or gone."""

  ids: tuple[int, ...] = ()
  stale: int = 0
  reason: str = ""


class ExperienceBank:
  """Experiences by scope (a hard partition), and the samples that train their author; threads may share it."""

  def __init__(self, config: ExperienceConfig, memory: bank.Memory):
    """Take `open`, which gives the memory its limits."""
    self.config, self.memory = config, memory
    self._writing = threading.RLock()  # one writes; may wait for a disk
    self._lock = threading.Lock()  # around the tables, never held for long
    self._samples = samples.Samples(
      cool_down=config.cool_down,
      alpha=config.alpha,
      cooled=config.cooled,
      batch=config.batch,
      buffer=config.buffer,
    )
    self._shown: dict[int, tuple[int, int | None]] = {}  # entry: times, last step
    self._paid: dict[int, tuple[float, int]] = {}  # entry: sum over its pairs, their number
    self._queries = 0
    for scope in memory.store.tenants():
      for entry in memory.entries(scope):
        if entry.data.get("key") != config.key:
          raise StoreError(
            f"entry {entry.id} is filed under {entry.data.get('key')!r}, and the bank under "
            f"{config.key!r}: their cosines cannot be compared; open it with the key it was made with "
            "(config.experience.key), or start a new one."
          )

  @classmethod
  def open(
    cls, path: str | os.PathLike | None, embedder: embed.Embedder, config: ExperienceConfig
  ) -> ExperienceBank:
    """The bank in a folder, made if there is none; path=None: one that goes with this object."""
    evict = "fifo" if config.evict == "fifo" else "lowest_score"
    cached = embed.Cached(embedder, config.cache)
    memory = bank.Memory.open(path, cached, limits=bank.Limits(config.capacity, evict))
    try:
      return cls(config, memory)
    except BaseException:
      memory.close()
      raise

  def close(self) -> None:
    self.memory.close()

  def prepare(self, texts: Iterable[str]) -> None:
    """Embeds texts that are about to be written, while no lock is held."""
    self.memory.embedder.embed(list(texts))

  # --- reading ------------------------------------------------------------------------------------

  def search(
    self, scope: str, queries: Sequence[str], step: int, *, scratch: Counts | None = None
  ) -> list[list[bank.Hit]]:
    """For each query the `top` entries by s(m), best first; each query is counted before the next.

    With `scratch` the counts go there and the bank keeps no trace (evaluation): its entries are
    taken in turn, as in training.
    """
    pools = self.memory.search(scope, queries, self.config.pool * self.config.top)
    with self._lock:
      shown = self._shown if scratch is None else collections.ChainMap(scratch, self._shown)
      found = []
      for n, hits in enumerate(pools):
        number = self._queries if scratch is None else self._queries + len(scratch) + n
        chosen = self._choose(hits, step, (number,), shown)
        for hit in chosen:
          shown[hit.id] = (shown.get(hit.id, (0, None))[0] + 1, step)
        if scratch is None:
          self._queries += 1
          for hit in chosen:
            self._samples.use(hit.entry.data["generation"], step)
        found.append(chosen)
      return found

  def search_aside(
    self,
    scope: str,
    queries: Sequence[str],
    step: int,
    draws: Sequence[tuple[int, ...]],
    asides: Asides,
    *,
    scratch: Counts | None = None,
  ) -> list[list[bank.Hit]]:
    """`search` for what is asked in the middle of trials: none changes what another trial finds.

    When such an ask comes depends on how fast all play. So each sees the counts without any of them, but those
    of its own trial (`draws[n][:-1]`), and goes into `asides` until all are counted at once.
    """
    pools = self.memory.search(scope, queries, self.config.pool * self.config.top)
    with self._lock:
      shown = self._shown if scratch is None else collections.ChainMap(scratch, self._shown)
      found = []
      for draw, hits in zip(draws, pools, strict=True):
        before = [asides.get((*draw[:-1], number), ()) for number in range(draw[-1])]
        times = collections.Counter(id for pairs in before for id, _ in pairs)
        own = {id: (shown.get(id, (0, None))[0] + n, step) for id, n in times.items()}
        chosen = self._choose(hits, step, draw, collections.ChainMap(own, shown))
        asides[draw] = tuple((hit.id, hit.entry.data["generation"]) for hit in chosen)
        found.append(chosen)
      return found

  def count_asides(self, asides: Asides, step: int) -> None:
    """Counts what `search_aside` has shown in this step, whoever asked first."""
    with self._lock:
      for draw in sorted(asides):
        self._queries += 1
        for id, generation in asides[draw]:
          self._shown[id] = (self._shown.get(id, (0, None))[0] + 1, step)
          self._samples.use(generation, step)

  def _choose(
    self, hits: list[bank.Hit], step: int, draw: Sequence[int], counts: Mapping[int, Any]
  ) -> list[bank.Hit]:
    """The best of a pool; `draw` names the query and draws where `sample` is set."""
    config = self.config
    shown = [counts.get(hit.id, (0, None)) for hit in hits]
    recent = [last is not None and step - last < config.window for _, last in shown]
    score_P = retrieval.score(
      np.array([times for times, _ in shown]), np.array(recent), lambda_=config.lambda_
    )
    if config.sample:
      rng = np.random.default_rng([config.seed, *draw])
      places = retrieval.drawn(score_P, config.top, rng)
    else:
      places = retrieval.best(score_P, config.top)
    return [hits[place] for place in places]

  # --- writing ------------------------------------------------------------------------------------

  def put(self, scope: str, items: Iterable[tuple[str, str]]) -> list[int]:
    """Adds (query, text) that no generation wrote, such as a bank made beforehand; their ids."""
    items = list(items)
    by_entry = self.config.key == "entry"
    self.prepare(text if by_entry else query for query, text in items)
    with self._writing:
      data, score = self._data("", 0, []), self._start(scope)
      ops = [Add(scope, text if by_entry else query, text, score, data) for query, text in items]
      done = self.memory.commit(ops, once=True, why="put")
      self._forget(done.evicted)
      return list(done.ids)

  def record(self, sample: Sample, *, extractor: int, step: int) -> int:
    """Keeps a response of the extractor as it was sampled; its id."""
    with self._lock:
      return self._samples.record(sample, extractor=extractor, step=step)

  def generation(self, number: int) -> samples.Generation:
    with self._lock:
      return self._samples[number]

  def apply(
    self,
    scope: str,
    parsed: replies.Parsed,
    shown: Sequence[Shown],
    generation: int,
    *,
    query: str,
    trial: str,
  ) -> Applied:
    """Adds and updates what a generation said about a trial, as one version.

    An update whose entry has changed or gone since it was shown adds its text as a new entry.
    """
    with self._writing:
      ops: list[Op] = []
      updated, stale, start = [], 0, self._start(scope)
      for operation in parsed.operations:
        text, parents = operation.text, []
        key = text if self.config.key == "entry" else query
        if operation.kind == "update":
          now = self._unchanged(scope, shown[operation.places[0]])
          if now is not None:
            data = self._data(trial, generation, [])
            ops.append(Change(scope, now.id, key, text, None, data, None, now.version))
            updated.append(now.id)
            continue
          stale, parents = stale + 1, [shown[operation.places[0]].id]
        ops.append(Add(scope, key, text, start, self._data(trial, generation, parents)))
      if not ops:
        return Applied(reason=parsed.reason)
      done = self.memory.commit(ops, once=True, why=f"experience {generation}")
      self._forget(done.evicted)
      return Applied((*done.ids, *updated), stale)

  def merge_due(self, step: int) -> bool:
    """Whether the entries are to be merged after this step of the actor (1, 2, ...)."""
    every = self.config.merge_every
    return every > 0 and step > 0 and step % every == 0

  def chunk(
    self, scope: str, merged: Sequence[int] = (), after: int = 0, lane: int = 0
  ) -> list[Entry]:
    """Entries for the next Merge: what the last chunk was merged into, then those with ids > `after`.

    Of the scope's entries every `merge_lanes`th is in a lane. [] at the end, and where one alone is left.
    """
    lanes = self.config.merge_lanes
    entries = (entry for entry in self.memory.entries(scope) if entry.id % lanes == lane)
    fresh = [entry for entry in entries if entry.id > after]
    carried = self.memory.get(scope, merged)[: self.config.merge_chunk - 1]
    entries = [*carried, *fresh[: self.config.merge_chunk - len(carried)]]
    return entries if fresh and len(entries) > 1 else []

  def merge(
    self, scope: str, parsed: replies.Parsed, shown: Sequence[Shown], generation: int, *, trial: str
  ) -> Applied:
    """Merges and discards entries of a chunk as one version; `ids` are those that others went into.

    Of merged entries the oldest stays and takes what the others were: how often they were shown and
    what they earned. Where any of the chunk has changed since it was shown, all of it is kept.
    """
    with self._writing:
      now = [self._unchanged(scope, one) for one in shown]
      if None in now:
        return Applied(stale=1, reason="an entry of the chunk has changed since it was shown")
      ops: list[Op] = []
      groups: dict[int, list[int]] = {}
      for operation in parsed.operations:
        entries = sorted((now[place] for place in operation.places), key=lambda entry: entry.id)
        ids = [entry.id for entry in entries]
        if operation.kind == "merge":
          oldest, groups[ids[0]] = entries[0], ids
          key = operation.text if self.config.key == "entry" else oldest.key
          score = _mean(self._paid, ids, oldest.score)
          data = self._data(trial, generation, ids)
          ops.append(
            Change(scope, oldest.id, key, operation.text, score, data, None, oldest.version)
          )
        if operation.kind != "keep":
          gone = entries[operation.kind == "merge" :]
          ops += [Remove(scope, entry.id, entry.version) for entry in gone]
      if not ops:
        return Applied(reason=parsed.reason)
      self.memory.commit(ops, why=f"merge {generation}")
      with self._lock:
        for oldest, ids in groups.items():
          times, last = zip(*(self._shown.get(id, (0, None)) for id in ids), strict=True)
          steps = [step for step in last if step is not None]
          self._shown[oldest] = (sum(times), max(steps, default=None))
          self._paid[oldest] = _sum(self._paid, ids)
      self._forget([op.id for op in ops if isinstance(op, Remove)])
      return Applied(tuple(groups))

  def _unchanged(self, scope: str, shown: Shown) -> Entry | None:
    """The live entry, if it still says what was shown; its score may have moved."""
    now = self.memory.get(scope, [shown.id])
    then = self._at(scope, shown.id, shown.version)
    same = now and then and (now[0].text, now[0].data) == (then.text, then.data)
    return now[0] if same else None

  def _at(self, scope: str, id: int, version: int) -> Entry | None:
    """An entry as it stood at a version."""
    now = self.memory.get(scope, [id])
    if now and now[0].version <= version:  # not written since
      return now[0]
    return next(iter(self.memory.store.get(scope, [id], at=version)), None)

  def _data(self, trial: str, generation: int, parents: Sequence[int]) -> dict[str, Any]:
    return {
      "trial": trial,
      "generation": generation,
      "parents": list(parents),
      "key": self.config.key,
    }

  def _start(self, scope: str) -> float:
    """The score of an entry that nobody has read: the scope's average, so that it is not evicted first."""
    if self.config.evict != "utility":
      return 0.0
    scores = [entry.score for entry in self.memory.entries(scope)] or [0.0]
    return max(min(scores), float(np.mean(scores)))

  def _forget(self, ids: Iterable[int]) -> None:
    with self._lock:
      for id in ids:
        self._shown.pop(id, None)
        self._paid.pop(id, None)

  # --- what trains --------------------------------------------------------------------------------

  def credit(self, ended: Sequence[Ended]) -> None:
    """Pays the generations for the trials they guided, and records who read what, as one version.

    An entry counts once a trial, however often it was read there. A pair belongs to the generation whose
    text was read, even if the entry has been rewritten or removed since.
    """
    with self._writing:
      wages: list[tuple[int, float]] = []  # generation, reward
      paid: dict[int, tuple[float, int]] = {}
      scopes: dict[int, str] = {}
      for end in ended:
        reward = end.pay if end.pay is not None else 1.0 if end.outcome.success else -1.0
        pairs = dict.fromkeys((read.id, read.version) for read in end.reads)
        entries = [self._at(end.scope, id, version) for id, version in pairs]
        written = dict.fromkeys((e.id, e.data["generation"]) for e in entries if e is not None)
        wages += [(generation, reward) for _, generation in written]
        wages += [(generation, reward) for generation in dict.fromkeys(end.asked)]
        for id in dict.fromkeys(id for id, _ in written):
          total, number = paid.get(id) or self._paid.get(id, (0.0, 0))
          paid[id], scopes[id] = (total + reward, number + 1), end.scope
      live = [entry for id, scope in scopes.items() for entry in self.memory.get(scope, [id])]
      self.memory.commit(
        [Change(e.tenant, e.id, score=_mean(paid, [e.id], e.score)) for e in live],
        reads=[read for end in ended for read in end.reads],
        outcomes=[end.outcome for end in ended],
        why="outcomes",
      )
      with self._lock:
        self._paid |= {entry.id: paid[entry.id] for entry in live}
        for generation, reward in wages:
          self._samples.pay(generation, reward)

  def oldest(self) -> int | None:
    """The oldest version of the extractor that wrote a sample which waits."""
    with self._lock:
      return self._samples.oldest()

  def ready(self) -> bool:
    """Whether a whole batch waits that does not cool down, and none is in training."""
    with self._lock:
      return self._samples.ready()

  def take(self) -> samples.Batch | None:
    """A batch for one update of the extractor (`samples.Samples.take`), or None where not `ready`."""
    with self._lock:
      return self._samples.take()

  def trained(self, batch: samples.Batch) -> None:
    """The update with this batch is done. Raises StoreError where it is not the one in training."""
    with self._lock:
      self._samples.trained(batch)

  def give_back(self, batch: samples.Batch) -> None:
    """The update did not happen: its samples wait again. Raises as `trained`."""
    with self._lock:
      self._samples.give_back(batch)

  def prune(self, before: int) -> int:
    """Forgets generations that wrote no live entry, wait for nothing and were last used before a step.

    `before`: the step of the oldest trial that still plays. Returns how many.
    """
    with self._writing:
      scopes = self.memory.store.tenants()
      live = {e.id: e.data["generation"] for scope in scopes for e in self.memory.entries(scope)}
      with self._lock:
        gone = (self._shown.keys() | self._paid.keys()) - live.keys()
        for table in (self._shown, self._paid):
          for id in gone:
            table.pop(id, None)
        return self._samples.prune(live.values(), before)

  def stats(self) -> dict[str, int]:
    """Sizes for metrics (`samples.Samples.stats`), and the number of entries."""
    entries = sum(map(self.memory.store.count, self.memory.store.tenants()))
    with self._lock:
      return {"entries": entries, **self._samples.stats()}

  # --- checkpoints --------------------------------------------------------------------------------

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, JSON-ready rest) for a checkpoint. A batch in training is saved as one that waits."""
    with self._writing, self._lock:
      arrays, rest = self._samples.state()
      return arrays, {
        "version": self.memory.version,
        "queries": self._queries,
        "shown": [[id, *value] for id, value in self._shown.items()],
        "paid": [[id, *value] for id, value in self._paid.items()],
        "samples": rest,
      }

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    """Back to what `state` gave: what was written since is forgotten, and so is a batch in training."""
    with self._writing, self._lock:
      self.memory.discard_after(rest["version"])
      self._samples.load(arrays, rest["samples"])
      self._queries = rest["queries"]
      self._shown = {id: (times, last) for id, times, last in rest["shown"]}
      self._paid = {id: (total, pairs) for id, total, pairs in rest["paid"]}

  def reset(self) -> None:
    """Back to nothing."""
    with self._writing, self._lock:
      self.memory.discard_after(0)
      self._samples.reset()
      self._shown, self._paid, self._queries = {}, {}, 0


def _sum(paid: dict[int, tuple[float, int]], ids: Iterable[int]) -> tuple[float, int]:
  """What several entries earned, and in how many pairs."""
  totals, pairs = zip(*(paid.get(id, (0.0, 0)) for id in ids), strict=True)
  return sum(totals), sum(pairs)


def _mean(paid: dict[int, tuple[float, int]], ids: Iterable[int], untried: float) -> float:
  total, pairs = _sum(paid, ids)
  return total / pairs if pairs else untried
