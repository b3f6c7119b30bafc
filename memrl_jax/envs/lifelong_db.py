"""DB tasks of LifelongAgentBench: answer a question, or change a table, with SQL (2505.11942, db_bench).

A question is judged by the rows that are answered, a change by the state of the table. Either is right when it
equals what the task stores, or what the reference statement gives in the same engine: engines print some numbers
differently. As in the release an answer that cannot be read ends the attempt, and of a change the state is judged
however the attempt ended, also at the last turn.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import re
from typing import Any, NamedTuple

from memrl_jax.envs import base, lifelong_db_generated, lifelong_mysql, lifelong_sql, prompting
from memrl_jax.envs import lifelong_tasks as tasks

ENGINES = ("sqlite", "mysql")
ANSWER_CHARS = 100_000


@dataclasses.dataclass(frozen=True)
class Options(tasks.Options):
  """turns: 3 in the benchmark, 15 in MemRL. engine: "sqlite", or "mysql" for an installed MySQL or MariaDB, of which
  a private server is started. statement_s: how long the statements of one turn may take together."""

  turns: int = 3
  engine: str = "sqlite"
  statement_s: float = 5.0

  def __post_init__(self):
    super().__post_init__()
    tasks.one_of(self.engine, ENGINES, "engine", "engine")
    if not self.statement_s > 0:
      raise ValueError(
        f"statements cannot run in {self.statement_s:g} seconds; choose more than 0 (config.env.statement_s)"
      )
    lacking = lifelong_mysql.missing() if self.engine == "mysql" else ""
    if lacking:
      raise ValueError(
        f"the engine mysql lacks {lacking}; install it, or choose sqlite (config.env.engine)"
      )


# Tasks.


class Task(NamedTuple):
  """`direct` are the rows of a right answer; a change has the `md5` of its table instead. `sql` is a reference."""

  name: str
  instruction: str
  skills: tuple[str, ...]
  table: lifelong_sql.Table
  md5: str | None
  direct: tuple[tuple[Any, ...], ...] | None
  sql: str


def read(name: str, row: tasks.Row) -> Task:
  """One row of the published schema."""
  table, answer = tasks.nested(row["table_info"]), tasks.nested(row["answer_info"])
  columns = [(one["name"], one["type"]) for one in tasks.nested(table["column_info_list"])]
  cells = tuple(tuple(one) for one in tasks.nested(table["row_list"]))
  direct = tasks.nested(answer.get("direct"))
  if (direct is None) == (answer.get("md5") is None):
    raise ValueError("answer_info needs one of direct and md5")
  return Task(
    name=name,
    instruction=row["instruction"],
    skills=tuple(tasks.nested(row["skill_list"])),
    table=lifelong_sql.Table(table["name"], tuple(columns), cells),
    md5=answer.get("md5"),
    direct=None if direct is None else tuple(tuple(one) for one in direct),
    sql=answer["sql"].strip(),
  )


SOURCE = tasks.Source("lifelong_db", read, lifelong_db_generated.rows)


def open_database(options: Options, table: lifelong_sql.Table) -> lifelong_sql.Database:
  """A fresh table in the engine of the options."""
  engine = lifelong_mysql.MySql if options.engine == "mysql" else lifelong_sql.Sqlite
  return engine(table, options.statement_s)


# Verdict.


def judge(options: Options, task: Task, state: str, answer: str | None) -> bool:
  """Whether the rows of an answer, or the state of the table, are right. `answer` is None where none was given."""
  if task.direct is not None and answer is None:
    return False
  if task.direct is not None and matches(answer, task.direct):
    return True
  if task.md5 is not None and state == task.md5:
    return True
  fresh = open_database(options, task.table)
  try:
    rows = fresh.rows(task.sql)
    if rows is None:  # a reference that only another engine can run
      return False
    return matches(answer, tuple(rows)) if task.direct is not None else state == fresh.state()
  finally:
    fresh.close()


def matches(answer: str, rows: tuple[tuple[Any, ...], ...]) -> bool:
  """Whether an answer writes these rows, in this order.

  It may be written as Python writes it, or loosely as the release allows: one bare row without brackets, texts
  without quotes. Numbers agree to 1e-6, also where they are quoted or Decimal('...').
  """
  return any(
    len(read_rows) == len(rows) and all(map(_same_row, read_rows, rows))
    for read_rows in (_literal_rows(answer[:ANSWER_CHARS]), _loose_rows(answer[:ANSWER_CHARS]))
    if read_rows is not None
  )


_DECIMAL = re.compile(r"Decimal\(\s*(['\"]?)(.*?)\1\s*\)")
_DATE = re.compile(r"datetime\.date\((\d+), *(\d+), *(\d+)\)")


def _plain(answer: str) -> str:
  """The answer without Python's names of types."""
  answer = _DECIMAL.sub(r"\2", answer)
  return _DATE.sub(lambda m: f"'{int(m[1]):04}-{int(m[2]):02}-{int(m[3]):02}'", answer)


def _literal_rows(answer: str) -> list[tuple[Any, ...]] | None:
  try:
    value = ast.literal_eval(_plain(answer).strip())
  except (ValueError, SyntaxError, RecursionError, MemoryError):
    return None
  if not isinstance(value, list):
    value = [value]
  return [tuple(row) if isinstance(row, tuple | list) else (row,) for row in value]


def _loose_rows(answer: str) -> list[tuple[Any, ...]] | None:
  text = _plain(answer).strip().removeprefix("[").removesuffix("]").strip()
  written = re.findall(r"\(([^()]*)\)", text) or ([text] if text else [])
  return [tuple(part.strip() for part in row.split(",") if part.strip()) for row in written]


def _same_row(said: tuple[Any, ...], row: tuple[Any, ...]) -> bool:
  return len(said) == len(row) and all(map(_same, said, row))


def _same(said: Any, value: Any) -> bool:
  if isinstance(value, str):
    return str(said) == value or str(said).strip("'\"") == value.strip("'\"")
  if value is None:
    return said is None or str(said) in ("None", "NULL")
  try:
    number = float(str(said).strip("'\""))
    return math.isclose(number, float(value), rel_tol=1e-6, abs_tol=1e-6)
  except (TypeError, ValueError):
    return str(said) == str(value)


# Actions.


class Action(NamedTuple):
  """A statement to run, or the answer (`sql` is None)."""

  sql: str | None
  answer: str = ""

  @property
  def text(self) -> str:
    """As a model writes it."""
    if self.sql is None:
      return f"Action: Answer\nFinal Answer: {self.answer}"
    return f"Action: Operation\n```sql\n{self.sql}\n```"


def parse(response: str) -> Action | None:
  """The first action of a response, None when there is none or its SQL or answer is missing.

  What is inside <think> does not count. Lines of SQL are joined, as in the release.
  """
  said = response.rpartition("</think>")[2]
  kind = re.search(r"Action:\s*(Operation|Answer)", said)
  if kind and kind[1] == "Operation":
    block = re.search(r"```sql\s*\n(.*?)\n?```", said, re.DOTALL)
    statement = block[1].strip().replace("\n", " ") if block else ""
    return Action(statement) if statement else None
  answer = re.search(r"Final Answer:(.*)", said)
  return Action(None, answer[1].strip()) if kind and answer else None


class LifelongDb(base.Seeded):
  """The environment: one table in a database of its own."""

  def __init__(self, options: Options):
    super().__init__(options, lambda chosen, seed: tasks.draw(SOURCE, chosen, seed), options.turns)
    self._database: lifelong_sql.Database | None = None

  def _begin(self, task: Task) -> base.Observation:
    self.close()
    self._database = open_database(self._options, task.table)
    columns = ", ".join(f"{name} ({kind})" for name, kind in task.table.columns)
    return self._observe(
      f"Task: {task.instruction}\nTable: {task.table.name}, with the columns {columns}."
    )

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action = parse(response)
    text, note = "", ""
    if action is None:
      note = "no action could be read in this; the attempt is over"
    elif action.sql is not None:
      reply = self._database.execute(action.sql)
      text, note = reply.text, "error" if reply.failed else ""
      if len(text) > self._options.output_chars:
        text = f"{text[: self._options.output_chars]} ... ({len(text)} characters)"
    self._turn += 1
    self._done = self._turn >= self.horizon or action is None or action.sql is None
    solved = False
    if self._done:
      answer = action.answer if action is not None and action.sql is None else None
      solved = judge(self._options, self._task, self._database.state(), answer)
      text = "\n".join(
        filter(None, [text, f"The attempt is over: {'right' if solved else 'wrong'}."])
      )
    observation = self._observe(text)
    if self._done:
      self.close()
    return base.StepResult(
      observation=observation,
      reward=self._options.reward_scale * solved,
      done=self._done,
      success=solved,
      score=float(solved),
      valid=action is not None,
      action=action.text if action else "",
      note=note,
    )

  def close(self) -> None:
    if self._database is not None:
      self._database.close()
      self._database = None

  def _observe(self, text: str) -> base.Observation:
    state = json.dumps([self._task.name, self._database.state(), text])
    return base.Observation(
      text=text,
      anchor=hashlib.sha256(state.encode()).hexdigest()[:24],
      goal=self._task.instruction,
      task=self._task.name,
    )


# Prompts.


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  wording = prompting.Wording(
    rules=(
      "You work on a table of a MySQL database and are given one task: a question about its rows, or a change to "
      f"them. You have {options.turns} turns. In each of them you either run a statement, written as\n"
      "Action: Operation\n```sql\nSELECT ... ;\n```\nor finish, written as\n"
      "Action: Answer\nFinal Answer: [(1, 'a'), (2, 'b')]\n"
      "A statement returns its rows as a list of tuples, an empty list for a change, or an error message. The final "
      "answer to a question is exactly those rows, their order and the order of their columns included. A change is "
      "judged by the table alone; its final answer may say anything. A turn without one of the two forms ends the "
      "trial. The task and the rows are the same in every trial."
    ),
    request="Explain in a few words what you do, then give exactly one action in one of the two forms.",
    show=str,
  )
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


# Scripted players.


class Solver(tasks.Player):
  """Runs the reference statement and answers what it returned."""

  def choose(self, attempt):
    if attempt.steps:
      return Action(None, attempt.now.text)
    return Action(tasks.find(SOURCE, self._options, attempt.initial.task).sql)


class Random(tasks.Player):
  """Looks at the table, deletes a row of it, or answers a number."""

  def choose(self, attempt):
    table = tasks.find(SOURCE, self._options, attempt.initial.task).table
    name, first = lifelong_sql.quoted(table.name), lifelong_sql.quoted(table.columns[0][0])
    number = int(self._rng.integers(1, 20))
    actions = [
      Action(f"SELECT * FROM {name} LIMIT {number}"),
      Action(f"DELETE FROM {name} WHERE {first} = {number}"),
      Action(None, f"[({number},)]"),
    ]
    return actions[int(self._rng.integers(len(actions)))]


FAMILY = base.Family(
  name="lifelong_db",
  options=Options,
  make=LifelongDb,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=lambda options, seed: json.dumps(tasks.draw(SOURCE, options, seed)),
)
