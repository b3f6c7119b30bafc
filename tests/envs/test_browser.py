"""Web pages without a browser: what is read of a page, which answers are calls, tasks, turns, sentences."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from experiments import run
from memrl_jax.envs import (
  base,
  browser,
  browser_calls,
  browser_engine,
  browser_page,
  browser_players,
  browser_tasks,
  browser_text,
  miniwob,
  panel,
  pool,
  webarena,
  workarena,
)
from memrl_jax.envs.miniwob import FAMILY, Options

# Pages, as BrowserGym writes them.

FORM = "\n".join(
  [
    "RootWebArea 'It\\'s a form', focused",
    "\t[3] LabelText '', clickable, visible",
    "\t\t[4] checkbox 'Gh, visible', clickable, visible, checked='false'",
    "\t\tStaticText 'Gh, visible'",
    "\tStaticText ''",
    '\t[5] textbox "Name" value="O\'Neill", clickable, visible, focused, required',
    "\t[6] image '', clickable, visible, class='trash'",
    "\t[7] combobox '' value='2', hasPopup='menu', expanded=False",
    "\t[8] button 'Send', clickable",
  ]
)
WRITTEN = "\n".join(
  [
    """RootWebArea "It's a form", focused""",
    " [3] LabelText, clickable",
    "  [4] checkbox 'Gh, visible', checked='false'",
    "  StaticText 'Gh, visible'",
    """ [5] textbox 'Name' value="O'Neill", focused, required""",
    " [6] image, clickable, class='trash'",
    " [7] combobox value='2', hasPopup='menu', expanded=False",
    " [8] button 'Send'",
  ]
)


def test_a_page_is_written_in_short_and_read_again():
  assert browser_text.page(FORM, 10_000) == WRITTEN
  read = browser_text.elements(WRITTEN)
  assert [str(each) for each in read] == WRITTEN.split("\n")
  assert [each.bid for each in read if each.actable] == ["3", "4", "5", "6", "7", "8"]
  assert [each.bid for each in browser_text.elements(FORM) if each.visible] == ["3", "4", "5", "6"]
  assert read[4][:5] == (1, "5", "textbox", "Name", "O'Neill")


def test_places_are_told_where_they_are_asked_for():
  tree = "RootWebArea ''\n\t[3] image '', center=\"(5,7)\", clickable, visible\n\t[4] button 'B', center=\"(1,2)\", clickable"
  assert browser_text.page(tree, 1000) == (
    ' [3] image, center="(5,7)", clickable\n [4] button \'B\', center="(1,2)"'
  )
  image, button = browser_text.elements(tree)
  assert (image.actable, image.visible, button.actable, button.visible) == (True, True, True, False)


def long_page(texts=40, buttons=20, hidden=20):
  lines = ["RootWebArea 'Long'"]
  lines += [f"\tStaticText 'text number {n}'" for n in range(texts)]
  lines += [f"\t[h{n}] button 'hidden {n}', clickable" for n in range(hidden)]
  lines += [f"\t[v{n}] button 'seen {n}', clickable, visible" for n in range(buttons)]
  return "\n".join(lines)


def test_a_long_page_keeps_its_head_and_what_is_in_view_and_says_what_is_missing():
  tree = long_page()
  whole = browser_text.page(tree, 10_000).split("\n")
  assert len(whole) == 81
  # A line of text has 27 characters with its end, a button in view 22, a hidden one 24: of 600, the head takes 19,
  # buttons fill 400 (17 of 20 in view, 390 or so), and text the rest.
  *shown, said = browser_text.page(tree, 600).split("\n")
  assert sum(len(line) + 1 for line in shown) <= 600
  assert said == f"({81 - len(shown)} of 81 lines are left out; scroll to see others)"
  assert shown[0] == "RootWebArea 'Long'" and shown == [line for line in whole if line in shown]
  kinds = {kind: sum(kind in line for line in shown) for kind in ("text", "hidden", "seen")}
  assert kinds["seen"] >= 16 and kinds["hidden"] == 0 and 7 <= kinds["text"] <= 9
  assert [line for line in whole if "text" in line][: kinds["text"]] == [
    line for line in shown if "text" in line
  ]


def test_room_that_text_does_not_need_goes_to_elements():
  shown = browser_text.page(long_page(texts=0, buttons=20, hidden=40), 800)
  assert sum(len(line) + 1 for line in shown.split("\n")[:-1]) > 770
  assert "seen 19" in shown and "hidden 5" in shown


@hypothesis.given(
  strategies.integers(200, 4000), strategies.integers(0, 60), strategies.integers(0, 60)
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_a_page_never_takes_more_room_than_it_is_given(chars, texts, buttons):
  *shown, last = browser_text.page(long_page(texts, buttons, texts), chars).split("\n")
  shown += [] if last.startswith("(") else [last]
  assert sum(len(line) + 1 for line in shown) <= chars


def test_one_endless_name_is_cut():
  (line,) = browser_text.page(f"[1] link '{'x' * 5000}', clickable", 10_000).split("\n")
  assert len(line) == browser_text.LINE_CHARS and line.endswith("…")


def test_failures_are_one_line_and_say_what_was_in_the_way():
  said = (
    "TimeoutError: Locator.click: Timeout 500ms exceeded.\nCall log:\n\x1b[2m  - waiting\x1b[0m\n"
    '  -   <div id="mask"></div> intercepts pointer events\n  - retrying'
  )
  assert browser_text.failure(said) == (
    "TimeoutError: Locator.click: Timeout 500ms exceeded.; "
    '<div id="mask"></div> intercepts pointer events'
  )
  assert browser_text.failure("") == ""


def test_addresses_of_files_name_no_machine():
  assert browser_text.address("file:///home/me/miniwob/click-test.html") == "click-test.html"
  assert browser_text.address("http://shop.example/a?b=c") == "http://shop.example/a?b=c"


# Calls.

ALL = browser_calls.allowed(browser_calls.GROUPS)


def parsed(said, names=ALL, style="full"):
  return browser_calls.parse(said, style, names)


@pytest.mark.parametrize(
  ("said", "call"),
  [
    ("<action>click('12')</action>", "click('12')"),
    ("no <action>click('1')</action> but <action>\n`click(\"a12\")`\n</action>", "click('a12')"),
    ("<action>click(12)", "click('12')"),
    ("<action>```python\nfill(bid='4', value='Ana Lí')\n```</action>", "fill('4', 'Ana Lí')"),
    ("<action>fill('4', 7)</action>", "fill('4', '7')"),
    ("<action>fill('4', 'Ti', True)</action>", "fill('4', 'Ti', True)"),
    ("<action>fill('4', 'x', enable_autocomplete_menu=False)</action>", "fill('4', 'x')"),
    ("<action>click('b2', button='right')</action>", "click('b2', 'right')"),
    ("<action>click('b2', modifiers=['Shift'])</action>", "click('b2', 'left', ['Shift'])"),
    ("<action>select_option('5', ['a', 'b'])</action>", "select_option('5', ['a', 'b'])"),
    ("<action>scroll(0, -200.5)</action>", "scroll(0, -200.5)"),
    ("<action>noop()</action>", "noop()"),
    ("<action>noop(1000)</action>", "noop()"),
    ("<action>goto('https://shop.example/')</action>", "goto('https://shop.example/')"),
    ("<action>send_msg_to_user('it is \"4\"\\n')</action>", "send_msg_to_user('it is \"4\"\\n')"),
  ],
)
def test_calls_are_written_in_one_way(said, call):
  assert parsed(said) == (call, "")
  assert parsed(f"<action>{call}</action>") == (call, "")


@pytest.mark.parametrize(
  ("said", "why"),
  [
    ("click('12')", "no action was given"),
    ("<action> </action>", "no action was given"),
    ("<action>click('1'); click('2')</action>", "not one call"),
    ("<action>click('1')\nclick('2')</action>", "not one call"),
    ("<action>__import__('os').abort()</action>", "not one call"),
    ("<action>click(open('/etc/passwd').read())</action>", "not one call"),
    ("<action>click(f'{1}')</action>", "not one call"),
    ("<action>fill('1', 'a' * 10**9)</action>", "not one call"),
    ("<action>click(*['1'])</action>", "not one call"),
    ("<action>click(**{'bid': '1'})</action>", "not one call"),
    ("<action>" + "(" * 3000 + "</action>", "not one call"),
    ("<action>\0</action>", "not one call"),
    ("<action>fill('1', '" + "x" * 4000 + "')</action>", "at most 4000 characters, this one"),
    ("<action>exec('1')</action>", "there is no action exec; choose one of click, "),
    ("<action>upload_file('1', '/etc/passwd')</action>", "there is no action upload_file"),
    ("<action>click()</action>", "click(bid, button='left', modifiers=[]): bid is missing"),
    ("<action>click('1', 'left', [], 4)</action>", "too many values"),
    ("<action>click('1', bid='1')</action>", "bid does not belong there"),
    ("<action>click('OK')</action>", "bid must be an id from the page"),
    ("<action>click(True)</action>", "bid must be an id from the page"),
    ("<action>click('1', 'top')</action>", "button must be one of left, middle, right"),
    ("<action>noop(1e9)</action>", "wait_ms must be 0 to 5000 milliseconds"),
    ("<action>scroll(0, 1e999)</action>", "delta_y must be a number of pixels"),
    ("<action>goto('file:///etc/passwd')</action>", "url must be an address that begins with http"),
    ("<action>goto('javascript:alert(1)')</action>", "url must be an address"),
    ("<action>tab_focus(-1)</action>", "index must be the number of an open tab"),
    ("<action>fill('1', None)</action>", "value must be a string"),
  ],
)
def test_what_is_no_call_is_told_why(said, why):
  call, note = parsed(said)
  assert call == "" and why in note and "\n" not in note


def test_only_actions_of_the_groups_are_calls_and_the_manual_lists_those():
  names = browser_calls.allowed(("bid",))
  assert "click" in names and "noop" in names and "goto" not in names
  assert parsed("<action>goto('http://a.b')</action>", names)[0] == ""
  lines = browser_calls.manual(names).split("\n")
  assert len(lines) == len(names) == 11
  assert "- noop(wait_ms=1000): wait, in milliseconds" in lines


def test_in_chat_style_a_bare_call_will_do():
  assert parsed("click('1')", style="chat") == ("click('1')", "")
  assert parsed("<action></action> click('1')", style="chat")[0] == ""


@hypothesis.given(strategies.text(max_size=60))
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_answer_is_a_call_of_plain_values_or_none(said):
  call, note = parsed(f"<action>{said}</action>")
  assert bool(call) != bool(note)
  call, _ = parsed(f"<action>fill('1', {said!r})</action>")
  assert call == f"fill('1', {said!r})"


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


# The engine, as far as it needs no browser.


def test_missing_servers_packages_and_browsers_are_one_sentence(monkeypatch, tmp_path):
  for name in browser_page.BENCHMARKS["workarena"].variables:
    monkeypatch.setenv(name, "x")
  monkeypatch.delenv("SNOW_INSTANCE_PWD")
  with pytest.raises(ValueError, match=r"a ServiceNow instance, .*variable SNOW_INSTANCE_PWD$"):
    browser_page.need("workarena")
  monkeypatch.setitem(sys.modules, "browsergym", None)
  monkeypatch.setitem(sys.modules, "browsergym.core", None)
  with pytest.raises(ImportError, match=r"BrowserGym is not installed: run pip install"):
    browser_page.need("miniwob")
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(
    ValueError, match=r"no browser chromium-headless-shell, .* on the PATH: apt-get"
  ):
    browser_engine.executable("")
  with pytest.raises(ValueError, match=r"no browser /no/such"):
    browser_engine.executable("/no/such")


def test_missing_pages_are_one_sentence(monkeypatch, tmp_path):
  monkeypatch.delenv("MINIWOB_URL", raising=False)
  monkeypatch.setattr(browser_page.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"pip install --no-deps miniwob"):
    browser_page._miniwob()
  monkeypatch.setenv("MINIWOB_URL", "http://127.0.0.1:8000/miniwob")
  assert browser_page._miniwob() == "http://127.0.0.1:8000/miniwob/"


def test_browsers_keep_their_files_where_a_socket_has_room(monkeypatch):
  # TMPDIR/memrl_browser_12345678/org.chromium.Chromium.123456/SingletonSocket ends with a zero byte in 108.
  longest = f"/{browser_engine.PREFIX}12345678/org.chromium.Chromium.123456/SingletonSocket"
  for room, kept in ((107 - len(longest), True), (108 - len(longest), False)):
    folder = "/" + "t" * (room - 1)
    monkeypatch.setattr(browser_engine.tempfile, "gettempdir", lambda folder=folder: folder)
    assert str(browser_engine.place()) == (folder if kept else "/tmp")


def test_what_a_dead_process_left_is_ended_and_nothing_else(tmp_path):
  def folder(name):
    made = tmp_path / f"{browser_engine.PREFIX}{name}"
    made.mkdir()
    return made

  def sleeper(made):
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code, f"--user-data-dir={made}/profile"])

  dead, living, young = (folder(name) for name in ("dead", "living", "young"))
  browser_engine._hold(dead).close()  # as the end of a process does
  held = browser_engine._hold(living)
  left, ours = sleeper(dead), sleeper(living)
  try:
    deadline = time.monotonic() + 10  # until the arguments of both can be read
    while not (browser_engine.running(str(dead)) and browser_engine.running(str(living))):
      assert time.monotonic() < deadline
    assert browser_engine.running(str(dead)) == [left.pid]
    browser_engine.sweep(tmp_path)
    assert left.wait(10) == -signal.SIGKILL and not dead.exists()
    assert ours.poll() is None and living.exists() and young.exists()
  finally:
    held.close()
    for process in (left, ours):
      process.kill()
      process.wait()


def test_what_has_no_name_is_told_by_its_class_and_what_reacts_is_clickable():
  strings = ["bid", "7", "class", "trash", "8", "9", "id", "x"]
  nodes = [
    {"role": {"value": "generic"}, "name": {"value": ""}, "browsergym_id": "7"},
    {"role": {"value": "button"}, "name": {"value": "OK"}, "browsergym_id": "8"},
    {"role": {"value": "generic"}, "name": {"value": ""}, "browsergym_id": "9"},
  ]
  plain = json.loads(json.dumps(nodes))
  dom = {
    "strings": strings,
    "documents": [{"nodes": {"attributes": [[0, 1, 2, 3], [0, 4, 2, 3], [0, 5, 6, 7]]}}],
  }
  properties = {"7": {"clickable": True}, "8": {"clickable": True}, "9": {"clickable": False}}
  browser_page._name(nodes, properties, dom)
  assert nodes[0]["role"]["value"] == "clickable"
  assert nodes[0]["properties"] == [{"name": "class", "value": {"value": "trash"}}]
  assert nodes[1:] == plain[1:]


def test_nothing_of_the_package_is_imported_until_a_page_is_opened():
  code = (
    "import sys\nfrom memrl_jax.envs import base\n"
    "for n in ('browser', 'miniwob', 'webarena', 'workarena'):\n"
    "  f = base.family(n)\n  f.make(f.options(executable=sys.executable)).close()\n"
    "  f.describe(f.options(), 0), f.prompts(f.options())\n"
    "assert not [m for m in sys.modules if m.startswith(('browsergym', 'playwright', 'gymnasium'))]"
  )
  environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
  subprocess.run([sys.executable, "-c", code], env=environment, check=True)


# The door: what is missing is said before a run has a folder or loads a model.


@pytest.fixture
def no_further(monkeypatch):
  """Whoever comes past the door is told by an exception of its own."""

  def passed(*_, **__):
    raise Passed

  monkeypatch.setattr(run, "check", passed)


class Passed(Exception):
  """A run has come past the door."""


def at_the_door(capsys, tmp_path, config, *more):
  place = tmp_path / "run"
  assert run.main([f"--config=experiments/{config}.py:smoke", f"--workdir={place}", *more]) == 2
  assert not place.exists()
  return capsys.readouterr().err


@pytest.fixture
def webarena_up(monkeypatch, tmp_path):
  """A browser's program, the package, and a site that answers under every variable but the last, which may be PASS."""
  monkeypatch.setattr(browser_engine, "executable", lambda named: "a browser")
  monkeypatch.setattr(browser_page, "_installed", lambda module: True)
  with socket.create_server(("127.0.0.1", 0)) as site:
    for name in browser_page.BENCHMARKS["webarena"].variables:
      monkeypatch.setenv(name, f"http://127.0.0.1:{site.getsockname()[1]}")
    monkeypatch.setenv("WA_HOMEPAGE", "PASS")
    yield


def test_a_run_without_its_servers_is_refused_at_the_door(
  webarena_up, no_further, capsys, tmp_path, monkeypatch
):
  with socket.create_server(("127.0.0.1", 0)) as closed:
    port = closed.getsockname()[1]
  monkeypatch.setenv("WA_GITLAB", f"http://127.0.0.1:{port}/explore")
  said = at_the_door(capsys, tmp_path, "mempi_webarena")
  assert (
    f"nobody answers at 127.0.0.1:{port} (" in said and "variable WA_GITLAB has a server" in said
  )
  monkeypatch.delenv("WA_GITLAB")
  said = at_the_door(capsys, tmp_path, "mempi_webarena")
  assert said.startswith("error: webarena needs WebArena's sites") and "variable WA_GITLAB" in said
  for name in browser_page.BENCHMARKS["workarena"].variables:
    monkeypatch.delenv(name, raising=False)
  said = at_the_door(capsys, tmp_path, "mempi_workarena")
  assert "SNOW_INSTANCE_URL, SNOW_INSTANCE_UNAME, SNOW_INSTANCE_PWD" in said


def test_the_door_is_open_where_nothing_is_missing_and_for_what_plays_nothing(
  webarena_up, no_further, monkeypatch
):
  with pytest.raises(Passed):
    run.main(["--config=experiments/mempi_webarena.py:smoke"])
  monkeypatch.delenv("WA_MAP")
  with pytest.raises(Passed):
    run.main(["--config=experiments/mempi_webarena.py:smoke", "--mode=export"])


def test_missing_packages_and_pages_are_refused_at_the_door(
  no_further, capsys, tmp_path, monkeypatch
):
  monkeypatch.setattr(browser_engine, "executable", lambda named: "a browser")
  monkeypatch.setattr(browser_page.importlib.util, "find_spec", lambda name: None)
  monkeypatch.delenv("MINIWOB_URL", raising=False)
  assert browser_page.MISSING in at_the_door(capsys, tmp_path, "mempi_miniwob")
  monkeypatch.setattr(browser_page, "_installed", lambda module: module == "browsergym.core")
  said = at_the_door(capsys, tmp_path, "mempi_miniwob")
  assert "miniwob is not installed: run pip install browsergym-miniwob" in said
  monkeypatch.setattr(browser_page, "_installed", lambda module: True)
  assert "pip install --no-deps miniwob" in at_the_door(capsys, tmp_path, "mempi_miniwob")
