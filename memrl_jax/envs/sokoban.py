"""Sokoban: push every box onto a target, up to three moves a turn.

Rules, rewards and symbols follow the LaMer release (experiments/lamer.md 2.1); rooms come from
`sokoban_rooms`.

Symbols: `#` wall, `_` floor, `O` target, `X` box, `√` box on target, `P` player, `S` player on target.
Positions and sets of cells are integers (`sokoban_rooms`).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from memrl_jax.envs import base, prompting
from memrl_jax.envs.sokoban_rooms import (
  MOVES,
  PLAYER,
  Options,
  Task,
  bits,
  displacement,
  draw,
  push,
  read,
  show,
  solvable,
  steps,
)

WORDS = (*MOVES, "still")
STEP, ON_TARGET, OFF_TARGET, SOLVED = -0.1, 1.0, -1.0, 10.0  # rewards of a primitive action

SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *prompting.words("boxes", "did", "tried", "stuck", "push", "goal", "off", "wall", "bad", *WORDS),
  *("#", "_", "O", "X", "√", "P", "S"),
  *prompting.ROW_LABELS,
  *prompting.COORDINATES,
)

_REMARK_MOVES = 6  # moves in a reflection: 12 tokens with tags, words, a cell and the stop token


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
  return prompting.written(
    options.style,
    prompting.Shorthand(f"boxes {options.boxes}", _past, _now, _reflect),
    _wording(options),
  )


# Players: all of them read the board as it is shown.


def walks(room: Task) -> dict[int, list[str]]:
  """Cell -> shortest moves there without pushing, for every cell the player can reach."""
  free, routes, queue = room.floor & ~room.boxes, {room.player: []}, [room.player]
  for cell in queue:
    for move, step in steps(room.width).items():
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
      room = room._replace(boxes=after >> 7, player=after & PLAYER)
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
    raise TypeError(f"{type(self).__name__} is no player: it lacks this method")


def stuck_box(attempt: base.AttemptLog) -> str:
  """The cell in front of the player, where the last push of a stuck attempt left its box."""
  room, last = read(attempt.now.text), attempt.steps[-1].action.split()
  ahead = room.player + steps(room.width).get(last[-1] if last else "", 0)
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
    for box in bits(room.boxes):
      for order, (move, step) in enumerate(steps(room.width).items()):
        if box - step in routes and free >> box + step & 1 and box + step not in stuck:
          far = min(displacement(1 << box + step, 1 << t, room.width) for t in bits(room.targets))
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
