"""SWE tasks: repair a repository from an issue, with a shell and an editor (SWE-bench's schema and verdict).

Instances come from a file (config.env.data) or are small generated repositories (`swe_repos`), so that tests and
laptop runs need no download. A shell shows times and process ids: two attempts with the same actions are the same
in what they do, not in every byte they print.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base, prompting, swe_executor, swe_tasks, swe_verdict
from memrl_jax.envs.swe_tasks import Options, draw

INVALID = "no such action"
LISTED = 60  # files named in the first observation


# Actions.


class Action(NamedTuple):
  """`tool` is bash, view, create, replace, insert or submit; `where` its line, `body` what follows."""

  tool: str
  where: str = ""
  body: str = ""

  @property
  def text(self) -> str:
    """As it is written between action tags."""
    head = f"{self.tool} {self.where}".rstrip()
    return f"{head}\n{self.body}" if self.body else head


_REPLACE = re.compile(r"<old>\n?(.*?)\n?</old>\s*<new>\n?(.*)</new>\s*", re.DOTALL)
_LINES = re.compile(r"(\S.*?)\s+(\d+)(?:\s+(\d+))?")


def parse(response: str) -> Action | None:
  """The action between the last action tags, None when there is none.

  The first word is the tool. `bash` takes the rest as its command; `view PATH [FIRST LAST]`, `create PATH`,
  `replace PATH` and `insert PATH LINE` take the rest of their line, and the lines after it as text. What is inside
  <think> does not count.
  """
  said = response.rpartition("</think>")[2]
  end = said.rfind("</action>")
  start = said.rfind("<action>", 0, max(end, 0))
  if not 0 <= start < end:
    return None
  words = said[start + len("<action>") : end].strip("\n").lstrip()
  tool = re.match(r"\w*", words)[0].lower()
  rest = words[len(tool) :]
  if tool == "bash" and rest.strip():
    return Action(tool, "", rest.strip())
  if tool == "submit" and not rest.strip():
    return Action(tool)
  line, _, body = rest.partition("\n")
  where = line.strip()
  well_formed = {
    "view": where and not body.strip(),
    "create": where,
    "replace": where and _REPLACE.fullmatch(body),
    "insert": _LINES.fullmatch(where) and body,
  }
  return Action(tool, where, body) if well_formed.get(tool) else None


# The environment.


class Swe(base.Seeded):
  """The environment. The attempt ends when a patch is submitted, or judged as it stands at the last turn."""

  def __init__(self, options: Options):
    super().__init__(options, draw, options.turns)
    self._executor: swe_executor.Executor | None = None

  def _begin(self, task: swe_tasks.Instance) -> base.Observation:
    self.close()
    executor = swe_tasks.executor(self._options, task)
    executor.start()
    self._executor, self._patch, self._last = executor, "", ""
    self._verdict: swe_verdict.Verdict | None = None
    code, listing = executor.run("git ls-files", chars=swe_executor.FILE_CHARS)
    names = listing.splitlines() if code == 0 else []
    more = [f"... and {len(names) - LISTED} more"] if len(names) > LISTED else []
    text = "\n".join(["Issue:", task.problem_statement, "", "Files:", *names[:LISTED], *more])
    return self._observe(text, task)

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action = parse(response)
    text, note = self._act(action) if action else ("", INVALID)
    self._last = action.text if action else self._last
    self._turn += 1
    self._done = self._turn >= self.horizon or (action is not None and action.tool == "submit")
    if self._done:
      self._verdict = self._judge()
      text = "\n".join(filter(None, [text, f"The attempt is over: {self._verdict.note}."]))
      self.close()
    solved = self._verdict is not None and self._verdict.resolved
    return base.StepResult(
      observation=self._observe(text, self._task),
      reward=self._options.reward_scale * solved,
      done=self._done,
      success=solved,
      score=self._verdict.score if self._verdict else 0.0,
      valid=action is not None,
      action=action.text if action else "",
      note=note,
    )

  def close(self) -> None:
    """Removes the repository and whatever ran in it."""
    if self._executor is not None:
      self._executor.stop()
      self._executor = None

  def _act(self, action: Action) -> tuple[str, str]:
    """Plays an action: what is shown, and what came of it."""
    if action.tool == "submit":
      return "", "submitted"
    if action.tool == "bash":
      code, output = self._executor.run(action.body, chars=self._options.output_chars)
      text = output.rstrip("\n") or "(no output)"
      note = f"exit {code}" if code is not None else f"killed: over {self._options.command_s:g} s"
    else:
      try:
        text, note = _edit(self._executor, action, self._options.output_chars), "done"
      except OSError as error:
        text, note = str(error), "failed"
    if action.tool != "view":
      self._patch = self._diff()
    return text, note

  def _diff(self) -> str:
    try:
      return self._executor.diff()
    except OSError as error:  # somebody removed .git, or made a patch too long to read
      return f"(there is no patch: {error})"

  def _judge(self) -> swe_verdict.Verdict:
    fresh = swe_tasks.executor(self._options, self._task)
    try:
      fresh.start()
      return swe_verdict.judge(fresh, self._task, self._patch)
    finally:
      fresh.stop()

  def _observe(self, text: str, task: swe_tasks.Instance) -> base.Observation:
    state = json.dumps([task.instance_id, self._patch, self._last, self._done])
    return base.Observation(
      text=text,
      anchor=hashlib.sha256(state.encode()).hexdigest()[:24],
      goal=task.problem_statement,
      task=task.instance_id,
    )


def _edit(executor: swe_executor.Executor, action: Action, chars: int) -> str:
  """Plays view, create, replace or insert; OSError with the reason when it cannot be done."""
  found = _LINES.fullmatch(action.where)
  if action.tool == "view":
    ranged = found and found[3]
    lines = executor.read(found[1] if ranged else action.where).splitlines()
    first, last = (int(found[2]), int(found[3])) if ranged else (1, len(lines))
    shown = [f"{n:6}\t{line}" for n, line in enumerate(lines, 1) if first <= n <= last]
    text = "\n".join(shown) or "(nothing there)"
    cut = f"\n[cut after {chars} characters; view {action.where} FIRST LAST shows a part]"
    return text if len(text) <= chars else text[:chars] + cut
  if action.tool == "create":
    text = action.body if action.body.endswith("\n") else f"{action.body}\n"
    executor.write(action.where, text)
    return f"{action.where} was written, {len(text.splitlines())} lines."
  if action.tool == "insert":
    path, line = found[1], int(found[2])
    lines = executor.read(path).splitlines(keepends=True)
    if found[3] or line > len(lines):
      raise OSError(f"{path} has {len(lines)} lines; say insert PATH LINE with a line up to that")
    if line and not lines[line - 1].endswith("\n"):
      lines[line - 1] += "\n"
    body = action.body if action.body.endswith("\n") else f"{action.body}\n"
    executor.write(path, "".join([*lines[:line], body, *lines[line:]]))
    return f"Inserted after line {line} of {path}."
  old, new = _REPLACE.fullmatch(action.body).groups()
  new = new.removesuffix("\n")
  text = executor.read(action.where)
  if not old or text.count(old) != 1:
    raise OSError(
      f"the old text stands {text.count(old) if old else 0} times in {action.where}; it must stand there exactly once"
    )
  executor.write(action.where, text.replace(old, new))
  return f"{action.where} was changed."


# Prompts.


def _wording(options: Options) -> prompting.Wording:
  return prompting.Wording(
    rules=(
      "You repair a program. Its repository lies in the current folder, /testbed, and an issue says what is "
      "wrong. Change the code so that the issue is gone and everything else still works. Tests that you cannot "
      "see will judge your change, together with the existing ones; changes to test files are undone before "
      f"that. You have {options.turns} turns, and each is one of these actions inside tags:\n"
      "<action>bash COMMAND</action> runs a command, which may have several lines, without network and for at most "
      f"{options.command_s:g} seconds; nothing keeps running after it.\n"
      "<action>view PATH</action> shows a file with line numbers, or a folder; <action>view PATH FIRST LAST</action> "
      "shows some lines.\n"
      "<action>create PATH\nTEXT</action> writes a whole file.\n"
      "<action>replace PATH\n<old>\nTEXT\n</old>\n<new>\nTEXT\n</new></action> replaces a text that stands in the "
      "file exactly once, indentation included.\n"
      "<action>insert PATH LINE\nTEXT</action> inserts after a line; line 0 is the beginning.\n"
      "<action>submit</action> hands in your change and ends the trial; at the last turn it is handed in as it is. "
      "The issue and the repository are the same in every trial."
    ),
    request=(
      "First think, inside <think> </think>, about what you know and what you need. Then give exactly one action "
      "inside <action> </action>."
    ),
    show=str,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  style = prompting.full if options.style == "full" else prompting.chat
  return style(_wording(options))


# Scripted players.


class _Player:
  """What both players share: the shape of their answers, and reflections."""

  def __init__(self, options: Options, rng: np.random.Generator):
    self._options, self._rng = options, rng

  def play(self, view: base.View) -> str:
    return f"<action>{self.choose(view.current).text}</action>"

  def reflect(self, view: base.View) -> str:
    tools = [step.action.split()[0] if step.action else "nothing" for step in view.current.steps]
    score = view.current.steps[-1].result.score if tools else 0.0
    return f"<remark>{', then '.join(tools[-4:])} gave a score of {score:.2f}</remark>"

  def choose(self, attempt: base.AttemptLog) -> Action:
    """The next action."""
    raise TypeError(f"{type(self).__name__} is no player: it lacks this method")


class Solver(_Player):
  """Applies the reference patch and submits."""

  def choose(self, attempt):
    if attempt.steps:
      return Action("submit")
    patch = swe_tasks.find(self._options, attempt.initial.task).patch
    return Action("bash", body=f"printf %s {shlex.quote(patch)} | git apply -")


class Random(_Player):
  """Looks at files of the listing, tries commands, and sometimes deletes a line before it submits."""

  def choose(self, attempt):
    names = attempt.initial.text.rpartition("Files:\n")[2].splitlines()
    name = names[int(self._rng.integers(len(names)))] if names else "."
    line = int(self._rng.integers(1, 40))
    actions = [
      Action("view", name),
      Action("bash", body="git status --short"),
      Action("bash", body=f"sed -i {line}d {shlex.quote(name)}"),
      Action("submit"),
    ]
    return actions[int(self._rng.integers(len(actions)))]


def _describe(options: Options, seed: int) -> str:
  return json.dumps(draw(options, seed)._asdict(), sort_keys=True)


FAMILY = base.Family(
  name="swe",
  options=Options,
  make=Swe,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=_describe,
)
