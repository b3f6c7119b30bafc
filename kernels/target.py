"""Where the code that is being traced will run: what decides if a Pallas kernel can be used there."""

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
  """What impl="auto" asks first: a TPU, and arrays that are already split."""
  return platform() == "tpu" and not partitioned()


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
