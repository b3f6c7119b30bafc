"""Several hosts: what they exchange is enough, they agree or end, and no loss of one is a hang."""

import copy
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from experiments import base, complementary_rooms, door, lamer_darkroom, mempi_hints, run
from memrl_jax.memory import embed, episodic, experience, experience_config, manager
from memrl_jax.methods import complementary, memrl
from memrl_jax.rollout import credit, pack
from memrl_jax.training import evaluate, folder, hosts, learner, loop, metrics, runs, together
from memrl_jax.types import Recall, Trial
from tests.rollout import trials as make

ROOT = pathlib.Path(hosts.__file__).parents[2]


def played():
  """Four trials of two tasks, one of them void; some long responses, some without tips."""
  trials = [
    make.trial(group, index, [(0.0, 0.0), (1.0 * index,)], success=bool(index))
    for group in range(2)
    for index in range(2)
  ]
  rng = np.random.default_rng(0)
  for trial in trials:
    for turn in trial.turns:
      ids = rng.integers(1, 3, rng.integers(1, 12))
      turn.sample = make.sample(rng.integers(1, 64, rng.integers(2, 30)), ids)
      turn.key, turn.reads = f"key {turn.index}", ((turn.index, 1),)
  trials[1].turns[0].plain = [make.turn(0, "play", 0).messages[0]]
  trials[2].void = "environment crash: x"
  return trials


def as_host(monkeypatch, index, count, gather=None):
  monkeypatch.setattr(hosts, "_job", hosts._Job(count, index, 45.0))
  if gather is not None:
    monkeypatch.setattr(hosts, "gather", gather)


def test_what_travels_is_enough_for_credit_and_metrics_and_never_trained_on():
  whole = played()
  slim = pickle.loads(pickle.dumps([hosts._slim(trial) for trial in copy.deepcopy(whole)]))
  assert len(pickle.dumps(slim)) < 0.8 * len(pickle.dumps(whole))
  shape = credit.Shape(len(whole), 2, 3)
  for estimator in ("gigpo", "ppo"):
    assign = credit.make(credit.CreditConfig(estimator=estimator), shape)
    assert assign(slim) == assign(whole)
    for a, b in zip(slim, whole, strict=True):
      assert [(t.advantage, t.value_target) for t in a.turns] == [
        (t.advantage, t.value_target) for t in b.turns
      ]
  assert evaluate.rollout_metrics(slim) == evaluate.rollout_metrics(whole)
  turns = [turn for trial in slim for turn in trial.turns]
  assert not any(turn.here for turn in turns)
  assert [turn.plain is None for turn in turns] == [
    turn.plain is None for trial in whole for turn in trial.turns
  ]
  assert len(pack.trainable(turns)) == len(pack.trainable([t for x in whole for t in x.turns])) > 0
  with pytest.raises(TypeError):  # whoever takes one for a row of its own must not train on zeros
    pack.pack(pack.trainable(turns), pack.PackConfig())


def test_what_another_model_answered_travels_whole_for_it_learns_from_that():
  (trial,) = [make.trial(0, 0, [(0.0,)])]
  turn = trial.turns[0]
  turn.phase, turn.trained, turn.sample = "advise", False, make.sample([5, 6], [7, 8, 9])
  (told,) = pickle.loads(pickle.dumps([hosts._slim(trial)]))
  assert told.turns[0].sample.prompt_ids.tolist() == [5, 6] and not told.turns[0].here
  assert told.turns[0].sample.logps.tolist() == turn.sample.logps.tolist()


def bank():
  """An experience bank with texts that are about as near to a query."""
  made = experience.ExperienceBank.open(None, embed.Hash(64), experience_config.ExperienceConfig())
  made.put("env", [("", f"red key number {n}") for n in range(5)])
  rest = complementary.Experiences(
    complementary.ComplementaryConfig(), manager.ExperienceManager(manager.ManagerConfig(), made)
  )
  return rest


def test_trials_of_two_hosts_are_shown_and_count_what_those_of_one_are_and_do(monkeypatch):
  first = [Recall("env", f"red key {n // 2}", (9, 0, n, 0)) for n in range(7)]
  later = [Recall("env", "red key", (9, 0, n, 1)) for n in (6, 1, 2)]
  one = bank()
  found = [memo.id for memos in one.reader.recall(first) for memo in memos]
  assert len(set(found)) > 2  # what is shown depends on what was shown
  asked = [memo.id for memos in one.reader.recall(later) for memo in memos]
  one.remember([])
  shown, told, both = [], [], (bank(), bank())
  for index, memory in enumerate(both):
    as_host(monkeypatch, index, 2, lambda own, what: [first[:3], first[3:]])
    mine = [Trial("env", 5, 0, n, mode="guided") for n in hosts.share(7)]
    with together.reading(memory.reader, mine) as read:
      own = [ask for ask in first if ask.draw[2] in hosts.share(7)]
      shown += [memo.id for memos in read.recall(own) for memo in memos]
      own = {n: ask for n, ask in enumerate(later) if ask.draw[2] in hosts.share(7)}
      answers = read.recall(list(own.values()))
      told += [(n, memo.id) for n, memos in zip(own, answers, strict=True) for memo in memos]
      with pytest.raises(RuntimeError, match="must begin at once"):
        read.recall(first[:1])
  assert shown == found and [id for _, id in sorted(told)] == asked
  asides = [item for memory in both for item in memory.reader.asides.items()]
  for memory in both:
    memory.pool(lambda own: asides)
    memory.remember([])
    assert memory.state()[1] == one.state()[1]
  for memory in (one, *both):
    memory.close()


def test_a_host_whose_trials_ask_nothing_lets_no_host_wait(monkeypatch):
  said, memory = [], bank()
  as_host(monkeypatch, 0, 2, lambda own, what: said.append(own) or [*own, []])
  with together.reading(memory.reader, [Trial("env", 5, 0, 0, mode="free")]):
    assert said == [[[]]]
  assert said == [[[]]]
  with together.reading(memory.reader, [Trial("env", 5, 0, 0)]):
    assert len(said) == 1
  assert said == [[[]], [[]]]  # it might have asked
  memory.close()


@pytest.mark.parametrize("number", [0, 1, 3, 7, 8])
def test_shares_are_blocks_that_hold_everything_once(monkeypatch, number):
  parts = []
  for index in range(3):
    as_host(monkeypatch, index, 3)
    parts.append(list(hosts.mine(range(number))))
    assert parts[-1] == list(hosts.share(number))
  assert [one for part in parts for one in part] == list(range(number))
  assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_alone_nothing_is_copied_or_waited_for():
  trials = played()
  assert hosts.exchange(trials, "") is trials and hosts.mine(trials) is not None
  assert hosts.gather([1, 2], "") == [1, 2] and hosts.leave(3) == 3
  with pytest.raises(ValueError, match="Gloo"), hosts.during(3), hosts.waiting("nobody"):
    raise ValueError("Gloo is not at work here")


class Remembers:
  """A run whose memory and weights have these checksums."""

  def __init__(self, **checksums):
    self.checksums = lambda: checksums


def test_hosts_that_remember_something_else_end_and_say_which(monkeypatch):
  def ends(reason):
    raise SystemExit(reason)

  other = {"number of updates": 12, "weights": "a", "memory": "c"}
  as_host(monkeypatch, 0, 3, lambda own, what: [*own, *own, (other, None)])
  monkeypatch.setattr(hosts, "end", ends)
  with pytest.raises(SystemExit, match=r"after update 12 the memory of hosts \[2\] differs"):
    loop._agreed(Remembers(weights="a", memory="b"), 12, None)
  with pytest.raises(SystemExit, match=r"after update 11 the number of updates of hosts \[2\]"):
    loop._agreed(Remembers(weights="a", memory="c"), 11, None)


def test_a_wish_to_stop_of_any_host_is_that_of_all(monkeypatch):
  same = {"number of updates": 3, "memory": "b"}
  as_host(monkeypatch, 0, 2, lambda own, what: [*own, (same, "SIGTERM")])
  assert loop._agreed(Remembers(memory="b"), 3, None) == "SIGTERM"


def test_a_host_without_any_answer_is_named_where_others_have_theirs(monkeypatch):
  trials = played() + played()[:1]  # 2 of the first host, 3 of the second
  as_host(monkeypatch, 0, 2)
  trials[0].void = trials[2].void = "remote policy: none of 1 servers is left"
  assert loop._unanswered(trials) is None
  trials[1].void = "remote policy: x"
  said = "all 2 trials of host 0 were void (remote policy: none of 1 servers is left)"
  assert loop._unanswered(trials) == said
  as_host(monkeypatch, 0, 6)  # more hosts than trials
  assert loop._unanswered(trials).startswith("all 1 trials of host 1 were void")
  as_host(monkeypatch, 0, 1)
  assert loop._unanswered(trials) is None


def test_what_memrl_was_asked_on_any_host_is_counted_once_on_all():
  def asked(queries):
    memory = episodic.Episodic.open(None, embed.Hash(64), episodic.EpisodicConfig())
    made = memrl.Episodes(memrl.MemrlConfig(), memory)
    made.reader.recall([Recall("env", query) for query in queries])
    return made

  both = asked(["a", "b", "c"]), asked(["d"])
  counts = [made.memory.reads() for made in both]
  for made in both:
    made.pool(lambda own: counts)
  states = [made.state()[1]["memory"]["counts"] for made in both]
  assert states[0] == states[1] and states[0]["queries"] == states[0]["empty"] == 4
  both[0].pool(lambda own: own + own)  # nothing was asked since
  assert both[0].state()[1]["memory"]["counts"] == states[0]
  for made in both:
    made.close()


def test_only_the_first_host_writes_the_run_folder(monkeypatch, tmp_path):
  as_host(monkeypatch, 1, 2, lambda own, what: [*own, (True, None)])
  place = folder.RunFolder.create(tmp_path / "run", {"a": 1}, resume=True)
  assert place.resumed  # as the first host found
  with metrics.log_of(place) as log:
    log.write(1, {"x": 1.0}, {})
    log.write_eval({"step": 1})
    log.write_rollouts(1, [{}])
    log.truncate(0)
  place.end_session("finished", 1)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("change", "said"),
  [
    ({"mesh.data": 1}, r"does not hold all \d devices of 2 hosts; set config.mesh.data to -1"),
    ({"mesh.data": -1, "pack.sequences": 6}, r"6 sequences cannot be split over \d data shards"),
    (
      {"mesh.data": -1, "pack.sequences": 8, "replicas.devices": 1},
      "1 devices from number 0 on are to sample, and not",
    ),
    (
      {"mesh.data": -1, "pack.sequences": 8, "loss.kl_coef": 0.1, "reference.mesh.data": 1},
      "none is left for a reference of its own; set config.reference.mesh.data to 0",
    ),
  ],
)
def test_devices_that_do_not_serve_every_host_are_refused(monkeypatch, change, said):
  as_host(monkeypatch, 0, 2)
  config = lamer_darkroom.get_config("smoke")
  base.override(config, [f"{key}={value}" for key, value in change.items()])
  with pytest.raises(ValueError, match=said):
    hosts.check(base.settings(config, "x", "smoke"))


def test_an_agent_is_on_every_host_and_its_mesh_counts_the_devices_of_one(monkeypatch):
  own = jax.devices()[:4]
  monkeypatch.setattr(jax, "local_devices", lambda: own)
  config = mempi_hints.get_config("smoke")

  def settings(*overrides):
    base.override(config, overrides)
    return base.settings(config, "x", "smoke")

  fits = settings("agent.mesh.data=-1")
  door.check_devices(fits)
  assert learner.devices(learner.frozen(fits.agent)) == own
  assert learner.devices(fits) == jax.devices()
  with pytest.raises(
    ValueError, match=r"needs 8 devices and 4 .*config.agent.mesh \(each host has"
  ):
    door.check_devices(settings("agent.mesh.data=8"))


def test_hosts_with_different_agents_are_refused(monkeypatch):
  settings = base.settings(mempi_hints.get_config("smoke"), "x", "smoke")
  monkeypatch.setattr(hosts, "gather", lambda own, what: [*own, *own, "another"])
  with pytest.raises(ValueError, match=r"the agent of hosts \[2\] is another than that of host 0"):
    runs.Run(settings)


@pytest.mark.parametrize(
  ("change", "where", "said"),
  [
    (
      {"train.concurrency": 3},
      None,
      "a host plays up to 8 trials.* config.train.concurrency to at least 8",
    ),
    (
      {"extractor.mesh.data": -1, "extractor.schedule": "async"},
      None,
      "schedule to interleaved, or",
    ),
    (
      {},
      1,
      "the extractor's 3 devices are not all .* and not all of host 0; set config.extractor.mesh",
    ),
    ({}, 0, "set config.mesh.data to -1"),  # nothing to say about the extractor
  ],
)
def test_an_extractor_is_on_all_hosts_or_the_first(monkeypatch, change, where, said):
  as_host(monkeypatch, 0, 2)
  if where is not None:
    devices = np.array([types.SimpleNamespace(process_index=host) for host in (0, where, 0)])
    grid = types.SimpleNamespace(devices=devices, size=3)
    monkeypatch.setattr(hosts.mesh_lib, "make", lambda config: grid)
  config = complementary_rooms.get_config("smoke")
  base.override(config, [f"{key}={value}" for key, value in change.items()])
  with pytest.raises(ValueError, match=said):
    hosts.check(base.settings(config, "x", "smoke"))


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--hosts=2"], "several hosts need --hosts=N, --coordinator=HOST:PORT and --host=I"),
    (["--hosts=auto", "--host=1"], "several hosts need"),
    (["--hosts=2", "--coordinator=h:1", "--host=2"], r"--host=2 must be in 0..1"),
    (["--hosts=auto", "--mode=export"], "--mode=export is work for one process"),
    (["--hosts=auto", "--host_timeout=1"], "--host_timeout=1 is too short"),
  ],
)
def test_flags_that_do_not_go_together_are_refused(flags, said):
  with pytest.raises(ValueError, match=said):
    run.parse(["--config=x", *flags])


# Two processes.

PAIR = """
import json, os, pathlib, sys, time
import jax, numpy as np
from memrl_jax.rollout import pack
from memrl_jax.training import hosts, mesh
address, me, what, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
hosts.join(address, 2, me, seconds=10)
hosts.keeps_checkpoints(folder)

def talk():
  big = np.random.default_rng(me).integers(0, 256, (me + 1) * 200_000, dtype=np.uint8)  # some blocks
  found = hosts.gather([me, big.tobytes()], "a talk")
  assert found[0::2] == [0, 1] and [len(x) for x in found[1::2]] == [200_000, 400_000]
  assert found[2 * me + 1] == big.tobytes() and hosts.gather([1] * me, "a talk") == [1]
  assert hosts.of_first(lambda: f"by {me}", "a talk") == "by 0"
  def fails():
    raise OSError("disk full")
  try:
    hosts.of_first(fails, "a talk")
    raise SystemExit("no error came")
  except OSError as error:
    assert str(error) == "disk full"
  grid = mesh.make(mesh.MeshConfig(data=-1))
  own = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * me
  placed = mesh.place_batch(grid, {"x": own})["x"]
  assert placed.shape == (4, 3) and not placed.is_fully_addressable
  double = jax.jit(lambda x: 2 * x)(placed)
  assert mesh.rows(grid, double).tolist() == (2 * own).tolist()
  count = mesh.place_params(grid, {"count": jax.numpy.zeros((), int)})["count"]  # of an optimiser that has not begun
  assert [int(shard.data) for shard in count.addressable_shards] == [0]
  whole = mesh.local({"w": double})["w"]
  assert np.asarray(whole).tolist() == [[0, 2, 4], [6, 8, 10], [20, 22, 24], [26, 28, 30]]

talk()
(folder / f"{what}{me}").touch()
if what == "talk":
  with hosts.during(3):  # an error of another kind is nobody's loss
    try:
      with hosts.waiting("more"):
        raise ValueError("a bug")
    except ValueError as error:
      assert str(error) == "a bug"
elif what == "lost":
  time.sleep(60)  # not waiting for anybody
hosts.leave(0)
"""


def pair(tmp_path, what):
  (tmp_path / "4").mkdir()
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
  return [
    subprocess.Popen(
      [sys.executable, "-c", PAIR, f"127.0.0.1:{port}", str(me), what, str(tmp_path)],
      env=env,
      stderr=subprocess.PIPE,
      text=True,
    )
    for me in range(2)
  ]


def test_two_hosts_hear_each_other_in_order_and_end_together(tmp_path):
  processes = pair(tmp_path, "talk")
  errors = [process.communicate(timeout=120)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], errors


def test_a_host_that_is_killed_ends_the_other_with_a_reason_even_one_that_waits_for_nobody(
  tmp_path,
):
  first, second = processes = pair(tmp_path, "lost")
  deadline = time.monotonic() + 120
  while not all((tmp_path / f"lost{me}").exists() for me in range(2)):
    assert all(p.poll() is None for p in processes) and time.monotonic() < deadline
    time.sleep(0.05)
  os.kill(first.pid, signal.SIGKILL)
  error = second.communicate(timeout=40)[1]
  first.communicate()
  assert second.returncode == hosts.LOST, error
  assert "host 1 of 2 ends: native code stopped" in error.splitlines()[-1]
  assert f"the newest complete checkpoint is {tmp_path}/4, and --resume goes on" in error


LATE = """
import pathlib, sys, threading, time
from memrl_jax.training import hosts
hosts._job, hosts.PATIENCE = hosts._Job(2, 0, 10.0), 0.05
threading.Thread(target=hosts._watch, daemon=True).start()
hosts.keeps_checkpoints(pathlib.Path(sys.argv[1]))
with hosts.during(7), hosts.waiting("what the devices compute"):
  time.sleep(60)
"""


def test_nobody_waits_for_ever_for_hosts_that_are_alive(tmp_path):
  command = [sys.executable, "-c", LATE, str(tmp_path)]
  env = {**os.environ, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=50)
  assert done.returncode == hosts.LOST
  assert done.stderr.startswith(
    "host 0 of 2 ends: the others are alive and did not come in update 7 while it waited for what the devices "
    "compute, since"
  )
  assert "there is no checkpoint yet, and --resume begins anew" in done.stderr
