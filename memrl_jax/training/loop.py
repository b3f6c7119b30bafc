"""The training loop, top to bottom: plan, collect, credit, update, remember, log, evaluate, save.

Everything an update does is a function of (seed, update number, weights, memory), so a run that was
killed and resumed from a checkpoint repeats the lost updates exactly.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

from memrl_jax.envs import mix, pool
from memrl_jax.rollout import lessons
from memrl_jax.sampling import images, remote
from memrl_jax.training import (
  checkpoint,
  evaluate,
  folder,
  hosts,
  lagged,
  memories,
  metrics,
  report,
  runs,
)
from memrl_jax.training.settings import Settings
from memrl_jax.types import Trial

MASKED_ALARM = 0.2  # share of masked tokens that is worth a word


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
    memories.of_host(run_folder.memory) as memory,
    contextlib.closing(runs.Run(settings, client, memory, trains=settings.trains)) as run,
    checkpoint.StopSignal() as stop,
    checkpoint.Checkpoints(
      run_folder.checkpoints, keep=train_settings.keep, keep_every=None
    ) as saved,
    metrics.log_of(run_folder) as log,
  ):
    done = run.load(saved, None) if run_folder.resumed and saved.latest() is not None else 0
    if not done and run.method.memory is not None:
      run.method.memory.reset()  # what updates wrote that no checkpoint has
    log.truncate(done + 1 if done else 0)
    status = "finished"
    with metrics.Progress(train_settings.updates, start=done, quiet=quiet) as progress:
      run.warmup()
      if not train_settings.updates:
        void = _evaluate(run, log, 0, "final", progress)
        status = f"stopped: {void}" if void else status
      elif not done and settings.eval.at_start:
        _evaluate(run, log, 0, "start", progress)
      envs = pool.EnvPool(
        run.family,
        settings.env.options,
        workers=settings.env.workers,
        timeout_s=settings.env.timeout_s,
        isolation=settings.env.isolation,
      )
      rollouts = lagged.Rollouts(run, envs, done)
      try:
        while done < train_settings.updates:
          told = run.told(done)
          if told is None:
            with hosts.during(done + 1):
              status, done = _update(run, log, rollouts, done, progress)
          else:
            with hosts.during(done + 1):
              status, done = _study(run, log, done, told, progress)
          if status != "finished":
            if done and done != saved.latest():
              run.save(saved, done)
            break
          last, anchored = done == train_settings.updates, done == run.method.anchors
          if anchored:
            run.actor.anchor()
          if last or anchored or _due(done, settings.train.eval_every):
            label = "final" if last else "anchor" if anchored else "update"
            rollouts.wait()
            void = _evaluate(run, log, done, label, progress)
            status = f"stopped: {void}" if void and last else status
          wish = _agreed(run, done, stop.requested)
          if last or wish or _due(done, settings.train.checkpoint_every):
            run.save(saved, done)
          if wish and not last:
            status = f"stopped by {wish} after update {done}; add --resume to go on"
            break
      finally:
        rollouts.close()
        envs.close()
    saved.wait()
    run_folder.end_session(status, done)
  if hosts.first():
    report.write_report(run_folder)
  return status


def _agreed(run: runs.Run, done: int, wish: str | None) -> str | None:
  """What any host is asked to stop for; none may be elsewhere, or weigh or remember anything else."""
  if hosts.count() == 1:
    return wish
  mine = {"number of updates": done, **run.checksums()}
  told = hosts.gather([(mine, wish)], f"what all have after update {done}")
  for name in mine:
    odd = hosts.differing([found[name] for found, _ in told])
    if odd:
      hosts.end(f"after update {done} the {name} of hosts {odd} differs from that of host 0")
  return next((asked for _, asked in told if asked), None)


def _due(done: int, every: int) -> bool:
  return every > 0 and done % every == 0


def _study(
  run: runs.Run, log: metrics.MetricsLog, update: int, told: Sequence[lessons.Lesson], progress
) -> tuple[str, int]:
  """One update that imitates; returns as `_update`."""
  began = time.perf_counter()
  numbers = run.study(update, told)
  seconds = time.perf_counter() - began
  log.write(update + 1, numbers, {"seconds/learn": seconds})
  reason = _reason_to_stop(run, update, None, numbers)
  progress.update(update + 1, {"imitates": numbers["train/loss"]}, seconds=seconds)
  if reason:
    progress.say(reason)
  return reason or "finished", update + 1


def _update(
  run: runs.Run, log: metrics.MetricsLog, rollouts: lagged.Rollouts, update: int, progress
) -> tuple[str, int]:
  """One update; returns "finished" or the reason why the run must stop, and how many updates are done.

  One that the server left without an answer is not done: a resumed run plays it again.
  Whenever it stops, or a trial was void, the trials of the update are written: with the checkpoint
  they are all that is needed to look at what went wrong.
  """
  began = time.perf_counter()
  try:
    trials, lag, timing = rollouts.take(update)
  except remote.RemoteError as error:  # nobody took the weights
    reason = f"stopped: in update {update + 1} {error}; --resume plays it again"
    progress.say(reason)
    return reason, update
  rolled = time.perf_counter()
  trials = hosts.exchange(trials, "the trials of the others")
  if hosts.count() > 1:
    run.method.pool(lambda own: hosts.gather(own, "what the memory was asked"))
  met = time.perf_counter()
  void = _nothing(trials)
  if run.client is not None and (unanswered := _unanswered(trials)):
    log.write_rollouts(update + 1, _records(trials))
    reason = f"stopped: in update {update + 1} {unanswered}; --resume plays it again"
    progress.say(reason)
    return reason, update
  rollouts.met(update)
  numbers = evaluate.rollout_metrics(trials)
  seen = [turn.messages for trial in hosts.mine(trials) for turn in trial.turns]
  dropped = sum(hosts.gather([sum(map(images.left_out, seen))], "the numbers of images"))
  numbers |= {"rollout/images_dropped": float(dropped)} if dropped else {}
  if not run.settings.frozen:
    numbers |= run.learn(update, trials)
  if run.settings.train.max_lag:
    numbers["train/lag"] = float(lag)
  numbers |= run.remember(update, trials)
  numbers |= {f"part/{name}": value for name, value in mix.by_part(trials).items()}
  learned = time.perf_counter()
  reason = _reason_to_stop(run, update, void, numbers)
  timing["seconds/learn"] = learned - met
  timing |= {"seconds/exchange": met - rolled} if hosts.count() > 1 else {}
  if run.extractor is not None:
    timing |= run.extractor.timing()
  log.write(update + 1, numbers, timing)
  every = run.settings.train.rollouts_every
  if reason or any(t.void for t in trials) or _due(update + 1, every) or update == 0:
    log.write_rollouts(update + 1, _records(trials))
  names = ("rollout/success", "rollout/valid", "train/entropy", "train/kl_old")
  shown = {name.partition("/")[2]: numbers[name] for name in names if name in numbers}
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
  return reason or "finished", update + 1


def _records(trials: Sequence[Trial], first: int | None = None) -> list[dict[str, Any]]:
  """Trials, or the first of them, as records; the host that played one has all of its tokens."""
  part, kept = hosts.share(len(trials)), range(len(trials))[:first]
  own = [trials[number].to_json() for number in kept if number in part]
  return hosts.gather(own, "the records of trials")


def _nothing(trials: Sequence[Trial], whose: str = "") -> str | None:
  """What to say where every trial is void."""
  if any(trial.void is None for trial in trials):
    return None
  return f"all {len(trials)} trials{whose} were void ({trials[0].void})"


def _unanswered(trials: Sequence[Trial]) -> str | None:
  """What to say where a host has void trials only: its servers may be gone, while others have theirs."""
  if hosts.count() == 1:
    return _nothing(trials)
  for host in range(hosts.count()):
    part = hosts.share(len(trials), host)
    if part and (void := _nothing(trials[part.start : part.stop], f" of host {host}")):
      return void
  return None


def _reason_to_stop(
  run: runs.Run, update: int, void: str | None, numbers: dict[str, float]
) -> str | None:
  """Why the run must not go on after this update, or None."""
  if numbers.get("train/finite", 1.0) < 1:
    return (
      f"stopped: a gradient of update {update + 1} was not finite and was not applied; its trials are "
      f"in rollouts/{update + 1:06d}.jsonl, the weights in checkpoints/{update + 1}"
    )
  if void:
    return f"stopped: in update {update + 1} {void}"
  collapse = run.guard.check(numbers)
  return f"stopped by the collapse guard: {collapse}" if collapse else None


def _evaluate(
  run: runs.Run, log: metrics.MetricsLog, step: int, label: str, progress
) -> str | None:
  """Plays the panel and writes what came of it; returns why that is nothing, where it is."""
  try:
    record, trials = run.evaluate(step, label, progress)
  except remote.RemoteError as error:  # nobody took the weights
    reason = f"the evaluation after update {step} was not played: {error}"
    progress.say(reason)
    return reason
  log.write_eval(record)
  keep = run.settings.eval.save_trials
  log.write_eval_trials(step, {arm: _records(played, keep) for arm, played in trials.items()})
  return _nothing([trial for played in trials.values() for trial in played])


def evaluate_checkpoint(
  settings: Settings,
  run_folder: folder.RunFolder,
  step: int | None,
  *,
  client: remote.Client | None = None,
) -> None:
  """--mode=eval: plays the panel with a checkpoint of this folder; adds a record and the report.

  Behind a server a checkpoint is what the method remembers; one that remembers nothing needs none.

  Raises:
    ValueError: every trial was void.
  """
  with (
    memories.copy(run_folder.memory) as memory,  # a checkpoint takes its memory back to its version
    contextlib.closing(runs.Run(settings, client, memory)) as run,
    checkpoint.Checkpoints(
      run_folder.checkpoints, keep=settings.train.keep, keep_every=None
    ) as saved,
    metrics.log_of(run_folder) as log,
    metrics.Progress(0) as progress,
  ):
    if client is None or run.method.memory is not None:
      done, label = run.load(saved, step), "eval"
    else:
      done, label = client.version, "remote"
    run.warmup()
    void = _evaluate(run, log, done, label, progress)
  if hosts.first():
    report.write_report(run_folder)
  if void:
    raise ValueError(void)
