"""Sokoban rooms: what a position is, which are solvable, how rooms are drawn, shown and read.

Rooms come from our own generator in the spirit of gym-sokoban: a random walk carves the floor, and play
in reverse from the solved room gives starts that are solvable by construction.

Sets of cells are integers: bit row*width + col, 0-indexed. A position is boxes << 7 | player.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import prompting

MOVES = ("up", "down", "left", "right")
PLAYER = 127  # mask of the player's cell in a position

_TASK_STREAM = 7301
_POSITIONS = 300_000  # most positions that are listed to know which are solvable


@dataclasses.dataclass(frozen=True)
class Options:
  """`released` pays a turn by its last action alone, plays on after a win and parses by substring."""

  height: int = 6
  width: int = 6
  boxes: int = 2
  turns: int = 7
  actions_per_turn: int = 3
  max_steps: int = 30
  min_solution: int = 5
  max_solution: int = 21
  draws: int = 10
  released: bool = False
  style: str = "brief"

  def __post_init__(self):
    prompting.check_style(self.style)
    if not (4 <= self.height <= prompting.MAX_SIDE and 4 <= self.width <= prompting.MAX_SIDE):
      raise ValueError(
        f"a {self.height}x{self.width} room cannot be used; choose sides from 4 to {prompting.MAX_SIDE} "
        "(config.env.height, config.env.width)"
      )
    if min(self.boxes, self.turns, self.actions_per_turn, self.max_steps, self.draws) < 1:
      raise ValueError(
        f"boxes {self.boxes}, turns {self.turns}, actions_per_turn {self.actions_per_turn}, max_steps {self.max_steps} "
        f"and draws {self.draws} must all be at least 1 (config.env)"
      )
    if not 1 <= self.min_solution <= self.max_solution:
      raise ValueError(
        f"no solution has between {self.min_solution} and {self.max_solution} moves; choose "
        "1 <= min_solution <= max_solution (config.env.min_solution, config.env.max_solution)"
      )
    cells, needed = (self.height - 2) * (self.width - 2), 2 * self.boxes + 1
    if needed > cells:
      raise ValueError(
        f"{self.boxes} boxes need {needed} free cells; a {self.height}x{self.width} room has {cells}: "
        "choose a larger size or fewer boxes (config.env.boxes)"
      )
    positions = cells * math.comb(cells - 1, self.boxes)
    if positions > _POSITIONS:
      raise ValueError(
        f"{self.boxes} boxes in a {self.height}x{self.width} room have up to {positions} positions, more than the "
        f"{_POSITIONS} that can be listed to detect dead ends: choose fewer boxes or a smaller size (config.env.boxes)"
      )


class Task(NamedTuple):
  """A room as sets of cells, and where boxes and player start."""

  height: int
  width: int
  floor: int
  targets: int
  boxes: int
  player: int


# Positions.


def steps(width: int) -> dict[str, int]:
  return {"up": -width, "down": width, "left": -1, "right": 1}


def bits(cells: int) -> list[int]:
  return [bit for bit in range(cells.bit_length()) if cells >> bit & 1]


def push(floor: int, width: int, position: int, move: str) -> int:
  """The position after one move; unchanged where a wall or a blocked box stands in the way."""
  boxes, player = position >> 7, position & PLAYER
  there = player + steps(width)[move]
  if not floor >> there & 1:
    return position
  if boxes >> there & 1:
    beyond = 2 * there - player
    if not (floor & ~boxes) >> beyond & 1:
      return position
    boxes ^= 1 << there | 1 << beyond
  return boxes << 7 | there


@functools.lru_cache(maxsize=256)
def solvable(floor: int, width: int, targets: int) -> dict[int, int]:
  """Every position that can still be solved -> fewest moves to a solution.

  Breadth-first play in reverse from all solved positions: the player walks back, and may pull the
  box in front of it along.
  """
  layer = [targets << 7 | player for player in bits(floor & ~targets)]
  moves, distance = dict.fromkeys(layer, 0), 0
  while layer:
    distance, before, layer = distance + 1, layer, []
    for position in before:
      boxes, player = position >> 7, position & PLAYER
      free = floor & ~boxes
      for step in (-width, width, -1, 1):
        back = player - step
        if free >> back & 1:
          walked = boxes << 7 | back
          if walked not in moves:
            moves[walked] = distance
            layer.append(walked)
          if boxes >> (player + step) & 1:
            pulled = (boxes ^ (1 << player + step | 1 << player)) << 7 | back
            if pulled not in moves:
              moves[pulled] = distance
              layer.append(pulled)
  return moves


# Rooms.

_BRUSHES = (  # cells, relative to the walker, that it carves
  ((0, 0), (0, 1)),
  ((0, 0), (1, 0)),
  ((0, -1), (0, 0), (0, 1)),
  ((-1, 0), (0, 0), (1, 0)),
  ((0, 0), (0, 1), (1, 0), (1, 1)),
)


def _carve(options: Options, rng: np.random.Generator) -> int:
  """Floor cut by 1.7*(height+width) steps of a walk that turns with probability .35."""
  length = int(1.7 * (options.height + options.width))
  turn_T, way_T = rng.random(length) < 0.35, rng.integers(4, size=length)
  brush_T = rng.integers(len(_BRUSHES), size=length)
  row, col = int(rng.integers(1, options.height - 1)), int(rng.integers(1, options.width - 1))
  floor, way = 0, int(way_T[0])
  for turns, new_way, brush in zip(turn_T, way_T.tolist(), brush_T.tolist(), strict=True):
    way = new_way if turns else way
    row = min(max(row + (-1, 1, 0, 0)[way], 1), options.height - 2)
    col = min(max(col + (0, 0, -1, 1)[way], 1), options.width - 2)
    for down, right in _BRUSHES[brush]:
      if 1 <= row + down <= options.height - 2 and 1 <= col + right <= options.width - 2:
        floor |= 1 << (row + down) * options.width + col + right
  return floor


def displacement(boxes: int, targets: int, width: int) -> int:
  """Steps between the boxes and their targets in the cheapest pairing, walls ignored."""
  places = [divmod(bit, width) for bit in bits(targets)]
  return min(
    sum(
      abs(row - place[0]) + abs(col - place[1])
      for (row, col), place in zip(pairing, places, strict=True)
    )
    for pairing in itertools.permutations([divmod(bit, width) for bit in bits(boxes)])
  )


def _propose(options: Options, rng: np.random.Generator) -> tuple[Task, int] | None:
  """A room with its optimal solution length; None where no box can leave its target.

  Of three positions that reverse play reaches with every target empty, the one whose boxes are
  farthest from their targets.
  """
  floor = _carve(options, rng)
  if floor.bit_count() < 2 * options.boxes + 1:
    return None
  picked = rng.permutation(bits(floor))[: options.boxes].tolist()
  targets = sum(1 << bit for bit in picked)
  moves = solvable.__wrapped__(floor, options.width, targets)
  starts = [position for position in moves if not position >> 7 & targets]
  if not starts:
    return None
  drawn = [starts[index] for index in rng.integers(len(starts), size=3).tolist()]
  start = max(drawn, key=lambda position: displacement(position >> 7, targets, options.width))
  task = Task(options.height, options.width, floor, targets, start >> 7, start & PLAYER)
  return task, moves[start]


@functools.lru_cache(maxsize=1024)
def draw(options: Options, seed: int) -> Task:
  """The room of a seed: of at most `draws` rooms the first whose solution has a wanted length.

  Where none has, the last room is used, as in the release.
  """
  rng = np.random.default_rng([seed, _TASK_STREAM])
  drawn = 0
  while True:
    proposal = _propose(options, rng)
    if proposal is None:
      continue
    drawn += 1
    task, length = proposal
    if options.min_solution <= length <= options.max_solution or drawn >= options.draws:
      return task


# Text.


def show(task: Task, position: int) -> str:
  """The board as text, rows labelled from 1."""
  boxes, player = position >> 7, position & PLAYER

  def symbol(bit: int) -> str:
    target = task.targets >> bit & 1
    if bit == player:
      return "S" if target else "P"
    if boxes >> bit & 1:
      return "√" if target else "X"
    return "O" if target else "_" if task.floor >> bit & 1 else "#"

  return "\n".join(
    f"{row + 1}:" + "".join(symbol(row * task.width + col) for col in range(task.width))
    for row in range(task.height)
  )


def read(board: str) -> Task:
  """The room that a board shows; the inverse of `show`, boxes and player where they stand now."""
  rows = [line.partition(":")[2] for line in board.strip().split("\n")]
  flat = "".join(rows)

  def cells(symbols: str) -> int:
    return sum(1 << bit for bit, symbol in enumerate(flat) if symbol in symbols)

  player = next(bit for bit, symbol in enumerate(flat) if symbol in "PS")
  return Task(len(rows), len(rows[0]), cells("_OX√PS"), cells("O√S"), cells("X√"), player)
