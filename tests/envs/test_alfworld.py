"""ALFWorld without its package: tasks, published folders, generated problems, answers, prompts, turns."""

import concurrent.futures
import json
import os
import sys
import time
import types

import numpy as np
import pytest

from memrl_jax.envs import alfworld, alfworld_engine, alfworld_games, alfworld_text, base, panel
from memrl_jax.envs import alfworld_tasks as tasks
from memrl_jax.envs.alfworld_tasks import Options

# Tasks.


def test_training_and_evaluation_rooms_are_apart_and_types_go_where_they_can():
  plans = {
    split: {task.plan for task in tasks.generated(split)} for split in ("train", *tasks.SPLITS[1:])
  }
  assert plans["valid_seen"] <= plans["train"] and not plans["train"] & plans["valid_unseen"]
  assert len(plans["train"]) == 4 * 24 and len(plans["valid_unseen"]) == 4 * 6
  for split, size in tasks.SIZES.items():
    made = tasks.generated(split)
    assert len({str(task) for task in made}) == len(made) == size
    kinds = [task.kind for task in made]
    assert max(map(kinds.count, tasks.TYPES)) - min(map(kinds.count, tasks.TYPES)) <= 1
    assert all(task.plan < 100 for task in made if task.kind in ("heat", "cool"))
    assert all(200 < task.plan < 400 for task in made if task.kind == "look")


def test_each_half_of_the_panel_plays_all_its_games_before_one_comes_again():
  loaded, options = panel.load("alfworld-v1"), Options(data="generated")
  for half, split in ((loaded.test, "valid_unseen"), (loaded.dev, "valid_seen")):
    drawn = [tasks.draw(options, seed) for seed in half[: tasks.SIZES[split]]]
    assert len(set(drawn)) == len(drawn) and {task.split for task in drawn} == {split}
  assert {tasks.draw(options, seed).split for seed in range(0, 65_536, 999)} == {"train"}
  assert tasks.draw(options, 2**32 - 2).split == "valid_unseen"
  heat = Options(data="generated", split="valid_unseen", types=("pick_heat_then_place_in_recep",))
  assert {tasks.draw(heat, seed).kind for seed in range(300)} == {"heat"}
  few = Options(data="generated", games=5)
  assert len({tasks.draw(few, seed) for seed in range(50)}) == 5


@pytest.fixture
def published(tmp_path):
  def write(split, folder, trial, solvable=True):
    path = tmp_path / "json_2.1.1" / split / folder / trial / "game.tw-pddl"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"pddl_problem": "", "solvable": solvable}))

  for number in range(3):
    write("train", "pick_heat_then_place_in_recep-Egg-None-Fridge-8", f"trial_T{number}")
    write("train", "look_at_obj_in_light-Book-None-DeskLamp-301", f"trial_T{number}")
  write("train", "look_at_obj_in_light-Pen-None-DeskLamp-302", "trial_T9", solvable=False)
  write("train", "pick_and_place_with_movable_recep-Pen-Mug-Desk-302", "trial_T9")
  write("train", "pick_and_place_simple-AppleSliced-None-Fridge-9", "trial_T9")
  write("valid_unseen", "pick_two_obj_and_place-CD-None-Safe-308", "trial_T7")
  return tmp_path


def test_published_folders_are_read_as_the_package_reads_them(published, monkeypatch):
  options = Options(data=str(published))
  drawn = [tasks.draw(options, seed) for seed in range(6)]
  assert len(set(drawn)) == 6  # neither unsolvable, nor sliced, nor with a movable receptacle
  assert {(task.kind, task.plan) for task in drawn} == {("heat", 8), ("look", 301)}
  assert len({task.kind for task in drawn[:3]}) == 2  # mixed: by name, the first three are one type
  (last,) = {tasks.draw(options, seed) for seed in (70_000, 70_001)}
  assert str(last) == "pick_two_obj_and_place-CD-None-Safe-308/trial_T7"
  assert tasks.find(options, str(last)) == last
  monkeypatch.setenv(tasks.VARIABLE, str(published / "json_2.1.1"))
  assert tasks.draw(Options(), 70_000).id == "trial_T7"
  assert tasks.describe(Options(), 0) == tasks.describe(Options(data="generated"), 0)
  with pytest.raises(ValueError, match="has no solvable games of clean in train; run alfworld-dow"):
    tasks.draw(Options(types=("clean",)), 0)
  with pytest.raises(ValueError, match="no solvable games of any type in valid_seen"):
    tasks.draw(Options(split="valid_seen"), 0)


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"split": "test"}, "split 'test' is not known; choose one of auto, train"),
    ({"style": "brief"}, "style 'brief' is not known; choose one of full, chat"),
    ({"types": ("toast",)}, "type 'toast' is not known; choose from pick, look"),
    ({"turns": 0}, "turns 0 must be at least 1"),
    ({"games": -1}, "games -1 at least 0"),
    ({"failure_reward": 1.0}, "let success pay more"),
    ({"data": "/nowhere"}, "/nowhere has no ALFWorld games .* run alfworld-download"),
  ],
)
def test_options_check_themselves(change, said):
  with pytest.raises(ValueError, match=said):
    Options(**change)


# Generated games.

RULES = alfworld_games.Rules(
  holds={
    "Cabinet": frozenset({"Mug"}),
    "Fridge": frozenset({"Mug", "Egg"}),
    "Microwave": frozenset({"Mug", "Egg"}),
    "CounterTop": frozenset({"Mug", "Egg"}),
    "SinkBasin": frozenset({"Mug"}),
    "StoveBurner": frozenset(),
    "SideTable": frozenset({"Mug", "DeskLamp"}),
  },
  openable=frozenset({"Cabinet", "Fridge", "Microwave"}),
  able={
    "heatable": frozenset({"Egg"}), "coolable": frozenset({"Egg", "Mug"}),
    "cleanable": frozenset({"Mug"}), "toggleable": frozenset({"DeskLamp"}),
  },
)  # fmt: skip
LAYOUT = ["Cabinet", "Cabinet", "Sink", "Fridge", "SideTable", "CounterTop"]
SEEN = ["Mug", "Egg", "Microwave", "StoveBurner", "SinkBasin", "Sink", "Window", "DeskLamp"]


def furnished(kind, number=0):
  return alfworld_games.furnish(tasks.Task(kind, 7, "train", str(number)), LAYOUT, SEEN, RULES)


@pytest.mark.parametrize("kind", tasks.TYPES)
def test_a_room_has_what_its_task_needs_and_nothing_is_done_already(kind):
  rooms = [furnished(kind, number) for number in range(60)]
  assert rooms == [furnished(kind, number) for number in range(60)]
  assert len({(room.target, room.goal) for room in rooms}) > (2 if kind in ("pick", "pick2") else 0)
  for room in rooms:
    kinds = [r.kind for r in room.receptacles]
    assert kinds.count("SinkBasin") == 1 and kinds.count("StoveBurner") == 4
    place = {r.id: r.kind for r in room.receptacles}
    assert len(place) == len(kinds)
    assert all(o.kind in RULES.holds[place[o.within]] for o in room.objects)
    targets = [o for o in room.objects if o.kind == room.target]
    assert len(targets) >= (2 if kind == "pick2" else 1)
    assert all(place[o.within] != room.goal for o in targets)
    device = {"heat": "Microwave", "cool": "Fridge", "clean": "SinkBasin"}.get(kind)
    assert room.goal != device and (room.goal == "") == (kind == "look")
    assert (not device) or room.target in RULES.able[f"{kind}able"]


def test_a_problem_says_all_that_the_domain_asks_for():
  task = tasks.Task("heat", 7, "train", "0")
  thing = alfworld_games.Thing
  fridge, basin = (
    thing("Fridge_bar__plus_000", "Fridge"),
    thing("Sink_bar_1_bar_SinkBasin", "SinkBasin"),
  )
  egg = thing("Egg_bar__plus_002", "Egg", fridge.id)
  room = alfworld_games.Room(task, (fridge, basin), (egg,), "Egg", "SinkBasin")
  wanted = """(define (problem heat_7) (:domain alfred) (:objects
agent1 - agent
loc_0 - location
loc_1 - location
loc_2 - location
FridgeType - rtype
SinkBasinType - rtype
EggType - otype
Fridge_bar__plus_000 - receptacle
Sink_bar_1_bar_SinkBasin - receptacle
Egg_bar__plus_002 - object
)
(:init
(= (total-cost) 0)
(atLocation agent1 loc_2)
(receptacleType Fridge_bar__plus_000 FridgeType)
(receptacleAtLocation Fridge_bar__plus_000 loc_0)
(openable Fridge_bar__plus_000)
(receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType)
(receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_1)
(objectType Egg_bar__plus_002 EggType)
(inReceptacle Egg_bar__plus_002 Fridge_bar__plus_000)
(objectAtLocation Egg_bar__plus_002 loc_0)
(coolable Egg_bar__plus_002)
(heatable Egg_bar__plus_002)
(pickupable Egg_bar__plus_002)
(canContain FridgeType EggType)
)
GOAL)"""
  assert alfworld_games.problem(room, RULES, "GOAL)") == wanted


def test_walkthroughs_of_rooms_written_by_hand():
  thing = alfworld_games.Thing
  receptacles = (
    thing("Cabinet_bar__plus_000", "Cabinet"), thing("Cabinet_bar__plus_001", "Cabinet"),
    thing("Fridge_bar__plus_002", "Fridge"), thing("SideTable_bar__plus_003", "SideTable"),
    thing("CounterTop_bar__plus_004", "CounterTop"),
  )  # fmt: skip
  mugs = tuple(thing(f"Mug_bar__plus_{n:03d}", "Mug", "Cabinet_bar__plus_000") for n in (5, 6))
  lamp = thing("DeskLamp_bar__plus_007", "DeskLamp", "SideTable_bar__plus_003")

  def solved(kind, objects, goal):
    task = tasks.Task(kind, 7, "train", "0")
    room = alfworld_games.Room(task, receptacles, objects, "Mug", goal)
    return alfworld_games.walkthrough(room, RULES)

  # Numbers run backwards by id: the first cabinet is number 2, and so is the first mug.
  fetch = ["go to cabinet 2", "open cabinet 2", "take mug 2 from cabinet 2"]
  assert solved("pick", mugs, "Fridge") == [
    *fetch, "go to fridge 1", "open fridge 1", "move mug 2 to fridge 1",
  ]  # fmt: skip
  assert solved("pick2", mugs, "CounterTop") == [
    *fetch, "go to countertop 1", "move mug 2 to countertop 1",
    "go to cabinet 2", "take mug 1 from cabinet 2", "go to countertop 1", "move mug 1 to countertop 1",
  ]  # fmt: skip
  assert solved("cool", mugs, "SideTable") == [
    *fetch, "go to fridge 1", "cool mug 2 with fridge 1", "go to sidetable 1",
    "move mug 2 to sidetable 1",
  ]  # fmt: skip
  assert solved("look", (*mugs, lamp), "") == [*fetch, "go to sidetable 1", "use desklamp 1"]


# Answers.


@pytest.mark.parametrize(
  ("response", "action"),
  [
    ("I think so. <action>Go to  Fridge 1</action>", "go to fridge 1"),
    ("<action>look</action> or rather <ACTION>open fridge 1.</ACTION>", "open fridge 1"),
    ("<action>\n> `go to fridge 1`\nand then look</action>", "go to fridge 1"),
    ("<action>Action: inventory", "inventory"),
    ("<action>look<action>", "look"),
    ("<action></action>", ""),
    ("go to fridge 1", ""),
    ("", ""),
  ],
)
def test_answers(response, action):
  assert alfworld_text.parse(response, "full") == action


def test_a_conversation_may_answer_without_tags():
  assert alfworld_text.parse("go to fridge 1\nbecause", "chat") == "go to fridge 1"
  assert alfworld_text.parse("<action></action>", "chat") == ""


NOW = (
  "go to fridge 1",
  "move egg 1 to fridge 1",
  "take mug 2 from desk 1",
  "look",
  "use desklamp 1",
)
NOW += ("heat egg 1 with microwave 1", "examine egg 1")


@pytest.mark.parametrize(
  ("action", "meant"),
  [
    ("put egg 1 in/on fridge 1", "move egg 1 to fridge 1"),
    ("put the egg 1 in the fridge 1", "move egg 1 to fridge 1"),
    ("place egg 1 into fridge 1", "move egg 1 to fridge 1"),
    ("pick up mug 2 from desk 1", "take mug 2 from desk 1"),
    ("walk to the fridge 1", "go to fridge 1"),
    ("turn on desklamp 1", "use desklamp 1"),
    ("heat egg 1 in microwave 1", "heat egg 1 with microwave 1"),
    ("look at egg 1", "examine egg 1"),
    ("look around", "look"),
    ("put egg 2 in fridge 1", "put egg 2 in fridge 1"),  # means nothing here
    ("dance", "dance"),
  ],
)
def test_commands_are_understood_in_both_grammars(action, meant):
  assert alfworld_text.command(action, NOW) == meant
  older = ("put egg 1 in/on fridge 1",)  # as older files name it
  assert alfworld_text.command("move egg 1 to fridge 1", older) == older[0]


# Turns, on a stand-in for the engine.


class Engine:
  """Wins on "win"; knows "look" and "win"."""

  def __init__(self):
    self.told = []

  def open(self, task):
    self.told.clear()
    return self._state("-= Welcome =-\n\nYou are in a room.\n\nYour task is to: win.")

  def step(self, command):
    self.told.append(command)
    known = command in ("look", "win")
    return self._state("Fine." if known else alfworld.NOTHING, won=command == "win")

  def state(self):
    return ",".join(self.told)

  def _state(self, text, won=False):
    class State(dict):
      feedback = text

    return State(won=won, admissible_commands=["look", "win"])


@pytest.fixture
def made(monkeypatch):
  engines = []
  monkeypatch.setattr(alfworld_engine, "borrow", Engine)
  monkeypatch.setattr(alfworld_engine, "give_back", engines.append)
  return types.SimpleNamespace(
    make=lambda **changes: alfworld.AlfWorld(Options(data="generated", **changes)), returned=engines
  )


def test_an_attempt_from_first_text_to_success(made):
  environment = made.make(list_actions=True)
  first = environment.reset(0)
  assert (first.goal, first.task) == ("win.", "pick-321/train-0")
  assert first.text == "You are in a room.\n\nYour task is to: win.\nPossible actions: look, win"
  result = environment.step("<action>dance</action>")
  assert result.valid and result.action == "dance" and not result.note and result.reward == 0
  assert result.observation.text.startswith("Nothing happens.\nPossible")
  result = environment.step("hm")
  assert (result.valid, result.action, result.done) == (False, "", False)
  assert "inside <action> tags" in result.note
  result = environment.step("<action>win</action>")
  assert (result.success, result.done, result.reward, result.score) == (True, True, 1.0, 1.0)
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step("look")
  assert environment.retry() == first
  environment.close(), environment.close()
  assert len(made.returned) == 1


def test_how_attempts_end_without_success(made):
  environment = made.make(turns=2, failure_reward=-1.0)
  environment.reset(0)
  assert environment.step("").reward == 0
  result = environment.step("<action>look</action>")
  assert (result.done, result.success, result.reward) == (True, False, -1.0)
  environment = made.make(format_ends=True)
  environment.reset(0)
  assert not environment.step("<action>dance</action>").done
  result = environment.step("no tag")
  assert (result.done, result.success, result.reward) == (True, False, -1.0)


@pytest.mark.parametrize("style", tasks.STYLES)
def test_prompts_state_the_task_and_grow_by_what_happened(made, style):
  options = Options(data="generated", style=style)
  environment, prompts = made.make(style=style), alfworld.FAMILY.prompts(options)
  log = base.AttemptLog(0, environment.reset(0))
  before = prompts.play(base.View((), log))
  assert "Your task is to: win." in before[0].content and "40 turns" in before[0].content
  result = environment.step("<action>dance</action>")
  log.steps.append(base.Step(result.action, result))
  after = prompts.play(base.View((), log))
  if style == "chat":
    assert after[: len(before)] == before
  assert alfworld.NOTHING in after[-1].content


def test_players_take_what_they_need(made, monkeypatch):
  options = Options(data="generated")
  monkeypatch.setattr(alfworld_engine, "content", lambda task: {"walkthrough": ["a", "b"]})
  environment, seen = made.make(), []
  log = base.AttemptLog(0, environment.reset(0))
  for name in ("solver", "random"):
    player = alfworld.FAMILY.players[name](options, np.random.default_rng(0))
    seen += [player.play(base.View((), log)) for _ in range(20)]
  assert set(seen) == {"<action>a</action>", "<action>look</action>", "<action>win</action>"}
  monkeypatch.setattr(alfworld_engine, "content", lambda task: {})
  with pytest.raises(ValueError, match="train-0 has no walkthrough to play"):
    alfworld.FAMILY.players["solver"](options, None).play(base.View((), log))


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, "alfworld.gen.constants", None)
  monkeypatch.setitem(sys.modules, "alfworld", None)
  for known in ("/somewhere", None):
    with monkeypatch.context() as patch:
      patch.setenv(tasks.VARIABLE, known) if known else patch.delenv(tasks.VARIABLE, raising=False)
      with pytest.raises(
        ImportError, match=r"pip install 'memrl_jax\[alfworld\]' with g\+\+, cmake"
      ):
        alfworld_engine._package.__wrapped__()
      assert os.environ.get(tasks.VARIABLE) == known


# Patches, on stand-ins.


def at_once(work):
  """Whether two of eight threads were ever inside `work`'s context together."""
  inside, most = [], []

  def slow(*_, **__):
    inside.append(1)
    most.append(len(inside))
    time.sleep(0.002)
    inside.pop()

  call = work(slow)
  with concurrent.futures.ThreadPoolExecutor(8) as threads:
    list(threads.map(call, (f"text {number}" for number in range(16))))
  return max(most) > 1, len(most)


def test_one_thread_at_a_time_parses_and_translates():
  def parsing(slow):
    parser = alfworld_engine._Parser(types.SimpleNamespace(parse=slow))
    return lambda text: (parser.parse(text, rule_name="a"), parser.parse(text, rule_name="a"))

  def translating(slow):
    return lambda text: alfworld_engine._quiet(slow)("domain", text, optimize=True)

  assert at_once(lambda slow: slow) == (True, 16)
  assert at_once(parsing) == at_once(translating) == (False, 16)  # each text once


def test_a_translation_leaves_arguments_and_output_alone_also_when_it_fails():
  def rude(domain, problem, verbose):
    sys.argv, sys.stdout = ["translate.py"], None
    raise SystemExit(problem)

  before = sys.argv, sys.stdout
  with pytest.raises(SystemExit, match="bad"):
    alfworld_engine._quiet(rude)("domain", "bad")
  assert (sys.argv, sys.stdout) == before


def test_an_empty_folder_in_the_environment_stops_who_would_play_from_it_and_nobody_else(
  tmp_path, monkeypatch
):
  monkeypatch.setenv(tasks.VARIABLE, str(tmp_path))
  with pytest.raises(ValueError, match="has no ALFWorld games"):
    base.family("alfworld").make(tasks.Options())
  base.family("alfworld").make(tasks.Options(data="generated"))
  panel.check_tasks(panel.load("alfworld-v1"))
