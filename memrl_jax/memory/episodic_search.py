"""Two-phase retrieval of MemRL (2601.03192, Eq. 5-7): what is similar enough, then what has proved useful.

Letters: P candidates of a query's pool, N texts, D width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.memory import bank, embed, episodic_prompt
from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.episodic_prompt import Suggestion
from memrl_jax.ops import utility


def least(config: EpisodicConfig) -> float:
  """The cosine that a candidate must exceed; a float32 below delta where it may also be reached."""
  delta = np.float32(config.delta)
  return float(delta if config.strict else np.nextafter(delta, np.float32(-2)))


def gate(config: EpisodicConfig, hits: list[bank.Hit], asked: int) -> list[bank.Hit] | None:
  """The pool among these hits; None where a member of it may lie beyond them."""
  if config.ties == "newest":
    hits = sorted(hits, key=lambda hit: (-hit.similarity, -hit.id))
  if config.count == "memories":
    pool = hits[: config.k1]
  else:
    keys: dict[str, None] = {}
    pool = []
    for hit in hits:
      if len(keys) < config.k1:
        keys[hit.entry.key] = None
      if hit.entry.key in keys:
        pool.append(hit)
  whole = len(hits) < asked or hits[-1].similarity < pool[-1].similarity
  return pool if whole else None


def rank(
  config: EpisodicConfig, pool: list[bank.Hit], rng: np.random.Generator | None
) -> list[Suggestion]:
  """Phase B: the k2 best by score; `rng` explores."""
  similarity_P = np.array([hit.similarity for hit in pool], np.float64)
  q_P = np.array([hit.entry.score for hit in pool])
  value_P = q_P if rng is None else _optimistic(config, pool, q_P, rng)
  columns = _similarity_z(config, similarity_P), _q_z(config, value_P)
  score_P = utility.mix(*columns, weights=config.mix)
  # Equal scores stay in the pool's order, by similarity, then age. Two candidates of which one is nearer
  # and one worth more always tie at lambda .5: what rounding leaves of the tie must not decide.
  order = np.argsort(-np.round(score_P, 9), kind="stable")
  if config.q_min is not None:
    order = order[q_P[order] >= config.q_min]
  if rng is not None and config.explore == "epsilon" and rng.random() < config.explore_rate:
    order = rng.permutation(order)
  chosen: list[Suggestion] = []
  seen: set[str] = set()
  for place in order.tolist():
    hit = pool[place]
    marks = {hit.entry.text, hit.entry.key} if config.distinct else {hit.entry.text}
    if len(chosen) < config.k2 and not marks & seen:
      seen |= marks
      chosen.append(_suggestion(hit, *(float(x_P[place]) for x_P in (*columns, score_P))))
  return chosen


def _optimistic(config, pool: list[bank.Hit], q_P: np.ndarray, rng) -> np.ndarray:
  """What stands for Q where exploration is a matter of values; Q itself otherwise."""
  visits_P = np.array([hit.entry.data["visits"] for hit in pool])
  if config.explore == "ucb":
    return utility.ucb(q_P, visits_P, c=config.explore_rate)
  if config.explore == "thompson":  # what a memory was written about counts as its first try
    wins_P = np.array([hit.entry.data["wins"] + hit.entry.data["success"] for hit in pool])
    return utility.thompson(wins_P, visits_P + 1 - wins_P, prior=config.explore_rate, rng=rng)
  return q_P


def _similarity_z(config: EpisodicConfig, similarity_P: np.ndarray) -> np.ndarray:
  if config.sim_norm == "fixed":
    return utility.fixed_z(similarity_P, mean=config.sim_mean, std=config.sim_std)
  return utility.pool_z(similarity_P) if config.sim_norm == "pool" else similarity_P


def _q_z(config: EpisodicConfig, value_P: np.ndarray) -> np.ndarray:
  if config.q_norm == "none":
    return value_P
  return np.clip(utility.pool_z(value_P), -config.q_clip, config.q_clip)


def _suggestion(hit: bank.Hit, z_similarity: float, z_q: float, score: float) -> Suggestion:
  entry, data = hit.entry, hit.entry.data
  return Suggestion(
    hit.id,
    hit.version,
    entry.key,
    entry.text,
    data["success"],
    hit.similarity,
    entry.score,
    data["visits"],
    z_similarity,
    z_q,
    score,
    data["learned"],
    tuple(data.get("images", ())),
  )


class Calibration(NamedTuple):
  """Of the similarities between pairs of tasks: the quantile for delta; mean and deviation for "fixed"."""

  delta: float
  mean: float
  std: float
  pairs: int

  def into(self, config: EpisodicConfig) -> EpisodicConfig:
    """The configuration with this delta, and these constants where its sim_norm is "fixed"."""
    fixed = {"sim_mean": self.mean, "sim_std": self.std} if config.sim_norm == "fixed" else {}
    return dataclasses.replace(config, delta=self.delta, **fixed)


def calibrate(
  embedder: embed.Embedder, tasks: Sequence[str], *, quantile: float = 0.8, most: int = 4000
) -> Calibration:
  """delta as the paper's second version sets it: the top 20 % of pairwise task similarity pass.

  Of more than `most` different tasks an even selection is compared.
  """
  texts = list(dict.fromkeys(episodic_prompt.plain(task) for task in tasks))
  if len(texts) < 2:
    raise ValueError(
      f"{len(texts)} different tasks make no pair; give at least 2 to calibrate delta"
    )
  texts = [texts[n] for n in np.linspace(0, len(texts) - 1, min(most, len(texts))).astype(int)]
  vectors_ND = embedder.embed(texts)
  pairs = (vectors_ND @ vectors_ND.T)[np.triu_indices(len(texts), 1)].astype(np.float64)
  return Calibration(
    float(np.quantile(pairs, quantile)), float(pairs.mean()), float(pairs.std()), len(pairs)
  )
