"""Generated DB tasks in the schema of LifelongAgentBench's db_bench: 36 kinds of task on 8 tables, answers by SQLite.

Kinds differ in what they ask and in the benchmark's 22 skills, not in their words: many instructions are close to
one another and need different SQL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from memrl_jax.envs import lifelong_sql

EACH = 2  # tasks of every kind and table
_TRIES = 40


class Theme(NamedTuple):
  """A table: what a row is, its columns (name, two kinds, two numbers) and what may stand in them."""

  table: str
  one: str
  many: str
  columns: tuple[str, str, str, str, str]
  kinds: tuple[str, ...]
  places: tuple[str, ...]
  ranges: tuple[range, range]


_FIRST = "Ada Bela Carl Dora Egon Fay Gita Hugo Ines Jon Kira Liam Mona Nils Olga Pia Quinn Rosa"
_LAST = "Abel Brandt Cho Diaz Eriksen Fischer Gupta Haas Ito Jansen Kaya Lopez Moreau Novak"
_CITIES = ("Bergen", "Lyon", "Porto", "Ghent", "Turin")

THEMES = (
  Theme("staff", "employee", "employees", ("name", "department", "city", "age", "salary"),
        ("sales", "support", "research", "legal"), _CITIES, (range(21, 66), range(2400, 7000, 50))),
  Theme("members", "member", "members", ("member", "plan", "club", "visits", "points"),
        ("basic", "plus", "family", "student"), ("north", "south", "east", "harbour"), (range(1, 80), range(10, 900, 5))),
  Theme("patients", "patient", "patients", ("patient", "ward", "insurer", "age", "days"),
        ("cardiology", "surgery", "neurology"), ("Alpha", "Beta", "Civic", "Delta"), (range(18, 95), range(1, 40))),
  Theme("players", "player", "players", ("player", "team", "position", "caps", "goals"),
        ("Lions", "Hawks", "Wolves", "Bears"), ("keeper", "back", "wing", "forward"), (range(1, 120), range(0, 60))),
  Theme("drivers", "driver", "drivers", ("driver", "depot", "licence", "trips", "kilometres"),
        _CITIES, ("B", "C", "D"), (range(5, 200), range(300, 9000, 25))),
  Theme("students", "student", "students", ("student", "faculty", "level", "credits", "fee"),
        ("physics", "history", "biology", "law"), ("bachelor", "master", "doctoral"), (range(6, 180, 2), range(200, 2000, 20))),
  Theme("authors", "author", "authors", ("author", "genre", "country", "books", "readers"),
        ("crime", "poetry", "science", "travel"), ("Chile", "Kenya", "Norway", "Japan"), (range(1, 50), range(500, 9000, 75))),
  Theme("donors", "donor", "donors", ("donor", "campaign", "channel", "gifts", "amount"),
        ("forest", "school", "clinic"), ("mail", "phone", "web", "street"), (range(1, 45), range(15, 3000, 15))),
)  # fmt: skip

_ONE, _MANY, _NESTED = (
  "where_single_condition",
  "where_multiple_conditions",
  "where_nested_conditions",
)
_GROUP, _GROUPS = "group_by_single_column", "group_by_multiple_columns"
_HAVING, _HAVINGS = "having_single_condition_with_aggregate", "having_multiple_conditions_with_aggregate"  # fmt: skip
_SUM, _ORDER = "having_aggregate_calculation", "order_by_single_column"
_SAME, _MIXED = "order_by_multiple_columns_same_direction", "order_by_multiple_columns_different_directions"  # fmt: skip
_SINGLE, _SEVERAL, _DEEP = "subquery_single", "subquery_multiple", "subquery_nested"

# (instruction, SQL, skills besides the first word of the SQL). {n}, {k}, {p}, {a}, {b} are the columns, {t} the table.
KINDS = (
  ("Which {many} have {k1} as {k}? Give {n}, ordered by {a}, lowest first.",
   "SELECT {n} FROM {t} WHERE {k} = '{k1}' ORDER BY {a}", (_ONE, _ORDER)),
  ("Which {many} have {k1} as {k}? Give {n}, ordered by {a}, highest first.",
   "SELECT {n} FROM {t} WHERE {k} = '{k1}' ORDER BY {a} DESC", (_ONE, _ORDER)),
  ("Give {n} and {b} of every {one} with {a} above {a1}, ordered by {b}.",
   "SELECT {n}, {b} FROM {t} WHERE {a} > {a1} ORDER BY {b}", (_ONE, _ORDER)),
  ("Give {n} and {b} of every {one} with {a} of at least {a1}, ordered by {b}.",
   "SELECT {n}, {b} FROM {t} WHERE {a} >= {a1} ORDER BY {b}", (_ONE, _ORDER)),
  ("How many {many} have {k1} as {k} and a {b} below {b1}?",
   "SELECT COUNT(*) FROM {t} WHERE {k} = '{k1}' AND {b} < {b1}", (_MANY,)),
  ("How many {many} have {k1} as {k} or a {b} below {b1}?",
   "SELECT COUNT(*) FROM {t} WHERE {k} = '{k1}' OR {b} < {b1}", (_MANY,)),
  ("Which {many} have {k1} as {k} and either {p1} as {p} or a {a} above {a1}? Give their {n}s ordered by {n}.",
   "SELECT {n} FROM {t} WHERE {k} = '{k1}' AND ({p} = '{p1}' OR {a} > {a1}) ORDER BY {n}", (_NESTED, _ORDER)),
  ("Give the {n}s of the {few} {many} with the highest {b}, highest first.",
   "SELECT {n} FROM {t} ORDER BY {b} DESC LIMIT {few}", (_ORDER, "limit_only")),
  ("Give the {n}s of the {few} {many} with the lowest {b}, lowest first.",
   "SELECT {n} FROM {t} ORDER BY {b} LIMIT {few}", (_ORDER, "limit_only")),
  ("Order the {many} by {b}, highest first, leave out the first {skip}, and give the {n}s of the next {few}.",
   "SELECT {n} FROM {t} ORDER BY {b} DESC LIMIT {few} OFFSET {skip}", (_ORDER, "limit_and_offset")),
  ("Order the {many} by {a}, lowest first, leave out the first {skip}, and give {n} and {a} of the next {few}.",
   "SELECT {n}, {a} FROM {t} ORDER BY {a} LIMIT {few} OFFSET {skip}", (_ORDER, "limit_and_offset")),
  ("List {k} and {n} of all {many}, ordered by {k} and then by {n}.",
   "SELECT {k}, {n} FROM {t} ORDER BY {k}, {n}", (_SAME,)),
  ("List {k} and {n} of all {many}, ordered by {k} and within it by {b} from high to low.",
   "SELECT {k}, {n} FROM {t} ORDER BY {k} ASC, {b} DESC", (_MIXED,)),
  ("How many {many} are there for each {k}? Give {k} and the number, ordered by {k}.",
   "SELECT {k}, COUNT(*) FROM {t} GROUP BY {k} ORDER BY {k}", (_GROUP, _ORDER)),
  ("What is the total {b} for each {p}? Give {p} and the total as total_{b}, ordered by {p}.",
   "SELECT {p}, SUM({b}) AS total_{b} FROM {t} GROUP BY {p} ORDER BY {p}", (_GROUP, _ORDER, "column_alias")),
  ("What is the highest {a} for each {p}? Give {p} and the value as top_{a}, ordered by {p}.",
   "SELECT {p}, MAX({a}) AS top_{a} FROM {t} GROUP BY {p} ORDER BY {p}", (_GROUP, _ORDER, "column_alias")),
  ("How many {many} are there for each pair of {k} and {p}? Give {k}, {p} and the number, ordered by {k} and {p}.",
   "SELECT {k}, {p}, COUNT(*) FROM {t} GROUP BY {k}, {p} ORDER BY {k}, {p}", (_GROUPS, _SAME)),
  ("Which values of {k} have at least {few} {many}? Order them by {k}.",
   "SELECT {k} FROM {t} GROUP BY {k} HAVING COUNT(*) >= {few} ORDER BY {k}", (_GROUP, _HAVING, _ORDER)),
  ("Which values of {k} have more than {few} {many}? Order them by {k}.",
   "SELECT {k} FROM {t} GROUP BY {k} HAVING COUNT(*) > {few} ORDER BY {k}", (_GROUP, _HAVING, _ORDER)),
  ("Which values of {p} have at least {few} {many} and a highest {a} above {a1}? Order them by {p}.",
   "SELECT {p} FROM {t} GROUP BY {p} HAVING COUNT(*) >= {few} AND MAX({a}) > {a1} ORDER BY {p}",
   (_GROUP, _HAVINGS, _ORDER)),
  ("For which values of {k} is the gap between the highest and the lowest {b} more than {b1}? Order them by {k}.",
   "SELECT {k} FROM {t} GROUP BY {k} HAVING MAX({b}) - MIN({b}) > {b1} ORDER BY {k}", (_GROUP, _SUM, _ORDER)),
  ("Which {many} have a {b} above the average {b} of all {many}? Give their {n}s ordered by {n}.",
   "SELECT {n} FROM {t} WHERE {b} > (SELECT AVG({b}) FROM {t}) ORDER BY {n}", (_ONE, _SINGLE, _ORDER)),
  ("Which {one} has the highest {a} among those whose {k} is {k1}? Give {n} and {a}.",
   "SELECT {n}, {a} FROM {t} WHERE {k} = '{k1}' AND {a} = (SELECT MAX({a}) FROM {t} WHERE {k} = '{k1}')",
   (_MANY, _SINGLE)),
  ("Which {many} have a {a} above the average {a} and a {b} below the average {b}? Give their {n}s ordered by {n}.",
   "SELECT {n} FROM {t} WHERE {a} > (SELECT AVG({a}) FROM {t}) AND {b} < (SELECT AVG({b}) FROM {t}) ORDER BY {n}",
   (_MANY, _SEVERAL, _ORDER)),
  ("Give the {n}s of all {many} who share the {k} of the {one} with the highest {b}, ordered by {n}.",
   "SELECT {n} FROM {t} WHERE {k} IN (SELECT {k} FROM {t} WHERE {b} = (SELECT MAX({b}) FROM {t})) ORDER BY {n}",
   (_ONE, _DEEP, _ORDER)),
  ("Which {one} comes directly after {n1} when all are ordered by {b}, lowest first? Give the {n}.",
   "SELECT x.{n} FROM {t} AS x WHERE x.{b} > (SELECT y.{b} FROM {t} AS y WHERE y.{n} = '{n1}') ORDER BY x.{b} LIMIT 1",
   (_ONE, _SINGLE, _ORDER, "limit_only", "table_alias")),
  ("A new {one} has come: id {id}, {n} {n2}, {k} {k1}, {p} {p1}, {a} {a1} and {b} {b1}. Enter the row.",
   "INSERT INTO {t} (id, {n}, {k}, {p}, {a}, {b}) VALUES ({id}, '{n2}', '{k1}', '{p1}', {a1}, {b1})", ()),
  ("Enter a {one} with id {id} and {n} {n2}, who has {k}, {p}, {a} and {b} as {n1} has them.",
   "INSERT INTO {t} SELECT {id}, '{n2}', {k}, {p}, {a}, {b} FROM {t} WHERE {n} = '{n1}'",
   ("select", _ONE)),
  ("Set the {b} of {n1} to {b1}.", "UPDATE {t} SET {b} = {b1} WHERE {n} = '{n1}'", (_ONE,)),
  ("Raise the {b} of {n1} by {few}.", "UPDATE {t} SET {b} = {b} + {few} WHERE {n} = '{n1}'", (_ONE,)),
  ("Every {one} with {k1} as {k} and a {a} below {a1} moves to {p1}: change the {p}.",
   "UPDATE {t} SET {p} = '{p1}' WHERE {k} = '{k1}' AND {a} < {a1}", (_MANY,)),
  ("Add {few} to the {a} of all {many} whose {p} is {p1} or whose {k} is {k1} with a {b} above {b1}.",
   "UPDATE {t} SET {a} = {a} + {few} WHERE {p} = '{p1}' OR ({k} = '{k1}' AND {b} > {b1})", (_NESTED,)),
  ("Remove {n1} from the table.", "DELETE FROM {t} WHERE {n} = '{n1}'", (_ONE,)),
  ("Remove all {many} whose {p} is {p1} and whose {a} is above {a1}.",
   "DELETE FROM {t} WHERE {p} = '{p1}' AND {a} > {a1}", (_MANY,)),
  ("Remove all {many} with a {b} below {b1}.", "DELETE FROM {t} WHERE {b} < {b1}", (_ONE,)),
  ("Remove all {many} whose {p} is {p1}, and those with a {a} above {a1} whose {k} is {k1}.",
   "DELETE FROM {t} WHERE {p} = '{p1}' OR ({a} > {a1} AND {k} = '{k1}')", (_NESTED,)),
)  # fmt: skip


def rows() -> Iterator[dict[str, Any]]:
  """The tasks, in an order that is mixed but always the same."""
  numbers = [(e, k, t) for e in range(EACH) for k in range(len(KINDS)) for t in range(len(THEMES))]
  random.Random(2505).shuffle(numbers)
  for each, kind, theme in numbers:
    yield _row(kind, THEMES[theme], random.Random(f"lifelong-db {each} {kind} {theme}"))


def _row(kind: int, theme: Theme, rng: random.Random) -> dict[str, Any]:
  """A task with a table of its own; drawn again while its answer is empty or it changes nothing."""
  words, statement, skills = KINDS[kind]
  verb = statement.split()[0].lower()
  for _ in range(_TRIES):
    table, filling = _table(theme, rng)
    sql = statement.format_map(filling)
    base = lifelong_sql.Sqlite(table, seconds=60.0)
    try:
      before, found, after = base.state(), base.rows(sql), base.state()
    finally:
      base.close()
    if found and found != [(0,)] if verb == "select" else found is not None and after != before:
      break
  else:
    raise RuntimeError(f"no table fits task {kind} of {theme.table}; change its kind")
  asks = verb == "select"
  return {
    "instruction": words.format_map(filling),
    "table_info": {
      "name": table.name,
      "row_list": [list(row) for row in table.rows],
      "column_info_list": [{"name": name, "type": kind} for name, kind in table.columns],
    },
    "answer_info": {
      "md5": None if asks else after,
      "direct": [list(row) for row in found] if asks else None,
      "sql": sql,
    },
    "skill_list": [verb, *skills],
  }


def _table(theme: Theme, rng: random.Random) -> tuple[lifelong_sql.Table, dict[str, Any]]:
  """A table with distinct names and numbers, and what may be filled into a kind of task on it."""
  size = rng.randint(11, 16)
  people = [f"{first} {last}" for first in _FIRST.split() for last in _LAST.split()]
  names = rng.sample(people, size + 1)
  a_values, b_values = (rng.sample(values, size) for values in theme.ranges)
  content = [
    (i + 1, names[i], rng.choice(theme.kinds), rng.choice(theme.places), a_values[i], b_values[i])
    for i in range(size)
  ]
  n, k, p, a, b = theme.columns
  columns = (("id", "INT"), (n, "TEXT"), (k, "TEXT"), (p, "TEXT"), (a, "INT"), (b, "INT"))
  some, other = rng.sample(content, 2)
  filling = {
    "t": theme.table, "one": theme.one, "many": theme.many, "n": n, "k": k, "p": p, "a": a, "b": b,
    "id": size + 1, "n1": some[1], "n2": names[-1], "k1": some[2], "p1": other[3],
    "a1": other[4], "b1": other[5], "few": rng.randint(2, 4), "skip": rng.randint(2, 4),
  }  # fmt: skip
  return lifelong_sql.Table(theme.table, columns, tuple(content)), filling
