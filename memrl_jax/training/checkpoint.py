"""Checkpoints: everything a run needs to go on, as one atomic step; and the wish to stop.

A step holds arrays (weights, optimiser, critic, ...: any pytree of jax or numpy arrays), host state
(counters, schedule, best, memory: JSON) and extra arrays whose shapes only the step knows (what a
method has counted so far). Orbax writes it in the background into a temporary
folder and renames that when complete, so a killed save leaves no half step. On disk the arrays are a
flat {"params.layers.wq": array}: no class of ours is needed to read them, and a renamed class or a
newer optax does not lock an old checkpoint.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import threading
import types
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from memrl_jax.training import hosts


class Checkpoints:
  """Steps in one directory: the newest `keep`, and every multiple of `keep_every` if given."""

  def __init__(self, directory: str | os.PathLike, *, keep: int, keep_every: int | None):
    if keep < 1 or (keep_every is not None and keep_every < 1):
      raise ValueError(
        f"keep={keep}, keep_every={keep_every}: both count from 1;"
        " set keep to at least 1 and keep_every to None or at least 1"
      )
    self._directory = pathlib.Path(directory).absolute()
    policies: list[Any] = [checkpoint_managers.LatestN(keep)]
    if keep_every is not None:
      policies.append(checkpoint_managers.EveryNSteps(keep_every))
    hosts.keeps_checkpoints(self._directory)
    with hosts.waiting("the folder of checkpoints"):
      self._manager = ocp.CheckpointManager(
        self._directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
          cleanup_tmp_directories=True,
        ),
        handler_registry=_handlers(),
      )

  def save(
    self,
    step: int,
    arrays: Any,
    host: dict[str, Any],
    extra: dict[str, np.ndarray] | None = None,
  ) -> None:
    """Starts to write one step and returns; the caller may donate or change both at once.

    `host` is kept as JSON: tuples return as lists, and keys must be strings. Waits for the save
    before it, and raises what went wrong there (a full disk, say).
    """
    flat = _flatten(arrays)
    host_text = json.dumps(host)  # now: the caller's dict may change while Orbax writes
    if json.loads(host_text).keys() != host.keys():
      raise ValueError(f"host state has keys that are no strings: {sorted(map(repr, host))}")
    self.wait()
    newest = self.latest()
    if newest is not None and step <= newest:
      raise ValueError(
        f"checkpoint {step} cannot follow checkpoint {newest} in {self._directory};"
        f" call drop_after({step - 1}) first, or choose another --workdir"
      )
    extra = extra or {}
    content = {
      "host": host_text,
      "shapes": {path: list(leaf.shape) for path, leaf in flat.items()},
      "extra": {name: [list(leaf.shape), str(leaf.dtype)] for name, leaf in extra.items()},
    }
    items = {"arrays": ocp.args.StandardSave(flat), "content": ocp.args.JsonSave(content)}
    kept = {
      name: np.array(leaf) for name, leaf in extra.items() if leaf.size
    }  # Orbax keeps no 0 items
    if kept:
      items["extra"] = ocp.args.StandardSave(kept)
    with hosts.waiting(f"the start of checkpoint {step}"):
      self._manager.save(step, args=ocp.args.Composite(**items), force=True)

  def wait(self) -> None:
    """Until the last save is on disk; raises if it failed."""
    with hosts.waiting("the end of a checkpoint"):
      self._manager.wait_until_finished()

  def steps(self) -> list[int]:
    """Complete steps, oldest first."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """The newest complete step; None if there is none."""
    return self._manager.latest_step()

  def restore(self, step: int | None, like: Any) -> tuple[int, Any, dict[str, Any]]:
    """(step, arrays, host) of one step, the newest for None.

    `like` gives structure, shapes, dtypes and shardings, as arrays or `jax.ShapeDtypeStruct`s; the
    devices may be others than those that saved. ValueError if there is no such step, or it holds
    something else.
    """
    self.wait()
    step = self._existing(step)
    wanted = _flatten(like)
    content = self._restore(step, content=ocp.args.JsonRestore()).content
    self._check_shapes(step, content["shapes"], wanted)
    flat = self._restore(step, arrays=ocp.args.StandardRestore(wanted)).arrays
    arrays = jax.tree.unflatten(jax.tree.structure(like), [flat[path] for path in wanted])
    return step, arrays, json.loads(content["host"])

  def extra(self, step: int) -> dict[str, np.ndarray]:
    """The extra arrays of a step that `restore` has found; {} where it has none."""
    shapes = self._restore(step, content=ocp.args.JsonRestore()).content.get("extra", {})
    extra = {name: np.zeros(shape, dtype) for name, (shape, dtype) in shapes.items()}
    if kept := {name: leaf for name, leaf in extra.items() if leaf.size}:
      restored = self._restore(step, extra=ocp.args.StandardRestore(kept)).extra
      extra |= {name: np.asarray(leaf) for name, leaf in restored.items()}
    return extra

  def drop_after(self, step: int) -> None:
    """Deletes the steps after `step`: for a run that goes on from an earlier one."""
    self.wait()
    for later in self.steps():
      if later > step:
        self._manager.delete(later)

  def close(self) -> None:
    """Waits for the last save, then frees Orbax's threads."""
    with hosts.waiting("the end of a checkpoint"):
      self._manager.close()

  def __enter__(self) -> Checkpoints:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _existing(self, step: int | None) -> int:
    steps = self.steps()
    if not steps:
      raise ValueError(
        f"no checkpoint in {self._directory}; start the run without restoring one, or correct the path"
      )
    if step is not None and step not in steps:
      raise ValueError(f"no checkpoint {step} in {self._directory}; it holds steps {steps}")
    return steps[-1] if step is None else step

  def _restore(self, step: int, **items: Any) -> Any:
    # What Orbax raises for a damaged step depends on the file that is damaged.
    try:
      with hosts.waiting(f"checkpoint {step}"):
        return self._manager.restore(step, args=ocp.args.Composite(**items))
    except (OSError, ValueError, KeyError) as error:
      others = [other for other in self.steps() if other != step]
      raise ValueError(
        f"checkpoint {step} in {self._directory} cannot be read ({type(error).__name__});"
        f" delete that folder and go on from {others or 'the start'}"
      ) from error

  def _check_shapes(self, step: int, saved: dict[str, list[int]], wanted: dict[str, Any]) -> None:
    shapes = {path: list(leaf.shape) for path, leaf in wanted.items()}
    differing = [
      f"{path} is {_shape(saved, path)} there and {_shape(shapes, path)} here"
      for path in sorted(saved.keys() | shapes.keys())
      if saved.get(path) != shapes.get(path)
    ]
    if differing:
      more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
      raise ValueError(
        f"checkpoint {step} in {self._directory} is of another model or optimiser"
        f" ({'; '.join(differing[:3])}{more}); restore it with the config that saved it"
      )


def _handlers() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
  registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
  arrays, content = ocp.StandardCheckpointHandler(), ocp.JsonCheckpointHandler()
  for item in ("arrays", "extra"):
    registry.add(item, ocp.args.StandardSave, arrays)
    registry.add(item, ocp.args.StandardRestore, arrays)
  registry.add("content", ocp.args.JsonSave, content)
  registry.add("content", ocp.args.JsonRestore, content)
  return registry


def _shape(shapes: dict[str, list[int]], path: str) -> str:
  return str(tuple(shapes[path])) if path in shapes else "absent"


def _flatten(tree: Any) -> dict[str, Any]:
  """Leaves by dotted path, in tree order. ValueError for a leaf that is no array."""
  flat = {}
  for keys, leaf in jax.tree_util.tree_leaves_with_path(tree):
    path = jax.tree_util.keystr(keys, simple=True, separator=".")
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
      raise ValueError(
        f"{path} is a {type(leaf).__name__}, not an array; keep it in the host state"
      )
    if path in flat:
      raise ValueError(f"two arrays are both called {path}; rename one")
    flat[path] = leaf
  return flat


class StopSignal:
  """Turns SIGTERM and the first Ctrl-C into a flag, so that a run ends between two updates, saved.

      with StopSignal() as stop:
        while step < total and not stop.requested: ...

  `requested` is None, "SIGTERM" or "SIGINT"; the second Ctrl-C raises KeyboardInterrupt. Outside the
  main thread Python delivers no signals, and the flag stays None.
  """

  def __init__(self):
    self.requested: str | None = None
    self._interrupts = 0
    self._before: dict[int, Any] = {}

  def __enter__(self) -> StopSignal:
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._before[number] = signal.signal(number, self._receive)
    return self

  def __exit__(self, *exc_info) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before.clear()

  def _receive(self, number: int, frame: types.FrameType | None) -> None:
    self._interrupts += number == signal.SIGINT
    if self._interrupts > 1:
      raise KeyboardInterrupt
    self.requested = self.requested or signal.Signals(number).name
    # Not print(): a handler may run in the middle of another print.
    text = f"\n{self.requested}: stopping after this update; Ctrl-C again to stop at once\n"
    os.write(2, text.encode())
