"""What the extractor of Complementary RL answers, as operations on the experience bank.

A reply is a thought, then a JSON list in an answer tag; or, in the notation of the tiny models, one
operation a line in a remark tag. It comes from a language model: whatever it holds, the result is
either a list that can be applied as a whole, or the reason why nothing is done.

    {"op": "add", "experience": TEXT}                           add:TEXT
    {"op": "update", "index": 1, "experience": TEXT}            update 1:TEXT
    {"op": "merge", "indices": [1, 3], "experience": TEXT}      merge 1 3:TEXT
    {"op": "discard", "indices": [2]}                           discard 2
    {"op": "keep", "indices": [4]}                              keep 4
    {"op": "return"}                                            return
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from memrl_jax.memory import tips

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_REMARK = re.compile(r"<remark>(.*?)</remark>", re.DOTALL)
_LINE = re.compile(r"(\w+)((?: \d+)*)(?::(.*))?")
_FENCE = re.compile(r"^\s*```\w*|```\s*$")
_OURS = re.compile(r"</?\s*(?:answer|experience|ask|remark)s?\s*>", re.IGNORECASE)
_WRITING = ("add", "update", "merge")


class Operation(NamedTuple):
  """ "add" a text, "update" an entry, "merge" several into one, "discard" some, "keep" some.

  `places` are 0-based positions among the entries that were shown (1-based in the reply).
  """

  kind: str
  places: tuple[int, ...] = ()
  text: str = ""


class Parsed(NamedTuple):
  """What to do; nothing at all where the reply is not valid as a whole, for `reason`."""

  operations: tuple[Operation, ...] = ()
  reason: str = ""


def clean(text: str, chars: int) -> str:
  """A text that can do no harm in a prompt: one line, none of our tags, valid Unicode, not too long."""
  text, before = text.encode("utf-8", "ignore").decode(), None
  while text != before:  # a tag inside a tag leaves a tag
    before, text = text, _OURS.sub(" ", tips.clean(text, len(text)))
  return text[:chars].strip()


def parse(reply: str, shown: int, *, max_ops: int, chars: int) -> Parsed:
  """The operations of a reply about a trial, at most `max_ops`; `chars` of each text are kept.

  Add and update; return ends the list.  Complementary RL (2603.17621), appendix; one operation that is not valid rejects the list.
  """
  return operations(reply, shown, {"add": 0, "update": 1}, max_ops, chars)


def parse_merge(reply: str, shown: int, *, chars: int) -> Parsed:
  """The operations of a reply about a chunk of entries, each named at most once; unnamed ones stay.

  Merge, discard and keep; return ends the list.
  """
  parsed = operations(reply, shown, {"merge": 2, "discard": 1, "keep": 1}, shown, chars)
  places = [place for operation in parsed.operations for place in operation.places]
  if len(set(places)) < len(places):
    return Parsed(reason="an entry is named twice")
  return parsed


def operations(reply: str, shown: int, kinds: dict[str, int], most: int, chars: int) -> Parsed:
  """All of the list or nothing of it; `kinds` says how many entries an operation names at least."""
  spoken = reply.rpartition("</think>")[2]
  if "<think>" in spoken:
    return Parsed(reason="the thought does not end")
  listed = _listed(spoken)
  if isinstance(listed, str):
    return Parsed(reason=listed)
  if not isinstance(listed, list) or len(listed) > most:
    return Parsed(reason=f"the answer is not a list of at most {most} operations")
  operations: list[Operation] = []
  for number, item in enumerate(listed, 1):
    kind = item.get("op") if isinstance(item, dict) else None
    if kind == "return":
      break
    made = _operation(kind, item, shown, kinds, chars)
    if isinstance(made, str):
      return Parsed(reason=f"operation {number} {made}")
    operations.append(made)
  return Parsed(tuple(operations))


def _listed(spoken: str) -> Any:
  """What stands in the last tag, as JSON would have it; a text says why nothing can be read there."""
  answers, remarks = _ANSWER.findall(spoken), _REMARK.findall(spoken)
  if not answers and not remarks:
    return "there is no answer tag"
  if answers:
    try:
      listed = json.loads(_FENCE.sub("", answers[-1]))
    except (ValueError, RecursionError):
      return "the answer is not JSON"
    return listed if isinstance(listed, list) else {}
  return [_line(line) for line in remarks[-1].strip().split("\n")]


def _line(line: str) -> dict[str, Any]:
  """An operation of the short notation; one that is none of ours is refused by name later."""
  found = _LINE.fullmatch(line.strip())
  if found is None:
    return {}
  kind, numbers, text = found.groups()
  places = [int(number) for number in numbers.split()]
  read = {"op": kind, "indices": places, "experience": text}
  return read | {"index": places[0] if len(places) == 1 else None}


def _operation(kind: Any, item: Any, shown: int, kinds: dict[str, int], chars: int):
  """The operation, or what is wrong with it."""
  if not isinstance(kind, str) or kind not in kinds:
    return f"is none of {', '.join(kinds)}, return"
  named = {"add": [], "update": [item.get("index")]}.get(kind, item.get("indices"))
  if not isinstance(named, list) or not all(type(n) is int and 1 <= n <= shown for n in named):
    return f"names an entry that is not among the {shown} shown"
  if len(set(named)) < max(kinds[kind], len(named)):
    return "names too few entries, or one twice"
  text = item.get("experience") if kind in _WRITING else ""
  text = clean(text, chars) if isinstance(text, str) else ""
  if not text and kind in _WRITING:
    return "has no text"
  return Operation(kind, tuple(n - 1 for n in named), text)
