"""How episodic memories enter a prompt: what worked first, what failed as a caution, within a budget.

MemRL (2601.03192): the model is told that memories are references and may be wrong. Nothing found means no
text at all, so that the prompt is that of an agent without memory. The budget goes to the best scores
first; a memory that is too long loses its trajectory from the end, then the end of what was learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

FOLLOW = "What worked on similar tasks. Use what fits; the task at hand may differ:"
AVOID = "What failed on similar tasks. Take it as a caution, and avoid these mistakes:"
_CUT = " [cut]"

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Control tokens of chat templates, and the tags that our own prompts and replies are made of.
_OPENS = re.compile(
  r"<(?=\||｜|/?\s*(?:s|bos|eos|pad|unk|start_of_turn|end_of_turn|memor(?:y|ies)|system|user|assistant|"
  r"think|action|remark|tips?|answer|tool_call|tool_response)\b)"
  r"|\[(?=/?(?:INST|SYS)\])",
  re.IGNORECASE,
)


class Suggestion(NamedTuple):
  """A memory as a query found it, in the memory at `version`.

  similarity: cosine of its key and the query. q: its utility, visits: how often that was updated.
  z_similarity, z_q: as they entered `score` (with exploration z_q is that of the value drawn).
  learned: how many characters of `text` say what was learned; the trajectory follows.
  """

  id: int
  version: int
  key: str
  text: str
  success: bool
  similarity: float
  q: float
  visits: int
  z_similarity: float
  z_q: float
  score: float
  learned: int
  images: tuple[str, ...] = ()

  @property
  def read(self) -> tuple[int, int]:
    """What `Feedback` and `Episode` name it by."""
    return self.id, self.version


def plain(text: str) -> str:
  """A text that stays a text in a prompt and in the store: no control characters, no live tags.

  A tag keeps its words; only its bracket is replaced, so nothing can close around what is left.
  """
  text = _SURROGATE.sub("\ufffd", text.replace("\r\n", "\n").replace("\r", "\n"))
  return _OPENS.sub(lambda found: "‹" if found[0] == "<" else "(", _CONTROL.sub("", text)).strip()


class Part(NamedTuple):
  """A memory as it is shown; the first of its kind has the heading of its block above it."""

  suggestion: Suggestion
  text: str


def blocks(
  suggestions: Sequence[Suggestion],
  *,
  memory_budget: int,
  total_budget: int,
  failed_trajectory: bool = True,
  count: Callable[[str], int] = len,
) -> tuple[str, ...]:
  """`parts` joined to at most two texts: of successes, of failures; () where there is nothing to show."""
  shown = parts(
    suggestions,
    memory_budget=memory_budget,
    total_budget=total_budget,
    failed_trajectory=failed_trajectory,
    count=count,
  )
  kinds = (
    [part.text for part in shown if part.suggestion.success is kind] for kind in (True, False)
  )
  return tuple("\n".join(texts) for texts in kinds if texts)


def parts(
  suggestions: Sequence[Suggestion],
  *,
  memory_budget: int,
  total_budget: int,
  failed_trajectory: bool = True,
  count: Callable[[str], int] = len,
) -> list[Part]:
  """What is shown of each memory that fits, those of successes first, in the order given.

  Each memory costs at most `memory_budget` and the blocks, joined by an empty line, at most
  `total_budget`, as `count` counts (characters, or a tokenizer's tokens).
  """
  order = sorted(range(len(suggestions)), key=lambda place: -suggestions[place].score)
  shown: dict[int, str] = {}
  for place in order:
    one = suggestions[place]
    learned, rest = plain(one.text[: one.learned]), plain(one.text[one.learned :])
    if not one.success and not failed_trajectory and learned:
      rest = ""

    def render(size: int, learned=learned, rest=rest, images=one.images) -> str:
      return _memory(learned, rest, size, images)

    def fits(size: int, place=place, render=render) -> bool:
      text = render(size)
      found = _parts(suggestions, shown | {place: text})
      whole = "\n\n".join(part.text for part in found)
      return count(text) <= memory_budget and count(whole) <= total_budget

    size = _largest(len(learned) + len(rest), fits)
    if size:
      shown[place] = render(size)
  return _parts(suggestions, shown)


def _memory(learned: str, rest: str, size: int, images: tuple[str, ...]) -> str:
  """The first `size` characters of a memory, what was learned before the trajectory."""
  cut = _CUT if size < len(learned) + len(rest) else ""
  parts = [learned[:size], rest[: max(0, size - len(learned))]]
  text = "\n".join(part for part in parts if part).rstrip() + cut
  if images:
    text = f"(images: {', '.join(plain(name) for name in images)})\n{text}"
  return text


def _parts(suggestions: Sequence[Suggestion], shown: dict[int, str]) -> list[Part]:
  found = []
  for heading, success in ((FOLLOW, True), (AVOID, False)):
    mine = [place for place in sorted(shown) if suggestions[place].success == success]
    for number, place in enumerate(mine, 1):
      text = f'<memory number="{number}">\n{shown[place]}\n</memory>'
      found.append(Part(suggestions[place], f"{heading}\n{text}" if number == 1 else text))
  return found


def chosen(texts: Sequence[str], keep: Sequence[bool]) -> list[str]:
  """The texts of `parts` that are kept; the first of its kind that is left has the heading of its block."""
  found, heading = [], ""
  for text, kept in zip(texts, keep, strict=True):
    for new in (FOLLOW, AVOID):
      if text.startswith(f"{new}\n"):
        heading, text = f"{new}\n", text.removeprefix(f"{new}\n")
    if kept:
      found.append(heading + text)
      heading = ""
  return found


def _largest(most: int, fits: Callable[[int], bool]) -> int:
  """The largest size in 1..most that fits, by bisection; 0 if none was found."""
  if not most or fits(most):
    return most
  low, high = 0, most
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if fits(middle) else (low, middle)
  return low
