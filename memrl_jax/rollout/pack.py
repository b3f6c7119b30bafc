"""From turns to packed batches: exactly the ids that were seen and sampled, in a few fixed shapes.

A row is `prompt_ids + ids`. Rows are packed first-fit-decreasing into sequences of T positions, told
apart by segment ids; B sequences make a micro-batch. Every micro-batch has the same shape, so the
training step compiles once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from memrl_jax.types import TokenBatch, Turn


@dataclasses.dataclass(frozen=True)
class PackConfig:
  """B sequences of T positions; at most S rows in a sequence and K sampled tokens in a row."""

  sequences: int = 16
  length: int = 256
  rows: int = 4
  response: int = 24

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value} (config.pack.{name})")
    if self.response > self.length:
      raise ValueError(
        f"a response of {self.response} tokens cannot fit sequences of {self.length}; lower "
        "config.pack.response or raise config.pack.length"
      )


def trainable(turns: Sequence[Turn]) -> list[Turn]:
  """Turns that carry an advantage and were sampled token by token from a policy."""
  return [turn for turn in turns if turn.advantage is not None and len(turn.sample.ids)]


def split(turns: Sequence[Turn], parts: int, rng: np.random.Generator) -> list[list[Turn]]:
  """Shuffles rows and deals them into `parts` optimiser steps of almost equal size."""
  order = rng.permutation(len(turns))
  return [[turns[i] for i in order[part::parts]] for part in range(parts) if part < len(turns)]


def pack(turns: Sequence[Turn], config: PackConfig) -> list[TokenBatch]:
  """Micro-batches that hold every given turn once; what is left over is padding without mask.

  Raises:
    ValueError: a row does not fit the sequence length, or a response the response length.
  """
  sequences = _first_fit(turns, config)
  step = config.sequences
  return [_batch(sequences[i : i + step], config) for i in range(0, len(sequences), step)]


def _first_fit(turns: Sequence[Turn], config: PackConfig) -> list[list[Turn]]:
  sizes = [len(turn.sample.prompt_ids) + len(turn.sample.ids) for turn in turns]
  for turn, size in zip(turns, sizes, strict=True):
    if size > config.length or len(turn.sample.ids) > config.response:
      raise ValueError(
        f"a row of {size} tokens with {len(turn.sample.ids)} sampled does not fit sequences of "
        f"{config.length} with {config.response}; raise config.pack.length or config.pack.response"
      )
  bins: list[tuple[list[Turn], int]] = []
  open_from = 0
  for i in sorted(range(len(turns)), key=lambda i: -sizes[i]):
    for b in range(open_from, len(bins)):
      rows, used = bins[b]
      if used + sizes[i] <= config.length and len(rows) < config.rows:
        rows.append(turns[i])
        bins[b] = (rows, used + sizes[i])
        break
    else:
      bins.append(([turns[i]], sizes[i]))
    while open_from < len(bins) and len(bins[open_from][0]) == config.rows:
      open_from += 1
  return [rows for rows, _ in bins]


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
    advantage_BS=np.zeros((B, S), np.float32),
    temperature_BS=np.ones((B, S), np.float32),
    value_target_BS=np.zeros((B, S), np.float32),
    value_index_BS=np.zeros((B, S), np.int32),
  )


def _batch(sequences: Sequence[Sequence[Turn]], config: PackConfig) -> TokenBatch:
  batch = empty(config)
  for b, rows in enumerate(sequences):
    start = 0
    for s, turn in enumerate(rows):
      prompt, ids = turn.sample.prompt_ids, turn.sample.ids
      P, N = len(prompt), len(ids)
      end = start + P + N
      batch.tokens_BT[b, start : start + P] = prompt
      batch.tokens_BT[b, start + P : end] = ids
      batch.segment_BT[b, start:end] = s + 1
      batch.position_BT[b, start:end] = np.arange(P + N)
      batch.gather_BSK[b, s, :N] = start + P - 1 + np.arange(N)
      batch.target_BSK[b, s, :N] = ids
      batch.mask_BSK[b, s, :N] = True
      batch.behaviour_BSK[b, s, :N] = turn.sample.logps
      batch.advantage_BS[b, s] = turn.advantage or 0.0
      batch.temperature_BS[b, s] = turn.sample.temperature
      batch.value_target_BS[b, s] = turn.value_target
      batch.value_index_BS[b, s] = start + P - 1
      start = end
  return batch


def rows_of(turns: Sequence[Turn], config: PackConfig) -> list[tuple[int, int, int]]:
  """Where `pack` puts each turn, as (micro-batch, sequence, segment), in the order of `turns`."""
  places = {}
  for number, rows in enumerate(_first_fit(turns, config)):
    for s, turn in enumerate(rows):
      places[id(turn)] = (number // config.sequences, number % config.sequences, s)
  return [places[id(turn)] for turn in turns]
