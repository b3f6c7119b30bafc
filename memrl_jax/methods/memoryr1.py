"""A manager of memories that learns from what the agent does with them, the way of Memory-R1 (2508.19828).

    play     the frozen agent plays with the memories nearest to its task, and writes a remark: a new fact
    decide   the manager reads the fact beside these memories: ADD it, let it UPDATE the nearest, DELETE the
             nearest, or NOOP
    pay      the agent plays the task again from the memories as they are then: the manager's reward

GRPO over a group of trials at one task. Member 0 decides by itself, and what it decides becomes of the bank;
into the others' mouths all four operations are put in turn, so that none of them is never tried:

    A_j = (r_j - mean of the operations' mean rewards) / std(r),   each operation with a quarter of the weight

Unlike the original the agent is not trained to sort out what it was given, an UPDATE takes the fact for the text of
the old memory, and the question that pays is the very task from which the fact comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from memrl_jax.envs.base import AttemptLog, Managing, View
from memrl_jax.memory import bank
from memrl_jax.memory.records import Add, Change, Op, Remove
from memrl_jax.methods import base
from memrl_jax.methods.memoryr1_config import MemoryR1Config
from memrl_jax.rollout.trial import Context, Generate, Program, Reading, decided, play, write_tip
from memrl_jax.types import Memo, Recall, Story, Trial, Turn

TENANT = "facts"
ADD, UPDATE, DELETE, NOOP = KINDS = ("add", "update", "delete", "noop")
FREE = "free"  # Trial.mode of who decides; otherwise one of KINDS
EPS = 1e-6


def trial(config: MemoryR1Config) -> Program:
  """An attempt, what becomes of its fact, and an attempt from the memories as they are then."""

  async def run(ctx: Context) -> None:
    log = AttemptLog(0, await ctx.open())
    goal, seen = log.initial.goal, ctx.prompts.extract.hinting.seen(View((), log))
    memos = await ctx.recall(TENANT, goal)
    await play(ctx, log, (), "reflection_only", reading=Reading(lambda log: "", given=memos))
    await write_tip(ctx, log)
    if not ctx.trial.tip:  # no fact, nothing to decide
      return
    kind = await _decide(ctx, log, seen, memos)
    nearest = tuple((memo.id, memo.version) for memo in memos[:1])
    ctx.trial.story = Story(TENANT, goal, nearest, [], kind)
    log = AttemptLog(1, await ctx.open())
    given = after(kind, ctx.trial.tip, memos)[: config.show]
    await play(ctx, log, (), "reflection_only", reading=Reading(lambda log: "", given=given))

  return run


def after(kind: str, fact: str, memos: tuple[Memo, ...]) -> tuple[Memo, ...]:
  """What an agent would find after the operation; the fact is filed under this very task, so it comes first."""
  new = (Memo(0, 0, fact, 0.0, 1.0),)
  rest = memos[kind in (UPDATE, DELETE) :]
  return (new if kind in (ADD, UPDATE) else ()) + tuple(m for m in rest if m.text != fact)


async def _decide(ctx: Context, log: AttemptLog, seen: str, memos: tuple[Memo, ...]) -> str:
  """The operation, its own or the one that is put into its mouth; adds its turn."""
  managing, mode, fact = ctx.prompts.extract.managing, ctx.trial.mode, ctx.trial.tip
  words = dict(zip(KINDS, managing.operations, strict=True))
  forced = words.get(mode, "")
  view = View((), log, tips=tuple(memo.text for memo in memos))
  answer = await ctx.ask(
    Generate(
      "advise",
      0,
      len(log.steps),
      lambda view: managing.manage(seen, fact, view.tips),
      view,
      forced=forced,
      whole=bool(forced),
    )
  )
  kind = mode if forced else read(managing, answer.sample.text)
  ctx.trial.turns.append(
    Turn(
      attempt=0,
      phase="advise",
      index=len(log.steps),
      messages=answer.messages,
      sample=decided(answer.sample, forced) if forced else answer.sample,
      action=kind or NOOP,
      valid=bool(kind),
      reward=0.0,
      anchor="operation",
      sampled=not forced,
      trained=bool(forced),
    )
  )
  return kind or NOOP


def read(managing: Managing, answer: str) -> str:
  """The operation that an answer begins with; "" where there is none, and nothing is done."""
  said = answer.rpartition("</think>")[2].strip()
  for kind, word in zip(KINDS, managing.operations, strict=True):
    if said.startswith(word):
      return kind
  return ""


# Credit.


def credit(config: MemoryR1Config, trials: Sequence[Trial]) -> dict[str, float]:
  """Sets the advantages of the operations that were put into the manager's mouth; returns metrics.

  The mean over all tokens of the batch is then that over groups of the mean over operations. While the words are
  taught every advantage is 1: the cross-entropy with a manager that draws lots.
  """
  teaches = bool(trials) and trials[0].update < config.teach
  groups: dict[int, list[Trial]] = {}
  for one in trials:
    if one.void is None and one.mode != FREE and len(one.attempts) == config.attempts:
      groups.setdefault(one.group, []).append(one)
  rows: list[tuple[Turn, float]] = []
  paid: dict[str, list[float]] = {kind: [] for kind in KINDS}
  used = 0
  for members in groups.values():
    reward = np.array([float(getattr(one.attempts[-1], config.reward)) for one in members])
    kinds = np.array([one.mode for one in members])
    for one, earned in zip(members, reward, strict=True):
      paid[one.mode].append(earned)
    if reward.std() < EPS and not teaches:
      continue
    used += 1
    tried = sorted(set(kinds.tolist()))
    baseline = np.mean([reward[kinds == kind].mean() for kind in tried])
    for one, earned in zip(members, reward, strict=True):
      turn = next(turn for turn in one.turns if turn.anchor == "operation")
      advantage = 1.0 if teaches else float((earned - baseline) / (reward.std() + EPS))
      if advantage < 0 and np.exp(turn.sample.logps.sum()) <= config.settled:
        continue
      share = 1 / (len(tried) * np.sum(kinds == one.mode) * len(turn.sample.ids))
      rows.append((turn, advantage * share))
  whole = sum(len(turn.sample.ids) for turn, _ in rows)
  for turn, advantage in rows:
    turn.advantage = advantage * whole / used or None
  numbers = {f"memoryr1/paid_{kind}": float(np.mean(got)) for kind, got in paid.items() if got}
  if groups:
    numbers["memoryr1/degenerate"] = 1 - used / len(groups)
  free = [
    turn for one in trials for turn in one.turns if turn.anchor == "operation" and turn.sampled
  ]
  if free:
    numbers["memoryr1/readable"] = float(np.mean([turn.valid for turn in free]))
    for kind in KINDS:
      mine = [turn.valid and turn.action == kind for turn in free]
      numbers[f"memoryr1/chose_{kind}"] = float(np.mean(mine))
  return numbers


# The bank.


class Facts:
  """What the manager keeps (base.Remembered). A fact is filed under the task about which it was written."""

  def __init__(self, config: MemoryR1Config, memory: bank.Memory):
    self.config, self.memory = config, memory
    self.reader = self.observer = self

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    """For each query the facts of the nearest tasks, no two of them the same."""
    texts = [ask.query for ask in asks]
    found = self.memory.search(TENANT, texts, 16 * self.config.show) if asks else []
    return [self._different(hits) for hits in found]

  def _different(self, hits: Sequence[bank.Hit]) -> tuple[Memo, ...]:
    memos: dict[str, Memo] = {}
    for hit in hits:
      text = hit.entry.text
      memos.setdefault(text, Memo(hit.id, hit.entry.version, text, 0.0, hit.similarity))
    return tuple(memos.values())[: self.config.show]

  def remember(self, trials: Sequence[Trial]) -> dict[str, float]:
    """What those who decided by themselves have decided; of two about one memory the first."""
    ops: list[Op] = []
    touched: set[int] = set()
    known = {(entry.key, entry.text) for entry in self.memory.entries(TENANT)}
    for one in trials:
      if one.mode != FREE or one.void is not None or one.story is None:
        continue
      kind, key, (old, *_) = one.story.verdict, one.story.query, (*one.story.shown, None)
      if kind == ADD or (kind == UPDATE and old is None):
        if (key, one.tip) not in known:
          known.add((key, one.tip))
          ops.append(Add(TENANT, key, one.tip, data={"trial": one.name}))
      elif kind in (UPDATE, DELETE) and old is not None and old[0] not in touched:
        touched.add(old[0])
        id, version = old
        change = Change(TENANT, id, text=one.tip, data={"trial": one.name}, expect=version)
        ops.append(change if kind == UPDATE else Remove(TENANT, id, version))
    if ops:
      self.memory.commit(ops, why=f"update {trials[0].update}")
    return {"bank/facts": float(len(self.memory.entries(TENANT)))}

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    return {}, {"version": self.memory.version}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self.memory.discard_after(rest["version"])

  def reset(self) -> None:
    self.memory.discard_after(0)

  def close(self) -> None:
    self.memory.close()


def make(config: MemoryR1Config, memory: Facts) -> base.Method:
  """The method; two arms: the agent alone, and with the facts that the manager has kept."""

  def plan(trials: Sequence[Trial], rng: np.random.Generator) -> None:
    for one in trials:
      one.mode = KINDS[(one.index - 1) % len(KINDS)] if one.index else FREE

  return base.Method(
    trial=trial(config),
    credit=lambda trials: credit(config, trials),
    remember=memory.remember,
    arms={"none": _arm(config, reads=False), "memory": _arm(config, reads=True)},
    plan=plan,
    memory=memory,
  )


def _arm(config: MemoryR1Config, *, reads: bool) -> Program:
  async def run(ctx: Context) -> None:
    for number in range(config.eval_attempts):
      log = AttemptLog(number, await ctx.open())
      memos = await ctx.recall(TENANT, log.initial.goal) if reads else ()
      await play(ctx, log, (), "reflection_only", reading=Reading(lambda log: "", given=memos))

  return run
