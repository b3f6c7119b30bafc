"""What MemRL and its baselines ask the frozen model beside playing; the environment sees none of it.

judge    Self-RAG (2310.11511) without training: before an attempt the model says whether memories would help
         at all, then of each that was found whether it is relevant. The original is trained to say so in
         tokens of its own, also about what it has written; a frozen model is asked, before it plays.
sum_up   the plan or the lesson that an attempt becomes (MemRL, MemP), or a tip in the environment's notation.
facts    Mem0 (2504.19413): what an attempt teaches, each fact compared with the memories nearest to it.

An answer that cannot be read changes nothing: what might help is searched and shown, no fact is kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from memrl_jax.envs.base import AttemptLog, View
from memrl_jax.memory import episodic_prompt, episodic_write
from memrl_jax.memory import facts as facts_lib
from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.episodic_write import Episode
from memrl_jax.rollout.trial import Context, Generate, write_tip
from memrl_jax.types import Memo, Message, Phase, Turn

NOTES = ("note", "tip", "facts")  # anchors of the turns that hold what is kept of an attempt

_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_RETRIEVE = (
  "You are about to work on the task below and may look into your notes on earlier tasks first. Would notes "
  "on similar tasks help you, or can you do it as well without? Answer yes (look) or no (do without)."
)
_RELEVANT = (
  "You are about to work on the task below. Is this note from an earlier task relevant to it, so that "
  "knowing it would help? Answer yes or no."
)


async def wanted(ctx: Context, log: AttemptLog, task: str) -> bool:
  """Whether the model asks for memories about this task."""

  def build(view: View) -> list[Message]:
    return [Message("system", _RETRIEVE), Message("user", f"Task:\n{task}")]

  turn = await _ask(ctx, log, "judge", 0, "retrieve", build, lambda text, shown: _verdict(text))
  return turn.action != "no"


async def relevant(
  ctx: Context, log: AttemptLog, task: str, memos: tuple[Memo, ...]
) -> tuple[Memo, ...]:
  """Those of the memories that the model does not call irrelevant."""
  keep = []
  for number, memo in enumerate(memos, start=1):

    def build(view: View) -> list[Message]:
      note = "\n".join(view.tips)
      return [Message("system", _RELEVANT), Message("user", f"Task:\n{task}\n\nNote:\n{note}")]

    def read(text: str, shown: int) -> tuple[str, bool]:
      return _verdict(text) if shown else ("", False)  # it had no room: no verdict about nothing

    reads = ((memo.id, memo.version),)
    view = View((), log, tips=(memo.text,))
    turn = await _ask(ctx, log, "judge", number, "relevant", build, read, view, reads)
    keep.append(turn.action != "no")
  texts = episodic_prompt.chosen([memo.text for memo in memos], keep)
  kept = [memo for memo, kept in zip(memos, keep, strict=True) if kept]
  return tuple(memo._replace(text=text) for memo, text in zip(kept, texts, strict=True))


async def sum_up(ctx: Context, how: EpisodicConfig, log: AttemptLog, episode: Episode) -> None:
  """The model's own words about an attempt, as a turn and in `trial.tip`."""
  if how.build == "note":
    await write_tip(ctx, log)
    return
  messages = episodic_write.request(how, episode)
  if messages is None:  # nothing is kept of it, or its trajectory says it all
    return
  turn = await _ask(
    ctx, log, "reflect", 0, "note", lambda view: messages, lambda text, shown: (text, bool(text))
  )
  ctx.trial.tip = turn.action


async def facts(
  ctx: Context, how: EpisodicConfig, log: AttemptLog, episode: Episode, scope: str
) -> None:
  """What is to become of the facts of an attempt, as the action of a turn (`facts_lib.load` reads it)."""
  messages = facts_lib.request(how, episode)
  if messages is None:
    return
  found: list[str] = []

  def read(text: str, shown: int) -> tuple[str, bool]:
    listed = facts_lib.listed(text)
    found.extend(listed or ())
    return "", listed is not None

  turn = await _ask(ctx, log, "reflect", 0, "facts", lambda view: messages, read)
  operations: list[facts_lib.Operation] = []
  for number, fact in enumerate(found, start=1):
    known = await ctx.recall(scope, fact)
    if known:
      operations += await _compare(ctx, log, number, fact, known)
    else:
      operations.append(facts_lib.Operation("add", fact))
  turn.action = facts_lib.dump(operations)


async def _compare(
  ctx: Context, log: AttemptLog, number: int, fact: str, known: tuple[Memo, ...]
) -> list[facts_lib.Operation]:
  made: list[facts_lib.Operation] = []

  def build(view: View) -> list[Message]:
    return facts_lib.compare(fact, view.tips)

  def read(text: str, shown: int) -> tuple[str, bool]:
    decided = facts_lib.decided(text, [(memo.id, memo.text) for memo in known[:shown]])
    made.extend(decided or ())
    return facts_lib.dump(made), decided is not None

  reads = tuple((memo.id, memo.version) for memo in known)
  view = View((), log, tips=tuple(memo.text for memo in known))
  await _ask(ctx, log, "reflect", number, "compare", build, read, view, reads)
  return made


def _verdict(text: str) -> tuple[str, bool]:
  """("yes" or "no", True), or ("", False) where neither was said."""
  found = None if "<think>" in text else _YES_NO.search(text)
  return (found[1].lower(), True) if found else ("", False)


async def _ask(
  ctx: Context,
  log: AttemptLog,
  phase: Phase,
  number: int,
  anchor: str,
  build: Callable[[View], list[Message]],
  read: Callable[[str, int], tuple[str, bool]],
  view: View | None = None,
  reads: tuple[tuple[int, int], ...] = (),
) -> Turn:
  """One question, recorded; `read` makes (action, whether it was well formed) of what was said and of how
  many tips the question had room for."""
  answer = await ctx.ask(Generate(phase, log.index, number, build, view or View((), log)))
  action, valid = read(answer.sample.text.rpartition("</think>")[2].strip(), len(answer.view.tips))
  turn = Turn(
    attempt=log.index,
    phase=phase,
    index=number,
    messages=answer.messages,
    sample=answer.sample,
    action=action,
    valid=valid,
    reward=0.0,
    anchor=anchor,
    reads=reads,
    trained=False,
  )
  ctx.trial.turns.append(turn)
  return turn
