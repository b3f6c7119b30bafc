"""Scripted players of the hints: how a hint is read, what is done without one, what is written down.

A remark (also the body of a tip, and a memory) says how an attempt ended, at what kind of container, and
what was done: `won box hall pen 3`, `lost box hall pen 3 bad` (the tool took hold, the digit was wrong),
`lost box hall pot bad`. A player can be told such lines and

    1  does what the first line says that won at its kind of container,
    2  else follows the report beside the container, unless a line calls its tool or digit bad,
    3  else uses a tool that took hold in a line, and a digit that none calls bad,
    4  else guesses among what no line calls bad.

Lines about other kinds of container mean nothing to it.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np

from memrl_jax.envs import base, prompting
from memrl_jax.envs.hints_world import CONTAINERS, DIGITS, ROOMS, TOOLS, Options, Procedure, town


@dataclasses.dataclass
class Told:
  """What lines say about one kind of container. `held`: tools that took hold; `bad`: tools, and tools
  with digits, that jammed a lock."""

  won: list[Procedure] = dataclasses.field(default_factory=list)
  held: list[str] = dataclasses.field(default_factory=list)
  bad: set[str | Procedure] = dataclasses.field(default_factory=set)


def kind(attempt: base.AttemptLog) -> tuple[str, str]:
  """(container, room) of the task at hand."""
  said = re.findall(r"\w+", attempt.initial.goal)
  return next(w for w in said if w in CONTAINERS), next(w for w in said if w in ROOMS)


def told(view: base.View) -> Told:
  """What tips and remembered reflections say of this kind of container; anything may stand in them."""
  facts = Told()
  for line in (*view.tips, *(attempt.reflection or "" for attempt in view.past)):
    match line.split():
      case [outcome, container, room, *said] if (container, room) == kind(view.current):
        _add(facts, outcome, said)
  return facts


def _add(facts: Told, outcome: str, said: list[str]) -> None:
  match outcome, said:
    case "won", [tool, digit] if tool in TOOLS and digit in DIGITS:
      facts.won.append((tool, digit))
    case "lost", [tool, digit, "bad"] if tool in TOOLS and digit in DIGITS:
      facts.held.append(tool)
      facts.bad.add((tool, digit))
    case "lost", [tool, "bad"] if tool in TOOLS:
      facts.bad.add(tool)


def remark(view: base.View) -> str:
  """What was done and how it ended, tags included."""
  done = [step for step in view.current.steps if step.result.note in ("ok", "bad")]
  said = [prompting.outcome(view.current), *kind(view.current)]
  said += [step.action.split()[1] for step in done]
  said += ["bad"] if done and done[-1].result.note == "bad" else []
  return f"<remark>{' '.join(said)}</remark>"


class Random(prompting.Chooser):
  """Any admissible action."""

  def choose(self, view: base.View) -> str:
    return str(self._rng.choice(view.current.now.admissible))

  def reflect(self, view: base.View) -> str:
    return remark(view)


class Reader(Random):
  """Follows what it is told, then reports, then its luck. `reads`: tips at all; `noise`: the probability
  of a random action."""

  def __init__(
    self, options: Options, rng: np.random.Generator, reads: bool = True, noise: float = 0.0
  ):
    super().__init__(options, rng)
    self._reads, self._noise = reads, noise

  def choose(self, view: base.View) -> str:
    if self._rng.random() < self._noise:
      return super().choose(view)
    return self._next(view, told(view) if self._reads else Told())

  def _next(self, view: base.View, facts: Told) -> str:
    said = view.current.now.anchor.partition(" report ")[2].split()
    report = [(said[0], said[1])] if said else []
    held = view.current.now.anchor.partition(" with ")[2]
    if held:
      wanted = [digit for tool, digit in facts.won + report if tool == held]
      left = [digit for digit in DIGITS if (held, digit) not in facts.bad]
      fresh = wanted[:1] if facts.won else [digit for digit in wanted if digit in left]
      return f"enter {fresh[0] if fresh else self._rng.choice(left or DIGITS)}"
    left = [tool for tool in TOOLS if tool not in facts.bad]
    wanted = [tool for tool, _ in facts.won]
    wanted += [tool for tool, digit in report if tool in left and (tool, digit) not in facts.bad]
    wanted += facts.held
    return f"use {wanted[0] if wanted else self._rng.choice(left or TOOLS)}"


class Solver(Reader):
  """Knows the procedures of the town."""

  def _next(self, view: base.View, facts: Told) -> str:
    kin = next(
      one for one in town(self._options.town) if (one.container, one.room) == kind(view.current)
    )
    return super()._next(view, Told(won=[kin.procedure]))


def mixture(options: Options, rng: np.random.Generator) -> base.Player:
  """The imitation mix: 95 % read, a third slip in 10 % of their turns."""
  noise = float(rng.choice([0.0, 0.0, 0.1]))
  player = Reader(options, rng, reads=rng.random() < 0.95, noise=noise)
  return prompting.Clumsy(player, rng, rate=0.01)
