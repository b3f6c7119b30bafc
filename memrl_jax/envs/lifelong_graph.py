"""A graph of facts, and the seven calls through which a KG task asks it.

Entities have ids and facts are triples (entity, relation, entity or value). A relation leads to one type; it is an
attribute when that type is a number or a date. A call gives a list of names, or a new variable: a set of entities.
"""

from __future__ import annotations

import collections
import functools
import pathlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

VALUES = ("type.int", "type.float", "type.datetime")  # types of attributes
FINAL = ("count", "argmax", "argmin")  # calls whose variables can only be answered
ARGUMENTS = {
  "get_relations": 1,
  "get_neighbors": 2,
  "intersection": 2,
  "get_attributes": 1,
  "argmax": 2,
  "argmin": 2,
  "count": 1,
}


class Graph:
  """Triples by entity and relation; `types` says to which type each relation leads."""

  def __init__(self, triples: Iterable[tuple[str, str, str]], types: Mapping[str, str]):
    self.types = dict(types)
    self._facts: dict[str, dict[str, set[str]]] = collections.defaultdict(
      lambda: collections.defaultdict(set)
    )
    for entity, relation, value in triples:
      self._facts[entity][relation].add(value)

  def names(self, entities: Iterable[str], *, attributes: bool) -> list[str]:
    """Relations, or attributes, that any of the entities has, sorted."""
    found = {name for entity in entities for name in self._facts.get(entity, ())}
    return sorted(n for n in found if (self.types.get(n) in VALUES) == attributes)

  def values(self, entities: Iterable[str], relation: str) -> frozenset[str]:
    """Where the relation leads from any of the entities."""
    return frozenset().union(*(self._facts.get(e, {}).get(relation, ()) for e in entities))

  def extreme(self, entities: Iterable[str], attribute: str, *, highest: bool) -> frozenset[str]:
    """The entities with the highest or lowest value of an attribute; several where they share it."""
    size = str if self.types[attribute] == "type.datetime" else float  # dates are ISO 8601
    pairs = [(size(v), e) for e in entities for v in self.values([e], attribute)]
    best = (max if highest else min)((value for value, _ in pairs), default=None)
    return frozenset(entity for value, entity in pairs if value == best)


@functools.lru_cache(maxsize=2)
def load(folder: str) -> Graph:
  """The graph of a folder with `triples.tsv` (entity, relation, value) and `fb_roles` (domain relation range).

  `fb_roles` is the release's file; relations that it lacks are left out.

  Raises:
    ValueError: a file is missing or not of this form.
  """
  triples, roles = pathlib.Path(folder, "triples.tsv"), pathlib.Path(folder, "fb_roles")
  if not (triples.is_file() and roles.is_file()):
    raise ValueError(
      f"{folder} holds no triples.tsv and fb_roles; put the part of Freebase there that the tasks ask about, or leave "
      "data and graph empty for generated ones (config.env.graph)"
    )
  types = {}
  for line in roles.read_text(encoding="utf-8").splitlines():
    if line:
      _, relation, kind = _fields(line, None, roles)
      types[relation] = kind
  with triples.open(encoding="utf-8") as file:
    facts = (_fields(line.rstrip("\n"), "\t", triples) for line in file if line.strip())
    return Graph(((e, r, v) for e, r, v in facts if r in types), types)


def _fields(line: str, mark: str | None, file: pathlib.Path) -> tuple[str, str, str]:
  parts = line.split(mark)
  if len(parts) != 3:
    raise ValueError(
      f"{file} has a line of {len(parts)} fields, {line[:80]!r}; give three (config.env.graph)"
    )
  return parts[0], parts[1], parts[2]


# Calls.


class Variable(NamedTuple):
  """A set of entities of one type, and the expression that it came from."""

  kind: str
  members: frozenset[str]
  source: str


class Refused(Exception):
  """A call that cannot be made; the message is for the agent."""


class Session:
  """The variables of one attempt. `entities` maps the names that a task mentions to ids."""

  def __init__(self, graph: Graph, entities: Mapping[str, str]):
    self._graph, self._entities = graph, dict(entities)
    self.variables: list[Variable] = []
    self._listed: dict[tuple[str, str], list[str]] = {}  # (call, expression) -> names it gave

  def call(self, name: str, arguments: list[str]) -> str:
    """Makes a call and says what came of it.

    Raises:
      Refused: there is no such call, or not with these arguments.
    """
    if name not in ARGUMENTS:
      raise Refused(f"there is no call {name}; choose one of {', '.join(ARGUMENTS)}")
    if len(arguments) != ARGUMENTS[name]:
      raise Refused(f"{name} takes {ARGUMENTS[name]} arguments, not {len(arguments)}")
    first = self._resolve(arguments[0], or_entity=name in ("get_relations", "get_neighbors"))
    if name in ("get_relations", "get_attributes"):
      names = self._graph.names(first.members, attributes=name == "get_attributes")
      self._listed[name, first.source] = names
      return f"[{', '.join(names)}]"
    if name == "intersection":
      made = _intersection(first, self._resolve(arguments[1]))
    elif name == "count":
      made = Variable("type.int", frozenset([str(len(first.members))]), f"(COUNT {first.source})")
    else:
      made = self._follow(name, first, arguments)
    self.variables.append(made)
    return f"variable #{len(self.variables) - 1}, of type {made.kind}"

  def _follow(self, name: str, first: Variable, arguments: list[str]) -> Variable:
    """get_neighbors, argmax and argmin, whose second argument must have been listed before."""
    lister = "get_relations" if name == "get_neighbors" else "get_attributes"
    listed, chosen = self._listed.get((lister, first.source)), arguments[1]
    if listed is None:
      raise Refused(f"call {lister}({arguments[0]}) first")
    if chosen not in listed:
      raise Refused(f"{chosen} is none of those that {arguments[0]} has: [{', '.join(listed)}]")
    if name == "get_neighbors":
      members = self._graph.values(first.members, chosen)
      return Variable(self._graph.types[chosen], members, f"(JOIN {chosen} {first.source})")
    members = self._graph.extreme(first.members, chosen, highest=name == "argmax")
    return Variable(first.kind, members, f"({name.upper()} {first.source} {chosen})")

  def _resolve(self, argument: str, *, or_entity: bool = False) -> Variable:
    number = variable_number(argument)
    if number is not None:
      found = self.variable(number)
      if found.source.startswith(tuple(f"({name.upper()} " for name in FINAL)):
        raise Refused(f"{argument} came from {', '.join(FINAL)} and can only be the final answer")
      return found
    if not or_entity:
      raise Refused(f"{argument} is no variable; write one as #0")
    if argument not in self._entities:
      known = ", ".join(self._entities)
      raise Refused(f"{argument} is neither a variable nor one of the entities {known}")
    entity = self._entities[argument]
    return Variable("", frozenset([entity]), entity)

  def variable(self, number: int) -> Variable:
    """The variable of a number; Refused where there is none."""
    if not number < len(self.variables):
      there = ", ".join(f"#{n}" for n in range(len(self.variables))) or "none yet"
      raise Refused(f"there is no variable #{number}; there are: {there}")
    return self.variables[number]


def _intersection(first: Variable, second: Variable) -> Variable:
  if first.kind != second.kind:
    raise Refused(f"their types differ: {first.kind} and {second.kind}")
  source = f"(AND {first.source} {second.source})"
  return Variable(first.kind, first.members & second.members, source)


def variable_number(argument: str) -> int | None:
  """The number of "#2", "variable #2" or "var#2"; None where it is no variable."""
  mark, _, number = argument.partition("#")
  named = mark.strip().lower() in ("", "variable", "var")
  return int(number) if named and number.strip().isdecimal() else None
