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
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from memrl_jax.models.config import DecoderConfig

_HIDDEN = -1e30  # added to a masked score: far below any score, and finite


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
    return rms_norm(x, self.weight[...] + self.offset, eps=self.eps)


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
    self, x_ND: jax.Array, angles_N2d: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [N, K, G, d] (rotated), keys [N, K, d] (rotated) and values [N, K, d]."""
    cfg = self.cfg
    K, G, d = cfg.kv_heads, cfg.groups, cfg.head_dim
    flat = self.attention_norm(x_ND) @ self.qkv[...].reshape(cfg.dim, -1)
    mixed = flat.reshape(-1, K, G + 2, d)
    if cfg.qkv_bias:
      mixed = mixed + self.qkv_bias[...][None]
    query, key, value = mixed[:, :, :G], mixed[:, :, G : G + 1], mixed[:, :, G + 1]
    if cfg.qk_norm:
      query, key = self.query_norm(query), self.key_norm(key)
    return rotate(query, angles_N2d), rotate(key, angles_N2d)[:, :, 0], value

  def finish(self, x_ND: jax.Array, attended_NH: jax.Array) -> jax.Array:
    """Output projection and MLP, each added to the residual stream."""
    cfg = self.cfg
    mixed = attended_NH @ self.out[...].reshape(-1, cfg.dim)
    x_ND = x_ND + (self.post_attention_norm(mixed) if cfg.post_norms else mixed)
    wide = self.mlp_norm(x_ND) @ self.gate_up[...].reshape(cfg.dim, -1)
    gate, up = wide[:, : cfg.mlp_dim], wide[:, cfg.mlp_dim :]
    act = jax.nn.silu if cfg.activation == "silu" else jax.nn.gelu
    mixed = (act(gate) * up) @ self.down[...]
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


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
  """x / sqrt(mean x^2 + eps) * w over the last axis, in float32. Zhang & Sennrich (1910.07467)."""
  wide = x.astype(jnp.float32)
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


def attend(
  cfg: DecoderConfig,
  query_NKGd: jax.Array,
  parts: Sequence[tuple[KV, jax.Array]],
  rows: int,
) -> jax.Array:
  """Softmax attention over several stretches of context, without concatenating them.

      out = sum_s softmax_s(cap(scale * q . k_s)) v_s      over the s that the masks [B, Q, S] allow

  The N queries are `rows` rows of Q positions. Batch and key-value heads are merged into one batch
  axis of the dots, and a group's queries into their row axis: on CPU this is several times faster
  than an einsum over four axes. A query that may see nothing (padding) gets some finite mean.
  """
  B, K, G, d = rows, cfg.kv_heads, cfg.groups, cfg.head_dim
  Q = query_NKGd.shape[0] // B
  merged = query_NKGd.reshape(B, Q, K, G, d).transpose(0, 2, 1, 3, 4).reshape(B * K, Q * G, d)
  merged = merged * jnp.asarray(cfg.attention_scale, merged.dtype)
  scores = []
  for kv, mask_BQS in parts:
    key = kv.key_BKdS.reshape(B * K, d, -1)
    score = jnp.einsum("nqd,nds->nqs", merged, key, preferred_element_type=jnp.float32)
    if cfg.attention_soft_cap is not None:
      score = cfg.attention_soft_cap * jnp.tanh(score / cfg.attention_soft_cap)
    bias = jnp.where(mask_BQS, 0.0, _HIDDEN)[:, None, :, None, :]
    spread = jnp.broadcast_to(bias, (B, K, Q, G, mask_BQS.shape[-1]))
    scores.append(score + spread.reshape(score.shape))
  tops = [jnp.max(score, axis=-1, keepdims=True) for score in scores]
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  weights = [jnp.exp(score - top) for score in scores]
  total = sum(jnp.sum(weight, axis=-1, keepdims=True) for weight in weights)
  out = sum(
    jnp.einsum(
      "nqs,nsd->nqd",
      weight.astype(merged.dtype),
      kv.value_BKSd.reshape(B * K, -1, d),
      preferred_element_type=jnp.float32,
    )
    for (kv, _), weight in zip(parts, weights, strict=True)
  )
  attended = (out / total).astype(merged.dtype).reshape(B, K, Q, G, d)
  return attended.transpose(0, 2, 1, 3, 4).reshape(B * Q, K * G * d)
