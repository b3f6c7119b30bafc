"""What a memory is made of: entries, the operations that change them, and who read what.

Words, one meaning each:
  entry    one memory of one tenant; its id is never given to another entry.
  tenant   a hard partition: an operation names its tenant, and meets no other tenant's entries.
  version  number of a commit, 1, 2, 3, ...; 0 is the empty memory. State = live entries + manifest.
  vector   the embedding of `key` as little-endian float32 bytes; b"" where nothing embeds.
"""

from __future__ import annotations

import array
import collections.abc
import dataclasses
import json
import math
import sys
from typing import Any, Literal

SCHEMA = 2  # layout of the database; `schema.MIGRATIONS` brings older ones up


class StoreError(ValueError):
  """A memory that cannot do what was asked; the message is one sentence with the way out."""


class Locked(StoreError):
  """Somebody else writes (or reads, where nobody may) this memory."""


class Conflict(StoreError):
  """An entry has changed since the caller read it; nothing was written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
  """What made the vectors. Same dimension but another embedder is another manifest."""

  embedder: str = "none"
  dimension: int = 0
  normalised: bool = False
  schema: int = SCHEMA


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
  """One memory as it was written by commit `version`; `data["trial"]` names the trial that wrote it."""

  id: int
  tenant: str
  version: int
  key: str  # what is embedded
  text: str  # what is shown
  score: float = 0.0
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  vector: bytes = b""


@dataclasses.dataclass(frozen=True, slots=True)
class Add:
  """Adds an entry. `id` is for imports only: it must be above every id ever given."""

  tenant: str
  key: str
  text: str
  score: float = 0.0
  data: dict[str, Any] = dataclasses.field(default_factory=dict)
  vector: Any = b""  # bytes, or any contiguous buffer of float32 such as a numpy array
  id: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
  """Changes the fields that are given. A new key needs its new vector.

  `expect` is the version of the entry that the caller has read; another one raises Conflict.
  """

  tenant: str
  id: int
  key: str | None = None
  text: str | None = None
  score: float | None = None
  data: dict[str, Any] | None = None
  vector: Any = None
  expect: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Remove:
  """Removes an entry from the state; its history stays. `expect` as in Change."""

  tenant: str
  id: int
  expect: int | None = None


Op = Add | Change | Remove


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
  """Trial `trial` was shown entry `id` at its step `step`, from the memory at version `version`."""

  trial: str
  step: int
  id: int
  version: int


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
  """How a trial ended; recorded twice, the later one counts."""

  trial: str
  reward: float
  success: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Where:
  """Which entries of a tenant: every condition that is given must hold.

  Scores are inclusive. Age is counted in versions since the entry was last written.
  `data` names fields and the values they must have.
  """

  tenant: str
  min_score: float | None = None
  max_score: float | None = None
  min_age: int | None = None
  max_age: int | None = None
  data: dict[str, Any] = dataclasses.field(default_factory=dict)


Merge = collections.abc.Callable[[list[Entry]], list[Op]]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
  """At most `max_entries` live entries a tenant, held by every commit.

  A commit that would exceed it first asks `merge`, then evicts: the oldest ids, or the lowest
  scores (ties: the oldest). `merge` gets the tenant's entries and the ones about to be added
  (their ids are negative) and returns operations, such as Change one and Remove its twin. It runs
  outside the write lock; where an entry has changed meanwhile, its operations are dropped.
  A rollback brings back what was, also over a cap that was lowered since.
  """

  max_entries: int
  evict: Literal["fifo", "lowest_score"] = "fifo"
  merge: Merge | None = None

  def __post_init__(self):
    if self.max_entries < 1:
      raise StoreError(f"max_entries is {self.max_entries}; a memory needs room for at least 1.")
    if self.evict not in ("fifo", "lowest_score"):
      raise StoreError(f'evict is {self.evict!r}; choose "fifo" or "lowest_score".')


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
  """What a commit did. `ids` has one id an Add, in order; an evicted one is in `evicted` as well."""

  version: int
  ids: tuple[int, ...] = ()
  evicted: tuple[int, ...] = ()
  merged: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Diff:
  """From one version to another; `changed` holds pairs (before, after) in the order of ids."""

  added: list[Entry]
  removed: list[Entry]
  changed: list[tuple[Entry, Entry]]


@dataclasses.dataclass(frozen=True, slots=True)
class Lineage:
  """Who wrote an entry, who was shown it, and how those trials ended.

  `mean_reward` is over the distinct reading trials whose outcome is known; None where none is.
  """

  id: int
  writer: str | None
  reads: list[tuple[Read, Outcome | None]]
  mean_reward: float | None


def blob(vector: Any, dimension: int) -> bytes:
  """Little-endian float32 bytes of a vector; raises where length, type or a value is wrong."""
  if not isinstance(vector, bytes):
    view = memoryview(vector)
    if view.format not in ("f", "<f") or not view.c_contiguous:
      raise StoreError(f"a vector has format {view.format!r}; give contiguous float32.")
    vector = view.tobytes()
  if len(vector) != 4 * dimension:
    raise StoreError(
      f"a vector has {len(vector) / 4:g} numbers and this memory keeps {dimension}; "
      "embed with the memory's own embedder."
    )
  numbers = array.array("f", vector)
  if sys.byteorder == "big":
    numbers.byteswap()
  if not math.isfinite(sum(numbers)):  # a NaN or an infinity survives any sum
    raise StoreError("a vector holds NaN or infinity; look at what embedded it.")
  return vector


def canonical(data: Any) -> str:
  """The one JSON text of a value: keys sorted, no spaces, no NaN; StoreError if it has none."""
  try:
    return json.dumps(
      data, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
  except (TypeError, ValueError) as error:
    raise StoreError(f"data must be plain JSON: {error}.") from None
