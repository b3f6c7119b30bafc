"""EMPO2 as a whole run: its memory belongs to the run as its weights do."""

import json
import types

import jax
import numpy as np
import pytest

from experiments import base, empo2_lab
from experiments import run as command
from memrl_jax.memory import transfer
from memrl_jax.memory.store import Store
from memrl_jax.training import checkpoint, evaluate, folder, loop, memories, metrics, runs
from memrl_jax.types import Trial
from tests.rollout import trials as make


def config(**changes):
  out = empo2_lab.get_config("smoke")
  out.train.updates = 4
  out.eval.tasks = 4
  out.env.turns = 4
  out.engine.slots = 8
  out.method.p_memory = 1.0
  out.method.mode_per = "group"
  base.override(out, [f"{key}={value}" for key, value in changes.items()])
  return out


def run(path, resume=False, **changes):
  made = config(**changes)
  with folder.RunFolder.create(path, made.to_dict(), resume) as place:
    loop.train(base.settings(made, "empo2_lab", "smoke"), place, quiet=True)
  return place


def remembered(place, tmp_path):
  """The whole history of the memory, as text."""
  out = tmp_path / "export.jsonl"
  with Store(place.memory, read_only=True) as store:
    transfer.export_jsonl(store, out)
    return store.version, out.read_text("utf-8")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return run(tmp_path_factory.mktemp("whole") / "run")


def test_killed_after_it_remembered_and_resumed_equals_uninterrupted_memory_included(
  whole, tmp_path, monkeypatch
):
  real = loop._reason_to_stop

  def killed(run, update, trials, numbers):
    if update == 2:  # its tips are written, its checkpoint is not
      raise KeyboardInterrupt
    return real(run, update, trials, numbers)

  monkeypatch.setattr(loop, "_reason_to_stop", killed)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / "run")
  monkeypatch.setattr(loop, "_reason_to_stop", real)
  place = run(tmp_path / "run", resume=True)
  assert remembered(place, tmp_path) == remembered(whole, tmp_path)
  assert place.metrics.read_bytes() == whole.metrics.read_bytes()
  for path in whole.rollouts.glob("*.jsonl"):
    assert (place.rollouts / path.name).read_bytes() == path.read_bytes()


def test_tips_are_written_read_and_trained_away(whole):
  numbers = metrics.read(whole.metrics)
  assert [record["step"] for record in numbers] == [1, 2, 3, 4]
  assert numbers[0]["memory/shown"] == 0 < numbers[-1]["memory/shown"]
  assert max(record.get("train/ratio_off", 0.0) for record in numbers) > 0
  assert max(record["train/logp_gap_max"] for record in numbers) < 1e-4  # off-policy rows left out
  read = set()
  for path in sorted(whole.rollouts.glob("[0-9]*.jsonl")):
    for trial in metrics.read(path):
      for turn in trial["turns"]:
        read |= {tuple(pair) for pair in turn["reads"]}
        assert turn["off_policy"] == (trial["mode"] == "off" and bool(turn["reads"]))
  with Store(whole.memory, read_only=True) as store:
    assert store.version == 4
    for entry, version in read:  # what a trial read was there, in that version of the memory
      assert any(store.get(tenant, [entry], at=version) for tenant in store.tenants(version))
    readers = [line for entry, _ in read for line in store.lineage(entry).reads]
  assert readers and all(outcome is not None for _, outcome in readers)


def test_nothing_compiles_after_every_mode_was_seen(tmp_path):
  made = base.settings(config(), "empo2_lab", "smoke")
  run = runs.Run(made)
  run.warmup()
  from memrl_jax.envs import pool

  envs = pool.EnvPool(run.family, made.env.options, isolation="inline")
  counts = []
  for update in range(3):
    trials = run.rollout(update, envs)
    run.learn(update, trials)
    run.method.remember(trials)
    counts.append(run.actor.trainer.compiled())
  envs.close()
  run.close()
  assert counts[1] == counts[2]


def test_a_checkpoint_holds_what_was_counted(whole):
  with checkpoint.Checkpoints(whole.checkpoints, keep=9, keep_every=None) as saved:
    extra = saved.extra(saved.latest())
    assert extra["prototypes"].shape == (len(extra["visits"]), 384)
    numbers = metrics.read(whole.metrics)[-1]
    assert len(extra["visits"]) == numbers["memory/states"] > 10
    assert np.issubdtype(extra["visits"].dtype, np.integer)


def test_evaluation_leaves_the_memory_as_it_is(whole, tmp_path):
  before = remembered(whole, tmp_path)
  made = config(
    **{"eval.arms": "(none,memory)", "tips.scope": "task", "eval.options.split": "train"}
  )
  loop.evaluate_checkpoint(base.settings(made, "empo2_lab", "smoke"), whole, None)
  assert remembered(whole, tmp_path) == before


def test_adaptation_fills_a_memory_of_its_own_while_the_weights_stay(whole, tmp_path, capsys):
  before = remembered(whole, tmp_path)
  made = whole.config.read_text("utf-8")
  argv = [
    "--config=experiments/empo2_lab.py:smoke", f"--workdir={whole.path}", "--mode=adapt",
    "--config.train.updates=4", "--config.eval.tasks=4", "--config.env.turns=4",
    "--config.engine.slots=8", "--config.method.p_memory=1.0", "--config.method.mode_per=group",
    "--config.adapt.rounds=2", "--config.adapt.tasks=2", "--config.adapt.episodes=2",
  ]  # fmt: skip
  stored = json.loads(made)
  whole.config.write_text(json.dumps({"experiment": "empo2_lab", "variant": "smoke", **stored}))
  assert command.main(argv) == 0, capsys.readouterr().err
  records = metrics.read(whole.adapt / "rounds.jsonl")
  assert [record["round"] for record in records] == [0, 1, 2]
  assert records[0]["tips_shown"] == 0 < records[1]["tips_shown"]
  assert records[0]["trials"] == 4
  assert remembered(whole, tmp_path) == before
  assert "adaptation of the memory" in whole.report.read_text("utf-8")


def test_an_action_repeated_in_the_same_state_of_an_attempt_is_counted():
  turns = [make.turn(0, "play", t, anchor=a) for t, a in enumerate("sstss")]
  for turn, action in zip(turns, ("left", "left", "left", "up", "left"), strict=True):
    turn.action = action
  turns.append(make.turn(1, "play", 0, anchor="s"))  # another attempt begins anew
  turns[-1].action = "left"
  void = Trial("game", 0, 0, 1, turns=turns[:2], void="crash")
  # Of 6 turns the second and the fifth do what was done in that state before.
  assert evaluate.repeated([Trial("game", 0, 0, 0, turns=turns), void]) == pytest.approx(2 / 6)


def test_the_policy_embedder_is_named_by_the_weights_it_reads():
  made = base.settings(config(**{"memory.embedder": "policy"}), "empo2_lab", "smoke")
  run = runs.Run(made)
  first = run.embedder
  vectors = first.embed(["goal lamp", "at hall chest", "goal lamp"])
  assert vectors.shape == (3, run.actor.cfg.dim) and np.allclose(np.linalg.norm(vectors, axis=1), 1)
  assert np.array_equal(vectors[0], vectors[2]) and vectors[0] @ vectors[1] < 0.999
  norm = jax.tree.map(lambda leaf: leaf + 1e-3, run.actor.initial["final_norm"])
  other = types.SimpleNamespace(
    cfg=run.actor.cfg, chat=run.actor.chat, initial=run.actor.initial | {"final_norm": norm}
  )
  moved = memories.embedder(made, other)
  assert moved.name != first.name and first.name.startswith("policy:tiny:lab:")
  run.close()
