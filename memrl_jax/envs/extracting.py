"""What the extractor of Complementary RL is asked, and what the actor says about experience.

The extractor reads a finished attempt and the entries that guided it, and answers with operations on
the bank (their grammar: `memory.replies`); it merges entries, and answers questions of an actor that is
in the middle of an attempt. The actor may ask such questions, and may judge an entry before it plays.
Wording of our own after the description in 2603.17621, appendix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from memrl_jax.envs import base
from memrl_jax.types import Message

ASKED = re.compile(r"<ask>(.*?)</ask>", re.DOTALL | re.IGNORECASE)
VERDICTS = ("accept", "refine", "reject")
SPEAK, ABSTAIN = "[GENERATE]", "[ABSTAIN]"  # Mem-pi's decisions, in sentences
OPERATIONS = ADD, UPDATE, DELETE, NOOP = "[ADD]", "[UPDATE]", "[DELETE]", "[NOOP]"  # Memory-R1's


def brief(
  header: str, ended: Callable[[base.View], str], now: Callable[[base.View], str]
) -> base.Extract:
  """In the notation of the tiny models; answers stand in <remark> tags."""

  def distill(view: base.View) -> list[Message]:
    return _user("\n", header, *_lines(view.tips), ended(view))

  def merge(texts: Sequence[str]) -> list[Message]:
    return _user("\n", "merge", *_lines(texts))

  def advise(view: base.View, question: str) -> list[Message]:
    return _user("\n", header, *_lines(view.tips), now(view), f"ask:{question}")

  def judge(view: base.View, rate: float) -> list[Message]:
    return _user("\n", header, *_lines(view.tips), f"judge {round(9 * rate)}")

  def hint(goal: str, seen: str) -> list[Message]:
    return _user("\n", *filter(None, (goal, seen)), "tip")

  def advice(answer: str) -> str:
    start, said, rest = answer.partition(_SPEAK)
    return rest.partition("</remark>")[0].strip() if said and not start.strip() else ""

  def manage(seen: str, fact: str, known: Sequence[str]) -> list[Message]:
    return _user("\n", seen, *_lines(known), f"reflect:{fact}", "merge")

  hinting = base.Hinting(_SPEAK, _ABSTAIN, "</remark>", now, hint, advice)
  managing = base.Managing(_OPERATIONS, manage)
  return base.Extract(distill, merge, advise, judge, hinting, managing)


def _lines(texts: Sequence[str]) -> list[str]:
  return [f"tip {number}:{text}" for number, text in enumerate(texts, start=1)]


def full(
  finished: Callable[[base.View], list[str]], so_far: Callable[[base.View], list[str]]
) -> base.Extract:
  """In sentences, for language models that read English and write JSON."""

  def distill(view: base.View) -> list[Message]:
    won = "was completed" if view.current.success else "was not completed"
    return _user("\n\n", *finished(view), f"The task {won}.", *_shown(view.tips, _GUIDED), _DISTILL)

  def merge(texts: Sequence[str]) -> list[Message]:
    return _user("\n\n", *_shown(texts, _STORED), _MERGE)

  def advise(view: base.View, question: str) -> list[Message]:
    asked = f"The agent asks: {question}"
    return _user("\n\n", *so_far(view), *_shown(view.tips, _STORED), asked, _ADVISE)

  def judge(view: base.View, rate: float) -> list[Message]:
    known = f"So far this kind of task was completed in {rate:.0%} of the attempts."
    return _user("\n\n", *so_far(view), *_shown(view.tips, _STORED), known, _JUDGE)

  def seen(view: base.View) -> str:
    return "\n\n".join(so_far(view))

  def hint(goal: str, seen: str) -> list[Message]:
    task = f"The task: {goal}" if goal and goal not in seen else ""
    return _user("\n\n", *filter(None, (task, seen)), _HINT)

  def advice(answer: str) -> str:
    start, said, rest = answer.rpartition("</think>")[2].partition(SPEAK)
    return " ".join(rest.split()) if said and not start.strip() else ""

  def manage(seen: str, fact: str, known: Sequence[str]) -> list[Message]:
    return _user("\n\n", seen, *_shown(known, _KEPT), f"The new note:\n{fact}", _MANAGE)

  hinting = base.Hinting(SPEAK, ABSTAIN, "", seen, hint, advice)
  managing = base.Managing(OPERATIONS, manage)
  return base.Extract(distill, merge, advise, judge, hinting, managing)


def _shown(texts: Sequence[str], heading: str) -> list[str]:
  if not texts:
    return []
  return ["\n".join([heading, *(f"[{n}] {text}" for n, text in enumerate(texts, start=1))])]


def tool(most: int) -> str:
  """What an actor that may ask is told."""
  return (
    f"At most {most} times in this attempt you may ask instead of acting: write <ask>where you are, what "
    "stands in the way, what you have tried, and your question</ask> and nothing else. The answer comes "
    "from experience with similar tasks and costs no turn."
  )


def question(response: str) -> str:
  """What the response asks; "" where it acts."""
  found = ASKED.search(response)
  return " ".join(found.group(1).split()) if found else ""


def verdict(response: str) -> tuple[str, str]:
  """(one of VERDICTS, the text of a refinement); ("", "") where the response holds no verdict."""
  body = response.rpartition("</think>")[2]
  found = re.search(r"<remark>(.*?)</remark>", body, re.DOTALL | re.IGNORECASE)
  kind, _, text = (found.group(1) if found else body).strip().partition(":")
  kind, text = kind.strip().lower(), " ".join(text.split())
  if kind not in VERDICTS or (kind == "refine" and not text):
    return "", ""
  return kind, text if kind == "refine" else ""


def _user(joint: str, *parts: str) -> list[Message]:
  return [Message("user", joint.join(parts))]


_SPEAK, _ABSTAIN = "<remark>", "keep"  # the same in brief notation
_OPERATIONS = ("<remark>", "<action>", "lost", "keep")  # each a token that the clones have said

_HINT = f"""Another agent is about to act here. You know such tasks. If it will do well by itself, or you know \
nothing that helps, answer {ABSTAIN} and nothing else. Otherwise answer {SPEAK} and then a short hint: what to do, \
in which order, and what to avoid. Every word costs."""

_KEPT = "Notes of an agent that stood before this task, nearest first:"
_MANAGE = f"""The agent has tried this task and has written a new note. Decide what becomes of its notes, so that it \
does better when such a task comes again. Answer {ADD} to keep the new note beside the others, {UPDATE} to put it in \
the place of the first, {DELETE} to throw the first away and the new one as well, or {NOOP} to change nothing."""

_GUIDED = "Experience that was given to the agent before this attempt:"
_STORED = "Experience from earlier attempts:"

_DISTILL = """Write down what should be known before such a task is tried again. An experience says in what \
situation it applies, which sequence of actions to take, how to decide between them, and what not to do. \
It must help in other instances of this kind of task: name no coordinates and nothing that only holds in \
this one, and claim nothing that the attempt does not show.

First think inside <think> tags. Then answer with a JSON list of at most 3 operations inside <answer> tags:
{"op": "add", "experience": "..."} stores a new experience;
{"op": "update", "index": 1, "experience": "..."} replaces one of the numbered ones above, where this \
attempt shows how to correct or extend it;
{"op": "return"} stores nothing, where nothing new was learned."""

_MERGE = """Clean this list up. Merge experiences that say the same thing, discard those that others contradict or \
that are too vague to act on, and leave the rest as they are.

First think inside <think> tags. Then answer with a JSON list of operations inside <answer> tags, naming each \
number at most once:
{"op": "merge", "indices": [1, 3], "experience": "..."}
{"op": "discard", "indices": [2]}
{"op": "keep", "indices": [4]}"""

_ADVISE = """Answer the agent in a few sentences. Say what to do next in its situation and why; adapt the experience \
to it, or say that it does not apply."""

_JUDGE = """Decide whether this experience will help with the task above. Answer inside tags with one of:
<remark>accept</remark>
<remark>refine: the experience in your own words, corrected</remark>
<remark>reject</remark>"""
