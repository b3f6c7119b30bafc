"""What the sampling engine costs: decode and rollout of a random 4.2 M parameter Qwen3, on this host.

The model and the work are those of the peers' measurements in `README.md` beside this file: 4 layers,
width 256, MLP 768, 4 query heads over 2 key-value heads of width 64, a tied vocabulary of 4096,
float32. Run it pinned to one core, in turn with the peer, and quote the ratio of CPU seconds:

    taskset -c 0 python experiments/bench/decode.py --cases decode,decode_4096,top_p,greedy,rollout

Every call gets new prompts, so nothing is reused between calls; a rollout also hands new weights to
the engine first, as a training step does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import engine as engine_lib

PROMPT, BATCH = 128, 8


def model() -> DecoderConfig:
  """The shape that the peers are measured with, 4.2 M parameters."""
  return DecoderConfig(
    vocab=4096,
    dim=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    mlp_dim=768,
    rope_theta=1e6,
    qk_norm=True,
  )


def params(cfg: DecoderConfig, seed: int = 0) -> policy.Params:
  """Every matrix from N(0, 0.02), as the peers' models."""
  leaves, tree = jax.tree.flatten(policy.init(jax.random.key(seed), cfg))
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  drawn = [
    leaf if np.ptp(leaf) == 0 else 0.02 * jax.random.normal(key, leaf.shape)
    for leaf, key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, drawn)


def engine_config(rows: int, longest: int) -> engine_lib.EngineConfig:
  """Shapes for prompts of 128 tokens; contexts of 192 and in steps of two up to `longest`."""
  buckets = [128, 192, 256]
  while buckets[-1] < longest:
    buckets.append(2 * buckets[-1])
  return engine_lib.EngineConfig(
    slots=rows, buckets=tuple(buckets), prefill_rows=(8,), prefill_chunks=(32, 128), round_steps=64
  )


def requests(
  prompts: int, group: int, new: int, seed: int, **settings: Any
) -> list[engine_lib.Request]:
  """`group` requests for each of `prompts` random prompts; no stop id, so all run to the budget."""
  rng = np.random.default_rng(seed)
  made = []
  for _ in range(prompts):
    prompt = rng.integers(2, 4096, PROMPT)
    for _ in range(group):
      key = rng.integers(0, 2**32, 2, dtype=np.uint32)
      made.append(engine_lib.Request(key, prompt, new, **settings))
  return made


def clock(call: Callable[[int], None], reps: int) -> dict[str, float]:
  """Wall and CPU seconds of call(1) .. call(reps), after call(0), which compiles."""
  began = time.perf_counter()
  call(0)
  first = time.perf_counter() - began
  wall, cpu = [], []
  for rep in range(1, reps + 1):
    began, spent = time.perf_counter(), time.process_time()
    call(rep)
    wall.append(time.perf_counter() - began)
    cpu.append(time.process_time() - spent)
  return {
    "first_s": first,
    "wall_s_best": min(wall),
    "wall_s_median": statistics.median(wall),
    "cpu_s_best": min(cpu),
    "cpu_s_median": statistics.median(cpu),
  }


def decode_case(
  *, longest: int = 256, new: int = 128, reps: int = 15, **settings: Any
) -> dict[str, Any]:
  """8 rows, prompt 128, `new` tokens each with log-probs; the engine may grow to `longest`.

  `settings` are those of a Request (temperature, top_p, top_k).
  """
  cfg = model()
  engine = engine_lib.Engine(cfg, params(cfg), engine_config(BATCH, longest))

  def call(rep: int) -> None:
    done = engine.generate(requests(BATCH, 1, new, rep, **settings))
    assert all(len(one.ids) == new for one in done)

  times = clock(call, reps)
  tokens = BATCH * new
  return {
    **times,
    "tokens_per_s_best": tokens / times["wall_s_best"],
    "tokens_per_cpu_s": tokens / times["cpu_s_median"],
  }


def rollout_case(
  *, prompts: int = 8, group: int = 4, new: int = 64, longest: int = 256, reps: int = 15
) -> dict[str, Any]:
  """The rollout of a GRPO step: new weights, then `group` samples for each of `prompts` prompts."""
  cfg = model()
  weights = params(cfg)
  engine = engine_lib.Engine(cfg, weights, engine_config(prompts * group, longest))

  def call(rep: int) -> None:
    engine.set_params(weights)
    done = engine.generate(requests(prompts, group, new, rep))
    assert all(len(one.ids) == new for one in done)

  times = clock(call, reps)
  tokens = prompts * group * new
  return {**times, "tokens_per_cpu_s": tokens / times["cpu_s_median"]}


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
  "decode": lambda reps: decode_case(reps=reps),
  "decode_4096": lambda reps: decode_case(reps=reps, longest=4096),
  "top_p": lambda reps: decode_case(reps=reps, top_p=0.95),
  "greedy": lambda reps: decode_case(reps=reps, temperature=0.0),
  "rollout": lambda reps: rollout_case(reps=reps),
  "rollout_8": lambda reps: rollout_case(reps=reps, group=8),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
  parser.add_argument("--reps", type=int, default=15)
  arguments = parser.parse_args()
  versions = {"jax": jax.__version__, "python": platform.python_version()}
  figures = {name: CASES[name](arguments.reps) for name in arguments.cases.split(",")}
  print(json.dumps({"versions": versions, "cores": len(os.sched_getaffinity(0)), **figures}))


if __name__ == "__main__":
  main()
