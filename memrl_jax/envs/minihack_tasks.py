"""Which MiniHack levels are played and how they are shown: no package needed.

A task is a level generator with an id, such as MiniHack-Room-Ultimate-5x5-v0; a level is one draw from
it. The levels of the two splits never meet: level k of "train" has game seed 2k, of "heldout" 2k + 1.
"""

from __future__ import annotations

import dataclasses
import re
from typing import NamedTuple

SPLITS = ("train", "heldout")
STYLES = ("full", "chat")

# The tasks of Complementary RL; any other id of the package can be played as well.
PAPER_TASKS = ("Room-Ultimate-5x5-v0", "MazeWalk-9x9-v0", "KeyRoom-Dark-S5-v0", "River-Narrow-v0")

_STAIRS = "the staircase down, shown as >, and step onto it."
GOALS = {
  "Room": f"Find {_STAIRS} Monsters and traps may be in the room.",
  "Corridor": f"Explore the rooms and corridors until you find {_STAIRS}",
  "CorridorBattle": f"Get past the monsters and reach {_STAIRS}",
  "MazeWalk": f"Find a way through the maze to {_STAIRS}",
  "ExploreMaze": f"Find a way through the maze to {_STAIRS}",
  "Labyrinth": f"Find a way through the labyrinth to {_STAIRS}",
  "HideNSeek": f"Keep out of the monster's sight and reach {_STAIRS}",
  "KeyRoom": "Pick up the key, shown as (, unlock the closed door, shown as +, by applying the key "
  f"beside the door, then reach {_STAIRS}",
  "LockedDoor": f"Get through the locked door, for example by kicking it, and reach {_STAIRS}",
  "ClosedDoor": f"Get through the closed door and reach {_STAIRS}",
  "River": "Push boulders, shown as `, into the river, shown as }, until there is a way across it, and "
  f"reach {_STAIRS}",
  "MultiRoom": f"Go through the doors from room to room and reach {_STAIRS}",
}  # fmt: skip
_GOAL = "Complete the MiniHack task {}."


def canonical(task: str) -> str:
  """The id without its prefix: "Room-Ultimate-5x5-v0".

  Raises:
    ValueError: it does not look like an id.
  """
  name = task.removeprefix("MiniHack-")
  if not re.fullmatch(r"\w+(-\w+)*-v\d+", name):
    raise ValueError(
      f"MiniHack task {task!r} is not an id; write one such as {PAPER_TASKS[0]} (config.env.task)"
    )
  return name


@dataclasses.dataclass(frozen=True)
class Options:
  """What is played and how it is shown.

  task: an id, with or without "MiniHack-". split: one of SPLITS. levels: how many levels there are to
  train on (0: a new one for each seed); held-out levels are unlimited.
  turns: of an attempt. moves_per_turn: how many actions of one response are played, at most.
  crop: cells shown to each side of the agent; 4 is the package's own 9x9. inventory, status: whether
  what is carried, and position and health, are told.
  reward_scale: what a success pays. Nothing else pays or costs: the package's own penalty for moves
  that change nothing is left out.
  """

  task: str = PAPER_TASKS[0]
  split: str = "train"
  levels: int = 0
  turns: int = 30
  moves_per_turn: int = 1
  crop: int = 4
  inventory: bool = True
  status: bool = False
  reward_scale: float = 1.0
  style: str = "full"

  def __post_init__(self):
    canonical(self.task)
    for name, allowed in (("split", SPLITS), ("style", STYLES)):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.env.{name})"
        )
    for name, least in (("levels", 0), ("turns", 1), ("moves_per_turn", 1), ("crop", 1)):
      if getattr(self, name) < least:
        raise ValueError(
          f"{name} {getattr(self, name)} is too small; choose at least {least} (config.env.{name})"
        )
    if self.levels and self.split != "train":
      raise ValueError(
        f"levels {self.levels} limits the training levels, and {self.split} levels are played; leave it "
        "at 0 (config.env.levels)"
      )
    if not 0 < self.reward_scale < float("inf"):
      raise ValueError(
        f"reward_scale {self.reward_scale:g} pays nothing for a success; choose a positive number "
        "(config.env.reward_scale)"
      )


class Task(NamedTuple):
  """One level; written "Room-Ultimate-5x5/train-17"."""

  name: str
  split: str
  level: int

  @property
  def seed(self) -> int:
    """The game's seed."""
    return 2 * self.level + SPLITS.index(self.split)

  def __str__(self) -> str:
    return f"{re.sub(r'-v[0-9]+$', '', self.name)}/{self.split}-{self.level}"


def draw(options: Options, seed: int) -> Task:
  """The level of a seed; seeds count through a limited number of levels."""
  level = seed % options.levels if options.levels else seed
  return Task(canonical(options.task), options.split, level)


def goal(task: str) -> str:
  """What the agent is asked to do, in one sentence or two, by kind of task."""
  name = canonical(task)
  return GOALS.get(name.split("-")[0], _GOAL.format(name))
