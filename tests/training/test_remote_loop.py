"""Training with a sampler on a server is the local training: the same trials, update for update."""

import json

import numpy as np
import pytest

from experiments import run
from memrl_jax.sampling import serve
from memrl_jax.training import metrics
from tests.sampling.tiny_engine import model, new_engine, text


def flags(place, *more):
  return [
    "--config=experiments/lamer_darkroom.py:smoke", f"--workdir={place}", "--config.eval.tasks=4",
    "--config.engine.slots=8", "--config.eval.at_start=false", *more,
  ]  # fmt: skip


def ids_of(place, update):
  records = metrics.read(place / "rollouts" / f"{update:06d}.jsonl")
  return [[turn["ids"] for turn in record["turns"]] for record in records]


def test_two_updates_through_a_server_are_two_local_updates(tmp_path):
  local, away = tmp_path / "local", tmp_path / "away"
  assert run.main(flags(local)) == 0
  with serve.Server(model()[0], new_engine(), text(), model="tiny") as server:
    remote = [
      f"--config.remote.url={server.url}",
      f"--config.remote.weights={tmp_path / 'weights'}",
    ]
    assert run.main(flags(away, *remote)) == 0
    assert server.worker.version == 3  # at the start and after either update
  for update in (1, 2):
    assert ids_of(away, update) == ids_of(local, update)
  for here, there in zip(
    metrics.read(local / "metrics.jsonl"), metrics.read(away / "metrics.jsonl"), strict=True
  ):
    assert there["train/logp_gap_max"] < 1e-4
    assert there["rollout/rows"] == here["rollout/rows"] > 0
    assert there["train/entropy"] == pytest.approx(here["train/entropy"], abs=1e-4)
  (timing,) = metrics.read(away / "timing.jsonl")[-1:]
  assert timing["remote/untrainable"] == timing["remote/failed"] == timing["remote/stale"] == 0
  evals = [json.loads(line)["arms"] for line in (away / "eval.jsonl").read_text().splitlines()]
  assert np.isfinite(evals[-1]["memory"]["score"])
