"""What is checked before a run has a folder: its models, devices, panel, server and the other hosts.

Each check answers a wrong input with a ValueError (or OSError) of one sentence, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from memrl_jax import methods
from memrl_jax.envs import panel as panels
from memrl_jax.memory import hintbank, transfer
from memrl_jax.models import lora, weights
from memrl_jax.sampling import remote
from memrl_jax.training import folder, handover, hosts, learner, mesh, servers
from memrl_jax.training.settings import Settings


def check_served(settings: Settings, mode: str) -> None:
  """What cannot be played with the weights of a server: all that goes with those of a run."""
  if settings.frozen:
    return
  if mode == "adapt":
    raise ValueError(
      f"--mode=adapt fills a memory with the weights that {settings.method_name} trained; leave "
      "config.remote.url empty, or choose a method that trains nothing"
    )
  if settings.method_name in methods.REMEMBERING:
    raise ValueError(
      f"{settings.method_name} is evaluated with the weights and the memory of its run, in this process; "
      "leave config.remote.url empty for --mode=eval"
    )


def check_hosts(settings: Settings, record: dict[str, Any]) -> None:
  """Whether several hosts can do this, and have all been asked for the same."""
  hosts.check(settings)
  asked = hosts.gather([folder.config_hash(record)], "the others' configs")
  if odd := hosts.differing(asked):
    raise ValueError(f"hosts {odd} were started with another config than host 0; use one command")


@contextlib.contextmanager
def connected(settings: Settings, trains: bool) -> Iterator[remote.Client]:
  """What this host asks of config.remote.url, which can do what this run wants of it; else ValueError, OSError."""
  with servers.connect(settings.remote) as client:
    if trains:
      client.check_trainable(settings.sampling.temperature)
      if not settings.remote.weights:
        raise ValueError(
          "training with a sampler on a server needs a directory that both see, for the new weights; "
          "name one (config.remote.weights)"
        )
    elif not client.reads_text:
      try:
        settings.model.directory()
      except ValueError as error:
        raise ValueError(
          f"{client.url} takes token ids, so the tokenizer of its model is needed here: {error}; or set "
          "config.remote.api to chat"
        ) from None
    if settings.method_name == "retrospex" and not client.gives.logps:
      raise ValueError(
        f"retrospex weighs responses by their log-probs, and {client.url} ({client.gives.api}) gives none; "
        "serve the model with memrl_jax.sampling.serve, vLLM or SGLang (config.remote.url)"
      )
    yield client


def _models(settings: Settings) -> list[tuple[Any, str]]:
  """The models of this process: what makes each, and where that stands in the config."""
  found = [(settings, "config.")] + [(settings.extractor, "config.extractor.")] * settings.extracts
  if settings.hints and not settings.agent.remote.url:
    found.append((learner.frozen(settings.agent), "config.agent."))
  return found


def check_devices(settings: Settings) -> None:
  """Whether the devices are here that train and sample each model; ValueError says which are not."""
  settings.places.grids(mesh.make(settings.mesh), settings.pack.sequences)
  for parts, place in _models(settings):
    there = learner.devices(parts)
    try:
      handover.grid(parts.replicas, mesh.make(parts.mesh, there), there)
    except ValueError as error:
      said = str(error).replace("config.mesh", f"{place}mesh")
      said = said.replace("config.replicas", f"{place}replicas")
      own = len(there) < jax.device_count()
      raise ValueError(said + own * " (each host has the agent on devices of its own)") from None


def check(settings: Settings, *, models: bool = True) -> None:
  """What a run needs from disk: its `models` and its panel. ValueError says what is wrong with them."""
  for parts, place in _models(settings) if models else ():
    try:
      directory = parts.model.directory()
      if parts.lora.rank:
        lora.check(weights.read_config(directory), parts.lora)
    except ValueError as error:
      said = str(error).replace("(config.model", f"({place}model")
      raise ValueError(said.replace("(config.lora", f"({place}lora")) from None
  if getattr(settings.method, "bank", ""):
    read = hintbank.read if settings.hints else transfer.read_entries
    read(settings.method.bank)
  panel = panels.load(settings.eval.panel)
  if panel.env != settings.env.name:
    raise ValueError(
      f"panel {panel.name} holds tasks of {panel.env}, and this experiment plays {settings.env.name}; "
      "choose another (config.eval.panel)"
    )
  panels.check_tasks(panel)
  seeds = getattr(panel, settings.eval.half)
  if settings.eval.tasks > len(seeds):
    raise ValueError(
      f"panel {panel.name} has {len(seeds)} {settings.eval.half} tasks, fewer than "
      f"{settings.eval.tasks}; lower config.eval.tasks"
    )
