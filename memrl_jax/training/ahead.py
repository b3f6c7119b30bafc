"""The programs of a run, compiled for chips that are not here: TPUs of any topology, or what is here.

    chips = ahead.devices("v5p:4x4x4")
    model = ahead.model(settings, ahead.grid(settings, "v5p:4x4x4", chips))
    program, seconds = ahead.compiled(ahead.training(model, settings.pack)["accumulate"])

They are the trainer's and the engine's own, with their kernels, on the mesh of the config. Weights,
moments and batches are shapes that know where they would lie.
"""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import (
  config as _config,
)  # holds the cache switch as a context; jax.config has no such
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from memrl_jax.models import lora, policy, weights
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.sampling import programs
from memrl_jax.sampling.requests import EngineConfig
from memrl_jax.training import mesh, roofline, step
from memrl_jax.training import settings as settings_lib

HERE = "here"  # the topology of the devices of this process
_REPORTED = (
  r"total memory required[^(]*\(([\d.]+)([KMGT]?)\)"  # by the compiler, of what does not fit
)
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def devices(topology: str) -> list[jax.Device]:
  """The chips of "v5p:4x4x4", present or not, or those that are here; ValueError if there are none such."""
  if topology == HERE:
    return jax.devices()
  generation, _, shape = topology.partition(":")
  if generation not in roofline.CHIPS or not re.fullmatch(r"\d+(x\d+)+", shape):
    raise ValueError(
      f"topology {topology!r} is not known; write one of {', '.join(roofline.CHIPS)}, a colon and its shape "
      f"(v5e:4x4, v5p:4x4x4), or {HERE} (--topology)"
    )
  if importlib.util.find_spec("libtpu") is None:
    raise ValueError("a plan for TPUs needs their compiler: pip install libtpu (--topology)")
  os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # or libtpu asks a metadata server that is not there
  os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # or a second process dies on libtpu's lock file
  try:
    return list(topologies.get_topology_desc(topology, platform="tpu").devices)
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f"there is no topology {topology} ({str(error).splitlines()[0]}); choose another shape (--topology)"
    ) from None


def grid(settings: settings_lib.Settings, topology: str, chips: Sequence[jax.Device]) -> Mesh:
  """The mesh of the config over all these chips; ValueError where they do not divide."""
  config, sequences = settings.mesh, settings.pack.sequences
  inner = config.fsdp * config.tensor
  if len(chips) % inner:
    raise ValueError(
      f"the {len(chips)} chips of {topology} cannot be split into fsdp {config.fsdp} x tensor {config.tensor}; "
      f"choose two whose product divides {len(chips)} (config.mesh.fsdp, config.mesh.tensor)"
    )
  made = mesh.make(config, list(chips))
  if made.size != len(chips):
    raise ValueError(
      f"a mesh of data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} leaves {len(chips) - made.size} "
      f"of the {len(chips)} chips of {topology} idle; set config.mesh.data to {len(chips) // inner}, or -1 for "
      "what is left"
    )
  if settings.trains and sequences % mesh.shards(made):
    raise ValueError(
      f"a micro-batch of {sequences} sequences cannot be split over the {mesh.shards(made)} data shards of "
      f"{topology}; choose config.pack.sequences divisible by them, or more config.mesh.tensor"
    )
  return made


class Model(NamedTuple):
  """A model on a mesh as `Learner` and `Engine` hold it, in shapes: what is trained (`state`), what adapters
  change (`base`), what plays (`played`), what the engine keeps for it (`sampler`)."""

  cfg: DecoderConfig
  mesh: Mesh
  trainer: step.Trainer
  state: step.TrainState | None
  base: Any
  played: Any
  sampler: programs.Resident
  itemsize: int


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    shapes,
    shardings,
  )


def _by_rules(made: Mesh, shapes: Any) -> Any:
  return _placed(shapes, mesh.param_shardings(made, shapes))


def model(settings: settings_lib.Settings, made: Mesh) -> Model:
  """The model in shapes."""
  cfg = weights.read_config(settings.model.directory())
  dtype = jnp.dtype(settings.model.dtype)
  plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), policy.shapes(cfg))
  base, trained, adapted = {}, plain, {}
  if settings.lora.rank:
    config = settings.lora
    base = _by_rules(made, jax.eval_shape(lambda p: lora.quantize(p, config), plain))
    trained = jax.eval_shape(lambda: lora.init(jax.random.key(0), cfg, config))
    adapted = {"join": lambda base, trained: lora.attach(base, trained, cfg, config)}
  trainer = step.Trainer(
    cfg,
    settings.loss,
    step.optimiser(settings.optim, settings.train.updates * settings.train.minibatches),
    made,
    max_tokens=settings.pack.response,
    remat=settings_lib.REMAT[settings.model.remat],
    **adapted,
  )
  trainer._base = base  # shapes: its constructor would put them on the mesh
  state = None
  if settings.trains:
    tree = {"policy": trained}
    if settings.credit.estimator == "ppo":
      tree["critic"] = jax.eval_shape(lambda p: step.init_critic(p, cfg), plain)
    moments = jax.eval_shape(trainer._tx.init, tree)
    state = step.TrainState(_by_rules(made, tree), _by_rules(made, moments))
  played = _by_rules(made, plain)
  sampler = programs.resident(cfg, played, settings.engine)
  return Model(cfg, made, trainer, state, base, played, sampler, dtype.itemsize)


def training(model: Model, config: pack.PackConfig) -> dict[str, jax.stages.Lowered]:
  """The gradient of a micro-batch and the optimiser's step."""
  made, trainer, params = model.mesh, model.trainer, model.state.params
  rows = NamedSharding(made, PartitionSpec(("data", "fsdp")))
  empty = pack.empty(config)
  batch = _placed(empty, jax.tree.map(lambda _: rows, empty))
  sums = _by_rules(made, jax.eval_shape(trainer._zeros_fn, params))
  old = batch.behaviour_BSK
  return {
    "accumulate": trainer._accumulate.lower(model.base, params, sums, batch, old, old),
    "apply": trainer._apply.lower(model.state, sums),
  }


def sampling(model: Model, config: EngineConfig) -> dict[str, jax.stages.Lowered]:
  """The largest prefill and the largest round of the engine: all slots, each at the longest context."""
  return programs.lowered(model.cfg, model.played, config)


def compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled | float, float]:
  """The program, or how many bytes it takes where the chip has fewer; and the seconds this took."""
  start = time.perf_counter()
  try:
    # Not from the persistent cache: a program for a chip that is absent cannot be loaded from it.
    with _config.enable_compilation_cache(False):
      made = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    found = re.search(_REPORTED, str(error))
    if "RESOURCE_EXHAUSTED" not in str(error) or found is None:
      raise
    made = float(found[1]) * _UNITS[found[2]]
  return made, time.perf_counter() - start
