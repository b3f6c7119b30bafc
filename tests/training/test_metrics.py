"""What a resumed run leaves behind equals what an unbroken one leaves behind."""

import io
import json
import math

import numpy as np
import pytest
import rich.console
from tensorboard.backend.event_processing import event_accumulator

from memrl_jax.training import folder as run_folder
from memrl_jax.training import metrics


@pytest.fixture
def run(tmp_path):
  with run_folder.RunFolder.create(tmp_path / "run", {"a": 1}, False) as folder:
    yield folder


def play(log: metrics.MetricsLog, steps) -> None:
  for step in steps:
    numbers = {"train/loss": np.float32(0.1) / (step + 1), "rollout/success": step / 10}
    log.write(step, numbers, {"seconds/train": 1.5})
    log.write_rollouts(step, [{"group": 0, "index": step}])
    log.write_eval({"step": step, "panel": "p", "tasks": 1, "arms": {}, "label": "update"})


def deterministic(folder) -> dict:
  files = [folder.metrics, folder.eval, *sorted(folder.rollouts.iterdir())]
  return {path.name: path.read_bytes() for path in files}


def board(folder) -> dict:
  events = event_accumulator.EventAccumulator(str(folder.tensorboard))
  events.Reload()
  return {
    tag: [(event.step, event.value) for event in events.Scalars(tag)]
    for tag in events.Tags()["scalars"]
  }


def test_a_line_is_sorted_exact_and_valid_json(run):
  with metrics.MetricsLog(run) as log:
    log.write(0, {"b": np.float32(0.1), "a": 3, "c": math.nan, "d": math.inf}, {})
  # float32(0.1) is 13421773 / 2^27 = 0.100000001490116...
  expected = '{"step": 0, "a": 3.0, "b": 0.10000000149011612, "c": null, "d": null}\n'
  assert run.metrics.read_text() == expected


def test_a_resumed_run_leaves_the_files_of_an_unbroken_run(tmp_path):
  folders = [run_folder.RunFolder.create(tmp_path / n, {}, False) for n in ("whole", "broken")]
  with metrics.MetricsLog(folders[0]) as log:
    play(log, range(6))
  with metrics.MetricsLog(folders[1]) as log:
    play(log, range(5))
  with open(folders[1].metrics, "a") as handle:
    handle.write('{"step": 5, "train/lo')  # killed here
  with metrics.MetricsLog(folders[1]) as log:
    log.truncate(3)
    assert not folders[1].rollout(3).exists()
    play(log, range(3, 6))
  assert deterministic(folders[0]) == deterministic(folders[1])
  assert len(deterministic(folders[0])) == 2 + 6
  steps = [record["step"] for record in metrics.read(folders[1].timing)]
  assert steps == [0, 1, 2, 3, 4, 5]
  assert board(folders[0]) == board(folders[1])
  assert len(list(folders[1].tensorboard.iterdir())) == 1  # readers that never purge agree too
  assert [step for step, _ in board(folders[1])["seconds/train"]] == [0, 1, 2, 3, 4, 5]


def test_a_half_written_line_is_neither_read_nor_glued_to_the_next(run):
  run.metrics.write_text('{"step": 0, "x": 1.0}\n{"step": 1, "x": 0.')
  assert [record["step"] for record in metrics.read(run.metrics)] == [0]
  with metrics.MetricsLog(run) as log:
    log.write(1, {"x": 2.0}, {})
  assert run.metrics.read_text() == '{"step": 0, "x": 1.0}\n{"step": 1, "x": 2.0}\n'


def test_a_damaged_line_in_the_middle_is_an_error(run):
  run.metrics.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
  with pytest.raises(ValueError, match=r"line 2 of .*metrics.jsonl is not JSON"):
    metrics.read(run.metrics)


def test_a_step_is_not_written_twice(run):
  with metrics.MetricsLog(run) as log:
    play(log, range(3))
  with metrics.MetricsLog(run) as log:
    with pytest.raises(ValueError, match=r"step 2 come after step 2 .* truncate\(2\)"):
      play(log, [2])
    log.truncate(2)
    play(log, [2])
    with pytest.raises(ValueError, match="no metric may be called step"):
      log.write(9, {"step": 1.0}, {})


def test_no_rollout_file_is_read_as_empty(run):
  assert metrics.read(run.rollout(3)) == []


def shown(terminal: bool, quiet: bool = False) -> str:
  console = rich.console.Console(file=io.StringIO(), force_terminal=terminal, width=140)
  with metrics.Progress(100, start=10, quiet=quiet, console=console) as progress:
    progress.say("saved [step 11]")
    progress.update(11, {"success": 0.25, "pass@3": 0.5}, seconds=2.0)
    progress.update(12, {"success": 0.75, "pass@3": 0.5}, seconds=4.0)
  return console.file.getvalue()


def test_progress_without_a_terminal_is_one_plain_line_an_update():
  # 12 of 100 done at a mean of 3 s: 88 * 3 = 264 s left, 4 min.
  assert shown(False).splitlines() == [
    "saved [step 11]",
    "update 11/100  success 0.25  pass@3 0.5  2 s/update  3 min left",
    "update 12/100  success 0.75  pass@3 0.5  3 s/update  4 min left",
  ]


def test_progress_on_a_terminal_is_a_bar_and_quiet_is_quiet():
  text = shown(True)
  assert (
    "12/100" in text and "success 0.75" in text and "4 min left" in text and "[step 11]" in text
  )
  assert shown(True, quiet=True) == shown(False, quiet=True) == ""


def test_durations():
  assert [metrics.duration(s) for s in (4.4, 89, 91, 5399, 12000)] == [
    "4 s",
    "89 s",
    "2 min",
    "1 h 30 min",
    "3 h 20 min",
  ]


def test_timing_carries_the_clock_and_metrics_do_not(run):
  with metrics.MetricsLog(run) as log:
    log.write(0, {"x": 1.0}, {"seconds/train": 2.0})
  assert set(json.loads(run.metrics.read_text())) == {"step", "x"}
  assert set(json.loads(run.timing.read_text())) == {"step", "time", "seconds/train"}
