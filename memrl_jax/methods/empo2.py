"""EMPO2: exploration with a tip memory, whose lessons hybrid updates move into the weights.

"Exploratory memory-augmented on- and off-policy optimization" (2602.23008). Every training trial ends
with a tip, one sentence by the policy itself, which is stored at each step of the trial. Per update
one mode is drawn for all trials:

    none  (1 - p_memory)                  play without tips, pi(a|s) / pi_old(a|s)
    on    p_memory (1 - q_offpolicy)      play with tips,    pi(a|s,tips) / pi_old(a|s,tips)
    off   p_memory q_offpolicy            play with tips,    pi(a|s) / pi_old(a|s,tips)

In mode `off` the policy learns to do without tips what it did with them: the prompt that is trained
is the same conversation rendered anew without tips, never the old one with pieces cut out. A novelty
reward (`memory.novelty`) joins the extrinsic one before groups are compared. What text, algorithm box
and release of the paper disagree about is an option; its default is the first value named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs.base import AttemptLog, Prompts, View
from memrl_jax.memory import novelty, tips
from memrl_jax.methods import base
from memrl_jax.rollout import credit
from memrl_jax.rollout.trial import Context, Program, Reading, play, write_tip
from memrl_jax.types import Trial

MODES = ("none", "on", "off")


@dataclasses.dataclass(frozen=True)
class Empo2Config:
  """`mode_per`: one draw for all trials of an "update", or one for each task "group".

  keep_tips: "current" shows the tips of this turn only, "all" those of earlier turns too (the release).
  """

  attempts: int = 1
  eval_attempts: int = 1
  p_memory: float = 0.25
  q_offpolicy: float = 2 / 3
  mode_per: str = "update"
  keep_tips: str = "current"

  def __post_init__(self):
    if self.attempts != 1 or self.eval_attempts < 1:
      raise ValueError(
        f"EMPO2 plays 1 attempt in a training trial and at least 1 in evaluation, not {self.attempts} "
        f"and {self.eval_attempts} (config.method.attempts, config.method.eval_attempts)"
      )
    if not (0 <= self.p_memory <= 1 and 0 <= self.q_offpolicy <= 1):
      raise ValueError(
        f"p_memory {self.p_memory} and q_offpolicy {self.q_offpolicy} are probabilities; choose them in "
        "[0, 1] (config.method)"
      )
    for name, allowed in (("mode_per", ("update", "group")), ("keep_tips", ("current", "all"))):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.method.{name})"
        )


def mode(config: Empo2Config, rng: np.random.Generator) -> str:
  """The mode of one draw, with the probabilities above."""
  memory, off = rng.random(2)
  if memory >= config.p_memory:
    return "none"
  return "off" if off < config.q_offpolicy else "on"


def plan(config: Empo2Config, trials: Sequence[Trial], rng: np.random.Generator) -> None:
  """Sets the mode of every trial; a group never mixes modes, or its trials could not be compared."""
  drawn: dict[int, str] = {}
  for trial in trials:
    key = trial.group if config.mode_per == "group" else 0
    if key not in drawn:
      drawn[key] = mode(config, rng)
    trial.mode = drawn[key]


def key(how: tips.TipConfig, log: AttemptLog, prompts: Prompts) -> str:
  """The situation in which the next action is taken, newest text first: an encoder cuts the end."""
  if how.key == "full_chat":
    messages = prompts.play(View((), log).without_tips())
    return "\n".join(f"{m.role}: {m.content}" for m in messages if m.role != "system")
  last = [log.steps[-1].action] if log.steps else []
  return "\n".join([log.now.text, *last, log.initial.goal]).strip()


def trial(
  config: Empo2Config, how: tips.TipConfig, *, reads: bool, writes: bool, attempts: int = 1
) -> Program:
  """Attempts at a task; one that `reads` is given tips at every step, unless the trial's mode is
  "none", and one that `writes` ends with a tip of its own."""

  async def run(ctx: Context) -> None:
    for number in range(attempts):
      attempt = AttemptLog(number, await ctx.open())
      reading = Reading(
        key=lambda log: key(how, log, ctx.prompts),
        scope=tips.scope(how, ctx.trial.task) if reads and ctx.trial.mode != "none" else None,
        keep=config.keep_tips == "all",
        plain=ctx.trial.mode == "off",
      )
      await play(ctx, attempt, (), "reflection_only", reading=reading)
      if writes:
        await write_tip(ctx, attempt)
      if attempt.success:
        return

  return run


class Kept(NamedTuple):
  """What EMPO2 remembers (base.Remembered): the tips in their store, the counts in the checkpoint."""

  tips: tips.Tips
  counts: novelty.Novelty

  @property
  def reader(self) -> tips.Tips:
    return self.tips

  observer = reader  # reading leaves no trace

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, rest = self.counts.state()
    return arrays, {"version": self.tips.version, "novelty": rest}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self.counts.load(arrays, rest["novelty"])
    self.tips.discard_after(rest["version"])

  def reset(self) -> None:
    self.counts.load({}, {"scopes": {}})
    self.tips.discard_after(0)

  def close(self) -> None:
    self.tips.close()


def make(
  config: Empo2Config,
  credit_config: credit.CreditConfig,
  shape: credit.Shape,
  memory: Kept,
) -> base.Method:
  """The method; `memory` is what it keeps from update to update."""
  extrinsic = credit.make(credit_config, shape)

  def assign(trials: Sequence[Trial]) -> dict[str, float]:
    numbers = explore([trial for trial in trials if trial.void is None], memory.counts)
    numbers |= extrinsic(trials)
    for name in MODES:
      numbers[f"rollout/mode_{name}"] = float(np.mean([trial.mode == name for trial in trials]))
    return numbers

  how, n = memory.tips.config, config.eval_attempts
  return base.Method(
    trial=trial(config, how, reads=True, writes=True),
    credit=assign,
    remember=memory.tips.write,
    arms={
      "none": trial(config, how, reads=False, writes=False, attempts=n),
      "memory": trial(config, how, reads=True, writes=False, attempts=n),
    },
    plan=lambda trials, rng: plan(config, trials, rng),
    memory=memory,
  )


def explore(trials: Sequence[Trial], counts: novelty.Novelty) -> dict[str, float]:
  """Pays every played turn for the novelty of the state it acted in; returns metrics."""
  turns = [(trial, turn) for trial in trials for turn in trial.turns if turn.phase == "play"]
  visits = [
    novelty.Visit(trial.task, turn.anchor, None if trial.mode == "none" else len(turn.reads))
    for trial, turn in turns
  ]
  for (_, turn), reward in zip(turns, counts.rewards(visits), strict=True):
    turn.intrinsic = float(reward)
  n = max(len(trials), 1)
  return {
    "credit/intrinsic": sum(turn.intrinsic for _, turn in turns) / n,
    "credit/extrinsic": sum(turn.reward for _, turn in turns) / n,
    "memory/states": counts.distinct,
    "memory/shown": float(np.mean([len(turn.reads) for _, turn in turns])) if turns else 0.0,
  }
