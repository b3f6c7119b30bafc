"""BERT as a sentence encoder, in Flax NNX: token ids in, one vector a text out.

`embed(params, cfg, tokens, lengths)` is the pure border: `params` is a nested dict of arrays, modules
are put together again inside the traced function. Layers are not stacked as the decoder's are:
slicing a stack would copy every weight on each call, which for a single short text costs as much as
the text does.

Letters: N texts, T positions, X = N T tokens, D width, H heads, d head width, M MLP width.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

Params = dict[str, Any]
Pooling = Literal["mean", "cls"]
Activation = Literal["gelu", "gelu_tanh", "relu"]

_HIDDEN = -1e30  # added to a masked score: far below any score, and finite


@dataclasses.dataclass(frozen=True)
class BertConfig:
  """Sizes of one encoder, and how it makes one vector of a text; checks itself."""

  vocab: int
  dim: int
  layers: int
  heads: int
  mlp_dim: int
  positions: int
  token_types: int = 2
  norm_eps: float = 1e-12
  activation: Activation = "gelu"
  pooling: Pooling = "mean"
  normalize: bool = True

  def __post_init__(self):
    for name in ("vocab", "dim", "layers", "heads", "mlp_dim", "positions", "token_types"):
      if getattr(self, name) < 1:
        raise ValueError(f"a sentence encoder needs {name} >= 1; got {getattr(self, name)}")
    if self.dim % self.heads:
      raise ValueError(
        f"a width of {self.dim} cannot be cut into {self.heads} heads; choose dim divisible by heads"
      )
    if self.activation not in ("gelu", "gelu_tanh", "relu"):
      raise ValueError(
        f"unknown activation {self.activation!r}; choose 'gelu', 'gelu_tanh' or 'relu'"
      )
    if self.pooling not in ("mean", "cls"):
      raise ValueError(f"unknown pooling {self.pooling!r}; choose 'mean' or 'cls'")


class LayerNorm(nnx.Module):
  """(x - mean) / sqrt(var + eps) * w + b over the last axis. Ba et al. (1607.06450)."""

  def __init__(self, width: int, eps: float):
    self.weight, self.bias = nnx.Param(jnp.ones(width)), nnx.Param(jnp.zeros(width))
    self.eps = eps

  def __call__(self, x_XD: jax.Array) -> jax.Array:
    centred = x_XD - jnp.mean(x_XD, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + self.eps)
    return centred * scale * self.weight[...][None] + self.bias[...][None]


class Linear(nnx.Module):
  """x W + b, with W [in, out]."""

  def __init__(self, rngs: nnx.Rngs, wide: int, out: int):
    self.weight = nnx.Param(wide**-0.5 * jax.random.normal(rngs.params(), (wide, out)))
    self.bias = nnx.Param(jnp.zeros(out))

  def __call__(self, x_XD: jax.Array) -> jax.Array:
    return x_XD @ self.weight[...] + self.bias[...][None]


class Layer(nnx.Module):
  """One post-norm transformer layer; `qkv` holds all queries, then all keys, then all values."""

  def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
    self.cfg = cfg
    self.qkv = Linear(rngs, cfg.dim, 3 * cfg.dim)
    self.out = Linear(rngs, cfg.dim, cfg.dim)
    self.up = Linear(rngs, cfg.dim, cfg.mlp_dim)
    self.down = Linear(rngs, cfg.mlp_dim, cfg.dim)
    self.attention_norm = LayerNorm(cfg.dim, cfg.norm_eps)
    self.mlp_norm = LayerNorm(cfg.dim, cfg.norm_eps)

  def __call__(self, x_XD: jax.Array, bias_NT: jax.Array) -> jax.Array:
    x_XD = self.attention_norm(x_XD + self.out(self._attend(self.qkv(x_XD), bias_NT)))
    wide = self.up(x_XD)
    if self.cfg.activation == "relu":
      wide = jax.nn.relu(wide)
    else:
      wide = jax.nn.gelu(wide, approximate=self.cfg.activation == "gelu_tanh")
    return self.mlp_norm(x_XD + self.down(wide))

  def _attend(self, qkv_X3D: jax.Array, bias_NT: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(d) + bias) v, every head of every text on one batch axis of the dots."""
    N, T = bias_NT.shape
    H, d = self.cfg.heads, self.cfg.dim // self.cfg.heads
    split = qkv_X3D.reshape(N, T, 3, H, d).transpose(2, 0, 3, 1, 4).reshape(3, N * H, T, d)
    query, key, value = split[0] * d**-0.5, split[1], split[2]
    score = jnp.einsum("nqd,nsd->nqs", query, key) + jnp.repeat(bias_NT, H, axis=0)[:, None]
    mixed = jnp.einsum("nqs,nsd->nqd", jax.nn.softmax(score, axis=-1), value)
    return mixed.reshape(N, H, T, d).transpose(0, 2, 1, 3).reshape(N * T, H * d)


class Bert(nnx.Module):
  """Sum of word, position and type embeddings, normed; layers; pooling."""

  def __init__(self, cfg: BertConfig, rngs: nnx.Rngs):
    def table(rows):
      return nnx.Param(cfg.dim**-0.5 * jax.random.normal(rngs.params(), (rows, cfg.dim)))

    self.cfg = cfg
    self.word, self.position = table(cfg.vocab), table(cfg.positions)
    self.token_type = table(cfg.token_types)
    self.norm = LayerNorm(cfg.dim, cfg.norm_eps)
    self.layers = nnx.List([Layer(cfg, rngs) for _ in range(cfg.layers)])

  def __call__(self, tokens_NT: jax.Array, length_N: jax.Array) -> jax.Array:
    """[N, D]; a text is a row's first `length_N` tokens, all of token type 0."""
    cfg, (N, T) = self.cfg, tokens_NT.shape
    mask_NT = jnp.arange(T)[None] < length_N[:, None]
    bias_NT = jnp.where(mask_NT, 0.0, _HIDDEN)
    x_NTD = self.word[...][tokens_NT] + (self.position[...][:T] + self.token_type[...][:1])[None]
    x_XD = self.norm(x_NTD.reshape(N * T, cfg.dim))
    for layer in self.layers:
      x_XD = layer(x_XD, bias_NT)
    x_NTD = x_XD.reshape(N, T, cfg.dim)
    vector_ND = x_NTD[:, 0] if cfg.pooling == "cls" else mean(x_NTD, mask_NT)
    return unit(vector_ND) if cfg.normalize else vector_ND


def mean(x_NTD: jax.Array, mask_NT: jax.Array) -> jax.Array:
  """Mean over a text's own tokens. Reimers & Gurevych (1908.10084) §3, MEAN strategy."""
  total_ND = jnp.sum(jnp.where(mask_NT[..., None], x_NTD, 0.0), axis=1)
  return total_ND / jnp.maximum(jnp.sum(mask_NT, axis=1, keepdims=True), 1)


def unit(x_ND: jax.Array) -> jax.Array:
  """x / max(|x|, 1e-12), so that a dot product is a cosine."""
  return x_ND / jnp.maximum(jnp.linalg.norm(x_ND, axis=-1, keepdims=True), 1e-12)


def init(key: jax.Array, cfg: BertConfig) -> Params:
  """Random float32 params."""
  return nnx.to_pure_dict(nnx.state(Bert(cfg, nnx.Rngs(params=key)), nnx.Param))


def shapes(cfg: BertConfig) -> Params:
  """The params tree with ShapeDtypeStructs for arrays; computes nothing."""
  return jax.eval_shape(lambda: init(jax.random.key(0), cfg))


def embed(params: Params, cfg: BertConfig, tokens_NT: jax.Array, length_N: jax.Array) -> jax.Array:
  """Vectors [N, D], float32, of texts padded on the right; what stands in the padding is not seen.

  Dots run in full float32 also where a chip's default is less (TPU bfloat16, GPU TF32).
  """
  with jax.default_matmul_precision("float32"):
    return nnx.merge(_graph(cfg), params)(tokens_NT, length_N)


@functools.lru_cache(maxsize=8)
def _graph(cfg: BertConfig) -> nnx.GraphDef:
  return nnx.graphdef(nnx.eval_shape(lambda: Bert(cfg, nnx.Rngs(params=0))))
