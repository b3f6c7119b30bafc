"""Rooms: find the key and the door that it fits, or the hatch of a maze, in fog and in few turns.

The environment of Complementary RL (2603.17621; there KeyRoom and MazeWalk of MiniHack) in small, in
the same text format. Two things are to be learned. **Knowledge**: every theme hides its things in the
same places in all its tasks (`rooms_world`), so an experience about a theme decides its later tasks, and
the weights can learn it too, slowly. **Skill**: to open, with the key at a door or on the hatch, which
helps with experience and without; a warm start kicks or walks on in half of its attempts.

Reward 1 for the right door or the hatch, else 0. `score` is the share of sub-goals that were reached.
"""

from __future__ import annotations

import functools
import re

from memrl_jax.envs import base, prompting, rooms_players
from memrl_jax.envs import rooms_world as world
from memrl_jax.envs.prompting import Cell
from memrl_jax.envs.rooms_world import Options

SUBGOALS = {"key": 4, "maze": 2}  # found, taken, brought to the door, opened; found, opened

# Verbs of answers stand bare, all else behind a space. Not yet in other environments: 13 words.
SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *(f"({row},{col})" for row in range(10) for col in range(10)),
  *("goal", "tip", *world.VERBS),
  *("add", "update", "merge", "discard", "keep", "return"),
  *(f" {name}" for name in (*world.THEMES, *world.KINDS)),
  *(" goal", " start", " at", " wall", " door", " with"),
  *(" open", " kick", " search", " ok", " bad", " locked"),
)

_ALSO = {
  "walk": "go", "move": "go", "pickup": "take", "get": "take", "unlock": "open", "apply": "open"
}  # fmt: skip


class Rooms(base.Seeded):
  """The environment. A turn is one action; its note is what came in sight, or what came of it."""

  def __init__(self, options: Options):
    super().__init__(options, world.draw, options.turns)

  def _begin(self, task: world.Task) -> base.Observation:
    self._world = world.World(task, self._options.side, self._options.stride)
    return self._observe(f"You are in a {task.theme} room.")

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    parsed, here = parse(response), self._world
    note = here.do(*parsed) if parsed else "malformed"
    self._turn += 1
    self._done = here.solved is not None or self._turn >= self._options.turns
    return base.StepResult(
      observation=self._observe(_said(note)),
      reward=float(bool(here.solved)),
      done=self._done,
      success=bool(here.solved),
      score=(len(here.reached) + bool(here.solved)) / SUBGOALS[here.task.kind],
      valid=bool(parsed),
      action=_canonical(*parsed) if parsed else "",
      note=note,
    )

  def _observe(self, message: str) -> base.Observation:
    task = self._world.task
    return base.Observation(
      text=_screen(self._world, message),
      anchor=_anchor(self._world),
      admissible=self._world.admissible(),
      goal=goal(self._options, task.theme),
      task=task.name,
    )


def parse(response: str) -> tuple[str, Cell | None] | None:
  """(verb, cell of `go`), None unless the tags hold exactly one action."""
  body = prompting.action_body(response) or ""
  found = prompting.cells(body)
  said = re.findall(r"[a-z]+", re.sub(r"\bpick up\b", "pickup", body))
  verbs = [_ALSO.get(word, word) for word in said if _ALSO.get(word, word) in world.VERBS]
  if len(verbs) != 1 or (verbs[0] == "go") != (len(found) == 1):
    return None
  if found and max(found[0]) > 9:
    return None
  return verbs[0], found[0] if found else None


def _canonical(verb: str, cell: Cell | None) -> str:
  return verb + (prompting.write(cell) if cell else "")


def _anchor(here: world.World) -> str:
  """The bare state: place, things in sight, whether the key is held."""
  shown = [f" {thing}{prompting.write(cell)}" for thing, cell in here.here()]
  return f"at{prompting.write(here.at)}{''.join(shown)}{' with key' if here.held else ''}"


# For readers.


_MEANINGS = {"wall": "wall", "floor": "floor", "key": "key", "door": "door", "goal": "hatch"}


def _screen(here: world.World, message: str) -> str:
  """Message, position, what has been seen of the map, legend, what is carried, what can be done."""
  rows = ["".join(row) for row in here.chart]
  row, col = here.at
  rows[row] = f"{rows[row][:col]}@{rows[row][col + 1 :]}"
  chart = "\n".join(line.rstrip() for line in rows)
  legend = [f"{sign} {_MEANINGS[name]}" for name, sign in world.SIGNS.items() if sign in chart]
  lines = [f"Message: {message}"] if message else []
  lines += [f"Position: {prompting.write(here.at)}.", "Map:", chart]
  lines.append(f"In view: {', '.join(['@ you', *legend])}")
  lines.append(f"You carry: {'key' if here.held else 'nothing'}")
  return "\n".join([*lines, "Actions: go (ROW,COLUMN), take, open, kick, search"])


def _said(note: str) -> str:
  """A note as a sentence."""
  if note in ("bad", "malformed", "locked", "ok", ""):
    return {
      "bad": "Nothing happens.",
      "malformed": "That is no action.",
      "locked": "It is locked, and you have no key.",
      "ok": "Taken.",
    }.get(note, "")
  if note.startswith(("ok", "bad")):
    return "It opens." if note.startswith("ok") else "That was the wrong one, and the end."
  return f"You see {', '.join(note.split())}."


# Prompts.


def goal(options: Options, theme: str) -> str:
  """What the agent is asked to do, and the theme."""
  if options.style == "brief":
    return f"goal {options.kind} {theme}"
  return _GOALS[options.kind].format(theme=theme)


def _log(attempt: base.AttemptLog) -> str:
  """Theme, start, then every stop and what came of it:

  red start(4,4)(4,1) wall(5,1)(2,1) key(2,2)(2,2) ok(1,3) door(0,3) kick open bad(0,3)
  """
  first = attempt.initial
  here = prompting.COORDINATE.search(first.anchor)[0]
  words = [f" {first.task.rpartition('/')[2]} start{here}{first.anchor[2 + len(here) :]}"]
  for step in attempt.steps:
    verb, note = step.action.partition("(")[0], step.result.note
    place = prompting.COORDINATE.search(step.result.observation.anchor)[0]
    if verb == "go" and place != here and not note.endswith((f"key{place}", f"goal{place}")):
      words.append(place)
    words.append(f" {verb}" if verb in ("open", "kick", "search") else "")
    silent = verb in ("kick", "search") or not note
    words.append("" if silent else f" {'bad' if note == 'malformed' else note}")
    here = place
  return "".join(words)


def _past(attempt: base.AttemptLog) -> str:
  return f"{_log(attempt)} {prompting.outcome(attempt)}"


_GOALS = {
  "key": "Leave the {theme} room: find its key and open the door that the key fits.",
  "maze": "Leave the {theme} maze: find the hatch that leads out, stand on it and open it.",
}

_RULES = {
  "key": (
    "One of the doors in the outer wall fits the key that lies somewhere; it breaks in any other, and the "
    "trial is over. You can open a door when you hold the key and the door is in sight. "
  ),
  "maze": (
    "One of several hatches leads out; to open another ends the trial. You can open the hatch on which "
    "you stand. "
  ),
}


def _wording(options: Options) -> prompting.Wording:
  return prompting.Wording(
    rules=(
      f"You are in a {'room' if options.kind == 'key' else 'maze'} of {options.side} rows and "
      f"{options.side} columns inside an outer wall. Rows and columns are counted from (1,1), top left. "
      "You see walls and doors one cell away, and what lies on the floor where you stand. "
      f"{_RULES[options.kind]}Rooms of one colour hide things in the same places, whatever else differs. "
      f"The actions are: go (ROW,COLUMN), which walks up to {options.stride} cells towards a cell and stops "
      f"where something new is seen, take, open, kick, search. A trial has {options.turns} turns of one action."
    ),
    request=(
      "Think about what you know and what is missing, then give exactly one action inside tags, for "
      "example <action>go (2,3)</action>."
    ),
    show=lambda text: text,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  shorthand = prompting.Shorthand(
    header=f"goal {options.kind}",
    past=_past,
    now=lambda attempt: f"{_log(attempt)} {attempt.now.anchor}",
    reflect=_past,
  )
  return prompting.written(options.style, shorthand, _wording(options))


def _describe(options: Options, seed: int) -> str:
  task = world.draw(options, seed)
  return repr(task._replace(walls=tuple(sorted(task.walls))))


FAMILY = base.Family(
  name="rooms",
  options=Options,
  make=Rooms,
  prompts=prompts,
  players={
    "random": rooms_players.Random,
    "solver": rooms_players.Solver,
    "explorer": rooms_players.Explorer,
    "explorer_blind": functools.partial(rooms_players.Explorer, reads=False),
    "mixture": rooms_players.mixture,
    "skilled": functools.partial(rooms_players.mixture, skilled=0.3),
  },
  describe=_describe,
)
