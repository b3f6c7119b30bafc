"""New memories and notes in old ones, worked out in full before any of it is written: who is filed where."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from memrl_jax.memory import bank, episodic_keep, episodic_ledger, episodic_prompt, episodic_write
from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.episodic_write import Episode, Kept
from memrl_jax.memory.records import Add, Change, Entry, Op, Remove
from memrl_jax.ops import utility


class Draft:
  """New memories of one tenant and notes in old ones, before any of it is written."""

  def __init__(self, config: EpisodicConfig, memory: bank.Memory, tenant: str):
    self._config, self._memory, self._tenant = config, memory, tenant
    self._adds: list[Add] = []
    self._keys: dict[str, np.ndarray] = {}  # keys that this draft opens, with their vectors
    self._amended: dict[int, tuple[Entry, Entry]] = {}
    self._gone: dict[int, Entry] = {}

  def followed(self, episode: Episode) -> int | None:
    """The best memory that the episode was shown, if it is still there."""
    for id, _ in episode.reads[:1]:
      if id in self._amended or self._memory.get(self._tenant, [id]):
        return id
    return None

  def amend(self, id: int, episode: Episode, note: str) -> None:
    stored, now = self._amended.get(id) or self._memory.get(self._tenant, [id]) * 2
    old = episodic_write.Text(now.text, now.data["learned"])
    text = episodic_write.noted(self._config, old, episode, note)
    now = dataclasses.replace(now, text=text.text, data=now.data | {"learned": text.learned})
    self._amended[id] = stored, now

  def add(self, episode: Episode, note: str) -> int | Kept:
    """The place of a new memory among those that this draft adds, or why there is no room for it."""
    config = self._config
    text = episodic_write.text(config, episode, note)
    key, vector = self._file(episodic_write.intent(config, episode.task))
    data = {
      "success": bool(episode.success),
      "learned": text.learned,
      "visits": 0,
      "wins": 0,
      "parents": list(dict.fromkeys(int(id) for id, _ in episode.reads)),
      "trial": episodic_ledger.name(self._tenant, episode.id),
      "last": None,
    }
    if episode.images:
      data["images"] = [episodic_prompt.plain(image) for image in episode.images]
    new = Add(self._tenant, key, text.text, config.first_q(episode.success), data, vector)
    if config.per_key is not None and not self._room(new):
      return Kept(episode.id, None, "the memories of its key are worth more")
    self._adds.append(new)
    return len(self._adds) - 1

  def _file(self, intent: str) -> tuple[str, Any]:
    """The key that a task is filed under, and its vector (b"": that of the text, made at the commit)."""
    (vector_D,) = self._memory.embedder.embed([intent])
    best, near, vector = -2.0, None, b""
    for hit in self._memory.search(self._tenant, [intent], 1)[0]:
      best, near = hit.similarity, hit.entry.key
      for stored in self._memory.store.get(self._tenant, [hit.id]):
        vector = stored.vector
    for key, key_D in self._keys.items():
      similarity = float(np.float32(key_D.astype(np.float64) @ vector_D.astype(np.float64)))
      if similarity > best and near != intent:
        best, near, vector = similarity, key, b""
    if near == intent or best >= float(np.float32(self._config.add_similarity)):
      return near, vector
    self._keys[intent] = vector_D
    return intent, b""

  def _room(self, new: Add) -> bool:
    """Whether it is among the per_key most worth of its key; of those stored the one it displaces goes."""
    drafted = sum(add.key == new.key for add in self._adds)
    mine = [
      entry
      for entry in self._memory.entries(self._tenant)
      if entry.key == new.key and entry.id not in self._gone
    ]
    entries = [*mine, Entry(0, new.tenant, 0, new.key, new.text, new.score, new.data)]
    left = self._config.per_key - drafted
    worth_N = episodic_keep.worth(entries, self._config)
    stay = utility.survivors([new.key] * len(entries), worth_N, left, None)
    if len(mine) not in stay:
      return False
    self._gone |= {entry.id: entry for place, entry in enumerate(mine) if place not in stay}
    return True

  def ops(self) -> list[Op]:
    changes = [
      Change(self._tenant, id, text=now.text, data=now.data, expect=old.version)
      for id, (old, now) in self._amended.items()
      if id not in self._gone
    ]
    removes = [Remove(self._tenant, id, old.version) for id, old in self._gone.items()]
    return [*self._adds, *changes, *removes]
