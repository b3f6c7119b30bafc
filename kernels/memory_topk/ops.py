"""memory_topk as callers see it: scores a memory bank and keeps the k best, in one pass.

Letters: Q queries, M memories, D features, k memories wanted.

`jax.lax.approx_max_k` is near but approximate, and both it and `top_k` want all Q x M scores.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from .. import target
from . import pallas, ref, xla


def memory_topk(
  query_QD: jax.Array,
  bank_MD: jax.Array,
  utility_M: jax.Array,
  valid_M: jax.Array | None = None,
  *,
  k: int,
  threshold: float | jax.Array,
  similarity_weight: float | jax.Array,
  utility_weight: float | jax.Array,
  chunk: int = 1024,
  impl: Literal["auto", "ref", "xla", "pallas"] = "auto",
) -> ref.MemoryTopk:
  """The k best memories a query: score = similarity_weight * sim + utility_weight * utility.

  Only memories with sim > threshold that are valid (`valid_M` None: all) and whose score is a
  number count; equal scores go to the smaller id. sim is the inner product, the cosine for unit
  vectors, in float32. Threshold and weights are one number, or one for each query [Q].

  MemRL (2601.03192) Eq. 5-7 gates at delta, takes the k1 most similar and ranks those by
  (1 - lambda) z(sim) + lambda z(utility). The first phase is this with utility_weight 0 and k = k1;
  with known means and deviations the second is this as well: weights (1 - lambda) / std(sim) and
  lambda / std(utility), each query its own, give the same order.

  "xla" looks at `chunk` memories at a time, "pallas" is for TPU and k up to 128 (inside `shard_map`
  where there are several devices), "ref" holds all Q x M scores, "auto" is "pallas" where that can
  run, else "xla". Nothing here is trained: differentiating it raises.
  """
  if valid_M is None:
    valid_M = jnp.ones(utility_M.shape, bool)
  _check(query_QD, bank_MD, utility_M, valid_M, k, chunk)
  utility_M = jnp.where(valid_M, utility_M, jnp.nan).astype(jnp.float32)  # no candidate, see ref
  names = dict(
    threshold=threshold, similarity_weight=similarity_weight, utility_weight=utility_weight
  )
  columns = [_a_query(value, query_QD.shape[0], name) for name, value in names.items()]
  match _choose(impl, query_QD, bank_MD, k):
    case "ref":
      run = functools.partial(ref.memory_topk, k=k)
    case "xla":
      run = functools.partial(xla.memory_topk, k=k, chunk=chunk)
    case "pallas":
      run = functools.partial(pallas.memory_topk, k=k)
  return _constant(run)(*target.vary_alike(query_QD, bank_MD, utility_M, *columns))


def _constant(run):
  """`run`, refusing to be differentiated."""
  run = jax.custom_jvp(run)

  @run.defjvp
  def refuse(primals, tangents):
    raise NotImplementedError(
      "memory_topk has no gradient, because memories are chosen, not trained; put "
      "jax.lax.stop_gradient around queries, bank and utilities"
    )

  return run


def _a_query(value, queries: int, name: str) -> jax.Array:
  value = jnp.asarray(value, jnp.float32)
  if value.shape not in ((), (queries,)):
    raise ValueError(
      f"memory_topk got {queries} queries but {name} of shape {value.shape}; give one number, or "
      "one for each query"
    )
  return jnp.broadcast_to(value, (queries,))


def _choose(impl, query_QD, bank_MD, k) -> Literal["ref", "xla", "pallas"]:
  match impl:
    case "ref" | "xla":
      return impl
    case "pallas":
      target.require_tpu("memory_topk")
      if k > pallas.LANES:
        raise ValueError(
          f"memory_topk's Pallas kernel keeps lists of at most {pallas.LANES} memories and k is {k}; "
          'use impl="xla"'
        )
      if pallas.width(query_QD, bank_MD) is None:
        raise ValueError(
          f"memory_topk's Pallas kernel keeps whole vectors of D = {query_QD.shape[1]} features in "
          'fast memory and they do not fit; use impl="xla"'
        )
      return "pallas"
    case "auto":
      able = target.chooses_pallas() and k <= pallas.LANES and pallas.width(query_QD, bank_MD)
      return "pallas" if able else "xla"
    case _:
      raise ValueError(f'memory_topk got impl={impl!r}; choose "auto", "xla", "pallas" or "ref"')


def _check(query_QD, bank_MD, utility_M, valid_M, k, chunk):
  if query_QD.ndim != 2 or bank_MD.ndim != 2 or query_QD.shape[1] != bank_MD.shape[1]:
    raise ValueError(
      f"memory_topk needs queries [Q, D] and a bank [M, D], got {query_QD.shape} and {bank_MD.shape}"
    )
  M = bank_MD.shape[0]
  if utility_M.shape != (M,) or valid_M.shape != (M,):
    raise ValueError(
      f"memory_topk got a bank of {M} memories, but utilities and validity of shapes "
      f"{utility_M.shape} and {valid_M.shape}; give one of each a memory"
    )
  if valid_M.dtype != bool:
    raise ValueError(f"memory_topk got validity of {valid_M.dtype}; make it bool, True counts")
  if M < 1 or k < 1 or chunk < 1:
    raise ValueError(
      f"memory_topk got {M} memories, k={k}, chunk={chunk}; each must be at least 1 (pad an empty "
      "bank with an invalid memory)"
    )
