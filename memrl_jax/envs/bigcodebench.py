"""BigCodeBench: one program for one request, judged by unit tests that nobody sees (2406.15877).

An attempt is one answer. Tasks come from a published file (config.env.data) or are the small ones of this package.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from memrl_jax.envs import base, bigcodebench_tasks, bigcodebench_verdict, prompting, swe_sandbox
from memrl_jax.envs.bigcodebench_tasks import Options, draw

NO_CODE = "no code"


class BigCodeBench(base.Seeded):
  """The environment. The whole response is read; its code is run with the tests in a sandbox."""

  def __init__(self, options: Options):
    super().__init__(options, draw, horizon=1)

  def _begin(self, task: bigcodebench_tasks.Task) -> base.Observation:
    return self._observe(self._shown(task), "")

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    answer = bigcodebench_tasks.code(response, self._task.entry_point)
    verdict = self._judge(answer)
    self._done = True
    errors = verdict.failures if self._options.show_errors else ()
    text = "\n".join([f"The attempt is over: {verdict.note}.", *errors])
    return base.StepResult(
      observation=self._observe(text, answer),
      reward=self._options.reward_scale * verdict.success,
      done=True,
      success=verdict.success,
      score=verdict.passed / max(verdict.total, 1),
      valid=bool(answer),
      action=answer,
      note="passed" if verdict.success else verdict.note,
    )

  def _judge(self, answer: str) -> bigcodebench_verdict.Verdict:
    if not answer:
      return bigcodebench_verdict.Verdict(0, 0, NO_CODE)
    options = self._options
    return bigcodebench_verdict.judge(
      bigcodebench_tasks.program(self._task, answer, options),
      self._task.test,
      swe_sandbox.Limits(options.check_s, options.memory_mb),
      options.python,
    )

  def _shown(self, task: bigcodebench_tasks.Task) -> str:
    return task.instruct_prompt if self._options.mode == "instruct" else task.complete_prompt

  def _observe(self, text: str, answer: str) -> base.Observation:
    state = json.dumps([self._task.task_id, self._options.mode, answer, self._done])
    return base.Observation(
      text=text,
      anchor=hashlib.sha256(state.encode()).hexdigest()[:24],
      goal=self._shown(self._task),
      task=self._task.task_id,
    )


# Prompts.


def _wording(options: Options) -> prompting.Wording:
  asked = {
    "instruct": "You are asked for a Python function in words, and told how its file begins.",
    "complete": "You are shown how a Python file begins: its imports, and the head of a function with what it does.",
  }
  return prompting.Wording(
    rules=(
      f"You write a program. {asked[options.mode]} Write the whole file, imports and head included, so that it runs "
      "by itself. Unit tests that you cannot see call the function; the trial is won if all of them pass. They run "
      f"without network and for at most {options.check_s:g} seconds. A trial is one answer, and the request is the "
      "same in every trial."
    ),
    request=(
      "You may think first, inside <think> </think>. Then give the file in one code block, which begins with "
      "```python and ends with ```."
    ),
    show=str,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  style = prompting.full if options.style == "full" else prompting.chat
  return style(_wording(options))


# Scripted players.


class _Programmer:
  """What the players share: the shape of their answers, and reflections."""

  def __init__(self, options: Options, rng: np.random.Generator):
    self._options, self._rng = options, rng

  def play(self, view: base.View) -> str:
    task = bigcodebench_tasks.find(self._options, view.current.initial.task)
    return f"```python\n{task.code_prompt}{self.body(task)}\n```"

  def reflect(self, view: base.View) -> str:
    steps = view.current.steps
    return f"<remark>{steps[-1].result.note if steps else 'nothing was tried'}</remark>"

  def body(self, task: bigcodebench_tasks.Task) -> str:
    """The rest of the function."""
    raise TypeError(f"{type(self).__name__} is no player: it lacks body(task)")


class Solver(_Programmer):
  """Knows the canonical solution."""

  def body(self, task):
    return task.canonical_solution


class Random(_Programmer):
  """Returns something, or leaves lines of the canonical solution away."""

  def body(self, task):
    lines = task.canonical_solution.rstrip().split("\n")
    kept = lines[: int(self._rng.integers(len(lines)))]
    values = ("None", "0", "[]", "''", "{}")
    return "\n".join([*kept, f"    return {values[int(self._rng.integers(len(values)))]}"])


def _describe(options: Options, seed: int) -> str:
  return json.dumps(draw(options, seed)._asdict(), sort_keys=True)


FAMILY = base.Family(
  name="bigcodebench",
  options=Options,
  make=BigCodeBench,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=_describe,
)
