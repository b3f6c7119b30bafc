"""The lab: find out which sample is the right one, and do not touch any before you know.

Somewhere a report names one of the samples that stand in the lab. To read it takes a chain of finds in
other rooms (`lab_world`), in few turns. Focusing the sample it names pays 100. Focusing any sample
earlier, or another one, is irreversible: it costs 100 and ends the attempt, also when the guess is right.
So an agent without memory learns first to focus nothing; what pays is scattered over episodes, each of
which finds one piece, and the same in every variation of a family. The environment of EMPO2
(2602.23008) in small: a lasting memory can pool the pieces, and the weights can learn them.

`score` is the share of the four sub-goals that were reached, `success` only the right focus.
"""

from __future__ import annotations

import functools
import re

from memrl_jax.envs import base, lab_players, prompting
from memrl_jax.envs import lab_world as world
from memrl_jax.envs.lab_world import Options

SOLVED, LOST = 100.0, -100.0
SUBGOALS = 4

# Verbs stand bare after a tag, all else behind a space. Not yet in other environments: 31 words.
SYMBOLS = (
  *prompting.SHARED_SYMBOLS,
  *("goal", "tip", *world.VERBS),
  *(f" {name}" for name in world.OBJECTS),
  *(" at", " with", " goal", " focus", " empty", " ok", " bad", " locked", " dark", " code"),
)

_FILLERS = ("the", "a", "to", "on", "at", "sample", "code")  # "go to the kitchen" is understood


class Lab(base.Seeded):
  """The environment. A turn is one action; its note is what came of it ("key", "empty", "locked")."""

  def __init__(self, options: Options):
    super().__init__(options, world.draw, options.turns)

  def _begin(self, task: world.Task) -> base.Observation:
    self._world = world.World(task, self._options.kinds)
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action, here = parse(response), self._world
    before = len(here.reached)
    note = here.do(action) if action else "malformed"
    reward = self._options.progress * (len(here.reached) - before)
    if here.solved is not None:
      reward += SOLVED if here.solved else LOST
    self._turn += 1
    self._done = here.solved is not None or self._turn >= self._options.turns
    return base.StepResult(
      observation=self._observe(),
      reward=reward,
      done=self._done,
      success=bool(here.solved),
      score=(len(here.reached) + bool(here.solved)) / SUBGOALS,
      valid=bool(action),
      action=action,
      note=note,
    )

  def _observe(self) -> base.Observation:
    return base.Observation(
      text=_sentences(self._world),
      anchor=_anchor(self._world),
      admissible=self._world.admissible(),
      goal=goal(self._options),
      task=self._world.task.name,
    )


def parse(response: str) -> str:
  """The canonical action "verb thing"; "" unless the tags hold exactly one."""
  body = prompting.action_body(response) or ""
  said = [word for word in re.findall(r"\w+", body) if word not in _FILLERS]
  known = len(said) == 2 and said[0] in world.VERBS and said[1] in world.OBJECTS
  return " ".join(said) if known else ""


def _anchor(here: world.World) -> str:
  """The bare state: place, what is open here and holds what, what is carried and known."""
  shown = [f" {kind} {thing}".rstrip() for kind, thing in here.contents().items()]
  if here.room == world.LAB:
    shown += [f" {colour}" for colour in here.task.samples]
  if here.room in here.cases:
    shown.append(" case report" if here.report_here() else " case")
  held = [f" {thing}" for thing in here.carried]
  held += [" lamp"] if here.lit else []
  held += [f" code {here.code}"] if here.code else []
  named = f" goal {here.named}" if here.named else ""
  return f"at {here.room}{''.join(shown)}{' with' if held else ''}{''.join(held)}{named}"


def _sentences(here: world.World) -> str:
  """The same for readers, with what is still closed."""
  if here.room == world.LAB:
    things = [f"the samples {', '.join(here.task.samples)}"]
  else:
    inside = {kind: f"open, {thing or 'empty'}" for kind, thing in here.contents().items()}
    things = [f"a {kind} ({inside.get(kind, 'closed')})" for kind in here.kinds]
    if here.task.chain == "lamp":
      things.append(f"a lamp ({'on' if here.lit else 'off'})")
    else:
      holds = "open, " + ("report" if here.report_here() else "empty")
      things.append(f"a case ({holds if here.room in here.cases else 'locked'})")
  known = [f"You carry: {', '.join(here.carried) or 'nothing'}."]
  known += [f"You know the code {here.code}."] if here.code else []
  known += [f"The report names {here.named}."] if here.named else []
  return " ".join([f"You are in the {here.room}. You see {', '.join(things)}.", *known])


# Prompts.


def goal(options: Options) -> str:
  """What the agent is asked to do; says of the family only which chain it has."""
  return f"goal {options.chain}" if options.style == "brief" else _GOALS[options.chain]


def _log(attempt: base.AttemptLog) -> str:
  """Rooms, containers and finds in order: ` hall jar pen kitchen box key attic case report`.

  An empty container has nothing behind it; taking and reading show in what is held and known.
  """
  words = [" " + attempt.initial.anchor.split()[1]]
  for step in attempt.steps:
    verb, _, thing = step.action.partition(" ")
    note = step.result.note
    if note in ("bad", "malformed") and verb not in ("use", "enter"):
      words.append(" bad")
    elif verb in ("open", "unlock", "use", "enter", "focus"):
      words.append(f" {thing} {note}" if note != "empty" else f" {thing}")
    elif verb == "go" or note == "dark":
      words.append(f" {thing}" if verb == "go" else " dark")
  return "".join(words)


def _past(attempt: base.AttemptLog) -> str:
  return f"{_log(attempt)} {prompting.outcome(attempt)}"


def _wording(options: Options) -> prompting.Wording:
  means = {
    "key": "take THING, unlock case (needs the key)",
    "code": "take THING, enter DIGIT (opens the case it belongs to)",
    "lamp": "take THING, use lamp (only one lamp works; the report cannot be read in the dark)",
  }[options.chain]
  return prompting.Wording(
    rules=(
      f"You explore a house with the rooms {', '.join(world.ROOMS)}; every room can be reached from "
      f"every room. {_GOALS[options.chain]} The samples stand in the lab. Focusing a sample before you have "
      "read the report, or a wrong one, costs 100 points and ends the trial at once. The actions are: "
      f"go ROOM, open CONTAINER, {means}, read report, focus COLOUR. A trial has {options.turns} turns of "
      "one action. Things lie in the same places in every trial of a task."
    ),
    request=(
      "Think about what you know and what is missing, then give exactly one action inside tags, for "
      "example <action>go kitchen</action>."
    ),
    show=lambda text: text,
  )


_GOALS = {
  "key": (
    "Focus the sample that the report names. The report lies in one of the locked cases; a key is "
    "hidden in a container somewhere."
  ),
  "code": (
    "Focus the sample that the report names. The report lies in one of the locked cases; the digit that "
    "opens it is written down in a container somewhere."
  ),
  "lamp": (
    "Focus the sample that the report names. The report lies in a container somewhere; it can be read "
    "once the one working lamp of the house is on."
  ),
}


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  shorthand = prompting.Shorthand(
    header=f"goal {options.chain}",
    past=_past,
    now=lambda attempt: f"{_log(attempt)} {attempt.now.anchor}",
    reflect=_past,
  )
  return prompting.written(options.style, shorthand, _wording(options))


def _describe(options: Options, seed: int) -> str:
  return repr(world.draw(options, seed))


FAMILY = base.Family(
  name="lab",
  options=Options,
  make=Lab,
  prompts=prompts,
  players={
    "random": lab_players.Random,
    "solver": lab_players.Solver,
    "explorer": lab_players.Explorer,
    "explorer_blind": functools.partial(lab_players.Explorer, reads=False),
    "hasty": lab_players.Hasty,
    "mixture": lab_players.mixture,
  },
  describe=_describe,
)
