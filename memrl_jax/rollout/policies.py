"""Who answers a trial's prompts: a language model here or on a server, scripted players, a mock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from memrl_jax.envs import base
from memrl_jax.rollout.trial import Answer, Generate, VoidTrial
from memrl_jax.sampling import chat, engine, remote, requests
from memrl_jax.types import Message, Sample, Trial

_EMPTY, _NO_LOGPS = np.zeros(0, np.int32), np.zeros(0, np.float32)


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

  def tokens(self, request: Generate) -> int:
    """The budget of an answer."""
    return self.play_tokens if request.phase == "play" else self.reflect_tokens

  def check_trainable(self) -> None:
    """Raises ValueError where the sampled distribution is not the one the trainer computes."""
    if self.top_p < 1 or self.top_k > 0 or self.temperature == 0:
      raise ValueError(
        f"rollouts that are trained on need temperature > 0, top_p 1 and top_k 0, because the trainer's "
        f"log-probs are those of softmax(logits / T); got temperature {self.temperature}, top_p "
        f"{self.top_p}, top_k {self.top_k} (config.sampling)"
      )


class LanguagePolicy:
  """A language model behind the sampling engine; `fit` says what happens to a prompt too long."""

  def __init__(
    self, sampler: requests.Sampler, text: chat.Chat, config: SamplingConfig, max_context: int
  ):
    self._engine, self._chat, self._config, self._max_context = sampler, text, config, max_context
    self._waiting: dict[int, tuple[list[Message], base.View, np.ndarray, int]] = {}
    self._whole: list[tuple[int, Answer]] = []  # answers that need no sampling
    self._count = 0  # of those; their tickets are negative

  def submit(self, trial: Trial, request: Generate, key: np.ndarray) -> int:
    config = self._config
    budget = config.tokens(request)
    begun = self._chat.reply(request.forced)[:-1] if request.forced else _EMPTY
    messages, view, prompt = fit(request, self._chat, self._max_context - budget - len(begun))
    prompt = np.concatenate([prompt, begun])
    if request.whole:
      sample = Sample(
        "", prompt, _EMPTY, _NO_LOGPS, temperature=config.temperature, forced=len(begun)
      )
      self._count += 1
      self._whole.append((-self._count, Answer(sample, messages, view)))
      return -self._count
    ticket = self._engine.submit(
      engine.Request(
        key=key,
        prompt=prompt,
        max_tokens=budget,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=self._chat.stop_ids,
        home=trial.group,
      )
    )
    self._waiting[ticket] = (messages, view, prompt, len(begun))
    return ticket

  def poll(self) -> list[tuple[int, Answer]]:
    answers, self._whole = self._whole, []
    for ticket, done in self._engine.run_round() if self._waiting else ():
      messages, view, prompt, forced = self._waiting.pop(ticket)
      text = self._chat.decode(done.ids)
      sample = Sample(
        text, prompt, done.ids, done.logps, done.finish, self._config.temperature, forced
      )
      answers.append((ticket, Answer(sample, messages, view)))
    return answers


def fit(
  request: Generate, text: chat.Chat, limit: int
) -> tuple[list[Message], base.View, np.ndarray]:
  """Messages, what was shown and prompt ids, at most `limit` of them.

  A longer prompt loses its tips first, the last of them before the others, then its oldest attempt,
  then the oldest turns of the current one.

  Raises:
    VoidTrial: even the bare prompt is longer.
  """
  view = request.view
  while True:
    messages = text.shown(request.build(view))
    prompt = text.encode(messages)
    if len(prompt) <= limit:
      return messages, view, prompt
    if view.tips:
      view = view._replace(tips=view.tips[:-1])
    elif any(step.tips for step in view.current.steps):
      view = view.without_tips()
    elif view.past:
      view = view._replace(past=view.past[1:])
    elif len(view.current.steps) > 1:
      shorter = dataclasses.replace(view.current, steps=view.current.steps[1:])
      view = view._replace(current=shorter)
    else:
      raise VoidTrial(
        f"prompt of {len(prompt)} tokens does not fit {limit}; raise config.engine.buckets"
      )


class RemotePolicy:
  """A language model behind a server; the same requests and keys as `LanguagePolicy`.

  A server that takes ids gets the ids that `text` makes, cut to `max_context`. One that takes text
  gets whole prompts and renders them itself; then `text` may be None, and the turns carry no ids.
  Where the server fails for good, the trial is void.
  """

  def __init__(
    self,
    client: remote.Client,
    text: chat.Chat | None,
    config: SamplingConfig,
    max_context: int,
  ):
    if text is None and not client.reads_text:
      raise ValueError(f"{client.url} takes token ids, so its policy needs the model's tokenizer")
    self._client, self._chat, self._config, self._max_context = client, text, config, max_context
    self._waiting: dict[int, tuple[list[Message], base.View, np.ndarray]] = {}

  def submit(self, trial: Trial, request: Generate, key: np.ndarray) -> int:
    if request.forced:
      raise VoidTrial("a server does not let an answer begin as it is told; sample in this process")
    config = self._config
    budget = config.tokens(request)
    if self._client.reads_text:
      messages = self._client.shown(request.build(request.view))
      view, prompt = request.view, _EMPTY
    else:
      messages, view, prompt = fit(request, self._chat, self._max_context - budget)
    ticket = self._client.submit(
      remote.Ask(
        key=key,
        max_tokens=budget,
        prompt=prompt,
        messages=messages,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=self._chat.stop_ids if self._chat else (),
        home=trial.group,
      )
    )
    self._waiting[ticket] = (messages, view, prompt)
    return ticket

  def poll(self) -> list[tuple[int, Answer]]:
    answers: list[tuple[int, Answer]] = []
    for ticket, reply in self._client.poll():
      messages, view, prompt = self._waiting.pop(ticket)
      if isinstance(reply, remote.Failure):
        answers.append((ticket, _NoAnswer(reply.reason)))
        continue
      trainable = len(reply.ids) > 0
      sample = Sample(
        self._chat.decode(reply.ids) if trainable else reply.text,
        prompt if trainable else _EMPTY,
        reply.ids,
        reply.logps,
        reply.finish,
        self._config.temperature,
      )
      answers.append((ticket, Answer(sample, messages, view)))
    return answers


class _NoAnswer:
  """Stands where an answer would: whichever trial looks at it is void, and no other."""

  def __init__(self, reason: str):
    self._reason = reason

  def __getattr__(self, name: str) -> None:
    raise VoidTrial(f"remote policy: {self._reason}")


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
