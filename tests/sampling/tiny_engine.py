"""The shipped Dark Room model behind a small engine, for tests of the server and its client."""

import functools

from experiments import base, lamer_darkroom
from memrl_jax.models import tiny
from memrl_jax.sampling import chat, engine


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
