"""What our side makes of a NetHack screen and of an answer; the game is played by a script."""

import enum
import sys
import types

import numpy as np
import pytest

from memrl_jax.envs import (
  base,
  minihack,
  minihack_game,
  minihack_players,
  minihack_tasks,
  minihack_text,
  pool,
)
from memrl_jax.envs.minihack_tasks import Options, Task, draw

CompassDirection = enum.Enum("CompassDirection", "N E S W NE SE SW NW")
Command = enum.Enum("Command", "PICKUP APPLY")
ACTIONS = (
  *("north", "east", "south", "west", "northeast", "southeast", "southwest", "northwest"),
  *("pickup", "apply"),
)
NAMES = {
  "@": b"human rogue called Agent",
  "#": b"corridor",
  ".": b"floor of a room",
  "+": b"closed door",
  "|": b"wall",
}


def screen(rows, column, row, message=b"You see here  a key.", health=(9, 12), opened=()):
  """The game's arrays for a map whose first line is row 0; cells of `opened` are open doors."""
  chars = np.full((21, 79), ord(" "), np.uint8)
  described = np.zeros((21, 79, 80), np.uint8)
  for y, line in enumerate(rows):
    for x, symbol in enumerate(line):
      chars[y, x] = ord(symbol)
      name = b"open door" if (x, y) in opened else NAMES.get(symbol, b"")
      described[y, x, : len(name)] = list(name)
  stats = np.zeros(27, np.int64)
  stats[[0, 1, 10, 11]] = column, row, *health
  letters, strings = np.zeros(55, np.uint8), np.zeros((55, 80), np.uint8)
  for at, (letter, item) in enumerate([(b"a", b"a +0 dagger"), (b"k", b"a key named Skeleton")]):
    letters[at] = letter[0]
    strings[at, : len(item)] = list(item)
  told = np.zeros(256, np.uint8)
  told[: len(message)] = list(message)
  return {
    "chars": chars, "screen_descriptions": described, "blstats": stats, "message": told,
    "inv_letters": letters, "inv_strs": strings,
  }  # fmt: skip


def text(seen, crop=2, actions=ACTIONS[:2], inventory=True, status=True):
  return minihack_text.write(
    minihack_text.read(seen, crop),
    minihack_text.message(seen),
    actions,
    inventory=inventory,
    status=status,
  )


def test_a_screen_is_written_as_the_game_shows_it():
  seen = screen(["  ####", "|..|  #", "|.@|.+#", "|...|"], 2, 2, opened=[(3, 2)])
  # Two cells around column 2, row 2: columns 0-4 and rows 0-4, so neither the door nor all of "#".
  assert text(seen) == (
    "Message: You see here a key.\n"
    "Position: column 2, row 2. Health: 9 of 12.\n"
    "Map:\n"
    "  ###\n"
    "|..|\n"
    "|.@|.\n"
    "|...|\n"
    "\n"
    "In view: @ you, # corridor, . floor of a room, | open door or wall\n"
    "You carry: a) a +0 dagger, k) a key named Skeleton\n"
    "Actions: 1 north, 2 east"
  )
  plain = text(seen, inventory=False, status=False)
  assert "Position" not in plain and "carry" not in plain
  assert "Message" not in text(screen(["@"], 0, 0, message=b""))


@pytest.mark.parametrize("column", [0, 1, 40, 77, 78])
@pytest.mark.parametrize("row", [0, 1, 10, 19, 20])
def test_the_agent_is_in_the_middle_at_every_border(column, row):
  lines = [["."] * 79 for _ in range(21)]
  lines[row][column] = "@"
  grid = minihack_text.read(screen(lines, column, row), 3).grid.split("\n")
  assert len(grid) == 7 and grid[3][3] == "@"
  inside = min(column, 3) + 1 + min(78 - column, 3), min(row, 3) + 1 + min(20 - row, 3)
  assert sum(len(line.strip()) for line in grid) == inside[0] * inside[1]


def test_what_is_out_of_view_changes_nothing():
  seen = screen(["....", ".@..", "...."], 1, 1)
  before = minihack_text.read(seen, 2)
  for key, poison in (("chars", ord("D")), ("screen_descriptions", ord("x"))):
    seen[key][:, 4:] = seen[key][4:] = poison
  assert minihack_text.read(seen, 2) == before


@pytest.mark.parametrize(
  ("answer", "wanted"),
  [
    ("north", ["north"]),
    ("  North. ", ["north"]),
    ("n", ["north"]),
    ("up", ["north"]),
    ("Move to the RIGHT", ["east"]),
    ("north-east", ["northeast"]),
    ("up left", ["northwest"]),
    ("sw", ["southwest"]),
    ("3", ["south"]),
    ("3 south", ["south"]),
    ("pick up the key", ["pickup"]),
    ("use key", ["apply"]),
    ("north, 2; then pick up", ["north", "east"]),  # an empty piece is not understood
    ("north then pick up\nfly\nwest", ["north", "pickup"]),
    ("0", []),
    ("11", []),
    ("kick", []),
    ("stay", []),  # known words, but there is no such action here
    ("nothing " * 20_000 + "north", ["north"]),  # long answers are read in no time
    ("upset", []),
    ("", []),
  ],
)
def test_actions_are_read_leniently(answer, wanted):
  for style in minihack_tasks.STYLES:
    response = f"I would go west.\n<action>{answer}</action>"
    assert minihack_text.parse(response, style, ACTIONS) == wanted


def test_without_tags_only_a_conversation_is_read_and_only_when_it_is_plain():
  for answer, wanted in (("go north", ["north"]), ("North of me is a key", [])):
    assert minihack_text.parse(answer, "chat", ACTIONS) == wanted
    assert minihack_text.parse(answer, "full", ACTIONS) == []
  # Words of the full keyboard are its own actions, not directions.
  keyboard = (*ACTIONS, "descend", "move", "far east")
  assert [minihack_text.named(t, keyboard) for t in ("move", "go downstairs", "move down", "far right")] == [
    "move", "descend", "south", "far east"
  ]  # fmt: skip


def test_levels_of_the_splits_never_meet_and_seeds_count_through_a_limited_number():
  seeds = [*range(50), 65_536, 2**32 - 2]
  played = {
    split: {draw(Options(split=split), seed).seed for seed in seeds}
    for split in minihack_tasks.SPLITS
  }
  assert all(len(found) == len(seeds) for found in played.values())
  assert not played["train"] & played["heldout"]
  few = Options(task="MiniHack-River-Narrow-v0", levels=7)
  assert len({draw(few, seed) for seed in seeds}) == 7
  assert str(draw(few, 18)) == "River-Narrow/train-4"
  assert Task("Room-5x5-v0", "heldout", 3).seed == 7


@pytest.mark.parametrize(
  ("wrong", "sentence"),
  [
    ({"task": "room"}, "MiniHack task 'room' is not an id"),
    ({"split": "test"}, "split 'test' is not known; choose one of train, heldout"),
    ({"style": "brief"}, "style 'brief' is not known"),
    ({"turns": 0}, "turns 0 is too small"),
    ({"crop": 0}, "crop 0 is too small"),
    ({"levels": 5, "split": "heldout"}, "levels 5 limits the training levels"),
    ({"reward_scale": 0.0}, "reward_scale 0 pays nothing"),
  ],
)
def test_options_that_cannot_be_played_say_why(wrong, sentence):
  with pytest.raises(ValueError, match=sentence):
    Options(**wrong)


# The environment on a scripted game.


class Game:
  """A corridor to the east: step 3 east wins, south dies, north is the game's own end with nothing."""

  actions = (*CompassDirection, *Command)

  def __init__(self):
    self.seeds, self.played, self.closed = [], [], False
    self.nethack = types.SimpleNamespace(set_initial_seeds=lambda *seeds: self.seeds.append(seeds))

  def look(self):
    line = "#" * self.at + "@" + "#" * (3 - self.at)
    return screen([line], self.at, 0, message=f"At {self.at}.".encode())

  def reset(self):
    self.at = 0
    return self.look(), {}

  def step(self, action):
    name = self.actions[action].name
    self.played.append(name)
    self.at += name == "E"
    status = {"S": "DEATH", "N": "ABORTED"}.get(
      name, "TASK_SUCCESSFUL" if self.at == 3 else "RUNNING"
    )
    reward = 1.0 if self.at == 3 else -0.01
    info = {"end_status": types.SimpleNamespace(name=status)}
    seen = self.look() if status == "RUNNING" else screen([""], 0, 0, message=b"")
    return seen, reward, status != "RUNNING", False, info

  def close(self):
    self.closed = True


@pytest.fixture
def opened(monkeypatch):
  def make(**options):
    game = Game()
    monkeypatch.setattr(minihack_game, "start", lambda name: game)
    return minihack.MiniHack(Options(**options)), game

  return make


def test_a_win_pays_and_nothing_else_does(opened):
  environment, game = opened(reward_scale=2.0)
  first = environment.reset(5)
  assert game.seeds == [(10, 10, False)] and first.task == "Room-Ultimate-5x5/train-5"
  steps = [environment.step("<action>east</action>") for _ in range(3)]
  assert [s.reward for s in steps] == [0, 0, 2] and [s.done for s in steps] == [False, False, True]
  assert steps[-1].success and steps[-1].score == 1 and steps[0].score == 0
  assert steps[-1].observation.text == "The task is done."
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step("east")
  assert environment.retry() == first and game.seeds[1] == game.seeds[0]
  environment.close()
  assert game.closed


@pytest.mark.parametrize(("way", "told"), [("south", "You died."), ("north", "ran out of moves")])
def test_other_ends_are_lost(opened, way, told):
  environment, _ = opened()
  environment.reset(0)
  result = environment.step(f"<action>{way}</action>")
  assert result.done and not result.success and result.reward == 0 and result.valid
  assert told in result.observation.text


def test_what_is_not_understood_costs_a_turn_and_no_move(opened):
  environment, game = opened(turns=2)
  first = environment.reset(0)
  result = environment.step("<action>dance</action>")
  assert (result.observation, result.valid, result.action, game.played) == (first, False, "", [])
  assert "not understood" in result.note and not result.done
  last = environment.step("<action>east</action>")
  assert last.done and not last.success and last.observation.text.startswith("Message: At 1.")


def test_several_moves_a_turn_end_with_the_game(opened):
  environment, game = opened(moves_per_turn=2)
  environment.reset(0)
  result = environment.step("<action>east, east, east</action>")
  assert result.action == "east, east" and "only the first 2" in result.note
  assert result.observation.text.startswith("Message: At 1. At 2.")
  assert environment.step("<action>east, south</action>").success
  assert game.played == ["E", "E", "E"]


def test_the_anchor_is_what_is_seen_and_carried(opened):
  environment, _ = opened(crop=1)
  anchors = [environment.reset(0).anchor]
  for _ in range(2):
    anchors.append(environment.step("<action>east</action>").observation.anchor)
  assert anchors[1] == anchors[2] != anchors[0]  # message and position are not in it
  assert "a key named Skeleton" in anchors[0]


@pytest.mark.parametrize("style", minihack_tasks.STYLES)
def test_prompts_state_the_goal_and_how_to_answer(opened, style):
  options = Options(task="KeyRoom-Dark-S5-v0", style=style, moves_per_turn=2, turns=9)
  environment, _ = opened()
  log = base.AttemptLog(0, environment.reset(0))
  prompt = minihack.prompts(options).play(base.View((), log))[-1].content
  for part in ("unlock the closed door", "<action>", "9 turns of up to 2", log.initial.text):
    assert part in prompt


def test_the_explorer_goes_round_a_wall_and_says_what_it_needs(opened):
  text = "Position: column 1, row 1. Health: 9 of 9.\nMap:\n...\n.@|\n..>\nIn view: @ you\nActions: 1 east"
  log = base.AttemptLog(0, base.Observation(text + "\nYou carry: nothing", ""))
  player = minihack_players.Explorer(Options(status=True, crop=1), np.random.default_rng(0))
  assert player.play(base.View((), log)) == "<action>southeast</action>"
  with pytest.raises(ValueError, match=r"config\.env\.status=True"):
    minihack_players.Explorer(Options(), np.random.default_rng(0))


def test_a_missing_package_is_named_with_the_command(monkeypatch):
  monkeypatch.setitem(sys.modules, "minihack", None)
  with pool.EnvPool(minihack.FAMILY, Options(), workers=1, isolation="inline") as envs:
    (answer,) = envs.run([pool.Call(envs.open(), "reset", 0)])
  assert isinstance(answer, pool.Failure) and "pip install" in answer.text
