"""TPU kernels without a TPU: compile for three generations, interpret with race detection, lower for GPU.

    compiled = tpu.compile(f, *shapes, generation="v5p", in_specs=P("data"), out_specs=P("data"))
    value = tpu.interpret(f, *arrays)       # raises on a race; jit, grad and vmap inside f are fine
    text = tpu.lower_for_gpu(f, *shapes)    # StableHLO

Only `compile` needs the libtpu wheel; it skips the test where that is missing.
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from jax._src import config
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}  # four chips each
CHIPS = 4


def mesh(generation: str, shape: tuple[int, ...] = (CHIPS,), names=("data",)) -> Mesh:
  """Four chips of a generation in TOPOLOGIES that need not be here; skips without libtpu."""
  if importlib.util.find_spec("libtpu") is None:
    pytest.skip("compiling for TPU needs the libtpu wheel: pip install libtpu")
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu asks a metadata server that is not there
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # or a second process dies on libtpu's lock file
  topology = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu")
  return Mesh(np.array(topology.devices).reshape(shape), names)


def compile(
  function: Callable,
  *shapes: jax.ShapeDtypeStruct,
  generation: str,
  in_specs: Any,
  out_specs: Any,
  shape: tuple[int, ...] = (CHIPS,),
  names: tuple[str, ...] = ("data",),
  donate_argnums: tuple[int, ...] = (),
) -> jax.stages.Compiled:
  """`jit(shard_map(function))` by the real TPU compiler; `shapes` are those of whole arrays.

  `in_specs` is one PartitionSpec for every argument, or a tuple with one each. Of the result, use
  `memory_analysis()` (bytes per chip) and `as_text()` (a kernel is a tpu_custom_call).
  """
  chips = mesh(generation, shape, names)
  specs = in_specs if type(in_specs) is tuple else (in_specs,) * len(shapes)
  placed = [
    jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(chips, spec))
    for array, spec in zip(shapes, specs, strict=True)
  ]
  split = jax.shard_map(function, mesh=chips, in_specs=specs, out_specs=out_specs, check_vma=False)
  # Not from the persistent cache: a program for a chip that is absent cannot be loaded from it.
  with config.enable_compilation_cache(False):
    return jax.jit(split, donate_argnums=donate_argnums).lower(*placed).compile()


def interpret(function: Callable, *arrays: Any, **params: Any) -> Any:
  """`jit(function)(*arrays)` with every Pallas TPU kernel interpreted on CPU.

  Scratch and outputs that were never written read as NaN, reads out of bounds raise, and a race
  between memory accesses in any of the kernels fails the test.
  """
  from jax._src.pallas.mosaic.interpret import interpret_pallas_call as machine

  states = []

  def record(**kwargs):  # each kernel has a state of its own; jax keeps only the last
    states.append(State(**kwargs))
    return states[-1]

  State = machine.RaceDetectionState
  pltpu.reset_tpu_interpret_mode_state()
  try:
    with (
      mock.patch.object(machine, "RaceDetectionState", record),
      pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, **params)),
      config.enable_compilation_cache(False),  # callbacks into this process cannot be cached
    ):
      # A new function, so that jit does not reuse a program that was traced for something else. It runs
      # once and mostly in callbacks: not optimised, it compiles in four fifths of the time.
      once = jax.jit(
        lambda *args: function(*args), compiler_options={"xla_backend_optimization_level": 0}
      )
      value = jax.block_until_ready(once(*arrays))
  finally:
    pltpu.reset_tpu_interpret_mode_state()
  if not states:
    raise AssertionError("no Pallas TPU kernel ran: was impl='pallas' passed on?")
  if any(state.races_found for state in states):
    raise AssertionError("race between memory accesses of a kernel; the accesses are on stdout")
  return value


def lower_for_gpu(function: Callable, *shapes: Any) -> str:
  """StableHLO of `jit(function)` for CUDA, which needs neither a GPU nor CUDA."""
  return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
