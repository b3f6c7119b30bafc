"""What is asked of the engine and what it answers, its shapes and its counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from memrl_jax.models.config import DecoderConfig


class Request(NamedTuple):
  """One prompt and how to answer it. `key` is raw threefry key data, uint32 [2].

  `home`: requests of one home are likely to begin alike (`replicas` keeps them together); -1: of none.
  """

  key: np.ndarray
  prompt: np.ndarray
  max_tokens: int
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stop: tuple[int, ...] = ()
  home: int = -1


class Completion(NamedTuple):
  """Sampled ids (a stop token is kept) and their log-probs when sampled, nats.

  `finish` is "stop" where the last id is one of the request's stop ids, else "length".
  """

  ids: np.ndarray
  logps: np.ndarray
  finish: str


class Stats(NamedTuple):
  """Counts since the engine was made, in tokens but for `steps` and `rounds`.

  Prompt tokens are `prefilled` or `reused` (the hit rate is reused / (reused + prefilled)); of those
  reused, `in_place` were not even copied. `padded` are prefill positions computed for nothing.
  """

  prefilled: int = 0
  padded: int = 0
  reused: int = 0
  in_place: int = 0
  sampled: int = 0
  steps: int = 0
  rounds: int = 0


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Shapes of the engine; every further value of a tuple costs compile time, not run time.

  buckets         context lengths in tokens, ascending; prompt + max_tokens must fit the last
  prefill_rows    rows of a prefill call, ascending
  prefill_chunks  tokens a row of a prefill call, ascending
  round_steps     most tokens a row decodes before the host looks again
  max_stop        most stop ids of a request
  share           rows that read a common beginning together; 0 copies it to each of them
  """

  slots: int
  buckets: tuple[int, ...] = (64, 128, 256)
  prefill_rows: tuple[int, ...] = (8, 32)
  prefill_chunks: tuple[int, ...] = (8, 32)
  round_steps: int = 8
  max_stop: int = 4
  share: int = 4

  def __post_init__(self):
    if self.slots < 1 or self.round_steps < 1 or self.max_stop < 1:
      raise ValueError(f"slots, round_steps and max_stop must be at least 1; got {self}")
    if self.share < 0 or self.share == 1:
      raise ValueError(f"share must be 0 (off) or at least 2 rows; got {self.share}")
    for name in ("buckets", "prefill_rows", "prefill_chunks"):
      values = getattr(self, name)
      if not values or min(values) < 1 or list(values) != sorted(set(values)):
        raise ValueError(f"{name} must be ascending and positive; got {values}")
    if self.prefill_chunks[-1] > self.buckets[0]:
      raise ValueError(
        f"a prefill chunk of {self.prefill_chunks[-1]} tokens does not fit the smallest bucket of "
        f"{self.buckets[0]}; choose prefill_chunks <= buckets[0]"
      )

  @property
  def round_rows(self) -> tuple[int, ...]:
    """Row counts of a decode round, ascending: a few live rows must not pay for all slots."""
    return tuple(sorted({-(-self.slots // 4), -(-self.slots // 2), self.slots}))

  def can_share(self, size: int) -> bool:
    """Whether rounds of this many rows exist with a shared beginning: not those of stragglers."""
    return self.share > 0 and size % self.share == 0 and 2 * size >= self.slots

  def own_columns(self, shared: int) -> tuple[int, ...]:
    """How many columns of their own rows may have beside `shared` common ones, ascending."""
    return (0, shared)


def check(request: Request, cfg: DecoderConfig, config: EngineConfig) -> np.ndarray:
  """The prompt as int32; ValueError for whatever the engine could not answer truthfully."""
  prompt = np.asarray(request.prompt, np.int32)
  if prompt.ndim != 1 or not len(prompt):
    raise ValueError(f"a prompt needs at least one token; got shape {prompt.shape}")
  if prompt.min() < 0 or prompt.max() >= cfg.vocab:
    raise ValueError(
      f"prompt ids {prompt.min()}..{prompt.max()} do not fit a vocabulary of {cfg.vocab}"
    )
  if request.max_tokens < 1:
    raise ValueError(f"max_tokens must be at least 1; got {request.max_tokens}")
  if len(prompt) + request.max_tokens > config.buckets[-1]:
    raise ValueError(
      f"a prompt of {len(prompt)} tokens and {request.max_tokens} more do not fit a context of "
      f"{config.buckets[-1]}; shorten the prompt or raise the last bucket"
    )
  if not (0 <= request.temperature < np.inf and 0 < request.top_p <= 1 and request.top_k >= 0):
    raise ValueError(
      "sampling needs temperature >= 0, 0 < top_p <= 1 and top_k >= 0; got "
      f"{request.temperature}, {request.top_p} and {request.top_k}"
    )
  if len(request.stop) > config.max_stop:
    raise ValueError(f"{len(request.stop)} stop ids exceed max_stop = {config.max_stop}")
  if any(not 0 <= token < cfg.vocab for token in request.stop):
    raise ValueError(f"stop ids {request.stop} do not fit a vocabulary of {cfg.vocab}")
  key = np.asarray(request.key)
  if key.shape != (2,) or key.dtype != np.uint32:
    raise ValueError(f"a key is two uint32 numbers; got {key.dtype} {key.shape}")
  return prompt


class Sampler(Protocol):
  """What one caller drives: an `engine.Engine`, or several as one (`replicas`)."""

  config: EngineConfig

  @property
  def pending(self) -> int: ...
  @property
  def stats(self) -> Stats: ...
  def submit(self, request: Request) -> int: ...
  def run_round(self) -> list[tuple[int, Completion]]: ...
  def generate(self, requests: Sequence[Request]) -> list[Completion]: ...
  def warmup(self) -> None: ...


def generate(sampler: Sampler, requests: Sequence[Request]) -> list[Completion]:
  """Complete all requests, in their order; ValueError while the sampler has others."""
  if sampler.pending:
    raise ValueError(f"{sampler.pending} requests are in flight; generate needs an idle engine")
  tickets = [sampler.submit(request) for request in requests]
  finished: dict[int, Completion] = {}
  while sampler.pending:
    finished.update(sampler.run_round())
  return [finished[ticket] for ticket in tickets]
