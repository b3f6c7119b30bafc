"""Memories in a chat request, and what is read from its answer. Pure functions of parsed JSON.

Whatever is not a message stays as it came. Content is a text or a list of parts, as in OpenAI's API: images
among them pass, and what is asked of the memory, or kept in it, is text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Messages = list[dict[str, Any]]
_SYSTEM = ("system", "developer")


def check(messages: Any) -> Messages:
  """The messages, if they are any; ValueError with one sentence."""
  good = isinstance(messages, list) and messages
  if not good or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
    raise ValueError("messages is a list of {role, content} with at least one of them")
  return messages


def text(content: Any) -> str:
  """What is text in a message's content."""
  if isinstance(content, str):
    return content
  parts = content if isinstance(content, list) else []
  found = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
  return "\n".join(part for part in found if isinstance(part, str))


def task(messages: Messages, which: str) -> str:
  """The "first" or "last" user message that has a text; "" where there is none."""
  order = messages if which == "first" else messages[::-1]
  texts = (text(m.get("content")) for m in order if m["role"] == "user")
  return next((found for found in texts if found.strip()), "")


def inject(messages: Messages, block: str, place: str, which: str) -> Messages:
  """New messages with the block at the end of the system message, or in front of the task.

  An empty block changes nothing.
  """
  if not block:
    return messages
  out = list(messages)
  if place == "system":
    if out[0]["role"] in _SYSTEM and isinstance(out[0].get("content"), str | list):
      out[0] = out[0] | {"content": _joined(out[0]["content"], block, behind=True)}
      return out
    return [{"role": "system", "content": block}, *out]
  found = [n for n, m in enumerate(out) if m["role"] == "user" and text(m.get("content")).strip()]
  if not found:
    return [{"role": "user", "content": block}, *out]
  n = found[0 if which == "first" else -1]
  out[n] = out[n] | {"content": _joined(out[n]["content"], block, behind=False)}
  return out


def _joined(content: str | list, block: str, *, behind: bool) -> str | list:
  if isinstance(content, str):
    return "\n\n".join([content, block] if behind else [block, content])
  part = {"type": "text", "text": block}
  return [*content, part] if behind else [part, *content]


def trajectory(messages: Messages, reply: dict[str, Any]) -> str:
  """A conversation as it is remembered: every turn but the system's, and what was called."""
  turns = [m for m in messages if m["role"] not in _SYSTEM]
  return "\n".join(filter(None, map(_turn, [*turns, reply | {"role": "assistant"}])))


def _turn(message: dict[str, Any]) -> str:
  content = message.get("content")
  said = [text(content), *["[image]"] * _images(content)]
  calls = message.get("tool_calls")
  for call in calls if isinstance(calls, list) else []:
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict):
      said.append(f"calls {function.get('name')} {function.get('arguments')}")
  shown = "\n".join(filter(None, said))
  return f"{message['role']}: {shown}" if shown else ""


def _images(content: Any) -> int:
  """How many images are among the parts."""
  parts = content if isinstance(content, list) else []
  return sum(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)


def reply(answer: Any) -> dict[str, Any] | None:
  """The first choice's message of a whole answer; None where it has none."""
  try:
    message = answer["choices"][0]["message"]
  except (KeyError, IndexError, TypeError):
    return None
  return message if isinstance(message, dict) else None


class Stream:
  """The events of a streamed answer as they pass: the first gets our field, the text is collected.

  Every other byte passes as it came.
  """

  def __init__(self, field: dict[str, Any]):
    self._field, self._rest, self._first = field, b"", True
    self._said: list[str] = []
    self._calls: dict[int, list[str]] = {}
    self.done = False

  def feed(self, data: bytes) -> bytes:
    """What may be sent on of the bytes so far."""
    *lines, self._rest = (self._rest + data).split(b"\n")
    return b"".join(self._line(line) + b"\n" for line in lines)

  def end(self) -> bytes:
    rest, self._rest = self._rest, b""
    return self._line(rest) if rest else b""

  def message(self) -> dict[str, Any]:
    """What was answered so far."""
    calls = [
      {"function": {"name": name, "arguments": arguments}}
      for name, arguments in self._calls.values()
    ]
    return {"content": "".join(self._said), "tool_calls": calls}

  def _line(self, line: bytes) -> bytes:
    if not line.startswith(b"data:"):
      return line
    payload = line[5:].strip()
    if payload == b"[DONE]":
      self.done = True
      return line
    try:
      event = json.loads(payload)
      self._collect(event)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
      return line  # not ours to judge
    if self._first and isinstance(event, dict):
      self._first = False
      end = b"\r" if line.endswith(b"\r") else b""
      return b"data: " + json.dumps(event | {"memrl": self._field}).encode() + end
    return line

  def _collect(self, event: dict[str, Any]) -> None:
    for choice in event.get("choices") or ():
      delta = choice.get("delta") or {}
      if choice.get("index", 0) != 0:
        continue
      if isinstance(delta.get("content"), str):
        self._said.append(delta["content"])
      for call in delta.get("tool_calls") or ():
        kept = self._calls.setdefault(int(call.get("index", 0)), ["", ""])
        function = call.get("function") or {}
        kept[0] += function.get("name") or ""
        kept[1] += function.get("arguments") or ""


def field(id: str, memories: Sequence[int]) -> dict[str, Any]:
  """What an answer says of the memories in its prompt."""
  return {"suggestion": id, "memories": list(memories)}
