"""Trains a tiny model from scratch by imitation of scripted players: the warm start of an environment.

    python experiments/tiny/imitate.py --recipe=darkroom --out=DIR [--steps=N] [--seed=S]
    python experiments/tiny/imitate.py --recipe=darkroom --out=DIR --measure-only

The players play LaMer's own trials (attempt, reflection, attempt, ...), so the rows are rendered and
tokenised by the very code that renders rollouts. The result is measured on the `dev` half of the
family's panel against the gate: memory must not hurt (pass@3 with minus without memory), format
valid >= .97, pass@1 between .10 and .40. `--out` writes config.json, model.safetensors and
imitation.json (recipe and measurement). Recipes and results: experiments/tiny/README.md.

A recipe with `rounds` makes a warm start for a lasting memory instead (tips.py): single attempts, with
tips of earlier ones. Its gate: a perfect tip raises success by .3, the tips of failures do not lower it.
One with a `source` is for experience that a second model writes (entries.py, entry_gates.py): the actor
that reads it, or the writer; or a frozen model that follows hints (hinted.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import jax
import numpy as np
import optax

from experiments.tiny import entries, entry_gates, hinted, tips
from memrl_jax.envs import base as env_base
from memrl_jax.envs import panel, pool
from memrl_jax.methods import baselines, lamer
from memrl_jax.models import policy, tiny, weights
from memrl_jax.models.config import DecoderConfig
from memrl_jax.ops import masks
from memrl_jax.rollout import collect, pack, policies
from memrl_jax.sampling import chat, engine
from memrl_jax.training import evaluate
from memrl_jax.types import Sample, Trial, Turn

DATA, ORDER = 11, 12  # streams of randomness under the seed


@dataclasses.dataclass(frozen=True)
class Recipe:
  """What is imitated and for how long.

  `mixes`: (share of trials, environment options) of the tasks. `rounds`: with tips, so many times
  `trials` episodes; `evaluate` and `also` are the options that are measured, besides the mixes.
  `source`: "actor" or "writer" of entries, or "hints", `trials` episodes for each of the mixes.
  """

  family: str
  mixes: tuple[tuple[float, tuple[tuple[str, object], ...]], ...]
  trials: int
  steps: int
  stop: int  # steps really run: the schedule of `steps` is cut here
  learning_rate: float
  layers: int
  length: int
  evaluate: tuple[tuple[str, object], ...] = ()
  dim: int = 128
  mlp: int = 256
  memory_share: float = 0.5
  sequences: int = 24
  rows: int = 6
  player: str = "mixture"
  rounds: int = 0
  also: tuple[tuple[tuple[str, object], ...], ...] = ()
  source: str = ""


_MINES5 = (("size", 4), ("mines", 5), ("turns", 10))
_LAB = [f"key-{i}" for i in range(8, 68)]  # never a family below lab_world.RESERVED
_LAB += [f"{chain}-{i}" for chain in ("lamp", "code") for i in range(8, 34)]
_ROOMS = [
  (("kind", kind), ("family", number))
  for number in range(8, 104)  # never one below rooms_world.RESERVED
  for kind in ("key", "maze")
]
_ROOMS_MIXES = tuple((1 / len(_ROOMS), options) for options in _ROOMS)
_TOWNS = tuple((1 / 96, (("town", i),)) for i in range(8, 104))  # none below hints_world.RESERVED
_ROOMS_DEV = dict(evaluate=(("kind", "key"),), also=((("kind", "maze"),),))
RECIPES = {
  "darkroom": Recipe(
    family="darkroom",
    mixes=(
      (0.6, (("start", "center"),)),
      (0.4, (("start", "random"), ("split", "train"))),
    ),
    trials=9_000, steps=1000, stop=850, learning_rate=2e-3, layers=3, length=128,
  ),
  "hints": Recipe(
    family="hints", source="hints", mixes=_TOWNS, evaluate=(("town", 0),),
    also=((("town", 0), ("split", "heldout")), (("town", 5),)),
    trials=192, steps=3500, stop=3500, learning_rate=2e-3, layers=4, length=192, rows=12, sequences=8,
    memory_share=0.75,
  ),
  "lab": Recipe(
    family="lab",
    mixes=tuple((1 / len(_LAB), (("family", name),)) for name in _LAB),
    evaluate=(("family", "key-0"),),
    also=(
      (("family", "key-0"), ("split", "heldout")),
      (("family", "lamp-0"),),
      (("family", "code-0"),),
    ),
    trials=16, rounds=6, steps=2800, stop=2800, learning_rate=2e-3, layers=4, length=192, rows=24,
    sequences=8,
  ),
  "minesweeper": Recipe(
    family="minesweeper",
    mixes=((0.4, (("mines", 3),)), (0.6, _MINES5)),
    trials=9_000, steps=1500, stop=1500, learning_rate=2e-3, layers=4, length=192,
  ),
  "minesweeper5": Recipe(
    family="minesweeper",
    mixes=((1.0, _MINES5),), evaluate=_MINES5,
    trials=20_000, steps=3500, stop=3500, learning_rate=2e-3, layers=4, length=192,
  ),
  "rooms": Recipe(
    family="rooms", source="actor", mixes=_ROOMS_MIXES, **_ROOMS_DEV,
    trials=64, steps=2400, stop=2400, learning_rate=2e-3, layers=4, length=256, rows=24, sequences=8,
  ),
  "rooms_writer": Recipe(
    family="rooms", source="writer", player="skilled", mixes=_ROOMS_MIXES, **_ROOMS_DEV,
    trials=64, steps=1000, stop=1000, learning_rate=2e-3, layers=4, length=256, rows=6, sequences=16,
    memory_share=0.4,
  ),
  "sokoban": Recipe(
    family="sokoban",
    mixes=((0.3, (("boxes", 1),)), (0.7, (("boxes", 2),))),
    trials=9_000, steps=1500, stop=900, learning_rate=2e-3, layers=4, length=192,
  ),
}  # fmt: skip


def play(recipe: Recipe, family: env_base.Family, seed: int) -> list[Trial]:
  """Trials of the scripted mixture on training tasks; every turn is one row."""
  make, every = family.players[recipe.player], []
  if recipe.rounds:
    options = [family.options(**dict(changes)) for _, changes in recipe.mixes]
    every = tips.rounds(
      family, options, make, count=recipe.rounds, episodes=recipe.trials, seed=(seed, DATA)
    )
    return [trial for trial in every if trial.void is None]
  rng = np.random.default_rng([seed, DATA])
  for mix, (share, changes) in enumerate(recipe.mixes):
    options = family.options(**dict(changes))
    count = round(share * recipe.trials)
    trials = [Trial(family.name, env_base.train_seed(rng), group, 0) for group in range(count)]
    players = policies.players(lambda r, o=options: make(o, r), seed * 100 + mix)
    envs = pool.EnvPool(family, options, isolation="inline")
    collect.collect(
      trials,
      lamer.trial(lamer.LamerConfig()),
      lambda trial, request, p=players: p,
      envs,
      family.prompts(options),
      horizon=evaluate.horizon(family, options),
      seed=(seed, DATA, mix),
    )
    envs.close()
    every += trials
  return [trial for trial in every if trial.void is None]


def episodes(recipe: Recipe, family: env_base.Family, seed: int) -> list[list[Turn]]:
  """Rows to imitate, by what is drawn together: an episode where its rows share beginnings, else a row."""
  if recipe.source:
    options = [family.options(**dict(changes)) for _, changes in recipe.mixes]
    make = {"actor": entries.actor, "writer": entries.writer, "hints": hinted.episodes}[
      recipe.source
    ]
    return make(family, options, family.players[recipe.player], recipe.trials, seed)
  units = [trial.turns for trial in play(recipe, family, seed)]
  return units if recipe.rounds else [[row] for unit in units for row in unit]


def tokenise(turns: list[Turn], text: chat.Chat) -> list[Turn]:
  """The rows with prompt and answer ids; behaviour log-probs do not exist and are not read."""
  rows = []
  for turn in turns:
    ids = text.reply(turn.sample.text)
    sample = Sample(turn.sample.text, text.encode(turn.messages), ids, np.zeros(len(ids)))
    rows.append(dataclasses.replace(turn, sample=sample, advantage=1.0))
  return rows


def batches(units: list[list[Turn]], recipe: Recipe, config: pack.PackConfig, seed: int):
  """Endless packed batches; units whose prompts show a memory make up `memory_share` of them.

  A unit is what is drawn together: a row, or an episode, whose rows share most of their prompts.
  """
  rng = np.random.default_rng([seed, ORDER])
  later = [unit for unit in units if any(row.memory for row in unit)]
  first = [unit for unit in units if not any(row.memory for row in unit)]
  count = round(1200 * len(units) / sum(map(len, units)))  # about 1200 rows
  while True:
    many = round(recipe.memory_share * count)
    picked = [later[i] for i in rng.integers(len(later), size=many)]
    picked += [first[i] for i in rng.integers(len(first), size=count - many)]
    chosen = [row for unit in picked for row in unit]
    sequences = pack.pack(chosen, dataclasses.replace(config, sequences=1))
    order = rng.permutation(len(sequences))
    for start in range(0, len(order) - config.sequences + 1, config.sequences):
      group = [sequences[i] for i in order[start : start + config.sequences]]
      yield jax.tree.map(lambda *leaves: np.concatenate(leaves), *group)


def train(
  recipe: Recipe, cfg: DecoderConfig, params: dict, units: list[list[Turn]], seed: int, log
) -> dict:
  """Maximises the log-likelihood of the answers; returns the weights."""
  tx = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(
      optax.warmup_cosine_decay_schedule(
        0.0, recipe.learning_rate, 60, recipe.steps, 0.05 * recipe.learning_rate
      ),
      b2=0.99,
      weight_decay=0.01,
    ),
  )

  def loss_fn(params, batch):
    logp_BSK, _ = policy.logprobs(params, cfg, batch, entropy=False, remat=True)
    return masks.close(masks.open_sum(-logp_BSK, batch.mask_BSK))

  @jax.jit
  def step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  longest = max(len(row.sample.ids) for unit in units for row in unit)
  config = pack.PackConfig(recipe.sequences, recipe.length, recipe.rows, longest)
  opt_state = tx.init(params)
  losses, began = [], time.perf_counter()
  for number, batch in zip(range(recipe.stop), batches(units, recipe, config, seed), strict=False):
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(float(loss))
    if (number + 1) % 100 == 0:
      seconds = time.perf_counter() - began
      log(f"step {number + 1}/{recipe.stop}  loss {np.mean(losses[-100:]):.4f}  {seconds:.0f} s")
  return params


def clone(
  recipe: Recipe, family, text: chat.Chat, out: pathlib.Path, seed: int, log, start=None
) -> None:
  """Plays, tokenises, trains, from the checkpoint at `start` if given, writes the weights (as bfloat16)."""
  began = time.perf_counter()
  units = [tokenise(unit, text) for unit in episodes(recipe, family, seed)]
  rows = [row for unit in units for row in unit]
  sizes = [len(row.sample.prompt_ids) + len(row.sample.ids) for row in rows]
  log(
    f"{len(rows)} rows in {time.perf_counter() - began:.0f} s; tokens a row: median "
    f"{np.median(sizes):.0f}, max {max(sizes)}; answers up to {max(len(r.sample.ids) for r in rows)}"
  )
  cfg = DecoderConfig.tiny(
    text.vocab_size, layers=recipe.layers, dim=recipe.dim, mlp_dim=recipe.mlp
  )
  log(f"{cfg.parameters / 1e6:.2f} M parameters")
  params = weights.load_directory(start)[1] if start else policy.init(jax.random.key(seed), cfg)
  params = train(recipe, cfg, params, units, seed, log)
  weights.save_directory(out, cfg, params, dtype="bfloat16")
  note(out, recipe, seed, {})  # also marks the folder as one that reads the tiny tokenizer


def note(out: pathlib.Path, recipe: Recipe, seed: int, dev: dict) -> None:
  """Writes imitation.json: how the checkpoint was made, and what it does on the dev half."""
  record = {"recipe": dataclasses.asdict(recipe), "seed": seed, "dev": dev}
  (out / "imitation.json").write_text(json.dumps(record, indent=1) + "\n")


def measure(
  family, changes, cfg, params, text: chat.Chat, tasks: int, seed: int, memory: str = "attempts"
) -> dict:
  """What the checkpoint does on the dev half, at temperature .7: pass@k of the memory and the memoryless
  arm, or (memory "tips") success by what tips it is given; "actor", "writer" and "hints" at other temperatures too."""
  options = family.options(**dict(changes))
  seeds = [int(s) for s in panel.load(f"{family.name}-v1").dev[:tasks]]
  sampler = engine.Engine(cfg, params, engine.EngineConfig(slots=128))
  gates = {"actor": entry_gates.actor, "writer": entry_gates.writer, "hints": hinted.gate}
  if memory in gates:
    return gates[memory](family, options, sampler, text, seeds, seed)
  sampling = policies.SamplingConfig(0.7, 1.0, 0, 16, 24)
  language = policies.LanguagePolicy(sampler, text, sampling, max(sampler.config.buckets))
  if memory == "tips":
    return tips.measure(family, options, language, seeds, seed)
  arms = {"memory": lamer.trial(lamer.LamerConfig()), "none": baselines.trial(3)}
  result = {}
  for name, program in arms.items():
    envs = pool.EnvPool(family, options, isolation="inline")
    trials = collect.collect(
      [Trial(family.name, s, group, 0) for group, s in enumerate(seeds)],
      program,
      lambda trial, request: language,
      envs,
      family.prompts(options),
      horizon=evaluate.horizon(family, options),
      seed=(seed, 1),
    )
    envs.close()
    result[name] = evaluate.summary(trials)
  result["gate"] = result["memory"]["pass"][-1] - result["none"]["pass"][-1]
  return result


def line(result: dict) -> str:
  """A measurement for the log."""
  if "gate" in result:
    arms = {arm: [round(p, 3) for p in result[arm]["pass"]] for arm in ("memory", "none")}
    return f"{arms}  gate {result['gate']:+.3f}  valid {result['memory']['valid']:.3f}"
  arms = {
    arm: {name: round(value, 3) for name, value in values.items()}
    for arm, values in result.items()
    if arm != "gain"
  }
  gain = f"gain {result['gain']:+.3f}" if "gain" in result else ""
  return f"{gain}\n" + "\n".join(f"  {arm} {arms[arm]}" for arm in arms)


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument("--recipe", required=True, choices=sorted(RECIPES))
  parser.add_argument("--out", type=pathlib.Path, required=True)
  parser.add_argument("--measure-only", action="store_true", help="measure the checkpoint in --out")
  parser.add_argument("--start", type=pathlib.Path, default=None, help="go on from a checkpoint")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--tasks", type=int, default=512)
  for field in ("steps", "stop", "trials", "layers"):
    parser.add_argument(f"--{field}", type=int, default=None)
  parser.add_argument("--player", default=None, help="who is imitated")
  args = parser.parse_args()
  recipe = RECIPES[args.recipe]
  given = {f: getattr(args, f) for f in ("steps", "stop", "trials", "layers", "player")}
  recipe = dataclasses.replace(recipe, **{f: v for f, v in given.items() if v is not None})
  family = env_base.family(recipe.family)
  text = chat.load(tiny.tokenizer_directory())
  log = functools.partial(print, flush=True)

  if not args.measure_only:
    clone(recipe, family, text, args.out, args.seed, log, args.start)
  cfg, params = weights.load_directory(args.out)  # measured is what will be shipped
  measured = {}
  lasting = recipe.rounds or recipe.source
  others = recipe.also if lasting else [changes for _, changes in recipe.mixes]
  memory = recipe.source or ("tips" if recipe.rounds else "attempts")
  for changes in dict.fromkeys([recipe.evaluate, *others]):
    measured[json.dumps(dict(changes))] = result = measure(
      family, changes, cfg, params, text, args.tasks, args.seed, memory
    )
    log(f"{dict(changes)}  {line(result)}")
  note(args.out, recipe, args.seed, measured)


if __name__ == "__main__":
  main()
