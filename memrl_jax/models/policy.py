"""The pure border of the language model: functions of (params, cfg, arrays), safe under jit and grad.

`params` is a nested dict of arrays; everything under "layers" leads with L and is scanned, so that
compile time does not grow with depth. Modules are put together again inside the traced function.

Letters: B sequences, T positions, D width, V vocabulary, S rows in a sequence, K sampled tokens of a
row (in TokenBatch); in the cached functions R rows, C context columns, N new columns, and a cache
block is [L, 2, R, K, C, d]: keys and values of K key-value heads of width d.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from memrl_jax.models import attention, decoder, stack
from memrl_jax.models import spread as spread_lib
from memrl_jax.models.config import DecoderConfig
from memrl_jax.types import TokenBatch

Params = dict[str, Any]

# What a layer keeps for its backward pass, beside its input; the rest is computed again. "some" also
# keeps the widest matmul's result: 2 M numbers a token, for 6 % of the time. False keeps everything.
# "offload" keeps what True does, its input too, in the host's memory until the backward pass comes.
KEPT = {True: ("attention",), "some": ("attention", "wide"), "offload": ("attention", "input")}


class DecodeWeights(NamedTuple):
  """Weights laid out for one token a row: layers sliced apart, the head transposed to [D, V]."""

  embedding_VD: jax.Array
  layers: tuple[Params, ...]
  final_norm: Params
  head_DV: jax.Array


class ChipWeights(NamedTuple):
  """Weights as an accelerator keeps them for sampling, its only copy: layers sliced apart, and every
  matrix with its two large axes last, which it then reads as it lies. `open_weights` opens them."""

  embedding_VD: jax.Array
  layers: tuple[Params, ...]
  final_norm: Params
  head_VD: jax.Array | None  # None: the embedding


class Shared(NamedTuple):
  """A stretch of context that several rows of a decoding step read in common, one block a layer.

  Row r reads positions below `base_R[r]` there; column c of its own context stands at position
  offset_R[r] + c, and counts from the base on. Lane p reads block p, or block `slot_P[p]` in place.
  """

  blocks: list[decoder.KV]
  lanes: decoder.Lanes
  base_R: jax.Array
  offset_R: jax.Array
  slot_P: jax.Array | None = None


class Slots(NamedTuple):
  """A whole slot cache, one block a layer, and where rows read in it: positions below `base_R[r]` from
  slot lead_R[r], the later ones from slot_R[r]."""

  blocks: list[decoder.KV]
  slot_R: jax.Array
  lead_R: jax.Array
  base_R: jax.Array


def init(key: jax.Array, cfg: DecoderConfig) -> Params:
  """Random float32 params: std fan_in^-1/2, residual branches shrunk by (2 L)^-1/2."""
  model = decoder.Decoder(cfg, nnx.Rngs(params=key))
  return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def shapes(cfg: DecoderConfig) -> Params:
  """The params tree with ShapeDtypeStructs for arrays; computes nothing."""
  return jax.eval_shape(lambda: init(jax.random.key(0), cfg))


def head(params: Params, cfg: DecoderConfig) -> jax.Array:
  """The output embedding [V, D]; the input table when the two are tied (and not told apart)."""
  tied = cfg.tie_embeddings and "head" not in params
  return params["embedding"] if tied else params["head"]


def hidden(
  params: Params,
  cfg: DecoderConfig,
  tokens_BT: jax.Array,
  segment_BT: jax.Array,
  position_BT: jax.Array,
  parent_BN: jax.Array | None = None,
  *,
  remat: bool | str = False,
  spread: spread_lib.Spread | None = None,
) -> jax.Array:
  """Final-normed hidden states [B, T, D] of packed sequences.

  A token sees the tokens before it, itself included, in its own segment and in those that lead to
  it (`parent_BN`, see TokenBatch); segment 0 is padding and neither sees nor is seen. `remat`: see
  KEPT. `spread`: over which chips; None: over one, or as the compiler chooses.
  """
  B, T = tokens_BT.shape
  kinds = stack.Kinds.of(cfg)
  angles = kinds.angles(cfg, position_BT.reshape(-1))
  attend = attention.packed(cfg, segment_BT, parent_BN, position_BT)

  def step(x_ND, layer):
    weights, kind = layer
    x_ND = checkpoint_name(x_ND, "input") if remat == "offload" else x_ND
    block = stack.layer(cfg, spread.layer(weights) if spread else weights)
    query, key, value = block.project(x_ND, kinds.pick(angles, kind), spread)
    mixed_NH = attend(query, key, value, kinds.window(cfg, kind))
    x_ND = block.finish(x_ND, mixed_NH, spread)
    return spread.between(x_ND) if spread else x_ND, None

  if remat:
    step = jax.checkpoint(step, prevent_cse=False, policy=_keep(remat))
  x_ND = stack.embed(params["embedding"], cfg, tokens_BT.reshape(-1), spread)
  x_ND, _ = jax.lax.scan(step, x_ND, (params["layers"], kinds.index_L))
  return stack.final_norm(params["final_norm"], cfg, x_ND).reshape(B, T, cfg.dim)


def _keep(remat: bool | str) -> Any:
  """Which of its named results `jax.checkpoint` keeps, and where."""
  policies = jax.checkpoint_policies
  if remat != "offload":
    return policies.save_only_these_names(*KEPT[remat])
  return policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=list(KEPT[remat]),
    offload_src="device",
    offload_dst="pinned_host",
  )


def logits(params: Params, cfg: DecoderConfig, hidden_XD: jax.Array) -> jax.Array:
  """Float32 logits [..., V] of final-normed hidden states, soft-capped where the model is."""
  return stack.cap(
    cfg,
    jnp.einsum("...d,vd->...v", hidden_XD, head(params, cfg), preferred_element_type=jnp.float32),
  )


def gather(
  hidden_BTD: jax.Array, index_BX: jax.Array, spread: spread_lib.Spread | None = None
) -> jax.Array:
  """Hidden states at positions `index_BX` of their own sequence, [B, X, D]."""
  if spread:
    return spread.by_rows(gather)(hidden_BTD, index_BX)
  B, T, D = hidden_BTD.shape
  flat = index_BX + T * jnp.arange(B)[:, None]
  return hidden_BTD.reshape(B * T, D)[flat.reshape(-1)].reshape(B, index_BX.shape[1], D)


def logprobs(
  params: Params,
  cfg: DecoderConfig,
  batch: TokenBatch,
  *,
  entropy: bool,
  remat: bool | str = False,
  spread: spread_lib.Spread | None = None,
  chunk: int = 512,
) -> tuple[jax.Array, jax.Array | None]:
  """Log-probs, and entropies if asked, of the sampled tokens under softmax(logits / T), nats.

      logp[b, s, k] = log softmax(W h[b, gather[b, s, k]] / T[b, s]) [target[b, s, k]]

  T is the temperature each row was sampled at, so the value is comparable with the recorded
  behaviour log-prob. Logits exist only at sampled tokens and only `chunk` tokens at a time. Masked
  entries are 0 and send no gradient. Returns ([B, S, K], [B, S, K] or None).
  """
  hidden_BTD = hidden(
    params,
    cfg,
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    batch.parent_BN,
    remat=remat,
    spread=spread,
  )
  return head_logprobs(params, cfg, hidden_BTD, batch, entropy=entropy, spread=spread, chunk=chunk)


def head_logprobs(
  params: Params,
  cfg: DecoderConfig,
  hidden_BTD: jax.Array,
  batch: TokenBatch,
  *,
  entropy: bool,
  spread: spread_lib.Spread | None = None,
  chunk: int = 512,
) -> tuple[jax.Array, jax.Array | None]:
  """`logprobs` from hidden states that a caller needs for something else too (a value head).

  Scores T entries a sequence where S * K are more: no sequence has more sampled tokens (see `pack`).
  """
  B, S, K = batch.mask_BSK.shape
  mask_BX = batch.mask_BSK.reshape(B, S * K)
  temperature_BSK = jnp.broadcast_to(batch.temperature_BS[:, :, None], (B, S, K))
  index_BX, label_BX, temperature_BX = (
    array.reshape(B, S * K) for array in (batch.gather_BSK, batch.target_BSK, temperature_BSK)
  )
  order_BX = None
  if hidden_BTD.shape[1] < S * K:
    order_BX = jnp.argsort(~mask_BX, axis=1, stable=True)[:, : hidden_BTD.shape[1]]
    mask_BX, index_BX, label_BX, temperature_BX = (
      jnp.take_along_axis(array, order_BX, axis=1)
      for array in (mask_BX, index_BX, label_BX, temperature_BX)
    )
  scored = attention.score(
    gather(hidden_BTD, jnp.where(mask_BX, index_BX, 0), spread).reshape(-1, cfg.dim),
    head(params, cfg),
    jnp.where(mask_BX, label_BX, 0).reshape(-1),
    mask_BX.reshape(-1),
    jnp.where(mask_BX, temperature_BX, 1.0).reshape(-1),
    rows=B,
    soft_cap=cfg.final_soft_cap,
    chunk=chunk,
    entropy=entropy,
  )

  def spread(value_N: jax.Array) -> jax.Array:
    value_BX = jnp.where(mask_BX, value_N.reshape(mask_BX.shape), 0.0)
    if order_BX is not None:
      sequence_B1 = jnp.arange(B)[:, None]
      value_BX = jnp.zeros((B, S * K)).at[sequence_B1, order_BX].set(value_BX)
    return value_BX.reshape(B, S, K)

  return spread(scored.logp_N), spread(scored.entropy_N) if entropy else None


def prefill(
  params: Params,
  cfg: DecoderConfig,
  context: decoder.KV | None,
  start_R: jax.Array,
  tokens_RN: jax.Array,
) -> list[decoder.KV]:
  """Keys and values, per layer, of a chunk of N tokens that continues each row's cached context.

  Row r has `start_R[r]` valid columns in `context`, whose arrays lead with L (None: nothing is
  cached, whatever `start_R` says); its chunk stands at positions start, start + 1, ... Padding goes
  to the right end of a chunk, where no valid token can see it. Makes no logits, and of the last
  layer computes only the projections.
  """
  R, N = tokens_RN.shape
  position_RN = start_R[:, None] + jnp.arange(N)[None]
  new_RNN = jnp.broadcast_to(jnp.tril(jnp.ones((N, N), bool)), (R, N, N))
  kinds = stack.Kinds.of(cfg)
  angles = kinds.angles(cfg, position_RN.reshape(-1))
  new_masks = kinds.masks(cfg, new_RNN, position_RN, position_RN)
  if context is not None:
    C = context.value_BKSd.shape[-2]
    column_RC = jnp.broadcast_to(jnp.arange(C), (R, C))
    old_RNC = jnp.broadcast_to((column_RC < start_R[:, None])[:, None, :], (R, N, C))
    old_masks = kinds.masks(cfg, old_RNC, position_RN, column_RC)

  def project(x_MD, weights, kind):
    block = stack.layer(cfg, weights)
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
    parts = [decoder.Part(new, kinds.pick(new_masks, kind))]
    if context is not None:
      parts.append(decoder.Part(at(index, context), kinds.pick(old_masks, kind)))
    return block.finish(x_MD, decoder.attend(cfg, query, parts, R)), new

  x_MD = stack.embed(params["embedding"], cfg, tokens_RN.reshape(-1))
  last = cfg.layers - 1
  x_MD, scanned = jax.lax.scan(step, x_MD, (jnp.arange(last), kinds.index_L[:last]))
  _, _, new = project(x_MD, at(last, params["layers"]), kinds.index_L[last])
  return [*(at(layer, scanned) for layer in range(last)), new]


def prefill_slots(
  weights: DecodeWeights,
  cfg: DecoderConfig,
  cached: Slots,
  start_R: jax.Array,
  tokens_RN: jax.Array,
) -> list[decoder.KV]:
  """`prefill` that reads the cached context where it lies, and keeps no scores: see `attention`."""
  R, N = tokens_RN.shape
  position_RN = start_R[:, None] + jnp.arange(N, dtype=jnp.int32)[None]
  kinds = stack.Kinds.of(cfg)
  angles = kinds.angles(cfg, position_RN.reshape(-1))
  base_R, zero_R = jnp.minimum(cached.base_R, start_R), jnp.zeros_like(start_R)
  stretches = [
    attention.Stretch(cached.blocks, zero_R, base_R, zero_R, slot_X=cached.lead_R),
    attention.Stretch(cached.blocks, base_R, start_R, zero_R, slot_X=cached.slot_R),
  ]
  x_MD = stack.embed(weights.embedding_VD, cfg, tokens_RN.reshape(-1))
  made = []
  for layer in range(cfg.layers):
    block = stack.layer(cfg, weights.layers[layer])
    query, key, value = block.project(x_MD, kinds.pick(angles, int(kinds.index_L[layer])))
    made.append(_kv(key, value, R))
    if layer + 1 < cfg.layers:
      mixed = attention.prefilled(cfg, query, stretches, layer, made[-1], position_RN)
      x_MD = block.finish(x_MD, mixed)
  return made


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


def chip_layer(layers: Params, cfg: DecoderConfig, index: jax.Array) -> Params:
  """One layer of ChipWeights, of the stacked ones."""
  one = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers)
  return one | {
    "qkv": one["qkv"].reshape(cfg.dim, -1),
    "out": one["out"].reshape(-1, cfg.dim),
    "gate_up": one["gate_up"].swapaxes(0, 1),
  }


def open_weights(weights: ChipWeights) -> DecodeWeights:
  """What `decode` and `prefill_slots` read: other views of the same arrays, inside a program."""
  head_VD = weights.embedding_VD if weights.head_VD is None else weights.head_VD
  layers = tuple(one | {"gate_up": one["gate_up"].swapaxes(0, 1)} for one in weights.layers)
  return DecodeWeights(weights.embedding_VD, layers, weights.final_norm, head_VD.T)


def decode(
  weights: DecodeWeights,
  cfg: DecoderConfig,
  context: list[decoder.KV],
  length_R: jax.Array,
  fresh: list[decoder.KV],
  step: jax.Array,
  token_R: jax.Array,
  shared: Shared | None = None,
  slot_R: jax.Array | None = None,
) -> tuple[jax.Array, list[decoder.KV]]:
  """Feed one token a row: its logits [R, V], and `fresh` with its key and value in column `step`.

  `context` is read only and has `length_R` valid columns, or is empty; `shared` may hold the first
  of them for several rows at once. `fresh`, N columns a layer, holds what this round has added; row
  r stands at position length_R[r] + step. Separate parts, because rewriting one large cache in
  every step costs more. On CPU `fresh` has rows and heads merged, [R * K, ...], or is returned so: in
  a loop an update of a 4-D array that is then read in 3-D costs four copies of it.

  With `slot_R` row r's context is block slot_R[r] of a slot cache, read in place.
  """
  R = token_R.shape[0]
  length_R1 = length_R[:, None]
  position_R1 = length_R1 + step
  kinds = stack.Kinds.of(cfg)
  angles = kinds.angles(cfg, position_R1[:, 0])

  stretches = []
  if shared is not None:
    nowhere_R = jnp.zeros_like(length_R)
    stretches.append(
      attention.Stretch(shared.blocks, None, shared.base_R, nowhere_R, shared.lanes, shared.slot_P)
    )
  if context:
    first_R, origin_R = None, jnp.zeros_like(length_R)
    if shared is not None:
      first_R, origin_R = shared.base_R - shared.offset_R, shared.offset_R
    stretches.append(
      attention.Stretch(context, first_R, length_R - origin_R, origin_R, slot_X=slot_R)
    )
  kernels = attention.by_kernel() or slot_R is not None
  if not kernels:
    masks = [_seen(cfg, kinds, position_R1, stretch) for stretch in stretches]
    index_N = jnp.arange(fresh[0].value_BKSd.shape[-2])
    see_RN = jnp.broadcast_to(index_N <= step, (R, len(index_N)))
    fresh_masks = kinds.masks(cfg, see_RN[:, None], position_R1, length_R1 + index_N[None])

  x_RD = stack.embed(weights.embedding_VD, cfg, token_R)
  updated = []
  for layer, new in enumerate(fresh):
    kind = int(kinds.index_L[layer])
    block = stack.layer(cfg, weights.layers[layer])
    query, key, value = block.project(x_RD, kinds.pick(angles, kind))
    lines = (R, cfg.kv_heads) if kernels else (R * cfg.kv_heads,)
    new = decoder.KV(
      _put(new.key_BKdS.reshape(*lines, cfg.head_dim, -1), key, step, -1),
      _put(new.value_BKSd.reshape(*lines, -1, cfg.head_dim), value, step, -2),
    )
    if kernels:
      mixed_RH = attention.cached(cfg, query, stretches, layer, new, step, position_R1[:, 0])
    else:
      parts = [decoder.Part(new, kinds.pick(fresh_masks, kind))]
      for stretch, seen in zip(stretches, masks, strict=True):
        parts.append(decoder.Part(stretch.blocks[layer], kinds.pick(seen, kind), stretch.lanes))
      mixed_RH = decoder.attend(cfg, query, parts, R)
    x_RD = block.finish(x_RD, mixed_RH)
    updated.append(new)
  normed_RD = stack.final_norm(weights.final_norm, cfg, x_RD)
  scores_RV = jnp.matmul(normed_RD, weights.head_DV, preferred_element_type=jnp.float32)
  return stack.cap(cfg, scores_RV), updated


def _put(array: jax.Array, column: jax.Array, at: jax.Array, axis: int) -> jax.Array:
  """Writes one column of an array that has them along `axis`."""
  shape, start = list(array.shape), [0] * array.ndim
  shape[axis], start[axis] = 1, at
  return jax.lax.dynamic_update_slice(array, column.reshape(shape), start)


def _seen(
  cfg: DecoderConfig, kinds: stack.Kinds, position_R1: jax.Array, stretch: attention.Stretch
) -> jax.Array:
  """Which columns of a stretch each row sees in layers of each kind, [kinds, R, 1, C]."""
  C = stretch.blocks[0].value_BKSd.shape[-2]
  column_RC = jnp.broadcast_to(jnp.arange(C), (len(stretch.end_R), C))
  see_RC = column_RC < stretch.end_R[:, None]
  if stretch.first_R is not None:
    see_RC &= column_RC >= stretch.first_R[:, None]
  return kinds.masks(cfg, see_RC[:, None, :], position_R1, column_RC + stretch.origin_R[:, None])


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
