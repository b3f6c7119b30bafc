"""Scripted players of the rooms: what they have seen, what they are told, what they do.

Mistakes are habits that a player keeps, not noise (experiments/tiny/README.md). Two habits matter. How it
**searches**: from one unseen part to the next, in an order of its own. How it **finishes** with the key at
a door, or on the hatch: an "opener" opens, a "kicker" kicks, a "walker" walks on. So a clone finishes well in
a part of its attempts only, and that is what it can learn by reward with or without experience.
"""

from __future__ import annotations

import numpy as np

from memrl_jax.envs import base, prompting, rooms_writers
from memrl_jax.envs import rooms_world as world
from memrl_jax.envs.prompting import Cell
from memrl_jax.envs.rooms_world import Options

FINISHES = ("opener", "kicker", "walker")
SHARES = (0.55, 0.29, 0.16)  # of these in the mixture
PATIENCE = 8  # turns of walking to one told place


class Seen:
  """What an attempt has shown so far, in the agent's own view."""

  def __init__(self, attempt: base.AttemptLog):
    self.things: dict[Cell, str] = {}
    self.stops: list[Cell] = []
    self._look(attempt.initial.anchor)
    for step in attempt.steps:
      self._look(step.result.observation.anchor)
    anchor = attempt.now.anchor
    self.at = self.stops[-1]
    self.held = anchor.endswith(" with key")
    self.door = next(
      (cell for cell in prompting.cells(anchor)[1:] if self.things[cell] == "door"), None
    )
    self.asked = [s.action for s in attempt.steps]

  def _look(self, anchor: str) -> None:
    place, *things = anchor.removesuffix(" with key").split(" ")
    self.stops += prompting.cells(place)
    for thing in things:
      self.things[prompting.cells(thing)[0]] = thing.partition("(")[0]

  def where(self, thing: str) -> list[Cell]:
    return [cell for cell, name in self.things.items() if name == thing]


def told(view: base.View, picky: bool) -> dict[str, Cell | None]:
  """The facts of tips and remembered reflections, the first of each kind; `picky`: of this theme only."""
  facts: dict[str, Cell | None] = {}
  for text in (*view.tips, *(attempt.reflection or "" for attempt in view.past)):
    entry = rooms_writers.read(text)
    if entry and (not picky or entry.theme == rooms_writers.theme(view.current)):
      for fact in entry.facts:
        facts.setdefault(fact.kind, next(iter(prompting.cells(fact.text)), None))
  return facts


class Random:
  """Any admissible action: a random verb, then a random cell."""

  def __init__(self, options: Options, rng: np.random.Generator):
    self._options, self._rng = options, rng
    self._writer = rooms_writers.Writer(rng, lazy=0.0)

  def play(self, view: base.View) -> str:
    return _tagged(self._any(view.current.now.admissible))

  def reflect(self, view: base.View) -> str:
    """An entry about the attempt, in the tags of a reflection."""
    answer = self._writer.distill(view._replace(tips=()))
    return answer.replace("add:", "")

  def _any(self, admissible: tuple[str, ...]) -> str:
    verbs: dict[str, list[str]] = {}
    for action in admissible:
      verbs.setdefault(action.partition("(")[0], []).append(action)
    choices = verbs[str(self._rng.choice(sorted(verbs)))]
    return choices[int(self._rng.integers(len(choices)))]


class Explorer(Random):
  """Searches part by part, takes the key when it sees it, finishes as its habit is.

  With `reads` it goes straight to what it is told, and stops kicking where it is told that this does
  nothing; a place that proves wrong is not gone to again. `picky`: believes only what is said of this
  theme. `near`: searches the nearest part first. `noise`: probability of a random action.
  """

  def __init__(
    self,
    options: Options,
    rng: np.random.Generator,
    reads: bool = True,
    finish: str = "opener",
    noise: float = 0.0,
    picky: bool = True,
    near: bool = True,
  ):
    super().__init__(options, rng)
    self._reads, self._finish, self._noise = reads, finish, noise
    self._picky, self._near = picky, near
    self._parts = rng.permutation(_parts(options.side)).tolist()
    self._edge = rng.permutation(_edge(options.side)).tolist()

  def play(self, view: base.View) -> str:
    facts = told(view, self._picky) if self._reads else {}
    action = self.choose(Seen(view.current), facts)
    if self._rng.random() < self._noise:
      action = self._any(view.current.now.admissible)
    return _tagged(action)

  def choose(self, seen: Seen, facts: dict[str, Cell | None]) -> str:
    if self._options.kind == "maze":
      told = self._fresh(seen, facts.get("goal"))
      if seen.at in seen.where("goal") and not told and seen.at != facts.get("bad"):
        return self._end(seen, facts, self._parts)
      return _go(told[0]) if told else self._search(seen, self._parts)
    if not seen.held:
      keys = seen.where("key") or self._fresh(seen, facts.get("key"))
      if seen.at in seen.where("key"):
        return "take"
      return _go(keys[0]) if keys else self._search(seen, self._parts)
    right = facts.get("door")
    if right and seen.door != right and seen.asked.count(_go(right)) < PATIENCE:
      return _go(right)
    if seen.door and seen.door != facts.get("bad"):
      return self._end(seen, facts, self._edge)
    doors = [door for door in seen.where("door") if door != facts.get("bad")]
    return _go(doors[0]) if doors and self._finish != "walker" else self._search(seen, self._edge)

  def _end(self, seen: Seen, facts: dict[str, Cell | None], parts: list[Cell]) -> str:
    if self._finish == "opener" or (self._finish == "kicker" and "kick" in facts):
      return "open"
    return "kick" if self._finish == "kicker" else self._search(seen, parts)

  def _fresh(self, seen: Seen, cell: Cell | None) -> list[Cell]:
    """What is told, unless it has been visited or cannot be reached."""
    return (
      [cell] if cell and cell not in seen.stops and seen.asked.count(_go(cell)) < PATIENCE else []
    )

  def _search(self, seen: Seen, parts: list[Cell]) -> str:
    """On to the next part that has not been looked at; after the last to any."""
    left = [
      part
      for part in map(tuple, parts)
      if seen.asked.count(_go(part)) < 3
      and all(world.far(part, stop) > world.SIGHT - (parts is self._edge) for stop in seen.stops)
    ]
    if not left:
      return self._any(tuple(_go(cell) for cell in map(tuple, parts) if tuple(cell) != seen.at))
    going = [part for part in left if seen.asked and seen.asked[-1] == _go(part)]
    if going:
      return _go(going[0])
    row, col = seen.at
    return _go(
      min(left, key=lambda p: abs(p[0] - row) + abs(p[1] - col)) if self._near else left[0]
    )


class Solver(Explorer):
  """Knows the family's places, and opens: solves nearly every task."""

  def play(self, view: base.View) -> str:
    options = self._options
    secret = world.secrets(options.kind, options.family, options.side)[
      rooms_writers.theme(view.current)
    ]
    thing = "key" if options.kind == "key" else "goal"
    return _tagged(self.choose(Seen(view.current), {thing: secret.treasure, "door": secret.door}))


def mixture(options: Options, rng: np.random.Generator, skilled: float = 0.0) -> base.Player:
  """The imitation mix: 55 % finish well; 95 % read entries, 70 % of these only those of the theme.

  `skilled`: share of players that finish well whatever the mix says, as a trained actor does. 1.5 % of the
  responses are malformed: with attempts of a dozen turns more would cost tries.
  """
  reads, finish = rng.random() < 0.95, str(rng.choice(FINISHES, p=SHARES))
  player = Explorer(
    options,
    rng,
    reads=reads,
    finish="opener" if skilled and rng.random() < skilled else finish,
    noise=float(rng.choice([0.0, 0.1])),
    picky=rng.random() < 0.7,
    near=rng.random() < 0.5,
  )
  return prompting.Clumsy(player, rng, rate=0.015)


def _parts(side: int) -> list[Cell]:
  """Cells from which all is seen."""
  lines = [*range(2, side, 3), side] if side % 3 == 1 else [*range(2, side + 1, 3)]
  lines = sorted({min(line, side) for line in lines} | {side - 1})
  return [(row, col) for row in lines for col in lines]


def _edge(side: int) -> list[Cell]:
  """The corners and the middles of the walls."""
  lines = (1, (side + 1) // 2, side)
  middle = (side + 1) // 2
  return [(r, c) for r in lines for c in lines if (r, c) != (middle, middle)]


def _go(cell: Cell) -> str:
  return f"go{prompting.write(tuple(cell))}"


def _tagged(action: str) -> str:
  return f"<action>{action}</action>"
