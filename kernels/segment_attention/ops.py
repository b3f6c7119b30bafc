"""segment_attention as callers see it: the same equation as `ref`, a pair of blocks at a time.

Letters: see `ref`; N tokens of a block.

Libraries do not have this. Segment ids of jax's splash_attention are compared for equality
(`segment_ids.q[:, None] == segment_ids.kv[None, :]`, jax 0.10.2), so that no segment can continue
another; a mask that depends on the batch has to be a dense [T, T] array there. tokamax on TPU calls
splash, refuses the ranges that could say it (`mask.q_end`), masks with a batch axis, and grouped
heads. Where no segment has a parent splash fits, but for rows of padding (its segment ids must
leave no query without a key, or the softmax divides by 0) and its layout [heads, T, d].
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .. import target
from . import blocks, pallas, ref, xla

Impl = Literal["auto", "ref", "xla", "pallas"]


def segment_attention(
  query_BTKGd: jax.Array,
  key_BTKd: jax.Array,
  value_BTKd: jax.Array,
  segment_BT: jax.Array,
  parent_BS: jax.Array | None = None,
  position_BT: jax.Array | None = None,
  *,
  scale: float,
  sliding_window: int | jax.Array | None = None,
  soft_cap: float | None = None,
  block: int | None = None,
  impl: Impl = "auto",
) -> jax.Array:
  """Causal attention in packed rows whose segments may share prefixes: [B, T, K, G, d], see `ref`.

  `segment_BT` says which segment a token belongs to, 0 is padding; `parent_BS` [B, S + 1] which
  segment each segment continues, 0 for none. None: nothing is shared. A row's segments may lie in
  any order, their number and depth are not limited; depth-first order skips the most work. A
  segment id above S gives NaN. `position_BT` counts tokens along a branch and is needed only with
  `sliding_window`, which may be an array, so that layers in a scan can differ (2^30: no window).

  "xla" and "pallas" visit the pairs of blocks of `block` tokens that see each other, and hold no
  array of T * T numbers, forward or backward; "ref" does. "pallas" is for TPU, inside `shard_map`
  where there are several: rows over the data axes, K over the tensor axis, nothing to communicate.
  "auto" is "pallas" where that can run and its blocks fit, else "xla". What the backward pass reads
  has the name "attention", for checkpoint policies.
  """
  _check(query_BTKGd, key_BTKd, value_BTKd, segment_BT, parent_BS, position_BT, block)
  if sliding_window is not None and position_BT is None:
    raise ValueError(
      "segment_attention got sliding_window without position_BT; give each token's position along "
      "its branch"
    )
  if position_BT is None:
    position_BT = jnp.zeros_like(segment_BT)
  # Padding is made harmless before anything is computed from it, and its gradient on the way back.
  real = segment_BT > 0
  query = jnp.where(real[..., None, None, None], query_BTKGd, 0)
  key = jnp.where(real[..., None, None], key_BTKd, 0)
  value = jnp.where(real[..., None, None], value_BTKd, 0)
  options = dict(scale=scale, soft_cap=soft_cap)
  match impl:
    case "ref":
      see_BTT = ref.visible(segment_BT, parent_BS, position_BT, sliding_window)
      out = ref.segment_attention(query, key, value, see_BTT, **options)
    case "auto" | "xla" | "pallas":
      shape = blocks.geometry(segment_BT, parent_BS, position_BT, sliding_window)
      out = _blocked(query, key, value, shape, block, _choose(impl, query, block), options)
    case _:
      raise ValueError(
        f'segment_attention got impl={impl!r}; choose "auto", "xla", "pallas" or "ref"'
      )
  out = jnp.where(real[..., None, None, None], out, 0)
  if parent_BS is not None:
    known = segment_BT < parent_BS.shape[1]
    out = jnp.where(known[..., None, None, None], out, jnp.nan)
  return out


def _choose(impl: Impl, query, block) -> Literal["xla", "pallas"]:
  if impl == "pallas":
    target.require_tpu("segment_attention")
  if impl == "auto":
    T, _, G, d = query.shape[1:]
    chosen = target.chooses_pallas() and pallas.fits(T, G, d, query.dtype, block)
    return "pallas" if chosen else "xla"
  return impl


def _blocked(query, key, value, shape, block, impl, options):
  T, _, G, d = query.shape[1:]
  kernel = {"pallas": pallas, "xla": xla}[impl]
  N, width = kernel.fit(T, G, d, query.dtype, block)
  rows = -T % N
  arrays = [_pad(x, rows, width - d) for x in (query, key, value)]
  # Padding by edge values that see nothing: enter, low, begin, end, position.
  shape = blocks.Geometry(
    *(
      jnp.pad(x, ((0, 0), (0, rows)), constant_values=fill)
      for x, fill in zip(shape, blocks.PADDING, strict=True)
    )
  )
  options = dict(**options, block=N)
  forward = functools.partial(kernel.forward, **options)
  backward = functools.partial(kernel.backward, **options)
  leaves = target.vary_alike(*arrays, *shape, blocks.seen(shape, N))
  out = _differentiable(forward, backward)(*leaves[:3], blocks.Geometry(*leaves[3:8]), leaves[8])
  return out[:, :T, ..., :d]


def _pad(x, rows, width):
  return jnp.pad(x, [(0, 0), (0, rows), *[(0, 0)] * (x.ndim - 3), (0, width)])


def _differentiable(forward, backward):
  """`forward` without its log-sum-exp, with the gradient that `backward` computes."""

  @jax.custom_vjp
  def attend(query, key, value, shape, seen):
    return forward(query, key, value, shape, seen)[0]

  def remember(*arrays):
    out, lse = (checkpoint_name(value, "attention") for value in forward(*arrays))
    return out, (*arrays, out, lse)

  def gradients(saved, d_out):
    return *backward(*saved, d_out), None, None

  attend.defvjp(remember, gradients)
  return attend


def _check(query, key, value, segment_BT, parent_BS, position_BT, block):
  B, T, K, d = key.shape if key.ndim == 4 else (None,) * 4
  if query.ndim != 5 or value.shape != key.shape or query.shape != (B, T, K, query.shape[3], d):
    raise ValueError(
      f"segment_attention needs queries [B, T, K, G, d] and keys and values [B, T, K, d], got "
      f"{query.shape}, {key.shape} and {value.shape}; put query heads into K groups of G"
    )
  if not query.dtype == key.dtype == value.dtype:
    raise ValueError(
      f"segment_attention got queries, keys and values of {query.dtype}, {key.dtype} and "
      f"{value.dtype}; cast them to one type"
    )
  for name, array in (("segment_BT", segment_BT), ("position_BT", position_BT)):
    if array is not None and (array.shape != (B, T) or array.dtype != jnp.int32):
      raise ValueError(
        f"segment_attention got {name} {array.dtype}{array.shape} for {B} rows of {T} tokens; "
        f"give int32 ({B}, {T})"
      )
  if parent_BS is not None and (parent_BS.ndim != 2 or parent_BS.shape[0] != B):
    raise ValueError(
      f"segment_attention got parent_BS of shape {parent_BS.shape} for {B} rows; give one line a "
      "row, with an entry for each segment id from 0"
    )
  if block is not None and block < 1:
    raise ValueError(f"segment_attention got block={block}; at least one token a block is needed")
