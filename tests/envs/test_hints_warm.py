"""The gate of the hints' warm start on the dev half of the panel (experiments/tiny/README.md), and its words."""

import pytest

from experiments.tiny import hinted, imitate
from memrl_jax.envs import hints, panel
from memrl_jax.envs import hints_world as world
from memrl_jax.models import tiny, weights
from memrl_jax.sampling import chat, engine

TASKS = 160  # the standard error of a share near .25 is .034


@pytest.fixture(scope="module")
def text():
  return chat.load(tiny.tokenizer_directory())


def test_every_word_is_one_token_that_was_there_and_is_read_as_it_was_written(text):
  pieces = set(text.pieces(range(text.vocab_size)))
  assert set(hints.SYMBOLS) <= pieces
  remark = "won safe garden lamp 1"
  ids = [text.pieces(text.reply(f"{before}{remark}")[:-1]) for before in ("tip:", "<remark>", "1:")]
  assert {tuple(one[-5:]) for one in ids} == {("won", " safe", " garden", " lamp", " 1")}


def measured(text, temperature, arms):
  cfg, params = weights.load_directory(tiny.directory("hints"))
  options = world.Options(**dict(imitate.RECIPES["hints"].evaluate))
  seeds = [int(seed) for seed in panel.load("hints-v1").dev[:TASKS]]
  sampler = engine.Engine(cfg, params, engine.EngineConfig(slots=128))
  result = hinted.gate(hints.FAMILY, options, sampler, text, seeds, 0, arms, (temperature,))
  return [result[f"{arm} {temperature}"] for arm in arms]


@pytest.mark.parametrize("temperature", hinted.TEMPERATURES)
def test_the_frozen_model_follows_a_hint_for_good_or_ill_and_can_do_little_alone(temperature, text):
  every = none, right, misleading = measured(text, temperature, ("none", "right", "misleading"))
  assert 0.15 - 0.03 <= none["success"] <= 0.35 + 0.03
  assert right["success"] >= none["success"] + 0.4
  assert misleading["success"] <= none["success"] - 0.08
  assert min(arm["valid"] for arm in every) >= 0.97
  assert min(none["faithful"], right["faithful"]) >= 0.9


def test_a_hint_about_another_kind_does_nothing_and_the_first_of_several_counts(text):
  none, irrelevant, first = measured(text, 0.7, ("none", "irrelevant", "right first"))
  assert abs(irrelevant["success"] - none["success"]) <= 0.1
  assert first["success"] >= none["success"] + 0.3
