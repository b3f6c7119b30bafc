"""The programs of a run, compiled for chips that are not here: TPUs of any topology, or what is here.

    chips = ahead.devices("v5p:4x4x4")
    model = ahead.model(settings, ahead.grid(settings, "v5p:4x4x4", chips))
    program, seconds = ahead.compiled(ahead.training(model, settings.pack)["accumulate"])

They are the trainer's and the engine's own, with their kernels, on the mesh of the config. Weights,
moments and batches are shapes that know where they would lie.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import (
  config as _config,
)  # holds the cache switch as a context; jax.config has no such
from jax.experimental import topologies
from jax.sharding import Mesh

from memrl_jax.models import lora, policy, weights
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.sampling import programs
from memrl_jax.sampling.requests import EngineConfig
from memrl_jax.training import apart, handover, mesh, precision, roofline, sections, step
from memrl_jax.training import settings as settings_lib

HERE = "here"  # the topology of the devices of this process
HOSTS = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}  # the chips of one host of a larger topology
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


def replica(
  settings: settings_lib.Settings, topology: str, made: Mesh, chips: Sequence[jax.Device]
) -> tuple[Mesh, int]:
  """The mesh of one sampler, and how many of them there are; ValueError as `handover.grid`.

  The compiler takes programs for all chips of a topology only, so that of one host stands for a host's.
  """
  grid = handover.grid(settings.replicas, made, list(chips))
  if grid is None:
    return made, 1
  one, tensor = grid.devices[:1], grid.shape["tensor"]
  if topology != HERE and tensor < len(chips):
    generation = topology.partition(":")[0]
    one = np.array(devices(f"{generation}:{HOSTS[generation]}")[:tensor]).reshape(1, 1, -1)
  return Mesh(one, mesh.AXES, axis_types=grid.axis_types), len(grid.devices)


class Model(NamedTuple):
  """A model as `Learner` and `Engine` hold it, in shapes: on the mesh that trains, what is trained (`state`),
  what is kept of its beginning (`start`), what adapters change (`base`) and the whole weights (`whole`); on that
  of one sampler, what plays (`played`) and what the engine keeps for it (`kept`). `handed`: whether what plays is
  a copy. `elsewhere`: what a reference or a critic holds on a mesh of its own."""

  cfg: DecoderConfig
  mesh: Mesh
  sampler: Mesh
  samplers: int
  trainer: step.Trainer
  state: step.TrainState | None
  start: Any
  base: Any
  whole: Any
  played: Any
  kept: programs.Resident
  handed: bool
  itemsize: int  # of the trained weights
  elsewhere: dict[str, Any]

  @property
  def played_itemsize(self) -> int:
    """Bytes of a number of the sampler's weights and cache."""
    return self.played["embedding"].dtype.itemsize


def _placed(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    shapes,
    shardings,
  )


def model(settings: settings_lib.Settings, made: Mesh, sampler: tuple[Mesh, int]) -> Model:
  """The model in shapes."""
  cfg = weights.read_config(settings.model.directory())
  dtype = jnp.dtype(settings.model.dtype)
  plain = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), policy.shapes(cfg))
  base, trained, adapted = {}, plain, {}
  if settings.lora.rank:
    config = settings.lora
    base = jax.eval_shape(lambda p: lora.quantize(p, config), plain)
    base = mesh.place_params(made, base, settings.mesh.table)
    trained = jax.eval_shape(lambda: lora.init(jax.random.key(0), cfg, config))
    adapted = {"base": base, "join": lambda base, trained: lora.attach(base, trained, cfg, config)}

  def trains(where: Mesh, layout: mesh.MeshConfig) -> step.Trainer:
    return step.Trainer(
      cfg,
      settings.loss,
      step.optimiser(settings.optim, settings.train.updates * settings.train.minibatches),
      where,
      max_tokens=settings.pack.response,
      remat=sections.REMAT[settings.model.remat],
      compute=settings.model.compute,
      update=settings.optim.update,
      layout=layout,
      **adapted,
    )

  trainer = trains(made, settings.mesh)
  state, start, elsewhere = None, {}, {}
  if settings.trains:
    critic = None
    if settings.credit.estimator == "ppo":
      critic = jax.eval_shape(lambda p: step.init_critic(p, cfg), plain)
    if settings.critic.wanted:
      elsewhere["critic"] = trains(*_elsewhere("critic", settings.critic, made)).init(None, critic)
      critic = None
    state = trainer.init(trained, critic)
    keeper, layout = made, settings.mesh
    if settings.reference.wanted:
      keeper, layout = _elsewhere("reference", settings.reference, made)
    memory = mesh.HOST if "start" in layout.offload else None
    start = mesh.place_params(keeper, _start(settings, plain, trained), layout.table, memory=memory)
    if settings.reference.wanted:
      elsewhere["reference"], start = start, {}
  where, samplers = sampler
  handed = where is not made or bool(settings.replicas.dtype)
  dtypes = jnp.dtype(settings.replicas.dtype or dtype)
  cast = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtypes), plain)
  played = mesh.place_params(where, cast, settings.mesh.table if where is made else mesh.RULES)
  whole = mesh.place_params(made, plain, settings.mesh.table)
  kept = programs.resident(cfg, played, settings.engine)
  shapes = (state, start, base, whole, played, kept)
  return Model(cfg, made, where, samplers, trainer, *shapes, handed, dtype.itemsize, elsewhere)


def _start(settings: settings_lib.Settings, plain: Any, trained: Any) -> dict[str, Any]:
  """What is kept of the weights that training begins from, as `Learner` does; {} where nobody reads them."""
  kept = jax.eval_shape(lambda p: precision.kept(p, settings.model.compute), plain)
  if not settings.lora.rank:
    return kept if settings.refers or settings.rereads else {}
  # Adapters; and with them merged in what has any: the rest is the base's.
  refers = {"adapters": trained} if settings.refers else {}
  return refers | ({"layers": kept["layers"]} if settings.rereads else {})


def _elsewhere(name: str, config: apart.ApartConfig, made: Mesh) -> tuple[Mesh, mesh.MeshConfig]:
  """A mesh of other chips than those of `made`, for which these stand in: what one of them holds is the same."""
  layout = dataclasses.replace(config.mesh, first=0)
  return apart.make(name, layout, list(made.devices.flat)), layout


def training(model: Model, config: pack.PackConfig) -> dict[str, jax.stages.Lowered]:
  """The gradient of a micro-batch and the optimiser's step."""
  empty = pack.empty(config)
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), empty)
  return model.trainer.lowered(model.state, batch)


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
