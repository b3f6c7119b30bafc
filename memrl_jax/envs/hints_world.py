"""The world of the hints: containers that open in one way each, and which tasks there are.

A **town** has up to six families of containers, a **family** is a kind of container in a room ("box",
"hall"), and all of a family open alike: with one of four tools and then one of three digits, its
**procedure**. Only the colour of the container tells the tasks of a family apart, so their intents are
nearly the same text; the splits have different colours. A **copy** of an intent is one container: by some
lies a report with a procedure of its own, which opens this very container and none but it.

Towns whose number is below `RESERVED` are for experiments and tests; the tiny checkpoint is cloned on
others (experiments/tiny/imitate.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import prompting

CONTAINERS = ("jar", "chest", "box", "drawer", "case", "safe")
ROOMS = ("hall", "kitchen", "study", "cellar", "attic", "garden")
COLOURS = ("red", "blue", "green", "gold", "white", "black")
TOOLS = ("key", "pen", "pot", "lamp")
DIGITS = ("1", "2", "3")

TRAINED = 4  # colours of the split "train"; the others are held out
RESERVED = 8  # towns with a lower number are kept out of imitation
TOWNS = 4096

_TOWN_STREAM, _COPY_STREAM, _TASK_STREAM = 7501, 7502, 7503

Procedure = tuple[str, str]  # (tool, digit)


@dataclasses.dataclass(frozen=True)
class Options:
  """Which tasks and how long. `copies`: of each intent; `reported`: the share of them with a report."""

  town: int = 0
  split: str = "train"
  families: int = 6
  copies: int = 32
  reported: float = 0.15
  turns: int = 3
  style: str = "brief"

  def __post_init__(self):
    prompting.check_style(self.style)
    if not 0 <= self.town < TOWNS:
      raise ValueError(f"town {self.town} is not known; choose 0 to {TOWNS - 1} (config.env.town)")
    if self.split not in ("train", "heldout"):
      raise ValueError(
        f"split {self.split!r} is not known; choose train or heldout (config.env.split)"
      )
    if not 1 <= self.families <= len(CONTAINERS):
      raise ValueError(
        f"a town has 1 to {len(CONTAINERS)} families, not {self.families} (config.env.families)"
      )
    if self.copies < 1 or self.turns < 1:
      raise ValueError(
        f"{self.copies} copies of {self.turns} turns leave nothing to play; choose at least 1 of each "
        "(config.env.copies, config.env.turns)"
      )
    if not 0 <= self.reported <= 1:
      raise ValueError(
        f"{self.reported} is no share; choose reported between 0 and 1 (config.env.reported)"
      )

  @property
  def colours(self) -> tuple[str, ...]:
    return COLOURS[:TRAINED] if self.split == "train" else COLOURS[TRAINED:]


class Kin(NamedTuple):
  """A family: its kind of container, its room, and the procedure that opens all of them."""

  container: str
  room: str
  procedure: Procedure


class Task(NamedTuple):
  """One container; `report` is the procedure that opens it besides the family's, None without a report."""

  name: str
  kin: Kin
  colour: str
  report: Procedure | None

  @property
  def intent(self) -> str:
    return f"{self.colour} {self.kin.container} at {self.kin.room}"


@functools.cache
def town(number: int) -> tuple[Kin, ...]:
  """The families of a town: no two share container, room or procedure."""
  rng = np.random.default_rng([_TOWN_STREAM, number])
  containers, rooms = rng.permutation(CONTAINERS).tolist(), rng.permutation(ROOMS).tolist()
  every = [(tool, digit) for tool in TOOLS for digit in DIGITS]
  chosen = [every[i] for i in rng.permutation(len(every))[: len(containers)]]
  return tuple(Kin(*parts) for parts in zip(containers, rooms, chosen, strict=True))


def task(options: Options, family: int, colour: str, copy: int) -> Task:
  """A copy; it is the same however many there are. A report names another tool than the family's.

  Reports are dealt evenly: of any run of n copies of an intent n * reported have one, give or take one.
  """
  kin = town(options.town)[family]
  key = [_COPY_STREAM, options.town, family, COLOURS.index(colour)]
  phase = np.random.default_rng(key).random()
  dealt = int((copy + 1) * options.reported + phase) - int(copy * options.reported + phase)
  rng = np.random.default_rng([*key, copy])
  others = [tool for tool in TOOLS if tool != kin.procedure[0]]
  report = others[rng.integers(len(others))], DIGITS[rng.integers(len(DIGITS))]
  name = f"town-{options.town}/{kin.container}-{kin.room}/{colour}-{copy}"
  return Task(name, kin, colour, report if dealt else None)


def draw(options: Options, seed: int) -> Task:
  """The task of a seed, uniform over the copies of all intents of the split."""
  rng = np.random.default_rng([seed, _TASK_STREAM])
  family = int(rng.integers(options.families))
  colour = options.colours[rng.integers(len(options.colours))]
  return task(options, family, colour, int(rng.integers(options.copies)))


class World:
  """One attempt. `tool` is the tool that took hold ("" before), `solved` the verdict (None before)."""

  def __init__(self, task: Task):
    self.task = task
    self.tool = ""
    self.solved: bool | None = None

  def admissible(self) -> tuple[str, ...]:
    """All actions that have an effect, sorted."""
    if self.tool:
      return tuple(f"enter {digit}" for digit in DIGITS)
    return tuple(sorted(f"use {tool}" for tool in TOOLS))

  def do(self, action: str) -> str:
    """What came of it; a wrong tool or digit jams the lock for good."""
    if action not in self.admissible():
      return "nothing"
    verb, thing = action.split()
    known = [self.task.kin.procedure, *([self.task.report] if self.task.report else [])]
    if verb == "use":
      right = thing in [tool for tool, _ in known]
      self.tool = thing if right else ""
      self.solved = None if right else False
    else:
      right = self.solved = (self.tool, thing) in known
    return "ok" if right else "bad"
