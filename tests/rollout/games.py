"""A small game for tests: count to the target; and environments that break in every way."""

import dataclasses
import time

from memrl_jax.envs import base, extracting
from memrl_jax.types import Message


@dataclasses.dataclass(frozen=True)
class Options:
  target: int = 2
  turns: int = 3
  fault: str = ""
  faulty_seed: int = -1


class Game:
  """Say the hidden number (seed % 3) to win; `fault` happens in the second turn of `faulty_seed`."""

  def __init__(self, options: Options):
    self.options, self.horizon = options, options.turns

  def reset(self, seed):
    self.seed = seed
    return self.retry()

  def retry(self):
    self.turn = 0
    return base.Observation("start", "start")

  def step(self, response):
    self.turn += 1
    if self.seed == self.options.faulty_seed and self.turn == 2:
      if self.options.fault == "raise":
        raise ZeroDivisionError("broken")
      if self.options.fault == "hang":
        time.sleep(2.0)
      if self.options.fault == "nonsense":
        return "not a result"
      if self.options.fault == "nan":
        return self._result(float("nan"), False, response)
    won = response.strip() == str(self.seed % 3)
    return self._result(1.0 if won else 0.0, won, response)

  def _result(self, reward, won, response):
    done = won or self.turn >= self.horizon
    observation = base.Observation(f"turn {self.turn}", f"turn {self.turn}")
    return base.StepResult(observation, reward, done, won, float(won), response.isdigit(), response)

  def close(self):
    pass


def _play(view):
  past = "".join(f"[{log.reflection}]" for log in view.past)
  said = " ".join(step.action for step in view.current.steps)
  return [Message("user", f"{past}{view.instruction} trial {len(view.past) + 1} said {said}")]


def _reflect(view):
  return [Message("user", "reflect on " + " ".join(step.action for step in view.current.steps))]


def _parse(text):
  return (text.removeprefix("note "), True) if text.startswith("note ") else ("", False)


def _told(view):
  return _reflect(view)[0].content


FAMILY = base.Family(
  "game",
  Options,
  Game,
  lambda options: base.Prompts(
    _play, _reflect, _parse, _reflect, _parse, extracting.brief("game", _told, _told)
  ),
  {"random": lambda options, rng: None},
)
