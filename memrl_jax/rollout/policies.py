"""Who answers a trial's prompts: a language model, scripted players, or a mock for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from memrl_jax.envs import base
from memrl_jax.rollout.trial import Answer, Generate, VoidTrial
from memrl_jax.sampling import chat, engine
from memrl_jax.types import Message, Sample, Trial

_EMPTY = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
  """How a policy samples. Token budgets count the stop token."""

  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  play_tokens: int = 16
  reflect_tokens: int = 24

  def __post_init__(self):
    if self.temperature < 0:
      raise ValueError(f"temperature {self.temperature} is negative; use 0 for greedy, 1 to train")
    if not 0 < self.top_p <= 1:
      raise ValueError(f"top_p {self.top_p} is not in (0, 1]; use 1 to switch it off")
    if self.top_k < 0 or self.play_tokens < 1 or self.reflect_tokens < 1:
      raise ValueError("top_k must be >= 0 and token budgets >= 1 (play_tokens, reflect_tokens)")

  def check_trainable(self) -> None:
    """Raises ValueError where the sampled distribution is not the one the trainer computes."""
    if self.top_p < 1 or self.top_k > 0 or self.temperature == 0:
      raise ValueError(
        f"rollouts that are trained on need temperature > 0, top_p 1 and top_k 0, because the trainer's "
        f"log-probs are those of softmax(logits / T); got temperature {self.temperature}, top_p "
        f"{self.top_p}, top_k {self.top_k} (config.sampling)"
      )


class LanguagePolicy:
  """A language model behind the sampling engine.

  A prompt that does not fit the context loses its oldest memory first, then the oldest turns of the
  current attempt; if the bare prompt does not fit, the trial is void.
  """

  def __init__(
    self, sampler: engine.Engine, text: chat.Chat, config: SamplingConfig, max_context: int
  ):
    self._engine, self._chat, self._config, self._max_context = sampler, text, config, max_context
    self._waiting: dict[int, tuple[list[Message], base.View, np.ndarray]] = {}

  def submit(self, trial: Trial, request: Generate, key: np.ndarray) -> int:
    config = self._config
    budget = config.play_tokens if request.phase == "play" else config.reflect_tokens
    messages, view, prompt = self._fit(request, self._max_context - budget)
    ticket = self._engine.submit(
      engine.Request(
        key=key,
        prompt=prompt,
        max_tokens=budget,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=self._chat.stop_ids,
      )
    )
    self._waiting[ticket] = (messages, view, prompt)
    return ticket

  def poll(self) -> list[tuple[int, Answer]]:
    answers = []
    for ticket, done in self._engine.run_round():
      messages, view, prompt = self._waiting.pop(ticket)
      text = self._chat.decode(done.ids)
      sample = Sample(text, prompt, done.ids, done.logps, done.finish, self._config.temperature)
      answers.append((ticket, Answer(sample, messages, view)))
    return answers

  def _fit(self, request: Generate, limit: int) -> tuple[list[Message], base.View, np.ndarray]:
    view = request.view
    while True:
      messages = request.build(view)
      prompt = self._chat.encode(messages)
      if len(prompt) <= limit:
        return messages, view, prompt
      if view.past:
        view = view._replace(past=view.past[1:])
      elif len(view.current.steps) > 1:
        shorter = dataclasses.replace(view.current, steps=view.current.steps[1:])
        view = view._replace(current=shorter)
      else:
        raise VoidTrial(
          f"prompt of {len(prompt)} tokens does not fit {limit}; raise config.engine.buckets"
        )


class TextPolicy:
  """A policy that answers at once with `answer(trial, request, key)`; its turns carry no tokens."""

  def __init__(self, answer: Callable[[Trial, Generate, np.ndarray], str]):
    self._answer = answer
    self._answers: list[tuple[int, Answer]] = []
    self._count = 0

  def submit(self, trial: Trial, request: Generate, key: np.ndarray) -> int:
    sample = Sample(self._answer(trial, request, key), _EMPTY, _EMPTY, np.zeros(0, np.float32))
    self._count += 1
    self._answers.append((self._count, Answer(sample, request.build(request.view), request.view)))
    return self._count

  def poll(self) -> list[tuple[int, Answer]]:
    answers, self._answers = self._answers, []
    return answers


def players(make: Callable[[np.random.Generator], base.Player], seed: int) -> TextPolicy:
  """Scripted players, one per trial, each with its own generator and its habits."""
  alive: dict[tuple[int, int], base.Player] = {}

  def answer(trial: Trial, request: Generate, key: np.ndarray) -> str:
    who = (trial.group, trial.index)
    if who not in alive:
      alive[who] = make(np.random.default_rng([seed, trial.group, trial.index, trial.seed]))
    view = request.view
    return alive[who].play(view) if request.phase == "play" else alive[who].reflect(view)

  return TextPolicy(answer)


def mock(reply: Callable[[list[Message], np.random.Generator], str]) -> TextPolicy:
  """For tests: `reply(messages, rng)`, whose generator depends on the request's key alone."""
  return TextPolicy(
    lambda trial, request, key: reply(
      request.build(request.view), np.random.default_rng(key.tolist())
    )
  )
