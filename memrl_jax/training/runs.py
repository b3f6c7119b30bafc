"""All parts of one run: what it plays, remembers, learns, evaluates and saves, in the order that `loop` says.

Everything an update does is a function of (seed, update number, weights, memory), so a run that was
killed and resumed from a checkpoint repeats the lost updates exactly.
"""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from memrl_jax import methods
from memrl_jax.envs import base as env_base
from memrl_jax.envs import mix, pool
from memrl_jax.models import weights
from memrl_jax.rollout import collect, credit, lessons, pack, policies
from memrl_jax.sampling import fleet, remote
from memrl_jax.training import (
  checkpoint,
  evaluate,
  extractor,
  guard,
  hosts,
  lagged,
  learner,
  memories,
  mesh,
  metrics,
  together,
)
from memrl_jax.training.settings import Settings
from memrl_jax.types import Trial

# Streams of randomness under the run's seed.
TRAIN, EVALUATE, SHUFFLE, MODE, TASKS, STUDY = range(6)


def plan(settings: Settings, update: int) -> list[Trial]:
  """The trials of one update: `groups` tasks, `group_size` trials each; a function of seed and update."""
  seeds = _seeds(settings, update)
  return [
    Trial(settings.env.name, seed, group, index, update=update)
    for group, seed in enumerate(seeds)
    for index in range(settings.train.group_size)
  ]


def _seeds(settings: Settings, update: int) -> list[int]:
  """The tasks of one update: new ones, or the next of a round over the run's own."""
  train = settings.train
  low, high = env_base.TRAIN_SEEDS
  if train.tasks:
    rounds, place = divmod(update, -(-train.tasks // train.groups))
    order = np.random.default_rng([settings.seed, TASKS, rounds]).permutation(train.tasks)
    return (low + order[place * train.groups : (place + 1) * train.groups]).tolist()
  parts = env_base.family(settings.env.name).parts(settings.env.options)  # of a mix, dealt in turn
  rng = np.random.default_rng([settings.seed, TRAIN, update])
  numbers = rng.choice(np.arange(low, high // parts), size=train.groups, replace=False)
  turns = (update * train.groups + np.arange(train.groups)) % parts
  return (numbers * parts + turns).tolist()


class Run:
  """All parts of one run, built from its settings: model, sampler, environments, method, trainer.

  `client` is the server that samples, where that is not the engine of this process: with weights that it is
  handed, if the run `trains`, else with its own, and then there are none here. `memory` is the folder of what
  the method remembers (None: it remembers in this process only).
  """

  def __init__(
    self,
    settings: Settings,
    client: remote.Client | None = None,
    memory: pathlib.Path | None = None,
    *,
    trains: bool = False,
  ):
    self.settings, self.client, self._memory = settings, client, memory
    self._doors = contextlib.ExitStack()  # of servers that the run has opened
    self.actor: learner.Learner | learner.Served
    if client is not None and not trains:
      self.actor = learner.Served(settings, client)
    else:
      self.actor = learner.Learner(
        settings,
        seed=settings.seed,
        total=settings.train.updates * settings.train.minibatches,
        frozen=settings.frozen,
        critic=settings.credit.estimator == "ppo",
        client=client,
        first=settings.first,
        initial=settings.rereads,
        places=settings.places,
      )
    # Who plays: the model that learns, or a frozen one for which it writes.
    self.player = self._agent() if settings.hints else self.actor
    self.family = env_base.family(settings.env.name)
    self.prompts = self.family.prompts(settings.env.options)
    self.horizon = evaluate.horizon(self.family, settings.env.options)
    remembered = None
    if settings.method_name in methods.REMEMBERING:
      self.embedder = memories.embedder(settings, self.actor)
      remembered = memories.of_method(settings, self.embedder, memory)
    self.method = methods.make(
      settings.method,
      settings.credit,
      self._credit_shape(),
      remembered,
      per_token=settings.loss.aggregate != "sequence_mean",
    )
    self.extractor: extractor.Extractor | None = None
    if settings.extracts:
      merge = self.prompts.extract.merge
      self.extractor = extractor.Extractor(settings, self.method.memory.manager, merge)
    self.evaluator = evaluate.Evaluator(settings, self.method.arms)
    self.guard = guard.Guard(settings.guard)
    self.kept = lagged.Kept(settings.train.max_lag)
    self.actor.sync()  # before the engine warms up: placement is part of what is compiled

  def _agent(self) -> learner.Learner | learner.Served:
    """The same on every host: a model of its own on each, or a server that all ask."""
    agent = self.settings.agent
    made: learner.Learner | learner.Served
    if agent.remote.url:
      client = self._doors.enter_context(fleet.connect(agent.remote))
      made, which = learner.Served(agent, client), client.gives
    else:
      parts = learner.frozen(agent)
      made = learner.Learner(parts, seed=self.settings.seed, total=0, frozen=True)
      which = weights.fingerprint(made.initial)
    if odd := hosts.differing(hosts.gather([which], "the agents of the others")):
      raise ValueError(
        f"the agent of hosts {odd} is another than that of host 0; let config.agent name the same weights, or the "
        "same model on a server, on all of them"
      )
    return made

  def _route(
    self, sampling: policies.SamplingConfig, hand: Callable[[], None] | None = None
  ) -> tuple[Any, Any]:
    """(who plays, who is asked for advice), with the weights of now (or what `hand` gives); both start afresh."""
    (hand or self.actor.sync)()
    if self.settings.hints:
      self.player.sync()
      return self.player.policy(self.settings.agent.sampling), self.actor.policy(sampling)
    advisor = None if self.extractor is None else self.extractor.advisor()
    return self.actor.policy(sampling), advisor

  def _credit_shape(self) -> credit.Shape:
    settings = self.settings
    return credit.Shape(
      settings.train.groups * settings.train.group_size,
      settings.method.attempts,
      methods.turns(settings.method, self.horizon),
    )

  @property
  def eval_sampling(self) -> policies.SamplingConfig:
    """How an evaluation samples."""
    e, s = self.settings.eval, self.settings.sampling
    return policies.SamplingConfig(e.temperature, e.top_p, e.top_k, s.play_tokens, s.reflect_tokens)

  def warmup(self) -> None:
    """Compiles what sampling needs."""
    self.actor.warmup()
    if self.settings.hints:
      self.player.warmup()
    if self.extractor is not None:
      self.extractor.warmup()

  def rollout(
    self,
    update: int,
    envs: pool.EnvPool,
    hand: Callable[[], None] | None = None,
    leash: Callable[[collect.Policy], collect.Policy] = lambda policy: policy,
  ) -> list[Trial]:
    """Plays the trials of one update; of several hosts each plays its share of them.

    hand: gives who samples its weights, in place of those of now.
    leash: puts something around who plays.
    """
    settings = self.settings
    trials = plan(settings, update)
    self.method.plan(trials, np.random.default_rng([settings.seed, MODE, update]))
    if self.extractor is not None:
      self.extractor.launch()
    policy, advisor = self._route(settings.sampling, hand)
    policy = leash(policy)
    mine = hosts.mine(trials)
    with together.reading(self.reader, mine) as read:
      collect.collect(
        mine,
        self.method.trial,
        lambda trial, request: advisor if request.phase == "advise" else policy,
        envs,
        self.prompts,
        horizon=self.horizon,
        seed=(settings.seed, TRAIN, update),
        concurrency=settings.train.concurrency,
        memory=read,
      )
    return trials

  @property
  def reader(self) -> collect.Memory | None:
    """What trials may read."""
    return None if self.method.memory is None else self.method.memory.reader

  def learn(self, update: int, trials: Sequence[Trial]) -> dict[str, float]:
    """Credit and optimiser steps; returns metrics."""
    settings = self.settings
    turns = [turn for trial in trials if trial.void is None for turn in trial.turns]
    if "critic" in self.actor.state.params:
      self.actor.values([turn for turn in turns if len(turn.sample.ids)])
    forced = [turn for turn in turns if not turn.sampled]
    if forced:
      self.actor.rescore(forced)
    numbers = self.method.credit(trials)
    if not self.method.trains(update):
      return numbers
    imitated = pack.imitated(turns, per_token=settings.loss.aggregate != "sequence_mean")
    rows = pack.trainable(turns) + imitated
    for turn in imitated if settings.loss.off_policy == "none" else rows:
      if turn.plain is not None:
        turn.plain_ids = self.actor.chat.encode(turn.plain) if turn.here else np.zeros(0, np.int32)
    numbers["rollout/rows"] = len(rows)
    rng = np.random.default_rng([settings.seed, SHUFFLE, update])
    numbers |= self.actor.learn(rows, settings.train.minibatches, rng)
    return numbers | self.method.watch(numbers)

  def told(self, update: int) -> list[lessons.Lesson] | None:
    """What the method imitates in this update; None where it plays."""
    return self.method.study(update, np.random.default_rng([self.settings.seed, STUDY, update]))

  def study(self, update: int, told: Sequence[lessons.Lesson]) -> dict[str, float]:
    """Optimiser steps on what is imitated; returns metrics."""
    longest = self.settings.sampling.reflect_tokens
    rows = lessons.rows(told, self.actor.chat, self.method.terms, longest=longest)
    rng = np.random.default_rng([self.settings.seed, SHUFFLE, update])
    numbers = self.actor.study(rows, self.settings.train.minibatches, rng)
    return numbers | {"study/rows": len(rows)}

  def remember(self, update: int, trials: Sequence[Trial]) -> dict[str, float]:
    """What the method makes of the trials, and the extractor of what it makes; returns metrics."""

    def remember() -> dict[str, float]:
      return self.method.remember(trials) or {}

    return remember() if self.extractor is None else self.extractor.settle(update, remember)

  def evaluate(
    self, step: int, label: str, progress: metrics.Progress
  ) -> tuple[dict[str, Any], dict[str, list[Trial]]]:
    """Plays the panel with the current weights."""
    e, sampling = self.settings.eval, self.eval_sampling
    base = None
    if "base" in e.swap:
      base = self.actor.policy(sampling, self.actor.sampler(self.actor.initial))
    at = ", ".join(self.settings.remote.urls)
    who = f"{self.client.gives.model} at {at}, " if self.client else ""
    progress.say(f"evaluating {who}update {step}, on {e.tasks} tasks of {e.panel}/{e.half} ...")
    policy, advisor = self._route(sampling)
    record, trials = self.evaluator.run(
      policy,
      step=step,
      label=label,
      base=base,
      memory=None if self.method.memory is None else self.method.memory.observer,
      advisor=advisor,
    )
    contrast = self.method.contrast(trials)
    for arm, played in trials.items():
      record["arms"][arm] |= self.method.summary(played) | mix.by_part(played)
      record["arms"][arm] |= contrast.get(arm, {})
    if self.client is not None:
      record["server"] = {"url": at, **self.client.gives._asdict()}
    for line in evaluate.table(record):
      progress.say(line)
    return record, trials

  def save(self, checkpoints: checkpoint.Checkpoints, step: int) -> None:
    host = {"updates": step, "guard": self.guard.counts, "seed": self.settings.seed}
    extra: dict[str, np.ndarray] = {}
    whole = contextlib.nullcontext() if self.extractor is None else self.extractor.consistent()
    with whole:
      if self.method.memory is not None:
        extra, host["memory"] = self.method.memory.state()
      arrays = self._saved()
      if self.settings.train.max_lag:
        arrays["behind"] = self.kept.saved(step)
    checkpoints.save(step, arrays, host, extra)

  def load(self, checkpoints: checkpoint.Checkpoints, step: int | None, memory: bool = True) -> int:
    """Restores weights, optimiser, guard and memory; returns the number of updates done."""
    like = self._saved()
    if self.settings.train.max_lag:
      like["behind"] = self.kept.like(self.actor.trained)
    done, arrays, host = checkpoints.restore(step, like)
    if self.settings.train.max_lag:
      self.kept.load(done, arrays.pop("behind"))
    if self.extractor is not None:
      self.extractor.model.load(arrays.pop("extractor"))
    self.actor.load(arrays)
    self.guard = guard.Guard(self.settings.guard, host["guard"])
    if memory and self.method.memory is not None:
      self.method.memory.load(checkpoints.extra(done), host["memory"])
    if self.extractor is not None:
      self.extractor.loaded()
    return done

  def _saved(self) -> dict[str, Any]:
    """The arrays of a checkpoint."""
    more = {} if self.extractor is None else {"extractor": self.extractor.model.saved()}
    return self.actor.saved() | more

  def checksums(self) -> dict[str, str]:
    """Of what must be the same on every host: the weights that are whole on each, and the memory."""
    found = {}
    if isinstance(self.actor, learner.Learner):
      trained = [self.actor.state.params]
      if self.extractor is not None and not self.extractor.lodged:
        trained.append(self.extractor.model.state.params)
      leaves = jax.tree.leaves(trained)
      whole = mesh.local([leaf for leaf in leaves if leaf.is_fully_replicated])
      found["weights"] = weights.fingerprint(whole)
    if self.method.memory is not None:
      found["memory"] = memories.checksum(self.method.memory, self._memory)
    return found

  def close(self) -> None:
    """Lets the extractor end, and goes from the memory's folder."""
    if self.extractor is not None:
      self.extractor.close()
    if self.method.memory is not None:
      self.method.memory.close()
    self._doors.close()
