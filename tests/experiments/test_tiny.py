"""The gate of every shipped warm start, on the dev half of its panel (experiments/tiny/README.md)."""

import pytest

from experiments.tiny import imitate
from memrl_jax.envs import base
from memrl_jax.models import tiny, weights
from memrl_jax.sampling import chat


def test_every_embedded_environment_ships_a_warm_start_within_the_size_limit():
  assert tiny.shipped() == sorted(imitate.RECIPES)
  assert {recipe.family for recipe in imitate.RECIPES.values()} <= set(base.families())
  size = sum(path.stat().st_size for path in tiny.ASSETS.rglob("*") if path.is_file())
  assert size < 12e6
  for name in tiny.shipped():
    cfg, _ = weights.load_directory(tiny.directory(name))
    assert 0.5e6 <= cfg.parameters <= 5e6


@pytest.mark.parametrize(
  "name", sorted(n for n, r in imitate.RECIPES.items() if not r.rounds and not r.source)
)
def test_memory_does_not_hurt_the_warm_start_and_there_is_room_to_learn(name):
  """256 tasks: the standard error of the gate is about .04, hence the margin below zero."""
  recipe = imitate.RECIPES[name]
  cfg, params = weights.load_directory(tiny.directory(name))
  text = chat.load(tiny.tokenizer_directory())
  family = base.family(recipe.family)
  result = imitate.measure(family, recipe.evaluate, cfg, params, text, 256, 0)
  assert result["gate"] > -0.03
  assert result["memory"]["valid"] >= 0.97
  assert 0.10 <= result["none"]["pass"][0] <= 0.40


@pytest.mark.parametrize("name", sorted(n for n, r in imitate.RECIPES.items() if r.rounds))
def test_tips_help_the_warm_start_and_those_of_failures_do_not_hurt(name):
  """128 tasks: the standard error of a share near .5 is .04, of one near .01 it is .009."""
  recipe = imitate.RECIPES[name]
  cfg, params = weights.load_directory(tiny.directory(name))
  text = chat.load(tiny.tokenizer_directory())
  family = base.family(recipe.family)
  result = imitate.measure(family, recipe.evaluate, cfg, params, text, 128, 0, "tips")
  assert result["gain"] >= 0.3
  assert result["failed"]["success"] >= result["none"]["success"] - 0.01
  assert min(result[arm]["valid"] for arm in ("none", "perfect", "pooled")) >= 0.97
  assert result["none"]["success"] <= 0.05 and 0.2 <= result["none"]["early"] <= 0.6
