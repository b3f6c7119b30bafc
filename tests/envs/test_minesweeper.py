import numpy as np
import pytest

from memrl_jax.envs import base, minesweeper
from tests.envs import trials


def board(mines, opened, **options):
  """A 3x3 board from given mines and opened cells."""
  options = minesweeper.Options(size=3, mines=len(mines), **options)
  environment = minesweeper.Minesweeper(options)
  return environment, environment.open(minesweeper.Task(frozenset(mines), frozenset(opened)))


def click(environment, row, col):
  return environment.step(f"<action>({row}, {col})</action>")


def test_rewards_by_hand():
  # * ? ?     mine at (1,1), safe cells 8, (2,2) open with number 1.
  # ? 1 ?     (1,3) has no mine near: it opens itself, (1,2), (2,3) (and meets (2,2)); then (2,3) has
  # ? ? ?     none near either and opens (3,2), (3,3); (3,2) has none near and opens (2,1), (3,1): a win.
  environment, first = board([(1, 1)], [(2, 2)])
  assert first.text == "1:???\n2:?1?\n3:???"
  result = click(environment, 1, 3)
  assert (result.reward, result.done, result.success, result.score) == (10.0, True, True, 1.0)
  assert result.observation.text == "1:?1.\n2:11.\n3:..."

  environment.retry()
  result = click(environment, 1, 2)  # number 1: a single cell
  assert (result.reward, result.done, result.score, result.note) == (0.5, False, 2 / 8, "ok")
  result = click(environment, 1, 2)  # already open
  assert (result.reward, result.done, result.valid, result.note) == (-1.0, False, True, "bad")
  result = click(environment, 1, 1)
  assert (result.reward, result.done, result.success, result.note) == (-0.1, True, False, "mine")
  assert result.observation.text == "1:*1?\n2:?1?\n3:???"


def test_a_cascade_that_does_not_win_pays_two():
  # mines (1,1), (3,1); (2,2) open shows 2. (1,3): none near, opens (1,2), (2,3); (2,3) none near,
  # opens (3,2), (3,3). (2,1) stays closed, so the game goes on: 6 of 7 safe cells.
  environment, _ = board([(1, 1), (3, 1)], [(2, 2)])
  result = click(environment, 1, 3)
  assert (result.reward, result.done, result.score) == (2.0, False, 6 / 7)
  assert result.observation.text == "1:?1.\n2:?2.\n3:?1."
  # with (2,3) open from the start the same click opens just (1,3) and (1,2): still more than one
  environment, _ = board([(1, 1), (3, 1)], [(2, 2), (2, 3)])
  assert click(environment, 1, 3).reward == 2.0


@pytest.mark.parametrize(
  ("response", "action", "valid", "released_valid"),
  [
    ("<action>(9,9)</action>", "(9,9)", False, True),
    ("<action>( 1 ,  2 )</action>", "(1,2)", True, True),
    ("<action>open (1,2) please</action>", "(1,2)", True, True),
    ("<action>1,2</action>", "", False, False),
    ("(1,2)", "", False, False),
  ],
)
def test_parsing(response, action, valid, released_valid):
  for released, wanted in ((False, valid), (True, released_valid)):
    environment, _ = board([(1, 1)], [(2, 2)], released_parsing=released)
    result = environment.step(response)
    assert (result.action, result.valid) == (action, wanted)
    if not valid:
      assert result.reward == -1.0 and not result.done


def test_two_pairs_are_ambiguous_except_as_released():
  response = "<action>(1,2) or (1,3)</action>"
  assert board([(1, 1)], [(2, 2)])[0].step(response).action == ""
  assert board([(1, 1)], [(2, 2)], released_parsing=True)[0].step(response).action == "(1,2)"


def test_turns_run_out():
  environment, _ = board([(1, 1)], [(2, 2)], turns=2)
  assert not environment.step("").done and environment.step("").done


def test_starts_look_like_the_releases():
  # experiments/lamer.md 2.2: on average 14 cells open at the start, 47 % of boards with a single open cell
  options = minesweeper.Options()
  tasks = [minesweeper.draw(options, seed) for seed in range(1500)]
  opened = np.array([len(task.opened) for task in tasks])
  assert abs(opened.mean() - 14) < 1.0 and abs((opened == 1).mean() - 0.47) < 0.05
  assert all(not task.mines & task.opened and len(task.mines) == 3 for task in tasks)
  assert opened.max() < 33


def test_deduction_by_hand():
  # 1:1??     (1,1)=1 says one mine in A={(1,2),(2,2)}; (2,1)=1 one in B={(1,2),(2,2),(3,2)};
  # 2:1??     B-A = {(3,2)} holds 0: safe. (3,1)=1: one in {(2,2),(3,2)}, minus {(3,2)}: (2,2) is a mine.
  # 3:1??
  board_ = minesweeper.read("1:1??\n2:1??\n3:1??")
  facts = minesweeper.deduce(minesweeper.Options(size=3, mines=1), board_, set())
  assert facts[frozenset([(3, 2)])] == 0 and facts[frozenset([(2, 2)])] == 1


def test_players_reach_their_rates():
  family, options = minesweeper.FAMILY, minesweeper.Options()
  names = ("random", "weak", "weak_forgetful", "solver", "mixture")
  rates = {name: trials.pass_at(family, options, name, 250) for name in names}
  assert 0.05 < rates["random"][0] < 0.17  # .10 in experiments/tiny/README.md
  assert rates["solver"][0] > 0.7
  assert rates["weak"][0] < 0.1 and rates["weak_forgetful"][2] == rates["weak"][0]
  assert rates["weak"][2] > rates["weak"][0] + 0.15  # memory pays, for systematic mistakes
  assert 0.15 < rates["mixture"][0] < 0.4


@pytest.mark.parametrize("memory", base.MEMORY_KINDS)
def test_obedient_players_never_open_a_named_mine(memory):
  family, options = minesweeper.FAMILY, minesweeper.Options()
  for name in ("weak", "solver"):
    for seed in range(60):
      player = family.players[name](options, np.random.default_rng(seed))
      hits = [
        step.action
        for log in trials.play(family, options, player, seed, memory=memory)
        for step in log.steps
        if step.result.note == "mine"
      ]
      assert len(hits) == len(set(hits))


def test_prompt_texts():
  environment, first = board([(1, 1)], [(2, 2)])
  prompts = minesweeper.prompts(minesweeper.Options(size=3, mines=1))
  log = base.AttemptLog(0, first)
  for cell in ((1, 2), (1, 2), (1, 1)):
    if cell == (1, 1):
      assert prompts.play(base.View((), log))[0].content == (
        "mines 1\nnow trial 1\n1:?1?\n2:?1?\n3:???\nplayed(1,2)(1,2)"
      )
    result = click(environment, *cell)
    log.steps.append(base.Step(result.action, result))
  assert prompts.reflect(base.View((), log))[0].content == (
    "reflect trial 1(1,2) ok(1,2) bad(1,1) mine\n1:*1?\n2:?1?\n3:???\nlost"
  )
  player = minesweeper.Weak(minesweeper.Options(size=3, mines=1), np.random.default_rng(0))
  assert player.reflect(base.View((), log)) == "<remark>mine(1,1) safe(1,2)</remark>"


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"mines": 35}, "35 mines do not fit: a 6x6 board takes 1 to 34"),
    ({"size": 10}, "10x10 cannot be shown"),
    ({"turns": 0}, "0 turns leave nothing"),
  ],
)
def test_options_refuse_in_a_sentence(options, message):
  with pytest.raises(ValueError, match=message):
    minesweeper.Options(**options)


def test_the_fullest_board_can_be_drawn():
  task = minesweeper.draw(minesweeper.Options(size=4, mines=14), 0)
  assert len(task.mines) == 14 and len(task.opened) == 1
