"""Rows of published files, and which of them a seed opens: shared by benchmarks that are one list of questions."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from memrl_jax.envs import base

SPLITS = ("train", "held_out", "all")
HELD_OUT = 3  # of ten tasks are held out: MemRL (2601.03192) trains on 70 % of BigCodeBench and transfers to 30 %

Row = TypeVar("Row")


def read(path: str, what: str, key: str, make: Callable[[dict[str, Any]], Row]) -> tuple[Row, ...]:
  """All rows of a JSONL or parquet file, made into tasks, in the order of their ids.

  `what` names the benchmark in errors, `key` is the field (and attribute) with the id.

  Raises:
    ValueError: there is no such file, a line is no JSON object, there are no rows, or an id comes twice.
    ImportError: a parquet file, and pyarrow is not installed.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(
      f"there is no file {path}; nothing is downloaded, so put {what}'s tasks there as JSONL or parquet, or leave it "
      "empty for the small tasks of this package (config.env.data)"
    )
  rows = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
  found = {getattr(one, key): one for one in map(make, rows)}
  if not found or len(found) < len(rows):
    raise ValueError(
      f"{path} has {len(rows)} rows with {len(found)} different values of {key}; give every task once (config.env.data)"
    )
  return tuple(found[name] for name in sorted(found))


def _jsonl(file: pathlib.Path) -> list[dict[str, Any]]:
  rows = []
  with file.open(encoding="utf-8") as lines:
    for number, line in enumerate(lines, start=1):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
      except json.JSONDecodeError:
        row = None
      if not isinstance(row, dict):
        raise ValueError(
          f"line {number} of {file} is no JSON object; write one on every line (config.env.data)"
        )
      rows.append(row)
  return rows


def _parquet(file: pathlib.Path) -> list[dict[str, Any]]:
  if importlib.util.find_spec("pyarrow") is None:
    raise ImportError(
      f"{file} is a parquet file, which needs pyarrow: pip install pyarrow, or give JSONL (config.env.data)"
    )
  import pyarrow.parquet

  return pyarrow.parquet.read_table(file).to_pylist()


def texts(row: dict[str, Any], fields: Sequence[str], name: str, what: str) -> list[str]:
  """The values of fields that must be texts; ValueError names those that are not."""
  wrong = [field for field in fields if not isinstance(row.get(field), str)]
  if wrong:
    raise ValueError(
      f"task {name} has no text as {', '.join(wrong)}; give rows in {what}'s schema (config.env.data)"
    )
  return [row[field] for field in fields]


def held_out(name: str) -> bool:
  """Whether the task of an id is held out: the same in every file and order."""
  return zlib.crc32(name.encode()) % 10 < HELD_OUT


def draw(known: Sequence[Row], key: str, split: str, seed: int) -> Row:
  """The task of a seed; consecutive seeds go through a whole split before one comes again.

  With "auto" the seeds of training open train tasks, and all others held-out ones.
  """
  if split == "auto":
    split = "train" if seed < base.TRAIN_SEEDS[1] else "held_out"
  there = [
    one for one in known if split == "all" or held_out(getattr(one, key)) == (split == "held_out")
  ]
  if not there:
    raise ValueError(
      f"none of the {len(known)} tasks is on the {split} side; choose all (config.env.split)"
    )
  return there[seed % len(there)]


def one_of(value: str, known: Sequence[str], field: str, what: str, why: str = "") -> None:
  """ValueError where an option is none of the known ones."""
  if value not in known:
    raise ValueError(
      f"{what} {value!r} is not known{why}; choose one of {', '.join(known)} (config.env.{field})"
    )
