"""MineSweeper with a safe first click, a limit of turns, and the same mines in every attempt.

Rules and rewards follow the LaMer release (experiments/lamer.md 2.2); unlike there, the first click is drawn
from the task seed like the mines, so that all members of a group see one board.

Cells: `?` closed, `.` open with no mine near, a digit = mines near, `*` the mine that was hit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base, prompting
from memrl_jax.envs.prompting import Cell

WIN, CASCADE, REVEAL, MINE, NOTHING = 10.0, 2.0, 0.5, -0.1, -1.0  # rewards of a turn

SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *prompting.words("mines", "mine", "safe", "ok", "bad", "played"),
  *("?", ".", "*"),
  *prompting.ROW_LABELS,
  *prompting.COORDINATES,
)

_TASK_STREAM = 7201
_REMARK_CELLS = 6  # safe cells in a reflection: 12 tokens with tags, words and the stop token


@dataclasses.dataclass(frozen=True)
class Options:
  """`released_parsing`: the release takes the first pair and calls one out of range well formed."""

  size: int = 6
  mines: int = 3
  turns: int = 7
  released_parsing: bool = False
  style: str = "brief"

  def __post_init__(self):
    prompting.check_style(self.style)
    if not 2 <= self.size <= prompting.MAX_SIDE:
      raise ValueError(
        f"a board of {self.size}x{self.size} cannot be shown; choose a side from 2 to {prompting.MAX_SIDE} (config.env.size)"
      )
    most = self.size**2 - 2
    if not 1 <= self.mines <= most:
      raise ValueError(
        f"{self.mines} mines do not fit: a {self.size}x{self.size} board takes 1 to {most}, one cell being opened "
        "and one left to find; choose fewer mines or a larger board (config.env.mines, config.env.size)"
      )
    if self.turns < 1:
      raise ValueError(
        f"{self.turns} turns leave nothing to play; choose at least 1 (config.env.turns)"
      )


@functools.cache
def near(size: int) -> dict[Cell, tuple[Cell, ...]]:
  """The up to eight neighbours of every cell, in reading order; keys in reading order."""
  room = [(row, col) for row in range(1, size + 1) for col in range(1, size + 1)]
  return {
    cell: tuple(
      other
      for other in room
      if other != cell and abs(other[0] - cell[0]) <= 1 and abs(other[1] - cell[1]) <= 1
    )
    for cell in room
  }


@functools.lru_cache(maxsize=1024)
def numbers(size: int, mines: frozenset[Cell]) -> dict[Cell, str]:
  """What every cell shows when it is open: the count of mines near it, or `.`."""
  return {
    cell: str(sum(other in mines for other in others) or ".") for cell, others in near(size).items()
  }


class Task(NamedTuple):
  """The mines, and the cells that are open at the start of every attempt."""

  mines: frozenset[Cell]
  opened: frozenset[Cell]


def reveal(size: int, mines: frozenset[Cell], cell: Cell, opened: Iterable[Cell] = ()) -> set[Cell]:
  """The cells that open with `cell`: it alone, or with all around while no mine is near."""
  neighbours, shown = near(size), numbers(size, mines)
  known, fresh, queue = set(opened), set(), [cell]
  while queue:
    here = queue.pop()
    if here in known or here in fresh:
      continue
    fresh.add(here)
    if shown[here] == ".":
      queue += neighbours[here]
  return fresh


@functools.lru_cache(maxsize=1024)
def draw(options: Options, seed: int) -> Task:
  """Mines and a safe first click of a seed, drawn again while the click already wins."""
  rng = np.random.default_rng([seed, _TASK_STREAM])
  room = list(near(options.size))
  while True:
    picked = rng.permutation(len(room))[: options.mines + 1]
    first, *mines = (room[index] for index in picked)
    opened = reveal(options.size, frozenset(mines), first)
    if len(opened) + options.mines < len(room):
      return Task(frozenset(mines), frozenset(opened))


class Minesweeper(base.Seeded):
  """The environment; an observation is the board, one row a line, `1:?.2...`."""

  def __init__(self, options: Options):
    super().__init__(options, draw, options.turns)

  def _begin(self, task: Task) -> base.Observation:
    self._opened, self._hit = set(task.opened), None
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    cell, valid = self._parse(response)
    reward, note = self._click(cell)
    self._turn += 1
    safe = self._options.size**2 - self._options.mines
    success = len(self._opened) == safe
    self._done = success or note == "mine" or self._turn >= self._options.turns
    return base.StepResult(
      observation=self._observe(),
      reward=reward,
      done=self._done,
      success=success,
      score=len(self._opened) / safe,
      valid=valid,
      action=prompting.write(cell) if cell else "",
      note=note,
    )

  def _parse(self, response: str) -> tuple[Cell | None, bool]:
    """The clicked cell (None when there is not exactly one) and whether the response is valid."""
    clicks = prompting.cells(prompting.action_body(response) or "")
    if self._options.released_parsing:
      return (clicks[0], True) if clicks else (None, False)
    if len(clicks) != 1:
      return None, False
    return clicks[0], clicks[0] in near(self._options.size)

  def _click(self, cell: Cell | None) -> tuple[float, str]:
    if cell not in near(self._options.size) or cell in self._opened:
      return NOTHING, "bad"
    if cell in self._task.mines:
      self._hit = cell
      return MINE, "mine"
    fresh = reveal(self._options.size, self._task.mines, cell, self._opened)
    self._opened |= fresh
    if len(self._opened) == self._options.size**2 - self._options.mines:
      return WIN, "ok"
    return (CASCADE if len(fresh) > 1 else REVEAL), "ok"

  def _observe(self) -> base.Observation:
    side, shown = self._options.size, numbers(self._options.size, self._task.mines)
    flat = "".join(symbol if cell in self._opened else "?" for cell, symbol in shown.items())
    if self._hit:
      at = (self._hit[0] - 1) * side + self._hit[1] - 1
      flat = f"{flat[:at]}*{flat[at + 1 :]}"
    text = "\n".join(f"{row + 1}:{flat[row * side : (row + 1) * side]}" for row in range(side))
    return base.Observation(text, text)


# Prompts.


def _clicks(attempt: base.AttemptLog) -> str:
  """Clicks in order, each with what came of it: `(1,2) ok(3,4) mine`."""
  return "".join(f"{step.action} {step.result.note}" for step in attempt.steps)


def _past(attempt: base.AttemptLog) -> str:
  return f"{_clicks(attempt)} {prompting.outcome(attempt)}"


def _now(attempt: base.AttemptLog) -> str:
  return f"\n{attempt.now.text}\nplayed{''.join(step.action for step in attempt.steps)}"


def _reflect(attempt: base.AttemptLog) -> str:
  return f"{_clicks(attempt)}\n{attempt.now.text}\n{prompting.outcome(attempt)}"


def _wording(options: Options) -> prompting.Wording:
  side = options.size
  return prompting.Wording(
    rules=(
      f"You play MineSweeper on a board of {side} rows and {side} columns that hides "
      f"{options.mines} mines. Cells are written (row,col), from (1,1) at the top left to "
      f"({side},{side}) at the bottom right. `?` is a closed cell, `.` an open cell with no mine "
      "next to it, a digit an open cell with that many mines among its eight neighbours, `*` a mine "
      "that went off. Opening a cell with no mine next to it also opens everything around it. You win "
      "when every cell without a mine is open; opening a mine ends the trial. A trial has "
      f"{options.turns} turns, one cell each. The mines and the cells open at the start are the same "
      "in every trial."
    ),
    request=(
      "Work out which closed cell is safest, using the digits and what you remember, then open exactly "
      "one, inside tags, for example <action>(2,3)</action>."
    ),
    show=prompting.spaced,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  return prompting.written(
    options.style,
    prompting.Shorthand(f"mines {options.mines}", _past, _now, _reflect),
    _wording(options),
  )


# Players: all of them read the board as it is shown.


def read(board: str) -> dict[Cell, str]:
  """Cell -> symbol, in reading order."""
  rows = (line.partition(":")[2] for line in board.split("\n"))
  return {(r, c): symbol for r, row in enumerate(rows, 1) for c, symbol in enumerate(row, 1)}


def remembered(view: base.View) -> tuple[set[Cell], set[Cell]]:
  """(mines, safe cells) that the memory names: `mine(r,c)`, `safe(a)(b)`, `(r,c) mine`, `(r,c) ok`."""
  mines, safe = set(), set()
  for attempt, bodies in zip(view.past, prompting.memory_bodies(view, _past), strict=True):
    if view.memory != "reflection_only":
      for step in attempt.steps:
        named = {"mine": mines, "ok": safe}.get(step.result.note)
        if named is not None:
          named.update(prompting.cells(step.action))
    if view.memory != "history_only":
      before, _, after = bodies[-1].partition("safe")
      mines.update(prompting.cells(before.partition("mine")[2]))
      safe.update(prompting.cells(after.partition("mine")[0]))
  return mines, safe - mines


class Clicker:
  """What all players share: a slip to a random closed cell, obedience to memory, reflections.

  `noise` is the probability of a random click, `obey` that this player heeds its memory at all,
  `useful` that a reflection names the mine and the safe clicks in the order they were made.
  """

  def __init__(
    self,
    options: Options,
    rng: np.random.Generator,
    noise: float = 0.0,
    obey: float = 1.0,
    useful: float = 1.0,
  ):
    self._options, self._rng, self._noise, self._useful = options, rng, noise, useful
    self._obeys = rng.random() < obey

  def play(self, view: base.View) -> str:
    board = read(view.current.now.text)
    closed = [cell for cell, symbol in board.items() if symbol == "?"]
    mines, safe = remembered(view) if self._obeys else (set(), set())
    if self._rng.random() < self._noise:
      cell = closed[int(self._rng.integers(len(closed)))]
    else:
      cell = self.choose(board, closed, mines, safe)
    return f"<action>{prompting.write(cell)}</action>"

  def reflect(self, view: base.View) -> str:
    notes = {"mine": [], "ok": [], "bad": []}
    for step in view.current.steps:
      notes[step.result.note].append(step.action)
    parts = ["mine" + "".join(notes["mine"])] if notes["mine"] else []
    if notes["ok"]:
      parts.append("safe" + "".join(notes["ok"][:_REMARK_CELLS]))
    useful = self._rng.random() < self._useful
    return f"<remark>{' '.join(parts) if parts and useful else 'lost'}</remark>"

  def choose(
    self, board: dict[Cell, str], closed: list[Cell], mines: set[Cell], safe: set[Cell]
  ) -> Cell:
    """The cell to open, given what the memory names."""
    raise TypeError(f"{type(self).__name__} is no player: it lacks this method")


class Random(Clicker):
  """A random closed cell."""

  def choose(self, board, closed, mines, safe):
    return closed[int(self._rng.integers(len(closed)))]


class Weak(Clicker):
  """The first closed cell, in reading order, next to the smallest visible number.

  Its mistakes are systematic: without memory it opens the same mine every time, and skipping a named
  mine changes what it does. That is what teaches a clone to read (experiments/tiny/README.md).
  """

  def choose(self, board, closed, mines, safe):
    allowed = [cell for cell in closed if cell not in mines] or closed
    neighbours = near(self._options.size)

    def smallest(cell: Cell) -> str:
      return min((board[n] for n in neighbours[cell] if board[n].isdigit()), default="9")

    return min(allowed, key=smallest)


class Solver(Clicker):
  """Opens what logic proves safe, else the least dangerous cell; ties in reading order.

  Logic: each number is a set of closed cells with a count of mines; sets inside sets are subtracted
  until nothing new follows. Danger of a cell: the largest ratio mines / cells of a set that holds it.
  """

  def choose(self, board, closed, mines, safe):
    mines = {cell for cell in mines if board.get(cell) == "?"}
    facts = deduce(self._options, board, mines)
    total = {cell: self._options.mines / len(closed) for cell in closed}
    danger = dict.fromkeys(closed, 0.0)
    for unknown, count in facts.items():
      for cell in unknown:
        danger[cell] = max(danger[cell], count / len(unknown))
        total[cell] = 0.0
    danger = {cell: max(danger[cell], total[cell]) for cell in closed}
    danger |= dict.fromkeys(mines, 2.0) | {cell: 0.0 for cell in safe if cell in danger}
    return min(closed, key=danger.__getitem__)


def deduce(
  options: Options, board: dict[Cell, str], mines: set[Cell]
) -> dict[frozenset[Cell], int]:
  """All facts "this set of closed cells holds that many mines" that the numbers give.

  A number minus the mines already known is a fact, and so is the difference of two facts of which
  one contains the other. Facts of count 0, or as many mines as cells, decide their cells.
  """
  neighbours, facts = near(options.size), {}
  for cell, symbol in board.items():
    if symbol.isdigit():
      around = [other for other in neighbours[cell] if board[other] == "?"]
      unknown = frozenset(other for other in around if other not in mines)
      if unknown:
        facts[unknown] = int(symbol) - (len(around) - len(unknown))
  queue = list(facts)
  while queue:
    one = queue.pop()
    for other in list(facts):
      small, large = (one, other) if len(one) < len(other) else (other, one)
      rest = large - small
      if small < large and rest not in facts:
        facts[rest] = facts[large] - facts[small]
        queue.append(rest)
  return facts


def mixture(options: Options, rng: np.random.Generator) -> base.Player:
  """The imitation mix: 60 % weak players and 40 % solvers with noise, 95 % obey memory.

  From 4 mines on solvers alone, with little noise: a weak player never wins there, and a solver has to
  guess, so that its own mistakes are systematic and a named mine changes what it does.
  """
  crowded = options.mines >= 4
  make = Weak if not crowded and rng.random() < 0.6 else Solver
  noise = float(rng.choice([0.0, 0.1] if crowded else [0.1, 0.3]))
  return prompting.Clumsy(make(options, rng, noise=noise, obey=0.95, useful=0.75), rng)


def _describe(options: Options, seed: int) -> str:
  task = draw(options, seed)
  return " ".join(
    name + "".join(map(prompting.write, sorted(cells)))
    for name, cells in (("mines", task.mines), ("opened", task.opened))
  )


FAMILY = base.Family(
  name="minesweeper",
  options=Options,
  make=Minesweeper,
  prompts=prompts,
  players={
    "random": Random,
    "weak": Weak,
    "weak_forgetful": functools.partial(Weak, obey=0.0),
    "solver": Solver,
    "solver_noisy": functools.partial(Solver, noise=0.3),
    "mixture": mixture,
  },
  describe=_describe,
)
