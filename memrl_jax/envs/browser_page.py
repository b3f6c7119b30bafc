"""Tasks of BrowserGym (2412.05467) in the browser of this process, one page after the other.

BrowserGym is used as it comes, but for three of its parts: our browser in place of one a task, a list in place of
its chat window, which is a second browser, and no picture where nobody asks for one. With its waits
left out, a step takes a third of the time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import io
import os
import pathlib
import socket
import urllib.parse
from collections.abc import Callable
from typing import Any, NamedTuple

from memrl_jax.envs import browser_engine, browser_text

MISSING = "BrowserGym is not installed: run pip install 'memrl_jax[browser]' and pip install --no-deps miniwob"
DOOR_S = 5.0  # for a server to take a connection
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


def door(benchmark: str) -> None:
  """Looks for all that a benchmark needs, and imports none of it.

  Raises:
    ValueError: a variable is not set, a server does not answer, or a package is missing.
  """
  known = _known(benchmark)
  for name in known.variables:
    _answers(name, os.environ[name])
  if not _installed("browsergym.core"):
    raise ValueError(MISSING)
  if not _installed(known.module):
    raise ValueError(f"{benchmark} is not installed: run pip install {known.package}")
  if benchmark == "miniwob":
    try:
      _miniwob()
    except ImportError as error:
      raise ValueError(str(error)) from None


def _installed(module: str) -> bool:
  try:
    return importlib.util.find_spec(module) is not None
  except ImportError:  # of the package around it
    return False


def _answers(name: str, value: str) -> None:
  """Whether somebody listens at the address that a variable names; other values are not looked at."""
  address = urllib.parse.urlsplit(value)
  if not address.hostname:  # a user, a password, or WebArena's PASS for a page that nobody serves
    return
  port = address.port or {"http": 80, "https": 443}.get(address.scheme, 80)
  try:
    socket.create_connection((address.hostname, port), timeout=DOOR_S).close()
  except OSError as error:
    raise ValueError(
      f"nobody answers at {address.hostname}:{port} ({error}), where the environment variable {name} has a "
      "server; start it, or correct the variable"
    ) from None


def _known(benchmark: str) -> Benchmark:
  """What a benchmark needs; ValueError where a variable that names its servers is not set."""
  known = BENCHMARKS.get(benchmark, Benchmark(f"browsergym.{benchmark}", f"browsergym-{benchmark}"))
  unset = [name for name in known.variables if not os.environ.get(name)]
  if unset:
    raise ValueError(
      f"{benchmark} needs {known.servers}, and nothing says where they are: set the environment "
      f"variable{'s' if len(unset) > 1 else ''} {', '.join(unset)}"
    )
  return known


def need(benchmark: str) -> dict[str, Any]:
  """Imports a benchmark, and gives the arguments that its tasks are made with.

  Raises:
    ValueError: an environment variable that names its servers is not set.
    ImportError: a package is missing.
  """
  known = _known(benchmark)
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


# BrowserGym, with our browser.


class _Launcher:
  """What BrowserGym takes for Playwright: it launches the shared browser, and cannot close it."""

  def __init__(self, program: str):
    self._program = program
    self.chromium = self
    self.selectors = browser_engine.engine().selectors

  def launch(self, **_: Any) -> _Launcher:
    return self

  def new_context(self, **settings: Any) -> Any:
    return browser_engine.engine().browser(self._program).new_context(**settings)

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
    self._program, self._groups = browser_engine.executable(program), groups
    self._mark, self._settle_s = mark, settle_s
    self._env: Any = None

  def open(self, task: str, seed: int) -> Seen:
    """The first page of a task, in a new context; "miniwob.click-test", without "browsergym/".

    Raises:
      RuntimeError: its servers do not answer.
    """
    self.close()
    benchmark = task.partition(".")[0]
    arguments = need(benchmark)
    import gymnasium
    import playwright.sync_api

    if f"browsergym/{task}" not in gymnasium.registry:
      raise ValueError(f"BrowserGym has no task {task!r} (config.env.tasks)")
    try:
      return self._open(gymnasium, task, seed, arguments)
    except playwright.sync_api.Error as error:
      self.close()
      if browser_engine.engine().alive(self._program):
        known = BENCHMARKS.get(benchmark)
        at = ", ".join(known.variables) if known else ""
        raise RuntimeError(
          f"{task} could not be opened: {browser_text.failure(str(error))}"
          + (f"; check that the servers answer that {at} name" if at else "")
        ) from error
    return self._open(gymnasium, task, seed, arguments)  # it had died while nobody used it

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
