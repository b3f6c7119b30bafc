"""Does a slow extractor hold up the actor? Updates a minute with one that works as it can, and 10x slower.

    python experiments/bench/extractor.py [--updates=12] [--slower=10] [--schedule=async]

Both runs play the rooms in this process. The slow extractor works as long as the other and then sleeps
for the rest of its time, as one on devices of its own would: it takes none of the actor's. The first
updates, in which programs compile, are left out.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from experiments import base, complementary_rooms
from memrl_jax.training import extractor, folder, loop, metrics

LEFT_OUT = 3  # updates


def slowed(work, factor: float):
  """A method of the extractor that takes `factor` times as long."""

  def slow(self, *arguments):
    began = time.perf_counter()
    try:
      return work(self, *arguments)
    finally:
      self._stop.wait((factor - 1) * (time.perf_counter() - began))

  return slow


def run(updates: int, schedule: str) -> dict[str, float]:
  """Plays and learns; what an update took, and what the extractor did meanwhile."""
  config = complementary_rooms.get_config("laptop")
  config.train.updates = updates + LEFT_OUT
  config.train.checkpoint_every = 0
  config.eval.tasks = 1
  config.eval.at_start = False
  config.extractor.schedule = schedule
  config.manager.deterministic = schedule != "async"
  settings = base.settings(config, "complementary_rooms", "laptop")
  with (
    tempfile.TemporaryDirectory() as temporary,
    folder.RunFolder.create(pathlib.Path(temporary) / "run", config.to_dict(), False) as place,
  ):
    loop.train(settings, place, quiet=True)
    timing, numbers = metrics.read(place.timing), metrics.read(place.metrics)
  kept = timing[LEFT_OUT:]
  seconds = [row["seconds/rollout"] + row["seconds/learn"] for row in kept]
  return {
    "updates a minute": 60 / float(np.mean(seconds)),
    "rollout s": float(np.mean([row["seconds/rollout"] for row in kept])),
    "slowest search ms": 1e3 * max(row["seconds/search"] for row in kept),
    "longest lock wait ms": 1e3 * max(row["seconds/lock"] for row in kept),
    "answers": sum(row["extractor/answered"] for row in numbers[LEFT_OUT:]),
    "jobs that wait": numbers[-1]["bank/queue"],
    "extractor updates": numbers[-1]["bank/updates"],
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
  parser.add_argument("--updates", type=int, default=12)
  parser.add_argument("--slower", type=float, default=10.0)
  parser.add_argument("--schedule", default="async", choices=("interleaved", "pipelined", "async"))
  arguments = parser.parse_args()
  plain = run(arguments.updates, arguments.schedule)
  for name in ("_answer", "_train"):
    work = getattr(extractor.Extractor, name)
    setattr(extractor.Extractor, name, slowed(work, arguments.slower))
  slow = run(arguments.updates, arguments.schedule)
  print(f"{arguments.schedule:>22}{'as it can':>12}{f'{arguments.slower:g}x slower':>14}")
  for name in plain:
    print(f"{name:>22}{plain[name]:12.2f}{slow[name]:14.2f}")
  lost = 1 - slow["updates a minute"] / plain["updates a minute"]
  print(f"updates a minute: {lost:.1%} fewer with the slow extractor")


if __name__ == "__main__":
  main()
