"""Scripted players of the lab: what they see, what they are told, what they do, what they write down.

A remark (also the body of a tip) states at most four facts in a fixed order, at most `FACTS` words,
so that a tiny model can copy them from its own log:

    lost key kitchen jar report attic empty hall study
    lost focus bad empty hall
    won lamp study report attic box bad hall

"key R C" (or "code R C", "lamp R"), "report R" (its case) or "report R C"; "focus bad" when the attempt
was lost by focusing before reading; "empty" lists rooms whose containers hold nothing of use, "bad" rooms
whose case or lamp was the wrong one.

Mistakes are habits that a player keeps, not noise: a tip that names what a habit misses changes what
the player does, and that is what teaches a clone to read (experiments/tiny/README.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from memrl_jax.envs import base, prompting
from memrl_jax.envs.lab_world import COLOURS, LAB, SEARCHED, Options, Place, secrets

FACTS = 9  # words of a remark


@dataclasses.dataclass
class Facts:
  """Where things are. `hidden`: containers with the key, code or report; `switches`: rooms of the right
  case or lamp; `empty` and `bad`: rooms to skip when searching for the one and the other; `careful`:
  focusing early is known to lose."""

  hidden: list[Place] = dataclasses.field(default_factory=list)
  switches: list[str] = dataclasses.field(default_factory=list)
  empty: list[str] = dataclasses.field(default_factory=list)
  bad: list[str] = dataclasses.field(default_factory=list)
  careful: bool = False


def told(view: base.View, options: Options) -> Facts:
  """What the tips and the remembered reflections say, in their order; anything may stand in them."""
  facts = Facts()
  for text in (*view.tips, *(attempt.reflection or "" for attempt in view.past)):
    said = text.split()
    for at, word in enumerate(said):
      room, kind = [*said[at + 1 : at + 3], "", ""][:2]
      if word in ("key", "code", "lamp", "report") and room in SEARCHED:
        if kind in options.kinds:
          facts.hidden.append((room, kind))
        else:
          facts.switches.append(room)
      elif word in ("empty", "bad"):
        rooms = facts.empty if word == "empty" else facts.bad
        rooms += _run(said[at + 1 :])
      facts.careful |= (word, room) == ("focus", "bad")
  return facts


def _run(said: Sequence[str]) -> list[str]:
  """The rooms that stand at the beginning of a list of words."""
  count = next((i for i, word in enumerate(said) if word not in SEARCHED), len(said))
  return list(said[:count])


class Seen:
  """What an attempt has shown so far, in the agent's own view."""

  def __init__(self, attempt: base.AttemptLog, options: Options):
    self.room = attempt.initial.anchor.split()[1]
    self.opened: dict[Place, str] = {}
    self.tried: dict[str, str] = {}  # room -> what its case or lamp did
    self.taken: set[str] = set()
    self.code = self.named = ""
    self.early = False
    for step in attempt.steps:
      self._add(step.action, step.result.note)
    self.lit = "ok" in self.tried.values()
    wanted = ("report" if options.chain == "lamp" else options.chain,)
    self.hidden = [place for place, thing in self.opened.items() if thing in wanted]
    self.switches = [room for room, note in self.tried.items() if note in ("ok", "report")]
    self.bad = [room for room, note in self.tried.items() if note in ("bad", "empty")]
    rooms = dict.fromkeys(room for room, _ in self.opened)  # in the order of the log: easy to copy
    searched = [r for r in rooms if all((r, kind) in self.opened for kind in options.kinds)]
    self.empty = [room for room in searched if room not in {place[0] for place in self.hidden}]
    if options.chain == "code" and not self.code:
      self.bad = []  # a guessed digit says nothing about the case
    self.able = "key" in self.taken or bool(self.code) or options.chain == "lamp"

  def _add(self, action: str, note: str) -> None:
    verb, _, thing = action.partition(" ")
    if verb == "go" and note != "bad":
      self.room = thing
    elif verb == "open" and note != "bad":
      self.opened[self.room, thing] = note.split()[0]
      self.code = note.split()[1] if note.startswith("code") else self.code
    elif verb == "take" and note == "ok":
      self.taken.add(thing)
    elif verb in ("unlock", "use", "enter") and note != "locked" and self.room in SEARCHED:
      if self.tried.get(self.room) not in ("ok", "report"):
        self.tried[self.room] = note
    elif verb == "read" and note in COLOURS:
      self.named = note
    elif verb == "focus" and note == "lost":
      self.early = not self.named


def remark(view: base.View, options: Options) -> str:
  """The facts of the attempt, tags included."""
  seen = Seen(view.current, options)
  words = [prompting.outcome(view.current)]
  if options.chain == "lamp":
    words += ["lamp", *seen.switches[:1]] if seen.switches else []
    words += ["report", *seen.hidden[0]] if seen.hidden else []
  else:
    words += [options.chain, *seen.hidden[0]] if seen.hidden else []
    words += ["report", *seen.switches[:1]] if seen.switches else []
  words += ["focus", "bad"] if seen.early else []
  for name, rooms in (("empty", seen.empty), ("bad", seen.bad)):
    fits = rooms[: max(0, FACTS - 1 - len(words))]
    words += [name, *fits] if fits else []
  return f"<remark>{' '.join(words)}</remark>"


class Random:
  """Any admissible action: a random verb, then a random thing."""

  def __init__(self, options: Options, rng: np.random.Generator):
    self._options, self._rng = options, rng

  def play(self, view: base.View) -> str:
    return _tagged(self._any(view.current.now.admissible))

  def reflect(self, view: base.View) -> str:
    return remark(view, self._options)

  def _any(self, admissible: Iterable[str]) -> str:
    verbs: dict[str, list[str]] = {}
    for action in admissible:
      verbs.setdefault(action.split()[0], []).append(action)
    choices = verbs[str(self._rng.choice(sorted(verbs)))]
    return choices[int(self._rng.integers(len(choices)))]


class Explorer(Random):
  """Searches room by room in an order of its own, and goes on sensibly from what it has found.

  With `reads` it goes straight to what tips name and skips what they call empty or bad; a place that
  proves wrong is not gone to again. `noise` is the probability of a random action, `useful` that a
  remark says more than how it ended.
  """

  def __init__(
    self,
    options: Options,
    rng: np.random.Generator,
    reads: bool = True,
    noise: float = 0.0,
    useful: float = 1.0,
  ):
    super().__init__(options, rng)
    self._reads, self._noise, self._useful = reads, noise, useful
    self._rooms = rng.permutation(SEARCHED).tolist()
    self._kinds = rng.permutation(options.kinds).tolist()

  def play(self, view: base.View) -> str:
    now = view.current.now
    seen = Seen(view.current, self._options)
    facts = told(view, self._options) if self._reads else Facts()
    action = self.choose(seen, facts, len(view.current.steps), now)
    if action not in now.admissible or self._rng.random() < self._noise:
      action = self._any(now.admissible)
    return _tagged(action)

  def reflect(self, view: base.View) -> str:
    if self._rng.random() < self._useful:
      return super().reflect(view)
    return f"<remark>{prompting.outcome(view.current)}</remark>"

  def choose(self, seen: Seen, facts: Facts, turn: int, now: base.Observation) -> str:
    """The next action; inadmissible when there is nothing left to try."""
    lamp = self._options.chain == "lamp"
    if seen.named:
      return f"focus {seen.named}" if seen.room == LAB else f"go {LAB}"
    if "read report" in now.admissible and (not lamp or seen.lit):
      return "read report"
    if "take key" in now.admissible:
      return "take key"
    if lamp:
      return self._by_lamp(seen, facts)
    return self._switch(seen, facts) if seen.able else self._search(seen, facts)

  def _by_lamp(self, seen: Seen, facts: Facts) -> str:
    """First what is told; then each room's lamp before its containers."""
    if seen.lit:
      return f"go {seen.hidden[0][0]}" if seen.hidden else self._search(seen, facts)
    untried = seen.room in SEARCHED and seen.room not in seen.tried
    known = [room for room in facts.switches if room not in seen.tried]
    if seen.hidden or known or (untried and seen.room not in facts.bad):
      return self._switch(seen, facts)
    return self._search(seen, facts)

  def _search(self, seen: Seen, facts: Facts) -> str:
    """Opens what is told, else the containers here, else goes on to the next room."""
    for room, kind in facts.hidden:
      if (room, kind) not in seen.opened:
        return f"open {kind}" if seen.room == room else f"go {room}"
    left = [place for place in self._order(seen.room) if place not in seen.opened]
    fresh = [place for place in left if place[0] not in facts.empty] or left
    if not fresh:
      return ""
    room, kind = fresh[0]
    return f"open {kind}" if seen.room == room else f"go {room}"

  def _order(self, here: str) -> list[Place]:
    rooms = sorted(self._rooms, key=lambda room: room != here)  # stable: this room, then by habit
    return [(room, kind) for room in rooms for kind in self._kinds]

  def _switch(self, seen: Seen, facts: Facts) -> str:
    """Tries the case or lamp that is told, else the one here, else goes on to the next."""
    left = [room for room in self._rooms if room not in seen.tried]
    left.sort(key=lambda room: room != seen.room)
    fresh = [room for room in left if room not in facts.bad] or left
    known = [room for room in facts.switches if room in left]
    if not fresh:
      return ""
    room = [*known, *fresh][0]
    tries = {"key": "unlock case", "code": f"enter {seen.code}", "lamp": "use lamp"}
    return tries[self._options.chain] if seen.room == room else f"go {room}"


class Hasty(Explorer):
  """An explorer that from its habitual turn on goes to the lab and focuses the sample it likes best,
  unless a tip says that focusing early loses, or names a place where it has not been yet."""

  def __init__(self, options: Options, rng: np.random.Generator, **habits):
    super().__init__(options, rng, **habits)
    self._patience = int(rng.integers(2, 8))  # turns
    self._liked = rng.permutation(COLOURS).tolist()

  def choose(self, seen: Seen, facts: Facts, turn: int, now: base.Observation) -> str:
    led = any(place not in seen.opened for place in facts.hidden)
    led |= any(room not in seen.tried for room in facts.switches)
    found = seen.named or "read report" in now.admissible
    if found or led or facts.careful or turn < self._patience:
      return super().choose(seen, facts, turn, now)
    liked = [f"focus {colour}" for colour in self._liked]
    return next((action for action in liked if action in now.admissible), f"go {LAB}")


class Solver(Explorer):
  """Knows the family's places, and so solves every variation in 7 or 8 turns."""

  def choose(self, seen: Seen, facts: Facts, turn: int, now: base.Observation) -> str:
    number = int(self._options.family.partition("-")[2])
    hidden, switch = secrets(self._options.chain, self._options.containers)[number]
    return super().choose(seen, Facts([hidden], [switch]), turn, now)


def mixture(options: Options, rng: np.random.Generator) -> base.Player:
  """The imitation mix: half explorers, half hasty; 90 % read tips, half of them slip in 10 % of turns."""
  make = Hasty if rng.random() < 0.5 else Explorer
  noise = float(rng.choice([0.0, 0.1]))
  player = make(options, rng, reads=rng.random() < 0.9, noise=noise, useful=0.9)
  return prompting.Clumsy(player, rng)


def _tagged(action: str) -> str:
  return f"<action>{action}</action>"
