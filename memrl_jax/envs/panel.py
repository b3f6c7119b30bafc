"""Fixed evaluation panels: the task seeds that every reported number is measured on.

A panel is a JSON file next to this one (`panels/<env>-v<version>.json`) with 512 "test" seeds and 512
"dev" seeds, a checksum, and a digest of the first tasks, so that neither an edited file nor a changed
task generator passes unnoticed. Choose settings on dev; report test. Training seeds are never in it:
`base.TRAIN_SEEDS` and `base.EVAL_SEEDS` do not overlap.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import zlib
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs import base

FOLDER = pathlib.Path(__file__).parent / "panels"
SIDE = 512  # seeds in each of test and dev: standard error about 2.2 points near 50 %
DESCRIBED = 16  # tasks that the digest covers
_DRAW = 2512_16848  # stream of the draw of seeds


class Panel(NamedTuple):
  """`tasks` is the digest of the first tasks under the family's default options."""

  name: str
  env: str
  version: int
  seeds: tuple[int, ...]
  tasks: str

  @property
  def test(self) -> tuple[int, ...]:
    return self.seeds[:SIDE]

  @property
  def dev(self) -> tuple[int, ...]:
    return self.seeds[SIDE : 2 * SIDE]


def draw(env: str, version: int) -> tuple[int, ...]:
  """The seeds of a panel: distinct, uniform over EVAL_SEEDS, fixed by environment and version."""
  rng = np.random.default_rng([_DRAW, zlib.crc32(env.encode()), version])
  seeds = dict.fromkeys(rng.integers(*base.EVAL_SEEDS, size=2 * SIDE + 64).tolist())
  return tuple(seeds)[: 2 * SIDE]


def digest(family: base.Family, seeds: tuple[int, ...]) -> str:
  """sha256 over the first tasks of a panel, hidden parts included, under default options."""
  if family.describe is None:
    raise ValueError(
      f"environment {family.name!r} does not describe its tasks; give its FAMILY describe="
    )
  options = family.options()
  text = "\n".join(family.describe(options, seed) for seed in seeds[:DESCRIBED])
  return hashlib.sha256(text.encode()).hexdigest()


def write(env: str, version: int, folder: pathlib.Path = FOLDER) -> pathlib.Path:
  """Draws and writes a panel; an existing file is never replaced, a new panel is a new version."""
  path = folder / f"{env}-v{version}.json"
  if path.exists():
    raise ValueError(
      f"{path} exists and may have been reported on; write version {version + 1} instead"
    )
  seeds = draw(env, version)
  tasks = digest(base.family(env), seeds)
  record: dict[str, Any] = {"env": env, "version": version, "tasks": tasks, "seeds": list(seeds)}
  path.write_text(json.dumps(record | {"sha256": _checksum(record)}) + "\n")
  return path


def load(name: str | pathlib.Path) -> Panel:
  """A panel by name ("sokoban-v1") or path.

  Raises:
    ValueError: the file is missing, or not what was written.
  """
  path = FOLDER / f"{name}.json" if not str(name).endswith(".json") else pathlib.Path(name)
  if not path.is_file():
    known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
    raise ValueError(
      f"there is no panel at {path}; choose one of {known}, or give a path (config.eval.panel)"
    )
  record = json.loads(path.read_text())
  stated = record.pop("sha256", None)
  actual = _checksum(record)
  if stated != actual:
    raise ValueError(
      f"{path} was changed: its sha256 says {stated}, its content has {actual}; restore the file, or "
      "write a new version with panel.write"
    )
  return Panel(path.stem, record["env"], record["version"], tuple(record["seeds"]), record["tasks"])


def check_tasks(panel: Panel) -> None:
  """Raises ValueError when the generator no longer makes the tasks that the panel was written with."""
  actual = digest(base.family(panel.env), panel.seeds)
  if actual != panel.tasks:
    raise ValueError(
      f"the tasks of {panel.name} changed: digest {actual}, written with {panel.tasks}; numbers on it no longer "
      "compare with earlier ones: restore the generator, or write a new version with panel.write"
    )


def _checksum(record: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
