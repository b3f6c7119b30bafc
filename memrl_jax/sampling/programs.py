"""The engine's device programs, in the two forms that it runs them in, and both ahead of time.

Copying, on CPU and GPU: a call gets copies of the columns that it reads, as wide as the bucket that they
fit; the weights are there twice, stacked for prefill and sliced for decoding.
In place, on TPU: kernels read the slot cache where it lies, each row to its own end. Of the cache and
of the weights there is one copy, laid out for these programs.

Letters: as in `engine`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from memrl_kernels import target

from memrl_jax.models import decoder, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import cache, sampler
from memrl_jax.sampling.requests import EngineConfig

Weights = policy.DecodeWeights | policy.ChipWeights
Sampled = tuple[jax.Array, ...]  # ids [R, N], log-probs [R, N], taken [R], stopped [R], steps run


class Rows(NamedTuple):
  """What decoding needs to know about a row, and nothing else; one array line a slot."""

  token: np.ndarray  # the last token, whose keys and values are not cached yet
  length: np.ndarray  # cached tokens before it
  done: np.ndarray  # tokens sampled so far
  budget: np.ndarray  # tokens still allowed
  key: np.ndarray
  temperature: np.ndarray
  top_p: np.ndarray
  top_k: np.ndarray
  stop: np.ndarray  # padded with -1


class Common(NamedTuple):
  """Beginnings that rows read together: positions below base_R[r] from slot lead_P[p] of r's lane p."""

  lead_P: np.ndarray
  lanes: decoder.Lanes
  base_R: np.ndarray


def reads_in_place(params: policy.Params) -> bool:
  """Whether the kernels that read a cache in place run where these weights are."""
  where = params["embedding"].sharding
  devices = {device.platform for device in where.device_set} if where is not None else set()
  return "tpu" in devices or target.interpreted()


def weights(cfg: DecoderConfig, params: policy.Params, *, in_place: bool) -> Weights:
  """The weights as decoding reads them; of ChipWeights, prefill too."""
  if not in_place:
    return _decode_weights(params, cfg)
  layers = tuple(_chip_layer(params["layers"], cfg, np.int32(at)) for at in range(cfg.layers))
  head = None if cfg.tie_embeddings else params["head"]
  return policy.ChipWeights(params["embedding"], layers, params["final_norm"], head)


_decode_weights = jax.jit(policy.decode_weights, static_argnames="cfg")
_chip_layer = jax.jit(policy.chip_layer, static_argnames="cfg")
prefill = jax.jit(policy.prefill, static_argnames="cfg")


# Unused arguments (most of the last layer) are kept: they lie there, and a plan counts them.
@functools.partial(jax.jit, static_argnames=("cfg", "mesh"), keep_unused=True)
def prefill_in_place(
  weights: policy.ChipWeights,
  cfg: DecoderConfig,
  kv: list[decoder.KV],
  slot_R: jax.Array,
  common: tuple[jax.Array, jax.Array],
  start_R: jax.Array,
  tokens_RN: jax.Array,
  *,
  mesh: Mesh | None,
) -> list[decoder.KV]:
  """`policy.prefill_slots` of the slots, each of which reads its first columns from a lead: `common` is
  (lead_R, base_R)."""
  with target.over(mesh):
    cached = policy.Slots(cache.layers(kv), slot_R, *common)
    return policy.prefill_slots(policy.open_weights(weights), cfg, cached, start_R, tokens_RN)


@functools.partial(jax.jit, static_argnames=("cfg", "mesh"))
def decode(
  weights: policy.DecodeWeights,
  cfg: DecoderConfig,
  context: list[decoder.KV],
  rows: Rows,
  uniform_RN2: jax.Array,
  count: jax.Array,
  floor: jax.Array,
  shared: policy.Shared | None,
  *,
  mesh: Mesh | None,
) -> tuple[Sampled, list[decoder.KV]]:
  """A round over copied columns; see `_round`."""
  R, steps, _ = uniform_RN2.shape
  fresh = policy.empty_kv(cfg, R, steps, weights.embedding_VD.dtype)
  fresh = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), fresh)

  def step(at, token_R, fresh):
    with target.over(mesh):
      return policy.decode(weights, cfg, context, rows.length, fresh, at, token_R, shared)

  sampled, fresh = _round(step, fresh, rows, uniform_RN2, count, floor)
  split = (R, cfg.kv_heads)
  return sampled, jax.tree.map(lambda leaf: leaf.reshape(*split, *leaf.shape[1:]), fresh)


@functools.partial(jax.jit, static_argnames=("cfg", "mesh"))
def decode_in_place(
  weights: policy.ChipWeights,
  cfg: DecoderConfig,
  kv: list[decoder.KV],
  slot_R: jax.Array,
  rows: Rows,
  uniform_RN2: jax.Array,
  count: jax.Array,
  floor: jax.Array,
  common: Common | None,
  *,
  mesh: Mesh | None,
) -> tuple[Sampled, list[decoder.KV]]:
  """A round that reads the slot cache where it lies; see `_round`."""
  R, steps, _ = uniform_RN2.shape
  blocks, shared = cache.layers(kv), None
  if common is not None:
    nowhere_R = jnp.zeros_like(rows.length)  # own columns lie at their positions
    shared = policy.Shared(blocks, common.lanes, common.base_R, nowhere_R, common.lead_P)

  def step(at, token_R, fresh):
    with target.over(mesh):
      opened = policy.open_weights(weights)
      return policy.decode(opened, cfg, blocks, rows.length, fresh, at, token_R, shared, slot_R)

  fresh = policy.empty_kv(cfg, R, steps, weights.embedding_VD.dtype)
  return _round(step, fresh, rows, uniform_RN2, count, floor)


class _State(NamedTuple):
  step: jax.Array
  token_R: jax.Array
  alive_R: jax.Array
  taken_R: jax.Array
  stopped_R: jax.Array
  token_RN: jax.Array
  logp_RN: jax.Array
  fresh: list[decoder.KV]


def _round(
  decode_step: Callable[..., tuple[jax.Array, list[decoder.KV]]],
  fresh: list[decoder.KV],
  rows: Rows,
  uniform_RN2: jax.Array,
  count: jax.Array,
  floor: jax.Array,
) -> tuple[Sampled, list[decoder.KV]]:
  """Decode the first `count` rows until at most `floor` of them live, or `steps` steps have passed.

  `decode_step(step, token_R, fresh)` gives logits [R, V] and `fresh` with one column more. Returns what
  was sampled, and the keys and values of the tokens that were fed.
  """
  R, steps, _ = uniform_RN2.shape
  uniform_NR2 = uniform_RN2.swapaxes(0, 1)
  controls = sampler.Controls(rows.temperature, rows.top_p, rows.top_k)

  def unfinished(state):
    return (state.step < steps) & (jnp.sum(state.alive_R) > floor)

  def advance(state):
    logits_RV, fresh = decode_step(state.step, state.token_R, state.fresh)
    token_R, logp_R = sampler.sample(logits_RV, uniform_NR2[state.step], controls)
    hit_R = state.alive_R & jnp.any(token_R[:, None] == rows.stop, axis=1)
    taken_R = state.taken_R + state.alive_R
    return _State(
      step=state.step + 1,
      token_R=token_R,
      alive_R=state.alive_R & ~hit_R & (taken_R < rows.budget),
      taken_R=taken_R,
      stopped_R=state.stopped_R | hit_R,
      token_RN=jax.lax.dynamic_update_index_in_dim(state.token_RN, token_R, state.step, 1),
      logp_RN=jax.lax.dynamic_update_index_in_dim(state.logp_RN, logp_R, state.step, 1),
      fresh=fresh,
    )

  start = _State(
    step=jnp.int32(0),
    token_R=rows.token,
    alive_R=jnp.arange(R) < count,
    taken_R=jnp.zeros(R, jnp.int32),
    stopped_R=jnp.zeros(R, bool),
    token_RN=jnp.zeros((R, steps), jnp.int32),
    logp_RN=jnp.zeros((R, steps), jnp.float32),
    fresh=fresh,
  )
  end = jax.lax.while_loop(unfinished, advance, start)
  return (end.token_RN, end.logp_RN, end.taken_R, end.stopped_R, end.step), end.fresh


def compiled() -> int:
  """How many programs the engine's functions have compiled in this process so far."""
  functions = (_decode_weights, _chip_layer, prefill, prefill_in_place, decode, decode_in_place)
  return cache.compiled() + sum(function._cache_size() for function in functions)


# Ahead of time, from shapes that know where they would lie.


class Resident(NamedTuple):
  """What an engine keeps on the devices, as shapes; `weights` beside, or in place of, those it was given."""

  weights: Weights
  cache: list[decoder.KV]


def resident(
  cfg: DecoderConfig, params: policy.Params, config: EngineConfig, *, in_place: bool | None = None
) -> Resident:
  """What an engine of these weights (ShapeDtypeStructs with shardings will do) keeps, once it has grown."""
  in_place = reads_in_place(params) if in_place is None else in_place
  embedding = params["embedding"]
  kv = cache.shapes(
    cfg, config.slots, config.buckets[-1], config.round_steps, embedding.dtype, embedding.sharding,
    apart=in_place,
  )  # fmt: skip
  return Resident(_weight_shapes(cfg, params, in_place), kv)


def _weight_shapes(cfg: DecoderConfig, params: policy.Params, in_place: bool) -> Weights:
  """As the jitted functions lay them out: an axis that stays one keeps its place on the mesh."""

  def like(leaf, function, spec):
    shape = jax.eval_shape(function, leaf)
    where = leaf.sharding
    if isinstance(where, NamedSharding):
      axes = [*where.spec, *[None] * (leaf.ndim - len(where.spec))]
      where = NamedSharding(where.mesh, PartitionSpec(*spec(axes)))
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=where)

  def sliced(leaf):
    return like(leaf, lambda x: x[0], lambda axes: axes[1:])

  layer = jax.tree.map(sliced, params["layers"])
  embedding, norm = params["embedding"], params["final_norm"]
  head = policy.head(params, cfg)
  if not in_place:
    turned = like(head, jnp.transpose, lambda axes: axes[::-1])
    return policy.DecodeWeights(embedding, (layer,) * cfg.layers, norm, turned)
  layer |= {
    "qkv": like(layer["qkv"], lambda x: x.reshape(cfg.dim, -1), lambda axes: axes[:2]),
    "out": like(layer["out"], lambda x: x.reshape(-1, cfg.dim), lambda axes: (axes[0], axes[-1])),
    "gate_up": like(
      layer["gate_up"], lambda x: x.swapaxes(0, 1), lambda axes: (axes[1], axes[0], axes[2])
    ),
  }
  head = None if cfg.tie_embeddings else head
  return policy.ChipWeights(embedding, (layer,) * cfg.layers, norm, head)


def lowered(
  cfg: DecoderConfig, params: policy.Params, config: EngineConfig, *, in_place: bool | None = None
) -> dict[str, jax.stages.Lowered]:
  """The largest prefill, and the largest round: all slots, each at the longest context.

  The programs that an engine of these weights runs (ShapeDtypeStructs with shardings will do).
  """
  kept, embedding = resident(cfg, params, config, in_place=in_place), params["embedding"]
  mesh, columns = target.mesh_of(embedding), config.buckets[-1]
  R, N, S = config.prefill_rows[-1], config.prefill_chunks[-1], config.slots
  where = embedding.sharding
  whole = NamedSharding(mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where

  def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

  i32, f32 = functools.partial(array, jnp.int32), functools.partial(array, jnp.float32)
  rows = Rows(
    *(i32(S),) * 4, array(jnp.uint32, S, 2), f32(S), f32(S), i32(S), i32(S, config.max_stop)
  )
  controls = rows, f32(S, config.round_steps, 2), i32(), i32(), None
  if isinstance(kept.weights, policy.ChipWeights):
    chunk = i32(R), (i32(R), i32(R)), i32(R), i32(R, N)
    return {
      "prefill": prefill_in_place.lower(kept.weights, cfg, kept.cache, *chunk, mesh=mesh),
      "decode": decode_in_place.lower(kept.weights, cfg, kept.cache, i32(S), *controls, mesh=mesh),
    }
  read = functools.partial(cache.shapes, cfg, width=columns, slack=0, dtype=embedding.dtype,
                           sharding=where)  # fmt: skip
  context = read(slots=S, apart=True)
  context = [jax.tree.map(_first, block) for block in context]
  return {
    "prefill": prefill.lower(params, cfg, read(slots=R, apart=False)[0], i32(R), i32(R, N)),
    "decode": decode.lower(kept.weights, cfg, context, *controls, mesh=mesh),
  }


def _first(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  """The shape of leaf[0]."""
  where = leaf.sharding
  if isinstance(where, NamedSharding):
    where = NamedSharding(where.mesh, PartitionSpec(*where.spec[1:]))
  return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=where)
