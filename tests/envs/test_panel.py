import json

import pytest

from memrl_jax.envs import base, darkroom, panel


@pytest.mark.parametrize("env", base.families())
def test_packaged_panels(env):
  loaded = panel.load(f"{env}-v1")
  assert (loaded.name, loaded.env, loaded.version) == (f"{env}-v1", env, 1)
  assert len(set(loaded.seeds)) == len(loaded.seeds) == 1024
  assert len(loaded.test) == len(loaded.dev) == 512 and not set(loaded.test) & set(loaded.dev)
  assert all(seed >= base.TRAIN_SEEDS[1] for seed in loaded.seeds)  # no training seed
  assert all(base.EVAL_SEEDS[0] <= seed < base.EVAL_SEEDS[1] for seed in loaded.seeds)
  # Drawn once, and not picked; where seeds count through the variations of a task, simply the first.
  first = base.EVAL_SEEDS[0]
  counted = tuple(range(first, first + 1024))
  assert loaded.seeds == (counted if env in ("scienceworld", "mix") else panel.draw(env, 1))
  panel.check_tasks(loaded)


def test_a_changed_file_is_refused(tmp_path):
  record = json.loads((panel.FOLDER / "darkroom-v1.json").read_text())
  record["seeds"][0] += 1
  path = tmp_path / "darkroom-v1.json"
  path.write_text(json.dumps(record))
  with pytest.raises(ValueError, match=r"darkroom-v1\.json was changed: its sha256 says"):
    panel.load(path)


def test_a_changed_generator_is_noticed(monkeypatch):
  loaded = panel.load("darkroom-v1")
  monkeypatch.setattr(darkroom, "_TASK_STREAM", 1)
  with pytest.raises(ValueError, match="tasks of darkroom-v1 changed"):
    panel.check_tasks(loaded)


def test_a_missing_panel_names_those_that_exist():
  with pytest.raises(ValueError, match="choose one of alfworld-v1, bigcodebench-v1, browser-v1"):
    panel.load("pacman-v1")


def test_write_round_trips_and_never_replaces(tmp_path):
  path = panel.write("minesweeper", 2, tmp_path)
  assert panel.load(path).seeds != panel.load("minesweeper-v1").seeds
  with pytest.raises(ValueError, match="write version 3 instead"):
    panel.write("minesweeper", 2, tmp_path)
