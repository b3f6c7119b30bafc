"""The slot cache: keys and values of S slots, and which tokens every column was computed from.

A slot holds one context. What it holds when its request has ended stays, for whoever starts with
the same tokens. All arrays have `width` columns, a bucket that grows by copying, plus `slack`
columns so that a round may write past the end of a short remainder.

Device arrays lead with L, the layers. Letters: S slots, C columns, R rows of one call, P prompt tokens.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from memrl_jax.models import decoder, policy
from memrl_jax.models.config import DecoderConfig


class SlotCache:
  """Device arrays and their host-side table `tokens_SC`, -1 where nothing is cached."""

  def __init__(self, cfg: DecoderConfig, slots: int, buckets: tuple[int, ...], slack: int):
    self.buckets, self.slack = buckets, slack
    self.width = buckets[0]
    self.tokens_SC = np.full((slots, buckets[-1] + 1), -1, np.int32)
    layers = policy.empty_kv(cfg, slots, self.width + slack)
    self._kv = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

  def place(self, sharding: jax.sharding.Sharding) -> None:
    """Live where the weights of this sharding live, on every device of a mesh.

    Compiled functions return their cache there, and one that started elsewhere would compile twice.
    """
    if isinstance(sharding, jax.sharding.NamedSharding):
      sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    self._kv = jax.device_put(self._kv, sharding)

  def bucket(self, columns: int) -> int:
    """The smallest bucket that holds `columns`."""
    return next(width for width in self.buckets if width >= columns)

  def reserve(self, columns: int) -> None:
    """Grow until every slot can hold `columns`."""
    for width in self.buckets:
      if self.width < width <= self.bucket(columns):
        self._kv = _grow(self._kv, width + self.slack)
        self.width = width

  def match(self, prefix_WP: np.ndarray, slots: slice | int = slice(None)) -> np.ndarray:
    """How many first tokens of a prefix a slot's columns were computed from.

    Prefixes end with at least one -2, which equals nothing. One prefix against many slots, or many
    prefixes against one slot.
    """
    differs = self.tokens_SC[slots, : prefix_WP.shape[-1]] != prefix_WP
    return differs.argmax(axis=1).astype(np.int32)

  def fetch(self, slot_R: np.ndarray, columns: int) -> list[decoder.KV]:
    """A copy, per layer, of the smallest bucket that holds the first columns of some slots."""
    return _fetch(self._kv, slot_R, self.bucket(columns))

  def fetch_stacked(self, slot_R: np.ndarray, columns: int) -> decoder.KV:
    """`fetch`, with a leading layer axis instead of a list."""
    return _fetch_stacked(self._kv, slot_R, self.bucket(columns))

  def store(
    self, slot_R: np.ndarray, start_R: np.ndarray, count: int, new: list[decoder.KV]
  ) -> None:
    """Write new columns of the first `count` rows into their slots, from column start on.

    What they mean is said by `record` and `append`.
    """
    self._kv = _store(self._kv, slot_R, start_R, np.int32(count), new)

  def clone(self, moves: list[tuple[int, int]], columns: int) -> None:
    """Copy the first columns from slot to slot, one (source, target) after the other."""
    pairs_S2 = np.zeros((len(self.tokens_SC), 2), np.int32)
    pairs_S2[: len(moves)] = np.reshape(moves, (-1, 2))
    self._kv = _clone(self._kv, pairs_S2, np.int32(len(moves)), self.bucket(columns))

  def record(self, slot: int, tokens: np.ndarray) -> None:
    """From now on the slot stands for exactly these tokens, whose columns the caller provides."""
    self.tokens_SC[slot, : len(tokens)] = tokens
    self.tokens_SC[slot, len(tokens) :] = -1

  def append(self, slot_X: np.ndarray, column_X: np.ndarray, token_X: np.ndarray) -> None:
    """Single columns that were stored, and the tokens they belong to."""
    self.tokens_SC[slot_X, column_X] = token_X

  def clear(self) -> None:
    """Forget everything that is cached."""
    self.tokens_SC[:] = -1


def compiled() -> int:
  """How many programs the functions of this file have compiled so far."""
  return sum(function._cache_size() for function in (_fetch, _fetch_stacked, _store, _clone, _grow))


@functools.partial(jax.jit, static_argnames="columns")
def _fetch(kv: decoder.KV, slot_R: jax.Array, columns: int) -> list[decoder.KV]:
  return [
    decoder.KV(key_SKdC[slot_R][..., :columns], value_SKCd[slot_R][:, :, :columns])
    for key_SKdC, value_SKCd in zip(*kv, strict=True)
  ]


@functools.partial(jax.jit, static_argnames="columns")
def _fetch_stacked(kv: decoder.KV, slot_R: jax.Array, columns: int) -> decoder.KV:
  return decoder.KV(
    kv.key_BKdS[:, slot_R][..., :columns], kv.value_BKSd[:, slot_R][..., :columns, :]
  )


@functools.partial(jax.jit, donate_argnames="kv")
def _store(
  kv: decoder.KV,
  slot_R: jax.Array,
  start_R: jax.Array,
  count: jax.Array,
  new: list[decoder.KV],
) -> decoder.KV:
  # A loop of block copies in place: a scatter of the same columns costs four times as much on CPU.
  def put(row, kv):
    for layer, fresh in enumerate(new):
      block = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1)[None], fresh)
      kv = _put(kv, block, layer, slot_R[row], start_R[row])
    return kv

  return jax.lax.fori_loop(0, count, put, kv)


@functools.partial(jax.jit, static_argnames="columns", donate_argnames="kv")
def _clone(kv: decoder.KV, pair_S2: jax.Array, count: jax.Array, columns: int) -> decoder.KV:
  L, _, K, d, _ = kv.key_BKdS.shape

  def copy(move, kv):
    source, target = pair_S2[move]
    block = decoder.KV(
      jax.lax.dynamic_slice(kv.key_BKdS, (0, source, 0, 0, 0), (L, 1, K, d, columns)),
      jax.lax.dynamic_slice(kv.value_BKSd, (0, source, 0, 0, 0), (L, 1, K, columns, d)),
    )
    return _put(kv, block, 0, target, 0)

  return jax.lax.fori_loop(0, count, copy, kv)


@functools.partial(jax.jit, static_argnames="columns")
def _grow(kv: decoder.KV, columns: int) -> decoder.KV:
  more, none = (0, columns - kv.value_BKSd.shape[-2]), (0, 0)
  return decoder.KV(
    jnp.pad(kv.key_BKdS, (none, none, none, none, more)),
    jnp.pad(kv.value_BKSd, (none, none, none, more, none)),
  )


def _put(kv: decoder.KV, block: decoder.KV, layer, slot, column) -> decoder.KV:
  return decoder.KV(
    jax.lax.dynamic_update_slice(kv.key_BKdS, block.key_BKdS, (layer, slot, 0, 0, column)),
    jax.lax.dynamic_update_slice(kv.value_BKSd, block.value_BKSd, (layer, slot, 0, column, 0)),
  )
