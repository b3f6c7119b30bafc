"""The harness itself: a race is found, also in a kernel that is not the last; no kernel is an error."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tests.kernels import tpu


def copy(array, racy):
  def kernel(source, out, scratch, semaphore):
    fetch = pltpu.make_async_copy(source, scratch, semaphore)
    fetch.start()
    if not racy:
      fetch.wait()
    out[...] = scratch[...]
    if racy:
      fetch.wait()

  return pl.pallas_call(
    kernel,
    in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
    out_shape=jax.ShapeDtypeStruct(array.shape, array.dtype),
    scratch_shapes=[pltpu.VMEM(array.shape, array.dtype), pltpu.SemaphoreType.DMA],
  )(array)


def test_a_race_in_any_kernel_is_an_error_and_none_leaves_the_value():
  ones = jnp.ones((8, 128))
  assert (tpu.interpret(lambda x: copy(copy(x, False), False), ones) == 1).all()
  with pytest.raises(AssertionError, match="race"):
    tpu.interpret(lambda x: copy(copy(x, True), False), ones)


def test_a_function_without_a_kernel_is_an_error():
  with pytest.raises(AssertionError, match="no Pallas TPU kernel ran"):
    tpu.interpret(lambda x: x + 1, jnp.ones(3))
