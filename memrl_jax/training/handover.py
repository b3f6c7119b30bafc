"""From where weights are trained to where they are sampled: another layout, other devices, another type.

Training splits weights over all devices and adds gradients in float32; sampling wants them whole on a few
chips that decode without asking others, often in bfloat16. A handover casts them where they lie, so that half
the bytes travel, and moves them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from memrl_jax.models import weights
from memrl_jax.training import mesh


@dataclasses.dataclass(frozen=True)
class ReplicaConfig:
  """Where a model samples in this process; by default one sampler reads the trained weights where they are.

  tensor: devices of each replica, which split its heads; 0: one replica a host, of all its devices.
  first, devices: the devices that sample, from which number on and how many (0: those of config.mesh).
  dtype: of the sampler's weights and cache; "" is config.model.dtype.
  """

  tensor: int = 0
  first: int = 0
  devices: int = 0
  dtype: str = ""

  def __post_init__(self):
    if min(self.tensor, self.first, self.devices) < 0:
      raise ValueError("tensor, first and devices must be at least 0 (config.replicas)")
    if self.first and not self.devices:
      raise ValueError(
        f"sampling from device {self.first} on needs to know on how many; set config.replicas.devices"
      )
    if self.dtype and self.dtype not in weights.DTYPES:
      raise ValueError(
        f"dtype {self.dtype!r} is not known; choose one of {', '.join(weights.DTYPES)}, or leave it empty "
        "(config.replicas.dtype)"
      )


def grid(config: ReplicaConfig, trained: Mesh, devices: Sequence[jax.Device]) -> Mesh | None:
  """The mesh that samples, of axes `mesh.AXES`: data counts replicas. None: it is the one that trains.

  `devices`: all there are. A replica never spans hosts: each host plays with its own.

  Raises:
    ValueError: the devices are not there, or cannot be divided so.
  """
  chosen = list(trained.devices.flat)
  if config.devices:
    chosen = list(devices)[config.first : config.first + config.devices]
    if len(chosen) < config.devices:
      raise ValueError(
        f"{config.devices} devices from number {config.first} on are to sample, and {len(devices)} are there; "
        "change config.replicas.devices or config.replicas.first"
      )
  hosts = {device.process_index for device in chosen}
  if not config.tensor and not config.devices and len(hosts) == 1:
    return None
  chosen.sort(key=lambda device: device.process_index)  # stable
  local = len(chosen) // len(hosts)
  tensor = config.tensor or local
  if len(chosen) % len(hosts) or local % tensor:
    raise ValueError(
      f"{len(chosen)} devices of {len(hosts)} hosts cannot be divided into replicas of {tensor}, each within a "
      "host; change config.replicas.tensor or config.replicas.devices"
    )
  return Mesh(np.array(chosen).reshape(-1, 1, tensor), mesh.AXES, axis_types=(AxisType.Auto,) * 3)


class Handover:
  """Makes views of weights: one tree for every replica of this process.

  made: the mesh that samples, from `grid`; None: there is one view, and it lies where the weights do.
  """

  def __init__(self, config: ReplicaConfig, made: Mesh | None):
    self.mesh, self._dtype = made, jnp.dtype(config.dtype) if config.dtype else None
    self._local: list[Mesh] = []
    if made is not None:
      here = jax.process_index()
      self._local = [
        Mesh(chips[None], mesh.AXES, axis_types=made.axis_types)
        for chips in made.devices
        if chips.flat[0].process_index == here
      ]
    self._cast = jax.jit(self._cast_fn)

  @property
  def views(self) -> int:
    """How many there are in this process."""
    return len(self._local) or 1

  def __call__(self, params: Any) -> list[Any]:
    """The views; what they hold is no longer that of `params`, unless nothing has to change at all."""
    if self._dtype is not None:
      params = self._cast(params)
    if self.mesh is None:
      return [params]
    moved = jax.device_put(params, mesh.param_shardings(self.mesh, params))
    return [_view(moved, one) for one in self._local]

  def _cast_fn(self, params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(self._dtype), params)


def _view(moved: Any, made: Mesh) -> Any:
  """The part of global arrays that lies on the devices of one replica, as arrays of their own."""
  ours = set(made.devices.flat)

  def part(leaf: jax.Array) -> jax.Array:
    shards = [shard.data for shard in leaf.addressable_shards if shard.device in ours]
    spec: PartitionSpec = leaf.sharding.spec
    return jax.make_array_from_single_device_arrays(leaf.shape, NamedSharding(made, spec), shards)

  return jax.tree.map(part, moved)
