"""The pure border of the language model: functions of (params, cfg, arrays), safe under jit and grad.

`params` is a nested dict of arrays; everything under "layers" leads with L and is scanned, so that
compile time does not grow with depth. Modules are put together again inside the traced function.

Letters: B sequences, T positions, D width, V vocabulary, S rows in a sequence, K sampled tokens of a
row (in TokenBatch); in the cached functions R rows, C context columns, N new columns, and a cache
block is [L, 2, R, K, C, d]: keys and values of K key-value heads of width d.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from memrl_kernels import token_logprob

from memrl_jax.models import decoder
from memrl_jax.models.config import DecoderConfig, rope_frequencies
from memrl_jax.types import TokenBatch

Params = dict[str, Any]


class DecodeWeights(NamedTuple):
  """Weights laid out for one token a row: layers sliced apart, the head transposed to [D, V]."""

  embedding_VD: jax.Array
  layers: tuple[Params, ...]
  final_norm: Params
  head_DV: jax.Array


def init(key: jax.Array, cfg: DecoderConfig) -> Params:
  """Random float32 params: std fan_in^-1/2, residual branches shrunk by (2 L)^-1/2."""
  model = decoder.Decoder(cfg, nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def shapes(cfg: DecoderConfig) -> Params:
  """The params tree with ShapeDtypeStructs for arrays; computes nothing."""
  return jax.eval_shape(lambda: init(jax.random.key(0), cfg))


def head(params: Params, cfg: DecoderConfig) -> jax.Array:
  """The output embedding [V, D]; the input table when the two are tied."""
  return params["embedding"] if cfg.tie_embeddings else params["head"]


def hidden(
  params: Params,
  cfg: DecoderConfig,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
  position_BT: jax.Array,
  *,
  remat: bool = False,
) -> jax.Array:
  """Final-normed hidden states [B, T, D] of packed sequences.

  A token sees the tokens before it, itself included, that carry its own segment id; id 0 is padding
  and neither sees nor is seen. `remat` recomputes each layer in the backward pass.
  """
  B, T = tokens_BT.shape
  index_T = jnp.arange(T)
  see_BTT = (index_T[:, None] >= index_T[None, :])[None] & (
    (segment_BT[:, :, None] == segment_BT[:, None, :]) & (segment_BT[:, :, None] > 0)
  )
  kinds = _Kinds.of(cfg)
  angles = kinds.angles(cfg, position_BT.reshape(-1))
  masks = kinds.masks(cfg, see_BTT, position_BT, position_BT)

  def step(x_ND, layer):
    weights, kind = layer
    block = _layer(cfg, weights)
    query, key, value = block.project(x_ND, kinds.pick(angles, kind))
    parts = [(_kv(key, value, B), kinds.pick(masks, kind))]
    return block.finish(x_ND, decoder.attend(cfg, query, parts, B)), None

  if remat:
    step = jax.checkpoint(step, prevent_cse=False)
  x_ND = _embed(params["embedding"], cfg, tokens_BT.reshape(-1))
  x_ND, _ = jax.lax.scan(step, x_ND, (params["layers"], kinds.index_L))
  return _final_norm(params["final_norm"], cfg, x_ND).reshape(B, T, cfg.dim)


def logits(params: Params, cfg: DecoderConfig, hidden_XD: jax.Array) -> jax.Array:
  """Float32 logits [..., V] of final-normed hidden states, soft-capped where the model is."""
  return _cap(
    cfg,
    jnp.einsum("...d,vd->...v", hidden_XD, head(params, cfg), preferred_element_type=jnp.float32),
  )


def gather(hidden_BTD: jax.Array, index_BX: jax.Array) -> jax.Array:
  """Hidden states at positions `index_BX` of their own sequence, [B, X, D]."""
  B, T, D = hidden_BTD.shape
  flat = index_BX + T * jnp.arange(B)[:, None]
  return hidden_BTD.reshape(B * T, D)[flat.reshape(-1)].reshape(B, index_BX.shape[1], D)


def logprobs(
  params: Params,
  cfg: DecoderConfig,
  batch: TokenBatch,
  *,
  entropy: bool,
  remat: bool = False,
  chunk: int = 512,
) -> tuple[jax.Array, jax.Array | None]:
  """Log-probs, and entropies if asked, of the sampled tokens under softmax(logits / T), nats.

      logp[b, s, k] = log softmax(W h[b, gather[b, s, k]] / T[b, s]) [target[b, s, k]]

  T is the temperature each row was sampled at, so the value is comparable with the recorded
  behaviour log-prob. Logits exist only at sampled tokens and only `chunk` tokens at a time. Masked
  entries are 0 and send no gradient. Returns ([B, S, K], [B, S, K] or None).
  """
  hidden_BTD = hidden(
    params, cfg, batch.tokens_BT, batch.segment_BT, batch.position_BT, remat=remat
  )
  return head_logprobs(params, cfg, hidden_BTD, batch, entropy=entropy, chunk=chunk)


def head_logprobs(
  params: Params,
  cfg: DecoderConfig,
  hidden_BTD: jax.Array,
  batch: TokenBatch,
  *,
  entropy: bool,
  chunk: int = 512,
) -> tuple[jax.Array, jax.Array | None]:
  """`logprobs` from hidden states that a caller needs for something else too (a value head)."""
  mask = batch.mask_BSK
  B, S, K = mask.shape
  index_BX = jnp.where(mask, batch.gather_BSK, 0).reshape(B, S * K)
  label_BSK = jnp.where(mask, batch.target_BSK, 0)
  temperature_BSK = jnp.where(mask, batch.temperature_BS[:, :, None], 1.0)
  scored = token_logprob.token_logprob(
    gather(hidden_BTD, index_BX).reshape(B * S * K, cfg.dim),
    head(params, cfg),
    label_BSK.reshape(-1),
    mask.reshape(-1),
    temperature_N=temperature_BSK.reshape(-1),
    soft_cap=cfg.final_soft_cap,
    chunk=chunk,
    entropy=entropy,
  )
  logp_BSK = jnp.where(mask, scored.logp_N.reshape(B, S, K), 0.0)
  if not entropy:
    return logp_BSK, None
  return logp_BSK, jnp.where(mask, scored.entropy_N.reshape(B, S, K), 0.0)


def prefill(
  params: Params,
  cfg: DecoderConfig,
  context: decoder.KV,
  start_R: jax.Array,
  tokens_RN: jax.Array,
) -> list[decoder.KV]:
  """Keys and values, per layer, of a chunk of N tokens that continues each row's cached context.

  Row r has `start_R[r]` valid columns in `context`, whose arrays lead with L; its chunk stands at
  positions start, start + 1, ... Padding goes to the right end of a chunk, where no valid token can see it.
  Makes no logits, and of the last layer computes only the projections.
  """
  R, N = tokens_RN.shape
  C = context.value_BKSd.shape[-2]
  column_RC = jnp.broadcast_to(jnp.arange(C), (R, C))
  position_RN = start_R[:, None] + jnp.arange(N)[None]
  old_RNC = jnp.broadcast_to((column_RC < start_R[:, None])[:, None, :], (R, N, C))
  new_RNN = jnp.broadcast_to(jnp.tril(jnp.ones((N, N), bool)), (R, N, N))
  kinds = _Kinds.of(cfg)
  angles = kinds.angles(cfg, position_RN.reshape(-1))
  old_masks = kinds.masks(cfg, old_RNC, position_RN, column_RC)
  new_masks = kinds.masks(cfg, new_RNN, position_RN, position_RN)

  def project(x_MD, weights, kind):
    block = _layer(cfg, weights)
    query, key, value = block.project(x_MD, kinds.pick(angles, kind))
    return block, query, _kv(key, value, R)

  def at(index, tree):
    # By index, because a slice of all layers but the last would copy the weights.
    return jax.tree.map(
      lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), tree
    )

  def step(x_MD, layer):
    index, kind = layer
    block, query, new = project(x_MD, at(index, params["layers"]), kind)
    old = at(index, context)
    parts = [(old, kinds.pick(old_masks, kind)), (new, kinds.pick(new_masks, kind))]
    return block.finish(x_MD, decoder.attend(cfg, query, parts, R)), new

  x_MD = _embed(params["embedding"], cfg, tokens_RN.reshape(-1))
  last = cfg.layers - 1
  x_MD, scanned = jax.lax.scan(step, x_MD, (jnp.arange(last), kinds.index_L[:last]))
  _, _, new = project(x_MD, at(last, params["layers"]), kinds.index_L[last])
  return [*(at(layer, scanned) for layer in range(last)), new]


def decode_weights(params: Params, cfg: DecoderConfig) -> DecodeWeights:
  """Slice and transpose once, outside the decode loop."""
  return DecodeWeights(
    embedding_VD=params["embedding"],
    layers=tuple(
      jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["layers"])
      for layer in range(cfg.layers)
    ),
    final_norm=params["final_norm"],
    head_DV=head(params, cfg).T,
  )


def decode(
  weights: DecodeWeights,
  cfg: DecoderConfig,
  context: list[decoder.KV],
  length_R: jax.Array,
  fresh: list[decoder.KV],
  step: jax.Array,
  token_R: jax.Array,
) -> tuple[jax.Array, list[decoder.KV]]:
  """Feed one token a row: its logits [R, V], and `fresh` with its key and value in column `step`.

  `context` is read only and has `length_R` valid columns. `fresh`, N columns a layer, holds what
  this round has added; row r stands at position length_R[r] + step. Two parts, because rewriting
  one large cache in every step costs more.
  """
  R = token_R.shape[0]
  C, N = context[0].value_BKSd.shape[-2], fresh[0].value_BKSd.shape[-2]
  column_RC = jnp.broadcast_to(jnp.arange(C), (R, C))
  column_RN = length_R[:, None] + jnp.arange(N)[None]
  position_R1 = (length_R + step)[:, None]
  kinds = _Kinds.of(cfg)
  angles = kinds.angles(cfg, position_R1[:, 0])
  old_masks = kinds.masks(cfg, (column_RC < length_R[:, None])[:, None, :], position_R1, column_RC)
  new_R1N = jnp.broadcast_to(jnp.arange(N) <= step, (R, 1, N))
  new_masks = kinds.masks(cfg, new_R1N, position_R1, column_RN)

  x_RD = _embed(weights.embedding_VD, cfg, token_R)
  updated = []
  for layer, (old, new) in enumerate(zip(context, fresh, strict=True)):
    kind = int(kinds.index_L[layer])
    block = _layer(cfg, weights.layers[layer])
    query, key, value = block.project(x_RD, kinds.pick(angles, kind))
    new = decoder.KV(
      jax.lax.dynamic_update_slice(new.key_BKdS, key[..., None], (0, 0, 0, step)),
      jax.lax.dynamic_update_slice(new.value_BKSd, value[:, :, None], (0, 0, step, 0)),
    )
    parts = [(old, kinds.pick(old_masks, kind)), (new, kinds.pick(new_masks, kind))]
    x_RD = block.finish(x_RD, decoder.attend(cfg, query, parts, R))
    updated.append(new)
  normed_RD = _final_norm(weights.final_norm, cfg, x_RD)
  scores_RV = jnp.matmul(normed_RD, weights.head_DV, preferred_element_type=jnp.float32)
  return _cap(cfg, scores_RV), updated


class _Kinds(NamedTuple):
  """The kinds of layer that exist (global, local) and which kind each layer is."""

  local: tuple[bool, ...]
  index_L: np.ndarray

  @classmethod
  def of(cls, cfg: DecoderConfig) -> _Kinds:
    local = tuple(sorted(set(cfg.local_layers)))
    return cls(local, np.array([local.index(kind) for kind in cfg.local_layers], np.int32))

  def angles(self, cfg: DecoderConfig, position_N: jax.Array) -> jax.Array:
    """(cos, sin) of every rotary angle for each kind, [kinds, N, 2, d/2], float32."""
    tables = []
    for local in self.local:
      frequency = np.array(rope_frequencies(cfg, local=local), np.float32)
      angle = position_N.astype(jnp.float32)[:, None] * frequency[None]
      tables.append(jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1))
    return jnp.stack(tables)

  def masks(
    self, cfg: DecoderConfig, see_BQS: jax.Array, query_BQ: jax.Array, key_BS: jax.Array
  ) -> jax.Array:
    """What each kind may see, [kinds, B, Q, S]: local kinds only the last `sliding_window`."""
    if cfg.sliding_window is None:
      return see_BQS[None]
    near = query_BQ[:, :, None] - key_BS[:, None, :] < cfg.sliding_window
    return jnp.stack([see_BQS & near if local else see_BQS for local in self.local])

  def pick(self, tables: jax.Array, kind: Any) -> jax.Array:
    return tables[0] if len(self.local) == 1 else tables[kind]


@functools.lru_cache(maxsize=32)
def _layer_graph(cfg: DecoderConfig) -> nnx.GraphDef:
  return nnx.graphdef(nnx.eval_shape(lambda: decoder.Layer(cfg, nnx.Rngs(params=0))))


def _layer(cfg: DecoderConfig, weights: Params) -> decoder.Layer:
  return nnx.merge(_layer_graph(cfg), weights)


def _kv(key_NKd: jax.Array, value_NKd: jax.Array, rows: int) -> decoder.KV:
  """From one line a token to one block a row."""
  shape = (rows, -1, *key_NKd.shape[1:])
  return decoder.KV(
    key_NKd.reshape(shape).transpose(0, 2, 3, 1), value_NKd.reshape(shape).swapaxes(1, 2)
  )


def empty_kv(
  cfg: DecoderConfig, rows: int, columns: int, dtype: Any = jnp.float32
) -> list[decoder.KV]:
  """Zeroed keys and values of `columns` positions, one block a layer."""
  K, d = cfg.kv_heads, cfg.head_dim
  return [
    decoder.KV(jnp.zeros((rows, K, d, columns), dtype), jnp.zeros((rows, K, columns, d), dtype))
    for _ in range(cfg.layers)
  ]


def _embed(embedding_VD: jax.Array, cfg: DecoderConfig, token_N: jax.Array) -> jax.Array:
  return embedding_VD[token_N] * jnp.asarray(cfg.embed_scale, embedding_VD.dtype)


def _final_norm(norm: Params, cfg: DecoderConfig, x_ND: jax.Array) -> jax.Array:
  weight = norm["weight"] + float(cfg.norm_offset)
  return decoder.rms_norm(x_ND, weight, eps=cfg.norm_eps)


def _cap(cfg: DecoderConfig, logits_XV: jax.Array) -> jax.Array:
  cap = cfg.final_soft_cap
  return logits_XV if cap is None else cap * jnp.tanh(logits_XV / cap)
