"""The folder of one run: what lies where, whose run it is, and who is writing to it now.

config.json       the whole resolved config
manifest.json     config hash, seeds, and one record a session: command, versions, git, device, times
metrics.jsonl     one record an update, deterministic: two identical runs give identical bytes
timing.jsonl      one record an update, seconds and clock
eval.jsonl        one record an evaluation
rollouts/         000012.jsonl: the trials of update 12, one a line
checkpoints/      one folder a step
memory/           what a method with a memory remembers (python -m memrl_jax.memory list runs/X/memory)
adapt/            --mode=adapt: rounds.jsonl, the trials of each round, and the memory they filled
tensorboard/      a view of metrics.jsonl and timing.jsonl, rebuilt from them on resume
report.html       a page to read, made from the files above
"""

from __future__ import annotations

import collections.abc
import datetime
import fcntl
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
from typing import Any

import jax

from memrl_jax.training import hosts

MIN_FREE_BYTES = 200_000_000  # two checkpoints of a shipped tiny model, its logs and rollouts [us]
PACKAGES = (
  "memrl_jax",
  "jax",
  "jaxlib",
  "flax",
  "optax",
  "orbax-checkpoint",
  "transformers",
  "numpy",
)
ASIDE = ".aside"  # ends the name of what is written before it takes the place of a file
RUN_FILES = ("manifest.json", "metrics.jsonl", "timing.jsonl", "eval.jsonl", "checkpoints")


class RunFolder:
  """Paths of one run. `create` also checks the folder, locks it and writes config and manifest.

  Reading needs no lock: `RunFolder(path)` touches nothing. Of several hosts only the first writes in it.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path).expanduser().absolute()
    self.config = self.path / "config.json"
    self.manifest = self.path / "manifest.json"
    self.metrics = self.path / "metrics.jsonl"
    self.timing = self.path / "timing.jsonl"
    self.eval = self.path / "eval.jsonl"
    self.rollouts = self.path / "rollouts"
    self.checkpoints = self.path / "checkpoints"
    self.memory = self.path / "memory"
    self.adapt = self.path / "adapt"
    self.tensorboard = self.path / "tensorboard"
    self.report = self.path / "report.html"
    self.resumed = False
    self._lock: Any = None

  @classmethod
  def create(
    cls,
    path: str | os.PathLike,
    config: dict[str, Any],
    resume: bool,
    *,
    may_differ: collections.abc.Collection[str] = (),
    seeds: dict[str, int] | None = None,
  ) -> RunFolder:
    """Opens a new run, or continues one; refuses in a ValueError, and then nothing is overwritten.

    `may_differ` names dotted keys, such as "train.updates", that may change when a run continues.
    `resume` on an empty folder starts a new run, so that one command serves a preemptible machine.
    """
    folder = cls(path)
    config = json.loads(json.dumps(config))
    folder.resumed = hosts.of_first(
      lambda: folder._open(config, resume, may_differ, seeds or {}), "the run folder"
    )
    return folder

  def _open(self, config: dict[str, Any], resume: bool, may_differ, seeds: dict[str, int]) -> bool:
    """Locks and writes; returns whether it continues a run."""
    _check_place(self.path)
    self._take_lock()
    try:
      resumed = self._check_run(config, resume, may_differ)
      for part in (self.rollouts, self.checkpoints, self.tensorboard):
        part.mkdir(exist_ok=True)
      for place in (self.path, self.rollouts, self.adapt):
        for aside in place.glob(f".*{ASIDE}"):  # of a session that was killed while it wrote
          aside.unlink()
      write_atomic(self.config, _dump(config))
      self._open_session(config, seeds)
    except BaseException:
      self.close()
      raise
    return resumed

  def rollout(self, step: int) -> pathlib.Path:
    """The file that holds the trials of update `step`."""
    return self.rollouts / f"{step:06d}.jsonl"

  def eval_trials(self, step: int) -> pathlib.Path:
    """The file that holds trials of the evaluation after `step` updates."""
    return self.rollouts / f"eval-{step:06d}.jsonl"

  def end_session(self, status: str, step: int) -> None:
    """Notes in the manifest when and how this session ended ("finished", "stopped by SIGTERM", ...)."""
    if not hosts.first():
      return
    manifest = json.loads(self.manifest.read_text("utf-8"))
    manifest["sessions"][-1] |= {"end": _now(), "status": status, "step": step}
    write_atomic(self.manifest, _dump(manifest))

  def close(self) -> None:
    """Releases the lock; so does the end of the process, however it ends."""
    if self._lock is not None:
      self._lock.close()
      self._lock = None

  def __enter__(self) -> RunFolder:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _take_lock(self) -> None:
    # The kernel drops an flock when its holder dies, so a stale file, or a reused pid, blocks nobody.
    handle = open(self.path / "lock", "a+", encoding="utf-8")  # noqa: SIM115
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      handle.seek(0)
      holder = handle.read().strip() or "unknown"
      handle.close()
      raise ValueError(
        f"{self.path} is in use by process {holder}; wait for it, stop it, or choose another --workdir"
      ) from None
    handle.truncate(0)
    handle.write(f"{os.getpid()} on {platform.node()}\n")
    handle.flush()
    self._lock = handle

  def _check_run(
    self, config: dict[str, Any], resume: bool, may_differ: collections.abc.Collection[str]
  ) -> bool:
    """True if the folder holds this very run and it may continue, False if it holds none."""
    if not self.config.exists():
      found = [name for name in RUN_FILES if (self.path / name).exists()]
      if found:
        raise ValueError(
          f"{self.path} holds {', '.join(found)} but no config.json, so its run cannot be continued;"
          " choose another --workdir"
        )
      return False
    differing = _differences(_load(self.config), config, may_differ)
    if differing:
      more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
      raise ValueError(
        f"{self.path} holds a run of another config ({'; '.join(differing[:3])}{more});"
        " use that config, or choose another --workdir"
      )
    if not resume:
      raise ValueError(
        f"{self.path} holds a run already; add --resume to continue it, or choose another --workdir"
      )
    return True

  def _open_session(self, config: dict[str, Any], seeds: dict[str, int]) -> None:
    earlier = _load(self.manifest)["sessions"] if self.manifest.exists() else []
    manifest = {
      "config_hash": config_hash(config),
      "seeds": seeds,
      "sessions": [*earlier, {"start": _now(), **_surroundings()}],
    }
    write_atomic(self.manifest, _dump(manifest))


def config_hash(config: dict[str, Any]) -> str:
  """8 hex digits of SHA-256 over the config as JSON with sorted keys; tuples count as lists."""
  text = json.dumps(config, sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def write_atomic(path: pathlib.Path, text: str) -> None:
  """Replaces `path` by `text`: a reader, or a crash at any moment, sees the old file or the new."""
  with tempfile.NamedTemporaryFile(
    "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", suffix=ASIDE, delete=False
  ) as handle:
    try:
      handle.write(text)
      handle.flush()
      os.fsync(handle.fileno())
      os.chmod(handle.name, 0o644)  # a temporary file is private; these are for others to read too
      os.replace(handle.name, path)
    except BaseException:
      os.unlink(handle.name)
      raise
  directory = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(directory)  # or a power cut may undo the rename
  finally:
    os.close(directory)


def _check_place(path: pathlib.Path) -> None:
  """Makes the folder; ValueError if it is a file, cannot be written, or the disk is nearly full."""
  if path.exists() and not path.is_dir():
    raise ValueError(f"{path} is a file, not a folder; choose another --workdir")
  try:
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
      pass
  except OSError as error:
    raise ValueError(
      f"{path} cannot be written ({error.strerror}); change its permissions, or choose another --workdir"
    ) from None
  free = shutil.disk_usage(path).free
  if free < MIN_FREE_BYTES:
    raise ValueError(
      f"{path} has {free / 1e6:.0f} MB free and a run needs {MIN_FREE_BYTES / 1e6:.0f} MB;"
      " free some space, or choose another --workdir"
    )


def _differences(
  old: dict[str, Any], new: dict[str, Any], may_differ: collections.abc.Collection[str]
) -> list[str]:
  old, new = flatten(old), flatten(new)
  absent = object()

  def show(value: Any) -> str:
    return "absent" if value is absent else json.dumps(value)

  return [
    f"{key} is {show(old.get(key, absent))} there and {show(new.get(key, absent))} here"
    for key in sorted(old.keys() | new.keys())
    if key not in may_differ and old.get(key, absent) != new.get(key, absent)
  ]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Nested dicts as one dict with dotted keys; an empty dict stays a value."""
  flat = {}
  for key, value in config.items():
    if isinstance(value, dict) and value:
      flat |= flatten(value, f"{prefix}{key}.")
    else:
      flat[f"{prefix}{key}"] = value
  return flat


def _surroundings() -> dict[str, Any]:
  """What the same config may run differently under."""
  devices = jax.devices()
  return {
    "command": sys.argv,
    "python": platform.python_version(),
    "platform": platform.platform(),
    "packages": {name: _version(name) for name in PACKAGES},
    "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
    "hosts": hosts.count(),
    "git": _git(pathlib.Path(__file__).parent),
  }


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _git(where: pathlib.Path) -> dict[str, Any] | None:
  """Commit of the checkout this code runs from, and whether files differ from it; None outside one."""

  def ask(*words: str) -> str:
    command = ["git", "-C", str(where), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout

  try:
    return {
      "commit": ask("rev-parse", "HEAD").strip(),
      "dirty": bool(ask("status", "--porcelain").strip()),
    }
  except (OSError, subprocess.SubprocessError):
    return None


def _load(path: pathlib.Path) -> dict[str, Any]:
  try:
    return json.loads(path.read_text("utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not JSON ({error}); choose another --workdir") from None


def _dump(value: dict[str, Any]) -> str:
  return json.dumps(value, indent=2) + "\n"


def _now() -> str:
  return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
