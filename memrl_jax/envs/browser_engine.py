"""One browser for one process, driven by BrowserGym (2412.05467) over Playwright.

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
import functools
import importlib
import importlib.util
import io
import multiprocessing.util
import os
import pathlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from memrl_jax.envs import browser_text

PREFIX, LOCK = "memrl_browser_", "memrl_jax.lock"
ROOM = 39  # of a temporary folder's name: with the rest it makes 107, the longest name of a socket
# The shell has no window around its pages, and needs half the memory and a third of the time.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
FLAGS = (
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
)
MISSING = "BrowserGym is not installed: run pip install 'memrl_jax[browser]' and pip install --no-deps miniwob"
_IGNORED_ROLES = ("LineBreak", "InlineTextBox")
_IGNORED = (
  *("editable", "readonly", "level", "settable", "multiline", "invalid", "focusable"),
  *("url", "controls"),  # addresses of links are long, and those of files differ between machines
)
_HINTS = ("class", "id", "fill")  # what tells things without a name apart


class Benchmark(NamedTuple):
  """What the tasks of a benchmark need: a module that registers them, from a package, and servers."""

  module: str
  package: str
  variables: tuple[str, ...] = ()
  servers: str = ""


BENCHMARKS = {
  "miniwob": Benchmark("browsergym.miniwob", "browsergym-miniwob"),
  "webarena": Benchmark(
    "browsergym.webarena",
    "browsergym-webarena",
    (
      *("WA_SHOPPING", "WA_SHOPPING_ADMIN", "WA_REDDIT", "WA_GITLAB", "WA_WIKIPEDIA", "WA_MAP"),
      "WA_HOMEPAGE",
    ),
    "WebArena's sites",
  ),
  "workarena": Benchmark(
    "browsergym.workarena",
    "browsergym-workarena",
    ("SNOW_INSTANCE_URL", "SNOW_INSTANCE_UNAME", "SNOW_INSTANCE_PWD"),
    "a ServiceNow instance",
  ),
}


def need(benchmark: str) -> dict[str, Any]:
  """Imports a benchmark, and gives the arguments that its tasks are made with.

  Raises:
    ValueError: an environment variable that names its servers is not set.
    ImportError: a package is missing.
  """
  known = BENCHMARKS.get(benchmark, Benchmark(f"browsergym.{benchmark}", f"browsergym-{benchmark}"))
  unset = [name for name in known.variables if not os.environ.get(name)]
  if unset:
    raise ValueError(
      f"{benchmark} needs {known.servers}, and nothing says where they are: set the environment "
      f"variable{'s' if len(unset) > 1 else ''} {', '.join(unset)}"
    )
  try:
    importlib.import_module("browsergym.core")
  except ImportError as error:
    raise ImportError(MISSING) from error
  try:
    importlib.import_module(known.module)
  except ImportError as error:
    raise ImportError(
      f"{benchmark} is not installed ({error}): run pip install {known.package}"
    ) from error
  return {"base_url": _miniwob()} if benchmark == "miniwob" else {}


def _miniwob() -> str:
  """Where MiniWoB's pages are: the variable MINIWOB_URL, or the files of its package, which is not imported."""
  if url := os.environ.get("MINIWOB_URL"):
    return url.rstrip("/") + "/"
  spec = importlib.util.find_spec("miniwob")
  for folder in spec.submodule_search_locations or [] if spec else []:
    pages = pathlib.Path(folder) / "html" / "miniwob"
    if pages.is_dir():
      return pages.as_uri() + "/"
  raise ImportError(
    "MiniWoB's pages are not installed: run pip install --no-deps miniwob (its own dependencies are not "
    "needed), or set MINIWOB_URL to where they are"
  )


def executable(named: str) -> str:
  """The browser's program: the one named, or the first of NAMES on the PATH.

  Raises:
    ValueError: there is none.
  """
  for name in [named] if named else NAMES:
    if found := shutil.which(name):
      return found
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
    """The running browser of a program."""
    if not self.alive(program):
      self._browsers[program] = self._playwright.chromium.launch(
        executable_path=program,
        args=[*FLAGS, "--disable-features=OverlayScrollbars,ExtendedOverlayScrollbars"],
        ignore_default_args=["--hide-scrollbars"],
      )
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


# BrowserGym, with our browser.


class _Launcher:
  """What BrowserGym takes for Playwright: it launches the shared browser, and cannot close it."""

  def __init__(self, program: str):
    self._program = program
    self.chromium = self
    self.selectors = engine().selectors

  def launch(self, **_: Any) -> _Launcher:
    return self

  def new_context(self, **settings: Any) -> Any:
    return engine().browser(self._program).new_context(**settings)

  def close(self) -> None:
    """The browser is that of the process."""


class _Chat:
  """BrowserGym's chat without its second browser: a list of messages."""

  def __init__(self, **_: Any):
    self.messages: list[dict[str, Any]] = []

  def add_message(self, role: str, msg: str) -> None:
    if role != "info":
      self.messages.append({"role": role, "timestamp": 0.0, "message": msg})

  def wait_for_user_message(self) -> None:
    raise RuntimeError("nobody is there to answer")

  def close(self) -> None:
    """It is a list."""


@functools.cache
def _reader(groups: tuple[str, ...]) -> Callable[[str], str]:
  """BrowserGym's reader of calls in these groups: the second to refuse others."""
  from browsergym.core.action.highlevel import HighLevelActionSet

  return HighLevelActionSet(subsets=list(groups), multiaction=False, strict=True).to_python_code


class Seen(NamedTuple):
  """A page as it was found. `error` is what the browser said of the last call, "" if it was carried out."""

  goal: str
  url: str
  tabs: tuple[str, ...]
  tab: int
  tree: str
  error: str


class Page:
  """One task at a time in a context of its own."""

  def __init__(self, *, program: str, groups: tuple[str, ...], mark: str, settle_s: float):
    self._program, self._groups = executable(program), groups
    self._mark, self._settle_s = mark, settle_s
    self._env: Any = None

  def open(self, task: str, seed: int) -> Seen:
    """The first page of a task, in a new context; "miniwob.click-test", without "browsergym/".

    Raises:
      RuntimeError: its servers do not answer.
    """
    self.close()
    arguments = need(task.partition(".")[0])
    import gymnasium
    import playwright.sync_api

    if f"browsergym/{task}" not in gymnasium.registry:
      raise ValueError(f"BrowserGym has no task {task!r} (config.env.tasks)")
    for again in (True, False):
      try:
        return self._open(gymnasium, task, seed, arguments)
      except playwright.sync_api.Error as error:
        self.close()
        if again and not engine().alive(self._program):  # it died while nobody used it
          continue
        servers = BENCHMARKS.get(task.partition(".")[0], Benchmark("", "")).variables
        at = f"; check that the servers of {', '.join(servers)} answer" if servers else ""
        raise RuntimeError(
          f"{task} could not be opened: {browser_text.failure(str(error))}{at}"
        ) from error
    raise AssertionError("unreachable")

  def _open(self, gymnasium: Any, task: str, seed: int, arguments: dict[str, Any]) -> Seen:
    import browsergym.core.env as env

    env.Chat = _Chat
    env._get_global_playwright = lambda: _Launcher(self._program)
    env.extract_screenshot = lambda page: None  # `screenshot` takes one where somebody asks
    self._env = gymnasium.make(
      f"browsergym/{task}",
      disable_env_checker=True,
      tags_to_mark=self._mark,
      pre_observation_delay=self._settle_s,
      action_mapping=_reader(self._groups),
      task_kwargs=arguments,
    ).unwrapped
    found, _ = self._env.reset(seed=seed)
    return self._seen(found)

  def step(self, call: str) -> tuple[Seen, float, bool]:
    """(the page after a call, the task's reward 0-1, whether the task has ended).

    A call that cannot be carried out is told in `Seen.error`; a page or browser that is gone raises.
    """
    found, reward, ended, cut, _ = self._env.step(call)
    return self._seen(found), float(reward), ended or cut

  def screenshot(self) -> bytes:
    """The page as it looks, as a PNG file."""
    import PIL.Image
    from browsergym.core.observation import extract_screenshot

    file = io.BytesIO()
    PIL.Image.fromarray(extract_screenshot(self._env.page)).save(file, "PNG")
    return file.getvalue()

  def _seen(self, found: dict[str, Any]) -> Seen:
    from browsergym.utils.obs import flatten_axtree_to_str

    properties = found["extra_element_properties"]
    tree = found["axtree_object"]
    _name(tree["nodes"], properties, found["dom_object"])
    return Seen(
      goal=found["goal"],
      url=browser_text.address(found["url"]),
      tabs=tuple(found["open_pages_titles"]),
      tab=int(found["active_page_index"][0]),
      tree=flatten_axtree_to_str(
        tree,
        extra_properties=properties,
        with_visible=True,
        with_clickable=True,
        with_center_coords="coord" in self._groups,
        ignored_roles=_IGNORED_ROLES,
        ignored_properties=_IGNORED,
      ),
      error=browser_text.failure(found["last_action_error"]),
    )

  def close(self) -> None:
    """Closes the context; a browser that is gone has closed it already."""
    env, self._env = self._env, None
    if env is not None:
      import playwright.sync_api

      with contextlib.suppress(playwright.sync_api.Error):
        env.close()


def _name(nodes: list[dict[str, Any]], properties: dict[str, Any], dom: dict[str, Any]) -> None:
  """Shows what the tree would leave out: plain elements that react to clicks get the role "clickable", and
  elements without a name their HTML attributes in _HINTS (an icon is often nothing but its class)."""
  strings, hints = dom["strings"], {}
  for document in dom["documents"]:
    for places in document["nodes"]["attributes"]:
      pairs = {strings[k]: strings[v] for k, v in zip(places[::2], places[1::2], strict=True)}
      if "bid" in pairs:
        hints[pairs["bid"]] = {name: pairs[name] for name in _HINTS if pairs.get(name)}
  for node in nodes:
    bid = node.get("browsergym_id")
    if not bid or not properties.get(bid, {}).get("clickable"):
      continue
    if node["role"]["value"] == "generic":
      node["role"]["value"] = "clickable"
    if not node.get("name", {}).get("value"):
      shown = [{"name": k, "value": {"value": v}} for k, v in hints.get(bid, {}).items()]
      node["properties"] = [*node.get("properties", []), *shown]
