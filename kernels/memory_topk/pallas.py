"""memory_topk as a TPU kernel: one pass over the bank, the best so far in fast memory.

The list of a query is sorted, 128 wide. A memory of the current block enters it by insertion, best
first, and a block is left as soon as nothing in it beats the last of any list: after the first few
blocks that is after a comparison or two, so that the pass costs what its matrix product costs.

Letters: Q queries, M memories, D features; R queries and W memories of a block.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import target
from . import ref

LANES = 128  # the longest list, and how wide it is kept
ROWS = 128
WIDTHS = (1024, 512, 256, 128)


def width(query_QD, bank_MD) -> int | None:
  """Memories of a block; None if not even the fewest fit."""
  D = query_QD.shape[1]
  wide = max(query_QD.dtype.itemsize, bank_MD.dtype.itemsize)
  for entries in WIDTHS:
    if 3 * D * wide * (ROWS + entries) + 10 * ROWS * entries * 4 <= 0.75 * target.fast_memory():
      return entries
  return None


def memory_topk(
  query_QD, bank_MD, utility_M, threshold_Q, similarity_weight_Q, utility_weight_Q, *, k
) -> ref.MemoryTopk:
  (Q, D), M = query_QD.shape, bank_MD.shape[0]
  R, W = min(ROWS, Q), min(width(query_QD, bank_MD), M)
  column = pl.BlockSpec((R, 1), lambda q, m: (q, 0))
  lists = pl.BlockSpec((R, LANES), lambda q, m: (q, 0))
  axes = jax.typeof(query_QD).manual_axis_type
  best = pl.pallas_call(
    functools.partial(_kernel, k=k, memories=M),
    grid=(pl.cdiv(Q, R), pl.cdiv(M, W)),
    in_specs=[
      pl.BlockSpec((R, D), lambda q, m: (q, 0)),
      pl.BlockSpec((W, D), lambda q, m: (m, 0)),
      pl.BlockSpec((1, W), lambda q, m: (0, m)),
      *[column] * 3,
    ],
    out_specs=[lists] * 3,
    out_shape=[
      jax.ShapeDtypeStruct((Q, LANES), dtype, manual_axis_type=axes)
      for dtype in (jnp.float32, jnp.float32, jnp.int32)
    ],
    scratch_shapes=[pltpu.VMEM((R, W), jnp.float32)] * 2,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=("parallel", "arbitrary"),
      vmem_limit_bytes=int(0.875 * target.fast_memory()),
    ),
    name="memory_topk",
  )(
    query_QD,
    bank_MD,
    utility_M[None],
    threshold_Q[:, None],
    similarity_weight_Q[:, None],
    utility_weight_Q[:, None],
  )
  return ref.MemoryTopk(*(array_QL[:, :k] for array_QL in best))


def _kernel(
  query, bank, utility, threshold, similarity_weight, utility_weight,
  best_score, best_similarity, best_id, score, similarity, *, k, memories,
):  # fmt: skip
  block = pl.program_id(1)

  @pl.when(block == 0)
  def _():
    best_score[...] = jnp.full_like(best_score, -jnp.inf)
    best_similarity[...] = jnp.full_like(best_similarity, -jnp.inf)
    best_id[...] = jnp.full_like(best_id, -1)

  similarity_RW = ref.similarity(query[...], bank[...])
  score_RW = ref.score(
    similarity_RW, utility[...], threshold[...], similarity_weight[...], utility_weight[...]
  )
  id_RW = block * score.shape[1] + jax.lax.broadcasted_iota(jnp.int32, score.shape, 1)
  similarity[...] = similarity_RW
  score[...] = jnp.where(id_RW < memories, score_RW, -jnp.inf)  # the last block may be cut off

  lane_RL = jax.lax.broadcasted_iota(jnp.int32, best_score.shape, 1)

  def better():
    """How many queries have a memory in this block that belongs in their list."""
    last_R1 = jnp.min(jnp.where(lane_RL < k, best_score[...], jnp.inf), axis=1, keepdims=True)
    top_R1 = jnp.max(score[...], axis=1, keepdims=True)
    return jnp.sum(jnp.where(top_R1 > last_R1, 1.0, 0.0))

  def insert(_):
    score_RW = score[...]
    top_R1 = jnp.max(score_RW, axis=1, keepdims=True)
    id_R1 = jnp.min(jnp.where(score_RW == top_R1, id_RW, memories), axis=1, keepdims=True)
    chosen_RW = id_RW == id_R1
    similarity_R1 = jnp.sum(jnp.where(chosen_RW, similarity[...], 0.0), axis=1, keepdims=True)
    # After all that are as good: they have smaller ids. A list it does not belong in stays as it
    # is, because then this place is k or more.
    place_R1 = jnp.sum(
      jnp.where(best_score[...] >= top_R1, 1, 0), axis=1, keepdims=True, dtype=jnp.int32
    )
    for best, new_R1 in (
      (best_id, id_R1), (best_similarity, similarity_R1), (best_score, top_R1)
    ):  # fmt: skip
      old_RL = best[...]
      moved_RL = jnp.where(lane_RL > place_R1, pltpu.roll(old_RL, 1, 1), new_R1)
      best[...] = jnp.where((lane_RL < place_R1) | (lane_RL >= k), old_RL, moved_RL)
    score[...] = jnp.where(chosen_RW, -jnp.inf, score_RW)
    return better()

  jax.lax.while_loop(lambda count: count > 0, insert, better())
