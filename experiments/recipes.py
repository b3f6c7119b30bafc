"""The values of all experiments, as small functions that set them; a config file composes two of them.

    config = base.new("lamer", "darkroom")
    recipes.darkroom(config, variant)  # the environment: task, sizes, optimiser, panel
    recipes.lamer(config, variant)     # the method: estimator, attempts, trials per task

Where a value comes from: [P] the method's paper (LaMer 2512.16848, EMPO2 2602.23008), [C] its release,
[T] measured with the tiny model (experiments/README.md), [us] our choice. What is not set here is a
default of the engine.

Variants: `laptop` (minutes on 2 CPU cores, tiny model), `smoke` (seconds), `paper` (Qwen3-4B), and
per environment `heldout`, `mines5` or `boxes2`, which are laptop runs of another task.
"""

from __future__ import annotations

import ml_collections

from memrl_jax.methods import baselines

Config = ml_collections.ConfigDict
VARIANTS = ("laptop", "smoke", "paper")


def _check(variant: str, *more: str) -> None:
  known = (*VARIANTS, *more)
  if variant not in known:
    raise ValueError(f"variant {variant!r} is not known; choose one of {', '.join(known)}")


# Environments.


def darkroom(config: Config, variant: str) -> None:
  """Dark Room 5x5 from the centre, 4 turns of 2 moves: the widest gap between luck and memory [T].

  heldout: random starts; trains on 3/4 of the (start, goal) pairs and is evaluated on the rest [T].
  """
  _check(variant, "heldout")
  (_paper if variant == "paper" else _laptop)(config)
  if variant == "paper":  # the paper has no Dark Room: sizes as its MineSweeper
    config.train.updates = 300
  else:
    config.optim.learning_rate = 3e-4  # [T]
    config.train.updates = 120  # [T]: after 60, cross-episode credit does not show yet
    config.sampling.play_tokens = 8  # 2 moves are 5 tokens
    _pack(config, length=128, rows=12, context=64)  # prompts of 15-51 tokens
  if variant == "heldout":
    config.env.start = "random"
    config.env.split = "train"
    config.eval.options.split = "heldout"
  if variant == "smoke":
    _smoke(config)


def minesweeper(config: Config, variant: str) -> None:
  """MineSweeper 6x6 with 3 mines, 7 turns [C]. mines5: 5 mines on 4x4, where a first
  attempt must guess and memory has room."""
  _check(variant, "mines5")
  (_paper if variant == "paper" else _laptop)(config)
  if variant == "paper":
    config.train.updates = 300  # [C]
    config.credit.gamma_traj = 0.9  # best in [P] Fig. 5; the released script says 0.6
    config.eval.harder = {f"mines{n}": {"mines": n} for n in (4, 5, 6)}  # [P] in kind
  else:
    config.optim.learning_rate = 1.5e-4  # [T]: 4e-4 and more peaks, then forgets its memory
    config.train.minibatches = 3  # [T]: 3-4
    config.sampling.play_tokens = 8  # one click is 4 tokens
    _pack(config, length=256, rows=16, context=80)  # prompts of 50-90 tokens, shared beginnings [T]
  if variant == "mines5":
    config.model.checkpoint = "tiny:minesweeper5"  # a clone for this board [T]
    config.env.size = 4  # [us]: a solver wins .22 in every attempt, and .22/.67/.94 with memory
    config.env.mines = 5
    config.env.turns = 10
    config.train.groups = 12  # [us], with the next: as Sokoban
    config.optim.learning_rate = 3e-4
  if variant == "smoke":
    _smoke(config)


def sokoban(config: Config, variant: str) -> None:
  """Sokoban 6x6, 7 turns of 3 actions [C]; 2 boxes in the paper, 1 on a laptop, boxes2: 2 there too."""
  _check(variant, "boxes2")
  (_paper if variant == "paper" else _laptop)(config)
  if variant == "paper":
    config.train.updates = 300  # [C]
    config.credit.gamma_traj = 0.6  # best in [P] Fig. 5; the released script says 0.9
    config.eval.harder = {f"boxes{n}": {"boxes": n} for n in (3, 4)}  # [P] in kind
  else:
    config.env.boxes = 2 if variant == "boxes2" else 1  # [us]: 2 boxes learn three times slower
    config.train.groups = 12  # [T]: tasks differ a lot in difficulty
    config.optim.learning_rate = 2e-4  # [T]: 3e-4 has updates of KL .5 and can lose its reflections
    config.train.minibatches = 3
    config.sampling.play_tokens = 8  # 3 actions are 6 tokens
    _pack(
      config, length=256, rows=16, context=80
    )  # prompts of 50-100 tokens, shared beginnings [T]
  if variant == "smoke":
    _smoke(config)


def lab(config: Config, variant: str) -> None:
  """The lab: 8 training variations of family lamp-0, evaluated on 16 others, single attempts.

  The clone solves lamp-0 in none of 512 episodes, key-0 in 1.5 of 100, from which GRPO learns too [T].
  """
  _check(variant)
  (_paper if variant == "paper" else _laptop)(config)
  config.env.family = "lamp-0"
  config.eval.options.split = "heldout"
  config.eval.arms = ("none",)  # a held-out variation has no tips of its own
  config.adapt.options.family = "key-5"  # [us]
  config.adapt.options.split = "heldout"
  config.tips.content = "tip"  # [us]: tiny models need no more of it
  config.novelty.threshold = 0.98  # [T]: the hash embedder tells the lab's states apart there
  if variant != "paper":
    config.train.updates = 60
    config.optim.learning_rate = 3e-4
    config.loss.aggregate = "token_mean"  # [P]
    config.sampling.play_tokens = 6  # an action is 5 tokens
    config.tips.top = 4  # [us]
    config.tips.threshold = 0.3  # [T]: of the hash embedder
    config.adapt.episodes = 4  # [us]
    _pack(config, length=192, rows=16, context=96)
    config.pack.sequences = 24
  if variant == "smoke":
    _smoke(config)


def scienceworld(config: Config, variant: str) -> None:
  """ScienceWorld: one task, its first 5 training variations, evaluated on its first 20 of the test split."""
  _check(variant)
  _paper(config)
  config.model.checkpoint = "path/to/Qwen2.5-7B-Instruct"  # [P], a directory of yours
  config.env.style = "chat"  # [P]: the whole conversation, answers without reasoning
  config.env.task = "power-component"
  config.env.variations = 5  # [C]
  config.eval.options.split = "test"
  config.eval.options.variations = 20  # [C]
  config.eval.arms = ("none",)  # [P]
  config.eval.temperature = 0.4  # [C], with the next two
  config.eval.top_p = 1.0
  config.eval.top_k = 0
  config.eval.tasks = 80  # [C]: 20 variations, 4 repeats
  config.train.updates = 150  # [?]: figures show 100 to 200
  config.train.minibatches = 16  # [C] in kind: mini-batches of 16 trials x 8
  config.sampling.play_tokens = 32  # [P]
  config.sampling.reflect_tokens = 512  # [C]
  config.pack.response = 512
  config.loss.entropy_coef = 0.0  # [C]
  config.credit.gamma_step = 1.0  # [P]: an undiscounted sum
  _pack(config, length=4608, rows=32, context=2304)  # 4500 tokens in all [P]
  config.adapt.options.task = "chemistry-mix-paint-secondary-color"  # [P] Fig. 8
  config.adapt.options.split = "test"
  config.adapt.options.variations = 9
  config.train.concurrency = 32  # [us]: a Java process each, 350 MB
  config.env.timeout_s = 300.0  # [us]: many simulators start at once
  if variant != "paper":
    _tiny_reader(config)
    config.env.isolation = "process"
    config.env.max_calls = 8
    config.env.jvms = 4
    config.train.concurrency = 4
    config.adapt.rounds = 1
    config.adapt.tasks = 2
    config.adapt.episodes = 2
  if variant == "smoke":
    _smoke(config)
    config.eval.tasks = 4


def webshop(config: Config, variant: str) -> None:
  """WebShop: the generated shop, or the published one (config.env.data_dir)."""
  _check(variant)
  _paper(config)
  config.model.checkpoint = "path/to/Qwen2.5-7B-Instruct"  # [P], a directory of yours
  config.env.style = "full"  # [P]: one prompt with the recent history, think and act
  config.eval.arms = ("none",)  # [P]
  config.eval.temperature = 0.4  # [C], with the next two
  config.eval.top_p = 1.0
  config.eval.top_k = 0
  config.train.updates = 150
  config.train.minibatches = 32  # [P] as GiGPO: 64 rows a step
  config.sampling.play_tokens = 512  # [P]
  config.sampling.reflect_tokens = 512  # [C]
  config.pack.response = 512
  config.loss.entropy_coef = 0.0  # [C]
  config.loss.kl_coef = 0.01  # [P]
  config.credit.gamma_step = 0.95  # [P]
  _pack(config, length=4096, rows=8, context=2048)
  config.adapt.options.split = "test"
  if variant != "paper":
    _tiny_reader(config)
    config.env.turns = 4
    config.adapt.rounds = 1
    config.adapt.tasks = 2
    config.adapt.episodes = 2
  if variant == "smoke":
    _smoke(config)


def _tiny_reader(config: Config) -> None:
  """Sizes for the tiny model of the lab, which cannot play this: it proves that a run goes through."""
  config.model.checkpoint = "tiny:lab"
  config.train.updates = 2
  config.train.groups = 2
  config.train.minibatches = 2
  config.sampling.play_tokens = 12
  config.sampling.reflect_tokens = 24
  config.env.workers = 2
  config.env.isolation = "thread"
  config.eval.tasks = 8
  config.eval.at_start = False
  config.guard.min_valid = 0.0  # its actions are those of another world
  config.loss.old_logps = "sampler"
  config.optim.learning_rate = 1e-4
  config.mesh.fsdp = 1
  config.mesh.tensor = 1
  config.tips.top = 3
  _pack(config, length=3072, rows=16, context=1536)
  config.pack.sequences = 2
  config.pack.response = 24
  config.engine.slots = 8


def _laptop(config: Config) -> None:
  """The shipped tiny model on two CPU cores."""
  config.train.updates = 40  # [T]
  config.train.groups = 8  # [T]
  config.train.minibatches = 2  # [T]
  config.sampling.reflect_tokens = 16  # reflections of the tiny models are up to 12 tokens
  config.optim.critic_learning_rate = 1e-3  # [us]: its value head starts at zero
  config.optim.beta2 = 0.99  # [T]: a hundred steps in all, so a shorter memory
  config.optim.weight_decay = 0.0  # [T]
  config.loss.entropy_coef = 0.001  # [C]; .005 lets a group without signal drift into noise [T]
  config.loss.aggregate = "sequence_mean"  # [T]: a long reflection must not outweigh a short move
  config.model.remat = "none"  # memory is no problem here, time is
  config.pack.response = 16
  config.eval.temperature = 0.7  # [C]; top-p and top-k stay off: the answers are a few tokens
  config.eval.tasks = 512  # as the paper [P], by the digits of its tables


def _smoke(config: Config) -> None:
  """Two updates, in seconds: proves that everything runs, and nothing else."""
  config.train.updates = 2
  config.train.groups = 2
  config.train.checkpoint_every = 1
  config.train.rollouts_every = 1
  config.eval.tasks = 16
  config.pack.sequences = 4
  config.engine.slots = 16
  config.engine.share = 0
  config.engine.buckets = config.engine.buckets[-1:]  # few shapes: compiling is most of a smoke run
  config.engine.prefill_rows = (8,)
  config.engine.prefill_chunks = (32,)


def _paper(config: Config) -> None:
  """Qwen3-4B on accelerators, with the values of the paper and its scripts (4 GPUs) [C]."""
  config.model.checkpoint = "path/to/Qwen3-4B"  # a directory of yours
  if "style" in config.env:  # a mix has parts instead, with a style each
    config.env.style = "full"
  config.env.workers = 16  # [us]
  config.env.isolation = "process"  # [us]: 128-384 games beside the accelerator's host thread
  config.sampling.play_tokens = 1024  # [C]
  config.sampling.reflect_tokens = 1024  # [C]
  config.train.groups = 16  # [C]
  config.train.minibatches = 40  # [C]: 64 rows a step, up to 2944 rows an update
  config.train.eval_every = 5  # [C]
  config.train.checkpoint_every = 10  # [C]
  config.optim.learning_rate = 1e-6  # [C], constant, no warm-up
  config.optim.critic_learning_rate = 1e-5  # [C]
  config.optim.beta2 = 0.999  # [C]
  config.optim.weight_decay = 0.01  # [C]
  config.optim.clip_norm = 1.0  # [C]
  config.loss.entropy_coef = 0.001  # [C]; no KL term [C]
  config.loss.aggregate = "token_mean"  # [C], there inside a micro-batch, here over all of them
  config.loss.old_logps = "trainer"  # [C]
  config.credit.weighting = "row"  # [C]
  config.credit.anchors = "state"  # [C]
  config.credit.batch_scale = False  # [C]
  config.eval.temperature = 0.7  # [C], with the next two
  config.eval.top_p = 0.8
  config.eval.top_k = 20
  config.eval.tasks = 512  # [P]: every printed digit is k/512
  config.mesh.fsdp = 2  # [C]: 4 GPUs, tensor parallel 2
  config.mesh.tensor = 2
  _pack(config, length=4096, rows=8, context=2048)  # prompts up to 2048 tokens [C] + 1024
  config.engine.prefill_chunks = (64, 512)  # [us]
  config.pack.sequences = 8  # [us]
  config.pack.response = 1024


def _pack(config: Config, *, length: int, rows: int, context: int) -> None:
  """Sizes that follow from how long rows are; whatever fits the context fits a packed sequence."""
  config.pack.length = length
  config.pack.rows = rows
  config.engine.buckets = (context, 2 * context)


# Methods. Fair budget [P]: 8 trials of 3 attempts against 24 trials of 1.


def lamer(config: Config, variant: str) -> None:
  """LaMer: GiGPO's estimator over trials of 3 attempts, cross-episode credit [P]."""
  config.credit.estimator = "gigpo"  # [C]
  config.method.attempts = 3  # [P]
  config.train.group_size = 2 if variant == "smoke" else 8  # [C]
  if variant == "paper":  # the main table's memory; reflections alone score as much or more [P]
    config.method.memory = "history_and_reflection"


# Where EMPO2 plays: single episodes in training and in evaluation, the same for every arm.
TIP_ENVIRONMENTS = ("lab", "scienceworld", "webshop")


def empo2(config: Config, variant: str) -> None:
  """EMPO2: GRPO's advantage on extrinsic and novelty reward, tips, off-policy updates [P]."""
  _episodes(config, variant)
  config.credit.estimator = "grpo"  # [P]
  config.credit.normalise = "mean_std"  # [P]
  config.credit.batch_scale = False
  config.novelty.kind = "prototypes"  # the reading of [P] that never divides by zero
  config.loss.off_policy = "with_tips"  # [P] Table 3, [C]; its Algorithm 1 says without_tips
  config.loss.mask_scope = "off_policy"  # [P]; the release has it switched off


def _episodes(config: Config, variant: str) -> None:
  """What EMPO2 and what it is compared with share where it plays."""
  config.train.group_size = 2 if variant == "smoke" else 8  # [P]
  config.credit.invalid_penalty = 0.0  # [C]
  config.loss.eps_low = 0.2  # [P], with the next two
  config.loss.eps_high = 0.3
  config.loss.dual_bound = 10.0
  if "eval_attempts" in config.method:
    config.method.eval_attempts = 1
  if config.env.name == "lab":
    config.credit.gamma_step = 1.0  # as ScienceWorld


def _single(config: Config, variant: str, estimator: str) -> None:
  """RL on single attempts, evaluated on 3 attempts without memory (and in LaMer's memory loop)."""
  config.credit.estimator = estimator
  config.method.attempts = 1  # [P]; the released MineSweeper scripts leave it at 3
  if config.env.name in TIP_ENVIRONMENTS:
    _episodes(config, variant)
    config.credit.batch_scale = False
  else:
    config.train.group_size = 6 if variant == "smoke" else 24  # [C]


def gigpo(config: Config, variant: str) -> None:
  """GiGPO (2505.10978): episode term plus anchor-state step term, no division by the std [C]."""
  _single(config, variant, "gigpo")


def grpo(config: Config, variant: str) -> None:
  """GRPO (2402.03300): return against the group, divided by its std [C]."""
  _single(config, variant, "grpo")
  config.credit.normalise = "mean_std"


def rloo(config: Config, variant: str) -> None:
  """RLOO (2402.14740): return against the mean of the others, under PPO's clip [C]."""
  _single(config, variant, "rloo")


def ppo(config: Config, variant: str) -> None:
  """PPO (1707.06347): a critic and GAE over the turns of an attempt."""
  _single(config, variant, "ppo")


def _frozen(config: Config) -> None:
  """Nothing is trained: the run is its evaluation."""
  config.train.updates = 0


def reflexion(config: Config, variant: str) -> None:
  """Reflexion (2303.11366): LaMer's loop with a frozen model."""
  del variant
  config.method.attempts = 3
  _frozen(config)


def retrospex(config: Config, variant: str) -> None:
  """Retrospex (2505.11807), reduced: as many episodes as RL has, played by the model as it is, then a
  critic of them re-scores what it proposes; arm `none` is the model alone."""
  _episodes(config, variant)
  config.eval.arms = ("none", "memory")
  config.method.candidates = 4  # [C], with the next four
  config.method.expectile = 0.7
  config.method.gamma = 0.99
  config.method.decay = 0.97 if config.env.name == "scienceworld" else 0.9
  config.method.floor = 0.6 if config.env.name == "scienceworld" else 0.5
  if config.env.name == "webshop":
    config.method.likelihood = "token"  # [C]: answers with thoughts differ by their lengths alone
  if variant == "smoke":
    config.method.steps = 50


def zeroshot(config: Config, variant: str) -> None:
  """The model as it is, 3 attempts without memory."""
  del variant
  _frozen(config)


def react(config: Config, variant: str) -> None:
  """ReAct (2210.03629): as zero-shot, asked for a thought first. (The tiny models know no thoughts.)"""
  del variant
  config.method.instruction = baselines.REACT
  _frozen(config)
