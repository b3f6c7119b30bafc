"""Which ScienceWorld tasks exist and what options accept; no Java."""

import pathlib

import pytest

from memrl_jax.envs import base, panel, scienceworld_tasks
from memrl_jax.envs.scienceworld_tasks import Options


def test_the_table_adds_up_to_the_published_totals():
  # 30 tasks, 7,207 variations: 3,592 / 1,796 / 1,819 (empo2 spec, 2.9).
  totals = [sum(counts[side] for counts in scienceworld_tasks.TASKS.values()) for side in (1, 2, 3)]
  assert len(scienceworld_tasks.TASKS) == 30 and totals == [3592, 1796, 1819]
  assert len({short for short, *_ in scienceworld_tasks.TASKS.values()}) == 30


@pytest.mark.parametrize(
  ("task", "first", "last"),  # the first 20 test variations that EMPO2's data files hold
  [
    ("find-animal", 225, 244),
    ("lifespan-longest-lived", 93, 112),
    ("test-conductivity", 675, 694),
    ("test-conductivity-of-unknown-substances", 450, 469),
    ("use-thermometer", 405, 424),
    ("measure-melting-point-known-substance", 327, 346),
  ],
)
def test_test_variations_are_those_of_the_paper(task, first, last):
  played = scienceworld_tasks.played(Options(task=task, split="test", variations=20))
  assert (played[0], played[-1], len(played)) == (first, last, 20)


@pytest.mark.parametrize(
  ("task", "exist"),
  [
    ("chemistry-mix", range(24, 32)),
    ("chemistry-mix-paint-secondary-color", range(27, 36)),
    ("power-component", range(15, 20)),
    ("identify-life-stages-1", range(9, 14)),
    ("identify-life-stages-2", range(6, 10)),
  ],
)
def test_no_variation_is_played_that_does_not_exist_and_it_is_said(task, exist):
  with pytest.warns(UserWarning, match=f"20 test variations of {task} .* {len(exist)} exist"):
    options = Options(task=task, split="test", variations=20)
  assert scienceworld_tasks.played(options) == exist


def test_papers_tasks_exist_and_are_eighteen():
  assert len(set(scienceworld_tasks.PAPER_TASKS)) == 18
  assert set(scienceworld_tasks.PAPER_TASKS) < set(scienceworld_tasks.TASKS)


def test_splits_share_no_variation_and_leave_no_gap():
  for task in scienceworld_tasks.TASKS:
    parts = [scienceworld_tasks.variations(task, split) for split in scienceworld_tasks.SPLITS]
    together = [v for part in parts for v in part]
    assert together == list(range(len(together)))


def test_consecutive_seeds_play_every_variation_once():
  options = Options(task="4-4", split="test", variations=0)
  drawn = [scienceworld_tasks.draw(options, seed) for seed in range(70_000, 70_075)]
  assert {task.variation for task in drawn} == set(range(225, 300))
  assert str(drawn[0]).startswith("find-animal/")


def test_the_panel_counts_seeds_so_that_n_tasks_are_n_variations():
  loaded = panel.load("scienceworld-v1")
  panel.check_tasks(loaded)
  for side in (loaded.test, loaded.dev):
    assert list(side) == list(range(side[0], side[0] + panel.SIDE))
  assert loaded.seeds[0] == base.EVAL_SEEDS[0] and len(loaded.seeds) == 2 * panel.SIDE


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"task": "find-unicorn"}, "task 'find-unicorn' is not known"),
    ({"split": "eval"}, "split 'eval' is not known; choose one of train, dev, test"),
    ({"style": "brief"}, "style 'brief' is not known; choose one of chat, full"),
    ({"ambiguous": "ask"}, "choose one of first, cancel"),
    ({"simplifications": ("easy", "fly")}, "simplification 'fly' is not known"),
    (
      {"task": "3-1", "simplifications": ("noElectricalAction",)},
      "power-component cannot be solved without",
    ),
    ({"variations": -1}, "-1 variations cannot be played"),
    ({"max_calls": 0}, "max_calls 0"),
    ({"heap_mb": 8}, "heap_mb 8"),
    ({"examples": "/nowhere.txt"}, "no file of worked examples at /nowhere.txt"),
  ],
)
def test_options_are_refused_in_a_sentence(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    Options(**changes)


def test_easy_leaves_electricity_to_tasks_that_need_it_and_containers_closed():
  plant, power = Options(task="find-plant"), Options(task="power-component")
  assert plant.simplified("noElectricalAction") and not power.simplified("noElectricalAction")
  assert plant.simplified("teleportAction") and not plant.simplified("openContainers")
  own = Options(simplifications=("openContainers", "openDoors"))
  assert own.simplification_string == "openContainers,openDoors"
  assert own.simplified("openContainers") and not own.simplified("teleportAction")


def test_prompts_list_what_the_options_allow(tmp_path: pathlib.Path):
  file = tmp_path / "examples.txt"
  file.write_text("EXAMPLE ONE\n")
  family = base.family("scienceworld")

  def told(**changes):
    observation = base.Observation("GOAL\nROOM", "ROOM", goal="GOAL")
    view = base.View((), base.AttemptLog(0, observation))
    return family.prompts(Options(**changes)).play(view)[0].content

  assert "teleport to" in told() and "connect X" not in told()
  assert "connect X" in told(task="power-component")
  assert "teleport" not in told(simplifications=()) and "connect X" in told(simplifications=())
  assert "EXAMPLE" not in told() and "EXAMPLE ONE" in told(examples=str(file))
  assert told().endswith("GOAL\nROOM") and told(max_calls=77).count("77") == 1
  assert "<action>" in told(style="full") and "<action>" not in told()
