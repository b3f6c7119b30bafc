"""MemRL: a frozen model whose memory learns, while it is used, which memories help.

"MemRL" (2601.03192). Nothing is trained but the utilities Q of the memories. An attempt is shown, once and
at its beginning, what the memory suggests for its task; what was shown then moves towards the attempt's
reward, and the attempt itself becomes a memory: a procedure where it succeeded, a lesson where it failed,
in the words of the same frozen model.

    suggest   sim > delta, top k1;   score = (1 - lambda) z(sim) + lambda z(Q), top k2         (Eq. 5-7)
    feedback  Q <- Q + alpha (r + gamma max Q' - Q)                                            (Eq. 3, 8)

The memory, its options and presets are `memory.episodic`. Baselines are settings of it (RAG, MemP) or
other methods of the engine (no memory and pass@k: zero-shot; Reflexion).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs.base import AttemptLog, View
from memrl_jax.memory import episodic, episodic_metrics, episodic_write
from memrl_jax.methods import base
from memrl_jax.rollout.trial import Context, Generate, Program, Reading, play, write_tip
from memrl_jax.types import Memo, Message, Recall, Story, Trial, Turn

CHOICES = {"query": ("goal", "observation", "goal_observation"), "note": ("story", "tip")}


@dataclasses.dataclass(frozen=True)
class MemrlConfig:
  """query: what a task is filed and searched under. note: how the model sums an attempt up: asked for a
  plan or a lesson about the "story" of it, or for a "tip" in the notation of its environment, which is then
  all that is stored (the tiny models). writes, learns: whether attempts become memories, and Q moves."""

  attempts: int = 1
  eval_attempts: int = 1
  query: str = "goal_observation"
  note: str = "story"
  writes: bool = True
  learns: bool = True

  def __post_init__(self):
    if self.attempts != 1 or self.eval_attempts < 1:
      raise ValueError(
        f"MemRL plays 1 attempt in a training trial and at least 1 in evaluation, not {self.attempts} and "
        f"{self.eval_attempts} (config.method.attempts, config.method.eval_attempts)"
      )
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.method.{name})"
        )


def query(config: MemrlConfig, log: AttemptLog) -> str:
  """What the memory is searched for, and remembers an attempt under."""
  said = {"goal": [log.initial.goal], "observation": [log.initial.text]}
  said["goal_observation"] = [log.initial.goal, log.initial.text]
  return "\n".join(filter(None, said[config.query])) or log.initial.text


def tenant(trial: Trial) -> str:
  """One memory an environment; of a mix, one a part."""
  part, colon, _ = trial.task.partition(":")
  return part if colon else trial.env


def trial(
  config: MemrlConfig, how: episodic.EpisodicConfig, *, reads: bool, writes: bool, attempts: int = 1
) -> Program:
  """Attempts at a task, shown what the memory suggests if it `reads`, summed up if it `writes`."""

  async def run(ctx: Context) -> None:
    for number in range(attempts):
      log = AttemptLog(number, await ctx.open())
      where, what = tenant(ctx.trial), query(config, log)
      memos = await ctx.recall(where, what) if reads else ()
      await play(
        ctx, log, (), "reflection_only", reading=Reading(lambda log, w=what: w, given=memos)
      )
      if writes:
        shown = [read for turn in ctx.trial.turns for read in turn.reads]
        told = [Message("user", trajectory(log))]
        ctx.trial.story = Story(where, what, tuple(dict.fromkeys(shown)), told)
        await sum_up(ctx, config, how, log)
      if log.success:
        return

  return run


async def sum_up(
  ctx: Context, config: MemrlConfig, how: episodic.EpisodicConfig, log: AttemptLog
) -> None:
  """The model's own words about an attempt, in `trial.tip`."""
  if config.note == "tip":
    await write_tip(ctx, log)
    return
  messages = episodic_write.request(how, episode(ctx.trial, log.success))
  if messages is None:  # nothing is kept of it, or its trajectory says it all
    return

  def build(view: View) -> list[Message]:
    return messages

  answer = await ctx.ask(Generate("reflect", log.index, 0, build, View((), log)))
  ctx.trial.tip = answer.sample.text.rpartition("</think>")[2].strip()
  ctx.trial.turns.append(
    Turn(
      attempt=log.index,
      phase="reflect",
      index=0,
      messages=answer.messages,
      sample=answer.sample,
      action=ctx.trial.tip,
      valid=bool(ctx.trial.tip),
      reward=0.0,
      anchor="note",
      trained=False,
    )
  )


def trajectory(log: AttemptLog) -> str:
  """What was done and seen, a line each."""
  lines = []
  for step in log.steps:
    lines += [f"> {step.action or '(nothing)'}", step.result.observation.text]
  return "\n".join(lines)


def episode(one: Trial, success: bool) -> episodic.Episode:
  """An attempt as the memory takes it."""
  story = one.story
  return episodic.Episode(
    one.name, story.query, story.messages[0].content, success, story.shown, note=one.tip
  )


class Reader(NamedTuple):
  """The memory as trials read it: a text a memory, those of successes first."""

  memory: episodic.Episodic
  frozen: bool
  bare: bool

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    return [self._one(ask) for ask in asks]

  def _one(self, ask: Recall) -> tuple[Memo, ...]:
    found = self.memory.suggest(ask.scope, ask.query, frozen=self.frozen)
    shown = [(one, one.text) for one in found] if self.bare else self.memory.texts(found)
    return tuple(Memo(one.id, one.version, text, one.q, one.similarity) for one, text in shown)


class Episodes:
  """What MemRL remembers (base.Remembered): the memory, and which task was solved when.

  `tasks`: how many the run rounds over (0: it does not).
  """

  def __init__(self, config: MemrlConfig, memory: episodic.Episodic, tasks: int = 0):
    self.config, self.memory, self._tasks = config, memory, tasks
    bare = config.note == "tip"
    self.reader, self.observer = Reader(memory, False, bare), Reader(memory, True, bare)
    self._solved: dict[str, list[bool]] = {}
    self._rounds = 0.0

  def remember(self, trials: Sequence[Trial]) -> dict[str, float]:
    """Pays what was shown, then files the attempts; the new ids were in no prompt yet."""
    done = [one for one in trials if one.void is None and one.story is not None]
    for place in dict.fromkeys(one.story.scope for one in done):
      mine = [one for one in done if one.story.scope == place]
      if self.config.learns:
        self.memory.feedback(
          place,
          [episodic.Feedback(one.name, one.success_by(1), list(one.story.shown)) for one in mine],
        )
      if self.config.writes:
        self.memory.remember(place, [episode(one, one.success_by(1)) for one in mine])
    for one in done:
      self._solved.setdefault(f"{one.task} {one.seed}", []).append(one.success_by(1))
    places = dict.fromkeys(one.story.scope for one in done)
    numbers = self.epochs()
    whole = numbers.get("epoch/rounds", 0.0) > self._rounds
    self._rounds = numbers.get("epoch/rounds", 0.0)
    for place in places:
      prefix = f"memory/{place}/" if len(places) > 1 else "memory/"
      numbers |= {f"{prefix}{name}": value for name, value in self.memory.stats(place).items()}
      if whole:  # looks at every use of every memory
        q_N, success_N, _ = self.memory.used(place)
        correlation = episodic_metrics.pearson(q_N, success_N.astype(float))
        numbers |= {f"{prefix}pearson": correlation} if np.isfinite(correlation) else {}
    return numbers

  def epochs(self) -> dict[str, float]:
    """Of the last whole round: the share of tasks solved in it, or ever, and what was forgotten since."""
    played = list(self._solved.values())
    rounds = min(map(len, played), default=0)
    if not rounds or len(played) < self._tasks or not self._tasks:
      return {}
    success_ET = np.array([solved[:rounds] for solved in played]).T
    numbers = {
      "epoch/rounds": float(rounds),
      "epoch/last": episodic_metrics.last_epoch_accuracy(success_ET),
      "epoch/cumulative": float(episodic_metrics.cumulative_success(success_ET)[-1]),
    }
    if rounds > 1:
      numbers["epoch/forgotten"] = episodic_metrics.forgetting_rate(success_ET)
    return numbers

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, rest = self.memory.state()
    solved = {task: list(rounds) for task, rounds in self._solved.items()}
    return arrays, {"memory": rest, "solved": solved}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self.memory.load(arrays, rest["memory"])
    self._solved = {task: list(solved) for task, solved in rest["solved"].items()}
    self._rounds = self.epochs().get("epoch/rounds", 0.0)

  def reset(self) -> None:
    self.memory.reset()
    self._solved, self._rounds = {}, 0.0

  def close(self) -> None:
    self.memory.close()


def make(config: MemrlConfig, memory: Episodes) -> base.Method:
  """The method; nothing is credited, because nothing but the memory learns."""
  how, n = memory.memory.config, config.eval_attempts
  return base.Method(
    trial=trial(config, how, reads=True, writes=True),
    credit=lambda trials: {},
    remember=memory.remember,
    arms={
      "none": trial(config, how, reads=False, writes=False, attempts=n),
      "memory": trial(config, how, reads=True, writes=False, attempts=n),
    },
    memory=memory,
  )
