"""Sokoban: push every box onto a target, up to three moves a turn.

Rules, rewards and symbols follow the LaMer release (experiments/lamer.md 2.1); rooms come from our own
generator in the spirit of gym-sokoban: a random walk carves the floor, and play in reverse from the
solved room gives starts that are solvable by construction.

Symbols: `#` wall, `_` floor, `O` target, `X` box, `√` box on target, `P` player, `S` player on target.
Sets of cells are integers: bit row*width + col, 0-indexed. A position is boxes << 7 | player.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base, prompting

MOVES = ("up", "down", "left", "right")
WORDS = (*MOVES, "still")
STEP, ON_TARGET, OFF_TARGET, SOLVED = -0.1, 1.0, -1.0, 10.0  # rewards of a primitive action

SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *prompting.words("boxes", "did", "tried", "stuck", "push", "goal", "off", "wall", "bad", *WORDS),
  *("#", "_", "O", "X", "√", "P", "S"),
  *prompting.ROW_LABELS,
  *prompting.COORDINATES,
)

_TASK_STREAM = 7301
_REMARK_MOVES = 6  # moves in a reflection: 12 tokens with tags, words, a cell and the stop token
_POSITIONS = 300_000  # most positions that are listed to know which are solvable
_PLAYER = 127  # mask of the player's cell in a position


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


def _steps(width: int) -> dict[str, int]:
  return {"up": -width, "down": width, "left": -1, "right": 1}


def _bits(cells: int) -> list[int]:
  return [bit for bit in range(cells.bit_length()) if cells >> bit & 1]


def push(floor: int, width: int, position: int, move: str) -> int:
  """The position after one move; unchanged where a wall or a blocked box stands in the way."""
  boxes, player = position >> 7, position & _PLAYER
  there = player + _steps(width)[move]
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
  layer = [targets << 7 | player for player in _bits(floor & ~targets)]
  moves, distance = dict.fromkeys(layer, 0), 0
  while layer:
    distance, before, layer = distance + 1, layer, []
    for position in before:
      boxes, player = position >> 7, position & _PLAYER
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


def _displacement(boxes: int, targets: int, width: int) -> int:
  """Steps between the boxes and their targets in the cheapest pairing, walls ignored."""
  places = [divmod(bit, width) for bit in _bits(targets)]
  return min(
    sum(
      abs(row - place[0]) + abs(col - place[1])
      for (row, col), place in zip(pairing, places, strict=True)
    )
    for pairing in itertools.permutations([divmod(bit, width) for bit in _bits(boxes)])
  )


def _propose(options: Options, rng: np.random.Generator) -> tuple[Task, int] | None:
  """A room with its optimal solution length; None where no box can leave its target.

  Of three positions that reverse play reaches with every target empty, the one whose boxes are
  farthest from their targets.
  """
  floor = _carve(options, rng)
  if floor.bit_count() < 2 * options.boxes + 1:
    return None
  picked = rng.permutation(_bits(floor))[: options.boxes].tolist()
  targets = sum(1 << bit for bit in picked)
  moves = solvable.__wrapped__(floor, options.width, targets)
  starts = [position for position in moves if not position >> 7 & targets]
  if not starts:
    return None
  drawn = [starts[index] for index in rng.integers(len(starts), size=3).tolist()]
  start = max(drawn, key=lambda position: _displacement(position >> 7, targets, options.width))
  task = Task(options.height, options.width, floor, targets, start >> 7, start & _PLAYER)
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
  boxes, player = position >> 7, position & _PLAYER

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


# The environment.


class Sokoban(base.Seeded):
  """The environment; an observation is the board, and a turn's note has one word per action."""

  def __init__(self, options: Options):
    super().__init__(options, draw, options.turns)

  def _begin(self, task: Task) -> base.Observation:
    self._position = task.boxes << 7 | task.player
    self._used, self._won = 0, False
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    actions = self._parse(response)
    rewards, notes = [], []
    for action in actions or ["bad"]:
      reward, note = self._act(action)
      rewards.append(reward)
      notes.append(note)
      if self._over() and not self._options.released:
        break
    self._turn += 1
    dead = self._dead()
    self._done = self._over() or self._turn >= self._options.turns
    boxes = self._position >> 7
    return base.StepResult(
      observation=self._observe(),
      reward=rewards[-1] if self._options.released else sum(rewards),
      done=self._done,
      success=self._won,
      score=(boxes & self._task.targets).bit_count() / self._task.targets.bit_count(),
      valid=bool(actions),
      action=" ".join(actions[: len(notes)]),
      note=" ".join([*notes, "stuck"] if dead else notes),
    )

  def _parse(self, response: str) -> list[str]:
    """Up to `actions_per_turn` whole words; the release takes the first substring of every piece."""
    body = prompting.action_body(response) or ""
    if self._options.released:
      pieces = body.split(",")
      hits = [next((word for word in WORDS if word in piece), None) for piece in pieces]
      actions = [word for word in hits if word]
    else:
      actions = prompting.whole_words(body, WORDS)
    return actions[: self._options.actions_per_turn]

  def _act(self, action: str) -> tuple[float, str]:
    """Plays one primitive action: its reward, and the word for what came of it."""
    self._used += 1
    if action not in MOVES:
      return STEP, action  # "still", or "bad" for a malformed turn
    task, before = self._task, self._position
    self._position = push(task.floor, task.width, before, action)
    if self._position == before:
      return STEP, "wall"
    boxes, boxes_before = self._position >> 7, before >> 7
    if boxes == boxes_before:
      return STEP, "ok"
    gained = (boxes & task.targets).bit_count() - (boxes_before & task.targets).bit_count()
    reward = STEP + {1: ON_TARGET, 0: 0.0, -1: OFF_TARGET}[gained]
    if boxes == task.targets:
      self._won = True
      reward += SOLVED
    return reward, {1: "goal", 0: "push", -1: "off"}[gained]

  def _dead(self) -> bool:
    """Whether no sequence of moves solves this position any more."""
    return self._position not in solvable(self._task.floor, self._task.width, self._task.targets)

  def _over(self) -> bool:
    return self._won or self._dead() or self._used >= self._options.max_steps

  def _observe(self) -> base.Observation:
    text = show(self._task, self._position)
    return base.Observation(text, text)


# Prompts.


def _acts(attempt: base.AttemptLog) -> str:
  """Actions in order, each with what came of it unless it was a plain move: ` up left push`."""
  pieces = []
  for step in attempt.steps:
    for action, note in zip(step.action.split() or ["bad"], step.result.note.split(), strict=False):
      pieces.append(f" {action}" if note in ("ok", action) else f" {action} {note}")
  return "".join(pieces)


def ending(attempt: base.AttemptLog) -> str:
  """How it ended: "won", "stuck" when no move could solve it any more, "lost" when turns ran out."""
  stuck = bool(attempt.steps) and attempt.steps[-1].result.note.endswith("stuck")
  return "stuck" if stuck and not attempt.success else prompting.outcome(attempt)


def _past(attempt: base.AttemptLog) -> str:
  return f"did{_acts(attempt)} {ending(attempt)}"


def _now(attempt: base.AttemptLog) -> str:
  did = "".join(f" {step.action}" if step.action else " bad" for step in attempt.steps)
  return f"\n{attempt.now.text}\ndid{did}"


def _reflect(attempt: base.AttemptLog) -> str:
  return f"{_acts(attempt)}\n{attempt.now.text}\n{ending(attempt)}"


def _wording(options: Options) -> prompting.Wording:
  most = options.actions_per_turn
  return prompting.Wording(
    rules=(
      f"You play Sokoban in a room of {options.height} rows and {options.width} columns with "
      f"{options.boxes} boxes. `#` is a wall, `_` floor, `O` an empty target, `X` a box, `√` a box on a "
      "target, `P` you, `S` you on a target. Rows count from 1 at the top. up, down, left and right "
      "move you one cell; walking into a box pushes it one cell if the cell behind it is free. Boxes "
      "cannot be pulled, and two boxes cannot be pushed at once. You win when every box is on a target. "
      "A trial ends early once the boxes can no longer be brought to the targets. A trial has "
      f"{options.turns} turns of up to {most} actions. The room is the same in every trial."
    ),
    request=(
      "Think about where each box has to go and which pushes would trap it, then give your next "
      f"actions, up to {most}, separated by commas, inside tags, for example <action>up, left, left</action>. "
      "The word still waits for one action."
    ),
    show=prompting.spaced,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  if options.style == "full":
    return prompting.full(_wording(options))
  return prompting.brief(prompting.Shorthand(f"boxes {options.boxes}", _past, _now, _reflect))


# Players: all of them read the board as it is shown.


def walks(room: Task) -> dict[int, list[str]]:
  """Cell -> shortest moves there without pushing, for every cell the player can reach."""
  free, routes, queue = room.floor & ~room.boxes, {room.player: []}, [room.player]
  for cell in queue:
    for move, step in _steps(room.width).items():
      if free >> cell + step & 1 and cell + step not in routes:
        routes[cell + step] = [*routes[cell], move]
        queue.append(cell + step)
  return routes


class Mover:
  """What all players share: slips, obedience to memory, reflections.

  `noise` is the probability that a move is random, `obey` that this player heeds its memory at all,
  `useful` that a reflection names the first moves and the cell where a box got stuck.
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
    room, moves = read(view.current.now.text), []
    memory = str(prompting.memory_bodies(view, _past)) if self._obeys else ""
    plan = self.plan(room, memory, first=not view.current.steps)
    for index in range(self._options.actions_per_turn):
      if self._rng.random() < self._noise:
        plan = [*plan[:index], str(self._rng.choice(MOVES))]
      if index >= len(plan):
        plan += self.plan(room, memory, first=False)
      moves.append(plan[index])
      after = push(room.floor, room.width, room.boxes << 7 | room.player, plan[index])
      room = room._replace(boxes=after >> 7, player=after & _PLAYER)
      if room.boxes == room.targets:
        break
    return f"<action>{' '.join(moves)}</action>"

  def reflect(self, view: base.View) -> str:
    attempt = view.current
    if self._rng.random() >= self._useful:
      return "<remark>lost</remark>"
    tried = " ".join(step.action or "bad" for step in attempt.steps).split()[:_REMARK_MOVES]
    where = stuck_box(attempt) if ending(attempt) == "stuck" else ""
    return f"<remark>tried {' '.join(tried)} {ending(attempt)}{where}</remark>"

  def plan(self, room: Task, memory: str, first: bool) -> list[str]:
    """At least one move from here; `first` at the start of an attempt."""
    raise NotImplementedError


def stuck_box(attempt: base.AttemptLog) -> str:
  """The cell in front of the player, where the last push of a stuck attempt left its box."""
  room, last = read(attempt.now.text), attempt.steps[-1].action.split()
  ahead = room.player + _steps(room.width).get(last[-1] if last else "", 0)
  row, col = divmod(ahead, room.width)
  return prompting.write((row + 1, col + 1)) if room.boxes >> ahead & 1 else ""


class Random(Mover):
  """Uniform moves."""

  def plan(self, room, memory, first):
    return [str(self._rng.choice(MOVES))]


class Solver(Mover):
  """Shortest solutions; a random move where there is none."""

  def plan(self, room, memory, first):
    left, position = solvable(room.floor, room.width, room.targets), room.boxes << 7 | room.player
    plan = []
    while left.get(position, 0) > 0 and len(plan) < self._options.actions_per_turn:
      options = {move: push(room.floor, room.width, position, move) for move in MOVES}
      move = min(MOVES, key=lambda move: left.get(options[move], math.inf))
      position = options[move]
      plan.append(move)
    return plan or [str(self._rng.choice(MOVES))]


class Greedy(Mover):
  """Pushes the first box (in reading order) that is off target nearer to a target, ties in fixed order.

  Its mistakes are systematic: without memory it traps the same box every time. It never pushes a box
  onto a cell that memory names as stuck, nor begins an attempt with the moves that memory says were
  tried, so that reading changes what it does.
  """

  def plan(self, room, memory, first):
    stuck = {(row - 1) * room.width + col - 1 for row, col in prompting.cells(memory)}
    ranked = sorted(self._pushes(room, stuck))
    plans = [plan for *_, plan in ranked] or [[str(self._rng.choice(MOVES))]]
    if first:
      plans = [p for p in plans if not _named(p, memory)] or plans
    return plans[0]

  def _pushes(self, room: Task, stuck: set[int]):
    """(on target, box, distance to the nearest target, order, moves) of every allowed push."""
    routes, free = walks(room), room.floor & ~room.boxes
    for box in _bits(room.boxes):
      for order, (move, step) in enumerate(_steps(room.width).items()):
        if box - step in routes and free >> box + step & 1 and box + step not in stuck:
          far = min(_displacement(1 << box + step, 1 << t, room.width) for t in _bits(room.targets))
          yield room.targets >> box & 1, box, far, order, [*routes[box - step], move]


def _named(plan: list[str], memory: str) -> bool:
  return any(f"{word} {' '.join(plan)} " in memory for word in ("tried", "did"))


def mixture(options: Options, rng: np.random.Generator) -> base.Player:
  """The imitation mix, as in MineSweeper: 60 % greedy, 40 % solver, 95 % obey memory."""
  make = Greedy if rng.random() < 0.6 else Solver
  noise = float(rng.choice([0.1, 0.3]))
  return prompting.Clumsy(make(options, rng, noise=noise, obey=0.95, useful=0.75), rng)


def _describe(options: Options, seed: int) -> str:
  task = draw(options, seed)
  return show(task, task.boxes << 7 | task.player)


FAMILY = base.Family(
  name="sokoban",
  options=Options,
  make=Sokoban,
  prompts=prompts,
  players={
    "random": Random,
    "greedy": Greedy,
    "greedy_forgetful": functools.partial(Greedy, obey=0.0),
    "solver": Solver,
    "solver_noisy": functools.partial(Solver, noise=0.3),
    "mixture": mixture,
  },
  describe=_describe,
)
