"""Turns episodes that wait on the disk into memories, with a language model, while nobody waits for it."""

from __future__ import annotations

import concurrent.futures
import logging
import threading

from memrl_jax.memory import episodic_write
from memrl_jax.memory.episodic import Episode, Episodic
from memrl_jax.memory.episodic_prompt import plain
from memrl_jax.memory.episodic_write import Write
from memrl_jax.runtime import asked
from memrl_jax.runtime.asked import Row
from memrl_jax.runtime.config import RuntimeConfig

_LOG = logging.getLogger("memrl_jax.runtime")
_BACKOFF_S, _LONGEST_S = 1.0, 60.0


def episode(row: Row, note: str | None = None) -> Episode:
  """What a suggestion with an outcome is to `Episodic.remember`."""
  return Episode(row.id, row.task, row.trajectory or "", bool(row.success), row.reads, note=note)


class Writer:
  """One thread; `wake` says that there is work. Its work is in the table `asked`, so none is lost."""

  def __init__(
    self,
    episodic: Episodic,
    tenant: str,
    table: asked.Asked,
    write: Write | None,
    config: RuntimeConfig,
  ):
    self._episodic, self._tenant, self._asked = episodic, tenant, table
    self._write, self._config = write, config
    self._awake, self._end = threading.Event(), threading.Event()
    self._thread: threading.Thread | None = None

  def start(self) -> None:
    """Goes on with what an earlier process left."""
    if self._write is not None:
      self._awake.set()
      self._thread = threading.Thread(target=self._run, name="memory writer", daemon=True)
      self._thread.start()

  def wake(self) -> None:
    self._awake.set()

  def stop(self) -> None:
    """A call of the language model that takes longer than some seconds is left alone, and made again."""
    self._end.set()
    self._awake.set()
    if self._thread is not None:
      self._thread.join(5.0)

  def _run(self) -> None:
    failures = 0
    while not self._end.is_set():
      self._awake.clear()
      try:
        failures = failures + 1 if self._round() else 0
      except Exception:
        if self._end.is_set():
          return  # closed under our feet, in a call that was given up
        _LOG.exception("the writer of memories failed; it tries again")
        failures += 1
      if failures:
        self._end.wait(min(_BACKOFF_S * 2 ** (failures - 1), _LONGEST_S))
      elif not self._asked.waiting(asked.PAID, 1):
        self._awake.wait()

  def _round(self) -> bool:
    """Some of what waits, written; whether any of it failed."""
    rows = self._asked.waiting(asked.PAID, self._config.write_workers)
    with concurrent.futures.ThreadPoolExecutor(self._config.write_workers) as pool:
      notes = list(pool.map(self._note, rows))
    if self._end.is_set():
      return False
    done = [(row, note) for row, note in zip(rows, notes, strict=True) if note is not None]
    episodes = [episode(row, note) for row, note in done]
    if episodes:
      self._episodic.remember(self._tenant, episodes)
      self._asked.settled(row.id for row, _ in done)
    failed = [row for row, note in zip(rows, notes, strict=True) if note is None]
    for row in failed:
      self._asked.failed(row.id)
      if row.tries + 1 >= self._config.write_tries:
        self._asked.settled([row.id], asked.GIVEN_UP)
    return bool(failed)

  def _note(self, row: Row) -> str | None:
    """What a language model says of an episode; None where it failed."""
    messages = episodic_write.request(self._config.episodic, episode(row))
    if messages is None:  # the configuration has changed since
      return ""
    try:
      return plain(self._write(messages)) or None
    except Exception as error:  # whatever a client of a model raises
      _LOG.warning("no summary of an episode: %s: %s", type(error).__name__, error)
      return None
