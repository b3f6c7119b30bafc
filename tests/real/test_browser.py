"""The real browser through our environment: MiniWoB's tasks, a player that solves some, replay, deaths, memory.

Needs a Chromium, `pip install browsergym-miniwob` and `pip install --no-deps miniwob`.
"""

import base64
import functools
import http.server
import importlib
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types

import numpy as np
import pytest

from memrl_jax.envs import base, browser, browser_calls, browser_engine, browser_page, miniwob, pool
from memrl_jax.envs.browser_tasks import Options as AnyOptions
from memrl_jax.envs.miniwob import FAMILY, Options

pytest.importorskip(
  "browsergym.miniwob", reason="packages: pip install browsergym-miniwob; --no-deps miniwob"
)
PIL = pytest.importorskip("PIL", reason="comes with browsergym-miniwob")
importlib.import_module("PIL.Image")
try:
  browser_engine.executable("")
except ValueError as error:
  pytest.skip(str(error), allow_module_level=True)
ROOT = pathlib.Path(__file__).resolve().parents[2]
WAIT_S = 60  # for processes to end, on a crowded machine; they take about one second


@pytest.fixture(scope="module", autouse=True)
def ended():
  """Until Playwright stops, its event loop counts as running in this thread, where other tests want their own."""
  yield
  if browser_engine._engine is not None:
    browser_engine._engine._playwright.stop()
    browser_engine._engine.close()
    browser_engine._forget()


@pytest.fixture
def opened():
  made = []

  def make(**changes):
    made.append(browser.Browser(Options(**changes)))
    return made[-1]

  yield make
  for environment in made:
    environment.close()


def play(environment, name, seed):
  """The log of one attempt by a scripted player."""
  player = FAMILY.players[name](environment._options, np.random.default_rng(seed))
  log = base.AttemptLog(0, environment.reset(seed))
  while not log.done:
    result = environment.step(player.play(base.View((), log)))
    log.steps.append(base.Step(result.action, result))
  return log


def descendants(process):
  """{process id: resident bytes} of all below a process."""
  found, parents = {}, {process}
  rows = []
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      fields = (path / "stat").read_text().rpartition(")")[2].split()
    except OSError:
      continue
    if fields[0] != "Z":
      rows.append((int(path.name), int(fields[1]), int(fields[21]) * os.sysconf("SC_PAGE_SIZE")))
  while True:
    new = {pid: size for pid, parent, size in rows if parent in parents and pid not in found}
    if not new:
      return found
    found |= new
    parents = set(new)


def engines(folder):
  """Processes that work in a temporary folder: drivers by their environment, browsers by their arguments."""
  found = set(browser_engine.running(str(folder)))
  for path in pathlib.Path("/proc").glob("[0-9]*"):
    try:
      if f"TMPDIR={folder}/{browser_engine.PREFIX}".encode() in (path / "environ").read_bytes():
        found.add(int(path.name))
    except OSError:
      continue
  return found


def gone(what):
  """Whether a function soon gives nothing."""
  deadline = time.monotonic() + WAIT_S
  while what():
    if time.monotonic() > deadline:
      return False
    time.sleep(0.1)
  return True


@pytest.fixture
def fresh(monkeypatch):
  """A temporary folder of our own, so that its browsers can be told from others; its name is short enough."""
  browser_engine.engine()  # that of this process is somewhere else
  with tempfile.TemporaryDirectory(prefix="b") as folder:
    monkeypatch.setenv("TMPDIR", folder)
    monkeypatch.setattr(tempfile, "tempdir", None)  # asked again, here and in the processes
    assert browser_engine.place() == pathlib.Path(folder)
    yield pathlib.Path(folder)
    assert gone(lambda: engines(folder))


# Tasks.

KINDS = (
  *("click-test", "click-button", "click-link", "click-option", "click-checkboxes", "choose-list"),
  *("enter-text", "enter-text-2", "enter-password", "focus-text", "focus-text-2", "login-user"),
  *("click-dialog", "click-tab", "click-collapsible", "click-button-sequence", "click-menu"),
  *(
    "email-inbox-delete",
    "social-media",
    "tic-tac-toe",
    "use-slider",
    "book-flight",
    "count-shape",
  ),
  *("drag-items", "search-engine"),
)
SOLVED = (
  *("click-test", "click-button", "click-link", "click-option", "click-checkboxes", "choose-list"),
  *("enter-text", "enter-text-2", "enter-password", "focus-text-2", "login-user", "click-tab"),
)


def test_the_tasks_are_those_of_the_package():
  import browsergym.miniwob as package

  assert tuple(task.subdomain for task in package.ALL_MINIWOB_TASKS) == miniwob.NAMES


def test_a_scripted_player_solves_tasks_of_different_kinds_from_their_text(opened):
  environment = opened(tasks=SOLVED, split="train")
  logs = [play(environment, "reader", seed) for seed in range(len(SOLVED))]
  assert all(log.success for log in logs), [log.initial.task for log in logs if not log.success]
  for log in logs:
    assert all(step.result.valid and not step.result.note for step in log.steps)
    assert [step.result.reward for step in log.steps] == [0.0] * (len(log.steps) - 1) + [1.0]
  assert max(len(log.steps) for log in logs) > 2


def test_splits_show_pages_of_either_kind(opened):
  pages = []
  for split, odd in (("train", 0), ("unseen", 1)):
    environment = opened(tasks=("enter-text",), split=split)
    environment.reset(5)
    drawn = environment._page._env.task.random.get_state()
    again = np.random.RandomState(environment._task.seed)
    assert again.randint(0, miniwob.PAGES) % 2 == odd  # what the package draws first, and only that
    assert drawn[2] == again.get_state()[2] and (drawn[1] == again.get_state()[1]).all()
    pages.append(environment._task.seed)
  assert len(set(pages)) == 2


# What is seen follows from the task and the calls.


def trace():
  """Everything that an agent sees of some attempts."""
  names = ("click-checkboxes", "enter-text", "email-inbox-delete", "choose-list")
  environment, lines = browser.Browser(Options(tasks=names, turns=4)), []
  for seed in (1, 2, 70_000, 2**32 - 2):
    log = play(environment, "random", seed)
    lines += [repr(log.initial), *(repr(step.result) for step in log.steps)]
  environment.close()
  return lines


def test_pages_are_the_same_in_another_process():
  code = "from tests.real.test_browser import trace\nprint(*trace(), sep='\\n')"
  ran = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "1"},
    capture_output=True,
    text=True,
    check=True,
  )
  assert ran.stdout.splitlines() == trace() and not ran.stderr


def test_a_retry_is_the_same_page_and_answers_the_same(opened):
  environment, other = opened(tasks=("login-user",)), opened(tasks=("login-user",))
  first = play(environment, "reader", 11)
  other.reset(12)
  assert other.reset(11) == first.initial == environment.retry()
  for step in first.steps:
    assert environment.step(f"<action>{step.action}</action>") == step.result


def test_what_is_no_call_never_reaches_the_page(opened):
  environment = opened(tasks=("click-test",))
  first = environment.reset(0)
  held = environment._page._env
  environment._page._env = None  # any use of the page would raise
  for said in ("click", "<action>goto('file:///etc/passwd')</action>", "<action>print(1)</action>"):
    result = environment.step(said)
    assert not result.valid and result.note and result.observation.anchor == first.anchor
  environment._page._env = held
  result = environment.step("<action>click('999')</action>")
  assert result.valid and result.note == browser.FAILED
  assert 'The last action failed: ValueError: Could not find element with bid "999"' in (
    result.observation.text
  )


def test_the_package_reads_our_calls_as_we_mean_them_and_runs_nothing_else():
  from browsergym.core.action.parsers import highlevel_action_parser

  read = browser_page._reader(browser_calls.GROUPS)
  texts = (
    "it's",
    'say "x"',
    "a\\b\nc\t",
    "\x00\u200bü取消",
    "'); import os; os.abort() #",
    "{x} # y",
  )
  for text in texts:
    call = browser_calls.write("fill", ["a12", text], {})
    assert highlevel_action_parser.parse_string(call, parse_all=True).as_list() == [
      ["fill", ["a12", text]]
    ]
    assert read(call).removesuffix(f"{call}\n") == read("noop()").removesuffix("noop()\n")
  for name in browser_calls.allowed(browser_calls.GROUPS):
    assert browser_calls.ACTIONS[name].group in ("", *browser_calls.GROUPS)
    assert f"def {name}(" in read("noop()")
  for call in ("upload_file('1', '/etc/passwd')", "__import__('os')", "click('1') click('2')"):
    assert browser_calls.parse(f"<action>{call}</action>", "full", browser_calls.ACTIONS)[0] == ""


def test_a_picture_of_the_page_goes_with_its_text_where_it_is_asked_for(opened):
  sizes = {}
  for images in (False, True):
    environment = opened(tasks=("click-checkboxes",), images=images)
    first = environment.reset(0)
    sizes[images] = [environment.step("<action>click('18')</action>").observation, first]
    assert environment.step("nonsense").observation.images == sizes[images][0].images
  assert [each.text for each in sizes[True]] == [each.text for each in sizes[False]]
  assert not any(each.images for each in sizes[False])
  pictures = [each.images[0] for each in sizes[True]]
  assert pictures[0] != pictures[1]  # a tick more
  for picture in pictures:
    file = io.BytesIO(base64.b64decode(picture.removeprefix("data:image/png;base64,")))
    assert PIL.Image.open(file).size == (498, 321)  # 332 x 214 of the task, 1.5 times


def test_missing_servers_and_packages_are_named(monkeypatch):
  benchmark = browser_page.BENCHMARKS["webarena"]
  for name in benchmark.variables:
    monkeypatch.delenv(name, raising=False)
  lone = browser.Browser(AnyOptions(tasks=("webarena.3",)))
  with pytest.raises(ValueError, match=r"needs WebArena's sites.*WA_SHOPPING, .*WA_HOMEPAGE"):
    lone.reset(0)
  with pytest.raises(ValueError, match=r"has no task 'miniwob.nothing'"):
    browser.Browser(AnyOptions(tasks=("miniwob.nothing",))).reset(0)


def test_a_browser_that_does_not_start_is_named():
  wrong = shutil.which("true")
  with pytest.raises(RuntimeError, match=rf"{wrong} ended as it started \(.*config.env.executable"):
    browser.Browser(Options(executable=wrong)).reset(0)


def test_places_can_be_clicked(opened):
  environment = opened(tasks=("click-test",), actions=("coord",))
  first = environment.reset(0).text
  x, y = re.search(r"button 'Click Me!', center=\"\((\d+),(\d+)\)", first).groups()
  assert environment.step(f"<action>mouse_click({x}, {y})</action>").success


def test_servers_that_do_not_answer_are_named(monkeypatch):
  monkeypatch.setenv("MINIWOB_URL", "http://127.0.0.1:9")  # nobody listens there
  with pytest.raises(RuntimeError, match=r"miniwob.click-test could not be opened: .*ERR_"):
    browser.Browser(Options(tasks=("click-test",))).reset(0)


@pytest.fixture
def shop(monkeypatch, tmp_path):
  """A benchmark on a web server, as WebArena is: find a price on another page, and tell it."""
  import browsergym.core.registration
  import browsergym.core.task

  (tmp_path / "index.html").write_text("<a href='a.html' target='_blank'>Apples</a> or pears?")
  (tmp_path / "a.html").write_text("<title>Apples</title><p>Apples cost 7 crowns.</p>")
  handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
  monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)

  class Shop(browsergym.core.task.AbstractBrowserTask):
    def setup(self, page):
      page.goto(url)
      return "Tell me what apples cost.", {}

    def teardown(self):
      pass

    def validate(self, page, chat_messages):
      last = chat_messages[-1]
      answered = last["role"] in ("assistant", "infeasible") and len(chat_messages) > 2
      return float(answered and "7" in last["message"]), answered, "", {}

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setitem(sys.modules, "browsergym.shop", types.ModuleType("browsergym.shop"))
    browsergym.core.registration.register_task("shop.price", Shop)
    yield url
    sys.modules["gymnasium"].registry.pop("browsergym/shop.price")
    server.shutdown()


def test_a_task_on_a_server_with_tabs_history_and_messages(shop):
  environment = browser.Browser(AnyOptions(tasks=("shop.price",), settle_s=0.3))

  def act(call):
    result = environment.step(f"<action>{call}</action>")
    assert result.valid and not result.note, result
    return result

  first = environment.reset(0)
  assert first.goal == "Tell me what apples cost." and f"Page: {shop}\n" in first.text
  (link,) = [e for e in browser.browser_players.shown(first.text) if e.role == "link"]
  seen = act(f"click('{link.bid}')").observation.text
  assert f"Page: {shop}a.html\nTabs: 0 '', 1 'Apples'; this is 1\n" in seen
  assert "StaticText 'Apples cost 7 crowns.'" in seen
  assert act("tab_focus(0)").observation.anchor != first.anchor  # a tab more
  assert act(f"goto('{shop}a.html')").observation.text.count("Apples cost") == 1
  assert f"Page: {shop}\n" in act("go_back()").observation.text
  act("tab_focus(1)")
  assert act("tab_close()").observation.anchor == first.anchor
  done = act("send_msg_to_user('They cost 7 crowns.')")
  assert done.done and done.success and done.reward == 1
  environment.retry()
  done = act("report_infeasible('no apples')")
  assert done.done and not done.success and done.reward == 0
  environment.close()


# Processes.


def answers(envs, handles, method, argument=None):
  return envs.run([pool.Call(handle, method, argument) for handle in handles])


def test_a_pool_plays_as_one_environment_does_and_leaves_nothing(opened, fresh):
  alone, options = opened(tasks=("enter-text",)), Options(tasks=("enter-text",))
  with pool.EnvPool(FAMILY, options, workers=2, isolation="process", timeout_s=120) as envs:
    handles = [envs.open() for _ in range(4)]
    assert answers(envs, handles, "reset", 5) == [alone.reset(5)] * 4
    said = "<action>fill('14', 'x')</action>"
    assert answers(envs, handles, "step", said) == [alone.step(said)] * 4
    assert answers(envs, handles, "retry") == [alone.retry()] * 4
    assert len({*browser_engine.running(str(fresh))}) >= 2 and not envs.failures
  assert gone(lambda: engines(fresh)) and not list(fresh.glob(f"{browser_engine.PREFIX}*"))


def test_threads_are_told_that_they_need_processes():
  with pool.EnvPool(FAMILY, Options(), workers=1, isolation="thread", timeout_s=60) as envs:
    (failure,) = answers(envs, [envs.open()], "reset", 0)
  assert failure.kind == "crash" and 'config.env.isolation="process"' in failure.text


def workers(envs):
  return [worker._process.pid for worker in envs._workers if worker is not None]


def main_browser(folder):
  """The browser that the others are children of."""
  found = set(browser_engine.running(str(folder)))
  (root,) = [pid for pid in found if not any(pid in descendants(other) for other in found)]
  return root


def test_a_killed_browser_fails_its_trials_and_the_next_one_works(fresh):
  options = Options(tasks=("click-test",))
  with pool.EnvPool(FAMILY, options, workers=1, isolation="process", timeout_s=120) as envs:
    one, other = envs.open(), envs.open()
    answers(envs, [one, other], "reset", 0)
    os.kill(main_browser(fresh), signal.SIGKILL)
    failed = answers(envs, [one, other], "step", "<action>noop(10)</action>")
    assert [failure.kind for failure in failed] == ["crash"] * 2
    assert all("closed" in failure.text for failure in failed), failed
    (first,) = answers(envs, [envs.open()], "reset", 0)
    assert isinstance(first, base.Observation) and "button" in first.text
    os.kill(main_browser(fresh), signal.SIGKILL)  # while nobody uses it
    time.sleep(0.5)
    (first,) = answers(envs, [envs.open()], "reset", 1)
    assert isinstance(first, base.Observation) and envs.failures == {"crash": 2}


def test_a_killed_worker_leaves_no_browser(fresh):
  options = Options(tasks=("click-test",))
  with pool.EnvPool(FAMILY, options, workers=1, isolation="process", timeout_s=120) as envs:
    handle = envs.open()
    answers(envs, [handle], "reset", 0)
    assert engines(fresh)
    os.kill(workers(envs)[0], signal.SIGKILL)
    assert gone(lambda: engines(fresh))  # nobody helps: the driver ends when its input does
    (failed,) = answers(envs, [handle], "step", "<action>noop(10)</action>")
    assert failed == pool.Failure("crash", "the environment's process died")
    (first,) = answers(envs, [envs.open()], "reset", 0)
    assert isinstance(first, base.Observation)
    assert len(list(fresh.glob(f"{browser_engine.PREFIX}*"))) == 1  # the other's was swept


def test_a_browser_that_hangs_costs_its_trial_and_is_ended_by_the_next(fresh):
  options = Options(tasks=("click-test",))
  with pool.EnvPool(FAMILY, options, workers=1, isolation="process", timeout_s=120) as envs:
    handle = envs.open()
    answers(envs, [handle], "reset", 0)
    stopped = main_browser(fresh)
    os.kill(stopped, signal.SIGSTOP)
    envs._timeout_s = 5.0  # only here: the next call starts a browser
    (failed,) = answers(envs, [handle], "step", "<action>noop(10)</action>")
    envs._timeout_s = 120.0
    assert failed.kind == "timeout"
    (first,) = answers(envs, [envs.open()], "reset", 0)
    assert isinstance(first, base.Observation)
    assert stopped not in browser_engine.running(str(fresh))


def test_tasks_show_what_can_be_done_and_a_hundred_resets_leave_no_process_and_no_memory(opened):
  environment = opened(tasks=KINDS, split="train")
  counts, sizes, own = [], [], []
  for seed in range(4 * len(KINDS)):
    name, first = KINDS[seed % len(KINDS)], environment.reset(seed)
    assert first.task == f"{name}/train-{seed // len(KINDS)}"
    assert first.goal and first.text.startswith("Goal: ")
    assert f"\nPage: {name}.html\nRootWebArea " in first.text and "file:" not in first.text
    assert any(each.actable for each in browser.browser_players.shown(first.text)), first.text
    if seed in (24, 99):  # all tasks once, and four times: the page is of the same task
      time.sleep(2)  # what was closed is on its way out
      below = descendants(os.getpid())
      counts.append(len(below))
      sizes.append(sum(below.values()) / 2**20)
      own.append(browser_rss(os.getpid()))
  assert counts[1] <= counts[0] + 1, counts  # a spare renderer comes and goes
  assert sizes[1] < 1.15 * sizes[0], sizes
  assert own[1] - own[0] < 30, own


def browser_rss(process):
  status = pathlib.Path(f"/proc/{process}/status").read_text()
  return int(status.split("VmRSS:")[1].split()[0]) / 1024
