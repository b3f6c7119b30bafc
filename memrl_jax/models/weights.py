"""Checkpoints: a directory with `config.json` and safetensors, in one file or several, as Hugging Face's.

Our params fuse what Hugging Face keeps apart (`decoder.Layer`) and stack the layers, and Hugging
Face stores a projection as [out, in]; this file is the only place that knows both layouts. Reading
goes tensor by tensor: the host never holds more than one layer besides the arrays themselves.

Precision. `dtype` is the type of every parameter, and with it of the residual stream, keys and
values. Always float32: the mean square and scale of a norm, rotary angles, attention scores and
their softmax, logits and log-probs. bfloat16 rounds the attention weights once, before they meet
the values.

Letters: L layers, D width, K key-value heads, G query heads per key-value head, d head width.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from memrl_jax.models import huggingface, policy
from memrl_jax.models.config import DecoderConfig

Dtype = Literal["float32", "bfloat16"]
Place = Callable[[Any, jax.ShapeDtypeStruct], jax.sharding.Sharding]

_TENSORS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_OURS = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
_STORAGE = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DTYPES = tuple(_STORAGE)
_READABLE = (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)
_SMALL = 2**26  # bytes of all layers together that may lie on the host at once
# What an export takes along from the directory that the weights came from.
_COMPANIONS = (
  "generation_config.json",
  "tokenizer.json",
  "tokenizer.model",
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "vocab.json",
  "merges.txt",
  "chat_template.jinja",
  "chat_template.json",
  "LICENSE",
  "NOTICE",
)
_CONFIG_COMPANIONS = ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings")


def read_config(path: str | os.PathLike[str]) -> DecoderConfig:
  """The decoder of a checkpoint, without its weights; errors as in `load_directory`."""
  folder = pathlib.Path(path)
  fields = _read_json(folder, _CONFIG)
  return huggingface.config_from_fields(fields, source=str(folder / _CONFIG))


def load_directory(
  path: str | os.PathLike[str], *, dtype: Dtype = "float32", place: Place | None = None
) -> tuple[DecoderConfig, policy.Params]:
  """Read a checkpoint, ours or Hugging Face's; every parameter comes back as `dtype`.

  `place` gives the sharding of a parameter by its path in the params tree and its shape; without
  it, parameters lie on the default device. Raises FileNotFoundError for a missing file, and
  ValueError, in one sentence, for an architecture or field that is not known, or a tensor that is
  missing, unexpected or of the wrong shape.
  """
  folder = pathlib.Path(path)
  cfg = read_config(folder)
  source = folder / (_TENSORS if (folder / _TENSORS).is_file() else _INDEX)
  with _Files(folder) as files:
    plain = huggingface.text_names(files.names)
    return cfg, from_reader(
      cfg,
      plain,
      lambda name: files.read(plain[name]),
      source=str(source),
      dtype=dtype,
      place=place,
    )


def from_reader(
  cfg: DecoderConfig,
  names: Iterable[str],
  read: Callable[[str], np.ndarray],
  *,
  source: str,
  dtype: Dtype = "float32",
  place: Place | None = None,
) -> policy.Params:
  """Params from anything that can hand out tensors by Hugging Face's name, one at a time.

  Args:
    names: the tensors there are, named as in `huggingface.tensor_shapes`.
    read: tensor of a name, in Hugging Face's layout; asked for in the order of the layers.
    source: names the file in errors.

  Raises:
    ValueError: a tensor is missing, unexpected, of the wrong shape or not of floating point.
  """
  if dtype not in _STORAGE:
    raise ValueError(f"parameters cannot be {dtype!r}; choose {' or '.join(_STORAGE)}")
  expected, names = huggingface.tensor_shapes(cfg), set(names)
  _check_names(cfg, expected, names, source)
  storage = _STORAGE[dtype]

  def get(name: str) -> np.ndarray:
    tensor = np.asarray(read(name))
    if tensor.shape != expected[name]:
      raise ValueError(
        f"{source}: {name} has shape {tensor.shape}, but {_CONFIG} asks for {expected[name]}"
      )
    if tensor.dtype not in _READABLE:
      raise ValueError(
        f"{source}: {name} is {tensor.dtype}, which is no plain floating point; load the checkpoint "
        "that was not quantised"
      )
    return tensor

  shapes = _shapes(cfg, storage)
  shardings = jax.tree_util.tree_map_with_path(place or (lambda path, leaf: None), shapes)

  def array(name: str, sharding: jax.sharding.Sharding | None) -> jax.Array:
    table = _empty(expected[name], storage)
    table[...] = get(name)
    return _put(table, sharding)

  params = {"embedding": array(huggingface.EMBEDDING, shardings["embedding"])}
  params["layers"] = _read_layers(cfg, get, shapes["layers"], shardings["layers"])
  final = array(huggingface.FINAL_NORM, shardings["final_norm"]["weight"])
  params["final_norm"] = {"weight": final}
  if not cfg.tie_embeddings:
    params["head"] = array(huggingface.HEAD, shardings["head"])
  elif huggingface.HEAD in names and not np.array_equal(
    read(huggingface.HEAD), read(huggingface.EMBEDDING)
  ):
    raise ValueError(
      f"{source}: {huggingface.HEAD} differs from {huggingface.EMBEDDING}, but {_CONFIG} ties them; "
      "set tie_word_embeddings to false"
    )
  return params


def save_directory(
  path: str | os.PathLike[str],
  cfg: DecoderConfig,
  params: policy.Params,
  *,
  dtype: Dtype = "float32",
  shard_bytes: int = 5 * 10**9,
  source: str | os.PathLike[str] | None = None,
) -> None:
  """Write `cfg` and `params` so that `load_directory`, and transformers, read them back.

  Raises ValueError if no architecture of Hugging Face describes `cfg`.
  """
  save_tensors(path, cfg, tensors(cfg, params), dtype=dtype, shard_bytes=shard_bytes, source=source)


def save_tensors(
  path: str | os.PathLike[str],
  cfg: DecoderConfig,
  named: Iterable[tuple[str, np.ndarray]],
  *,
  dtype: Dtype = "float32",
  shard_bytes: int = 5 * 10**9,
  source: str | os.PathLike[str] | None = None,
) -> None:
  """`save_directory` of what `tensors` gives, of which the host holds no more than one file.

  Up to `shard_bytes` of tensors make one file; more make several and an index. With `source`, the
  directory that the weights came from, its tokenizer, generation config and special token ids go
  along. Each file is written aside and then renamed, so a reader never meets half a file.
  """
  fields = huggingface.fields_from_config(cfg, dtype)
  folder = pathlib.Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  if source is not None:
    fields |= _companions(pathlib.Path(source), folder)
  storage, shapes = _STORAGE[dtype], huggingface.tensor_shapes(cfg)
  size = {name: math.prod(shape) * storage.itemsize for name, shape in shapes.items()}
  files = _plan_files(size, shard_bytes)
  parts: dict[str, np.ndarray] = {}
  for name, tensor in named:
    parts[name] = np.ascontiguousarray(tensor, dtype=storage)
    done = next((file for file, held in files.items() if held == list(parts)), None)
    if done is not None:
      aside = folder / (done + ".part")
      safetensors.numpy.save_file(parts, aside, metadata={"format": "pt"})
      os.replace(aside, folder / done)
      parts = {}
  if len(files) > 1:
    where = {name: file for file, held in files.items() for name in held}
    index = {"metadata": {"total_size": sum(size.values())}, "weight_map": where}
    _write_json(folder / _INDEX, index)
    files[_INDEX] = []
  for stale in folder.glob("model*.safetensors*"):
    if re.fullmatch(_OURS, stale.name) and stale.name not in files:
      stale.unlink(missing_ok=True)
  _write_json(folder / _CONFIG, fields)


def fingerprint(params: policy.Params) -> str:
  """Eight digits that other weights will not share: a checksum over the first values of every array."""
  firsts = [leaf[(0,) * (leaf.ndim - 1)][:64] for leaf in jax.tree.leaves(params)]
  values = (np.asarray(read(first), np.float32).tobytes() for first in firsts)
  return f"{zlib.crc32(b''.join(values)):08x}"


def to_tensors(cfg: DecoderConfig, params: policy.Params) -> dict[str, np.ndarray]:
  """Params -> Hugging Face names and layouts, one tensor a layer and projection."""
  return dict(tensors(cfg, params))


def tensors(cfg: DecoderConfig, params: policy.Params) -> Iterator[tuple[str, np.ndarray]]:
  """`to_tensors`, one at a time and in the order of `huggingface.tensor_shapes`.

  Of params that lie over several hosts all must go through it to the end: each `read` is of all hosts.
  """
  yield huggingface.EMBEDDING, read(params["embedding"])
  for index in range(cfg.layers):
    layer = jax.tree.map(lambda leaf, index=index: read(leaf, index), params["layers"])
    split = _split_layer(cfg, layer)
    for name in huggingface.layer_shapes(cfg):
      yield huggingface.layer_name(index, name), split[name]
  yield huggingface.FINAL_NORM, read(params["final_norm"]["weight"])
  if not cfg.tie_embeddings:
    yield huggingface.HEAD, read(params["head"])


def read(leaf: jax.Array | np.ndarray, index: int | None = None) -> np.ndarray:
  """An array, or one entry of its first axis, on this host.

  Of one that is split over several hosts each gets the whole, and all must ask for the same ones in one order.
  """
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    if not leaf.is_fully_replicated:
      leaf, index = _whole(leaf.sharding.mesh)(leaf, index), None
    leaf = leaf.addressable_data(0)
  return np.asarray(leaf if index is None else leaf[index])


@functools.cache
def _whole(mesh: jax.sharding.Mesh) -> Callable[[jax.Array, int | None], jax.Array]:
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.jit(
    lambda leaf, index: leaf if index is None else leaf[index], out_shardings=everywhere
  )


def _split_layer(cfg: DecoderConfig, layer: policy.Params) -> dict[str, np.ndarray]:
  D, G = cfg.dim, cfg.groups
  split = {
    "self_attn.o_proj.weight": layer["out"].reshape(-1, D).T,
    "mlp.gate_proj.weight": layer["gate_up"][:, 0].T,
    "mlp.up_proj.weight": layer["gate_up"][:, 1].T,
    "mlp.down_proj.weight": layer["down"].T,
  }
  for name, heads in _heads(G).items():
    split[f"self_attn.{name}.weight"] = layer["qkv"][:, :, heads].reshape(D, -1).T
    if cfg.qkv_bias:
      split[f"self_attn.{name}.bias"] = layer["qkv_bias"][:, heads].reshape(-1)
  for ours, theirs in huggingface.norm_names(cfg).items():
    split[theirs] = layer[ours]["weight"]
  return split


def _fuse_layer(cfg: DecoderConfig, get: Callable[[str], np.ndarray], layer: policy.Params) -> None:
  """Inverse of `_split_layer`, into the arrays of `layer`."""
  D, K, G, d = cfg.dim, cfg.kv_heads, cfg.groups, cfg.head_dim
  for name, heads in _heads(G).items():
    tensor = get(f"self_attn.{name}.weight").reshape(K, -1, d, D)
    for k in range(K):
      layer["qkv"][:, k, heads] = tensor[k].transpose(2, 0, 1)
    if cfg.qkv_bias:
      layer["qkv_bias"][:, heads] = get(f"self_attn.{name}.bias").reshape(K, -1, d)
  _transpose(get("self_attn.o_proj.weight"), layer["out"].reshape(-1, D))
  _transpose(get("mlp.gate_proj.weight"), layer["gate_up"][:, 0])
  _transpose(get("mlp.up_proj.weight"), layer["gate_up"][:, 1])
  _transpose(get("mlp.down_proj.weight"), layer["down"])
  for ours, theirs in huggingface.norm_names(cfg).items():
    layer[ours]["weight"][...] = get(theirs)


def _layer_shapes(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
  """The arrays of one layer, without its norms."""
  D, K, G, d, M = cfg.dim, cfg.kv_heads, cfg.groups, cfg.head_dim, cfg.mlp_dim
  shapes = {"qkv": (D, K, G + 2, d), "out": (K, G, d, D), "gate_up": (D, 2, M), "down": (M, D)}
  return shapes | ({"qkv_bias": (K, G + 2, d)} if cfg.qkv_bias else {})


def _shapes(cfg: DecoderConfig, storage: np.dtype) -> policy.Params:
  """`policy.shapes` in another type, without tracing the module, which takes most of a second."""

  def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, storage)

  layers = {name: struct(cfg.layers, *shape) for name, shape in _layer_shapes(cfg).items()}
  for name in huggingface.norm_names(cfg):
    width = cfg.head_dim if name in ("query_norm", "key_norm") else cfg.dim
    layers[name] = {"weight": struct(cfg.layers, width)}
  table = struct(cfg.vocab, cfg.dim)
  return {
    "embedding": table,
    "final_norm": {"weight": struct(cfg.dim)},
    "layers": layers,
    **({} if cfg.tie_embeddings else {"head": table}),
  }


def _heads(G: int) -> dict[str, slice]:
  """Which of the G + 2 heads of a group each projection makes."""
  return {"q_proj": slice(0, G), "k_proj": slice(G, G + 1), "v_proj": slice(G + 1, G + 2)}


def _transpose(tensor: np.ndarray, into: np.ndarray, block: int = 256) -> None:
  # In blocks of rows: a transposed copy of a whole large matrix misses the cache at every element.
  for start in range(0, len(tensor), block):
    into[:, start : start + block] = tensor[start : start + block].T


def _read_layers(
  cfg: DecoderConfig, get: Callable[[str], np.ndarray], shapes: Any, shardings: Any
) -> policy.Params:
  """The stacked layers, filled in place one after the other; all at once where they are small."""
  size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
  count = cfg.layers if size <= _SMALL else 1

  def block(start: int) -> policy.Params:
    arrays = jax.tree.map(lambda leaf: _empty((count, *leaf.shape[1:]), leaf.dtype), shapes)
    for index in range(count):
      _fuse_layer(
        cfg,
        lambda name, layer=start + index: get(huggingface.layer_name(layer, name)),
        jax.tree.map(lambda array, index=index: array[index], arrays),
      )
    return arrays

  if count == cfg.layers:
    return jax.tree.map(_put, block(0), shardings)
  none = {"is_leaf": lambda leaf: leaf is None}
  single = jax.tree.map(_without_leading, shardings, **none)
  placed = shardings if jax.tree.leaves(shardings) else None
  empty = jax.jit(
    lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes),
    out_shardings=placed,
  )
  fill = jax.jit(_fill, donate_argnums=0, out_shardings=placed)
  stack = empty()
  for index in range(cfg.layers):
    stack = fill(stack, jax.tree.map(_put, block(index), single), np.int32(index))
    jax.block_until_ready(stack)  # or the next layers pile up on the host
  return stack


def _without_leading(sharding: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
  """The sharding of a single layer [1, ...], from the stack's."""
  if isinstance(sharding, jax.sharding.NamedSharding):
    spec = jax.sharding.PartitionSpec(None, *sharding.spec[1:])
    return jax.sharding.NamedSharding(sharding.mesh, spec)
  return sharding


def _fill(stack: policy.Params, layer: policy.Params, index: jax.Array) -> policy.Params:
  return jax.tree.map(
    lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, index, 0), stack, layer
  )


def _empty(shape: tuple[int, ...], storage: np.dtype) -> np.ndarray:
  """Memory that begins at a multiple of 64: the CPU backend then takes it over without a copy."""
  size = math.prod(shape) * storage.itemsize
  raw = np.empty(size + 64, np.uint8)
  start = -raw.ctypes.data % 64
  return raw[start : start + size].view(storage).reshape(shape)


def _put(tensor: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
  if sharding is None:
    return jnp.asarray(tensor)
  return jax.make_array_from_callback(tensor.shape, sharding, lambda index: tensor[index])


def _check_names(
  cfg: DecoderConfig, expected: dict[str, Any], names: set[str], source: str
) -> None:
  missing = [name for name in expected if name not in names]
  if missing:
    raise ValueError(
      f"{source} lacks {len(missing)} of {len(expected)} tensors, first {missing[0]}; "
      f"does {_CONFIG} belong to it?"
    )
  tied = {huggingface.HEAD} if cfg.tie_embeddings else set()
  unexpected = sorted(names - set(expected) - tied)
  if unexpected:
    raise ValueError(
      f"{source} has {len(unexpected)} tensors that {_CONFIG} does not name, first {unexpected[0]}"
    )


class _Files:
  """The safetensors of a directory; at most one is open, so that the pages of the others are free."""

  def __init__(self, folder: pathlib.Path):
    self._folder, self._file, self._open = folder, "", contextlib.ExitStack()
    if (folder / _TENSORS).is_file():
      self._where = dict.fromkeys(self._names(_TENSORS), _TENSORS)
      return
    if not (folder / _INDEX).is_file():
      raise FileNotFoundError(
        f"{folder} has no {_TENSORS} and no {_INDEX}; a checkpoint needs {_CONFIG} and one of them"
      )
    self._where = _read_json(folder, _INDEX).get("weight_map")
    if not isinstance(self._where, dict) or not self._where:
      raise ValueError(f"{folder / _INDEX} has no weight_map")
    for file in sorted(set(self._where.values())):
      promised = {name for name, where in self._where.items() if where == file}
      if not (folder / file).is_file():
        raise FileNotFoundError(
          f"{folder} has no {file}, where {_INDEX} puts {len(promised)} tensors, first "
          f"{min(promised)}; fetch that file again"
        )
      lost = promised - set(self._names(file))
      if lost:
        raise ValueError(f"{folder / file} lacks {min(lost)}, which {_INDEX} puts there")

  @property
  def names(self) -> list[str]:
    return list(self._where)

  def read(self, name: str) -> np.ndarray:
    return self._reader(self._where[name]).get_tensor(name)

  def _names(self, file: str) -> list[str]:
    return list(self._reader(file).keys())

  def _reader(self, file: str) -> Any:
    if file != self._file:
      self._open.close()
      try:
        opened = safetensors.safe_open(self._folder / file, framework="numpy")
      except safetensors.SafetensorError as error:
        raise ValueError(
          f"{self._folder / file} is not a safetensors file, or was cut short: {error}"
        ) from error
      self._current, self._file = self._open.enter_context(opened), file
    return self._current

  def __enter__(self) -> _Files:
    return self

  def __exit__(self, *error: Any) -> None:
    self._open.close()


def _plan_files(size: dict[str, int], shard_bytes: int) -> dict[str, list[str]]:
  """File -> its tensors, in order; a tensor larger than `shard_bytes` has a file of its own."""
  groups: list[list[str]] = [[]]
  room = shard_bytes
  for name, needed in size.items():
    if needed > room and groups[-1]:
      groups.append([])
      room = shard_bytes
    groups[-1].append(name)
    room -= needed
  if len(groups) == 1:
    return {_TENSORS: groups[0]}
  return {
    f"model-{number:05}-of-{len(groups):05}.safetensors": group
    for number, group in enumerate(groups, 1)
  }


def _companions(source: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
  """Copies the files beside the weights; returns the fields of config.json that go along."""
  for name in _COMPANIONS:
    if (source / name).is_file() and source.resolve() != folder.resolve():
      shutil.copyfile(source / name, folder / name)
  fields = _read_json(source, _CONFIG)
  fields = fields | (fields.get("text_config") or {})
  return {name: fields[name] for name in _CONFIG_COMPANIONS if fields.get(name) is not None}


def _read_json(folder: pathlib.Path, name: str) -> dict[str, Any]:
  if not (folder / name).is_file():
    raise FileNotFoundError(f"{folder} has no {name}; a checkpoint needs {_CONFIG} and {_TENSORS}")
  try:
    return json.loads((folder / name).read_text("utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{folder / name} is not JSON: {error}") from error


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
  aside = path.with_name(path.name + ".part")
  aside.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")
  os.replace(aside, path)
