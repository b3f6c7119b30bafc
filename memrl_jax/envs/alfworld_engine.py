"""ALFWorld's own text engine: loaded without side effects, safe in threads, ten times as fast.

The engine is TextWorld's for planning problems, with the state kept by Fast Downward's library. Loading a
game rewrites `sys.argv` and swaps `sys.stdout`, and its parsers cannot be shared by threads; `_patch` puts
a lock and a memory around both. Texts and lists of commands stay those of the package as it comes
(tests/real/test_alfworld.py).
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from memrl_jax.envs import alfworld_games
from memrl_jax.envs.alfworld_tasks import TYPES, VARIABLE, Task

MISSING = (
  "ALFWorld is not installed: run pip install 'memrl_jax[alfworld]' with g++, cmake and make installed and "
  "this Python first on the PATH (it compiles the planner Fast Downward, a minute or two)"
)
TRANSLATED = 64  # problems kept in memory, 1 to 2 MB each
FACTS = (
  100_000  # facts of games that were played, which the engine itself would keep forever: 30 MB
)
# What a command can change; the rest is fixed, or a trace of what was looked at.
DYNAMIC = frozenset({
  "atlocation", "opened", "inreceptacle", "holds", "isclean", "ishot", "iscool", "ison", "istoggled",
  "issliced",
})  # fmt: skip
_lock = threading.RLock()
_idle: list[Game] = []


class Package(NamedTuple):
  """What is used of it."""

  environment: Callable[[], Any]
  rules: alfworld_games.Rules
  layouts: pathlib.Path
  domain: str
  grammar: str
  goals: dict[str, dict[str, Any]]


def package() -> Package:
  """The package, imported and patched once.

  Raises:
    ImportError: it is missing.
  """
  with _lock:
    return _package()


@functools.cache
def _package() -> Package:
  known = os.environ.get(VARIABLE)
  # Else the import makes a folder in the user's home, and names it in the variable for all to see.
  os.environ.setdefault(VARIABLE, tempfile.gettempdir())
  try:
    import alfworld.gen.constants as constants
    import alfworld.gen.goal_library as goal_library
    import alfworld.info as info
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    _patch()
  except ImportError as error:
    raise ImportError(MISSING) from error
  finally:
    os.environ.pop(VARIABLE)
    os.environ.update({VARIABLE: known} if known is not None else {})

  def environment() -> Any:
    return AlfredDemangler(PddlEnv(textworld.EnvInfos(admissible_commands=True, won=True)))

  able = constants.VAL_ACTION_OBJECTS
  movable = frozenset(constants.MOVABLE_RECEPTACLES)
  return Package(
    environment=environment,
    rules=alfworld_games.Rules(
      holds={
        kind: frozenset(what)
        for kind, what in constants.VAL_RECEPTACLE_OBJECTS.items()
        if kind not in movable
      },
      openable=frozenset(constants.OPENABLE_CLASS_LIST),
      able={kind.lower(): frozenset(which) for kind, which in able.items()}
      | {"isReceptacleObject": movable},
    ),
    layouts=pathlib.Path(constants.__file__).parent / "layouts",
    domain=pathlib.Path(info.ALFRED_PDDL_PATH).read_text("utf-8"),
    grammar=pathlib.Path(info.ALFRED_TWL2_PATH).read_text("utf-8"),
    goals=goal_library.gdict,
  )


# Patches from outside.


def _patch() -> None:
  """Remembers what the engine computes again and again, and lets one thread at a time compute it."""
  import fast_downward
  import textworld.envs.pddl.logic
  import textworld.envs.pddl.textgen
  import textworld.logic

  textgen = textworld.envs.pddl.textgen
  textgen._PARSER = _Parser(textgen._PARSER)
  textgen.copy_context = _copied
  textworld.logic._PARSER = _Parser(textworld.logic._PARSER)
  fast_downward.pddl2sas = _quiet(fast_downward.pddl2sas)


class _Parser:
  """A parser that remembers; its trees are read and never changed."""

  def __init__(self, parser: Any):
    self._parse = functools.lru_cache(maxsize=20_000)(parser.parse)

  def parse(self, text: str, **how: Any) -> Any:
    with _lock:
      return self._parse(text, **how)


def _copied(context: dict[str, Any]) -> dict[str, Any]:
  """A grammar's context whose two changing parts are copied, as far down as they are changed."""
  return context | {part: dict(context[part]) for part in ("variables", "mapping")}


def _quiet(translate: Callable[..., Any]) -> Callable[..., Any]:
  """The translation of problems, remembered, with the program's own arguments and output untouched.

  Each is translated once: not a second time simplified for the planner, which takes longer and which
  nobody asks here (it would plan on the first all the same, more slowly).
  """
  remembered = functools.lru_cache(maxsize=TRANSLATED)(translate)

  def translated(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
    del optimize
    with _lock:
      arguments, output = sys.argv, sys.stdout
      try:
        return remembered(domain, problem, verbose=verbose)
      finally:
        sys.argv, sys.stdout = arguments, output

  return translated


def _forget() -> None:
  """Empties the engine's table of all facts that ever were; equal facts made later are equal all the same."""
  import mementos.core

  if len(mementos.core._memento_cache) > FACTS:
    mementos.core._memento_cache.clear()


# Games.


@functools.lru_cache(maxsize=64)
def content(task: Task) -> dict[str, Any]:
  """A game as its file has it: domain, grammar, problem, and commands that solve it."""
  if task.path:
    return json.loads(pathlib.Path(task.path).read_text("utf-8"))
  known = package()
  plan = known.layouts / f"FloorPlan{task.plan}"
  layout = [
    name.split("|")[0]
    for name in json.loads(plan.with_name(f"{plan.name}-openable.json").read_text())
  ]
  seen = json.loads(plan.with_name(f"{plan.name}-objects.json").read_text())
  room = alfworld_games.furnish(task, layout, seen, known.rules)
  asked = known.goals[TYPES[task.kind][0]]
  formula = asked["pddl"].format(obj=room.target, recep=room.goal, toggle=alfworld_games.LAMP)
  sentence = alfworld_games.sentence(room, asked["templates"])
  return {
    "pddl_domain": known.domain,
    "grammar": known.grammar.replace("UNKNOWN GOAL", sentence),
    "pddl_problem": alfworld_games.problem(room, known.rules, formula.replace("#", "-")),
    "walkthrough": alfworld_games.walkthrough(room, known.rules),
    "solvable": True,
  }


def borrow() -> Game:
  """An engine for one player at a time; `give_back` it.

  Engines are kept for as long as the process lives, 3 MB each: copies of the planner's library share a
  table, and a process that has unloaded one of them crashes when it ends.
  """
  with _lock:
    return _idle.pop() if _idle else Game(package().environment())


def give_back(game: Game) -> None:
  """For the next player."""
  with _lock:
    _idle.append(game)


class Game:
  """One engine, which plays one game at a time."""

  def __init__(self, engine: Any) -> None:
    self._engine = engine
    self._loaded: Task | None = None

  def open(self, task: Task) -> Any:
    """The engine's first state of a game: .feedback, ["admissible_commands"], ["won"]."""
    with _lock:
      if self._loaded != task:
        self._loaded = None
        _forget()
        self._engine.load(content(task))
        self._loaded = task
      state = self._engine.reset()
    self._follow(self._engine.unwrapped._pddl_state)
    return state

  def step(self, command: str) -> Any:
    """The engine's state after a command."""
    return self._engine.step(command)[0]

  def state(self) -> str:
    """What differs from the beginning of the game, the same for the same state; "" at the beginning."""
    gone = (f"not {fact}" for fact in self._gone)
    return "; ".join(sorted([*map(str, self._come), *gone]))

  def _follow(self, state: Any) -> None:
    """Notes what the commands change; the engine itself only keeps a sum of it."""
    self._come, self._gone = set(), set()
    apply = state.apply
    first = frozenset(fact for fact in state.facts if fact.name in DYNAMIC)

    def noted(action: Any) -> Any:
      changes = apply(action)
      self._note(changes, first)
      return changes

    state.apply = noted

  def _note(self, changes: Iterable[Any], first: frozenset[Any]) -> None:
    for fact in changes:
      if fact.name in DYNAMIC:
        self._gone.discard(fact)
        self._come |= {fact} - first
      elif fact.name.removeprefix("not_") in DYNAMIC:
        self._come.discard(fact.negate())
        self._gone |= {fact.negate()} & first
