"""Complementary RL: an actor that reads experience, an extractor that writes it, and both learn.

"Complementary RL" (2603.17621). Of the trials of a group one part plays `guided`, with an experience from
the bank in its prompts, the other `free`. Per update:

    actor       A = (r - mean_c) / std_c inside its own part c of the group, the parts weigh half and half  (Eq. 5)
    extractor   reads every finished trial with what guided it, and adds, updates or merges entries;
                a generation earns +1 for each trial that its entries guided to success, -1 for each other  (Eq. 3)

The free part reads nothing: that is what the actor can do by itself. Who answers the extractor's prompts,
when, and how it is trained is `training.extractor`; the bank, the samples and the fence between many
readers and one writer are `memory.experience` and `memory.manager`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memrl_jax.envs import extracting
from memrl_jax.envs.base import AttemptLog, View
from memrl_jax.memory.experience import Ended, Shown
from memrl_jax.memory.manager import ExperienceManager, Reader
from memrl_jax.memory.records import Add, Outcome, Read
from memrl_jax.methods import base
from memrl_jax.ops import subgroups
from memrl_jax.rollout import credit
from memrl_jax.rollout.trial import Context, Generate, Program, Reading, play
from memrl_jax.types import Memo, Story, Trial, Turn

CHOICES = {
  "groups": ("split", "pooled"),
  "distill": ("all", "guided"),
  "scope": ("env", "task"),
  "query": ("goal_observation", "goal", "observation"),
  "critic": ("none", "paper", "release"),
}


@dataclasses.dataclass(frozen=True)
class ComplementaryConfig:
  """How experience is given and what of a trial is made of it.

  guided: share of a group that is given experience; 0 is the baseline without, 1 all guided. groups:
    advantages inside the "split" parts, or in the "pooled" group (which collapses, Fig. 3).
  warmup: updates in which experience is collected, none is given, and the actor does not train.
  actor: whether it trains at all (else: experience only).
  writes: whether finished trials go to the extractor; all of them, or those of `distill`. bank: a file of
    entries to begin with (`python -m memrl_jax.memory export`); with writes=False a static bank.
  scope: one bank for the "env" (of a mix: for each part), or one for each "task". query: what it is
    searched for.
  questions: how often in an attempt a guided actor may ask the extractor instead of acting.
  critic: after the warm-up the actor first accepts, refines or rejects what it was given (appendix B.1):
    pay s + r with s = 1, .5, 0 ("paper"), or s alone where s < 1, and -1 for a rejection ("release").
  imitate_every: in every so many updates, guided trials that beat the mean of the free ones are also
    imitated without experience, with weight `imitate_weight`; given up for good once the update's KL is
    above `imitate_kl` or its entropy below `imitate_entropy` of the first one. 0: never.
  """

  attempts: int = 1
  eval_attempts: int = 1
  guided: float = 0.5
  groups: str = "split"
  warmup: int = 5
  actor: bool = True
  writes: bool = True
  distill: str = "all"
  bank: str = ""
  scope: str = "env"
  query: str = "goal_observation"
  questions: int = 0
  critic: str = "none"
  imitate_every: int = 0
  imitate_weight: float = 0.05
  imitate_kl: float = 0.02
  imitate_entropy: float = 0.5

  def __post_init__(self):
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.method.{name})"
        )
    if self.attempts != 1 or self.eval_attempts < 1:
      raise ValueError(
        f"Complementary RL plays 1 attempt in a training trial and at least 1 in evaluation, not "
        f"{self.attempts} and {self.eval_attempts} (config.method.attempts, config.method.eval_attempts)"
      )
    if not 0 <= self.guided <= 1:
      raise ValueError(
        f"guided {self.guided} is a share of each group; choose it in [0, 1] (config.method.guided)"
      )
    for name in ("warmup", "questions", "imitate_every", "imitate_weight", "imitate_kl"):
      if getattr(self, name) < 0:
        raise ValueError(
          f"{name} is {getattr(self, name)}; it must not be negative (config.method.{name})"
        )
    if self.distill == "guided" and not self.guided:
      raise ValueError(
        "without guided trials there is nothing to distill; set config.method.distill to all"
      )

  @property
  def asides(self) -> int:
    """The most turns of an attempt that the environment does not see: judging, asking, being answered."""
    return (self.critic != "none") + 2 * self.questions


def plan(config: ComplementaryConfig, trials: Sequence[Trial]) -> None:
  """The last trials of every group are guided, the first ones free; during warm-up all are free."""
  size: dict[int, int] = {}
  for trial in trials:
    size[trial.group] = size.get(trial.group, 0) + 1
  for trial in trials:
    free = size[trial.group] - round(config.guided * size[trial.group])
    guided = trial.index >= free and trial.update >= config.warmup
    trial.mode = "guided" if guided else "free"
    trial.subgroup = trial.mode if config.groups == "split" else ""


def scope(config: ComplementaryConfig, trial: Trial) -> str:
  """In which scope of the bank a trial reads and writes; a mix prefixes its tasks with "part:"."""
  part, colon, _ = trial.task.partition(":")
  if config.scope == "task":
    return trial.task
  return part if colon else trial.env


def query(config: ComplementaryConfig, log: AttemptLog) -> str:
  """What the bank is searched for, once an attempt."""
  said = {"goal": [log.initial.goal], "observation": [log.initial.text]}
  said["goal_observation"] = [log.initial.goal, log.initial.text]
  return "\n".join(filter(None, said[config.query]))


def trial(
  config: ComplementaryConfig,
  *,
  reads: bool,
  writes: bool,
  attempts: int = 1,
  rate: Callable[[str], float] | None = None,
) -> Program:
  """Attempts at a task; one that `reads` is given what the bank holds about it (unless its mode is
  "free"), one that `writes` leaves its story for the extractor. `rate`: how often a task was solved so
  far, for an actor that judges what it is given."""

  async def run(ctx: Context) -> None:
    for number in range(attempts):
      log = AttemptLog(number, await ctx.open())
      guided, where, what = (
        reads and ctx.trial.mode != "free",
        scope(config, ctx.trial),
        query(config, log),
      )
      memos = await ctx.recall(where, what) if guided else ()
      verdict, given = "", memos
      if memos and rate is not None:
        verdict, given = await judge(ctx, log, memos, rate(ctx.trial.task))
      reading = Reading(
        key=lambda log, what=what: what,
        scope=where if guided else None,
        plain=config.imitate_every > 0,
        given=given,
        questions=config.questions if guided else 0,
      )
      await play(ctx, log, (), "reflection_only", reading=reading)
      if writes:
        shown = tuple((memo.id, memo.version) for memo in memos)
        told = View((), log, tips=tuple(memo.text for memo in memos))
        ctx.trial.story = Story(where, what, shown, ctx.prompts.extract.distill(told), verdict)
      if log.success:
        return

  return run


async def judge(
  ctx: Context, log: AttemptLog, memos: tuple[Memo, ...], rate: float
) -> tuple[str, tuple[Memo, ...]]:
  """The actor's verdict about what it was given, and what is left of that; appendix B.1."""
  view = View((), log, tips=tuple(memo.text for memo in memos))
  answer = await ctx.ask(
    Generate("judge", log.index, 0, lambda view: ctx.prompts.extract.judge(view, rate), view)
  )
  verdict, text = extracting.verdict(answer.sample.text)
  ctx.trial.turns.append(
    Turn(
      attempt=log.index,
      phase="judge",
      index=0,
      messages=answer.messages,
      sample=answer.sample,
      action=f"{verdict} {text}".strip(),
      valid=bool(verdict),
      reward=0.0,
      anchor="judge",
      reads=tuple((memo.id, memo.version) for memo in memos),
      trained=False,
    )
  )
  if verdict == "refine":
    memos = (memos[0]._replace(text=text),)
  return verdict or "none", () if verdict == "reject" else memos


def pay(config: ComplementaryConfig, story: Story, success: bool) -> float | None:
  """What a pair (entry, trial) is worth to the extractor; None where the release drops it."""
  reward = 1.0 if success else -1.0
  if not story.verdict:
    return reward
  if config.critic == "release":
    told = {"accept": 1.0, "refine": 0.5, "reject": -1.0}.get(story.verdict)
    return told if told is None or told < 1 else told + reward
  return reward + {"accept": 1.0, "refine": 0.5}.get(story.verdict, 0.0)


class Experiences:
  """What Complementary RL remembers (base.Remembered): the bank behind its manager, and rates of success.

  `first` are the entries that a new bank begins with.
  """

  def __init__(
    self, config: ComplementaryConfig, manager: ExperienceManager, first: Sequence[Add] = ()
  ):
    self.config, self.manager, self._first = config, manager, first
    self.reader = manager.reader(count=True)
    self._rates: dict[str, tuple[int, int]] = {}  # task: solved, played
    self.calm: dict[str, Any] = {"entropy": None, "stopped": ""}  # the guard of imitation

  @property
  def observer(self) -> Reader:
    """For one evaluation: entries are taken in turn as in training, on a copy of the counts."""
    return self.manager.reader(count=False)

  def rate(self, task: str) -> float:
    """Share of the trials at this task that solved it."""
    solved, played = self._rates.get(task, (0, 0))
    return solved / max(played, 1)

  def remember(self, trials: Sequence[Trial]) -> dict[str, float]:
    """Pays the generations that guided the trials, and queues the trials for the extractor."""
    self.manager.count_asides(self.reader.asides)
    done = [trial for trial in trials if trial.void is None and trial.story is not None]
    self.manager.bank.credit([self._ended(trial) for trial in done])
    for trial in done:
      solved, played = self._rates.get(trial.task, (0, 0))
      self._rates[trial.task] = (solved + trial.success_by(1), played + 1)
    warm = any(trial.update < self.config.warmup for trial in done)
    wanted = [t for t in done if warm or self.config.distill == "all" or t.mode == "guided"]
    for trial in wanted if self.config.writes else ():
      story = trial.story
      self.manager.submit(
        "distill",
        story.scope,
        [Shown(*read) for read in story.shown],
        query=story.query,
        trial=trial.name,
        payload={"messages": [[message.role, message.content] for message in story.messages]},
      )
    self.manager.bank.prune(self.manager.step + 1)
    return {}

  def pool(self, gather: Callable[[list], list]) -> None:
    """What trials of other processes asked in their middle is counted here, too."""
    self.reader.asides.update(gather(list(self.reader.asides.items())))

  def _ended(self, trial: Trial) -> Ended:
    story, success = trial.story, trial.success_by(1)
    first = {
      read: turn.index for turn in reversed(trial.turns) for read in turn.reads if turn.trained
    }
    asked = [
      self.manager.bank.record(turn.sample, extractor=self.manager.advising, step=self.manager.step)
      for turn in trial.turns
      if turn.phase == "advise"
    ]
    worth = pay(self.config, story, success)
    reads = [Read(trial.name, step, *read) for read, step in first.items()]
    return Ended(
      story.scope,
      Outcome(trial.name, _return(trial), success),
      tuple(reads) if worth is not None else (),
      tuple(asked),
      worth,
    )

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, rest = self.manager.state()
    return arrays, {"manager": rest, "rates": dict(self._rates), "calm": dict(self.calm)}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self.reader.asides.clear()
    self.manager.load(arrays, rest["manager"])
    self._rates = {task: tuple(rate) for task, rate in rest["rates"].items()}
    self.calm = dict(rest["calm"])

  def reset(self) -> None:
    self.reader.asides.clear()
    self.manager.reset()
    self._rates.clear()
    self.calm.update(entropy=None, stopped="")
    for scope in dict.fromkeys(add.tenant for add in self._first):
      mine = [(add.key, add.text) for add in self._first if add.tenant == scope]
      self.manager.bank.put(scope, mine)

  def close(self) -> None:
    self.manager.close()


def make(
  config: ComplementaryConfig,
  credit_config: credit.CreditConfig,
  shape: credit.Shape,
  memory: Experiences,
  per_token: bool,
) -> base.Method:
  """The method. `per_token`: the loss is a mean over tokens, not over rows."""
  compare = credit.make(credit_config, shape)

  def assign(trials: Sequence[Trial]) -> dict[str, float]:
    numbers = compare(trials)
    if config.groups == "split":
      halve(trials, shape.rows, per_token)
    if config.imitate_every and trials[0].update % config.imitate_every == 0:
      numbers["imitate/rows"] = 0 if memory.calm["stopped"] else imitate(config, trials)
    for name in ("guided", "free"):
      numbers |= {f"rollout/{name}_{k}": v for k, v in played(trials, name).items()}
    return numbers

  def plan_all(trials: Sequence[Trial], rng: np.random.Generator) -> None:
    memory.manager.step = trials[0].update
    plan(config, trials)

  rate = None if config.critic == "none" else memory.rate
  n = config.eval_attempts
  return base.Method(
    trial=trial(config, reads=True, writes=True, rate=rate),
    credit=assign,
    remember=memory.remember,
    arms={
      "none": trial(config, reads=False, writes=False, attempts=n),
      "memory": trial(config, reads=True, writes=False, attempts=n, rate=rate),
    },
    plan=plan_all,
    memory=memory,
    summary=solved,
    trains=lambda update: config.actor and update >= config.warmup,
    watch=lambda numbers: watch(config, memory.calm, numbers),
    pool=memory.pool,
  )


def halve(trials: Sequence[Trial], rows: int, per_token: bool) -> None:
  """Scales advantages so that the guided and the free part of the update weigh the same."""
  paid = [
    (turn, trial.subgroup == "guided")
    for trial in trials
    if trial.void is None
    for turn in trial.turns
    if turn.advantage is not None and len(turn.sample.ids)
  ]
  count_N, guided_N, mask_N = np.zeros(rows), np.zeros(rows, bool), np.arange(rows) < len(paid)
  for n, (turn, guided) in enumerate(paid):
    count_N[n], guided_N[n] = len(turn.sample.ids) if per_token else 1, guided
  factor_N = np.asarray(subgroups.balance(count_N, guided_N, mask_N))
  for (turn, _), factor in zip(paid, factor_N, strict=False):
    turn.advantage *= float(factor)


def imitate(config: ComplementaryConfig, trials: Sequence[Trial]) -> int:
  """Marks the turns of guided trials that beat the mean of the free ones of their group; how many.

  They are trained once more from the prompt without experience, on the tokens that were sampled.
  """
  free: dict[int, list[float]] = {}
  for one in trials:
    if one.void is None and one.mode == "free":
      free.setdefault(one.group, []).append(_return(one))
  marked = 0
  for one in trials:
    better = one.void is None and one.mode == "guided" and one.group in free
    if better and _return(one) > np.mean(free[one.group]):
      for turn in one.turns:
        if turn.plain is not None and turn.trained and len(turn.sample.ids):
          turn.imitate, marked = config.imitate_weight, marked + 1
  return marked


def watch(
  config: ComplementaryConfig, calm: dict[str, Any], numbers: dict[str, float]
) -> dict[str, float]:
  """Stops imitation for good where the update moved too far or the policy loses its entropy."""
  if not config.imitate_every or "train/entropy" not in numbers:
    return {}
  calm["entropy"] = numbers["train/entropy"] if calm["entropy"] is None else calm["entropy"]
  if numbers["train/kl_old"] > config.imitate_kl:
    calm["stopped"] = calm["stopped"] or "kl"
  if numbers["train/entropy"] < config.imitate_entropy * calm["entropy"]:
    calm["stopped"] = calm["stopped"] or "entropy"
  return {"imitate/stopped": float(bool(calm["stopped"]))}


def _return(one: Trial) -> float:
  return sum(attempt.reward for attempt in one.attempts)


def played(trials: Sequence[Trial], mode: str) -> dict[str, float]:
  """How often the trials of one mode succeeded, and how many they are."""
  mine = [one for one in trials if one.void is None and one.mode == mode]
  if not mine:
    return {"trials": 0}
  return {"trials": len(mine), "success": float(np.mean([one.success_by(1) for one in mine]))}


def solved(trials: Sequence[Trial]) -> dict[str, float]:
  """Actions of the attempts that solved their task, and the share of trials that were given something."""
  usable = [one for one in trials if one.void is None]
  won = [attempt.turns for one in usable for attempt in one.attempts if attempt.success]
  given = [any(turn.reads for turn in one.turns) for one in usable]
  numbers = {"given": float(np.mean(given)) if given else 0.0}
  return numbers | ({"turns_solved": float(np.mean(won))} if won else {})
