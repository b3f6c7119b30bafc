"""Several environments in one run: the seed of a task opens one of the named parts.

    config.env.parts = "key=rooms(kind=key), maze=rooms(kind=maze), webshop"

Complementary RL (2603.17621) trains one policy and one bank on such mixes: Room, WebShop and ALFWorld,
then Maze, KeyRoom and Sokoban too. A part keeps its options, prompts and number of turns. Its name opens
the names of its tasks ("maze:rooms/17"), by which memories and numbers (`by_part`) tell parts apart.

    training    seed s opens part s mod n at its seed floor(s / n)
    evaluation  seed i of a half of the panel opens part i mod n at seed floor(i / n) of the same half of
                the panel of that part's family

Not at s itself: where seeds count through tasks (WebShop, ScienceWorld), every n-th seed would leave most
tasks out. And on its own panel a part plays the tasks that a run of it alone is measured on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import re
import typing
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs import base, panel
from memrl_jax.types import Message, Trial

PLAYERS = ("random", "solver", "mixture")  # names that parts may share
PANEL_VERSION = 1  # of the parts' own panels

_PART = re.compile(r"\s*(?:([\w-]+)\s*=\s*)?(\w+)\s*(?:\(([^()]*)\))?\s*(?:,|$)")
_GRAMMAR = 'write them as "maze=rooms(kind=maze), webshop" (config.env.parts)'


class Part(NamedTuple):
  """One environment of a mix, under a name of its own."""

  name: str
  family: base.Family
  options: Any


# Options.


@dataclasses.dataclass(frozen=True)
class Options:
  """parts: `name=family(option=value, ...)`, separated by commas; the family's name where none is given."""

  parts: str = "darkroom, minesweeper, sokoban"

  def __post_init__(self):
    styles = {part.name: part.options.style for part in self.parsed}
    if len({style == "brief" for style in styles.values()}) > 1:
      said = ", ".join(f"{name} is {style}" for name, style in styles.items())
      raise ValueError(
        f"brief and other styles do not mix, one model reads and answers all parts ({said}); set style "
        "in the options of the parts (config.env.parts)"
      )

  @property
  def parsed(self) -> tuple[Part, ...]:
    """The parts in their order."""
    return _parse(self.parts.strip())


@functools.cache
def _parse(text: str) -> tuple[Part, ...]:
  parts: dict[str, Part] = {}
  at = 0
  while at < len(text) or not parts:
    found = _PART.match(text, at)
    if not found:
      raise ValueError(f"the parts of a mix cannot be read at {text[at:].strip()!r}; {_GRAMMAR}")
    name, family, options = found[1] or found[2], found[2], found[3] or ""
    if name in parts:
      raise ValueError(f"two parts are called {name}; give one another name; {_GRAMMAR}")
    if family == FAMILY.name:
      raise ValueError(f"part {name} is itself a mix; name its parts here instead; {_GRAMMAR}")
    try:
      known = base.family(family)
      parts[name] = Part(name, known, known.options(**_fields(known.options, options)))
    except ValueError as error:
      raise ValueError(f"part {name} of the mix: {error}") from None
    at = found.end()
  return tuple(parts.values())


def _fields(options: type, text: str) -> dict[str, Any]:
  """The fields that "kind=maze, turns=9" sets; a comma inside a value stays with it."""
  kinds, fields = typing.get_type_hints(options), {}
  for assignment in re.split(r",\s*(?=\w+\s*=)", text.strip().rstrip(",")) if text.strip() else []:
    name, equals, value = (piece.strip() for piece in assignment.partition("="))
    if not equals or name not in kinds:
      raise ValueError(
        f"option {name!r} is not known; choose from {', '.join(kinds)} (config.env.parts)"
      )
    if name in fields:
      raise ValueError(f"option {name} is set twice; leave one out (config.env.parts)")
    fields[name] = _value(name, kinds[name], value)
  return fields


def _value(name: str, kind: Any, text: str) -> Any:
  """The bool, int, float, str or tuple of one that the text spells."""
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    return tuple(_value(name, element, piece.strip()) for piece in text.split(",") if piece.strip())
  try:
    return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
  except (ValueError, KeyError):
    raise ValueError(f"{name} takes {_WANTED[kind]}, not {text!r} (config.env.parts)") from None


_WANTED = {bool: "true or false", int: "a whole number", float: "a number"}


# Seeds.


def locate(options: Options, seed: int) -> tuple[Part, int]:
  """The part that a seed opens, and the seed that the part is given."""
  parts = options.parsed
  if seed < base.EVAL_SEEDS[0]:
    own, turn = divmod(seed, len(parts))
    return parts[turn], own
  half, place = divmod((seed - base.EVAL_SEEDS[0]) % (2 * panel.SIDE), panel.SIDE)
  place, turn = divmod(place, len(parts))
  return parts[turn], _panel(parts[turn].family.name)[half * panel.SIDE + place]


@functools.cache
def _panel(family: str) -> tuple[int, ...]:
  return panel.load(f"{family}-v{PANEL_VERSION}").seeds


# The environment.


class Mix:
  """Environments that are made when a seed first opens their part, and kept until `close`."""

  def __init__(self, options: Options):
    self._options = options
    self._made: dict[str, base.Environment] = {}
    self._open: tuple[Part, int] | None = None
    self._closing = contextlib.ExitStack()

  @property
  def horizon(self) -> int:
    """Turns of the longest attempt; a part with fewer ends by itself."""
    return max(self._environment(part).horizon for part in self._options.parsed)

  def reset(self, seed: int) -> base.Observation:
    self._open = locate(self._options, seed)
    part, own = self._open
    return self._named(self._environment(part).reset(own))

  def retry(self) -> base.Observation:
    return self._named(self._now().retry())

  def step(self, response: str) -> base.StepResult:
    return self._now().step(response)

  def close(self) -> None:
    self._closing.close()

  def _environment(self, part: Part) -> base.Environment:
    if part.name not in self._made:
      self._made[part.name] = part.family.make(part.options)
      self._closing.callback(self._made[part.name].close)
    return self._made[part.name]

  def _now(self) -> base.Environment:
    if self._open is None:
      raise RuntimeError("no task is open to play; call reset(seed) first")
    return self._made[self._open[0].name]

  def _named(self, first: base.Observation) -> base.Observation:
    part, own = self._open
    return dataclasses.replace(
      first, task=f"{part.name}:{first.task or f'{part.family.name}/{own}'}"
    )


def _of_part(view: base.View) -> tuple[str, base.View]:
  """The name of the part that a view shows, and the view as that part's own run would have it."""

  def own(log: base.AttemptLog) -> base.AttemptLog:
    task = log.initial.task.partition(":")[2]
    return dataclasses.replace(log, initial=dataclasses.replace(log.initial, task=task))

  name = view.current.initial.task.partition(":")[0]
  return name, view._replace(past=tuple(map(own, view.past)), current=own(view.current))


def prompts(options: Options) -> base.Prompts:
  """Each part's own prompts. What sees no view (parsers) is the same for all parts of a mix."""
  parts = {part.name: part.family.prompts(part.options) for part in options.parsed}
  shared = parts[options.parsed[0].name]

  def ask(which: Callable[[base.Prompts], Callable[..., list[Message]]]):
    def build(view: base.View, *more: Any) -> list[Message]:
      name, own = _of_part(view)
      return which(parts[name])(own, *more)

    return build

  return shared._replace(
    play=ask(lambda part: part.play),
    reflect=ask(lambda part: part.reflect),
    tip=ask(lambda part: part.tip),
    extract=shared.extract._replace(
      distill=ask(lambda part: part.extract.distill),
      advise=ask(lambda part: part.extract.advise),
      judge=ask(lambda part: part.extract.judge),
    ),
  )


class Player:
  """The player of this name of whichever part is shown."""

  def __init__(self, name: str, options: Options, rng: np.random.Generator):
    for part in options.parsed:
      if name not in part.family.players:
        shared = set.intersection(*(set(each.family.players) for each in options.parsed))
        raise ValueError(
          f"part {part.name} of the mix has no player {name!r}; all its parts have {', '.join(sorted(shared))}"
        )
    self._make = {
      part.name: functools.partial(part.family.players[name], part.options, rng)
      for part in options.parsed
    }
    self._made: dict[str, base.Player] = {}

  def play(self, view: base.View) -> str:
    player, own = self._player(view)
    return player.play(own)

  def reflect(self, view: base.View) -> str:
    player, own = self._player(view)
    return player.reflect(own)

  def _player(self, view: base.View) -> tuple[base.Player, base.View]:
    name, own = _of_part(view)
    if name not in self._made:
      self._made[name] = self._make[name]()
    return self._made[name], own


# Numbers.


def by_part(trials: Sequence[Trial]) -> dict[str, float]:
  """How each part of a mix went, under "maze/success" and so on; {} for other environments.

  success: share of trials that won an attempt. reward: mean of attempts. turns_solved: mean turns until
  the task was won, over trials that won (absent where none did). trials counts what these are taken over,
  void the rest; a trial that was void before its task was known counts under "unopened/void".
  """
  parts: dict[str, list[Trial]] = collections.defaultdict(list)
  for trial in trials:
    if trial.env == FAMILY.name:
      parts[trial.task.partition(":")[0] or "unopened"].append(trial)
  numbers: dict[str, float] = {}
  for name, of_part in sorted(parts.items()):
    usable = [trial for trial in of_part if trial.void is None]
    numbers[f"{name}/void"] = len(of_part) - len(usable)
    if usable:
      numbers |= {f"{name}/{key}": value for key, value in _numbers(usable).items()}
  return numbers


def _numbers(trials: Sequence[Trial]) -> dict[str, float]:
  attempts = [attempt for trial in trials for attempt in trial.attempts]
  solved = []
  for trial in trials:
    won = [attempt.success for attempt in trial.attempts]
    if any(won):
      solved.append(sum(attempt.turns for attempt in trial.attempts[: won.index(True) + 1]))
  numbers = {
    "trials": len(trials),
    "success": len(solved) / len(trials),
    "reward": float(np.mean([attempt.reward for attempt in attempts])),
  }
  return numbers | ({"turns_solved": float(np.mean(solved))} if solved else {})


def _door(options: Options) -> None:
  for part in options.parsed:
    part.family.door(part.options)


def _describe(options: Options, seed: int) -> str:
  part, own = locate(options, seed)
  return f"{part.name}: {part.family.describe(part.options, own)}"


def _image(options: Options, name: str) -> str | None:
  part, _, own = name.partition(":")
  return next((p.family.image(p.options, own) for p in options.parsed if p.name == part), None)


FAMILY = base.Family(
  name="mix",
  options=Options,
  make=Mix,
  prompts=prompts,
  players={name: functools.partial(Player, name) for name in PLAYERS},
  describe=_describe,
  parts=lambda options: len(options.parsed),
  image=_image,
  door=_door,
)
