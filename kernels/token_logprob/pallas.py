"""token_logprob as TPU kernels: tiles of scores live in fast memory and are never written out.

Forward: one pass over the vocabulary for each block of rows, sums kept in fast memory.
Backward, for a slice of the vocabulary at a time: one kernel makes the scores again and writes only
the gradient of the logits, in the dtype of the hidden states; two matrix products by XLA make the
gradients of hidden states and embedding from it. That is 6 N V D multiply-adds in all three (the
least there is without stored logits), and no gradient is read back from memory to be added to,
except that of the hidden states, once a slice.

Letters as in `tile`; V vocabulary, S vocabulary entries of a slice, R rows and W entries of a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .. import target
from . import tile

# From most to least reuse of what was fetched: an entry of the vocabulary is fetched N / R times.
BLOCKS = (
  (1024, 1024),
  (1024, 512),
  (1024, 256),
  (512, 512),
  (512, 256),
  (256, 256),
  (128, 256),
  (128, 128),
)


class Blocks(NamedTuple):
  rows: int
  entries: int
  limit: int  # bytes of fast memory that the compiler may use


def fits(hidden_ND, embedding_VD) -> bool:
  return _blocks(hidden_ND, embedding_VD) is not None


def blocks(hidden_ND, embedding_VD) -> Blocks:
  """The block shape; ValueError if even the smallest does not fit."""
  chosen = _blocks(hidden_ND, embedding_VD)
  if chosen is None:
    raise ValueError(
      f"token_logprob's Pallas kernel keeps whole rows of D = {hidden_ND.shape[1]} features in fast "
      f'memory ({target.fast_memory() >> 20} MiB) and they do not fit; use impl="xla"'
    )
  return chosen


def _blocks(hidden_ND, embedding_VD) -> Blocks | None:
  N, D = hidden_ND.shape
  V = embedding_VD.shape[0]
  wide, tall = hidden_ND.dtype.itemsize, embedding_VD.dtype.itemsize
  for rows, entries in BLOCKS:
    fetched = 2 * D * (rows * wide + entries * tall)  # twice: the next block comes in meanwhile
    cast = D * entries * wide if wide != tall else 0
    columns = 2 * 7 * rows * 128 * 4  # [R, 1] takes the room of [R, 128]
    if fetched + cast + columns + 6 * rows * entries * 4 <= 0.75 * target.fast_memory():
      # A block may be cut off at the end of an array, but must not be larger than it.
      return Blocks(min(rows, N), min(entries, V), int(0.875 * target.fast_memory()))
  return None


def _params(limit: int) -> pltpu.CompilerParams:
  return pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=limit)


def forward(
  hidden_ND, embedding_VD, label_N1, temperature_N1, *, soft_cap, entropy
) -> tile.Statistics:
  N, D = hidden_ND.shape
  V = embedding_VD.shape[0]
  R, W, limit = blocks(hidden_ND, embedding_VD)
  column = pl.BlockSpec((R, 1), lambda n, v: (n, 0))
  out = 4 if entropy else 3
  return tile.finish(
    _sums(
      pl.pallas_call(
        functools.partial(_forward_kernel, entries=V, soft_cap=soft_cap),
        grid=(pl.cdiv(N, R), pl.cdiv(V, W)),
        in_specs=[
          pl.BlockSpec((R, D), lambda n, v: (n, 0)),
          pl.BlockSpec((W, D), lambda n, v: (v, 0)),
          column,
          column,
        ],
        out_specs=[column] * out,
        out_shape=[_shape((N, 1), jnp.float32, hidden_ND)] * out,
        compiler_params=_params(limit),
        name="token_logprob_forward",
      )(hidden_ND, embedding_VD, label_N1, temperature_N1)
    )
  )


def _sums(columns) -> tile.Sums:
  return tile.Sums(*columns) if len(columns) == 4 else tile.Sums(*columns, None)


def _forward_kernel(hidden, embedding, label, temperature, *sums, entries, soft_cap):
  tile_index = pl.program_id(1)
  before = _sums(sums)

  @pl.when(tile_index == 0)
  def _():
    start = tile.nothing(before.maximum_N1[...], entropy=before.weighted_N1 is not None)
    jax.tree.map(_store, before, start)

  score_RW = tile.scores(hidden[...], embedding[...], temperature[...], soft_cap)
  entry_RW = _entry(score_RW.shape, tile_index)
  score_RW = jnp.where(entry_RW < entries, score_RW, -jnp.inf)
  hit_RW = (entry_RW == label[...]) & (entry_RW < entries)
  chosen_R1 = jnp.sum(jnp.where(hit_RW, score_RW, 0.0), axis=1, keepdims=True)
  after = tile.add(jax.tree.map(lambda ref: ref[...], before), score_RW, chosen_R1)
  jax.tree.map(_store, before, after)


def _store(ref, value):
  ref[...] = value


def _entry(shape, tile_index):
  """The vocabulary entry of each column of a block."""
  return tile_index * shape[1] + jax.lax.broadcasted_iota(jnp.int32, shape, 1)


def _shape(shape, dtype, like) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def backward(
  hidden_ND, embedding_VD, label_N1, temperature_N1, pulled: tile.Pull, *, soft_cap, tiles
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of hidden states, embedding and temperature, V / tiles entries (or fewer) at a time."""
  V = embedding_VD.shape[0]
  W = blocks(hidden_ND, embedding_VD).entries
  S = V if tiles == 1 else max(W, V // tiles // W * W)

  def add(start, size, sums):
    hidden_grad_ND, embedding_grad_VD, temperature_grad_N1 = sums
    pull_NS, temperature = _pull(
      hidden_ND, embedding_VD, label_N1, temperature_N1, pulled, start, size, soft_cap
    )
    part_SD = jax.lax.dynamic_slice_in_dim(embedding_VD, start, size)
    hidden, part_grad_SD = tile.push(pull_NS, hidden_ND, part_SD)
    embedding_grad_VD = jax.lax.dynamic_update_slice_in_dim(
      embedding_grad_VD, part_grad_SD.astype(embedding_VD.dtype), start, 0
    )
    return hidden_grad_ND + hidden, embedding_grad_VD, temperature_grad_N1 + temperature

  sums = (
    jnp.zeros_like(hidden_ND, jnp.float32),
    jnp.zeros_like(embedding_VD),
    jnp.zeros_like(temperature_N1),
  )
  sums = target.like(hidden_ND, sums)
  sums = jax.lax.fori_loop(0, V // S, lambda s, sums: add(s * S, S, sums), sums)
  if V % S:
    sums = add(V // S * S, V % S, sums)
  hidden_grad_ND, embedding_grad_VD, temperature_grad_N1 = sums
  return hidden_grad_ND.astype(hidden_ND.dtype), embedding_grad_VD, temperature_grad_N1


def _pull(hidden_ND, embedding_VD, label_N1, temperature_N1, pulled, start, size, soft_cap):
  """Gradients of logits start ... start + size [N, S], in the dtype of `hidden_ND`, and their part
  of the temperature's [N, 1]; `start` is a multiple of the block."""
  N, D = hidden_ND.shape
  R, W, limit = blocks(hidden_ND, embedding_VD)
  column = pl.BlockSpec((R, 1), lambda n, v, first: (n, 0))
  pulled, tree = jax.tree.flatten(pulled)
  return pl.pallas_call(
    functools.partial(
      _backward_kernel, tree=tree, entries=embedding_VD.shape[0], soft_cap=soft_cap
    ),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(pl.cdiv(N, R), pl.cdiv(size, W)),
      in_specs=[
        pl.BlockSpec((R, D), lambda n, v, first: (n, 0)),
        pl.BlockSpec((W, D), lambda n, v, first: (first[0] + v, 0)),
        *[column] * (2 + len(pulled)),
      ],
      out_specs=[pl.BlockSpec((R, W), lambda n, v, first: (n, v)), column],
    ),
    out_shape=[
      _shape((N, size), hidden_ND.dtype, hidden_ND),
      _shape((N, 1), jnp.float32, hidden_ND),
    ],
    compiler_params=_params(limit),
    name="token_logprob_backward",
  )(
    jnp.asarray(start // W, jnp.int32)[None],
    hidden_ND,
    embedding_VD,
    label_N1,
    temperature_N1,
    *pulled,
  )


def _backward_kernel(first, hidden, embedding, label, temperature, *refs, tree, entries, soft_cap):
  *pulled, pull, temperature_grad = refs
  pulled = jax.tree.unflatten(tree, [column[...] for column in pulled])

  @pl.when(pl.program_id(1) == 0)
  def _():
    temperature_grad[...] = jnp.zeros_like(temperature_grad)

  score_RW = tile.scores(hidden[...], embedding[...], temperature[...], soft_cap)
  entry_RW = _entry(score_RW.shape, first[0] + pl.program_id(1))
  pull_RW, part_R1 = tile.gradient(
    score_RW, entry_RW == label[...], entry_RW < entries, temperature[...], pulled, soft_cap
  )
  pull[...] = pull_RW.astype(pull.dtype)
  temperature_grad[...] += part_R1
