"""What web pages need, where no browser is: what is missing is said before a run has a folder or loads a model."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments import door, run
from memrl_jax.envs import browser_engine, browser_page

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

  monkeypatch.setattr(door, "check", passed)


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
