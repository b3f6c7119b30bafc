"""Where MemRL plays, with its values; `recipes` has those that all experiments share.

[P] is its paper (2601.03192), [C] its release, [T] measured with the tiny models, [us] our choice. The model
is frozen: an update is a batch of tasks, and a run rounds over the same tasks. Baselines of MemRL are
overrides of these files, all in BASELINES.
"""

from __future__ import annotations

import dataclasses

from experiments import recipes
from experiments.recipes import Config
from memrl_jax.memory import episodic_config

# Nothing is learned about memories, and nothing tried out: they are found by similarity alone.
_SIMILAR = (
  "episodic.alpha=0",
  "episodic.lambda_=0",
  "episodic.explore=none",
  "episodic.explore_rate=0",
  "episodic.q_min=none",
)
_RAG = (*_SIMILAR, "episodic.build=trajectory", "episodic.update=vanilla")
_NOTHING = ("method.reads=false", "method.writes=false", "method.learns=false")
_RETRY = ("method.retry=unsolved",)

# What MemRL is compared with and what of it can be left away, as `--config.` overrides of the files here.
BASELINES: dict[str, tuple[str, ...]] = {
  "no memory": _NOTHING,
  "Pass@k": (*_NOTHING, *_RETRY, "sampling.temperature=0.7"),  # [us]: at 0 every try is the same
  "Reflexion": (  # the last attempt at this very task and what the model says about it
    *_SIMILAR,
    *_RETRY,
    "method.scope=task",
    "episodic.k2=1",
    "episodic.ties=newest",
    "episodic.failed_trajectory=true",
  ),
  "RAG": _RAG,
  "Self-RAG-like": (*_RAG, "method.judges=both"),
  "Mem0-like": (  # delta is of tasks to tasks; a fact is never that near to one, and Mem0 has no gate
    *_SIMILAR,
    "episodic.build=facts",
    "episodic.update=vanilla",
    "episodic.delta=-1",
    "episodic.strict=false",
  ),
  "MemP": _SIMILAR,
  "similarity only": ("episodic.lambda_=0",),
  "TD over attempts": ("method.attempts=3", "episodic.gamma=0.9"),
  "MemQ": ("episodic.gamma=0.9", "episodic.trace=0.8"),
}


def lab(config: Config, variant: str) -> None:
  """The lab, family key-5: a frozen clone that reads and writes in the notation of the tiny models."""
  recipes._check(variant)
  (recipes._paper if variant == "paper" else recipes._laptop)(config)
  config.env.family = "key-5"  # [us]: never imitated; the clone alone solves 1 in 50
  config.eval.options.split = "heldout"
  _rounds(config, tasks=64, batch=16, rounds=4 if variant != "paper" else 10)
  if variant == "paper":
    config.method.query = "goal"
    return
  config.method.note = "tip"
  config.method.query = "goal"
  config.episodic.build = "note"
  config.episodic.delta = 0.3  # [T]: of the hash embedder
  config.episodic.k1 = 8  # [us], with the next
  config.episodic.k2 = 4
  config.sampling.play_tokens = 6
  recipes._pack(config, length=192, rows=16, context=96)
  if variant == "smoke":
    recipes._smoke(config)
    config.train.tasks = 4


def hints(config: Config, variant: str) -> None:
  """The hints, town 0: tasks that look alike, where one memory helps and others mislead."""
  recipes._check(variant)
  (recipes._paper if variant == "paper" else recipes._laptop)(config)
  config.env.town = 0  # [us]: never imitated
  config.eval.options.split = "heldout"  # other colours: transfer with a frozen memory
  _rounds(config, tasks=96, batch=24, rounds=10)  # rounds [P]
  config.method.query = "goal"
  if variant == "paper":
    return
  config.method.note = "tip"
  config.episodic.build = "note"
  config.episodic.delta = 0.65  # [T]: the 80th percentile of the tasks' similarity is .61
  config.sampling.temperature = (
    0.7  # [us]: as in evaluations; with 0 [P] an agent without luck finds nothing
  )
  config.sampling.play_tokens = 6
  recipes._pack(config, length=192, rows=16, context=96)
  if variant == "smoke":
    recipes._smoke(config)
    config.train.tasks = 4


def alfworld(config: Config, variant: str) -> None:
  """3553 games in batches of 32, 10 rounds [P]; transfer to the unseen rooms."""
  _paper(config, variant, "alfworld", tasks=3553, batch=32, tokens=512)
  config.env.turns = 30  # [P]
  config.eval.tasks = 134
  if variant != "paper":
    _reader(config, variant, turns=5)
    config.env.data = "generated"
    config.env.games = 8


def lifelong_db(config: Config, variant: str) -> None:
  """Tables in SQL: 350 tasks in batches of 5, 10 rounds [P]."""
  _lifelong(config, variant, "lifelong_db", held_out=139)


def lifelong_os(config: Config, variant: str) -> None:
  """A shell in a machine of its own: 350 tasks in batches of 5, 10 rounds [P]."""
  _lifelong(config, variant, "lifelong_os", held_out=150)
  config.env.timeout_s = 120.0  # twice the seconds of a command, and a start


def _lifelong(config: Config, variant: str, preset: str, *, held_out: int) -> None:
  _paper(config, variant, preset, tasks=350, batch=5, tokens=512)
  config.env.turns = 15  # [P]
  config.eval.tasks = held_out
  if variant != "paper":
    _reader(config, variant, turns=3)


def bigcodebench(config: Config, variant: str) -> None:
  """798 programming tasks in batches of 25, 10 rounds [P], one answer each."""
  _paper(config, variant, "bigcodebench", tasks=798, batch=25, tokens=1280)
  config.eval.tasks = 342
  config.env.timeout_s = 120.0
  if variant != "paper":
    _reader(config, variant, turns=0)


def hle(config: Config, variant: str) -> None:
  """2500 questions in batches of 32, 10 rounds [P], one answer each; there is no transfer set."""
  _paper(config, variant, "hle", tasks=2500, batch=32, tokens=2048)
  config.sampling.temperature = 0.6  # [P]
  config.env.timeout_s = 300.0
  if variant != "paper":
    _reader(config, variant, turns=0)


def _paper(
  config: Config, variant: str, preset: str, *, tasks: int, batch: int, tokens: int
) -> None:
  recipes._check(variant)
  recipes._paper(config)
  config.model.checkpoint = "path/to/Qwen2.5-7B-Instruct"  # a directory of yours; [P] has APIs
  config.model.dtype = "bfloat16"
  config.episodic = dataclasses.asdict(episodic_config.preset(preset))
  _rounds(config, tasks=tasks, batch=batch, rounds=10)
  config.sampling.temperature = 0.0  # [P]
  config.sampling.play_tokens = tokens
  config.sampling.reflect_tokens = 512
  config.pack.response = max(tokens, 512)
  config.eval.temperature = 0.0
  config.eval.top_p = 1.0
  config.eval.top_k = 0
  config.eval.at_start = False
  recipes._pack(config, length=16_384, rows=8, context=8192)
  config.memory.embedder = "remote"  # [P]: text-embedding-3-large
  config.memory.url = "https://api.openai.com/v1"
  config.memory.model = "text-embedding-3-large"


def _rounds(config: Config, *, tasks: int, batch: int, rounds: int) -> None:
  config.train.group_size = 1
  config.train.groups = batch
  config.train.tasks = tasks
  config.train.updates = rounds * -(-tasks // batch)
  config.train.checkpoint_every = 10


def _reader(config: Config, variant: str, *, turns: int) -> None:
  """Sizes for a tiny model that cannot play this: it proves that a run goes through."""
  style = config.env.style
  recipes._tiny_reader(config)
  config.env.style = style
  if turns:
    config.env.turns = turns
  config.model.dtype = "float32"
  config.sampling.temperature = 1.0
  config.memory.embedder = "hash"
  config.episodic.delta = 0.2
  _rounds(config, tasks=4, batch=2, rounds=2)
  if variant == "smoke":
    updates = config.train.updates
    recipes._smoke(config)
    config.train.updates = updates
    config.eval.tasks = 4
