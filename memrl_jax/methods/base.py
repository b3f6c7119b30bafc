"""A method is a value: the functions that the engine calls, made from a checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from memrl_jax.rollout import collect
from memrl_jax.rollout.lessons import Lesson
from memrl_jax.rollout.trial import Program
from memrl_jax.types import Trial


class Remembered(Protocol):
  """What a method keeps from update to update beside the weights; part of every checkpoint.

  `reader` answers `ctx.recall` in trials, None where nothing is asked; `observer` answers in evaluations,
  which leave no trace.
  """

  reader: collect.Memory | None
  observer: collect.Memory | None

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, JSON-ready rest) for a checkpoint."""

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    """Back to what `state` gave: what was remembered since is forgotten."""

  def reset(self) -> None:
    """Back to nothing."""

  def close(self) -> None:
    """Lets go of files."""


class Method(NamedTuple):
  """What a paper binds.

  trial:    the program that training trials run.
  credit:   gives every trained turn its advantage; returns metrics.
  remember: reads finished trials into a memory (a no-op where memory lives in the context); may
            return metrics.
  arms:     evaluation programs by name; "memory" is the method's own way to play.
  plan:     decides how each trial of an update uses the memory, from a generator of that update.
  memory:   what it remembers outside of the context, if anything.
  summary:  numbers of its own about the trials of an evaluation arm.
  trains:   whether the policy trains in an update.
  watch:    reads the metrics of an update and may add to them.
  study:    what an update imitates in place of playing, if it does; `terms` weigh the parts of that loss.
  anchors:  after so many updates a KL term refers to the policy as it is then, which is also evaluated.
  pool:     makes the counts that reading leaves in the memory those of all processes; it is given what gathers.
  contrast: numbers about an arm that need the others: of the trials by arm, numbers by arm.
  """

  trial: Program
  credit: Callable[[Sequence[Trial]], dict[str, float]]
  remember: Callable[[Sequence[Trial]], dict[str, float] | None]
  arms: Mapping[str, Program]
  plan: Callable[[Sequence[Trial], np.random.Generator], None] = lambda trials, rng: None
  memory: Remembered | None = None
  summary: Callable[[Sequence[Trial]], dict[str, float]] = lambda trials: {}
  trains: Callable[[int], bool] = lambda update: True
  watch: Callable[[dict[str, float]], dict[str, float]] = lambda numbers: {}
  study: Callable[[int, np.random.Generator], list[Lesson] | None] = lambda update, rng: None
  terms: Mapping[str, float] = MappingProxyType({})
  anchors: int | None = None
  pool: Callable[[Callable[[list], list]], None] = lambda gather: None
  contrast: Callable[[Mapping[str, Sequence[Trial]]], dict[str, dict[str, Any]]] = lambda arms: {}


def forget(trials: Sequence[Trial]) -> None:
  """For methods whose memory lives in the prompt only."""
