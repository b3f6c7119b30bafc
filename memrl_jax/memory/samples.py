"""What trains the extractor of Complementary RL: its responses, as sampled, and what they have earned.

A generation is one response. It may have written several entries, and is the unit that trains (once a
batch). Its reward is the mean over all pairs (entry, trial that was shown it) since it was last trained,
+1 where the trial succeeded and -1 where not.  2603.17621, sections 2.3 and 3.3, appendix B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.memory import retrieval
from memrl_jax.memory.records import StoreError
from memrl_jax.types import Sample

ARRAYS = {"prompt_ids": np.int32, "ids": np.int32, "logps": np.float32}


class Generation(NamedTuple):
  """A response of the extractor with its log-probs from when it was sampled, by which version, when.

  `step` is the actor's. A sample without ids (scripted, or from a server that tells none) never trains.
  """

  sample: Sample
  extractor: int
  step: int


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """Samples for one update of the extractor, taken out of the buffer until `trained` or `give_back`.

  total_N is the sum over pairs_N pairs; weight_N > 0 is w(m).
  """

  generations: tuple[int, ...]
  samples: tuple[Generation, ...]
  total_N: np.ndarray
  pairs_N: np.ndarray
  weight_N: np.ndarray

  @property
  def reward_N(self) -> np.ndarray:
    """The mean over pairs."""
    return self.total_N / self.pairs_N


class Samples:
  """The generations of a run and the buffer of those that wait. Not safe from threads by itself."""

  def __init__(self, *, cool_down: int, alpha: float, cooled: str, batch: int, buffer: int):
    """As in `experience_config.ExperienceConfig`."""
    self._how = {"cool_down": cool_down, "alpha": alpha}
    self._cooled, self._batch, self._size = cooled, batch, buffer
    self.reset()

  def reset(self) -> None:
    self._known: dict[int, Generation] = {}
    self._used: dict[int, int] = {}  # step when it was written or last shown
    self._trained: dict[int, tuple[int, int]] = {}  # times, number of the last update
    self._buffer: dict[int, tuple[float, int]] = {}  # sum since last trained, pairs; oldest first
    self._flight: Batch | None = None
    self._next, self.updates, self.lost = 1, 0, 0

  def __getitem__(self, number: int) -> Generation:
    return self._known[number]

  def record(self, sample: Sample, *, extractor: int, step: int) -> int:
    """Keeps a response as it was sampled; its id."""
    if len(sample.ids) != len(sample.logps):
      raise ValueError(
        f"a generation has {len(sample.ids)} ids and {len(sample.logps)} log-probs; keep both as sampled"
      )
    number, self._next = self._next, self._next + 1
    self._known[number] = Generation(sample, extractor, step)
    self._used[number] = step
    return number

  def use(self, number: int, step: int) -> None:
    """An entry of this generation was shown."""
    self._used[number] = step

  def pay(self, number: int, reward: float) -> None:
    """One more pair. Beyond the buffer's size the sample that has waited longest is lost."""
    known = self._known.get(number)
    if known is None or not len(known.sample.ids):
      return
    total, pairs = self._buffer.get(number, (0.0, 0))
    self._buffer[number] = (total + reward, pairs + 1)
    while len(self._buffer) > self._size:
      del self._buffer[next(iter(self._buffer))]
      self.lost += 1

  def weight(self, numbers: Sequence[int]) -> np.ndarray:
    """w(m) in the extractor's next update."""
    times = [self._trained.get(number, (0, -np.inf)) for number in numbers]
    trained_N, last_N = np.array(times, float).reshape(-1, 2).T
    return retrieval.weight(trained_N, self.updates + 1 - last_N, **self._how)

  def ready(self) -> bool:
    """Whether a whole batch waits that does not cool down, and none is in training."""
    warm = np.count_nonzero(self.weight(list(self._buffer)))
    return self._flight is None and warm >= self._batch

  def take(self) -> Batch | None:
    """The oldest samples that do not cool down, or None where `ready` says no."""
    if not self.ready():
      return None
    waiting = list(self._buffer)
    weight_W = self.weight(waiting)
    if self._cooled == "drop":
      for place in np.flatnonzero(weight_W == 0):
        del self._buffer[waiting[place]]
    places = np.flatnonzero(weight_W)[: self._batch]
    chosen = tuple(waiting[place] for place in places)
    total_N, pairs_N = np.array([self._buffer.pop(number) for number in chosen]).T
    known = tuple(self._known[number] for number in chosen)
    self._flight = Batch(chosen, known, total_N, pairs_N.astype(int), weight_W[places])
    return self._flight

  def trained(self, batch: Batch) -> None:
    """An update with this batch is done: its samples are counted, and cool down.

    Raises:
      StoreError: this batch is not the one in training; it was finished, given back or forgotten.
    """
    self._in_flight(batch)
    self.updates, self._flight = self.updates + 1, None
    for number in batch.generations:
      self._trained[number] = (self._trained.get(number, (0, 0))[0] + 1, self.updates)

  def give_back(self, batch: Batch) -> None:
    """The update did not happen: the samples wait again, before all others. Raises as `trained`."""
    self._in_flight(batch)
    self._buffer, self._flight = self._waiting(), None

  def _in_flight(self, batch: Batch) -> None:
    if batch is not self._flight:
      raise StoreError(
        "this batch of the extractor is not in training: it was finished, given back, or taken before "
        "a resume; take a new one."
      )

  def _waiting(self) -> dict[int, tuple[float, int]]:
    """The buffer as if the batch in training had not been taken."""
    waiting = {}
    if self._flight is not None:
      totals = zip(
        self._flight.generations, self._flight.total_N, self._flight.pairs_N, strict=True
      )
      for number, total, n in totals:
        more = self._buffer.get(number, (0.0, 0))
        waiting[number] = (float(total) + more[0], int(n) + more[1])
    return waiting | {n: sums for n, sums in self._buffer.items() if n not in waiting}

  def prune(self, live: Iterable[int], before: int) -> int:
    """Forgets generations that are not `live`, wait for nothing and were last used before a step."""
    kept = set(live) | self._waiting().keys()
    kept |= {number for number, step in self._used.items() if step >= before}
    gone = self._known.keys() - kept
    for number in gone:
      for table in (self._known, self._used, self._trained):
        table.pop(number, None)
    return len(gone)

  def oldest(self) -> int | None:
    """The oldest version of the extractor in the buffer."""
    return min((self._known[number].extractor for number in self._buffer), default=None)

  def stats(self) -> dict[str, int]:
    """Sizes for metrics; `cooling` samples wait in the buffer and may not train yet."""
    weight_N = self.weight(list(self._buffer))
    return {
      "generations": len(self._known),
      "waiting": len(weight_N),
      "cooling": int(np.count_nonzero(weight_N == 0)),
      "lost": self.lost,
      "updates": self.updates,
    }

  # --- checkpoints --------------------------------------------------------------------------------

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(arrays, JSON-ready rest) for a checkpoint. A batch in training is saved as one that waits."""
    arrays, listed = pack(self._known.items())
    rest = {"next": self._next, "updates": self.updates, "lost": self.lost, "known": listed}
    rest["used"] = [[n, step] for n, step in self._used.items()]
    rest["trained"] = [[n, *value] for n, value in self._trained.items()]
    rest["buffer"] = [[n, *value] for n, value in self._waiting().items()]
    return arrays, rest

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    """Back to what `state` gave; a batch in training is forgotten."""
    self.reset()
    self._next, self.updates, self.lost = rest["next"], rest["updates"], rest["lost"]
    self._known = dict(unpack(arrays, rest["known"]))
    self._used = {n: step for n, step in rest["used"]}
    self._trained = {n: (times, last) for n, times, last in rest["trained"]}
    self._buffer = {n: (total, pairs) for n, total, pairs in rest["buffer"]}


def pack(
  generations: Iterable[tuple[int, Generation]],
) -> tuple[dict[str, np.ndarray], list[list[Any]]]:
  """Numbered generations as a few flat arrays and a JSON-ready list."""
  generations = list(generations)
  arrays, listed = {}, []
  for name, dtype in ARRAYS.items():
    rows = [np.asarray(getattr(g.sample, name), dtype) for _, g in generations]
    arrays[name] = np.concatenate([np.zeros(0, dtype), *rows])
  for number, (sample, extractor, step) in generations:
    sizes = [len(getattr(sample, name)) for name in ARRAYS]
    listed.append([number, sizes, sample.text, sample.finish, sample.temperature, extractor, step])
  return arrays, listed


def unpack(
  arrays: dict[str, np.ndarray], listed: list[list[Any]]
) -> Iterable[tuple[int, Generation]]:
  """What `pack` was given."""
  start = dict.fromkeys(ARRAYS, 0)
  for number, sizes, text, finish, temperature, extractor, step in listed:
    parts = {}
    for name, size in zip(ARRAYS, sizes, strict=True):
      parts[name] = arrays[name][start[name] : start[name] + size].copy()
      start[name] += size
    sample = Sample(text=text, finish=finish, temperature=temperature, **parts)
    yield number, Generation(sample, extractor, step)
