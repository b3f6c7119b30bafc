"""A part of a mix plays as it does alone, all parts get their share of seeds, and numbers keep them apart."""

import collections
import dataclasses
import pickle

import numpy as np
import pytest

from experiments import base as configs
from memrl_jax.envs import base, darkroom, minesweeper, mix, panel, pool, webshop_tasks
from memrl_jax.methods import baselines
from memrl_jax.rollout import collect, policies
from memrl_jax.types import Attempt, Trial

FIRST = base.EVAL_SEEDS[0]
THREE = "near=darkroom(size=3), boxes=sokoban(boxes=1), mines=minesweeper(turns=9)"


def own_seeds(options, seeds):
  """Part name -> the seeds it is given."""
  found = collections.defaultdict(list)
  for seed in seeds:
    part, own = mix.locate(options, seed)
    found[part.name].append(own)
  return found


# Seeds.


def test_training_deals_seeds_in_turn_and_every_part_gets_each_of_its_own_once():
  found = own_seeds(mix.Options(THREE), range(300))
  assert {name: sorted(own) for name, own in found.items()} == {
    name: list(range(100)) for name in ("near", "boxes", "mines")
  }
  last = own_seeds(mix.Options(THREE), range(65_500, 65_536))
  assert max(map(max, last.values())) < base.TRAIN_SEEDS[1]


def test_families_that_count_through_their_tasks_play_all_of_them_in_a_mix():
  # Given the seed itself, two parts would see every other level only.
  options = mix.Options("a=minihack(levels=4), b=minihack(levels=4)")
  described = {mix.FAMILY.describe(options, seed) for seed in range(8)}
  assert len(described) == 8


@pytest.mark.parametrize("half", ["test", "dev"])
@pytest.mark.parametrize(
  "parts", ["darkroom, sokoban", THREE, "darkroom, lab, minesweeper, sokoban"]
)
def test_every_start_of_the_panel_is_dealt_evenly_over_the_parts_own_panels(parts, half):
  options, seeds = mix.Options(parts), getattr(panel.load("mix-v1"), half)
  for part in options.parsed:
    counts_S = np.cumsum([mix.locate(options, seed)[0] == part for seed in seeds])
    fair_S = np.arange(1, len(seeds) + 1) / len(options.parsed)
    assert np.abs(counts_S - fair_S).max() < 1
    own = own_seeds(options, seeds)[part.name]
    assert own == list(getattr(panel.load(f"{part.family.name}-v1"), half)[: len(own)])


def test_the_panel_counts_so_that_it_can_be_dealt():
  assert panel.load("mix-v1").seeds == tuple(range(FIRST, FIRST + 1024))
  panel.check_tasks(panel.load("mix-v1"))


def test_webshop_keeps_its_own_halves():
  options = mix.Options("webshop, minihack")
  for half, split in (("test", "test"), ("dev", "dev")):
    own = own_seeds(options, getattr(panel.load("mix-v1"), half))["webshop"]
    assert {webshop_tasks.split(webshop_tasks.Options(), seed) for seed in own} == {split}
  own = own_seeds(options, range(100))["webshop"]
  assert {webshop_tasks.split(webshop_tasks.Options(), seed) for seed in own} == {"train"}


def test_any_seed_opens_a_task():
  for seed in (FIRST + 1023, FIRST + 1024, base.EVAL_SEEDS[1] - 1):
    assert mix.locate(mix.Options(THREE), seed)[1] >= FIRST
  assert mix.locate(mix.Options(THREE), FIRST + 1024) == mix.locate(mix.Options(THREE), FIRST)


# Playing.


def play(environment, prompts, player, seed, attempts=2):
  """All that is shown, said and answered in two attempts, task names aside."""
  told, past = [], ()
  for index in range(attempts):
    first = environment.reset(seed) if index == 0 else environment.retry()
    told.append(dataclasses.replace(first, task=""))
    log = base.AttemptLog(index, first)
    while not log.done:
      view = base.View(past, log, "history_and_reflection", tips=("look there",))
      response = player.play(view)
      result = environment.step(response)
      told += [prompts.play(view), prompts.extract.advise(view, "where?"), response, result]
      log.steps.append(base.Step(result.action, result))
    view = base.View(past, log)
    log.reflection = player.reflect(view)
    told += [prompts.reflect(view), prompts.tip(view), log.reflection, log.now]
    told += [prompts.extract.distill(view), prompts.extract.judge(view, 0.5)]
    past += (log,)
  return told


@pytest.mark.parametrize("style", ["brief", "full"])
def test_a_part_plays_in_a_mix_as_it_does_alone(style):
  styled = THREE.replace(")", f", style={style})")
  options = mix.Options(styled)
  mixed, prompts = mix.FAMILY.make(options), mix.FAMILY.prompts(options)
  for seed in range(6):
    part, own = mix.locate(options, seed)
    together = play(
      mixed, prompts, mix.FAMILY.players["random"](options, np.random.default_rng(seed)), seed
    )
    alone = play(
      part.family.make(part.options),
      part.family.prompts(part.options),
      part.family.players["random"](part.options, np.random.default_rng(seed)),
      own,
    )
    assert together == alone


def test_players_read_the_task_names_of_their_own_part():
  # WebShop's solver finds its goal by the name of the task; a mix puts its part's name before it.
  options = mix.Options("shop=webshop, boxes=sokoban(style=full)")
  environment, player = mix.Mix(options), mix.Player("solver", options, np.random.default_rng(0))
  log = base.AttemptLog(0, environment.reset(0))
  assert log.initial.task.startswith("shop:")
  while not log.done:
    result = environment.step(player.play(base.View((), log)))
    log.steps.append(base.Step(result.action, result))
  assert log.success


def test_players_see_views_as_in_a_run_of_their_part(monkeypatch):
  seen = []

  class Recorder:
    def __init__(self, options, rng):
      self.play = seen.append

  monkeypatch.setitem(darkroom.FAMILY.players, "random", Recorder)
  options = mix.Options("one=darkroom, lab")
  environment, player = mix.Mix(options), mix.Player("random", options, np.random.default_rng(0))
  logs = [base.AttemptLog(0, environment.reset(4)), base.AttemptLog(1, environment.retry())]
  player.play(base.View(tuple(logs[:1]), logs[1]))
  assert [log.initial.task for log in (*seen[0].past, seen[0].current)] == ["darkroom/2"] * 2


def test_tasks_are_named_by_part_and_a_part_without_names_by_its_seed():
  environment = mix.Mix(mix.Options("one=darkroom, two=darkroom(size=4), lab"))
  names = [environment.reset(seed).task for seed in (9, 10)]
  assert names == ["one:darkroom/3", "two:darkroom/3"]
  assert environment.retry().task == "two:darkroom/3"
  assert environment.reset(11).task.startswith("lab:key-0/")


def test_each_part_keeps_its_number_of_turns():
  options = mix.Options("a=darkroom(turns=2,start=random), b=minesweeper(turns=5)")
  environment = mix.Mix(options)
  assert environment.horizon == 5
  lengths = []
  for seed in (0, 1):
    environment.reset(seed)
    results = [environment.step("")]  # no response is well formed: nobody wins
    while not results[-1].done:
      results.append(environment.step(""))
    lengths.append(len(results))
  assert lengths == [2, 5]


def test_a_mix_opens_first_and_closes_all_parts_it_opened(monkeypatch):
  closed = []

  def close(self):
    closed.append(type(self))
    raise OSError("stuck")

  for kind in (darkroom.Darkroom, minesweeper.Minesweeper):
    monkeypatch.setattr(kind, "close", close)
  environment = mix.Mix(mix.Options("darkroom, minesweeper, sokoban"))
  with pytest.raises(RuntimeError, match="call reset"):
    environment.retry()
  environment.reset(0)
  environment.reset(1)
  with pytest.raises(OSError, match="stuck"):
    environment.close()
  assert set(closed) == {darkroom.Darkroom, minesweeper.Minesweeper}


def test_a_rollout_of_a_mix_is_counted_by_part():
  options = mix.Options(THREE)
  assert pickle.loads(pickle.dumps((mix.FAMILY.make, options))) == (mix.Mix, options)
  policy = policies.players(lambda rng: mix.FAMILY.players["mixture"](options, rng), 0)
  with pool.EnvPool(mix.FAMILY, options, isolation="inline") as envs:
    trials = collect.collect(
      [Trial("mix", seed, seed, 0) for seed in range(30)],
      baselines.trial(1),
      lambda trial, request: policy,
      envs,
      mix.FAMILY.prompts(options),
      horizon=mix.Mix(options).horizon,
      seed=(0,),
    )
  numbers = mix.by_part(trials)
  assert [numbers[f"{name}/trials"] for name in ("near", "boxes", "mines")] == [10, 10, 10]
  near = [trial.attempts[0].success for trial in trials[::3]]
  assert numbers["near/success"] == np.mean(near) > 0


# Numbers.


def test_numbers_by_part():
  def trial(task, *attempts, void=None):
    played = [Attempt(won, 0.0, reward, turns) for won, reward, turns in attempts]
    return Trial("mix", 0, 0, 0, attempts=played, task=task, void=void)

  trials = [
    trial("a:x/1", (False, 0.0, 5), (True, 1.0, 3)),  # solved after 5 + 3 turns
    trial("a:x/2", (True, 2.0, 2)),
    trial("a:x/3", (False, 0.0, 9)),
    trial("a:x/3", void="crash"),
    trial("b:y/1", (False, -1.0, 4)),
    trial("", void="crash"),
  ]
  assert mix.by_part(trials) == {
    "a/trials": 3,
    "a/void": 1,
    "a/success": 2 / 3,
    "a/reward": 0.75,  # of 4 attempts
    "a/turns_solved": 5.0,  # (8 + 2) / 2
    "b/trials": 1,
    "b/void": 0,
    "b/success": 0.0,
    "b/reward": -1.0,
    "unopened/void": 1,
  }
  assert mix.by_part([dataclasses.replace(one, env="lab") for one in trials]) == {}


# Options.


def test_options_of_parts_are_read_as_their_types():
  text = (
    " mines=minesweeper( turns = 9,released_parsing=true, style=full ), "
    "power=scienceworld(simplifications=easy,noElectricalAction, variations=0),swe(command_s=2)"
  )
  mines, power, swe = mix.Options(text).parsed
  assert (mines.options.turns, mines.options.released_parsing, mines.options.style) == (
    9,
    True,
    "full",
  )
  assert power.options.simplifications == ("easy", "noElectricalAction")
  assert (power.options.variations, swe.name, swe.options.command_s) == (0, "swe", 2.0)


@pytest.mark.parametrize(
  ("parts", "sentence"),
  [
    ("", "cannot be read at ''; write them as"),
    ("darkroom; sokoban", "cannot be read at 'darkroom; sokoban'; write them as"),
    ("darkroom, a=sokoban(boxes=1", r"cannot be read at 'a=sokoban\(boxes=1'; write them as"),
    ("a=pacman", "part a of the mix: environment 'pacman' is not known; choose one of"),
    (
      "a=darkroom(width=3)",
      "part a of the mix: option 'width' is not known; choose from size, start",
    ),
    ("a=darkroom(3)", "part a of the mix: option '3' is not known; choose from size, start"),
    ("a=darkroom(size=big)", "part a of the mix: size takes a whole number, not 'big'"),
    ("a=minesweeper(released_parsing=yes)", "released_parsing takes true or false, not 'yes'"),
    ("a=darkroom(size=3,size=4)", "part a of the mix: option size is set twice"),
    ("a=darkroom(size=99)", "part a of the mix: a room of 99x99 cannot be shown"),
    ("darkroom, darkroom(size=3)", "two parts are called darkroom; give one another name"),
    ("a=mix(parts=darkroom)", "part a is itself a mix; name its parts here instead"),
    ("darkroom, sokoban(style=full)", r"do not mix, .* \(darkroom is brief, sokoban is full\)"),
  ],
)
def test_wrong_parts_are_said_in_a_sentence(parts, sentence):
  with pytest.raises(ValueError, match=sentence) as raised:
    mix.Options(parts)
  assert "\n" not in str(raised.value)


def test_a_player_that_a_part_lacks_is_said_with_those_that_all_have():
  options = mix.Options("darkroom, sokoban")
  with pytest.raises(
    ValueError, match=r"darkroom of the mix has no player 'solver'; .* have mixture, random"
  ):
    mix.FAMILY.players["solver"](options, np.random.default_rng(0))


def test_one_override_sets_the_parts_and_evaluation_may_have_others():
  config = configs.new("zeroshot", "mix")
  text = "key=lab(family=key-3), lamp=lab(family=lamp-0)"
  configs.override(
    config,
    [
      "model.checkpoint=tiny:lab",
      "train.updates=0",
      f"env.parts={text}",
      f"eval.options.parts={text.replace(')', ',split=heldout)')}",
    ],
  )
  settings = configs.settings(config)
  assert [part.options.family for part in settings.env.options.parsed] == ["key-3", "lamp-0"]
  assert mix.FAMILY.parts(settings.env.options) == 2
  (changes,) = settings.eval.options
  assert [part.options.split for part in mix.Options(changes[1]).parsed] == ["heldout"] * 2
