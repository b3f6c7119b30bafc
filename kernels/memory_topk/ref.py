"""Definition of memory_topk: every score, then the k largest.

Letters: Q queries, M memories, D features, k memories wanted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class MemoryTopk(NamedTuple):
  """Best first. Where fewer than k memories qualify the rest is score and similarity -inf, id -1."""

  score_Qk: jax.Array
  similarity_Qk: jax.Array
  id_Qk: jax.Array  # row of the bank, int32


def memory_topk(
  query_QD: jax.Array,
  bank_MD: jax.Array,
  utility_M: jax.Array,
  threshold_Q: jax.Array,
  similarity_weight_Q: jax.Array,
  utility_weight_Q: jax.Array,
  *,
  k: int,
) -> MemoryTopk:
  """The k memories with the largest weighted sum of similarity and utility, of those similar enough.

      sim = q . m        candidates = { m : sim > threshold, utility is a number }
      score = similarity_weight sim + utility_weight utility

  Equal scores are in order of their ids.
  """
  similarity_QM = similarity(query_QD, bank_MD)
  score_QM = score(
    similarity_QM,
    utility_M[None],
    threshold_Q[:, None],
    similarity_weight_Q[:, None],
    utility_weight_Q[:, None],
  )
  id_QM = jnp.broadcast_to(jnp.arange(bank_MD.shape[0], dtype=jnp.int32), score_QM.shape)
  missing = max(0, k - bank_MD.shape[0])
  pad = ((0, 0), (0, missing))
  return best(
    jnp.pad(score_QM, pad, constant_values=-jnp.inf),
    jnp.pad(similarity_QM, pad),
    jnp.pad(id_QM, pad),
    k,
  )


def similarity(query_QD, bank_MD) -> jax.Array:
  """q . m in float32, whatever the arrays are: no rounding to bfloat16 inside, which moves ranks."""
  dtype = jnp.promote_types(query_QD.dtype, bank_MD.dtype)
  return jax.lax.dot_general(
    query_QD.astype(dtype),
    bank_MD.astype(dtype),
    (((1,), (1,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )


def score(similarity_QM, utility_1M, threshold_Q1, similarity_weight_Q1, utility_weight_Q1):
  """The score of each candidate, -inf of the others (and where it is not a number)."""
  score_QM = similarity_weight_Q1 * similarity_QM + utility_weight_Q1 * utility_1M
  good_QM = (similarity_QM > threshold_Q1) & (score_QM == score_QM)
  return jnp.where(good_QM, score_QM, -jnp.inf)


def best(score_QX, similarity_QX, id_QX, k: int) -> MemoryTopk:
  """The k best of what is listed, where equal scores are listed in order of their ids."""
  score_Qk, place_Qk = jax.lax.top_k(score_QX, k)
  found_Qk = score_Qk > -jnp.inf
  similarity_Qk = jnp.take_along_axis(similarity_QX, place_Qk, axis=1)
  id_Qk = jnp.take_along_axis(id_QX, place_Qk, axis=1)
  return MemoryTopk(
    score_Qk, jnp.where(found_Qk, similarity_Qk, -jnp.inf), jnp.where(found_Qk, id_Qk, -1)
  )
