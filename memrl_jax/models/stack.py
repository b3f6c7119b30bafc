"""What every pass through the decoder is made of: its kinds of layers, and what stands before and after them.

Letters: N tokens, L layers, D width, V vocabulary, d head width; B rows, Q query and S key positions.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from memrl_jax.models import decoder
from memrl_jax.models import spread as spread_lib
from memrl_jax.models.config import DecoderConfig, rope_frequencies


class Kinds(NamedTuple):
  """The kinds of layer that exist (global, local) and which kind each layer is."""

  local: tuple[bool, ...]
  index_L: np.ndarray

  @classmethod
  def of(cls, cfg: DecoderConfig) -> Kinds:
    local = tuple(sorted(set(cfg.local_layers)))
    return cls(local, np.array([local.index(kind) for kind in cfg.local_layers], np.int32))

  def angles(self, cfg: DecoderConfig, position_N: jax.Array) -> jax.Array:
    """(cos, sin) of every rotary angle for each kind, [kinds, N, 2, d/2], float32."""
    tables = []
    for local in self.local:
      frequency = np.array(rope_frequencies(cfg, local=local), np.float32)
      angle = position_N.astype(jnp.float32)[:, None] * frequency[None]
      tables.append(jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1))
    return jnp.stack(tables)

  def masks(
    self, cfg: DecoderConfig, see_BQS: jax.Array, query_BQ: jax.Array, key_BS: jax.Array
  ) -> jax.Array:
    """What each kind may see, [kinds, B, Q, S]: local kinds only the last `sliding_window`."""
    if cfg.sliding_window is None:
      return see_BQS[None]
    near = query_BQ[:, :, None] - key_BS[:, None, :] < cfg.sliding_window
    return jnp.stack([see_BQS & near if local else see_BQS for local in self.local])

  def window(self, cfg: DecoderConfig, kind: Any) -> jax.Array | int | None:
    """How far a layer of this kind sees, in tokens."""
    if not any(self.local):
      return None
    far = [cfg.sliding_window if local else jnp.iinfo(jnp.int32).max for local in self.local]
    return far[0] if len(far) == 1 else jnp.array(far, jnp.int32)[kind]

  def pick(self, tables: jax.Array, kind: Any) -> jax.Array:
    return tables[0] if len(self.local) == 1 else tables[kind]


@functools.lru_cache(maxsize=32)
def _graph(cfg: DecoderConfig) -> nnx.GraphDef:
  return nnx.graphdef(nnx.eval_shape(lambda: decoder.Layer(cfg, nnx.Rngs(params=0))))


def layer(cfg: DecoderConfig, weights: dict[str, Any]) -> decoder.Layer:
  return nnx.merge(_graph(cfg), weights)


def embed(
  embedding_VD: jax.Array,
  cfg: DecoderConfig,
  token_N: jax.Array,
  spread: spread_lib.Spread | None = None,
) -> jax.Array:
  if spread is None:
    x_ND = embedding_VD[token_N]
  else:
    x_ND = spread.between(spread.lookup(embedding_VD, token_N, cfg.vocab, cfg.dim))
  return x_ND * jnp.asarray(cfg.embed_scale, embedding_VD.dtype)


def final_norm(norm: dict[str, Any], cfg: DecoderConfig, x_ND: jax.Array) -> jax.Array:
  return decoder.rms_norm(x_ND, norm["weight"], eps=cfg.norm_eps, offset=float(cfg.norm_offset))


def cap(cfg: DecoderConfig, logits_XV: jax.Array) -> jax.Array:
  top = cfg.final_soft_cap
  return logits_XV if top is None else top * jnp.tanh(logits_XV / top)
