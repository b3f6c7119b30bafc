"""Scripted players of MiniHack, which read the same text as a model does.

The explorer keeps what it has seen, walks to what it wants, and otherwise to the nearest place from
which it could see more. Cells are (column, row); a way is one of the eight steps.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable

import numpy as np

from memrl_jax.envs import base, prompting
from memrl_jax.envs.minihack_tasks import Options

Cell = tuple[int, int]
WAYS: dict[str, Cell] = {
  "north": (0, -1), "east": (1, 0), "south": (0, 1), "west": (-1, 0),
  "northeast": (1, -1), "southeast": (1, 1), "southwest": (-1, 1), "northwest": (-1, -1),
}  # fmt: skip
_FLOOR = ".<>#()[!?/=$*%_@"  # and letters: walking into a monster attacks it
_SQUARE = [(column, row) for column in (-1, 0, 1) for row in (-1, 0, 1)]


class Random(prompting.Chooser):
  """Uniform over the listed actions."""

  def choose(self, view: base.View) -> str:
    return str(self._rng.choice(listed(view.current.now.text)))


class Explorer(prompting.Chooser):
  """Key, stairs, door, river, and else the nearest unknown; plays one action a turn."""

  def __init__(self, options: Options, rng: np.random.Generator):
    if not (options.status and options.inventory):
      raise ValueError(
        "the explorer needs to know where it is and what it carries; turn both on "
        "(config.env.status=True, config.env.inventory=True)"
      )
    super().__init__(options, rng)

  def choose(self, view: base.View) -> str:
    known = Known(view.current, self._options.crop)
    text = view.current.now.text
    actions, carries_key = listed(text), "key" in text.partition("You carry:")[2]
    if known.at in known.keys and not carries_key and "pickup" in actions:
      return "pickup"
    wanted: list[Iterable[Cell]] = [known.shown(">")]
    if "pickup" in actions and not carries_key:
      wanted.append(known.keys)
    if "apply" in actions and carries_key:
      beside = {_step(door, WAYS[way], -1) for door in known.shown("+") for way in _STRAIGHT}
      if known.at in beside:
        return "apply"
      wanted.append(beside)
    for cells in wanted:
      if way := known.way_to(set(cells).__contains__):
        return way
    for cells in (known.bridges - known.visited, known.beyond_water()):
      if way := known.way_to(cells.__contains__):
        return way
    if way := self._push(known) or known.way_to(known.unexplored().__contains__):
      return way
    return str(self._rng.choice([name for name in WAYS if name in actions] or actions))

  def _push(self, known: Known) -> str:
    """The next step of the shortest straight push of a boulder into water; "" when there is none.

    A push over an earlier bridge lengthens it and goes before all others.
    """
    best, chosen = None, ""
    for boulder in known.shown("`"):
      for way, step in WAYS.items():
        cell, length, over = _step(boulder, step), 1, False
        while known.cells.get(cell) in (".", "<"):
          over |= cell in known.bridges
          cell, length = _step(cell, step), length + 1
        behind = _step(boulder, step, -1)
        if known.cells.get(cell) != "}" or (behind, way) in known.failed:
          continue
        path = known.path_to(behind.__eq__)
        if path is None:
          continue
        cost = (not over, len(path) + length)
        if best is None or cost < best:
          best, chosen = cost, path[0] if path else way
    return chosen


_STRAIGHT = ("north", "east", "south", "west")


class Known:
  """What an attempt has shown of its level so far."""

  def __init__(self, log: base.AttemptLog, crop: int):
    self.cells: dict[Cell, str] = {}
    self.visited: set[Cell] = set()
    self.keys: set[Cell] = set()
    self.bridges: set[Cell] = set()  # where water was
    self.failed: set[tuple[Cell, str]] = set()  # steps that led nowhere
    self._doors: set[Cell] = set()
    self.at = self._look(log.initial.text, crop)
    for step in log.steps:
      before = self.at
      target = _step(before, WAYS.get(step.action, (0, 0)))
      fought = self.cells.get(target, " ").isalpha()
      self.at = self._look(step.result.observation.text, crop)
      if self.at == before and step.action in WAYS and not fought:
        self.failed.add((before, step.action))

  def _look(self, text: str, crop: int) -> Cell:
    """Takes in one observation; where the agent is."""
    column, row = map(int, re.search(r"column (\d+), row (\d+)", text).groups())
    grid = text.partition("Map:\n")[2].partition("\nIn view:")[0]
    legend = text.partition("\nIn view:")[2]
    for down, line in enumerate(grid.split("\n")):
      for right, symbol in enumerate(line):
        if symbol == " ":
          continue
        cell = (column - crop + right, row - crop + down)
        if self.cells.get(cell) == "}" and symbol != "}":
          self.bridges.add(cell)
        if symbol == "+":
          self._doors.add(cell)
        if symbol == "(" and re.search(r"\( [^,]*key", legend):
          self.keys.add(cell)
        self.cells[cell] = symbol
    self.visited.add((column, row))
    return column, row

  def shown(self, symbol: str) -> list[Cell]:
    return [cell for cell, known in self.cells.items() if known == symbol]

  def unexplored(self) -> set[Cell]:
    """Cells that were not stood on, beside something that was not seen."""
    return {
      cell
      for cell in self.cells
      if cell not in self.visited
      and self._walkable(cell, traps=True)
      and any(_step(cell, step) not in self.cells for step in _SQUARE)
    }

  def beyond_water(self) -> set[Cell]:
    """What is unexplored to the right of the water."""
    shore = max((cell[0] for cell in self.shown("}")), default=10**6)
    return {cell for cell in self.unexplored() if cell[0] > shore}

  def way_to(self, wanted: Callable[[Cell], bool]) -> str:
    """The first step to the nearest wanted cell other than this one; "" when none can be reached."""
    path = self.path_to(lambda cell: cell != self.at and wanted(cell))
    return path[0] if path else ""

  def path_to(self, wanted: Callable[[Cell], bool]) -> list[str] | None:
    """The steps to the nearest wanted cell, over traps only if it must be; None when there is no way."""
    for traps in (False, True):
      came: dict[Cell, list[str]] = {self.at: []}
      queue = collections.deque([self.at])
      while queue:
        cell = queue.popleft()
        if wanted(cell):
          return came[cell]
        for way, step in WAYS.items():
          to = _step(cell, step)
          if to not in came and self._leads(cell, way, to, traps):
            came[to] = [*came[cell], way]
            queue.append(to)
    return None

  def _leads(self, cell: Cell, way: str, to: Cell, traps: bool) -> bool:
    return (cell, way) not in self.failed and self._walkable(to, traps)

  def _walkable(self, cell: Cell, traps: bool) -> bool:
    symbol = self.cells.get(cell, " ")
    if symbol in "-|":
      return cell in self._doors
    return symbol in _FLOOR or symbol.isalpha() or (traps and symbol in "^")


def _step(cell: Cell, way: Cell, times: int = 1) -> Cell:
  return cell[0] + times * way[0], cell[1] + times * way[1]


def listed(text: str) -> list[str]:
  """The actions that an observation names."""
  return re.findall(r"\d+ ([^,]+)", text.rpartition("Actions: ")[2])
