"""Which tasks of a browser benchmark are played and how they are shown: no package needed.

A task has a name, such as click-test, and instances: MiniWoB draws a page from a seed, WorkArena a record,
WebArena's have one each. Splits: "train" are training tasks, "seen" the same with instances that training
never shows, "unseen" has tasks of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

from memrl_jax.envs import base, browser_calls, panel

SPLITS = ("train", "seen", "unseen")
STYLES = ("full", "chat")
MARKS = ("all", "standard_html")
LEVELS = 2**26  # instances a task, at most; seeds of the package end at 2^32


def parity(level: int, held_out: bool) -> int:
  """The seed of an instance: training has the even ones, the held-out ones are odd."""
  return 2 * level + held_out


class Suite(NamedTuple):
  """The tasks of a benchmark.

  `prefix` makes ids of names. `names` are those it has, `held_out` the tasks of "unseen". An `open` suite may
  have others. A task has so many `instances`; `seed(level, held_out)` is the package's seed of one, in two
  series that never meet.
  """

  family: str
  prefix: str
  names: tuple[str, ...]
  held_out: frozenset[str]
  open: bool = False
  instances: int = LEVELS
  seed: Callable[[int, bool], int] = parity

  def split(self, name: str) -> tuple[str, ...]:
    unseen = name == SPLITS[2]
    return tuple(task for task in self.names if (task in self.held_out) == unseen)

  def check(self, task: str) -> None:
    """Raises ValueError when there is no such task."""
    if task in self.names or (self.open and task):
      return
    near = difflib.get_close_matches(task, self.names, n=5, cutoff=0)
    raise ValueError(
      f"{self.family} has no task {task!r} among its {len(self.names)}; nearest are {', '.join(near)} "
      "(config.env.tasks)"
    )


ANY = Suite("browser", "", ("miniwob.click-test",), frozenset(), open=True)


@dataclasses.dataclass(frozen=True)
class Options:
  """What is played and how it is shown; families of one benchmark have other defaults.

  tasks: names, () for all of the split; where they are named, "seen" and "unseen" play them too.
  split: one of SPLITS, or "auto": training seeds play train, the dev half of the packaged panel plays seen,
  its test half and all other seeds unseen. instances: of each task there are to train on (0: no limit).
  turns: of an attempt. actions: groups of `browser_calls.ACTIONS` that may be used.
  page_chars: room for a page; about 3.5 make a token. What is left out is said (`browser_text.page`).
  images: whether a picture of the page goes with its text, for models that take them.
  mark: which elements get an id, "all" or only those of BrowserGym's "standard_html".
  settle_s: seconds between an action and the look at the page. BrowserGym waits .5, and a tenth of a second
  or a whole one within each step of an action, which is left out here.
  executable: the browser's program, "" for the first of `browser_engine.NAMES`.
  reward_scale: what a success pays; tasks that give a part of it pay that part.
  """

  tasks: tuple[str, ...] = ANY.names
  split: str = "auto"
  instances: int = 0
  turns: int = 15
  actions: tuple[str, ...] = browser_calls.GROUPS
  page_chars: int = 12_000
  images: bool = False
  mark: str = "standard_html"
  settle_s: float = 0.5
  executable: str = ""
  reward_scale: float = 1.0
  style: str = "full"

  suite: ClassVar[Suite] = ANY

  def __post_init__(self):
    for name, allowed in (
      ("split", ("auto", *SPLITS)),
      ("mark", MARKS),
      ("style", STYLES),
    ):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.env.{name})"
        )
    for name in ("tasks", "actions"):
      if isinstance(getattr(self, name), str):
        raise ValueError(
          f"{name} is a list, also of one; write it with a comma (config.env.{name})"
        )
    unknown = [group for group in self.actions if group not in browser_calls.GROUPS]
    if unknown:
      raise ValueError(
        f"there are no actions {unknown[0]!r}; choose from {', '.join(browser_calls.GROUPS)} "
        "(config.env.actions)"
      )
    for task in self.tasks:
      self.suite.check(task)
    if not self.tasks and self.suite is ANY:
      raise ValueError(
        "no task is named; name BrowserGym's, such as miniwob.click-test (config.env.tasks)"
      )
    for name, least in (("instances", 0), ("turns", 1), ("page_chars", 200), ("settle_s", 0)):
      if not least <= getattr(self, name) < float("inf"):
        raise ValueError(
          f"{name} {getattr(self, name)} is too small; choose at least {least} (config.env.{name})"
        )
    if not 0 < self.reward_scale < float("inf"):
      raise ValueError(
        f"reward_scale {self.reward_scale:g} pays nothing for a success; choose a positive number "
        "(config.env.reward_scale)"
      )

  def names(self, split: str) -> tuple[str, ...]:
    return self.tasks or self.suite.split(split)


class Task(NamedTuple):
  """One instance; written "click-test/train-17". `id` is BrowserGym's without "browsergym/"."""

  name: str
  split: str
  level: int
  id: str
  seed: int

  def __str__(self) -> str:
    return f"{self.name}/{self.split}-{self.level}"


def draw(options: Options, seed: int) -> Task:
  """The task of a seed: seeds count through the tasks of their split, then through instances; those of the
  panel count by their place in it, so that each half plays all of its tasks before one comes again."""
  suite = options.suite
  split, number = _panel_places(suite.family).get(seed, (SPLITS[2], seed))
  if seed < base.TRAIN_SEEDS[1]:
    split = SPLITS[0]
  split = split if options.split == "auto" else options.split
  names = options.names(split)
  level, which = divmod(number, len(names))
  level %= options.instances if options.instances and split == SPLITS[0] else suite.instances
  name = names[which]
  return Task(name, split, level, suite.prefix + name, suite.seed(level, split != SPLITS[0]))


@functools.cache
def _panel_places(family: str) -> dict[int, tuple[str, int]]:
  seeds = panel.draw(family, 1)
  halves = {SPLITS[2]: seeds[: panel.SIDE], SPLITS[1]: seeds[panel.SIDE :]}
  return {
    seed: (split, number) for split, half in halves.items() for number, seed in enumerate(half)
  }


def parts(options: Options) -> int:
  """Among how many tasks training seeds are dealt."""
  return len(options.names(SPLITS[0] if options.split == "auto" else options.split))


def benchmarks(options: Options) -> list[str]:
  """BrowserGym's benchmarks to which the tasks belong."""
  names = options.tasks or options.suite.names
  return sorted({(options.suite.prefix + name).partition(".")[0] for name in names})


def describe(options: Options, seed: int) -> str:
  task = draw(options, seed)
  return f"{task} {task.id} seed {task.seed}"
