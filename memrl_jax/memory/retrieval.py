"""Which of the nearest experiences is shown, and how much one that was trained before may still teach.

Both keep a system that feeds on its own choices from running in a circle (Complementary RL, 2603.17621,
appendix B): an entry that is always shown is the only one that gets better, and a generation that is
trained again and again is memorised. Counts are passed in; nothing here remembers anything.

Letters: P entries of the pool in the order of their similarity, N training samples.
"""

from __future__ import annotations

import numpy as np


def score(count_P: np.ndarray, recent_P: np.ndarray, *, lambda_: float) -> np.ndarray:
  """What an entry is worth showing: its rank, less for being shown often, less for just now.

      s(m) = -rank - lambda log(1 + c(m)) - 1[recent(m)],   rank = 0, 1, 2, ...

  Complementary RL (2603.17621) Eq. 6. c counts retrievals. Without recency an entry has to be shown
  exp(1/lambda) - 1 times to lose one rank: 12 at lambda .4.
  """
  rank_P = np.arange(len(count_P))
  return -rank_P - lambda_ * np.log1p(count_P) - np.asarray(recent_P, float)


def best(score_P: np.ndarray, top: int) -> np.ndarray:
  """Places of the `top` highest scores, best first; of equals the more similar."""
  return np.argsort(-score_P, kind="stable")[:top]


def drawn(score_P: np.ndarray, top: int, rng: np.random.Generator) -> np.ndarray:
  """`top` places drawn without replacement, p(m) = softmax(s), by the Gumbel trick (1903.06059)."""
  return best(score_P + rng.gumbel(size=len(score_P)), top)


def weight(
  trained_N: np.ndarray, since_N: np.ndarray, *, cool_down: int, alpha: float
) -> np.ndarray:
  """How much a sample's advantage counts: nothing while it cools down, then less each time.

      w(m) = 0 if t - t_last < cool_down else (1 + c_train)^-alpha

  Complementary RL (2603.17621) Eq. 7. `since_N` is t - t_last in updates of the extractor, infinite for
  a sample that was never trained, whose weight is 1.
  """
  return np.where(since_N < cool_down, 0.0, (1.0 + np.asarray(trained_N, float)) ** -alpha)
