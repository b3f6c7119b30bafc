"""What MemRL reports of a run: success over epochs, forgetting, and whether Q foretells success.

MemRL (2601.03192), section 5. Letters: E epochs, T tasks, N uses of a memory, B bins. Nothing here is a
mean over nothing: where no number exists it is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


def last_epoch_accuracy(success_ET: np.ndarray) -> float:
  """Share of tasks solved in the last epoch."""
  return float(_checked(success_ET)[-1].mean())


def cumulative_success(success_ET: np.ndarray) -> np.ndarray:
  """Share of tasks solved at least once so far, [E]; never falls (CSR)."""
  return np.logical_or.accumulate(_checked(success_ET), axis=0).mean(axis=1)


def forgetting(success_ET: np.ndarray) -> np.ndarray:
  """Share of all tasks that were solved in one epoch and not in the next, [E-1]."""
  success_ET = _checked(success_ET)
  return (success_ET[:-1] & ~success_ET[1:]).mean(axis=1)


def forgetting_rate(success_ET: np.ndarray) -> float:
  """`forgetting`, on average over the epochs; NaN for a single one."""
  lost_E = forgetting(success_ET)
  return float(lost_E.mean()) if len(lost_E) else float("nan")


def transfer(success_ET: np.ndarray, validation_E: np.ndarray) -> float:
  """Success on held-out tasks, memory frozen, after the epoch that was best on validation tasks.

  Of equally good epochs the first. Row e of `success_ET` was played with the memory of epoch e.
  """
  success_ET = _checked(success_ET)
  if len(validation_E) != len(success_ET):
    raise ValueError(
      f"{len(success_ET)} epochs came with {len(validation_E)} validation scores; give one an epoch"
    )
  return float(success_ET[int(np.argmax(validation_E))].mean())


def pearson(x_N: np.ndarray, y_N: np.ndarray) -> float:
  """Correlation; NaN where one of them does not vary."""
  x_N, y_N = np.asarray(x_N, np.float64), np.asarray(y_N, np.float64)
  if len(x_N) < 2 or np.ptp(x_N) == 0 or np.ptp(y_N) == 0:
    return float("nan")
  return float(np.corrcoef(x_N, y_N)[0, 1])


class Bins(NamedTuple):
  """Uses of memories by their Q at the time; the last bin includes its upper edge.

  success_B: share of those tasks that succeeded; failed_B: share of uses whose memory is of a failure.
  pearson: of the middles of the bins that were used, and their success.
  """

  edges: np.ndarray
  count_B: np.ndarray
  success_B: np.ndarray
  failed_B: np.ndarray
  pearson: float


def by_q(q_N: np.ndarray, success_N: np.ndarray, worked_N: np.ndarray, edges: np.ndarray) -> Bins:
  """Success against Q, from `Episodic.used`. What lies outside the edges counts in the outermost bin."""
  edges = np.asarray(edges, np.float64)
  place_N = np.clip(np.searchsorted(edges, q_N, side="right") - 1, 0, len(edges) - 2)
  count_B = np.bincount(place_N, minlength=len(edges) - 1)
  with np.errstate(invalid="ignore"):
    success_B, failed_B = (
      np.bincount(place_N, np.asarray(what_N, float), minlength=len(edges) - 1) / count_B
      for what_N in (success_N, ~np.asarray(worked_N, bool))
    )
  used, middle = count_B > 0, (edges[1:] + edges[:-1]) / 2
  return Bins(edges, count_B, success_B, failed_B, pearson(middle[used], success_B[used]))


def _checked(success_ET: np.ndarray) -> np.ndarray:
  success_ET = np.asarray(success_ET)
  if success_ET.ndim != 2 or not success_ET.size or success_ET.dtype != bool:
    raise ValueError(
      f"success has shape {success_ET.shape} and type {success_ET.dtype}; give booleans [epochs, tasks], "
      "at least one of each"
    )
  return success_ET
