"""The bank of experience that Mem-pi's memory policy begins with: hints, and whether they helped.

Mem-pi (2605.21463), stage 1. An entry of the bank.Memory is one hint: key = the context x (goal and what was
seen), text = the hint m, score = how much better the agent did with it, `data` = goal, seen, and the success
rates of the agent alone and with the hint (None: not known). Written by a run itself (`methods.mempi`), or
imported from JSON lines.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from memrl_jax.memory import bank, embed
from memrl_jax.memory.records import Add
from memrl_jax.types import Memo, Recall

TENANT, USELESS = (
  "hints",
  "useless",
)  # what is given and imitated; what only tells when to be silent
_FIELDS = {"goal", "seen", "hint", "alone", "hinted", "task"}


@dataclasses.dataclass(frozen=True)
class Hint:
  """One experience. `alone`, `hinted`: R, the agent's success or score in [0, 1], without and with it."""

  goal: str
  seen: str
  hint: str
  alone: float | None = None
  hinted: float | None = None
  task: str = ""

  @property
  def helped(self) -> bool | None:
    """Whether the agent did better with it; None where nobody tried."""
    return None if self.alone is None or self.hinted is None else self.hinted > self.alone

  @property
  def key(self) -> str:
    return "\n".join(filter(None, (self.goal, self.seen)))


def read(path: str | os.PathLike) -> list[Hint]:
  """Hints of a file of JSON lines: {"goal", "seen", "hint"} and, where known, "alone", "hinted", "task".

  Raises:
    ValueError: the file is not there, or a line is not such an object; names the line.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ValueError(
      f"there is no bank of hints {path}; correct config.method.bank, or leave it empty"
    )
  hints = []
  for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
    if line.strip():
      hints.append(_parse(line, f"{path}, line {number}"))
  if not hints:
    raise ValueError(f"{path} holds no hints; leave config.method.bank empty to play for some")
  return hints


def _parse(line: str, where: str) -> Hint:
  try:
    record = json.loads(line)
    known = {name: record[name] for name in _FIELDS if name in record}
    texts = all(isinstance(known.get(name, ""), str) for name in ("goal", "seen", "hint", "task"))
    rates = all(known.get(name) is None or 0 <= known[name] <= 1 for name in ("alone", "hinted"))
    if not (texts and rates and known["hint"].strip() and known.keys() >= {"goal", "seen"}):
      raise ValueError
    return Hint(**known)
  except (ValueError, KeyError, TypeError, AttributeError):
    raise ValueError(
      f"{where} is no hint; write an object with the texts goal, seen and hint, and, where known, the success "
      "rates alone and hinted in [0, 1]"
    ) from None


class HintBank:
  """The bank of a run. `recall` answers with the hints of the most similar contexts (the baseline RAG)."""

  def __init__(self, memory: bank.Memory, *, show: int, keep: str, near: float):
    self.memory, self._show, self._keep, self._near = memory, show, keep, near

  @classmethod
  def open(
    cls,
    path: str | os.PathLike | None,
    embedder: embed.Embedder,
    *,
    show: int,
    keep: str,
    near: float = -1.0,
  ) -> HintBank:
    """The bank in a folder, made if there is none; path=None: one that goes with this object.

    show: hints for a query. keep: whether "all" hints are given and imitated, or those that "helped". near: the
    least cosine of a context with the query.
    """
    return cls(bank.Memory.open(path, embedder), show=show, keep=keep, near=near)

  def add(self, hints: Iterable[Hint], why: str = "") -> None:
    """Files hints, as one version."""
    ops = []
    for one in hints:
      gain = 0.0 if one.helped is None else one.hinted - one.alone
      data = {name: getattr(one, name) for name in ("goal", "seen", "alone", "hinted", "task")}
      ops.append(Add(TENANT if self.useful(one) else USELESS, one.key, one.hint, gain, data))
    if ops:
      self.memory.commit(ops, why=why)

  def useful(self, one: Hint) -> bool:
    """Whether a hint is one to give; one that nobody has tried is."""
    return self._keep == "all" or one.helped is not False

  def hints(self) -> list[Hint]:
    """All of them, in the order in which they were filed."""
    entries = [e for tenant in (TENANT, USELESS) for e in self.memory.entries(tenant)]
    return [Hint(hint=e.text, **e.data) for e in sorted(entries, key=lambda e: e.id)]

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    """For each query the hints of the nearest contexts, no two of them the same."""
    found = self.memory.search(TENANT, [ask.query for ask in asks], 16 * self._show) if asks else []
    return [self._different(hits) for hits in found]

  def _different(self, hits: Sequence[bank.Hit]) -> tuple[Memo, ...]:
    memos = {
      hit.entry.text: Memo(hit.id, hit.version, hit.entry.text, hit.entry.score, hit.similarity)
      for hit in reversed(hits)
      if hit.similarity >= self._near
    }
    return tuple(reversed(memos.values()))[: self._show]

  def stats(self) -> dict[str, float]:
    hints = self.hints()
    tried = [one.helped for one in hints if one.helped is not None]
    numbers = {"bank/hints": float(len(hints)), "bank/tried": float(len(tried))}
    return numbers | ({"bank/helped": float(np.mean(tried))} if tried else {})

  def state(self) -> dict[str, Any]:
    return {"version": self.memory.version}

  def load(self, rest: dict[str, Any]) -> None:
    self.memory.discard_after(rest["version"])

  def close(self) -> None:
    self.memory.close()
