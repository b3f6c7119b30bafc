"""One browser for one process, driven by Playwright.

It starts when first needed and is shared by the environments of the process, each of which has a context of
its own, as private windows have: opening a page costs a third of starting a browser. Playwright answers
only the thread that started it, which must be the main one: one process, one browser.

No browser outlives its process. Playwright's driver, a child of ours, ends when its input closes, and the
browser with it. Both keep their files in a folder that this process locks; the first browser of a process
ends what still runs in folders whose lock nobody holds any more, and removes them.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import multiprocessing.util
import os
import pathlib
import shutil
import signal
import tempfile
import threading
from typing import Any

from memrl_jax.envs import browser_text

PREFIX, LOCK = "memrl_browser_", "memrl_jax.lock"
ROOM = 39  # of a temporary folder's name: with the rest it makes 107, the longest name of a socket
# The shell has no window around its pages, and needs half the memory and a third of the time.
LIBRARY = "/usr/lib/chromium"  # where Debian has the program behind that script
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
)


def executable(named: str) -> str:
  """The browser's program: the one named, or the first of NAMES on the PATH.

  Debian's headless shell is a script that starts the program and waits; a signal to it would not reach the
  browser, so the program itself is taken.

  Raises:
    ValueError: there is none.
  """
  for name in [named] if named else NAMES:
    if found := shutil.which(name):
      return (name == NAMES[0] and shutil.which(name, path=LIBRARY)) or found
  raise ValueError(
    f"there is no browser {named or ', '.join(NAMES)} on the PATH: apt-get install chromium-headless-shell "
    "(or chromium), or name the program of one (config.env.executable)"
  )


# The browser of this process.


_engine: Engine | None = None


def engine() -> Engine:
  """The one of this process, started if need be.

  Raises:
    RuntimeError: this is not the main thread.
  """
  global _engine
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError(
      "a browser answers only the main thread of its process, and this is another; give every worker "
      'a process (config.env.isolation="process")'
    )
  if _engine is None:
    sweep(place())
    _engine = Engine()
  return _engine


def _forget() -> None:
  """A forked child shares our pipes: it must not talk to our browser."""
  global _engine
  _engine = None


if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_forget)


class Engine:
  """Playwright's driver, and browsers by their program; stands in for Playwright in BrowserGym."""

  def __init__(self) -> None:
    import browsergym.core as core
    import playwright.sync_api

    self.folder = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX, dir=place()))
    self._lock = _hold(self.folder)
    temporary = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(self.folder)  # of the driver and the browser, which inherit it
    try:
      self._playwright = playwright.sync_api.sync_playwright().start()
    finally:
      os.environ.pop("TMPDIR")
      os.environ.update({} if temporary is None else {"TMPDIR": temporary})
    core._set_global_playwright(self._playwright)
    self._browsers: dict[str, Any] = {}
    # When this process ends, also where it is a worker, which runs no atexit.
    multiprocessing.util.Finalize(None, self.close, exitpriority=10)

  def browser(self, program: str) -> Any:
    """The running browser of a program.

    Raises:
      RuntimeError: it does not start.
    """
    import playwright.sync_api

    if not self.alive(program):
      try:
        self._browsers[program] = self._playwright.chromium.launch(
          executable_path=program,
          args=[*FLAGS, "--disable-features=OverlayScrollbars,ExtendedOverlayScrollbars"],
          ignore_default_args=["--hide-scrollbars"],
        )
      except playwright.sync_api.Error as error:
        raise RuntimeError(
          f"{program} ended as it started ({browser_text.failure(str(error))}); see what `{program} --headless "
          "--no-sandbox --dump-dom about:blank` says, or name another (config.env.executable)"
        ) from error
    return self._browsers[program]

  def alive(self, program: str) -> bool:
    return program in self._browsers and self._browsers[program].is_connected()

  @property
  def selectors(self) -> Any:
    return self._playwright.selectors

  def close(self) -> None:
    """Ends the browsers without a farewell, which might never be answered; the driver ends with us."""
    end(str(self.folder))
    shutil.rmtree(self.folder, ignore_errors=True)
    self._lock.close()


def place() -> pathlib.Path:
  """Where browsers keep their files: the temporary folder, or /tmp where its name is too long for a Chromium,
  which ends at once if it cannot make its socket there."""
  folder = tempfile.gettempdir()
  return pathlib.Path(folder if len(folder) <= ROOM else "/tmp")


def _hold(folder: pathlib.Path) -> io.TextIOBase:
  """Locks a folder for as long as this process lives; it is never seen unlocked."""
  lock = open(folder / f"{LOCK}.new", "w")  # noqa: SIM115 (closed with the engine)
  fcntl.flock(lock, fcntl.LOCK_EX)
  (folder / f"{LOCK}.new").rename(folder / LOCK)
  return lock


def sweep(folder: pathlib.Path) -> None:
  """Ends the browsers whose processes are gone, and removes their folders."""
  for path in folder.glob(f"{PREFIX}*/{LOCK}"):
    try:
      with open(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        end(str(path.parent))
        shutil.rmtree(path.parent, ignore_errors=True)
    except OSError:  # in use, or swept by another first, or not ours
      continue


def end(folder: str) -> None:
  """Kills the browsers that keep their files in a folder."""
  for process in running(folder):
    with contextlib.suppress(ProcessLookupError):
      os.kill(process, signal.SIGKILL)


def running(folder: str) -> list[int]:
  """Processes that were told to keep their files in a folder: browsers, which end their helpers with them."""
  found = []
  for process in pathlib.Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      if f"{folder}/".encode() in (process / "cmdline").read_bytes():
        found.append(int(process.name))
  return found
