"""All settings of a run, as frozen dataclasses that check themselves and each other.

Where a section belongs to a part of the engine, its dataclass stands beside that part; what concerns
the loop and its models stands in `sections`. Nothing after this point sees a ConfigDict.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from memrl_jax import methods
from memrl_jax.envs import base as env_base
from memrl_jax.memory import episodic_config, experience_config, manager, novelty, tips
from memrl_jax.methods import complementary, memoryr1, mempi, memrl, memrl_config
from memrl_jax.models import lora
from memrl_jax.rollout import credit, pack, policies
from memrl_jax.sampling import engine, remote
from memrl_jax.training import apart, guard, handover, mesh, objective, sections, step


@dataclasses.dataclass(frozen=True)
class Settings:
  """Everything a run depends on."""

  name: str
  variant: str
  seed: int
  env: sections.EnvSettings
  model: sections.ModelSettings
  lora: lora.LoraConfig
  method_name: str
  method: methods.Config
  sampling: policies.SamplingConfig
  engine: engine.EngineConfig
  remote: remote.RemoteConfig
  credit: credit.CreditConfig
  loss: objective.LossConfig
  optim: step.OptimConfig
  pack: pack.PackConfig
  mesh: mesh.MeshConfig
  replicas: handover.ReplicaConfig
  reference: apart.ApartConfig
  critic: apart.ApartConfig
  memory: sections.MemorySettings
  tips: tips.TipConfig
  novelty: novelty.NoveltyConfig
  episodic: episodic_config.EpisodicConfig
  experience: experience_config.ExperienceConfig
  manager: manager.ManagerConfig
  extractor: sections.ExtractorSettings
  agent: sections.AgentSettings
  train: sections.TrainSettings
  eval: sections.EvalSettings
  adapt: sections.AdaptSettings
  guard: guard.GuardConfig

  def __post_init__(self):
    if self.seed < 0:
      raise ValueError(f"seed {self.seed} is negative; use 0 or more (config.seed)")
    self._check_method()
    self._check_memory()
    if isinstance(self.method, complementary.ComplementaryConfig):
      self._check_extractor(self.method)
    if isinstance(self.method, memrl.MemrlConfig):
      memrl_config.check(self.method, self.episodic, self.train.tasks)
    if self.hints:
      self._check_hints()
    if "rag" in self.eval.arms and not isinstance(self.method, mempi.MempiConfig):
      raise ValueError(f"{self.method_name} has no arm rag; leave it out of config.eval.arms")
    self._check_sizes()
    self._check_meshes()

  @property
  def frozen(self) -> bool:
    """Whether this method trains nothing."""
    return methods.METHODS[self.method_name] is None

  @property
  def trains(self) -> bool:
    """Whether this run changes weights."""
    return self.train.updates > 0 and not self.frozen

  @property
  def refers(self) -> bool:
    """Whether a KL term refers to the weights that training starts from."""
    return self.trains and self.loss.kl_coef > 0

  @property
  def rereads(self) -> bool:
    """Whether the weights that the model comes with are read again: by a swap test, or to embed."""
    return "base" in self.eval.swap or self.memory.embedder == "policy"

  @property
  def places(self) -> apart.Apart:
    """What has a mesh of its own."""
    return apart.Apart(self.reference, self.critic)

  @property
  def hints(self) -> bool:
    """Whether the model writes hints for a frozen agent (`agent`), which plays, or keeps its memory."""
    return isinstance(self.method, mempi.MempiConfig | memoryr1.MemoryR1Config)

  @property
  def first(self) -> tuple[int, float] | None:
    """Optimiser steps before all others, with a rate of their own (Mem-pi's stage 1), if there are any."""
    count, rate = 0, 0.0
    if isinstance(self.method, mempi.MempiConfig):
      count, rate = self.method.distil, self.method.distil_rate
    elif isinstance(self.method, memoryr1.MemoryR1Config):
      count, rate = self.method.teach, self.method.teach_rate
    return (count * self.train.minibatches, rate) if count else None

  def _check_method(self) -> None:
    allowed = methods.METHODS[self.method_name]
    remembers = self.method_name in methods.REMEMBERING
    if allowed is None and self.train.updates and not remembers:
      raise ValueError(
        f"{self.method_name} runs a frozen model and cannot train for {self.train.updates} updates; "
        "set config.train.updates to 0"
      )
    if allowed is not None and self.credit.estimator not in allowed:
      raise ValueError(
        f"{self.method_name} uses the estimator {' or '.join(allowed)}, not {self.credit.estimator}; "
        "change config.credit.estimator or config.method.name"
      )
    if self.lora.rank and (allowed is None or self.credit.estimator == "ppo"):
      why = (
        "trains nothing" if allowed is None else "also trains a critic, all of whose weights move"
      )
      raise ValueError(
        f"adapters do not go with {self.method_name}, which {why}; set config.lora.rank to 0"
      )
    if self.train.updates and allowed:
      sections.check_precision(self.model, self.lora, self.optim)
    if self.remote.adapters and not self.lora.rank:
      raise ValueError(
        "no adapters are trained that could be sent alone; set config.remote.adapters to false, or config.lora.rank"
      )
    if self.train.max_lag and (allowed is None or remembers):
      why = (
        "trains nothing: no weights can lag" if allowed is None
        else "remembers after every update what the next rollout reads: none can begin before that"
      )  # fmt: skip
      raise ValueError(f"{self.method_name} {why}; set config.train.max_lag to 0")
    if self.train.tasks > env_base.TRAIN_SEEDS[1]:
      raise ValueError(
        f"there are {env_base.TRAIN_SEEDS[1]} training tasks, fewer than {self.train.tasks}; lower "
        "config.train.tasks"
      )
    if self.train.updates and allowed:
      self.sampling.check_trainable()
      if self.train.group_size == 1 and self.credit.estimator not in ("ppo", "reinforce"):
        raise ValueError(
          f"a group of 1 trial has nobody to compare with under {self.credit.estimator}: every "
          "advantage is 0; raise config.train.group_size"
        )

  def _check_memory(self) -> None:
    """Options of a memory belong to methods that have one: elsewhere they would do nothing."""
    if self.frozen and self.remote.url and self.memory.embedder == "policy":
      raise ValueError(
        f"the policy embedder reads the weights, and those of {self.method_name} are behind config.remote.url; "
        "choose hash, minilm or remote (config.memory.embedder)"
      )
    if self.method_name == "empo2" and self.loss.off_policy == "none":
      raise ValueError(
        f"{self.method_name} trains rows without the tips they were sampled with; say whose log-probs "
        'divide there, "with_tips" or "without_tips" (config.loss.off_policy)'
      )
    if self.method_name != "empo2" and self.loss.off_policy != "none":
      raise ValueError(
        f"{self.method_name} has no off-policy rows; set config.loss.off_policy to none"
      )
    if self.method_name != "empo2" and self.novelty.kind != "none":
      raise ValueError(
        f"{self.method_name} pays no novelty reward; set config.novelty.kind to none, or use empo2 "
        "with config.method.p_memory=0"
      )
    if self.loss.mask_scope == "off_policy" and self.loss.off_policy == "none":
      raise ValueError(
        f"{self.method_name} has no off-policy rows to mask; set config.loss.mask_scope to none or all"
      )

  @property
  def extracts(self) -> bool:
    """Whether a second model writes what this method remembers."""
    method = self.method
    known = isinstance(method, complementary.ComplementaryConfig)
    return known and bool(method.writes or method.questions)

  def _check_extractor(self, method: complementary.ComplementaryConfig) -> None:
    if method.writes and not method.guided and not method.questions and self.extractor.train:
      raise ValueError(
        "nobody is guided, so the extractor would write for nobody and earn nothing; for the baseline without "
        "experience set config.method.writes to false too"
      )
    if self.extracts:
      self.extractor.check()
      learns = self.extractor.train and self.trains
      refers = learns and self.extractor.loss.kl_coef > 0
      mesh.check_trained(self.extractor.mesh, "config.extractor.mesh", trains=learns, starts=refers)
      if not self.manager.deterministic and self.extractor.schedule != "async":
        raise ValueError(
          f"the schedule {self.extractor.schedule} repeats bit for bit, and config.manager.deterministic=false "
          "does not; set it to true, or config.extractor.schedule to async"
        )
    if method.imitate_every and method.questions:
      raise ValueError(
        "turns in which the actor asked cannot be imitated without experience; set config.method.questions or "
        "config.method.imitate_every to 0"
      )

  def _check_hints(self) -> None:
    if self.credit != credit.CreditConfig():
      raise ValueError(
        f"{self.method_name} pays by config.method and reads nothing of config.credit; leave that "
        "section as it is"
      )
    if self.loss.aggregate != "token_mean":
      raise ValueError(
        f"{self.method_name} balances its losses for a mean over tokens, not {self.loss.aggregate}; set "
        "config.loss.aggregate to token_mean"
      )
    if self.remote.url:
      raise ValueError(
        "the memory policy, or the manager, is asked and trained in this process; the address of the agent's server is "
        "config.agent.remote.url"
      )

  def _check_sizes(self) -> None:
    tokens = max(self.sampling.play_tokens, self.sampling.reflect_tokens)
    if self.trains and tokens > self.pack.response:
      raise ValueError(
        f"responses of up to {tokens} tokens (config.sampling) do not fit config.pack.response = "
        f"{self.pack.response}; raise it"
      )
    if self.trains and self.pack.length < max(self.engine.buckets):
      raise ValueError(
        f"a row of up to {max(self.engine.buckets)} tokens (config.engine.buckets) does not fit "
        f"sequences of config.pack.length = {self.pack.length}; raise it"
      )
    if self.remote.url and self.replicas != handover.ReplicaConfig():
      raise ValueError(
        "what samples is behind config.remote.url, so config.replicas would do nothing; leave that section as it is"
      )
    shards = self.mesh.data * self.mesh.fsdp
    if self.mesh.data > 0 and self.pack.sequences % shards:
      raise ValueError(
        f"batch of {self.pack.sequences} sequences cannot be split over {shards} data shards; choose "
        "config.pack.sequences divisible by config.mesh.data * config.mesh.fsdp"
      )
    family = env_base.family(self.env.name)
    for _, changes in (*self.eval.harder, ("", self.eval.options), ("", self.adapt.options)):
      changed(self.env.options, dict(changes))
    if "base" in self.eval.swap and self.remote.url:
      raise ValueError(
        "the swap test with the base policy needs its weights in this process, not behind "
        "config.remote.url; leave base out of config.eval.swap"
      )
    if "random" in self.eval.swap and "random" not in family.players:
      raise ValueError(f"{self.env.name} has no random player for the swap test (config.eval.swap)")

  def _check_meshes(self) -> None:
    self.places.check(
      refers=self.refers,
      values=self.trains and self.credit.estimator == "ppo",
      update=self.optim.update,
    )
    if self.reference.wanted and "start" in self.mesh.offload:
      raise ValueError(
        "the weights that training starts from lie on the reference's mesh; offload them there "
        "(config.reference.mesh.offload), not in config.mesh.offload"
      )
    mesh.check_trained(
      self.mesh, "config.mesh", trains=self.trains, starts=self.refers or self.rereads
    )


def changed(options: Any, changes: dict[str, Any]) -> Any:
  """Environment options with some fields replaced; ValueError names an unknown field."""
  known = [field.name for field in dataclasses.fields(options)]
  for name in changes:
    if name not in known:
      raise ValueError(f"environment option {name!r} is not known; choose from {', '.join(known)}")
  return dataclasses.replace(options, **changes)
