"""LaMer: meta-RL across several attempts at the same task, with reflections in context.

"Meta-RL induces exploration in language agents" (2512.16848); experiments/lamer.md 1.1, 1.4-1.6.

    J(theta) = E[ G_1 ],   G_n,t = g_n,t + sum_{m > n} gamma_traj^(m-n) g_m,0

where g_n,t is the discounted return inside attempt n from turn t on. The reflection written between
two attempts is an action of the same policy and is paid by what comes after it.
"""

from __future__ import annotations

import dataclasses

from memrl_jax.envs import base as env_base
from memrl_jax.methods import base
from memrl_jax.rollout import credit
from memrl_jax.rollout.trial import Context, Program, play, reflect


@dataclasses.dataclass(frozen=True)
class LamerConfig:
  """`attempts` at one task in a trial; `memory` is what later attempts see of earlier ones."""

  attempts: int = 3
  memory: str = "reflection_only"

  def __post_init__(self):
    if self.attempts < 1:
      raise ValueError(
        f"a trial needs at least 1 attempt, not {self.attempts} (config.method.attempts)"
      )
    if self.memory not in env_base.MEMORY_KINDS:
      raise ValueError(
        f"memory {self.memory!r} is not known; choose one of {', '.join(env_base.MEMORY_KINDS)} "
        "(config.method.memory)"
      )


def trial(config: LamerConfig) -> Program:
  """Play, reflect, play, reflect, play; the first success ends the trial."""

  async def run(ctx: Context) -> None:
    past: tuple[env_base.AttemptLog, ...] = ()
    for number in range(config.attempts):
      attempt = env_base.AttemptLog(number, await ctx.open())
      await play(ctx, attempt, past, config.memory)
      if attempt.success or number == config.attempts - 1:
        return
      if config.memory != "history_only":  # the release writes reflections that nobody reads
        attempt.reflection = await reflect(ctx, attempt)
      past = (*past, attempt)

  return run


def make(
  config: LamerConfig, credit_config: credit.CreditConfig, shape: credit.Shape
) -> base.Method:
  """The method: trials as above, advantages by any estimator with cross-episode returns."""
  return base.Method(
    trial=trial(config),
    credit=credit.make(credit_config, shape),
    remember=base.forget,
    arms={"memory": trial(config)},
  )
