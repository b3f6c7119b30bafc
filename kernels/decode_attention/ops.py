"""decode_attention as callers see it: the same equation as `ref`, over the live columns only.

Libraries have relatives of it, and none fits. jax's paged_attention and ragged_paged_attention for
TPU (jax 0.10.2) read pages through a table, of which this cache, one stretch a row with keys
transposed, would have to become a copy; neither returns the log-sum-exp that merging needs. jax's
decode_attention for GPU has a start and a length, but no soft cap, and wants a cache [R, C, K, d].
tokamax on TPU refuses lengths (`mask.k_end`), pages and grouped heads.
"""

from typing import Literal

import jax
import jax.numpy as jnp

from .. import target
from . import pallas, ref, xla

Impl = Literal["auto", "ref", "xla", "pallas"]


def decode_attention(
  query_RKGd: jax.Array,
  key_RKdC: jax.Array,
  value_RKCd: jax.Array,
  length_RX: jax.Array,
  start_RX: jax.Array | None = None,
  slot_R: jax.Array | None = None,
  *,
  scale: float,
  soft_cap: float | None = None,
  block: int | None = None,
  impl: Impl = "auto",
) -> ref.Part:
  """Attention of a row's queries over columns start <= c < length of its cache; see `ref`.

  Both are one number a row, [R], or one a query of its group, [R, G]: so that the queries of several
  rows can read a beginning that they share together, each as far as it shares it. `start_RX` (None:
  0) is also how a sliding window is given: for a token at position p and a cache whose column 0 is
  position o, start = p + 1 - window - o; below 0 counts as 0, lengths above C as C. The queries' own
  key and value are seen only if they are in the cache, or in another part.
  Float32; `merge` adds up parts. For generation only: the kernel has no gradient.

  "xla" and "pallas" read the cache in blocks of `block` columns, up to the longest row ("xla") or
  to the end of each row ("pallas", for TPU, inside `shard_map` where there are several: rows over
  the data axes, K over the tensor axis). "auto" is "pallas" where that can run and its blocks fit,
  else "xla".
  """
  _check(query_RKGd, key_RKdC, value_RKCd, length_RX, start_RX, slot_R, block)
  if start_RX is None:
    start_RX = jnp.zeros_like(length_RX)
  length_RX, start_RX = (x[:, None] if x.ndim == 1 else x for x in (length_RX, start_RX))
  length_RX = jnp.minimum(length_RX, key_RKdC.shape[-1])
  start_RX = jnp.maximum(start_RX, 0)
  if impl == "auto":
    chosen = target.chooses_pallas() and pallas.fits(key_RKdC, block)
    impl = "pallas" if chosen else "xla"
  options = dict(scale=scale, soft_cap=soft_cap)
  arrays = (query_RKGd, key_RKdC, value_RKCd, length_RX, start_RX)
  if slot_R is not None:
    arrays += (slot_R,)
  arrays = target.vary_alike(*arrays)
  match impl:
    case "ref":
      return ref.decode_attention(*arrays, **options)
    case "xla":
      return xla.decode_attention(*arrays, **options, block=xla.fit(key_RKdC, block))
    case "pallas":
      target.require_tpu("decode_attention")
      return pallas.decode_attention(*arrays, **options, block=pallas.fit(key_RKdC, block))
    case _:
      raise ValueError(
        f'decode_attention got impl={impl!r}; choose "auto", "xla", "pallas" or "ref"'
      )


def _check(query, key, value, length, start, slot, block):
  R, K, _, d = query.shape if query.ndim == 4 else (None,) * 4
  S, C = R if slot is None else key.shape[0], key.shape[-1]
  if key.shape != (S, K, d, C) or value.shape != (S, K, C, d):
    raise ValueError(
      f"decode_attention needs queries [R, K, G, d], keys [R, K, d, C] and values [R, K, C, d], got "
      f"{query.shape}, {key.shape} and {value.shape}; keys lie transposed"
    )
  if not query.dtype == key.dtype == value.dtype:
    raise ValueError(
      f"decode_attention got queries, keys and values of {query.dtype}, {key.dtype} and "
      f"{value.dtype}; cast the queries to the type of the cache"
    )
  G = query.shape[2]
  for name, array in (("length_RX", length), ("start_RX", start)):
    known = array is None or (array.shape in ((R,), (R, G)) and array.dtype == jnp.int32)
    if not known or (array is not None and array.ndim != length.ndim):
      raise ValueError(
        f"decode_attention got {name} {array.dtype}{array.shape} for {R} rows of {G} queries; give "
        f"int32 ({R},), or ({R}, {G}), and both alike"
      )
  if slot is not None and (slot.shape != (R,) or slot.dtype != jnp.int32):
    raise ValueError(
      f"decode_attention got slot_R {slot.dtype}{slot.shape} for {R} rows; give int32 ({R},)"
    )
  if block is not None and block < 1:
    raise ValueError(f"decode_attention got block={block}; at least one column a block is needed")
