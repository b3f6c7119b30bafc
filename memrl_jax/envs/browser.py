"""Tasks on web pages in a real browser, as text: any of BrowserGym's (2412.05467), by its id.

`browser_tasks` says what can be played, `browser_page` plays it in the browser of `browser_engine`, `browser_text`
writes a page, `browser_calls` reads an answer. `miniwob`, `webarena` and `workarena` are this with names, splits and
defaults of their own. An answer that is no call of an allowed action is told so and never reaches the page.
Success is the task's own verdict at its end. A browser that is gone fails its trials, which are void; the next
one opens another.
"""

from __future__ import annotations

import base64

from memrl_jax.envs import (
  base,
  browser_calls,
  browser_engine,
  browser_page,
  browser_players,
  browser_tasks,
  browser_text,
  prompting,
)
from memrl_jax.envs.browser_tasks import Options, Task

FAILED = "failed"


class Browser(base.Seeded):
  """The environment; it holds one page, opened at the first reset."""

  def __init__(self, options: Options):
    super().__init__(options, browser_tasks.draw, options.turns)
    self._actions = browser_calls.allowed(options.actions)
    self._page = browser_page.Page(
      program=options.executable,
      groups=options.actions,
      mark=options.mark,
      settle_s=options.settle_s,
    )

  def _begin(self, task: Task) -> base.Observation:
    self._seen = self._page.open(task.id, task.seed)
    self._images = self._look()
    self._asked = {"goal": self._seen.goal, "task": str(task)}
    return self._observe(f"Goal: {self._seen.goal}\n")

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    call, note = browser_calls.parse(response, self._options.style, self._actions)
    paid, ended = 0.0, False
    if call:
      self._seen, paid, ended = self._page.step(call)
      self._images = self._look()
      note = FAILED if self._seen.error else ""
    self._turn += 1
    self._done = ended or self._turn >= self._options.turns
    score = min(max(paid, 0.0), 1.0) if self._done else 0.0
    return base.StepResult(
      observation=self._observe(),
      reward=self._options.reward_scale * score,
      done=self._done,
      success=ended and score >= 1,
      score=score,
      valid=bool(call),
      action=call,
      note=note,
    )

  def _observe(self, opening: str = "") -> base.Observation:
    seen = self._seen
    lines = [f"Page: {seen.url}"]
    if len(seen.tabs) > 1:
      titles = (f"{number} {title!r}" for number, title in enumerate(seen.tabs))
      lines.append(f"Tabs: {', '.join(titles)}; this is {seen.tab}")
    if seen.error:
      lines.append(f"The last action failed: {seen.error}")
    lines.append(browser_text.page(seen.tree, self._options.page_chars))
    return base.Observation(
      opening + "\n".join(lines),
      browser_text.anchor(seen.url, seen.tabs, seen.tree),
      images=self._images,
      **self._asked,
    )

  def _look(self) -> tuple[str, ...]:
    """A picture of the page, where the options ask for it."""
    if not self._options.images:
      return ()
    picture = base64.b64encode(self._page.screenshot()).decode()
    return (f"data:image/png;base64,{picture}",)

  def close(self) -> None:
    self._done = True
    self._page.close()


# Prompts.


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  rules = "\n".join(
    [
      "You are given a task on a web page. The page is shown as its accessibility tree: one element a line, "
      "with what it is, its text in quotes, what it holds, and its state. Elements that you can act on begin "
      f"with their id in brackets. You have {options.turns} turns, one action in each:",
      browser_calls.manual(browser_calls.allowed(options.actions)),
      "An id is written in quotes. Strings, numbers, True and False are the only values.",
    ]
  )
  request = (
    "Think about what the task still needs and which element it takes, then give your next action inside "
    "tags, for example <action>click('12')</action>."
  )
  wording = prompting.Wording(rules, request, str)
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


def _door(options: Options) -> None:
  browser_engine.executable(options.executable)
  for benchmark in browser_tasks.benchmarks(options):
    browser_page.door(benchmark)


def family(name: str, options: type[Options]) -> base.Family:
  """A family of the tasks that these options draw from."""
  return base.Family(
    name=name,
    options=options,
    make=Browser,
    prompts=prompts,
    players={"random": browser_players.Random, "reader": browser_players.Reader},
    describe=browser_tasks.describe,
    parts=browser_tasks.parts,
    door=_door,
  )


FAMILY = family("browser", Options)
