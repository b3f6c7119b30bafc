"""Transitions of played attempts, as vectors of their texts: what a critic is fitted to.

A text is kept once, as its vector; a transition names rows of that table. What is kept is part of a
checkpoint and needs no file of its own. Letters: N transitions, U distinct texts, D width.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memrl_jax.memory.embed import Embedder


class Transitions:
  """The newest `capacity` transitions, in the order in which they were added.

  links_N4   rows of state, action and next state (0 where there is none), and whether it was the last.
  rewards_N  in the environment's units.
  """

  def __init__(self, embedder: Embedder, capacity: int):
    self._embedder, self.capacity = embedder, capacity
    self.clear()

  def __len__(self) -> int:
    return len(self.links_N4)

  @property
  def texts(self) -> int:
    """Distinct texts, U."""
    return len(self._rows)

  def append(self, states: Sequence[str], actions: Sequence[str], rewards: Sequence[float]) -> None:
    """Adds one attempt, turn by turn; its last turn ends it."""
    state_N, action_N = self._known(states), self._known(actions)
    after_N = [*state_N[1:], 0][: len(state_N)]
    over_N = [n + 1 == len(state_N) for n in range(len(state_N))]
    new_N4 = np.array([state_N, action_N, after_N, over_N], np.int32).T
    self.links_N4 = np.concatenate([self.links_N4, new_N4])
    self.rewards_N = np.concatenate([self.rewards_N, np.array(rewards, np.float32)])

  def _known(self, texts: Sequence[str]) -> list[int]:
    """The rows of these texts, new ones included."""
    vectors_ND = self._embedder.embed(texts)
    return [self._rows.setdefault(vector.tobytes(), len(self._rows)) for vector in vectors_ND]

  def trim(self) -> None:
    """Drops the oldest transitions above the capacity, and the texts that only they named."""
    if len(self) <= self.capacity:
      return
    links_N4, self.rewards_N = self.links_N4[-self.capacity :], self.rewards_N[-self.capacity :]
    used, places = np.unique(links_N4[:, :3], return_inverse=True)
    parts = [places.reshape(-1, 3), links_N4[:, 3:]]
    self.links_N4 = np.concatenate(parts, axis=1).astype(np.int32)
    vectors = list(self._rows)
    self._rows = {vectors[row]: place for place, row in enumerate(used)}

  @property
  def table_UD(self) -> np.ndarray:
    """The vectors of all texts, by row."""
    joined = b"".join(self._rows)
    return np.frombuffer(joined, np.float32).reshape(-1, self._embedder.dimension)

  def state(self) -> dict[str, np.ndarray]:
    """What `load` takes back."""
    return {"texts": self.table_UD, "links": self.links_N4, "rewards": self.rewards_N}

  def load(self, arrays: dict[str, np.ndarray]) -> None:
    self.links_N4, self.rewards_N = arrays["links"], arrays["rewards"]
    self._rows = {vector.tobytes(): row for row, vector in enumerate(arrays["texts"])}

  def clear(self) -> None:
    self.links_N4, self.rewards_N = np.zeros((0, 4), np.int32), np.zeros(0, np.float32)
    self._rows: dict[bytes, int] = {}  # vector -> its row, in order
