"""--mode=adapt: how far a memory alone takes frozen weights on tasks that training never saw.

EMPO2 (2602.23008) section 6.1. Round 0 plays without a memory; every round ends with the tips of its
trials, written exactly as in training, and rounds 1, 2, ... play with what was written so far. The
weights may come from any method, so that arms differ in them alone. The paper says neither how many
episodes make a round nor whose: here `episodes` at each of `tasks` tasks of the panel (config.adapt).
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

from memrl_jax.envs import panel as panels
from memrl_jax.envs import pool
from memrl_jax.methods import empo2
from memrl_jax.rollout import collect
from memrl_jax.sampling import remote
from memrl_jax.training import checkpoint, evaluate, folder, memories, metrics, report, runs
from memrl_jax.training import settings as settings_lib
from memrl_jax.training.settings import Settings
from memrl_jax.types import Trial

ADAPT = 4  # stream of randomness under the run's seed


def adapt(
  settings: Settings,
  run_folder: folder.RunFolder,
  step: int | None,
  *,
  client: remote.Client | None = None,
) -> list[dict[str, Any]]:
  """Plays all rounds with a checkpoint of this folder; returns and writes one record a round.

  Everything of an earlier call is replaced: the records in adapt/rounds.jsonl, the trials of each
  round, and the memory in adapt/memory.
  """
  shutil.rmtree(run_folder.adapt, ignore_errors=True)
  run_folder.adapt.mkdir()
  run = runs.Run(settings, client)
  with (
    checkpoint.Checkpoints(
      run_folder.checkpoints, keep=settings.train.keep, keep_every=None
    ) as saved,
    metrics.Progress(settings.adapt.rounds + 1) as progress,
  ):
    done = 0 if settings.frozen else run.load(saved, step, memory=False)
    run.actor.sync()
    run.warmup()
    embedding = memories.embedder(settings, run.actor)
    remembered = memories.remembered(settings, embedding, run_folder.adapt / "memory")
    try:
      records = _rounds(settings, run, remembered.tips, done, progress, run_folder)
    finally:
      remembered.tips.close()
  report.write_report(run_folder)
  return records


def _rounds(settings, run, memory, done, progress, run_folder) -> list[dict[str, Any]]:
  a = settings.adapt
  options = settings_lib.changed(settings.env.options, dict(a.options))
  seeds = getattr(panels.load(settings.eval.panel), settings.eval.half)[: a.tasks]
  config = (
    settings.method if isinstance(settings.method, empo2.Empo2Config) else empo2.Empo2Config()
  )
  program = empo2.trial(config, settings.tips, reads=True, writes=True)
  policy, records = run.actor.policy(run.eval_sampling), []
  envs = pool.EnvPool(
    run.family,
    options,
    workers=settings.env.workers,
    timeout_s=settings.env.timeout_s,
    isolation=settings.env.isolation,
  )
  try:
    for number in range(a.rounds + 1):
      trials = collect.collect(
        [
          Trial(
            settings.env.name,
            int(seed),
            group,
            index,
            mode="on" if number else "none",
            update=number,
          )
          for group, seed in enumerate(seeds)
          for index in range(a.episodes)
        ],
        program,
        lambda trial, request: policy,
        envs,
        run.family.prompts(options),
        horizon=evaluate.horizon(run.family, options),
        seed=(settings.seed, ADAPT, number),
        concurrency=settings.train.concurrency,
        memory=memory,
      )
      memory.write(trials)
      shown = [len(turn.reads) for trial in trials for turn in trial.turns if turn.phase == "play"]
      record = {
        "round": number,
        "step": done,
        "options": dict(a.options),
        "tips_shown": sum(shown) / max(len(shown), 1),
        "version": memory.version,
        **evaluate.summary(trials),
      }
      records.append(record)
      _write(run_folder.adapt / "rounds.jsonl", records)
      _write(run_folder.adapt / f"trials-{number:02d}.jsonl", [t.to_json() for t in trials])
      progress.update(
        number + 1, {"success": record["pass"][-1], "reward": record["reward"]}, seconds=0.0
      )
  finally:
    envs.close()
  return records


def _write(path: pathlib.Path, records: list[dict[str, Any]]) -> None:
  folder.write_atomic(path, "".join(json.dumps(record) + "\n" for record in records))
