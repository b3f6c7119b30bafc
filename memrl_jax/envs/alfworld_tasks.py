"""Which ALFWorld games are played and how they are shown: no package needed.

A game is a chore of one of six types in one room. It is a published file where a folder of those is
named, and made by `alfworld_games` where none is. Splits are the published ones: "valid_seen" has new
games in the rooms of "train", "valid_unseen" has rooms of its own, and is what papers report on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base, panel

# Short name: (as files are named, what may be asked where; floor plans by room).
TYPES = {
  "pick": ("pick_and_place_simple", ("kitchen", "living", "bedroom", "bathroom")),
  "look": ("look_at_obj_in_light", ("living", "bedroom")),
  "clean": ("pick_clean_then_place_in_recep", ("kitchen", "bathroom")),
  "heat": ("pick_heat_then_place_in_recep", ("kitchen",)),
  "cool": ("pick_cool_then_place_in_recep", ("kitchen",)),
  "pick2": ("pick_two_obj_and_place", ("kitchen", "living", "bedroom", "bathroom")),
}
ROOMS = {"kitchen": 0, "living": 200, "bedroom": 300, "bathroom": 400}  # plan = this + 1..30
HELD_OUT = range(1, 7)  # of 1..30, as the package's own constants have it

SPLITS = ("train", "valid_seen", "valid_unseen")
SIZES = {"train": 3553, "valid_seen": 140, "valid_unseen": 134}  # as published, and as generated
STYLES = ("full", "chat")
GENERATED = "generated"
VARIABLE = "ALFWORLD_DATA"
_DRAW = 2010_03768  # stream of the draw of generated tasks
_PANEL_VERSION = 1


def canonical(kind: str) -> str:
  """The short name of a type given by either name.

  Raises:
    ValueError: it is neither.
  """
  for short, (long, _) in TYPES.items():
    if kind in (short, long):
      return short
  raise ValueError(
    f"ALFWorld task type {kind!r} is not known; choose from {', '.join(TYPES)} (config.env.types)"
  )


@dataclasses.dataclass(frozen=True)
class Options:
  """What is played and how it is shown.

  data: the folder of the published games (that of `alfworld-download`), or "generated"; "" is the folder
  that the environment variable ALFWORLD_DATA names, and generated games where it is not set.
  split: one of SPLITS, or "auto": training seeds play train, the dev half of the packaged panel plays
  valid_seen, its test half and all other seeds valid_unseen. types: those of TYPES that are played, ()
  for all. games: the first so many of them, in an order that mixes them (0: all of the split).
  turns: of an attempt. list_actions: whether every observation ends with the commands that do something.
  success_reward, failure_reward: what a solved task pays, and one whose turns ran out; Complementary RL
  has 1 and -1. format_ends: whether a response without an action ends the attempt and pays -1, as in its
  release; else it costs the turn.
  """

  data: str = ""
  split: str = "auto"
  types: tuple[str, ...] = ()
  games: int = 0
  turns: int = 40
  list_actions: bool = False
  success_reward: float = 1.0
  failure_reward: float = 0.0
  format_ends: bool = False
  style: str = "full"

  def __post_init__(self):
    object.__setattr__(self, "types", tuple(canonical(kind) for kind in self.types))
    for name, allowed in (("split", ("auto", *SPLITS)), ("style", STYLES)):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.env.{name})"
        )
    if self.turns < 1 or self.games < 0:
      raise ValueError(
        f"turns {self.turns} must be at least 1 and games {self.games} at least 0 "
        "(config.env.turns, config.env.games)"
      )
    if not float("-inf") < self.failure_reward < self.success_reward < float("inf"):
      raise ValueError(
        f"a failure that pays {self.failure_reward:g} and a success that pays {self.success_reward:g} turn "
        "the task around; let success pay more (config.env.success_reward, config.env.failure_reward)"
      )
    if self.data and self.folder:
      root(self.folder)  # a folder that the environment names is looked at when games are played

  @property
  def folder(self) -> str:
    """Where the published games are; "" where games are generated."""
    named = self.data or os.environ.get(VARIABLE, "") or GENERATED
    return "" if named == GENERATED else named


class Task(NamedTuple):
  """One game; written "heat-7/train-12", or as its folders are named. `path` is "" where it is generated."""

  kind: str
  plan: int
  split: str
  id: str
  path: str = ""

  def __str__(self) -> str:
    if self.path:
      return "/".join(pathlib.Path(self.path).parts[-3:-1])
    return f"{self.kind}-{self.plan}/{self.split}-{self.id}"


# Which task a seed is.


def draw(options: Options, seed: int) -> Task:
  """The task of a seed; seeds count through the games, and those of the panel by their place in it, so
  that each half of the panel plays all of its games before one comes again."""
  split, number = place(options, seed)
  choices = games(options.folder, split, options.types, options.games)
  return choices[number % len(choices)]


def place(options: Options, seed: int) -> tuple[str, int]:
  """(split of a seed, how many games of it come before)."""
  split, number = _panel_places().get(seed, (SPLITS[2], seed))
  if seed < base.TRAIN_SEEDS[1]:
    split = SPLITS[0]
  return (split if options.split == "auto" else options.split), number


@functools.cache
def _panel_places() -> dict[int, tuple[str, int]]:
  seeds = panel.draw("alfworld", _PANEL_VERSION)
  halves = {SPLITS[2]: seeds[: panel.SIDE], SPLITS[1]: seeds[panel.SIDE :]}
  return {
    seed: (split, number) for split, half in halves.items() for number, seed in enumerate(half)
  }


@functools.lru_cache(maxsize=64)
def games(folder: str, split: str, types: tuple[str, ...], most: int) -> tuple[Task, ...]:
  """The games of a split, by type, in their fixed order.

  Raises:
    ValueError: there are none.
  """
  known = published(folder, split) if folder else generated(split)
  chosen = [task for task in known if not types or task.kind in types]
  if not chosen:
    raise ValueError(
      f"{folder} has no solvable games of {', '.join(types) or 'any type'} in {split}; run "
      "alfworld-download, or choose other games (config.env.data, config.env.types)"
    )
  return tuple(chosen[:most] if most else chosen)


def find(options: Options, name: str) -> Task:
  """The task that is written so.

  Raises:
    ValueError: these options have no such task.
  """
  for split in SPLITS if options.split == "auto" else (options.split,):
    task = _by_name(options.folder, split).get(name)
    if task:
      return task
  raise ValueError(
    f"there is no ALFWorld task {name!r} in {options.folder or 'the generated games'}"
  )


@functools.lru_cache(maxsize=8)
def _by_name(folder: str, split: str) -> dict[str, Task]:
  return {str(task): task for task in (published(folder, split) if folder else generated(split))}


def plans(kind: str, split: str) -> list[int]:
  """The floor plans in which a type is asked for."""
  numbers = [n for n in range(1, 31) if (n in HELD_OUT) == (split == "valid_unseen")]
  return [ROOMS[room] + n for room in TYPES[kind][1] for n in numbers]


@functools.cache
def generated(split: str) -> tuple[Task, ...]:
  """As many as are published, the six types in turn; a task does not depend on how many there are."""
  tasks = []
  for number in range(SIZES[split]):
    rng = np.random.default_rng([_DRAW, SPLITS.index(split), number])
    kind = list(TYPES)[number % len(TYPES)]
    tasks.append(Task(kind, int(rng.choice(plans(kind, split))), split, str(number)))
  return tuple(tasks)


# The published files: SPLIT/TYPE-Object-Movable-Receptacle-PLAN/trial_.../game.tw-pddl


_FOLDER = re.compile(r"(\w+)-\w+-None-\w+-(\d+)")  # none with a movable receptacle
_SOLVABLE = re.compile(rb'"solvable"\s*:\s*true')


def root(folder: str) -> pathlib.Path:
  """The folder that holds the splits.

  Raises:
    ValueError: there are none.
  """
  given = pathlib.Path(folder).expanduser()
  for root in (given, given / "json_2.1.1"):
    if any((root / split).is_dir() for split in SPLITS):
      return root
  raise ValueError(
    f"{given} has no ALFWorld games (json_2.1.1/train, .../valid_unseen): run alfworld-download, name their "
    f'folder, or choose "{GENERATED}" (config.env.data, or the environment variable {VARIABLE})'
  )


@functools.lru_cache(maxsize=8)
def published(folder: str, split: str) -> tuple[Task, ...]:
  """The solvable games of a split, without sliced objects and movable receptacles as in the package.

  Their order is by hash of their names, so that the first few are of all types.
  """
  found = []
  for path in (root(folder) / split).glob("*/*/game.tw-pddl"):
    match = _FOLDER.fullmatch(path.parts[-3])
    kind = {long: short for short, (long, _) in TYPES.items()}.get(match[1]) if match else None
    if kind and "Sliced" not in path.parts[-3] and _SOLVABLE.search(path.read_bytes()):
      found.append(Task(kind, int(match[2]), split, path.parts[-2], str(path)))
  return tuple(sorted(found, key=lambda task: hashlib.sha256(str(task).encode()).hexdigest()))


def describe(options: Options, seed: int) -> str:
  """The task of a seed; of the generated games unless the options themselves name a folder, so that a
  panel is the same whatever the environment variable says."""
  return str(draw(dataclasses.replace(options, data=options.data or GENERATED), seed))
