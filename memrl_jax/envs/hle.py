"""Humanity's Last Exam (2501.14249): one question, one answer, right or wrong.

Questions come from a file that its user has (config.env.data) or are the toy ones of this package.
"""

from __future__ import annotations

import hashlib
import json

from memrl_jax.envs import base, hle_tasks, hle_verdict, prompting
from memrl_jax.envs.hle_tasks import Options, draw


class Exam(base.Seeded):
  """The environment. What it shows at the end says whether the answer was right, and never which one is."""

  def __init__(self, options: Options):
    super().__init__(options, draw, horizon=1)

  def _begin(self, task: hle_tasks.Question) -> base.Observation:
    return self._observe(task.question, "", (task.image,) if task.image else ())

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    answer = hle_verdict.final(response)
    right = hle_tasks.correct(self._task, answer, self._options.judge)
    self._done = True
    note = "correct" if right else ("wrong" if answer else "no answer")
    return base.StepResult(
      observation=self._observe(f"The attempt is over: {note}.", answer),
      reward=self._options.reward_scale * right,
      done=True,
      success=right,
      score=float(right),
      valid=bool(answer),
      action=answer,
      note=note,
    )

  def _observe(self, text: str, answer: str, images: tuple[str, ...] = ()) -> base.Observation:
    state = json.dumps([self._task.id, answer, self._done])
    return base.Observation(
      text=text,
      anchor=hashlib.sha256(state.encode()).hexdigest()[:24],
      goal=self._task.question,
      task=self._task.id,
      images=images,
    )


_WORDING = prompting.Wording(
  rules=(
    "You sit an exam of hard questions and are given one of them. Where choices with letters are listed, the answer is "
    "one letter; otherwise it is a word, a number or an expression that stands for itself, as short as the question "
    "allows. A trial is one answer, which is right or wrong, and the question is the same in every trial."
  ),
  request=(
    "First work the question out, inside <think> </think>. Then give the final answer alone inside "
    "<action> </action>."
  ),
  show=str,
)


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  style = prompting.full if options.style == "full" else prompting.chat
  return style(_WORDING)


# Scripted players.


class Solver(prompting.Chooser):
  """Knows the answer."""

  def choose(self, view):
    return hle_tasks.find(self._options, view.current.initial.task).answer


class Random(prompting.Chooser):
  """Chooses a letter, or says a word of the question."""

  def choose(self, view):
    asked = hle_tasks.find(self._options, view.current.initial.task)
    if asked.answer_type == "multipleChoice":
      letters = [name for name, _ in hle_verdict.choices(asked.question)] or ["A", "B", "C", "D"]
      return letters[int(self._rng.integers(len(letters)))]
    words = asked.question.split()
    return words[int(self._rng.integers(len(words)))]


def _describe(options: Options, seed: int) -> str:
  return json.dumps(draw(options, seed)._asdict(), sort_keys=True)


FAMILY = base.Family(
  name="hle",
  options=Options,
  make=Exam,
  prompts=prompts,
  players={"random": Random, "solver": Solver},
  describe=_describe,
  image=hle_tasks.image,
)
