"""What a text environment is, what an agent may know of it, and the registry of families.

An environment is told a response (the model's whole text) and parses it itself. A family adds the
prompts that show it to a language model, the scripted players that know how to play it, and how its
task seeds are drawn. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from memrl_jax.types import Message

TRAIN_SEEDS = (0, 65_536)  # task seeds of training; experiments/lamer.md 2.5
EVAL_SEEDS = (65_536, 2**32 - 1)  # task seeds of evaluation panels: disjoint by construction

MEMORY_KINDS = ("reflection_only", "history_only", "history_and_reflection")


@dataclasses.dataclass(frozen=True)
class Observation:
  """`anchor` identifies the bare state (equal anchors = same state), without history or memory.

  `goal` is what the agent is asked to do ("" where every task asks the same), `task` the stable name of
  the task and its variation ("" = the seed); both are needed in the first observation of an attempt only.
  `images` go with the text (types.Message).
  """

  text: str
  anchor: str
  admissible: tuple[str, ...] | None = None
  goal: str = ""
  task: str = ""
  images: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class StepResult:
  """The outcome of one turn.

  `action` is the parsed action in canonical form ("" when nothing could be parsed), `valid` whether
  the response was well formed, `score` progress in 0-1 and `success` the environment's verdict;
  they are kept apart. `note` is the short feedback shown in histories ("mine", "wall", ...).
  """

  observation: Observation
  reward: float
  done: bool
  success: bool
  score: float
  valid: bool
  action: str
  note: str = ""


class Environment(Protocol):
  """One instance at a time. `horizon` is the number of turns in an attempt."""

  horizon: int

  def reset(self, seed: int) -> Observation:
    """Opens the task of this seed; the same seed is always the same task."""

  def retry(self) -> Observation:
    """Opens the same task again, identical in every hidden detail."""

  def step(self, response: str) -> StepResult:
    """Plays one turn with the model's whole response."""

  def close(self) -> None:
    """Frees what the instance holds; called once, also after a failure."""


class Seeded:
  """What environments share whose tasks are a function of the seed alone: opening, retry, order of calls.

  A subclass has `_begin(task)`, which returns the first observation, and sets `_done` in `step`.
  """

  def __init__(self, options: Any, draw: Callable[[Any, int], Any], horizon: int):
    self._options, self._draw, self.horizon = options, draw, horizon
    self._task: Any = None
    self._done = True

  def reset(self, seed: int) -> Observation:
    return self.open(self._draw(self._options, seed))

  def retry(self) -> Observation:
    if self._task is None:
      raise RuntimeError("no task is open to retry; call reset(seed) first")
    return self.open(self._task)

  def open(self, task: Any) -> Observation:
    """Starts an attempt at a given task."""
    self._task, self._turn, self._done = task, 0, False
    return self._begin(task)

  def close(self) -> None:
    """Nothing is held."""

  def _begin(self, task: Any) -> Observation:
    raise TypeError(f"{type(self).__name__} has no _begin(task)")

  def _check_open(self) -> None:
    if self._done:
      raise RuntimeError("the attempt is over; call retry() or reset(seed) before the next step")


class Step(NamedTuple):
  """One turn of an attempt as the agent remembers it: what it did and what came of it.

  `tips` stood in the prompt of that turn and stay in the history; empty where a method shows tips once.
  """

  action: str
  result: StepResult
  tips: tuple[str, ...] = ()


@dataclasses.dataclass
class AttemptLog:
  """What happened in one attempt, in the agent's own view."""

  index: int
  initial: Observation
  steps: list[Step] = dataclasses.field(default_factory=list)
  reflection: str | None = None

  @property
  def now(self) -> Observation:
    return self.steps[-1].result.observation if self.steps else self.initial

  @property
  def done(self) -> bool:
    return bool(self.steps) and self.steps[-1].result.done

  @property
  def success(self) -> bool:
    return bool(self.steps) and self.steps[-1].result.success


class View(NamedTuple):
  """All that the agent may know when it answers: remembered attempts and the current one.

  `past` is empty when memory is cleared. `memory` is one of MEMORY_KINDS and says how past attempts
  are shown. `instruction` is an extra sentence of the method ("" for none; ReAct asks for thoughts).
  `tips` were retrieved from a memory for this turn, best first; without them a prompt is byte for
  byte that of an agent without memory. `images` has those of each tip: of the first, of the second, and so
  on; where a tip is dropped they are not shown.
  """

  past: tuple[AttemptLog, ...]
  current: AttemptLog
  memory: str = "reflection_only"
  instruction: str = ""
  tips: tuple[str, ...] = ()
  images: tuple[tuple[str, ...], ...] = ()

  def without_tips(self) -> View:
    """The same view as an agent without memory has it, the tips of earlier turns gone too."""
    steps = [step._replace(tips=()) for step in self.current.steps]
    bare = dataclasses.replace(self.current, steps=steps)
    return self._replace(current=bare, tips=(), images=())


class Hinting(NamedTuple):
  """How a memory policy is asked whether to give a hint and which (Mem-pi, 2605.21463).

  An answer begins with the decision: `speak`, then the hint and `close`, or `abstain` and nothing else. seen: what
  the agent sees now. hint: the prompt for a goal and what is seen. advice: the hint of a whole answer, "" where it
  holds none.
  """

  speak: str
  abstain: str
  close: str
  seen: Callable[[View], str]
  hint: Callable[[str, str], list[Message]]
  advice: Callable[[str], str]


class Managing(NamedTuple):
  """How a manager is asked what becomes of a new fact (Memory-R1, 2508.19828).

  operations: the words that answers begin with: add it, let it update the nearest memory, delete that one, do
  nothing. manage: the prompt for what the agent saw, the fact, and the memories, nearest first.
  """

  operations: tuple[str, str, str, str]
  manage: Callable[[str, str, Sequence[str]], list[Message]]


class Extract(NamedTuple):
  """A family's prompts about experience; `view.tips` are the entries they show, numbered from 1.

  distill: the finished attempt `view.current`. merge: a chunk of entries. advise: a question asked in
  the middle of `view.current`. judge: entries before an attempt begins, and the share of attempts at
  this task that the actor has won so far. hinting: what a memory policy is asked,
  managing: what a manager is.
  """

  distill: Callable[[View], list[Message]]
  merge: Callable[[Sequence[str]], list[Message]]
  advise: Callable[[View, str], list[Message]]
  judge: Callable[[View, float], list[Message]]
  hinting: Hinting
  managing: Managing


class Prompts(NamedTuple):
  """How a family shows itself to a language model; pure functions of a View.

  `reflect` asks what to do better in the next attempt, `tip` what a stranger who plays this task
  should know; their parsers give (text, whether it was well formed). `extract` is for experience that a
  second model writes.
  """

  play: Callable[[View], list[Message]]
  reflect: Callable[[View], list[Message]]
  parse_reflection: Callable[[str], tuple[str, bool]]
  tip: Callable[[View], list[Message]]
  parse_tip: Callable[[str], tuple[str, bool]]
  extract: Extract


class Player(Protocol):
  """A scripted agent for one trial; keeps its habits over the attempts of that trial."""

  def play(self, view: View) -> str:
    """A whole response, in the grammar a model would use."""

  def reflect(self, view: View) -> str:
    """A whole reflection, tags included."""


class Family(NamedTuple):
  """A registered environment.

  `options` is a frozen dataclass that checks itself (ValueError with one sentence); `players` maps
  a name to `make(options, rng) -> Player`; `describe(options, seed)` writes the whole task of a seed,
  its hidden part included, for checksums of panels (never for an agent). `parts(options)` is the number
  of environments among which task seeds are dealt in turn: seed s opens number s mod parts.
  `image(options, name)` is the image that the task of this name (Observation.task) begins with, if it does.
  `door(options)` refuses (ValueError with one sentence), before a run begins, what its first trial would fail on: a
  server, a package or a program that is not there.
  """

  name: str
  options: type
  make: Callable[[Any], Environment]
  prompts: Callable[[Any], Prompts]
  players: Mapping[str, Callable[[Any, np.random.Generator], Player]]
  describe: Callable[[Any, int], str] | None = None
  parts: Callable[[Any], int] = lambda options: 1
  image: Callable[[Any, str], str | None] = lambda options, name: None
  door: Callable[[Any], None] = lambda options: None


_MODULES = {
  "alfworld": "memrl_jax.envs.alfworld",
  "bigcodebench": "memrl_jax.envs.bigcodebench",
  "browser": "memrl_jax.envs.browser",
  "darkroom": "memrl_jax.envs.darkroom",
  "hints": "memrl_jax.envs.hints",
  "hle": "memrl_jax.envs.hle",
  "lab": "memrl_jax.envs.lab",
  "lifelong_db": "memrl_jax.envs.lifelong_db",
  "lifelong_kg": "memrl_jax.envs.lifelong_kg",
  "lifelong_os": "memrl_jax.envs.lifelong_os",
  "minesweeper": "memrl_jax.envs.minesweeper",
  "minihack": "memrl_jax.envs.minihack",
  "miniwob": "memrl_jax.envs.miniwob",
  "mix": "memrl_jax.envs.mix",
  "rooms": "memrl_jax.envs.rooms",
  "scienceworld": "memrl_jax.envs.scienceworld",
  "sokoban": "memrl_jax.envs.sokoban",
  "swe": "memrl_jax.envs.swe",
  "webarena": "memrl_jax.envs.webarena",
  "webshop": "memrl_jax.envs.webshop",
  "workarena": "memrl_jax.envs.workarena",
}


def families() -> Sequence[str]:
  """Names that `family` knows."""
  return sorted(_MODULES)


def family(name: str) -> Family:
  """The family of this name; its packages are imported only now.

  Raises:
    ValueError: the name is not registered.
  """
  if name not in _MODULES:
    raise ValueError(
      f"environment {name!r} is not known; choose one of {', '.join(families())} (config.env.name)"
    )
  return importlib.import_module(_MODULES[name]).FAMILY


def train_seed(rng: np.random.Generator) -> int:
  """One training task seed, uniform over TRAIN_SEEDS."""
  return int(rng.integers(*TRAIN_SEEDS))
