"""ScienceWorld: steps a second of our environment against the bare simulator, resets, memory.

    python experiments/bench/scienceworld.py
    python experiments/bench/scienceworld.py --gold     # plays the simulator's solution of every task

Four sides play the same actions in turn, each in a Java process of its own with the same heap limit:
`ours` and `inexact` are the environment with exact replays and without (memrl_jax/envs/jvm.py); `bare`
makes the calls of `ours` on the same kind of process without the environment; `stock` makes them on
the package's own gateway, whose replays are not exact. Reported are medians over rounds of the ratio
of seconds, wall clock and CPU (Python and Java).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Instead of this file's folder, in which this file hides the simulator's package of the same name.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from memrl_jax.envs import base, jvm, scienceworld, scienceworld_tasks
from memrl_jax.envs.scienceworld_tasks import Options

TASKS = ("find-plant", "boil", "chemistry-mix", "grow-plant")
ACTIONS = (
  "go to hallway", "open door to kitchen", "go to kitchen", "look around", "open cupboard",
  "pick up thermometer", "wait1", "activate stove", "inventory", "fly away", "teleport to greenhouse",
  "pick up flower pot 1", "teleport to kitchen", "open fridge", "look at stove", "wait",
)  # fmt: skip


def cpu_seconds(pid: int) -> float:
  """User and system time of a process."""
  fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
  status = Path(f"/proc/{pid}/status").read_text()
  return int(status.split("VmRSS:")[1].split()[0]) / 1024


def ours(episodes: int, exact: bool) -> tuple[Callable[[], int], int]:
  """(one round: plays and returns the number of steps, the Java process)."""
  environments = [
    scienceworld.ScienceWorld(Options(task=task, variations=0, max_calls=len(ACTIONS), exact=exact))
    for task in TASKS
  ]
  lent = jvm.borrow(jvm.Kind(exact=exact), 16)
  jvm.give_back(lent)  # the environments below take it in turn

  def play() -> int:
    for environment in environments:
      for seed in range(episodes):
        environment.reset(seed)
        for action in ACTIONS:
          environment.step(action)
      environment.close()
    return len(TASKS) * episodes * len(ACTIONS)

  return play, lent.pid


def bare(episodes: int, server, load: Callable[[str, int], object]) -> Callable[[], int]:
  """The calls that a step and a reset make, and nothing else."""

  def play() -> int:
    for task in TASKS:
      for seed in range(episodes):
        load(task, seed)
        server.getTaskDescription()
        server.getScore()
        server.freeActionInventory()
        for action in ACTIONS:
          reply = server.step(action)
          if reply.startswith("Ambiguous"):
            server.step("0")
          server.getScore()
          server.getCompleted()
          server.freeActionLook()
          server.freeActionInventory()
    return len(TASKS) * episodes * len(ACTIONS)

  return play


def stock(episodes: int):
  os.environ["JAVA_TOOL_OPTIONS"] = "-Xmx256m -XX:+UseSerialGC"
  from scienceworld import ScienceWorldEnv

  ScienceWorldEnv.__del__ = lambda self: None  # it closes a second time, and complains
  env = ScienceWorldEnv("")
  del os.environ["JAVA_TOOL_OPTIONS"]

  def load(task: str, variation: int) -> None:
    env.server.load(task, variation, "easy", False)
    env.server.step("look around")

  return bare(episodes, env.server, load), env._gateway.java_process.pid, env


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--episodes", type=int, default=4, help="of each task in a round")
  parser.add_argument("--gold", action="store_true", help="play all solutions instead")
  args = parser.parse_args()
  if args.gold:
    return solutions()
  begun = time.perf_counter()
  mine = jvm.Jvm(jvm.Kind())
  mine.load("boil", 0, "easy")
  start_s = time.perf_counter() - begun
  stock_play, stock_pid, keep = stock(args.episodes)
  sides = {
    "ours": ours(args.episodes, exact=True),
    "inexact": ours(args.episodes, exact=False),
    "bare": (bare(args.episodes, mine.server, lambda t, v: mine.load(t, v, "easy")), mine.pid),
    "stock": (stock_play, stock_pid),
  }
  seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
  for number in range(args.rounds + 2):  # two to warm up the compiler
    for side, (side_play, side_pid) in sides.items():
      wall, cpu = time.perf_counter(), time.process_time() + cpu_seconds(side_pid)
      steps = side_play()
      spent = (time.perf_counter() - wall, time.process_time() + cpu_seconds(side_pid) - cpu)
      if number >= 2:
        seconds[side].append(spent)
  print(json.dumps({"start_s": round(start_s, 2), **report(seconds, steps)}, indent=1))
  print(json.dumps(resets(100)))
  keep.close()
  mine.kill()


def solutions() -> None:
  """Plays the simulator's own solution of the first test variation of every task."""
  for name in scienceworld_tasks.TASKS:
    options = Options(task=name, split="test", variations=1, max_calls=300)
    environment = scienceworld.ScienceWorld(options)
    log = base.AttemptLog(0, environment.reset(0))
    player = scienceworld.Gold(options, np.random.default_rng(0))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      log.steps.append(base.Step(result.action, result))
    total = sum(step.result.reward for step in log.steps)
    last = log.steps[-1].result
    print(
      f"{log.initial.task}: {len(log.steps)} turns, score {last.score:g}, return {total:g}",
      flush=True,
    )
    environment.close()


def report(seconds, steps: int) -> dict:
  def ratio(ours: str, peer: str) -> dict[str, float]:
    pairs = list(zip(seconds[ours], seconds[peer], strict=True))
    kinds = ("wall", "cpu")
    return {
      k: round(statistics.median(a[i] / b[i] for a, b in pairs), 3) for i, k in enumerate(kinds)
    }

  medians = {
    side: [statistics.median(s) for s in zip(*rows, strict=True)] for side, rows in seconds.items()
  }
  return {
    "steps_per_s": {side: round(steps / wall, 1) for side, (wall, _) in medians.items()},
    "steps_per_cpu_s": {side: round(steps / cpu, 1) for side, (_, cpu) in medians.items()},
    "ours/bare": ratio("ours", "bare"),
    "ours/stock": ratio("ours", "stock"),
    "inexact/stock": ratio("inexact", "stock"),
  }


def resets(count: int) -> dict:
  """Seconds a reset and what the Java process holds along the way, over all tasks in turn."""
  memory, begun = [], time.perf_counter()
  for number in range(count):
    names = list(scienceworld_tasks.TASKS)
    environment = scienceworld.ScienceWorld(Options(task=names[number % len(names)], variations=0))
    environment.reset(number)
    environment.step("look around")
    memory.append(rss_mb(environment._jvm.pid))
    environment.close()
  return {
    "resets": count,
    "seconds_per_reset": round((time.perf_counter() - begun) / count, 3),
    "rss_mb": [round(memory[at]) for at in (0, count // 2, count - 1)],
    "processes": len(jvm._idle),
  }


if __name__ == "__main__":
  main()
