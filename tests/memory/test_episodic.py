"""Retrieval from the episodic memory of MemRL: two phases worked by hand, exploration, configuration."""

import dataclasses
import math

import numpy as np
import pytest

from memrl_jax.memory import episodic
from memrl_jax.memory.episodic import Episode, EpisodicConfig
from tests.memory import episodes_by_hand
from tests.memory.episodes_by_hand import pay, put, set_q

make = episodes_by_hand.make


# --- phase A -------------------------------------------------------------------------------------


def test_the_gate_is_exceeded_or_reached_and_empty_means_nothing(make):
  for strict, found in ((True, ["0.75"]), (False, ["0.75", "0.5"])):
    memory = make(delta=0.5, strict=strict)  # .5 and .75 are exact in float32
    put(memory, "0.75", "0.5", "0.4")
    assert [one.key for one in memory.suggest("a", "q")] == found
  nothing = memory.suggest("a", "far away")
  assert nothing == [] and memory.prompt(nothing) == ()
  assert memory.suggest("nobody", "q") == []


def test_k1_counts_keys_or_memories(make):
  # Three memories under one key at .8, one each at .7 and .6.
  for count, ties, pool in (
    ("keys", "oldest", [1, 2, 3, 4]),
    ("memories", "oldest", [1, 2]),
    ("memories", "newest", [3, 2]),
    ("keys", "newest", [3, 2, 1, 4]),
  ):
    memory = make(k1=2, k2=9, count=count, ties=ties)
    put(memory, "0.8", "0.8", "0.8", "0.7", "0.6")
    assert [one.id for one in memory.suggest("a", "q")] == pool, (count, ties)


def test_a_key_with_more_memories_than_were_asked_for_is_whole(make):
  memory = make(k1=1, k2=99)  # asks for 4 at first, then 8, 16, 32
  put(memory, *["0.8"] * 30, "0.7")
  assert [one.id for one in memory.suggest("a", "q")] == list(range(1, 31))


# --- phase B -------------------------------------------------------------------------------------

SIMILARITY, Q = ("0.50", "0.49", "0.48"), (0.0, 0.1, 1.0)


@pytest.mark.parametrize(
  "options,order",
  [
    # Pool: z(sim) = (1.22, 0, -1.22); Q has mean .3667, std .4497: z(Q) = (-.815, -.593, 1.408).
    # Sums / 2: (.205, -.297, .092): a gap of .01 in similarity outweighs Q 0 against Q 1.
    ({}, [1, 3, 2]),
    # Fixed, std .0941: z(sim) differ by .106; sums / 2 from the mean .1857: (3.340, 3.233, 3.127) + z(Q):
    # (1.263, 1.320, 2.268): Q decides.
    ({"sim_norm": "fixed", "sim_mean": 0.1857, "sim_std": 0.0941}, [3, 2, 1]),
    # None: .25 - .408, .245 - .296, .24 + .704.
    ({"sim_norm": "none"}, [3, 2, 1]),
    # The shift never matters, the width does: at std .005 similarity decides.
    ({"sim_norm": "fixed", "sim_mean": -9.0, "sim_std": 0.0941}, [3, 2, 1]),
    ({"sim_norm": "fixed", "sim_mean": 0.0, "sim_std": 0.003}, [1, 2, 3]),
    ({"lambda_": 0.0}, [1, 2, 3]),
    ({"lambda_": 1.0}, [3, 2, 1]),
    ({"weights": (1.0, 0.0)}, [1, 2, 3]),
    ({"weights": (3.0, 1.0)}, [1, 2, 3]),  # 3.67-.82, -.59, -3.67+1.41
    ({"q_norm": "none", "sim_norm": "none", "lambda_": 0.05}, [3, 1, 2]),  # .475 .4705 .506
    ({"q_min": 0.05}, [3, 2]),  # the z-scores are those of the whole pool
  ],
)
def test_two_phases_by_hand(make, options, order):
  memory = make(k2=3, **options)
  put(memory, *SIMILARITY)
  set_q(memory, dict(zip((1, 2, 3), Q, strict=True)))
  found = memory.suggest("a", "q")
  assert [one.id for one in found] == order
  if not options:
    np.testing.assert_allclose([one.score for one in found], [0.205, 0.092, -0.297], atol=2e-3)
    np.testing.assert_allclose([one.z_q for one in found], [-0.815, 1.408, -0.593], atol=1e-3)


def test_equal_values_and_a_pool_of_one_have_no_z(make):
  memory = make(k2=3)
  put(memory, "0.5", "0.7", "0.6")
  set_q(memory, {1: 0.1, 2: 0.1, 3: 0.1})  # numpy: std of three .1 is 1.4e-17, not 0
  found = memory.suggest("a", "q")
  assert [one.id for one in found] == [2, 3, 1] and {one.z_q for one in found} == {0.0}
  alone = make(delta=0.65, k2=2)
  put(alone, "0.7", "0.6")
  set_q(alone, {1: -1.0})
  (one,) = alone.suggest("a", "q")
  assert (one.id, one.z_similarity, one.z_q, one.score) == (1, 0.0, 0.0, 0.0)
  # Two that disagree at lambda .5 tie exactly: the nearer one, whatever rounding says.
  two = make(k2=2)
  put(two, "0.63", "0.61")
  for low in (0.1, 0.2, 0.3, -0.3):
    for high in (0.4, 0.5, 0.51, 0.7):
      set_q(two, {1: low, 2: high})
      assert [one.id for one in two.suggest("a", "q")] == [1, 2], (low, high)


def test_z_of_q_is_clipped(make):
  # 24 at 0 and one at 1: mean .04, std .196, z = 4.9; without a clip it would beat any similarity.
  memory = make(k1=25, k2=1, q_clip=3.0, lambda_=1.0)
  put(memory, *[f"0.{90 - n}" for n in range(25)])
  set_q(memory, {25: 1.0})
  assert memory.suggest("a", "q")[0].z_q == 3.0
  wide = make(k1=25, k2=1, q_clip=9.0, lambda_=1.0)
  put(wide, *[f"0.{90 - n}" for n in range(25)])
  set_q(wide, {25: 1.0})
  assert wide.suggest("a", "q")[0].z_q == pytest.approx(4.899, abs=1e-3)


def test_without_learning_lambda_still_looks_at_where_q_started(make):
  """alpha 0 is not MemP: with starts by outcome the nearest memory, of a failure, loses to a success."""
  for lambda_, first in ((0.5, 2), (0.0, 1)):
    memory = make(alpha=0.0, lambda_=lambda_, q_success=1.0, k2=1)
    put(memory, "0.72", success=False)
    put(memory, "0.71")
    put(memory, "0.3")
    assert [one.id for one in memory.suggest("a", "q")] == [first]


def test_lambda_moves_the_choice_one_way(make):
  """The mean Q of what is shown never falls with lambda."""
  rng = np.random.default_rng(0)
  values, shown = rng.normal(size=12), []
  for lambda_ in (0.0, 0.25, 0.5, 0.75, 1.0):
    memory = make(k1=12, k2=1, lambda_=lambda_)
    put(memory, *[f"0.{80 - n}" for n in range(12)])
    set_q(memory, dict(enumerate(values.tolist(), 1)))
    shown.append(memory.suggest("a", "q")[0].q)
  assert shown == sorted(shown) and shown[0] < shown[-1]


def test_no_two_of_a_result_say_the_same(make):
  memory = make(k2=3)
  texts = [Episode(f"{n}", f"0.{9 - n}", "same", True) for n in range(3)]
  assert len({kept.id for kept in memory.remember("a", texts)}) == 3  # other tasks: other texts
  memory.memory.update("a", [1, 2], lambda e: dataclasses.replace(e, text="same"))
  assert [one.id for one in memory.suggest("a", "q")] == [1, 3]
  again = [Episode(name, "0.6", "same", True) for name in ("x", "y")]
  assert [kept.id for kept in memory.remember("a", again)] == [4, 4]  # kept once
  by_key = make(k2=3, distinct=True)
  put(by_key, "0.9", "0.9", "0.8")
  assert [one.id for one in by_key.suggest("a", "q")] == [1, 3]


# --- exploration ---------------------------------------------------------------------------------


def buried(make, seed, **options):
  """A good memory with one unlucky try against one that always pays .2; how often it is shown at the end."""
  memory = make(k1=2, k2=1, lambda_=0.99, seed=seed, **options)
  good, fair = put(memory, "0.7", "0.71")
  pay(memory, good, -1.0)
  pay(memory, fair, 0.2)
  for _ in range(60):
    (one,) = memory.suggest("a", "q")
    pay(memory, one.id, 1.0 if one.id == good else 0.2)
  return np.mean([memory.suggest("a", "q", frozen=True)[0].id == good for _ in range(5)])


def test_an_unlucky_good_memory_stays_buried_without_exploration(make):
  assert buried(make, 0) == 0
  assert (
    np.mean([buried(make, seed, explore="epsilon", explore_rate=0.3) for seed in range(3)]) == 1
  )
  assert buried(make, 0, explore="ucb", explore_rate=0.5) == 1
  assert buried(make, 0, explore="ucb", explore_rate=1e-6) == 0


def test_thompson_tries_what_is_uncertain(make):
  # Wins and losses: 40 of 80 against 0 of 1: Beta(41, 41) is about .5, Beta(1+0, 1+2) exceeds it in
  # P(theta > .5) = .5^3 = .125 of the draws (the memory itself is of a failure: 0 wins, 2 losses).
  memory = make(k1=2, k2=1, lambda_=1.0, explore="thompson", explore_rate=1.0)
  (tried,) = put(memory, "0.7")
  (new,) = put(memory, "0.71", success=False)
  memory.memory.update(
    "a", [tried], lambda e: dataclasses.replace(e, data=e.data | {"visits": 80, "wins": 40})
  )
  pay(memory, new, -1.0)
  share = np.mean([memory.suggest("a", "q")[0].id == new for _ in range(600)])
  assert share == pytest.approx(0.125, abs=0.045)  # 3 SE are .041


def test_draws_are_seeded_and_evaluation_leaves_no_trace(make):
  def life(seed, **how):
    memory = make(k1=5, k2=2, explore="epsilon", explore_rate=1.0, seed=seed)
    put(memory, *[f"0.{9 - n}" for n in range(5)])
    found = [[one.id for one in memory.suggest("a", "q", **how)] for _ in range(20)]
    return memory, found

  (memory, one), (_, same), (_, other) = life(0), life(0), life(1)
  assert one == same != other and len({tuple(ids) for ids in one}) > 5
  assert (
    life(0, draw=(3, 1))[1] == [life(0, draw=(3, 1))[1][0]] * 20
  )  # a function of the draw alone
  before = memory.memory.store.fingerprint(), memory.state()
  found = {tuple(one.id for one in memory.suggest("a", "q", frozen=True)) for _ in range(20)}
  assert found == {(1, 2)} and (memory.memory.store.fingerprint(), memory.state()) == before


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
  "wrong",
  [
    {"k1": 0}, {"k2": -1}, {"delta": 1.0}, {"delta": 2.0}, {"lambda_": 1.1}, {"alpha": -0.1},
    {"sim_norm": "zscore"}, {"sim_std": 0.0, "sim_mean": 0.0, "sim_norm": "fixed"}, {"sim_mean": 0.5},
    {"explore_rate": 0.0, "explore": "epsilon"}, {"explore_rate": 0.1}, {"explore_rate": 2.0, "explore": "epsilon"},
    {"trace": 0.5}, {"adjust": "in_place", "update": "vanilla"}, {"q_floor": 0.5}, {"capacity": 0},
    {"per_key": 0}, {"weights": (0.0, 0.0)}, {"lambda_": 0.3, "weights": (1.0, 1.0)},
    {"q_min": math.nan}, {"step": "1/n", "alpha": 0.0}, {"total_budget": 0}, {"q_clip": 0.0},
  ],
)  # fmt: skip
def test_config_checks_itself(wrong):
  with pytest.raises(ValueError, match=rf"{next(iter(wrong))} is .*\(config\.episodic\."):
    EpisodicConfig(**wrong)


def test_presets_are_the_values_that_are_used(make):
  for name in ("hle", "alfworld", "bigcodebench", "lifelong_os", "lifelong_db"):
    for sim_norm in ("pool", "fixed"):
      config = episodic.preset(name, sim_norm=sim_norm)
      assert (config.alpha, config.lambda_, config.gamma) == (0.3, 0.5, 0.0)
    # The released fixed constants and delta agree: the 80th percentile of a normal is mean + .84 std.
    assert config.delta == pytest.approx(config.sim_mean + 0.8416 * config.sim_std, abs=0.017)
  memp, rag = episodic.preset("alfworld", "memp"), episodic.preset("bigcodebench", "rag")
  assert (memp.alpha, memp.lambda_, memp.update) == (0.0, 0.0, "adjustment")
  assert (rag.lambda_, rag.build, rag.update, rag.explore) == (0.0, "trajectory", "vanilla", "none")
  with pytest.raises(ValueError, match="choose one of hle"):
    episodic.preset("chess")
  memory = make(delta=0.62)
  assert memory.effective()["delta"] == 0.62 and memory.effective()["embedder"] == "dial"
  put(memory, "0.61", "0.63")
  assert [one.key for one in memory.suggest("a", "q")] == ["0.63"]


def test_calibration_is_the_80th_percentile_of_pairs(make):
  memory = make()
  # q with each: .9, .5, .1; among themselves: products .45, .09, .05. Sorted: .05 .09 .1 .45 .5 .9.
  found = memory.calibrate(["q", "0.9", "0.5", "0.1", "0.9"])
  assert found.pairs == 6 and found.delta == pytest.approx(0.5)  # at .8 * 5 = 4, counted from 0
  assert found.mean == pytest.approx(2.09 / 6, abs=1e-6)
  pool, fixed = episodic.preset("hle"), episodic.preset("hle", sim_norm="fixed")
  assert found.into(pool).delta == found.delta and found.into(pool).sim_std is None
  assert (found.into(fixed).sim_mean, found.into(fixed).sim_std) == (found.mean, found.std)
  with pytest.raises(ValueError, match="at least 2"):
    memory.calibrate(["q", "q"])
