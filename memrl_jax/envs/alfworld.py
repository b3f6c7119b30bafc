"""ALFWorld: chores in the rooms of a house, as text, on the real engine (2010.03768).

`alfworld_tasks` says what can be played, `alfworld_games` makes games where none were downloaded,
`alfworld_engine` runs them, `alfworld_text` reads an answer. An observation is the engine's own text,
"Nothing happens." included. Success is the engine's verdict that the goal holds. A game and all that
happens in it follow from its file, or its task, and the commands.
"""

from __future__ import annotations

from typing import Any

from memrl_jax.envs import alfworld_engine, alfworld_tasks, alfworld_text, base, prompting
from memrl_jax.envs.alfworld_tasks import Options, Task

NOTHING = "Nothing happens."
NO_ACTION = "no action was given; write one command inside <action> tags"
BAD_FORMAT = -1.0  # what `format_ends` pays


class AlfWorld(base.Seeded):
  """The environment; it borrows an engine at the first reset and gives it back when closed."""

  def __init__(self, options: Options):
    super().__init__(options, alfworld_tasks.draw, options.turns)
    if options.folder:
      alfworld_tasks.root(options.folder)
    self._game: alfworld_engine.Game | None = None

  def _begin(self, task: Task) -> base.Observation:
    if self._game is None:
      self._game = alfworld_engine.borrow()
    state = self._game.open(task)
    text, goal = alfworld_text.opening(state.feedback)
    self._asked = {"goal": goal, "task": str(task)}
    self._admissible = tuple(state["admissible_commands"])
    return self._observe(text)

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action = alfworld_text.parse(response, self._options.style)
    said, won = NOTHING, False
    if action:
      action = alfworld_text.command(action, self._admissible)
      state = self._game.step(action)
      said, won = state.feedback.strip(), bool(state["won"])
      self._admissible = tuple(state["admissible_commands"])
    self._turn += 1
    broken = not action and self._options.format_ends
    self._done = won or broken or self._turn >= self._options.turns
    reward = 0.0
    if self._done:
      reward = self._options.success_reward if won else self._options.failure_reward
    return base.StepResult(
      observation=self._observe(said),
      reward=BAD_FORMAT if broken else reward,
      done=self._done,
      success=won,
      score=float(won),
      valid=bool(action),
      action=action,
      note="" if action else NO_ACTION,
    )

  def _observe(self, text: str) -> base.Observation:
    if self._options.list_actions:
      text = f"{text}\nPossible actions: {', '.join(self._admissible)}"
    return base.Observation(text, self._game.state(), self._admissible, **self._asked)

  def close(self) -> None:
    if self._game is not None:
      game, self._game, self._done = self._game, None, True
      alfworld_engine.give_back(game)


# Prompts.


_COMMANDS = (
  ("go to R", "walk to a place; whatever is done there, you must be there first"),
  ("open R, close R", "what is inside of a closed place is seen, and reached, when it is open"),
  ("take O from R, move O to R", "you can carry one thing at a time"),
  (
    "heat O with R, cool O with R, clean O with R",
    "a microwave, a fridge, a sink basin, O in hand",
  ),
  ("use O", "switch on a lamp"),
  ("slice O with O", "with a knife in hand"),
  ("examine O, examine R, look, inventory", "what is there, and what you carry"),
)


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  rules = "\n".join(
    [
      "You are in a room of a house, and you have one chore to do there, stated below. You have "
      f"{options.turns} turns, one command in each. Commands, with O for an object and R for a place, such "
      "as apple 1 and fridge 1, always with their numbers:",
      *(f"- {command}: {meaning}" for command, meaning in _COMMANDS),
      f'A command that cannot be carried out is answered "{NOTHING}" and costs its turn all the same.',
    ]
  )
  request = (
    "Think about what the task still needs and where it may be found, then give your next command inside "
    "tags, for example <action>go to fridge 1</action>."
  )
  wording = prompting.Wording(rules, request, str)
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


# Players.


class Solver(prompting.Chooser):
  """Plays the solution that a game comes with, then looks around."""

  def choose(self, view: base.View) -> str:
    task = alfworld_tasks.find(self._options, view.current.initial.task)
    commands: Any = alfworld_engine.content(task).get("walkthrough")
    if not commands:
      raise ValueError(
        f"the file of {task} has no walkthrough to play; let the solver play generated games (config.env.data)"
      )
    turn = len(view.current.steps)
    return commands[turn] if turn < len(commands) else "look"


class Random(prompting.Chooser):
  """Uniform over the commands that do something."""

  def choose(self, view: base.View) -> str:
    return str(self._rng.choice(view.current.now.admissible))


FAMILY = base.Family(
  name="alfworld",
  options=Options,
  make=AlfWorld,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=alfworld_tasks.describe,
)
