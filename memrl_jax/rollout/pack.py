"""From turns to packed batches: exactly the ids that were seen and sampled, in a few fixed shapes.

A row is `prompt_ids + ids`. Rows that begin alike share that beginning: it stands once in a sequence
of T positions and all that continues it behind it, as a tree of segments (see TokenBatch), so that
training computes it once. The log-probs, the loss and its gradient are those of separate rows. B
sequences make a micro-batch; all have one shape, so the training step compiles once.

What is shared: rows of a group have one first prompt, turns of a trial the rules and what came
before; sorted by their ids, rows lie next to those they share most with. Sharing happens inside a
sequence, hence inside an optimiser step: `split` deals rows to steps at random, as the methods have
it, and so gives up what rows in different steps have in common.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.types import TokenBatch, Turn

SHARE = ("prefix", "none")
_LEAST = 8  # tokens; a shorter common beginning (a start token, a role) is repeated


@dataclasses.dataclass(frozen=True)
class PackConfig:
  """B sequences of T positions; at most S rows in a sequence and K sampled tokens in a row.

  share: "prefix" lets rows of a sequence share what they have in common at their beginning; "none"
    keeps them apart.
  """

  sequences: int = 16
  length: int = 256
  rows: int = 4
  response: int = 24
  share: str = "prefix"

  def __post_init__(self):
    for name in ("sequences", "length", "rows", "response"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"{name} must be at least 1, not {getattr(self, name)} (config.pack.{name})"
        )
    if self.response > self.length:
      raise ValueError(
        f"a response of {self.response} tokens cannot fit sequences of {self.length}; lower "
        "config.pack.response or raise config.pack.length"
      )
    if self.share not in SHARE:
      raise ValueError(
        f"share {self.share!r} is not known; choose one of {', '.join(SHARE)} (config.pack.share)"
      )


class Packed(NamedTuple):
  """Micro-batches, and where each turn went, as (micro-batch, sequence, row), in the turns' order."""

  batches: list[TokenBatch]
  places: list[tuple[int, int, int]]

  @property
  def tokens(self) -> int:
    """Positions that hold a token: what the model computes, padding aside."""
    return sum(int(np.count_nonzero(batch.segment_BT)) for batch in self.batches)


def trainable(turns: Sequence[Turn]) -> list[Turn]:
  """Turns that carry an advantage and were sampled token by token from a policy."""
  return [turn for turn in turns if turn.advantage is not None and len(turn.sample.ids)]


def imitated(turns: Sequence[Turn], per_token: bool) -> list[Turn]:
  """The rows of turns that are also imitated: the plain prompt, the answer as sampled.

  Advantages, those of `turns` included, are scaled so that one mean over all rows is the sum of the
  turns' own mean and of that of the imitated ones times their weight.
  """

  def count(rows: Sequence[Turn]) -> int:
    return sum(len(row.sample.ids) if per_token else 1 for row in rows)

  rows = trainable(turns)
  chosen = [turn for turn in turns if turn.imitate > 0]
  own, more = count(rows), count(chosen)
  for row in rows:
    row.advantage *= (own + more) / own
  made = [
    dataclasses.replace(turn, advantage=turn.imitate * (own + more) / more) for turn in chosen
  ]
  for turn in turns:
    turn.imitate = 0.0
  return made


def tokens_alone(turn: Turn) -> int:
  """Positions that the row takes by itself: all but its last token, which is only a target."""
  return len(turn.prompt_ids) + len(turn.sample.ids) - 1


def split(turns: Sequence[Turn], parts: int, rng: np.random.Generator) -> list[list[Turn]]:
  """Shuffles rows and deals them into `parts` optimiser steps of almost equal size."""
  order = rng.permutation(len(turns))
  return [[turns[i] for i in order[part::parts]] for part in range(parts) if part < len(turns)]


def pack(turns: Sequence[Turn], config: PackConfig) -> list[TokenBatch]:
  """Micro-batches that hold every given turn once; what is left over is padding without mask.

  Raises:
    ValueError: a row does not fit the sequence length, or a response the response length.
  """
  return pack_with_places(turns, config).batches


def pack_with_places(turns: Sequence[Turn], config: PackConfig) -> Packed:
  """`pack`, and where it put each turn."""
  _check(turns, config)
  inputs = [np.concatenate([t.prompt_ids, t.sample.ids[:-1]]) for t in turns]
  bins = _bins(inputs, [len(turn.sample.ids) for turn in turns], config)
  size = config.sequences
  batches = [empty(config) for _ in range(0, len(bins), size)]
  places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(turns)
  for number, rows in enumerate(bins):
    m, b = divmod(number, size)
    _fill(batches[m], b, [(turns[i], inputs[i], shared) for i, shared in rows])
    for s, (i, _) in enumerate(rows):
      places[i] = (m, b, s)
  return Packed(batches, places)


def _check(turns: Sequence[Turn], config: PackConfig) -> None:
  for turn in turns:
    sampled = len(turn.sample.ids)
    size = len(turn.prompt_ids) + sampled
    if size > config.length or sampled > config.response:
      raise ValueError(
        f"a row of {size} tokens with {sampled} sampled does not fit sequences of "
        f"{config.length} with {config.response}; raise config.pack.length or config.pack.response"
      )


def _bins(
  rows: Sequence[np.ndarray], sampled: Sequence[int], config: PackConfig
) -> list[list[tuple[int, int]]]:
  """Best fit: each row goes where it adds least; a bin is a list of (row, tokens shared).

  With sharing rows come in the order of their ids, so that in every bin the last row is the one
  that shares most with the next; without, the longest come first. No bin has more sampled tokens
  than positions, which only rows that are equal could bring about.
  """
  size_R = np.array([len(row) for row in rows], np.int64)
  order = np.argsort(-size_R, kind="stable")
  common_R = np.zeros(len(rows), np.int64)
  if config.share == "prefix" and len(rows):
    order, common_R = _sorted(rows, size_R)
  bins: list[list[tuple[int, int]]] = []
  used_X, count_X, loss_X, like_X = (np.zeros(len(rows), np.int64) for _ in range(4))
  for i, common in zip(order.tolist(), common_R.tolist(), strict=True):
    n = len(bins)
    # With the last row of each bin: what all neighbours since then have in common.
    np.minimum(like_X[:n], common, out=like_X[:n])
    shared_X = np.where(like_X[:n] >= _LEAST, like_X[:n], 0)
    left_X = config.length - used_X[:n] - (size_R[i] - shared_X)
    fits_X = (left_X >= 0) & (count_X[:n] < config.rows)
    fits_X &= loss_X[:n] + sampled[i] <= config.length
    score_X = np.where(fits_X, shared_X, -1)
    best = int(np.argmax(score_X)) if n else 0
    if n == 0 or score_X[best] < 0:
      best, shared = n, 0
      bins.append([])
    else:
      shared = int(shared_X[best])
    bins[best].append((i, shared))
    used_X[best] += size_R[i] - shared
    count_X[best] += 1
    loss_X[best] += sampled[i]
    like_X[best] = size_R[i]
  return bins


def _sorted(rows: Sequence[np.ndarray], size_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The rows' order by their ids, and what each then has in common with the one before it."""
  padded = np.zeros((len(rows), int(size_R.max()) + 1), ">u4")
  padded[np.arange(padded.shape[1]) < size_R[:, None]] = np.concatenate(rows) + 1  # 0 ends a row
  order = np.argsort(padded.view(f"S{padded.strides[0]}")[:, 0], kind="stable")
  padded = padded[order]
  differ = padded[1:] != padded[:-1]
  common = np.where(differ.any(axis=1), differ.argmax(axis=1), size_R[order][1:])
  return order, np.concatenate([[0], common])


def empty(config: PackConfig) -> TokenBatch:
  """A micro-batch of padding only."""
  B, T, S, K = config.sequences, config.length, config.rows, config.response
  return TokenBatch(
    tokens_BT=np.zeros((B, T), np.int32),
    segment_BT=np.zeros((B, T), np.int32),
    position_BT=np.zeros((B, T), np.int32),
    gather_BSK=np.zeros((B, S, K), np.int32),
    target_BSK=np.zeros((B, S, K), np.int32),
    mask_BSK=np.zeros((B, S, K), bool),
    behaviour_BSK=np.zeros((B, S, K), np.float32),
    off_BS=np.zeros((B, S), bool),
    imitate_BS=np.zeros((B, S), bool),
    forced_BS=np.zeros((B, S), bool),
    advantage_BS=np.zeros((B, S), np.float32),
    temperature_BS=np.ones((B, S), np.float32),
    value_target_BS=np.zeros((B, S), np.float32),
    value_index_BS=np.zeros((B, S), np.int32),
    parent_BN=np.zeros((B, 2 * S), np.int32),  # a row adds itself, and may cut one segment in two
  )


def _fill(batch: TokenBatch, b: int, rows: Sequence[tuple[Turn, np.ndarray, int]]) -> None:
  """Writes the rows of sequence b: (turn, its input ids, how many of them the row before gave)."""
  starts, parents = _forest([(len(ids), shared) for _, ids, shared in rows])
  batch.parent_BN[b, 1 : len(parents) + 1] = parents
  where_T = np.empty(batch.tokens_BT.shape[1], np.int64)  # of the row in hand: depth -> position
  end = 0
  for s, (turn, ids, shared) in enumerate(rows):
    sample, size = turn.sample, len(ids)
    start, end = end, end + size - shared
    where_T[shared:size] = np.arange(start, end)
    batch.tokens_BT[b, start:end] = ids[shared:]
    batch.position_BT[b, start:end] = np.arange(shared, size)
    N = len(sample.ids)
    batch.gather_BSK[b, s, :N] = where_T[size - N : size]
    batch.target_BSK[b, s, :N] = sample.ids
    batch.mask_BSK[b, s, :N] = True
    batch.behaviour_BSK[b, s, :N] = sample.logps
    batch.off_BS[b, s] = turn.plain_ids is not None
    batch.imitate_BS[b, s] = turn.imitate > 0
    batch.forced_BS[b, s] = not turn.sampled
    batch.advantage_BS[b, s] = turn.advantage or 0.0
    batch.temperature_BS[b, s] = sample.temperature
    batch.value_target_BS[b, s] = turn.value_target
    batch.value_index_BS[b, s] = where_T[size - N]
  batch.segment_BT[b, :end] = np.searchsorted(starts, np.arange(end), side="right")


def _forest(rows: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
  """Segments of rows (tokens, tokens shared with the row before): where each starts, its parent.

  Segments come in the order of their start, which is depth first; ids count from 1, parent 0 is
  none. A row cuts the segment in which it leaves the row before it.
  """
  cuts: list[list[int]] = []  # [start, depth at start, depth at end, parent], by number of creation
  path: list[int] = []  # from the root to where the last row ended
  end = 0
  for size, shared in rows:
    while path and cuts[path[-1]][1] >= shared:
      path.pop()
    if path and shared < cuts[path[-1]][2]:
      top = path[-1]
      start, low, high, _ = cuts[top]
      for cut in cuts:
        if cut[3] == top:
          cut[3] = len(cuts)
      cuts.append([start + shared - low, shared, high, top])
      cuts[top][2] = shared
    if size > shared:
      cuts.append([end, shared, size, path[-1] if path else -1])
      path.append(len(cuts) - 1)
      end += size - shared
  order = sorted(range(len(cuts)), key=lambda n: cuts[n][0])
  number = {n: rank for rank, n in enumerate(order, 1)} | {-1: 0}
  return [cuts[n][0] for n in order], [number[cuts[n][3]] for n in order]
