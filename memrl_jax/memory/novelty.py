"""Novelty reward: a state pays less the more often states like it were seen.

    r_int(s) = coef / n(s)

EMPO2 (2602.23008) section 4.2, which leaves n open; papers and release read it in three ways:

  prototypes    n = visits of the nearest prototype with cosine >= threshold, this one included; a state
                without one becomes a prototype with n = 1. (Our default: "distinct states", "added when
                below the threshold", and never a division by zero.)
  similar_list  n = 1 + number of states seen before with cosine >= threshold.
  tip_count     n = 1 + number of tips in the prompt, in memory modes only; what the release computes.

Counts belong to one scope (a task and its variation), last for the whole run, and move in training
rollouts only. Letters: P prototypes of a scope, D dimensions of an embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

KINDS = ("none", "prototypes", "similar_list", "tip_count")


class Embedder(Protocol):
  """Texts -> unit vectors, float32 [n, D]."""

  dimension: int

  def embed(self, texts: Sequence[str]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class NoveltyConfig:
  """`coef` is in units of the environment's reward; `threshold` a cosine, which depends on the embedder."""

  kind: str = "none"
  coef: float = 1.0
  threshold: float = 0.5

  def __post_init__(self):
    if self.kind not in KINDS:
      raise ValueError(
        f"novelty {self.kind!r} is not known; choose one of {', '.join(KINDS)} (config.novelty.kind)"
      )
    if self.coef < 0 or not -1 <= self.threshold <= 1:
      raise ValueError(
        f"novelty needs coef >= 0 and a threshold in [-1, 1], not {self.coef} and {self.threshold} "
        "(config.novelty)"
      )


class Visit(NamedTuple):
  """One state of a training rollout; `tips` is how many stood in its prompt, None without a memory."""

  scope: str
  state: str
  tips: int | None


class Novelty:
  """The counts of a run. The order of visits matters: it is that of the trials."""

  def __init__(self, config: NoveltyConfig, embedder: Embedder):
    self._config, self._embedder = config, embedder
    self._scopes: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # prototypes [P, D], visits [P]

  @property
  def distinct(self) -> int:
    """Prototypes over all scopes: the states that were told apart so far."""
    return sum(len(visits) for _, visits in self._scopes.values())

  def rewards(self, visits: Sequence[Visit]) -> np.ndarray:
    """The intrinsic reward of each visit, float64 [len(visits)], in order; counts move on."""
    coef = self._config.coef
    if self._config.kind == "none":
      return np.zeros(len(visits))
    if self._config.kind == "tip_count":
      return np.array([0.0 if v.tips is None else coef / (v.tips + 1) for v in visits])
    texts = list(dict.fromkeys(visit.state for visit in visits))
    vectors = dict(zip(texts, self._embedder.embed(texts), strict=True)) if texts else {}
    return np.array([coef / self._count(visit.scope, vectors[visit.state]) for visit in visits])

  def _count(self, scope: str, vector_D: np.ndarray) -> int:
    """n of this state, which is counted."""
    known_PD, visits_P = self._scopes.get(scope, _nothing(len(vector_D)))
    similar_P = known_PD @ vector_D
    listed = self._config.kind == "similar_list"
    n = 1 + int(visits_P[similar_P >= self._config.threshold].sum())
    # Who is counted with whom: in a list only equals, which saves storing them twice.
    same = 1 - 1e-6 if listed else self._config.threshold
    nearest = int(similar_P.argmax()) if len(similar_P) else -1
    if nearest >= 0 and similar_P[nearest] >= same:
      visits_P[nearest] += 1
      n = n if listed else int(visits_P[nearest])
    else:
      known_PD, visits_P = np.concatenate([known_PD, vector_D[None]]), np.append(visits_P, 1)
    self._scopes[scope] = (known_PD, visits_P)
    return n

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, JSON-ready rest) for a checkpoint."""
    D = self._embedder.dimension
    known, visits = zip(_nothing(D), *self._scopes.values(), strict=True)
    arrays = {"prototypes": np.concatenate(known), "visits": np.concatenate(visits)}
    return arrays, {"scopes": {scope: len(v) for scope, (_, v) in self._scopes.items()}}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    """Back to what `state` gave."""
    self._scopes, start = {}, 0
    for scope, size in rest["scopes"].items():
      part = slice(start, start + size)
      self._scopes[scope] = (arrays["prototypes"][part].copy(), arrays["visits"][part].copy())
      start += size


def _nothing(dimension: int) -> tuple[np.ndarray, np.ndarray]:
  """The prototypes and visits of a scope that nobody has been to."""
  return np.zeros((0, dimension), np.float32), np.zeros(0, np.int64)
