"""The world of the rooms: a walled grid in fog, the rules of what happens, and which tasks there are.

Two kinds of task, on a grid of `side` x `side` cells inside an outer wall (rows and columns 0 and side+1):

    key    a key lies somewhere; one of several doors in the outer wall fits it, in any other it breaks
    maze   many walls and several hatches; one leads out, the others are pits. Stand on it and open it

So a first attempt succeeds by luck in one of five cases at best, whatever the skill of the agent, and what
was found out decides. Walls and doors are seen from one cell away, what lies on the floor (key, hatch) only
from its own cell: where it lies is worth knowing too.

Every task has a **theme**, a colour that the agent is told. Within a **family** a theme fixes where the
key or the right hatch lies and which door fits. The seed draws the rest: walls, where the agent starts,
the other doors and hatches. So what is found out about a theme holds in all its later tasks and misleads
in those of others.

Families whose number is below `RESERVED` are for training and tests; the tiny checkpoints are cloned on
higher numbers only (experiments/tiny/imitate.py). Cells are (row, column), inner ones from (1, 1).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import prompting
from memrl_jax.envs.prompting import Cell

KINDS = ("key", "maze")
THEMES = ("red", "blue", "green", "gold", "white", "black", "amber", "pink")
VERBS = ("go", "take", "open", "kick", "search")
RESERVED = 8  # families with a lower number are kept out of imitation
FAMILIES = 4096

SIGHT = 1  # cells to every side, diagonals included
APART = 3  # at least between two doors, so that two are never in sight at once
SIGNS = {"wall": "#", "floor": ".", "key": "(", "door": "+", "goal": ">"}
WALLS = {"key": 0.12, "maze": 0.34}  # share of inner cells

_PLACE_STREAM, _TASK_STREAM = 7401, 7402


@dataclasses.dataclass(frozen=True)
class Options:
  """Which tasks and how long. `theme`: one of THEMES, or "any" (each task draws its own).

  `choices`: doors of a room or hatches of a maze, one of them right (fewer where they do not fit).
  `stride`: cells a turn of walking.
  """

  kind: str = "key"
  family: int = 0
  theme: str = "any"
  side: int = 7
  stride: int = 3
  choices: int = 5
  turns: int = 12
  style: str = "brief"

  def __post_init__(self):
    prompting.check_style(self.style)
    for name, known in (("kind", KINDS), ("theme", ("any", *THEMES))):
      if getattr(self, name) not in known:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(known)} "
          f"(config.env.{name})"
        )
    for name, least, most in (
      ("family", 0, FAMILIES - 1),
      ("side", 5, 8),  # with the outer wall 0 to 9: one digit in coordinates
      ("stride", 1, 9),
      ("choices", 1, 6),
      ("turns", 1, 99),
    ):
      if not least <= getattr(self, name) <= most:
        raise ValueError(
          f"{name} {getattr(self, name)} is out of range; choose {least} to {most} (config.env.{name})"
        )


class Secret(NamedTuple):
  """What a theme hides in all its tasks; see `Task`."""

  treasure: Cell
  door: Cell | None


class Task(NamedTuple):
  name: str
  kind: str
  theme: str
  treasure: Cell  # the key, or the hatch that leads out
  right: Cell | None  # the door that fits; None in a maze
  others: tuple[Cell, ...]  # the other doors or hatches
  walls: frozenset[Cell]
  start: Cell


@functools.cache
def inner(side: int) -> tuple[Cell, ...]:
  return tuple((row, col) for row in range(1, side + 1) for col in range(1, side + 1))


@functools.cache
def ring(side: int) -> tuple[Cell, ...]:
  """Cells of the outer wall that can be a door: no corners."""
  ends, along = (0, side + 1), range(1, side + 1)
  return tuple([(r, c) for r in ends for c in along] + [(r, c) for r in along for c in ends])


def inside(cell: Cell, side: int) -> Cell:
  """The inner cell next to a cell of the outer wall; inner cells are their own."""
  return min(max(cell[0], 1), side), min(max(cell[1], 1), side)


def far(one: Cell, other: Cell) -> int:
  """Distance in moves of a king: 1 is in sight."""
  return max(abs(one[0] - other[0]), abs(one[1] - other[1]))


def steps(one: Cell, other: Cell) -> int:
  """Distance in steps where no wall is in the way."""
  return abs(one[0] - other[0]) + abs(one[1] - other[1])


@functools.lru_cache(maxsize=1024)
def secrets(kind: str, family: int, side: int) -> dict[str, Secret]:
  """What each theme hides in this family; no two themes share a place."""
  rng = np.random.default_rng([_PLACE_STREAM, KINDS.index(kind), family, side])
  cells = [inner(side)[i] for i in rng.permutation(side * side)]
  doors = [ring(side)[i] for i in rng.permutation(4 * side)]
  found = {}
  for theme in THEMES:
    treasure = cells.pop()
    door = next(door for door in doors if far(door, treasure) >= APART)
    doors.remove(door)
    found[theme] = Secret(treasure, door if kind == "key" else None)
  return found


@functools.lru_cache(maxsize=1024)
def draw(options: Options, seed: int) -> Task:
  """The task of a seed; all that is not the theme's own is drawn afresh."""
  side, kind = options.side, options.kind
  rng = np.random.default_rng([seed, _TASK_STREAM])
  theme = THEMES[rng.integers(len(THEMES))] if options.theme == "any" else options.theme
  secret = secrets(kind, options.family, side)[theme]
  others = _others(secret, options, rng)
  starts = [
    cell for cell in inner(side) if steps(cell, secret.treasure) > side // 2 and cell not in others
  ]
  start = starts[rng.integers(len(starts))]
  kept = {start, secret.treasure, *(inside(cell, side) for cell in (secret.door, *others) if cell)}
  wanted = round(WALLS[kind] * side * side)
  walls = _walls(side, wanted, kept, [inner(side)[i] for i in rng.permutation(side * side)])
  name = f"rooms/{kind}/{theme}"
  return Task(name, kind, theme, *secret, others, frozenset(walls), start)


def _others(secret: Secret, options: Options, rng: np.random.Generator) -> tuple[Cell, ...]:
  """Doors or hatches that look like the right one and are not; none is next to another."""
  places = ring(options.side) if secret.door else inner(options.side)
  chosen, apart = [secret.door or secret.treasure], APART if secret.door else 2
  for index in rng.permutation(len(places)):
    fits = all(far(places[index], cell) >= apart for cell in chosen)
    if fits and len(chosen) < options.choices:
      chosen.append(places[index])
  return tuple(sorted(chosen[1:]))


def _walls(side: int, wanted: int, kept: set[Cell], order: Iterable[Cell]) -> set[Cell]:
  """At most `wanted` cells, none of them `kept`, that leave the rest in one piece."""
  free = set(inner(side))
  for cell in order:
    if len(free) <= side * side - wanted:
      break
    if cell not in kept and len(_reach(free - {cell}, next(iter(kept)))) == len(free) - 1:
      free.remove(cell)
  return set(inner(side)) - free


def _reach(free: set[Cell], start: Cell) -> set[Cell]:
  found, edge = {start}, [start]
  while edge:
    for cell in _next(edge.pop()):
      if cell in free and cell not in found:
        found.add(cell)
        edge.append(cell)
  return found


def _next(cell: Cell) -> tuple[Cell, ...]:
  row, col = cell
  return (row - 1, col), (row, col + 1), (row + 1, col), (row, col - 1)


@functools.cache
def _moves(side: int) -> tuple[tuple[Cell, str], ...]:
  return tuple((cell, f"go{prompting.write(cell)}") for cell in inner(side))


class World:
  """The state of an attempt. `do` plays one action and says in a few words what came of it.

  `things` is what stands or lies where, `met` those of them that the agent has seen, `chart` its map by
  SIGNS, " " where it has not looked; `reached` are the sub-goals, `solved` is None until a door or hatch
  was opened.
  """

  def __init__(self, task: Task, side: int, stride: int):
    self.task, self.side, self.stride = task, side, stride
    self.at = task.start
    self.held = False
    self.chart = [[" "] * (side + 2) for _ in range(side + 2)]
    self.blocked: set[Cell] = set()  # walls that have been seen
    self.met: dict[Cell, str] = {}
    self.reached: set[str] = set()
    self.solved: bool | None = None
    self.things = {cell: "door" if task.right else "goal" for cell in task.others}
    self.things[task.treasure] = "key" if task.right else "goal"
    if task.right:
      self.things[task.right] = "door"
    self._look()

  def here(self) -> list[tuple[str, Cell]]:
    """Things in sight, by name and place."""
    return [
      (thing, cell)
      for cell, thing in self.things.items()
      if far(cell, self.at) <= (SIGHT if thing == "door" else 0)
    ]

  def admissible(self) -> tuple[str, ...]:
    """Every action that is not known to do nothing, sorted, and the two that never do anything."""
    actions = [
      move for cell, move in _moves(self.side) if cell not in self.blocked and cell != self.at
    ]
    actions += ["take"] if self.things.get(self.at) == "key" else []
    actions += ["open"] if self._openable() else []
    return (*actions, "kick", "search")

  def do(self, verb: str, cell: Cell | None = None) -> str:
    if verb == "go":
      note = self._go(inside(cell, self.side))
    elif verb in ("take", "open"):
      note = self._take() if verb == "take" else self._open()
    else:
      note = "bad"  # kicking and searching never do anything
    if self.held and self._openable() == self.task.right:
      self.reached.add("brought")
    return note

  def _look(self) -> list[str]:
    """What has come in sight."""
    row, col = self.at
    for r in range(row - SIGHT, row + SIGHT + 1):
      for c in range(col - SIGHT, col + SIGHT + 1):
        if self.chart[r][c] == " ":
          wall = (r, c) in self.task.walls
          outer = r in (0, self.side + 1) or c in (0, self.side + 1)
          self.chart[r][c] = SIGNS["wall" if wall or outer else "floor"]
          self.blocked |= {(r, c)} if wall else set()
    fresh = [(thing, cell) for thing, cell in self.here() if cell not in self.met]
    for thing, cell in fresh:
      self.met[cell] = thing
      self.chart[cell[0]][cell[1]] = SIGNS[thing]
    if self.at == self.task.treasure:
      self.reached.add("found")
    return [f"{thing}{prompting.write(cell)}" for thing, cell in fresh]

  def _go(self, target: Cell) -> str:
    """Moves along the shortest path that is not known to be blocked; stops where something is new."""
    path = self._path(target)
    if not path:
      return "bad"
    for cell in path[: self.stride]:
      if cell in self.task.walls:
        return f"wall{prompting.write(cell)}"
      self.at = cell
      found = self._look()
      if found:
        return " ".join(found)
    return ""

  def _path(self, target: Cell) -> list[Cell]:
    """The cells from here to the target, without the first; empty when there is no way."""
    side, blocked = range(1, self.side + 1), self.blocked
    before: dict[Cell, Cell] = {self.at: self.at}
    edge = collections.deque([self.at])
    while edge and target not in before:
      here = edge.popleft()
      for cell in _next(here):
        if cell not in before and cell not in blocked and cell[0] in side and cell[1] in side:
          before[cell] = here
          edge.append(cell)
    path = []
    while target in before and target != self.at:
      path.append(target)
      target = before[target]
    return path[::-1]

  def _take(self) -> str:
    if self.things.get(self.at) != "key":
      return "bad"
    del self.things[self.at], self.met[self.at]
    self.chart[self.at[0]][self.at[1]] = SIGNS["floor"]
    self.held = True
    self.reached.add("taken")
    return "ok"

  def _openable(self) -> Cell | None:
    """The door in sight, or the hatch underfoot."""
    if self.things.get(self.at) == "goal":
      return self.at
    return next((cell for thing, cell in self.here() if thing == "door"), None)

  def _open(self) -> str:
    """What is wrong ends the attempt: the key breaks, the hatch is a pit."""
    cell = self._openable()
    if cell is None:
      return "bad"
    if self.task.kind == "key" and not self.held:
      return "locked"
    self.solved = cell == (self.task.right or self.task.treasure)
    return f"{'ok' if self.solved else 'bad'}{prompting.write(cell)}"
