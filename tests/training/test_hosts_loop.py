"""A run on two hosts is the run on one: killed, resumed, stopped by a signal to one of them, and moved to one."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from memrl_jax.memory import reader
from memrl_jax.sampling import serve
from memrl_jax.training import hosts, metrics
from tests.sampling.tiny_engine import model, new_engine, text
from tests.training import test_mempi_loop

ROOT = pathlib.Path(hosts.__file__).parents[2]
UPDATES = 4
LAID_OUT = {  # how rows were packed
  f"{who}/{name}"
  for who in ("train", "extractor")
  for name in ("micro_batches", "tokens", "shared")
}
FLAGS = [
  f"--config.train.updates={UPDATES}",
  "--config.train.checkpoint_every=1",
  "--config.eval.at_start=False",
  "--config.eval.tasks=2",
  "--config.engine.slots=8",
  "--config.engine.prefill_rows=(8,)",
  "--config.mesh.data=-1",
]
AHEAD = ["--config.train.max_lag=1", "--config.loss.old_logps=trainer"]
SPLIT = "--config.mesh.fsdp=2"  # no host has all weights
COMPLEMENTARY = [  # some attempts succeed with experience, and the extractor learns from that
  "--config.train.group_size=8",
  "--config.env.choices=1",
  "--config.env.turns=6",
  "--config.experience.merge_every=2",
  "--config.experience.cool_down=0",
  "--config.extractor.engine.slots=8",
  "--config.extractor.engine.prefill_rows=(8,)",
  "--config.extractor.loss.kl_coef=0",
]
# An actor that asks the extractor instead of every other thing it wants to say, and pay that is never the same.
ASKS = """
import sys
from experiments import run
from memrl_jax.envs import extracting
from memrl_jax.methods import complementary
extracting.question = lambda text: "which way?" if sum(map(ord, text)) % 2 else ""
complementary.pay = lambda config, story, won: sum(map(ord, story.messages[-1].content)) % 5 / 2 - 1
sys.exit(run._alone(run.main()))
"""


def start(config, path, count, *more, program=("experiments/run.py",)):
  """The processes of a run on `count` hosts."""
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  env = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}  # a device a process
  command = [sys.executable, *program, f"--config=experiments/{config}.py:smoke"]
  command += [f"--workdir={path}", *FLAGS, *more]
  which = [f"--hosts={count}", f"--coordinator=127.0.0.1:{port}"]
  return [
    subprocess.Popen(
      command + ([*which, f"--host={host}"] if count > 1 else []),
      cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )
    for host in range(count)
  ]  # fmt: skip


def ended(processes, timeout=300):
  """(exit codes, what was said on stdout, on stderr)."""
  said = [process.communicate(timeout=timeout) for process in processes]
  return [process.returncode for process in processes], *zip(*said, strict=True)


def wait_for(path, updates, processes):
  """Until so many updates are written."""
  deadline = time.monotonic() + 300
  while len(metrics.read(path / "metrics.jsonl")) < updates:
    assert all(process.poll() is None for process in processes), ended(processes)
    assert time.monotonic() < deadline
    time.sleep(0.02)


def assert_same_run(one, other):
  mine, theirs = (metrics.read(path / "metrics.jsonl") for path in (one, other))
  assert len(mine) == len(theirs) == UPDATES
  for a, b in zip(mine, theirs, strict=True):
    assert a.keys() == b.keys()
    for name in a.keys() - LAID_OUT:
      np.testing.assert_allclose(a[name], b[name], atol=1e-5, rtol=1e-5, err_msg=name)
  evals = [metrics.read(p / "eval.jsonl") for p in (one, other)]
  for record in (*evals[0], *evals[1]):
    record.pop("server", None)
  assert evals[0] == evals[1]
  rollouts = [sorted(path.name for path in (p / "rollouts").iterdir()) for p in (one, other)]
  assert rollouts[0] == rollouts[1]
  for name in rollouts[0]:
    records = [metrics.read(p / "rollouts" / name) for p in (one, other)]
    for a, b in zip(*records, strict=True):  # whole, whoever played it
      assert [(t["messages"], t["prompt_ids"], t["ids"]) for t in a["turns"]] == [
        (t["messages"], t["prompt_ids"], t["ids"]) for t in b["turns"]
      ]
      assert all(len(turn["logps"]) == len(turn["ids"]) for turn in a["turns"])


def newest(path):
  steps = [int(one.name) for one in (path / "checkpoints").glob("*") if one.name.isdigit()]
  return max(steps, default=0)


def stopped(path, processes, done):
  """What became of two hosts, of which the second is asked to stop once there is a checkpoint after `done`."""
  while newest(path) == done:  # it is at work, whose handlers of signals are ours
    assert all(process.poll() is None for process in processes), ended(processes)
    time.sleep(0.02)
  processes[1].send_signal(signal.SIGTERM)
  codes, said, errors = ended(processes)
  if newest(path) < UPDATES:
    assert codes == [3, 3], errors
    assert f"stopped by SIGTERM after update {newest(path)}" in said[0]
    assert all(line.startswith("[Gloo]") for line in said[1].splitlines())  # the others are silent
    assert len(metrics.read(path / "metrics.jsonl")) == newest(path)


# Mem-pi gathers, imitates, and has adapted once when it dies, so the weights of stage 1 come from a checkpoint.
MEMPI = ["--config.method.distil=1", "--config.method.gate=off"]
MANAGER = ["--config.method.teach=1", "--config.lora.rank=4"]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("config", "victim", "after", "more"),
  [
    ("lamer_darkroom", 1, 2, []),
    ("empo2_lab", 0, 2, []),
    ("mempi_lab", 1, 3, MEMPI),
    ("memoryr1_hints", 0, 2, MANAGER),
    ("lamer_darkroom", 0, 2, AHEAD),
    ("complementary_rooms", 0, 2, [*COMPLEMENTARY, "--config.extractor.mesh.data=-1"]),
  ],
)
def test_killed_stopped_and_moved_to_one_host_it_is_the_run_of_one_host(
  config, victim, after, more, tmp_path
):
  one, two = tmp_path / "one", tmp_path / "two"
  codes, _, errors = ended(start(config, one, 1, *more))
  assert codes == [0], errors

  split = [SPLIT] if more is AHEAD else []
  killed = start(config, two, 2, *more, *split)
  wait_for(two, after, killed)
  killed[victim].kill()
  began = time.monotonic()
  codes, _, errors = ended(killed)
  other = 1 - victim
  assert (codes[victim], codes[other]) == (-signal.SIGKILL, hosts.LOST), errors
  assert time.monotonic() - began < 60
  assert f"host {other} of 2 ends:" in errors[other]
  assert f"{two}/checkpoints/{newest(two)}" in errors[other]
  if config == "empo2_lab" or split:  # a memory to be copied, or older weights
    resumed_and_stopped(config, two, *more, *split)

  if config == "mempi_lab":  # on two hosts again, whose agent one server is
    with test_mempi_loop.served() as server:
      agent = f"--config.agent.remote.url={server.url}"
      codes, _, errors = ended(start(config, two, 2, *more, agent, "--resume"))
  else:
    codes, _, errors = ended(start(config, two, 1, *more, "--resume"))
  assert not any(codes), errors
  assert_same_run(one, two)
  assert (two / "report.html").is_file()
  assert_same_memory(one, two)


@pytest.mark.slow
def test_an_extractor_on_one_of_two_hosts_works_beside_both_and_answers_both(tmp_path):
  one, two = tmp_path / "one", tmp_path / "two"
  more = [*COMPLEMENTARY, "--config.extractor.schedule=pipelined", "--config.extractor.mesh.data=1"]
  more += ["--config.method.questions=1", "--config.method.imitate_every=0"]
  more += ["--config.optim.learning_rate=1e-5"]  # Adam makes more of what differs in rounding

  def begin(path, count, *flags):
    return start("complementary_rooms", path, count, *more, *flags, program=("-c", ASKS))

  codes, _, errors = ended(begin(one, 1))
  assert codes == [0], errors
  stopped(two, begin(two, 2), 0)
  codes, _, errors = ended(begin(two, 2, "--resume"))
  assert codes == [0, 0], errors
  assert_same_run(one, two)
  assert_same_memory(one, two)
  played = metrics.read(two / "rollouts" / "000004.jsonl")
  advised = [turn for trial in played for turn in trial["turns"] if turn["phase"] == "advise"]
  assert any(turn["reads"] for turn in advised)
  assert metrics.read(two / "metrics.jsonl")[-1]["extractor/updates"] > 1


def assert_same_memory(one, two):
  if (one / "memory").is_dir():
    with reader.Reader(one / "memory") as mine, reader.Reader(two / "memory") as theirs:
      assert mine.fingerprint() == theirs.fingerprint()


def resumed_and_stopped(config, two, *more):
  """On two hosts again, of which the second is asked to stop."""
  done = newest(two)
  resumed = start(config, two, 2, *more, "--resume")
  wait_for(two, done, resumed)
  stopped(two, resumed, done)
  sessions = json.loads((two / "manifest.json").read_text())["sessions"]
  assert [session["hosts"] for session in sessions] == [2, 2]


def sampler(adapters=False):
  """A server with the model that the smoke run begins with."""
  cfg, params = model()
  more = {"base": params} if adapters else {}
  return serve.Server(cfg, new_engine(), text(), model="tiny", **more)


def remote_flags(place, *servers):
  urls = ",".join(server.url for server in servers)
  return [
    f"--config.remote.url={urls}", f"--config.remote.weights={place}", "--config.remote.retries=1",
    "--config.remote.backoff_s=0.1",
  ]  # fmt: skip


@pytest.mark.slow
def test_hosts_whose_servers_die_stop_together_and_resumed_it_is_the_run_of_one_host(tmp_path):
  """A server for each host, rollouts ahead, weights split over both; then the server of the second dies."""
  config, one, two = "lamer_darkroom", tmp_path / "one", tmp_path / "two"
  with sampler() as first, sampler() as second:
    codes, _, errors = ended(start(config, one, 1, *AHEAD, *remote_flags(tmp_path / "w", second)))
    assert codes == [0], errors
    run = start(config, two, 2, *AHEAD, SPLIT, *remote_flags(tmp_path / "w2", first, second))
    wait_for(two, 1, run)
    second.stop()
    codes, said, errors = ended(run)
    assert codes == [3, 3], (said, errors)
    assert not any("Traceback" in error for error in errors), errors
    assert re.search(
      r"stopped: in update \d .*(no server answers at|broke off|of host 1 were void)", said[0]
    ), said
    assert "--resume plays it again" in said[0] and 1 <= newest(two) < UPDATES
    assert newest(two) == len(metrics.read(two / "metrics.jsonl"))
    with sampler() as third:
      flags = remote_flags(tmp_path / "w2", third, first)
      versions = [server.worker.version for server in (third, first)]
      codes, _, errors = ended(start(config, two, 2, *AHEAD, SPLIT, *flags, "--resume"))
      assert codes == [0, 0], errors
      pushes = [s.worker.version - max(versions) for s in (third, first)]
      assert pushes[0] == pushes[1] > 0  # both are one model
      assert min(server.counts.sampled for server in (first, third)) > 0
  assert_same_run(one, two)
  (kept,) = (tmp_path / "w2").iterdir()
  assert kept.name == f"{first.worker.version:06d}"


@pytest.mark.slow
def test_adapters_go_once_to_a_server_that_both_hosts_ask_and_a_frozen_model_is_evaluated(tmp_path):
  config, one, two = "lamer_darkroom", tmp_path / "one", tmp_path / "two"
  lora = ["--config.lora.rank=2", "--config.remote.adapters=True", "--config.train.max_lag=0"]
  with sampler(adapters=True) as near, sampler(adapters=True) as far:
    codes, _, errors = ended(start(config, one, 1, *lora, *remote_flags(tmp_path / "w", near)))
    assert codes == [0], errors
    codes, _, errors = ended(
      start(config, two, 2, *lora, SPLIT, *remote_flags(tmp_path / "w2", far))
    )
    assert codes == [0, 0], errors
    assert far.worker.version == near.worker.version == UPDATES + 1
    assert_same_run(one, two)
    (file,) = (tmp_path / "w2" / f"{UPDATES + 1:06d}").iterdir()
    assert file.stat().st_size < 200_000
    # The evaluation of a method that trains nothing, over servers of each host's own.
    found = []
    for hosts_, place in ((1, tmp_path / "alone"), (2, tmp_path / "both")):
      flags = [*remote_flags(tmp_path / "w", near, far), "--config.train.updates=0", "--mode=eval"]
      codes, _, errors = ended(start("reflexion_darkroom", place, hosts_, *flags))
      assert codes == [0] * hosts_, errors
      found.append(metrics.read(place / "eval.jsonl"))
    assert found[0] == found[1] and found[0][0]["server"]["url"] == f"{near.url}, {far.url}"
