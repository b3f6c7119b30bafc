"""Where Mem-pi plays, with its values; `recipes` has those that all experiments share.

[S] is experiments/mempi.md (the paper's text is not public: what is known of it, and our definition), [T] measured
with the tiny models, [us] our choice. config.model is the memory policy, which learns; config.agent plays.
"""

from __future__ import annotations

from experiments import recipes
from experiments.recipes import Config


def hints(config: Config, variant: str) -> None:
  """The hints, town 0: what opens a kind of container is the same in every colour, and the agent cannot know it."""
  recipes._check(variant)
  if variant == "paper":
    _paper(config, "hints")
  else:
    _tiny(config, "tiny:hints")
    config.sampling.reflect_tokens = 10  # [us] Lmax: a hint is up to 7 tokens and its end
    config.sampling.play_tokens = 10  # it plays nothing
    config.agent.sampling.play_tokens = 6
    recipes._pack(config, length=192, rows=16, context=96)
    config.pack.response = 10
  config.env.town = 0  # [us]: never imitated
  config.eval.options.split = "heldout"  # other colours
  if variant == "smoke":
    _smoke(config)


def _tiny(config: Config, checkpoint: str) -> None:
  """A tiny agent and a memory policy that begins as a copy of it."""
  recipes._laptop(config)
  _plain(config)
  config.model.checkpoint = checkpoint
  config.agent.model.checkpoint = checkpoint
  config.agent.sampling.temperature = 0.7  # as in evaluations
  config.agent.sampling.reflect_tokens = 16
  config.method.gather = 8  # [T]
  config.method.distil = 60  # [T]
  config.method.distil_rate = 1e-3  # [T]
  config.method.brevity = 0.05  # [S]
  config.train.updates = 8 + 60 + 100
  config.train.groups = 16
  config.train.group_size = 8  # [S]
  config.train.minibatches = 1
  config.optim.learning_rate = 3e-4  # [T]
  config.loss.kl_coef = 0.01  # [S]
  config.eval.at_start = False
  config.eval.arms = ("none", "rag", "memory")


def _plain(config: Config) -> None:
  """What Mem-pi's loss is: PPO's clip over tokens, a KL term to stage 1, no entropy bonus [S]."""
  config.loss.surrogate = "ppo_clip"
  config.loss.eps_low = 0.2
  config.loss.eps_high = 0.28
  config.loss.aggregate = "token_mean"
  config.loss.entropy_coef = 0.0


def _smoke(config: Config) -> None:
  recipes._smoke(config)
  config.method.gather = 1
  config.method.distil = 2
  config.method.hints = 8
  config.train.updates = 5
  config.train.group_size = 4
  config.agent.engine.slots = 16
  config.agent.engine.share = 0
  config.agent.engine.buckets = config.engine.buckets
  config.agent.engine.prefill_rows = (8,)
  config.agent.engine.prefill_chunks = (32,)


def _paper(config: Config, name: str) -> None:
  """Qwen2.5-7B-Instruct as memory policy and as agent; 8 GPUs [S]."""
  raise NotImplementedError(name)
