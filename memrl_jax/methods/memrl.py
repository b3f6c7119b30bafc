"""MemRL: a frozen model whose memory learns, while it is used, which memories help.

"MemRL" (2601.03192). Nothing is trained but the utilities Q of the memories. An attempt is shown, once and
at its beginning, what the memory suggests for its task; what was shown then moves towards the attempt's
reward, and the attempt itself becomes a memory: a procedure where it succeeded, a lesson where it failed,
in the words of the same frozen model.

    suggest   sim > delta, top k1;   score = (1 - lambda) z(sim) + lambda z(Q), top k2         (Eq. 5-7)
    feedback  Q <- Q + alpha (r + gamma max Q' - Q)                                            (Eq. 3, 8)

Of several attempts in a trial each asks the memory, is paid and is remembered for itself, and Q' is of the
memories that the next attempt may be shown: it begins where the last one ended, and its query says so. After
a success, and after the last attempt, there is no next one.

The memory, its options and presets are `memory.episodic`. Baselines are settings of it and of this method
(experiments/frozen.py has them all); what they ask the model beside playing is `memrl_asides`.
"""

from __future__ import annotations

from memrl_jax.envs.base import AttemptLog, Step
from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.methods import base, memrl_asides, memrl_memory
from memrl_jax.methods.memrl_config import MemrlConfig
from memrl_jax.methods.memrl_memory import SOLVED, Episodes
from memrl_jax.rollout.trial import Context, Program, Reading, play
from memrl_jax.types import Attempt, Memo, Message, Story, Trial

__all__ = ["Episodes", "MemrlConfig", "make", "query", "trial"]


def query(config: MemrlConfig, log: AttemptLog, before: AttemptLog | None = None) -> str:
  """What the memory is searched for, and remembers an attempt under: its task, and how the attempt
  `before` it ended, if there was one."""
  said = {"goal": [log.initial.goal], "observation": [log.initial.text]}
  said["goal_observation"] = [log.initial.goal, log.initial.text]
  task = "\n".join(filter(None, said[config.query])) or log.initial.text
  if before is None:
    return task
  return f"{task}\nThe attempt before failed with:\n{_lines(before.steps[-1])}"


def place(config: MemrlConfig, trial: Trial) -> str:
  """Where a trial reads and writes: one memory an environment (of a mix: a part), or one a task."""
  part, colon, _ = trial.task.partition(":")
  if config.scope == "task":
    return f"{trial.task} {trial.seed}"
  return part if colon else trial.env


def trial(
  config: MemrlConfig,
  how: EpisodicConfig,
  *,
  attempts: int,
  reads: bool = True,
  evaluates: bool = False,
) -> Program:
  """Attempts at a task until the first success, shown what the memory suggests if it `reads`; one that
  `evaluates` leaves nothing behind."""

  async def run(ctx: Context) -> None:
    if ctx.trial.mode == SOLVED:
      ctx.trial.attempts.append(Attempt(success=True, score=1.0, reward=0.0, turns=0))
      return
    told: list[Message] = []  # an attempt each
    before: AttemptLog | None = None
    for number in range(attempts):
      log = AttemptLog(number, await ctx.open())
      where, what = place(config, ctx.trial), query(config, log, before)
      memos = await suggested(ctx, config, log, where, what) if reads else ()
      reading = Reading(lambda log, w=what: w, given=memos)
      await play(ctx, log, (), "reflection_only", reading=reading)
      if not evaluates:
        told.append(Message("user", "\n".join(map(_lines, log.steps))))
        ctx.trial.story = Story(where, what, memrl_memory.shown(ctx.trial), told)
        if config.writes and how.build == "facts":
          await memrl_asides.facts(ctx, how, log, memrl_memory.played(ctx.trial)[-1], where)
        elif config.writes:
          await memrl_asides.sum_up(ctx, how, log, memrl_memory.played(ctx.trial)[-1])
      if log.success:
        return
      before = log

  return run


async def suggested(
  ctx: Context, config: MemrlConfig, log: AttemptLog, where: str, what: str
) -> tuple[Memo, ...]:
  """What the memory suggests, as far as the model wants it."""
  if config.judges in ("retrieve", "both") and not await memrl_asides.wanted(ctx, log, what):
    return ()
  memos = await ctx.recall(where, what)
  if config.judges in ("relevance", "both"):
    return await memrl_asides.relevant(ctx, log, what, memos)
  return memos


def _lines(step: Step) -> str:
  """What was done, and what was seen then."""
  return f"> {step.action or '(nothing)'}\n{step.result.observation.text}"


def make(config: MemrlConfig, memory: Episodes) -> base.Method:
  """The method; nothing is credited, because nothing but the memory learns."""
  how, n = memory.memory.config, config.eval_attempts
  return base.Method(
    trial=trial(config, how, attempts=config.attempts, reads=config.reads),
    credit=lambda trials: {},
    remember=memory.remember,
    arms={
      "none": trial(config, how, attempts=n, reads=False, evaluates=True),
      "memory": trial(config, how, attempts=n, reads=config.reads, evaluates=True),
    },
    plan=memory.plan,
    pool=memory.pool,
    memory=memory,
  )
