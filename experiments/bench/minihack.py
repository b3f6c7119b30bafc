"""MiniHack: steps a second of our environment against the bare game, and what the explorer solves.

    python experiments/bench/minihack.py
    python experiments/bench/minihack.py --levels=200

All sides play the same actions on the same levels in turn. `stock` is the package as it comes, with its
default observations and wrappers; `bare` is the same game told to fill in only the six arrays that we
read, without wrappers. `ours` is a whole turn on it: answer read, move played, text built, result made;
`calls` is `ours` without the text. Reported are medians over rounds of the ratio of CPU seconds, resets
included on all sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

# Instead of this file's folder, in which this file hides the package of the same name.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import gymnasium
import numpy as np

from memrl_jax.envs import base, minihack
from memrl_jax.envs.minihack_tasks import PAPER_TASKS, Options, draw

TURNS = {"River-Narrow-v0": (30, 100)}  # others: the paper's 30


class Untold(minihack.MiniHack):
  """The environment without text."""

  def _observe(self, seen, message) -> base.Observation:
    return base.Observation("", "", **self._asked)


def speed(task: str, rounds: int, steps: int) -> dict:
  options = Options(task=task, turns=10**9)
  environment, untold = minihack.MiniHack(options), Untold(options)
  environment.reset(0), untold.reset(0)
  game = untold._game = environment._game  # one game for all: none is warmer than another
  moves = np.random.default_rng(0).integers(0, 8, steps).tolist()
  answers = [f"<action>{environment._actions[move]}</action>" for move in moves]

  stock = gymnasium.make(f"MiniHack-{task}")

  def raw(played, inner) -> None:
    level = 0
    seeded(inner, options, level)
    played.reset()
    for move in moves:
      _, _, ended, cut, _ = played.step(move)
      if ended or cut:
        level += 1
        seeded(inner, options, level)
        played.reset()

  def turns(played: minihack.MiniHack) -> None:
    level = 0
    played.reset(level)
    for answer in answers:
      if played.step(answer).done:
        level += 1
        played.reset(level)

  sides = {
    "stock": lambda: raw(stock, stock.unwrapped),
    "bare": lambda: raw(game, game),
    "calls": lambda: turns(untold),
    "ours": lambda: turns(environment),
  }
  seconds: dict[str, list[float]] = {side: [] for side in sides}
  for number in range(rounds + 1):
    for side, work in sides.items():
      begun = time.process_time()
      work()
      if number:  # the first warms up
        seconds[side].append(time.process_time() - begun)
  environment.close(), stock.close()

  def ratio(side: str, peer: str) -> float:
    pairs = zip(seconds[side], seconds[peer], strict=True)
    return round(statistics.median(one / other for one, other in pairs), 2)

  microseconds = {
    side: round(1e6 * statistics.median(each) / steps, 1) for side, each in seconds.items()
  }
  compared = (("ours", "stock"), ("calls", "bare"), ("ours", "bare"))
  return {"us_per_step": microseconds} | {f"{a}/{b}": ratio(a, b) for a, b in compared}


def seeded(game, options: Options, level: int) -> None:
  number = draw(options, level).seed
  game.seed(number, number, reseed=False)


def solved(task: str, turns: int, levels: int) -> str:
  """The explorer's wins on held-out levels."""
  options = Options(task=task, split="heldout", turns=turns, status=True, crop=12)
  environment = minihack.MiniHack(options)
  lengths = []
  for seed in range(levels):
    player = minihack.FAMILY.players["explorer"](options, np.random.default_rng(seed))
    log = base.AttemptLog(0, environment.reset(seed))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      log.steps.append(base.Step(result.action, result))
    lengths += [len(log.steps)] if log.success else []
  environment.close()
  mean = f", {np.mean(lengths):.1f} turns each" if lengths else ""
  return f"{len(lengths)} of {levels} levels in {turns} turns{mean}"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--rounds", type=int, default=9)
  parser.add_argument("--steps", type=int, default=2000, help="of a round")
  parser.add_argument("--levels", type=int, default=20, help="that the explorer plays")
  args = parser.parse_args()
  for task in PAPER_TASKS:
    print(task, json.dumps(speed(task, args.rounds, args.steps)))
    for turns in TURNS.get(task, (30,)):
      print(" ", solved(task, turns, args.levels), flush=True)


if __name__ == "__main__":
  main()
