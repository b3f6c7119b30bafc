"""MemRL's episodic memory: which memories a query is shown, and how rewards move what they are worth.

"MemRL" (2601.03192). The language model is frozen; all learning is in this file's numbers.

  memory      one entry of the bank.Memory: key = an intent that is embedded, text = what is shown,
              score = its utility Q; `data` holds visits, wins, success, learned, parents, trial, last.
  key         memories of (nearly) the same intent are filed under one key and share its vector.
  suggest     phase A: what is similar enough; phase B: the best by similarity and Q together.
  feedback    Q of every memory that was in the prompt moves towards the reward.
  remember    a finished episode becomes a memory, or a lesson.
  revise      the facts of an episode change what is known (`facts`).

A feedback and an episode have names: given again they change nothing, also after a restart or a rollback. A
call that has returned is on the disk, as one version of the memory.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from memrl_jax.memory import (
  bank,
  embed,
  episodic_draft,
  episodic_keep,
  episodic_ledger,
  episodic_prompt,
  episodic_search,
  episodic_write,
  facts,
  records,
)
from memrl_jax.memory.episodic_config import EpisodicConfig, preset
from memrl_jax.memory.episodic_ledger import Feedback, Paid
from memrl_jax.memory.episodic_prompt import Suggestion
from memrl_jax.memory.episodic_search import Calibration, calibrate
from memrl_jax.memory.episodic_write import Episode, Kept, Write
from memrl_jax.memory.records import Conflict, Entry, Op, Outcome, Read, Remove, StoreError

__all__ = [
  "Calibration",
  "Episode",
  "Episodic",
  "EpisodicConfig",
  "Feedback",
  "Kept",
  "Paid",
  "Suggestion",
  "calibrate",
  "preset",
]

_DATA = {"visits", "wins", "success", "learned", "parents"}  # what every memory has in `data`
_COUNTS = ("queries", "empty", "feedback", "unknown", "gone", "repeated", "unwritten")


class Episodic:
  """The memory of many tenants, open in this process; threads may share it. Make one with `open`."""

  def __init__(self, config: EpisodicConfig, memory: bank.Memory):
    """Take `open`, which gives the memory its limits."""
    self.config, self.memory = config, memory
    self._writing = threading.RLock()  # one writes; never held while a language model thinks
    self._lock = threading.Lock()  # around the counters
    self._asked = (
      4 * config.k1
    )  # hits that hold a pool, as a rule; grows with the memories of a key
    self._reload()
    for tenant in memory.store.tenants():
      for entry in memory.entries(tenant):
        if not entry.data.keys() >= _DATA:
          raise StoreError(
            f"entry {entry.id} of {tenant!r} was not written by an episodic memory; open another folder."
          )

  @classmethod
  def open(
    cls,
    path: str | os.PathLike | None,
    embedder: embed.Embedder,
    config: EpisodicConfig,
    *,
    read_only: bool = False,
  ) -> Episodic:
    """The memory in a folder, made if there is none; path=None: one that goes with this object."""
    cached, limits = embed.Cached(embedder, config.cache), None
    if config.capacity is not None:
      hook = episodic_keep.under_cap(embedder.embed, config)
      limits = bank.Limits(config.capacity, "lowest_score", hook)
    memory = bank.Memory.open(path, cached, limits=limits, read_only=read_only)
    try:
      return cls(config, memory)
    except BaseException:
      memory.close()
      raise

  def close(self) -> None:
    self.memory.close()

  def __enter__(self) -> Episodic:
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def calibrate(self, tasks: Sequence[str]) -> Calibration:
    """`calibrate` with this memory's embedder; `into` puts it into a configuration to open it with."""
    return calibrate(self.memory.embedder, tasks)

  # --- reading ------------------------------------------------------------------------------------

  def suggest(
    self, tenant: str, query: str, *, frozen: bool = False, draw: Sequence[int] | None = None
  ) -> list[Suggestion]:
    """The memories for a query, best first; [] where nothing is similar enough.

    frozen: no exploration, no trace (evaluation). draw: seeds what exploration draws, beside
    config.seed; by default the memory's version and the number of the query.
    """
    return self.suggest_many(tenant, [query], frozen=frozen, draw=draw)[0]

  def suggest_many(
    self,
    tenant: str,
    queries: Sequence[str],
    *,
    frozen: bool = False,
    draw: Sequence[int] | None = None,
  ) -> list[list[Suggestion]]:
    """`suggest` for each query, with one search."""
    pools = self._pools(tenant, queries)
    with self._lock:
      first = self._counts["queries"]
      if not frozen:
        self._counts["queries"] += len(queries)
        self._counts["empty"] += sum(not pool for pool in pools)
    found = []
    for n, pool in enumerate(pools):
      rng = None
      if self.config.explore != "none" and not frozen and pool:
        seed = (pool[0].version, first + n) if draw is None else (*draw, n)
        rng = np.random.default_rng([self.config.seed, *seed])
      found.append(episodic_search.rank(self.config, pool, rng) if pool else [])
    return found

  def _pools(self, tenant: str, queries: Sequence[str]) -> list[list[bank.Hit]]:
    """Phase A: C(s) = the k1 nearest keys (or memories) with a cosine above delta."""
    config, least = self.config, episodic_search.least(self.config)
    queries = [episodic_write.intent(config, query) for query in queries]
    asked = self._asked
    found = self.memory.search(tenant, queries, asked, least)
    pools = []
    for query, hits in zip(queries, found, strict=True):
      wanted = asked
      while (pool := episodic_search.gate(config, hits, wanted)) is None:
        wanted *= 2
        (hits,) = self.memory.search(tenant, [query], wanted, least)
      self._asked = min(max(self._asked, wanted), 32 * config.k1)
      pools.append(pool)
    return pools

  def prompt(self, suggestions: Sequence[Suggestion], count=len) -> tuple[str, ...]:
    """`episodic_prompt.blocks` with this memory's budgets, which `count` counts."""
    return episodic_prompt.blocks(suggestions, **self._budgets(), count=count)

  def texts(self, suggestions: Sequence[Suggestion], count=len) -> list[episodic_prompt.Part]:
    """`episodic_prompt.parts`: the same, a memory at a time."""
    return episodic_prompt.parts(suggestions, **self._budgets(), count=count)

  def _budgets(self) -> dict[str, Any]:
    names = ("memory_budget", "total_budget", "failed_trajectory")
    return {name: getattr(self.config, name) for name in names}

  # --- learning -----------------------------------------------------------------------------------

  def feedback(self, tenant: str, items: Iterable[Feedback]) -> Paid:
    """Moves Q of every memory that was shown, one feedback after the other, as one version.

    On return it is on the disk. A feedback with a known `id` is left out, so it may be sent again.
    """
    items = list(items)
    for item in items:
      _check_names(tenant, item.id)
      if item.reward is not None and not math.isfinite(item.reward):
        raise ValueError(f"feedback {item.id!r} has reward {item.reward}; give a finite number")
    asking = [item for item in items if item.next_query is not None and self.config.gamma > 0]
    pools = self._pools(tenant, [item.next_query for item in asking]) if asking else []
    nexts = {item.id: [hit.id for hit in pool] for item, pool in zip(asking, pools, strict=True)}
    with self._writing:
      while True:
        with contextlib.suppress(Conflict):
          return self._pay(tenant, items, nexts)

  def _pay(self, tenant: str, items: list[Feedback], nexts: dict[str, list[int]]) -> Paid:
    fresh = {}
    for item in items:
      if ("feedback", tenant, item.id) not in self._done:
        fresh.setdefault(item.id, item)
    ledger = episodic_ledger.Ledger(self.config, self.memory, tenant)
    reads, outcomes, unknown, gone = [], [], 0, 0
    for item in fresh.values():
      trial = episodic_ledger.name(tenant, item.id)
      reward = self.config.reward(item.success) if item.reward is None else float(item.reward)
      outcomes.append(Outcome(trial, reward, bool(item.success)))
      next_q = max((ledger.q(id) for id in nexts.get(item.id, ()) if ledger.has(id)), default=0.0)
      shown = {id for id, _ in item.reads}
      for step, (id, version) in enumerate(item.reads):
        if not self._was_there(tenant, id, version):
          unknown += 1
          continue
        reads.append(Read(trial, step, int(id), int(version)))
        if ledger.has(int(id)):
          ledger.learn(int(id), reward, bool(item.success), next_q, shown)
        else:
          gone += 1
    repeated = len(items) - len(fresh)
    version = self.memory.version
    if fresh:
      done = self.memory.commit(
        ledger.ops(), reads=reads, outcomes=outcomes, why=_why("feedback", tenant, fresh)
      )
      version = done.version
      self._done.update(("feedback", tenant, id) for id in fresh)
    with self._lock:
      self._counts.update(feedback=len(fresh), unknown=unknown, gone=gone, repeated=repeated)
    return Paid(version, ledger.moved(), unknown, gone, repeated)

  def _was_there(self, tenant: str, id: int, version: int) -> bool:
    """Whether this tenant had a memory at a version."""
    for number in (id, version):
      if isinstance(number, bool) or not isinstance(number, int | np.integer):
        return False
    if not (0 < id < 2**63 and 0 < version <= self.memory.version):
      return False
    now = self.memory.get(tenant, [id])
    if now and now[0].version <= version:  # not written since
      return True
    return bool(self.memory.store.get(tenant, [id], at=version))

  # --- writing ------------------------------------------------------------------------------------

  def remember(
    self, tenant: str, episodes: Iterable[Episode], write: Write | None = None, *, workers: int = 1
  ) -> list[Kept]:
    """Makes memories of finished episodes, as one version; one answer an episode, in their order.

    `write` asks a language model, `workers` at a time, while no lock is held. An episode that it fails
    on, or says nothing about, fails alone and is not kept; it may be given again.
    """
    if self.config.build == "facts":
      raise ValueError(
        "facts are compared with what is known before they are kept; ask as memory.facts says, and give "
        "what was decided to revise"
      )
    episodes = list(episodes)
    for episode in episodes:
      _check_names(tenant, episode.id)
    intents = [episodic_write.intent(self.config, episode.task) for episode in episodes]
    known = {episode.id for episode in episodes if ("remember", tenant, episode.id) in self._done}
    notes, failed = episodic_write.notes(self.config, episodes, known, write, workers)
    with self._lock:
      self._counts["unwritten"] += failed
    self.memory.embedder.embed(intents)  # while nothing is locked
    with self._writing:
      while True:
        with contextlib.suppress(Conflict):
          return self._keep(tenant, episodes, notes)

  def _keep(self, tenant: str, episodes: list[Episode], notes: list[str | Kept]) -> list[Kept]:
    draft = episodic_draft.Draft(self.config, self.memory, tenant)
    kept: list[Any] = list(notes)
    for n, (episode, note) in enumerate(zip(episodes, notes, strict=True)):
      if isinstance(note, Kept):
        continue
      if ("remember", tenant, episode.id) in self._done:  # by another thread, meanwhile
        kept[n] = Kept(episode.id, None, episodic_write.BEFORE)
        continue
      followed = None if episode.success else draft.followed(episode)
      if self.config.adjust == "in_place" and followed is not None:
        draft.amend(followed, episode, note)
        kept[n] = Kept(episode.id, followed)
      else:
        kept[n] = draft.add(episode, note)
    new = [episodes[n].id for n, one in enumerate(kept) if one is not notes[n] and _settled(one)]
    if not new:
      return kept
    done = self.memory.commit(draft.ops(), once=True, why=_why("remember", tenant, new))
    self._done.update(("remember", tenant, id) for id in new)
    lost = {*done.evicted, *done.merged}
    for n, one in enumerate(kept):
      if isinstance(one, int):
        id = done.ids[one]
        full = "merged or evicted at once, the memory is full"
        kept[n] = Kept(episodes[n].id, *((None, full) if id in lost else (id,)))
    return kept

  def revise(self, tenant: str, told: Iterable[facts.Told]) -> dict[str, int]:
    """Does what was decided about the facts of finished episodes, as one version (`memory.facts`).

    Returns how many facts were `facts.DONE` what with; an episode that was given before counts nowhere.
    """
    told = list({one.id: one for one in told}.values())
    for one in told:
      _check_names(tenant, one.id)
    self.memory.embedder.embed([op.text for one in told for op in one.operations if op.text])
    with self._writing:
      while True:
        new = [one for one in told if ("remember", tenant, one.id) not in self._done]
        ops, counts = facts.draft(self.config, self.memory, tenant, new)
        with contextlib.suppress(Conflict):
          if new:
            why = _why("remember", tenant, [one.id for one in new])
            self.memory.commit(ops, why=why)
          self._done.update(("remember", tenant, one.id) for one in new)
          return counts

  # --- looking after it ---------------------------------------------------------------------------

  def prune(self, tenant: str, keep: int, *, below: float | None = None) -> int:
    """Removes the least worth until `keep` are left, and what was tried and has a Q under `below`.

    Returns how many went.
    """
    if keep < 0:
      raise ValueError(f"keep is {keep}; it must not be negative")

    def ops(entries: list[Entry]) -> list[Op]:
      bad = {e.id for e in entries if below is not None and e.data["visits"] and e.score < below}
      rest = [entry for entry in entries if entry.id not in bad]
      embed = self.memory.embedder.embed
      return [Remove(tenant, id) for id in bad] + episodic_keep.prune(
        rest, keep, embed, self.config
      )

    return self._maintain(tenant, ops, "prune")

  def merge(self, tenant: str) -> int:
    """Makes one of near duplicates (`episodic_keep.merge`); returns how many went."""
    embedder = self.memory.embedder.embedder  # without its cache, which is for keys
    return self._maintain(
      tenant, lambda entries: episodic_keep.merge(entries, embedder.embed, self.config), "merge"
    )

  def _maintain(self, tenant: str, work, why: str) -> int:
    with self._writing:
      while True:
        entries = self.memory.entries(tenant)
        versions = {entry.id: entry.version for entry in entries}
        ops = [dataclasses.replace(op, expect=versions[op.id]) for op in work(entries)]
        with contextlib.suppress(Conflict):
          if ops:
            self.memory.commit(ops, why=why)
          return sum(isinstance(op, Remove) for op in ops)

  def effective(self) -> dict[str, Any]:
    """The values that are in use, for the manifest of a run."""
    made = self.memory.embedder
    mix = {"weight_similarity": self.config.mix[0], "weight_q": self.config.mix[1]}
    return {
      **dataclasses.asdict(self.config),
      **mix,
      "embedder": made.name,
      "dimension": made.dimension,
    }

  def stats(self, tenant: str) -> dict[str, float]:
    """Sizes, the state of Q, and what has happened since the start (or the last `load`)."""
    entries = self.memory.entries(tenant)
    visits_N = np.array([entry.data["visits"] for entry in entries])
    q_N = np.array([entry.score for entry in entries])
    with self._lock:
      counts = {name: float(n) for name, n in self._counts.items()}
    return counts | {
      "memories": float(len(entries)),
      "keys": float(len({entry.key for entry in entries})),
      "successes": float(sum(entry.data["success"] for entry in entries)),
      "visited": float(np.mean(visits_N > 0)) if len(entries) else 0.0,
      "visits": float(visits_N.sum()),
      "q_mean": float(q_N.mean()) if len(entries) else 0.0,
      "q_std": float(q_N.std()) if len(entries) else 0.0,
    }

  def used(self, tenant: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(q_N, success_N, worked_N): each time a living memory was shown, its Q then, whether that task
    succeeded, and whether the memory itself is of a success. For `episodic_metrics`."""
    rows = []
    for entry in self.memory.entries(tenant):
      past = [(state.version, state.score) for state, _ in self.memory.store.history(entry.id)]
      for read, outcome in self.memory.store.lineage(entry.id).reads:
        if outcome is not None:
          q = [score for born, score in past if born <= read.version][-1]
          rows.append((q, outcome.success, entry.data["success"]))
    q_N, success_N, worked_N = np.array(rows, np.float64).reshape(-1, 3).T
    return q_N, success_N.astype(bool), worked_N.astype(bool)

  def reads(self) -> collections.Counter[str]:
    """How often it was asked since the start, and how often it had nothing to say."""
    with self._lock:
      return collections.Counter({name: self._counts[name] for name in ("queries", "empty")})

  def add_reads(self, more: collections.Counter[str]) -> None:
    """Counts what was asked elsewhere, of a copy of this memory."""
    with self._lock:
      self._counts.update(more)

  # --- checkpoints --------------------------------------------------------------------------------

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, JSON-ready rest) for a checkpoint."""
    with self._writing, self._lock:
      return {}, {"version": self.memory.version, "counts": dict(self._counts)}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    """Back to what `state` gave: what was written and learned since is forgotten."""
    with self._writing:
      self.memory.discard_after(rest["version"])
      self._reload(rest["counts"])

  def reset(self) -> None:
    """Back to nothing."""
    self.load({}, {"version": 0, "counts": {}})

  def _reload(self, counts: dict[str, int] | None = None) -> None:
    """The names of all feedback and episodes, from the versions that they made."""
    with self._lock:
      self._counts: collections.Counter[str] = collections.Counter(
        dict.fromkeys(_COUNTS, 0) | (counts or {})
      )
      self._done: set[tuple[str, str, str]] = set()
    for record in self.memory.store.versions():
      what, _, rest = record["why"].partition(" ")
      if what in ("feedback", "remember"):
        tenant, *ids = json.loads(rest)
        self._done.update((what, tenant, id) for id in ids)


def _why(what: str, tenant: str, ids: Iterable[str]) -> str:
  return f"{what} {records.canonical([tenant, *ids])}"


def _settled(one: Any) -> bool:
  """Whether an episode will be in the memory: as a new one (its place), or as a note."""
  return isinstance(one, int) or one.id is not None


def _check_names(tenant: str, id: str) -> None:
  for what, value in (("tenant", tenant), ("id", id)):
    good = isinstance(value, str) and value and value == value.encode("utf-8", "ignore").decode()
    if not good:
      raise ValueError(f"the {what} {value!r:.60} is no name; give a text that is not empty")
