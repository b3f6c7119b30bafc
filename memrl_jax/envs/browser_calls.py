"""The calls with which an agent acts on a web page: no package needed.

A call is one of BrowserGym's, such as click('12'). It is read as a literal, checked against the table below and
written anew, so that nothing else of an answer ever reaches the browser.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

ANSWER_CHARS = 4000  # of an action; a form is filled in field by field
WAIT_MS = 5000  # the longest noop


class Parameter(NamedTuple):
  """One argument of a call; `read` gives its canonical value or raises ValueError with what it must be."""

  name: str
  read: Callable[[Any], Any]
  default: Any = None
  optional: bool = False


class Action(NamedTuple):
  """One of BrowserGym's calls. `group` is the subset of its action sets that has it."""

  group: str
  parameters: tuple[Parameter, ...]
  meaning: str


def _element(value: Any) -> str:
  named = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
  if not isinstance(named, str) or not re.fullmatch(r"[a-zA-Z]{0,12}[0-9]{1,9}", named):
    raise ValueError("an id from the page, such as '12'")
  return named


def _text(value: Any) -> str:
  if isinstance(value, int | float) and not isinstance(value, bool):
    value = str(value)
  if not isinstance(value, str):
    raise ValueError("a string")
  return value


def _options(value: Any) -> str | list[str]:
  if isinstance(value, list | tuple) and value:
    return [_text(each) for each in value]
  return _text(value)


def _number(value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e6:
    raise ValueError("a number of pixels")
  return value


def _wait(value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_MS:
    raise ValueError(f"0 to {WAIT_MS} milliseconds")
  return value


def _tab(value: Any) -> int:
  if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 100:
    raise ValueError("the number of an open tab")
  return value


def _flag(value: Any) -> bool:
  if not isinstance(value, bool):
    raise ValueError("True or False")
  return value


def _key(value: Any) -> str:
  if not isinstance(value, str) or not 0 < len(value) <= 40:
    raise ValueError("a key such as 'Enter' or 'Control+a'")
  return value


def _url(value: Any) -> str:
  if not isinstance(value, str) or not re.match(r"https?://[^\s/]", value):
    raise ValueError("an address that begins with http:// or https://")  # no files, no scripts
  return value


def _one_of(*known: str) -> Callable[[Any], str]:
  def read(value: Any) -> str:
    if value not in known:
      raise ValueError(f"one of {', '.join(known)}")
    return value

  return read


def _modifiers(value: Any) -> list[str]:
  known = _one_of("Alt", "Control", "ControlOrMeta", "Meta", "Shift")
  if not isinstance(value, list | tuple):
    raise ValueError("a list of Alt, Control, ControlOrMeta, Meta, Shift")
  return [known(each) for each in value]


_BID = Parameter("bid", _element)
_BUTTON = Parameter("button", _one_of("left", "middle", "right"), "left", True)
_MODIFIERS = Parameter("modifiers", _modifiers, [], True)
_XY = (Parameter("x", _number), Parameter("y", _number))

# Uploads are left out: they would read any file of the machine that the browser runs on.
ACTIONS = {
  "click": Action("bid", (_BID, _BUTTON, _MODIFIERS), "click on an element"),
  "dblclick": Action("bid", (_BID, _BUTTON, _MODIFIERS), "click on it twice"),
  "hover": Action("bid", (_BID,), "move the mouse over it"),
  "focus": Action("bid", (_BID,), "put the cursor into it"),
  "fill": Action(
    "bid",
    (
      _BID,
      Parameter("value", _text),
      Parameter("enable_autocomplete_menu", _flag, False, True),
    ),
    "replace the text of a field; with True at the end, as if typed, so that suggestions open",
  ),
  "clear": Action("bid", (_BID,), "empty a field"),
  "select_option": Action(
    "bid", (_BID, Parameter("options", _options)), "choose in a list, one option or a list of them"
  ),
  "press": Action(
    "bid", (_BID, Parameter("key_comb", _key)), "press keys in an element, such as 'Enter'"
  ),
  "drag_and_drop": Action(
    "bid",
    (Parameter("from_bid", _element), Parameter("to_bid", _element)),
    "drag one element onto another",
  ),
  "scroll": Action(
    "bid",
    (Parameter("delta_x", _number), Parameter("delta_y", _number)),
    "scroll by pixels, right and down",
  ),
  "mouse_click": Action("coord", (*_XY, _BUTTON), "click at a place, in pixels"),
  "mouse_dblclick": Action("coord", (*_XY, _BUTTON), "click there twice"),
  "mouse_move": Action("coord", _XY, "move the mouse"),
  "mouse_down": Action("coord", (*_XY, _BUTTON), "press the mouse and hold it"),
  "mouse_up": Action("coord", (*_XY, _BUTTON), "let go of it"),
  "mouse_drag_and_drop": Action(
    "coord",
    tuple(Parameter(name, _number) for name in ("from_x", "from_y", "to_x", "to_y")),
    "drag from one place to another",
  ),
  "keyboard_press": Action("coord", (Parameter("key", _key),), "press keys where the cursor is"),
  "keyboard_type": Action("coord", (Parameter("text", _text),), "type text where the cursor is"),
  "go_back": Action("nav", (), "to the page before"),
  "go_forward": Action("nav", (), "to the page after"),
  "goto": Action("nav", (Parameter("url", _url),), "open an address"),
  "new_tab": Action("tab", (), "open an empty tab"),
  "tab_close": Action("tab", (), "close this tab"),
  "tab_focus": Action("tab", (Parameter("index", _tab),), "go to another tab; the first is 0"),
  "send_msg_to_user": Action(
    "chat", (Parameter("text", _text),), "tell the user the answer, which ends the task"
  ),
  "report_infeasible": Action(
    "infeas", (Parameter("reason", _text),), "say that it cannot be done, which ends the task"
  ),
  "noop": Action("", (Parameter("wait_ms", _wait, 1000, True),), "wait, in milliseconds"),
}
GROUPS = ("bid", "coord", "nav", "tab", "chat", "infeas")


def allowed(groups: Sequence[str]) -> tuple[str, ...]:
  """The names of the actions in these groups; waiting is always allowed."""
  return tuple(name for name, action in ACTIONS.items() if action.group in ("", *groups))


def manual(names: Sequence[str]) -> str:
  """What the actions are and do, one a line."""
  return "\n".join(f"- {_signature(name)}: {ACTIONS[name].meaning}" for name in names)


def _signature(name: str) -> str:
  shown = (p.name + (f"={p.default!r}" if p.optional else "") for p in ACTIONS[name].parameters)
  return f"{name}({', '.join(shown)})"


_TAG = re.compile(r"<action>(.*?)(?:</action>|<action>|$)", re.DOTALL | re.IGNORECASE)
_FENCE = re.compile(r"^```\w*\s*|\s*```$")

NO_ACTION = "no action was given; write one call inside <action> tags"
NO_CALL = "that is not one call with plain values, such as click('12')"


def parse(response: str, style: str, names: Sequence[str]) -> tuple[str, str]:
  """(the call of a response as BrowserGym reads it, ""); ("", what is wrong with it) where it has none.

  The call is what stands in the last action tag; in chat style, without tags, the whole response.
  """
  bodies = [body.strip() for body in _TAG.findall(response) if body.strip()]
  if bodies:
    said = bodies[-1]
  else:
    said = response.strip() if style == "chat" and "action>" not in response.lower() else ""
  said = _FENCE.sub("", said).strip("` \n\t")
  if not said:
    return "", NO_ACTION
  if len(said) > ANSWER_CHARS:
    return "", f"an action has at most {ANSWER_CHARS} characters, this one {len(said)}"
  try:
    name, given, named = _literal(said)
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return "", NO_CALL
  if name not in names:
    return "", f"there is no action {name[:40]}; choose one of {', '.join(names)}"
  try:
    return write(name, given, named), ""
  except ValueError as error:
    return "", f"{_signature(name)}: {error}"


def _literal(said: str) -> tuple[str, list[Any], dict[str, Any]]:
  """(name, arguments, named arguments) of a call whose values are literals; nothing is evaluated."""
  call = ast.parse(said, mode="eval").body
  if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
    raise ValueError(NO_CALL)
  named = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
  if len(named) < len(call.keywords):  # **something
    raise ValueError(NO_CALL)
  return call.func.id, [ast.literal_eval(each) for each in call.args], named


def write(name: str, given: Sequence[Any], named: dict[str, Any]) -> str:
  """The canonical text of a call.

  Raises:
    ValueError: an argument is missing, too many, or not what it must be.
  """
  parameters = ACTIONS[name].parameters
  unknown = [word for word in named if word not in [p.name for p in parameters[len(given) :]]]
  if len(given) > len(parameters) or unknown:
    raise ValueError("too many values" if not unknown else f"{unknown[0]} does not belong there")
  values = []
  for place, parameter in enumerate(parameters):
    if place < len(given) or parameter.name in named:
      value = given[place] if place < len(given) else named[parameter.name]
    elif parameter.optional:
      value = parameter.default
    else:
      raise ValueError(f"{parameter.name} is missing")
    try:
      values.append(parameter.read(value))
    except ValueError as error:
      raise ValueError(f"{parameter.name} must be {error}") from None
  while values and parameters[len(values) - 1].optional:
    if values[-1] != parameters[len(values) - 1].default:
      break
    values.pop()
  return f"{name}({', '.join(map(repr, values))})"
