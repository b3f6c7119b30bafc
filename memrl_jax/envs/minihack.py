"""MiniHack: small worlds in the real NetHack, as text (2109.13202; the game is NLE, 2006.13760).

`minihack_tasks` says what can be played, `minihack_game` runs the games, `minihack_text` writes a screen
and reads an answer. A level and all that happens in it follow from its seed and the actions: the game
is seeded at every opening, and with it the moon, which in NetHack changes luck by the date. Success is
a positive reward at the end of the game; what the agent sees is what the game remembers to have shown
(fog of war).
"""

from __future__ import annotations

from typing import Any

from memrl_jax.envs import base, minihack_game, minihack_players, minihack_text, prompting
from memrl_jax.envs.minihack_tasks import Options, Task, draw, goal

NOT_UNDERSTOOD = (
  "not understood, nothing was played; name one of the listed actions in <action> tags"
)
_ENDINGS = {"TASK_SUCCESSFUL": "The task is done.", "DEATH": "You died."}
_ENDED = "The game ended: it ran out of moves."


class MiniHack(base.Seeded):
  """The environment; it holds one game, made at the first reset."""

  def __init__(self, options: Options):
    super().__init__(options, draw, options.turns)
    self._game: Any = None
    self._seen: base.Observation | None = None

  def _begin(self, task: Task) -> base.Observation:
    if self._game is None:
      self._game = minihack_game.start(task.name)
      kinds = self._game.actions
      self._actions = tuple(minihack_text.name(type(kind).__name__, kind.name) for kind in kinds)
    self._asked = {"goal": goal(task.name), "task": str(task)}
    seen = minihack_game.seed(self._game, task.seed)
    self._seen = self._observe(seen, minihack_text.message(seen))
    return self._seen

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    named = minihack_text.parse(response, self._options.style, self._actions)
    played, won, over, notes, messages = [], False, False, [], []
    for action in named[: self._options.moves_per_turn]:
      played.append(action)
      seen, reward, ended, cut, info = self._game.step(self._actions.index(action))
      over, won = ended or cut, (ended or cut) and reward > 0
      if over:  # the game has cleared its screen by now
        told = "The task is done." if won else _ENDINGS.get(info["end_status"].name, _ENDED)
        self._seen = base.Observation(told, told, **self._asked)
        break
      messages.append(minihack_text.message(seen))
    if messages and not over:
      self._seen = self._observe(seen, " ".join(filter(None, messages)))
    if not played:
      notes.append(NOT_UNDERSTOOD)
    elif len(named) > self._options.moves_per_turn:
      notes.append(f"of {len(named)} actions only the first {self._options.moves_per_turn} count")
    self._turn += 1
    self._done = over or self._turn >= self._options.turns
    return base.StepResult(
      observation=self._seen,
      reward=self._options.reward_scale if won else 0.0,
      done=self._done,
      success=won,
      score=float(won),
      valid=bool(played),
      action=", ".join(played),
      note="; ".join(notes),
    )

  def _observe(self, seen: dict[str, Any], message: str) -> base.Observation:
    options = self._options
    screen = minihack_text.read(seen, options.crop)
    text = minihack_text.write(
      screen, message, self._actions, inventory=options.inventory, status=options.status
    )
    return base.Observation(text, f"{screen.grid}\n{screen.inventory}", **self._asked)

  def close(self) -> None:
    if self._game is not None:
      game, self._game, self._done = self._game, None, True
      game.close()


# Prompts.


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  several = options.moves_per_turn > 1
  rules = (
    "You are the character @ in a small dungeon of the game NetHack, seen from above: north is up, west "
    "is left. The map shows the surroundings as far as you have seen them, with you in the middle; what "
    f"is blank was not seen yet. {goal(options.task)} You have {options.turns} turns"
    + (
      f" of up to {options.moves_per_turn} actions each.\n"
      if several
      else ", one action in each.\n"
    )
    + "Walking into a monster attacks it, walking into a boulder pushes it, and doors cannot be passed "
    "diagonally. Each turn lists the actions that there are."
  )
  what = "your next actions, parted by commas," if several else "your next action"
  request = (
    "Think about where you are, what is still unknown and what stands in your way, then give "
    f"{what} inside tags, for example <action>north</action>."
  )
  wording = prompting.Wording(rules, request, str)
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


FAMILY = base.Family(
  name="minihack",
  options=Options,
  make=MiniHack,
  prompts=prompts,
  players={"explorer": minihack_players.Explorer, "random": minihack_players.Random},
  describe=lambda options, seed: f"{draw(options, seed)} seed {draw(options, seed).seed}",
)
