"""Where arrays live: a mesh of axes data, fsdp, tensor, and the rules that place each weight.

Batches are split over data and fsdp along their leading axis. A weight's dimensions have names, and
one table says which axis of the mesh splits a name; what nobody splits is whole on every device. Axes
are Auto: GSPMD partitions the program.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from memrl_kernels import target

from memrl_jax.models import lora

AXES = ("data", "fsdp", "tensor")
BATCH = PartitionSpec(("data", "fsdp"))
OFFLOAD = ("moments", "start")
HOST, DEVICE = "pinned_host", "device"  # kinds of memory
# On CPU LLVM does the least that vectorises: a tenth of the compile time less, at the same speed.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}

DIMENSIONS = {
  "embedding": ("vocab", "embed"),
  "head": ("vocab", "embed"),
  "qkv": ("layers", "embed", "kv_heads", "group", "width"),
  "out": ("layers", "kv_heads", "group", "width", "embed"),
  "gate_up": ("layers", "embed", "half", "mlp"),
  "down": ("layers", "mlp", "embed"),
}
# Dimension -> axis of the mesh, several joined by "+", "" for none.
RULES = {
  "vocab": "tensor", "embed": "fsdp", "kv_heads": "tensor", "mlp": "tensor",
  "layers": "", "group": "", "width": "", "half": "", "rank": "",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Devices along each axis; data = -1 takes what is left. `first` is the first device's number: two
  models with meshes behind each other share no device.

  rules: changes of RULES, as "mlp=" or "embed=fsdp+data".
  sequence: between the blocks of training, tokens are split over tensor too: less memory, as much sent.
  offload: what lies in the host's memory between uses, of "moments" (the optimiser's) and "start" (the
    weights of the KL term).
  """

  data: int = 1
  fsdp: int = 1
  tensor: int = 1
  first: int = 0
  rules: tuple[str, ...] = ()
  sequence: bool = False
  offload: tuple[str, ...] = ()

  def __post_init__(self):
    check(self.table)
    for name in self.offload:
      if name not in OFFLOAD:
        raise ValueError(
          f"{name!r} cannot lie in host memory; choose from {', '.join(OFFLOAD)} (config.mesh.offload)"
        )

  @property
  def table(self) -> dict[str, str]:
    """RULES with the changes of `rules`; ValueError names a change of nothing."""
    changes = dict(rule.partition("=")[::2] for rule in self.rules)
    for name in changes:
      if name not in RULES:
        raise ValueError(
          f"no weight has a dimension {name!r}; choose from {', '.join(RULES)} (config.mesh.rules)"
        )
    return RULES | changes


def check(table: Mapping[str, str], weights: Mapping[str, tuple[str, ...]] = DIMENSIONS) -> None:
  """ValueError for an axis that there is not, a dimension without a rule, or one axis for two of them."""
  for name, rule in table.items():
    for axis in _axes(rule):
      if axis not in AXES:
        raise ValueError(
          f"{name} cannot be split over {axis!r}; the mesh has {', '.join(AXES)} (config.mesh.rules)"
        )
  for weight, names in weights.items():
    if missing := [name for name in names if name not in table]:
      raise ValueError(f"dimension {missing[0]} of {weight} has no rule; add it to mesh.RULES")
    taken: dict[str, str] = {}
    for name in names:
      for axis in _axes(table[name]):
        if axis in taken:
          raise ValueError(
            f"{axis} would split both {taken[axis]} and {name} of {weight}; give one of them another axis, or "
            f"none: {name}= (config.mesh.rules)"
          )
        taken[axis] = name


def check_trained(config: MeshConfig, section: str, *, trains: bool, starts: bool) -> None:
  """Whether `sequence` and `offload` have something to do; ValueError says what to leave out.

  trains: weights are trained on this mesh. starts: those that training started from are kept there.
  """
  if (config.sequence or config.offload) and not trains:
    raise ValueError(
      f"nothing is trained here, so {section}.sequence and {section}.offload would do nothing; leave them as they are"
    )
  if "start" in config.offload and not starts:
    raise ValueError(
      "nobody reads the weights that training starts from there (a KL term, a swap test with the base, or the policy "
      f"embedder would), so they are not kept; leave start out of {section}.offload"
    )


def _axes(rule: str) -> list[str]:
  return rule.split("+") if rule else []


def make(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
  """The mesh; ValueError if the axes do not multiply to the number of devices they need."""
  devices = (jax.devices() if devices is None else devices)[config.first :]
  inner = config.fsdp * config.tensor
  data = len(devices) // inner if config.data == -1 else config.data
  needed = data * inner
  if needed < 1 or needed > len(devices):
    raise ValueError(
      f"a mesh of data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} needs {needed or inner} "
      f"devices and {len(devices)} are there from number {config.first} on; change config.mesh"
    )
  grid = np.array(devices[:needed]).reshape(data, config.fsdp, config.tensor)
  return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 3)


def shards(mesh: Mesh) -> int:
  """Into how many parts a batch is split."""
  return mesh.shape["data"] * mesh.shape["fsdp"]


def jit(mesh: Mesh, function: Callable, **options: Any) -> Any:
  """`jax.jit` of a function for the devices of a mesh, which TPU kernels in it are split over."""

  @functools.wraps(function)
  def traced(*arguments):
    with target.over(mesh):
      return function(*arguments)

  if mesh.devices.flat[0].platform == "cpu":
    options["compiler_options"] = CPU_OPTIONS
  return jax.jit(traced, **options)


def place_batch(mesh: Mesh, batch: Any) -> Any:
  """Splits every array of a batch along its leading axis; of shapes, says where they would lie. Over several
  hosts each gives its own rows of it."""
  sharding = NamedSharding(mesh, BATCH)

  def place(leaf):
    if mesh.is_multi_process and isinstance(leaf, np.ndarray):
      return jax.make_array_from_process_local_data(sharding, leaf)
    return _put(leaf, sharding)

  return jax.tree.map(place, batch)


def rows(mesh: Mesh, array: jax.Array) -> np.ndarray:
  """What a program made of a batch, for the rows that this host gave."""
  if mesh.is_multi_process:
    array = multihost_utils.global_array_to_host_local_array(array, mesh, BATCH)
  return np.asarray(array)


def local(tree: Any) -> Any:
  """Arrays that lie over several hosts as copies that each host has whole; others as they are."""
  spread = [leaf for leaf in jax.tree.leaves(tree) if not leaf.is_fully_addressable]
  if not spread:
    return tree
  if not all(leaf.is_fully_replicated for leaf in spread):
    whole = NamedSharding(spread[0].sharding.mesh, PartitionSpec())
    tree = jax.jit(lambda tree: tree, out_shardings=whole)(tree)
  return jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)


def _put(leaf: Any, where: NamedSharding) -> Any:
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
  if where.mesh.is_multi_process and isinstance(leaf, jax.Array) and leaf.is_fully_addressable:
    # What every host has by itself, as a counter; device_put would make of it what no checkpoint can read.
    own = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, where, lambda index: own[index])
  return jax.device_put(leaf, where)


def placement(
  mesh: Mesh, table: Mapping[str, str] = RULES, *, memory: str | None = None
) -> Callable[[Any, Any], NamedSharding]:
  """Where the table puts a weight, or an optimiser's moment of it: a function of its path and shape.

  A dimension that its axes do not divide is left whole. `memory`: of this kind, for all but scalars.
  """

  def place(path, leaf) -> NamedSharding:
    spec, names = [], _names(path)
    if names is not None and leaf.ndim == len(names):
      for name, size in zip(names, leaf.shape, strict=True):
        # An axis of one device splits nothing; leaving it out keeps the sharding that jit returns.
        axes = tuple(axis for axis in _axes(table[name]) if mesh.shape[axis] > 1)
        whole = not axes or size % math.prod(mesh.shape[axis] for axis in axes)
        spec.append(None if whole else axes[0] if len(axes) == 1 else axes)
      while spec and spec[-1] is None:
        spec.pop()
    kind = {"memory_kind": memory} if memory and leaf.ndim else {}
    return NamedSharding(mesh, PartitionSpec(*spec), **kind)

  return place


def _names(path: Any) -> tuple[str, ...] | None:
  """The dimensions of the weight at a path; None for one that is not split (norms, biases).

  Adapters of a matrix [..., in, out] are [..., in, rank] and [..., rank, out].
  """
  keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
  weight = next((key for key in reversed(keys) if key in DIMENSIONS), None)
  if weight is None:
    return None
  names = DIMENSIONS[weight]
  if keys[-1] not in ("a", "b"):
    return names
  if weight == "head":  # transposed
    return {"a": (names[1], "rank"), "b": ("rank", names[0])}[keys[-1]]
  end = 1 + lora.INPUTS[weight]
  return (*names[:end], "rank") if keys[-1] == "a" else (names[0], "rank", *names[end:])


def param_shardings(mesh: Mesh, params: Any, table: Mapping[str, str] = RULES, **options) -> Any:
  """A sharding for every weight (or optimiser moment of the same path), see `placement`."""
  return jax.tree_util.tree_map_with_path(placement(mesh, table, **options), params)


def place_params(mesh: Mesh, params: Any, table: Mapping[str, str] = RULES, **options) -> Any:
  """Puts weights or optimiser state where the table says; of shapes, says where they would lie."""
  return jax.tree.map(_put, params, param_shardings(mesh, params, table, **options))
