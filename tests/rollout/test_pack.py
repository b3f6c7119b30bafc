"""Packing: every sampled token once, with the ids and log-probs it was sampled with."""

import dataclasses

import numpy as np
import pytest

from memrl_jax.rollout import pack
from tests.rollout import trials as make

CONFIG = pack.PackConfig(sequences=3, length=16, rows=3, response=5)


LONG = pack.PackConfig(sequences=2, length=64, rows=5, response=5)
every_share = pytest.mark.parametrize("share", pack.SHARE)


def row(prompt, ids, advantage=1.0):
  return dataclasses.replace(
    make.turn(0, "play", 0), sample=make.sample(prompt, ids), advantage=advantage
  )


def rows(count=20, seed=0):
  rng = np.random.default_rng(seed)
  return [
    row(
      rng.integers(1, 50, size=rng.integers(1, 8)),
      rng.integers(1, 50, size=rng.integers(1, 5)),
      rng.normal(),
    )
    for _ in range(count)
  ]


def family(seed=0, trials=6, turns=5):
  """Rows of trials that begin alike: each turn's prompt is the one before it and what was said."""
  rng = np.random.default_rng(seed)
  out = []
  for trial in range(trials):
    prompt = np.arange(1, 12) + 20 * (trial % 2)
    for _ in range(turns):
      ids = rng.integers(1, 4, size=rng.integers(1, 5))
      out.append(row(prompt, ids, rng.normal()))
      prompt = np.concatenate([prompt, ids, rng.integers(1, 3, size=2)])
  return out + out[:2]  # two rows twice


def brush(seed=0, count=30):
  """Rows of very different lengths with 8 and a few more tokens in common: bins are left and refilled."""
  rng = np.random.default_rng(seed)
  return [
    row([*range(1, 9), *rng.integers(1, 3, size=rng.integers(2, 45))], [5, 6]) for _ in range(count)
  ]


def unpacked(batches):
  """(prompt, ids, behaviour, advantage) of every row, read back along the branch that it ends."""
  found = []
  for batch in batches:
    for b, s in np.argwhere(batch.mask_BSK.any(-1)):
      mask = batch.mask_BSK[b, s]
      gather, target = batch.gather_BSK[b, s][mask], batch.target_BSK[b, s][mask]
      last = gather[-1]
      line, segment = [], batch.segment_BT[b, last]
      while segment:
        line.append(segment)
        segment = batch.parent_BN[b, segment]
      seen = np.flatnonzero(np.isin(batch.segment_BT[b, : last + 1], line))
      tokens, n = batch.tokens_BT[b, seen], mask.sum()
      assert (batch.position_BT[b, seen] == np.arange(len(seen))).all()
      assert (gather == seen[-n:]).all()
      assert (tokens[len(seen) - n + 1 :] == target[:-1]).all()
      assert batch.value_index_BS[b, s] == gather[0]
      found.append(
        (
          tuple(tokens[: len(seen) - n + 1]),
          tuple(target),
          tuple(batch.behaviour_BSK[b, s][mask]),
          batch.advantage_BS[b, s],
        )
      )
  return found


def recorded(turns):
  return [
    (
      tuple(t.sample.prompt_ids),
      tuple(t.sample.ids),
      tuple(t.sample.logps),
      np.float32(t.advantage),
    )
    for t in turns
  ]


@every_share
@pytest.mark.parametrize("seed", range(5))
def test_every_row_comes_back_exactly_once(share, seed):
  for turns, config in ((rows(seed=seed), CONFIG), (family(seed), LONG), (brush(seed), LONG)):
    found = unpacked(pack.pack(turns, dataclasses.replace(config, share=share)))
    assert sorted(found) == sorted(recorded(turns))


def test_rows_of_one_prompt_hold_it_once():
  # 10 prompt tokens and 4 answers of 5: 4 * (10 + 4) tokens apart, 10 + 4 * 4 together; the last
  # sampled token of a row is a target and needs no hidden state.
  turns = [row(np.arange(10) + 1, [k, k, k, k, 9]) for k in range(20, 24)]
  apart, together = (
    pack.pack_with_places(turns, dataclasses.replace(LONG, share=share))
    for share in ("none", "prefix")
  )
  assert (apart.tokens, together.tokens) == (56, 26)
  (batch,) = together.batches
  assert batch.parent_BN[0, :6].tolist() == [0, 0, 1, 1, 1, 1]
  assert (batch.gather_BSK[0, :4, 0] == 9).all()  # all first tokens are predicted by one state


def test_a_row_that_leaves_another_halfway_cuts_its_segment():
  # Sorted, the second row leaves the first at depth 12, the third leaves the second at depth 9:
  # segments 1 = [0, 9), 2 = [9, 12) and 3, 4 behind it, 5 behind 1.
  base = list(range(1, 10))
  turns = [
    row([*base, 1, 1, 1, 1, 1], [5]),
    row([*base, 1, 1, 1, 2, 2], [5]),
    row([*base, 2, 2, 2], [5]),
  ]
  (batch,) = pack.pack(turns, LONG)
  assert batch.segment_BT[0, :19].tolist() == [1] * 9 + [2] * 3 + [3] * 2 + [4] * 2 + [5] * 3
  assert batch.parent_BN[0, :6].tolist() == [0, 0, 1, 2, 2, 1]


def test_sampled_tokens_are_context_of_later_turns_and_carry_loss_once():
  first = row(np.arange(1, 11), [21, 22, 23])
  later = row([*range(1, 11), 21, 22, 23, 31], [24])
  packed = pack.pack_with_places([first, later], LONG)
  assert packed.tokens == 14 and packed.batches[0].mask_BSK.sum() == 4


def test_identical_rows_cost_nothing_and_count_twice():
  turns = [row(np.arange(1, 11), [21, 22], advantage) for advantage in (1.0, -2.0)]
  packed = pack.pack_with_places(turns, LONG)
  assert packed.tokens == 11 and packed.batches[0].mask_BSK.sum() == 4
  assert sorted(packed.batches[0].advantage_BS[0, :2]) == [-2.0, 1.0]


def test_a_sequence_never_has_more_sampled_tokens_than_positions():
  config = dataclasses.replace(LONG, length=12, rows=9)
  turns = [row([1] * 7, [21, 22, 23, 24]) for _ in range(9)]  # equal rows need 10 positions in all
  batches = pack.pack(turns, dataclasses.replace(config, sequences=1))
  assert [int(batch.mask_BSK.sum()) for batch in batches] == [12, 12, 12]


def test_a_common_beginning_below_eight_tokens_is_repeated():
  for common, tokens in ((7, 2 * 9), (8, 8 + 2 * 2)):
    turns = [row([*range(1, common + 1), k, k], [5]) for k in (20, 30)]
    packed = pack.pack_with_places(turns, LONG)
    assert packed.tokens == tokens


def test_sharing_needs_fewer_sequences():
  turns = family(trials=20)
  few, many = (
    pack.pack_with_places(turns, dataclasses.replace(LONG, share=share, sequences=1))
    for share in ("prefix", "none")
  )
  assert few.tokens < many.tokens / 2 and len(few.batches) < len(many.batches)
  assert many.tokens == sum(map(pack.tokens_alone, turns))


@every_share
def test_the_mask_counts_every_sampled_token_and_nothing_else(share):
  turns = family()
  batches = pack.pack(turns, dataclasses.replace(LONG, share=share))
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
  turns = family()
  batches, places = pack.pack_with_places(turns, LONG)
  for turn, (m, b, s) in zip(turns, places, strict=True):
    assert batches[m].advantage_BS[b, s] == np.float32(turn.advantage)


def test_a_row_that_does_not_fit_says_what_to_raise():
  long = dataclasses.replace(make.turn(0, "play", 0), sample=make.sample(range(20)), advantage=1.0)
  with pytest.raises(ValueError, match=r"config\.pack\.length"):
    pack.pack([long], CONFIG)


def test_turns_without_tokens_or_advantage_are_not_trained():
  scripted = dataclasses.replace(make.turn(0, "play", 0), sample=make.sample(ids=()), advantage=1.0)
  assert pack.trainable([scripted, make.turn(0, "play", 0)]) == []


def test_an_unknown_way_to_share_is_refused():
  with pytest.raises(ValueError, match=r"config\.pack\.share"):
    pack.PackConfig(share="suffix")
