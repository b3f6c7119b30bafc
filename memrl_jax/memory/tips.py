"""The tip memory of EMPO2: one sentence about each trial, filed under every step of it.

What is filed and found (2602.23008, section 4.1, appendix D.2; options where paper and release differ):

  entry   key: the situation of a step; text: the tip, the action taken there, the trial's return
  read    entries of the scope with cosine(query, key) > threshold, best by `rank`, at most `top`

A scope is a hard partition, by default one for each variation of a task. Equal texts are kept once;
beyond `capacity` entries of a scope the oldest goes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from memrl_jax.memory import bank
from memrl_jax.memory.records import Add, Outcome, Read
from memrl_jax.types import Memo, Recall, Trial

RANKS = ("score", "similarity", "score_then_similarity")
SCOPES = ("variation", "task", "all")
KEYS = ("latest", "full_chat")
CONTENTS = ("tip_action_score", "tip")

_TAGS = re.compile(r"</?\s*(?:tips?|action|remark|think)\s*>|<\|[^|>]{0,40}\|>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\ufeff]+")


@dataclasses.dataclass(frozen=True)
class TipConfig:
  """What a tip is filed under, and how tips are found.

  rank: "score" takes the best-paid, the newest of equals first (a published reading that never shows
    the lessons of failures once there are `top` good tips); or by "similarity", or both in that order.
  key: "latest" is the newest observation, the last action and the goal; "full_chat" the whole prompt,
    which a sentence encoder cuts.
  chars: what is kept of a tip.
  """

  top: int = 10
  threshold: float = 0.5
  rank: str = "score"
  scope: str = "variation"
  key: str = "latest"
  content: str = "tip_action_score"
  capacity: int = 1000
  chars: int = 600

  def __post_init__(self):
    for name, allowed in (("rank", RANKS), ("scope", SCOPES), ("key", KEYS), ("content", CONTENTS)):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.tips.{name})"
        )
    if self.top < 1 or self.capacity < 1 or self.chars < 1:
      raise ValueError("top, capacity and chars must be at least 1 (config.tips)")
    if not -1 <= self.threshold < 1:
      raise ValueError(
        f"a cosine is never above 1, so threshold {self.threshold} finds nothing; choose it in [-1, 1) "
        "(config.tips.threshold)"
      )


def clean(text: str, chars: int) -> str:
  """A tip that can do no harm in a prompt: one line, none of our tags, at most `chars` characters."""
  text = _CONTROL.sub(" ", text)
  while (plain := _TAGS.sub(" ", text)) != text:  # a tag inside a tag leaves a tag
    text = plain
  return " ".join(text.split())[:chars]


def scope(config: TipConfig, task: str) -> str:
  """The part of the memory that belongs to a task such as "find-animal/225"."""
  if config.scope == "all":
    return "all"
  return task.rpartition("/")[0] or task if config.scope == "task" else task


class Tips:
  """The memory of a run as trials see it; nothing is written while they play."""

  def __init__(self, config: TipConfig, memory: bank.Memory):
    self.config, self._memory = config, memory

  @property
  def version(self) -> int:
    return self._memory.version

  def close(self) -> None:
    """Lets go of the store."""
    self._memory.close()

  def discard_after(self, version: int) -> None:
    """Forgets what was written after `version`."""
    self._memory.discard_after(version)

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    """The best tips for each ask, no two of them equal."""
    found: list[tuple[Memo, ...]] = [()] * len(asks)
    places: dict[str, list[int]] = {}
    for place, ask in enumerate(asks):
      places.setdefault(ask.scope, []).append(place)
    for scope_name, where in places.items():
      queries = [asks[place].query for place in where]
      hits = self._memory.search(scope_name, queries, None, self.config.threshold)
      for place, near in zip(where, hits, strict=True):
        found[place] = self._best(near)
    return found

  def _best(self, hits: Sequence[bank.Hit]) -> tuple[Memo, ...]:
    order = {
      "score": lambda hit: (-hit.entry.score, -hit.id),
      "similarity": lambda hit: (-hit.similarity, -hit.id),
      "score_then_similarity": lambda hit: (-hit.entry.score, -hit.similarity, -hit.id),
    }[self.config.rank]
    best: dict[str, Memo] = {}
    for hit in sorted((h for h in hits if h.similarity > self.config.threshold), key=order):
      if len(best) == self.config.top:
        break
      memo = Memo(hit.id, hit.version, hit.entry.text, hit.entry.score, hit.similarity)
      best.setdefault(hit.entry.text, memo)
    return tuple(best.values())

  def write(self, trials: Sequence[Trial]) -> None:
    """One version for all trials: their tips, who read which tip, and how it ended."""
    done = [trial for trial in trials if trial.void is None]
    self._memory.commit(
      [item for trial in done for item in self._adds(trial)],
      reads=[
        Read(trial.name, turn.index, entry, version)
        for trial in done
        for turn in trial.turns
        for entry, version in turn.reads
      ],
      outcomes=[Outcome(trial.name, _score(trial), trial.success_by(1)) for trial in done],
      once=True,
    )

  def _adds(self, trial: Trial) -> list[Add]:
    tip = clean(trial.tip, self.config.chars)
    if not tip:
      return []
    score, place, adds = _score(trial), scope(self.config, trial.task), []
    for turn in trial.turns:
      if turn.phase == "play":
        text = (
          tip if self.config.content == "tip" else f"{tip}; {_done(turn.action)}; score {score:g}"
        )
        data = {"trial": trial.name, "step": turn.index, "action": turn.action}
        adds.append(Add(place, turn.key, text, score, data))
    return adds


def _score(trial: Trial) -> float:
  """The trial's return, rounded as the release does."""
  return round(sum(attempt.reward for attempt in trial.attempts), 1)


def _done(action: str) -> str:
  return f"action here: {action}" if action else "no valid action here"
