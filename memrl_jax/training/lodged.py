"""A model that lies on devices of the first host alone, in a run on several: who has it, and who hears of it.

It computes there, in a thread if it likes, and waits for nobody. A checkpoint, which all hosts write together, has
it as plain arrays of the first, so that it fits a run on one host, and the other way round.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from memrl_jax.rollout import policies
from memrl_jax.sampling import requests
from memrl_jax.training import hosts, learner, mesh


class Held(learner.Learner):
  """The model, on the first host."""

  def saved(self) -> dict[str, Any]:
    """The arrays of a checkpoint, in this host's memory."""
    return jax.device_get(super().saved())

  def load(self, arrays: dict[str, Any]) -> None:
    """Back to what `saved` gave."""
    if not self.frozen:
      now = learner.Learner.saved(self)
      super().load(jax.tree.map(lambda old, new: jax.device_put(old, new.sharding), arrays, now))

  def shared(self, params: Any) -> Any:
    """These weights, of which the others get a copy; all hosts ask."""
    _told(params)
    return params


class Elsewhere:
  """The model as the others see it: its words, what a checkpoint holds of it, and, where it `answers` each host's
  trials, weights of some age on devices of this host."""

  engine = params = None

  def __init__(self, parts: learner.Parts, saved: Any, answers: bool):
    """`saved`: shapes of what the first host saves."""
    self._saved, self._copy = saved, None
    self.chat, self.context = parts.model.chat(), max(parts.engine.buckets)
    if answers:
      # Frozen: on this host's own devices.
      frozen = learner.Frozen(parts.model, parts.engine, parts.mesh, parts.replicas)
      self._copy = learner.Learner(frozen, seed=0, total=0, frozen=True)
      self.params = self._copy.params

  def shared(self, params: Any) -> Any:
    """The weights that the first host has, in the place of these."""
    return mesh.place_params(self._copy.mesh, _told(params), self._copy.parts.mesh.table)

  def sampler(self, params: Any) -> requests.Sampler:
    return self._copy.sampler(params)

  def hand(self, sampler: requests.Sampler, params: Any) -> None:
    self._copy.hand(sampler, params)

  def policy(
    self, sampling: policies.SamplingConfig, sampler: requests.Sampler
  ) -> policies.LanguagePolicy:
    return self._copy.policy(sampling, sampler)

  def warmup(self) -> None:
    """It never samples for all."""

  def saved(self) -> dict[str, Any]:
    """Takes the place of the first host's arrays, which alone are written."""
    return jax.tree.map(
      lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), self._saved
    )

  def load(self, arrays: dict[str, Any]) -> None:
    """The first host has it."""


def make(parts: learner.Parts, *, answers: bool, **how: Any) -> Held | Elsewhere:
  """This host's side of it; `how` as in `Learner`."""
  held = None

  def build() -> Any:
    nonlocal held
    held = Held(parts, **how)
    return jax.tree.map(_shape, learner.Learner.saved(held))

  saved = hosts.of_first(build, "the model on the first host")
  return held or Elsewhere(parts, saved, answers)


def _told(params: Any) -> Any:
  """The first host's, in every host's memory. One array after the other: each lies whole on a device meanwhile."""
  with hosts.waiting("the weights of another model"):
    return jax.tree.map(multihost_utils.broadcast_one_to_all, params)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
