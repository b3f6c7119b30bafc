"""A table over seeds: the final evaluation of several runs, grouped by everything but the seed.

    python experiments/compare.py runs/sweep/*

For each group and arm: the number of seeds, and the mean of pass@k over seeds with its standard error
(the spread between trained policies; the intervals inside a run are about the panel alone).
"""

from __future__ import annotations

import collections
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

Flat = dict[str, Any]


class Row(NamedTuple):
  """One arm of one group: pass@k by seed."""

  group: str
  arm: str
  seeds: tuple[int, ...]
  passes: tuple[tuple[float, ...], ...]

  def cells(self) -> list[str]:
    """Mean and standard error of pass@1, pass@2, ..."""
    return [
      f"{statistics.mean(values):.3f} ± {_error(values)}"
      for values in zip(*self.passes, strict=True)
    ]


def _error(values: Sequence[float]) -> str:
  if len(values) < 2:
    return "?"
  return f"{statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def read(folder: pathlib.Path) -> tuple[Flat, dict[str, Any]]:
  """(flat config, final evaluation) of a run; ValueError if it has none. --mode=eval is left out."""
  try:
    config = dict(_flatten(json.loads((folder / "config.json").read_text("utf-8"))))
    lines = (folder / "eval.jsonl").read_text("utf-8").splitlines()
  except (OSError, json.JSONDecodeError):
    raise ValueError(f"{folder} is not a run with an evaluation") from None
  for record in reversed([json.loads(line) for line in lines]):
    if record["step"] == config["train.updates"] and record["label"] != "eval":
      return config, record
  raise ValueError(
    f"{folder} has no evaluation after update {config['train.updates']} yet; resume it"
  )


def _flatten(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
  for key, value in config.items():
    if isinstance(value, dict):
      yield from _flatten(value, f"{prefix}{key}.")
    else:
      yield f"{prefix}{key}", value


def rows(runs: Sequence[tuple[Flat, dict[str, Any]]]) -> list[Row]:
  """Groups runs that differ in the seed alone; the name of a group says what else differs."""
  groups = collections.defaultdict(list)
  for flat, record in runs:
    rest = {key: value for key, value in flat.items() if key != "seed"}
    groups[json.dumps(rest, sort_keys=True)].append((flat["seed"], record))
  configs = [json.loads(key) for key in groups]
  table = []
  for config, members in zip(configs, groups.values(), strict=True):
    members.sort(key=lambda member: member[0])
    for arm in members[0][1]["arms"]:
      played = [(seed, record["arms"][arm]["pass"]) for seed, record in members]
      seeds, passes = zip(*((seed, tuple(values)) for seed, values in played), strict=True)
      table.append(Row(_name(config, configs), arm, seeds, passes))
  return table


def _name(config: Flat, configs: Sequence[Flat]) -> str:
  """Experiment and variant, and the values in which it differs from others of that name."""
  title = f"{config['experiment']}-{config['variant']}"
  same = [other for other in configs if f"{other['experiment']}-{other['variant']}" == title]
  keys = sorted(key for key in config if any(other.get(key) != config[key] for other in same))
  return " ".join([title, *(f"{key}={config[key]}" for key in keys)])


def main(folders: Sequence[str]) -> int:
  """Prints the table; 2 if a folder holds no evaluated run."""
  try:
    if not folders:
      raise ValueError("name the run folders: python experiments/compare.py runs/sweep/*")
    table = rows([read(pathlib.Path(folder)) for folder in folders])
  except ValueError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  most = max(len(row.passes[0]) for row in table)
  head = " | ".join(f"pass@{k}" for k in range(1, most + 1))
  print(f"| experiment | arm | seeds | {head} |\n|{'---|' * (3 + most)}")
  for row in table:
    seeds = " ".join(map(str, row.seeds))
    print(f"| {row.group} | {row.arm} | {seeds} | {' | '.join(row.cells())} |")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
