"""One language model of a run: its weights, its words, what samples with it and what trains it.

A run has one, or, where a second model writes the memory, two, each on a mesh of its own. It is a `Learner`,
sampled by an engine of this process or by a server that is handed the weights; or it is `Served`: nothing of
it is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from memrl_jax.models import lora, weights
from memrl_jax.rollout import pack, policies
from memrl_jax.sampling import engine, remote, replicas, requests
from memrl_jax.training import (
  apart,
  handover,
  hosts,
  mesh,
  objective,
  precision,
  sections,
  servers,
)
from memrl_jax.training import step as steps
from memrl_jax.types import Turn


class Parts(Protocol):
  """The sections of the settings that make a model."""

  model: sections.ModelSettings
  lora: lora.LoraConfig
  engine: engine.EngineConfig
  loss: objective.LossConfig
  optim: steps.OptimConfig
  pack: pack.PackConfig
  mesh: mesh.MeshConfig
  replicas: handover.ReplicaConfig


@dataclasses.dataclass(frozen=True)
class Frozen:
  """The `Parts` of a model that is never trained."""

  model: sections.ModelSettings
  engine: engine.EngineConfig
  mesh: mesh.MeshConfig
  replicas: handover.ReplicaConfig
  lora: lora.LoraConfig = dataclasses.field(default_factory=lora.LoraConfig)
  loss: objective.LossConfig = dataclasses.field(default_factory=objective.LossConfig)
  optim: steps.OptimConfig = dataclasses.field(default_factory=steps.OptimConfig)
  pack: pack.PackConfig = dataclasses.field(default_factory=pack.PackConfig)


def frozen(agent: sections.AgentSettings) -> Frozen:
  """The `Parts` of a frozen agent."""
  return Frozen(agent.model, agent.engine, agent.mesh, agent.replicas)


def devices(parts: Parts) -> list[jax.Device]:
  """Those that its mesh and its replicas count: of all hosts, or of this one, for an agent is on each host."""
  return jax.local_devices() if isinstance(parts, Frozen) else jax.devices()


class Learner:
  """A model and how it is trained; `state` is what training changes.

  `initial` are the weights it comes with, kept where somebody is to read them; `start` what training begins
  from and a KL term refers to (with adapters: theirs), or, once it was `anchored`, what it was then, and None
  without a KL term. Both are kept in the dtype that training computes in, on the mesh of the reference, where
  its `offload` says. `client` is the server that samples; without one an `engine` here does.
  """

  def __init__(
    self,
    parts: Parts,
    *,
    seed: int,
    total: int,
    frozen: bool,
    critic: bool = False,
    keep: bool = False,
    client: remote.Client | None = None,
    first: tuple[int, float] | None = None,
    initial: bool = False,
    places: apart.Apart = apart.TOGETHER,
  ):
    """`total`: optimiser steps, for the schedule. `keep`: an old `state` stays readable after an update.

    first: it is taught in so many steps, with a rate of their own, and anchored before the others. initial:
    whether `initial` is going to be read, once training is under way. places: what has a mesh of its own.
    """
    self.parts, self.frozen, self.client = parts, frozen, client
    refers = parts.loss.kl_coef > 0 and total > 0 and not frozen
    self._anchors = refers and first is not None
    self._pushed: Any = None  # the params that the server has
    there = devices(parts)
    self.mesh = mesh.make(parts.mesh, there)
    reference, valuer = places.grids(self.mesh, parts.pack.sequences)
    self._kept = (self.mesh, parts.mesh)
    if reference is not None:
      self._kept = (reference, places.reference.mesh)
    place = mesh.placement(self.mesh, parts.mesh.table)
    folder, dtype = parts.model.directory(), parts.model.dtype
    self.cfg, loaded = weights.load_directory(folder, dtype=dtype, place=place)
    self.chat = parts.model.chat()
    played = handover.grid(parts.replicas, self.mesh, there)
    self._handover = handover.Handover(parts.replicas, played)
    self.engine = None if client else self.sampler(loaded)
    start, adapted = loaded, {}
    if parts.lora.rank:
      loaded, start, adapted = self._adapt(loaded, seed)

    def trainer(made: Any, layout: mesh.MeshConfig, models: Sequence[str]) -> steps.Trainer:
      return steps.Trainer(
        self.cfg,
        parts.loss,
        steps.optimiser(parts.optim, total, first or (0, 0.0), models),
        made,
        max_tokens=parts.pack.response,
        remat=sections.REMAT[parts.model.remat],
        keep=keep,
        compute=parts.model.compute,
        update=parts.optim.update,
        layout=layout,
        **adapted,
      )

    models = steps.MODELS if valuer is None else ("policy",)
    self.trainer = trainer(self.mesh, parts.mesh, models)
    self._refer = self.trainer.score
    if reference is not None:
      scorer = trainer(reference, places.reference.mesh, models)
      self._refer = apart.Reference(scorer, self.mesh).score
    if valuer is not None:
      other = trainer(valuer, places.critic.mesh, ("critic",))
      self.trainer = apart.Pair(self.trainer, other)
    if frozen:  # needs no optimiser, nor a copy of its weights
      self.state = steps.TrainState({"policy": loaded}, None)
      self._initial, self.start = loaded, None
      return
    value = steps.init_critic(loaded, self.cfg) if critic else None
    self.state = self.trainer.init(start, value)
    if parts.lora.rank:
      start = mesh.place_params(self.mesh, start, parts.mesh.table)
    self.start, self._initial = self._stored(start) if refers else None, None
    if initial:  # kept once where both are the same
      same = refers and start is loaded
      self._initial = self.start if same else self._stored(loaded)

  def _adapt(self, initial: Any, seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """The weights that adapters start from, the adapters, and what the trainer needs to train them only."""
    config = self.parts.lora
    self._adapted = weights.fingerprint(initial)  # what the adapters belong to
    base = lora.quantize(initial, config)
    start = lora.init(jax.random.key(seed), self.cfg, config)
    initial = lora.dense(lora.attach(base, start, self.cfg, config))
    self._merge = jax.jit(lambda base, trained: lora.merge(base, trained, self.cfg, config))
    self._base = base
    join = {"base": base, "join": lambda b, trained: lora.attach(b, trained, self.cfg, config)}
    return initial, start, join

  @property
  def initial(self) -> Any:
    """The weights it came with, rounded to what training computes in, in their own dtype."""
    if self._initial is None:
      raise ValueError("nobody was to read the initial weights, so they were not kept")
    dtype, params = self.parts.model.dtype, self._fetched(self._initial)
    if self._kept[0] is not self.mesh:
      params = mesh.place_params(self.mesh, params, self.parts.mesh.table)
    if not self.parts.model.compute or self.frozen:
      return params
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

  def _stored(self, params: Any) -> Any:
    """Weights as they are kept that are not trained: a pass of the trainer makes the same of them."""
    kept = precision.kept(params, self.parts.model.compute)
    made, layout = self._kept
    if made is not self.mesh:
      kept = mesh.place_params(made, kept, layout.table)
    return self._in(mesh.HOST, kept)

  def _fetched(self, params: Any) -> Any:
    """What was `_stored`, where a program of that mesh can read it."""
    return params if self.frozen else self._in(mesh.DEVICE, params)

  def _in(self, memory: str, params: Any) -> Any:
    made, layout = self._kept
    if "start" not in layout.offload:
      return params
    return mesh.place_params(made, params, layout.table, memory=memory)

  @property
  def context(self) -> int:
    """The longest prompt and answer together, tokens."""
    return max(self.parts.engine.buckets)

  @property
  def params(self) -> Any:
    """The policy's weights, adapters merged in."""
    return self._merged(self.trained)

  @property
  def trained(self) -> Any:
    """What training changes of the policy: all its weights, or its adapters. The next update consumes it."""
    return self.state.params["policy"]

  def _merged(self, trained: Any) -> Any:
    return self._merge(self._base, trained) if self.parts.lora.rank else trained

  def sampler(self, params: Any) -> engine.Engine | replicas.Replicas:
    """A new sampler with these weights, where config.replicas says."""
    views, config = self._handover(params), self.parts.engine
    if len(views) == 1:
      return engine.Engine(self.cfg, views[0], config)
    return replicas.Replicas(self.cfg, views, config)

  def hand(self, sampler: engine.Engine | replicas.Replicas, params: Any) -> None:
    """Gives a sampler other weights; it starts afresh: nothing depends on what it did before."""
    _give(sampler, self._handover(params))

  def policy(
    self, sampling: policies.SamplingConfig, sampler: requests.Sampler | None = None
  ) -> policies.LanguagePolicy | policies.RemotePolicy:
    """The weights that the engine (or another one) or the server holds, as a policy."""
    if self.client is not None:
      return policies.RemotePolicy(self.client, self.chat, sampling, self.context)
    return policies.LanguagePolicy(sampler or self.engine, self.chat, sampling, self.context)

  def sync(self, trained: Any = None) -> None:
    """Hands the weights to what samples, here or behind a server; it starts afresh.

    trained: a copy of what was `trained` earlier, in place of that of now.
    """
    self.handed(trained)()

  def handed(self, trained: Any = None) -> Callable[[], None]:
    """All of `sync` that hosts do together; what it returns does the rest, with this host's devices alone."""
    trained = self.trained if trained is None else trained
    with hosts.waiting("the weights that others hold"):
      if self.client is None:
        views = self._handover(self._merged(trained))
        return lambda: _give(self.engine, views)
      if trained is not self._pushed:
        self._push(trained)
        self._pushed = trained
    return lambda: None

  def _push(self, trained: Any) -> None:
    client, dtype, config = self.client, self.client.config.dtype, self.parts.lora
    if client.config.adapters:
      adapters = jax.tree.map(weights.read, trained)
      servers.push(client, lambda path: lora.save(path, adapters, config, self._adapted))
    else:
      named = weights.tensors(self.cfg, self._merged(trained))
      servers.push(
        client, lambda path: weights.save_tensors(path, self.cfg, named, dtype=dtype), named
      )

  def warmup(self) -> None:
    """Compiles what sampling needs here."""
    if self.engine is not None:
      self.engine.warmup()

  def learn(
    self, rows: Sequence[Turn], minibatches: int, rng: np.random.Generator
  ) -> dict[str, float]:
    """Optimiser steps on rows that have an advantage; returns metrics. Changes `state`."""
    self.state, numbers = self.advanced(self.state, rows, minibatches, rng)
    return numbers

  def study(
    self, rows: Sequence[Turn], minibatches: int, rng: np.random.Generator
  ) -> dict[str, float]:
    """`learn` on rows to imitate, which nothing holds back: the KL term is to the weights of now.

    Every host has all rows, and trains on its share of them.
    """
    share = hosts.share(len(rows))
    for number, row in enumerate(rows):
      row.here = number in share
    self._score(rows)
    reference = self.state.params["policy"]
    self.state, numbers = self.advanced(self.state, rows, minibatches, rng, reference)
    return numbers

  def anchor(self) -> None:
    """From here on a KL term refers to the weights of now."""
    if self._anchors:
      self.start = self._stored(jax.tree.map(jnp.array, self.state.params["policy"]))

  def rescore(self, turns: Sequence[Turn]) -> None:
    """Sets the behaviour log-probs of turns, on every host those of all: those of the weights of now."""
    self._score(turns)
    own = [turn.sample.logps for turn in _here(turns)]
    told = hosts.gather(own, "the log-probs of forced answers")
    for turn, logps in zip(turns, told, strict=True):
      turn.sample = turn.sample._replace(logps=logps)

  def _score(self, turns: Sequence[Turn]) -> None:
    """`rescore` of the turns that are here."""
    (packed,) = self._packed([turns])
    scores = self._rows(self.trainer.score(self.state.params["policy"], packed.batches))
    for turn, (m, b, s) in zip(_here(turns), packed.places, strict=True):
      logps = np.asarray(scores[m][b, s, : len(turn.sample.ids)], np.float32)
      turn.sample = turn.sample._replace(logps=logps)

  def advanced(
    self,
    state: steps.TrainState,
    rows: Sequence[Turn],
    minibatches: int,
    rng: np.random.Generator,
    reference: Any = None,
  ) -> tuple[steps.TrainState, dict[str, float]]:
    """The state after `learn`, which consumes `state` (unless made with `keep`) and sets nothing here.

    reference: weights of the KL term, in place of `start`.
    """
    config, refer = self.parts.loss, self.trainer.score
    if reference is None and config.kl_coef:
      reference, refer = self._fetched(self.start), self._refer
    dealt = pack.split(rows, minibatches, rng)
    packed = self._packed(dealt)
    parts = [one.batches for one in packed]
    params = state.params["policy"]
    off = [any(row.plain_ids is not None for row in part) for part in dealt]
    old = [self.trainer.old(params, part, off=o) for part, o in zip(parts, off, strict=True)]
    ref = [refer(reference, part) if config.kl_coef else None for part in parts]
    history = []
    for part, part_old, part_ref in zip(parts, old, ref, strict=True):
      state, result = self.trainer.update(state, part, part_old, part_ref)
      history.append(result)
    # The first wait: until here every step was dispatched while the device worked on those before.
    with self._waiting():
      history = jax.device_get(history)
    numbers: dict[str, float] = {}
    if history:
      numbers |= {name: float(np.mean([h[name] for h in history])) for name in history[0]}
      # Before the first optimiser step both sides hold the same weights: the true difference.
      for name in ("train/logp_gap", "train/logp_gap_max"):
        numbers[name] = float(history[0][name])
      if not numbers.get("train/off_policy", 1.0):  # nothing to say about rows that are not there
        gone = ["train/ratio_off", "train/clipped_off"]
        gone += ["train/masked"] if config.mask_scope == "off_policy" else []
        for name in gone:
          del numbers[name]
      numbers["train/finite"] = float(min(h["train/finite"] for h in history))
    numbers["train/micro_batches"] = sum(len(part) for part in parts)
    computed, alone = self._tokens(packed, rows)
    numbers["train/tokens"] = computed
    numbers["train/shared"] = 1 - computed / max(alone, 1)
    return state, numbers

  def values(self, turns: Sequence[Turn]) -> None:
    """Sets `turn.value`: the critic's estimate at the end of every prompt."""
    (packed,) = self._packed([turns])
    values = self._rows(self.trainer.values(self.state.params["critic"], packed.batches))
    found = [float(values[m][b, s]) for m, b, s in packed.places]
    for turn, value in zip(turns, hosts.gather(found, "the critic's values"), strict=True):
      turn.value = value

  def _packed(self, parts: Sequence[Sequence[Turn]]) -> list[pack.Packed]:
    """Micro-batches of each part: of several hosts each packs the rows it has, in its share of the
    sequences, and all make equally many."""
    whole, count = self.parts.pack, hosts.count() if self.mesh.is_multi_process else 1
    config = dataclasses.replace(whole, sequences=whole.sequences // count)
    packed = [pack.pack_with_places(_here(part), config) for part in parts]
    sizes = self._gather([len(one.batches) for one in packed], "the sizes of micro-batches")
    for one, most in zip(packed, np.max(sizes, axis=0), strict=True):
      one.batches.extend(pack.empty(config) for _ in range(most - len(one.batches)))
    return packed

  def _rows(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    with self._waiting():
      return [mesh.rows(self.mesh, array) for array in arrays]

  def _tokens(self, packed: Sequence[pack.Packed], rows: Sequence[Turn]) -> tuple[int, int]:
    """(positions that are computed, those the rows would take alone), on all hosts."""
    own = (sum(one.tokens for one in packed), sum(map(pack.tokens_alone, _here(rows))))
    computed, alone = zip(*self._gather(own, "the numbers of tokens"), strict=True)
    return sum(computed), sum(alone)

  def _gather(self, own: Any, what: str) -> list[Any]:
    """What each host has, of those that this model lies on."""
    return hosts.gather([own], what) if self.mesh.is_multi_process else [own]

  def _waiting(self) -> contextlib.AbstractContextManager[None]:
    """Around a wait for what other hosts compute, too."""
    spread = self.mesh.is_multi_process
    return hosts.waiting("what the devices compute") if spread else contextlib.nullcontext()

  def saved(self) -> dict[str, Any]:
    """The arrays of a checkpoint; frozen weights are where they came from."""
    if self.frozen:
      return _nothing()
    return self.state._asdict() | ({"start": self.start} if self._anchors else {})

  def load(self, arrays: dict[str, Any]) -> None:
    """Back to what `saved` gave."""
    if self._anchors:
      self.start = arrays.pop("start")
    if not self.frozen:
      self.state = steps.TrainState(**arrays)


class Served:
  """A model that stays as it is, behind a server: no weights here, and nothing to compile.

  The part of a `Learner` that playing needs. A server that takes ids wants the model's tokenizer; one that
  reads text wants nothing. Its checkpoints are those of a frozen `Learner`.
  """

  engine = cfg = initial = None

  def __init__(self, parts: Parts, client: remote.Client):
    self.client = client
    self.chat = None if client.reads_text else parts.model.chat()
    self.context = max(parts.engine.buckets)

  def policy(self, sampling: policies.SamplingConfig) -> policies.RemotePolicy:
    """What the server holds, as a policy."""
    return policies.RemotePolicy(self.client, self.chat, sampling, self.context)

  def sync(self, trained: Any = None) -> None:
    """The server has its weights."""

  def warmup(self) -> None:
    """Nothing is compiled."""

  def saved(self) -> dict[str, Any]:
    """The arrays of a checkpoint."""
    return _nothing()

  def load(self, arrays: dict[str, Any]) -> None:
    """There is nothing to go back to."""


def _give(sampler: engine.Engine | replicas.Replicas, views: list[Any]) -> None:
  sampler.set_params(views if isinstance(sampler, replicas.Replicas) else views[0])


def _here(turns: Sequence[Turn]) -> list[Turn]:
  """Those that this host has whole."""
  return [turn for turn in turns if turn.here]


def _nothing() -> dict[str, Any]:
  """Stands in a checkpoint for weights that are where they came from."""
  return {"frozen": np.zeros(1)}
