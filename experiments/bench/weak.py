"""Weak scaling of all that is outside the model: 1, 2 and 4 processes with the same work each, a stub for the model.

    python experiments/bench/weak.py                      # LaMer on Sokoban at the paper's sizes, JSON and a table
    python experiments/bench/weak.py --config=experiments/empo2_lab.py --groups=4

Every process plays its share of an update's trials with the config's environments, prompts and tokenizer (the
shipped one); a scripted player answers at once, so nothing is sampled or trained. Then trials are exchanged,
credited, measured and remembered as training does it, and the process packs its own rows. CPU seconds by part,
of the median update, the mean of the processes:

  own       of the trials that a process plays itself: environments, prompts, bookkeeping of the rollout, packing
  common    of all trials of the update, the same on every process: exchange, credit, metrics, memory

An update on H hosts takes a host  own * trials / H + common * trials, which `--hosts` works out.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from experiments import run as command
from experiments.bench import lamer_profile

OWN = ("environments", "prompts to tokens", "rollout", "packing")
COMMON = ("plan", "exchange", "credit", "metrics", "memory")


def stub(settings: Any, text: Any, clock: Any) -> Any:
  """A scripted player whose turns carry ids, as those of a model do."""
  from memrl_jax.envs import base as env_base
  from memrl_jax.rollout import policies
  from memrl_jax.rollout.trial import Answer
  from memrl_jax.types import Sample

  family = env_base.family(settings.env.name)
  make = family.players["random"]
  limit = max(settings.engine.buckets) - settings.sampling.reflect_tokens
  player = policies.players(lambda rng: make(settings.env.options, rng), settings.seed)

  class Stub:
    def submit(self, trial, request, key):
      with clock.part("prompts to tokens"):
        messages, view, prompt = policies.fit(request, text, limit)
      ticket = player.submit(trial, request, key)
      waiting[ticket] = (messages, view, prompt)
      return ticket

    def poll(self):
      answers = []
      for ticket, answer in player.poll():
        messages, view, prompt = waiting.pop(ticket)
        ids = np.asarray(text.reply(answer.sample.text), np.int32)[: settings.pack.response]
        sample = Sample(answer.sample.text, prompt, ids, np.full(len(ids), -1.0, np.float32))
        answers.append((ticket, Answer(sample, messages, view)))
      return answers

  waiting: dict[int, Any] = {}
  return Stub()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
  """CPU seconds of the median update by part, in this process."""
  from experiments import base
  from memrl_jax import methods
  from memrl_jax.envs import base as env_base
  from memrl_jax.envs import pool
  from memrl_jax.memory import embed
  from memrl_jax.models import tiny
  from memrl_jax.rollout import collect, credit, pack
  from memrl_jax.sampling import chat
  from memrl_jax.training import evaluate, hosts, memories, runs

  experiment = command.load(arguments.config, [f"train.groups={arguments.groups * hosts.count()}"])
  settings = base.settings(experiment.config, experiment.name, experiment.variant)
  family, clock = env_base.family(settings.env.name), lamer_profile.Clock()
  text = chat.load(tiny.tokenizer_directory(), tiny.directory(settings.env.name))
  horizon = evaluate.horizon(family, settings.env.options)
  count = settings.train.groups * settings.train.group_size
  shape = credit.Shape(count, settings.method.attempts, methods.turns(settings.method, horizon))
  with tempfile.TemporaryDirectory() as folder:
    remembered = None
    if settings.method_name in methods.REMEMBERING:
      hashing = embed.Cached(embed.Hash(settings.memory.dimension), settings.memory.cache)
      remembered = memories.of_method(settings, hashing, Path(folder) / "memory")
    method = methods.make(settings.method, settings.credit, shape, remembered)
    envs = pool.EnvPool(family, settings.env.options, isolation="inline")
    clock.wrap(envs, "run", "environments")
    history, turns = [], 0
    for update in range(1 + arguments.updates):
      clock.seconds.clear()
      rng = np.random.default_rng([settings.seed, update])
      with clock.part("plan"):
        trials = runs.plan(settings, update)
        method.plan(trials, rng)
      for trial in trials:  # the same tasks on every process
        trial.seed = update * arguments.groups + trial.group % arguments.groups
      policy = stub(settings, text, clock)
      with clock.part("rollout"):
        collect.collect(
          hosts.mine(trials),
          method.trial,
          lambda trial, request, policy=policy: policy,
          envs,
          family.prompts(settings.env.options),
          horizon=horizon,
          seed=(settings.seed, update),
          concurrency=settings.train.concurrency,
          memory=None if method.memory is None else method.memory.reader,
        )
      own = hosts.mine(trials)
      sent = len(zlib.compress(pickle.dumps(own, protocol=5), 1)) / max(len(own), 1)
      with clock.part("exchange"):
        trials = hosts.exchange(trials, "the trials of the others")
      with clock.part("metrics"):
        numbers = evaluate.rollout_metrics(trials)
      with clock.part("credit"):
        method.credit(trials)
      with clock.part("memory"):
        method.remember(trials)
      rows = pack.trainable([turn for trial in hosts.mine(trials) for turn in trial.turns])
      with clock.part("packing"):
        for part in pack.split(rows, settings.train.minibatches, rng):
          pack.pack_with_places(part, settings.pack)
      if update:  # the first compiles
        history.append({name: clock.seconds.get(name, 0.0) for name in OWN + COMMON})
        turns += sum(len(trial.turns) for trial in hosts.mine(trials))
    envs.close()
    if method.memory is not None:
      method.memory.close()
  seconds = {name: float(np.median([one[name] for one in history])) for name in OWN + COMMON}
  return {
    "processes": hosts.count(),
    "trials": count,
    "turns": turns / len(own) / arguments.updates,
    "tokens": float(np.mean([len(row.prompt_ids) for row in rows])),
    "bytes": sent,
    "void": numbers["rollout/void"],
    "seconds": seconds,
  }


def _child(arguments: argparse.Namespace) -> None:
  from memrl_jax.training import hosts

  if arguments.count > 1:
    hosts.join(arguments.coordinator, arguments.count, arguments.index, seconds=300)
  print(json.dumps(measure(arguments)), flush=True)
  hosts.leave(0)


def _measured(arguments: argparse.Namespace, count: int, beside: int) -> dict[str, Any]:
  """The mean of `count` processes that run together, and of `beside` - 1 such runs at the same time.

  So the machine is as busy in every column, and what differs is how many processes talk to each other.
  """
  shared = [f"--{name}={getattr(arguments, name)}" for name in ("config", "groups", "updates")]
  started = []
  for _ in range(beside):
    with socket.create_server(("127.0.0.1", 0)) as free:
      where = f"--coordinator=127.0.0.1:{free.getsockname()[1]}"
    for index in range(count):
      flags = [*shared, where, f"--count={count}", f"--index={index}"]
      child = [sys.executable, __file__, *flags]
      started.append(subprocess.Popen(child, stdout=subprocess.PIPE, text=True))
  told = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
  seconds = {n: float(np.mean([one["seconds"][n] for one in told])) for n in OWN + COMMON}
  means = {
    name: float(np.mean([one[name] for one in told])) for name in ("turns", "tokens", "bytes")
  }
  return told[0] | means | {"seconds": seconds}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  add = parser.add_argument
  add("--config", default="experiments/lamer_sokoban.py:paper", metavar="FILE[:VARIANT]")
  add("--groups", type=int, default=4, help="of each process")
  add("--updates", type=int, default=5)
  add("--processes", default="1,2,4")
  add("--trials", type=int, default=128, help="of the update that is worked out")
  add("--hosts", type=int, default=64)
  for name, kind in (("--count", int), ("--index", int), ("--coordinator", str)):
    add(name, type=kind, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if arguments.count:
    _child(arguments)
    return
  counts = [int(count) for count in arguments.processes.split(",")]
  found = [_measured(arguments, count, max(counts) // count) for count in counts]
  print(json.dumps(found))
  print("| CPU ms a trial | " + " | ".join(str(one["processes"]) for one in found) + " |")
  print("|---|" + "---|" * len(found))
  print("| turns a trial | " + " | ".join(f"{one['turns']:.1f}" for one in found) + " |")
  rates = []
  for names, whose in ((OWN, "own"), (COMMON, "common")):
    share = {
      "own": lambda one: one["trials"] / one["processes"],
      "common": lambda one: one["trials"],
    }[whose]
    totals = [sum(one["seconds"][name] for name in names) / share(one) for one in found]
    for name in names:
      cells = [f"{1e3 * one['seconds'][name] / share(one):.2f}" for one in found]
      print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"| **{whose}** | " + " | ".join(f"**{1e3 * total:.2f}**" for total in totals) + " |")
    rates.append(max(totals))
  own, common = rates
  seconds = own * arguments.trials / arguments.hosts + common * arguments.trials
  print(
    f"{arguments.trials} trials on {arguments.hosts} hosts: {seconds:.2f} CPU s a host an update "
    f"({own * arguments.trials / arguments.hosts:.2f} own, {common * arguments.trials:.2f} common)"
  )


if __name__ == "__main__":
  main()
