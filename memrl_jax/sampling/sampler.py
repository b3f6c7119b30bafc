"""Drawing one token a row, with the log-prob that training compares against.

Every setting is an array with one value a row, so no mix of settings compiles anything new. The
log-prob is always that of softmax(logits / T) over the *full* vocabulary; top-k and top-p only
restrict where tokens are drawn from. A sample drawn with top_k > 0 or top_p < 1 therefore does not
come from the distribution its log-prob belongs to: training must refuse it.

Letters: R rows, V vocabulary, N tokens drawn in a round.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

_ONE_BITS = 0x3F800000  # the bits of 1.0: weights in [0, 1] order like their bits


class Controls(NamedTuple):
  """Per-row settings. temperature 0 is greedy, top_p 1 and top_k 0 do not restrict."""

  temperature_R: jax.Array
  top_p_R: jax.Array
  top_k_R: jax.Array


def uniforms(key_R2: np.ndarray, first_R: np.ndarray, count: int) -> np.ndarray:
  """The random numbers of tokens first, first + 1, ...: float32 [R, N, 2], in [0, 1).

      u[r, n] = uniform(fold_in(key[r], first[r] + n))

  `key_R2` is raw threefry key data, uint32. A token's numbers depend on its request's key and its
  index in the response alone, so neither the batch nor the round can change a draw. Bit for bit
  those of `jax.random`, on the host: they are few, and a program for them takes long to compile.
  """
  chex.assert_type(key_R2, np.uint32)
  index_RN = first_R[:, None] + np.arange(count)[None]
  zero_RN = np.zeros(index_RN.shape, np.uint32)
  key_2RN = _threefry(key_R2.T[:, :, None], zero_RN, index_RN.astype(np.uint32))
  high, low = _threefry(
    key_2RN[..., None], np.zeros((*index_RN.shape, 2), np.uint32), np.arange(2, dtype=np.uint32)
  )
  return (((high ^ low) >> 9) | np.uint32(_ONE_BITS)).view(np.float32) - np.float32(1)


def _threefry(key: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Threefry-2x32 with 20 rounds (Salmon et al., Parallel Random Numbers, 2011) of two words."""
  ring = (key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA))
  x, y = x + ring[0], y + ring[1]
  for block in range(5):
    for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
      x = x + y
      y = ((y << turn) | (y >> (32 - turn))) ^ x
    x, y = x + ring[(block + 1) % 3], y + ring[(block + 2) % 3] + np.uint32(block + 1)
  return np.stack([x, y])


def sample(
  logits_RV: jax.Array, uniform_R2: jax.Array, controls: Controls
) -> tuple[jax.Array, jax.Array]:
  """Token ids [R] and their log-probs [R] under softmax(logits / T) of the full vocabulary, nats.

  A greedy row (T = 0) takes the first of the largest logits; its log-prob is reported at T = 1.
  """
  V = logits_RV.shape[1]
  chex.assert_equal_shape_prefix([logits_RV, uniform_R2, *controls], 1)
  greedy_R = controls.temperature_R == 0
  scaled_RV = logits_RV / jnp.where(greedy_R, 1.0, controls.temperature_R)[:, None]
  top_R1 = jnp.max(scaled_RV, axis=1, keepdims=True)
  weight_RV = jnp.exp(scaled_RV - top_R1)
  log_total_R = jnp.log(jnp.sum(weight_RV, axis=1))

  restricted = jnp.any((controls.top_p_R < 1) | (controls.top_k_R > 0))
  support_RV = jax.lax.cond(restricted, restrict, lambda weight, _: weight, weight_RV, controls)
  token_R = jax.lax.cond(
    jnp.all(greedy_R),
    lambda: jnp.zeros_like(greedy_R, jnp.int32),
    lambda: draw(support_RV, uniform_R2),
  )
  token_R = jax.lax.cond(
    jnp.any(greedy_R),
    lambda: jnp.where(
      greedy_R,
      jnp.min(jnp.where(scaled_RV == top_R1, jnp.arange(V)[None], V - 1), axis=1),
      token_R,
    ),
    lambda: token_R,
  )
  chosen_R = jnp.take_along_axis(scaled_RV, token_R[:, None], axis=1)[:, 0]
  return token_R, chosen_R - top_R1[:, 0] - log_total_R


def restrict(weight_RV: jax.Array, controls: Controls) -> jax.Array:
  """Zero the weights outside the top k, and outside the nucleus of what is left.

  The nucleus is the smallest set of largest weights that holds at least top_p of the mass
  (Holtzman et al. 1904.09751); tokens that tie with its last member stay in. Weights in [0, 1].
  """
  V = weight_RV.shape[1]

  def largest(weight_RV):
    k_R = jnp.where(controls.top_k_R > 0, jnp.minimum(controls.top_k_R, V), V)
    return _keep(weight_RV, jnp.ones_like(weight_RV), k_R.astype(jnp.float32))

  def nucleus(weight_RV):
    kept_RV = _keep(weight_RV, weight_RV, controls.top_p_R * jnp.sum(weight_RV, axis=1))
    return jnp.where((controls.top_p_R < 1)[:, None], kept_RV, weight_RV)

  def where_any(rows_R, restriction, weight_RV):
    return jax.lax.cond(jnp.any(rows_R), restriction, lambda weight_RV: weight_RV, weight_RV)

  weight_RV = where_any(controls.top_k_R > 0, largest, weight_RV)
  return where_any(controls.top_p_R < 1, nucleus, weight_RV)


def draw(weight_RV: jax.Array, uniform_R2: jax.Array) -> jax.Array:
  """A token with probability proportional to its weight, by inverse CDF in two levels.

  The first uniform picks a block of about sqrt(V) tokens by the blocks' sums, the second a token in
  it: two short scans instead of V random numbers, and twice the resolution of one float32.
  """
  R, V = weight_RV.shape
  width = max(8, 1 << round((V.bit_length() - 1) / 2))
  blocks = -(-V // width)
  weight_RBW = jnp.pad(weight_RV, ((0, 0), (0, blocks * width - V))).reshape(R, blocks, width)
  block_R = _inverse_cdf(jnp.sum(weight_RBW, axis=2), uniform_R2[:, 0])
  inside_RW = jnp.take_along_axis(weight_RBW, block_R[:, None, None], axis=1)[:, 0]
  return block_R * width + _inverse_cdf(inside_RW, uniform_R2[:, 1])


def _inverse_cdf(weight_RX: jax.Array, uniform_R: jax.Array) -> jax.Array:
  """The first index whose cumulative weight exceeds u * total; never one of weight zero."""
  X = weight_RX.shape[1]
  cumulative_RX = jnp.cumsum(weight_RX, axis=1)
  target_R1 = (uniform_R * cumulative_RX[:, -1])[:, None]
  index_1X = jnp.arange(X)[None]
  last_R = jnp.max(jnp.where(weight_RX > 0, index_1X, 0), axis=1)  # where rounding passes the end
  over_RX = (cumulative_RX > target_R1) & (weight_RX > 0)
  return jnp.minimum(jnp.min(jnp.where(over_RX, index_1X, X), axis=1), last_R)


def _keep(weight_RV: jax.Array, mass_RV: jax.Array, wanted_R: jax.Array) -> jax.Array:
  """Zero all weights below the largest threshold at which the kept mass is at least `wanted`.

  The threshold is built bit by bit: 30 passes find it exactly, and no sort is needed.
  """
  bits_RV = jax.lax.bitcast_convert_type(weight_RV, jnp.int32)

  def narrow(step, floor_R):
    trial_R = floor_R | (1 << (29 - step))
    kept_R = jnp.sum(jnp.where(bits_RV >= trial_R[:, None], mass_RV, 0.0), axis=1)
    return jnp.where((kept_R >= wanted_R) & (trial_R <= _ONE_BITS), trial_R, floor_R)

  floor_R = jax.lax.fori_loop(0, 30, narrow, jnp.zeros(weight_RV.shape[0], jnp.int32))
  return jnp.where(bits_RV >= floor_R[:, None], weight_RV, 0.0)
