"""The collapse guard: stops a run with a reason before it wastes hours (experiments/lamer.md 5, reports 2-3).

It watches entropy, repetition, the share of valid actions, the step's KL, and void trials.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memrl_jax.types import Trial


@dataclasses.dataclass(frozen=True)
class GuardConfig:
  """Limits that must hold; a run stops after `patience` updates in a row outside one of them.

  entropy in nats per token; repetition and valid and void are shares; kl in nats per token.
  """

  min_entropy: float = 0.0
  max_repetition: float = 0.5
  min_valid: float = 0.2
  max_kl: float = 0.5
  max_void: float = 0.5
  patience: int = 5

  def __post_init__(self):
    if self.patience < 1:
      raise ValueError(
        f"patience must be at least 1 update, not {self.patience} (config.guard.patience)"
      )


class Guard:
  """Counts updates in a row outside each limit. Its state is a plain dict, for checkpoints."""

  def __init__(self, config: GuardConfig, counts: dict[str, int] | None = None):
    self._config = config
    self.counts: dict[str, int] = dict(counts or {})

  def check(self, metrics: dict[str, float]) -> str | None:
    """The reason to stop after this update, or None."""
    c = self._config
    limits = {
      "train/entropy": ("entropy", lambda x: x < c.min_entropy, f"below {c.min_entropy} nats"),
      "rollout/repetition": (
        "repetition",
        lambda x: x > c.max_repetition,
        f"above {c.max_repetition}",
      ),
      "rollout/valid": (
        "share of valid responses",
        lambda x: x < c.min_valid,
        f"below {c.min_valid}",
      ),
      "train/kl_old": ("KL of an update", lambda x: x > c.max_kl, f"above {c.max_kl} nats"),
      "rollout/void": ("share of void trials", lambda x: x > c.max_void, f"above {c.max_void}"),
    }
    for name, (what, outside, limit) in limits.items():
      if name not in metrics:
        continue
      self.counts[name] = self.counts.get(name, 0) + 1 if outside(metrics[name]) else 0
      if self.counts[name] >= c.patience:
        return (
          f"{what} was {limit} for {c.patience} updates (now {metrics[name]:.4g}); see config.guard"
        )
    return None


def repetition(trials: Sequence[Trial], min_tokens: int = 8) -> float:
  """Share of long responses in which one id makes up more than half: the mark of a broken policy."""
  long = [t.sample.ids for trial in trials for t in trial.turns if len(t.sample.ids) >= min_tokens]
  broken = [np.unique(ids, return_counts=True)[1].max() * 2 > len(ids) for ids in long]
  return float(np.mean(broken)) if broken else 0.0
