"""Rollouts ahead of the learner: whose weights sample is a function of the update's number, and nothing else."""

import functools
import json
import os
import signal
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import base, empo2_lab, reflexion_darkroom
from memrl_jax.envs import pool
from memrl_jax.ops import ratios
from memrl_jax.sampling import engine, remote
from memrl_jax.training import checkpoint, hosts, lagged, metrics, objective, runs
from tests.training import test_loop

UPDATES = 4
LAG = {
  "train.max_lag": 2, "loss.old_logps": "trainer", "train.rollouts_every": 1, "eval.tasks": 4,
  "eval.at_start": False,
}  # fmt: skip


def settings(**changes):
  return base.settings(test_loop.config(**(LAG | changes)), "lamer_darkroom", "smoke")


def run(path, resume=False, **changes):
  return test_loop.run(path, resume, **(LAG | changes))


def records(trials):
  return [json.loads(json.dumps(trial.to_json())) for trial in trials]


@functools.cache
def like():
  made = runs.Run(settings())
  return made.actor.saved() | {"behind": made.kept.like(made.actor.trained)}


def arrays(place):
  """Those of the last checkpoint."""
  with checkpoint.Checkpoints(place.checkpoints, keep=9, keep_every=None) as saved:
    return saved.restore(UPDATES, like())[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  place, status = run(tmp_path_factory.mktemp("whole") / "run")
  assert status == "finished"
  return place


def test_the_thread_samples_what_one_thread_does_with_weights_that_old(whole):
  """The reference keeps every weight and takes turns: W0, W0, W0, W1."""
  serial = runs.Run(settings())
  serial.warmup()
  kept, programs = [], 0
  with pool.EnvPool(serial.family, serial.settings.env.options) as envs:
    for update in range(UPDATES):
      kept.append(jax.tree.map(jnp.copy, serial.actor.trained))
      older = kept[max(0, update - 2)]
      trials = serial.rollout(update, envs, functools.partial(serial.actor.sync, older))
      serial.learn(update, trials)
      assert records(trials) == metrics.read(whole.rollout(update + 1)), f"update {update}"
      programs = programs or (engine.compiled(), serial.actor.trainer.compiled())
  assert programs == (engine.compiled(), serial.actor.trainer.compiled())
  for found, wanted in zip(arrays(whole)["behind"], kept[-2:], strict=True):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_metrics_say_how_stale_the_rows_are(whole):
  """Without lag trainer and sampler agree to 1e-4; two updates apart they do not."""
  found = metrics.read(whole.metrics)
  assert [record["train/lag"] for record in found] == [0, 1, 2, 2]
  gaps = [record["train/logp_gap_max"] for record in found]
  assert gaps[0] < 1e-4 and min(gaps[1:]) > 0.02
  assert all(0 < record["train/logp_gap"] < record["train/logp_gap_max"] for record in found)
  assert found[0]["train/truncated"] == 0 and all(r["train/truncated"] < 0.2 for r in found)
  for record in metrics.read(whole.timing):
    assert record["seconds/rollout"] > 0 and record["seconds/wait"] >= 0


class Killed(Exception):
  pass


def stopping(monkeypatch, after, act):
  """`act` happens while update `after` + 1 is trained, with rollouts under way."""
  learn = runs.Run.learn

  def acting(self, update, trials):
    if update == after:
      act()
    return learn(self, update, trials)

  monkeypatch.setattr(runs.Run, "learn", acting)


def kill():
  raise Killed


def test_stopped_in_the_middle_and_resumed_equals_uninterrupted(whole, tmp_path, monkeypatch):
  """First by SIGTERM, then killed; what was under way is played again with the weights of the checkpoint."""
  opened, released = [], []
  open_, release = pool.EnvPool.open, pool.EnvPool.release
  monkeypatch.setattr(pool.EnvPool, "open", lambda s: opened.append(h := open_(s)) or h)
  monkeypatch.setattr(pool.EnvPool, "release", lambda s, h: (released.append(h), release(s, h)))
  path, often, saves = tmp_path / "run", {"train.checkpoint_every": 1}, []
  with monkeypatch.context() as patch:
    save = runs.Run.save
    patch.setattr(runs.Run, "save", lambda *a: (saves.append(a[-1]), save(*a)))
    stopping(patch, 0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    _, status = run(path, **often)
    assert "SIGTERM after update 1" in status and saves == [1]
  with monkeypatch.context() as patch:
    stopping(patch, 2, kill)
    with pytest.raises(Killed):
      run(path, resume=True, **often)
  assert sorted(opened) == sorted(released) and opened
  assert not [t for t in threading.enumerate() if t.name.startswith("rollouts")]
  place, status = run(path, resume=True, **often)
  assert status == "finished" and test_loop.files(place) == test_loop.files(whole)
  jax.tree.map(np.testing.assert_array_equal, arrays(place), arrays(whole))


@pytest.mark.slow  # compiles for another device
def test_a_sampler_on_a_device_of_its_own_plays_the_same(whole, tmp_path):
  place, _ = run(tmp_path / "run", **{"replicas.first": 1, "replicas.devices": 1})
  assert test_loop.files(place) == test_loop.files(whole)


def test_a_rollout_under_way_is_given_up_at_once():
  started, over = threading.Event(), threading.Event()

  def endless():
    started.set()
    return [] if not over.wait(0.01) else 1 / 0

  def rollout(update, envs, hand, leash):
    policy = leash(types.SimpleNamespace(poll=endless))
    while update:
      policy.poll()
    return []

  sampler = types.SimpleNamespace(stats=engine.Stats())
  actor = types.SimpleNamespace(trained=jnp.zeros(1), engine=sampler)
  stub = types.SimpleNamespace(
    settings=settings(), kept=lagged.Kept(2), actor=actor, client=None, rollout=rollout
  )
  rollouts = lagged.Rollouts(stub, None, 0)
  assert rollouts.take(0).trials == [] and started.wait(10)
  closing = threading.Thread(target=rollouts.close, daemon=True)
  closing.start()
  closing.join(10)
  given_up = not closing.is_alive()
  over.set()
  assert given_up


def on_two_hosts(monkeypatch, client, fails=()):
  """A run of four updates, two ahead, and what happens in it: (what, whose weights or which update)."""
  monkeypatch.setattr(hosts, "_job", hosts._Job(2, 0, 45.0))
  events, done = [], []

  def handed(trained):
    assert threading.current_thread() is threading.main_thread()
    assert client is None or len(done) == sum(what == "met" for what, _ in events)  # nobody plays
    events.append(("hand", number := int(trained[0])))
    if len(events) in fails:
      raise remote.RemoteError("no server took new weights")
    return lambda: played_with.append(number)

  def rollout(update, envs, hand, leash):
    hand()
    done.append(update)
    return []

  played_with = []
  actor = types.SimpleNamespace(handed=handed, engine=None if client else types.SimpleNamespace(
    stats=engine.Stats()))  # fmt: skip
  run = types.SimpleNamespace(
    settings=settings(), kept=lagged.Kept(2), actor=actor, client=client, rollout=rollout
  )
  with lagged.Rollouts(run, None, 0) as rollouts:
    for update in range(UPDATES):
      actor.trained = jnp.full(1, update)
      rollouts.take(update)
      events.append(("met", update))
      rollouts.met(update)
  return events, played_with


@pytest.mark.parametrize("served", [False, True])
def test_hosts_hand_over_at_one_place_of_the_schedule_and_never_beside_it(served, monkeypatch):
  """To engines as early as there are weights; to servers when all hosts have played, and nobody is asking."""
  client = types.SimpleNamespace(counts=remote.Counts(), push_s=0.0, close=lambda: None)
  events, played_with = on_two_hosts(monkeypatch, client if served else None)
  met = [("met", update) for update in range(UPDATES)]
  early = [("hand", 0), met[0], ("hand", 1), *met[1:]]
  between = [("hand", 0), met[0], ("hand", 0), met[1], ("hand", 0), met[2], ("hand", 1), met[3]]
  assert events == (between if served else early)
  assert played_with == [0, 0, 0, 1]


def test_a_server_that_takes_nothing_is_heard_of_by_who_wants_its_update(monkeypatch):
  client = types.SimpleNamespace(counts=remote.Counts(), push_s=0.0, close=lambda: None)
  kept, take = [], lagged.Rollouts.take

  def taking(self, update):
    kept.append(update)
    return take(self, update)

  monkeypatch.setattr(lagged.Rollouts, "take", taking)
  with pytest.raises(remote.RemoteError, match="no server took"):
    on_two_hosts(monkeypatch, client, fails={3})  # the hand-over for update 1, while 0 is learned
  assert kept == [0, 1]


def test_an_error_of_a_rollout_comes_out_of_the_run(tmp_path, monkeypatch):
  def broken(self, update, *rest):
    raise Killed(f"update {update}")

  monkeypatch.setattr(runs.Run, "rollout", broken)
  with pytest.raises(Killed, match="update 0"):
    run(tmp_path / "run")


def test_methods_that_remember_or_train_nothing_are_refused_in_a_sentence():
  for module, why in (
    (empo2_lab, "remembers after every update what the next rollout reads"),
    (reflexion_darkroom, "trains nothing"),
  ):
    config = module.get_config("smoke")
    config.train.max_lag = 1
    with pytest.raises(ValueError, match=why) as caught:
      base.settings(config)
    assert "config.train.max_lag" in str(caught.value)


# A bandit: a row is one token, the arm; theta are the arms' logits.

ARMS = np.log([0.5, 0.3, 0.2])  # the policy of now
OLDER = np.log([0.25, 0.25, 0.5])  # the policy that sampled
REWARD = np.array([1.0, -1.0, 2.0])


@functools.partial(jax.jit, static_argnames="cap")
def gradient(theta, older, arms, advantage, *, cap):
  """d loss / d theta of rows that `older` sampled, before any step has moved theta."""
  config = objective.LossConfig(old_logps="trainer", tis_cap=cap)
  mask_B1 = jnp.ones((len(arms), 1), bool)

  def logps(theta):
    return jax.nn.log_softmax(theta)[arms][:, None]

  def loss(moved):
    old_B1, zero_B1 = logps(theta), jnp.zeros((len(arms), 1))
    weight_B1 = ratios.truncated_importance_weight(old_B1, logps(older), mask_B1, cap=cap)
    tokens = objective.Tokens(
      logps(moved), old_B1, weight_B1, zero_B1, zero_B1, mask_B1, advantage,
      jnp.zeros(len(arms), bool),
    )  # fmt: skip
    opened, _ = objective.policy_loss(config, tokens, max_tokens=1)
    return opened.total / opened.count

  return jax.grad(loss)(theta)


def expected(cap):
  """The mean of the gradient over what `OLDER` samples: a quarter each of the first two, half the third."""
  arms = np.array([0, 1, 2, 2])
  return gradient(jnp.asarray(ARMS), jnp.asarray(OLDER), arms, REWARD[arms], cap=cap)


def test_rows_of_older_weights_push_as_rows_of_the_present_ones_would():
  # sum_a p A = .5 - .3 + .4 = .6; the policy gradient is p_a (A_a - .6) = .2, -.48, .28; the loss is its negative.
  np.testing.assert_allclose(expected(cap=10.0), [-0.2, 0.48, -0.28], atol=1e-6)
  # Weights p / b = 2, 1.2, .4 cut to 1.5, 1.2, .4: b w A = .375, -.3, .4, together .475, and
  # the gradient is b_a w_a A_a - p_a .475 = .1375, -.4425, .305.
  np.testing.assert_allclose(expected(cap=1.5), [-0.1375, 0.4425, -0.305], atol=1e-6)


@pytest.mark.parametrize("lag", [1, 3])
def test_a_bandit_is_learned_from_rows_of_older_weights(lag):
  rng, theta, kept = np.random.default_rng(0), jnp.asarray(ARMS), lagged.Kept(lag)
  tx = optax.adam(0.1)
  state = tx.init(theta)
  for update in range(60):
    kept.keep(update, theta)
    older = kept.of(update)
    arms = rng.choice(3, 32, p=np.asarray(jax.nn.softmax(older)))
    advantage = REWARD[arms] - REWARD[arms].mean()
    change, state = tx.update(gradient(theta, older, arms, advantage, cap=2.0), state)
    theta = optax.apply_updates(theta, change)
  assert jax.nn.softmax(theta)[2] > 0.9  # from .2
