"""The memory of a run: its embedder, its store in the run folder, and what its method makes of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from memrl_jax.envs import base as env_base
from memrl_jax.memory import (
  bank,
  embed,
  episodic,
  experience,
  hintbank,
  manager,
  novelty,
  reader,
  schema,
  tips,
  transfer,
)
from memrl_jax.methods import base, complementary, empo2, memoryr1, mempi, memrl, retrospex
from memrl_jax.models import policy, weights
from memrl_jax.models.config import DecoderConfig
from memrl_jax.training import hosts, learner, mesh
from memrl_jax.training.settings import Settings


def embedder(settings: Settings, model: learner.Learner | learner.Served) -> embed.Embedder:
  """The embedder of config.memory; "policy" reads the weights that `model` came with, whatever training does."""
  memory = settings.memory
  if memory.embedder == "hash":
    made: embed.Embedder = embed.Hash(memory.dimension)
  elif memory.embedder == "minilm":
    made = embed.MiniLM(memory.directory)
  elif memory.embedder == "remote":
    made = embed.Remote(memory.url, memory.model)
  else:
    cfg, text = model.cfg, model.chat
    params = mesh.local(model.initial)  # each host asks when it wants to
    hidden = jax.jit(lambda tokens_NT, length_N: _hidden(cfg, params, tokens_NT, length_N))
    made = embed.Policy(
      lambda texts: [list(text.reply(one)) for one in texts],
      hidden,
      dimension=cfg.dim,
      label=f"{settings.model.checkpoint}:{weights.fingerprint(params)}",
      max_tokens=max(settings.engine.buckets),
    )
  return embed.Cached(made, memory.cache)


def _hidden(cfg: DecoderConfig, params: Any, tokens_NT, length_N) -> jax.Array:
  position_NT = np.broadcast_to(np.arange(tokens_NT.shape[1], dtype=np.int32), tokens_NT.shape)
  segment_NT = (position_NT < length_N[:, None]).astype(np.int32)
  return policy.hidden(params, cfg, tokens_NT, segment_NT, position_NT)


def of_method(
  settings: Settings, embedding: embed.Embedder, folder: pathlib.Path | None
) -> base.Remembered:
  """What the run's own method remembers; transitions of Retrospex live in its checkpoints alone."""
  if isinstance(settings.method, complementary.ComplementaryConfig):
    return experiences(settings, embedding, folder)
  if isinstance(settings.method, memrl.MemrlConfig):
    image = env_base.family(settings.env.name).image
    return memrl.Episodes(
      settings.method,
      episodic.Episodic.open(folder, embedding, settings.episodic),
      settings.train.tasks,
      functools.partial(image, settings.env.options),
    )
  if isinstance(settings.method, memoryr1.MemoryR1Config):
    return memoryr1.Facts(settings.method, bank.Memory.open(folder, embedding))
  if isinstance(settings.method, mempi.MempiConfig):
    prompts = env_base.family(settings.env.name).prompts(settings.env.options)
    method = settings.method
    kept = hintbank.HintBank.open(
      folder, embedding, show=method.show, keep=method.keep, near=method.near
    )
    return mempi.Experience(
      settings.method, kept, prompts.extract.hinting, settings.sampling.reflect_tokens
    )
  if isinstance(settings.method, retrospex.RetrospexConfig):
    return retrospex.Remembered(settings.method, embedding, settings.seed, settings.train.updates)
  return remembered(settings, embedding, folder)


def experiences(
  settings: Settings, embedding: embed.Embedder, folder: pathlib.Path | None
) -> complementary.Experiences:
  """The bank of Complementary RL behind its manager, and the entries that it begins with."""
  made = experience.ExperienceBank.open(folder, embedding, settings.experience)
  try:
    first = transfer.read_entries(settings.method.bank) if settings.method.bank else []
    return complementary.Experiences(
      settings.method, manager.ExperienceManager(settings.manager, made), first
    )
  except BaseException:
    made.close()
    raise


def remembered(
  settings: Settings, embedding: embed.Embedder, folder: pathlib.Path | None
) -> empo2.Kept:
  """What EMPO2 remembers: the store in `folder` (None: in this process only) and the counts."""
  limits = bank.Limits(max_entries=settings.tips.capacity)
  memory = bank.Memory.open(folder, embedding, limits=limits)
  return empo2.Kept(tips.Tips(settings.tips, memory), novelty.Novelty(settings.novelty, embedding))


def checksum(memory: base.Remembered, folder: pathlib.Path | None) -> str:
  """Names all that is remembered now, beside the weights: the state of a checkpoint, and every entry and
  version of the store in `folder`, if there is one."""
  arrays, rest = memory.state()
  total = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
  for name in sorted(arrays):
    total.update(f"{name} {arrays[name].dtype} {arrays[name].shape} ".encode())
    total.update(np.ascontiguousarray(arrays[name]).tobytes())
  if folder is not None and (folder / schema.FILE).is_file():
    with reader.Reader(folder) as store:
      total.update(store.fingerprint().encode())
  return total.hexdigest()[:16]


@contextlib.contextmanager
def of_host(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """Where this host keeps the memory of a run: the first in the run's own folder, any other in a copy of
  what was there before, which goes with it. A memory has one process that writes it."""
  with contextlib.nullcontext(folder) if hosts.first() else copy(folder) as place:
    hosts.gather([None], "the copies of the memory")  # nobody writes before all have theirs
    yield place


@contextlib.contextmanager
def copy(folder: pathlib.Path) -> Iterator[pathlib.Path]:
  """A copy of a memory that may be changed, gone afterwards; there need not be one."""
  with tempfile.TemporaryDirectory() as temporary:
    place = pathlib.Path(temporary) / "memory"
    if folder.is_dir():
      shutil.copytree(folder, place)
    yield place
