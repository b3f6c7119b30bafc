"""The decoder, as Flax NNX modules: token embedding, a stack of equal layers, a final norm.

Letters: N tokens (any number of rows, flattened), D width, K key-value heads, G query heads per
key-value head, d head width, M MLP width; B rows, Q query positions, S key positions.

A layer is cut in two where attention happens, so that training, prefill and decoding share every
weight and differ only in where keys and values come from:

    q, k, v = layer.project(x_ND, angles)        a = attend(q, [(k, v, mask), ...])
    x_ND    = layer.finish(x_ND, a)

Matmuls run on flattened tokens: with [B, T, D] operands XLA's weight gradients are slow on CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from memrl_kernels import target

from memrl_jax.models import spread as spread_lib
from memrl_jax.models.config import DecoderConfig

_HIDDEN = -1e30  # added to a masked score: far below any score, and finite
_SCORES = 1 << 27  # bytes of the scores that `attend` makes at once


class KV(NamedTuple):
  """Keys and values of S positions. Keys lie transposed, [..., d, S]: the dot with one query a row,
  which is decoding, reads them four times faster so."""

  key_BKdS: jax.Array
  value_BKSd: jax.Array


class RmsNorm(nnx.Module):
  """`rms_norm` with its weight; Gemma stores w - 1."""

  def __init__(self, width: int, eps: float, offset: bool):
    self.weight = nnx.Param(jnp.zeros(width) if offset else jnp.ones(width))
    self.eps, self.offset = eps, float(offset)

  def __call__(self, x: jax.Array) -> jax.Array:
    return rms_norm(x, self.weight[...], eps=self.eps, offset=self.offset)


class Layer(nnx.Module):
  """One pre-norm transformer layer with grouped-query attention and a gated MLP.

  `qkv` holds, per key-value head, its G query heads, then its key, then its value: one matmul, and
  a shard over K keeps every group whole. `gate_up` holds the gate, then the up projection.
  """

  def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
    D, K, G, d, M = cfg.dim, cfg.kv_heads, cfg.groups, cfg.head_dim, cfg.mlp_dim
    depth = (2 * cfg.layers) ** -0.5  # keeps the residual stream's variance flat in depth

    def normal(shape, fan_in, gain=1.0):
      return nnx.Param(gain * fan_in**-0.5 * jax.random.normal(rngs.params(), shape))

    def norm(width):
      return RmsNorm(width, cfg.norm_eps, cfg.norm_offset)

    self.cfg = cfg
    self.qkv = normal((D, K, G + 2, d), D)
    self.out = normal((K, G, d, D), K * G * d, depth)
    self.gate_up = normal((D, 2, M), D)
    self.down = normal((M, D), M, depth)
    self.attention_norm, self.mlp_norm = norm(D), norm(D)
    if cfg.qkv_bias:
      self.qkv_bias = nnx.Param(jnp.zeros((K, G + 2, d)))
    if cfg.qk_norm:
      self.query_norm, self.key_norm = norm(d), norm(d)
    if cfg.post_norms:
      self.post_attention_norm, self.post_mlp_norm = norm(D), norm(D)

  def project(
    self, x_ND: jax.Array, angles_N2d: jax.Array, spread: spread_lib.Spread | None = None
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [N, K, G, d] (rotated), keys [N, K, d] (rotated) and values [N, K, d]."""
    cfg = self.cfg
    K, G, d = cfg.kv_heads, cfg.groups, cfg.head_dim
    normed = self.attention_norm(x_ND)
    flat = (spread.rows(normed) if spread else normed) @ self.qkv[...].reshape(cfg.dim, -1)
    mixed = flat.reshape(-1, K, G + 2, d)
    mixed = spread.cut(mixed, 1) if spread else mixed
    if cfg.qkv_bias:
      mixed = mixed + self.qkv_bias[...][None]
    query, key, value = mixed[:, :, :G], mixed[:, :, G : G + 1], mixed[:, :, G + 1]
    if cfg.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    return rotate(query, angles_N2d), rotate(key, angles_N2d)[:, :, 0], value

  def finish(
    self, x_ND: jax.Array, attended_NH: jax.Array, spread: spread_lib.Spread | None = None
  ) -> jax.Array:
    """Output projection and MLP, each added to the residual stream."""
    cfg = self.cfg
    mixed = attended_NH @ self.out[...].reshape(-1, cfg.dim)
    x_ND = x_ND + (self.post_attention_norm(mixed) if cfg.post_norms else mixed)
    normed, gate_up = self.mlp_norm(x_ND), self.gate_up[...]
    normed = spread.rows(normed) if spread else normed
    if not (spread or target.splits()):  # split along M, it could not be merged where it lies
      gate_up = gate_up.reshape(cfg.dim, -1)
    wide = jnp.tensordot(normed, gate_up, 1)
    wide = checkpoint_name(spread.cut(wide, 2) if spread else wide, "wide")
    mixed = gated(cfg.activation, wide).reshape(-1, cfg.mlp_dim) @ self.down[...]
    return x_ND + (self.post_mlp_norm(mixed) if cfg.post_norms else mixed)


class Decoder(nnx.Module):
  """Embedding, stacked layers (every array of `layers` leads with L), final norm, head."""

  def __init__(self, cfg: DecoderConfig, rngs: nnx.Rngs):
    def table():
      return nnx.Param(cfg.dim**-0.5 * jax.random.normal(rngs.params(), (cfg.vocab, cfg.dim)))

    self.embedding = table()
    if not cfg.tie_embeddings:
      self.head = table()
    self.final_norm = RmsNorm(cfg.dim, cfg.norm_eps, cfg.norm_offset)
    stack = nnx.vmap(lambda rngs: Layer(cfg, rngs), in_axes=0, out_axes=0)
    self.layers = nnx.split_rngs(splits=cfg.layers)(stack)(rngs)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, offset: float = 0.0) -> jax.Array:
  """x / sqrt(mean x^2 + eps) * (offset + w) over the last axis, in float32.

  Zhang & Sennrich (1910.07467). A bfloat16 w is widened before 1 is added: 1 + w would lose it.
  """
  wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32) + offset
  scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
  return (wide * scale * jnp.expand_dims(weight, range(x.ndim - 1))).astype(x.dtype)


def rotate(x: jax.Array, angles_N2d: jax.Array) -> jax.Array:
  """Rotary embedding of [N, ..., d]: turns the pair (x_i, x_{i + d/2}) by its angle.

  `angles_N2d` is (cos, sin) of d/2 angles, stacked. RoFormer (2104.09864) Eq. 34, in the
  half-split order of Hugging Face weights.
  """
  shape = (x.shape[0],) + (1,) * (x.ndim - 2) + (x.shape[-1] // 2,)
  cos, sin = angles_N2d[:, 0].reshape(shape), angles_N2d[:, 1].reshape(shape)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return turned.astype(x.dtype)


class Lanes(NamedTuple):
  """Which rows read a stretch of context together: W of them are one row of its dots.

  Lane p reads block p for the rows `member_PW[p]`; row r finds its result at `place_R[r]` of the
  flattened lanes. Unused places of a lane may name any row.
  """

  member_PW: jax.Array
  place_R: jax.Array


class Part(NamedTuple):
  """A stretch of context, and what of it each query of each row sees."""

  kv: KV
  see_BQS: jax.Array
  lanes: Lanes | None = None  # None: block b belongs to row b


def attend(
  cfg: DecoderConfig, query_NKGd: jax.Array, parts: Sequence[Part], rows: int
) -> jax.Array:
  """Softmax attention over several stretches of cached context, without concatenating them.

      out = sum_s softmax_s(cap(scale * q . k_s)) v_s      over the s that the masks allow

  The N queries are `rows` rows of Q positions. Batch and key-value heads are merged into one batch
  axis of the dots, and a group's queries into their row axis: on CPU this is several times faster
  than an einsum over four axes. A part with lanes is read once for all rows of a lane, and its
  softmax joined to that of the others by its maximum and sum (Milakov & Gimelshein 1805.02867); it
  needs Q = 1. A query that may see nothing (padding) gets some finite mean. Where the scores would
  take more than _SCORES bytes, queries come some positions at a time.
  """
  B, K, G, d = rows, cfg.kv_heads, cfg.groups, cfg.head_dim
  Q = query_NKGd.shape[0] // B
  each = 4 * B * K * G * sum(part.see_BQS.shape[-1] for part in parts)  # bytes of a position
  some = next(n for n in range(Q, 0, -1) if Q % n == 0 and (n * each <= _SCORES or n == 1))
  if some < Q:

    def positions(array):
      return array.reshape(B, Q // some, some, *array.shape[2:]).swapaxes(0, 1)

    def attend_some(block):
      query, seen = block
      few = [part._replace(see_BQS=see) for part, see in zip(parts, seen, strict=True)]
      return attend(cfg, query.reshape(B * some, K, G, d), few, B).reshape(B, some, K * G * d)

    seen = [
      positions(jnp.broadcast_to(part.see_BQS, (B, Q, part.see_BQS.shape[-1]))) for part in parts
    ]
    out = jax.lax.map(attend_some, (positions(query_NKGd.reshape(B, Q, K, G, d)), seen))
    return out.swapaxes(0, 1).reshape(B * Q, K * G * d)
  query_BQKGd = (query_NKGd * jnp.asarray(cfg.attention_scale, query_NKGd.dtype)).reshape(
    B, Q, K, G, d
  )
  own = [part for part in parts if part.lanes is None]
  scores = [_cached_scores(cfg, query_BQKGd, part.kv, part.see_BQS) for part in own]
  tops = [jnp.max(score, axis=-1, keepdims=True) for score in scores]
  joint = [_in_lanes(cfg, query_BQKGd, part) for part in parts if part.lanes is not None]
  top = functools.reduce(jnp.maximum, tops + [lane_top for lane_top, _, _ in joint])
  weights = [jnp.exp(score - top) for score in scores]
  total = sum(jnp.sum(weight, axis=-1, keepdims=True) for weight in weights)
  out = sum(
    _mix(part.kv, weight, query_NKGd.dtype) for part, weight in zip(own, weights, strict=True)
  )
  for lane_top, lane_total, lane_out in joint:
    share = jnp.exp(lane_top - top)
    total, out = total + share * lane_total, out + share * lane_out
  attended = (out / total).astype(query_NKGd.dtype).reshape(B, K, Q, G, d)
  return attended.transpose(0, 2, 1, 3, 4).reshape(B * Q, K * G * d)


def _cached_scores(
  cfg: DecoderConfig, query_BQKGd: jax.Array, kv: KV, see_BQS: jax.Array
) -> jax.Array:
  """Capped scores [B * K, Q * G, S], hidden where the mask is False."""
  B, Q, K, G, d = query_BQKGd.shape
  merged = query_BQKGd.transpose(0, 2, 1, 3, 4).reshape(B * K, Q * G, d)
  key = kv.key_BKdS.reshape(B * K, d, -1)
  score = jnp.einsum("nqd,nds->nqs", merged, key, preferred_element_type=jnp.float32)
  if cfg.attention_soft_cap is not None:
    score = cfg.attention_soft_cap * jnp.tanh(score / cfg.attention_soft_cap)
  bias = jnp.where(see_BQS, 0.0, _HIDDEN)[:, None, :, None, :]
  return score + jnp.broadcast_to(bias, (B, K, Q, G, see_BQS.shape[-1])).reshape(score.shape)


def _mix(kv: KV, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Values [B * K, Q * G, d] summed with weights, float32."""
  value = kv.value_BKSd.reshape(weight.shape[0], -1, kv.value_BKSd.shape[-1])
  return jnp.einsum("nqs,nsd->nqd", weight.astype(dtype), value, preferred_element_type=jnp.float32)


def _in_lanes(
  cfg: DecoderConfig, query_BQKGd: jax.Array, part: Part
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Maximum, sum and unnormalised mean of a part that rows read together, [rows * K, G, .]."""
  K, G, d = query_BQKGd.shape[2:]
  P, W = part.lanes.member_PW.shape
  member = part.lanes.member_PW.reshape(-1)
  query_PWKGd = query_BQKGd[member].reshape(P, W, K, G, d)
  score = _cached_scores(cfg, query_PWKGd, part.kv, part.see_BQS[member].reshape(P, W, -1))
  top = jnp.max(score, axis=-1, keepdims=True)
  weight = jnp.exp(score - top)
  total = jnp.sum(weight, axis=-1, keepdims=True)
  out = _mix(part.kv, weight, query_BQKGd.dtype)

  def back(array):
    lines = array.reshape(P, K, W, G, -1).swapaxes(1, 2).reshape(P * W, K, G, -1)
    return lines[part.lanes.place_R].reshape(-1, G, array.shape[-1])

  return back(top), back(total), back(out)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: str, wide_N2M: jax.Array) -> jax.Array:
  """act(gate) * up of a gate and an up projection that lie side by side, [N, M], or [N, 1, M] of
  [N, 2, M].

  The gradient is written by hand: one pass over `wide`, and nothing else is kept for it.
  """
  gate_NM, up_NM = jnp.split(wide_N2M, 2, axis=1)
  return _activation(activation)(gate_NM) * up_NM


def _activation(name: str) -> Callable[[jax.Array], jax.Array]:
  return jax.nn.silu if name == "silu" else jax.nn.gelu


def _gated_forward(activation, wide_N2M):
  return gated(activation, wide_N2M), wide_N2M


def _gated_backward(activation, wide_N2M, ct_NM):
  gate_NM, up_NM = jnp.split(wide_N2M, 2, axis=1)
  act_NM, slope_NM = jax.jvp(_activation(activation), (gate_NM,), (jnp.ones_like(gate_NM),))
  return (jnp.concatenate([ct_NM * up_NM * slope_NM, ct_NM * act_NM], axis=1),)


gated.defvjp(_gated_forward, _gated_backward)


class Sight(NamedTuple):
  """Which tokens of a packed sequence see which: q sees k if k <= q and

      segment_k <= segment_q < after_k,      in local layers also position_q - position_k < window

  Segments are numbered depth first, so [segment_k, after_k) are k's segment and all that continue it.
  """

  looks_BT: jax.Array  # segment as a query; -1 where padding looks
  begin_BT: jax.Array  # segment as a key; beyond all of them where padding is seen
  after_BT: jax.Array
  position_BT: jax.Array


def sight(segment_BT: jax.Array, parent_BN: jax.Array | None, position_BT: jax.Array) -> Sight:
  """The sight of every token, from the forest of its sequence's segments (see TokenBatch)."""
  real_BT = segment_BT > 0
  after_BT = segment_BT + 1
  if parent_BN is not None:
    N = parent_BN.shape[1]
    own_1N1, other_11N = jnp.arange(N)[None, :, None], jnp.arange(N)[None, None, :]
    # Depth first, the descendants of a segment end where for the first time a parent lies before it.
    ends_BNN = (other_11N > own_1N1) & (parent_BN[:, None, :] < own_1N1)
    after_BN = jnp.min(jnp.where(ends_BNN, other_11N, N), axis=2)
    after_BT = jnp.take_along_axis(after_BN, segment_BT, axis=1)
  return Sight(
    jnp.where(real_BT, segment_BT, -1),
    jnp.where(real_BT, segment_BT, jnp.iinfo(jnp.int32).max),
    after_BT,
    position_BT,
  )


def attend_packed(
  cfg: DecoderConfig,
  query_NKGd: jax.Array,
  key_NKd: jax.Array,
  value_NKd: jax.Array,
  see: Sight,
  window: jax.Array | int | None,
) -> jax.Array:
  """Attention of packed sequences to themselves, [N, H]; N = B * T tokens, `window` None: no limit.

  By blocks of queries, each with the keys up to its end; the backward pass computes the weights
  again from the log-sum-exp, so that no [T, T] array is kept. A kernel for another device goes
  here: it has the same arguments.
  """
  B, T = see.looks_BT.shape
  K, G, d = cfg.kv_heads, cfg.groups, cfg.head_dim
  query = query_NKGd.reshape(B, T, K, G, d).transpose(0, 2, 1, 3, 4).reshape(B * K, T * G, d)
  key, value = (
    array.reshape(B, T, K, d).swapaxes(1, 2).reshape(B * K, T, d) for array in (key_NKd, value_NKd)
  )
  query = query * jnp.asarray(cfg.attention_scale, query.dtype)
  out = _packed(cfg, query, key, value, see, window)
  return out.reshape(B, K, T, G, d).transpose(0, 2, 1, 3, 4).reshape(B * T, K * G * d)


def _query_blocks(T: int) -> list[tuple[int, int]]:
  """At most 8 blocks of at least 96 queries: fewer compute more hidden scores, more compile longer."""
  size = max(96, -(-T // 8))
  return [(start, min(start + size, T)) for start in range(0, T, size)]


def _scores(cfg, query, key, see: Sight, window, start: int, end: int):
  """Capped and masked scores [B * K, queries * G, end] of one block of queries."""
  B, K, G = see.looks_BT.shape[0], cfg.kv_heads, cfg.groups
  score = jnp.einsum(
    "nqd,nsd->nqs",
    query[:, start * G : end * G],
    key[:, :end],
    preferred_element_type=jnp.float32,
  )
  if cfg.attention_soft_cap is not None:
    score = cfg.attention_soft_cap * jnp.tanh(score / cfg.attention_soft_cap)
  looks_BQ1 = see.looks_BT[:, start:end, None]
  sees_BQS = (see.begin_BT[:, None, :end] <= looks_BQ1) & (looks_BQ1 < see.after_BT[:, None, :end])
  index_T = jnp.arange(end)
  sees_BQS &= index_T[None, None, :] <= index_T[None, start:, None]
  if window is not None:
    position = see.position_BT
    sees_BQS &= position[:, start:end, None] - position[:, None, :end] < window
  bias = jnp.where(sees_BQS, 0.0, _HIDDEN)[:, None, :, None, :]
  bias = jnp.broadcast_to(bias, (B, K, end - start, G, end)).reshape(score.shape)
  return score, bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed(cfg, query, key, value, see, window):
  return _packed_forward(cfg, query, key, value, see, window)[0]


def _packed_forward(cfg, query, key, value, see, window):
  out, lse = [], []
  for start, end in _query_blocks(key.shape[1]):
    score, bias = _scores(cfg, query, key, see, window, start, end)
    score = score + bias
    top = jnp.max(score, axis=-1, keepdims=True)
    weight = jnp.exp(score - top)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    mixed = jnp.einsum(
      "nqs,nsd->nqd",
      weight.astype(value.dtype),
      value[:, :end],
      preferred_element_type=jnp.float32,
    )
    out.append((mixed / total).astype(query.dtype))
    lse.append(top + jnp.log(total))
  out = checkpoint_name(jnp.concatenate(out, axis=1), "attention")
  lse = checkpoint_name(jnp.concatenate(lse, axis=1), "attention")
  return out, (query, key, value, see, window, out, lse)


def _packed_backward(cfg, saved, ct):
  query, key, value, see, window, out, lse = saved
  T, G = key.shape[1], cfg.groups
  delta = jnp.sum(ct.astype(jnp.float32) * out.astype(jnp.float32), axis=-1, keepdims=True)
  d_query, d_key, d_value = [], jnp.zeros(key.shape, jnp.float32), jnp.zeros(key.shape, jnp.float32)
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  for start, end in _query_blocks(T):
    rows = slice(start * G, end * G)
    score, bias = _scores(cfg, query, key, see, window, start, end)
    weight = jnp.exp(score + bias - lse[:, rows])
    d_weight = dot("nqd,nsd->nqs", ct[:, rows], value[:, :end])
    d_score = weight * (d_weight - delta[:, rows])
    if cfg.attention_soft_cap is not None:
      d_score = d_score * (1 - jnp.square(score / cfg.attention_soft_cap))
    d_score = d_score.astype(query.dtype)
    d_query.append(dot("nqs,nsd->nqd", d_score, key[:, :end]))
    d_key = d_key.at[:, :end].add(dot("nqs,nqd->nsd", d_score, query[:, rows]))
    d_value = d_value.at[:, :end].add(dot("nqs,nqd->nsd", weight.astype(ct.dtype), ct[:, rows]))
  d_query = jnp.concatenate(d_query, axis=1).astype(query.dtype)
  return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None, None


_packed.defvjp(_packed_forward, _packed_backward)
