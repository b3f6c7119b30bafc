"""What MemRL remembers of trials: attempts as episodes and feedback, and which task was solved when."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.memory import episodic, episodic_metrics, facts
from memrl_jax.methods import memrl_asides, memrl_config
from memrl_jax.methods.memrl_config import MemrlConfig
from memrl_jax.types import Memo, Recall, Trial

SOLVED = "solved"  # the mode of a trial that is not played
Image = Callable[[str], str | None]  # that of the task of a name, None where there is none
_LOG = logging.getLogger("memrl_jax.methods")


def shown(one: Trial, attempt: int | None = None) -> tuple[tuple[int, int], ...]:
  """The memories that stood in the prompts of play, of one attempt or all."""
  turns = [t for t in one.turns if t.phase == "play" and attempt in (None, t.attempt)]
  return tuple(dict.fromkeys(read for turn in turns for read in turn.reads))


def played(one: Trial, images: tuple[str, ...] = ()) -> list[episodic.Episode]:
  """The attempts of a trial as the memory takes them, each with a name of its own; all have seen `images`."""
  found = []
  for number, (attempt, told) in enumerate(zip(one.attempts, one.story.messages, strict=True)):
    turns = [turn for turn in one.turns if turn.attempt == number]
    notes = [turn.action for turn in turns if turn.anchor in memrl_asides.NOTES]
    found.append(
      episodic.Episode(
        f"{one.name}.{number}" if number else one.name,
        next(turn.key for turn in turns if turn.phase == "play"),
        told.content,
        attempt.success,
        shown(one, number),
        images,
        note=notes[-1] if notes else "",
      )
    )
  return found


def feedback(episodes: Sequence[episodic.Episode]) -> list[episodic.Feedback]:
  """How the attempts of a trial ended, and which state each of them led to: that of the next one."""
  nexts = [episode.task for episode in episodes[1:]] + [None]
  return [
    episodic.Feedback(one.id, one.success, one.reads, next_query=after)
    for one, after in zip(episodes, nexts, strict=True)
  ]


class Reader(NamedTuple):
  """The memory as trials read it: a text a memory, those of successes first.

  `bare`: without words about what they are; so are tips of the tiny models, and facts. `image`: what a
  memory that names an image brings along. What is explored is a matter of who asks, not of who asked before.
  """

  memory: episodic.Episodic
  frozen: bool
  bare: bool
  image: Image

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    return [self._one(ask) for ask in asks]

  def _one(self, ask: Recall) -> tuple[Memo, ...]:
    draw = ask.draw or None
    found = self.memory.suggest(ask.scope, ask.query, frozen=self.frozen, draw=draw)
    shown = [(one, one.text) for one in found] if self.bare else self.memory.texts(found)
    return tuple(
      Memo(one.id, one.version, text, one.q, one.similarity, self._images(one))
      for one, text in shown
    )

  def _images(self, one: episodic.Suggestion) -> tuple[str, ...]:
    return tuple(filter(None, map(self.image, one.images)))


class Episodes:
  """What MemRL remembers (base.Remembered): the memory, and which task was solved when.

  `tasks`: how many the run rounds over (0: it does not). `image`: that of a task; the memory keeps only
  whose it is.
  """

  def __init__(
    self,
    config: MemrlConfig,
    memory: episodic.Episodic,
    tasks: int = 0,
    image: Image = lambda name: None,
  ):
    memrl_config.check(config, memory.config, tasks)
    self.config, self.memory, self._tasks, self._image = config, memory, tasks, image
    bare, found = memory.config.build in ("note", "facts"), functools.cache(self._found)
    self.reader = Reader(memory, False, bare, found)
    self.observer = Reader(memory, True, bare, found)
    self._solved: dict[str, list[bool]] = {}  # by the seed of a task, round after round
    self._rounds = 0.0
    self._reads = memory.reads()  # when they were pooled last

  def plan(self, trials: Sequence[Trial], rng: np.random.Generator) -> None:
    """What was solved before is not played again where only the unsolved is."""
    for one in trials:
      if self.config.retry == "unsolved" and any(self._solved.get(str(one.seed), ())):
        one.mode = SOLVED

  def remember(self, trials: Sequence[Trial]) -> dict[str, float]:
    """Pays what was shown, then files the attempts; the new ids were in no prompt yet."""
    usable = [one for one in trials if one.void is None]
    done = [one for one in usable if one.story is not None]
    places = list(dict.fromkeys(one.story.scope for one in done))
    numbers = self._facts(done)
    for place in places:
      mine = [self._played(one) for one in done if one.story.scope == place]
      if self.config.learns:
        self.memory.feedback(place, [item for one in mine for item in feedback(one)])
      if self.config.writes:
        self._write(place, [episode for one in mine for episode in one], numbers)
    for one in usable:  # those that were not played are solved
      solved = any(attempt.success for attempt in one.attempts)
      self._solved.setdefault(str(one.seed), []).append(solved)
    if self.config.retry == "unsolved":
      numbers["retry/played"] = float(sum(one.mode != SOLVED for one in trials))
    numbers |= self.epochs()
    whole = numbers.get("epoch/rounds", 0.0) > self._rounds
    self._rounds = numbers.get("epoch/rounds", 0.0)
    for place in places if self.config.scope == "env" else ():  # not for each of thousands of tasks
      prefix = f"memory/{place}/" if len(places) > 1 else "memory/"
      numbers |= {f"{prefix}{name}": value for name, value in self.memory.stats(place).items()}
      if whole:  # looks at every use of every memory
        q_N, success_N, _ = self.memory.used(place)
        correlation = episodic_metrics.pearson(q_N, success_N.astype(float))
        numbers |= {f"{prefix}pearson": correlation} if np.isfinite(correlation) else {}
    return numbers

  def pool(self, gather: Callable[[list], list]) -> None:
    """Counts what the trials of other processes have asked since the last time as if asked here."""
    own = self.memory.reads() - self._reads
    everybody = sum(gather([own]), collections.Counter())
    self.memory.add_reads(everybody - own)
    self._reads = self.memory.reads()

  def _played(self, one: Trial) -> list[episodic.Episode]:
    return played(one, (one.task,) if self._image(one.task) else ())

  def _found(self, name: str) -> str | None:
    """An image that a memory names."""
    image = self._image(name)
    if image is None:
      _LOG.warning(
        "a memory names the image of task %r, which this run has not: it is not shown", name
      )
    return image

  def _facts(self, done: Sequence[Trial]) -> dict[str, float]:
    """Where facts are kept: how many answers could not be read, and a place for what became of the others."""
    if self.memory.config.build != "facts" or not self.config.writes:
      return {}
    asked = [turn for one in done for turn in one.turns if turn.anchor in ("facts", "compare")]
    malformed = float(sum(not turn.valid for turn in asked))
    return {"facts/malformed": malformed} | {f"facts/{name}": 0.0 for name in facts.DONE}

  def _write(
    self, place: str, episodes: Sequence[episodic.Episode], numbers: dict[str, float]
  ) -> None:
    if self.memory.config.build != "facts":
      self.memory.remember(place, episodes)
      return
    told = [facts.Told(e.id, e.success, e.reads, facts.load(e.note)) for e in episodes]
    for name, count in self.memory.revise(place, told).items():
      numbers[f"facts/{name}"] += count

  def epochs(self) -> dict[str, float]:
    """Of the last whole round: the share of tasks solved in it, or ever, and what was forgotten since."""
    played = list(self._solved.values())
    rounds = min(map(len, played), default=0)
    if not rounds or len(played) < self._tasks or not self._tasks:
      return {}
    success_ET = np.array([solved[:rounds] for solved in played]).T
    numbers = {
      "epoch/rounds": float(rounds),
      "epoch/last": episodic_metrics.last_epoch_accuracy(success_ET),
      "epoch/cumulative": float(episodic_metrics.cumulative_success(success_ET)[-1]),
    }
    if rounds > 1:
      numbers["epoch/forgotten"] = episodic_metrics.forgetting_rate(success_ET)
    return numbers

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, rest = self.memory.state()
    solved = {task: list(rounds) for task, rounds in self._solved.items()}
    return arrays, {"memory": rest, "solved": solved}

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self.memory.load(arrays, rest["memory"])
    self._solved = {task: list(solved) for task, solved in rest["solved"].items()}
    self._rounds = self.epochs().get("epoch/rounds", 0.0)
    self._reads = self.memory.reads()

  def reset(self) -> None:
    self.memory.reset()
    self._solved, self._rounds = {}, 0.0
    self._reads = self.memory.reads()

  def close(self) -> None:
    self.memory.close()
