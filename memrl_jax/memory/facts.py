"""Facts as memories, the way of Mem0 (2504.19413): what an episode teaches, each fact against what is known.

    request   a language model lists the facts of a finished episode                          (extraction)
    compare   for each fact, with the memories that are nearest to it, it decides:             (update)
              add it, update one of them, delete those that it contradicts, or do nothing
    draft     what was decided, as operations on an episodic memory; no utility is needed

A fact is its own key: it is found by what it says. The answers are in the grammar of `memory.replies`; one
that cannot be read changes nothing. Mem0 reads one conversation after the other, here the episodes of an
update are read at once: what was decided about a fact that another episode has changed meanwhile is
`stale` and left out, and a fact that two of them add is added once.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.memory import bank, episodic_ledger, episodic_write, records, replies
from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.episodic_prompt import plain
from memrl_jax.memory.episodic_write import Episode
from memrl_jax.memory.records import Add, Change, Entry, Op, Remove
from memrl_jax.types import Message

MOST, CHARS = 5, 500  # facts of an episode, characters of a fact [us]
DONE = ("added", "updated", "deleted", "nothing", "stale")

_EXTRACT = (
  "You keep notes for an agent. From the episode below take the facts that will still hold when such a task "
  "comes again: how this world behaves, what a tool or a place is good for, what leads to success and what "
  "does not. One short sentence a fact, which can be understood alone; claim nothing that the episode does "
  f"not show. Answer with a JSON list of at most {MOST} entries inside <answer> tags, each of the form "
  '{"op": "add", "experience": "..."}; the list is empty where nothing new can be learned.'
)
_COMPARE = (
  "You keep notes for an agent. Below are notes that are kept already, with numbers, and a new one. Decide "
  "what becomes of them and answer with a JSON list inside <answer> tags. Where the new note says something "
  'that none of the others says: {"op": "add", "experience": "..."}. Where it corrects or extends one of '
  'them, that one as it should read now: {"op": "update", "index": 1, "experience": "..."}. Where it shows '
  'that some of them are wrong: {"op": "discard", "indices": [2]}. Where all of it is known: an empty list.'
)


class Operation(NamedTuple):
  """What was decided: "add" a text, "update" a memory to it, "delete" a memory, or "nothing".

  `was` is the memory's text as whoever decided has seen it.
  """

  kind: str
  text: str = ""
  id: int = 0
  was: str = ""


class Told(NamedTuple):
  """What an episode has taught. `id` names the episode once and for all, as in `Episode`."""

  id: str
  success: bool
  reads: tuple[tuple[int, int], ...]
  operations: tuple[Operation, ...]


def request(config: EpisodicConfig, episode: Episode) -> list[Message] | None:
  """What a language model is asked about an episode; None where such episodes are not kept."""
  if not episodic_write.kept(config, episode):
    return None
  return [Message("system", _EXTRACT), Message("user", episodic_write.told(config, episode))]


def listed(reply: str) -> list[str] | None:
  """The facts of an answer to `request`; None where it cannot be read."""
  parsed = replies.parse(reply, 0, max_ops=MOST, chars=CHARS)
  facts = [plain(one.text) for one in parsed.operations]
  return None if parsed.reason or not all(facts) else facts


def compare(fact: str, known: Sequence[str]) -> list[Message]:
  """What a language model is asked about a fact and the memories that are nearest to it."""
  notes = "\n".join(f"[{number}] {text}" for number, text in enumerate(known, start=1))
  return [Message("system", _COMPARE), Message("user", f"Kept:\n{notes}\n\nNew:\n{fact}")]


def decided(reply: str, known: Sequence[tuple[int, str]]) -> list[Operation] | None:
  """The operations of an answer to `compare` about these (id, text); None where it cannot be read.

  A memory that is named twice makes the answer contradict itself.
  """
  kinds = {"add": 0, "update": 1, "discard": 1}
  parsed = replies.operations(reply, len(known), kinds, 1 + len(known), CHARS)
  made = []
  for kind, places, text in parsed.operations:
    if kind == "add":
      made.append(Operation("add", plain(text)))
    for place in places:
      made.append(
        Operation("delete" if kind == "discard" else "update", plain(text), *known[place])
      )
  named = [one.id for one in made if one.id]
  empty = any(one.kind != "delete" and not one.text for one in made)
  if parsed.reason or empty or len(set(named)) < len(named):
    return None
  return made or [Operation("nothing")]


def dump(operations: Iterable[Operation]) -> str:
  """Operations as one line of JSON, for a record."""
  return records.canonical([list(one) for one in operations])


def load(text: str) -> tuple[Operation, ...]:
  """What `dump` wrote; () of ""."""
  return tuple(Operation(*one) for one in json.loads(text or "[]"))


def draft(
  config: EpisodicConfig, memory: bank.Memory, tenant: str, told: Sequence[Told]
) -> tuple[list[Op], dict[str, int]]:
  """Operations on the memory, and how many facts were DONE what with. Nothing is written."""
  counts, ops = collections.Counter(dict.fromkeys(DONE, 0)), []
  touched: set[int] = set()
  new: list[np.ndarray] = []
  for one in told:
    for kind, text, id, was in one.operations:
      if kind == "nothing":
        counts["nothing"] += 1
      elif kind == "add":
        (vector_D,) = memory.embedder.embed([episodic_write.intent(config, text)])
        (nearest,) = memory.search_vectors(tenant, vector_D[None], 1)
        known = any(float(vector_D @ other_D) >= config.add_similarity for other_D in new)
        known |= any(hit.entry.text == text for hit in nearest)
        counts["nothing" if known else "added"] += 1
        if not known:
          new.append(vector_D)
          ops.append(_add(config, tenant, one, text, vector_D))
      else:
        (entry,) = memory.get(tenant, [id]) or [None]
        if entry is None or entry.text != was or id in touched:
          counts["stale"] += 1
          continue
        touched.add(id)
        counts[f"{kind}d"] += 1
        ops.append(
          Remove(tenant, id, entry.version)
          if kind == "delete"
          else _change(config, entry, one, text)
        )
  return ops, dict(counts)


def _add(config: EpisodicConfig, tenant: str, one: Told, text: str, vector_D: np.ndarray) -> Add:
  data = {
    "success": one.success,
    "learned": len(text),
    "visits": 0,
    "wins": 0,
    "parents": list(dict.fromkeys(id for id, _ in one.reads)),
    "trial": episodic_ledger.name(tenant, one.id),
    "last": None,
  }
  key = episodic_write.intent(config, text)
  return Add(tenant, key, text, config.first_q(one.success), data, vector_D)


def _change(config: EpisodicConfig, entry: Entry, one: Told, text: str) -> Change:
  trial = episodic_ledger.name(entry.tenant, one.id)
  data = entry.data | {"success": one.success, "learned": len(text), "trial": trial}
  key = episodic_write.intent(config, text)
  return Change(entry.tenant, entry.id, key, text, data=data, expect=entry.version)
