"""What trials of several hosts read of the experience bank: as if they asked one bank, one after the other.

Which entry a trial is shown depends on what the trials before it were shown (`ExperienceBank.search`). So the
hosts tell each other what their trials ask first, all before one of them is answered, and each searches for all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from memrl_jax.memory import manager
from memrl_jax.rollout import collect
from memrl_jax.training import hosts
from memrl_jax.types import Memo, Recall, Trial


@contextlib.contextmanager
def reading(
  memory: collect.Memory | None, trials: Sequence[Trial]
) -> Iterator[collect.Memory | None]:
  """What this host's `trials` read inside; all of them begin at once, on every host (`hosts.check`)."""
  if hosts.count() == 1 or not isinstance(memory, manager.Reader):
    yield memory
    return
  all_hosts = _Together(memory)
  if all(trial.mode == "free" for trial in trials):
    all_hosts.join([])  # they will ask nothing, and nobody should wait for them
  yield all_hosts
  if not all_hosts.joined:
    all_hosts.join([])


class _Together:
  """The bank of this host, which counts what all hosts read."""

  def __init__(self, reader: manager.Reader):
    self._reader, self.joined = reader, False

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    first = [ask for ask in asks if not manager.is_later(ask)]
    found = iter(self.join(first) if first else ())
    later = iter(self._reader.recall([ask for ask in asks if manager.is_later(ask)]))
    return [next(later if manager.is_later(ask) else found) for ask in asks]

  def join(self, asks: list[Recall]) -> list[tuple[Memo, ...]]:
    """The answers to what this host asks first, after those to the hosts before it."""
    if self.joined:
      raise RuntimeError("a trial began after others had read; all of a host's must begin at once")
    self.joined = True
    told = hosts.gather([asks], "what all trials ask the memory")
    found = self._reader.recall([ask for one in told for ask in one])
    before = sum(map(len, told[: hosts.index()]))
    return found[before : before + len(asks)]
