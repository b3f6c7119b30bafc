"""Where the code that is being traced will run: what decides if a Pallas kernel can be used there."""

import contextlib
import math

import jax
from jax._src import config as _config  # holds the interpret switch; pltpu only sets it
from jax.experimental.pallas import tpu as pltpu


def platform() -> str:
  """ "tpu", "cpu" or "gpu": of the mesh inside `shard_map` (also one of a TPU topology that this
  machine does not have, compiled ahead of time), else of the default backend."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def interpreted() -> bool:
  """Inside `pltpu.force_tpu_interpret_mode`, where TPU kernels run on any platform, slowly."""
  return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def partitioned() -> bool:
  """The compiler may still have to split the array over devices, which it cannot do to a kernel:
  more than one device, and not inside a `shard_map` over every axis of the mesh."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return jax.device_count() > 1
  return not mesh.are_all_axes_manual


def chooses_pallas() -> bool:
  """What impl="auto" asks first: a TPU (or its interpreter), and arrays that are already split."""
  return interpreted() or (platform() == "tpu" and not partitioned())


def mesh_of(array: jax.Array) -> jax.sharding.Mesh | None:
  """The mesh that an array lies on, for `over`."""
  return getattr(array.sharding, "mesh", None)


def over(mesh: jax.sharding.Mesh | None):
  """A context: what is traced in it, outside of any `shard_map`, may be split over a mesh of TPUs.

  Other meshes change nothing: only kernels have to be split by hand.
  """
  if mesh is None or mesh.devices.flat[0].platform != "tpu":
    return contextlib.nullcontext()
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def splits() -> bool:
  """Inside `over` a mesh of TPUs whose arrays the compiler would partition: `split` does it first."""
  mesh = jax.sharding.get_abstract_mesh()
  return not mesh.empty and not mesh.manual_axes and platform() == "tpu"


def axes(names: tuple[str, ...], size: int) -> tuple[str, ...] | None:
  """Those of these axes that `split` cuts `size` into, for a PartitionSpec; all of them or none."""
  shape = jax.sharding.get_abstract_mesh().shape if splits() else {}
  names = tuple(name for name in names if shape.get(name, 1) > 1)
  return names if names and size % math.prod(shape[name] for name in names) == 0 else None


def split(function, in_specs, out_specs):
  """`function` of a device's part of its arguments, inside `over`; elsewhere, of all of them."""
  if not splits():
    return function
  return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs)


def require_tpu(kernel: str) -> None:
  """For impl="pallas": raises where a TPU kernel can neither run nor be compiled ahead of time."""
  if not interpreted() and platform() != "tpu":
    raise NotImplementedError(
      f'{kernel} has a Pallas kernel for TPU only and this is {platform()}; use impl="xla", or '
      'impl="auto" to let it choose (to compile for a TPU that is not here, trace it inside '
      "jax.shard_map over a mesh of a TPU topology)"
    )


def fast_memory() -> int:
  """Bytes of a TPU core's vector memory; interpreted: those of a v5p."""
  return pltpu.get_tpu_info().vmem_capacity_bytes if platform() == "tpu" else 64 << 20


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """The same arrays, typed inside `shard_map` as differing between devices where any of them does.

  A custom gradient needs it: of an array that every device holds whole, the sum of gradients over
  devices is then JAX's own, as the transpose of this.
  """
  axes = frozenset().union(*(jax.typeof(array).manual_axis_type.varying for array in arrays))
  return tuple(_vary(array, axes) for array in arrays)


def like(array: jax.Array, tree):
  """`tree` (constants that start a loop, say), typed as differing between devices as `array` does."""
  return jax.tree.map(lambda leaf: _vary(leaf, jax.typeof(array).manual_axis_type.varying), tree)


def _vary(array, axes):
  return jax.lax.pcast(
    array, tuple(axes - jax.typeof(array).manual_axis_type.varying), to="varying"
  )
