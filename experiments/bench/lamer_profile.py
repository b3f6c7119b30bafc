"""Where the time of a LaMer step goes: device programs by name, environments, packing, the rest.

    taskset -c 0 python experiments/bench/lamer_profile.py
    taskset -c 0 python experiments/bench/lamer_profile.py --config.pack.share=none

Runs updates of `experiments/lamer_sokoban.py` on the shipped tiny model in this process, the first to
compile and the others timed. Device work is made synchronous, so that a program's time is the time
of its call; CPU seconds of the whole process, so that another job on the machine counts for little.
"Model" is what runs in compiled programs; everything else is Python: environments, prompts and
tokens, the sampler's host side, credit, packing, dispatch.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax

from experiments import base, lamer_sokoban
from memrl_jax.envs import pool
from memrl_jax.rollout import pack, policies
from memrl_jax.sampling import cache, engine
from memrl_jax.training import runs

UPDATES = 3  # after one that compiles


class Clock:
  """CPU seconds by name, each without what was timed inside it."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._inner = [0.0]

  @contextlib.contextmanager
  def part(self, name: str) -> Iterator[None]:
    self._inner.append(0.0)
    began = time.process_time()
    try:
      yield
    finally:
      spent = time.process_time() - began
      self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
      self._inner[-1] += spent

  def wrap(self, place: Any, attribute: str, name: str) -> None:
    """Times every call of a function that stands at `place.attribute`."""
    call = getattr(place, attribute)

    @functools.wraps(call)
    def timed(*args, **kwargs):
      with self.part(name):
        return jax.block_until_ready(call(*args, **kwargs))

    if hasattr(call, "_cache_size"):
      timed._cache_size = call._cache_size
    setattr(place, attribute, timed)

  def programs(self, place: Any, label: Callable[[str], str]) -> None:
    """Times every jitted function among the attributes of a module or object."""
    for attribute, value in list(vars(place).items()):
      if hasattr(value, "_cache_size"):
        self.wrap(place, attribute, label(attribute.strip("_")))


def main() -> None:
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  config = lamer_sokoban.get_config()
  base.override(config, [word.removeprefix("--config.") for word in sys.argv[1:]])
  config.env.isolation = "inline"  # environments in this thread, so that they are timed
  settings = base.settings(config, "lamer_sokoban", "laptop")
  run, clock = runs.Run(settings), Clock()
  run.warmup()
  for module in (engine, cache):
    clock.programs(module, lambda name: f"model: sampler {name}")
  clock.programs(run.actor.trainer, lambda name: f"model: training {name}")
  clock.wrap(policies.LanguagePolicy, "submit", "prompts to tokens")
  clock.wrap(pool.EnvPool, "run", "environments")
  clock.wrap(pack, "pack_with_places", "packing")
  run.method = run.method._replace(credit=_timed(clock, run.method.credit, "credit"))
  envs = pool.EnvPool(run.family, settings.env.options, isolation="inline")
  numbers: dict[str, float] = {}
  for update in range(1 + UPDATES):
    if update == 1:
      clock.seconds.clear()
    with clock.part("rollout, host side"):
      trials = run.rollout(update, envs)
    with clock.part("learn, host side"):
      numbers = run.learn(update, trials)
  envs.close()
  total = sum(clock.seconds.values())
  model = sum(spent for name, spent in clock.seconds.items() if name.startswith("model"))
  print("| part | CPU s an update | share |\n|---|---|---|")
  for name, spent in sorted(clock.seconds.items(), key=lambda item: -item[1]):
    print(f"| {name} | {spent / UPDATES:.3f} | {spent / total:.1%} |")
  print(f"| **all** | {total / UPDATES:.3f} | |")
  print(f"| **outside the model** | {(total - model) / UPDATES:.3f} | {1 - model / total:.1%} |")
  kept = ("rollout/rows", "train/tokens", "train/shared", "train/micro_batches")
  print(json.dumps({name: round(float(numbers[name]), 3) for name in kept}))


def _timed(clock: Clock, call: Callable, name: str) -> Callable:
  @functools.wraps(call)
  def timed(*args):
    with clock.part(name):
      return call(*args)

  return timed


if __name__ == "__main__":
  main()
