"""Where Complementary RL plays, and its own values; `recipes` has those that all experiments share.

[P] is its paper (2603.17621), [C] its release, [T] measured with the tiny models, [us] our choice. Its
baselines are overrides of its config files (experiments/README.md).
"""

from __future__ import annotations

from experiments import recipes
from experiments.recipes import Config


def rooms(config: Config, variant: str) -> None:
  """Mazes in fog whose themes hide the way out in one place each; three hatches, one leads out. On a laptop
  5x5."""
  recipes._check(variant)
  if variant == "paper":
    recipes._paper(config)
    _papers(config, turns=12, updates=145, tokens=1024, context=8192)
  else:
    _rooms_laptop(config)
    config.env.family = 0  # [us]: reserved, never imitated
    config.env.kind = "maze"  # [T]: key rooms are solved ten times less often, and show less
    config.env.side = 5
    config.env.choices = 3
  if variant == "smoke":
    recipes._smoke(config)


def _rooms_laptop(config: Config) -> None:
  """Sizes for the tiny actor of the rooms."""
  recipes._laptop(config)
  config.model.checkpoint = "tiny:rooms"
  config.train.updates = 100
  config.optim.learning_rate = (
    2e-4  # [T]: at 3e-4 one run in three loses its format after an update of KL .2
  )
  config.loss.aggregate = "token_mean"
  config.sampling.play_tokens = 8  # an action is up to 5 tokens
  recipes._pack(config, length=192, rows=16, context=96)
  config.pack.sequences = 24


def minihack(config: Config, variant: str) -> None:
  """The real game, one of the paper's four tasks; 128 trials an update, 145 updates [P]."""
  recipes._check(variant)
  recipes._paper(config)
  _papers(config, turns=30, updates=145, tokens=4096, context=32_768)
  config.env.task = "Room-Ultimate-5x5-v0"
  config.eval.options.split = "heldout"
  if variant != "paper":
    _reader(config, turns=6)
    config.env.moves_per_turn = 4
  if variant == "smoke":
    _smoke(config)


def alfworld(config: Config, variant: str) -> None:
  """The real engine: the published games where they are (config.env.data), else generated ones."""
  recipes._check(variant)
  recipes._paper(config)
  _papers(config, turns=40, updates=128, tokens=2048, context=32_768)
  config.env.failure_reward = -1.0  # [C]
  if variant == "paper":
    config.eval.tasks = 134  # [P]: all held-out games
  else:
    _reader(config, turns=6)
    config.env.data = "generated"
    config.env.games = 8
  if variant == "smoke":
    _smoke(config)


def webshop(config: Config, variant: str) -> None:
  """WebShop, the published shop or the generated one; 64 trials an update, at most 256 updates [P]."""
  recipes._check(variant)
  recipes._paper(config)
  _papers(config, turns=15, updates=256, tokens=1024, context=16_384)
  config.train.groups = 8
  config.train.minibatches = 4
  config.optim.warmup = 40  # [P]: 10 updates
  config.env.reward_scale = 1.0
  if variant != "paper":
    _reader(config, turns=4)
  if variant == "smoke":
    _smoke(config)


def swe(config: Config, variant: str) -> None:
  """SWE tasks: instances of SWE-bench in their images, or small generated repositories in a sandbox."""
  recipes._check(variant)
  recipes._paper(config)
  _papers(config, turns=30, updates=128, tokens=4096, context=65_536)
  config.env.style = "chat"
  if variant == "paper":
    config.model.checkpoint = "path/to/Qwen3-4B-Instruct-2507"  # [P]
    config.env.data = "path/to/instances.jsonl"  # [P]: 124 of SWE-bench Verified, by pass@16
    config.env.executor = "docker"
    config.env.timeout_s = 7300.0  # four times the seconds of a command, and a start
    config.env.command_s = 1800.0
    config.eval.tasks = 124
  else:
    _reader(config, turns=3)
  if variant == "smoke":
    _smoke(config)


def mix(config: Config, variant: str) -> None:
  """Several tasks in one run: Room, WebShop and ALFWorld, 128 trials each [P]; on a laptop, key rooms and
  mazes with one tiny actor and one bank each."""
  recipes._check(variant)
  if variant == "paper":
    recipes._paper(config)
    _papers(config, turns=0, updates=128, tokens=4096, context=32_768)
    config.env.parts = (
      "room=minihack(task=Room-Ultimate-5x5-v0), webshop=webshop(reward_scale=1), "
      "alfworld=alfworld(failure_reward=-1)"
    )
    config.train.groups = 48  # [P]: 384 trials
    config.train.minibatches = 4  # [P]: 96 a step
    return
  _rooms_laptop(config)
  config.env.parts = "key=rooms(kind=key), maze=rooms(kind=maze)"
  config.train.groups = 16  # 64 trials a part
  if variant == "smoke":
    recipes._smoke(config)


def complementary(config: Config, variant: str) -> None:
  """Complementary RL: split GRPO for the actor, CISPO for the extractor, a bank between them [P]."""
  config.train.group_size = 4 if variant == "smoke" else 8  # [P]
  config.credit.estimator = "grpo"  # [P]
  config.credit.normalise = "mean_std_population"  # [P] Eq. 5; the release is configured for "mean"
  config.credit.batch_scale = False
  config.credit.invalid_penalty = 0.0  # [C]
  config.credit.gamma_step = 1.0  # [P]
  config.loss.surrogate = "ppo_clip"  # [P], with eps .2 on both sides
  config.loss.kl_coef = 0.0
  config.loss.entropy_coef = 0.0
  config.loss.old_logps = "sampler"  # where recomputed, ratios are 1 and correct nothing
  if variant == "paper":
    config.sampling.temperature = 0.99  # [C]; its top-p .99 and top-k 100 cannot be trained exactly
    config.memory.embedder = "remote"  # [C]: Qwen3-Embedding-0.6B behind a server of yours
    config.memory.url = "http://127.0.0.1:8001/v1"
    config.memory.model = "Qwen3-Embedding-0.6B"
    config.manager.batch = 32  # [C], with the next
    config.manager.wait_s = 0.005
    config.manager.deterministic = False
    config.extractor.schedule = "async"  # [P]
    config.extractor.model.checkpoint = "path/to/Qwen3-4B-Thinking-2507"  # [P]
    config.extractor.sampling.reflect_tokens = 8192  # [C]
    config.extractor.engine.slots = 64
    config.extractor.engine.buckets = (16_384, 65_536)  # [P]
    config.extractor.engine.prefill_chunks = (64, 512)
    config.extractor.pack.length = 65_536
    config.extractor.pack.sequences = 8
    config.extractor.pack.response = 8192
    config.extractor.optim.weight_decay = 0.01
    config.extractor.mesh.first = 4  # [us]: the actor's mesh is in front of it
    config.extractor.mesh.fsdp = 2
    config.extractor.mesh.tensor = 2
    return
  config.extractor.model.checkpoint = config.model.checkpoint
  config.extractor.model.remat = "none"
  config.extractor.sampling.reflect_tokens = 24
  config.extractor.engine = dict(config.engine)
  config.extractor.engine.slots = min(64, config.engine.slots)
  config.extractor.pack.sequences = 8
  config.extractor.pack.length = config.pack.length
  config.extractor.pack.rows = config.pack.rows
  config.extractor.pack.response = 24
  config.extractor.optim.beta2 = 0.99
  config.extractor.optim.weight_decay = 0.0
  if "rooms" in config.model.checkpoint:
    _rooms_extractor(config)
  else:
    config.method.warmup = 1
    config.experience.merge_every = 1
  if variant == "smoke":
    config.method.warmup = 1
    config.experience.merge_every = 1
    config.experience.batch = 2
    config.experience.buffer = 64


def _rooms_extractor(config: Config) -> None:
  """The tiny extractor; sizes of the bank for some 80 updates of 64 trials."""
  config.extractor.model.checkpoint = "tiny:rooms_writer"
  config.extractor.optim.learning_rate = 1e-4  # [T]: at 1e-3 its answers cease to be readable
  config.extractor.loss.kl_coef = (
    0.05  # [T]: without it one run in four ends in babble; [P] has none
  )
  config.extractor.engine.buckets = (64, 128, 256)
  config.extractor.pack.length = 256
  config.loss.surrogate = "dual_clip"  # [T], with the next: tiny models lose their format easily
  config.credit.invalid_penalty = 0.5
  config.method.query = "goal"  # the map says nothing about what is hidden
  config.method.warmup = 2  # [us]: 64 trials write enough
  config.method.imitate_every = 1  # [T]: without it little moves into the weights of the free part
  config.method.imitate_weight = 0.5  # [T]: .05, .2 and .5 in turn do better without experience
  config.experience.capacity = 256  # [us], with the next two
  config.experience.evict = "utility"
  config.experience.merge_lanes = 8
  config.experience.chars = 200
  config.experience.batch = (
    32  # [T]: an update reads some 20 generations; with 64 it waits too long
  )
  config.experience.cool_down = 1


def _papers(config: Config, *, turns: int, updates: int, tokens: int, context: int) -> None:
  """What all experiments of the paper share: 7 B actor, 128 trials in micro-batches of 64, AdamW 1e-6."""
  config.model.checkpoint = "path/to/Qwen2.5-7B-Instruct"  # [P], a directory of yours
  if turns:
    config.env.turns = turns
  config.train.updates = updates
  config.train.minibatches = 2  # [P]: 64 trials a step
  config.sampling.play_tokens = tokens
  config.sampling.reflect_tokens = 1024
  config.pack.response = tokens
  config.loss.old_logps = "sampler"
  recipes._pack(config, length=context, rows=16, context=context // 2)


def _reader(config: Config, *, turns: int) -> None:
  """Sizes for a tiny model that cannot play this: it proves that a run goes through."""
  style = config.env.style
  recipes._tiny_reader(config)
  config.env.style = style
  config.env.turns = turns


def _smoke(config: Config) -> None:
  recipes._smoke(config)
  config.eval.tasks = 4
  config.eval.at_start = False
