"""Sixteen bits where they are enough: what computes, and how weights of bfloat16 are moved.

A bfloat16 number has 8 bits of mantissa: an update of less than 1/512 of a weight rounds to none, and
those of RL are a hundredth of that. Two ways out, for weights that are kept in bfloat16:

    stochastic    w' = w + u, rounded up with the probability that makes the mean exact; no state
    compensated   w and the 16 bits that it leaves out are the float32 weight that is updated; 2 bytes

Stochastic rounding: Gupta et al. (1502.02551) section 3; with Adam, Zamirai et al. (2010.06192), whose
other way, Kahan's sum with a bfloat16 remainder, the exact remainder here betters at the same size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

NARROW = jnp.bfloat16
MOMENTS = ("float32", "bfloat16")


class Stepper(NamedTuple):
  """An optimiser that returns moved weights: init(params) -> state, step(grads, state, params) -> both."""

  init: Callable[[Any], Any]
  step: Callable[[Any, Any, Any], tuple[Any, Any]]


def plain(tx: optax.GradientTransformation) -> Stepper:
  """w + u in the dtype of the weights."""

  def step(grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return Stepper(tx.init, step)


def stochastic(tx: optax.GradientTransformation) -> Stepper:
  """bfloat16 weights rounded at random, by a key that only the number of the step decides.

  Every device, and every mesh, draws the same. Moments are those of float32 weights.
  """

  def init(params):
    return {"optax": tx.init(_wide(params)), "steps": jnp.zeros((), jnp.uint32)}

  def step(grads, state, params):
    moved, inner = plain(tx).step(grads, state["optax"], _wide(params))
    leaves, tree = jax.tree.flatten(moved)
    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), state["steps"]), len(leaves))
    drawn = [
      rounded(key, new) if was.dtype == NARROW else new
      for key, new, was in zip(keys, leaves, jax.tree.leaves(params), strict=True)
    ]
    return tree.unflatten(drawn), {"optax": inner, "steps": state["steps"] + 1}

  return Stepper(init, step)


def compensated(tx: optax.GradientTransformation) -> Stepper:
  """bfloat16 weights, and beside them what is missing to the float32 weights that are updated."""

  def init(params):
    def nothing(leaf):
      return jnp.zeros_like(leaf, jnp.int16) if leaf.dtype == NARROW else jnp.zeros((), jnp.int16)

    return {"optax": tx.init(_wide(params)), "rest": jax.tree.map(nothing, params)}

  def step(grads, state, params):
    whole = jax.tree.map(
      lambda leaf, rest: joined(leaf, rest) if leaf.dtype == NARROW else leaf, params, state["rest"]
    )
    moved, inner = plain(tx).step(grads, state["optax"], whole)
    pairs = jax.tree.map(
      lambda new, was, rest: parted(new) if was.dtype == NARROW else (new, rest),
      moved, params, state["rest"],
    )  # fmt: skip
    fresh, rest = jax.tree.transpose(jax.tree.structure(params), None, pairs)
    return fresh, {"optax": inner, "rest": rest}

  return Stepper(init, step)


UPDATES = {"plain": plain, "stochastic": stochastic, "compensated": compensated}


def rounded(key: jax.Array, x: jax.Array) -> jax.Array:
  """float32 to bfloat16, up or down, with mean x: the 16 bits that go are added to 16 random ones."""
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  bits = (jax.lax.bitcast_convert_type(x, jnp.uint32) + noise) & jnp.uint32(0xFFFF0000)
  drawn = jax.lax.bitcast_convert_type(bits, jnp.float32).astype(NARROW)
  return jnp.where(jnp.isfinite(x), drawn, x.astype(NARROW))


def parted(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """float32 to the nearest bfloat16 and an int16: its bits are the bfloat16's, moved by 16, plus it."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  high = ((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16)
  low = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.int16)
  return jax.lax.bitcast_convert_type(high, NARROW), low


def joined(narrow: jax.Array, rest: jax.Array) -> jax.Array:
  """The float32 that `parted` took apart."""
  high = jax.lax.bitcast_convert_type(narrow, jnp.uint16).astype(jnp.uint32) << 16
  bits = high + rest.astype(jnp.int32).astype(jnp.uint32)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _wide(params: Any) -> Any:
  return optax.tree.cast(params, jnp.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("table",), meta_fields=("dtype",))
@dataclasses.dataclass(frozen=True)
class Lookup:
  """An embedding that computes in another dtype: its rows are rounded once they are read.

  So its gradient, a sum over all tokens of a kind, is one of the table's own dtype.
  """

  table: jax.Array
  dtype: Any

  def __getitem__(self, index: Any) -> jax.Array:
    return self.table[index].astype(self.dtype)


def computing(params: Any, dtype: str) -> Any:
  """The weights of a forward pass in `dtype` ("": as they are); norms keep theirs.

  Gradients reach the weights in their own dtype. Those of a micro-batch's matmuls are rounded to
  `dtype` once, on the way; their sum over micro-batches is not.
  """
  if not dtype:
    return params
  cast = kept(params, dtype)
  cast["embedding"] = Lookup(params["embedding"], jnp.dtype(dtype))
  # A tied embedding too is rounded for all that matmuls read of it.
  return cast if "head" in params else cast | {"head": params["embedding"].astype(dtype)}


def kept(params: Any, dtype: str) -> Any:
  """Weights that are only computed with, in `dtype`: `computing` makes of them what it makes of `params`."""

  def cast(path, leaf):
    return leaf if "norm" in jax.tree_util.keystr(path) else leaf.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params) if dtype else params
