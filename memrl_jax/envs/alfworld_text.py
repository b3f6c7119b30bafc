"""The commands in a model's answer, and what ALFWorld's engine calls them: no package needed."""

from __future__ import annotations

import re

ACTION_CHARS = 200  # of a response's action; no real one is longer
_TAG = re.compile(r"<action>(.*?)(?:</action>|<action>|$)", re.DOTALL | re.IGNORECASE)
_LEAD = re.compile(r"^(?:>|\d+[.)]|action\s*:)\s*")
_ARTICLE = re.compile(r"\b(?:the|an?) (?=[a-z]+ ?\d)")
# What may be said, and what the engine may call it. Present games say "move O to R", older files and
# most published prompts "put O in/on R".
_MEANT = tuple(
  (re.compile(said), called)
  for said, called in (
    (
      r"(?:move|put|place) (.+?) (?:in/on|inside|into|onto|in|on|to) (.+)",
      ("move {0} to {1}", "put {0} in/on {1}", "put {0} in {1}", "put {0} on {1}"),
    ),
    (r"(?:take|pick up|get|grab) (.+?) (?:from|out of) (.+)", ("take {0} from {1}",)),
    (r"(heat|cool|clean) (.+?) (?:with|in|using) (.+)", ("{0} {1} with {2}",)),
    (r"(?:go|walk|goto|move)(?: to)? (.+)", ("go to {0}",)),
    (r"(?:use|turn on|switch on|toggle) (.+)", ("use {0}",)),
    (r"(?:examine|inspect|look at|look in) (.+)", ("examine {0}",)),
    (r"look around", ("look",)),
  )
)


def parse(response: str, style: str) -> str:
  """The action of a response: what stands in its last action tag; in chat style, without tags, its first line.

  Lower-cased, in single spaces, without the marks and quotes that models put around it; "" when there
  is none. A tag that is never closed will do.
  """
  bodies = [body for body in _TAG.findall(response) if body.strip()]
  if bodies:
    said = bodies[-1]
  else:
    said = response if style == "chat" and "action>" not in response.lower() else ""
  line = next((line for line in said.lower().splitlines() if line.strip()), "")
  line = _LEAD.sub("", line.strip().strip("\"'`*[]")).strip(" \"'`*[].!")
  return " ".join(line.split())[:ACTION_CHARS]


def command(action: str, admissible: tuple[str, ...]) -> str:
  """The admissible command that an action means; the action itself where it means none."""
  plain = _ARTICLE.sub("", action)
  for said in (action, plain):
    if said in admissible:
      return said
  for pattern, called in _MEANT:
    if match := pattern.fullmatch(plain):
      for form in called:
        if (meant := form.format(*match.groups())) in admissible:
          return meant
  return action


def opening(feedback: str) -> tuple[str, str]:
  """(a game's first text without its banner, the task that it states)."""
  text = feedback.strip()
  if text.startswith("-="):
    text = text.partition("\n")[2].strip()
  return text, text.partition("Your task is to:")[2].strip()
