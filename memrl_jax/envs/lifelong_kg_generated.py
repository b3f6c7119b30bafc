"""A generated graph of people, films, books and places, and questions about it in LifelongAgentBench's KG schema.

The questions are of 18 kinds; many are close to one another and need other relations, other ends or another order
of calls. The graph has every fact in both directions.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from memrl_jax.envs import lifelong_graph

EACH = 40  # draws of every kind; the same question is kept once, one without an answer never

_FIRST = (
  "Agnes Bruno Celia David Elena Felix Greta Hamid Irene Jonas Karin Lukas Mira Noor Otto Paula"
)
_LAST = "Arden Bloch Castle Dunne Ekman Farrow Gruber Holt Ivers Joshi Keller Lindt Marsh Nagy"
_OF, _THING = "Red Silent Last Golden Broken Hidden Northern Paper", "River Garden Winter Bridge Mirror Station Harvest Island Letter"  # fmt: skip
_CITY = "Arlen Bodmar Calder Dornby Eastwick Falkirk Glenmoor Hollin Ivrea Jarrow Kelso Lomond Marden Norwick Oakham Penrith"
_COUNTRY = "Avaria Brennland Corvia Dalmora Estria"
_GENRE = "comedy thriller western drama documentary"
_JOB = "actor director novelist painter pilot"

# (relation, its inverse, from, to, how many); a type's name is the part before the last dot.
RELATIONS = (
  ("people.person.place_of_birth", "place.city.people_born_here", "person", "city", 1),
  ("people.person.profession", "people.profession.people", "person", "job", 2),
  ("place.city.country", "place.country.cities", "city", "country", 1),
  ("film.film.directed_by", "people.person.films_directed", "film", "person", 1),
  ("film.film.starring", "people.person.films_acted_in", "film", "person", 4),
  ("film.film.genre", "film.genre.films", "film", "genre", 2),
  ("film.film.country", "place.country.films", "film", "country", 1),
  ("book.book.author", "people.person.books_written", "book", "person", 1),
  ("book.book.setting", "place.city.books_set_here", "book", "city", 1),
)
ATTRIBUTES = (
  ("people.person.birth_year", "person", range(1920, 2000)),
  ("people.person.height_cm", "person", range(150, 201)),
  ("film.film.release_year", "film", range(1950, 2024)),
  ("film.film.length_minutes", "film", range(70, 220)),
  ("book.book.pages", "book", range(90, 900)),
  ("place.city.population", "city", range(4_000, 900_000)),
)
TYPES = {
  "person": "people.person", "job": "people.profession", "city": "place.city", "country": "place.country",
  "film": "film.film", "genre": "film.genre", "book": "book.book",
}  # fmt: skip


class Kind(NamedTuple):
  """A question about {entities}; `paths` start at one and follow relations, their ends are intersected, `end` closes."""

  question: str
  paths: tuple[str, ...]
  end: str = ""


_DIRECTED, _ACTED, _WROTE = (
  f"person people.person.{name}" for name in ("films_directed", "films_acted_in", "books_written")
)
_BORN, _CITIES = "place.city.people_born_here", "country place.country.cities"
KINDS = (
  Kind("Which films did {person} direct?", (_DIRECTED,)),
  Kind("In which country was {person} born?", ("person people.person.place_of_birth place.city.country",)),
  Kind("Who acted in the films that {person} directed?", (f"{_DIRECTED} film.film.starring",)),
  Kind("Which directors has {person} acted for?", (f"{_ACTED} film.film.directed_by",)),
  Kind("Where are the books of {person} set?", (f"{_WROTE} book.book.setting",)),
  Kind("Which films of the genre {genre} did {person} act in?", (_ACTED, "genre film.genre.films")),
  Kind("Which films made in {country} are of the genre {genre}?", ("country place.country.films", "genre film.genre.films")),
  Kind("Who was born in {country} and is a {job}?", (f"{_CITIES} {_BORN}", "job people.profession.people")),
  Kind("Who was born in {city} and is a {job}?", (f"city {_BORN}", "job people.profession.people")),
  Kind("How many films did {person} act in?", (_ACTED,), "count"),
  Kind("How many books did {person} write?", (_WROTE,), "count"),
  Kind("How many people were born in {country}?", (f"{_CITIES} {_BORN}",), "count"),
  Kind("How many films of the genre {genre} were made in {country}?",
       ("genre film.genre.films", "country place.country.films"), "count"),
  Kind("Which is the longest film that {person} acted in?", (_ACTED,), "argmax film.film.length_minutes"),
  Kind("Which is the latest film that {person} acted in?", (_ACTED,), "argmax film.film.release_year"),
  Kind("Who is the oldest of the people born in {city}?", (f"city {_BORN}",), "argmin people.person.birth_year"),
  Kind("Who is the tallest {job} born in {country}?",
       (f"{_CITIES} {_BORN}", "job people.profession.people"), "argmax people.person.height_cm"),
  Kind("Which city of {country} has the fewest inhabitants?", (_CITIES,), "argmin place.city.population"),
)  # fmt: skip


@functools.cache
def world() -> tuple[lifelong_graph.Graph, dict[str, dict[str, str]]]:
  """The graph, and the ids of its entities by kind and name."""
  rng = random.Random("lifelong-kg graph")
  people = [f"{first} {last}" for first in _FIRST.split() for last in _LAST.split()]
  titles = [f"The {of} {thing}" for of in _OF.split() for thing in _THING.split()]
  rng.shuffle(titles)
  names = {
    "person": rng.sample(people, 70), "city": _CITY.split(), "country": _COUNTRY.split(), "genre": _GENRE.split(),
    "job": _JOB.split(), "film": titles[:48], "book": titles[48:],
  }  # fmt: skip
  count = iter(range(10_000))
  ids = {k: {name: f"m.0{next(count):04}" for name in listed} for k, listed in names.items()}
  triples, types = [], {}
  for relation, inverse, start, goal, most in RELATIONS:
    types |= {relation: TYPES[goal], inverse: TYPES[start]}
    goals = list(ids[goal].values())
    for entity in ids[start].values():
      for other in rng.sample(goals, rng.randint(1, most)):
        triples += [(entity, relation, other), (other, inverse, entity)]
  for attribute, owner, values in ATTRIBUTES:
    types[attribute] = "type.int"
    owners = list(ids[owner].values())
    drawn = rng.sample(values, len(owners)) if len(values) >= len(owners) else rng.choices(values, k=len(owners))  # fmt: skip
    triples += [
      (entity, attribute, str(value)) for entity, value in zip(owners, drawn, strict=True)
    ]
  return lifelong_graph.Graph(triples, types), ids


def rows() -> Iterator[dict[str, Any]]:
  """The questions with an answer, each once, in an order that is mixed but always the same."""
  rng, made = random.Random("lifelong-kg questions"), {}
  for kind in KINDS:
    for _ in range(EACH):
      row = _row(kind, rng)
      if row["answer_list"] not in ([], ["0"]):
        made.setdefault(row["question"], row)
  questions = sorted(made)
  rng.shuffle(questions)
  return iter([made[question] for question in questions])


def _row(kind: Kind, rng: random.Random) -> dict[str, Any]:
  graph, ids = world()
  starts = [path.split()[0] for path in kind.paths]
  chosen = {start: rng.choice(list(ids[start])) for start in starts}
  session = lifelong_graph.Session(graph, {chosen[s]: ids[s][chosen[s]] for s in starts})
  actions = [*_calls(kind, chosen)]
  for name, arguments in actions:
    try:
      session.call(name, arguments)
    except lifelong_graph.Refused:  # a way that leads nowhere from these entities
      return {"question": "", "answer_list": []}
  return {
    "question": kind.question.format_map(chosen),
    "entity_dict": {chosen[s]: ids[s][chosen[s]] for s in starts},
    "answer_list": sorted(session.variables[-1].members),
    "action_list": [f"{name}({', '.join(arguments)})" for name, arguments in actions],
    "skill_list": list(dict.fromkeys(name for name, _ in actions)),
  }


def _calls(kind: Kind, chosen: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
  """The calls that answer a question, variables numbered as they are made."""
  made, ends = 0, []
  for path in kind.paths:
    start, *relations = path.split()
    at = chosen[start]
    for relation in relations:
      yield "get_relations", [at]
      yield "get_neighbors", [at, relation]
      at, made = f"#{made}", made + 1
    ends.append(at)
  if len(ends) == 2:
    yield "intersection", ends
    ends, made = [f"#{made}"], made + 1
  if kind.end == "count":
    yield "count", ends
  elif kind.end:
    name, attribute = kind.end.split()
    yield "get_attributes", ends
    yield name, [*ends, attribute]
