"""ALFWorld: what our environment adds to the engine's own step, and what our patches save.

    python experiments/bench/alfworld.py
    python experiments/bench/alfworld.py --rounds=20

All sides play the same commands in the same generated games. `stock` is the package as it comes, `engine`
the same with the patches of memrl_jax/envs/alfworld_engine.py, `ours` a whole turn on it: answer read,
command played, state told apart, result made. Reported are medians over rounds, in CPU seconds; `overhead`
is ours / engine - 1, of steps alone, its two sides in turn. Ends with the solver's wins on held-out games.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

# Instead of this file's folder, in which this file hides the package of the same name.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from memrl_jax.envs import alfworld, alfworld_engine, alfworld_tasks, base
from memrl_jax.envs.alfworld_tasks import Options, Task

OPTIONS = Options(data=alfworld_tasks.GENERATED, split="valid_unseen", turns=10**9)
Walk = tuple[Task, list[str]]


def walks(games: int, steps: int) -> list[Walk]:
  """Random walks, one a game, that do not end it."""
  environment, found = alfworld.AlfWorld(OPTIONS), []
  for seed in range(games):
    rng = np.random.default_rng(seed)
    seen, commands = environment.reset(seed), []
    while len(commands) < steps:
      commands.append(str(rng.choice(seen.admissible)))
      result = environment.step(f"<action>{commands[-1]}</action>")
      seen = result.observation
      if result.done:
        seen, commands = environment.retry(), []
    found.append((environment._task, commands))
  environment.close()
  return found


def timed(work: Callable[[str], object], arguments: list[str]) -> float:
  begun = time.process_time()
  for argument in arguments:
    work(argument)
  return time.process_time() - begun


def steps(walked: list[Walk], rounds: int) -> tuple[dict[str, float], list[float], float]:
  """(median milliseconds a step of both sides, overhead by round, median seconds of a retry)."""
  environment, retry = alfworld.AlfWorld(OPTIONS), []
  seconds: dict[str, list[float]] = {"engine": [], "ours": []}
  for number in range(rounds + 1):
    spent = dict.fromkeys(seconds, 0.0)
    for task, commands in walked:
      environment.open(task)
      game = environment._game
      sides = {
        "ours": lambda: timed(environment.step, [f"<action>{c}</action>" for c in commands]),  # noqa: B023
        "engine": lambda: timed(game._engine.step, commands),  # noqa: B023
      }
      for side in sorted(sides, reverse=bool(number % 2)):
        begun = time.process_time()
        environment.retry()
        retry.append(time.process_time() - begun)
        if side == "engine":
          game._engine.reset()  # without our note of what changes
        spent[side] += sides[side]()
    if number:  # the first warms up
      for side, used in spent.items():
        seconds[side].append(used)
  environment.close()
  count = sum(len(commands) for _, commands in walked)
  each = {
    f"{side} ms": round(1e3 * statistics.median(used) / count, 2) for side, used in seconds.items()
  }
  pairs = zip(seconds["ours"], seconds["engine"], strict=True)
  return each, [ours / engine - 1 for ours, engine in pairs], statistics.median(retry)


def stock(walked: list[Walk], contents: list[dict]) -> dict[str, float]:
  """Milliseconds of a load, a reset and a step of the package as it comes; for a process of its own."""
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
  from textworld.envs import PddlEnv

  infos = textworld.EnvInfos(admissible_commands=True, won=True)
  spent = {"load": 0.0, "reset": 0.0, "step": 0.0}
  for (_, commands), content in zip(walked, contents, strict=True):
    engine = AlfredDemangler(PddlEnv(infos))
    spent["load"] += timed(engine.load, [content])
    spent["reset"] += timed(lambda _, engine=engine: engine.reset(), [""])
    spent["step"] += timed(engine.step, commands) / len(commands)
  return {what: round(1e3 * used / len(walked), 1) for what, used in spent.items()}


def solved(games: int) -> str:
  """The solver's wins on held-out games."""
  options = Options(data=alfworld_tasks.GENERATED, split="valid_unseen")
  environment, lengths = alfworld.AlfWorld(options), []
  for seed in range(games):
    player = alfworld.FAMILY.players["solver"](options, np.random.default_rng(seed))
    log = base.AttemptLog(0, environment.reset(seed))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      log.steps.append(base.Step(result.action, result))
    lengths += [len(log.steps)] if log.success else []
  environment.close()
  return f"{len(lengths)} of {games} held-out games, {np.mean(lengths):.1f} turns each"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument(
    "--games", type=int, default=6, help="that are walked: 6 are one of each type"
  )
  parser.add_argument("--steps", type=int, default=40, help="of a walk")
  parser.add_argument("--solve", type=int, default=24, help="games that the solver plays")
  args = parser.parse_args()
  walked = walks(args.games, args.steps)
  each, overheads, retry = steps(walked, args.rounds)
  print(each, f"retry {1e3 * retry:.0f} ms")
  low, high = min(overheads), max(overheads)
  print(f"overhead {statistics.median(overheads):.1%} ({low:.1%} to {high:.1%} over rounds)")
  contents = [alfworld_engine.content(task) for task, _ in walked]
  with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other:
    print("stock, ms:", other.submit(stock, walked, contents).result())
  print("solver:", solved(args.solve), flush=True)


if __name__ == "__main__":
  main()
