"""Scripted players of web pages, which read the same text as a model does.

The reader looks for what its goal names: values to enter, things to choose, something to click. At every turn
it does the first of what the goal asks that the page does not show as done, and ends with the button that
sends. It knows nothing of single tasks or of ids.
"""

from __future__ import annotations

import re

from memrl_jax.envs import base, browser_text, prompting
from memrl_jax.envs.browser_text import Element

_FIELDS = ("textbox", "searchbox", "spinbutton")
_CHOICES = ("checkbox", "radio", "switch")
_PRESSED = ("button", "link", "tab", "menuitem", "clickable", "StaticText")
_ENDS = r"(?:submit|ok|log ?in|search|send|agree|done|go|sign in|continue|save)"
_NUMBERS = {"1st": 0, "2nd": 1, "3rd": 2, "4th": 3, "5th": 4, "6th": 5}


def shown(text: str) -> list[Element]:
  """The elements of an observation."""
  return [each for each in browser_text.elements(text) if each.bid or each.name]


class Random(prompting.Chooser):
  """Clicks on anything, and fills fields with words of the goal."""

  def choose(self, view: base.View) -> str:
    there = [each for each in shown(view.current.now.text) if each.actable]
    if not there:
      return "noop(100)"
    chosen = there[int(self._rng.integers(len(there)))]
    if chosen.role in _FIELDS:
      words = view.current.initial.goal.split() or ["a"]
      return f"fill({chosen.bid!r}, {str(self._rng.choice(words))!r})"
    return f"click({chosen.bid!r})"


class Reader(prompting.Chooser):
  """Follows the goal word by word."""

  def choose(self, view: base.View) -> str:
    goal = " ".join(view.current.initial.goal.split())
    page = shown(view.current.now.text)
    done = [step.action for step in view.current.steps if not step.result.note]
    for way in (_focus, _choose, _fill, _press):
      if call := way(goal, page, done):
        return call
    return "noop(100)"


def _focus(goal: str, page: list[Element], done: list[str]) -> str:
  """Put the cursor into a field."""
  if not re.match(r"focus", goal, re.IGNORECASE):
    return ""
  fields = [each for each in page if each.role in _FIELDS and each.bid]
  place = next((at for word, at in _NUMBERS.items() if word in goal), 0)
  return f"focus({fields[place].bid!r})" if place < len(fields) else ""


def _choose(goal: str, page: list[Element], done: list[str]) -> str:
  """Choose in a list, or tick boxes, of the names between "select" and "and click", or "from"."""
  asked = re.match(
    r"(?:select|choose|check) (.+?)(?: from [\w ]+)?,? (?:and|then) (?:click|hit|press)",
    goal,
    re.IGNORECASE,
  )
  if not asked:
    return ""
  whole, names = asked[1], [name.strip() for name in asked[1].split(",")]
  for each in page:
    if each.role in ("combobox", "listbox") and each.value != whole:
      options = [other.name for other in page if other.role == "option"]
      if whole in options and f"select_option({each.bid!r}, {whole!r})" not in done:
        return f"select_option({each.bid!r}, {whole!r})"
  for each in page:
    named = each.role in _CHOICES and each.bid and each.name in (whole, *names)
    if named and not re.search(r"checked='?[Tt]rue", each.rest):
      return f"click({each.bid!r})"
  return ""


def _fill(goal: str, page: list[Element], done: list[str]) -> str:
  """Enter quoted values into fields, the first into the first; one value goes into all "both" fields."""
  if not re.match(r"(?:enter|type)\b|use the textbox to enter", goal, re.IGNORECASE):
    return ""
  values = re.findall(r'"([^"]*)"', re.split(r"\bpress\b|\bclick\b", goal)[0])
  fields = [each for each in page if each.role in _FIELDS and each.bid]
  if len(values) == 1 and "both" in goal:
    values *= len(fields)
  for value, field in zip(values, fields, strict=False):
    for word, change in (("lower case", str.lower), ("upper case", str.upper)):
      value = change(value) if word in goal else value
    call = f"fill({field.bid!r}, {value!r})"
    if field.value != value and call not in done:
      return call
  return ""


def _press(goal: str, page: list[Element], done: list[str]) -> str:
  """Press what the goal names, in its order and once each; then, or else, what ends such forms."""
  named = re.findall(r'"([^"]+)"', goal) + re.findall(r"button ([A-Z]+)\b", goal)
  named += re.findall(r"click on ([A-Z][\w# ]*?)\.?$", goal, re.IGNORECASE)
  named += re.findall(r"^select ([^,]+?)\.?$", goal, re.IGNORECASE)
  for name in dict.fromkeys(named):
    for at, each in enumerate(page):
      if each.name.lower() == name.lower() and each.role in _PRESSED:
        target = each if each.bid else _around(page, at)
        if target and target.role not in _FIELDS and f"click({target.bid!r})" not in done:
          return f"click({target.bid!r})"
  buttons = [each for each in page if each.bid and each.role in ("button", "clickable")]
  ends = [each for each in buttons if re.fullmatch(_ENDS, each.name, re.IGNORECASE)]
  for each in [*ends, *(buttons if len(buttons) == 1 else [])]:
    if f"click({each.bid!r})" not in done:
      return f"click({each.bid!r})"
  for each in page:  # what is folded away may hold it
    if "expanded=False" in each.rest and each.bid and f"click({each.bid!r})" not in done:
      return f"click({each.bid!r})"
  return ""


def _around(page: list[Element], at: int) -> Element | None:
  """The element that holds a text."""
  for each in reversed(page[:at]):
    if each.depth < page[at].depth:
      return each if each.actable else None
  return None
