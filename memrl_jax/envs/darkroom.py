"""Dark Room: find a hidden goal in an empty room, in too few moves to see all of it.

An attempt is `turns` turns of `moves_per_turn` moves; walls keep the position; reaching the goal pays
10 and ends the attempt. Nothing but luck finds the goal in attempt 1, and nothing but memory of the
cells already searched makes attempts 2 and 3 better than luck: with the 5x5 room, start in the
centre and 8 moves, no policy without memory exceeds pass@3 = 1-(1-8/24)^3 = .704 and one with memory
reaches 1 (experiments/tiny/README.md).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base, prompting
from memrl_jax.envs.prompting import Cell

MOVES = {"up": (-1, 0), "right": (0, 1), "down": (1, 0), "left": (0, -1)}
GOAL_REWARD = 10.0
MALFORMED_REWARD = -0.1

SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *prompting.words("room", "path", "at", "searched", *MOVES),
  *prompting.COORDINATES,
)

_TASK_STREAM, _SPLIT_STREAM = 7101, 7106  # keep the draws of tasks and of the split apart


@dataclasses.dataclass(frozen=True)
class Options:
  """`split` restricts (start, goal) pairs: "train" and "heldout" share none, "all" is their union."""

  size: int = 5
  start: str = "center"  # or "random"
  turns: int = 4
  moves_per_turn: int = 2
  split: str = "all"
  heldout_fraction: float = 0.25
  style: str = "brief"

  def __post_init__(self):
    prompting.check_style(self.style)
    if not 2 <= self.size <= prompting.MAX_SIDE:
      raise ValueError(
        f"a room of {self.size}x{self.size} cannot be shown; choose a side from 2 to {prompting.MAX_SIDE} (config.env.size)"
      )
    if self.start not in ("center", "random"):
      raise ValueError(
        f"start {self.start!r} is not known; choose center or random (config.env.start)"
      )
    if self.turns < 1 or self.moves_per_turn < 1:
      raise ValueError(
        f"{self.turns} turns of {self.moves_per_turn} moves leave nothing to play; "
        "choose at least 1 of each (config.env.turns, config.env.moves_per_turn)"
      )
    if self.split not in ("all", "train", "heldout"):
      raise ValueError(
        f"split {self.split!r} is not known; choose all, train or heldout (config.env.split)"
      )
    pairs = len(_all_pairs(self.size, self.start))
    if self.split != "all" and not 1 <= round(self.heldout_fraction * pairs) < pairs:
      raise ValueError(
        f"holding out {self.heldout_fraction} of {pairs} (start, goal) pairs leaves one side empty; "
        "choose a fraction between 0 and 1 or a larger room (config.env.heldout_fraction)"
      )


class Task(NamedTuple):
  start: Cell
  goal: Cell


@functools.cache
def _all_pairs(size: int, start: str) -> tuple[Task, ...]:
  room = [(row, col) for row in range(1, size + 1) for col in range(1, size + 1)]
  middle = ((size + 1) // 2, (size + 1) // 2)
  starts = [middle] if start == "center" else room
  return tuple(Task(first, goal) for first in starts for goal in room if goal != first)


@functools.cache
def tasks(options: Options) -> tuple[Task, ...]:
  """All tasks of the split, by one fixed permutation per room: the halves are disjoint."""
  pairs = _all_pairs(options.size, options.start)
  if options.split == "all":
    return pairs
  order = np.random.default_rng([_SPLIT_STREAM, options.size]).permutation(len(pairs))
  heldout = set(order[: round(options.heldout_fraction * len(pairs))].tolist())
  wanted = options.split == "heldout"
  return tuple(pair for index, pair in enumerate(pairs) if (index in heldout) == wanted)


def draw(options: Options, seed: int) -> Task:
  """The task of a seed, uniform over the split."""
  choices = tasks(options)
  return choices[int(np.random.default_rng([seed, _TASK_STREAM]).integers(len(choices)))]


def walk(cell: Cell, move: str, size: int) -> Cell:
  """One move; a wall keeps the position."""
  row, col = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
  return (row, col) if 1 <= row <= size and 1 <= col <= size else cell


class Darkroom(base.Seeded):
  """The environment. An observation is the position; a turn's note lists the positions walked."""

  def __init__(self, options: Options):
    super().__init__(options, draw, options.turns)

  def _begin(self, task: Task) -> base.Observation:
    self._cell = task.start
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    body = prompting.action_body(response)
    moves = prompting.whole_words(body or "", tuple(MOVES))[: self._options.moves_per_turn]
    walked = []
    for move in moves:
      self._cell = walk(self._cell, move, self._options.size)
      walked.append(prompting.write(self._cell))
      if self._cell == self._task.goal:
        break
    self._turn += 1
    success = self._cell == self._task.goal
    self._done = success or self._turn >= self._options.turns
    return base.StepResult(
      observation=self._observe(),
      reward=GOAL_REWARD if success else 0.0 if moves else MALFORMED_REWARD,
      done=self._done,
      success=success,
      score=float(success),
      valid=bool(moves),
      action=" ".join(moves[: len(walked)]),
      note="".join(walked) or "malformed",
    )

  def _observe(self) -> base.Observation:
    text = prompting.write(self._cell)
    return base.Observation(text, text)


# Prompts.


def path(attempt: base.AttemptLog) -> list[Cell]:
  """Every position of an attempt in order, the start first."""
  walked = "".join(step.result.note for step in attempt.steps)
  return prompting.cells(attempt.initial.text + walked)


def _write_path(attempt: base.AttemptLog) -> str:
  return "path" + "".join(map(prompting.write, path(attempt)))


def _past(attempt: base.AttemptLog) -> str:
  return f"{_write_path(attempt)} {prompting.outcome(attempt)}"


_SHORTHAND = prompting.Shorthand(
  header="room",
  past=_past,
  now=lambda attempt: f" {_write_path(attempt)} at{attempt.now.text}",
  reflect=lambda attempt: f" {_past(attempt)}",
)


def _wording(options: Options) -> prompting.Wording:
  side, moves = options.size, options.moves_per_turn
  return prompting.Wording(
    rules=(
      f"You are in a dark, empty room of {side} rows and {side} columns. Cells are written (row,col), "
      f"from (1,1) at the top left to ({side},{side}) at the bottom right. A goal is hidden in one "
      "cell; you notice it only when you stand on it. The moves are up (row - 1), down (row + 1), "
      "left (col - 1) and right (col + 1); walking into a wall leaves you where you are. A trial has "
      f"{options.turns} turns of up to {moves} moves. The goal stays in the same cell in every trial, "
      "so cells that were searched before need not be searched again."
    ),
    request=(
      f"Think about which cells are still unsearched, then give your next moves, up to {moves}, "
      "separated by commas, inside tags, for example <action>up, left</action>."
    ),
    show=lambda text: f"You are at {text}.",
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  return prompting.written(options.style, _SHORTHAND, _wording(options))


# Players.


def _remark(view: base.View, useful: bool) -> str:
  """Names the searched cells in the order of the path, the start left out; or says only "lost"."""
  searched = dict.fromkeys(path(view.current)[1:])
  searched.pop(path(view.current)[0], None)
  body = "searched" + "".join(map(prompting.write, searched)) if useful and searched else "lost"
  return f"<remark>{body}</remark>"


class RandomWalk:
  """Uniform moves; forgets everything. Writes a useful reflection with probability `useful`."""

  def __init__(self, options: Options, rng: np.random.Generator, useful: float = 1.0):
    self._options, self._rng, self._useful = options, rng, useful

  def play(self, view: base.View) -> str:
    moves = self._rng.choice(list(MOVES), self._options.moves_per_turn)
    return f"<action>{' '.join(moves)}</action>"

  def reflect(self, view: base.View) -> str:
    return _remark(view, self._rng.random() < self._useful)


class Sweeper:
  """Walks to the nearest cell not yet seen, ties by a fixed order of directions.

  Cells of this attempt and (with `memory`) cells named in the memory count as seen. With probability
  `noise` a move is random. For every past attempt that names no cell the order is turned by one: a
  player that walks one path again and again would teach a clone to copy its memory
  (experiments/tiny/README.md).
  """

  def __init__(
    self,
    options: Options,
    rng: np.random.Generator,
    noise: float = 0.0,
    memory: bool = True,
    useful: float = 1.0,
    order: Sequence[str] = tuple(MOVES),
  ):
    self._options, self._rng, self._order = options, rng, list(order)
    self._noise, self._memory, self._useful = noise, memory, useful

  def play(self, view: base.View) -> str:
    bodies = prompting.memory_bodies(view, _past) if self._memory else []
    named = [prompting.cells(" ".join(body)) for body in bodies]
    seen = set(path(view.current)).union(*named)
    turned = sum(not cells for cells in named) % len(self._order)
    order = self._order[turned:] + self._order[:turned]
    cell, moves = path(view.current)[-1], []
    for _ in range(self._options.moves_per_turn):
      move = self._next(cell, seen, order)
      if self._rng.random() < self._noise:
        move = str(self._rng.choice(list(MOVES)))
      cell = walk(cell, move, self._options.size)
      seen.add(cell)
      moves.append(move)
    return f"<action>{' '.join(moves)}</action>"

  def reflect(self, view: base.View) -> str:
    return _remark(view, self._rng.random() < self._useful)

  def _next(self, cell: Cell, seen: set[Cell], order: Sequence[str]) -> str:
    side = range(1, self._options.size + 1)
    fresh = [(row, col) for row in side for col in side if (row, col) not in seen]

    def distance(move: str) -> int:
      there = walk(cell, move, self._options.size)
      return min((abs(there[0] - row) + abs(there[1] - col) for row, col in fresh), default=0)

    return min(order, key=distance)


def mixture(options: Options, rng: np.random.Generator) -> base.Player:
  """The imitation mix: 30 % random walk, 70 % sweeper with memory, each with an order of its own.

  The orders differ so that first attempts of a clone differ too: a start that walks one path would be
  a poor one for every method without memory.
  """
  if rng.random() < 0.3:
    player = RandomWalk(options, rng, useful=0.85)
  else:
    order = rng.permutation(list(MOVES)).tolist()
    player = Sweeper(options, rng, noise=float(rng.choice([0.0, 0.3])), useful=0.85, order=order)
  return prompting.Clumsy(player, rng)


def _describe(options: Options, seed: int) -> str:
  task = draw(options, seed)
  return f"start{prompting.write(task.start)} goal{prompting.write(task.goal)}"


FAMILY = base.Family(
  name="darkroom",
  options=Options,
  make=Darkroom,
  prompts=prompts,
  players={
    "random": RandomWalk,
    "sweeper": Sweeper,
    "sweeper_noisy": functools.partial(Sweeper, noise=0.3),
    "sweeper_blind": functools.partial(Sweeper, memory=False),
    "mixture": mixture,
  },
  describe=_describe,
)
