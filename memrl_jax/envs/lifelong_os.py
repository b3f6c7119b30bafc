"""OS tasks of LifelongAgentBench: bring a Linux machine into a state, with bash as root (2505.11942, os_interaction).

Every attempt has a machine of its own (`lifelong_machine`). A script of the task prepares it, and another one judges
what stands at the end, however the attempt ended, as in the release. Commands run one by one in `/`; what they leave
running goes on until the end. The judging script runs in the same machine, so an agent that replaces its programs
can fool it, as in the release.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
import shlex
from typing import NamedTuple

from memrl_jax.envs import base, lifelong_machine, lifelong_os_generated, prompting
from memrl_jax.envs import lifelong_tasks as tasks
from memrl_jax.envs.swe_sandbox import Limits, Result

INTERPRETERS = ("bash", "python", "c", "cpp")


@dataclasses.dataclass(frozen=True)
class Options(tasks.Options):
  """turns: 5 in the benchmark, 15 in MemRL. command_s: what a command may take; 20 s in the benchmark. A last turn
  takes up to twice as long, which the limit of the pool must allow (config.env.timeout_s). memory_mb: of the machine.
  image: a root folder for machines (debootstrap, or an exported container), "" for this system's /usr."""

  turns: int = 5
  command_s: float = 20.0
  memory_mb: int = 1024
  image: str = ""

  def __post_init__(self):
    super().__post_init__()
    if not self.command_s > 0 or self.memory_mb < 64:
      raise ValueError(
        f"nothing runs in {self.command_s:g} s with {self.memory_mb} MB; choose more than 0 s and at least 64 MB "
        "(config.env.command_s, config.env.memory_mb)"
      )
    if self.image and not pathlib.Path(self.image, "bin/bash").exists():
      raise ValueError(
        f"{self.image} is no root folder of a system with bash; make one with debootstrap, or leave it empty for this "
        "system's programs (config.env.image)"
      )
    if any(mark in self.image for mark in ",:"):
      raise ValueError(
        f"an overlay cannot be made over {self.image!r}; choose a path without commas and colons (config.env.image)"
      )


# Tasks.


class Script(NamedTuple):
  """A command item of the schema: what runs it, and its text."""

  interpreter: str
  text: str

  @property
  def command(self) -> str:
    """As a bash command."""
    quoted = shlex.quote(self.text)
    if self.interpreter == "bash":
      return self.text
    if self.interpreter == "python":
      return f"exec python3 -c {quoted}"
    compiler = {"c": "gcc -x c", "cpp": "g++ -x c++"}[self.interpreter]
    return f"printf %s {quoted} | {compiler} -o /tmp/a.out - && exec /tmp/a.out"


class Task(NamedTuple):
  """`prepare` makes the state that the agent finds, `check` exits with 0 where it is right, `truth` is a reference."""

  name: str
  instruction: str
  skills: tuple[str, ...]
  prepare: Script
  check: Script
  truth: Script


def read(name: str, row: tasks.Row) -> Task:
  """One row of the published schema."""
  judged = tasks.nested(row["evaluation_info"])
  return Task(
    name=name,
    instruction=row["instruction"],
    skills=tuple(tasks.nested(row["skill_list"])),
    prepare=_script(row["initialization_command_item"]),
    check=_script(judged["evaluation_command_item"]),
    truth=_script(judged["ground_truth_command_item"]),
  )


def _script(item: tasks.Row) -> Script:
  item = tasks.nested(item)
  if item["command_name"] not in INTERPRETERS:
    raise ValueError(f"command {item['command_name']!r} is none of {', '.join(INTERPRETERS)}")
  return Script(item["command_name"], item["script"])


SOURCE = tasks.Source("lifelong_os", read, lifelong_os_generated.rows)


# Actions.


class Action(NamedTuple):
  """A script for bash, or the end (`script` is None)."""

  script: str | None

  @property
  def text(self) -> str:
    """As a model writes it."""
    return "Act: finish" if self.script is None else f"Act: bash\n```bash\n{self.script}\n```"


def parse(response: str) -> Action | None:
  """The first action of a response, None when there is none; all its blocks of bash are one script.

  What is inside <think> does not count.
  """
  said = response.rpartition("</think>")[2]
  act = re.search(r"Act:\s*((?i:bash|finish))", said)
  if act is None:
    return None
  if act[1].lower() == "finish":
    return Action(None)
  return Action("\n\n".join(re.findall(r"```bash\s*\n(.*?)\n?```", said, re.DOTALL)))


class LifelongOs(base.Seeded):
  """The environment; it holds a machine while an attempt is open."""

  def __init__(self, options: Options):
    super().__init__(options, lambda chosen, seed: tasks.draw(SOURCE, chosen, seed), options.turns)
    self._machine: lifelong_machine.Machine | None = None

  def _begin(self, task: Task) -> base.Observation:
    self.close()
    options = self._options
    limits = Limits(options.command_s, options.memory_mb)
    machine = lifelong_machine.Machine(limits, image=options.image, chars=options.output_chars)
    machine.start()
    self._machine, self._played = machine, []
    prepared = machine.run(task.prepare.command)
    if prepared.code != 0:
      self.close()
      raise RuntimeError(
        f"the machine of {task.name} cannot be prepared ({prepared.output.strip()[-300:]}, exit {prepared.code}); "
        "install what its script needs, or name a root folder that has it (config.env.image)"
      )
    return self._observe(f"Task: {task.instruction}")

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action = parse(response)
    text, note = "", ""
    if action is None:
      note = "no action could be read in this; the attempt is over"
    elif action.script is not None:
      self._played.append(action.script)
      result = self._machine.run(action.script)
      text, note = result.output.rstrip("\n") or "(no output)", _ended(result)
    self._turn += 1
    self._done = self._turn >= self.horizon or action is None or action.script is None
    solved = False
    if self._done:
      solved = self._machine.run(self._task.check.command).code == 0
      self.close()
      text = "\n".join(
        filter(None, [text, f"The attempt is over: {'right' if solved else 'wrong'}."])
      )
    return base.StepResult(
      observation=self._observe(text),
      reward=self._options.reward_scale * solved,
      done=self._done,
      success=solved,
      score=float(solved),
      valid=action is not None,
      action=action.text if action else "",
      note=note,
    )

  def close(self) -> None:
    """Ends the machine and whatever runs in it."""
    if self._machine is not None:
      self._machine.stop()
      self._machine = None

  def _observe(self, text: str) -> base.Observation:
    """Two states are equal when the same commands led there: a machine has no other name for its state."""
    state = json.dumps([self._task.name, self._played, self._done])
    return base.Observation(
      text=text,
      anchor=hashlib.sha256(state.encode()).hexdigest()[:24],
      goal=self._task.instruction,
      task=self._task.name,
    )


def _ended(result: Result) -> str:
  return "stopped" if result.code is None else f"exit {result.code}"


# Prompts.


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  wording = prompting.Wording(
    rules=(
      "You are root on a Linux machine and are given one task. Bring the machine into the state that the task asks "
      f"for; a script that you cannot see then checks it. You have {options.turns} turns. In each of them you either "
      "run commands, written as\nAct: bash\n```bash\nCOMMANDS\n```\nor finish, written as\nAct: finish\n"
      f"Commands start in / with a fresh shell, ask nobody anything, and may take {options.command_s:g} seconds. There "
      "is no network. A turn without one of the two forms ends the trial, as the last turn does. The task and the "
      "machine are the same in every trial."
    ),
    request="Explain in a few words what you do, then give exactly one action in one of the two forms.",
    show=str,
  )
  return prompting.chat(wording) if options.style == "chat" else prompting.full(wording)


# Scripted players.


class Solver(tasks.Player):
  """Runs the reference script and finishes."""

  def choose(self, attempt):
    if attempt.steps:
      return Action(None)
    return Action(tasks.find(SOURCE, self._options, attempt.initial.task).truth.command)


class Random(tasks.Player):
  """Looks around, makes a file, or finishes."""

  def choose(self, attempt):
    scripts = ["ls -la / /home /tmp", "cat /etc/passwd", "touch /tmp/here", None]
    return Action(scripts[int(self._rng.integers(len(scripts)))])


FAMILY = base.Family(
  name="lifelong_os",
  options=Options,
  make=LifelongOs,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=lambda options, seed: json.dumps(tasks.draw(SOURCE, options, seed)),
)
