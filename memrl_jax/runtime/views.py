"""A memory as plain JSON values: what the service answers, the command line prints and the page draws."""

from __future__ import annotations

from typing import Any

from memrl_jax.memory.episodic import Suggestion
from memrl_jax.memory.records import Diff, Entry, Lineage

_SHORT = 400  # characters of a text in a list
STATES = 2000  # of one memory's past, the newest
ROWS = 500  # of a diff, in each of its parts; of the reads of a memory


def memory(entry: Entry, *, whole: bool = False) -> dict[str, Any]:
  data = entry.data
  found = {
    "id": entry.id,
    "version": entry.version,
    "task": entry.key,
    "text": entry.text if whole else entry.text[:_SHORT],
    "cut": not whole and len(entry.text) > _SHORT,
    "q": entry.score,
    "success": data["success"],
    "visits": data["visits"],
    "wins": data["wins"],
    "parents": data["parents"],
  }
  return found


def suggestion(one: Suggestion) -> dict[str, Any]:
  return {
    "id": one.id,
    "version": one.version,
    "task": one.key,
    "text": one.text,
    "success": one.success,
    "similarity": one.similarity,
    "q": one.q,
    "visits": one.visits,
    "score": one.score,
  }


def past(
  states: list[tuple[Entry, int | None]], lineage: Lineage, children: list[int]
) -> dict[str, Any]:
  """Everything about one memory; `removed` is the version that took it away."""
  last, removed = states[-1]
  outcomes = [
    {
      "trial": read.trial,
      "version": read.version,
      "reward": outcome.reward if outcome else None,
      "success": outcome.success if outcome else None,
    }
    for read, outcome in lineage.reads[-ROWS:]
  ]
  return memory(last, whole=True) | {
    "removed": removed,
    "written_by": lineage.writer,
    "children": children,
    "mean_reward": lineage.mean_reward,
    "reads": len(lineage.reads),
    "last_reads": outcomes,
    "states": len(states),
    "q_over_time": [
      {"version": e.version, "until": died, "q": e.score, "visits": e.data["visits"]}
      for e, died in states[-STATES:]
    ],
  }


def diff(found: Diff, a: int, b: int) -> dict[str, Any]:
  """From version a to b; `more` counts what is left out of each part."""
  parts = {"added": found.added, "removed": found.removed, "changed": found.changed}
  changed = [
    {
      "id": old.id,
      "task": new.key,
      "q": [old.score, new.score],
      "visits": [old.data["visits"], new.data["visits"]],
      "text": None if old.text == new.text else [old.text[:_SHORT], new.text[:_SHORT]],
    }
    for old, new in found.changed[:ROWS]
  ]
  return {
    "from": a,
    "to": b,
    "added": [memory(entry) for entry in found.added[:ROWS]],
    "removed": [memory(entry) for entry in found.removed[:ROWS]],
    "changed": changed,
    "more": {name: max(0, len(part) - ROWS) for name, part in parts.items()},
  }
