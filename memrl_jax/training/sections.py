"""The sections of the settings that concern the loop and the models of a run; each checks itself.

Where a section belongs to a part of the engine, its dataclass stands beside that part.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from memrl_jax.envs import pool
from memrl_jax.models import lora, tiny, weights
from memrl_jax.rollout import pack, policies
from memrl_jax.sampling import chat, engine, remote
from memrl_jax.training import handover, mesh, objective, step

# As `policy.hidden` takes it.
REMAT = {"none": False, "some": "some", "all": True, "offload": "offload"}


@dataclasses.dataclass(frozen=True)
class EnvSettings:
  """Which environment, with its own options, and how it is run (envs/pool)."""

  name: str
  options: Any
  workers: int = 2
  timeout_s: float = 60.0
  isolation: str = "thread"

  def __post_init__(self):
    if self.isolation not in pool.ISOLATION:
      raise ValueError(
        f"isolation {self.isolation!r} is not known; choose one of {', '.join(pool.ISOLATION)} "
        "(config.env.isolation)"
      )


@dataclasses.dataclass(frozen=True)
class ModelSettings:
  """`checkpoint`: "tiny:<name>" for a shipped tiny model, or a directory.

  dtype: of the weights and the cache; "bfloat16" for a model that stays as it is, under adapters, or with
    config.optim.update.
  compute: dtype that training computes in, of weights kept in `dtype`; "": the same. What a KL term refers to
    is kept in it.
  remat: what the backward pass computes again: "none", "all" of a layer, "some" (not its widest projection), or
    "offload": all, and what it starts from waits in the host's memory.
  """

  checkpoint: str
  dtype: str = "float32"
  remat: str = "all"
  compute: str = ""

  def __post_init__(self):
    if self.remat not in REMAT:
      raise ValueError(
        f"remat {self.remat!r} is not known; choose one of {', '.join(REMAT)} (config.model.remat)"
      )
    if self.dtype not in weights.DTYPES:
      raise ValueError(
        f"dtype {self.dtype!r} is not known; choose one of {', '.join(weights.DTYPES)} "
        "(config.model.dtype)"
      )
    if self.compute not in ("", "bfloat16") or self.compute == self.dtype:
      raise ValueError(
        f"weights of {self.dtype} cannot compute in {self.compute!r}; set config.model.compute to bfloat16 for "
        'those of float32, or leave it ""'
      )

  def directory(self) -> pathlib.Path:
    """Where the weights lie; ValueError if they are not there."""
    if self.checkpoint.startswith("tiny:"):
      return tiny.directory(self.checkpoint.removeprefix("tiny:"))
    path = pathlib.Path(self.checkpoint).expanduser()
    if path.suffix == ".gguf":
      raise ValueError(
        f"{path} is a GGUF file; write it as a directory once, with python -m memrl_jax.models.gguf "
        f"{path} DIRECTORY, and give that directory (config.model.checkpoint)"
      )
    if not (path / "config.json").is_file():
      raise ValueError(
        f"no model in {path} (config.json is missing); give a directory with weights, or "
        f"tiny:<name> with one of {', '.join(tiny.shipped())} (config.model.checkpoint)"
      )
    return path

  def chat(self) -> chat.Chat:
    """The tokenizer and chat template that belong to the weights."""
    directory = self.directory()
    if tiny.is_tiny(directory):
      return chat.load(tiny.tokenizer_directory(), directory)
    return chat.from_transformers(directory)


@dataclasses.dataclass(frozen=True)
class TrainSettings:
  """One update: `groups` tasks x `group_size` trials, then `minibatches` optimiser steps.

  tasks: the run plays the first so many training tasks, in rounds, each in an order of its own (the last
  update of a round may be smaller); 0: every update draws from all.
  max_lag: the trials of update u are sampled with the weights after max(0, u - max_lag) updates, beside the
  learner; 0: with those of now, while it waits. See training/lagged.
  eval_every, checkpoint_every, rollouts_every: in updates; 0 means never (but for the last update).
  keep: checkpoints kept.
  """

  updates: int = 40
  tasks: int = 0
  groups: int = 8
  group_size: int = 8
  minibatches: int = 2
  max_lag: int = 0
  concurrency: int = 256
  eval_every: int = 0
  checkpoint_every: int = 10
  rollouts_every: int = 5
  keep: int = 2

  def __post_init__(self):
    for name, low in (
      ("updates", 0), ("tasks", 0), ("groups", 1), ("group_size", 1), ("minibatches", 1), ("max_lag", 0),
      ("concurrency", 1),
      ("eval_every", 0), ("checkpoint_every", 0), ("rollouts_every", 0), ("keep", 1),
    ):  # fmt: skip
      if getattr(self, name) < low:
        raise ValueError(
          f"{name} must be at least {low}, not {getattr(self, name)} (config.train.{name})"
        )


@dataclasses.dataclass(frozen=True)
class EvalSettings:
  """The evaluation on a fixed panel.

  panel: name or file of a panel; tasks: how many of its seeds; half: "test", or "dev" for tuning.
  arms: "memory", "none", and for Mem-pi "rag". swap: who plays attempt 1 in the swap test, "random" and/or "base".
  harder: named changes of environment options, evaluated without retraining.
  options: changes of the environment's options in every evaluation (a held-out split).
  diversity_tasks, diversity_samples: tasks and trajectories per task of the diversity (0: none).
  """

  panel: str
  tasks: int = 512
  half: str = "test"
  arms: tuple[str, ...] = ("memory", "none")
  swap: tuple[str, ...] = ()
  harder: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
  options: tuple[tuple[str, Any], ...] = ()
  temperature: float = 0.7
  top_p: float = 1.0
  top_k: int = 0
  diversity_tasks: int = 0
  diversity_samples: int = 32
  save_trials: int = 32
  at_start: bool = True

  def __post_init__(self):
    for arm in self.arms:
      if arm not in ("memory", "none", "rag"):
        raise ValueError(
          f"evaluation arm {arm!r} is not known; choose memory, none or rag (config.eval.arms)"
        )
    for who in self.swap:
      if who not in ("random", "base"):
        raise ValueError(
          f"swap policy {who!r} is not known; choose random or base (config.eval.swap)"
        )
    if self.half not in ("test", "dev"):
      raise ValueError(
        f"panel half {self.half!r} is not known; choose test or dev (config.eval.half)"
      )
    if (
      self.tasks < 1
      or self.diversity_tasks < 0
      or self.diversity_samples < 1
      or self.save_trials < 0
    ):
      raise ValueError(
        "tasks and diversity_samples must be >= 1, diversity_tasks and save_trials >= 0 (config.eval)"
      )


EMBEDDERS = ("hash", "minilm", "policy", "remote")


@dataclasses.dataclass(frozen=True)
class MemorySettings:
  """What turns texts into vectors for a method with a memory (memory/embed).

  embedder: "hash" (no download; `dimension`), "minilm" (weights in `directory`), "policy" (hidden states
  of the weights that training starts from), or "remote" (`model` behind `url`).
  cache: texts whose vectors are kept in memory.
  """

  embedder: str = "hash"
  dimension: int = 384
  directory: str = ""
  url: str = ""
  model: str = ""
  cache: int = 65_536

  def __post_init__(self):
    if self.embedder not in EMBEDDERS:
      raise ValueError(
        f"embedder {self.embedder!r} is not known; choose one of {', '.join(EMBEDDERS)} "
        "(config.memory.embedder)"
      )
    if self.dimension < 2 or self.cache < 1:
      raise ValueError("dimension must be at least 2 and cache at least 1 (config.memory)")
    if self.embedder == "minilm" and not self.directory:
      raise ValueError(
        "the minilm embedder needs the directory of its weights; name it (config.memory.directory)"
      )
    if self.embedder == "remote" and not (self.url and self.model):
      raise ValueError(
        "the remote embedder needs an address and a model (config.memory.url, config.memory.model)"
      )


@dataclasses.dataclass(frozen=True)
class AdaptSettings:
  """--mode=adapt: a memory is filled in `rounds` rounds while the weights stay as they are.

  A round is `episodes` at each of `tasks` tasks of the panel, of an environment changed by `options`;
  round 0 has no memory. (EMPO2 section 6.1, which says neither number.)
  """

  rounds: int = 10
  tasks: int = 16
  episodes: int = 8
  options: tuple[tuple[str, Any], ...] = ()

  def __post_init__(self):
    if self.rounds < 1 or self.tasks < 1 or self.episodes < 1:
      raise ValueError("rounds, tasks and episodes must be at least 1 (config.adapt)")


SCHEDULES = ("interleaved", "pipelined", "async")


@dataclasses.dataclass(frozen=True)
class ExtractorSettings:
  """The second model of Complementary RL: the same sections as the actor's, and when it works.

  train: whether it learns. schedule: "interleaved" (in the actor's thread), "pipelined" (beside the actor,
    one update behind; repeats bit for bit) or "async" (beside the actor, whenever it can).
  max_queue: jobs that may wait for it; beyond that the oldest are dropped.
  sampling.reflect_tokens is the budget of an experience, of a merge and of advice; play_tokens is not used.
  """

  model: ModelSettings = dataclasses.field(default_factory=lambda: ModelSettings(""))
  lora: lora.LoraConfig = dataclasses.field(default_factory=lora.LoraConfig)
  sampling: policies.SamplingConfig = dataclasses.field(
    default_factory=lambda: policies.SamplingConfig(reflect_tokens=64)
  )
  engine: engine.EngineConfig = dataclasses.field(
    default_factory=lambda: engine.EngineConfig(slots=64)
  )
  loss: objective.LossConfig = dataclasses.field(
    default_factory=lambda: objective.LossConfig(surrogate="cispo", eps_low=0.1, eps_high=0.1)
  )
  optim: step.OptimConfig = dataclasses.field(default_factory=step.OptimConfig)
  pack: pack.PackConfig = dataclasses.field(default_factory=lambda: pack.PackConfig(response=64))
  mesh: mesh.MeshConfig = dataclasses.field(default_factory=mesh.MeshConfig)
  replicas: handover.ReplicaConfig = dataclasses.field(default_factory=handover.ReplicaConfig)
  train: bool = True
  schedule: str = "interleaved"
  max_queue: int = 4096

  def __post_init__(self):
    if self.schedule not in SCHEDULES:
      raise ValueError(
        f"schedule {self.schedule!r} is not known; choose one of {', '.join(SCHEDULES)} "
        "(config.extractor.schedule)"
      )
    if self.max_queue < 1:
      raise ValueError("max_queue must be at least 1 (config.extractor.max_queue)")

  def check(self) -> None:
    """What a run with an extractor needs of it; ValueError names what is wrong."""
    s, tokens = self.sampling, self.sampling.reflect_tokens
    if not self.train:
      return
    check_precision(self.model, self.lora, self.optim, "config.extractor")
    if s.top_p < 1 or s.top_k > 0 or s.temperature == 0:
      raise ValueError(
        "an extractor that is trained needs temperature > 0, top_p 1 and top_k 0: its log-probs are those of "
        f"softmax(logits / T); got {s.temperature}, {s.top_p}, {s.top_k} (config.extractor.sampling)"
      )
    if tokens > self.pack.response or self.pack.length < max(self.engine.buckets):
      raise ValueError(
        f"the extractor's answers of up to {tokens} tokens and rows of up to {max(self.engine.buckets)} do not "
        f"fit config.extractor.pack (response {self.pack.response}, length {self.pack.length}); raise it"
      )
    if self.loss.off_policy != "none" or self.loss.mask_scope == "off_policy":
      raise ValueError(
        "the extractor has no off-policy rows; set config.extractor.loss.off_policy to none"
      )


@dataclasses.dataclass(frozen=True)
class AgentSettings:
  """The frozen agent that a memory policy writes for: a model of this process, or one behind `remote.url`.

  sampling is the agent's in training and in evaluations; reflect_tokens is the budget of a hint that it writes
  for the bank. mesh and replicas count the devices of one host: of several, each has the agent whole.
  """

  model: ModelSettings = dataclasses.field(default_factory=lambda: ModelSettings(""))
  sampling: policies.SamplingConfig = dataclasses.field(default_factory=policies.SamplingConfig)
  engine: engine.EngineConfig = dataclasses.field(
    default_factory=lambda: engine.EngineConfig(slots=128)
  )
  remote: remote.RemoteConfig = dataclasses.field(default_factory=remote.RemoteConfig)
  mesh: mesh.MeshConfig = dataclasses.field(default_factory=mesh.MeshConfig)
  replicas: handover.ReplicaConfig = dataclasses.field(default_factory=handover.ReplicaConfig)

  def __post_init__(self):
    if self.model.compute or self.mesh.sequence or self.mesh.offload:
      raise ValueError(
        "the agent is never trained, so model.compute, mesh.sequence and mesh.offload of config.agent would do "
        "nothing; leave them as they are"
      )
    if self.remote.url and self.replicas != handover.ReplicaConfig():
      raise ValueError(
        "the agent samples behind config.agent.remote.url, so config.agent.replicas would do nothing; leave that "
        "section as it is"
      )


def check_precision(
  model: ModelSettings,
  adapters: lora.LoraConfig,
  optim: step.OptimConfig,
  section: str = "config",
) -> None:
  """Whether weights that are trained move as they should; ValueError names what is wrong."""
  narrow = model.dtype != "float32" and not adapters.rank
  if narrow and optim.update == "plain":
    raise ValueError(
      f"updates of this size vanish in {model.dtype} weights; train float32 ones ({section}.model.dtype), adapters "
      f"beside them ({section}.lora.rank), or set {section}.optim.update to stochastic or compensated"
    )
  if not narrow and optim.update != "plain":
    raise ValueError(
      f"what is trained here is float32, to which nothing {optim.update} needs to be done; set "
      f"{section}.optim.update to plain, or {section}.model.dtype to bfloat16"
    )
  if model.compute and adapters.rank:
    raise ValueError(
      f"adapters compute in the dtype of the weights below them; set {section}.model.dtype to {model.compute}, "
      f"and leave {section}.model.compute empty"
    )
