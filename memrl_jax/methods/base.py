"""A method is a value: the functions that the engine calls, made from a checked configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from memrl_jax.rollout.trial import Program
from memrl_jax.types import Trial


class Method(NamedTuple):
  """What a paper binds.

  trial:    the program that training trials run.
  credit:   gives every trained turn its advantage; returns metrics.
  remember: reads finished trials into a memory (a no-op where memory lives in the context).
  arms:     evaluation programs by name; "memory" is the method's own way to play.
  """

  trial: Program
  credit: Callable[[Sequence[Trial]], dict[str, float]]
  remember: Callable[[Sequence[Trial]], None]
  arms: Mapping[str, Program]


def forget(trials: Sequence[Trial]) -> None:
  """For methods whose memory lives in the prompt only."""
