"""What a trial program may do: ask the policy, step the environment, read the memory, record turns.

A trial program is a coroutine `async def trial(ctx)`. It never blocks: `await` hands a request to the
runtime (`rollout.collect`), which batches the requests of all live trials and resumes each with its
answer. A failure of the environment or the policy surfaces in the program as `VoidTrial`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs import base, extracting
from memrl_jax.types import Attempt, Memo, Message, Phase, Recall, Sample, Trial, Turn


class VoidTrial(Exception):
  """This trial cannot be used; the message is its reason. Never a reward of zero."""


class Generate(NamedTuple):
  """Ask the policy. `build` turns the view into messages; it may be called again on a smaller view.

  `draw` counts the answers that are sampled to one prompt. `forced`: how the answer begins, whatever the
  policy thinks; `whole`: and that is all of it, nothing is sampled.
  """

  phase: Phase
  attempt: int
  turn: int
  build: Callable[[base.View], list[Message]]
  view: base.View
  draw: int = 0
  forced: str = ""
  whole: bool = False


class EnvCall(NamedTuple):
  """Ask the environment: `method` is "reset", "retry" or "step"."""

  method: str
  argument: Any = None


class Answer(NamedTuple):
  """A policy's answer: the view and messages it really saw (memories may have been shrunk)."""

  sample: Sample
  messages: list[Message]
  view: base.View


class _Request:
  """Awaiting this hands `request` to the runtime and returns what the runtime sends back."""

  def __init__(self, request: Generate | EnvCall | Recall):
    self.request = request

  def __await__(self) -> Generator[Generate | EnvCall | Recall, Any, Any]:
    return (yield self.request)


class Context:
  """One trial's way to its policy, its environment and its record."""

  def __init__(self, trial: Trial, prompts: base.Prompts, horizon: int):
    self.trial = trial
    self.prompts = prompts
    self.horizon = horizon
    self._opened = False
    self._recalls = 0

  async def open(self) -> base.Observation:
    """The first observation of the next attempt: always the same task, in the same state."""
    call = EnvCall("retry") if self._opened else EnvCall("reset", self.trial.seed)
    seen = await _Request(call)
    self._opened = True
    self.trial.task = seen.task or f"{self.trial.env}/{self.trial.seed}"
    return seen

  async def ask(self, request: Generate) -> Answer:
    """The policy's answer to one prompt."""
    return await _Request(request)

  async def step(self, response: str) -> base.StepResult:
    """The environment's answer to one response."""
    return await _Request(EnvCall("step", response))

  async def recall(self, scope: str, query: str) -> tuple[Memo, ...]:
    """What the memory holds about `query`, best first; () where the rollout has no memory."""
    one, number = self.trial, self._recalls
    self._recalls += 1
    return await _Request(Recall(scope, query, (one.update, one.group, one.index, number)))


Program = Callable[[Context], Awaitable[None]]


class Reading(NamedTuple):
  """How a trial uses a memory: what a turn is filed under, and what is read and what of it is kept.

  key: the text under which the memory is asked, and remembers, about the turn that comes next.
  scope: which part of the memory is read; None reads nothing.
  keep: tips stay in the prompts of later turns.
  plain: a turn whose prompt held tips also carries the prompt of the same turn without them.
  given: what every turn is shown instead, read once before the attempt.
  questions: how often in an attempt the agent may ask another model instead of acting; the answer
    is shown from then on, and costs no turn.
  consult: asked before every turn instead, for what that turn is shown.
  """

  key: Callable[[base.AttemptLog], str]
  scope: str | None = None
  keep: bool = False
  plain: bool = False
  given: tuple[Memo, ...] | None = None
  questions: int = 0
  consult: Callable[[base.AttemptLog], Awaitable[tuple[Memo, ...]]] | None = None


NO_MEMORY = Reading(lambda log: "")


async def play(
  ctx: Context,
  log: base.AttemptLog,
  past: tuple[base.AttemptLog, ...],
  memory: str,
  instruction: str = "",
  reading: Reading = NO_MEMORY,
) -> None:
  """Plays one attempt to its end; each turn is one freshly rendered prompt and one row."""
  told: list[Memo] = []  # answers to questions
  while not log.done and len(log.steps) < ctx.horizon:
    key = reading.key(log)
    memos = (*await _read(ctx, reading, log, key), *told)
    may_ask = len(told) < reading.questions
    words = "\n\n".join(filter(None, (instruction, may_ask * extracting.tool(reading.questions))))
    tips, images = tuple(memo.text for memo in memos), tuple(memo.images for memo in memos)
    view = base.View(past, log, memory, words, tips, images)
    request = Generate("play", log.index, len(log.steps), ctx.prompts.play, view, len(told))
    answer = await ctx.ask(request)
    asked = extracting.question(answer.sample.text) if may_ask else ""
    anchor, shown = log.now.anchor, memos[: len(answer.view.tips)]
    plain = answer.view.without_tips()._replace(instruction=instruction)
    bare = ctx.prompts.play(plain) if reading.plain else None
    result = None if asked else await ctx.step(answer.sample.text)
    ctx.trial.turns.append(
      Turn(
        attempt=log.index,
        phase="play",
        index=len(log.steps),
        messages=answer.messages,
        sample=answer.sample,
        action=f"ask {asked}" if result is None else result.action,
        valid=result is None or result.valid,
        reward=0.0 if result is None else result.reward,
        anchor=anchor,
        memory=remembered(answer.view),
        key=key,
        reads=tuple((memo.id, memo.version) for memo in shown if memo.id),
        plain=None if bare is None or bare == ctx.prompts.play(answer.view) else bare,
      )
    )
    if result is None:
      told.append(await _advice(ctx, log, reading, asked, len(told)))
      continue
    log.steps.append(base.Step(result.action, result, answer.view.tips if reading.keep else ()))
  last = log.steps[-1].result
  total = sum(step.result.reward for step in log.steps)
  ctx.trial.attempts.append(Attempt(last.success, last.score, total, len(log.steps)))


def decided(sample: Sample, text: str) -> Sample:
  """The forced beginning of an answer as a row of its own; its log-probs come from the trainer (NaN until then)."""
  n = sample.forced
  unknown = np.full(n, np.nan, np.float32)
  return sample._replace(
    text=text,
    prompt_ids=sample.prompt_ids[:-n],
    ids=sample.prompt_ids[-n:],
    logps=unknown,
    forced=n,
  )


async def _read(ctx: Context, reading: Reading, log: base.AttemptLog, key: str) -> tuple[Memo, ...]:
  if reading.consult is not None:
    return await reading.consult(log)
  if reading.given is not None or reading.scope is None:
    return reading.given or ()
  return await ctx.recall(reading.scope, key)


async def _advice(
  ctx: Context, log: base.AttemptLog, reading: Reading, question: str, number: int
) -> Memo:
  """The other model's answer, with what the memory holds about the question; not an entry itself."""
  memos = await ctx.recall(reading.scope, question)
  view = base.View((), log, tips=tuple(memo.text for memo in memos))

  def build(view: base.View) -> list[Message]:
    return ctx.prompts.extract.advise(view, question)

  answer = await ctx.ask(Generate("advise", log.index, len(log.steps), build, view, number))
  _, _, text = answer.sample.text.rpartition("</think>")
  ctx.trial.turns.append(
    Turn(
      attempt=log.index,
      phase="advise",
      index=len(log.steps),
      messages=answer.messages,
      sample=answer.sample,
      action=question,
      valid=bool(text.strip()),
      reward=0.0,
      anchor="advise",
      reads=tuple((memo.id, memo.version) for memo in memos[: len(answer.view.tips)]),
      trained=False,
    )
  )
  return Memo(0, 0, " ".join(text.split()), 0.0, 0.0)


async def reflect(ctx: Context, log: base.AttemptLog) -> str:
  """Writes a reflection on the attempt that has just failed; it does not see earlier reflections."""
  return await _write(ctx, log, ctx.prompts.reflect, ctx.prompts.parse_reflection, "reflect")


async def write_tip(ctx: Context, log: base.AttemptLog) -> None:
  """Ends a trial with a tip about it, in `trial.tip`; its tokens carry no loss."""
  text = await _write(ctx, log, ctx.prompts.tip, ctx.prompts.parse_tip, "tip", trained=False)
  ctx.trial.tip = text


async def _write(ctx, log, build, parse, anchor: str, trained: bool = True) -> str:
  """A turn that looks back at an attempt and changes nothing in the environment."""
  answer = await ctx.ask(Generate("reflect", log.index, 0, build, base.View((), log)))
  text, valid = parse(answer.sample.text)
  ctx.trial.turns.append(
    Turn(
      attempt=log.index,
      phase="reflect",
      index=0,
      messages=answer.messages,
      sample=answer.sample,
      action=text,
      valid=valid,
      reward=0.0,
      anchor=anchor,
      trained=trained,
    )
  )
  return text


def remembered(view: base.View) -> tuple[str, ...]:
  """What stood in the prompt of earlier attempts, one text each, and then of tips."""
  return _attempts(view) + view.tips


def _attempts(view: base.View) -> tuple[str, ...]:
  if view.memory == "history_only":
    return tuple(" | ".join(step.action for step in log.steps) for log in view.past)
  if view.memory == "reflection_only":
    return tuple(log.reflection or "" for log in view.past)
  return tuple(
    " | ".join(step.action for step in log.steps) + " :: " + (log.reflection or "")
    for log in view.past
  )
