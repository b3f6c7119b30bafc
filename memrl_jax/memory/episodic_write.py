"""What becomes of a finished episode: a procedure, or a lesson from a failure (MemRL 2601.03192; MemP).

build    trajectory         the task and what was done
         script             a short plan that a language model abstracts from it
         proceduralization  the plan, then the trajectory
         note               what the model has said about it and nothing else, for models that write in
                            a notation of their own (nobody is asked: the episode brings its note)
         facts              no memory of the episode itself: what it teaches, fact by fact (`memory.facts`)
update   vanilla            successes and failures are built alike
         validation         failures are dropped
         adjustment         a failure becomes a reflection with its trajectory, as a memory of its own
                            ("append") or as a note in the memory that was followed ("in_place")
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.episodic_prompt import plain
from memrl_jax.types import Message

Write = Callable[[list[Message]], str]
BEFORE = "it was given before"


@dataclasses.dataclass(frozen=True)
class Episode:
  """A finished episode. `id` names it once and for all in its tenant: given twice, it is kept once.

  task: what is searched later. reads: (id, version) of the memories that were in the prompt, the best
  first. note: what a language model has said about it already, in answer to `request`.
  """

  id: str
  task: str
  trajectory: str
  success: bool
  reads: tuple[tuple[int, int], ...] = ()
  images: tuple[str, ...] = ()
  note: str | None = None


class Kept(NamedTuple):
  """What became of an episode: the memory's id, or None and why."""

  episode: str
  id: int | None
  reason: str = ""


class Text(NamedTuple):
  """The text of a memory; its first `learned` characters say what was learned."""

  text: str
  learned: int


_SCRIPT = (
  "You turn a finished episode into a plan that helps with similar tasks. Write 3 to 5 short steps, each on "
  "a line of its own. Keep the strategy and the points where a decision was taken, and why; leave out "
  "names, numbers and moves that only fit this one episode. Write the steps and nothing else."
)
_REFLECT = (
  "You learn from an episode that failed. In at most five sentences say which assumption or step was wrong, "
  "what would have been better, and what to avoid on similar tasks. Be concrete; do not retell the "
  "episode. Write these sentences and nothing else."
)


def intent(config: EpisodicConfig, task: str) -> str:
  """A task as it is embedded, written or asked about."""
  found = plain(task)[: config.key_chars]
  if not found:
    raise ValueError("the task is empty, so nothing can be found by it; give a description of it")
  return found


def kept(config: EpisodicConfig, episode: Episode) -> bool:
  """Whether the update strategy keeps it at all."""
  return episode.success or config.update != "validation"


def request(config: EpisodicConfig, episode: Episode) -> list[Message] | None:
  """What a language model is asked about an episode; None where it is not needed."""
  reflects = not episode.success and config.update == "adjustment"
  if config.build == "note" or not kept(config, episode):
    return None
  if config.build == "trajectory" and not reflects:
    return None
  system = _REFLECT if reflects else _SCRIPT
  return [Message("system", system), Message("user", told(config, episode))]


def told(config: EpisodicConfig, episode: Episode) -> str:
  """An episode as a language model reads it."""
  verdict = "success" if episode.success else "failure"
  trajectory = _trajectory(config, episode)
  return f"Task:\n{plain(episode.task)}\n\nOutcome: {verdict}\n\nEpisode:\n{trajectory}"


def notes(
  config: EpisodicConfig,
  episodes: Sequence[Episode],
  known: Collection[str],
  write: Write | None,
  workers: int,
) -> tuple[list[str | Kept], int]:
  """For each episode what was learned ("": its trajectory says it) or why it is not kept; how many failed.

  A language model that raises, or says nothing, fails the one episode.
  """
  found: list[str | Kept] = [""] * len(episodes)
  asks: dict[int, list[Message]] = {}
  named = set(known)
  for n, episode in enumerate(episodes):
    messages = request(config, episode)
    if episode.id in named:
      found[n] = Kept(episode.id, None, BEFORE)
    elif not kept(config, episode):
      found[n] = Kept(episode.id, None, "failures are not kept")
    elif config.build == "note":
      found[n] = plain(episode.note or "") or Kept(episode.id, None, "it came without a note")
    elif messages is not None and episode.note is not None:
      found[n] = plain(episode.note) or Kept(episode.id, None, "its note is empty")
    elif messages is not None:
      asks[n] = messages
    named.add(episode.id)
  if asks and write is None:
    raise ValueError(
      f"episode {episodes[min(asks)].id!r} needs a language model to sum it up; give write, or its note"
    )

  def ask(n: int) -> str | Kept:
    try:
      note = plain(write(asks[n]))
    except Exception as error:  # whatever a client of a model raises
      return Kept(episodes[n].id, None, f"{type(error).__name__}: {error}")
    return note or Kept(episodes[n].id, None, "the language model said nothing")

  with concurrent.futures.ThreadPoolExecutor(max(1, workers)) as pool:
    for n, note in zip(asks, pool.map(ask, asks), strict=True):
      found[n] = note
  return found, sum(isinstance(found[n], Kept) for n in asks)


def text(config: EpisodicConfig, episode: Episode, note: str) -> Text:
  """A new memory: the task and what was learned, then the trajectory unless it is abstracted away."""
  if config.build == "note":
    said = plain(note)[: config.note_chars]
    return Text(said, len(said))
  reflects = not episode.success and config.update == "adjustment"
  task = f"Task: {intent(config, episode.task)}"
  label = "Lesson" if reflects else "Plan"
  learned = f"{task}\n{label}: {plain(note)[: config.note_chars]}" if note else task
  if config.build == "script" and not reflects:
    return Text(learned, len(learned))
  return Text(f"{learned}\nEpisode:\n{_trajectory(config, episode)}", len(learned))


def noted(config: EpisodicConfig, old: Text, episode: Episode, note: str) -> Text:
  """A memory with one more lesson behind what was learned; the oldest lessons make room."""
  learned, rest = old.text[: old.learned], old.text[old.learned :]
  head, *lessons = learned.split("\nLesson of ")
  lessons.append(f"{plain(episode.id)}: {plain(note)[: config.note_chars]}")
  while sum(map(len, lessons)) > config.note_chars and len(lessons) > 1:
    lessons.pop(0)
  learned = "\nLesson of ".join([head, *lessons])
  return Text(learned + rest, len(learned))


def _trajectory(config: EpisodicConfig, episode: Episode) -> str:
  """From its beginning; of one that is too long the middle is left out."""
  whole, most = plain(episode.trajectory), config.trajectory_chars
  if len(whole) <= most:
    return whole
  return f"{whole[: most - most // 2]}\n[...]\n{whole[len(whole) - most // 2 :]}"
