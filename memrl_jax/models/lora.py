"""LoRA: low-rank changes of chosen weights, trained while the base stays as it is.

    W' = W + s A B,   A [in, r], B [r, out],   s = alpha / r,  or alpha / sqrt(r) if rank-stabilised

Hu et al. (2106.09685) Eq. 3; the scale over sqrt(r) is Kalajdzievski (2312.03732) Eq. 7. The adapters
are a tree of their own, {target: {"a", "b"}}, and the only thing that is trained and saved:

    adapters = init(key, cfg, config)
    params = attach(base, adapters, cfg, config)      inside the loss: any function of policy takes it
    params = merge(base, adapters, cfg, config)       for the sampler, and for export

`attach` writes W' out one layer at a time, when the layer reads it; with `remat` the backward pass
does so again, and neither W' nor its gradient ever exists for all layers together. `merge` writes out
all of it. Both give the same function. The price is the weight gradient's matmuls of full training.

QLoRA (Dettmers et al., 2305.14314): `quantize` stores the base's matrices in 8 or 4 bits, in blocks
with a scale each, by `qwix`; both functions above read them. (qwix's own LoRA wraps the matmuls it
sees inside a module's `__call__`, and does not see those of a decoder that reads fused weights through
a reshape, under a scan: it adds no adapter and says nothing.)

Letters: L layers, D width, V vocabulary, r rank; each target's own axes stand in `decoder.Layer`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from memrl_jax.models import policy, weights
from memrl_jax.models.config import DecoderConfig

Adapters = dict[str, dict[str, jax.Array]]

INPUTS = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}  # how many of a matrix's axes are its input
TARGETS = (*INPUTS, "head")
BASES = ("float", "int8", "nf4")
FILE = "adapters.safetensors"  # beside nothing else: no directory that a model is loaded from


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Which weights get adapters of which rank; rank 0 trains all weights, without adapters.

  Projections that are fused in one weight share their A: `qkv` and `gate_up` are one target each.
  base: how the frozen matrices are kept; block: weights that share a scale there.
  """

  rank: int = 0
  alpha: float = 16.0
  targets: tuple[str, ...] = tuple(INPUTS)
  rank_stabilised: bool = False
  base: str = "float"
  block: int = 64

  def __post_init__(self):
    if self.rank < 0 or not self.alpha > 0 or self.block < 1:
      raise ValueError(
        f"LoRA needs rank >= 0 (0: off), alpha > 0 and block >= 1, not rank = {self.rank}, alpha = "
        f"{self.alpha}, block = {self.block} (config.lora)"
      )
    for target in self.targets:
      if target not in TARGETS:
        raise ValueError(
          f"LoRA target {target!r} is not known; choose from {', '.join(TARGETS)} "
          "(config.lora.targets)"
        )
    if not self.targets or len(set(self.targets)) < len(self.targets):
      raise ValueError(
        f"LoRA needs at least one target, each named once, not {self.targets} (config.lora.targets)"
      )
    if self.base not in BASES:
      raise ValueError(
        f"base {self.base!r} is not known; choose one of {', '.join(BASES)} (config.lora.base)"
      )
    if self.base != "float" and not self.rank:
      raise ValueError(
        f"a base in {self.base} cannot be trained itself; set config.lora.rank or use base = 'float'"
      )

  @property
  def scale(self) -> float:
    """s, the factor of A B; needs rank >= 1."""
    return self.alpha / (math.sqrt(self.rank) if self.rank_stabilised else self.rank)


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("weight", "a", "b"),
  meta_fields=("scale", "inputs"),
)
@dataclasses.dataclass(frozen=True)
class LowRank:
  """A weight that is written out when it is read: `leaf[...]` is W + s A B, of one layer or of all.

  Modules read their weights as `self.qkv[...]`, and scans slice every array in here, so it stands in
  a params tree where an array stood. `weight` may be quantized; without adapters, a and b are None.
  """

  weight: Any
  a: jax.Array | None
  b: jax.Array | None
  scale: float
  inputs: int

  def __getitem__(self, index: Any) -> jax.Array:
    if index is not Ellipsis:
      raise TypeError(f"a weight with adapters is read whole, as w[...], not w[{index!r}]")
    weight = _dense(self.weight)
    if self.a is None:
      return weight
    lead, r = self.a.shape[: -1 - self.inputs], self.a.shape[-1]
    change = self.a.reshape(*lead, -1, r) @ self.b.reshape(*lead, r, -1)
    wide = weight.astype(jnp.float32) + self.scale * change.reshape(weight.shape)
    return wide.astype(weight.dtype)


def check(cfg: DecoderConfig, config: LoraConfig) -> None:
  """Whether a model can have these adapters; reads no weights.

  Raises:
    ValueError: a rank above a target's smaller side, a head that is the embedding, or a block that
      does not divide the axis of a quantized weight.
  """
  for target in config.targets:
    _, wide, out = _sides(cfg, target)
    rows, columns = math.prod(wide), math.prod(out)
    if not 1 <= config.rank <= min(rows, columns):
      raise ValueError(
        f"LoRA rank {config.rank} does not lie between 1 and {min(rows, columns)}, the smaller side "
        f"of {target} ({rows} x {columns}) (config.lora.rank)"
      )
  if config.base != "float":
    for name, inputs in INPUTS.items():
      _block(name, policy.shapes(cfg)["layers"][name].shape[inputs], config)


def _block(name: str, size: int, config: LoraConfig) -> int:
  """How many of a weight's `size` inputs share a scale."""
  block = min(config.block, size)
  if size % block:
    raise ValueError(
      f"blocks of {block} weights do not divide the {size} inputs of {name}; choose a divisor "
      "(config.lora.block)"
    )
  return block


def init(key: jax.Array, cfg: DecoderConfig, config: LoraConfig) -> Adapters:
  """Float32 adapters that change nothing yet: B = 0, A uniform within in^-1/2 (as PEFT draws it).

  Raises:
    ValueError: as `check`.
  """
  check(cfg, config)
  adapters = {}
  for index, target in enumerate(config.targets):
    lead, wide, out = _sides(cfg, target)
    rows = math.prod(wide)
    low, high = -(rows**-0.5), rows**-0.5
    shape = (*lead, *wide, config.rank)
    a = jax.random.uniform(jax.random.fold_in(key, index), shape, minval=low, maxval=high)
    adapters[target] = {"a": a, "b": jnp.zeros((*lead, config.rank, *out))}
  return adapters


def count(adapters: Adapters) -> int:
  """Number of trained weights."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(adapters))


def attach(
  base: policy.Params, adapters: Adapters, cfg: DecoderConfig, config: LoraConfig
) -> policy.Params:
  """Params of the changed function, each layer's weights written out when the layer reads them.

  Gradients with respect to `adapters` pass through. The head, one table, is written out at once.
  """
  _check(adapters, cfg, config)
  layers = dict(base["layers"])
  for name, inputs in INPUTS.items():
    pair = adapters.get(name, {"a": None, "b": None})
    if name in adapters or not _is_float(layers[name]):
      scale = config.scale if name in adapters else 0.0
      layers[name] = LowRank(layers[name], pair["a"], pair["b"], scale, inputs)
  params = {**base, "layers": layers}
  if "head" in adapters:
    pair = adapters["head"]
    turned = LowRank(base["head"].T, pair["a"], pair["b"], config.scale, 1)
    params["head"] = turned[...].T
  return params


def merge(
  base: policy.Params, adapters: Adapters, cfg: DecoderConfig, config: LoraConfig
) -> policy.Params:
  """Plain arrays of the changed function, of the base's dtype: what a sampler or a file wants."""
  return dense(attach(base, adapters, cfg, config))


_merge = jax.jit(merge, static_argnames=("cfg", "config"))


def dense(params: policy.Params) -> policy.Params:
  """Params with every weight written out."""

  def is_leaf(leaf):
    return isinstance(leaf, LowRank)

  return jax.tree.map(lambda leaf: leaf[...] if is_leaf(leaf) else leaf, params, is_leaf=is_leaf)


def quantize(params: policy.Params, config: LoraConfig) -> policy.Params:
  """The base with its layers' matrices in `config.base`: "int8", or the 16 levels of "nf4".

      w ~ level[q] * scale,   scale = max |w| / max level, over `block` weights along an input axis

  The rest (embedding, head, norms, biases) stays. With base "float" this is the identity.

  Raises:
    ImportError: qwix is not installed.
    ValueError: a block does not divide the axis that it lies on.
  """
  if config.base == "float":
    return params
  qwix = _qwix()
  layers = dict(params["layers"])
  for name, inputs in INPUTS.items():
    weight = layers[name]
    axis = inputs  # the last input axis; axis 0 is the layer
    block = _block(name, weight.shape[axis], config)
    others = [other for other in range(weight.ndim) if other != axis]
    layers[name] = qwix.quantize(
      weight, config.base, tiled_axes={axis: block}, channelwise_axes=others
    )
  return {**params, "layers": layers}


def save(path: str | os.PathLike[str], adapters: Adapters, config: LoraConfig, base: str) -> None:
  """Writes adapters alone, with what says how to merge them, and into what: weights whose fingerprint is `base`."""
  folder = pathlib.Path(path)
  folder.mkdir(parents=True, exist_ok=True)
  flat = {
    f"{t}.{part}": weights.read(leaf) for t, pair in adapters.items() for part, leaf in pair.items()
  }
  said = {"config": json.dumps(dataclasses.asdict(config)), "base": base}
  aside = folder / (FILE + ".part")
  safetensors.numpy.save_file(flat, aside, metadata=said)
  os.replace(aside, folder / FILE)


def load_merged(
  path: str | os.PathLike[str], base: policy.Params, cfg: DecoderConfig
) -> policy.Params:
  """`merge` of the adapters that `save` wrote there, into weights that are not yet quantized.

  Raises:
    ValueError: they belong to another base or another model.
  """
  with safetensors.safe_open(pathlib.Path(path) / FILE, "numpy") as file:
    said, flat = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  if said["base"] != (here := weights.fingerprint(base)):
    raise ValueError(
      f"the adapters in {path} are of the weights {said['base']} and these are {here}; start from the same "
      "checkpoint in the same precision, or send whole weights (config.remote.adapters=false)"
    )
  fields = json.loads(said["config"])
  config = LoraConfig(**fields | {"targets": tuple(fields["targets"])})
  adapters: Adapters = {}
  for name, leaf in flat.items():
    target, _, part = name.partition(".")
    adapters.setdefault(target, {})[part] = jnp.asarray(leaf)
  return _merge(quantize(base, config), adapters, cfg, config)


def _sides(cfg: DecoderConfig, target: str) -> tuple[tuple[int, ...], ...]:
  """A target's shape in three parts: layers, input axes, output axes."""
  if target == "head":
    if cfg.tie_embeddings:
      raise ValueError(
        "this model's head is its input embedding: adapters on it would change both; leave 'head' "
        "out of config.lora.targets"
      )
    return (), (cfg.dim,), (cfg.vocab,)
  shape, inputs = policy.shapes(cfg)["layers"][target].shape, INPUTS[target]
  return shape[:1], shape[1 : 1 + inputs], shape[1 + inputs :]


def _check(adapters: Adapters, cfg: DecoderConfig, config: LoraConfig) -> None:
  """Adapters of another config (an old checkpoint, say) are named, not broadcast."""
  if set(adapters) != set(config.targets):
    raise ValueError(
      f"the adapters are of {', '.join(sorted(adapters))}, but config.lora.targets names "
      f"{', '.join(sorted(config.targets))}"
    )
  for target, pair in adapters.items():
    lead, wide, out = _sides(cfg, target)
    wanted = {"a": (*lead, *wide, config.rank), "b": (*lead, config.rank, *out)}
    for name, shape in wanted.items():
      if pair[name].shape != shape:
        raise ValueError(
          f"adapter {target}.{name} has shape {pair[name].shape}; this model and config.lora.rank = "
          f"{config.rank} need {shape}"
        )


def _is_float(weight: Any) -> bool:
  return isinstance(weight, jax.Array | np.ndarray)


def _dense(weight: Any) -> jax.Array:
  return weight if _is_float(weight) else _qwix().dequantize(weight)


def _qwix() -> Any:
  try:
    import qwix  # optional, and slow to import: only a quantized base needs it
  except ImportError as error:
    raise ImportError(
      "a quantized base needs qwix: pip install qwix, or set config.lora.base = 'float'"
    ) from error
  return qwix
