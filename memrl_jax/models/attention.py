"""Attention of the model where TPU kernels can do it, and how it is split over a mesh.

Where they can run (`memrl_kernels.target`), on one TPU or in a `shard_map` over the mesh that
`target.over` names, rows are split over data and fsdp, key-value heads over tensor; nothing is sent.
Elsewhere, on CPU and GPU, `decoder` has its own code for the same equations: the two agree to
rounding. A kernel whose blocks do not fit gives way to its XLA form.

Letters: as in `decoder` and `policy`; P lanes of W rows that read a stretch of context together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from memrl_kernels import decode_attention, segment_attention, target, token_logprob

from memrl_jax.models import decoder
from memrl_jax.models.config import DecoderConfig

ROWS, HEADS = ("data", "fsdp"), ("tensor",)  # axes of the mesh, see training.mesh
_LINES = 2048  # queries of all heads that a prefill kernel takes at once: 4 MB of scores a block


class Stretch(NamedTuple):
  """Cached columns that decoding reads, one block a layer, and which of them a global layer sees.

  Row r sees columns first_R[r] (None: 0) to end_R[r] - 1; column c stands at position
  origin_R[r] + c. With lanes, several rows read one block; without, block b belongs to row b. With
  `slot_X` row, or lane, x reads block slot_X[x] of many, in place.
  """

  blocks: list[decoder.KV]
  first_R: jax.Array | None
  end_R: jax.Array
  origin_R: jax.Array
  lanes: decoder.Lanes | None = None
  slot_X: jax.Array | None = None


def by_kernel() -> bool:
  """Whether the code that is being traced has the kernels."""
  return target.chooses_pallas() or target.splits()


def packed(
  cfg: DecoderConfig,
  segment_BT: jax.Array,
  parent_BN: jax.Array | None,
  position_BT: jax.Array,
) -> Callable[..., jax.Array]:
  """Attention of packed sequences to themselves, a function of (query, key, value, window)."""
  if not by_kernel():
    see = decoder.sight(segment_BT, parent_BN, position_BT)
    return lambda *arrays: decoder.attend_packed(cfg, *arrays[:3], see, arrays[3])
  B, T = segment_BT.shape
  K, G, d = cfg.kv_heads, cfg.groups, cfg.head_dim
  row = PartitionSpec(target.axes(ROWS, B))
  head = PartitionSpec(*row, None, target.axes(HEADS, K))
  far = jnp.int32(1 << 30)

  def attend(query_NKGd, key_NKd, value_NKd, window):
    def local(query, key, value, window, segment_BT, position_BT, *parent_BN):
      return segment_attention.segment_attention(
        query, key, value, segment_BT, *(parent_BN or [None]), position_BT,
        scale=cfg.attention_scale, soft_cap=cfg.attention_soft_cap,
        sliding_window=window if any(cfg.local_layers) else None,
      )  # fmt: skip

    parent = () if parent_BN is None else (parent_BN,)
    specs = (head, head, head, PartitionSpec(), row, row, *(row for _ in parent))
    out = target.split(local, specs, head)(
      query_NKGd.reshape(B, T, K, G, d),
      key_NKd.reshape(B, T, K, d),
      value_NKd.reshape(B, T, K, d),
      far if window is None else jnp.asarray(window, jnp.int32),
      segment_BT,
      position_BT,
      *parent,
    )
    return out.reshape(B * T, K * G * d)

  return attend


def cached(
  cfg: DecoderConfig,
  query_RKGd: jax.Array,
  stretches: Sequence[Stretch],
  layer: int,
  fresh: decoder.KV,
  step: jax.Array,
  position_R: jax.Array,
) -> jax.Array:
  """Attention of one query a row to cached stretches and to the columns 0..step of `fresh`.

  The parts are joined by their log-sum-exp. `fresh` is as short as a round, less than a kernel's
  block, so plain matmuls read it.
  """
  R, K, G, d = query_RKGd.shape
  window = cfg.sliding_window if cfg.local_layers[layer] else None
  options = dict(scale=cfg.attention_scale, soft_cap=cfg.attention_soft_cap)

  def start(first_R, origin_R):
    near_R = jnp.zeros(R, jnp.int32) if window is None else position_R + 1 - window - origin_R
    return near_R if first_R is None else jnp.maximum(first_R, near_R)

  new = decoder.KV(fresh.key_BKdS.reshape(R, K, d, -1), fresh.value_BKSd.reshape(R, K, -1, d))
  end_R = jnp.broadcast_to(step + 1, (R,)).astype(jnp.int32)
  start_R = start(None, position_R - step)
  parts = [
    decode_attention.decode_attention(query_RKGd, *new, end_R, start_R, **options, impl="ref")
  ]
  for one in stretches:
    queries, bounds = query_RKGd, (one.end_R, start(one.first_R, one.origin_R))
    if one.lanes is not None:
      queries = _into_lanes(one.lanes, query_RKGd)
      bounds = tuple(_into_lanes(one.lanes, jnp.broadcast_to(x[:, None], (R, G))) for x in bounds)
    part = _split_rows(options, queries, one.blocks[layer], one.slot_X, *bounds)
    if one.lanes is not None:
      part = decode_attention.Part(*(_from_lanes(one.lanes, x, G) for x in part))
    parts.append(part)
  return decode_attention.merge(parts).out_RKGd.astype(query_RKGd.dtype).reshape(R, K * G * d)


def _split_rows(options, query_RKGd, kv, slot_R, end_RX, start_RX) -> decode_attention.Part:
  R, K = query_RKGd.shape[:2]
  row, heads = target.axes(ROWS, R), target.axes(HEADS, K)
  head = PartitionSpec(row, heads)
  cache = head if slot_R is None else PartitionSpec(None, heads)
  more = () if slot_R is None else (slot_R,)

  def local(query, key, value, end, start, *slot):
    return decode_attention.decode_attention(query, key, value, end, start, *slot, **options)

  each = PartitionSpec(row)
  specs = (head, cache, cache, each, each, *(each for _ in more))
  return target.split(local, specs, head)(query_RKGd, *kv, end_RX, start_RX, *more)


def prefilled(
  cfg: DecoderConfig,
  query_NKGd: jax.Array,
  stretches: Sequence[Stretch],
  layer: int,
  new: decoder.KV,
  position_RQ: jax.Array,
) -> jax.Array:
  """Attention of a chunk of Q queries a row to stretches read in place, and to the chunk itself.

  Query q sees the chunk's columns 0..q. A stretch is seen alike by all queries of a row, but for the
  window of a local layer. No scores are kept: the queries of a row, some at a time, are one group of
  `decode_attention`, each with bounds of its own, and the parts are joined by their log-sum-exp.
  """
  R, Q = position_RQ.shape
  K, G, d = query_NKGd.shape[1:]
  window = cfg.sliding_window if cfg.local_layers[layer] else None
  row, heads = target.axes(ROWS, R), target.axes(HEADS, K)
  each, head, cache = PartitionSpec(row), PartitionSpec(row, heads), PartitionSpec(None, heads)

  def bounds(first_R, end_RQ, origin_R):
    start_RQ = jnp.zeros_like(position_RQ)
    if window is not None:
      start_RQ = position_RQ + 1 - window - origin_R[:, None]
    return jnp.maximum(start_RQ, first_R[:, None]), jnp.broadcast_to(end_RQ, (R, Q))

  index_Q = jnp.arange(Q, dtype=jnp.int32)
  zero_R = jnp.zeros(R, jnp.int32)
  seen = [(new, None, *bounds(zero_R, index_Q[None] + 1, position_RQ[:, 0]))]
  specs = [(head, each, each, each)]
  for one in stretches:
    first_R = zero_R if one.first_R is None else one.first_R
    limits = bounds(first_R, one.end_R[:, None], one.origin_R)
    seen.append((one.blocks[layer], one.slot_X, *limits))
    specs.append((cache, each, each, each))

  def local(query_RQKGd, seen):
    R, _, K, _, _ = query_RQKGd.shape
    blocks = next(n for n in range(1, Q + 1) if (Q % n == 0 and Q // n * G * K <= _LINES) or n == Q)
    query = query_RQKGd.reshape(R, blocks, Q // blocks, K, G, d).swapaxes(2, 3)
    query = query.reshape(R * blocks, K, Q // blocks * G, d)

    def lines(x_RQ):
      return jnp.repeat(x_RQ.reshape(R * blocks, Q // blocks), G, axis=1)

    own_R = jnp.arange(R, dtype=jnp.int32)
    parts = [
      decode_attention.decode_attention(
        query, *kv, lines(end_RQ), lines(start_RQ),
        jnp.repeat(own_R if slot_R is None else slot_R, blocks),
        scale=cfg.attention_scale, soft_cap=cfg.attention_soft_cap,
      )
      for kv, slot_R, start_RQ, end_RQ in seen
    ]  # fmt: skip
    out = decode_attention.merge(parts).out_RKGd.astype(query.dtype)
    out = out.reshape(R, blocks, K, Q // blocks, G, d).swapaxes(2, 3)
    return out.reshape(R, Q, K, G, d)

  head_RQK = PartitionSpec(row, None, heads)
  out = target.split(local, (head_RQK, specs), head_RQK)(query_NKGd.reshape(R, Q, K, G, d), seen)
  return out.reshape(R * Q, K * G * d)


def _into_lanes(lanes: decoder.Lanes, x_RXG: jax.Array) -> jax.Array:
  """[R, ..., G, d] or [R, G] to one line a lane, its W rows' queries as one group of W * G."""
  P, W = lanes.member_PW.shape
  lines = x_RXG[lanes.member_PW.reshape(-1)].reshape(P, W, *x_RXG.shape[1:])
  if x_RXG.ndim == 2:
    return lines.reshape(P, -1)
  K, G, d = x_RXG.shape[1:]
  return lines.swapaxes(1, 2).reshape(P, K, W * G, d)


def _from_lanes(lanes: decoder.Lanes, x_PKX: jax.Array, G: int) -> jax.Array:
  """The way back of [P, K, W * G, ...], to one line a row."""
  P, W = lanes.member_PW.shape
  K, rest = x_PKX.shape[1], x_PKX.shape[3:]
  lines = x_PKX.reshape(P, K, W, G, *rest).swapaxes(1, 2).reshape(P * W, K, G, *rest)
  return lines[lanes.place_R]


def score(
  hidden_ND: jax.Array,
  embedding_VD: jax.Array,
  label_N: jax.Array,
  mask_N: jax.Array,
  temperature_N: jax.Array,
  rows: int,
  **options,
) -> token_logprob.TokenLogprob:
  """`token_logprob` of tokens that belong to `rows` rows, the vocabulary split over tensor."""
  row, words = target.axes(ROWS, rows), target.axes(HEADS, embedding_VD.shape[0])

  def local(hidden_ND, embedding_VD, label_N, mask_N, temperature_N):
    arrays = hidden_ND, embedding_VD, label_N, mask_N
    if words is None:
      return token_logprob.token_logprob(*arrays, temperature_N=temperature_N, **options)
    return token_logprob.token_logprob_split(
      *arrays, axis=words[0], temperature_N=temperature_N, **options
    )

  each = PartitionSpec(row)
  specs = (each, PartitionSpec(words), each, each, each)
  return target.split(local, specs, each)(hidden_ND, embedding_VD, label_N, mask_N, temperature_N)
