"""The tiny models that ship inside the package: one checkpoint a warm start, one tokenizer for all.

They are made by `experiments/tiny/`. Every environment family has one under its own name; a task that
needs another start (`minesweeper5`) or a later environment gets its own and never changes an earlier one.
"""

from __future__ import annotations

import pathlib
from typing import Any

ASSETS = pathlib.Path(__file__).parent / "assets" / "tiny"
MARK = "imitation.json"  # how a tiny checkpoint was made, and the sign that it is one


def tokenizer_directory() -> pathlib.Path:
  """Where the one tokenizer of all tiny models lies; `sampling.chat.load` reads it."""
  return ASSETS / "tokenizer"


def is_tiny(checkpoint: pathlib.Path) -> bool:
  """Whether `experiments/tiny/imitate.py` made this checkpoint, so that it reads the tiny tokenizer."""
  return (checkpoint / MARK).is_file()


def shipped() -> list[str]:
  """Names of the checkpoints."""
  return sorted(path.parent.name for path in ASSETS.glob("*/config.json"))


def directory(name: str) -> pathlib.Path:
  """Where the checkpoint of this name lies.

  Raises:
    ValueError: none is shipped for it.
  """
  if name not in shipped():
    raise ValueError(
      f"no tiny checkpoint is shipped for {name!r}; there is one for "
      f"{', '.join(shipped()) or 'no environment yet'} (config.model.checkpoint)"
    )
  return ASSETS / name


def load(name: str) -> tuple[Any, Any]:
  """(DecoderConfig, params) of the shipped checkpoint of this name."""
  from memrl_jax.models import (
    weights,
  )  # the tokenizer and the names are found without importing jax

  return weights.load_directory(directory(name))
