"""Claims that hold for every embedded environment."""

import dataclasses
import importlib
import subprocess
import sys

import numpy as np
import pytest

from memrl_jax.envs import base, prompting
from tests.envs import trials

# Families that the tiny models play; WebShop and ScienceWorld have tests of their own.
FAMILIES = [
  name
  for name in base.families()
  if hasattr(importlib.import_module(f"memrl_jax.envs.{name}"), "SYMBOLS")
]


def symbols(name):
  return importlib.import_module(f"memrl_jax.envs.{name}").SYMBOLS


def opened(name, **options):
  family = base.family(name)
  options = family.options(**options)
  return family, options, family.make(options)


@pytest.mark.parametrize("name", FAMILIES)
def test_group_members_stay_equal_after_reset_and_every_retry(name):
  family, options, one = opened(name)
  other = family.make(options)
  rng = np.random.default_rng(0)
  for seed in range(20):
    player = family.players["random"](options, rng)
    first = one.reset(seed)
    assert other.reset(seed) == first
    for _ in range(3):
      hidden = one._task
      log = base.AttemptLog(0, first)
      while not log.done:  # only `one` plays: `other` must not depend on what anybody did
        result = one.step(player.play(base.View((), log)))
        log.steps.append(base.Step(result.action, result))
      assert one.retry() == other.retry() == first
      assert one._task == other._task == hidden


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_response_gives_the_same_result_in_every_attempt(name):
  family, options, environment = opened(name)
  seen = []
  for attempt in range(3):
    observation = environment.reset(7) if attempt == 0 else environment.retry()
    log = base.AttemptLog(0, observation)
    player = family.players["random"](options, np.random.default_rng(3))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      log.steps.append(base.Step(result.action, result))
    seen.append(log.steps)
  assert seen[0] == seen[1] == seen[2]


def test_tasks_are_the_same_in_another_process_with_another_string_hash():
  code = (
    "from memrl_jax.envs import base\n"
    "for n in base.families():\n"
    "  f = base.family(n)\n"
    "  print([f.describe(f.options(), s) for s in (0, 1, 65536, 4294967294)])"
  )
  outputs = [
    subprocess.run(
      [sys.executable, "-c", code],
      env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for hash_seed in ("1", "2")
  ]
  here = [
    [base.family(n).describe(base.family(n).options(), s) for s in (0, 1, 65536, 4294967294)]
    for n in base.families()
  ]
  assert outputs[0] == outputs[1] == "".join(f"{line}\n" for line in here)


@pytest.mark.parametrize("name", FAMILIES)
def test_seeds_are_different_tasks(name):
  family = base.family(name)
  described = {family.describe(family.options(), seed) for seed in range(60)}
  few = {"darkroom": 15, "lab": 7}  # of 24 and 8 tasks
  assert len(described) > few.get(name, 55)


@pytest.mark.parametrize("memory", base.MEMORY_KINDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_brief_text_is_made_of_symbols_and_short(name, memory):
  family, options, _ = opened(name)
  seen, longest = [], 0
  for seed in range(25):
    player = family.players["mixture"](options, np.random.default_rng([seed, 4]))
    logs = trials.play(family, options, player, seed, memory=memory, seen=seen)
    seen += [log.reflection for log in logs if log.reflection]
  for text in seen:
    longest = max(longest, len(trials.tokens(text, symbols(name))))
  if memory == "reflection_only":
    limits = {
      "darkroom": 48,
      "hints": 60,
      "lab": 80,
      "minesweeper": 90,
      "rooms": 60,
      "sokoban": 105,
    }
    assert longest <= limits[name]


@pytest.mark.parametrize("name", FAMILIES)
def test_brief_responses_are_made_of_symbols_and_at_most_twelve_tokens(name):
  family, options, environment = opened(name)
  player = family.players["random"](options, np.random.default_rng(0))
  for seed in range(20):
    log = base.AttemptLog(0, environment.reset(seed))
    while not log.done:
      response = player.play(base.View((), log))
      assert len(trials.tokens(response, symbols(name))) <= 5
      result = environment.step(response)
      assert result.valid
      log.steps.append(base.Step(result.action, result))
    reflection = player.reflect(base.View((), log))
    assert len(trials.tokens(reflection, symbols(name))) + 1 <= 12  # with the stop token
    assert prompting.parse_reflection(reflection)[1]


@pytest.mark.parametrize("style", prompting.STYLES)
@pytest.mark.parametrize("name", FAMILIES)
def test_cleared_memory_is_the_prompt_of_a_first_attempt(name, style):
  family, options, environment = opened(name, style=style)
  prompts = family.prompts(options)
  first = base.AttemptLog(0, environment.reset(3))
  third = base.AttemptLog(2, environment.retry(), reflection="left over")
  for memory in base.MEMORY_KINDS:
    assert prompts.play(base.View((), third, memory)) == prompts.play(base.View((), first))
  past = dataclasses.replace(first, reflection="beware of (1,1)")
  assert prompts.play(base.View((past,), third)) != prompts.play(base.View((), third))


@pytest.mark.parametrize("name", FAMILIES)
def test_memory_kinds_show_what_they_say(name):
  family, options, _ = opened(name)
  player = family.players["random"](options, np.random.default_rng(5))
  log = next(
    logs[0]
    for logs in (trials.play(family, options, player, seed, attempts=1) for seed in range(50))
    if not logs[0].success
  )
  log.reflection = "REMEMBER"
  full = family.prompts(dataclasses.replace(options, style="full"))
  now = base.AttemptLog(1, log.initial)
  texts = {m: full.play(base.View((log,), now, m))[0].content for m in base.MEMORY_KINDS}
  shown = {m: ("REMEMBER" in text, "Action 1" in text) for m, text in texts.items()}
  assert shown == {
    "reflection_only": (True, False),
    "history_only": (False, True),
    "history_and_reflection": (True, True),
  }
  with pytest.raises(ValueError, match="memory 'all' is not known"):
    full.play(base.View((log,), now, "all"))


@pytest.mark.parametrize("name", FAMILIES)
def test_instruction_stands_before_the_request(name):
  family, options, environment = opened(name, style="full")
  view = base.View((), base.AttemptLog(0, environment.reset(0)), instruction="Think aloud.")
  text = family.prompts(options).play(view)[0].content
  assert 0 < text.index("Think aloud.") < text.rindex("<action>")


def test_play_shows_two_observations_and_reflection_shows_all():
  family, options, environment = opened("minesweeper", style="full", turns=9)
  log = base.AttemptLog(0, environment.reset(0))
  for _ in range(8):
    result = environment.step("<action>(9,9)</action>")  # no-op: the attempt goes on
    log.steps.append(base.Step(result.action, result))
  prompts = family.prompts(options)
  play = prompts.play(base.View((), log))[0].content
  reflect = prompts.reflect(base.View((), log))[0].content
  assert play.count("Row 1:") == 1 + 2 and play.count("...\n") == 5  # 7 actions, 2 observed
  assert "Action 1:" not in play and "Action 2:" in play
  assert reflect.count("Row 1:") == 1 + 8 and "Action 1:" in reflect


@pytest.mark.parametrize(
  ("response", "wanted"),
  [
    ("so <remark> go left </remark> bye", ("go left", True)),
    ("I use <remark> tags: <remark>b</remark>", ("b", True)),
    ("<remark>no end", ("", False)),
    ("no start</remark>", ("", False)),
    ("</remark>turned<remark>", ("", False)),
    ("<remark>  </remark>", ("", False)),
    ("nothing", ("", False)),
  ],
)
def test_reflection_tags(response, wanted):
  assert prompting.parse_reflection(response) == wanted


def test_reflections_are_cut():
  assert prompting.parse_reflection("<remark>" + "x" * 5000 + "</remark>") == ("x" * 2000, True)


def test_action_body_runs_from_first_to_last_tag():
  assert prompting.action_body("a<action>Up</action>b<action>c</action>") == "up</action>b<action>c"
  assert prompting.action_body("</action>up<action>") is None


@pytest.mark.parametrize("name", FAMILIES)
def test_garbage_never_raises_and_is_invalid(name):
  _, _, environment = opened(name)
  for garbage in (
    "",
    "<action>",
    "</action><action>",
    "<action></action>",
    "<action>(((</action>",
    "\0√",
  ):
    environment.reset(1)
    result = environment.step(garbage)
    assert not result.valid and result.action == "" and not result.success


@pytest.mark.parametrize("name", FAMILIES)
def test_a_finished_attempt_refuses_steps(name):
  _, _, environment = opened(name, turns=1)
  with pytest.raises(RuntimeError, match="call reset"):
    environment.retry()
  environment.reset(0)
  environment.step("nothing")
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step("nothing")


@pytest.mark.parametrize("name", FAMILIES)
def test_clumsy_players_lose_a_tag_at_the_stated_rate(name):
  family, options, environment = opened(name)
  player = prompting.Clumsy(
    family.players["random"](options, np.random.default_rng(0)), np.random.default_rng(1), rate=0.25
  )
  view = base.View((), base.AttemptLog(0, environment.reset(0)))
  broken = sum(prompting.action_body(player.play(view)) is None for _ in range(400))
  assert 70 <= broken <= 130


def test_unknown_family_says_which_exist():
  with pytest.raises(ValueError, match="choose one of alfworld, bigcodebench, browser"):
    base.family("pacman")
