"""The shape of a decoder: one frozen record that can say Qwen2.5, Qwen3, Llama 3 and Gemma 3.

Letters: V vocabulary, D model width, L layers, H query heads, K key-value heads, G = H / K, d head width, M MLP width.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3.1's stretching of low rotary frequencies (`rope_type: llama3` in Hugging Face configs)."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_position: int

  def __post_init__(self):
    if self.factor < 1 or not 0 < self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
        f"rope scaling needs factor >= 1 and 0 < low_freq_factor < high_freq_factor; got {self}"
      )
    if self.original_max_position < 1:
      raise ValueError(f"rope scaling needs original_max_position >= 1; got {self}")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Sizes and variants of one decoder; checks itself.

  `sliding_window` w: a token of a local layer sees itself and the w - 1 tokens before it. With
  `global_every` n, layers n, 2n, ... (counted from 1) are global and use `rope_theta`; the others
  are local and use `local_rope_theta` (Gemma 3: n = 6). n = 0 makes every layer local, except the
  first `local_from` (Qwen2's max_window_layers). `rope_factor` f turns positions p into p / f where
  `rope_theta` is used.
  """

  vocab: int
  dim: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_dim: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  rope_factor: float = 1.0
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  tie_embeddings: bool = True
  sliding_window: int | None = None
  global_every: int = 0
  local_from: int = 0
  local_rope_theta: float | None = None  # None: the local layers use rope_theta
  attention_soft_cap: float | None = None
  final_soft_cap: float | None = None
  embed_scale: float = 1.0  # Gemma: sqrt(dim)
  post_norms: bool = False  # Gemma: a norm after attention and after the MLP as well
  norm_offset: bool = False  # Gemma: norms multiply by 1 + w
  query_scale: float | None = None  # None: head_dim ** -0.5
  activation: Activation = "silu"

  def __post_init__(self):
    for name in ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "mlp_dim"):
      if getattr(self, name) < 1:
        raise ValueError(f"a decoder needs {name} >= 1; got {getattr(self, name)}")
    if self.heads % self.kv_heads:
      raise ValueError(
        f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly; "
        "choose heads divisible by kv_heads"
      )
    if self.head_dim % 2:
      raise ValueError(f"rotary embedding needs an even head_dim; got {self.head_dim}")
    if self.activation not in ("silu", "gelu_tanh"):
      raise ValueError(f"unknown activation {self.activation!r}; choose 'silu' or 'gelu_tanh'")
    if self.sliding_window is None and (
      self.global_every or self.local_from or self.local_rope_theta is not None
    ):
      raise ValueError("global_every, local_from and local_rope_theta need a sliding_window")
    if self.global_every < 0 or not 0 <= self.local_from <= self.layers:
      raise ValueError(
        f"global_every must be at least 0, and local_from between 0 and {self.layers} layers; got "
        f"{self.global_every} and {self.local_from}"
      )
    if self.rope_factor != 1 and self.rope_scaling is not None:
      raise ValueError("rope_factor and rope_scaling exclude each other; leave one at its default")
    if self.sliding_window is not None and self.sliding_window < 1:
      raise ValueError(f"sliding_window must be at least 1 token; got {self.sliding_window}")
    for name in ("attention_soft_cap", "final_soft_cap", "local_rope_theta", "query_scale"):
      value = getattr(self, name)
      if value is not None and not value > 0:
        raise ValueError(f"{name} must be positive or None; got {value}")
    for name in ("rope_theta", "rope_factor", "norm_eps", "embed_scale"):
      if not getattr(self, name) > 0:
        raise ValueError(f"{name} must be positive; got {getattr(self, name)}")

  @classmethod
  def tiny(cls, vocab: int, **changes: Any) -> DecoderConfig:
    """The 0.6 M parameter Qwen3 shape of the embedded tasks; `changes` replace single fields."""
    sizes = dict(dim=128, layers=4, heads=4, kv_heads=2, head_dim=32, mlp_dim=256)
    variant = dict(rope_theta=1000.0, qk_norm=True, tie_embeddings=True)
    return cls(vocab=vocab, **(sizes | variant | changes))

  @property
  def groups(self) -> int:
    """Query heads that share one key-value head."""
    return self.heads // self.kv_heads

  @property
  def attention_scale(self) -> float:
    return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

  @property
  def local_layers(self) -> tuple[bool, ...]:
    """For each layer: does it attend through the sliding window?"""
    if self.sliding_window is None:
      return (False,) * self.layers
    every, first = self.global_every, self.local_from
    return tuple(
      layer >= first and (every == 0 or (layer + 1) % every != 0) for layer in range(self.layers)
    )

  @property
  def parameters(self) -> int:
    """Number of weights, counted by hand."""
    attention = self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
    bias = self.head_dim * (self.heads + 2 * self.kv_heads) * self.qkv_bias
    norms = self.dim * (4 if self.post_norms else 2) + 2 * self.head_dim * self.qk_norm
    layer = attention + bias + norms + 3 * self.dim * self.mlp_dim
    return self.layers * layer + self.dim + self.vocab * self.dim * (2 - self.tie_embeddings)

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

  @classmethod
  def from_json(cls, text: str) -> DecoderConfig:
    """Inverse of `to_json`; an unknown or missing field is an error, never ignored."""
    fields = json.loads(text)
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - known)
    if unknown:
      raise ValueError(f"unknown decoder fields {unknown}; known fields are {sorted(known)}")
    if fields.get("rope_scaling") is not None:
      fields["rope_scaling"] = RopeScaling(**fields["rope_scaling"])
    return cls(**fields)


def rope_frequencies(cfg: DecoderConfig, *, local: bool) -> tuple[float, ...]:
  """Angle per position of each of the d/2 rotary pairs, radians.

      f_i = theta^(-2i/d);  Llama 3: f_i / factor below the low band, f_i above the high band,
      linear in original_max_position / wavelength between them;  `rope_factor`: f_i / rope_factor.

  Layers with a base of their own are never scaled. RoFormer (2104.09864) Eq. 15; position
  interpolation (2306.15595) Eq. 4; Llama 3.1 as in `transformers.modeling_rope_utils`.
  """
  own_base = local and cfg.local_rope_theta is not None
  theta = cfg.local_rope_theta if own_base else cfg.rope_theta
  base = [theta ** (-2 * i / cfg.head_dim) for i in range(cfg.head_dim // 2)]
  scaling = cfg.rope_scaling
  if own_base:
    return tuple(base)
  if scaling is None:
    return tuple(frequency / cfg.rope_factor for frequency in base)

  def stretch(frequency: float) -> float:
    turns = scaling.original_max_position * frequency / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = min(max((turns - scaling.low_freq_factor) / band, 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / scaling.factor

  return tuple(stretch(frequency) for frequency in base)
