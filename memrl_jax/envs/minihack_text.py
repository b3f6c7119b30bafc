"""The text of a NetHack screen, and the actions in a model's answer: no package needed.

A screen is what the game tells: characters and descriptions of the map cells that were seen, a message,
what is carried. Arrays are indexed [row, column]; positions are (column, row), as the game counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import prompting

# What a `Screen` is made of, by the game's names.
KEYS = ("chars", "blstats", "message", "inv_strs", "inv_letters", "screen_descriptions")
_COLUMN, _ROW, _HEALTH, _MOST = 0, 1, 10, 11  # of blstats


class Screen(NamedTuple):
  """What is seen at one moment. `grid` has the agent in its centre and is blank outside the map."""

  grid: str
  legend: str
  inventory: str
  status: str


def read(seen: Mapping[str, np.ndarray], crop: int) -> Screen:
  """The game's arrays as text, `crop` cells to each side of the agent."""
  stats = seen["blstats"]
  column, row = int(stats[_COLUMN]), int(stats[_ROW])
  grid, legend = _surroundings(seen["chars"], seen["screen_descriptions"], column, row, crop)
  return Screen(
    grid=grid,
    legend=legend,
    inventory=_carried(seen["inv_letters"].tobytes(), seen["inv_strs"].tobytes()),
    status=f"Position: column {column}, row {row}. Health: {stats[_HEALTH]} of {stats[_MOST]}.",
  )


def message(seen: Mapping[str, np.ndarray]) -> str:
  """The game's own words, in single spaces."""
  return " ".join(_string(seen["message"].tobytes()).split())


def write(
  screen: Screen, message: str, actions: tuple[str, ...], *, inventory: bool, status: bool
) -> str:
  """The observation: message, status, map, legend, what is carried, what can be done."""
  lines = [f"Message: {message}"] if message else []
  lines += [screen.status] if status else []
  lines += [f"Map:\n{screen.grid}", f"In view: {screen.legend}"]
  lines += [f"You carry: {screen.inventory or 'nothing'}"] if inventory else []
  lines.append(_choices(actions))
  return "\n".join(lines)


@functools.lru_cache(maxsize=64)
def _choices(actions: tuple[str, ...]) -> str:
  return "Actions: " + ", ".join(f"{number} {name}" for number, name in enumerate(actions, start=1))


def _surroundings(chars, described, column: int, row: int, crop: int) -> tuple[str, str]:
  """(the map around a position, what its symbols mean)."""
  top, left = max(0, row - crop), max(0, column - crop)
  rows, columns = slice(top, row + crop + 1), slice(left, column + crop + 1)
  symbols = chars[rows, columns]
  size, before = symbols.shape[1], " " * (left - column + crop)
  shown = symbols.tobytes().decode("latin-1").replace("\0", " ")
  lines = [(before + shown[at : at + size]).rstrip() for at in range(0, len(shown), size)]
  above, below = top - row + crop, max(0, row + crop + 1 - len(chars))
  cells = np.ascontiguousarray(described[rows, columns])
  names = cells.view(f"S{cells.shape[-1]}").ravel().tolist()
  here = (row - top) * size + column - left
  names[here] = b""  # the agent, whose cell says who it is and not what it stands on
  legend = _legend(frozenset(zip(shown, names, strict=True)), shown[here])
  return "\n".join([""] * above + lines + [""] * below), legend


@functools.lru_cache(maxsize=4096)
def _legend(found: frozenset[tuple[str, bytes]], agent: str) -> str:
  meanings: dict[str, list[str]] = {agent: ["you"]}
  for symbol, name in sorted(found):
    if symbol != " " and name:
      meanings.setdefault(symbol, []).append(_string(name))
  return ", ".join(f"{symbol} {' or '.join(names)}" for symbol, names in meanings.items())


@functools.lru_cache(maxsize=256)
def _carried(letters: bytes, strings: bytes) -> str:
  size = len(strings) // len(letters)
  items = [strings[at : at + size] for at in range(0, len(strings), size)]
  letters = letters.decode("latin-1")
  return ", ".join(
    f"{letter}) {_string(item)}"
    for letter, item in zip(letters, items, strict=True)
    if letter > "\0"
  )


def _string(raw: bytes) -> str:
  return raw.split(b"\0", 1)[0].decode("latin-1")


# Actions by name.


_POINTS = {
  "N": "north", "E": "east", "S": "south", "W": "west",
  "NE": "northeast", "SE": "southeast", "SW": "southwest", "NW": "northwest",
}  # fmt: skip
_WAYS = {
  "north": ("n", "up"), "east": ("e", "right"), "south": ("s", "down"), "west": ("w", "left")
}  # fmt: skip
_MEANT = {
  "pick up": "pickup", "pick": "pickup", "take": "pickup", "get": "pickup", "grab": "pickup",
  "use": "apply", "unlock": "apply", "stay": "wait", "put on": "puton", "take off": "takeoff",
  "drink": "quaff", "downstairs": "descend", "hit": "fight",
}  # fmt: skip
_LONGEST = 3  # words of a phrase: "far north east"
_FILLER = (
  "i",
  "will",
  "go",
  "move",
  "walk",
  "step",
  "head",
  "run",
  "the",
  "to",
  "towards",
  "action",
)


def name(kind: str, member: str) -> str:
  """How an action of the game is called here, from its enumeration and its name in there."""
  if kind in ("CompassDirection", "CompassDirectionLonger"):
    return ("far " if kind.endswith("Longer") else "") + _POINTS[member]
  if kind == "MiscDirection" and member in ("UP", "DOWN"):
    return {"UP": "ascend", "DOWN": "descend"}[member]
  return member.lower().replace("_", " ")


def _aliases() -> dict[str, str]:
  found = dict(_MEANT)
  for point, others in _WAYS.items():
    found |= dict.fromkeys((point, *others), point)
  for first in ("north", "south"):
    for second in ("east", "west"):
      for one in (first, *_WAYS[first]):
        for two in (second, *_WAYS[second]):
          found |= {f"{one} {two}": first + second, one + two: first + second}
  return found | {f"far {word}": f"far {point}" for word, point in found.items() if point in _WAYS}


ALIASES = _aliases()


def parse(response: str, style: str, actions: tuple[str, ...]) -> list[str]:
  """The actions that a response names, in order, up to the first that is not understood.

  They stand in action tags, parted by commas, lines or "then": a name, an alias or a number of the
  list, in any case and among other words. In chat style a first line without tags will do when it is
  an action and nothing else.
  """
  body = prompting.action_body(response)
  strict = body is None and style == "chat"
  if strict:
    body = next(iter(response.strip().splitlines()), "").lower()
  found = []
  for piece in re.split(r"[,;\n]+|\bthen\b", (body or "").strip()):
    action = named(piece, actions, strict)
    if not action:
      break
    found.append(action)
  return found


@functools.lru_cache(maxsize=4096)
def named(text: str, actions: tuple[str, ...], strict: bool = False) -> str:
  """The action that a text names first; "" when none, or when it says more than that and may not."""
  said = re.findall(r"[a-z]+\d*|\d+", text)
  phrase = " ".join(said)
  if phrase.isdigit() and 1 <= int(phrase) <= len(actions):
    return actions[int(phrase) - 1]
  said = said if phrase in actions else [word for word in said if word not in _FILLER]
  for start in range(len(said)):
    for end in range(min(start + _LONGEST, len(said)), start, -1):
      phrase = " ".join(said[start:end])
      meant = phrase if phrase in actions else ALIASES.get(phrase, "")
      if meant in actions:
        return meant if not strict or end - start == len(said) else ""
  return ""
