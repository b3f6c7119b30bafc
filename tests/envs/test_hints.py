import collections

import numpy as np
import pytest

from experiments.tiny import hinted, imitate
from memrl_jax.envs import base, hints, hints_players
from memrl_jax.envs import hints_world as world
from memrl_jax.envs.hints import FAMILY, Options
from memrl_jax.memory import embed
from tests.envs import trials

# Every box in the hall opens with pen and 3; on this one a report says pot and 1, which opens it too.
KIN = world.Kin("box", "hall", ("pen", "3"))
REPORTED = world.Task("hand", KIN, "red", ("pot", "1"))
SILENT = REPORTED._replace(report=None)


def walk(actions, task=REPORTED, **options):
  """The results of some actions at a given task."""
  environment = hints.Hints(Options(**options))
  environment.open(task)
  return [environment.step(f"<action>{action}</action>") for action in actions]


def episode(task, name="reader", tips=(), seed=0, options=None):
  """(log of one attempt of a player who is shown tips at every turn, its remark)."""
  options = options or Options()
  environment = FAMILY.make(options)
  player = FAMILY.players[name](options, np.random.default_rng([seed, 7]))
  log = base.AttemptLog(0, environment.open(task))
  while not log.done:
    result = environment.step(player.play(base.View((), log, tips=tips)))
    log.steps.append(base.Step(result.action, result))
  return log, FAMILY.prompts(options).parse_tip(player.reflect(base.View((), log)))[0]


@pytest.mark.parametrize(
  ("actions", "task", "notes", "scores"),
  [
    (("use pen", "enter 3"), SILENT, ["ok", "ok"], [0.5, 1]),
    (("use pot", "enter 1"), REPORTED, ["ok", "ok"], [0.5, 1]),
    (("use pen", "enter 3"), REPORTED, ["ok", "ok"], [0.5, 1]),
    (("use pen", "enter 1"), REPORTED, ["ok", "bad"], [0.5, 0.5]),  # halves of two procedures
    (("use pot",), SILENT, ["bad"], [0]),  # what another container's report said
    (("enter 3", "use pen", "enter 3"), SILENT, ["nothing", "ok", "ok"], [0, 0.5, 1]),
  ],
)
def test_the_familys_procedure_opens_every_container_and_a_report_only_its_own(
  actions, task, notes, scores
):
  results = walk(actions, task)
  assert [r.note for r in results] == notes and [r.score for r in results] == scores
  opened = scores[-1] == 1
  assert [r.done for r in results] == [False] * (len(actions) - 1) + [True]
  assert results[-1].success == opened and sum(r.reward for r in results) == float(opened)


def test_malformed_turns_use_up_time_and_leave_the_lock_alone():
  environment = hints.Hints(Options())
  first = environment.open(REPORTED)
  responses = ["use pen", "<action>use</action>", "<action>use pen enter 3</action>"]
  results = [environment.step(response) for response in responses]
  assert [(r.valid, r.note, r.done) for r in results] == [
    (False, "malformed", False),
    (False, "malformed", False),
    (False, "malformed", True),
  ]
  assert results[-1].observation == first
  assert hints.parse("So <action> Use the PEN </action>") == "use pen"


def test_towns_differ_and_in_a_town_no_two_families_share_a_word_or_a_procedure():
  towns = [world.town(number) for number in range(40)]
  for kins in towns:
    assert all(len(set(column)) == 6 for column in zip(*kins, strict=True))
  laws = collections.Counter((k.container, k.room, k.procedure) for kins in towns for k in kins)
  assert len(laws) > 150  # of 240 drawn from 432: a procedure cannot be guessed from the words


def test_splits_have_other_colours_of_the_same_families_and_reports_are_dealt_evenly():
  train, heldout = Options(), Options(split="heldout")
  every = {
    name: [world.draw(options, seed) for seed in range(400)]
    for name, options in (("train", train), ("heldout", heldout))
  }
  assert {t.kin for t in every["train"]} == {t.kin for t in every["heldout"]} == set(world.town(0))
  assert not {t.colour for t in every["train"]} & {t.colour for t in every["heldout"]}
  for family in range(6):
    copies = [world.task(train, family, "red", copy) for copy in range(40)]
    reports = [t.report for t in copies if t.report]
    assert len(reports) == 6  # .15 * 40
    assert all(tool != copies[0].kin.procedure[0] for tool, _ in reports) and len(set(reports)) > 1
  fewer = Options(copies=4)
  same = {world.draw(fewer, seed).name: world.draw(fewer, seed) for seed in range(99)}
  assert all(t in [world.task(train, f, t.colour, int(t.name[-1])) for f in range(6)] for t in same.values())  # fmt: skip


def test_imitation_never_sees_the_towns_kept_for_experiments():
  towns = [dict(changes)["town"] for _, changes in imitate.RECIPES["hints"].mixes]
  assert len(towns) > 50 and min(towns) >= world.RESERVED > Options().town


def test_intents_of_a_family_are_nearer_than_any_others_and_say_nothing_of_the_copy():
  """So similarity finds the family, and cannot choose among the memories of it."""
  drawn = {world.draw(Options(), seed).intent: world.draw(Options(), seed) for seed in range(600)}
  assert len(drawn) == 24
  goals = [hints.goal(Options(), task) for task in drawn.values()]
  vectors_ND = embed.Hash().embed(goals)
  kin_N = np.array([world.town(0).index(task.kin) for task in drawn.values()])
  near_NN = vectors_ND @ vectors_ND.T
  family_NN = kin_N[:, None] == kin_N[None]
  assert near_NN[family_NN].min() > near_NN[~family_NN].max() + 0.05
  words = [set(goal.split()) for goal in goals]
  assert {len(a - b) for a, i in zip(words, kin_N, strict=True) for b, j in zip(words, kin_N, strict=True) if i == j and a != b} == {1}  # fmt: skip


def success(options, tips, player="reader", tasks=600):
  """Share of tasks a scripted reader opens with what `tips` shows it of each."""
  every = [world.draw(options, seed) for seed in range(tasks)]
  return np.mean([episode(t, player, tips(t), n)[0].success for n, t in enumerate(every)])


def test_a_right_memory_helps_a_misleading_one_hurts_and_another_familys_does_nothing():
  """Alone a reader opens the .15 with a report, and 1 of 12 others: .22."""
  options = Options()
  seeds = range(600)
  given = hinted.shown(options, seeds, 0)
  won = {
    arm: np.mean([
      episode(world.draw(options, s), tips=given[arm][s], seed=s)[0].success for s in seeds
    ])
    for arm in hinted.ARMS
  }  # fmt: skip
  assert won["none"] == pytest.approx(0.15 + 0.85 / 12, abs=0.05)  # 3 standard errors
  assert won["right"] == won["right first"] == 1
  assert won["misleading"] == won["right last"] == 0  # the line is not what its own report says
  assert won["irrelevant"] == pytest.approx(won["none"], abs=0.05)
  # A tool that took hold leaves 2 of 3 digits: .15 + .85/2. A jammed one: 1 of 9, but the report's in a third.
  assert won["held"] == pytest.approx(0.575, abs=0.06)
  assert won["jammed"] == pytest.approx(0.15 * 2 / 3 + 0.85 / 9 + 0.15 / 3 / 9, abs=0.05)


def test_remarks_of_successes_help_and_those_of_failures_mislead_where_a_report_is_right():
  """Written by readers without a memory: a third of their successes are of the family's procedure."""
  options = Options(families=1)
  bank = [episode(world.draw(options, s), seed=s) for s in range(2000, 2600)]
  wins = [text for log, text in bank if log.success]
  jams = [text for log, text in bank if not log.success and len(text.split()) == 5]
  right = hinted.line(world.town(0)[0], world.town(0)[0].procedure)
  assert 0.2 < np.mean([text == right for text in wins]) < 0.5
  alone = success(options, lambda task: ())
  number = iter(range(10**6))
  assert success(options, lambda task: (wins[next(number) % len(wins)],)) > alone
  reported = [t for t in (world.draw(options, s) for s in range(900)) if t.report]
  kept = np.mean([episode(t, tips=(jams[n],))[0].success for n, t in enumerate(reported)])
  assert 0.55 < kept < 0.85  # 1 without a hint; a third of the wrong tools are the report's


@pytest.mark.parametrize(
  ("actions", "task", "said"),
  [
    (("use pen", "enter 3"), SILENT, "won box hall pen 3"),
    (("use pot", "enter 1"), REPORTED, "won box hall pot 1"),  # nothing tells it from the one above
    (("use pen", "enter 1"), SILENT, "lost box hall pen 1 bad"),
    (("use key",), SILENT, "lost box hall key bad"),
    (("enter 1", "open", "use"), SILENT, "lost box hall"),
  ],
)
@pytest.mark.parametrize("style", ["brief", "full"])
def test_a_remark_says_what_was_done_and_how_it_ended(actions, task, said, style):
  environment = hints.Hints(Options(style=style))
  log = base.AttemptLog(0, environment.open(task))
  results = walk(actions, task, style=style)
  log.steps = [base.Step(result.action, result) for result in results]
  assert hints_players.remark(base.View((), log)) == f"<remark>{said}</remark>"


def test_lines_are_read_in_their_order_and_may_be_anything():
  def done(*tips, task=REPORTED):
    return [step.action for step in episode(task, tips=tips)[0].steps]

  assert done("won box hall key 2", "won box hall pen 3") == ["use key"]
  assert done("won jar hall key 2", "won box attic key 2") == ["use pot", "enter 1"]
  assert done("lost box hall pot bad", "lost box hall pen 1 bad", "lost box hall pen 2 bad") == [
    "use pen",
    "enter 3",
  ]
  for text in ("", "won", "won box", "lost box hall pen", "won box hall 3 pen", "tip " * 90):
    assert done(text) == ["use pot", "enter 1"]
  assert done("won box hall pen 3", "won box hall key 1") == ["use pen", "enter 3"]


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_who_knows_the_town_opens_everything_in_two_turns(split):
  for town in range(12):
    options = Options(town=town, split=split, turns=2)
    logs = [
      episode(world.draw(options, s), "solver", seed=s, options=options)[0] for s in range(20)
    ]
    assert all(log.success for log in logs)


def test_brief_prompts_are_short_and_give_no_procedure_away():
  given = hinted.shown(Options(), range(60), 0)["right last"]
  longest = 0
  for seed, tips in enumerate(given):
    task = world.draw(Options(), seed)
    log, _ = episode(task, tips=tips, seed=seed)
    prompts = FAMILY.prompts(Options())
    start = prompts.play(base.View((), base.AttemptLog(0, log.initial)))[0].content
    report = f" report {' '.join(task.report)}" if task.report else ""
    assert start == f"goal open\nnow trial 1 {task.intent}{report}"
    for message in (*prompts.play(base.View((), log, tips=tips)), *prompts.tip(base.View((), log))):
      longest = max(longest, len(trials.tokens(message.content, hints.SYMBOLS)))
  assert longest <= 44


def test_full_style_says_the_same():
  environment = hints.Hints(Options(style="full"))
  first = environment.open(REPORTED)
  assert first.goal == "Open the red box in the hall." and first.goal in first.text
  assert "use pot, enter 1" in first.text
  text = FAMILY.prompts(Options(style="full")).play(base.View((), base.AttemptLog(0, first)))
  assert "Open the red box in the hall." in text[0].content and "pen 3" not in text[0].content


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    ({"town": -1}, "choose 0 to 4095"),
    ({"split": "test"}, "choose train or heldout"),
    ({"families": 7}, "1 to 6 families, not 7"),
    ({"copies": 0}, "nothing to play"),
    ({"reported": 1.5}, "between 0 and 1"),
    ({"style": "long"}, "prompt style"),
  ],
)
def test_wrong_options_are_refused_in_a_sentence(wrong, message):
  with pytest.raises(ValueError, match=message):
    Options(**wrong)
