"""What an agent reads of a web page: no package needed.

A page is its accessibility tree, one element a line, as BrowserGym writes it: `[12] button 'Send'`. An
element that can be acted on has an id in brackets.
"""

from __future__ import annotations

import ast
import hashlib
import re
from typing import NamedTuple

LINE_CHARS = 300  # of an element; longer names are cut
ACTABLE_SHARE = 2 / 3  # of a cut page; the rest is text to read

# What acts by its nature; other elements are told to be clickable.
_NATIVE = frozenset({
  "button", "link", "textbox", "searchbox", "checkbox", "radio", "combobox", "listbox", "option", "menuitem",
  "menuitemcheckbox", "menuitemradio", "tab", "slider", "spinbutton", "switch", "treeitem", "clickable",
})  # fmt: skip
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_LINE = re.compile(
  rf"(\t*)(?:\[(\w+)\] )?([\w-]+)(?: ({_QUOTED}))?(?: value=({_QUOTED}|[^,]+))?(.*)", re.DOTALL
)


class Element(NamedTuple):
  """A line of a page. `rest` are its attributes as BrowserGym writes them: "checked='false', focused"."""

  depth: int
  bid: str
  role: str
  name: str
  value: str
  rest: str
  visible: bool

  @property
  def actable(self) -> bool:
    return bool(self.bid) and (self.role in _NATIVE or "clickable" in self.rest.split(", ")[:2])

  def __str__(self) -> str:
    parts = [f"[{self.bid}]"] if self.bid else []
    parts += [self.role, *([repr(self.name)] if self.name else [])]
    parts += [f"value={self.value!r}"] if self.value else []
    attributes = self.rest.split(", ") if self.rest else []
    if self.role in _NATIVE and "clickable" in attributes[:2]:
      attributes.remove("clickable")
    line = ", ".join([" ".join(parts), *attributes])
    cut = line if len(line) <= LINE_CHARS else line[: LINE_CHARS - 1] + "…"
    return " " * self.depth + cut


def elements(tree: str) -> list[Element]:
  """The lines of a tree, as BrowserGym or `page` writes them, but for those that say nothing."""
  found = []
  for line in tree.split("\n"):
    match = _LINE.fullmatch(line.replace(" ", "\t", len(line) - len(line.lstrip(" "))))
    if match is None:
      continue
    indent, bid, role, name, value, rest = match.groups(default="")
    attributes = [each for each in rest.split(", ") if each]
    visible = "visible" in attributes[:3]  # after its center and "clickable", where it has those
    if visible:
      attributes.remove("visible")
    rest = ", ".join(attributes)
    element = Element(len(indent), bid, role, _unquoted(name), _unquoted(value), rest, visible)
    if element.bid or element.name or element.value or element.rest:
      found.append(element)
  return found


def _unquoted(quoted: str) -> str:
  try:
    return str(ast.literal_eval(quoted)).strip() if quoted else ""
  except (SyntaxError, ValueError):
    return quoted.strip()


def page(tree: str, chars: int) -> str:
  """A tree in at most `chars` characters, and a line that says how many others there are.

  The first line is kept. Up to two thirds of the room go to what can be acted on, in the order of the page,
  what is in view before what is not; then text fills up, and what still could be acted on.
  """
  found = elements(tree)
  lines = [str(element) for element in found]
  if sum(len(line) + 1 for line in lines) <= chars:
    return "\n".join(lines)
  actable = [at for at, element in enumerate(found) if element.actable and at]
  in_view = [at for at in actable if found[at].visible]
  hidden = [at for at in actable if not found[at].visible]
  others = [at for at, element in enumerate(found) if at and not element.actable]
  kept: set[int] = set()
  room = chars
  for some, share in (
    ([0], 1.0), (in_view, ACTABLE_SHARE), (hidden, ACTABLE_SHARE), (others, 1.0), (actable, 1.0),
  ):  # fmt: skip
    for at in some:
      cost = len(lines[at]) + 1
      if at not in kept and chars - room + cost <= share * chars:
        kept.add(at)
        room -= cost
  shown = [line for at, line in enumerate(lines) if at in kept]
  return "\n".join(
    [
      *shown,
      f"({len(lines) - len(shown)} of {len(lines)} lines are left out; scroll to see others)",
    ]
  )


def failure(error: str) -> str:
  """What the browser said of a call that failed, in one line: its first, and what was in the way."""
  lines = [line.strip(" -") for line in re.sub(r"\x1b\[[0-9;]*m", "", error).splitlines()]
  lines = [line for line in lines if line]
  block = next((line for line in lines[1:] if "intercepts pointer events" in line), "")
  return "; ".join(filter(None, [*lines[:1], block]))[:LINE_CHARS]


def address(url: str) -> str:
  """A page's address; of a local file its name only, which is the same on every machine."""
  if url.startswith("file:"):
    url = url.rpartition("/")[2]
  return url if len(url) <= LINE_CHARS else url[: LINE_CHARS - 1] + "…"


def anchor(url: str, tabs: tuple[str, ...], tree: str) -> str:
  """What a state of the browser is known by: a digest of all that can be seen of it."""
  return hashlib.sha256("\n".join([url, *tabs, tree]).encode()).hexdigest()[:32]
