"""The text between an environment and a language model: tags, memory blocks, history windows.

Three styles. "full": rules and observations in sentences, for language models that read English.
"chat": the same as a conversation, in which each turn appends and nothing before it changes. "brief":
a compact notation for our tiny models, in which every word, cell and coordinate is one token. A family
describes itself with a `Wording` and a `Shorthand`; everything else stands here once.

Trials are numbered by what is remembered: with no remembered attempt every attempt is trial 1, so a
cleared memory gives exactly the prompt of a first attempt (experiments/lamer.md 6.6).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs import base, extracting
from memrl_jax.types import Message

STYLES = ("brief", "full", "chat")
REFLECTION_CHARS = 2000  # experiments/lamer.md 1.6
HISTORY_TURNS = 7  # actions shown of an attempt; experiments/lamer.md 1.7
HISTORY_OBSERVATIONS = 2  # newest observations shown in full; older ones as "..."
MAX_SIDE = 9  # one digit in coordinates and row labels

COORDINATE = re.compile(r"\(\s*(\d+)\s*,\s*(\d+)\s*\)")

Cell = tuple[int, int]


# What is written in brief style, as atomic strings for a tokenizer.


def words(*names: str) -> tuple[str, ...]:
  """Each word bare (at the start of a line or tag) and with the space that joins it to a word."""
  return tuple(form for name in names for form in (name, f" {name}"))


COORDINATES = tuple(
  f"({row},{col})" for row in range(1, MAX_SIDE + 1) for col in range(1, MAX_SIDE + 1)
)
ROW_LABELS = tuple(f"\n{row}:" for row in range(1, MAX_SIDE + 1))
SHARED_SYMBOLS = (
  *("<action>", "</action>", "<remark>", "</remark>", "\n", ":"),
  *words("trial", "now", "reflect", "lost", "won"),
  *(f" {digit}" for digit in range(1, 10)),
  *(str(digit) for digit in range(10)),
)


# Reading responses.


def action_body(response: str) -> str | None:
  """The text between the first <action> and the last </action>, lower-cased; None without tags."""
  start, end = response.find("<action>"), response.rfind("</action>")
  return response[start + len("<action>") : end].lower() if 0 <= start < end else None


def parse_reflection(response: str) -> tuple[str, bool]:
  """(text between the last <remark> and its end, at most 2000 characters; whether there was one).

  Missing tags and an empty remark both give ("", False): nothing can be remembered.
  """
  end = response.rfind("</remark>")
  start = response.rfind("<remark>", 0, max(end, 0))
  body = response[start + len("<remark>") : end].strip() if 0 <= start < end else ""
  return body[:REFLECTION_CHARS], bool(body)


def whole_words(text: str, known: Sequence[str]) -> list[str]:
  """The known words of the text in order; "setup" is not "up"."""
  return [word for word in re.findall(r"\w+", text) if word in known]


def cells(text: str) -> list[Cell]:
  """All (row,col) pairs of a text, in order, 1-indexed."""
  return [(int(row), int(col)) for row, col in COORDINATE.findall(text)]


def write(cell: Cell) -> str:
  """The canonical "(row,col)"."""
  return f"({cell[0]},{cell[1]})"


def spaced(board: str) -> str:
  """A board for readers: `1:?.2` becomes `Row 1: ? . 2`, so that no tokenizer merges cells."""
  rows = (row.partition(":") for row in board.split("\n"))
  return "\n".join(f"Row {label}: {' '.join(content)}" for label, _, content in rows)


# Memory.


def outcome(attempt: base.AttemptLog) -> str:
  """How an attempt is remembered to have ended."""
  return "won" if attempt.success else "lost"


def memory_bodies(view: base.View, history: Callable[[base.AttemptLog], str]) -> list[list[str]]:
  """What `view.memory` shows of each past attempt, oldest first: history, reflection, or both."""
  bodies = []
  for attempt in view.past:
    shown = [history(attempt)] if view.memory != "reflection_only" else []
    bodies.append(shown + ([attempt.reflection or ""] if view.memory != "history_only" else []))
  return bodies


def check_memory(view: base.View) -> None:
  """Raises ValueError when `view.memory` is not one of MEMORY_KINDS."""
  if view.memory not in base.MEMORY_KINDS:
    raise ValueError(
      f"memory {view.memory!r} is not known; choose one of {', '.join(base.MEMORY_KINDS)} (config.memory)"
    )


def check_style(style: str) -> None:
  """Raises ValueError when the style is not one of STYLES."""
  if style not in STYLES:
    raise ValueError(
      f"prompt style {style!r} is not known; choose one of {', '.join(STYLES)} (config.env.style)"
    )


# Brief style.


class Shorthand(NamedTuple):
  """A family in brief notation.

  `past` is the history body of a finished attempt, `now` what follows "now trial k", `reflect` what
  follows "reflect trial k".
  """

  header: str
  past: Callable[[base.AttemptLog], str]
  now: Callable[[base.AttemptLog], str]
  reflect: Callable[[base.AttemptLog], str]


def brief(shorthand: Shorthand) -> base.Prompts:
  """Prompts in brief style.

  A memory line is `trial k:body` without a space, so that a reflection is read with the very tokens
  it was written with.
  """

  def play(view: base.View) -> list[Message]:
    check_memory(view)
    lines = [shorthand.header]
    for number, bodies in enumerate(memory_bodies(view, shorthand.past), start=1):
      lines += [f"trial {number}:{body}" for body in bodies]
    lines += [f"tip:{tip}" for tip in view.tips]
    return _user([*lines, now(view)], view.instruction, "\n")

  def now(view: base.View) -> str:
    return f"now trial {len(view.past) + 1}{shorthand.now(view.current)}"

  def ended(view: base.View) -> str:
    return f"reflect trial {len(view.past) + 1}{shorthand.reflect(view.current)}"

  def reflect(view: base.View) -> list[Message]:
    return _user([ended(view)], view.instruction, "\n")

  extract = extracting.brief(shorthand.header, ended, now)
  return base.Prompts(play, reflect, parse_reflection, reflect, parse_reflection, extract)


# Tips.


def tip_block(
  tips: Sequence[str], images: Sequence[Sequence[str]] = (), seen: Sequence[str] = ()
) -> list[str]:
  """What is appended to a turn that was given tips: nothing at all without any.

  A tip with `images` (those of each tip) says which of the prompt they are: it has those `seen`
  without the tips, then those that the tips bring.
  """
  if not tips:
    return []
  places = [*seen, *brought(tips, images, seen)]
  lines = [f"- {tip}" for tip in tips]
  for number, mine in enumerate(images[: len(tips)]):
    for image in mine:
      lines[number] += f"\n(Its image is number {places.index(image) + 1} in this prompt.)"
  return ["\n".join(["<tips>", _TIPS_ARE, *lines, "</tips>"])]


def brought(
  tips: Sequence[str], images: Sequence[Sequence[str]], seen: Sequence[str]
) -> tuple[str, ...]:
  """The images of the tips that the prompt does not have already, each once."""
  found = dict.fromkeys(image for mine in images[: len(tips)] for image in mine)
  return tuple(image for image in found if image not in seen)


def parse_tip(response: str) -> tuple[str, bool]:
  """The answer as one line of at most 2000 characters; not well formed when nothing was said."""
  line = " ".join(response.split())[:REFLECTION_CHARS]
  return line, bool(line)


_TIPS_ARE = (
  "Notes from earlier explorations of this task, which may be wrong or may not apply here:"
)

_TIP_REQUEST = (
  "The episode is over; thank you for playing. What you found out may or may not be worth knowing to "
  "others who will be given this task. Say in one sentence, on one line and in fewer than 100 words, "
  "what was done, what was learned from it, and how far it came from completing the task."
)


# Full style.


class Wording(NamedTuple):
  """A family in sentences. `show` renders an observation, `request` says how to answer a turn."""

  rules: str
  request: str
  show: Callable[[str], str]


def full(wording: Wording) -> base.Prompts:
  """Prompts in full style: rules, initial observation, past attempts, current attempt, request."""

  def past(attempt: base.AttemptLog) -> str:
    return f"{_history(wording, attempt.steps)}\nThis trial was {outcome(attempt)}."

  def play(view: base.View) -> list[Message]:
    check_memory(view)
    parts = _opening(wording, view)
    for past_number, bodies in enumerate(memory_bodies(view, past), start=1):
      parts.append(
        "\n".join([f"Memory of trial #{past_number}:", *(b or "(empty)" for b in bodies)])
      )
    seen = _seen(view.current)
    parts += [_so_far(wording, view), *tip_block(view.tips, view.images, seen)]
    images = seen + brought(view.tips, view.images, seen)
    return _user(parts, view.instruction, "\n\n", wording.request, images)

  def finished(view: base.View) -> list[str]:
    return _finished(wording, view)

  def reflect(view: base.View) -> list[Message]:
    ending = f"Trial #{len(view.past) + 1} has ended and the task was not completed."
    parts, images = [*finished(view), ending], _seen(view.current, whole=True)
    return _user(parts, view.instruction, "\n\n", _REFLECT_REQUEST, images)

  def tip(view: base.View) -> list[Message]:
    images = _seen(view.current, whole=True)
    return _user(finished(view), view.instruction, "\n\n", _TIP_REQUEST, images)

  return base.Prompts(play, reflect, parse_reflection, tip, parse_tip, _extract(wording))


def _extract(wording: Wording) -> base.Extract:
  """The prompts about experience, the same for both styles in sentences."""

  def so_far(view: base.View) -> list[str]:
    return [*_opening(wording, view), _so_far(wording, view)]

  return extracting.full(lambda view: _finished(wording, view), so_far)


def _opening(wording: Wording, view: base.View) -> list[str]:
  initial = wording.show(view.current.initial.text)
  return [wording.rules, f"What you see at the start of every trial:\n{initial}"]


def _so_far(wording: Wording, view: base.View) -> str:
  number = len(view.past) + 1
  if view.current.steps:
    return f"Trial #{number} so far:\n{_history(wording, view.current.steps)}"
  return f"Trial #{number} begins now, from the initial state shown above."


def _seen(log: base.AttemptLog, whole: bool = False) -> tuple[str, ...]:
  """The images of the observations that full style shows of the current attempt, in their order.

  Past attempts, and prompts about experience, are told in words alone.
  """
  steps = log.steps if whole else log.steps[-HISTORY_OBSERVATIONS:]
  observed = [log.initial, *(step.result.observation for step in steps)]
  return tuple(image for observation in observed for image in observation.images)


def _finished(wording: Wording, view: base.View) -> list[str]:
  steps = view.current.steps
  return [
    *_opening(wording, view),
    f"Everything that happened in trial #{len(view.past) + 1}:\n"
    f"{_history(wording, steps, keep=len(steps), observed=len(steps))}",
  ]


# Chat style.


def chat(wording: Wording) -> base.Prompts:
  """Prompts as a conversation: rules and first observation, then action and observation in turn.

  Remembered attempts stand in the first message; the tips of a turn close its message.
  """

  def opening(view: base.View) -> str:
    initial = wording.show(view.current.initial.text)
    parts = [wording.rules, *filter(None, (view.instruction, wording.request)), initial]
    memories = memory_bodies(view, lambda attempt: _history(wording, attempt.steps))
    for number, bodies in enumerate(memories, start=1):
      parts.insert(
        -1, "\n".join([f"Memory of trial #{number}:", *(b or "(empty)" for b in bodies)])
      )
    return "\n\n".join(parts)

  def conversation(view: base.View) -> list[Message]:
    messages, said, images = [], opening(view), view.current.initial.images
    for step in view.current.steps:
      messages.append(Message("user", "\n\n".join([said, *tip_block(step.tips)]), images))
      messages.append(Message("assistant", step.action or "(nothing)"))
      note = f" ({step.result.note})" if step.result.note else ""
      said = wording.show(step.result.observation.text) + note
      images = step.result.observation.images
    return [*messages, Message("user", said, images)]

  def closed(said: list[Message], *parts: str, images: tuple[str, ...] = ()) -> list[Message]:
    *before, last = said
    return [*before, Message("user", "\n\n".join([last.content, *parts]), last.images + images)]

  def play(view: base.View) -> list[Message]:
    check_memory(view)
    said = conversation(view)
    seen = [image for message in said for image in message.images]
    told = tip_block(view.tips, view.images, seen)
    return closed(said, *told, images=brought(view.tips, view.images, seen))

  def reflect(view: base.View) -> list[Message]:
    return closed(conversation(view), _REFLECT_REQUEST)

  def tip(view: base.View) -> list[Message]:
    return closed(conversation(view), _TIP_REQUEST)

  return base.Prompts(play, reflect, parse_reflection, tip, parse_tip, _extract(wording))


def written(style: str, shorthand: Shorthand, wording: Wording) -> base.Prompts:
  """The prompts of a family in one of STYLES."""
  if style == "brief":
    return brief(shorthand)
  return chat(wording) if style == "chat" else full(wording)


_REFLECT_REQUEST = (
  "Look back over this trial. First reason step by step about which decisions went wrong and what "
  "the observations reveal about the task. Then make a short, concrete plan for the next trial, "
  "which starts from the same initial state. Close with what your next self should know, inside "
  "tags: <remark>what you learned and what to do differently</remark>"
)


def _history(
  wording: Wording,
  steps: Sequence[base.Step],
  keep: int = HISTORY_TURNS,
  observed: int = HISTORY_OBSERVATIONS,
) -> str:
  """The newest `keep` actions; observations only for the newest `observed`, older ones "..."."""
  lines, first = [], max(0, len(steps) - keep)
  for turn, step in enumerate(steps[first:], start=first):
    feedback = f" ({step.result.note})" if step.result.note else ""
    lines.append(f"Action {turn + 1}: {step.action or 'none'}{feedback}")
    shown = turn >= len(steps) - observed
    lines.append(wording.show(step.result.observation.text) if shown else "...")
  return "\n".join(lines)


def _user(
  parts: list[str], instruction: str, joint: str, request: str = "", images: tuple[str, ...] = ()
) -> list[Message]:
  return [Message("user", joint.join([*parts, *filter(None, (instruction, request))]), images)]


# Scripted players.


class Chooser:
  """A player that says what it does in `choose`, and of the end only how it was."""

  def __init__(self, options: Any, rng: np.random.Generator):
    self._options, self._rng = options, rng

  def play(self, view: base.View) -> str:
    return f"<action>{self.choose(view)}</action>"

  def reflect(self, view: base.View) -> str:
    return f"<remark>{outcome(view.current)}</remark>"

  def choose(self, view: base.View) -> str:
    raise TypeError(f"{type(self).__name__} is no player: it lacks choose(view)")


class Clumsy:
  """A player that loses one tag of its response with probability `rate`.

  Imitation data with about 4 % of such rows leave the clone with something to learn about format
  (experiments/tiny/README.md).
  """

  def __init__(self, player: base.Player, rng: np.random.Generator, rate: float = 0.04):
    self.player, self._rng, self._rate = player, rng, rate

  def play(self, view: base.View) -> str:
    return self._slip(self.player.play(view))

  def reflect(self, view: base.View) -> str:
    return self._slip(self.player.reflect(view))

  def _slip(self, response: str) -> str:
    if self._rng.random() >= self._rate:
      return response
    tags = re.findall(r"</?(?:action|remark)>", response)
    return response.replace(tags[int(self._rng.integers(len(tags)))], "")
