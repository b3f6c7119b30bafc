"""Training adapters through the whole loop: only they move, sampler and trainer agree, export merges."""

import jax
import numpy as np
import pytest

from experiments import run
from memrl_jax.models import tiny, weights
from memrl_jax.training import metrics


def flags(place, *more):
  return [
    "--config=experiments/lamer_darkroom.py:smoke", f"--workdir={place}", "--config.eval.tasks=4",
    "--config.engine.slots=8", "--config.eval.at_start=false", "--config.lora.rank=2",
    "--config.optim.learning_rate=1e-2", "--config.loss.kl_coef=0.01",
    "--config.train.minibatches=1", *more,
  ]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  place = tmp_path_factory.mktemp("lora") / "run"
  assert run.main(flags(place)) == 0
  return place


def test_the_sampler_runs_the_merged_weights_and_the_reference_is_the_base(trained):
  first, second = metrics.read(trained / "metrics.jsonl")
  assert max(first["train/logp_gap_max"], second["train/logp_gap_max"]) < 1e-4
  assert abs(first["train/kl_ref"]) < 1e-6 < second["train/kl_ref"]


def test_export_has_the_trained_policy_and_its_tokenizer(trained, capsys):
  assert run.main(flags(trained, "--mode=export")) == 0
  folder = trained / "export-000002"
  assert str(folder) in capsys.readouterr().out
  cfg, params = weights.load_directory(folder)
  _, base = weights.load_directory(tiny.directory("darkroom"))
  moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, base)
  assert min(moved["layers"][name] for name in ("qkv", "out", "gate_up", "down")) > 1e-4
  assert moved["embedding"] == moved["final_norm"]["weight"] == 0
  assert cfg == weights.load_directory(tiny.directory("darkroom"))[0]
  assert tiny.is_tiny(folder) and (folder / "tokenizer.model").is_file()
  again = ["--config=experiments/reflexion_darkroom.py:smoke", "--config.eval.tasks=4"]
  more = [f"--config.model.checkpoint={folder}", f"--workdir={trained.parent / 'again'}"]
  assert run.main([*again, *more]) == 0  # a checkpoint like any other


def test_adapters_are_refused_beside_a_critic(tmp_path, capsys):
  words = ["--config=experiments/ppo_darkroom.py:smoke", "--config.lora.rank=2"]
  assert run.main([*words, f"--workdir={tmp_path / 'run'}"]) == 2
  assert "trains a critic" in capsys.readouterr().err.replace("\n", " ")
