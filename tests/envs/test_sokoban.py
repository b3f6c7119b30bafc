import time

import numpy as np
import pytest

from memrl_jax.envs import base, sokoban
from tests.envs import trials

ROW = """
1:########
2:#______#
3:#PX_O__#
4:#__X_O_#
5:#______#
6:########
"""


def room(text, **options):
  task = sokoban.read(text)
  options = sokoban.Options(
    height=task.height, width=task.width, boxes=task.boxes.bit_count(), **options
  )
  environment = sokoban.Sokoban(options)
  return environment, environment.open(task)


def test_show_is_the_inverse_of_read():
  text = ROW.strip()
  task = sokoban.read(text)
  assert sokoban.show(task, task.boxes << 7 | task.player) == text
  both = "1:#####\n2:#S√_#\n3:#__X#\n4:#__O#\n5:#####"
  task = sokoban.read(both)
  assert sokoban.show(task, task.boxes << 7 | task.player) == both


def test_rewards_are_summed_over_the_actions_of_a_turn():
  environment, _ = room(ROW)
  result = environment.step("<action>right, right, left</action>")
  # push, push onto the target (+1), walk back: -0.1 - 0.1 + 1 - 0.1
  assert result.reward == pytest.approx(0.7) and result.score == 0.5
  assert result.note == "push goal ok" and not result.done
  result = environment.step("<action>right, right, still</action>")
  # walk back, push off the target (-1), wait
  assert (
    result.reward == pytest.approx(-1.3) and result.note == "ok off still" and result.score == 0.0
  )


def test_a_turn_stops_at_the_win():
  text = "1:######\n2:#PXO_#\n3:######"
  environment, _ = room(text + "\n4:######")
  result = environment.step("<action>right right right</action>")
  assert result.reward == pytest.approx(-0.1 + 1 + 10)
  assert (result.success, result.done, result.action) == (True, True, "right")
  assert result.observation.text.startswith("1:######\n2:#_P√_#")


def test_released_pays_the_last_action_and_plays_on_after_the_win():
  environment, _ = room("1:######\n2:#PXO_#\n3:######\n4:######", released=True)
  result = environment.step("<action>right, right, left</action>")
  assert result.reward == pytest.approx(-0.1)  # only the last action, a plain step
  assert result.note.startswith("goal off ok") and result.success and result.done


def test_whole_words_and_the_substrings_of_the_release():
  for released, action in ((False, "left"), (True, "up")):
    environment, _ = room(ROW, released=released)
    assert environment.step("<action>setup the left</action>").action == action


def test_still_is_valid_and_garbage_is_not():
  environment, first = room(ROW)
  result = environment.step("<action>still</action>")
  assert result.valid and result.reward == pytest.approx(-0.1) and result.observation == first
  result = environment.step("<action>wait</action>")
  assert not result.valid and result.reward == pytest.approx(-0.1) and result.note == "bad"


def test_a_dead_position_ends_the_attempt_and_the_turn():
  text = "1:######\n2:#___O#\n3:#PX__#\n4:#____#\n5:######"
  environment, _ = room(text)
  result = environment.step("<action>right right left</action>")  # box against the right wall: fine
  assert not result.done
  environment.retry()
  environment.step("<action>up right</action>")
  result = environment.step("<action>down up up</action>")  # box on the bottom wall: never up again
  assert result.done and not result.success and result.note == "push stuck"
  assert result.action == "down"


def test_wall_and_blocked_box_keep_the_position():
  environment, first = room("1:########\n2:#______#\n3:#PXX_O_#\n4:#____O_#\n5:########")
  result = environment.step("<action>left right</action>")
  assert result.note == "wall wall" and result.observation == first
  assert result.reward == pytest.approx(-0.2)


def test_attempts_end_after_turns_and_after_max_steps():
  environment, _ = room(ROW, turns=2)
  assert not environment.step("").done and environment.step("").done
  environment, _ = room(ROW, max_steps=4)
  assert not environment.step("<action>still still still</action>").done
  result = environment.step("<action>still still still</action>")
  assert result.done and result.note == "still"


def forward_length(task):
  """Fewest moves to a solution by plain forward search; None when there is none."""
  start = task.boxes << 7 | task.player
  seen, layer, length = {start}, [start], 0
  while layer:
    if any(position >> 7 == task.targets for position in layer):
      return length
    after = {sokoban.push(task.floor, task.width, p, move) for p in layer for move in sokoban.MOVES}
    layer, length = list(after - seen), length + 1
    seen |= after
  return None


def test_reverse_play_agrees_with_forward_search():
  rng, dead = np.random.default_rng(0), 0
  for seed in range(12):
    task = sokoban.draw(sokoban.Options(), seed)
    left = sokoban.solvable(task.floor, task.width, task.targets)
    position = task.boxes << 7 | task.player
    assert left[position] == forward_length(task)
    for _ in range(30):  # wander, into dead ends too
      position = sokoban.push(task.floor, task.width, position, str(rng.choice(sokoban.MOVES)))
    wandered = task._replace(boxes=position >> 7, player=position & 127)
    dead += position not in left
    assert left.get(position) == forward_length(wandered)
  assert 0 < dead < 12


@pytest.mark.parametrize("boxes", [1, 2, 3])
def test_rooms_are_solvable_and_of_the_wanted_length(boxes):
  options = sokoban.Options(boxes=boxes)
  lengths = []
  for seed in range(60):
    task = sokoban.draw(options, seed)
    assert task.boxes.bit_count() == task.targets.bit_count() == boxes
    assert not task.boxes & task.targets  # every target starts empty
    left = sokoban.solvable(task.floor, task.width, task.targets)
    lengths.append(left[task.boxes << 7 | task.player])
  assert np.mean([5 <= length <= 21 for length in lengths]) > 0.95
  assert len(set(lengths)) > 5


def test_generation_is_fast():
  begun = time.process_time()
  for seed in range(1_000_000, 1_000_040):
    sokoban.draw(sokoban.Options(), seed)
  assert (time.process_time() - begun) / 40 < 0.015


def test_players_reach_their_rates():
  family, options = sokoban.FAMILY, sokoban.Options()
  names = ("random", "greedy", "greedy_forgetful", "solver", "mixture")
  rates = {name: trials.pass_at(family, options, name, 200) for name in names}
  assert rates["solver"][0] == 1.0 and rates["random"][0] < 0.1
  assert rates["greedy_forgetful"][2] == rates["greedy"][0] < 0.7
  assert rates["greedy"][2] > rates["greedy"][0] + 0.06  # memory pays, for systematic mistakes
  assert 0.4 < rates["mixture"][0] < 0.8


def test_greedy_heeds_the_stuck_cell_and_the_tried_moves():
  # box at (3,3), targets (2,5): the nearest push is right onto (3,4) or up onto (2,3), up comes first
  text = "1:######\n2:#___O#\n3:#_XP_#\n4:#____#\n5:######"
  player = sokoban.Greedy(sokoban.Options(height=5, boxes=1), np.random.default_rng(0))
  room = sokoban.read(text)
  free = player.plan(room, "", first=True)
  assert free == ["down", "left", "up"]
  assert player.plan(room, "stuck(2,3)", first=True) == ["up", "left", "left", "down", "right"]
  assert player.plan(room, "tried down left up lost", first=True) != free
  assert player.plan(room, "did down left up push lost", first=True) != free
  assert player.plan(room, "tried down left up lost", first=False) == free


def test_prompt_texts():
  environment, first = room("1:######\n2:#___O#\n3:#PX__#\n4:#____#\n5:######")
  options = sokoban.Options(height=5, boxes=1)
  prompts, log = sokoban.prompts(options), base.AttemptLog(0, first)
  for response in ("<action>left up right</action>", "broken"):
    result = environment.step(response)
    log.steps.append(base.Step(result.action, result))
  assert prompts.play(base.View((), log))[0].content == (
    "boxes 1\nnow trial 1\n1:######\n2:#_P_O#\n3:#_X__#\n4:#____#\n5:######\ndid left up right bad"
  )
  result = environment.step("<action>down up up</action>")
  log.steps.append(base.Step(result.action, result))
  view = base.View((), log)
  assert prompts.reflect(view)[0].content == (
    "reflect trial 1 left wall up right bad down push\n"
    "1:######\n2:#___O#\n3:#_P__#\n4:#_X__#\n5:######\nstuck"
  )
  player = sokoban.Greedy(options, np.random.default_rng(0))
  assert player.reflect(view) == "<remark>tried left up right bad down stuck(4,3)</remark>"


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (
      {"height": 4, "width": 4, "boxes": 3},
      "3 boxes need 7 free cells; a 4x4 room has 4: choose a larger size or fewer boxes",
    ),
    ({"height": 3}, "a 3x6 room cannot be used"),
    ({"height": 9, "width": 9, "boxes": 4}, "more than the 300000 that can be listed"),
    ({"min_solution": 9, "max_solution": 5}, "no solution has between 9 and 5 moves"),
    ({"turns": 0}, "turns 0"),
  ],
)
def test_options_refuse_in_a_sentence(options, message):
  with pytest.raises(ValueError, match=message):
    sokoban.Options(**options)


def test_a_room_with_no_cell_to_spare_can_be_drawn():
  task = sokoban.draw(sokoban.Options(height=4, width=5, boxes=2, min_solution=1), 0)
  assert task.floor.bit_count() >= 5
