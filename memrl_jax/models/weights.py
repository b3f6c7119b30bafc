"""Weight files: a directory with `model.safetensors` and `config.json`, named as Hugging Face names Qwen3.

Our params fuse what Hugging Face keeps apart (`decoder.Layer`), and Hugging Face stores a projection
as [out, in]; this file is the only place that knows both layouts.

Letters: L layers, D width, K key-value heads, G query heads per key-value head, d head width.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig

_TENSORS = "model.safetensors"
_CONFIG = "config.json"


def save_directory(
  path: str | os.PathLike[str],
  cfg: DecoderConfig,
  params: policy.Params,
  *,
  dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
  """Write `cfg` and `params` so that `load_directory`, and transformers, read them back.

  Each file is written aside and then renamed, so a reader never meets half a file. Raises
  ValueError if the architecture is not a Qwen3.
  """
  fields = _config_fields(cfg, dtype)
  folder = pathlib.Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  storage = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
  tensors = {
    name: np.ascontiguousarray(tensor, dtype=storage)
    for name, tensor in to_tensors(cfg, params).items()
  }
  aside = folder / (_TENSORS + ".part")
  safetensors.numpy.save_file(tensors, aside, metadata={"format": "pt"})
  os.replace(aside, folder / _TENSORS)
  aside = folder / (_CONFIG + ".part")
  aside.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
  os.replace(aside, folder / _CONFIG)


def load_directory(path: str | os.PathLike[str]) -> tuple[DecoderConfig, policy.Params]:
  """Read a checkpoint of `save_directory`; params come back float32.

  Raises FileNotFoundError for a missing file, and ValueError, in one sentence, for an architecture
  or field that is not known, or a tensor that is missing, unexpected or of the wrong shape.
  """
  folder = pathlib.Path(path)
  for name in (_CONFIG, _TENSORS):
    if not (folder / name).is_file():
      raise FileNotFoundError(
        f"{folder} has no {name}; a checkpoint needs {_CONFIG} and {_TENSORS}"
      )
  cfg = _read_config(folder / _CONFIG)
  try:
    with safetensors.safe_open(folder / _TENSORS, framework="flax") as file:
      tensors = {name: np.asarray(file.get_tensor(name), np.float32) for name in file.keys()}  # noqa: SIM118
  except safetensors.SafetensorError as error:
    raise ValueError(f"{folder / _TENSORS} is not a safetensors file: {error}") from error
  return cfg, from_tensors(cfg, tensors, source=str(folder / _TENSORS))


def to_tensors(cfg: DecoderConfig, params: policy.Params) -> dict[str, np.ndarray]:
  """Params -> Hugging Face names and layouts, one tensor a layer and projection."""
  params = jax.tree.map(np.asarray, params)
  D, G, layers = cfg.dim, cfg.groups, params["layers"]
  tensors = {
    "model.embed_tokens.weight": params["embedding"],
    "model.norm.weight": params["final_norm"]["weight"],
  }
  if not cfg.tie_embeddings:
    tensors["lm_head.weight"] = params["head"]
  for layer in range(cfg.layers):
    qkv_DKgd, out = layers["qkv"][layer], layers["out"][layer]
    gate_up = layers["gate_up"][layer]
    tensors |= {
      _layer_name(layer, name): tensor
      for name, tensor in {
        "self_attn.q_proj": qkv_DKgd[:, :, :G].reshape(D, -1).T,
        "self_attn.k_proj": qkv_DKgd[:, :, G].reshape(D, -1).T,
        "self_attn.v_proj": qkv_DKgd[:, :, G + 1].reshape(D, -1).T,
        "self_attn.o_proj": out.reshape(-1, D).T,
        "self_attn.q_norm": layers["query_norm"]["weight"][layer],
        "self_attn.k_norm": layers["key_norm"]["weight"][layer],
        "mlp.gate_proj": gate_up[:, 0].T,
        "mlp.up_proj": gate_up[:, 1].T,
        "mlp.down_proj": layers["down"][layer].T,
        "input_layernorm": layers["attention_norm"]["weight"][layer],
        "post_attention_layernorm": layers["mlp_norm"]["weight"][layer],
      }.items()
    }
  return tensors


def from_tensors(
  cfg: DecoderConfig, tensors: dict[str, np.ndarray], *, source: str
) -> policy.Params:
  """Inverse of `to_tensors`; `source` names the file in errors."""
  _check_tensors(cfg, tensors, source)
  D, K, G, d = cfg.dim, cfg.kv_heads, cfg.groups, cfg.head_dim

  def stacked(name, form=lambda tensor: tensor):
    return jnp.asarray(np.stack([form(tensors[_layer_name(i, name)]) for i in range(cfg.layers)]))

  def heads(name, per_head):
    return stacked(name, lambda tensor: tensor.T.reshape(D, K, per_head, d))

  layers = {
    "qkv": jnp.concatenate(
      [
        heads("self_attn.q_proj", G),
        heads("self_attn.k_proj", 1),
        heads("self_attn.v_proj", 1),
      ],
      axis=3,
    ),
    "out": stacked("self_attn.o_proj", lambda tensor: tensor.T.reshape(K, G, d, D)),
    "gate_up": jnp.stack(
      [stacked("mlp.gate_proj", np.transpose), stacked("mlp.up_proj", np.transpose)], axis=2
    ),
    "down": stacked("mlp.down_proj", np.transpose),
    "query_norm": {"weight": stacked("self_attn.q_norm")},
    "key_norm": {"weight": stacked("self_attn.k_norm")},
    "attention_norm": {"weight": stacked("input_layernorm")},
    "mlp_norm": {"weight": stacked("post_attention_layernorm")},
  }
  params = {
    "embedding": jnp.asarray(tensors["model.embed_tokens.weight"]),
    "final_norm": {"weight": jnp.asarray(tensors["model.norm.weight"])},
    "layers": layers,
  }
  if not cfg.tie_embeddings:
    params["head"] = jnp.asarray(tensors["lm_head.weight"])
  return params


def _layer_name(layer: int, name: str) -> str:
  return f"model.layers.{layer}.{name}.weight"


def _check_tensors(cfg: DecoderConfig, tensors: dict[str, np.ndarray], source: str) -> None:
  empty = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape), policy.shapes(cfg))
  expected = {name: tensor.shape for name, tensor in to_tensors(cfg, empty).items()}
  missing = sorted(set(expected) - set(tensors))
  if missing:
    raise ValueError(
      f"{source} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}; "
      f"does {_CONFIG} belong to it?"
    )
  unexpected = sorted(set(tensors) - set(expected))
  if unexpected:
    raise ValueError(
      f"{source} has {len(unexpected)} tensors that {_CONFIG} does not name, first {unexpected[0]}"
    )
  for name, shape in expected.items():
    if tensors[name].shape != shape:
      raise ValueError(
        f"{source}: {name} has shape {tensors[name].shape}, but {_CONFIG} asks for {shape}"
      )


def _config_fields(cfg: DecoderConfig, dtype: str) -> dict[str, Any]:
  fields = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": cfg.vocab,
    "hidden_size": cfg.dim,
    "num_hidden_layers": cfg.layers,
    "num_attention_heads": cfg.heads,
    "num_key_value_heads": cfg.kv_heads,
    "head_dim": cfg.head_dim,
    "intermediate_size": cfg.mlp_dim,
    "rope_theta": cfg.rope_theta,
    "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
    "rms_norm_eps": cfg.norm_eps,
    "tie_word_embeddings": cfg.tie_embeddings,
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "dtype": dtype,
  }
  if _from_fields(fields) != cfg:
    raise ValueError(f"only the Qwen3 architecture can be saved; this decoder is not one: {cfg}")
  return fields


def _from_fields(fields: dict[str, Any]) -> DecoderConfig:
  return DecoderConfig(
    vocab=fields["vocab_size"],
    dim=fields["hidden_size"],
    layers=fields["num_hidden_layers"],
    heads=fields["num_attention_heads"],
    kv_heads=fields["num_key_value_heads"],
    head_dim=fields["head_dim"],
    mlp_dim=fields["intermediate_size"],
    rope_theta=fields["rope_theta"],
    norm_eps=fields["rms_norm_eps"],
    tie_embeddings=fields["tie_word_embeddings"],
    qk_norm=True,
  )


def _read_config(path: pathlib.Path) -> DecoderConfig:
  """The config of one of our own checkpoints: every field must be the one we would have written."""
  try:
    fields = json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error
  architectures = fields.get("architectures")
  if architectures != ["Qwen3ForCausalLM"]:
    raise ValueError(f"{path}: unknown architecture {architectures}; known: Qwen3ForCausalLM")
  try:
    cfg = _from_fields(fields)
    expected = _config_fields(cfg, fields["dtype"])
  except KeyError as error:
    raise ValueError(f"{path} lacks the field {error}") from error
  for name in sorted(set(fields) | set(expected)):
    if fields.get(name) != expected.get(name):
      raise ValueError(
        f"{path}: {name} = {fields.get(name)!r} is not supported; expected {expected.get(name)!r}"
      )
  return cfg
