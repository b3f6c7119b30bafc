import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memrl_jax.envs import base, prompting, rooms, rooms_players
from memrl_jax.envs import rooms_world as world
from memrl_jax.envs.rooms import FAMILY, Options
from tests.envs import trials

# Rows and columns 1 to 5. The key lies at (2,4), its door is (0,4); (4,0) is a door that it does not fit.
#
#     . . . d .      d: inside of the right door
#     . . . K .
#     . . . . .
#     d . # . .
#     S . . . .
ROOM = world.Task(
  name="rooms/key/amber",
  kind="key",
  theme="amber",
  treasure=(2, 4),
  right=(0, 4),
  others=((4, 0),),
  walls=frozenset({(4, 3)}),
  start=(5, 1),
)
MAZE = ROOM._replace(
  name="rooms/maze/pink", kind="maze", theme="pink", right=None, others=((3, 1),)
)
WRONG = ("go(2,4)", "go(2,4)", "take", "go(2,1)", "go(4,1)")  # with the key to the wrong door


def opened(task=ROOM, **options):
  environment = rooms.Rooms(Options(kind=task.kind, side=5, **options))
  return environment, base.AttemptLog(0, environment.open(task))


def walk(actions, task=ROOM, **options):
  """The log of some actions at a given task."""
  environment, log = opened(task, **options)
  for action in actions:
    result = environment.step(f"<action>{action}</action>")
    log.steps.append(base.Step(result.action, result))
  return log


def episode(options, name, seed, tips=(), player_seed=0):
  environment = FAMILY.make(options)
  log = base.AttemptLog(0, environment.reset(seed))
  player = FAMILY.players[name](options, np.random.default_rng([seed, player_seed]))
  while not log.done:
    result = environment.step(player.play(base.View((), log, tips=tips)))
    log.steps.append(base.Step(result.action, result))
  return log


def perfect(options, seed):
  """The entry that says all there is to know about the theme of a task."""
  task = world.draw(options, seed)
  first = "key" if options.kind == "key" else "goal"
  door = f" door{prompting.write(task.right)}" if task.right else ""
  return f"goal {task.theme} {first}{prompting.write(task.treasure)}{door}"


def notes(log):
  return [step.result.note for step in log.steps]


def test_the_key_opens_the_door_that_it_fits():
  log = walk(["go(2,4)", "go(2,4)", "take", "go(0,4)", "open"])
  assert notes(log) == ["", "key(2,4)", "ok", "door(0,4)", "ok(0,4)"]
  assert [step.result.reward for step in log.steps] == [0, 0, 0, 0, 1]
  assert [step.result.score for step in log.steps] == [0, 0.25, 0.5, 0.75, 1.0]
  assert log.success and log.done


def test_a_wrong_door_breaks_the_key_and_ends_the_attempt():
  log = walk([*WRONG, "open"])
  assert notes(log)[-1] == "bad(4,0)" and log.done and not log.success


def test_doors_stay_shut_without_the_key_and_kicks_do_nothing():
  log = walk(["open", "kick", "search", "take", "go(5,1)"])
  assert notes(log) == ["locked", "bad", "bad", "bad", "bad"]
  assert len({step.result.observation.anchor for step in log.steps}) == 1 and not log.done


def test_one_hatch_leads_out_and_the_other_is_a_pit():
  won = walk(["open", "go(2,1)", "go(3,1)", "go(2,4)", "go(2,4)", "open"], MAZE)
  assert notes(won)[0] == "bad" and notes(won)[-1] == "ok(2,4)" and won.success
  lost = walk(["go(3,1)", "open"], MAZE)
  assert notes(lost) == ["goal(3,1)", "bad(3,1)"] and lost.done and not lost.success
  assert lost.steps[-1].result.score == 0


def test_walking_is_by_stride_and_stops_at_a_wall_that_was_not_known():
  """Along the first row from (1,1): a wall at (1,4) shows when the agent stands at (1,3)."""
  task = ROOM._replace(start=(1, 1), right=(0, 1), walls=frozenset({(1, 4)}))
  log = walk(["go(1,5)", "go(1,5)"], task, stride=3)
  assert notes(log) == ["wall(1,4)", "key(2,4)"]  # then around it
  assert log.steps[0].result.observation.anchor == "at(1,3)"
  log = walk(["go(1,5)"], task._replace(walls=frozenset()), stride=3)
  assert notes(log) == [""] and log.now.anchor == "at(1,4)"


def test_what_lies_on_the_floor_is_seen_only_from_its_own_cell():
  log = walk(["go(3,4)", "go(3,4)"])
  beside = log.now
  assert beside.anchor == "at(3,4)" and " key" not in beside.text.split("You carry")[0]
  log = walk(["go(2,4)", "go(2,4)"])
  assert log.now.anchor.startswith("at(2,4) key(2,4)") and "key(2,4)" in log.now.text


@pytest.mark.parametrize("kind", world.KINDS)
def test_a_theme_hides_its_things_in_the_same_places_whatever_else_differs(kind):
  options = Options(kind=kind, theme="blue")
  drawn = [world.draw(options, seed) for seed in (*range(30), *range(70_000, 70_030))]
  assert len({(task.treasure, task.right, task.name) for task in drawn}) == 1
  for varies in ("start", "walls", "others"):
    assert len({getattr(task, varies) for task in drawn}) > 20
  secrets = [world.secrets(kind, number, 7) for number in range(3)]
  assert all(len({secret.treasure for secret in one.values()}) == 8 for one in secrets)
  assert len({one["blue"] for one in secrets}) == 3
  if kind == "key":
    assert all(len({secret.door for secret in one.values()}) == 8 for one in secrets)


@pytest.mark.parametrize("kind", world.KINDS)
@pytest.mark.parametrize("side", [5, 8])
def test_every_place_can_be_reached_and_is_told_apart(kind, side):
  for seed in range(60):
    task = world.draw(Options(kind=kind, side=side, family=seed), seed)
    free = set(world.inner(side)) - task.walls
    assert world._reach(free, task.start) == free
    doors = [task.right, *task.others] if task.right else []
    places = [task.treasure, task.start, *(world.inside(door, side) for door in doors)]
    places += [] if task.right else task.others
    assert set(places) <= free and task.start not in task.others
    wanted = [task.right or task.treasure, *task.others]
    assert side < 7 or len(wanted) == 5
    apart = 3 if task.right else 2
    assert all(world.far(a, b) >= apart for a in wanted for b in wanted if a != b)
    assert all(max(cell) <= 9 for cell in wanted)


@pytest.mark.parametrize("kind", world.KINDS)
def test_success_is_rare_without_knowledge_whatever_the_skill_and_sure_with_both(kind):
  """One of five doors or hatches is right: about .2 is the most that skill alone can win."""
  options = Options(kind=kind)
  rate = lambda name, tip: np.mean([  # noqa: E731
    episode(options, name, seed, (perfect(options, seed),) if tip else ()).success
    for seed in range(160)
  ])  # fmt: skip
  assert rate("random", False) <= 0.08
  assert 0.05 <= rate("explorer", False) <= 0.2 + 0.07
  assert rate("explorer", True) >= 0.9 and rate("solver", False) >= 0.85


@pytest.mark.parametrize("kind", world.KINDS)
def test_the_mixture_is_led_by_a_good_entry_and_not_by_a_useless_one(kind):
  options, number = Options(kind=kind), 240
  shown = {
    "none": lambda seed: (),
    "good": lambda seed: (perfect(options, seed),),
    "useless": lambda seed: (f"goal {world.draw(options, seed).theme} start(4,4) wall(2,3)",),
  }
  rate = {
    name: np.mean([episode(options, "mixture", s, tip(s)).success for s in range(number)])
    for name, tip in shown.items()
  }
  assert rate["none"] <= 0.16 and rate["good"] >= rate["none"] + 0.25
  assert rate["useless"] == rate["none"]  # the same players: nothing in it is about what they do


def test_a_picky_reader_heeds_its_own_theme_and_another_is_misled():
  options = Options(theme="red")
  view = lambda text: base.View((), base.AttemptLog(0, FAMILY.make(options).reset(1)), tips=(text,))  # noqa: E731
  assert rooms_players.told(view("goal red key(2,3)"), picky=True) == {"key": (2, 3)}
  assert rooms_players.told(view("goal pink key(2,3)"), picky=True) == {}
  assert rooms_players.told(view("goal pink key(2,3)"), picky=False) == {"key": (2, 3)}
  assert rooms_players.told(view("goal red kick bad"), picky=True) == {"kick": None}
  assert rooms_players.told(view("goal red and blue"), picky=False) == {}


def test_brief_prompts_stand_as_a_tiny_model_has_learned_them():
  log = walk(["go(2,4)", "go(2,4)", "take", "kick"])
  prompts = FAMILY.prompts(Options(side=5))
  view = base.View((), log, tips=("goal amber door(0,4)",))
  lived = " amber start(5,1) door(4,0)(2,1) key(2,4) ok kick"
  assert prompts.play(view)[0].content == (
    f"goal key\ntip:goal amber door(0,4)\nnow trial 1{lived} at(2,4) with key"
  )
  assert prompts.extract.distill(view)[0].content == (
    f"goal key\ntip 1:goal amber door(0,4)\nreflect trial 1{lived} lost"
  )
  assert prompts.extract.merge(["goal red kick bad"])[0].content == (
    "merge\ntip 1:goal red kick bad"
  )


@pytest.mark.parametrize("kind", world.KINDS)
def test_rows_are_short_and_made_of_symbols(kind):
  longest = 0
  for seed in range(60):
    options = Options(kind=kind, family=seed)
    prompts = FAMILY.prompts(options)
    log = episode(options, "mixture", seed)
    view = base.View((), log, tips=("goal red key(2,3) door(0,4)",))
    for messages in (prompts.play(view), prompts.extract.distill(view)):
      longest = max(longest, len(trials.tokens(messages[0].content, rooms.SYMBOLS)))
  assert longest <= 80


@pytest.mark.parametrize(
  ("said", "meant"),
  [
    ("go(2,3)", ("go", (2, 3))),
    ("go to (2, 3)", ("go", (2, 3))),
    ("Walk (0,4).", ("go", (0, 4))),
    ("pick up the key", ("take", None)),
    ("unlock the door", ("open", None)),
    ("go", None),
    ("open (2,3)", None),
    ("kick and open", None),
    ("go (2,3) (4,5)", None),
    ("go (12,3)", None),
  ],
)
def test_an_action_is_read_leniently_and_only_one(said, meant):
  assert rooms.parse(f"<action>{said}</action>") == meant


@given(st.integers(0, 2**32 - 2), st.data())
def test_any_actions_keep_the_world_sound(seed, data):
  options = Options(kind=data.draw(st.sampled_from(world.KINDS)), side=data.draw(st.integers(5, 8)))
  here = world.World(world.draw(options, seed), options.side, options.stride)
  cell = st.tuples(st.integers(0, 9), st.integers(0, 9))
  for verb, at in data.draw(st.lists(st.tuples(st.sampled_from(world.VERBS), cell), max_size=12)):
    before = here.at
    here.do(verb, at)
    assert here.at not in here.task.walls and here.at in world.inner(options.side)
    assert world.steps(before, here.at) <= (options.stride if verb == "go" else 0)
    assert set(here.met) <= set(here.things) and here.blocked <= here.task.walls
    if here.solved is not None:
      return


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"kind": "cave"}, "choose one of key, maze"),
    ({"theme": "grey"}, "choose one of any, red"),
    ({"family": 4096}, "choose 0 to 4095"),
    ({"side": 9}, "choose 5 to 8"),
    ({"turns": 0}, "choose 1 to 99"),
    ({"style": "rhyme"}, "choose one of brief"),
  ],
)
def test_wrong_options_are_refused_in_a_sentence(wrong, message):
  with pytest.raises(ValueError, match=message):
    Options(**wrong)


def test_options_are_checked_when_replaced():
  with pytest.raises(ValueError, match=r"config\.env\.stride"):
    dataclasses.replace(Options(), stride=0)
