"""What an episodic memory is worth, and which one is shown: the equations of MemRL, on the host.

"MemRL" (2601.03192), sections 3-4; where paper and release differ each reading is a function. A utility
Q is a running estimate of the reward that a memory brings to those who are shown it.

Letters: P candidates of one query's pool, N memories.
"""

from __future__ import annotations

import numpy as np

_FLAT = 1e-6  # a spread below it is rounding: similarities are float32


def pool_z(x_P: np.ndarray) -> np.ndarray:
  """z-score inside the pool, by the population's deviation; all 0 where the candidates are equal.

      z = (x - mean) / std

  MemRL Eq. 7. Any gap is stretched to unit variance, one of .001 as well.
  """
  x_P = np.asarray(x_P, np.float64)
  if not len(x_P):
    return x_P
  spread = x_P.std()
  return (x_P - x_P.mean()) / spread if spread > _FLAT else np.zeros(len(x_P))


def fixed_z(x_P: np.ndarray, *, mean: float, std: float) -> np.ndarray:
  """z-score by constants of a data set, as the release does for similarity.

  The mean never changes an order; (1 - lambda) / std is the weight that a similarity really has.
  """
  return (np.asarray(x_P, np.float64) - mean) / std


def mix(similarity_P: np.ndarray, q_P: np.ndarray, *, weights: tuple[float, float]) -> np.ndarray:
  """score = (1 - lambda) z(similarity) + lambda z(Q), of values that are normalised already.

  MemRL Eq. 7, weights = (1 - lambda, lambda).
  """
  return weights[0] * np.asarray(similarity_P) + weights[1] * np.asarray(q_P)


def ucb(q_P: np.ndarray, visits_P: np.ndarray, *, c: float) -> np.ndarray:
  """Optimism: Q + c sqrt(ln(1 + sum n) / (1 + n)), n visits (Auer et al. 2002, counts from 0)."""
  visits_P = np.asarray(visits_P, np.float64)
  return q_P + c * np.sqrt(np.log1p(visits_P.sum()) / (1 + visits_P))


def thompson(
  wins_P: np.ndarray, losses_P: np.ndarray, *, prior: float, rng: np.random.Generator
) -> np.ndarray:
  """Draws that stand for Q, theta ~ Beta(prior + wins, prior + losses)."""
  return rng.beta(prior + np.asarray(wins_P), prior + np.asarray(losses_P))


def td(q: float, reward: float, next_q: float, *, step: float, gamma: float) -> float:
  """The TD error times the step, which is what Q changes by.

      step (r + gamma max Q' - Q)

  MemRL Eq. 3; with gamma 0 its Eq. 8, after which (1 - step)^n of a wrong start is left after n updates
  and Var(Q) is step / (2 - step) Var(r).
  """
  return step * (reward + gamma * next_q - q)


def trace(depth: int, *, gamma: float, lambda_: float) -> float:
  """Share of an update that reaches a memory `depth` generations before the one shown.

  (gamma lambda)^depth       MemQ (2605.08374): TD(lambda) along who was written with whom in view
  """
  return (gamma * lambda_) ** depth


def worth(q_N: np.ndarray, visits_N: np.ndarray, *, bonus: float) -> np.ndarray:
  """What a memory is kept for: Q + bonus / sqrt(1 + n), so that few visits are not held against it. [us]"""
  return np.asarray(q_N, np.float64) + bonus / np.sqrt(1 + np.asarray(visits_N, np.float64))


def survivors(keys: list[str], worth_N: np.ndarray, keep: int, per_key: int | None) -> list[int]:
  """Places of the `keep` memories to keep, ascending. [us]

  First the best of every key, best key first, then the second best of every key, and so on (at most
  `per_key` rounds), so that the easy tasks do not push out all that is known about the hard ones. Of
  equals the later place stays.
  """
  order = np.lexsort((-np.arange(len(keys)), -np.asarray(worth_N)))
  seen: dict[str, int] = {}
  rounds = []
  for place in order.tolist():
    seen[keys[place]] = seen.get(keys[place], 0) + 1
    if per_key is None or seen[keys[place]] <= per_key:
      rounds.append((seen[keys[place]], len(rounds), place))
  return sorted(place for _, _, place in sorted(rounds)[:keep])
