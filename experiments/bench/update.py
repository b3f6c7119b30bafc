"""What training costs: reference log-probs, an update, and whole GRPO steps, on this host.

The model and the work are those of `decode.py` and of the peers: 8 prompts of 128 tokens, 4 samples of
64 tokens each, KL to a reference with weight .04, AdamW. Cases:

    update    the update alone, rows of a prompt in one sequence that holds the prompt once
    plain     the update alone, every row by itself
    step      rollout, packing, reference log-probs and update, as `training.loop` does them
    memory    compiles a step at 4096 positions and a vocabulary of 151,936; runs nothing

    taskset -c 0 python experiments/bench/update.py --cases=update,plain,step
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import re
import resource
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

from experiments.bench import decode
from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.sampling import engine as engine_lib
from memrl_jax.training import mesh, objective, step
from memrl_jax.types import Sample, Turn

GROUPS, SAMPLES, PROMPT, COMPLETION = 8, 4, 128, 64
LOSS = objective.LossConfig(surrogate="ppo_clip", kl_coef=0.04)
TOGETHER = pack.PackConfig(
  sequences=GROUPS, length=PROMPT + SAMPLES * COMPLETION, rows=SAMPLES, response=COMPLETION
)
APART = dataclasses.replace(
  TOGETHER, sequences=GROUPS * SAMPLES, length=PROMPT + COMPLETION, rows=1, share="none"
)


def trainer(cfg: DecoderConfig, remat: bool | str = "some") -> step.Trainer:
  tx = step.optimiser(step.OptimConfig(learning_rate=1e-5), 1000)
  return step.Trainer(
    cfg, LOSS, tx, mesh.make(mesh.MeshConfig()), max_tokens=COMPLETION, remat=remat
  )


def turn(prompt: np.ndarray, ids: np.ndarray, logps: np.ndarray) -> Turn:
  sample = Sample("", prompt, ids, logps)
  return Turn(0, "play", 0, [], sample, "", True, float(ids[0] % 7), "")


def credit(turns: list[Turn]) -> None:
  """GRPO's advantage within each prompt's samples, which stand together."""
  reward_PG = np.array([one.reward for one in turns]).reshape(-1, SAMPLES)
  centred_PG = reward_PG - reward_PG.mean(1, keepdims=True)
  advantage_PG = centred_PG / (reward_PG.std(1, keepdims=True) + 1e-6)
  for one, advantage in zip(turns, advantage_PG.reshape(-1), strict=True):
    one.advantage = float(advantage)


def invented(seed: int) -> list[Turn]:
  """Rows with random prompts, answers and log-probs."""
  rng = np.random.default_rng(seed)
  turns = []
  for _ in range(GROUPS):
    prompt = rng.integers(2, 4096, PROMPT)
    for _ in range(SAMPLES):
      logps = rng.normal(-8.3, 0.1, COMPLETION).astype(np.float32)
      turns.append(turn(prompt, rng.integers(2, 4096, COMPLETION), logps))
  credit(turns)
  return turns


class Clock:
  """Wall and CPU seconds of named parts, in the order they were measured."""

  def __init__(self):
    self.spent: dict[str, list[tuple[float, float]]] = {}

  def __call__(self, name: str, call: Callable[[], Any]) -> Any:
    wall, cpu = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(call())
    taken = (time.perf_counter() - wall, time.process_time() - cpu)
    self.spent.setdefault(name, []).append(taken)
    return result

  def figures(self) -> dict[str, dict[str, float]]:
    """Medians and best over all but the first of each part, which compiles."""
    return {
      name: {
        "first_s": times[0][0],
        "first_cpu_s": times[0][1],
        "cpu_s_median": statistics.median(cpu for _, cpu in times[1:]),
        "cpu_s_best": min(cpu for _, cpu in times[1:]),
        "wall_s_best": min(wall for wall, _ in times[1:]),
      }
      for name, times in self.spent.items()
    }


def update_case(config: pack.PackConfig, names: tuple[str, str], reps: int) -> dict[str, Any]:
  """Reference log-probs and updates of invented rows."""
  cfg = decode.model()
  weights = decode.params(cfg)
  one, clock = trainer(cfg), Clock()
  state = one.init(weights, None)

  def once(state: step.TrainState, packed: pack.Packed) -> step.TrainState:
    ref = clock(names[0], lambda: one.score(weights, packed.batches))
    return clock(names[1], lambda: one.update(state, packed.batches, None, ref))[0]

  for rep in range(reps + 1):
    packed = pack.pack_with_places(invented(rep), config)
    state = once(state, packed)
  figures = clock.figures()
  figures[names[1]] |= {
    "tokens": packed.tokens,
    "temporaries_mib": temporaries(one, packed.batches[0], state.params),
  }
  return figures


def step_case(reps: int) -> dict[str, Any]:
  """Whole GRPO steps; the first one compiles everything."""
  cfg = decode.model()
  weights = decode.params(cfg)
  one, clock = trainer(cfg), Clock()
  state = one.init(weights, None)
  engine = engine_lib.Engine(
    cfg, state.params["policy"], decode.engine_config(GROUPS * SAMPLES, 256)
  )

  def rollout(seed: int) -> list[Turn]:
    engine.set_params(state.params["policy"])
    requests = decode.requests(GROUPS, SAMPLES, COMPLETION, seed)
    answers = engine.generate(requests)
    return [
      turn(request.prompt, answer.ids, answer.logps)
      for request, answer in zip(requests, answers, strict=True)
    ]

  def whole(seed: int):
    turns = clock("rollout", lambda: rollout(seed))
    credit(turns)
    batches = clock("packing", lambda: pack.pack(turns, TOGETHER))
    ref = clock("reference", lambda: one.score(weights, batches))
    return clock("update", lambda: one.update(state, batches, None, ref))

  for rep in range(reps + 1):
    state, metrics = clock("step", lambda rep=rep: whole(rep))
  assert np.isfinite(metrics["train/loss"])
  return clock.figures()


def temporaries(one: step.Trainer, batch: Any, params: Any) -> float:
  """MiB of temporary buffers of the gradient program."""
  stats = one.lower(params, batch).compile().memory_analysis()
  return stats.temp_size_in_bytes / 2**20


def memory_case(reps: int) -> dict[str, Any]:
  """The largest arrays of a step with a real vocabulary: Qwen3-0.6B's widths, 2 layers, T = 4096."""
  del reps
  cfg = DecoderConfig(
    vocab=151_936,
    dim=1024,
    layers=2,
    heads=16,
    kv_heads=8,
    head_dim=128,
    mlp_dim=3072,
    rope_theta=1e6,
    qk_norm=True,
  )
  T = 4096
  batch = pack.empty(pack.PackConfig(sequences=1, length=T, rows=4, response=1024))
  one = trainer(cfg, remat=True)
  compiled = one.lower({"policy": policy.shapes(cfg)}, batch).compile()
  sizes = {}
  for kind, dims in re.findall(r"\b(f32|bf16|s32|pred)\[([\d,]+)\]", compiled.as_text()):
    sizes[f"{kind}[{dims}]"] = math.prod(map(int, dims.split(",")))
  largest = sorted(sizes, key=lambda name: -sizes[name])[:6]
  return {
    "memory": {
      "positions_x_vocabulary": T * cfg.vocab,
      "largest_arrays": {name: sizes[name] for name in largest},
      "temporaries_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
    }
  }


CASES: dict[str, Callable[[int], dict[str, Any]]] = {
  "update": lambda reps: update_case(TOGETHER, ("reference", "update"), reps),
  "plain": lambda reps: update_case(APART, ("reference_plain", "update_plain"), reps),
  "step": step_case,
  "memory": memory_case,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--cases", default="update,plain,step", help=f"some of {', '.join(CASES)}")
  parser.add_argument("--reps", type=int, default=8)
  arguments = parser.parse_args()
  figures: dict[str, Any] = {
    "versions": {"jax": jax.__version__, "python": platform.python_version()}
  }
  for case in arguments.cases.split(","):
    figures |= CASES[case](arguments.reps)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(json.dumps(figures | {"peak_gib": peak}))


if __name__ == "__main__":
  main()
