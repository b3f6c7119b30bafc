"""One file per paper, plus baselines; methods never import each other. `make` knows them by name."""

from __future__ import annotations

from memrl_jax.methods import (
  base,
  baselines,
  complementary,
  empo2,
  lamer,
  memoryr1,
  mempi,
  memrl,
  retrospex,
)
from memrl_jax.rollout import credit

# Method name -> the estimators it may use; None: a frozen model, nothing is trained.
METHODS: dict[str, tuple[str, ...] | None] = {
  "lamer": credit.ESTIMATORS,
  "empo2": ("grpo", "gigpo", "hgpo", "rloo"),
  "complementary": ("grpo", "gigpo", "hgpo", "rloo"),
  "gigpo": ("gigpo",),
  "hgpo": ("hgpo",),
  "grpo": ("grpo",),
  "rloo": ("rloo",),
  "ppo": ("ppo",),
  "mempi": credit.ESTIMATORS,  # none of which it uses: it pays by ops.counterfactual
  "memoryr1": credit.ESTIMATORS,  # as mempi: it pays by itself
  "memrl": None,
  "reflexion": None,
  "retrospex": None,
  "zeroshot": None,
  "react": None,
}

# Methods with a memory outside of the context.
REMEMBERING = ("empo2", "complementary", "memoryr1", "mempi", "memrl", "retrospex")

Config = (
  lamer.LamerConfig
  | empo2.Empo2Config
  | complementary.ComplementaryConfig
  | memoryr1.MemoryR1Config
  | mempi.MempiConfig
  | memrl.MemrlConfig
  | retrospex.RetrospexConfig
  | baselines.BaselineConfig
)


def config_type(name: str) -> type[Config]:
  """The configuration class of a method; ValueError for an unknown name."""
  if name not in METHODS:
    raise ValueError(
      f"method {name!r} is not known; choose one of {', '.join(METHODS)} (config.method.name)"
    )
  if name == "empo2":
    return empo2.Empo2Config
  if name == "complementary":
    return complementary.ComplementaryConfig
  if name == "mempi":
    return mempi.MempiConfig
  if name == "memoryr1":
    return memoryr1.MemoryR1Config
  if name == "memrl":
    return memrl.MemrlConfig
  if name == "retrospex":
    return retrospex.RetrospexConfig
  return lamer.LamerConfig if name in ("lamer", "reflexion") else baselines.BaselineConfig


def make(
  config: Config,
  credit_config: credit.CreditConfig,
  shape: credit.Shape,
  memory: base.Remembered | None = None,
  per_token: bool = True,
) -> base.Method:
  """The method, with both evaluation arms: "memory" (attempts with reflections, tips or experience, or
  re-scored) and "none".

  `memory` is for the REMEMBERING. ValueError where one of them has none. `per_token`: the loss is a mean
  over tokens, not over rows.

  A method without memory is evaluated in the memory loop too, so that what training brought and what
  memory at test time brings can be told apart.
  """
  if isinstance(config, empo2.Empo2Config):
    if memory is None:
      raise ValueError("EMPO2 needs a memory; open one (training.memories) and pass it")
    return empo2.make(config, credit_config, shape, memory)
  if isinstance(config, complementary.ComplementaryConfig):
    if memory is None:
      raise ValueError("Complementary RL needs a bank; open one (training.memories) and pass it")
    return complementary.make(config, credit_config, shape, memory, per_token)
  if isinstance(config, mempi.MempiConfig):
    if memory is None:
      raise ValueError("Mem-pi needs a bank of hints; open one (training.memories) and pass it")
    return mempi.make(config, memory)
  if isinstance(config, memoryr1.MemoryR1Config):
    if memory is None:
      raise ValueError("Memory-R1 needs facts; open them (training.memories) and pass them")
    return memoryr1.make(config, memory)
  if isinstance(config, memrl.MemrlConfig):
    if memory is None:
      raise ValueError("MemRL needs a memory; open one (training.memories) and pass it")
    return memrl.make(config, memory)
  if isinstance(config, retrospex.RetrospexConfig):
    if memory is None:
      raise ValueError("Retrospex needs a memory; make one (training.memories) and pass it")
    return retrospex.make(config, credit_config, shape, memory)
  if isinstance(config, lamer.LamerConfig):
    method = lamer.make(config, credit_config, shape)
    return method._replace(arms={**method.arms, "none": baselines.trial(config.attempts)})
  method = baselines.make(config, credit_config, shape)
  loop = lamer.LamerConfig(attempts=config.eval_attempts)
  return method._replace(arms={**method.arms, "memory": lamer.trial(loop)})


def turns(config: Config, horizon: int) -> int:
  """The most turns of an attempt: those that the environment sees, and a method's own beside them."""
  beside = config.asides if isinstance(config, complementary.ComplementaryConfig) else 0
  return horizon + beside
