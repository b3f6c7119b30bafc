"""token_logprob as callers see it: the same equation as `ref`, a chunk of rows at a time.

Letters: N rows (tokens to score), D features, V vocabulary, C rows of a chunk.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from . import ref


def token_logprob(
  hidden_ND: jax.Array,
  embedding_VD: jax.Array,
  label_N: jax.Array,
  mask_N: jax.Array | None = None,
  *,
  temperature_N: jax.Array,
  entropy: bool,
  soft_cap: float | None = None,
  chunk: int = 512,
  impl: Literal["auto", "ref", "xla"] = "auto",
) -> ref.TokenLogprob:
  """log softmax(cap(h E^T) / T)[label] and, if asked, the entropy; float32 nats, see `ref`.

  `embedding_VD` has one row a token, the layout of a (tied) embedding table; hand over an untied
  head [D, V] transposed. `mask_N` None means every row counts.
  "xla" never holds an [N, V] array, in the forward or the backward pass: logits of `chunk` rows
  exist at a time and are computed again for the gradient. "ref" holds it. "auto" is "xla".
  """
  if mask_N is None:
    mask_N = jnp.ones(label_N.shape, bool)
  _check(hidden_ND, embedding_VD, label_N, mask_N, temperature_N, chunk)

  definition = functools.partial(ref.token_logprob, soft_cap=soft_cap, entropy=entropy)
  match impl:
    case "ref":
      return definition(hidden_ND, embedding_VD, label_N, mask_N, temperature_N=temperature_N)
    case "xla" | "auto":
      return _chunked(definition, hidden_ND, embedding_VD, label_N, mask_N, temperature_N, chunk)
    case "pallas":
      raise NotImplementedError(
        'token_logprob has no Pallas kernel; use impl="xla", or impl="auto" to let it choose'
      )
    case _:
      raise ValueError(f'token_logprob got impl={impl!r}; choose "auto", "xla" or "ref"')


def _check(hidden_ND, embedding_VD, label_N, mask_N, temperature_N, chunk):
  if hidden_ND.ndim != 2 or embedding_VD.ndim != 2 or hidden_ND.shape[1] != embedding_VD.shape[1]:
    raise ValueError(
      f"token_logprob needs hidden [N, D] and embedding [V, D], got {hidden_ND.shape} and "
      f"{embedding_VD.shape}; flatten rows and tokens, and transpose a head [D, V]"
    )
  shapes = (label_N.shape, mask_N.shape, temperature_N.shape)
  if any(shape != hidden_ND.shape[:1] for shape in shapes):
    raise ValueError(
      f"token_logprob got {hidden_ND.shape[0]} rows of hidden states, but labels, mask and "
      f"temperatures of shapes {shapes}; give one of each a row"
    )
  if mask_N.dtype != bool:
    raise ValueError(f"token_logprob got a mask of {mask_N.dtype}; make it bool, True counts")
  if chunk < 1:
    raise ValueError(f"token_logprob got chunk={chunk}; at least one row a chunk is needed")


def _chunked(definition, hidden_ND, embedding_VD, label_N, mask_N, temperature_N, chunk):
  rows = hidden_ND.shape[0]
  chunks = max(1, -(-rows // chunk))
  chunk = -(-rows // chunks)  # equal chunks, so that padding is less than one row a chunk
  # Each chunk adds to the gradient of the embedding: in float32, even where that is bfloat16.
  embedding_VD = embedding_VD.astype(jnp.float32)

  def split(row_N):
    """[N, ...] to [chunks, C, ...], a chunk taking every chunks-th row: where N is split over
    devices, each of them then holds a part of every chunk, not a few chunks whole."""
    row_N = jnp.pad(row_N, ((0, chunks * chunk - rows), *[(0, 0)] * (row_N.ndim - 1)))
    return jnp.moveaxis(row_N.reshape(chunk, chunks, *row_N.shape[1:]), 1, 0)

  def join(part):
    return jnp.moveaxis(part, 0, 1).reshape(chunk * chunks)[:rows]

  @jax.checkpoint
  def score(part):
    hidden_CD, label_C, mask_C, temperature_C = part
    return definition(hidden_CD, embedding_VD, label_C, mask_C, temperature_N=temperature_C)

  parts = jax.tree.map(split, (hidden_ND, label_N, mask_N, temperature_N))
  return jax.tree.map(join, jax.lax.map(score, parts))
