"""Which memories stay: near duplicates become one, and the least worth go. MemRL itself keeps everything. [us]

Words as in `episodic`. Functions of entries that return operations; who calls them commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from memrl_jax.memory.episodic_config import EpisodicConfig
from memrl_jax.memory.records import Change, Entry, Op, Remove
from memrl_jax.ops import utility

_COMPARED = 4000  # characters of a text
_KEYS = 4096  # that are compared with each other
Embed = Callable[[Sequence[str]], np.ndarray]


def worth(entries: Sequence[Entry], config: EpisodicConfig) -> np.ndarray:
  """`utility.worth` of these memories, of the lower of Q and the mean reward since they were written.

  The mean counts what a memory was written about as its first visit. Q alone forgets and is shared: shown
  beside a good memory a useless one has Q near 1 within a dozen visits.
  """
  low, high = config.reward(False), config.reward(True)
  data = [entry.data for entry in entries]
  visits_N = np.array([one["visits"] for one in data], np.float64)
  wins_N = np.array([one["wins"] + bool(one["success"]) for one in data], np.float64)
  q_N = np.array([entry.score for entry in entries], np.float64)
  mean_N = low + (high - low) * wins_N / (visits_N + 1)
  return utility.worth(np.minimum(q_N, mean_N), visits_N, bonus=config.prune_bonus)


def merge(entries: Sequence[Entry], embed: Embed, config: EpisodicConfig) -> list[Op]:
  """Of the memories of a key with the same outcome whose texts say the same, the one worth most stays.

  Texts are compared as they begin (cosine above merge_above). It takes the others' evidence: visits and
  wins add up, and Q is the mean over all visits.
  """
  groups: dict[tuple[str, bool], list[Entry]] = {}
  for entry in entries:
    groups.setdefault((entry.key, entry.data["success"]), []).append(entry)
  ops: list[Op] = []
  for group in groups.values():
    if len(group) < 2:
      continue
    order = np.argsort(-worth(group, config), kind="stable").tolist()
    vectors_ND = embed([group[n].text[:_COMPARED] for n in order])
    leaders: list[int] = []  # places in `order`
    twins: dict[int, list[Entry]] = {}
    for place, vector_D in enumerate(vectors_ND):
      near = np.flatnonzero(vectors_ND[leaders] @ vector_D > config.merge_above)
      if len(near):
        twins[leaders[near[0]]].append(group[order[place]])
      else:
        leaders.append(place)
        twins[place] = [group[order[place]]]
    for same in twins.values():
      if len(same) > 1:
        ops += _one(same)
  return ops


def _one(same: Sequence[Entry]) -> list[Op]:
  """The first of these takes the evidence of all; the others go."""
  first, ids = same[0], {entry.id for entry in same}
  visits = sum(entry.data["visits"] for entry in same)
  total = sum(entry.data["visits"] * entry.score for entry in same)
  parents = dict.fromkeys(p for entry in same for p in entry.data["parents"] if p not in ids)
  data = first.data | {
    "visits": visits,
    "wins": sum(entry.data["wins"] for entry in same),
    "parents": list(parents),
  }
  q = total / visits if visits else first.score
  return [
    Change(first.tenant, first.id, score=q, data=data),
    *(Remove(entry.tenant, entry.id) for entry in same[1:]),
  ]


def prune(entries: Sequence[Entry], keep: int, embed: Embed, config: EpisodicConfig) -> list[Op]:
  """Removes what `utility.survivors` does not keep; keys for which the same memories are found are one there."""
  worth_N = worth(entries, config)
  keys = [entry.key for entry in entries]
  if config.per_key is None:
    keys = neighbourhoods(keys, worth_N, embed, config.delta)
  stay = set(utility.survivors(keys, worth_N, keep, config.per_key))
  return [Remove(entry.tenant, entry.id) for n, entry in enumerate(entries) if n not in stay]


def neighbourhoods(
  keys: Sequence[str], worth_N: np.ndarray, embed: Embed, delta: float
) -> list[str]:
  """For each memory the key of the best one for which it stands in: a query that finds one finds the other.

  Best first, a key belongs to the first leader with a cosine above delta, or leads itself. Beyond _KEYS
  different keys, where this would cost too much, each stands for itself.
  """
  different = list(dict.fromkeys(keys[n] for n in np.argsort(-worth_N, kind="stable")))
  if len(different) > _KEYS or not different:
    return list(keys)
  vectors_KD = np.asarray(embed(different))
  leads: list[int] = []
  leader: dict[str, str] = {}
  for n, vector_D in enumerate(vectors_KD):
    near = np.flatnonzero(vectors_KD[leads] @ vector_D > delta)
    if not len(near):
      leads.append(n)
    leader[different[n]] = different[leads[near[0]] if len(near) else n]
  return [leader[key] for key in keys]


def under_cap(embed: Embed, config: EpisodicConfig) -> Callable[[list[Entry]], list[Op]]:
  """For `Limits.merge`, called where a commit would exceed the capacity: merge, then make room.

  Only keys that get a new memory are looked through for duplicates, and a tenth of the capacity is freed at
  once, so that this stays cheap and rare.
  """

  def hook(entries: list[Entry]) -> list[Op]:
    growing = {entry.key for entry in entries if entry.id < 0}
    ops = merge([entry for entry in entries if entry.key in growing], embed, config)
    gone = {op.id for op in ops if isinstance(op, Remove)}
    left = [entry for entry in entries if entry.id not in gone]
    if len(left) > config.capacity:
      ops += prune(left, config.capacity - config.capacity // 10, embed, config)
      gone = {op.id for op in ops if isinstance(op, Remove)}
    # A merged memory may be pruned after all; one operation an entry is enough.
    return [op for op in ops if isinstance(op, Remove) or op.id not in gone]

  return hook
