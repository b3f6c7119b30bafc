"""Mem-pi: a memory policy decides whether the agent is given a hint, and writes it.

"Mem-pi" (2605.21463); its text is not public, experiments/mempi.md has the definition. The agent is frozen. A second
model, the memory policy, sees x = (what the agent is to do, what it sees), and answers y = d m: a decision, to
speak or to abstain, and if it speaks a hint m of at most Lmax tokens, which is put into the agent's prompt. What
it knows is in its weights.

  gather    the agent plays alone, writes a hint, and plays again with it: the bank
  stage 1   L1 = - sum_t log pi(m_t | x, speak, m_<t), and cross-entropy of the decision that helped
  stage 2   groups of one forced abstention and forced hints; decision and content are paid apart
            (ops.counterfactual), KL to the policy of stage 1

An agent that is given nothing reads exactly the prompt of an agent without memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from memrl_jax.envs.base import AttemptLog, Hinting, View
from memrl_jax.memory import hintbank
from memrl_jax.methods import base
from memrl_jax.methods.mempi_config import MempiConfig
from memrl_jax.ops import counterfactual
from memrl_jax.rollout.lessons import Lesson
from memrl_jax.rollout.trial import Context, Generate, Program, Reading, decided, play, write_tip
from memrl_jax.types import Attempt, Memo, Message, Sample, Story, Trial, Turn

GATHER, ABSTAIN, SPEAK = "gather", "abstain", "speak"  # Trial.mode; "" decides by itself


def trial(config: MempiConfig, *, source: str = "policy", attempts: int = 1) -> Program:
  """Attempts of the agent, with hints of a `source`: "policy", the bank by similarity ("rag"), or "none"."""

  async def run(ctx: Context) -> None:
    if ctx.trial.mode == GATHER:
      await gather(ctx, config)
      return
    reading = None
    for number in range(attempts):
      log = AttemptLog(number, await ctx.open())
      reading = reading or await _reading(ctx, config, log, source)  # one hint, all attempts
      await play(ctx, log, (), "reflection_only", reading=reading)

  return run


async def _reading(ctx: Context, config: MempiConfig, log: AttemptLog, source: str) -> Reading:
  if source == "none":
    return Reading(lambda log: "", given=())
  ask = consult if source == "policy" else _retrieve
  if config.invocation == "step":
    return Reading(lambda log: "", consult=lambda log: ask(ctx, log))
  return Reading(lambda log: "", given=await ask(ctx, log))


async def _retrieve(ctx: Context, log: AttemptLog) -> tuple[Memo, ...]:
  goal, seen = context(ctx.prompts.extract.hinting, log)
  return await ctx.recall(hintbank.TENANT, hintbank.Hint(goal, seen, "").key)


def context(hinting: Hinting, log: AttemptLog) -> tuple[str, str]:
  """x = (q, o): the goal, and what the agent sees now."""
  return log.initial.goal, hinting.seen(View((), log))


async def consult(ctx: Context, log: AttemptLog) -> tuple[Memo, ...]:
  """The hint for what the agent sees now, () if it is given none; adds the decision's turn and the hint's."""
  hinting, mode, step = ctx.prompts.extract.hinting, ctx.trial.mode, len(log.steps)
  forced = {ABSTAIN: hinting.abstain, SPEAK: hinting.speak}.get(mode, "")
  answer = await ctx.ask(
    Generate(
      "advise",
      log.index,
      step,
      lambda view: _with(hinting.hint(log.initial.goal, hinting.seen(view)), log.now.images),
      View((), log),
      forced=forced,
      whole=mode == ABSTAIN,
    )
  )
  text = hinting.advice(forced + answer.sample.text)
  if forced:
    ctx.trial.turns.append(_turn(log, answer, decided(answer.sample, forced), mode))
  if mode != ABSTAIN:
    ctx.trial.turns.append(_turn(log, answer, answer.sample, text or ABSTAIN))
  return (Memo(0, 0, text, 0.0, 0.0),) if text else ()


def _with(messages: list[Message], images: tuple[str, ...]) -> list[Message]:
  """What the memory policy is asked, with what the agent sees."""
  *before, last = messages
  return [*before, last._replace(images=last.images + images)]


def _turn(log: AttemptLog, answer: Any, sample: Sample, action: str) -> Turn:
  return Turn(
    attempt=log.index,
    phase="advise",
    index=len(log.steps),
    messages=answer.messages,
    sample=sample,
    action=action,
    valid=True,
    reward=0.0,
    anchor="hint" if sample is answer.sample else "decision",
    sampled=sample is answer.sample,
  )


# The bank.


async def gather(ctx: Context, config: MempiConfig) -> None:
  """The agent alone, then its hint about that, then again with the hint; `episodes` of each.

  A turn's key is what the agent saw before it.
  """
  hinting = ctx.prompts.extract.hinting
  for number in range(2 * config.episodes):
    log = AttemptLog(number, await ctx.open())
    hint = (Memo(0, 0, ctx.trial.tip, 0.0, 0.0),) if ctx.trial.tip else ()
    if number == 0:
      ctx.trial.story = Story(*context(hinting, log), (), [])
    reading = Reading(lambda log: context(hinting, log)[1], given=hint)
    await play(ctx, log, (), "reflection_only", reading=reading)
    if number == config.episodes - 1:
      await write_tip(ctx, log)
      if not ctx.trial.tip:
        return


def experience(config: MempiConfig, trials: Sequence[Trial]) -> list[hintbank.Hint]:
  """What the trials of a gathering say; the agent alone is judged by all trials of its task.

  Where the policy is asked before every step, a hint is filed under all that the agent saw while it had the hint: it
  helped from there if that attempt went better than those alone.
  """
  done = [one for one in trials if one.void is None and one.mode == GATHER]
  alone: dict[tuple[str, int], list[float]] = {}
  for one in done:
    first = one.attempts[: config.episodes]
    alone.setdefault((one.task, one.seed), []).append(worth(config.judge, first))
  hints = []
  for one in done:
    if one.tip:
      rate = float(np.mean(alone[one.task, one.seed]))
      hinted = worth(config.judge, one.attempts[config.episodes :])
      hints += [
        hintbank.Hint(one.story.scope, seen, one.tip, rate, hinted, one.task)
        for seen in _contexts(config, one)
      ]
  return hints


def _contexts(config: MempiConfig, one: Trial) -> list[str]:
  """What the agent saw where the policy will be asked, in the attempts with its hint."""
  if config.invocation == "episode":
    return [one.story.query]
  hinted = (t for t in one.turns if t.phase == "play" and t.attempt >= config.episodes)
  return list(dict.fromkeys(turn.key for turn in hinted))


# Stage 1.


def lessons(
  config: MempiConfig, hinting: Hinting, hints: Sequence[hintbank.Hint], rng: np.random.Generator
) -> list[Lesson]:
  """What an update of stage 1 imitates: the content of hints drawn from the bank, and their decisions.

  A decision's label is what helped offline, smoothed; a hint that nobody tried teaches to speak.
  """
  drawn = [hints[i] for i in rng.integers(len(hints), size=config.hints)]
  made = []
  for one in drawn:
    messages = hinting.hint(one.goal, one.seen)
    if config.keep == "all" or one.helped is not False:
      made.append(Lesson(messages, hinting.speak, one.hint + hinting.close, "content"))
    silent = one.helped is False and config.decisions > 0
    right = config.smoothing if silent else 1 - config.smoothing  # of speaking
    made.append(Lesson(messages, "", hinting.speak, "decision", right, ends=False))
    made.append(Lesson(messages, "", hinting.abstain, "decision", 1 - right))
  return [one for one in made if one.weight]


# Stage 2.


def credit(config: MempiConfig, trials: Sequence[Trial], longest: int) -> dict[str, float]:
  """Sets the advantages of both rows of every trial; returns metrics. `longest`: Lmax, tokens."""
  groups: dict[int, dict[int, Trial]] = {}
  for one in trials:
    groups.setdefault(one.group, {})[one.index] = one
  shape = len(groups), max(one.index for one in trials) + 1
  return_NJ, length_NJ = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
  mask_NJ, tokens = np.zeros(shape, bool), {name: np.zeros(shape) for name in ("decision", "hint")}
  for n, members in enumerate(groups.values()):
    for j, one in members.items():
      if one.void is None:
        mask_NJ[n, j], return_NJ[n, j] = True, worth(config.reward, one.attempts)
        length_NJ[n, j] = hint_tokens(one)
  reward_NJ = counterfactual.regularised(
    return_NJ, length_NJ, weight=config.brevity, longest=longest
  )
  paid = _advantages(config, reward_NJ, mask_NJ)
  for n, members in enumerate(groups.values()):
    for j, one in members.items():
      for turn in _asides(one):
        advantage = (paid.decision_NJ if turn.anchor == "decision" else paid.content_NJ)[n, j]
        turn.advantage = float(advantage) if one.void is None and advantage else None
        if turn.anchor == "decision" and _settled(config, turn):
          turn.advantage = None
        if turn.advantage is not None:
          tokens[turn.anchor][n, j] += len(turn.sample.ids)
  factors = counterfactual.balance(
    tokens["decision"],
    tokens["hint"],
    decision_weight=config.decision_weight,
    content_weight=config.content_weight,
  )
  factors = {"decision": np.asarray(factors.decision_NJ), "hint": np.asarray(factors.content_NJ)}
  for n, members in enumerate(groups.values()):
    for j, one in members.items():
      for turn in _asides(one):
        if turn.advantage is not None:
          turn.advantage *= float(factors[turn.anchor][n, j])
          turn.advantage = turn.advantage or None
  return _numbers(return_NJ, length_NJ, mask_NJ, paid) | _speaks(trials)


def _settled(config: MempiConfig, turn: Turn) -> bool:
  """Whether a decision has been made against already: it is hardly ever taken, and would be pushed down further.

  The forced branch's gradient does not fade as the decision becomes unlikely, so its logit would fall for ever.
  """
  unlikely = np.exp(turn.sample.logps.sum()) <= config.settled
  return bool(unlikely and turn.advantage is not None and turn.advantage < 0)


def _advantages(config: MempiConfig, reward_NJ, mask_NJ) -> counterfactual.Advantages:
  paid = counterfactual.advantages(
    reward_NJ,
    mask_NJ,
    gate=config.gate,
    threshold=config.gate_above,
    temperature=config.gate_temperature,
    normalise=config.normalise,
  )
  return jax.tree.map(np.asarray, paid)


def _asides(one: Trial) -> list[Turn]:
  return [turn for turn in one.turns if turn.phase == "advise"]


def worth(measure: str, episodes: Sequence[Attempt]) -> float:
  """R(x, m): the mean over the agent's episodes of what is measured, its "success" or its "score"."""
  return float(np.mean([getattr(episode, measure) for episode in episodes]))


def hint_tokens(one: Trial) -> int:
  """|m|: sampled tokens of the hints that the agent was given, 0 where it was given none."""
  return sum(
    len(turn.sample.ids)
    for turn in _asides(one)
    if turn.anchor == "hint" and turn.action != ABSTAIN
  )


def _numbers(return_NJ, length_NJ, mask_NJ, paid) -> dict[str, float]:
  speaks_NJ = mask_NJ.copy()
  speaks_NJ[:, 0] = False
  alone_N, used_N = mask_NJ[:, 0], paid.used_N
  numbers = {
    "mempi/degenerate": float(np.mean(~used_N)),
    "mempi/open": float(np.mean(np.any(paid.open_NJ > 0, axis=1))),
  }
  for name, values in (
    ("alone", return_NJ[:, 0][alone_N]),
    ("hinted", return_NJ[speaks_NJ]),
    ("hint_tokens", length_NJ[speaks_NJ]),
    ("delta", paid.delta_N[used_N]),
  ):
    numbers |= {f"mempi/{name}": float(np.mean(values))} if len(values) else {}
  return numbers


def _speaks(trials: Sequence[Trial]) -> dict[str, float]:
  """How likely the policy is to speak, and that by whether the agent alone succeeded (member 0)."""
  numbers: dict[str, list[float]] = {"speaks": [], "speaks_solved": [], "speaks_failed": []}
  for one in trials:
    if one.mode == ABSTAIN and one.void is None:
      silent = [t.sample.logps.sum() for t in one.turns if t.anchor == "decision"]
      likely = float(np.mean(1 - np.exp(silent))) if silent else float("nan")
      if np.isfinite(likely):
        solved = all(attempt.success for attempt in one.attempts)
        numbers["speaks"].append(likely)
        numbers["speaks_solved" if solved else "speaks_failed"].append(likely)
  return {f"mempi/{name}": float(np.mean(got)) for name, got in numbers.items() if got}


# The method.


class Experience:
  """What Mem-pi remembers (base.Remembered): the bank of stage 1."""

  def __init__(self, config: MempiConfig, bank: hintbank.HintBank, hinting: Hinting, longest: int):
    """`hinting`: the environment's words for it; `longest`: Lmax, tokens."""
    self.config, self.bank, self.hinting, self.longest = config, bank, hinting, longest
    self.reader = self.observer = bank

  def remember(self, trials: Sequence[Trial]) -> dict[str, float]:
    found = experience(self.config, trials)
    if not found:
      return {}
    self.bank.add(found, f"update {trials[0].update}")
    return self.bank.stats()

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return {}, self.bank.state()

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self.bank.load(rest)

  def reset(self) -> None:
    self.bank.load({"version": 0})
    if self.config.bank:
      self.bank.add(hintbank.read(self.config.bank), "imported")

  def close(self) -> None:
    self.bank.close()


def make(config: MempiConfig, memory: Experience) -> base.Method:
  """The method; three arms: the agent alone, with the memory policy, with what the bank has by similarity."""

  def plan(trials: Sequence[Trial], rng: np.random.Generator) -> None:
    gathers = config.stage(trials[0].update) == "gather"
    for one in trials:
      one.mode = GATHER if gathers else ABSTAIN if one.index == 0 else SPEAK

  def assign(trials: Sequence[Trial]) -> dict[str, float]:
    if config.stage(trials[0].update) == "gather":
      return {}
    return credit(config, trials, memory.longest)

  def study(update: int, rng: np.random.Generator) -> list[Lesson] | None:
    if config.stage(update) != "distil":
      return None
    hints = memory.bank.hints()
    if not hints:
      raise ValueError(
        "the bank is empty, so stage 1 has nothing to imitate: the agent wrote no hints; raise "
        "config.method.gather, or give a bank (config.method.bank)"
      )
    return lessons(config, memory.hinting, hints, rng)

  n = config.eval_attempts
  return base.Method(
    trial=trial(config, attempts=config.episodes),
    credit=assign,
    remember=memory.remember,
    arms={
      "none": trial(config, source="none", attempts=n),
      "memory": trial(config, attempts=n),
      "rag": trial(config, source="rag", attempts=n),
    },
    plan=plan,
    memory=memory,
    summary=spoken,
    trains=lambda update: config.stage(update) == "adapt",
    study=study,
    terms={"content": 1.0, "decision": config.decisions or 1.0},
    anchors=config.gather + config.distil if config.distil else None,
    contrast=contrast,
  )


def spoken(trials: Sequence[Trial]) -> dict[str, float]:
  """Hint tokens for each task, and the share of trials in which the agent was given nothing."""
  usable = [one for one in trials if one.void is None and _asides(one)]
  if not usable:
    return {}
  tokens = [hint_tokens(one) for one in usable]
  return {
    "hint_tokens": float(np.mean(tokens)),
    "abstained": float(np.mean([not count for count in tokens])),
  }


def contrast(arms: Mapping[str, Sequence[Trial]]) -> dict[str, dict[str, Any]]:
  """Of the arm "memory": how often it abstains where the agent alone solves the task and where it does not."""
  if not {"none", "memory"} <= arms.keys():
    return {}
  alone = {one.seed: one.success_by(1) for one in arms["none"] if one.void is None}
  numbers: dict[str, Any] = {}
  for name, solved in (("solved", True), ("failed", False)):
    mine = [one for one in arms["memory"] if one.void is None and alone.get(one.seed) is solved]
    silent = sum(not hint_tokens(one) for one in mine)
    numbers |= {f"abstained_{name}": silent / max(len(mine), 1), f"tasks_{name}": len(mine)}
  return {"memory": numbers}
