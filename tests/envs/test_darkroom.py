import itertools

import numpy as np
import pytest

from memrl_jax.envs import base, darkroom
from tests.envs import trials


def at(goal, **options):
  environment = darkroom.Darkroom(darkroom.Options(**options))
  environment.open(darkroom.Task((3, 3), goal))
  return environment


def test_reaching_the_goal_ends_the_turn_and_pays_ten():
  environment = at((2, 3))
  result = environment.step("think <action>up, up</action>")
  assert (result.reward, result.done, result.success, result.score) == (10.0, True, True, 1.0)
  assert (result.note, result.observation.anchor) == (
    "(2,3)",
    "(2,3)",
  )  # the second move is not made


def test_walls_keep_the_position_and_four_turns_end_the_attempt():
  environment = at((5, 5))
  results = [environment.step("<action>up up</action>") for _ in range(4)]
  assert [r.note for r in results] == ["(2,3)(1,3)", "(1,3)(1,3)", "(1,3)(1,3)", "(1,3)(1,3)"]
  assert [r.done for r in results] == [False, False, False, True]
  assert [r.reward for r in results] == [0.0] * 4 and not results[-1].success


def test_malformed_turns_cost_a_turn_and_a_tenth():
  environment = at((5, 5))
  results = [environment.step("up left") for _ in range(4)]
  assert [(r.reward, r.valid) for r in results] == [(-0.1, False)] * 4
  assert results[-1].done and results[-1].observation.text == "(3,3)"


def test_words_are_whole_and_extra_moves_are_dropped():
  assert at((5, 5)).step("<action>setup the left, downstairs</action>").action == "left"
  assert at((5, 5)).step("<action>LEFT left left left</action>").action == "left left"


@pytest.mark.parametrize("start", ["center", "random"])
def test_splits_are_disjoint_and_complete(start):
  sides = {
    split: set(darkroom.tasks(darkroom.Options(start=start, split=split)))
    for split in ("all", "train", "heldout")
  }
  assert not sides["train"] & sides["heldout"]
  assert sides["train"] | sides["heldout"] == sides["all"]
  pairs = 24 if start == "center" else 600
  assert (len(sides["all"]), len(sides["heldout"])) == (pairs, pairs // 4)


def test_goals_are_uniform_over_the_other_cells():
  # 4800 draws over 24 goals: 200 each, standard deviation 13.8
  goals = [darkroom.draw(darkroom.Options(), seed).goal for seed in range(4800)]
  counts = np.unique(goals, axis=0, return_counts=True)[1]
  assert len(counts) == 24 and counts.min() > 140 and counts.max() < 260


def test_players_reach_the_measured_rates():
  # experiments/tiny/README.md: random walk .21/.36/.47; sweeper .32/.32/.32 blind, .34/.66/.93 with memory
  family, options = darkroom.FAMILY, darkroom.Options()
  rates = {
    name: trials.pass_at(family, options, name, 400)
    for name in ("random", "sweeper", "sweeper_blind", "mixture")
  }
  assert rates["sweeper"][2] > 0.85 and abs(rates["sweeper"][0] - 1 / 3) < 0.08
  assert abs(rates["random"][2] - 0.47) < 0.08
  assert rates["sweeper_blind"][2] == rates["sweeper_blind"][0]  # one path, three times
  assert rates["sweeper_blind"][2] < 0.704 < rates["sweeper"][2]  # no memoryless policy exceeds it
  assert 0.55 < rates["mixture"][2] < 0.8


def test_sweeper_reads_histories_as_well_as_reflections():
  family, options = darkroom.FAMILY, darkroom.Options()
  assert trials.pass_at(family, options, "sweeper", 200, memory="history_only")[2] > 0.85


def test_mixture_never_walks_one_path_three_times_on_purpose():
  family, options = darkroom.FAMILY, darkroom.Options()
  repeats = total = 0
  for seed in range(300):
    player = family.players["mixture"](options, np.random.default_rng([seed, 2]))
    logs = [log for log in trials.play(family, options, player, seed) if not log.success]
    paths = [darkroom.path(log) for log in logs]
    for one, other in itertools.pairwise(paths):
      total, repeats = total + 1, repeats + (one == other)
  assert total > 200 and repeats / total < 0.01


def test_prompt_texts():
  environment, prompts = at((1, 1)), darkroom.prompts(darkroom.Options())
  log = base.AttemptLog(0, base.Observation("(3,3)", "(3,3)"))
  for response in ("<action>up left</action>", "broken", "<action>up up</action>"):
    result = environment.step(response)
    log.steps.append(base.Step(result.action, result))
  assert prompts.play(base.View((), log))[0].content == (
    "room\nnow trial 1 path(3,3)(2,3)(2,2)(1,2)(1,2) at(1,2)"
  )
  assert prompts.reflect(base.View((), log))[0].content == (
    "reflect trial 1 path(3,3)(2,3)(2,2)(1,2)(1,2) lost"
  )
  log.reflection = "searched(2,3)"
  now = base.AttemptLog(1, log.initial)
  assert prompts.play(base.View((log,), now, "history_and_reflection"))[0].content == (
    "room\ntrial 1:path(3,3)(2,3)(2,2)(1,2)(1,2) lost\ntrial 1:searched(2,3)\n"
    "now trial 2 path(3,3) at(3,3)"
  )


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"size": 12}, "12x12 cannot be shown; choose a side from 2 to 9"),
    ({"start": "corner"}, "choose center or random"),
    ({"split": "test"}, "choose all, train or heldout"),
    ({"split": "train", "heldout_fraction": 0.01}, "holding out 0.01 of 24"),
    ({"turns": 0}, "0 turns of 2 moves"),
    ({"style": "long"}, "choose one of brief, full"),
  ],
)
def test_options_refuse_in_a_sentence(options, message):
  with pytest.raises(ValueError, match=message):
    darkroom.Options(**options)
