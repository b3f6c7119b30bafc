"""Tasks of LifelongAgentBench (2505.11942): options that all its families share, files, and which task a seed opens.

A family brings rows of the published schema, read from a file (config.env.data) or generated, and a function that
reads one row. Rows keep the order of their file: the benchmark is a stream of tasks.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from memrl_jax.envs import base, prompting

STYLES = ("full", "chat")
SPLITS = ("train", "held_out", "all")
HELD_OUT = 0.3  # share of tasks; MemRL holds out 150 of 500 OS tasks and 139 of 500 DB tasks

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
  """data: the published tasks as JSON (`entry_dict.json`), JSONL or parquet, or "" for generated ones.

  split: which tasks a seed opens: "train", "held_out" or "all"; "auto": training seeds open train ones, others
  held-out ones. Three tasks in ten are held out, by a hash of their instruction. output_chars: how much of an
  output is shown. reward_scale: what a solved task pays.
  """

  data: str = ""
  split: str = "auto"
  turns: int = 1
  output_chars: int = 4000
  reward_scale: float = 1.0
  style: str = "chat"

  def __post_init__(self):
    one_of(self.style, STYLES, "style", "prompt style", " (there is no tiny model of it)")
    one_of(self.split, ("auto", *SPLITS), "split", "split")
    if min(self.turns, self.output_chars) < 1:
      raise ValueError(
        f"{self.turns} turns with {self.output_chars} characters of output leave nothing to do; choose at least 1 "
        "of each (config.env.turns, config.env.output_chars)"
      )
    if not (self.reward_scale > 0 and math.isfinite(self.reward_scale)):
      raise ValueError(
        f"a reward scale of {self.reward_scale} turns the task around; choose one above 0 (config.env.reward_scale)"
      )


def one_of(value: str, known: tuple[str, ...], field: str, what: str, why: str = "") -> None:
  """Raises ValueError when a value is not among those known."""
  if value not in known:
    raise ValueError(
      f"{what} {value!r} is not known{why}; choose one of {', '.join(known)} (config.env.{field})"
    )


class Task(Protocol):
  """What every family's tasks have; `skills` are the benchmark's labels of what a task takes."""

  name: str
  instruction: str
  skills: tuple[str, ...]


class Source(NamedTuple):
  """Where the tasks of a family come from: its name, its reader of one row, and its generator of rows.

  `read(name, row)` raises KeyError for a missing field and TypeError or ValueError for one that is not as published.
  """

  family: str
  read: Callable[[str, Row], Any]
  generate: Callable[[], Iterable[Row]]


# Which task.


@functools.lru_cache(maxsize=8)
def tasks(source: Source, data: str) -> tuple[Any, ...]:
  """All tasks of a file, or the generated ones, in order; read once in a process.

  Raises:
    ValueError: there is no such file, or a row is not of the schema.
    ImportError: a parquet file, and pyarrow is not installed.
  """
  found = []
  for key, row in rows(data) if data else enumerate(source.generate()):
    try:
      found.append(source.read(f"{source.family}/{key}", row))
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
      raise ValueError(
        f"row {key} of {data or 'the generated tasks'} is not of the schema of {source.family} "
        f"({type(error).__name__}: {error}); give the published rows (config.env.data)"
      ) from error
  if not found:
    raise ValueError(f"{data} holds no tasks; give the published file (config.env.data)")
  return tuple(found)


def held_out(task: Task) -> bool:
  """Whether a task is held out: equal instructions are on the same side in every file and order."""
  return zlib.crc32(task.instruction.encode()) / 2**32 < HELD_OUT


def side(source: Source, data: str, split: str) -> tuple[Any, ...]:
  """The tasks of a split, in order.

  Raises:
    ValueError: there are none.
  """
  every = tasks(source, data)
  there = tuple(one for one in every if split == "all" or held_out(one) == (split == "held_out"))
  if not there:
    raise ValueError(
      f"none of the {len(every)} tasks is on the {split} side; choose all (config.env.split)"
    )
  return there


def draw(source: Source, options: Options, seed: int) -> Any:
  """The task of a seed; consecutive seeds go through a whole split, in its order, before one comes again."""
  split = options.split
  if split == "auto":
    split = "train" if seed < base.TRAIN_SEEDS[1] else "held_out"
  there = side(source, options.data, split)
  return there[seed % len(there)]


def find(source: Source, options: Options, name: str) -> Any:
  """The task of this name."""
  return next(one for one in tasks(source, options.data) if one.name == name)


# Files.


def rows(path: str) -> list[tuple[str, Row]]:
  """(key, row) of a file: the keys of a JSON object, or positions in a list, JSONL or parquet file."""
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(
      f"there is no file {path}; nothing is downloaded, so put the published tasks there as JSON, JSONL or parquet, "
      "or leave it empty for generated ones (config.env.data)"
    )
  if file.suffix == ".parquet":
    found = _parquet(file)
  elif file.suffix == ".jsonl":
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
  else:
    found = json.loads(file.read_text(encoding="utf-8"))
  pairs = found.items() if isinstance(found, dict) else enumerate(found)
  return [(str(key), row) for key, row in pairs]


def _parquet(file: pathlib.Path) -> list[Row]:
  if importlib.util.find_spec("pyarrow") is None:
    raise ImportError(
      f"{file} is a parquet file, which needs pyarrow: pip install pyarrow, or give JSON (config.env.data)"
    )
  import pyarrow.parquet

  return pyarrow.parquet.read_table(file).to_pylist()


def nested(value: Any) -> Any:
  """A list or object, also where a table format holds it as text (JSON, or as Python writes it)."""
  if not isinstance(value, str):
    return value
  try:
    return json.loads(value)
  except json.JSONDecodeError:
    return ast.literal_eval(value)


# Scripted players.


class Player:
  """What the scripted players of these tasks share: they say in `choose` what they do."""

  def __init__(self, options: Any, rng: np.random.Generator):
    self._options, self._rng = options, rng

  def play(self, view: base.View) -> str:
    return self.choose(view.current).text

  def reflect(self, view: base.View) -> str:
    return f"<remark>{prompting.outcome(view.current)}</remark>"

  def choose(self, attempt: base.AttemptLog) -> Any:
    """The next action, which has its `text`."""
    raise TypeError(f"{type(self).__name__} is no player: it lacks choose(attempt)")
