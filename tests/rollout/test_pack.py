"""Packing: every sampled token once, with the ids and log-probs it was sampled with."""

import dataclasses

import numpy as np
import pytest

from memrl_jax.rollout import pack
from tests.rollout import trials as make

CONFIG = pack.PackConfig(sequences=3, length=16, rows=3, response=5)


def rows(count=20, seed=0):
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(count):
    prompt = rng.integers(1, 50, size=rng.integers(1, 8))
    ids = rng.integers(1, 50, size=rng.integers(1, 5))
    out.append(
      dataclasses.replace(
        make.turn(0, "play", 0), sample=make.sample(prompt, ids), advantage=rng.normal()
      )
    )
  return out


def unpacked(batches):
  """(prompt, ids, behaviour, advantage) of every row, read back through the batch's own indices."""
  found = []
  for batch in batches:
    for b, s in np.argwhere(batch.mask_BSK.any(-1)):
      mask = batch.mask_BSK[b, s]
      gather = batch.gather_BSK[b, s][mask]
      where = np.flatnonzero(batch.segment_BT[b] == s + 1)
      tokens = batch.tokens_BT[b, where]
      n = mask.sum()
      assert (np.diff(gather) == 1).all()
      assert (batch.tokens_BT[b, gather + 1] == batch.target_BSK[b, s][mask]).all()
      assert (batch.position_BT[b, where] == np.arange(len(where))).all()
      assert batch.value_index_BS[b, s] == gather[0]
      found.append(
        (
          tuple(tokens[:-n]),
          tuple(tokens[-n:]),
          tuple(batch.behaviour_BSK[b, s][mask]),
          batch.advantage_BS[b, s],
        )
      )
  return found


def test_every_row_comes_back_exactly_once():
  turns = rows()
  found = unpacked(pack.pack(turns, CONFIG))
  wanted = [
    (
      tuple(t.sample.prompt_ids),
      tuple(t.sample.ids),
      tuple(t.sample.logps),
      np.float32(t.advantage),
    )
    for t in turns
  ]
  assert sorted(found) == sorted(wanted)


def test_the_mask_counts_every_sampled_token_and_nothing_else():
  turns = rows()
  batches = pack.pack(turns, CONFIG)
  assert sum(b.mask_BSK.sum() for b in batches) == sum(len(t.sample.ids) for t in turns)


def test_all_micro_batches_have_one_shape_whatever_the_number_of_rows():
  shapes = {
    tuple(leaf.shape for leaf in batch)
    for count in (1, 7, 20)
    for batch in pack.pack(rows(count), CONFIG)
  }
  assert len(shapes) == 1


@pytest.mark.parametrize("count", range(1, 12))
def test_splitting_into_steps_keeps_every_row(count):
  turns = rows(count)
  parts = pack.split(turns, 4, np.random.default_rng(0))
  assert sorted(id(t) for part in parts for t in part) == sorted(map(id, turns))
  assert all(parts)


def test_places_agree_with_the_batches():
  turns = rows()
  batches = pack.pack(turns, CONFIG)
  for turn, (m, b, s) in zip(turns, pack.rows_of(turns, CONFIG), strict=True):
    assert batches[m].advantage_BS[b, s] == np.float32(turn.advantage)


def test_a_row_that_does_not_fit_says_what_to_raise():
  long = dataclasses.replace(make.turn(0, "play", 0), sample=make.sample(range(20)), advantage=1.0)
  with pytest.raises(ValueError, match=r"config\.pack\.length"):
    pack.pack([long], CONFIG)


def test_turns_without_tokens_or_advantage_are_not_trained():
  scripted = dataclasses.replace(make.turn(0, "play", 0), sample=make.sample(ids=()), advantage=1.0)
  assert pack.trainable([scripted, make.turn(0, "play", 0)]) == []
