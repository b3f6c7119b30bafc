"""A reference or a critic on devices of its own, beside those that train the policy.

    reference   log-probs of the micro-batches ──> the policy's loss
    critic      values ──> advantages;  a gradient and an optimiser's step beside the policy's

What they compute is what they would on the policy's mesh, by the same functions (`step.Trainer`). Nothing here
waits: all is dispatched, and devices wait for each other where one needs what another has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memrl_jax.training import mesh as meshes
from memrl_jax.training import step
from memrl_jax.types import TokenBatch


@dataclasses.dataclass(frozen=True)
class ApartConfig:
  """Where a reference or a critic lies; `mesh.data` 0: on the policy's mesh."""

  mesh: meshes.MeshConfig = dataclasses.field(default_factory=lambda: meshes.MeshConfig(data=0))

  @property
  def wanted(self) -> bool:
    """Whether it has devices of its own."""
    return self.mesh.data != 0


class Apart(NamedTuple):
  """The sections of a run's config: what its model has apart."""

  reference: ApartConfig = ApartConfig()
  critic: ApartConfig = ApartConfig()

  def check(self, *, refers: bool, values: bool, update: str) -> None:
    """Whether each has something to do there; ValueError names what is wrong.

    refers: there is a KL term. values: there is a critic. update: config.optim.update.
    """
    for name, config, used, without, idle in (
      ("reference", self.reference.mesh, refers, "without a KL term", "moments"),
      ("critic", self.critic.mesh, values, "without PPO", "start"),
    ):
      place = f"config.{name}.mesh"
      if not config.data and config != meshes.MeshConfig(data=0):
        raise ValueError(
          f"the {name} lies on the policy's mesh, so the rest of {place} would do nothing; set {place}.data (-1: what "
          "is left)"
        )
      if config.data and not used:
        raise ValueError(f"{without} there is no {name} that is used; set {place}.data to 0")
      if idle in config.offload:
        raise ValueError(f"the {name} has no {idle} that could be offloaded ({place}.offload)")
    if self.critic.wanted and update == "stochastic":
      raise ValueError(
        "stochastic rounding counts the steps of policy and critic as one; with config.critic.mesh set "
        "config.optim.update to compensated"
      )

  def grids(self, policy: Mesh, sequences: int) -> tuple[Mesh | None, Mesh | None]:
    """The meshes of both, None where it is the policy's; `sequences`: those of a micro-batch.

    Raises:
      ValueError: the devices are not there, or train the policy, or cannot share a micro-batch.
    """
    made = {
      name: grid(name, config.mesh, policy, sequences) if config.wanted else None
      for name, config in self._asdict().items()
    }
    return made["reference"], made["critic"]


TOGETHER = Apart()


def grid(name: str, layout: meshes.MeshConfig, policy: Mesh, sequences: int) -> Mesh:
  """The mesh of one of them, see `Apart.grids`."""
  made = make(name, layout)
  if shared := set(made.devices.flat) & set(policy.devices.flat):
    raise ValueError(
      f"{len(shared)} devices of the {name} train the policy too; set config.{name}.mesh.first behind the "
      f"{policy.size} of config.mesh, or config.{name}.mesh.data to 0 for the policy's mesh"
    )
  if sequences % meshes.shards(made):
    raise ValueError(
      f"micro-batches of {sequences} sequences (config.pack.sequences) cannot be split over the "
      f"{meshes.shards(made)} data shards of the {name}; change config.{name}.mesh.data or fsdp"
    )
  return made


def make(name: str, layout: meshes.MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """`mesh.make`, whose sentences name the section."""
  try:
    return meshes.make(layout, devices)
  except ValueError as error:
    raise ValueError(str(error).replace("config.mesh", f"config.{name}.mesh")) from None


class Bridge:
  """Moves what a program made of a batch from one mesh to another.

  Devices copy from devices what both have as a whole; anything else would go through the host, and wait.
  """

  def __init__(self, here: Mesh, there: Mesh, spec: PartitionSpec = meshes.BATCH):
    whole = PartitionSpec()
    self._gather = meshes.jit(here, _same, out_shardings=NamedSharding(here, whole))
    self._there = NamedSharding(there, whole)
    self._part = meshes.jit(there, _same, out_shardings=NamedSharding(there, spec))

  def __call__(self, array: jax.Array) -> jax.Array:
    return self._part(jax.device_put(self._gather(array), self._there))


class Reference:
  """A trainer's `score` on a mesh of its own, for a loss on that of the policy."""

  def __init__(self, scorer: step.Trainer, policy: Mesh):
    self._scorer, self._bridge = scorer, Bridge(scorer.mesh, policy)

  def score(self, params: Any, batches: Sequence[TokenBatch]) -> list[jax.Array]:
    """Log-probs [B, S, K] under weights of this mesh, as the policy's mesh has its batches."""
    return [self._bridge(array) for array in self._scorer.score(params, batches)]


class Pair:
  """A policy's trainer and its critic's, as one `step.Trainer`: each has its part of the state on its mesh.

  A gradient of either that is not finite stops both: each gets the other's `health`, one number.
  """

  def __init__(self, policy: step.Trainer, critic: step.Trainer):
    self._policy, self._critic = policy, critic
    self.score, self.old, self.values = policy.score, policy.old, critic.values
    whole = PartitionSpec()
    self._to_critic = Bridge(policy.mesh, critic.mesh, whole)
    self._to_policy = Bridge(critic.mesh, policy.mesh, whole)

  def init(self, params: Any, critic: Any) -> step.TrainState:
    """Places both and starts their optimisers."""
    valued = self._critic.init(None, critic)  # first: what it copies goes before moments come
    return _joined(self._policy.init(params, None), valued)

  def compiled(self) -> int:
    """As `step.Trainer.compiled`."""
    return self._policy.compiled() + self._critic.compiled()

  def update(
    self,
    state: step.TrainState,
    batches: Sequence[TokenBatch],
    old: Sequence[jax.Array] | None = None,
    ref: Sequence[jax.Array] | None = None,
  ) -> tuple[step.TrainState, dict[str, jax.Array]]:
    """As `step.Trainer.update`."""
    policy, critic = _without(state, "critic"), _without(state, "policy")
    pushed = self._policy.sums(policy.params, batches, old, ref)
    valued = self._critic.sums(critic.params, batches)
    healthy = self._to_critic(self._policy.health(pushed))
    policy, metrics = self._policy.apply(
      policy, pushed, self._to_policy(self._critic.health(valued))
    )
    critic, more = self._critic.apply(critic, valued, healthy)
    return _joined(policy, critic), metrics | more


def _same(array: jax.Array) -> jax.Array:
  return array


def _without(tree: Any, model: str) -> Any:
  """A state without what belongs to one of the models."""
  if isinstance(tree, dict):
    return {name: _without(part, model) for name, part in tree.items() if name != model}
  if isinstance(tree, tuple):
    return _rebuilt(tree, [_without(part, model) for part in tree])
  return tree


def _joined(tree: Any, other: Any) -> Any:
  """The state of both models, from one of each: in dicts one has what the other has not."""
  if isinstance(tree, dict):
    both = {name: _joined(tree[name], other[name]) for name in tree.keys() & other.keys()}
    return tree | other | both
  if isinstance(tree, tuple):
    return _rebuilt(tree, [_joined(*parts) for parts in zip(tree, other, strict=True)])
  raise ValueError("both models have a state of one name: what keeps it cannot be apart")


def _rebuilt(tree: tuple, parts: list[Any]) -> tuple:
  return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
