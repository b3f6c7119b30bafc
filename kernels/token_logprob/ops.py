"""token_logprob as callers see it: the equation of `ref`, in memory that does not hold [N, V].

Letters: N rows (tokens to score), D features, V vocabulary, W a device's part of the vocabulary.

tokamax's `linear_softmax_cross_entropy_loss` is the nearest thing in a library: it returns one sum
or mean over rows, without log-probs of each row, temperature, soft cap or entropy, and its XLA path
holds the logits. Policy gradients need each of these, hence this one.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from .. import target
from . import pallas, ref, tile, xla

Impl = Literal["auto", "ref", "xla", "pallas"]


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
  impl: Impl = "auto",
) -> ref.TokenLogprob:
  """log softmax(cap(h E^T) / T)[label] and, if asked, the entropy; float32 nats, see `ref`.

  `embedding_VD` has one row a token, the layout of a (tied) embedding table; hand over an untied
  head [D, V] transposed. `mask_N` None means every row counts.
  "xla" and "pallas" hold at most the logits of `chunk` rows at a time (chunk * V numbers), in the
  forward and the backward pass, which makes them again; "ref" holds them all. "pallas" is for TPU,
  inside `shard_map` where there are several. "auto" is "pallas" where that can run, else "xla".
  """
  if mask_N is None:
    mask_N = jnp.ones(label_N.shape, bool)
  _check(hidden_ND, embedding_VD, label_N, mask_N, temperature_N, chunk)
  if impl == "ref":
    return ref.token_logprob(
      hidden_ND,
      embedding_VD,
      label_N,
      mask_N,
      temperature_N=temperature_N,
      soft_cap=soft_cap,
      entropy=entropy,
    )
  statistics = _statistics(
    hidden_ND, embedding_VD, label_N, mask_N, temperature_N, soft_cap, entropy, chunk, impl
  )
  return _log_probs(statistics, label_N, mask_N, embedding_VD.shape[0])


def token_logprob_split(
  hidden_ND: jax.Array,
  embedding_WD: jax.Array,
  label_N: jax.Array,
  mask_N: jax.Array | None = None,
  *,
  axis: str,
  temperature_N: jax.Array,
  entropy: bool,
  soft_cap: float | None = None,
  chunk: int = 512,
  impl: Impl = "auto",
) -> ref.TokenLogprob:
  """`token_logprob` inside `shard_map`, where each device along mesh axis `axis` holds W = V /
  devices entries of the vocabulary, in order, and all of them hold the same N rows.

  Three numbers a row travel between devices, never logits. Labels count over the whole vocabulary.
  """
  if impl == "ref":
    raise ValueError(
      'token_logprob_split has no ref of its own; compare with token_logprob\'s "ref"'
    )
  if mask_N is None:
    mask_N = jnp.ones(label_N.shape, bool)
  _check(hidden_ND, embedding_WD, label_N, mask_N, temperature_N, chunk)
  W = embedding_WD.shape[0]
  here_N = jnp.where(mask_N, label_N, 0) - W * jax.lax.axis_index(axis)
  part = _statistics(
    hidden_ND, embedding_WD, here_N, mask_N, temperature_N, soft_cap, entropy, chunk, impl
  )
  # logsumexp over devices (the maximum is a constant of it), and the entropy of a mixture.
  maximum_N1 = jax.lax.pmax(jax.lax.stop_gradient(part.normaliser_N1), axis)
  share_N1 = jnp.exp(part.normaliser_N1 - maximum_N1)
  total_N1 = jax.lax.psum(share_N1, axis)
  normaliser_N1 = maximum_N1 + jnp.log(total_N1)
  entropy_N1 = None
  if entropy:
    nats_N1 = normaliser_N1 - part.normaliser_N1 + part.entropy_N1
    entropy_N1 = jax.lax.psum(share_N1 * nats_N1, axis) / total_N1
  whole = tile.Statistics(normaliser_N1, jax.lax.psum(part.chosen_N1, axis), entropy_N1)
  return _log_probs(whole, label_N, mask_N, W * jax.lax.axis_size(axis))


def _statistics(
  hidden_ND, embedding_VD, label_N, mask_N, temperature_N, soft_cap, entropy, chunk, impl
) -> tile.Statistics:
  # Padding is made harmless before anything is computed from it, so that its gradient is 0, not NaN.
  hidden_ND = jnp.where(mask_N[:, None], hidden_ND, 0)
  temperature_N = jnp.where(mask_N, temperature_N, 1.0).astype(jnp.float32)
  label_N = jnp.where(mask_N, label_N, 0).astype(jnp.int32)
  tiles = min(max(1, -(-hidden_ND.shape[0] // chunk)), embedding_VD.shape[0])
  match _choose(impl, hidden_ND, embedding_VD):
    case "xla":
      forward = functools.partial(xla.forward, soft_cap=soft_cap, entropy=entropy, tiles=tiles)
      backward = functools.partial(xla.backward, soft_cap=soft_cap, tiles=tiles)
    case "pallas":
      forward = functools.partial(pallas.forward, soft_cap=soft_cap, entropy=entropy)
      backward = functools.partial(pallas.backward, soft_cap=soft_cap, tiles=tiles)
  arrays = (hidden_ND, embedding_VD, label_N[:, None], temperature_N[:, None])
  return _differentiable(forward, backward)(*target.vary_alike(*arrays))


def _differentiable(forward, backward):
  """`forward` with the gradient that `backward` computes."""

  @jax.custom_vjp
  def statistics(hidden_ND, embedding_VD, label_N1, temperature_N1):
    return forward(hidden_ND, embedding_VD, label_N1, temperature_N1)

  def remember(*arrays):
    value = forward(*arrays)
    return value, (arrays, value)

  def gradients(saved, cotangent):
    arrays, value = saved
    hidden, embedding, temperature = backward(*arrays, tile.pull(value, cotangent))
    return hidden, embedding, None, temperature

  statistics.defvjp(remember, gradients)
  return statistics


def _log_probs(statistics, label_N, mask_N, vocabulary) -> ref.TokenLogprob:
  known_N = (label_N >= 0) & (label_N < vocabulary)
  chosen_N = jnp.where(known_N, statistics.chosen_N1[:, 0], jnp.nan)
  logp_N = jnp.where(mask_N, chosen_N - statistics.normaliser_N1[:, 0], 0.0)
  if statistics.entropy_N1 is None:
    return ref.TokenLogprob(logp_N, None)
  return ref.TokenLogprob(logp_N, jnp.where(mask_N, statistics.entropy_N1[:, 0], 0.0))


def _choose(impl: Impl, hidden_ND, embedding_VD) -> Literal["xla", "pallas"]:
  match impl:
    case "xla":
      return "xla"
    case "pallas":
      target.require_tpu("token_logprob")
      pallas.blocks(hidden_ND, embedding_VD)  # raises
      return "pallas"
    case "auto":
      chosen = target.chooses_pallas() and pallas.fits(hidden_ND, embedding_VD)
      return "pallas" if chosen else "xla"
    case _:
      raise ValueError(f'token_logprob got impl={impl!r}; choose "auto", "xla", "pallas" or "ref"')


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
