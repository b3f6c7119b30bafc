"""The training loop, top to bottom: plan, collect, credit, update, remember, log, evaluate, save.

Everything an update does is a function of (seed, update number, weights, memory), so a run that was
killed and resumed from a checkpoint repeats the lost updates exactly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from memrl_jax import methods
from memrl_jax.envs import base as env_base
from memrl_jax.envs import pool
from memrl_jax.models import lora, tiny, weights
from memrl_jax.rollout import collect, credit, pack, policies
from memrl_jax.sampling import engine, remote
from memrl_jax.training import checkpoint, evaluate, folder, guard, memories, mesh, metrics, report
from memrl_jax.training import settings as settings_lib
from memrl_jax.training import step as steps
from memrl_jax.training.settings import Settings
from memrl_jax.types import Trial

MASKED_ALARM = 0.2  # share of masked tokens that is worth a word
TRAIN, EVALUATE, SHUFFLE, MODE = 0, 1, 2, 3  # streams of randomness under the run's seed


def plan(settings: Settings, update: int) -> list[Trial]:
  """The trials of one update: `groups` tasks, `group_size` trials each; a function of seed and update."""
  rng = np.random.default_rng([settings.seed, TRAIN, update])
  seeds = rng.choice(
    np.arange(*env_base.TRAIN_SEEDS), size=settings.train.groups, replace=False
  ).tolist()
  return [
    Trial(settings.env.name, seed, group, index, update=update)
    for group, seed in enumerate(seeds)
    for index in range(settings.train.group_size)
  ]


class Run:
  """All parts of one run, built from its settings: model, sampler, environments, method, trainer.

  `client` is the server that samples, where that is not the engine of this process; `memory` the folder
  of what the method remembers (None: it remembers in this process only).
  """

  def __init__(
    self,
    settings: Settings,
    client: remote.Client | None = None,
    memory: pathlib.Path | None = None,
  ):
    self.settings, self.client = settings, client
    self._pushed: Any = None  # the params that the server has
    self.mesh = mesh.make(settings.mesh)
    self.cfg, self.initial = weights.load_directory(
      settings.model.directory(), dtype=settings.model.dtype, place=mesh.placement(self.mesh)
    )
    self.chat = settings.model.chat()
    self.start = self.initial  # what training starts from, and the reference of a KL term
    self.family = env_base.family(settings.env.name)
    self.prompts = self.family.prompts(settings.env.options)
    self.horizon = evaluate.horizon(self.family, settings.env.options)
    remembered = None
    if settings.method_name in methods.REMEMBERING:
      self.embedder = memories.embedder(settings, self.cfg, self.initial, self.chat)
      remembered = memories.of_method(settings, self.embedder, memory)
    self.method = methods.make(settings.method, settings.credit, self._credit_shape(), remembered)
    self.engine = engine.Engine(self.cfg, self.initial, settings.engine)
    self.evaluator = evaluate.Evaluator(settings, self.method.arms)
    total = settings.train.updates * settings.train.minibatches
    adapted = self._adapt() if settings.lora.rank else {}
    self.trainer = steps.Trainer(
      self.cfg,
      settings.loss,
      steps.optimiser(settings.optim, total),
      self.mesh,
      max_tokens=settings.pack.response,
      remat=settings_lib.REMAT[settings.model.remat],
      **adapted,
    )
    critic = None
    if settings.credit.estimator == "ppo" and not settings.frozen:
      critic = steps.init_critic(self.initial, self.cfg)
    if settings.frozen:  # needs no optimiser, nor a copy of its weights
      self.state = steps.TrainState({"policy": self.initial}, None)
    else:
      self.state = self.trainer.init(self.start, critic)
    self.guard = guard.Guard(settings.guard)
    self.sync()  # before the engine warms up: placement is part of what is compiled

  def _adapt(self) -> dict[str, Any]:
    """What the trainer needs to train adapters only; from here on `start` is theirs."""
    config, key = self.settings.lora, jax.random.key(self.settings.seed)
    base = lora.quantize(self.initial, config)
    self.start = lora.init(key, self.cfg, config)
    self.initial = lora.dense(lora.attach(base, self.start, self.cfg, config))
    self._merge = jax.jit(lambda base, trained: lora.merge(base, trained, self.cfg, config))
    self._base = base
    return {"base": base, "join": lambda b, trained: lora.attach(b, trained, self.cfg, config)}

  @property
  def params(self) -> Any:
    """The policy's weights, adapters merged in."""
    trained = self.state.params["policy"]
    return self._merge(self._base, trained) if self.settings.lora.rank else trained

  def _credit_shape(self) -> credit.Shape:
    train = self.settings.train
    return credit.Shape(
      train.groups * train.group_size, self.settings.method.attempts, self.horizon
    )

  def policy(
    self, sampling: policies.SamplingConfig
  ) -> policies.LanguagePolicy | policies.RemotePolicy:
    """The current weights as a policy."""
    context = max(self.settings.engine.buckets)
    if self.client is not None:
      return policies.RemotePolicy(self.client, self.chat, sampling, context)
    return policies.LanguagePolicy(self.engine, self.chat, sampling, context)

  @property
  def eval_sampling(self) -> policies.SamplingConfig:
    """How an evaluation samples."""
    e, s = self.settings.eval, self.settings.sampling
    return policies.SamplingConfig(e.temperature, e.top_p, e.top_k, s.play_tokens, s.reflect_tokens)

  def sync(self) -> None:
    """Hands the weights to the sampler, which starts afresh: nothing depends on what it did before."""
    trained = self.state.params["policy"]
    if self.client is None:
      self.engine.set_params(self.params)
    elif trained is not self._pushed:
      self.client.push_params(self.cfg, self.params)
      self._pushed = trained

  def rollout(self, update: int, envs: pool.EnvPool) -> list[Trial]:
    """Plays the trials of one update with the current weights."""
    settings = self.settings
    self.sync()
    policy = self.policy(settings.sampling)
    trials = plan(settings, update)
    self.method.plan(trials, np.random.default_rng([settings.seed, MODE, update]))
    return collect.collect(
      trials,
      self.method.trial,
      lambda trial, request: policy,
      envs,
      self.prompts,
      horizon=self.horizon,
      seed=(settings.seed, TRAIN, update),
      concurrency=settings.train.concurrency,
      memory=self.reader,
    )

  @property
  def reader(self) -> collect.Memory | None:
    """What trials may read."""
    return None if self.method.memory is None else self.method.memory.reader

  def learn(self, update: int, trials: Sequence[Trial]) -> dict[str, float]:
    """Credit and optimiser steps; returns metrics. Changes `state`."""
    settings = self.settings
    if "critic" in self.state.params:
      self._read_critic(trials)
    numbers = self.method.credit(trials)
    usable = [turn for trial in trials if trial.void is None for turn in trial.turns]
    rows = pack.trainable(usable)
    for turn in rows:
      if turn.plain is not None:
        turn.plain_ids = self.chat.encode(turn.plain)
    numbers["rollout/rows"] = len(rows)
    rng = np.random.default_rng([settings.seed, SHUFFLE, update])
    packed = [
      pack.pack_with_places(part, settings.pack)
      for part in pack.split(rows, settings.train.minibatches, rng)
    ]
    parts = [one.batches for one in packed]
    params = self.state.params["policy"]
    old = [self.trainer.old(params, part) for part in parts]
    ref = [
      self.trainer.score(self.start, part) if settings.loss.kl_coef else None for part in parts
    ]
    history = []
    for part, part_old, part_ref in zip(parts, old, ref, strict=True):
      self.state, result = self.trainer.update(self.state, part, part_old, part_ref)
      history.append(result)
    # The first wait: until here every step was dispatched while the device worked on those before.
    history = jax.device_get(history)
    if history:
      numbers |= {name: float(np.mean([h[name] for h in history])) for name in history[0]}
      # Before the first optimiser step both sides hold the same weights: the true difference.
      for name in ("train/logp_gap", "train/logp_gap_max"):
        numbers[name] = float(history[0][name])
      if not numbers.get("train/off_policy", 1.0):  # nothing to say about rows that are not there
        gone = ["train/ratio_off", "train/clipped_off"]
        gone += ["train/masked"] if settings.loss.mask_scope == "off_policy" else []
        for name in gone:
          del numbers[name]
      numbers["train/finite"] = float(min(h["train/finite"] for h in history))
    numbers["train/micro_batches"] = sum(len(part) for part in parts)
    computed, alone = sum(one.tokens for one in packed), sum(map(pack.tokens_alone, rows))
    numbers["train/tokens"] = computed
    numbers["train/shared"] = 1 - computed / max(alone, 1)
    return numbers

  def _read_critic(self, trials: Sequence[Trial]) -> None:
    """Sets `turn.value`: the critic's estimate at the end of every prompt."""
    turns = [
      turn for trial in trials if trial.void is None for turn in trial.turns if len(turn.sample.ids)
    ]
    packed = pack.pack_with_places(turns, self.settings.pack)
    values = self.trainer.values(self.state.params["critic"], packed.batches)
    for turn, (m, b, s) in zip(turns, packed.places, strict=True):
      turn.value = float(values[m][b, s])

  def evaluate(
    self, step: int, label: str, progress: metrics.Progress
  ) -> tuple[dict[str, Any], dict[str, list[Trial]]]:
    """Plays the panel with the current weights."""
    self.sync()
    e, sampling = self.settings.eval, self.eval_sampling
    base = None
    if "base" in e.swap:
      frozen = engine.Engine(self.cfg, self.initial, self.settings.engine)
      base = policies.LanguagePolicy(frozen, self.chat, sampling, max(self.settings.engine.buckets))
    progress.say(f"evaluating at update {step} on {e.tasks} tasks of {e.panel}/{e.half} ...")
    record, trials = self.evaluator.run(
      self.policy(sampling), step=step, label=label, base=base, memory=self.reader
    )
    for arm, played in trials.items():
      record["arms"][arm] |= self.method.summary(played)
    for line in evaluate.table(record):
      progress.say(line)
    return record, trials

  def save(self, checkpoints: checkpoint.Checkpoints, step: int) -> None:
    host = {"updates": step, "guard": self.guard.counts, "seed": self.settings.seed}
    extra: dict[str, np.ndarray] = {}
    if self.method.memory is not None:
      extra, host["memory"] = self.method.memory.state()
    checkpoints.save(step, self._saved(), host, extra)

  def load(self, checkpoints: checkpoint.Checkpoints, step: int | None, memory: bool = True) -> int:
    """Restores weights, optimiser, guard and memory; returns the number of updates done."""
    done, arrays, host = checkpoints.restore(step, self._saved())
    if not self.settings.frozen:
      self.state = steps.TrainState(**arrays)
    self.guard = guard.Guard(self.settings.guard, host["guard"])
    if memory and self.method.memory is not None:
      self.method.memory.load(checkpoints.extra(done), host["memory"])
    return done

  def _saved(self) -> dict[str, Any]:
    """The arrays of a checkpoint; frozen weights are where they came from."""
    return {"frozen": np.zeros(1)} if self.settings.frozen else self.state._asdict()

  def close(self) -> None:
    """Lets go of the memory's folder."""
    if self.method.memory is not None:
      self.method.memory.close()


def train(
  settings: Settings,
  run_folder: folder.RunFolder,
  *,
  quiet: bool = False,
  client: remote.Client | None = None,
) -> str:
  """Runs or continues the run of this folder; returns how it ended ("finished", ...)."""
  train_settings = settings.train
  with (
    contextlib.closing(Run(settings, client, run_folder.memory)) as run,
    checkpoint.StopSignal() as stop,
    checkpoint.Checkpoints(
      run_folder.checkpoints, keep=train_settings.keep, keep_every=None
    ) as saved,
    metrics.MetricsLog(run_folder) as log,
  ):
    done = run.load(saved, None) if run_folder.resumed and saved.latest() is not None else 0
    if not done and run.method.memory is not None:
      run.method.memory.reset()  # what updates wrote that no checkpoint has
    log.truncate(done + 1 if done else 0)
    status = "finished"
    with metrics.Progress(train_settings.updates, start=done, quiet=quiet) as progress:
      if client is None:
        run.engine.warmup()
      if not train_settings.updates:
        _evaluate(run, log, 0, "final", progress)
      elif not done and settings.eval.at_start:
        _evaluate(run, log, 0, "start", progress)
      envs = pool.EnvPool(
        run.family,
        settings.env.options,
        workers=settings.env.workers,
        timeout_s=settings.env.timeout_s,
        isolation=settings.env.isolation,
      )
      try:
        while done < train_settings.updates:
          status = _update(run, log, envs, done, progress)
          done += 1
          if status != "finished":
            run.save(saved, done)
            break
          last = done == train_settings.updates
          if last or _due(done, settings.train.eval_every):
            _evaluate(run, log, done, "final" if last else "update", progress)
          if last or stop.requested or _due(done, settings.train.checkpoint_every):
            run.save(saved, done)
          if stop.requested and not last:
            status = f"stopped by {stop.requested} after update {done}; add --resume to go on"
            break
      finally:
        envs.close()
    saved.wait()
    run_folder.end_session(status, done)
  report.write_report(run_folder)
  return status


def _due(done: int, every: int) -> bool:
  return every > 0 and done % every == 0


def _update(run: Run, log: metrics.MetricsLog, envs: pool.EnvPool, update: int, progress) -> str:
  """One update; returns "finished", or the reason why the run must stop.

  Whenever it stops, or a trial was void, the trials of the update are written: with the checkpoint
  they are all that is needed to look at what went wrong.
  """
  began = time.perf_counter()
  before = run.engine.stats
  trials = run.rollout(update, envs)
  rolled = time.perf_counter()
  numbers = evaluate.rollout_metrics(trials)
  if not run.settings.frozen:
    numbers |= run.learn(update, trials)
  numbers |= run.method.remember(trials) or {}
  learned = time.perf_counter()
  reason = _reason_to_stop(run, update, trials, numbers)
  timing = {
    "seconds/rollout": rolled - began,
    "seconds/learn": learned - rolled,
    **_engine_timing(before, run.engine.stats, rolled - began),
  }
  if run.client is not None:
    counts = dataclasses.asdict(run.client.counts)
    timing |= {f"remote/{name}": count for name, count in counts.items()}
  log.write(update + 1, numbers, timing)
  every = run.settings.train.rollouts_every
  if reason or any(t.void for t in trials) or _due(update + 1, every) or update == 0:
    log.write_rollouts(update + 1, (trial.to_json() for trial in trials))
  shown = {"success": numbers["rollout/success"], "valid": numbers["rollout/valid"]}
  shown |= {
    name: numbers[f"train/{name}"] for name in ("entropy", "kl_old") if f"train/{name}" in numbers
  }
  if numbers["rollout/void"]:
    shown["void"] = numbers["rollout/void"]
  progress.update(update + 1, shown, seconds=learned - began)
  if numbers.get("train/masked", 0.0) > MASKED_ALARM:
    progress.say(
      f"update {update + 1}: {numbers['train/masked']:.0%} of the tokens are below config.loss.mask_logp "
      "and not pushed; the memory asks for what the policy alone hardly ever says"
    )
  if reason:
    progress.say(reason)
  return reason or "finished"


def _reason_to_stop(
  run: Run, update: int, trials: Sequence[Trial], numbers: dict[str, float]
) -> str | None:
  """Why the run must not go on after this update, or None."""
  if numbers.get("train/finite", 1.0) < 1:
    return (
      f"stopped: a gradient of update {update + 1} was not finite and was not applied; its trials are "
      f"in rollouts/{update + 1:06d}.jsonl, the weights in checkpoints/{update + 1}"
    )
  if all(trial.void for trial in trials):
    reason = trials[0].void
    return f"stopped: all {len(trials)} trials of update {update + 1} were void ({reason})"
  collapse = run.guard.check(numbers)
  return f"stopped by the collapse guard: {collapse}" if collapse else None


def _engine_timing(before: engine.Stats, after: engine.Stats, seconds: float) -> dict[str, float]:
  """What the sampler did in one rollout; reuse is the share of prompt tokens that were cached."""
  done = engine.Stats(*(b - a for a, b in zip(before, after, strict=True)))
  return {
    "engine/reused": done.reused / max(done.reused + done.prefilled, 1),
    "engine/prefilled": done.prefilled,
    "engine/tokens_saved": done.reused,
    "engine/tokens_in_place": done.in_place,
    "engine/steps": done.steps,
    "engine/tokens_per_second": done.sampled / max(seconds, 1e-9),
  }


def _evaluate(run: Run, log: metrics.MetricsLog, step: int, label: str, progress) -> None:
  record, trials = run.evaluate(step, label, progress)
  log.write_eval(record)
  keep = run.settings.eval.save_trials
  log.write_eval_trials(
    step, {arm: [trial.to_json() for trial in played[:keep]] for arm, played in trials.items()}
  )


def evaluate_checkpoint(settings: Settings, run_folder: folder.RunFolder, step: int | None) -> None:
  """--mode=eval: plays the panel with a checkpoint of this folder; adds a record and the report."""
  with (
    memories.copy(run_folder.memory) as memory,  # a checkpoint takes its memory back to its version
    contextlib.closing(Run(settings, memory=memory)) as run,
    checkpoint.Checkpoints(
      run_folder.checkpoints, keep=settings.train.keep, keep_every=None
    ) as saved,
    metrics.MetricsLog(run_folder) as log,
    metrics.Progress(0) as progress,
  ):
    done = run.load(saved, step)
    run.engine.warmup()
    _evaluate(run, log, done, "eval", progress)
  report.write_report(run_folder)


def export_checkpoint(
  settings: Settings, run_folder: folder.RunFolder, step: int | None
) -> pathlib.Path:
  """--mode=export: the policy of a checkpoint as a Hugging Face directory, adapters merged in.

  The tokenizer goes along, so that transformers, a server or config.model.checkpoint reads it back.
  """
  run = Run(settings)
  with checkpoint.Checkpoints(
    run_folder.checkpoints, keep=settings.train.keep, keep_every=None
  ) as saved:
    done = run.load(saved, step, memory=False)
  source, path = settings.model.directory(), run_folder.path / f"export-{done:06d}"
  is_tiny = tiny.is_tiny(source)
  dtype, goes_along = settings.model.dtype, None if is_tiny else source
  weights.save_directory(path, run.cfg, run.params, dtype=dtype, source=goes_along)
  if is_tiny:
    for file in (*tiny.tokenizer_directory().iterdir(), source / tiny.MARK):
      shutil.copy(file, path)
  return path
