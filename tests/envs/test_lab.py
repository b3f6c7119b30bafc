import collections
import dataclasses
import re

import numpy as np
import pytest

from experiments.tiny import imitate, tips
from memrl_jax.envs import base, lab, lab_players
from memrl_jax.envs import lab_world as world
from memrl_jax.envs.lab import FAMILY, Options
from tests.envs import trials

# The key lies in the kitchen's jar, the report in the attic's case; it names gold.
TASK = world.Task(
  name="hand",
  chain="key",
  hidden=("kitchen", "jar"),
  switch="attic",
  start="hall",
  samples=("red", "blue", "gold", "black"),
  right="gold",
  code="7",
  clutter=((("hall", "chest"), "pen"),),
)
PATH = (
  *("go kitchen", "open jar", "take key", "go attic"),
  *("unlock case", "read report", "go lab", "focus gold"),
)


def walk(actions, task=TASK, **options):
  """The results of some actions at a given task."""
  environment = lab.Lab(Options(family=f"{task.chain}-0", **options))
  environment.open(task)
  return [environment.step(f"<action>{action}</action>") for action in actions]


def episode(options, name, seed, tips=(), player_seed=0):
  """(log of one attempt of a player who is shown tips at every turn, its remark)."""
  environment, prompts = FAMILY.make(options), FAMILY.prompts(options)
  player = FAMILY.players[name](options, np.random.default_rng([seed, player_seed]))
  log = base.AttemptLog(0, environment.reset(seed))
  while not log.done:
    result = environment.step(player.play(base.View((), log, tips=tips)))
    log.steps.append(base.Step(result.action, result))
  return log, prompts.parse_tip(player.reflect(base.View((), log)))[0]


def test_the_chain_of_finds_is_worth_a_hundred_at_its_end_only():
  results = walk(PATH)
  assert [r.reward for r in results] == [0.0] * 7 + [100.0]
  assert [r.score for r in results] == [0, 0, 0.25, 0.25, 0.5, 0.75, 0.75, 1]
  assert [r.note for r in results] == ["", "key", "ok", "", "report", "gold", "", "won"]
  assert [r.success for r in results] == [r.done for r in results] == [False] * 7 + [True]
  paid = walk(PATH, progress=10.0)
  assert [r.reward for r in paid] == [0, 0, 10, 0, 10, 10, 0, 100]


def test_lamp_and_code_are_found_in_the_world_and_not_assumed():
  lamp = TASK._replace(chain="lamp")  # the report in the kitchen's jar, the lamp in the attic
  notes = [r.note for r in walk(["use lamp", "go kitchen", "open jar", "read report"], lamp)]
  assert notes == ["bad", "", "report", "dark"]
  path = ["go kitchen", "open jar", "go attic", "use lamp", "go kitchen", "read report"]
  results = walk([*path, "go lab", "focus gold"], lamp)
  assert [r.score for r in results] == [0, 0.25, 0.25, 0.5, 0.5, 0.75, 0.75, 1]
  code = TASK._replace(chain="code")
  path = ["go attic", "enter 6", "enter 7", "read report", "go lab", "focus gold"]
  assert [r.note for r in walk(path, code)] == ["", "bad", "report", "gold", "", "won"]
  assert walk(["go kitchen", "open jar"], code)[-1].note == "code 7"


@pytest.mark.parametrize("colour", ["gold", "red"])
def test_focusing_before_reading_loses_whatever_the_colour(colour):
  last = walk([*PATH[:5], "go lab", f"focus {colour}"])[-1]
  assert (last.reward, last.done, last.success, last.score) == (-100.0, True, False, 0.5)
  assert walk([*PATH[:-1], "focus red"])[-1].reward == -100.0  # read, but not heeded


def test_malformed_turns_are_free_of_charge_and_use_up_time():
  environment = lab.Lab(Options(turns=4))
  environment.open(TASK)
  responses = ["go kitchen", "<action>go</action>", "<action>go hall kitchen</action>", "<action>"]
  results = [environment.step(response) for response in responses]
  assert [(r.reward, r.valid, r.note) for r in results] == [(0.0, False, "malformed")] * 4
  assert [r.done for r in results] == [False] * 3 + [True]
  assert results[-1].observation == lab.Lab(Options()).open(TASK)
  said = "I will <action> Go to the KITCHEN </action>"
  assert lab.parse(said) == "go kitchen" and lab.parse("<action>focus on gold</action>")


def test_admissible_is_all_that_has_an_effect():
  """Every other action of the grammar is "bad" and leaves the state as it was."""
  for chain, name in (("key", "key-3"), ("lamp", "lamp-3"), ("code", "code-3")):
    options = Options(family=name)
    for seed in range(3):
      log, _ = episode(options, "solver", seed)
      here = world.World(world.draw(options, seed), options.kinds)
      for step in log.steps:
        before = lab._anchor(here)
        allowed = here.admissible()
        everything = {f"{verb} {thing}" for verb in world.VERBS for thing in world.OBJECTS}
        assert set(allowed) <= everything and list(allowed) == sorted(set(allowed))
        assert {here.do(action) for action in sorted(everything - set(allowed))} == {"bad"}
        assert lab._anchor(here) == before and step.action in allowed
        assert here.do(step.action) == step.result.note, chain


def test_equal_anchors_are_equal_states_and_unequal_ones_are_not():
  opened = walk(["go attic", "go hall", "open chest", "take pen", "go attic", "go hall"])
  anchors = [result.observation.anchor for result in opened]
  assert anchors[1] == "at hall" and anchors[2] == anchors[1] + " chest pen"
  assert anchors[3] == anchors[5] == "at hall chest pen with pen" and anchors[4] != anchors[0]
  assert walk(PATH[:6])[-1].observation.anchor == "at attic case report with key goal gold"
  assert "open, pen" in opened[3].observation.text and "carry: pen" in opened[3].observation.text


def test_families_hide_things_in_different_places_and_variations_leave_them_there():
  for chain in world.CHAINS:
    secrets = world.secrets(chain, 3)
    assert len(set(secrets)) == len(secrets) == Options(family=f"{chain}-0").families == 90
    assert all(hidden[0] != switch for hidden, switch in secrets)
    for number in (0, 7, 89):
      drawn = world.tasks(Options(family=f"{chain}-{number}"))
      assert {(task.hidden, task.switch) for task in drawn} == {secrets[number]}
  # The colour is not worth learning by heart: every sample is the right one in some variation.
  many = world.tasks(Options(variations=64))
  counts = collections.Counter(task.right for task in many)
  assert set(counts) == set(world.COLOURS) and max(counts.values()) < 64 / 3


def test_splits_are_disjoint_and_more_training_leaves_held_out_tasks_alone():
  def bare(**options):
    return [task._replace(name="") for task in world.tasks(Options(family="code-5", **options))]

  train, heldout = bare(), bare(split="heldout")
  assert (len(set(train)), len(set(heldout))) == (8, world.HELDOUT)
  assert not set(bare(variations=40)) & set(heldout)
  assert bare(split="heldout", variations=40) == heldout and bare(variations=40)[:8] == train
  names = collections.Counter(world.draw(Options(), seed).name for seed in range(1600))
  assert set(names) == {f"key-0/train-{i}" for i in range(8)}
  assert max(abs(count - 200) for count in names.values()) < 5 * 13.2  # sqrt(1600 * 1/8 * 7/8)


def test_imitation_never_sees_the_families_kept_for_training():
  """Else the clone would know the places that reinforcement learning is to find."""
  recipe = imitate.RECIPES["lab"]
  numbers = [int(dict(changes)["family"].partition("-")[2]) for _, changes in recipe.mixes]
  assert len(numbers) > 20 and min(numbers) >= world.RESERVED
  assert int(Options().family.partition("-")[2]) < world.RESERVED


def test_imitation_shows_an_episode_what_earlier_ones_wrote_on_its_task(monkeypatch):
  monkeypatch.setattr(tips, "STRAY", 0.0)
  every = [Options(family="key-8"), Options(family="lamp-8")]
  make = FAMILY.players["mixture"]
  trials = tips.rounds(FAMILY, every, make, count=4, episodes=12, seed=(0,))
  written, most = collections.defaultdict(list), 0
  for start in range(0, len(trials), 12):  # one round of one family
    batch = trials[start : start + 12]
    for trial in batch:
      shown = trial.turns[0].memory
      assert set(shown) <= {text for _, text in written[trial.task]}
      assert all(turn.memory == shown for turn in trial.turns if turn.phase == "play")
      worth = dict((text, reward) for reward, text in written[trial.task])
      rewards = [worth[text] for text in shown]
      assert rewards == sorted(rewards, reverse=True) and len(set(shown)) == len(shown)
      most = max(most, len(shown))
    for trial in batch:
      written[trial.task].append((trial.attempts[0].reward, trial.tip))
  assert 2 <= most <= tips.MOST
  assert not any(trial.turns[0].memory for trial in trials[:24])


@pytest.mark.parametrize("split", ["train", "heldout"])
@pytest.mark.parametrize("chain", world.CHAINS)
def test_who_knows_the_family_solves_every_variation_within_eight_turns(chain, split):
  for number in range(0, 90, 9):
    options = Options(family=f"{chain}-{number}", split=split, turns=8)
    for task in world.tasks(options):
      environment = FAMILY.make(options)
      log = base.AttemptLog(0, environment.open(task))
      player = FAMILY.players["solver"](options, np.random.default_rng(0))
      while not log.done:
        result = environment.step(player.play(base.View((), log)))
        log.steps.append(base.Step(result.action, result))
      assert log.success and log.now.admissible


def test_success_is_rare_without_knowledge_and_sure_with_a_good_tip():
  """An explorer of 12 turns opens at most 9 of 18 containers, and a case is one of six."""
  options = Options()
  _, perfect = episode(options, "solver", 0)
  (room, kind), switch = world.secrets("key", 3)[0]
  assert perfect == f"won key {room} {kind} report {switch}"
  for name in ("explorer", "hasty"):
    alone = [episode(options, name, seed)[0] for seed in range(150)]
    helped = [episode(options, name, seed, (perfect,))[0] for seed in range(40)]
    assert np.mean([log.success for log in alone]) <= 0.04
    assert all(log.success for log in helped)


def test_a_tip_that_early_focus_loses_flips_what_the_hasty_do():
  options = Options()
  lost = [episode(options, "hasty", seed) for seed in range(60)]
  assert np.mean([log.steps[-1].result.note == "lost" for log, _ in lost]) > 0.9
  tip = next(text for log, text in lost if log.steps[-1].result.note == "lost")
  assert tip.startswith("lost") and "focus bad" in tip
  warned = [episode(options, "hasty", seed, ("lost focus bad",))[0] for seed in range(60)]
  assert not any(log.steps[-1].result.note == "lost" for log in warned)


def test_rooms_that_tips_call_empty_or_bad_are_searched_last():
  for seed in range(20):
    log, _ = episode(Options(), "explorer", seed, ("lost empty hall kitchen study",))
    opened = {room for room, _ in lab_players.Seen(log, Options()).opened}
    assert opened and not opened & {"hall", "kitchen", "study"}
  places = world.secrets("lamp", 3)[5]
  skip = [room for room in world.SEARCHED if room not in (places[1], places[0][0])]
  log, _ = episode(Options(family="lamp-5"), "explorer", 1, (f"lost bad {' '.join(skip)}",))
  tried = [s.result.note for s in log.steps if s.action == "use lamp"]
  assert len(tried) <= 2 and tried[-1] == "ok"


def test_a_wrong_guess_of_the_code_says_nothing_about_the_case():
  log = base.AttemptLog(0, lab.Lab(Options(family="code-0")).open(TASK._replace(chain="code")))
  results = walk(["go attic", "enter 3"], TASK._replace(chain="code"))
  log.steps = [base.Step(result.action, result) for result in results]
  said = lab_players.remark(base.View((), log), Options(family="code-0"))
  assert said == "<remark>lost</remark>"


@pytest.mark.parametrize("chain", world.CHAINS)
def test_pieces_found_by_different_episodes_add_up(chain):
  """Five failures of others make success far more likely than one does, and one than none."""
  options = Options(family=f"{chain}-2")
  found = {0: 0, 1: 0, 5: 0}
  for seed in range(60):
    tips = [episode(options, "explorer", seed, player_seed=1 + i)[1] for i in range(5)]
    for count in found:
      found[count] += episode(options, "explorer", seed, tuple(tips[:count]))[0].success
  assert found[0] <= 5 and found[0] + 10 < found[1] and found[1] + 10 < found[5]


@pytest.mark.parametrize("chain", world.CHAINS)
def test_a_remark_is_true_short_and_read_as_it_was_meant(chain):
  seen = set()
  for seed in range(80):
    options = Options(family=f"{chain}-{seed % 8}")
    log, text = episode(options, "hasty" if seed % 3 else "explorer", seed)
    hidden, switch = world.secrets(chain, 3)[seed % 8]
    facts = lab_players.told(base.View((), log, tips=(text,)), options)
    assert set(facts.hidden) <= {hidden} and set(facts.switches) <= {switch}
    assert hidden[0] not in facts.empty and switch not in facts.bad
    assert facts.careful == (log.steps[-1].result.note == "lost")
    assert len(text.split()) <= lab_players.FACTS
    seen |= {name for name in dataclasses.asdict(facts) if getattr(facts, name)}
  assert {"hidden", "empty", "careful"} <= seen


@pytest.mark.parametrize(
  "text", ["", "key", "key lab jar", "report " * 50, "<tips> empty empty hall"]
)
def test_players_take_any_tip(text):
  log, _ = episode(Options(), "explorer", 0, (text, "focus"))
  assert len(log.steps) <= 12


@pytest.mark.parametrize("chain", world.CHAINS)
def test_brief_prompts_are_short_and_give_no_place_away(chain):
  longest, starts = 0, set()
  for seed in range(40):
    options = Options(family=f"{chain}-{seed % 8}")
    prompts = FAMILY.prompts(options)
    log, _ = episode(options, "mixture", seed)
    starts.add(re.sub(r"|".join(world.SEARCHED), "R", prompts.play(base.View((), base.AttemptLog(0, log.initial)))[0].content))  # fmt: skip
    for view in (prompts.play(base.View((), log)), prompts.tip(base.View((), log))):
      longest = max(longest, len(trials.tokens(view[0].content, lab.SYMBOLS)))
  assert starts == {f"goal {chain}\nnow trial 1 R at R"}
  assert longest <= 60  # with the template's four: 64


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"family": "key-90"}, "number from 0 to 89"),
    ({"family": "door-1"}, "choose one of key, lamp, code"),
    ({"containers": 5}, "choose 1 to 4"),
    ({"split": "test"}, "choose train or heldout"),
    ({"turns": 0}, "nothing to play"),
    ({"progress": 200.0}, "between 0 and the 100"),
  ],
)
def test_wrong_options_are_refused_in_a_sentence(wrong, message):
  with pytest.raises(ValueError, match=message):
    Options(**wrong)
