"""Which ScienceWorld tasks and variations exist, and what an agent is asked to play: no Java needed.

The counts were read from the simulator (package scienceworld 1.2.3); `tests/real/test_scienceworld.py`
compares all of them with it. A task's variations are numbered from 0: first those of the training
split, then dev, then test, without gaps or overlaps.
"""

from __future__ import annotations

import dataclasses
import pathlib
import warnings
from typing import NamedTuple

SPLITS = ("train", "dev", "test")

# name: (short id, variations of train, dev, test)
TASKS = {
  "boil": ("1-1", 14, 7, 9),
  "melt": ("1-2", 14, 7, 9),
  "freeze": ("1-3", 14, 7, 9),
  "change-the-state-of-matter-of": ("1-4", 14, 7, 9),
  "use-thermometer": ("2-1", 270, 135, 135),
  "measure-melting-point-known-substance": ("2-2", 218, 109, 109),
  "measure-melting-point-unknown-substance": ("2-3", 150, 75, 75),
  "power-component": ("3-1", 10, 5, 5),
  "power-component-renewable-vs-nonrenewable-energy": ("3-2", 10, 5, 5),
  "test-conductivity": ("3-3", 450, 225, 225),
  "test-conductivity-of-unknown-substances": ("3-4", 300, 150, 150),
  "find-living-thing": ("4-1", 150, 75, 75),
  "find-non-living-thing": ("4-2", 150, 75, 75),
  "find-plant": ("4-3", 150, 75, 75),
  "find-animal": ("4-4", 150, 75, 75),
  "grow-plant": ("5-1", 62, 31, 33),
  "grow-fruit": ("5-2", 62, 31, 33),
  "chemistry-mix": ("6-1", 16, 8, 8),
  "chemistry-mix-paint-secondary-color": ("6-2", 18, 9, 9),
  "chemistry-mix-paint-tertiary-color": ("6-3", 18, 9, 9),
  "lifespan-longest-lived": ("7-1", 62, 31, 32),
  "lifespan-shortest-lived": ("7-2", 62, 31, 32),
  "lifespan-longest-lived-then-shortest-lived": ("7-3", 62, 31, 32),
  "identify-life-stages-1": ("8-1", 6, 3, 5),
  "identify-life-stages-2": ("8-2", 4, 2, 4),
  "inclined-plane-determine-angle": ("9-1", 84, 42, 42),
  "inclined-plane-friction-named-surfaces": ("9-2", 692, 346, 348),
  "inclined-plane-friction-unnamed-surfaces": ("9-3", 80, 40, 42),
  "mendelian-genetics-known-plant": ("10-1", 60, 30, 30),
  "mendelian-genetics-unknown-plant": ("10-2", 240, 120, 120),
}

# The rows of EMPO2's Table 1: 18, although its text says 19.
PAPER_TASKS = (
  "chemistry-mix",
  "chemistry-mix-paint-secondary-color",
  "chemistry-mix-paint-tertiary-color",
  "find-animal",
  "find-living-thing",
  "find-non-living-thing",
  "find-plant",
  "identify-life-stages-1",
  "identify-life-stages-2",
  "lifespan-longest-lived",
  "lifespan-longest-lived-then-shortest-lived",
  "lifespan-shortest-lived",
  "power-component",
  "power-component-renewable-vs-nonrenewable-energy",
  "test-conductivity",
  "test-conductivity-of-unknown-substances",
  "measure-melting-point-known-substance",
  "use-thermometer",
)

SIMPLIFICATIONS = (
  "teleportAction",
  "openDoors",
  "openContainers",
  "selfWateringFlowerPots",
  "noElectricalAction",
)
AMBIGUOUS = ("first", "cancel")
STYLES = ("chat", "full")
MIN_HEAP_MB = 96  # a world and its list of valid actions


class Task(NamedTuple):
  """One variation; written "find-animal/225"."""

  name: str
  variation: int

  def __str__(self) -> str:
    return f"{self.name}/{self.variation}"


def canonical(task: str) -> str:
  """The name of a task given by name or short id.

  Raises:
    ValueError: neither is known.
  """
  for name, (short, *_) in TASKS.items():
    if task in (name, short):
      return name
  raise ValueError(
    f"ScienceWorld task {task!r} is not known; choose a name such as find-animal or a short id such as "
    "4-4 from memrl_jax/envs/scienceworld_tasks.py (config.env.task)"
  )


def variations(task: str, split: str) -> range:
  """All variations of a split, as the simulator numbers them."""
  counts = TASKS[canonical(task)][1:]
  start = sum(counts[: SPLITS.index(split)])
  return range(start, start + counts[SPLITS.index(split)])


def electrical(task: str) -> bool:
  """Whether a task cannot do without connecting things; "easy" leaves these actions in then."""
  return "power-component" in task or "conductivity" in task


@dataclasses.dataclass(frozen=True)
class Options:
  """What is played and how it is shown.

  task: a name or short id of TASKS. split: one of SPLITS. variations: the first so many of the split
  (0: all); EMPO2 trains on the first 5 and tests on the first 20. Where fewer exist, those that
  exist are played and a warning says so.
  simplifications: ("easy",) is what EMPO2's environment plays (teleport, open doors, self-watering pots,
  and no electrical actions but for electrical tasks); or any of SIMPLIFICATIONS; () for none.
  max_calls: turns of an episode. The simulator itself counts moves, and an input that it does not
  know, or a look around, is free there.
  ambiguous: what is done when the simulator asks which of several things is meant: "first" takes the
  first, "cancel" does nothing (a moment passes all the same) and shows the list.
  correction: replace each action by the most similar admissible one (Jaccard over words), as EMPO2's
  release does; every replacement is noted in its step. admissible: list what is admissible in every
  observation, for scripted players and re-scoring; it costs some 30 ms a turn and is never in a prompt.
  examples: a text file with worked examples for the first message; the same for every arm.
  exact: the same actions give the same episode, letter by letter, as retries, groups and crash recovery
  assume; False is a fifth faster, and object order and small temperature differences vary then.
  heap_mb: the most that one simulator's Java heap takes (its process takes about 100 MB more).
  jvms: the most simulators of one process; more trials alive than this are refused.
  """

  task: str = "find-animal"
  split: str = "train"
  variations: int = 5
  simplifications: tuple[str, ...] = ("easy",)
  max_calls: int = 30
  ambiguous: str = "first"
  correction: bool = False
  admissible: bool = False
  style: str = "chat"
  examples: str = ""
  exact: bool = True
  heap_mb: int = 256
  jvms: int = 16

  def __post_init__(self):
    object.__setattr__(self, "task", canonical(self.task))
    self._check_choices()
    self._check_simplifications()
    if self.max_calls < 1 or self.jvms < 1 or self.heap_mb < MIN_HEAP_MB:
      raise ValueError(
        f"max_calls {self.max_calls}, jvms {self.jvms} and heap_mb {self.heap_mb} must be at least 1, 1 and "
        f"{MIN_HEAP_MB} (config.env)"
      )
    if self.examples and not pathlib.Path(self.examples).is_file():
      raise ValueError(
        f"there is no file of worked examples at {self.examples}; give the path of a text file, or none "
        "(config.env.examples)"
      )
    exist = len(variations(self.task, self.split))
    if self.variations < 0:
      raise ValueError(
        f"{self.variations} variations cannot be played; choose a positive number, or 0 for all "
        "(config.env.variations)"
      )
    if self.variations > exist:
      warnings.warn(
        f"{self.variations} {self.split} variations of {self.task} were asked for and {exist} exist: those "
        "are played",
        stacklevel=3,
      )

  def _check_choices(self) -> None:
    for name, allowed in (("split", SPLITS), ("style", STYLES), ("ambiguous", AMBIGUOUS)):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.env.{name})"
        )

  def _check_simplifications(self) -> None:
    names = self.simplification_string.split(",")
    unknown = [name for name in names if name not in (*SIMPLIFICATIONS, "easy", "")]
    if unknown:
      raise ValueError(
        f"simplification {unknown[0]!r} is not known; choose from easy, {', '.join(SIMPLIFICATIONS)} "
        "(config.env.simplifications)"
      )
    if "noElectricalAction" in names and electrical(self.task):
      raise ValueError(
        f"{self.task} cannot be solved without electrical actions; leave out noElectricalAction "
        "(config.env.simplifications)"
      )

  @property
  def simplification_string(self) -> str:
    """As the simulator reads it: names joined by commas."""
    return ",".join(self.simplifications)

  def simplified(self, name: str) -> bool:
    """Whether one of SIMPLIFICATIONS is in force; "easy" is all but openContainers."""
    if "easy" in self.simplification_string.split(",") and name != "openContainers":
      return name != "noElectricalAction" or not electrical(self.task)
    return name in self.simplification_string.split(",")


def played(options: Options) -> range:
  """The variations that these options play."""
  exist = variations(options.task, options.split)
  return exist[: options.variations] if options.variations else exist


def draw(options: Options, seed: int) -> Task:
  """The task of a seed: seeds count through the variations, so that as many consecutive seeds as there
  are variations play each of them once."""
  choices = played(options)
  return Task(options.task, choices[seed % len(choices)])
