"""token_logprob in plain JAX: a loop over tiles of the vocabulary, for CPU, GPU, and under GSPMD.

Tile t holds entries t, t + tiles, t + 2 tiles, ...: where the vocabulary is split over devices,
each of them then holds a part of every tile, not a few tiles whole.

Letters as in `tile`; V vocabulary, t tiles; a rest of V mod t entries is one more, small tile.
"""

import jax
import jax.numpy as jnp

from .. import target
from . import tile


def forward(
  hidden_ND, embedding_VD, label_N1, temperature_N1, *, soft_cap, entropy, tiles
) -> tile.Statistics:
  def add(sums, part_WD, first, stride):
    score_NW = tile.scores(hidden_ND, part_WD, temperature_N1, soft_cap)
    place_N1 = (label_N1 - first) // stride
    here_N1 = _entries(part_WD, first, stride)[jnp.clip(place_N1, 0, part_WD.shape[0] - 1)]
    chosen_N1 = jnp.take_along_axis(score_NW, place_N1, axis=1, mode="clip")
    return tile.add(sums, score_NW, jnp.where(here_N1 == label_N1, chosen_N1, 0.0))

  V = embedding_VD.shape[0]
  split_WtD, rest_RD = _split(embedding_VD, tiles)
  sums = target.like(temperature_N1, tile.nothing(temperature_N1, entropy=entropy))
  sums = _loop(tiles, lambda t, sums: add(sums, split_WtD[:, t], t, tiles), sums)
  if rest_RD.shape[0]:
    sums = add(sums, rest_RD, V - rest_RD.shape[0], 1)
  return tile.finish(sums)


def backward(
  hidden_ND, embedding_VD, label_N1, temperature_N1, pulled: tile.Pull, *, soft_cap, tiles
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of hidden states, embedding and temperature; the tiles' scores are made again."""

  def gradients(part_WD, first, stride):
    score_NW = tile.scores(hidden_ND, part_WD, temperature_N1, soft_cap)
    hit_NW = label_N1 == _entries(part_WD, first, stride)[None]
    pull_NW, temperature_N1_part = tile.gradient(
      score_NW, hit_NW, None, temperature_N1, pulled, soft_cap
    )
    return *tile.push(pull_NW, hidden_ND, part_WD), temperature_N1_part

  def add(t, sums):
    hidden_grad_ND, split_grad_WtD, temperature_grad_N1 = sums
    hidden, part, temperature = gradients(split_WtD[:, t], t, tiles)
    split_grad_WtD = split_grad_WtD.at[:, t].set(part.astype(split_grad_WtD.dtype))
    return hidden_grad_ND + hidden, split_grad_WtD, temperature_grad_N1 + temperature

  V, D = embedding_VD.shape
  split_WtD, rest_RD = _split(embedding_VD, tiles)
  sums = (
    jnp.zeros_like(hidden_ND, jnp.float32),
    jnp.zeros_like(split_WtD),
    jnp.zeros_like(temperature_N1),
  )
  hidden_grad_ND, split_grad_WtD, temperature_grad_N1 = _loop(
    tiles, add, target.like(temperature_N1, sums)
  )
  embedding_grad_VD = split_grad_WtD.reshape(-1, D)
  if rest_RD.shape[0]:
    hidden, part, temperature = gradients(rest_RD, V - rest_RD.shape[0], 1)
    hidden_grad_ND, temperature_grad_N1 = hidden_grad_ND + hidden, temperature_grad_N1 + temperature
    embedding_grad_VD = jnp.concatenate([embedding_grad_VD, part.astype(embedding_VD.dtype)])
  return hidden_grad_ND.astype(hidden_ND.dtype), embedding_grad_VD, temperature_grad_N1


def _split(embedding_VD, tiles):
  V, D = embedding_VD.shape
  whole = V // tiles * tiles
  return embedding_VD[:whole].reshape(V // tiles, tiles, D), embedding_VD[whole:]


def _entries(part_WD, first, stride):
  return first + stride * jnp.arange(part_WD.shape[0])


def _loop(tiles, body, value):
  """No loop around a single tile, which XLA then fuses with what comes before and after."""
  return body(0, value) if tiles == 1 else jax.lax.fori_loop(0, tiles, body, value)
