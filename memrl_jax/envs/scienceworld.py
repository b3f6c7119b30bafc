"""ScienceWorld: elementary-school science in a house of text, on the real simulator (2203.07540).

30 tasks, from finding an animal to Mendelian genetics; `scienceworld_tasks` says which exist and what
can be chosen, `jvm` runs the simulator. The score is the simulator's, -100 to 100; a turn's reward is
its change, so that rewards sum to final minus first score. (The first is above 0 where a simplification
fulfils part of a task, 8 in find-animal for its open door.) Focusing on a wrong thing ends the episode
at -100. Success is 100 and nothing less.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re

import numpy as np

from memrl_jax.envs import base, jvm, prompting
from memrl_jax.envs.scienceworld_tasks import Options, Task, draw

CORRECTED = "corrected from"  # opens the note of a corrected action
ACTION_CHARS = 300  # of a response's action; no real one is longer
_MENU = "Ambiguous request"
_UNKNOWN = ("No known action", "Unknown action")


# The environment.


class ScienceWorld(base.Seeded):
  """The environment; it borrows a simulator at the first reset and gives it back when closed.

  `corrections` counts the actions that were replaced since it was made.
  """

  def __init__(self, options: Options):
    super().__init__(options, draw, options.max_calls)
    self._jvm: jvm.Jvm | None = None
    self.corrections = 0

  def _begin(self, task: Task) -> base.Observation:
    if self._jvm is None:
      self._jvm = jvm.borrow(_kind(self._options), self._options.jvms)
    with _Careful(self):
      look = self._jvm.load(*task, self._options.simplification_string)
      self._goal = " ".join(self._jvm.server.getTaskDescription().split())
      self._score = self._read_score()
      return self._observe(self._goal, look)

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action = parse(response, self._options.style)
    with _Careful(self):
      action, notes = self._correct(action)
      reply = self._act(action, notes) if action else "No action was given."
      before, self._score = self._score, self._read_score()
      over = bool(self._jvm.server.getCompleted()) or self._score < 0
      self._turn += 1
      self._done = over or self._turn >= self._options.max_calls
      observation = self._observe(reply, self._jvm.server.freeActionLook())
    known = bool(action) and not reply.startswith(_UNKNOWN)
    return base.StepResult(
      observation=observation,
      reward=float(self._score - before),
      done=self._done,
      success=self._score >= 100,
      score=max(self._score, 0) / 100,
      valid=known,
      action=action,
      note="; ".join(notes if known or not action else [*notes, "unknown action"]),
    )

  def _act(self, action: str, notes: list[str]) -> str:
    """Plays one action. A question back is answered here: the next input would be read as its answer."""
    reply = self._jvm.server.step(action)
    if not reply.startswith(_MENU):
      return reply
    if self._options.ambiguous == "first":
      notes.append("ambiguous, the first was taken")
      return self._jvm.server.step("0")
    notes.append("ambiguous, nothing was done")
    self._jvm.server.step("")
    return "That could mean any of these; say which:\n" + reply.split("\n", 1)[1].rstrip()

  def _correct(self, action: str) -> tuple[str, list[str]]:
    """The action to play and the note that it is another than the agent's."""
    if not (action and self._options.correction):
      return action, []
    closest = most_similar(action, self._valid())
    if closest == action:
      return action, []
    self.corrections += 1
    return closest, [f"{CORRECTED} {action!r}"]

  def _valid(self) -> tuple[str, ...]:
    found = json.loads(self._jvm.server.getValidActionObjectCombinationsJSON())
    return tuple(sorted({entry["action"] for entry in found["validActions"]}))

  def _read_score(self) -> int:
    return round(100 * self._jvm.server.getScore())

  def _observe(self, reply: str, look: str) -> base.Observation:
    state = f"{look.rstrip()}\n{self._jvm.server.freeActionInventory().rstrip()}"
    told = reply.rstrip()
    return base.Observation(
      text=state if told in state else f"{told}\n{state}",
      anchor=state,
      admissible=self._valid() if self._options.admissible else None,
      goal=self._goal,
      task=str(self._task),
    )

  def close(self) -> None:
    if self._jvm is not None:
      lent, self._jvm = self._jvm, None
      jvm.give_back(lent)

  def drop(self) -> None:
    """Ends the simulator: it died, or what state it is in nobody knows. The next reset takes another."""
    lent, self._jvm, self._done = self._jvm, None, True
    jvm.discard(lent)


def _kind(options: Options) -> jvm.Kind:
  return jvm.Kind(options.heap_mb, options.exact)


class _Careful:
  """Whatever is raised inside, Ctrl-C included, costs the environment its simulator."""

  def __init__(self, environment: ScienceWorld):
    self._environment = environment

  def __enter__(self) -> None:
    """Nothing to prepare."""

  def __exit__(self, kind, *_) -> None:
    if kind is not None:
      self._environment.drop()


def parse(response: str, style: str) -> str:
  """The action of a response: what stands in action tags; in chat style, without tags, its first line.

  Lower-cased, in single spaces; "" when there is none.
  """
  body = prompting.action_body(response)
  if body is None and style == "chat":
    body = next(iter(response.strip().splitlines()), "").lower()
  return " ".join((body or "").split())[:ACTION_CHARS]


def most_similar(action: str, valid: tuple[str, ...]) -> str:
  """The valid action with the largest Jaccard similarity of words, |A & B| / |A | B|.

  The first of equals; the action itself where no word is shared.
  """
  said = set(action.split())

  def similarity(other: str) -> float:
    words = set(other.split())
    return len(said & words) / len(said | words)

  best = max(valid, key=similarity, default=action)
  return best if similarity(best) > 0 else action


# Prompts.


_ACTIONS = (
  ("look around", "describe the place where you are"),
  ("look at X, look in X", "describe a thing, or what it contains"),
  ("inventory", "list what you carry"),
  ("task", "read the task again"),
  ("go to X", "walk through an open door to a neighbouring place"),
  ("open X, close X", "a door or a container"),
  ("pick up X, put down X", "into and out of your inventory"),
  ("move X to Y, pour X in Y, dunk X in Y", "put a thing or a liquid into a container or device"),
  ("mix X", "stir together what a container holds"),
  ("activate X, deactivate X", "switch a device on or off"),
  ("use X on Y", "use a tool or an instrument on a thing"),
  ("focus on X", "declare that X is the thing the task asks for"),
  ("read X, eat X, flush X", "what it says"),
  ("wait, wait1", "let ten moments pass, or one"),
)
_TELEPORT = ("teleport to X", "be in any place of this world at once, by its name")
_ELECTRICAL = ("connect X to Y, disconnect X", "wire up electrical parts")


def _wording(options: Options) -> prompting.Wording:
  actions = list(_ACTIONS)
  if options.simplified("teleportAction"):
    actions.append(_TELEPORT)
  if not options.simplified("noElectricalAction"):
    actions.append(_ELECTRICAL)
  rules = [
    "You are in a small simulated world of rooms, things, substances and living beings, and you have one "
    f"science task, stated below. An episode has at most {options.max_calls} actions. Progress is scored "
    "from 0 to 100.\nActions, with X and Y for things or places:",
    "\n".join(f"- {action}: {meaning}" for action, meaning in actions),
    "Name a thing by the words that descriptions use for it. In a place that you have not seen, look "
    "around first; things may be inside closed containers. After each action you are told what came of "
    "it, where you are and what you carry. An action that the world does not know does nothing and is "
    "spent all the same: try another wording or another idea rather than repeat it. Focus only on what "
    "the task asks you to focus on: a wrong focus fails the whole task at once.",
  ]
  if options.examples:
    text = pathlib.Path(options.examples).read_text("utf-8").strip()
    rules.append(f"Worked examples of other tasks:\n{text}")
  request = "Answer with your next action alone, on one line."
  if options.style == "full":
    request = (
      "Think about what is still missing and where it could be, then give your next action inside tags, "
      "for example <action>look around</action>."
    )
  return prompting.Wording("\n\n".join(rules), request, str)


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options, as a conversation by default."""
  wording = _wording(options)
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


# Players.


class Gold(prompting.Chooser):
  """Plays the simulator's own solution, then waits."""

  def choose(self, view: base.View) -> str:
    name, variation = view.current.initial.task.split("/")
    options, turn = self._options, len(view.current.steps)
    path = gold(name, int(variation), options.simplification_string, _kind(options), options.jvms)
    return path[turn] if turn < len(path) else "wait1"


@functools.lru_cache(maxsize=256)
def gold(
  name: str, variation: int, simplifications: str, kind: jvm.Kind, most: int
) -> tuple[str, ...]:
  """The simulator's solution of a variation; it plays one first, which takes up to half a minute."""
  lent = jvm.borrow(kind, most)
  try:
    lent.load(name, variation, simplifications, gold=True)
    path = tuple(lent.server.getGoldActionSequence())
  except BaseException:
    jvm.discard(lent)
    raise
  jvm.give_back(lent)
  return path


class Random(prompting.Chooser):
  """Uniform over the admissible actions that do not end the episode by a wrong focus."""

  def __init__(self, options: Options, rng: np.random.Generator):
    if not options.admissible:
      raise ValueError(
        "the random player draws from the admissible actions; turn them on "
        "(config.env.admissible=True)"
      )
    super().__init__(options, rng)

  def choose(self, view: base.View) -> str:
    valid = [a for a in view.current.now.admissible if not re.match(r"focus on|reset task", a)]
    return str(self._rng.choice(valid))


FAMILY = base.Family(
  name="scienceworld",
  options=Options,
  make=ScienceWorld,
  prompts=prompts,
  players={"gold": Gold, "random": Random},
  describe=lambda options, seed: str(draw(options, seed)),
)
