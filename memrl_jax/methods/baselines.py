"""What LaMer is compared with: prompting without training, and RL whose attempts share no memory.

zero-shot, ReAct (2210.03629)   a frozen model; ReAct asks for a thought before each action.
PPO, RLOO, GRPO, GiGPO          RL on single attempts (experiments/lamer.md 1.1: 24 x 1 against 8 x 3).
Reflexion (2303.11366) is LaMer's trial with a frozen model: see `methods.registry`.

Every attempt starts with a cleared memory: its prompts are those of a first attempt. (The released
baselines show the previous attempt's actions as if they were the current one's; experiments/lamer.md 6.6.)
"""

from __future__ import annotations

import dataclasses

from memrl_jax.envs.base import AttemptLog
from memrl_jax.methods import base
from memrl_jax.rollout import credit
from memrl_jax.rollout.trial import Context, Program, play

REACT = "First think step by step about what you know, then act."


@dataclasses.dataclass(frozen=True)
class BaselineConfig:
  """`attempts` per training trial (1 is the fair budget); evaluation always plays `eval_attempts`."""

  attempts: int = 1
  eval_attempts: int = 3
  instruction: str = ""

  def __post_init__(self):
    if self.attempts < 1 or self.eval_attempts < 1:
      raise ValueError(
        f"trials need at least 1 attempt, not {self.attempts} in training and {self.eval_attempts} in "
        "evaluation (config.method.attempts, config.method.eval_attempts)"
      )


def trial(attempts: int, instruction: str = "") -> Program:
  """Independent attempts at the same task, until the first success; nothing is remembered."""

  async def run(ctx: Context) -> None:
    for number in range(attempts):
      attempt = AttemptLog(number, await ctx.open())
      await play(ctx, attempt, (), "reflection_only", instruction)
      if attempt.success:
        return

  return run


def make(
  config: BaselineConfig, credit_config: credit.CreditConfig, shape: credit.Shape
) -> base.Method:
  """The baseline: memoryless trials; the estimator of `credit_config` makes it PPO, RLOO, GRPO, GiGPO."""
  return base.Method(
    trial=trial(config.attempts, config.instruction),
    credit=credit.make(credit_config, shape),
    remember=base.forget,
    arms={"none": trial(config.eval_attempts, config.instruction)},
  )
