"""What can be said about an attempt in the rooms, and scripted writers of experience.

An **entry** is one line about a theme, with one or two facts:

    goal red key(2,3) door(0,4)        where the key lies, which door fits
    goal pink goal(5,6) kick bad       where the hatch is; kicking does nothing
    goal blue start(4,4) wall(3,2)     true, and of no use: they change from task to task

Every fact stands in the log of the attempt, word for word or nearly, so that a tiny model can copy it.
A writer answers in the notation of the extractor (`extracting.brief`): what to add to a bank, what to
update, how to merge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base
from memrl_jax.envs import rooms_world as world

# Kinds of facts, in the order in which an entry states them. The first four help in later tasks.
PLACES = ("key", "door", "goal")
USEFUL = (*PLACES, "kick")
KINDS = (*USEFUL, "bad", "start", "wall", "search")
ADVICE = {"kick": " kick bad", "search": " search bad"}
MOST = 2  # facts in an entry
USES = {"key": 0.5, "maze": 0.6}  # mazes show less that helps

_FACT = re.compile(r" (key|door|goal|bad|start|wall)\((\d),(\d)\)| (kick|search) bad")


class Fact(NamedTuple):
  kind: str
  text: str


class Entry(NamedTuple):
  theme: str
  facts: tuple[Fact, ...]

  @property
  def useful(self) -> bool:
    """Whether it says anything that holds in other tasks of the theme."""
    return any(fact.kind in USEFUL for fact in self.facts)

  def write(self) -> str:
    ordered = sorted(self.facts, key=lambda fact: KINDS.index(fact.kind))
    return f"goal {self.theme}{''.join(fact.text for fact in ordered)}"


def read(text: str) -> Entry | None:
  """The entry that a line states; None when it is not exactly one."""
  head = re.match(rf"goal ({'|'.join(world.THEMES)})(?= )", text)
  if not head:
    return None
  rest, facts = text[head.end() :], []
  while found := _FACT.match(rest):
    facts.append(Fact(found[1] or found[4], found[0]))
    rest = rest[found.end() :]
  return None if rest or not 1 <= len(facts) <= MOST else Entry(head[1], tuple(facts))


def theme(attempt: base.AttemptLog) -> str:
  return attempt.initial.task.rpartition("/")[2]


def _maze(attempt: base.AttemptLog) -> bool:
  return "/maze/" in attempt.initial.task


def known(attempt: base.AttemptLog) -> list[Fact]:
  """All facts that the log of an attempt shows, each once, in the order of the log."""
  said = re.sub(r"^at", " start", attempt.initial.anchor)
  for step in attempt.steps:
    verb, note = step.action.partition("(")[0], step.result.note
    if verb == "open" and note.startswith("ok("):
      note = ("goal" if _maze(attempt) else "door") + note[2:]
    elif verb not in ("go", "open", "kick", "search") or (verb == "go" and note == "bad"):
      note = ""
    said += f" {verb} bad" if verb in ADVICE else f" {note}"
  facts = [Fact(found[1] or found[4], found[0]) for found in _FACT.finditer(said)]
  # a door or hatch that was only seen is not known to be right: drop the sights, keep what opened
  opened = [s.result.note[2:] for s in attempt.steps if s.result.note.startswith("ok(")]
  fits = {f" {kind}{cell}" for kind in ("door", "goal") for cell in opened}
  return list(dict.fromkeys(f for f in facts if f.kind not in ("door", "goal") or f.text in fits))


class Writer:
  """Writes facts of kinds that it picks at random.

  useful: probability that an answer is about what helps, where the log shows any such thing (by
    default USES, so that about a third of all entries help). lazy: that it stores nothing. update: that it
    replaces a shown entry of the theme.
  """

  def __init__(
    self,
    rng: np.random.Generator,
    useful: float | None = None,
    lazy: float = 0.05,
    update: float = 0.4,
  ):
    self._rng, self._useful, self._lazy, self._update = rng, useful, lazy, update

  def distill(self, view: base.View) -> str:
    """Adds an entry, or updates the first shown one of this theme that it can extend or correct."""
    facts, about = known(view.current), theme(view.current)
    if self._rng.random() < self._lazy:
      return "<remark>return</remark>"
    shown = [read(text) for text in view.tips]
    same = [n for n, entry in enumerate(shown) if entry and entry.theme == about]
    if same and self._rng.random() < self._update:
      old = shown[same[0]]
      stated = {fact.kind for fact in facts}
      kept = [fact for fact in old.facts if fact.kind not in stated or fact.kind not in PLACES]
      facts = list(dict.fromkeys([*kept, *facts]))
      text = Entry(about, self._pick(facts, view.current)).write()
      if text != old.write():
        return f"<remark>update {same[0] + 1}:{text}</remark>"
      return "<remark>return</remark>"
    return f"<remark>add:{Entry(about, self._pick(facts, view.current)).write()}</remark>"

  def _pick(self, facts: Sequence[Fact], attempt: base.AttemptLog) -> tuple[Fact, ...]:
    """One or two facts, all about what helps or none."""
    useful = USES["maze" if _maze(attempt) else "key"] if self._useful is None else self._useful
    helps = [fact for fact in facts if fact.kind in USEFUL]
    rest = [fact for fact in facts if fact.kind not in USEFUL]
    chosen = helps if helps and self._rng.random() < useful else rest
    kinds: dict[str, list[Fact]] = {}
    for fact in chosen:
      kinds.setdefault(fact.kind, []).append(fact)
    count = min(len(kinds), 1 + (self._rng.random() < 0.7))
    names = self._rng.permutation(sorted(kinds))[:count]
    return tuple(kinds[n][int(self._rng.integers(len(kinds[n])))] for n in names)

  def merge(self, texts: Sequence[str]) -> str:
    return merged(texts)


def merged(texts: Sequence[str]) -> str:
  """The first thing to do about a list: discard what is no entry, or the older of two that contradict each
  other; merge two where one says all that both say, or one where the key is and one which door; or keep
  all. One operation an answer: what is left is for the next merge.
  """
  entries = dict(enumerate(map(read, texts), start=1))
  pairs = [(one, other) for one in entries for other in entries if one < other]
  bad = [number for number, entry in entries.items() if entry is None]
  bad += [one for one, other in pairs if _contradict(entries[one], entries[other])]
  if bad:
    return f"<remark>discard {bad[0]}</remark>"
  for one, other in pairs:
    both = _joined(entries[one], entries[other])
    if both:
      return f"<remark>merge {one} {other}:{both.write()}</remark>"
  return f"<remark>keep {' '.join(map(str, entries))}</remark>"


def _joined(one: Entry | None, other: Entry | None) -> Entry | None:
  """The entry that says what both say, where they are of a kind."""
  if one is None or other is None or one.theme != other.theme:
    return None
  facts = tuple(dict.fromkeys((*one.facts, *other.facts)))
  same = len(facts) == max(len(one.facts), len(other.facts))
  places = {fact.kind for fact in facts} == {"key", "door"} and len(facts) == 2
  return Entry(one.theme, facts) if same or places else None


def _contradict(one: Entry | None, other: Entry | None) -> bool:
  """Whether both name the same place of a theme, differently."""
  if one is None or other is None or one.theme != other.theme:
    return False
  places = {fact.kind: fact.text for fact in one.facts if fact.kind in PLACES}
  return any(places.get(fact.kind, fact.text) != fact.text for fact in other.facts)
