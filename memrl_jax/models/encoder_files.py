"""A sentence encoder's directory, in sentence-transformers' layout: what its files say, and its weights.

    config.json, model.safetensors, tokenizer.json (or vocab.txt)   the BERT
    modules.json                    what follows it: pooling and, perhaps, normalisation
    1_Pooling/config.json           mean or cls
    sentence_bert_config.json       how many tokens of a text are read

A field that changes the vectors is honoured or refused by its name. This file is the only place that
knows Hugging Face's names and layouts of a BERT.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from memrl_jax.models import bert


class Reading(NamedTuple):
  """How a text becomes ids: at most `max_tokens` of them, special tokens included."""

  max_tokens: int
  lowercase: bool


class Files(NamedTuple):
  """What a directory gives. `tokenize(texts)` -> for each, its ids and how many it has uncut."""

  name: str
  cfg: bert.BertConfig
  params: bert.Params
  tokenize: Callable[[Sequence[str]], list[tuple[list[int], int]]]
  max_tokens: int
  fingerprint: str


def read(directory: str | os.PathLike[str]) -> Files:
  """Everything that an encoder needs of its directory; weights come as float32.

  Raises:
    FileNotFoundError: a file is missing.
    ValueError: the directory asks for something that is not supported, or is damaged.
  """
  folder = pathlib.Path(directory)
  cfg, reading = read_config(folder)
  params = from_tensors(cfg, _read_tensors(folder), source=str(folder / _TENSORS))
  tokenizer, reading = _tokenizer(folder, cfg, reading)
  fingerprint = _fingerprint(cfg, params, tokenizer, reading)
  return Files(
    folder.resolve().name,
    cfg,
    params,
    lambda texts: tokenize(tokenizer, texts, reading),
    reading.max_tokens,
    fingerprint,
  )


def tokenize(tokenizer: Any, texts: Sequence[str], reading: Reading) -> list[tuple[list[int], int]]:
  """For each text, its ids, cut to `max_tokens` with the closing token kept, and its full length."""
  if not texts:
    return []
  texts = [text.lower() if reading.lowercase else text for text in texts]
  whole = tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"]
  long = [index for index, ids in enumerate(whole) if len(ids) > reading.max_tokens]
  read = [(ids, len(ids)) for ids in whole]
  if long:
    cut = tokenizer(
      [texts[index] for index in long],
      truncation=True,
      max_length=reading.max_tokens,
      padding=False,
    )["input_ids"]
    for index, ids in zip(long, cut, strict=True):
      read[index] = (ids, len(whole[index]))
  return read


_CONFIG, _TENSORS, _MODULES = "config.json", "model.safetensors", "modules.json"
_READING, _SENTENCE = "sentence_bert_config.json", "config_sentence_transformers.json"

_SIZES = {
  "vocab_size": "vocab",
  "hidden_size": "dim",
  "num_hidden_layers": "layers",
  "num_attention_heads": "heads",
  "intermediate_size": "mlp_dim",
  "max_position_embeddings": "positions",
  "type_vocab_size": "token_types",
  "layer_norm_eps": "norm_eps",
}
_ACTIVATIONS = {
  "gelu": "gelu",
  "gelu_new": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",
  "relu": "relu",
}
_FIXED = {
  "model_type": "bert",
  "position_embedding_type": "absolute",
  "is_decoder": False,
  "add_cross_attention": False,
  "chunk_size_feed_forward": 0,
  "quantization_config": None,
}
_WITHOUT_EFFECT = {  # on the vectors of a text
  "_name_or_path", "architectures", "attention_probs_dropout_prob", "bos_token_id",
  "classifier_dropout", "directionality", "dtype", "eos_token_id", "gradient_checkpointing",
  "hidden_dropout_prob", "id2label", "initializer_range", "label2id", "pad_token_id",
  "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
  "pooler_size_per_head", "pooler_type", "tie_word_embeddings", "torch_dtype",
  "transformers_version", "use_cache",
}  # fmt: skip


def read_config(folder: pathlib.Path) -> tuple[bert.BertConfig, Reading]:
  """What a directory's JSON files say; a `max_tokens` of 0 leaves it to the tokenizer.

  Raises:
    FileNotFoundError: config.json or modules.json is missing.
    ValueError: a field is missing, not known, or has a value that is not supported.
  """
  path = folder / _CONFIG
  fields = _json(path)
  _only(path, fields, _FIXED, {*_SIZES, "hidden_act", *_WITHOUT_EFFECT})
  lacking = sorted({*_SIZES, "hidden_act", "model_type"} - set(fields))
  if lacking:
    raise ValueError(f"{path} lacks the field {lacking[0]}")
  if fields["hidden_act"] not in _ACTIVATIONS:
    raise ValueError(_unsupported(path, "hidden_act", fields["hidden_act"], [*_ACTIVATIONS]))
  pooling, normalize = _read_modules(folder, fields["hidden_size"])
  cfg = bert.BertConfig(
    **{ours: fields[theirs] for theirs, ours in _SIZES.items()},
    activation=_ACTIVATIONS[fields["hidden_act"]],
    pooling=pooling,
    normalize=normalize,
  )
  return cfg, _read_reading(folder, cfg)


def _read_modules(folder: pathlib.Path, width: int) -> tuple[str, bool]:
  """(pooling, normalize): a Transformer, a Pooling, and perhaps a Normalize, in this order."""
  path = folder / _MODULES
  modules = _json(path)
  kinds = [module["type"].rpartition(".")[2] for module in modules]
  if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
    raise ValueError(
      f"{path}: the modules {', '.join(kinds)} are not supported; known: Transformer, Pooling and, "
      "perhaps, Normalize"
    )
  if modules[0]["path"]:
    raise ValueError(_unsupported(path, "path of the Transformer", modules[0]["path"], [""]))
  if len(modules) == 3 and (folder / modules[2]["path"] / _CONFIG).is_file():
    normalized = folder / modules[2]["path"] / _CONFIG
    where = dict.fromkeys(("module_input_name", "module_output_name"), "sentence_embedding")
    _only(normalized, _json(normalized), where, set())
  if (folder / _SENTENCE).is_file():
    prompt = _json(folder / _SENTENCE).get("default_prompt_name")
    if prompt is not None:
      raise ValueError(_unsupported(folder / _SENTENCE, "default_prompt_name", prompt, [None]))
  return _read_pooling(folder / modules[1]["path"] / _CONFIG, width), len(modules) == 3


_MODES = {  # the older spelling of `pooling_mode`, a flag each
  "pooling_mode_cls_token": "cls",
  "pooling_mode_mean_tokens": "mean",
  "pooling_mode_max_tokens": "max",
  "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
  "pooling_mode_weightedmean_tokens": "weightedmean",
  "pooling_mode_lasttoken": "lasttoken",
}


def _read_pooling(path: pathlib.Path, width: int) -> str:
  fields = _json(path)
  sizes = {"word_embedding_dimension": width, "embedding_dimension": width}
  _only(path, fields, sizes | {"include_prompt": True}, {"pooling_mode", *_MODES})
  flagged = [mode for flag, mode in _MODES.items() if fields.get(flag)]
  mode = fields.get("pooling_mode", flagged[0] if len(flagged) == 1 else flagged)
  if mode not in ("mean", "cls"):
    raise ValueError(_unsupported(path, "pooling_mode", mode, ["mean", "cls"]))
  return mode


def _read_reading(folder: pathlib.Path, cfg: bert.BertConfig) -> Reading:
  path = folder / _READING
  fields = _json(path) if path.is_file() else {}
  fixed = {
    "transformer_task": "feature-extraction",
    "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
  }
  _only(path, fields, fixed, {"max_seq_length", "do_lower_case"})
  length = fields.get("max_seq_length") or 0
  if length > cfg.positions:
    raise ValueError(
      f"{path}: max_seq_length = {length}, but {_CONFIG} has {cfg.positions} positions"
    )
  return Reading(length, bool(fields.get("do_lower_case", False)))


def _only(path: pathlib.Path, fields: dict, fixed: dict[str, Any], free: set[str]) -> None:
  """Every field is in `free`, or has the one value of `fixed`."""
  for name, value in fields.items():
    if name not in fixed and name not in free:
      raise ValueError(f"{path}: the field {name} = {value!r} is not known and may change vectors")
    if name in fixed and value != fixed[name]:
      raise ValueError(_unsupported(path, name, value, [fixed[name]]))


def _unsupported(path: pathlib.Path, name: str, value: Any, known: list) -> str:
  return f"{path}: {name} = {value!r} is not supported; known: {', '.join(map(repr, known))}"


def _json(path: pathlib.Path) -> Any:
  if not path.is_file():
    raise FileNotFoundError(
      f"{path.parent} has no {path.name}; a sentence encoder needs {_CONFIG}, {_TENSORS}, "
      f"{_MODULES}, the pooling's {_CONFIG} and a tokenizer, as sentence-transformers saves them"
    )
  try:
    return json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON: {error}") from error


def _read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
  path = folder / _TENSORS
  if not path.is_file():
    raise FileNotFoundError(
      f"{folder} has no {_TENSORS}; save the encoder again with sentence-transformers >= 2.3, which "
      "writes one"
    )
  try:
    return safetensors.numpy.load_file(path)
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _tokenizer(folder: pathlib.Path, cfg: bert.BertConfig, reading: Reading) -> tuple[Any, Reading]:
  """The directory's tokenizer, and the reading with the number of tokens settled."""
  import transformers  # seconds; only who loads an encoder pays them

  if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
    raise FileNotFoundError(f"{folder} has no tokenizer: neither tokenizer.json nor vocab.txt")
  tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
  if len(tokenizer) > cfg.vocab:
    raise ValueError(
      f"the tokenizer of {folder} has {len(tokenizer)} tokens, but {_CONFIG} has vocab_size = "
      f"{cfg.vocab}; they do not belong together"
    )
  tokens = reading.max_tokens or min(int(tokenizer.model_max_length), cfg.positions)
  return tokenizer, reading._replace(max_tokens=tokens)


def _fingerprint(
  cfg: bert.BertConfig, params: bert.Params, tokenizer: Any, reading: Reading
) -> str:
  """32 hex digits of everything that changes a vector: equal for a copy that was saved again."""
  backend = tokenizer.backend_tokenizer
  backend.no_truncation()
  backend.no_padding()
  said = [dataclasses.asdict(cfg), reading._asdict(), backend.to_str()]
  digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    digest.update(jax.tree_util.keystr(path).encode())
    digest.update(np.ascontiguousarray(leaf).tobytes())
  return digest.hexdigest()[:32]


# Hugging Face's names. Ours fuse query, key and value, and store a projection as [in, out].

_LINEAR = {
  "out": "attention.output.dense",
  "up": "intermediate.dense",
  "down": "output.dense",
}
_NORMS = {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"}
_QKV = tuple(f"attention.self.{name}" for name in ("query", "key", "value"))
_UNUSED = ("embeddings.position_ids", "embeddings.token_type_ids", "pooler.dense.")


def tensor_shapes(cfg: bert.BertConfig) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor that a file of this encoder must hold."""
  D, M = cfg.dim, cfg.mlp_dim
  wanted = {
    "embeddings.word_embeddings.weight": (cfg.vocab, D),
    "embeddings.position_embeddings.weight": (cfg.positions, D),
    "embeddings.token_type_embeddings.weight": (cfg.token_types, D),
    "embeddings.LayerNorm.weight": (D,),
    "embeddings.LayerNorm.bias": (D,),
  }
  sizes = {"intermediate.dense": (M, D), "output.dense": (D, M)}
  for layer in range(cfg.layers):
    for name in (*_QKV, *_LINEAR.values()):
      out, wide = sizes.get(name, (D, D))
      wanted[f"encoder.layer.{layer}.{name}.weight"] = (out, wide)
      wanted[f"encoder.layer.{layer}.{name}.bias"] = (out,)
    for name in _NORMS.values():
      wanted |= {f"encoder.layer.{layer}.{name}.{part}": (D,) for part in ("weight", "bias")}
  return wanted


def from_tensors(
  cfg: bert.BertConfig, tensors: dict[str, np.ndarray], *, source: str
) -> bert.Params:
  """Params, float32, from Hugging Face's tensors; `source` names the file in errors.

  Raises:
    ValueError: a tensor is missing, of another shape, or not known.
  """
  tensors = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
  wanted = tensor_shapes(cfg)
  missing = sorted(set(wanted) - set(tensors))
  if missing:
    raise ValueError(
      f"{source} lacks {len(missing)} of {len(wanted)} tensors, first {missing[0]}; "
      "does config.json belong to it?"
    )
  for name in sorted(tensors):
    if name not in wanted and not name.startswith(_UNUSED):
      raise ValueError(f"{source} has a tensor that config.json does not name: {name}")
    if name in wanted and tensors[name].shape != wanted[name]:
      raise ValueError(
        f"{source}: {name} has shape {tensors[name].shape}, but config.json asks for {wanted[name]}"
      )

  def get(name):
    return np.asarray(tensors[name], np.float32)

  def norm(name):
    return {part: jnp.asarray(get(f"{name}.{part}")) for part in ("weight", "bias")}

  def linear(*names):
    weight = np.concatenate([get(f"{name}.weight") for name in names]).T
    bias = np.concatenate([get(f"{name}.bias") for name in names])
    return {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}

  def layer(index):
    at = f"encoder.layer.{index}."
    return {
      "qkv": linear(*(at + name for name in _QKV)),
      **{ours: linear(at + theirs) for ours, theirs in _LINEAR.items()},
      **{ours: norm(at + theirs) for ours, theirs in _NORMS.items()},
    }

  return {
    "word": jnp.asarray(get("embeddings.word_embeddings.weight")),
    "position": jnp.asarray(get("embeddings.position_embeddings.weight")),
    "token_type": jnp.asarray(get("embeddings.token_type_embeddings.weight")),
    "norm": norm("embeddings.LayerNorm"),
    "layers": {index: layer(index) for index in range(cfg.layers)},
  }
