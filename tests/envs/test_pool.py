"""The pool under crashes, hangs, dying processes and nonsense."""

import dataclasses
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from memrl_jax.envs import base, pool


@dataclasses.dataclass(frozen=True)
class Options:
  size: int = 1


class Obedient:
  """Does what the response says; counts steps since its last reset."""

  horizon = 1000

  made = 0

  def __init__(self, options):
    Obedient.made += 1

  def reset(self, seed):
    self._seed, self._count = seed, 0
    return base.Observation(f"{seed}", "")

  def retry(self):
    return self.reset(self._seed)

  def step(self, response):
    self._count += 1
    if response == "crash":
      return 1 / 0
    if response == "exit":
      sys.exit("bye")
    if response == "hang":
      time.sleep(3.0)
    if response == "forever":
      time.sleep(20.0)
    if response == "nap":
      time.sleep(0.3)
    if response == "die":
      os._exit(9)
    if response == "none":
      return None
    reward = {"nan": float("nan"), "text": "ten"}.get(response, 1.0)
    seen = base.Observation(f"{self._seed}:{self._count}", "")
    return base.StepResult(seen, reward, False, False, 0.0, True, response)

  def close(self):
    self._count = None


FAMILY = base.Family("obedient", Options, Obedient, None, {})


def make(isolation="thread", workers=2, **options):
  return pool.EnvPool(FAMILY, Options(), isolation=isolation, workers=workers, **options)


def opened(envs, count):
  handles = [envs.open() for _ in range(count)]
  answers = envs.run([pool.Call(handle, "reset", 10 + handle) for handle in handles])
  assert [answer.text for answer in answers] == [str(10 + handle) for handle in handles]
  return handles


def step(envs, handles, responses):
  calls = [pool.Call(h, "step", r) for h, r in zip(handles, responses, strict=True)]
  return [a if isinstance(a, pool.Failure) else a.observation.text for a in envs.run(calls)]


@pytest.mark.parametrize("isolation", pool.ISOLATION)
def test_one_crash_costs_one_environment(isolation):
  with make(isolation) as envs:
    handles = opened(envs, 4)
    answers = step(envs, handles, ["a", "crash", "exit", "a"])
    assert answers[0] == "10:1" and answers[3] == "13:1"
    assert answers[1] == pool.Failure("crash", "ZeroDivisionError: division by zero")
    assert answers[2] == pool.Failure("crash", "SystemExit: bye")
    again = step(envs, handles, ["a"] * 4)
    assert again == ["10:2", answers[1], answers[2], "13:2"]  # dead handles stay dead
    assert envs.failures == {"crash": 2}  # counted once


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_hang_costs_one_call_and_the_rest_of_its_chunk_is_served(isolation):
  with make(isolation, workers=1, timeout_s=1.0) as envs:
    handles = opened(envs, 4)
    step(envs, handles, ["a"] * 4)
    begun = time.monotonic()
    answers = step(envs, handles, ["a", "forever", "a", "a"])
    assert (
      time.monotonic() - begun < 15
    )  # not the twenty seconds of the hang, on a busy machine too
    assert answers == [
      "10:2",
      pool.Failure("timeout", "step gave no answer in 1 s"),
      "12:2",
      "13:2",
    ]
    assert step(envs, [handles[0], handles[3]], ["a", "a"]) == ["10:3", "13:3"]


def test_time_is_counted_for_each_call_and_not_for_the_chunk():
  with make(workers=1, timeout_s=0.7) as envs:
    answers = step(envs, opened(envs, 4), ["nap"] * 4)  # 1.2 s in all
    assert answers == ["10:1", "11:1", "12:1", "13:1"]


def test_several_hangs_in_one_chunk():
  with make(workers=1, timeout_s=0.2) as envs:
    answers = step(envs, opened(envs, 4), ["hang", "a", "hang", "a"])
    assert [getattr(a, "kind", a) for a in answers] == ["timeout", "11:1", "timeout", "13:1"]


def test_inline_cannot_interrupt_but_still_counts_a_late_answer():
  with make("inline", timeout_s=0.1) as envs:
    answers = step(envs, opened(envs, 2), ["nap", "a"])
    assert answers[0].kind == "timeout" and answers[1] == "11:1"


def test_a_dead_process_fails_its_call_and_others_are_replayed():
  with make("process", workers=1) as envs:
    handles = opened(envs, 3)
    step(envs, handles, ["a", "b", "c"])
    envs.run([pool.Call(handles[2], "retry")])
    answers = step(envs, handles, ["a", "die", "a"])
    assert answers == ["10:2", pool.Failure("crash", "the environment's process died"), "12:1"]
    assert step(envs, handles, ["a"] * 3)[::2] == ["10:3", "12:2"]


@pytest.mark.parametrize("isolation", ["inline", "thread"])
def test_nonsense_is_named(isolation):
  with make(isolation) as envs:
    answers = step(envs, opened(envs, 3), ["none", "nan", "text"])
    assert [a.kind for a in answers] == ["nonsense"] * 3
    assert [a.text for a in answers] == [
      "step returned NoneType, not StepResult",
      "step returned reward nan, not a finite number",
      "step returned reward 'ten', not a finite number",
    ]


@pytest.mark.parametrize("isolation", ["inline", "thread"])
def test_calls_on_one_handle_are_served_in_order(isolation):
  with make(isolation) as envs:
    handle, made = envs.open(), Obedient.made
    calls = [pool.Call(handle, "reset", 5), *[pool.Call(handle, "step", "a")] * 3]
    calls += [
      pool.Call(handle, "retry"),
      pool.Call(handle, "step", "crash"),
      pool.Call(handle, "step", "a"),
    ]
    *good, crash, after = envs.run(calls)
    assert [getattr(a, "observation", a).text for a in good] == ["5", "5:1", "5:2", "5:3", "5"]
    assert crash == after and crash.kind == "crash"
    assert Obedient.made == made + 1  # nothing is made again for a dead handle


def test_results_do_not_depend_on_workers_or_isolation():
  family = base.family("sokoban")
  options, seen = family.options(), []
  for workers, isolation in ((1, "inline"), (1, "thread"), (3, "thread"), (2, "process")):
    with pool.EnvPool(family, options, workers=workers, isolation=isolation) as envs:
      handles = [envs.open() for _ in range(7)]
      rng, answers = np.random.default_rng(0), []
      answers += envs.run([pool.Call(h, "reset", h // 2) for h in handles])
      for _ in range(3):
        moves = rng.choice(["up", "down", "left", "right"], size=(7, 2))
        calls = zip(handles, moves, strict=True)
        answers += envs.run(
          [pool.Call(h, "step", f"<action>{' '.join(m)}</action>") for h, m in calls]
        )
        answers += envs.run([pool.Call(h, "retry") for h in handles])
      seen.append(answers)
  assert seen[0] == seen[1] == seen[2] == seen[3]
  assert not any(isinstance(answer, pool.Failure) for answer in seen[0])


def test_release_forgets_the_handle_and_bad_calls_are_refused():
  with make() as envs:
    one, other = opened(envs, 2)
    envs.release(one)
    with pytest.raises(ValueError, match=f"handle {one} is not open"):
      envs.run([pool.Call(one, "step", "a")])
    with pytest.raises(ValueError, match="method 'close' is not known"):
      envs.run([pool.Call(other, "close")])
    assert step(envs, [other], ["a"]) == ["11:1"] and envs.open() == other + 1


def test_options_are_checked():
  with pytest.raises(ValueError, match="isolation 'fork' is not known"):
    make("fork")
  with pytest.raises(ValueError, match="0 workers"):
    make(workers=0)


def test_cheap_calls_cost_microseconds():
  with make("thread") as envs:
    handles = opened(envs, 128)
    calls = [pool.Call(handle, "step", "a") for handle in handles]
    best = min(_seconds(envs, calls) for _ in range(20))
    assert best / len(calls) < 50e-6


def _seconds(envs, calls):
  begun = time.perf_counter()
  envs.run(calls)
  return time.perf_counter() - begun


def test_no_process_outlives_the_pool_or_its_parent():
  with make("process") as envs:
    opened(envs, 2)
    pids = [worker._process.pid for worker in envs._workers]
  assert not any(map(_runs, pids))
  code = (
    "import os, threading, time\nfrom tests.envs import test_pool as t\n"
    "if __name__ == '__main__':\n"
    "  envs = t.make('process'); handles = t.opened(envs, 2)\n"
    "  print(*[w._process.pid for w in envs._workers], flush=True)\n"
    "  threading.Thread(target=t.step, args=(envs, handles, ['forever'] * 2), daemon=True).start()\n"
    "  time.sleep(0.3); os._exit(1)"  # in the middle of a call, no cleanup at all
  )
  environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
  command = [sys.executable, "-c", code]
  with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.wait()  # not for the end of its output: orphans would hold that open
  assert len(pids) == 2
  deadline = time.monotonic() + 5
  while any(map(_runs, pids)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not any(map(_runs, pids))


def _runs(pid):
  try:
    with open(f"/proc/{pid}/stat") as file:
      return file.read().rpartition(")")[2].split()[0] != "Z"
  except FileNotFoundError:
    return False
