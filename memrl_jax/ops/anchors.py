"""Anchors to cluster ids, on the host: which rows of a batch stood in the same situation.

N rows; ids are int32, counted from 0 in order of first appearance, so they are always below N:
`num_clusters = N` fits every batch and never recompiles. A task's rows must not meet another
task's, so the group belongs into the key. Two rows are compared by value, never by `hash()` alone.
"""

import difflib
from collections.abc import Hashable, Sequence

import numpy as np


def exact_clusters(keys: Sequence[Hashable]) -> np.ndarray:
  """Equal keys share an id, [N].  GiGPO (2505.10978), with keys (group, anchor observation)."""
  ids: dict[Hashable, int] = {}
  return np.array([ids.setdefault(key, len(ids)) for key in keys], np.int32)


def similarity_clusters(
  groups: Sequence[Hashable], texts: Sequence[str], threshold: float
) -> np.ndarray:
  """Each text joins the first cluster of its group that it resembles, else opens a new one, [N].

      join if  ratio(representative, text) = 2 matched / (len + len) >= threshold,   in (0, 1]

  GiGPO's similarity variant. The representative is the cluster's first text, so the result depends
  on the order of rows. Characters that are frequent in long texts count like all others
  (autojunk off), else the ratio would change its meaning at 200 characters.
  """
  _same_length(groups=groups, texts=texts)
  if not 0.0 < threshold <= 1.0:
    raise ValueError(f"similarity threshold is {threshold}; choose a value above 0 and at most 1")
  clusters: dict[Hashable, list[tuple[str, int]]] = {}
  ids = []
  opened = 0
  for group, text in zip(groups, texts, strict=True):
    members = clusters.setdefault(group, [])
    joined = _first_similar(members, text, threshold)
    if joined is None:
      joined, opened = opened, opened + 1
      members.append((text, joined))
    ids.append(joined)
  return np.array(ids, np.int32)


def context_clusters(
  groups: Sequence[Hashable],
  trajectories: Sequence[Hashable],
  anchors: Sequence[Hashable],
  *,
  contexts: int,
) -> np.ndarray:
  """Row k-1 clusters by the last k anchors of the row's trajectory, k = 1..contexts, [K, N].

  HGPO's context-aware keys: k = 1 is `exact_clusters` of the anchor, larger k also demands the same
  recent history. Rows of a trajectory must stand in the order they were played. A turn with fewer
  than k anchors behind it uses those it has.
  """
  _same_length(groups=groups, trajectories=trajectories, anchors=anchors)
  if contexts < 1:
    raise ValueError(f"contexts is {contexts}; at least 1 (the current anchor alone) is needed")
  history: dict[Hashable, tuple[Hashable, ...]] = {}
  recent = []
  for group, trajectory, anchor in zip(groups, trajectories, anchors, strict=True):
    key = (group, trajectory)
    history[key] = (*history.get(key, ()), anchor)[-contexts:]
    recent.append(history[key])
  pairs = list(zip(groups, recent, strict=True))
  return np.stack([exact_clusters([(g, h[-k:]) for g, h in pairs]) for k in range(1, contexts + 1)])


def _first_similar(members: list[tuple[str, int]], text: str, threshold: float) -> int | None:
  matcher = difflib.SequenceMatcher(None, autojunk=False)
  matcher.set_seq2(text)  # the matcher indexes its second text once
  for representative, cluster in members:
    matcher.set_seq1(representative)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # upper bounds first
    if representative == text or all(bound() >= threshold for bound in bounds):
      return cluster
  return None


def _same_length(**columns: Sequence) -> None:
  lengths = {name: len(column) for name, column in columns.items()}
  if len(set(lengths.values())) > 1:
    raise ValueError(f"anchor columns differ in length: {lengths}; give one entry a row in each")
