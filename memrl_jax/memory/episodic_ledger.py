"""What feedback makes of the utilities, worked out in full before any of it is written.

Q of every memory that was shown moves by step (r + gamma max Q' - Q), MemRL (2601.03192) Eq. 3 and 8; as
an option the same error reaches the memories it was written with in view (MemQ, 2605.08374).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

from memrl_jax.memory import bank, records
from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.records import Change, Entry, Op
from memrl_jax.ops import utility

_FAINT = 1e-3  # a trace below it moves nothing that could be measured


@dataclasses.dataclass(frozen=True)
class Feedback:
  """How a task ended. `id` names it once and for all in its tenant.

  reads: (id, version) of the memories in its prompt; one that stands there twice is updated twice.
  reward: by default the configuration's for `success`. next_query: the state after this one, whose best
  memory is bootstrapped from with gamma; None: the task is over.
  """

  id: str
  success: bool
  reads: tuple[tuple[int, int], ...] = ()
  reward: float | None = None
  next_query: str | None = None


class Paid(NamedTuple):
  """What feedback did: Q before and after by memory, and what could not be done.

  unknown: reads of what this tenant never had; gone: reads of memories removed since; repeated: feedback
  that was given before.
  """

  version: int
  q: dict[int, tuple[float, float]]
  unknown: int = 0
  gone: int = 0
  repeated: int = 0


def name(tenant: str, id: str) -> str:
  """A feedback or an episode in the records of trials, which all tenants share."""
  return records.canonical([tenant, id])


class Ledger:
  """Utilities of one tenant while feedback is worked through, before any of it is written."""

  def __init__(self, config: EpisodicConfig, memory: bank.Memory, tenant: str):
    self._config, self._memory, self._tenant = config, memory, tenant
    self._rows: dict[int, tuple[Entry, Entry]] = {}  # as stored, as it will be

  def has(self, id: int) -> bool:
    if id not in self._rows:
      for entry in self._memory.get(self._tenant, [id]):
        self._rows[id] = entry, entry
    return id in self._rows

  def q(self, id: int) -> float:
    return self._rows[id][1].score

  def learn(self, id: int, reward: float, success: bool, next_q: float, shown: set[int]) -> None:
    """One update of a memory, and of those it was written with in view that were not shown themselves."""
    config, data = self._config, self._rows[id][1].data
    step = self._step(id)
    delta = utility.td(self.q(id), reward, next_q, step=1.0, gamma=config.gamma)
    counts = {"visits": data["visits"] + 1, "wins": data["wins"] + success, "last": reward}
    self._move(id, step * delta, counts)
    depth, seen, front = 0, set(shown) | {id}, [id]
    while front and config.trace > 0:
      depth += 1
      share = utility.trace(depth, gamma=config.gamma, lambda_=config.trace)
      parents = dict.fromkeys(p for child in front for p in self._rows[child][1].data["parents"])
      front = [p for p in parents if p not in seen and self.has(p)] if share >= _FAINT else []
      seen.update(front)
      for parent in front:
        self._move(parent, self._step(parent) * share * delta, {})

  def _step(self, id: int) -> float:
    if self._config.step == "constant":
      return self._config.alpha
    return 1 / (1 + self._rows[id][1].data["visits"])

  def _move(self, id: int, by: float, counts: dict[str, Any]) -> None:
    stored, now = self._rows[id]
    floor = -math.inf if self._config.q_floor is None else self._config.q_floor
    now = dataclasses.replace(now, score=max(now.score + by, floor), data=now.data | counts)
    self._rows[id] = stored, now

  def ops(self) -> list[Op]:
    return [
      Change(self._tenant, id, score=now.score, data=now.data, expect=old.version)
      for id, (old, now) in self._rows.items()
      if now is not old
    ]

  def moved(self) -> dict[int, tuple[float, float]]:
    return {id: (old.score, now.score) for id, (old, now) in self._rows.items() if now is not old}
