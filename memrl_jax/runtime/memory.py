"""A memory that is deployed: `suggest` for a task, `feedback` when its end is known, from any thread.

    with runtime.open("folder") as memory:
      found = memory.suggest("put a clean apple in the fridge")
      ...                                  # found.prompt goes in front of the task
      memory.feedback(found.id, 1.0, "what was done")

A feedback that was acknowledged is kept: its outcome and Q are on the disk when the call returns. Given
again, after a lost answer or a crash, it changes nothing. Feedbacks that arrive together become one version.
MemRL (2601.03192); `memory.episodic` has the method, this file what a deployment adds.
"""

from __future__ import annotations

import collections
import math
import os
import pathlib
import re
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from memrl_jax.memory import embed, episodic_write, transfer
from memrl_jax.memory.episodic import Episodic, Feedback, Suggestion
from memrl_jax.memory.episodic_prompt import plain
from memrl_jax.memory.episodic_write import Write
from memrl_jax.memory.records import Entry
from memrl_jax.runtime import asked, views
from memrl_jax.runtime.asked import Outcome, Row
from memrl_jax.runtime.config import RuntimeConfig
from memrl_jax.runtime.imports import read_lines
from memrl_jax.runtime.writer import Writer, episode

TENANT = "default"
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


class Refused(ValueError):
  """What was asked cannot be done; the message is one sentence."""


class Unknown(Refused):
  """There is no such suggestion, memory or version here."""


class Suggestions(NamedTuple):
  """What a task is told. `id` names it in `feedback` ("": nothing will be learned from it).

  prompt: the text for the model, "" where nothing is similar enough. memories: what is in it, the best
  first.
  """

  id: str
  prompt: str
  memories: tuple[Suggestion, ...]


class Told(NamedTuple):
  """What a feedback did. repeated: it was given before, and what was said then counts.

  q: utilities after it, of the memories that were shown and are still there. kept: the memory that the
  episode became; None where there is none (yet), and `reason` says why.
  """

  id: str
  version: int
  repeated: bool
  q: dict[int, float]
  kept: int | None
  reason: str = ""


class Memory:
  """One memory in a folder. Make it with `runtime.open`; it is closed with `close` or `with`."""

  def __init__(
    self,
    folder: str | os.PathLike,
    config: RuntimeConfig,
    embedder: embed.Embedder,
    write: Write | None,
    tenant: str,
  ):
    if config.needs_write and write is None:
      raise ValueError(
        f"build {config.episodic.build!r} with update {config.episodic.update!r} needs a language model; "
        'give write, or choose build="trajectory" and update="vanilla" (config.episodic)'
      )
    self.config, self.tenant = config, tenant
    self.folder = pathlib.Path(folder).expanduser().absolute()
    self.episodic = Episodic.open(self.folder, embedder, config.episodic)
    self._lock, self._writing = threading.Lock(), threading.Lock()
    self._queue: collections.deque[_Job] = collections.deque()
    try:
      self._asked = asked.Asked(self.folder, config.suggestions)
      self._writer = Writer(self.episodic, tenant, self._asked, write, config)
      self._settle(self._asked.waiting(asked.TOLD))  # of a process that died before it was done
      self._writer.start()
    except BaseException:
      self.episodic.close()
      raise

  def close(self) -> None:
    """What is under way ends first; what waits for a language model waits on the disk."""
    self._writer.stop()
    with self._writing:
      self._asked.close()
      self.episodic.close()

  def __enter__(self) -> Memory:
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  # --- the two calls --------------------------------------------------------------------------------

  def suggest(self, task: str, *, frozen: bool = False) -> Suggestions:
    """What helped with similar tasks. frozen: for evaluation, no exploration and nothing is written."""
    text = self._text("task", task, self.config.task)
    if not text:
      raise Refused("the task is empty, so nothing can be found by it; give a description of it")
    found = self.episodic.suggest(self.tenant, text, frozen=frozen)
    prompt, shown = self._prompt(found)
    if frozen:
      return Suggestions("", prompt, shown)
    id = secrets.token_hex(16)  # never begins with "-", which a command line takes for an option
    self._asked.add(id, text, [one.read for one in shown])
    return Suggestions(id, prompt, shown)

  def again(self, id: str) -> Suggestions:
    """An earlier suggestion, word for word, for the next turn of the same episode."""
    row = self._row(id)
    found = []
    for place, (number, version) in enumerate(row.reads):
      for entry in self.episodic.memory.store.get(self.tenant, [number], at=version):
        found.append(_shown(entry, version, -float(place)))
    prompt, shown = self._prompt(found)
    return Suggestions(id, prompt, shown)

  def feedback(
    self,
    id: str,
    reward: float,
    trajectory: str | None = None,
    *,
    success: bool | None = None,
  ) -> Told:
    """How a suggestion's task ended: moves Q of what was shown, and remembers the episode.

    success: by default whether the reward is above 0. trajectory: what was done; without one (and without
    `saw`) Q moves and nothing is remembered.
    """
    number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not number or not math.isfinite(reward) or abs(reward) > self.config.reward:
      most = self.config.reward
      raise Refused(f"the reward {reward!r} is no number in [{-most:g}, {most:g}]; scale it")
    if trajectory is not None:
      trajectory = self._text("trajectory", trajectory, self.config.trajectory)
    good = reward > 0 if success is None else bool(success)
    job = _Job(Outcome(self._known(id), float(reward), good, trajectory))
    with self._lock:
      self._queue.append(job)
    with self._writing:  # whoever comes first writes for all that wait behind
      with self._lock:
        batch, self._queue = list(self._queue), collections.deque()
      if batch:
        self._write(batch)
    if job.error is not None:
      raise job.error
    return job.told

  def saw(self, id: str, trajectory: str) -> None:
    """What happened after a suggestion, kept in case its feedback brings no trajectory."""
    most = self.config.episodic.trajectory_chars
    text = plain(trajectory)
    if len(text) > most:
      text = f"{text[: most - most // 2]}\n[...]\n{text[len(text) - most // 2 :]}"
    self._asked.saw(self._known(id), text)

  def _write(self, batch: list[_Job]) -> None:
    """Outcomes onto the disk, then into the memory; an error is that of all whose end it left open."""
    try:
      fresh: dict[str, _Job] = {}
      rows: dict[str, Row] = {}
      for job in batch:
        row = rows.get(job.outcome.id) or self._asked.get(job.outcome.id)
        if row is None:
          job.error = _unknown(job.outcome.id)
        else:
          job.repeated = row.state != asked.OPEN or row.id in fresh
          rows[row.id] = row
          fresh.setdefault(row.id, job)
      self._asked.tell([job.outcome for job in fresh.values() if not job.repeated])
      unsettled = [row for row in map(self._asked.get, rows) if row and row.state == asked.TOLD]
      kept = self._settle(unsettled)
      for job in batch:
        if job.error is None:
          job.told = self._told(rows[job.outcome.id], job.repeated, kept.get(job.outcome.id))
    except BaseException as error:
      for job in batch:
        if job.told is None and job.error is None:
          job.error = error

  def _settle(self, rows: list[Row]) -> dict[str, tuple[int | None, str]]:
    """Moves Q by these outcomes and remembers the episodes; for each its memory, or why there is none."""
    if not rows:
      return {}
    items = [Feedback(row.id, row.success, row.reads, row.reward) for row in rows]
    self.episodic.feedback(self.tenant, items)
    found = {row.id: (None, "it came without a trajectory") for row in rows if not row.trajectory}
    episodes = {row.id: episode(row) for row in rows if row.id not in found}
    later = [
      id
      for id, e in episodes.items()
      if episodic_write.request(self.config.episodic, e) is not None
    ]
    now = [e for id, e in episodes.items() if id not in later]
    for kept in self.episodic.remember(self.tenant, now) if now else []:
      found[kept.episode] = kept.id, kept.reason
    self._asked.settled(row.id for row in rows if row.id not in later)
    if later:
      self._asked.paid(later)
      found |= dict.fromkeys(later, (None, "a language model sums it up first"))
      self._writer.wake()
    return found

  def _told(self, row: Row, repeated: bool, kept: tuple[int | None, str] | None) -> Told:
    entries = self.episodic.memory.get(self.tenant, dict.fromkeys(id for id, _ in row.reads))
    id, reason = kept or (None, episodic_write.BEFORE)
    q = {entry.id: entry.score for entry in entries}
    return Told(row.id, self.episodic.memory.version, repeated, q, id, reason)

  # --- looking --------------------------------------------------------------------------------------

  def memories(
    self, *, query: str = "", text: str = "", limit: int = 50, offset: int = 0
  ) -> dict[str, Any]:
    """The memories by Q; those nearest to a query with their similarity; those that contain a text."""
    query, text = plain(query), plain(text).casefold()
    if query:
      (hits,) = self.episodic.memory.search(self.tenant, [query], limit + offset)
      rows = [views.memory(hit.entry) | {"similarity": hit.similarity} for hit in hits[offset:]]
      return {"total": len(self.episodic.memory.entries(self.tenant)), "memories": rows}
    entries = self.episodic.memory.entries(self.tenant)
    if text:
      entries = [e for e in entries if text in e.text.casefold() or text in e.key.casefold()]
    entries.sort(key=lambda entry: (-entry.score, entry.id))
    rows = [views.memory(entry) for entry in entries[offset : offset + limit]]
    return {"total": len(entries), "memories": rows}

  def show(self, id: int) -> dict[str, Any]:
    """One memory, living or gone: its text, Q over time, who wrote it, what came of it."""
    store = self.episodic.memory.store
    states = store.history(id) if 0 < id < 2**63 else []
    if not states or states[0][0].tenant != self.tenant:
      raise Unknown(f"there is no memory {id} here")
    entries = self.episodic.memory.entries(self.tenant)
    children = [entry.id for entry in entries if id in entry.data["parents"]]
    return views.past(states, store.lineage(id), children)

  def versions(self, *, limit: int = 50, offset: int = 0) -> dict[str, Any]:
    """What happened, the newest first."""
    rows = self.episodic.memory.store.versions()
    return {"version": rows[-1]["version"], "versions": rows[::-1][offset : offset + limit]}

  def diff(self, a: int, b: int | None = None) -> dict[str, Any]:
    """What changed from version a to b (default: to now)."""
    b = self.episodic.memory.version if b is None else b
    self._check_version(a, b)
    return views.diff(self.episodic.memory.store.diff(a, b, self.tenant), a, b)

  def stats(self) -> dict[str, Any]:
    """Sizes, Q, what happened since the start, suggestions by their state, and the values in use."""
    counts = self.episodic.stats(self.tenant)
    return {
      "version": self.episodic.memory.version,
      **{name: round(value, 6) for name, value in counts.items()},
      "suggestions": self._asked.counts(),
      "bytes": sum(file.stat().st_size for file in self.folder.glob("*.db*")),
      "config": self.episodic.effective(),
    }

  # --- looking after it -----------------------------------------------------------------------------

  def rollback(self, version: int) -> dict[str, Any]:
    """A new version that equals an old one. Feedback given since stays a fact and is not given again."""
    self._check_version(version)
    done = self.episodic.memory.rollback(version, self.tenant)
    count = len(self.episodic.memory.entries(self.tenant))
    return {"version": done.version, "equals": version, "memories": count}

  def snapshot(self, folder: str | os.PathLike) -> dict[str, Any]:
    """A copy with the whole history in a new folder, whole or not there (`memory.transfer`)."""
    return {"version": self.episodic.memory.snapshot(folder)}

  def export(self, at: int | None = None) -> Iterator[str]:
    """The memories as JSON lines; equal states give equal lines."""
    if at is not None:
      self._check_version(at)
    return transfer.export_lines(self.episodic.memory.store, self.tenant, at)

  def import_(self, lines: Iterable[str]) -> dict[str, Any]:
    """Adds exported memories as one version, embedded anew. One with a key and text that are here is not added.

    They keep Q and visits. In a memory that never had any they keep their ids as well; elsewhere they get
    new ones, and who was written from whom is lost.
    """
    store = self.episodic.memory.store
    with self._writing:
      ops = read_lines(lines, self.tenant, self.config.episodic, keep_ids=store.next_id() == 1)
      before = len(self.episodic.memory.entries(self.tenant))
      done = self.episodic.memory.commit(ops, once=True, why="import")
    now = len(self.episodic.memory.entries(self.tenant))
    return {"version": done.version, "given": len(ops), "memories_before": before, "memories": now}

  # --- inside ---------------------------------------------------------------------------------------

  def _prompt(self, found: list[Suggestion]) -> tuple[str, tuple[Suggestion, ...]]:
    """The text, and of `found` what is in it: budgets may leave memories out, which then earn nothing."""
    text, shown = "\n\n".join(self.episodic.prompt(found)), list(found)
    if _number(text) < len(found):
      shown = []
      for one in sorted(found, key=lambda one: -one.score):
        more = [*shown, one]
        if _number("\n\n".join(self.episodic.prompt(more))) == len(more):
          shown = more
    return text, tuple(one for one in found if one in shown)

  def _text(self, name: str, text: str, most: int) -> str:
    if not isinstance(text, str) or len(text) > most:
      size = len(text) if isinstance(text, str) else type(text).__name__
      raise Refused(f"the {name} is {size}; give a text of at most {most} characters")
    return plain(text)

  def _known(self, id: str) -> str:
    if not isinstance(id, str) or not _ID.fullmatch(id):
      raise Unknown("that is no suggestion's id; send the one that `suggest` or the proxy gave")
    return id

  def _row(self, id: str) -> Row:
    row = self._asked.get(self._known(id))
    if row is None:
      raise _unknown(id)
    return row

  def _check_version(self, *versions: int) -> None:
    now = self.episodic.memory.version
    for version in versions:
      if not 0 <= version <= now:
        raise Unknown(f"there is no version {version}; this memory has 0 to {now}")


class _Job:
  """A feedback on its way: filled in by whoever writes."""

  def __init__(self, outcome: Outcome):
    self.outcome, self.repeated = outcome, False
    self.told: Told | None = None
    self.error: BaseException | None = None


def _shown(entry: Entry, version: int, score: float) -> Suggestion:
  """A memory as an earlier prompt showed it; similarity and z-scores are not kept."""
  data = entry.data
  return Suggestion(
    entry.id,
    version,
    entry.key,
    entry.text,
    data["success"],
    math.nan,
    entry.score,
    data["visits"],
    math.nan,
    math.nan,
    score,
    data["learned"],
    tuple(data.get("images", ())),
  )


def _number(text: str) -> int:
  """Memories in a prompt; what they say cannot look like the beginning of one (`plain`)."""
  return text.count('<memory number="')


def _unknown(id: str) -> Unknown:
  return Unknown(
    f"there is no suggestion {id} here; it is another memory's, or was forgotten long ago"
  )


def open_memory(
  folder: str | os.PathLike,
  config: RuntimeConfig | None = None,
  *,
  embedder: embed.Embedder | None = None,
  write: Write | None = None,
  tenant: str = TENANT,
) -> Memory:
  """The memory in a folder, made if there is none. One process at a time may have it open.

  embedder: by default `embed.Hash`, which needs no download. write: asks a language model, for plans and
  reflections. tenant: of a folder that other code has filled.
  """
  return Memory(folder, config or RuntimeConfig(), embedder or embed.Hash(), write, tenant)
