"""The slot cache: keys and values of S slots, and which tokens every column was computed from.

A slot holds one context. What it holds when its request has ended stays, for whoever starts with
the same tokens. A slot may also *follow* another: its first `base` columns are then those of its
lead, read there in place, and only the later ones are its own. A lead owns all its columns, and
nobody overwrites what a follower reads there before an heir has a copy.

`width` columns are in use, a bucket that grows; the arrays hold at least these, plus `slack` columns so
that a round may write past the end of a short remainder.

On the devices it is a list of KV, each with a leading axis of layers: one of all layers, from which calls
get copies of what they read, or one a layer (`apart`), which kernels read in place. Key-value heads are
split over the tensor axis of the weights' mesh where they divide; the rest lies whole on every device.

Letters: L layers, S slots, C columns, R rows of one call, P prompt tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from memrl_jax.models import attention, decoder
from memrl_jax.models.config import DecoderConfig

LINE = 128  # columns of a tile: a TPU keeps keys with the columns last only in multiples of it


class Move(NamedTuple):
  """Columns start..end-1 of a slot that another gets a copy of."""

  source: int
  target: int
  start: int
  end: int


class SlotCache:
  """Device arrays and their host-side table `tokens_SC`, -1 where nothing is cached."""

  def __init__(
    self,
    cfg: DecoderConfig,
    slots: int,
    buckets: tuple[int, ...],
    slack: int,
    dtype: Any,
    sharding: Sharding,
    *,
    apart: bool = False,
  ):
    """`sharding` is that of any weight, on whose devices the cache lies."""
    self._shapes = functools.partial(
      shapes, cfg, slots, slack=slack, dtype=dtype, sharding=sharding, apart=apart
    )
    self.buckets, self.slack = buckets, slack
    self.tokens_SC = np.empty((slots, buckets[-1] + 1), np.int32)
    self.lead_S = np.empty(slots, np.int32)
    self.base_S = np.empty(slots, np.int32)  # 0 where a slot is its own lead
    self.clear()
    self.kv = self._zeros(self.width)

  def clear(self) -> None:
    """Forget everything. The arrays stay as large as they are, and nothing can tell."""
    self.width = self.buckets[0]
    self.tokens_SC[:] = -1
    self.lead_S[:] = np.arange(len(self.lead_S))
    self.base_S[:] = 0

  def bucket(self, columns: int) -> int:
    """The smallest bucket that holds `columns`."""
    return next(width for width in self.buckets if width >= columns)

  def _zeros(self, width: int) -> list[decoder.KV]:
    return jax.tree.map(
      lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), self._shapes(width)
    )

  def _narrower(self, width: int) -> bool:
    return self.kv[0].value_BKSd.shape < self._shapes(width)[0].value_BKSd.shape

  def _grow(self, width: int) -> None:
    """One part after the other, so that only one is there twice."""
    columns = self._shapes(width)[0].value_BKSd.shape[-2]
    for at in range(len(self.kv)):
      self.kv[at] = _grow(self.kv[at], columns, where=_where(self.kv))

  def reserve(self, columns: int) -> None:
    """Grow until every slot can hold `columns`: by copying, where there is anything to copy."""
    self.width = max(self.width, self.bucket(columns))
    if np.all(self.tokens_SC[:, 0] < 0):
      if self._narrower(self.width):
        self.kv = self._zeros(self.width)
      return
    for width in self.buckets:
      if width <= self.width and self._narrower(width):
        self._grow(width)

  def match(self, prefix_WP: np.ndarray, slots: slice | int = slice(None)) -> np.ndarray:
    """How many first tokens of a prefix a slot's columns were computed from.

    Prefixes end with at least one -2, which equals nothing. One prefix against many slots, or many
    prefixes against one slot.
    """
    differs = self.tokens_SC[slots, : prefix_WP.shape[-1]] != prefix_WP
    return differs.argmax(axis=1).astype(np.int32)

  def fetch(self, slot_R: np.ndarray, columns: int) -> list[decoder.KV]:
    """A copy, per layer, of the first columns of slots that follow nobody, or of leads."""
    return _fetch(self.kv, slot_R, columns)

  def fetch_from(
    self, slot_R: np.ndarray, first_R: np.ndarray, columns: int
  ) -> tuple[list[decoder.KV], np.ndarray]:
    """A copy, per layer, of the slots' own columns from `first_R` on, and where the copy starts.

    It starts earlier than asked near the end of the array.
    """
    first_R = np.minimum(first_R, self.width + self.slack - columns)
    return _fetch_from(self.kv, slot_R, first_R, columns), first_R

  def fetch_stacked(self, slot_R: np.ndarray, columns: int) -> decoder.KV:
    """A copy of the slots' first columns, those of their leads included, with a layer axis."""
    lead_R, base_R = self.lead_S[slot_R], self.base_S[slot_R]
    return _fetch_stacked(self.kv, slot_R, lead_R, base_R, columns)

  def store(
    self, slot_R: np.ndarray, start_R: np.ndarray, count: int, new: list[decoder.KV]
  ) -> None:
    """Write new columns of the first `count` rows into their slots, from column start on.

    What they mean is said by `record` and `append`.
    """
    self.kv = _store(self.kv, slot_R, start_R, np.int32(count), new, where=_where(self.kv))

  def clone(self, moves: list[Move]) -> None:
    """Copy columns from slot to slot, one move after the other."""
    S = len(self.tokens_SC)
    for at in range(0, len(moves), S):
      part = moves[at : at + S]
      moves_S4 = np.zeros((S, 4), np.int32)
      moves_S4[: len(part)] = part
      widest = self.bucket(max(move.end for move in part))
      self._clone(moves_S4, len(part), widest)

  def _clone(self, moves_S4: np.ndarray, count: int, columns: int) -> None:
    self.kv = _clone(self.kv, moves_S4, np.int32(count), columns, where=_where(self.kv))

  def warm_growth(self, width: int) -> None:
    """Grow to the next bucket by copying and afresh, which compiles both."""
    if self._narrower(width):
      self._grow(width)
      self.kv = self._zeros(width)
    self.width = width

  def warm_clone(self, columns: int) -> None:
    """Compile `clone`."""
    self._clone(np.zeros_like(self.tokens_SC[:, :4]), 0, columns)

  def follow(self, slot: int, source: int, shared: int, *, in_place: bool) -> list[Move]:
    """The slot starts with `shared` columns of another; returns the moves that `clone` must make.

    In place, it reads them from where the source has them. A source that follows is always
    followed: only what lies beyond the common lead is copied.
    """
    lead, base = int(self.lead_S[source]), int(self.base_S[source])
    if lead == source and not in_place:
      self._own(slot)
      return [Move(source, slot, 0, shared)]
    if lead == source:
      base = shared
    self.lead_S[slot], self.base_S[slot] = lead, min(base, shared)
    return [] if shared <= base else [Move(source, slot, base, shared)]

  def followers(self, lead: int) -> np.ndarray:
    """The slots that read columns of this one."""
    return np.flatnonzero((self.lead_S == lead) & (np.arange(len(self.lead_S)) != lead))

  def shorten(self, slot: int, columns: int) -> None:
    """The slot is about to be continued after its first `columns` columns."""
    if columns == 0:
      self._own(slot)
    self.base_S[slot] = min(int(self.base_S[slot]), columns)

  def hand_over(self, lead: int, keep: int, needed_S: np.ndarray) -> tuple[list[Move], list[int]]:
    """The lead keeps only its first `keep` columns; returns the moves to make before it loses them.

    Of its followers that read more, the needed ones get an heir among themselves, which copies the
    columns; the others, returned too, forget what lies beyond `keep`.
    """
    long = [slot for slot in self.followers(lead) if self.base_S[slot] > keep]
    needed = [slot for slot in long if needed_S[slot]]
    forgotten = [slot for slot in long if not needed_S[slot]]
    for slot in forgotten:
      self.tokens_SC[slot, keep:] = -1
      self.shorten(slot, keep)
    if not needed:
      return [], forgotten
    heir = max(needed, key=lambda slot: self.base_S[slot])
    columns = int(self.base_S[heir])
    for slot in needed:
      self.lead_S[slot] = heir
    self._own(heir)
    return [Move(lead, heir, 0, columns)], forgotten

  def settle(self, slot_X: np.ndarray) -> None:
    """Copy what these slots read in place, so that each owns all its columns."""
    slots = [int(slot) for slot in slot_X if self.lead_S[slot] != slot]
    moves = [Move(int(self.lead_S[slot]), slot, 0, int(self.base_S[slot])) for slot in slots]
    if moves:
      self.clone(moves)
    for slot in slots:
      self._own(slot)

  def _own(self, slot: int) -> None:
    self.lead_S[slot], self.base_S[slot] = slot, 0

  def record(self, slot: int, tokens: np.ndarray) -> None:
    """From now on the slot stands for exactly these tokens, whose columns the caller provides."""
    self.tokens_SC[slot, : len(tokens)] = tokens
    self.tokens_SC[slot, len(tokens) :] = -1

  def append(self, slot_X: np.ndarray, column_X: np.ndarray, token_X: np.ndarray) -> None:
    """Single columns that were stored, and the tokens they belong to."""
    self.tokens_SC[slot_X, column_X] = token_X


def compiled() -> int:
  """How many programs the functions of this file have compiled so far."""
  functions = (_fetch, _fetch_from, _fetch_stacked, _store, _clone, _grow)
  return sum(function._cache_size() for function in functions)


def shapes(
  cfg: DecoderConfig,
  slots: int,
  width: int,
  slack: int,
  dtype: Any,
  sharding: Sharding | None,
  *,
  apart: bool,
) -> list[decoder.KV]:
  """The device arrays, as shapes with shardings, on the devices of `sharding`."""
  columns = width + slack
  if apart:
    columns = -(-columns // LINE) * LINE
  if isinstance(sharding, NamedSharding):
    mesh, axis = sharding.mesh, attention.HEADS[0]
    splits = mesh.shape.get(axis, 1) > 1 and cfg.kv_heads % mesh.shape[axis] == 0
    sharding = NamedSharding(mesh, PartitionSpec(None, None, axis) if splits else PartitionSpec())
  lead = (1 if apart else cfg.layers, slots, cfg.kv_heads)

  def array(*shape):
    return jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=sharding)

  d = cfg.head_dim
  return [decoder.KV(array(d, columns), array(columns, d)) for _ in range(cfg.layers // lead[0])]


def layers(kv: list[decoder.KV]) -> list[decoder.KV]:
  """One KV [S, ...] a layer."""
  return [decoder.KV(*layer) for part in kv for layer in zip(*part, strict=True)]


def _where(kv: list[decoder.KV]) -> NamedSharding | None:
  """Where compiled functions have to leave a cache on a mesh: one that comes back with another
  sharding than it had would compile everything twice."""
  where = kv[0].key_BKdS.sharding
  return where if isinstance(where, NamedSharding) else None


def _keep(kv: Any, where: NamedSharding | None) -> Any:
  return kv if where is None else jax.lax.with_sharding_constraint(kv, where)


@functools.partial(jax.jit, static_argnames="columns")
def _fetch(kv: list[decoder.KV], slot_R: jax.Array, columns: int) -> list[decoder.KV]:
  return [
    decoder.KV(key_SKdC[slot_R][..., :columns], value_SKCd[slot_R][:, :, :columns])
    for key_SKdC, value_SKCd in layers(kv)
  ]


@functools.partial(jax.jit, static_argnames="columns")
def _fetch_from(
  kv: list[decoder.KV], slot_R: jax.Array, first_R: jax.Array, columns: int
) -> list[decoder.KV]:
  K, d = kv[0].key_BKdS.shape[2:4]

  def pick(key_SKdC, value_SKCd, slot, first):
    return decoder.KV(
      jax.lax.dynamic_slice(key_SKdC, (slot, 0, 0, first), (1, K, d, columns))[0],
      jax.lax.dynamic_slice(value_SKCd, (slot, 0, first, 0), (1, K, columns, d))[0],
    )

  some = jax.vmap(pick, (None, None, 0, 0))
  return [some(*layer, slot_R, first_R) for layer in layers(kv)]


@functools.partial(jax.jit, static_argnames="columns")
def _fetch_stacked(
  kv: list[decoder.KV], slot_R: jax.Array, lead_R: jax.Array, base_R: jax.Array, columns: int
) -> decoder.KV:
  (kv,) = kv

  def first(slot_R):
    return decoder.KV(
      kv.key_BKdS[:, slot_R][..., :columns], kv.value_BKSd[:, slot_R][..., :columns, :]
    )

  def joined():
    own, lead = first(slot_R), first(lead_R)
    followed_RC = jnp.arange(columns)[None] < base_R[:, None]
    return decoder.KV(
      jnp.where(followed_RC[None, :, None, None, :], lead.key_BKdS, own.key_BKdS),
      jnp.where(followed_RC[None, :, None, :, None], lead.value_BKSd, own.value_BKSd),
    )

  return jax.lax.cond(jnp.any(base_R > 0), joined, lambda: first(slot_R))


@functools.partial(jax.jit, donate_argnames="kv", static_argnames="where")
def _store(
  kv: list[decoder.KV],
  slot_R: jax.Array,
  start_R: jax.Array,
  count: jax.Array,
  new: list[decoder.KV],
  *,
  where: NamedSharding | None,
) -> list[decoder.KV]:
  each = kv[0].key_BKdS.shape[0]

  # A loop of block copies in place: a scatter of the same columns costs four times as much on CPU.
  def put(row, kv):
    kv = list(kv)
    for layer, fresh in enumerate(new):
      part, at = divmod(layer, each)
      block = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1)[None], fresh)
      kv[part] = _put(kv[part], block, at, slot_R[row], start_R[row])
    return kv

  return _keep(jax.lax.fori_loop(0, count, put, kv), where)


@functools.partial(jax.jit, static_argnames=("columns", "where"), donate_argnames="kv")
def _clone(
  kv: list[decoder.KV],
  moves_S4: jax.Array,
  count: jax.Array,
  columns: int,
  *,
  where: NamedSharding | None,
) -> list[decoder.KV]:
  L, _, K, d, _ = kv[0].key_BKdS.shape
  column_C = jnp.arange(columns)

  def chosen(start, end, new, old, shape):
    moved_C = (start <= column_C) & (column_C < end)
    return jnp.where(moved_C.reshape(shape), new, old)

  def block(kv, slot):
    return decoder.KV(
      jax.lax.dynamic_slice(kv.key_BKdS, (0, slot, 0, 0, 0), (L, 1, K, d, columns)),
      jax.lax.dynamic_slice(kv.value_BKSd, (0, slot, 0, 0, 0), (L, 1, K, columns, d)),
    )

  def copy(move, kv):
    source, target, start, end = moves_S4[move]
    new, old = block(kv, source), block(kv, target)
    merged = decoder.KV(
      chosen(start, end, new.key_BKdS, old.key_BKdS, (1, 1, 1, 1, columns)),
      chosen(start, end, new.value_BKSd, old.value_BKSd, (1, 1, 1, columns, 1)),
    )
    return _put(kv, merged, 0, target, 0)

  def copy_all(move, kv):
    return [copy(move, part) for part in kv]

  return _keep(jax.lax.fori_loop(0, count, copy_all, kv), where)


@functools.partial(jax.jit, static_argnames=("columns", "where"))
def _grow(kv: decoder.KV, columns: int, *, where: NamedSharding | None) -> decoder.KV:
  more, none = (0, columns - kv.value_BKSd.shape[-2]), (0, 0)
  kv = decoder.KV(
    jnp.pad(kv.key_BKdS, (none, none, none, none, more)),
    jnp.pad(kv.value_BKSd, (none, none, none, more, none)),
  )
  return _keep(kv, where)


def _put(kv: decoder.KV, block: decoder.KV, layer, slot, column) -> decoder.KV:
  return decoder.KV(
    jax.lax.dynamic_update_slice(kv.key_BKdS, block.key_BKdS, (layer, slot, 0, 0, column)),
    jax.lax.dynamic_update_slice(kv.value_BKSd, block.value_BKSd, (layer, slot, 0, column, 0)),
  )
