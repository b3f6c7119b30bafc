"""Evaluation on a fixed panel: pass@k over sequential attempts, with intervals.

pass@k is the share of tasks won in at least one of the first k attempts at the same instance, one
trial a task (experiments/lamer.md 3.1); it is not the unbiased pass@k over independent samples. Void trials
leave the denominator and are counted. All arms play with the same sampling keys, so they differ in
what the agent is shown and not in its luck.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs import base as env_base
from memrl_jax.envs import panel as panels
from memrl_jax.envs import pool
from memrl_jax.methods import baselines
from memrl_jax.rollout import collect, policies
from memrl_jax.rollout.trial import Generate, Program
from memrl_jax.training import guard, hosts, together
from memrl_jax.training import settings as settings_lib
from memrl_jax.types import Trial

Z95 = 1.959964  # 97.5 % quantile of the normal distribution


def wilson(successes: int, trials: int) -> tuple[float, float]:
  """95 % interval of a proportion (Wilson 1927): centre and half-width of the score test.

      (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

  (0, 1) without trials.
  """
  if trials == 0:
    return 0.0, 1.0
  p, n, z2 = successes / trials, trials, Z95 * Z95
  centre = p + z2 / (2 * n)
  half = Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
  return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))


class Arm(NamedTuple):
  """One way to play the panel: which program, on which environment, who answers attempt 1."""

  program: Program
  options: Any
  first: collect.Policy | None = None


class Evaluator:
  """Plays the panel of a run with any policy; the tasks are the same at every call."""

  def __init__(self, settings: settings_lib.Settings, arms: dict[str, Program]):
    self._settings, self._programs = settings, arms
    self._family = env_base.family(settings.env.name)
    self._panel = panels.load(settings.eval.panel)
    seeds = getattr(self._panel, settings.eval.half)
    if settings.eval.tasks > len(seeds):
      raise ValueError(
        f"panel {settings.eval.panel} has {len(seeds)} {settings.eval.half} tasks, fewer than the "
        f"{settings.eval.tasks} asked for; lower config.eval.tasks"
      )
    self._seeds = [int(seed) for seed in seeds[: settings.eval.tasks]]

  def run(
    self,
    policy: collect.Policy,
    *,
    step: int,
    label: str,
    base: collect.Policy | None = None,
    memory: collect.Memory | None = None,
    advisor: collect.Policy | None = None,
  ) -> tuple[dict[str, Any], dict[str, list[Trial]]]:
    """(record for eval.jsonl, trials by arm). `base` is the untrained policy of the swap test, `memory`
    what the arms with one read (nothing is written to it), `advisor` who answers an agent's questions."""
    record = {
      "step": step,
      "label": label,
      "panel": f"{self._settings.eval.panel}/{self._settings.eval.half}",
      "tasks": len(self._seeds),
      "arms": {},
    }
    kept = {}
    for name, arm in self._arms(base).items():
      trials = self._play(arm, policy, memory=memory, advisor=advisor)
      record["arms"][name] = summary(trials)
      kept[name] = trials
    if self._settings.eval.diversity_tasks:
      diversity = self.diversity(policy)  # of first attempts, in which no arm remembers anything
      for name in self._settings.eval.arms:
        record["arms"][name]["diversity"] = diversity
    return record, kept

  def _arms(self, base: collect.Policy | None) -> dict[str, Arm]:
    settings = self._settings
    options = settings_lib.changed(settings.env.options, dict(settings.eval.options))
    arms = {name: Arm(self._programs[name], options) for name in settings.eval.arms}
    for who in settings.eval.swap:
      first = self._random(options) if who == "random" else base
      arms[f"swap {who}"] = Arm(self._programs["memory"], options, first)
    for name, changes in settings.eval.harder:
      harder = settings_lib.changed(options, dict(changes))
      for arm in settings.eval.arms:
        arms[f"{arm}, {name}"] = Arm(self._programs[arm], harder)
    return arms

  def _random(self, options: Any) -> collect.Policy:
    make = self._family.players["random"]
    return policies.players(lambda rng: make(options, rng), self._settings.seed)

  def _play(
    self,
    arm: Arm,
    policy: collect.Policy,
    repeats: int = 1,
    tasks: int | None = None,
    memory: collect.Memory | None = None,
    advisor: collect.Policy | None = None,
  ) -> list[Trial]:
    def route(trial: Trial, request: Generate) -> collect.Policy:
      if request.phase == "advise":
        return advisor
      swapped = arm.first is not None and request.attempt == 0 and request.phase == "play"
      return arm.first if swapped else policy

    env = self._settings.env
    envs = pool.EnvPool(
      self._family,
      arm.options,
      workers=env.workers,
      timeout_s=env.timeout_s,
      isolation=env.isolation,
    )
    trials = [
      Trial(env.name, seed, group, index)
      for group, seed in enumerate(self._seeds[:tasks])
      for index in range(repeats)
    ]
    mine = hosts.mine(trials)
    try:
      with together.reading(memory, mine) as read:
        collect.collect(
          mine,
          arm.program,
          route,
          envs,
          self._family.prompts(arm.options),
          horizon=horizon(self._family, arm.options),
          seed=(self._settings.seed, 1),
          concurrency=self._settings.train.concurrency,
          memory=read,
        )
    finally:
      envs.close()
    return list(hosts.exchange(trials, "the trials of an evaluation"))

  def diversity(self, policy: collect.Policy) -> float:
    """Mean over tasks of the entropy of attempt-1 trajectories, nats (experiments/lamer.md 3.1)."""
    settings = self._settings.eval
    options = settings_lib.changed(self._settings.env.options, dict(settings.options))
    arm = Arm(baselines.trial(1), options)
    trials = self._play(arm, policy, settings.diversity_samples, settings.diversity_tasks)
    return trajectory_entropy(trials)


def horizon(family: env_base.Family, options: Any) -> int:
  """Turns of an attempt."""
  env = family.make(options)
  try:
    return env.horizon
  finally:
    env.close()


def summary(trials: Sequence[Trial]) -> dict[str, Any]:
  """What one arm did; void trials are counted and left out of every share."""
  usable = [trial for trial in trials if trial.void is None]
  n = len(usable)
  attempts = max((len(trial.attempts) for trial in usable), default=0)
  wins = [sum(trial.success_by(k) for trial in usable) for k in range(1, max(attempts, 1) + 1)]
  bounds = [wilson(count, n) for count in wins]
  turns = [turn for trial in usable for turn in trial.turns]
  plays = [attempt for trial in usable for attempt in trial.attempts]
  by_attempt = []
  for k in range(attempts):
    played = [trial.attempts[k].success for trial in usable if len(trial.attempts) > k]
    by_attempt.append(_mean(played))
  return {
    "pass": [count / max(n, 1) for count in wins],
    "low": [low for low, _ in bounds],
    "high": [high for _, high in bounds],
    "score": _mean([max(attempt.score for attempt in trial.attempts) for trial in usable]),
    "reward": _mean([attempt.reward for attempt in plays]),
    "turns": _mean([attempt.turns for attempt in plays]),
    "valid": _mean([turn.valid for turn in turns]),
    "success_by_attempt": by_attempt,
    "diversity": None,
    "trials": n,
    "void": len(trials) - n,
  }


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values)) if len(values) else 0.0


def trajectory_entropy(trials: Sequence[Trial]) -> float:
  """Entropy in nats of the empirical distribution of trajectories of a task, averaged over tasks.

  A trajectory is the tuple of parsed actions of attempt 1.
  """
  by_task = collections.defaultdict(list)
  for trial in trials:
    if trial.void is None:
      actions = tuple(turn.action for turn in trial.turns if turn.attempt == 0)
      by_task[trial.group].append(actions)
  entropies = []
  for actions in by_task.values():
    counts = np.array(list(collections.Counter(actions).values()), float)
    shares = counts / counts.sum()
    entropies.append(float(-(shares * np.log(shares)).sum()))
  return _mean(entropies)


def rollout_metrics(trials: Sequence[Trial]) -> dict[str, float]:
  """What an update's trials did."""
  result = summary(trials)
  turns = [turn for trial in trials if trial.void is None for turn in trial.turns]
  numbers = {
    "rollout/success": result["pass"][-1],
    "rollout/score": result["score"],
    "rollout/reward": result["reward"],
    "rollout/turns": result["turns"],
    "rollout/void": result["void"] / max(len(trials), 1),
    "rollout/repetition": guard.repetition(trials),
    "rollout/repeated": repeated(trials),
    "rollout/episodes": sum(len(trial.attempts) for trial in trials if trial.void is None),
    "rollout/response_tokens": float(np.mean([len(t.sample.ids) for t in turns])) if turns else 0.0,
    "rollout/prompt_tokens": float(np.mean([len(t.sample.prompt_ids) for t in turns]))
    if turns
    else 0.0,
    "rollout/cut": float(np.mean([t.sample.finish == "length" for t in turns])) if turns else 0.0,
  }
  if turns:  # the guard must not take a round with nothing left to play for one of babble
    numbers["rollout/valid"] = result["valid"]
  for k, share in enumerate(result["pass"], start=1):
    numbers[f"rollout/pass@{k}"] = share
  return numbers


def repeated(trials: Sequence[Trial]) -> float:
  """Share of played turns that do in a state what the attempt has done there before."""
  told = []
  for trial in trials:
    if trial.void is None:
      seen = set()
      for turn in trial.turns:
        if turn.phase == "play":
          told.append((turn.attempt, turn.anchor, turn.action) in seen)
          seen.add((turn.attempt, turn.anchor, turn.action))
  return float(np.mean(told)) if told else 0.0


def table(record: dict[str, Any]) -> list[str]:
  """The evaluation as lines of text: pass@k with 95 % intervals."""
  k = max(len(arm["pass"]) for arm in record["arms"].values())
  head = "  ".join(f"pass@{i + 1} [95 % interval]" for i in range(k))
  lines = [f"  {'arm':<22}{head}   score  turns  valid  void"]
  for name, arm in record["arms"].items():
    cells = [
      f"{p:.3f} [{low:.3f}, {high:.3f}] "
      for p, low, high in zip(arm["pass"], arm["low"], arm["high"], strict=True)
    ]
    cells += [" " * 21] * (k - len(cells))
    lines.append(
      f"  {name:<22}{' '.join(cells)}   {arm['score']:.3f}  {arm['turns']:5.2f}  "
      f"{arm['valid']:.3f}  {arm['void']}"
    )
    if "hint_tokens" in arm:
      said = [f"{arm['hint_tokens']:.2f} hint tokens a task", f"silent in {arm['abstained']:.3f}"]
      if "abstained_solved" in arm:
        said += [
          f"of tasks that the agent alone solves {arm['abstained_solved']:.3f}",
          f"of others {arm['abstained_failed']:.3f}",
        ]
      lines.append(f"  {'':<22}{', '.join(said)}")
  return lines
