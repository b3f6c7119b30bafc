"""Imitation data and measurements with tips: how `imitate.py` makes a warm start that reads a memory.

Scripted players play in rounds. In each round an episode is shown up to `MOST` remarks of earlier rounds on
its very task, of mixed quality, and ends with a remark of its own, so that the tips grow better from
round to round as they do in training. The episodes are rendered by the code that renders rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from memrl_jax.envs import base as env_base
from memrl_jax.envs import pool
from memrl_jax.rollout import collect, policies
from memrl_jax.rollout import trial as trial_lib
from memrl_jax.training import evaluate
from memrl_jax.types import Memo, Recall, Trial

MOST = 5  # tips in a prompt
STRAY = 0.05  # share of tips that come from another family: tips may be wrong
ALONE = 0.3  # share of episodes without any tip

Tips = tuple[str, ...]


class Given:
  """A memory that answers every turn of an episode with the tips fixed for it; `scope` is its group."""

  def __init__(self, tips: Mapping[int, Tips]):
    self._tips = tips

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    return [
      tuple(Memo(0, 0, text, 0.0, 1.0) for text in self._tips[int(ask.scope)]) for ask in asks
    ]


def episode(logs: dict[int, env_base.AttemptLog], remark: bool = True) -> trial_lib.Program:
  """One attempt with the tips given for it, then a remark; `logs` keeps the attempt by its group."""

  async def play(ctx: trial_lib.Context) -> None:
    log = logs[ctx.trial.group] = env_base.AttemptLog(0, await ctx.open())
    reading = trial_lib.Reading(lambda log: "", scope=str(ctx.trial.group))
    await trial_lib.play(ctx, log, (), "reflection_only", reading=reading)
    if remark:
      await trial_lib.write_tip(ctx, log)

  return play


def run(
  family: env_base.Family,
  options: Any,
  policy: collect.Policy,
  seeds: Sequence[int],
  tips: Mapping[int, Tips],
  seed: Sequence[int],
  remark: bool = True,
) -> tuple[list[Trial], dict[int, env_base.AttemptLog]]:
  """One episode a seed, with a remark at its end or without: the trials, and by their groups the attempts
  as the agent saw them."""
  envs = pool.EnvPool(family, options, isolation="inline")
  trials = [Trial(family.name, int(s), group, 0) for group, s in enumerate(seeds)]
  try:
    logs: dict[int, env_base.AttemptLog] = {}
    collect.collect(
      trials,
      episode(logs, remark),
      lambda trial, request: policy,
      envs,
      family.prompts(options),
      horizon=evaluate.horizon(family, options),
      seed=seed,
      memory=Given(tips),
    )
    return trials, logs
  finally:
    envs.close()


def rounds(
  family: env_base.Family,
  every: Sequence[Any],
  make: Callable[[Any, np.random.Generator], env_base.Player],
  *,
  count: int,
  episodes: int,
  seed: Sequence[int],
) -> list[Trial]:
  """`count` rounds of `episodes` episodes for each options in `every`; the tips of a task are its own."""
  rng, written, played = np.random.default_rng(seed), {}, []
  strays: list[str] = []
  for number in range(count):
    for index, options in enumerate(every):
      seeds = [env_base.train_seed(rng) for _ in range(episodes)]
      environment = family.make(options)
      names = [environment.reset(s).task for s in seeds]
      tips = {group: choose(written.get(name, []), strays, rng) for group, name in enumerate(names)}
      players = policies.players(
        lambda r, o=options: make(o, r), int(rng.integers(2**31))
      )  # a player of its own for every episode
      trials, _ = run(family, options, players, seeds, tips, (*seed, number, index))
      for trial in trials:
        written.setdefault(trial.task, []).append((trial.attempts[0].reward, trial.tip))
      strays += [trial.tip for trial in trials[:2]]
      played += trials
  return played


def choose(written: list[tuple[float, str]], strays: list[str], rng: np.random.Generator) -> Tips:
  """Up to MOST different tips, best outcome first: the best of all, or any, some of them strays."""
  texts = list(dict.fromkeys(text for _, text in reversed(written) if text))
  if not texts or rng.random() < ALONE:
    return ()
  worth = {text: reward for reward, text in written}
  if rng.random() < 0.5:  # as a memory that ranks by score; else anything it might hold
    texts.sort(key=lambda text: -worth[text])
  else:
    texts = [texts[i] for i in rng.permutation(len(texts))]
  texts = texts[: rng.integers(1, MOST + 1)]
  texts.sort(key=lambda text: -worth[text])
  swap = rng.random(len(texts)) < STRAY
  return tuple(
    strays[rng.integers(len(strays))] if other else text
    for text, other in zip(texts, swap, strict=True)
  )


def measure(
  family: env_base.Family,
  options: Any,
  policy: collect.Policy,
  seeds: Sequence[int],
  seed: int,
) -> dict[str, dict[str, float]]:
  """Single attempts of `policy` by what it is told: nothing, how a solver did it, or what one or five
  explorers found who failed. `early`: share of attempts lost by a penalty; `faithful`: share of remarks
  that say, word for word, what a scripted player says of the same attempt."""

  def scripted(name: str, salt: int) -> list[Trial]:
    players = policies.players(lambda rng: family.players[name](options, rng), salt)
    nothing = dict.fromkeys(range(len(seeds)), ())
    return run(family, options, players, seeds, nothing, (seed, salt))[0]

  def model(log: env_base.AttemptLog) -> str:
    player = family.players["explorer"](options, np.random.default_rng(0))
    return family.prompts(options).parse_tip(player.reflect(env_base.View((), log)))[0]

  failed = [[] for _ in seeds]
  salt = 1
  while any(len(found) < MOST for found in failed):
    for trial in scripted("explorer", salt):
      if not trial.attempts[0].success:
        failed[trial.group].append(trial.tip)
    salt += 1
  arms = {
    "none": [()] * len(seeds),
    "perfect": [(trial.tip,) for trial in scripted("solver", 0)],
    "failed": [tuple(found[:1]) for found in failed],
    "pooled": [tuple(dict.fromkeys(found[:MOST])) for found in failed],
  }
  result = {}
  for name, given in arms.items():
    trials, logs = run(family, options, policy, seeds, dict(enumerate(given)), (seed, 99))
    attempts = [trial.attempts[0] for trial in trials]
    turns = [turn for trial in trials for turn in trial.turns]
    result[name] = {
      "success": float(np.mean([attempt.success for attempt in attempts])),
      "early": float(np.mean([attempt.reward < 0 for attempt in attempts])),
      "score": float(np.mean([attempt.score for attempt in attempts])),
      "turns": float(np.mean([attempt.turns for attempt in attempts])),
      "valid": float(np.mean([turn.valid for turn in turns])),
      "faithful": float(np.mean([trial.tip == model(logs[trial.group]) for trial in trials])),
      "longest": max(len(turn.sample.prompt_ids) for turn in turns),
    }
  result["gain"] = result["perfect"]["success"] - result["none"]["success"]
  return result
