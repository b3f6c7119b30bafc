"""What is spread over a mesh by hand is what one device would have read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.models.spread import Spread
from memrl_jax.training import mesh

pytestmark = pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")


@pytest.mark.parametrize("split", [(2, 2, 2), (1, 4, 2), (8, 1, 1)])
@pytest.mark.parametrize(
  "V, D", [(12, 8), (11, 8), (12, 6)], ids=["even", "odd words", "odd width"]
)
def test_a_lookup_reads_the_same_rows_and_sends_each_its_gradient(split, V, D):
  """Of whole numbers, so that sums are exact in any order; 11 words over 2 and 6 columns over 4 stay whole."""
  made = mesh.make(mesh.MeshConfig(*split), jax.devices())
  one = Spread(made, mesh.placement(made))
  rng = np.random.default_rng(0)
  table_VD = rng.integers(-9, 9, (V, D)).astype(np.float32)
  token_N = rng.integers(0, V, 32).astype(np.int32)
  weight_ND = rng.integers(-9, 9, (32, D)).astype(np.float32)

  def total(table_VD, token_N):
    x_ND = one.lookup(table_VD, token_N, V, D)
    return jnp.sum(x_ND * weight_ND), x_ND

  placed = mesh.place_params(made, {"embedding": table_VD})["embedding"]
  program = jax.jit(jax.grad(total, has_aux=True))
  grad_VD, x_ND = program(placed, mesh.place_batch(made, token_N))
  np.testing.assert_array_equal(x_ND, table_VD[token_N])
  want_VD = np.zeros_like(table_VD)
  np.add.at(want_VD, token_N, weight_ND)
  np.testing.assert_array_equal(grad_VD, want_VD)
