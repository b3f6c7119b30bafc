"""memory_topk in plain JAX: the best so far and a chunk of the bank at a time, never [Q, M]."""

import jax
import jax.numpy as jnp

from .. import target
from . import ref


def memory_topk(
  query_QD, bank_MD, utility_M, threshold_Q, similarity_weight_Q, utility_weight_Q, *, k, chunk
) -> ref.MemoryTopk:
  Q, M = query_QD.shape[0], bank_MD.shape[0]
  chunk = min(chunk, M)

  def add(start, size, best: ref.MemoryTopk):
    similarity_QC = ref.similarity(query_QD, jax.lax.dynamic_slice_in_dim(bank_MD, start, size))
    score_QC = ref.score(
      similarity_QC,
      jax.lax.dynamic_slice_in_dim(utility_M, start, size)[None],
      threshold_Q[:, None],
      similarity_weight_Q[:, None],
      utility_weight_Q[:, None],
    )
    id_QC = jnp.broadcast_to(start + jnp.arange(size, dtype=jnp.int32), score_QC.shape)
    # What was found before has smaller ids, so it stands first and wins where scores are equal.
    join = lambda old, new: jnp.concatenate([old, new], axis=1)  # noqa: E731
    return ref.best(*map(join, best, (score_QC, similarity_QC, id_QC)), k)

  best = ref.MemoryTopk(
    jnp.full((Q, k), -jnp.inf), jnp.full((Q, k), -jnp.inf), jnp.full((Q, k), -1, jnp.int32)
  )
  best = target.like(query_QD, best)
  best = jax.lax.fori_loop(0, M // chunk, lambda c, best: add(c * chunk, chunk, best), best)
  return add(M // chunk * chunk, M % chunk, best) if M % chunk else best
