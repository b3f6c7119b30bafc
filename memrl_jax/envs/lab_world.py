"""The world of the lab: rooms, things, the rules of what happens, and which tasks there are.

A **family** fixes the procedure ("key-0": in which container the key lies, in which room's case the
report), a **variation** of it the rest: where the agent starts, which samples stand in the lab, which
one the report names, what lies about. So what is learned on training variations holds on held-out ones.

Three chains of sub-goals, each found out only by searching:

    key    take the key from a container, unlock the one case that holds the report, read, focus
    code   find the code in a container, enter it at the one case that opens, read, focus
    lamp   use the one lamp that lights the house, find the report in a container, read, focus

Families whose number is below `RESERVED` are for training and for out-of-distribution tests; the tiny
checkpoint is cloned on higher numbers only (experiments/tiny/imitate.py).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import prompting

SEARCHED = ("hall", "kitchen", "study", "cellar", "attic", "garden")  # rooms with containers
LAB = "lab"  # the room with the samples; nothing is hidden there
ROOMS = (*SEARCHED, LAB)
CONTAINERS = ("jar", "chest", "box", "drawer")  # every searched room has the first few of them
CLUTTER = ("pen", "pan", "pot")  # can be taken, serve no purpose
COLOURS = ("red", "blue", "green", "gold", "white", "black")
CODES = tuple("123456789")
CHAINS = ("key", "lamp", "code")
VERBS = ("go", "open", "take", "unlock", "use", "enter", "read", "focus")
OBJECTS = (*ROOMS, *CONTAINERS, *CLUTTER, *COLOURS, *CODES, "key", "lamp", "case", "report")

SAMPLES = 4  # in the lab, of six colours
CLUTTERED = 5  # containers with clutter
HELDOUT = 16  # held-out variations of a family
RESERVED = 8  # families with a lower number are kept out of imitation

_PLACE_STREAM, _VARIATION_STREAM, _TASK_STREAM = 7301, 7302, 7303

Place = tuple[str, str]  # (room, container)


@dataclasses.dataclass(frozen=True)
class Options:
  """Which tasks, how long, how rewarded.

  `variations`: how many the split "train" has ("heldout" always has HELDOUT others). `containers`: in
  each of the six searched rooms. `progress`: points paid for each of the three sub-goals before the
  last, on the scale on which solving pays 100.
  """

  family: str = "key-0"
  split: str = "train"
  variations: int = 8
  turns: int = 12
  containers: int = 3
  progress: float = 0.0
  style: str = "brief"

  def __post_init__(self):
    prompting.check_style(self.style)
    if not 1 <= self.containers <= len(CONTAINERS):
      raise ValueError(
        f"{self.containers} containers in a room cannot be named; choose 1 to {len(CONTAINERS)} "
        "(config.env.containers)"
      )
    known, count = re.fullmatch(rf"({'|'.join(CHAINS)})-(\d+)", self.family), self.families
    if not known or int(known[2]) >= count:
      raise ValueError(
        f"family {self.family!r} is not known; choose one of {', '.join(CHAINS)} and a number from 0 "
        f"to {count - 1}, as in key-0 (config.env.family)"
      )
    if self.split not in ("train", "heldout"):
      raise ValueError(
        f"split {self.split!r} is not known; choose train or heldout (config.env.split)"
      )
    if self.variations < 1 or self.turns < 1:
      raise ValueError(
        f"{self.variations} variations of {self.turns} turns leave nothing to play; choose at least 1 "
        "of each (config.env.variations, config.env.turns)"
      )
    if not 0 <= self.progress <= 100:
      raise ValueError(
        f"progress of {self.progress} points is not between 0 and the 100 of a solved task "
        "(config.env.progress)"
      )

  @property
  def chain(self) -> str:
    return self.family.partition("-")[0]

  @property
  def families(self) -> int:
    """How many families each chain has: the hiding place and another room."""
    return len(SEARCHED) * self.containers * (len(SEARCHED) - 1)

  @property
  def kinds(self) -> tuple[str, ...]:
    return CONTAINERS[: self.containers]


class Task(NamedTuple):
  """One variation. `hidden` holds the key, the code or (lamp) the report; `switch` is the room whose
  case or lamp is the right one. Both are the family's; what follows is the variation's."""

  name: str
  chain: str
  hidden: Place
  switch: str
  start: str
  samples: tuple[str, ...]
  right: str
  code: str
  clutter: tuple[tuple[Place, str], ...]


@functools.cache
def secrets(chain: str, containers: int) -> tuple[tuple[Place, str], ...]:
  """(hidden, switch) of every family of a chain, in the order of their numbers; all differ."""
  pairs = [
    ((room, kind), switch)
    for room in SEARCHED
    for kind in CONTAINERS[:containers]
    for switch in SEARCHED
    if switch != room
  ]
  rng = np.random.default_rng([_PLACE_STREAM, CHAINS.index(chain), containers])
  return tuple(pairs[index] for index in rng.permutation(len(pairs)))


@functools.lru_cache(maxsize=1024)
def tasks(options: Options) -> tuple[Task, ...]:
  """All variations of the split. The held-out ones are drawn first and the training ones go on, each
  unlike all before it: the splits share none, and more training variations change no held-out one."""
  number = int(options.family.partition("-")[2])
  hidden, switch = secrets(options.chain, options.containers)[number]
  rng = np.random.default_rng(
    [_VARIATION_STREAM, CHAINS.index(options.chain), number, options.containers]
  )
  free = [(room, kind) for room in SEARCHED for kind in options.kinds if (room, kind) != hidden]
  starts = [room for room in SEARCHED if room not in (hidden[0], switch)]
  wanted = HELDOUT + (options.variations if options.split == "train" else 0)
  drawn: dict[tuple, None] = {}
  while len(drawn) < wanted:
    samples = tuple(COLOURS[i] for i in sorted(rng.permutation(len(COLOURS))[:SAMPLES]))
    places = sorted(rng.permutation(len(free))[:CLUTTERED])
    variation = (
      starts[rng.integers(len(starts))],
      samples,
      samples[rng.integers(SAMPLES)],
      CODES[rng.integers(len(CODES))],
      tuple((free[i], CLUTTER[rng.integers(len(CLUTTER))]) for i in places),
    )
    drawn[variation] = None
  chosen = list(drawn)[HELDOUT:] if options.split == "train" else list(drawn)[:HELDOUT]
  return tuple(
    Task(f"{options.family}/{options.split}-{index}", options.chain, hidden, switch, *variation)
    for index, variation in enumerate(chosen)
  )


def draw(options: Options, seed: int) -> Task:
  """The task of a seed, uniform over the variations of the split."""
  choices = tasks(options)
  return choices[int(np.random.default_rng([seed, _TASK_STREAM]).integers(len(choices)))]


class World:
  """The state of an attempt. `do` plays one action and says in a word or two what came of it.

  `reached` holds the sub-goals, `solved` is None until a sample was focused.
  """

  def __init__(self, task: Task, kinds: tuple[str, ...]):
    self.task, self.kinds = task, kinds
    self.room = task.start
    self.opened: set[Place] = set()
    self.cases: set[str] = set()  # rooms whose case is open
    self.carried: list[str] = []
    self.code = self.named = ""  # the code and the sample, once known
    self.lit = False
    self.reached: set[str] = set()
    self.solved: bool | None = None
    self._inside = dict(task.clutter) | {
      task.hidden: "report" if task.chain == "lamp" else task.chain
    }

  def admissible(self) -> tuple[str, ...]:
    """Every action that can be done here, sorted; all else is "bad" and changes nothing."""
    actions = [f"go {room}" for room in ROOMS if room != self.room]
    if self.room == LAB:
      return tuple(sorted(actions + [f"focus {colour}" for colour in self.task.samples]))
    actions += [f"open {kind}" for kind in self.kinds if (self.room, kind) not in self.opened]
    loose = [thing for thing in self.contents().values() if thing in ("key", *CLUTTER)]
    actions += {f"take {thing}" for thing in loose if thing not in self.carried}
    if self.task.chain == "lamp":
      actions += [] if self.lit else ["use lamp"]
    elif self.room not in self.cases:
      codes = [f"enter {code}" for code in CODES]
      actions += ["unlock case"] if self.task.chain == "key" else codes
    if self.report_here() and not self.named:
      actions.append("read report")
    return tuple(sorted(actions))

  def contents(self) -> dict[str, str]:
    """What the open containers of this room hold ("" for nothing)."""
    kinds = [kind for kind in self.kinds if (self.room, kind) in self.opened]
    return {kind: self._inside.get((self.room, kind), "") for kind in kinds}

  def report_here(self) -> bool:
    """Whether the report lies open to view in this room."""
    if self.task.chain == "lamp":
      return "report" in self.contents().values()
    return self.room == self.task.switch and self.room in self.cases

  def do(self, action: str) -> str:
    if action not in self.admissible():
      return "bad"
    verb, thing = action.split()
    acts = {
      "go": self._go,
      "open": self._open,
      "take": self._take,
      "unlock": self._unlock,
      "use": self._use,
      "enter": self._enter,
      "read": self._read,
      "focus": self._focus,
    }
    note = acts[verb](thing)
    if self.report_here():
      self.reached.add("found")
    return note

  def _go(self, room: str) -> str:
    self.room = room
    return ""

  def _open(self, kind: str) -> str:
    self.opened.add((self.room, kind))
    thing = self.contents()[kind]
    if thing == "code":
      self.code = self.task.code
      self.reached.add("means")
      return f"code {self.code}"
    return thing or "empty"

  def _take(self, thing: str) -> str:
    self.carried.append(thing)
    if thing == "key":
      self.reached.add("means")
    return "ok"

  def _unlock(self, _: str) -> str:
    if "key" not in self.carried:
      return "locked"
    self.cases.add(self.room)
    return "report" if self.report_here() else "empty"

  def _enter(self, code: str) -> str:
    if self.room != self.task.switch or code != self.task.code:
      return "bad"
    self.cases.add(self.room)
    return "report"

  def _use(self, _: str) -> str:
    self.lit = self.room == self.task.switch
    if self.lit:
      self.reached.add("means")
    return "ok" if self.lit else "bad"

  def _read(self, _: str) -> str:
    if self.task.chain == "lamp" and not self.lit:
      return "dark"
    self.named = self.task.right
    self.reached.add("read")
    return self.named

  def _focus(self, colour: str) -> str:
    """Irreversible. Who has not read the report fails whatever the colour."""
    self.solved = bool(self.named) and colour == self.task.right
    return "won" if self.solved else "lost"
