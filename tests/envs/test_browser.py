"""Web pages without a browser: tasks, turns, sentences."""

import time

import numpy as np
import pytest

from memrl_jax.envs import (
  base,
  browser,
  browser_page,
  browser_players,
  browser_tasks,
  miniwob,
  panel,
  pool,
  webarena,
  workarena,
)
from memrl_jax.envs.miniwob import FAMILY, Options

# Tasks.


def test_no_held_out_task_has_a_variant_in_training():
  train, unseen = (Options().names(split) for split in ("train", "unseen"))
  assert len(train) + len(unseen) == 125 and len(unseen) == 30 and not set(train) & set(unseen)
  assert not [one for one in unseen for other in train if other.startswith(f"{one}-")]
  assert not [one for one in unseen for other in train if one.startswith(f"{other}-")]
  templates = [
    {webarena.TEMPLATES[int(name)] for name in webarena.Options().names(split)}
    for split in ("train", "unseen")
  ]
  assert not templates[0] & templates[1] and len(webarena.NAMES) == 812
  assert len(workarena.NAMES) == 33 and set(workarena.NAMES) >= workarena.HELD_OUT


def test_training_has_the_even_pages_and_evaluation_the_odd_ones():
  for held_out in (False, True):
    seeds = [miniwob.seed(level, held_out) for level in range(200)]
    assert len(set(seeds)) == 200
    assert {np.random.RandomState(s).randint(0, 10**6) % 2 for s in seeds} == {held_out}
  assert miniwob.seed(browser_tasks.LEVELS - 1, True) < 2**32


@pytest.mark.parametrize("name", ["miniwob", "webarena", "workarena"])
def test_each_half_of_the_panel_plays_all_its_tasks_before_one_comes_again(name):
  family, loaded = base.family(name), panel.load(f"{name}-v1")
  options = family.options()
  for half, split in ((loaded.test, "unseen"), (loaded.dev, "seen")):
    drawn = [browser_tasks.draw(options, seed) for seed in half]
    some = [task.name for task in drawn[: len(options.names(split))]]
    assert len(set(some)) == len(some) and {task.split for task in drawn} == {split}
    assert all(t.seed == options.suite.seed(t.level, True) for t in drawn)
  train = [browser_tasks.draw(options, seed) for seed in range(2 * family.parts(options))]
  assert [t.level for t in train] == [
    n // family.parts(options) % options.suite.instances for n in range(len(train))
  ]
  assert all(task.seed == options.suite.seed(task.level, False) for task in train)
  assert {task.name for task in train} == set(options.names("train"))
  assert all(task.id == f"{options.suite.prefix}{task.name}" for task in train)


def test_training_instances_can_be_few():
  options = Options(tasks=("click-test",), instances=3)
  drawn = [browser_tasks.draw(options, seed) for seed in range(9)]
  assert [task.level for task in drawn] == [0, 1, 2] * 3
  assert str(browser_tasks.draw(options, base.TRAIN_SEEDS[1])) == "click-test/unseen-65536"


@pytest.mark.parametrize(
  ("kind", "changes", "why"),
  [
    (
      Options,
      {"tasks": ("click-tset",)},
      "no task 'click-tset' among its 125; nearest are click-test",
    ),
    (Options, {"tasks": "click-test"}, "tasks is a list, also of one"),
    (webarena.Options, {"tasks": ("812",)}, "webarena has no task '812' among its 812"),
    (browser_tasks.Options, {"tasks": ()}, "no task is named; name BrowserGym's"),
    (Options, {"actions": ("mouse",)}, "there are no actions 'mouse'; choose from bid, coord"),
    (
      Options,
      {"split": "test"},
      "split 'test' is not known; choose one of auto, train, seen, unseen",
    ),
    (Options, {"turns": 0}, "turns 0 is too small; choose at least 1"),
    (Options, {"page_chars": 10}, "page_chars 10 is too small; choose at least 200"),
    (Options, {"settle_s": float("nan")}, "settle_s nan is too small"),
    (Options, {"reward_scale": 0.0}, "pays nothing for a success"),
  ],
)
def test_options_check_themselves(kind, changes, why):
  with pytest.raises(ValueError) as caught:
    kind(**changes)
  assert why in str(caught.value) and "(config.env." in str(caught.value)


# Turns, on a page of our own.


class Fake:
  """A page with a field and a button; the task is done when the button is pressed with "yes" in the field."""

  def __init__(self, **settings):
    self.settings, self.opened, self.closed, self.text = settings, [], 0, ""

  def seen(self, error=""):
    tree = (
      f"RootWebArea 'Form'\n\t[1] textbox 'Answer' value={self.text!r}, clickable, visible\n"
      "\t[2] button 'Submit', clickable, visible"
    )
    tabs = ("Form", "Other") if self.text == "tab" else ("Form",)
    goal = 'Enter "yes" into the text field and press Submit.'
    return browser_page.Seen(goal, "form.html", tabs, 0, tree, error)

  def open(self, task, seed):
    self.opened.append((task, seed))
    self.text = ""
    return self.seen()

  def step(self, call):
    if call == "noop(5000)":
      time.sleep(30)
    if call.startswith("fill('1', "):
      self.text = call[11:-2]
    elif call == "click('2')":
      return self.seen(), {"yes": 1.0, "half": 0.5}.get(self.text, 0.0), True
    elif call == "noop(7)":
      raise RuntimeError("Target page, context or browser has been closed")
    elif not call.startswith("noop"):
      return self.seen("ValueError: Could not find element"), 0.0, False
    return self.seen(), 0.0, False

  def screenshot(self):
    return self.text.encode()

  def close(self):
    self.closed += 1


@pytest.fixture
def opened(monkeypatch):
  monkeypatch.setattr(browser_page, "Page", Fake)

  def make(**changes):
    return browser.Browser(Options(**{"tasks": ("enter-text",), "turns": 4} | changes))

  return make


def act(environment, *calls):
  return [environment.step(f"<action>{call}</action>") for call in calls]


def test_an_attempt_is_paid_when_the_task_says_so(opened):
  environment = opened(reward_scale=10.0)
  first = environment.reset(3)
  assert environment._page.opened == [("miniwob.enter-text", miniwob.seed(3, False))]
  assert first.text == (
    'Goal: Enter "yes" into the text field and press Submit.\nPage: form.html\n'
    "RootWebArea 'Form'\n [1] textbox 'Answer'\n [2] button 'Submit'"
  )
  assert first.goal.startswith("Enter") and first.task == "enter-text/train-3"
  filled, done = act(environment, "fill('1', 'yes')", "click('2')")
  assert filled.observation.text.startswith("Page: form.html\n") and "value='yes'" in (
    filled.observation.text
  )
  assert (filled.reward, filled.done) == (0.0, False)
  assert (done.reward, done.done, done.success, done.score) == (10.0, True, True, 1.0)
  assert filled.observation.anchor != first.anchor
  assert environment.retry() == first
  _, half = act(environment, "fill('1', 'half')", "click('2')")
  assert (half.reward, half.done, half.success, half.score) == (5.0, True, False, 0.5)
  environment.retry()
  (lost,) = act(environment, "click('2')")
  assert (lost.reward, lost.done, lost.success) == (0.0, True, False)


def test_turns_run_out_and_bad_answers_cost_one_without_touching_the_page(opened):
  environment = opened()
  first = environment.reset(0)
  environment._page.step = None  # a call would raise
  for said in ("nothing", "<action>goto('http://a.b')</action>", "<action>click()</action>"):
    result = environment.step(said)
    assert (result.valid, result.action, result.done) == (False, "", False) and result.note
    assert result.observation.anchor == first.anchor
  last = environment.step("nothing")
  assert last.done and not last.success and last.reward == 0
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step("nothing")


def test_a_call_that_fails_is_valid_and_told(opened):
  environment = opened()
  environment.reset(0)
  (result,) = act(environment, "click('9')")
  assert result.valid and result.note == "failed"
  assert "The last action failed: ValueError: Could not find element\n" in result.observation.text
  (result,) = act(environment, "fill('1', 'tab')")
  assert "\nTabs: 0 'Form', 1 'Other'; this is 0\n" in result.observation.text
  assert "failed" not in result.observation.text


def test_pictures_go_along_where_they_are_asked_for(opened):
  environment = opened(images=True)
  shown = [environment.reset(0), *(r.observation for r in act(environment, "fill('1', 'a')", "x"))]
  urls = [f"data:image/png;base64,{text}" for text in ("", "YQ==", "YQ==")]
  assert [each.images for each in shown] == [(url,) for url in urls]
  assert opened().reset(0).images == ()


def test_a_page_that_is_gone_or_hangs_voids_its_trial_alone(opened):
  opened()
  options = Options(tasks=("enter-text",))
  with pool.EnvPool(FAMILY, options, workers=2, isolation="thread", timeout_s=0.3) as envs:
    handles = [envs.open() for _ in range(2)]
    envs.run([pool.Call(handle, "reset", 0) for handle in handles])
    said = ("<action>noop(7)</action>", "<action>noop(5000)</action>")
    gone, hung = envs.run([pool.Call(h, "step", s) for h, s in zip(handles, said, strict=True)])
    assert (gone.kind, hung.kind) == ("crash", "timeout") and "has been closed" in gone.text
    (again,) = envs.run([pool.Call(envs.open(), "reset", 0)])
    assert isinstance(again, base.Observation)


def test_the_reader_solves_the_form_and_random_clicks_what_there_is(opened):
  environment = opened()
  for name, wanted in (("reader", ["fill('1', 'yes')", "click('2')"]), ("random", None)):
    log = base.AttemptLog(0, environment.reset(0))
    player = FAMILY.players[name](environment._options, np.random.default_rng(0))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      assert result.valid and not result.note
      log.steps.append(base.Step(result.action, result))
    assert wanted is None or [step.action for step in log.steps] == wanted
  assert isinstance(player, browser_players.Random)


@pytest.mark.parametrize("style", browser_tasks.STYLES)
def test_prompts_say_what_can_be_done(opened, style):
  environment = opened(style=style)
  log = base.AttemptLog(0, environment.reset(0))
  log.steps.append(base.Step("click('9')", act(environment, "click('9')")[0]))
  text = "\n".join(
    message.content for message in browser.prompts(environment._options).play(base.View((), log))
  )
  assert "You have 4 turns" in text and "- fill(bid, value, " in text and "goto" not in text
  assert "Goal: Enter" in text and "(failed)" in text and "<action>click('12')</action>" in text
