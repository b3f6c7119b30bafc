"""What a run would need on chips that are not here: its programs, compiled ahead of time.

    plans = [plan.make(settings, name) for name in ("v5e:4x4", "v5p:4x4x4")]
    print(*plan.table(plans), sep="\n")

The programs are the trainer's and the engine's own, with their kernels, for the mesh of the config over
all chips of the topology; weights are shapes only. What a chip holds while a program runs is

    need = arguments + temporaries + outputs - aliased  +  what is resident and no argument of it

the first four from the compiler, the last counted from shapes and shardings (`learner.Learner`,
`programs.resident`): weights, moments, the weights that training started from, the sampler's copy, its cache.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from memrl_jax import methods
from memrl_jax.rollout import credit
from memrl_jax.sampling import cache, programs
from memrl_jax.sampling.requests import EngineConfig
from memrl_jax.training import ahead, mesh, roofline
from memrl_jax.training import settings as settings_lib

# Shares of a chip's memory above which something is worth a word: what lies there, what a program adds.
LARGE, NOTABLE = 0.4, 0.05


class Program(NamedTuple):
  """One program on one chip: bytes, the work counted by hand, and the roofline's seconds.

  need: bytes on the chip while it runs, residents included. Where a program alone is too large, the
  compiler says only how large: `compiled` is False and the four parts are 0. seconds: None for a chip
  without published peaks.
  """

  compiled: bool
  need: float
  arguments: int
  temporaries: int
  outputs: int
  aliased: int
  flops: float
  memory: float
  sent: float
  host: float
  seconds: float | None
  compile_s: float


class Plan(NamedTuple):
  """One experiment on one topology; everything in bytes is of one chip.

  step_s: roofline of one optimiser step of one micro-batch, old and reference log-probs included.
  context, slots: the largest that the cache has room for, the other one as configured; 0: no room. slots are
  those of each of the `samplers`; decode_tokens_s is that of all of them together.
  change: what to change where it does not fit. notes: what the figures do not say.
  """

  topology: str
  chips: int
  split: roofline.Split
  samplers: int
  parameters: int
  capacity: float
  resident: dict[str, int]
  programs: dict[str, Program]
  need: float
  fits: bool
  step_s: float | None
  step_tokens: int
  decode_tokens_s: float | None
  context: int
  slots: int
  change: list[str]
  notes: list[str]

  def record(self) -> dict[str, Any]:
    """What plan.json holds of it."""
    programs = {name: program._asdict() for name, program in self.programs.items()}
    return self._asdict() | {"split": self.split._asdict(), "programs": programs}


def chip(topology: str, device: jax.Device) -> tuple[float, roofline.Chip | None]:
  """Bytes of memory of a chip, and its published peaks if they are known.

  A card that is here says itself how much a program may take; CPU devices share the memory of their machine.
  """
  if topology != ahead.HERE:
    peaks = roofline.CHIPS[topology.partition(":")[0]]
    return peaks.memory, peaks
  stats = device.memory_stats() or {}
  machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count()
  return float(stats.get("bytes_limit", machine)), roofline.GPUS.get(device.device_kind)


def _program(
  compiled: jax.stages.Compiled | float,
  compile_s: float,
  rest: int,
  work: roofline.Work,
  peaks: roofline.Chip | None,
) -> Program:
  """`rest`: bytes of residents that are no arguments."""
  fitted = not isinstance(compiled, float)
  sizes, total = (0, 0, 0, 0), compiled
  if fitted:
    seen = compiled.memory_analysis()
    names = ("argument", "temp", "output", "alias")
    sizes = tuple(getattr(seen, f"{name}_size_in_bytes") for name in names)
    total = sum(sizes[:3]) - sizes[3]
  seconds = None if peaks is None else work.seconds(peaks)
  return Program(fitted, rest + total, *sizes, *work, seconds, compile_s)


def _own(model: ahead.Model) -> dict[str, tuple[str, ...]]:
  """Residents that are arguments of a program. Where the sampler's weights are a copy, `handed` is."""
  in_place = programs.reads_in_place(model.played)
  return {
    "accumulate": ("weights", "critic", "base"),
    "apply": ("weights", "critic", "moments"),
    "prefill": ("sliced", "cache") if in_place else ("weights", "handed"),
    "decode": ("sliced", "cache") if in_place else ("sliced",),
  }


def _resident(model: ahead.Model, settings: settings_lib.Settings) -> dict[str, int]:
  """Bytes of one chip, by what they are.

  weights: those that are trained, or play; start: what training began from, kept for a KL term or the
  swap test; behind: those that rollouts ahead of it are sampled with; handed: the sampler's, where they are a
  copy (another layout or type, adapters and base as one); sliced: its copy for decoding.
  """
  whole, layers = _bytes(model.whole), _bytes(model.whole["layers"])
  sampler = {}
  stays = not programs.reads_in_place(
    model.played
  )  # else sliced ones take the place of what is handed
  if _samples(settings):
    sampler = {"sliced": _bytes(model.kept.weights), "cache": _bytes(model.kept.cache)}
    sampler |= {"handed": _bytes(model.played)} if model.handed and stays else {}
  if model.state is None:
    return {"weights": whole} | sampler
  params = model.state.params
  trained = {"weights": _bytes(params["policy"]), "moments": _bytes(model.state.opt_state)}
  if "critic" in params:
    trained["critic"] = _bytes(params["critic"])
  trained |= {"start": _bytes(model.start)} if model.start else {}
  if settings.lora.rank:
    trained["base"] = _bytes(model.base)
    sampler |= {"handed": layers} if sampler and stays and not model.handed else {}
  if lag := settings.train.max_lag:  # until an update is done, those of its rollout too
    trained["behind"] = (lag + 1) * trained["weights"]
  return trained | sampler


def _cached(model: ahead.Model) -> int:
  """Bytes of one cached token on one chip."""
  return roofline.kept(model.cfg, model.played_itemsize)


def _bytes(tree: Any, *, host: bool = False) -> int:
  """Of one chip; of what lies in its host's memory only if `host`."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * jnp.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(tree)
    if host or x.sharding.memory_kind != mesh.HOST
  )


def _float32(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=leaf.sharding)


def _samples(settings: settings_lib.Settings) -> bool:
  """Whether the weights are sampled here, not by a server."""
  return not (settings.trains and settings.remote.url)


def _work(
  settings: settings_lib.Settings, model: ahead.Model, split: roofline.Split
) -> dict[str, roofline.Work]:
  """The roofline's count of each program, and of `score`, the log-probs that a step needs beside it."""
  cfg, p, e, size = model.cfg, settings.pack, settings.engine, model.itemsize
  columns, played = e.buckets[-1], (_split(model.sampler), model.played_itemsize)
  in_place = programs.reads_in_place(model.played)
  work = {
    "prefill": roofline.prefill(
      cfg, e.prefill_rows[-1], e.prefill_chunks[-1], columns, *played, in_place=in_place
    ),
    "decode": roofline.decode(cfg, e.slots, e.round_steps, columns, *played, in_place=in_place),
  }
  if model.state is None:
    return work
  trained = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.state.params))
  referred = settings.refers and not settings.reference.wanted
  forwards = (settings.loss.old_logps == "trainer") + referred
  size = jnp.dtype(settings.model.compute).itemsize if settings.model.compute else size
  once = roofline.score(cfg, p, split, size)
  score = roofline.Work(*(forwards * x for x in once))
  if referred and "start" in settings.mesh.offload:
    # Fetched once for all steps of an update.
    start = _bytes(model.start, host=True) / settings.train.minibatches
    score = score._replace(memory=score.memory + start, host=start)
  more = {"remat": settings.model.remat, "critic": "critic" in model.state.params}
  more["sequence"] = settings.mesh.sequence
  return work | {
    "score": score,
    "accumulate": roofline.accumulate(cfg, p, split, size, trained=trained, **more),
    "apply": roofline.apply(
      split,
      trained,
      _bytes(model.state.params),
      _bytes(model.state.opt_state, host=True),
      offloaded="moments" in settings.mesh.offload,
    ),
  }


# The plan.


def check(settings: settings_lib.Settings, topology: str) -> None:
  """ValueError where `make` would raise one about the topology or the mesh; compiles nothing."""
  chips = ahead.devices(topology)
  ahead.replica(settings, topology, ahead.grid(settings, topology, chips), chips)


def make(
  settings: settings_lib.Settings, topology: str, say: Callable[[str], None] = lambda _: None
) -> Plan:
  """Compiles the programs of an experiment for a topology; `say` hears what is being done.

  Raises:
    ValueError: the topology is not known, or the mesh of the config does not fit it.
  """
  chips = ahead.devices(topology)
  made = ahead.grid(settings, topology, chips)
  capacity, peaks = chip(topology, chips[0])
  split, sampler = _split(made), ahead.replica(settings, topology, made, chips)
  say(
    f"{topology}: {len(chips)} chips, data {split.data} x fsdp {split.fsdp} x tensor {split.tensor}, "
    f"{sampler[1]} {'sampler' if sampler[1] == 1 else 'samplers'}"
  )
  model = ahead.model(settings, made, sampler)
  resident, work = _resident(model, settings), _work(settings, model, split)
  found, own = {}, _own(model)
  for lower, section, wanted in (
    (ahead.training, settings.pack, settings.trains),
    (ahead.sampling, settings.engine, _samples(settings)),
  ):
    for name, lowered in lower(model, section).items() if wanted else ():
      say(f"compiling {name} ...")
      rest = sum(size for part, size in resident.items() if part not in own[name])
      found[name] = _program(*ahead.compiled(lowered), rest, work[name], peaks)
  need = max(program.need for program in found.values())
  step_s = decode_rate = None
  if peaks and settings.trains:
    step_s = sum(work[name].seconds(peaks) for name in ("score", "accumulate", "apply"))
  if "decode" in found and peaks:
    tokens = model.samplers * settings.engine.slots * settings.engine.round_steps
    decode_rate = tokens / found["decode"].seconds
  tensor = model.sampler.shape["tensor"]
  heads = tensor if model.cfg.kv_heads % tensor == 0 else 1  # parts of the cache
  context, slots = room(
    {name: program.need for name, program in found.items()},
    capacity,
    settings.engine,
    roofline.kept(model.cfg, model.played_itemsize) / heads,
    in_place=programs.reads_in_place(model.played),
  )
  plan = Plan(
    topology, len(chips), split, model.samplers, model.cfg.parameters, capacity, resident, found, need,
    need <= capacity, step_s, settings.pack.sequences * settings.pack.length, decode_rate, context,
    slots, [], _notes(settings, model, peaks),
  )  # fmt: skip
  return plan if plan.fits else plan._replace(change=advice(plan, settings))


def room(
  need: dict[str, float], capacity: float, config: EngineConfig, token: float, *, in_place: bool
) -> tuple[int, int]:
  """The longest context for the config's slots, and most slots for its context, that fit a chip.

  What is left of each program's `need` without keys and values is shared by the cache and, in decode and
  prefill, the copy that is read, unless the cache is read in place; `token`: bytes of one cached token.
  Temporaries stay as compiled.
  """
  if "decode" not in need:  # sampled elsewhere
    return 0, 0
  S, C, steps = config.slots, config.buckets[-1], config.round_steps
  tile = cache.LINE if in_place else 1
  width = -(-(C + steps) // tile) * tile
  contexts, slots = [], []
  for name, bytes_needed in need.items():
    read = {"decode": S, "prefill": config.prefill_rows[-1]}.get(name, 0)  # rows of the copy
    read = 0 if in_place else read
    left = (capacity - bytes_needed) / token + S * width + read * C
    contexts.append((left + read * steps) / (S + read) // tile * tile - steps)
    copied = read if name == "decode" else 0
    slots.append((left - (read - copied) * C) / (width + (C if copied else 0)))
  return max(0, math.floor(min(contexts))), max(0, math.floor(min(slots)))


def advice(plan: Plan, settings: settings_lib.Settings) -> list[str]:
  """What to change where it does not fit, each a sentence; what concerns the largest part first."""
  e, sequences, resident = settings.engine, settings.pack.sequences, plan.resident
  over = {name: one.need for name, one in plan.programs.items() if one.need > plan.capacity}
  # Of a program: its temporaries and results, and what it reads of the cache.
  own = {name: need - sum(resident.values()) for name, need in over.items()}
  notable = {name for name, size in own.items() if size > NOTABLE * plan.capacity}
  cached = resident.get("cache", 0)
  held = sum(resident.values()) - cached
  found: list[tuple[float, str]] = []
  if cached > LARGE * plan.capacity or "decode" in notable:
    more = f"at most {plan.slots}" if plan.slots else "fewer"
    found.append((cached + own.get("decode", 0), (
      f"the cache takes {_size(cached)}, and decoding {_size(own.get('decode', 0))} more: {more} slots, now "
      f"{e.slots} (config.engine.slots), or contexts shorter than {e.buckets[-1]} (config.engine.buckets)"
    )))  # fmt: skip
  if held > LARGE * plan.capacity:
    more = "" if settings.lora.rank else ", or train adapters in bfloat16 (config.lora.rank)"
    if away := [name for name in mesh.OFFLOAD if resident.get(name, 0) > NOTABLE * plan.capacity]:
      more = f", keep {' and '.join(away)} in the host's memory (config.mesh.offload){more}"
    found.append((held, (
      f"weights, their copies and moments take {_size(held)}: split them over more chips than "
      f"{plan.split.weights} (config.mesh.fsdp, config.mesh.tensor){more}"
    )))  # fmt: skip
  if "accumulate" in notable:
    change = "shorter sequences (config.pack.length), or more chips to each (config.mesh.tensor)"
    if settings.model.remat in ("none", "some"):
      change = f"more recomputation than {settings.model.remat} (config.model.remat)"
    if sequences > plan.split.rows:
      change = f"micro-batches of fewer than {sequences} sequences (config.pack.sequences)"
    if settings.model.dtype == "float32" and not settings.model.compute:
      change += ", or compute in bfloat16 (config.model.compute)"
    if plan.split.tensor > 1 and not settings.mesh.sequence:
      change += ", or split tokens over tensor too (config.mesh.sequence)"
    found.append((own["accumulate"], (
      f"the gradient of a micro-batch takes {_size(own['accumulate'])} more: {change}"
    )))  # fmt: skip
  if "prefill" in notable:
    found.append((own["prefill"], (
      f"a prefill takes {_size(own['prefill'])} more: fewer rows than {e.prefill_rows[-1]}, or chunks shorter than "
      f"{e.prefill_chunks[-1]} (config.engine.prefill_rows, config.engine.prefill_chunks)"
    )))  # fmt: skip
  return [sentence for _, sentence in sorted(found, reverse=True)] or [
    "split the weights over more chips (config.mesh.fsdp)"
  ]


def _split(made: Mesh) -> roofline.Split:
  return roofline.Split(*(made.shape[axis] for axis in mesh.AXES))


def _notes(
  settings: settings_lib.Settings, model: ahead.Model, peaks: roofline.Chip | None
) -> list[str]:
  """What the figures do not say."""
  notes, split, heads = [], _split(model.mesh), model.cfg.kv_heads
  sampler = _split(model.sampler)
  if sampler.rows > 1 and _samples(settings):
    notes.append(
      f"all {sampler.rows} shards of data and fsdp decode the same rows: replicas, each with rows of its own, "
      "would share the work (config.replicas.tensor)"
    )
  for axis in {split.tensor, sampler.tensor}:
    if heads % axis:
      notes.append(
        f"{heads} key-value heads cannot be split over tensor {axis}: every chip of that axis holds all of them"
      )
  for name, held in model.elsewhere.items():
    size = _bytes(held)
    if name == "critic":  # the sums of its gradient, too
      size += _bytes(jax.tree.map(_float32, held.params))
    notes.append(
      f"the {name} has chips of its own (config.{name}.mesh), which are not in this plan: of each it takes "
      f"{_size(size)}, beside the temporaries of its programs"
    )
  offloads = settings.mesh.offload or settings.model.remat == "offload"
  if peaks and peaks.host_rate is None and offloads:
    notes.append(
      "no published rate of this chip's link to its host is known: the seconds take it to be no limit "
      "(config.mesh.offload, config.model.remat)"
    )
  if settings.trains:
    notes += _filled(settings, split.rows)
  if settings.extracts:
    notes.append("the extractor's model is not in this plan (config.extractor)")
  if settings.hints and not settings.agent.remote.url:
    notes.append("the agent's model is not in this plan (config.agent)")
  return notes


def rows(settings: settings_lib.Settings) -> int | None:
  """The most rows of an optimiser step; None where the environment's options do not bound the turns of an
  attempt, or rows are made of other things than played turns."""
  known = {field.name for field in dataclasses.fields(settings.env.options)}
  if "turns" not in known or settings.hints or settings.extracts:
    return None
  train, method = settings.train, settings.method
  turns = methods.turns(method, settings.env.options.turns)
  shape = credit.Shape(train.groups * train.group_size, method.attempts, turns)
  return -(-shape.rows // train.minibatches)


def _filled(settings: settings_lib.Settings, shards: int) -> list[str]:
  """A word where a step cannot put a row in every sequence of one micro-batch; fuller ones are not judged."""
  most, sequences = rows(settings), settings.pack.sequences
  if most is None or most >= sequences:
    return []
  fewer = "" if shards == sequences else ", config.pack.sequences"
  return [
    f"an optimiser step has at most {most} rows for the {sequences} sequences of a micro-batch on {shards} data shards: at "
    f"least {1 - most / sequences:.0%} of them are padding; take fewer, larger steps (config.train.minibatches, now "
    f"{settings.train.minibatches}), larger updates (config.train.groups), or more chips to a sequence "
    f"(config.mesh.tensor{fewer})"
  ]


# To read.


def table(plans: Sequence[Plan]) -> list[str]:
  """One line a topology, then the programs of each and what is to be said about it."""
  lines = [_line(_COLUMNS)]
  for plan in plans:
    compiled = sum(program.compile_s for program in plan.programs.values())
    lines.append(
      _line(
        (
          plan.topology,
          str(plan.chips),
          "x".join(map(str, plan.split)),
          str(plan.samplers),
          f"{_size(plan.need)} of {_size(plan.capacity)}",
          "yes" if plan.fits else "no",
          _seconds(plan.step_s),
          "-" if plan.decode_tokens_s is None else f"{plan.decode_tokens_s:,.0f}",
          str(plan.context),
          str(plan.slots),
          f"{compiled:.0f}",
        )
      )
    )
  for plan in plans:
    parts = ", ".join(f"{part} {_size(size)}" for part, size in plan.resident.items())
    lines += ["", f"{plan.topology}, a chip: resident {parts}", _line(_PARTS)]
    for name, one in plan.programs.items():
      sizes = (one.arguments, one.temporaries, one.outputs, one.aliased)
      shown = [_size(size) if one.compiled else "too large" for size in sizes]
      moved = (_size(size) for size in (one.memory, one.sent, one.host))
      work = (f"{one.flops / 1e12:.3g}", *moved, _seconds(one.seconds))
      lines.append(_line((name, *shown, _size(one.need), *work, f"{one.compile_s:.0f}")))
    lines += [f"change: {sentence}" for sentence in plan.change]
    lines += [f"note: {sentence}" for sentence in plan.notes]
  return lines


_COLUMNS = (
  "topology", "chips", "mesh", "samplers", "needs", "fits", "step s", "tokens/s", "context", "slots", "compile s",
)  # fmt: skip
_PARTS = (
  "program", "arguments", "temporaries", "outputs", "aliased", "needs", "TFLOP", "moves", "sends",
  "host", "seconds", "compile s",
)  # fmt: skip


def _line(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"


def _size(size: float) -> str:
  return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _seconds(seconds: float | None) -> str:
  return "-" if seconds is None else f"{seconds:.3g}"
