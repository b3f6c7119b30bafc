"""A run folder never mixes two runs, two processes or two configs, and says what to do instead."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest

from memrl_jax.training import folder as run_folder

CONFIG = {"method": {"name": "lamer", "gamma": 0.95}, "train": {"updates": 10, "lr": 1e-5}}
HOLD_LOCK = """
import sys, time
from memrl_jax.training import folder
run = folder.RunFolder(sys.argv[1])
run._take_lock()
print("held", flush=True)
time.sleep(60)
"""


def changed(**values):
  return {**CONFIG, "train": {**CONFIG["train"], **values}}


def snapshot(path: pathlib.Path):
  return {
    file: file.read_bytes() for file in path.rglob("*") if file.name != "lock" and file.is_file()
  }


def test_a_new_run_has_its_config_and_says_how_it_was_started(tmp_path):
  with run_folder.RunFolder.create(tmp_path / "a" / "b", CONFIG, False, seeds={"run": 3}) as run:
    assert json.loads(run.config.read_text()) == CONFIG
    assert not run.resumed
    run.end_session("finished", 10)
    manifest = json.loads(run.manifest.read_text())
  assert manifest["config_hash"] == run_folder.config_hash(CONFIG)
  assert manifest["seeds"] == {"run": 3}
  (session,) = manifest["sessions"]
  assert session["status"] == "finished" and session["step"] == 10
  assert session["command"] == sys.argv and session["packages"]["jax"]
  assert sorted(path.name for path in run.path.iterdir()) == [
    "checkpoints",
    "config.json",
    "lock",
    "manifest.json",
    "rollouts",
    "tensorboard",
  ]


def test_the_hash_ignores_order_and_sees_every_value():
  reordered = {"train": {"lr": 1e-5, "updates": 10}, "method": {"gamma": 0.95, "name": "lamer"}}
  assert run_folder.config_hash(reordered) == run_folder.config_hash(CONFIG)
  # echo -n '{"a":[1,2]}' | sha256sum | cut -c 1-8; a tuple is a list in JSON
  assert run_folder.config_hash({"a": (1, 2)}) == "01530d16"
  assert run_folder.config_hash(changed(lr=2e-5)) != run_folder.config_hash(CONFIG)


def test_a_run_is_continued_only_when_asked_to(tmp_path):
  run_folder.RunFolder.create(tmp_path, CONFIG, False).close()
  before = snapshot(tmp_path)
  with pytest.raises(ValueError, match=r"holds a run already; add --resume .* another --workdir"):
    run_folder.RunFolder.create(tmp_path, CONFIG, False)
  assert snapshot(tmp_path) == before
  with run_folder.RunFolder.create(tmp_path, CONFIG, True) as run:
    assert run.resumed
    assert len(json.loads(run.manifest.read_text())["sessions"]) == 2


def test_another_config_is_refused_and_three_differences_are_named(tmp_path):
  run_folder.RunFolder.create(tmp_path, CONFIG, False).close()
  before = snapshot(tmp_path)
  other = {"method": {"name": "grpo"}, "train": {"updates": 20, "lr": 2e-5}, "env": "maze"}
  with pytest.raises(ValueError) as caught:
    run_folder.RunFolder.create(tmp_path, other, True)
  text = str(caught.value)
  assert 'env is absent there and "maze" here' in text
  assert "method.gamma is 0.95 there and absent here" in text
  assert 'method.name is "lamer" there and "grpo" here and 2 more' in text
  assert snapshot(tmp_path) == before


def test_a_longer_run_may_go_on_if_its_length_may_differ(tmp_path):
  run_folder.RunFolder.create(tmp_path, CONFIG, False).close()
  with pytest.raises(ValueError, match=r"train\.updates is 10 there and 20 here"):
    run_folder.RunFolder.create(tmp_path, changed(updates=20), True)
  allowed = {"may_differ": ("train.updates",)}
  with run_folder.RunFolder.create(tmp_path, changed(updates=20), True, **allowed) as run:
    assert json.loads(run.config.read_text())["train"]["updates"] == 20
  with pytest.raises(ValueError, match=r"train\.lr"):
    run_folder.RunFolder.create(tmp_path, changed(updates=20, lr=1.0), True, **allowed)


def test_resume_on_an_empty_folder_starts_a_run(tmp_path):
  with run_folder.RunFolder.create(tmp_path, CONFIG, True) as run:
    assert not run.resumed


def test_remains_without_a_config_are_left_alone(tmp_path):
  (tmp_path / "metrics.jsonl").write_text("{}\n")
  with pytest.raises(ValueError, match=r"holds metrics.jsonl but no config.json"):
    run_folder.RunFolder.create(tmp_path, CONFIG, True)


def test_places_where_no_run_can_live(tmp_path, monkeypatch):
  (tmp_path / "file").write_text("text")
  with pytest.raises(ValueError, match="is a file, not a folder"):
    run_folder.RunFolder.create(tmp_path / "file", CONFIG, False)
  with pytest.raises(ValueError, match=r"cannot be written .* another --workdir"):
    run_folder.RunFolder.create(tmp_path / "file" / "below", CONFIG, False)
  with pytest.raises(ValueError, match="cannot be written"):  # root may write anywhere but there
    run_folder.RunFolder.create("/proc/self/run", CONFIG, False)
  usage = types.SimpleNamespace(free=150_000_000)
  monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: usage)
  with pytest.raises(ValueError, match="has 150 MB free and a run needs 200 MB"):
    run_folder.RunFolder.create(tmp_path / "run", CONFIG, False)


def test_two_processes_never_share_a_folder_and_a_dead_one_blocks_nobody(tmp_path):
  root = pathlib.Path(run_folder.__file__).parents[2]
  child = subprocess.Popen(
    [sys.executable, "-c", HOLD_LOCK, str(tmp_path)],
    stdout=subprocess.PIPE,
    text=True,
    env={**os.environ, "PYTHONPATH": str(root)},
  )
  assert child.stdout.readline() == "held\n"
  with pytest.raises(ValueError, match=f"in use by process {child.pid} on "):
    run_folder.RunFolder.create(tmp_path, CONFIG, False)
  assert not (tmp_path / "config.json").exists()
  child.send_signal(signal.SIGKILL)
  child.wait()
  run_folder.RunFolder.create(tmp_path, CONFIG, False).close()


def test_a_refused_run_gives_its_lock_back(tmp_path):
  run_folder.RunFolder.create(tmp_path, CONFIG, False).close()
  with pytest.raises(ValueError):
    run_folder.RunFolder.create(tmp_path, CONFIG, False)
  run_folder.RunFolder.create(tmp_path, CONFIG, True).close()


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
  path = tmp_path / "config.json"
  run_folder.write_atomic(path, "old")

  def full(descriptor):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(run_folder.os, "fsync", full)
  with pytest.raises(OSError, match="No space left"):
    run_folder.write_atomic(path, "new")
  assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.json", "old")]


def test_what_a_killed_session_had_begun_to_write_is_gone_when_the_run_goes_on(tmp_path):
  first = run_folder.RunFolder.create(tmp_path, CONFIG, False)
  with pytest.MonkeyPatch.context() as killed:
    killed.setattr(run_folder.os, "fsync", lambda descriptor: 1 / 0)
    killed.setattr(run_folder.os, "unlink", lambda path: None)  # nobody cleans up after a kill
    with pytest.raises(ZeroDivisionError):
      run_folder.write_atomic(first.rollout(2), "half")
  assert any(first.rollouts.iterdir())
  first.close()
  run_folder.RunFolder.create(tmp_path, CONFIG, True).close()
  assert not any(first.rollouts.iterdir())
