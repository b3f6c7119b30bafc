"""The shipped Dark Room model behind a small engine, for tests of the server and its client."""

import functools

from experiments import base, lamer_darkroom
from memrl_jax.envs import base as env_base
from memrl_jax.envs import pool
from memrl_jax.methods import lamer
from memrl_jax.models import tiny
from memrl_jax.rollout import collect, credit
from memrl_jax.sampling import chat, engine
from memrl_jax.types import Trial


@functools.cache
def settings(*overrides):
  config = lamer_darkroom.get_config("smoke")
  config.engine.slots = 8
  base.override(config, overrides)
  return base.settings(config, "lamer_darkroom", "smoke")


@functools.cache
def model():
  """(DecoderConfig, params)."""
  return tiny.load("darkroom")


@functools.cache
def text():
  return chat.load(tiny.tokenizer_directory(), tiny.directory("darkroom"))


def new_engine(params=None):
  cfg, shipped = model()
  return engine.Engine(cfg, shipped if params is None else params, settings().engine)


def rollout(policy):
  """Eight LaMer trials at two Dark Room tasks, with their advantages."""
  s = settings()
  family = env_base.family(s.env.name)
  horizon = s.env.options.turns
  trials = [
    Trial(s.env.name, seed, group, i) for group, seed in enumerate((5, 9)) for i in range(4)
  ]
  with pool.EnvPool(family, s.env.options) as envs:
    collect.collect(
      trials,
      lamer.trial(s.method),
      lambda trial, request: policy,
      envs,
      family.prompts(s.env.options),
      horizon=horizon,
      seed=(0, 0, 1),
    )
  credit.make(s.credit, credit.Shape(len(trials), s.method.attempts, horizon))(trials)
  return trials


def turns_of(trials):
  return [turn for trial in trials for turn in trial.turns]
