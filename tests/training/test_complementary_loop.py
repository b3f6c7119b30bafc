"""Complementary RL as a whole run: two models, one bank, and schedules that repeat bit for bit."""

import json
import time

import jax
import numpy as np
import pytest

from experiments import base, complementary_rooms
from memrl_jax.memory import transfer
from memrl_jax.memory.store import Store
from memrl_jax.training import extractor, folder, learner, loop, metrics, runs


def config(**changes):
  out = complementary_rooms.get_config("smoke")
  out.train.updates = 4
  out.train.group_size = 8
  out.eval.tasks = 4
  out.env.kind = "maze"  # small and with one hatch, so that some attempts succeed
  out.env.side = 5
  out.env.choices = 1
  out.env.turns = 6
  out.method.warmup = 1
  out.experience.merge_every = 2
  out.experience.batch = 2
  out.experience.cool_down = 0
  base.override(out, [f"{key}={value}" for key, value in changes.items()])
  return out


def run(path, resume=False, **changes):
  made = config(**changes)
  with folder.RunFolder.create(path, made.to_dict(), resume) as place:
    loop.train(base.settings(made, "complementary_rooms", "smoke"), place, quiet=True)
  return place


def bank(place, tmp_path):
  """The whole history of the bank, as text."""
  out = tmp_path / "export.jsonl"
  with Store(place.memory, read_only=True) as store:
    transfer.export_jsonl(store, out)
    return store.version, out.read_text("utf-8")


def same(one, two, tmp_path):
  assert bank(one, tmp_path) == bank(two, tmp_path)
  assert one.metrics.read_bytes() == two.metrics.read_bytes()
  for path in two.rollouts.glob("*.jsonl"):
    assert (one.rollouts / path.name).read_bytes() == path.read_bytes()


SCHEDULES = ("interleaved", "pipelined")


@pytest.fixture(scope="module", params=SCHEDULES)
def whole(request, tmp_path_factory):
  path = tmp_path_factory.mktemp(request.param) / "run"
  return request.param, run(path, **{"extractor.schedule": request.param})


def test_both_models_learn_from_what_the_other_does(whole):
  _, place = whole
  numbers = metrics.read(place.metrics)
  assert numbers[0]["rollout/guided_trials"] == 0  # warm-up
  assert "train/loss" not in numbers[0] and "train/loss" in numbers[-1]
  assert numbers[-1]["bank/entries"] > 0 and numbers[-1]["extractor/updates"] > 0
  assert max(n.get("train/logp_gap_max", 0.0) for n in numbers) < 1e-4
  ended = metrics.read(place.eval)[-1]["arms"]
  assert ended["memory"]["given"] > 0 == ended["none"]["given"]


def test_killed_after_the_bank_was_written_and_resumed_equals_uninterrupted(
  whole, tmp_path, monkeypatch
):
  schedule, place = whole
  real = loop._reason_to_stop

  def killed(run, update, trials, numbers):
    if update == 2:  # the bank has this update, no checkpoint has
      raise KeyboardInterrupt
    return real(run, update, trials, numbers)

  changes = {"extractor.schedule": schedule}
  monkeypatch.setattr(loop, "_reason_to_stop", killed)
  with pytest.raises(KeyboardInterrupt):
    run(tmp_path / "run", **changes)
  monkeypatch.setattr(loop, "_reason_to_stop", real)
  same(run(tmp_path / "run", resume=True, **changes), place, tmp_path)


def test_a_pipelined_run_does_not_depend_on_how_fast_the_extractor_is(whole, tmp_path, monkeypatch):
  schedule, place = whole
  if schedule == "interleaved":
    pytest.skip("there is one thread")
  real = extractor.Extractor._answer

  def slow(self, jobs):
    time.sleep(0.5)
    real(self, jobs)

  monkeypatch.setattr(extractor.Extractor, "_answer", slow)
  same(run(tmp_path / "run", **{"extractor.schedule": schedule}), place, tmp_path)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two devices")
def test_models_on_devices_of_their_own_give_the_same_run(whole, tmp_path):
  schedule, place = whole
  apart = run(tmp_path / "run", **{"extractor.schedule": schedule, "extractor.mesh.first": 1})
  same(apart, place, tmp_path)


def test_old_samples_are_corrected_by_their_ratio(tmp_path):
  """Samples that an older extractor wrote have ratios other than 1, and CISPO's clip acts on some."""
  place = run(
    tmp_path / "run",
    **{
      "train.updates": 10, "extractor.optim.learning_rate": 0.003, "extractor.optim.beta2": 0.9,
      "experience.batch": 3, "experience.capacity": 8,
    },
  )  # fmt: skip
  trained = [n for n in metrics.read(place.metrics) if n.get("extractor/version_lag", 0) > 0]
  assert any(abs(n["extractor/ratio"] - 1) > 1e-3 for n in trained)
  assert any(n["extractor/clipped"] > 0 for n in trained)


def test_an_asynchronous_run_ends_and_trains(tmp_path):
  place = run(
    tmp_path / "run",
    **{"extractor.schedule": "async", "manager.deterministic": "false", "train.updates": 6},
  )
  numbers = metrics.read(place.metrics)
  assert [n["step"] for n in numbers] == [1, 2, 3, 4, 5, 6]
  assert sum(n["extractor/answered"] for n in numbers) > 0 and numbers[-1]["bank/entries"] > 0


@pytest.mark.parametrize(
  ("baseline", "trains", "written"),
  [
    ({"method.guided": "0", "method.writes": "false"}, True, False),
    ({"extractor.train": "false"}, True, True),
    ({"method.actor": "false"}, False, True),
    ({"method.groups": "pooled"}, True, True),
    ({"method.guided": "1"}, True, True),
  ],
  ids=["no experience", "frozen extractor", "experience only", "pooled", "all guided"],
)
def test_baselines_are_overrides(baseline, trains, written, tmp_path):
  place = run(tmp_path / "run", **{"train.updates": 3, **baseline})
  numbers = metrics.read(place.metrics)
  assert any("train/loss" in n for n in numbers) == trains
  assert any(n.get("extractor/written", 0) > 0 for n in numbers) == written
  trained = any("extractor/updates" in n for n in numbers)
  assert trained == (written and baseline.get("extractor.train") != "false")


def test_a_static_bank_is_read_and_never_written(tmp_path):
  first = run(tmp_path / "first", **{"train.updates": 2})
  out = tmp_path / "bank.jsonl"
  with Store(first.memory, read_only=True) as store:
    transfer.export_jsonl(store, out)
    texts = {entry.text for entry in store.entries(None)}
  place = run(
    tmp_path / "run",
    **{"method.bank": str(out), "method.writes": "false", "method.warmup": 0, "train.updates": 2},
  )
  with Store(place.memory, read_only=True) as store:
    assert {entry.text for entry in store.entries(None)} == texts
  assert metrics.read(place.metrics)[0]["rollout/guided_trials"] > 0
  trials = [json.loads(line) for line in (place.rollouts / "000001.jsonl").open()]
  assert any(turn["reads"] for trial in trials for turn in trial["turns"])


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"method.guided": "0"}, "nobody is guided"),
    ({"extractor.sampling.top_p": "0.9"}, "top_p 1"),
    ({"manager.deterministic": "false"}, "repeats bit for bit"),
    ({"extractor.sampling.reflect_tokens": "512"}, "config.extractor.pack"),
    ({"method.imitate_every": "1", "method.questions": "1"}, "cannot be imitated"),
    ({"extractor.schedule": "never"}, "choose one of interleaved"),
  ],
)
def test_settings_that_do_not_fit_are_one_sentence(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    base.settings(config(**changes), "complementary_rooms", "smoke")


def test_nothing_is_compiled_after_the_first_updates():
  from memrl_jax.envs import pool

  run_ = runs.Run(base.settings(config(), "complementary_rooms", "smoke"))
  run_.warmup()
  counts = []
  with pool.EnvPool(run_.family, run_.settings.env.options) as envs:
    for update in range(5):
      trials = run_.rollout(update, envs)
      run_.learn(update, trials)
      run_.remember(update, trials)
      counts.append(run_.actor.trainer.compiled() + run_.extractor.model.trainer.compiled())
  assert counts[2] == counts[-1] and np.all(np.diff(counts) >= 0)
  run_.close()


def test_the_weights_of_an_update_under_way_are_in_no_checkpoint(tmp_path, monkeypatch):
  """Or a run that is resumed from it would make the update a second time."""
  seen, real = [], extractor.Extractor._train

  def watched(self, training):
    before = self.model.state
    update = self.model.trainer.update

    def step(*arguments):
      made = update(*arguments)
      seen.append(self.model.state is before)
      return made

    def got(history):
      seen.append(self.model.state is before)
      return history

    with monkeypatch.context() as patch:
      patch.setattr(self.model.trainer, "update", step)
      patch.setattr(learner.jax, "device_get", lambda x, get=jax.device_get: got(get(x)))
      made = real(self, training)
    seen.append(self.model.state is before)  # until it is handed over
    return made

  monkeypatch.setattr(extractor.Extractor, "_train", watched)
  run(tmp_path / "run")
  assert seen and all(seen)
