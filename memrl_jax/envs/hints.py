"""The hints: one memory among many that look alike helps, others mislead.

Open a container: use the right tool, then enter the right digit, with no second try (`hints_world`). The
frozen model of MemRL (2601.03192) cannot know the procedure of a family and guesses; where a report lies
by the container it follows that, and wins alone. Both successes are remembered in the same words, but
only one of them is worth repeating:

    won box hall pen 3       the family's procedure: opens every box in the hall
    won box hall pot 1       what a report said: opened one box, and jams all others
    lost box hall pen 2 bad  the tool took hold: worth more than many a success
    lost box hall pot bad    true for nearly all, and wrong where a report says pot

The intents under which they are found differ in the colour alone, which means nothing. So similarity
cannot choose, and a utility learned from outcomes can.

`score` is .5 when the tool took hold, 1 when the container opened (`success`).
"""

from __future__ import annotations

import functools
import re

from memrl_jax.envs import base, hints_players, prompting
from memrl_jax.envs import hints_world as world
from memrl_jax.envs.hints_world import Options

# Verbs of answers stand bare after a tag, all else behind a space. Every word is one of other environments.
SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *("goal", "tip", "use", "enter"),
  *(f" {name}" for name in (*world.CONTAINERS, *world.ROOMS, *world.COLOURS, *world.TOOLS)),
  *(" open", " at", " report", " with", " ok", " bad"),
)

_FILLERS = ("the", "a", "digit", "number", "tool")  # "use the pen" is understood


class Hints(base.Seeded):
  """The environment. A turn is one action; its note is "ok", "bad" (the end), "nothing" or "malformed"."""

  def __init__(self, options: Options):
    super().__init__(options, world.draw, options.turns)

  def _begin(self, task: world.Task) -> base.Observation:
    self._world = world.World(task)
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action, here = parse(response), self._world
    note = here.do(action) if action else "malformed"
    self._turn += 1
    self._done = here.solved is not None or self._turn >= self._options.turns
    return base.StepResult(
      observation=self._observe(),
      reward=float(bool(here.solved)),
      done=self._done,
      success=bool(here.solved),
      score=(bool(here.tool) + bool(here.solved)) / 2,
      valid=bool(action),
      action=action,
      note=note,
    )

  def _observe(self) -> base.Observation:
    here = self._world
    return base.Observation(
      text=_sentences(here),
      anchor=_anchor(here),
      admissible=here.admissible(),
      goal=goal(self._options, here.task),
      task=here.task.name,
    )


def parse(response: str) -> str:
  """The canonical action "use TOOL" or "enter DIGIT"; "" unless the tags hold exactly one."""
  body = prompting.action_body(response) or ""
  said = [word for word in re.findall(r"\w+", body) if word not in _FILLERS]
  things = {"use": world.TOOLS, "enter": world.DIGITS}
  known = len(said) == 2 and said[1] in things.get(said[0], ())
  return " ".join(said) if known else ""


def _anchor(here: world.World) -> str:
  """The bare state: `red box at hall report pot 1 with pot`."""
  report = f" report {' '.join(here.task.report)}" if here.task.report else ""
  return f"{here.task.intent}{report}{f' with {here.tool}' if here.tool else ''}"


def _sentences(here: world.World) -> str:
  """The same for readers."""
  said = [_asked(here.task)]
  if here.task.report:
    said.append("A report lies beside it: use {}, enter {}.".format(*here.task.report))
  else:
    said.append("No report lies beside it.")
  said.append(f"The {here.tool} took hold." if here.tool else "Nothing has been used on it yet.")
  return " ".join(said)


# Prompts.


def _asked(task: world.Task) -> str:
  return f"Open the {task.colour} {task.kin.container} in the {task.kin.room}."


def goal(options: Options, task: world.Task) -> str:
  """What the agent is asked to do: the intent under which memories are searched."""
  return f"goal open {task.intent}" if options.style == "brief" else _asked(task)


def _past(attempt: base.AttemptLog) -> str:
  """What was seen and done: ` red box at hall report pot 1 with pen ok 3 bad lost`."""
  words = [f" {attempt.initial.anchor}"]
  for step in attempt.steps:
    if step.result.note in ("ok", "bad"):
      verb, _, thing = step.action.partition(" ")
      words.append(f"{' with' if verb == 'use' else ''} {thing} {step.result.note}")
  return f"{''.join(words)} {prompting.outcome(attempt)}"


def _wording(options: Options) -> prompting.Wording:
  return prompting.Wording(
    rules=(
      "You open containers that are locked in an odd way. First one of the tools "
      f"{', '.join(world.TOOLS)} has to be used on the lock, then a digit from 1 to {world.DIGITS[-1]} has "
      "to be entered. A wrong tool or a wrong digit jams the lock, and the trial is over. Containers of one "
      "kind in one room all open with the same tool and digit, whatever their colour. What a report says "
      "opens the container beside which it lies, but no other. "
      f"A trial has {options.turns} turns of one action: use TOOL, or enter DIGIT."
    ),
    request=(
      "Think about what you know, then give exactly one action inside tags, for example "
      "<action>use pen</action>."
    ),
    show=lambda text: text,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  shorthand = prompting.Shorthand(
    header="goal open",
    past=_past,
    now=lambda attempt: f" {attempt.now.anchor}",
    reflect=_past,
  )
  return prompting.written(options.style, shorthand, _wording(options))


FAMILY = base.Family(
  name="hints",
  options=Options,
  make=Hints,
  prompts=prompts,
  players={
    "random": hints_players.Random,
    "solver": hints_players.Solver,
    "reader": hints_players.Reader,
    "reader_blind": functools.partial(hints_players.Reader, reads=False),
    "mixture": hints_players.mixture,
  },
  describe=lambda options, seed: repr(world.draw(options, seed)),
)
