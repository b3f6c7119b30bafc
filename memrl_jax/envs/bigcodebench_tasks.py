"""What a BigCodeBench task is: options, rows of the published schema, and the program that an answer stands for."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, NamedTuple

from memrl_jax.envs import bigcodebench_files as files
from memrl_jax.envs import bigcodebench_generated as generated

STYLES = ("full", "chat")
MODES = ("instruct", "complete")


@dataclasses.dataclass(frozen=True)
class Options:
  """data: BigCodeBench's tasks as JSONL or parquet, or "" for the small tasks of this package.

  mode: what is shown, "instruct" (a request in words) or "complete" (imports, head and docstring of the function).
  split: which tasks a seed opens: "train", "held_out" or "all"; "auto": training seeds open train tasks, others
  held-out ones. calibrated: the task's imports and head stand before every program, as in the published pass@1.
  check_s, memory_mb: seconds that the tests of a program may take, and address space of each of its processes; the
  limit of the pool must allow check_s (config.env.timeout_s). python: the interpreter that has the libraries of
  the tasks, "" = this one. show_errors: whether an attempt ends with what failed and how, or only with how many
  tests did; the first shows parts of the tests. reward_scale: what a program pays that passes all its tests.
  """

  data: str = ""
  mode: str = "instruct"
  split: str = "auto"
  calibrated: bool = True
  check_s: float = 20.0
  memory_mb: int = 4096
  python: str = ""
  show_errors: bool = False
  reward_scale: float = 1.0
  style: str = "chat"

  def __post_init__(self):
    files.one_of(
      self.style, STYLES, "style", "prompt style", " (there is no tiny model of BigCodeBench)"
    )
    files.one_of(self.mode, MODES, "mode", "mode")
    files.one_of(self.split, ("auto", *files.SPLITS), "split", "split")
    if not (self.check_s > 0 and math.isfinite(self.check_s)) or self.memory_mb < 1:
      raise ValueError(
        f"no program passes its tests in {self.check_s:g} s and {self.memory_mb} MB; choose finite numbers above 0 "
        "(config.env.check_s, config.env.memory_mb)"
      )
    if not (self.reward_scale > 0 and math.isfinite(self.reward_scale)):
      raise ValueError(
        f"a reward scale of {self.reward_scale} turns the task around; choose one above 0 (config.env.reward_scale)"
      )


class Task(NamedTuple):
  """A row of BigCodeBench. `test` defines the class TestCases, which calls the function `entry_point`.

  `code_prompt` holds the imports and the function's head, `complete_prompt` also its docstring; the canonical
  solution continues either.
  """

  task_id: str
  complete_prompt: str
  instruct_prompt: str
  canonical_solution: str
  code_prompt: str
  test: str
  entry_point: str


def task(row: dict[str, Any]) -> Task:
  """A row of the schema; doc_struct and libs are not needed.

  Raises:
    ValueError: a field is missing or no text.
  """
  return Task(
    *files.texts(row, Task._fields, row.get("task_id", "without task_id"), "BigCodeBench")
  )


@functools.lru_cache(maxsize=8)
def tasks(data: str) -> tuple[Task, ...]:
  """The tasks of a file, or those of this package; read once in a process."""
  return (
    files.read(data, "BigCodeBench", "task_id", task)
    if data
    else tuple(sorted(map(task, generated.rows())))
  )


def find(options: Options, name: str) -> Task:
  """The task of an id."""
  return next(one for one in tasks(options.data) if one.task_id == name)


def draw(options: Options, seed: int) -> Task:
  """The task of a seed."""
  return files.draw(tasks(options.data), "task_id", options.split, seed)


# From answers to programs.

_FENCED = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.MULTILINE | re.DOTALL)


def code(response: str, entry_point: str) -> str:
  """The code of an answer, "" when there is none.

  It is the first fenced block that defines the function, or else the last block; without fences the whole answer,
  if it defines the function or is indented as the rest of one. What is inside <think> does not count.
  """
  said = response.rpartition("</think>")[2]
  blocks = _FENCED.findall(said)
  if blocks:
    found = next((block for block in blocks if defines(block, entry_point)), blocks[-1])
  else:
    found = said if defines(said, entry_point) or re.match(r"\n*[ \t]+\S", said) else ""
  return found.strip("\n") if found.strip() else ""


def defines(text: str, entry_point: str) -> bool:
  """Whether a text defines the function at its outermost level."""
  name = re.escape(entry_point)
  return bool(re.search(rf"^(?:(?:async )?def\s+{name}\b|{name}\s*=)", text, re.MULTILINE))


def program(one: Task, answer: str, options: Options) -> str:
  """The program that is tested: the rest of a function becomes whole, and calibration adds the task's head.

  With calibration the head, closed by `pass`, stands first: a program that leaves out the imports still has them.
  """
  if not defines(answer, one.entry_point):
    answer = one.complete_prompt + answer
  return f"{one.code_prompt}\n    pass\n{answer}" if options.calibrated else answer
