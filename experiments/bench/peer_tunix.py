"""The same work on Tunix (google-tunix, Flax NNX): decode and GRPO steps of the 4.2 M parameter Qwen3.

Runs in an environment of its own that holds google-tunix; calls its public entry points only, imports
nothing of ours, and prints one JSON object on its last line, in the shape of `update.py` and
`decode.py`. Weights are random, text is numbers in words, and the stop id is outside the vocabulary,
so that every row runs to its budget.

    taskset -c 0 TUNIX/bin/python experiments/bench/peer_tunix.py --cases=decode,step
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import inspect
import io
import itertools
import json
import os
import resource
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import optax
from flax import nnx
from tunix.generate import sampler as tunix_sampler
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

VOCAB, LAYERS, KV_HEADS, HEAD_DIM = 4096, 4, 2, 64
PROMPT, GROUPS, SAMPLES, COMPLETION, BETA = 128, 8, 4, 64, 0.04
NEVER = 10**7  # a stop id that no row can sample


class Numbers:
  """A tokenizer of text that is made of token ids."""

  def encode(self, text, **_):
    return [int(word) for word in text.split()]

  def decode(self, ids, **_):
    return " ".join(str(int(i)) for i in ids)

  def bos_id(self):
    return None

  def eos_id(self):
    return 1

  def pad_id(self):
    return 0


def prompts(count: int, seed: int) -> list[str]:
  ids = np.random.default_rng(seed).integers(2, VOCAB, (count, PROMPT))
  return [" ".join(map(str, row)) for row in ids]


def model(seed: int) -> nnx.Module:
  """Every matrix from N(0, 0.02): the package leaves some of them at zero."""
  config = qwen3.ModelConfig(
    num_layers=LAYERS,
    vocab_size=VOCAB,
    embed_dim=256,
    hidden_dim=768,
    num_heads=4,
    head_dim=HEAD_DIM,
    num_kv_heads=KV_HEADS,
    rope_theta=1_000_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
  )
  graph, state = nnx.split(qwen3.Qwen3(config, rngs=nnx.Rngs(params=seed)))
  leaves, tree = jax.tree.flatten(state)
  keys = jax.random.split(jax.random.key(seed), len(leaves))
  drawn = [
    leaf if leaf.ndim < 2 else 0.02 * jax.random.normal(key, leaf.shape, leaf.dtype)
    for leaf, key in zip(leaves, keys, strict=True)
  ]
  return nnx.merge(graph, jax.tree.unflatten(tree, drawn))


def summary(wall: list[float], cpu: list[float]) -> dict[str, float]:
  return {
    "cpu_s_median": statistics.median(cpu),
    "cpu_s_best": min(cpu),
    "wall_s_best": min(wall),
  }


def decode(reps: int, *, new: int = 128, cache: int = 256, top_p: float = 1.0) -> dict[str, float]:
  """8 rows, prompt 128, `new` tokens at temperature 1 with log-probs, after a first call."""
  rows = 8
  sampler = tunix_sampler.Sampler(
    model(0),
    Numbers(),
    tunix_sampler.CacheConfig(
      cache_size=cache, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
    ),
  )
  wall, cpu = [], []
  for rep in range(reps + 1):
    began, spent = time.perf_counter(), time.process_time()
    done = sampler(
      prompts(rows, rep),
      max_generation_steps=new,
      max_prompt_length=PROMPT,
      eos_tokens=[NEVER],
      seed=rep,
      temperature=1.0,
      top_p=top_p,
      return_logprobs=True,
    )
    assert all(len(ids) == new for ids in done.tokens)
    wall.append(time.perf_counter() - began)
    cpu.append(time.process_time() - spent)
  figures = summary(wall[1:], cpu[1:])
  return figures | {"tokens_per_cpu_s": rows * new / figures["cpu_s_median"], "first_s": wall[0]}


def step(reps: int) -> dict[str, dict[str, float]]:
  """GRPO steps, 8 prompts x 4 samples; the parts are timed around the cluster's own methods."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
  role = rl_cluster.Role
  steps = reps + 3  # the first two compile, the last one has the shutdown in it
  cluster = (getattr(rl_cluster, "RLCluster", None) or rl_cluster.RLEngine)(
    actor=model(0),
    reference=model(0),
    tokenizer=Numbers(),
    cluster_config=rl_cluster.ClusterConfig(
      role_to_mesh={name: mesh for name in (role.ACTOR, role.REFERENCE, role.ROLLOUT)},
      rollout_engine="vanilla",
      training_config=rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adamw(1e-5),
        eval_every_n_steps=10**9,
        max_steps=steps,
        mini_batch_size=GROUPS,
        train_micro_batch_size=GROUPS,
        rollout_micro_batch_size=GROUPS,
        compute_logps_micro_batch_size=GROUPS,
      ),
      rollout_config=base_rollout.RolloutConfig(
        max_tokens_to_generate=COMPLETION,
        max_prompt_length=PROMPT,
        kv_cache_size=PROMPT + COMPLETION,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=[NEVER],
        return_logprobs=True,
      ),
    ),
  )
  spent: dict[str, list[tuple[float, float]]] = {}

  def timed(method: str, name: str, wait) -> None:
    call = getattr(cluster, method)

    def measured(*args, **kwargs):
      began, used = time.perf_counter(), time.process_time()
      result = call(*args, **kwargs)
      wait(result)
      spent.setdefault(name, []).append((time.perf_counter() - began, time.process_time() - used))
      return result

    setattr(cluster, method, measured)

  timed("generate", "rollout", lambda result: None)
  timed("get_ref_per_token_logps", "reference", jax.block_until_ready)
  timed(
    "update_actor",
    "update",
    lambda result: jax.block_until_ready(nnx.state(cluster.actor_trainer.model)),
  )

  def reward(prompts, completions, **_):
    return [float(int(text.split()[0]) % 7) for text in completions]

  names = inspect.signature(grpo_learner.GRPOLearner.__init__).parameters
  learner = grpo_learner.GRPOLearner(
    **{"rl_engine" if "rl_engine" in names else "rl_cluster": cluster},
    reward_fns=reward,
    algo_config=grpo_learner.GRPOConfig(
      num_generations=SAMPLES, num_iterations=1, beta=BETA, epsilon=0.2
    ),
  )
  stamps = []

  def data():
    for number in range(steps + 1):
      stamps.append((time.perf_counter(), time.process_time()))
      yield {"prompts": np.array(prompts(GROUPS, number))}

  with mesh, contextlib.redirect_stdout(io.StringIO()):
    learner.train(data())
  taken = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(stamps)]
  spent["step"] = taken[: reps + 2]
  figures = {
    name: summary([t[0] for t in times[2:]], [t[1] for t in times[2:]])
    for name, times in spent.items()
  }
  first_wall, first_cpu = taken[0]
  figures["step"] |= {"first_s": first_wall, "first_cpu_s": first_cpu}
  return figures


CASES = {
  "decode": lambda reps: {"decode": decode(reps)},
  "decode_4096": lambda reps: {"decode_4096": decode(reps, cache=4096)},
  "top_p": lambda reps: {"top_p": decode(reps, top_p=0.95)},
  "step": step,
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--cases", default="decode,decode_4096,top_p,step")
  parser.add_argument("--reps", type=int, default=6)
  arguments = parser.parse_args()
  figures: dict[str, object] = {
    "versions": {name: importlib.metadata.version(name) for name in ("google-tunix", "jax", "flax")}
  }
  for case in arguments.cases.split(","):
    figures |= CASES[case](arguments.reps)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(json.dumps(figures | {"peak_gib": peak}))


if __name__ == "__main__":
  main()
