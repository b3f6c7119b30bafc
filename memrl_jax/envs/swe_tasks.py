"""What an SWE task is: options, instances in SWE-bench's schema, and which of them a seed opens."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from memrl_jax.envs import base, swe_executor, swe_repos

STYLES = ("full", "chat")
SPLITS = ("train", "held_out", "all")
EXECUTORS = ("local", "docker")
HELD_OUT = 5  # one instance in this many is held out

PYTEST = "python -m pytest -rA -q --tb=no -p no:cacheprovider"


@dataclasses.dataclass(frozen=True)
class Options:
  """data: a JSONL or parquet file in SWE-bench's schema, or "" for generated repositories of this `repos_seed`.
  repos: a folder with a clone `<owner>__<name>` of every repository, which the local executor takes commits from.

  split: which instances a seed opens: "train", "held_out" or "all"; "auto": training seeds open train ones, others
  held-out ones. One instance in five is held out, by a hash of its id up to a dot (what follows names a variant).
  executor: "local" (sandboxed folder, this Python) or "docker" (the instance's official image). command_s: seconds
  that a command, and the tests of a verdict, may take; a last turn takes up to four times as long, which the
  limit of the pool must allow (config.env.timeout_s). memory_mb: address space of a process, or memory of a
  container. output_chars: how much of a command's output is shown. reward_scale: what a solved task pays.
  """

  data: str = ""
  repos: str = ""
  repos_seed: int = 0
  split: str = "auto"
  executor: str = "local"
  turns: int = 20
  command_s: float = 10.0
  memory_mb: int = 2048
  output_chars: int = 4000
  reward_scale: float = 1.0
  style: str = "chat"

  def __post_init__(self):
    _one_of(self.style, STYLES, "style", "prompt style", " (there is no tiny model of SWE tasks)")
    _one_of(self.split, ("auto", *SPLITS), "split", "split")
    _one_of(self.executor, EXECUTORS, "executor", "executor")
    if self.data and self.repos_seed:
      raise ValueError(
        "repos_seed describes generated repositories, and data names others; leave one out (config.env.data, "
        "config.env.repos_seed)"
      )
    if not self.data and (self.repos or self.executor == "docker"):
      raise ValueError(
        "generated repositories need no clones and have no images; name a file of instances (config.env.data), or "
        "leave repos empty and choose local (config.env.repos, config.env.executor)"
      )
    if min(self.turns, self.memory_mb, self.output_chars) < 1 or not self.command_s > 0:
      raise ValueError(
        f"{self.turns} turns of {self.command_s:g} s with {self.memory_mb} MB and {self.output_chars} characters of "
        "output leave nothing to do; choose numbers above 0 (config.env.turns, config.env.command_s, "
        "config.env.memory_mb, config.env.output_chars)"
      )
    if not (self.reward_scale > 0 and math.isfinite(self.reward_scale)):
      raise ValueError(
        f"a reward scale of {self.reward_scale} turns the task around; choose one above 0 (config.env.reward_scale)"
      )


def _one_of(value: str, known: tuple[str, ...], field: str, what: str, why: str = "") -> None:
  if value not in known:
    raise ValueError(
      f"{what} {value!r} is not known{why}; choose one of {', '.join(known)} (config.env.{field})"
    )


# Instances.


class Instance(NamedTuple):
  """A row of SWE-bench. `patch` is the reference solution, `test_patch` the tests that judge.

  Three fields are ours: `test_command` is told the test files and prints outcomes as pytest -rA or unittest -v
  do, `files` holds a small repository itself (path -> text), `image` names another image than the official one.
  """

  instance_id: str
  repo: str
  base_commit: str
  problem_statement: str
  test_patch: str
  fail_to_pass: tuple[str, ...]
  pass_to_pass: tuple[str, ...]
  patch: str = ""
  test_command: str = PYTEST
  files: Mapping[str, str] | None = None
  image: str = ""


_TEXTS = ("instance_id", "repo", "base_commit", "problem_statement", "test_patch")


def instance(row: Mapping[str, Any]) -> Instance:
  """A row of the schema; test lists may be lists or JSON text.

  Raises:
    ValueError: a field is missing or not what it should be.
  """
  name = row.get("instance_id", "without instance_id")
  missing = [f for f in (*_TEXTS, "FAIL_TO_PASS", "PASS_TO_PASS") if row.get(f) is None]
  if missing:
    raise ValueError(
      f"instance {name} lacks {', '.join(missing)}; give rows in SWE-bench's schema (config.env.data)"
    )
  fail, kept = (_tests(name, row[field]) for field in ("FAIL_TO_PASS", "PASS_TO_PASS"))
  if not fail:
    raise ValueError(
      f"instance {name} has no FAIL_TO_PASS test, so nothing says when it is solved; leave it out (config.env.data)"
    )
  for path in row.get("files") or ():
    if path.startswith("/") or ".." in path.split("/"):
      raise ValueError(
        f"instance {name} has a file {path!r} outside its repository; use paths within it (config.env.data)"
      )
  given = {key: row[key] for key in ("patch", "test_command", "files", "image") if row.get(key)}
  return Instance(*(row[field] for field in _TEXTS), fail, kept, **given)


def _tests(name: str, value: Any) -> tuple[str, ...]:
  try:
    listed = json.loads(value) if isinstance(value, str) else list(value)
  except json.JSONDecodeError:
    listed = None
  if not isinstance(listed, list) or not all(isinstance(test, str) for test in listed):
    raise ValueError(
      f"the tests of instance {name} are {value!r}; give a list of names, or one as JSON text (config.env.data)"
    )
  return tuple(listed)


def load(path: str) -> tuple[Instance, ...]:
  """All instances of a JSONL or parquet file, in the order of their ids.

  Raises:
    ValueError: there is no such file, it holds no instances, or an id twice.
    ImportError: a parquet file, and pyarrow is not installed.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(
      f"there is no file {path}; nothing is downloaded, so put SWE-bench's instances there as JSONL or parquet, or "
      "leave it empty for generated repositories (config.env.data)"
    )
  if file.suffix == ".parquet":
    rows = _parquet(file)
  else:
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]
  found = {one.instance_id: one for one in map(instance, rows)}
  if not found or len(found) < len(rows):
    raise ValueError(
      f"{path} has {len(rows)} rows with {len(found)} different instance_ids; give every instance once "
      "(config.env.data)"
    )
  return tuple(found[name] for name in sorted(found))


def _parquet(file: pathlib.Path) -> list[dict[str, Any]]:
  if importlib.util.find_spec("pyarrow") is None:
    raise ImportError(
      f"{file} is a parquet file, which needs pyarrow: pip install pyarrow, or give JSONL (config.env.data)"
    )
  import pyarrow.parquet

  return pyarrow.parquet.read_table(file).to_pylist()


@functools.lru_cache(maxsize=8)
def instances(data: str, repos_seed: int) -> tuple[Instance, ...]:
  """The instances of a file, or the generated ones; read once in a process."""
  return load(data) if data else tuple(map(instance, swe_repos.rows(repos_seed)))


def find(options: Options, name: str) -> Instance:
  """The instance of an id."""
  return next(i for i in instances(options.data, options.repos_seed) if i.instance_id == name)


def held_out(one: Instance) -> bool:
  """Whether an instance is held out: the same in every file and order."""
  return zlib.crc32(one.instance_id.partition(".")[0].encode()) % HELD_OUT == 0


def draw(options: Options, seed: int) -> Instance:
  """The instance of a seed; consecutive seeds go through a whole split before one comes again."""
  split = options.split
  if split == "auto":
    split = "train" if seed < base.TRAIN_SEEDS[1] else "held_out"
  known = instances(options.data, options.repos_seed)
  there = [one for one in known if split == "all" or held_out(one) == (split == "held_out")]
  if not there:
    raise ValueError(
      f"none of the {len(known)} instances is on the {split} side; choose all (config.env.split)"
    )
  return there[seed % len(there)]


# Where an instance runs.


def executor(options: Options, one: Instance) -> swe_executor.Executor:
  """A fresh executor for an instance, not yet started.

  Raises:
    ValueError: the local executor has neither files nor clones to work on.
  """
  limits = swe_executor.Limits(options.command_s, options.memory_mb)
  if options.executor == "docker":
    return swe_executor.Docker(limits, image=one.image or official_image(one.instance_id))
  if one.files is not None:
    return swe_executor.Local(limits, files=one.files)
  if not options.repos:
    raise ValueError(
      f"instance {one.instance_id} needs a clone of {one.repo}; name a folder that holds it as "
      f"{one.repo.replace('/', '__')}, or choose docker (config.env.repos, config.env.executor)"
    )
  clone = pathlib.Path(options.repos) / one.repo.replace("/", "__")
  return swe_executor.Local(limits, repository=str(clone), commit=one.base_commit)


def official_image(name: str) -> str:
  """The image that SWE-bench publishes for an instance; "__" is not allowed in names of images."""
  return f"swebench/sweb.eval.x86_64.{name.lower().replace('__', '_1776_')}:latest"
