"""Hugging Face's `config.json` and tensor names for the four families: Qwen2, Qwen3, Llama 3, Gemma 3.

A field either becomes part of `DecoderConfig`, or must have the one value that changes nothing, or
is on a list of names that never change the function. Every other field is refused by name: a
decoder that ignores what it does not know computes something else than the model does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from memrl_jax.models.config import DecoderConfig, RopeScaling

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class _Family(NamedTuple):
  """`defaults`: what transformers assumes where config.json is silent; None means no default."""

  model_type: str
  defaults: dict[str, Any]


_COMMON = {
  "vocab_size": None,
  "hidden_size": None,
  "intermediate_size": None,
  "num_hidden_layers": None,
  "num_attention_heads": None,
  "num_key_value_heads": None,
  "head_dim": None,
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": False,
  "rope_theta": None,
  "rope_scaling": None,
  "rope_parameters": None,
}
_WINDOWS = {
  "use_sliding_window": False,
  "sliding_window": 4096,
  "max_window_layers": 28,
  "layer_types": None,
}
_FAMILIES = {
  "Qwen2ForCausalLM": _Family("qwen2", _COMMON | _WINDOWS | {"hidden_act": "silu"}),
  "Qwen3ForCausalLM": _Family(
    "qwen3", _COMMON | _WINDOWS | {"hidden_act": "silu", "head_dim": 128}
  ),
  "LlamaForCausalLM": _Family("llama", _COMMON | {"hidden_act": "silu"}),
  "Gemma3ForCausalLM": _Family(
    "gemma3_text",
    _COMMON
    | {
      "vocab_size": 262_208,
      "num_attention_heads": 8,
      "num_key_value_heads": 4,
      "head_dim": 256,
      "hidden_activation": "gelu_pytorch_tanh",
      "tie_word_embeddings": True,
      "query_pre_attn_scalar": 256,
      "sliding_window": 4096,
      "sliding_window_pattern": 6,
      "layer_types": None,
      "rope_local_base_freq": None,
      "final_logit_softcapping": None,
      "attn_logit_softcapping": None,
    },
  ),
}
_MULTIMODAL = "Gemma3ForConditionalGeneration"  # we read its text part
_THETA = {"gemma3_text": 1_000_000.0}  # where config.json names no base; 10,000 for the others
_LOCAL_THETA = 10_000.0  # Gemma 3's local layers
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Fields that may only say what changes nothing; a null says nothing either.
_ONLY = {
  "attention_bias": False,
  "mlp_bias": False,
  "use_mrope": False,
  "use_bidirectional_attention": False,
  "partial_rotary_factor": 1.0,
  "is_decoder": False,
  "is_encoder_decoder": False,
  "add_cross_attention": False,
  "tie_encoder_decoder": False,
}
# Fields that never change what the decoder computes: training, generation, bookkeeping.
_HARMLESS = frozenset(
  """architectures model_type dtype torch_dtype transformers_version use_cache bos_token_id
  eos_token_id pad_token_id sep_token_id decoder_start_token_id initializer_range
  max_position_embeddings attention_dropout pretraining_tp output_attentions output_hidden_states
  return_dict return_dict_in_generate output_scores chunk_size_feed_forward problem_type id2label
  label2id num_labels _name_or_path name_or_path tokenizer_class task_specific_params prefix
  torchscript cache_implementation attn_implementation _attn_implementation
  _attn_implementation_autoset _commit_hash finetuning_task use_bfloat16 pruned_heads do_sample
  temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
  encoder_no_repeat_ngram_size num_beams num_beam_groups diversity_penalty early_stopping max_length
  min_length bad_words_ids suppress_tokens begin_suppress_tokens forced_bos_token_id
  forced_eos_token_id remove_invalid_values exponential_decay_length_penalty num_return_sequences
  tf_legacy_loss cross_attention_hidden_size unsloth_fixed unsloth_version
  _sliding_window_pattern""".split()  # noqa: SIM905
)
# Only beside the text part of a multimodal model.
_IMAGES = frozenset(
  """vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
  boi_token_id eoi_token_id image_token_id""".split()  # noqa: SIM905
)


def config_from_fields(fields: Mapping[str, Any], *, source: str) -> DecoderConfig:
  """The decoder that a `config.json` describes, in the style of transformers 4 or 5.

  `source` names the file in errors. Raises ValueError, in one sentence, for an unknown
  architecture, a missing size, and every field whose effect would be lost.
  """
  family, fields = _text_part(fields, source)
  _refuse_unknown(family, fields, source)
  known = family.defaults | {
    name: value for name, value in fields.items() if name in family.defaults
  }

  def number(name: str) -> Any:
    value = known[name]
    if value is None:
      raise ValueError(f"{source} lacks the field {name!r}")
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(f"{source}: {name} = {value!r} should be a number")
    return value

  gemma = family.model_type == "gemma3_text"
  layers, heads, dim = (
    number(name) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
  )
  head_dim = dim // heads if known["head_dim"] is None else number("head_dim")
  locals_ = _local_layers(family, known, layers, source)
  windows = {}
  if any(locals_):
    windows = {"sliding_window": number("sliding_window")} | _pattern(locals_, source)
  ropes = _rope(family, fields, known, any(locals_), source)
  act_name = "hidden_activation" if gemma else "hidden_act"
  if known[act_name] not in _ACTIVATIONS:
    raise ValueError(
      f"{source}: {act_name} = {known[act_name]!r} is not supported; known: {', '.join(_ACTIVATIONS)}"
    )
  if not isinstance(known["tie_word_embeddings"], bool):
    raise ValueError(
      f"{source}: tie_word_embeddings = {known['tie_word_embeddings']!r} should be true or false"
    )
  gemma_only = {}
  if gemma:
    scalar = number("query_pre_attn_scalar")
    gemma_only = dict(
      attention_soft_cap=known["attn_logit_softcapping"],
      final_soft_cap=known["final_logit_softcapping"],
      embed_scale=float(dim**0.5),
      post_norms=True,
      norm_offset=True,
      query_scale=None if scalar == head_dim else scalar**-0.5,
    )
  try:
    return DecoderConfig(
      vocab=number("vocab_size"),
      dim=dim,
      layers=layers,
      heads=heads,
      kv_heads=heads if known["num_key_value_heads"] is None else number("num_key_value_heads"),
      head_dim=head_dim,
      mlp_dim=number("intermediate_size"),
      norm_eps=number("rms_norm_eps"),
      qk_norm=family.model_type in ("qwen3", "gemma3_text"),
      qkv_bias=family.model_type == "qwen2",
      tie_embeddings=known["tie_word_embeddings"],
      activation=_ACTIVATIONS[known[act_name]],
      **ropes,
      **windows,
      **gemma_only,
    )
  except ValueError as error:
    raise ValueError(f"{source}: {error}") from error


def fields_from_config(cfg: DecoderConfig, dtype: str) -> dict[str, Any]:
  """Inverse of `config_from_fields`, in words that transformers 4 and 5 both read.

  transformers 5.24 reads `attn_logit_softcapping` of a Gemma 3 and does not apply it; we do. Raises
  ValueError if no architecture describes `cfg`.
  """
  architecture = _architecture(cfg)
  family = _FAMILIES[architecture]
  ropes: dict[str, Any] = {"rope_type": "default"}
  if cfg.rope_factor != 1:
    ropes = {"rope_type": "linear", "factor": cfg.rope_factor}
  if cfg.rope_scaling is not None:
    ropes = {
      "rope_type": "llama3",
      "factor": cfg.rope_scaling.factor,
      "low_freq_factor": cfg.rope_scaling.low_freq_factor,
      "high_freq_factor": cfg.rope_scaling.high_freq_factor,
      "original_max_position_embeddings": cfg.rope_scaling.original_max_position,
    }
  activation = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}[cfg.activation]
  kinds = ["sliding_attention" if local else "full_attention" for local in cfg.local_layers]
  rope_parameters = ropes | {"rope_theta": cfg.rope_theta}
  fields = {
    "architectures": [architecture],
    "model_type": family.model_type,
    "vocab_size": cfg.vocab,
    "hidden_size": cfg.dim,
    "num_hidden_layers": cfg.layers,
    "num_attention_heads": cfg.heads,
    "num_key_value_heads": cfg.kv_heads,
    "head_dim": cfg.head_dim,
    "intermediate_size": cfg.mlp_dim,
    "rope_theta": cfg.rope_theta,
    "rope_parameters": rope_parameters,
    "rms_norm_eps": cfg.norm_eps,
    "tie_word_embeddings": cfg.tie_embeddings,
    "attention_bias": False,
    "max_position_embeddings": 32768,
    "dtype": dtype,
  }
  if ropes["rope_type"] != "default":
    fields["rope_scaling"] = ropes
  if family.model_type == "gemma3_text":
    scalar = cfg.head_dim if cfg.query_scale is None else cfg.query_scale**-2
    whole = round(scalar)
    local_theta = _LOCAL_THETA if cfg.local_rope_theta is None else cfg.local_rope_theta
    fields |= {
      "hidden_activation": activation,
      "query_pre_attn_scalar": whole if whole and whole**-0.5 == cfg.attention_scale else scalar,
      "sliding_window": cfg.sliding_window or 4096,
      "layer_types": kinds,
      "rope_local_base_freq": local_theta,
      "rope_parameters": {
        "full_attention": rope_parameters,
        "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
      },
      "final_logit_softcapping": cfg.final_soft_cap,
      "attn_logit_softcapping": cfg.attention_soft_cap,
    }
  else:
    fields["hidden_act"] = activation
  if family.model_type in ("qwen2", "qwen3"):
    fields |= {
      "use_sliding_window": cfg.sliding_window is not None,
      "sliding_window": cfg.sliding_window,
      "max_window_layers": cfg.local_from,
      "layer_types": kinds,
    }
  if family.model_type == "llama":
    fields["mlp_bias"] = False
  if config_from_fields(fields, source="the exported config") != cfg:
    raise ValueError(f"no architecture of {', '.join(_FAMILIES)} describes this decoder: {cfg}")
  return fields


def tensor_shapes(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """Every tensor of the checkpoint, by Hugging Face's name, in the order of the layers."""
  shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (cfg.vocab, cfg.dim)}
  for index in range(cfg.layers):
    shapes |= {layer_name(index, name): shape for name, shape in layer_shapes(cfg).items()}
  shapes[FINAL_NORM] = (cfg.dim,)
  if not cfg.tie_embeddings:
    shapes[HEAD] = (cfg.vocab, cfg.dim)
  return shapes


def layer_shapes(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """The tensors of one layer, named without `model.layers.N.`; a projection is [out, in]."""
  D, M = cfg.dim, cfg.mlp_dim
  queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
  heads = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
  shapes: dict[str, tuple[int, ...]] = {
    f"self_attn.{name}.weight": (width, D) for name, width in heads.items()
  }
  if cfg.qkv_bias:
    shapes |= {f"self_attn.{name}.bias": (width,) for name, width in heads.items()}
  shapes |= {
    "self_attn.o_proj.weight": (D, queries),
    "mlp.gate_proj.weight": (M, D),
    "mlp.up_proj.weight": (M, D),
    "mlp.down_proj.weight": (D, M),
  }
  for ours, theirs in norm_names(cfg).items():
    shapes[theirs] = (cfg.head_dim,) if ours in ("query_norm", "key_norm") else (D,)
  return shapes


def layer_name(layer: int, name: str) -> str:
  return f"model.layers.{layer}.{name}"


def norm_names(cfg: DecoderConfig) -> dict[str, str]:
  """Our norms of a layer -> Hugging Face's, whose `post_attention_layernorm` is two things."""
  names = {"attention_norm": "input_layernorm"}
  if cfg.post_norms:
    names |= {
      "post_attention_norm": "post_attention_layernorm",
      "mlp_norm": "pre_feedforward_layernorm",
      "post_mlp_norm": "post_feedforward_layernorm",
    }
  else:
    names["mlp_norm"] = "post_attention_layernorm"
  if cfg.qk_norm:
    names |= {"query_norm": "self_attn.q_norm", "key_norm": "self_attn.k_norm"}
  return {ours: f"{theirs}.weight" for ours, theirs in names.items()}


def text_names(names: Iterable[str]) -> dict[str, str]:
  """Name as in `tensor_shapes` -> name in the file, without what a text model does not need.

  A multimodal file keeps the language model under a prefix of its own, and old Llama files store
  the rotary frequencies, which follow from the config.
  """
  found = {}
  for name in names:
    plain = re.sub(r"^(language_model\.model|model\.language_model)\.", "model.", name)
    plain = re.sub(r"^language_model\.lm_head", "lm_head", plain)
    image = re.match(r"(model\.)?(vision_tower|multi_modal_projector)\.", plain)
    if image is None and not plain.endswith("rotary_emb.inv_freq"):
      found[plain] = name
  return found


def _text_part(fields: Mapping[str, Any], source: str) -> tuple[_Family, dict[str, Any]]:
  """The family, and the fields of its text model: all of them, unless the model sees images too."""
  names = fields.get("architectures") or [
    name for name, family in _FAMILIES.items() if family.model_type == fields.get("model_type")
  ]
  if names == [_MULTIMODAL]:
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
      raise ValueError(f"{source} lacks the field 'text_config'")
    outer = {name: value for name, value in fields.items() if name not in _IMAGES | {"text_config"}}
    outer = {"tie_word_embeddings": True} | outer
    return _FAMILIES["Gemma3ForCausalLM"], dict(text) | outer
  if len(names) != 1 or names[0] not in _FAMILIES:
    said = fields.get("architectures") or fields.get("model_type")
    raise ValueError(
      f"{source}: unknown architecture {said}; known: {', '.join((*_FAMILIES, _MULTIMODAL))}"
    )
  family = _FAMILIES[names[0]]
  if fields.get("model_type") not in (None, family.model_type):
    raise ValueError(
      f"{source}: model_type {fields['model_type']!r} does not belong to the architecture {names[0]}"
    )
  return family, dict(fields)


def _refuse_unknown(family: _Family, fields: dict[str, Any], source: str) -> None:
  for name, value in fields.items():
    if value is None or name in family.defaults or name in _HARMLESS:
      continue
    if name not in _ONLY:
      raise ValueError(
        f"{source}: {name} = {value!r} is not supported for {family.model_type}, and leaving it out "
        "could change what the model computes; delete the field if it does not"
      )
    if value != _ONLY[name]:
      raise ValueError(f"{source}: {name} = {value!r} is not supported; expected {_ONLY[name]!r}")


def _local_layers(
  family: _Family, known: dict[str, Any], layers: int, source: str
) -> tuple[bool, ...]:
  """For each layer: does it attend through the sliding window?"""
  if family.model_type == "llama":
    return (False,) * layers
  kinds = known["layer_types"]
  sliding = family.model_type == "gemma3_text" or (
    known["use_sliding_window"] and known["sliding_window"] is not None
  )
  if kinds is None and not sliding:
    return (False,) * layers
  if kinds is None and family.model_type == "gemma3_text":
    every = known["sliding_window_pattern"]
    return tuple((layer + 1) % every != 0 for layer in range(layers))
  if kinds is None:
    return tuple(layer >= known["max_window_layers"] for layer in range(layers))
  if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
    raise ValueError(
      f"{source}: layer_types should name sliding_attention or full_attention for each of {layers} "
      f"layers; got {kinds!r}"
    )
  if "sliding_attention" in kinds and not sliding:
    raise ValueError(
      f"{source}: layer_types asks for sliding_attention, but use_sliding_window = "
      f"{known['use_sliding_window']!r} and sliding_window = {known['sliding_window']!r}"
    )
  return tuple(kind == "sliding_attention" for kind in kinds)


def _pattern(locals_: tuple[bool, ...], source: str) -> dict[str, int]:
  """The two numbers of DecoderConfig that say which layers are local."""
  layers, first = len(locals_), locals_.index(True)
  for every in (0, *range(2, layers + 1)):
    said = tuple(
      layer >= first and (every == 0 or (layer + 1) % every != 0) for layer in range(layers)
    )
    if said == locals_:
      return {"global_every": every, "local_from": first}
  raise ValueError(
    f"{source}: layer_types {locals_} (True: sliding) is not supported; after the first sliding layer "
    "the full ones must be every n-th"
  )


def _rope(
  family: _Family, fields: dict[str, Any], known: dict[str, Any], local: bool, source: str
) -> dict[str, Any]:
  """The rotary fields of DecoderConfig, from `rope_parameters` or from the older three fields."""
  gemma = family.model_type == "gemma3_text"
  full = dict(known["rope_parameters"] or {})
  result: dict[str, Any] = {}
  if gemma:
    nested = full
    unknown = sorted(set(nested) - {"full_attention", "sliding_attention"})
    if unknown:
      raise ValueError(
        f"{source}: rope_parameters.{unknown[0]} is not supported; Gemma 3 has full_attention and "
        "sliding_attention there"
      )
    full = dict(nested.get("full_attention") or {})
    theta, scaling = _rope_kind(
      dict(nested.get("sliding_attention") or {}),
      known["rope_local_base_freq"],
      _LOCAL_THETA,
      fields,
      f"{source}: rope_parameters.sliding_attention",
    )
    if scaling:
      raise ValueError(f"{source}: scaled rotary angles of sliding layers are not supported")
    if local:
      result["local_rope_theta"] = theta
  older = known["rope_scaling"] or {}
  clash = sorted(name for name in older if name in full and full[name] != older[name])
  if clash:
    raise ValueError(
      f"{source}: rope_scaling.{clash[0]} = {older[clash[0]]!r} contradicts rope_parameters, which "
      f"says {full[clash[0]]!r}"
    )
  default = _THETA.get(family.model_type, 10_000.0)
  where = f"{source}: {'rope_parameters' if full else 'rope_scaling'}"
  theta, scaling = _rope_kind(full | older, known["rope_theta"], default, fields, where)
  return {"rope_theta": theta} | scaling | result


def _rope_kind(
  rope: dict[str, Any],
  older_theta: float | None,
  default: float,
  fields: dict[str, Any],
  where: str,
) -> tuple[float, dict[str, Any]]:
  """(base, scaling as fields of DecoderConfig) of one kind of layer."""
  kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
  rope.pop("type", None)
  theta = rope.pop("rope_theta", None)
  if None not in (theta, older_theta) and theta != older_theta:
    raise ValueError(
      f"{where}.rope_theta = {theta} contradicts the base {older_theta} beside it; keep one"
    )
  theta = next(base for base in (theta, older_theta, default) if base is not None)
  if rope.pop("partial_rotary_factor", None) not in (None, 1.0):
    raise ValueError(f"{where}.partial_rotary_factor must be 1; other values are not supported")
  wanted = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
      "factor",
      "low_freq_factor",
      "high_freq_factor",
      "original_max_position_embeddings",
    ),
  }
  if kind not in wanted:
    raise ValueError(f"{where}: rope_type {kind!r} is not supported; known: {', '.join(wanted)}")
  if kind == "llama3":
    rope.setdefault("original_max_position_embeddings", fields.get("max_position_embeddings"))
  for name in sorted(set(rope) ^ set(wanted[kind])):
    said = f"{name} = {rope[name]!r} means nothing" if name in rope else f"{name} is missing"
    raise ValueError(f"{where}: {said} with rope_type {kind!r}")
  values = [rope[name] for name in wanted[kind]]
  for name, value in zip(wanted[kind], values, strict=True):
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(f"{where}.{name} = {value!r} should be a number")
  if kind == "linear":
    return float(theta), {"rope_factor": float(values[0])}
  if kind == "llama3":
    return float(theta), {"rope_scaling": RopeScaling(*map(float, values[:3]), int(values[3]))}
  return float(theta), {}


def _architecture(cfg: DecoderConfig) -> str:
  """The only family that could describe this decoder."""
  if cfg.norm_offset:
    return "Gemma3ForCausalLM"
  if cfg.qk_norm:
    return "Qwen3ForCausalLM"
  return "Qwen2ForCausalLM" if cfg.qkv_bias else "LlamaForCausalLM"
