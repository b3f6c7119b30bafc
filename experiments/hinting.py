"""Where Mem-pi and a Memory-R1-like manager play, with their values; `recipes` has those that all experiments share.

[S] is experiments/mempi.md (the paper's text is not public: what is known of it, and our definition), [T] measured
with the tiny models, [us] our choice. config.model is the memory policy, or the manager, which learns;
config.agent plays.
"""

from __future__ import annotations

import dataclasses

from experiments import recipes
from experiments.recipes import Config
from memrl_jax.rollout import credit

# The memory policy as adapters beside frozen weights, as `--config.` overrides of the variants `paper` [S].
LORA = (
  "lora.rank=16",
  "model.dtype=bfloat16",
  "optim.learning_rate=1e-5",
  "method.distil_rate=1e-4",
)


def hints(config: Config, variant: str) -> None:
  """The hints, town 0: what opens a kind of container is the same in every colour, and the agent cannot know it."""
  recipes._check(variant)
  if variant == "paper":
    _paper(config)
  else:
    _tiny(config, "tiny:hints")
    _short(config)
    config.method.near = (
      0.79  # [T]: helpful hints are about containers without a report; others are below
    )
  _containers(config)
  if variant == "smoke":
    _smoke(config)


def managed(config: Config, variant: str) -> None:
  """The same tasks and the same agent; the manager of its memory reads the fact, and three others, at once."""
  recipes._check(variant)
  if variant == "paper":
    _paper_models(config)
    config.train.updates = 150  # [us], with the next
    config.optim.learning_rate = 1e-6
  else:
    _tiny_models(config, "tiny:hints")
    _short(config)
    config.method.teach = 60  # [T], with the next
    config.method.teach_rate = 1e-3
    config.train.updates = 60 + 100
    config.optim.learning_rate = 3e-4
  config.train.group_size = 9  # [us]: one decides by itself, and every operation is tried twice
  config.loss.kl_coef = 0.0  # what is put into its mouth is in no KL term
  config.eval.arms = ("none", "memory")
  _containers(config)
  if variant == "smoke":
    recipes._smoke(config)
    config.train.group_size = 9
    config.train.updates = 2
    _smoke_agent(config)


def _short(config: Config) -> None:
  """The sizes of the hints."""
  config.sampling.reflect_tokens = 10  # [us] Lmax: a hint is up to 7 tokens and its end
  config.sampling.play_tokens = 10  # it plays nothing
  config.agent.sampling.play_tokens = 6
  recipes._pack(config, length=192, rows=16, context=96)
  config.pack.response = 10


def _containers(config: Config) -> None:
  config.env.town = 0  # [us]: never imitated
  config.env.reported = 0.5  # [us]: beside half of the containers lies all that the agent needs
  config.eval.options.split = "heldout"  # other colours


def lab(config: Config, variant: str) -> None:
  """The lab, family key-5: what the agent lacks is the same in every variation, and no single episode shows it all."""
  recipes._check(variant)
  if variant == "paper":
    _paper(config)
  else:
    _tiny(config, "tiny:lab")
    config.sampling.reflect_tokens = 12  # [us] Lmax: up to 9 words, a tag and the end
    config.sampling.play_tokens = 12  # it plays nothing
    config.agent.sampling.play_tokens = 6  # an action is 5 tokens
    recipes._pack(config, length=192, rows=16, context=96)
    config.pack.response = 12
    config.method.reward = "score"  # [us]: of a hundred episodes alone four succeed
    config.method.distil = 60  # [T]: one context
    config.train.updates = 8 + 60 + 80
  config.env.family = "key-5"  # [us]: never imitated
  config.eval.options.split = "heldout"
  if variant == "smoke":
    _smoke(config)


def alfworld(config: Config, variant: str) -> None:
  """The real engine [S]: the published games where they are (config.env.data), else generated ones."""
  _world(config, variant, turns=30, tokens=512)  # turns: MemRL's, with which it is compared
  config.eval.tasks = 134  # all held-out games
  if variant != "paper":
    _reader(config, variant, turns=3)
    config.env.data = "generated"
    config.env.games = 8


def lifelong_db(config: Config, variant: str) -> None:
  """Tables in SQL."""
  _lifelong(config, variant, held_out=139)


def lifelong_os(config: Config, variant: str) -> None:
  """A shell in a machine of its own [S]."""
  _lifelong(config, variant, held_out=150)
  config.env.timeout_s = 120.0  # twice the seconds of a command, and a start


def _lifelong(config: Config, variant: str, *, held_out: int) -> None:
  _world(config, variant, turns=15, tokens=512)  # turns: MemRL's
  config.eval.tasks = held_out
  if variant != "paper":
    _reader(config, variant, turns=3)


def miniwob(config: Config, variant: str) -> None:
  """Small tasks on web pages, in a real browser [us]: 95 tasks to learn from, 30 others to be judged by."""
  _browser(config, variant, held_out=300)  # ten pages of each


def webarena(config: Config, variant: str) -> None:
  """Six web sites of your own [S]; judged on the templates of tasks that are never played."""
  _browser(config, variant, held_out=234)


def workarena(config: Config, variant: str) -> None:
  """A ServiceNow instance of your own [S]; judged on eight tasks of 33."""
  _browser(config, variant, held_out=80)  # ten instances of each


def _browser(config: Config, variant: str, *, held_out: int) -> None:
  """Web pages, as text; a browser a process, a page for every trial that plays."""
  _world(config, variant, tokens=512)
  # [us]: a turn shows three pages, and a hint looks back at all of them.
  config.agent.engine.buckets = (8192, 32_768)
  config.env.timeout_s = 120.0  # a browser may have to start
  config.train.concurrency = 32  # [us]
  config.eval.tasks = held_out
  if variant != "paper":
    _reader(config, variant, turns=2)
    config.env.isolation = "process"
    config.env.page_chars = 600
    config.train.groups = 10  # a task each
    config.train.concurrency = 4


def _world(config: Config, variant: str, *, tokens: int, turns: int = 0) -> None:
  """What real environments share; `tokens` of an answer of the agent."""
  recipes._check(variant)
  _paper(config)
  config.agent.sampling.play_tokens = tokens
  if turns:
    config.env.turns = turns


def _reader(config: Config, variant: str, *, turns: int) -> None:
  """Sizes for tiny models that cannot play this: it proves that a run goes through."""
  style = config.env.style
  recipes._tiny_reader(config)
  config.env.style = style
  config.env.turns = turns
  config.model.dtype = "float32"
  config.mesh.data = 1
  config.agent.model.checkpoint = config.model.checkpoint
  config.agent.model.dtype = "float32"
  config.agent.mesh = dict(config.mesh)
  config.agent.sampling.play_tokens = 12
  config.agent.sampling.reflect_tokens = (
    16  # its hints never end, and one over Lmax is not imitated
  )
  if variant == "smoke":
    recipes._smoke(config)
  config.agent.engine = dict(config.engine)
  config.method.gather = 1
  config.method.distil = 2
  config.method.hints = 8
  config.train.updates = 5
  config.train.group_size = 2
  config.eval.tasks = 4


def _tiny(config: Config, checkpoint: str) -> None:
  """Mem-pi's own values with them."""
  _tiny_models(config, checkpoint)
  config.method.gather = 8  # [T]
  config.method.keep = "helped"  # [us]: one in eight did
  config.method.decisions = (
    0.0  # [us]: as a bank without trials, so stage 1 speaks nine times in ten
  )
  config.method.show = 1  # [us]: as many hints as the policy gives
  config.method.distil = 200  # [T]
  config.method.distil_rate = 1e-3  # [T]
  config.method.brevity = 0.05  # [S]
  config.train.updates = 8 + 200 + 100
  config.train.group_size = 8  # [S]
  config.optim.learning_rate = 3e-4  # [T]
  config.loss.kl_coef = 0.01  # [S]
  config.eval.arms = ("none", "rag", "memory")


def _tiny_models(config: Config, checkpoint: str) -> None:
  """A tiny agent, and a memory policy or a manager that begins as a copy of it."""
  recipes._laptop(config)
  _plain(config)
  config.model.checkpoint = checkpoint
  config.agent.model.checkpoint = checkpoint
  config.agent.sampling.temperature = 0.7  # as in evaluations
  config.agent.sampling.reflect_tokens = 16
  config.train.groups = 16
  config.train.minibatches = 1
  config.eval.at_start = False


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
  _smoke_agent(config)


def _smoke_agent(config: Config) -> None:
  config.agent.engine.slots = 16
  config.agent.engine.share = 0
  config.agent.engine.buckets = config.engine.buckets
  config.agent.engine.prefill_rows = (8,)
  config.agent.engine.prefill_chunks = (32,)


def _paper(config: Config) -> None:
  """Mem-pi's own values with the models."""
  _paper_models(config)
  config.method.gather = 16  # [us], with the next two: 2048 hints, each imitated three times
  config.method.distil = 96
  config.method.hints = 64
  config.method.distil_rate = 1e-5  # [S]
  config.method.brevity = 0.05  # [S]
  config.train.updates = 16 + 96 + 150  # [us]
  config.train.group_size = 8  # [S]
  config.optim.learning_rate = 1e-6  # [S]
  config.loss.kl_coef = 0.02  # [S]: .01 to .04
  config.eval.arms = ("none", "rag", "memory")


def _paper_models(config: Config) -> None:
  """Qwen2.5-7B-Instruct as memory policy and as agent, which four devices each hold; the paper has 8 GPUs [S].

  With adapters instead: LORA.
  """
  recipes._paper(config)
  _plain(config)
  config.credit = dataclasses.asdict(credit.CreditConfig())  # nothing of it is read
  config.model.checkpoint = "path/to/Qwen2.5-7B-Instruct"  # [S], a directory of yours
  config.sampling.temperature = 1.0  # [S]
  config.sampling.reflect_tokens = 256  # [S] Lmax
  config.sampling.play_tokens = 256  # it plays nothing
  config.pack.response = 256
  config.train.minibatches = 4  # [us]: 240 rows an update
  config.train.eval_every = 25
  config.eval.at_start = False
  recipes._pack(config, length=16_384, rows=8, context=8192)
  config.agent.model.checkpoint = config.model.checkpoint  # [S]
  config.agent.model.dtype = "bfloat16"
  config.agent.sampling.temperature = 0.7  # as in evaluations
  config.agent.sampling.play_tokens = 512
  config.agent.sampling.reflect_tokens = (
    256  # [S]: a hint of the bank is no longer than one of the policy
  )
  config.agent.engine = dict(config.engine)
  config.agent.mesh = dict(config.mesh) | {"first": 4}  # behind the memory policy's
