"""Definition of decode_attention, and how attention over parts of a context adds up to the whole.

Letters: R rows, K key-value heads, G query heads per key-value head, d head width, C columns of the
cache. Keys lie transposed, [R, K, d, C], values [R, K, C, d]: the layout of the model's cache.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Part(NamedTuple):
  """Attention over a part of the context: the mean of its values, and log sum exp of its scores.

  Both float32, so that merging loses nothing: cast what comes out of the merge. A part in which
  nothing is seen is 0 and -inf.
  """

  out_RKGd: jax.Array
  lse_RKG: jax.Array


def merge(parts: Sequence[Part]) -> Part:
  """Attention over all the parts together, exactly.

      lse = log sum_p exp lse_p,    out = sum_p exp(lse_p - lse) out_p

  The parts need not share a cache: a prompt that many rows share is one row there, with the queries
  of all of them as its group.
  """
  top = functools.reduce(jnp.maximum, [part.lse_RKG for part in parts])
  top = jnp.where(top == -jnp.inf, 0.0, top)  # nothing seen in any part
  weights = [jnp.exp(part.lse_RKG - top) for part in parts]
  total = sum(weights)
  some = jnp.where(total == 0, 1.0, total)
  out = sum(
    (weight / some)[..., None] * part.out_RKGd for part, weight in zip(parts, weights, strict=True)
  )
  return Part(out, top + jnp.log(total))


def decode_attention(
  query_RKGd: jax.Array,
  key_RKdC: jax.Array,
  value_RKCd: jax.Array,
  length_RX: jax.Array,
  start_RX: jax.Array,
  slot_R: jax.Array | None = None,
  *,
  scale: float,
  soft_cap: float | None,
) -> Part:
  """Attention of a row's queries over columns start <= c < length of its cache; X is 1 or G.

      z_c = scale * q . k_c,   z <- cap tanh(z / cap),   out = sum_c softmax_c(z) v_c,   log sum exp z

  The matmuls run in the dtype of the queries and add in float32. Columns outside are never seen,
  whatever they hold. Row r reads line slot_R[r] of the cache (None: line r).
  """
  if slot_R is not None:
    key_RKdC, value_RKCd = key_RKdC[slot_R], value_RKCd[slot_R]
  column_11C = jnp.arange(key_RKdC.shape[-1])[None, None]
  see_RXC = (start_RX[:, :, None] <= column_11C) & (column_11C < length_RX[:, :, None])
  score = scale * jnp.einsum(
    "rkgd,rkdc->rkgc", query_RKGd, key_RKdC, preferred_element_type=jnp.float32
  )
  if soft_cap is not None:
    score = soft_cap * jnp.tanh(score / soft_cap)
  score = jnp.where(see_RXC[:, None], score, -jnp.inf)
  lse_RKG = jax.nn.logsumexp(score, axis=-1)
  finite = jnp.where(lse_RKG == -jnp.inf, 0.0, lse_RKG)
  weight = jnp.exp(score - finite[..., None]).astype(value_RKCd.dtype)
  value_RKCd = jnp.where(see_RXC.any(axis=1)[:, None, :, None], value_RKCd, 0)
  out = jnp.einsum("rkgc,rkcd->rkgd", weight, value_RKCd, preferred_element_type=jnp.float32)
  return Part(out, lse_RKG)
