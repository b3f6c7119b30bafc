"""What a run writes while it goes: numbers of each update, evaluations, trials; and what it shows.

A record of metrics.jsonl is {"step": 12, "rollout/success": 0.25, ...}: keys sorted, floats in full,
null where a number is not finite, and nothing that depends on the clock. Seconds go to timing.jsonl
({"step": 12, "time": unix seconds, "seconds/rollout": 3.1, ...}). TensorBoard is a view of both.
"""

from __future__ import annotations

import collections.abc
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

import rich.console
import rich.progress
from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer import event_file_writer

from memrl_jax.training import folder as run_folder
from memrl_jax.training import hosts


class MetricsLog:
  """Appends to the files of a run folder; `truncate` takes back what a resumed run will redo."""

  def __init__(self, folder: run_folder.RunFolder):
    self._folder = folder
    for path in (folder.metrics, folder.timing, folder.eval):
      _cut_half_line(path)
    self._last = max((record["step"] for record in read(folder.metrics)), default=-1)
    self._board = event_file_writer.EventFileWriter(str(folder.tensorboard))

  def write(self, step: int, metrics: dict[str, float], timing: dict[str, float]) -> None:
    """One update. ValueError if its step was written before."""
    if step <= self._last:
      raise ValueError(
        f"metrics of step {step} come after step {self._last} in {self._folder.metrics};"
        f" call truncate({step}) before redoing it"
      )
    numbers = {"step": step, **_numbers(metrics)}
    seconds = {"step": step, "time": time.time(), **_numbers(timing)}
    _append(self._folder.metrics, numbers)
    _append(self._folder.timing, seconds)
    self._board.add_event(_event(numbers, seconds))
    self._board.flush()
    self._last = step

  def write_eval(self, record: dict[str, Any]) -> None:
    """One evaluation: {"step", "panel", "tasks", "label", "arms": {name: {"pass": [...], ...}}}."""
    _append(self._folder.eval, record)

  def write_rollouts(self, step: int, trials: collections.abc.Iterable[dict[str, Any]]) -> None:
    """The trials of one update (`Trial.to_json`), in the order given."""
    text = "".join(json.dumps(trial) + "\n" for trial in trials)
    run_folder.write_atomic(self._folder.rollout(step), text)

  def write_eval_trials(self, step: int, arms: dict[str, list[dict[str, Any]]]) -> None:
    """Some trials of each arm of the evaluation after `step` updates, one a line, with its arm."""
    lines = [{"arm": arm, **trial} for arm, trials in arms.items() for trial in trials]
    path = self._folder.eval_trials(step)
    run_folder.write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))

  def truncate(self, step: int) -> None:
    """Drops every record of steps >= `step`, so that a resumed run's files equal an unbroken run's.

    A file changes as a whole or not at all, and a crash in the middle is mended by calling it again.
    """
    for path in (self._folder.metrics, self._folder.timing, self._folder.eval):
      if path.exists():
        kept = [json.dumps(record) + "\n" for record in read(path) if record["step"] < step]
        run_folder.write_atomic(path, "".join(kept))
    for path in self._folder.rollouts.glob("*.jsonl"):
      if int(path.stem.removeprefix("eval-")) >= step:
        path.unlink()
    self._last = max((record["step"] for record in read(self._folder.metrics)), default=-1)
    self._rebuild_board()

  def close(self) -> None:
    self._board.close()

  def __enter__(self) -> MetricsLog:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def _rebuild_board(self) -> None:
    """A fresh events file from the JSONL files, in place of all older ones."""
    self._board.close()
    for path in self._folder.tensorboard.glob("events.out.tfevents.*"):
      path.unlink()
    self._board = event_file_writer.EventFileWriter(str(self._folder.tensorboard))
    # A TensorBoard that is open now forgets what it has read when it sees a session start at step 0.
    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    self._board.add_event(event_pb2.Event(wall_time=time.time(), step=0, session_log=start))
    timing = {record["step"]: record for record in read(self._folder.timing)}
    for numbers in read(self._folder.metrics):
      self._board.add_event(_event(numbers, timing.get(numbers["step"], {"time": 0.0})))
    self._board.flush()


def read(path: pathlib.Path) -> list[dict[str, Any]]:
  """The records of a JSONL file; [] if there is none. A half-written last line is left out.

  ValueError for a damaged line anywhere else: that is no interrupted write.
  """
  if not path.exists():
    return []
  records = []
  lines = path.read_bytes().split(b"\n")
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      records.append(json.loads(line))
    except ValueError:
      if any(rest.strip() for rest in lines[number:]):
        raise ValueError(
          f"line {number} of {path} is not JSON; remove the line, or restore the file"
        ) from None
  return records


def _append(path: pathlib.Path, record: dict[str, Any]) -> None:
  with open(path, "a", encoding="utf-8") as handle:
    handle.write(json.dumps(record) + "\n")
    handle.flush()
    os.fsync(handle.fileno())


def _cut_half_line(path: pathlib.Path) -> None:
  """Removes what a killed process left after the last complete line: the next would be glued to it."""
  if path.exists():
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
      os.truncate(path, complete)


def _numbers(values: dict[str, float]) -> dict[str, float | None]:
  """Sorted, as Python floats; None where not finite, because JSON has no NaN."""
  clash = {"step", "time"} & values.keys()
  if clash:
    raise ValueError(f"no metric may be called {' or '.join(sorted(clash))}; rename it")
  floats = {name: float(values[name]) for name in sorted(values)}
  return {name: value if math.isfinite(value) else None for name, value in floats.items()}


def _event(numbers: dict[str, Any], seconds: dict[str, Any]) -> event_pb2.Event:
  """All scalars of one step as one TensorBoard event; null shows as NaN."""
  scalars = {**numbers, **seconds}
  values = [
    summary_pb2.Summary.Value(tag=tag, simple_value=math.nan if value is None else value)
    for tag, value in scalars.items()
    if tag not in ("step", "time")
  ]
  summary = summary_pb2.Summary(value=values)
  return event_pb2.Event(wall_time=seconds["time"], step=numbers["step"], summary=summary)


class NoLog(MetricsLog):
  """What a host keeps that is not the first: nothing. Each call of a `MetricsLog` is allowed."""

  def __init__(self):
    """Opens no file."""

  def _nothing(self, *what: Any) -> None:
    """Writes nothing."""

  write = write_eval = write_rollouts = write_eval_trials = truncate = close = _nothing


def log_of(folder: run_folder.RunFolder) -> MetricsLog:
  """The log of a run: of several hosts only the first writes one."""
  return MetricsLog(folder) if hosts.first() else NoLog()


class Progress:
  """A bar on a terminal, one line an update elsewhere, nothing if `quiet` or on any but the first host.

      with Progress(100) as progress:
        progress.update(13, {"success": 0.31, "pass@3": 0.44}, seconds=3.2)

  `start` is the number of updates done in earlier sessions; the remaining time ignores them.
  """

  def __init__(
    self,
    total: int,
    *,
    start: int = 0,
    quiet: bool = False,
    console: rich.console.Console | None = None,
  ):
    quiet = quiet or not hosts.first()
    self._total, self._quiet = total, quiet
    self._console = console or rich.console.Console(file=sys.stdout)
    self._seconds: list[float] = []
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.description}", markup=False),
      rich.progress.BarColumn(bar_width=24),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TextColumn("{task.fields[numbers]}", markup=False),
      console=self._console,
    )
    self._live = self._console.is_terminal and not quiet
    self._task = self._bar.add_task("update", total=total, completed=start, numbers="")

  def __enter__(self) -> Progress:
    if self._live:
      self._bar.start()
    return self

  def __exit__(self, *exc_info) -> None:
    if self._live:
      self._bar.stop()

  def update(self, done: int, numbers: dict[str, float], seconds: float) -> None:
    """`done` updates are complete; the last took `seconds`. Shows `numbers` in the order given."""
    if self._quiet:
      return
    self._seconds = [*self._seconds[-19:], seconds]
    mean = sum(self._seconds) / len(self._seconds)
    parts = [f"{name} {value:.3g}" for name, value in numbers.items()]
    parts += [f"{mean:.2g} s/update", f"{duration(mean * (self._total - done))} left"]
    if self._live:
      self._bar.update(self._task, completed=done, numbers="  ".join(parts))
    else:
      self.say(f"update {done}/{self._total}  " + "  ".join(parts))

  def say(self, text: str) -> None:
    """A line that stays, above the bar."""
    if self._quiet:
      return
    if self._live:
      self._bar.console.print(text, soft_wrap=True, markup=False, highlight=False)
    else:
      print(text, file=self._console.file, flush=True)


def duration(seconds: float) -> str:
  """Seconds as a person says them: 45 s, 12 min, 3 h 20 min."""
  if seconds < 90:
    return f"{seconds:.0f} s"
  minutes = round(seconds / 60)
  return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
