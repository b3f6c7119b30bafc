"""What WebShop costs: episodes and searches a second in the generated shop, and a large catalogue on disk.

    python experiments/bench/webshop.py                       # 50,000 products with texts of real length
    python experiments/bench/webshop.py --products=0          # the generated shop only
    python experiments/bench/webshop.py --data=DIR            # your own published files

The large catalogue is generated, with descriptions of 120 words drawn by Zipf's law from 200,000, so that
text and index are about as large for each product as published ones. It is built and used in processes of
their own, whose peak memory is reported. JSON.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import pathlib
import random
import re
import statistics
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from memrl_jax.envs import base
from memrl_jax.envs import webshop_catalogue as catalogues
from memrl_jax.envs import webshop_generated as generated
from memrl_jax.envs import webshop_search as search
from memrl_jax.envs import webshop_tasks as tasks

EPISODES = 300
SEARCHES = 300
WORDS, VOCABULARY = 120, 200_000
PUBLISHED = 1_181_436  # entries of the full items_shuffle.json


def episodes(player: str, options: tasks.Options) -> dict[str, float]:
  """Episodes and turns a second of a scripted player, after the shop was opened."""
  family = base.family("webshop")
  environment = family.make(options)
  agent = family.players[player](options, np.random.default_rng(0))
  environment.reset(0)
  turns, scores, begun = 0, [], time.perf_counter()
  for seed in range(EPISODES):
    log = base.AttemptLog(0, environment.reset(seed))
    while not log.done:
      result = environment.step(agent.play(base.View((), log)))
      log.steps.append(base.Step(result.action, result))
    turns += len(log.steps)
    scores.append(log.steps[-1].result.score)
  seconds = time.perf_counter() - begun
  return {
    "episodes_per_s": EPISODES / seconds,
    "turns_per_s": turns / seconds,
    "mean_score": statistics.mean(scores),
  }


def searches(shop: catalogues.Catalogue) -> dict[str, float]:
  """Latency of a search for the text of a goal, in ms, and the share whose hits hold the goal's own product."""
  taken, worked, found = [], [], 0
  for number in shop.goal_numbers("train", "id")[:SEARCHES]:
    goal = shop.goal(int(number))
    begun, begun_cpu = time.perf_counter(), time.thread_time()
    hits = shop.search(goal.text)
    taken.append(1000 * (time.perf_counter() - begun))
    worked.append(1000 * (time.thread_time() - begun_cpu))
    found += any(shop.product(hit).asin == goal.asin for hit in hits)
  p50, p99 = np.percentile(taken, [50, 99])
  return {
    "p50_ms": float(p50),
    "p99_ms": float(p99),
    "cpu_p50_ms": statistics.median(worked),
    "searches_per_s": 1000 / statistics.mean(taken),
    "goal_in_hits": found / len(taken),
  }


def write(folder: pathlib.Path, products: int) -> None:
  """A generated shop in the published files, one product at a time, with long descriptions."""
  items, attributes, human = generated.make(0, products)
  rng = np.random.default_rng(0)
  with (folder / "items_shuffle.json").open("w", encoding="utf-8") as file:
    for place, item in enumerate(items):
      words = np.minimum(rng.zipf(1.3, WORDS), VOCABULARY)
      item["full_description"] += " " + " ".join(f"w{word}" for word in words)
      file.write(("[" if place == 0 else ", ") + json.dumps(item))
    file.write("]")
  (folder / "items_ins_v2.json").write_text(json.dumps(attributes))
  asked = dict(random.Random(0).sample(sorted(human.items()), min(6000, len(human))))
  (folder / "items_human_ins.json").write_text(json.dumps(asked))


def in_process(work: Any, *arguments: Any) -> Any:
  """The answer of a function, with the time and the peak memory of a process that does nothing else."""
  fresh = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=fresh) as pool:
    return pool.submit(_measured, work, arguments).result()


def _measured(work: Any, arguments: tuple) -> Any:
  search.bm25s_module()
  before, begun = _peak(), time.perf_counter()
  answer = work(*arguments)
  return {
    "s": time.perf_counter() - begun,
    "cpu_s": time.process_time(),
    "peak_MiB": _peak(),
    "peak_before_MiB": before,
    **answer,
  }


def _peak() -> float:
  """MiB of this process at its largest (Linux; getrusage would count the parent that it was forked from)."""
  status = pathlib.Path("/proc/self/status").read_text()
  return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1024


def _build(folder: str) -> dict[str, Any]:
  return {"products": catalogues.stored(folder, "", "human", build_any=True).size}


def _open(folder: str) -> dict[str, Any]:
  begun = time.perf_counter()
  shop = catalogues.stored(folder, "", "human")
  return {"open_s": time.perf_counter() - begun, **searches(shop)}


def large(folder: pathlib.Path) -> dict[str, Any]:
  """Builds the index of the files in a folder, then opens it afresh."""
  built, opened = in_process(_build, str(folder)), in_process(_open, str(folder))
  index = sum(path.stat().st_size for path in folder.glob("webshop-*/**/*") if path.is_file())
  data = sum(path.stat().st_size for path in folder.glob("items_*.json"))
  more = PUBLISHED / built["products"]
  peak = built["peak_before_MiB"] + more * (built["peak_MiB"] - built["peak_before_MiB"])
  return {
    "data_MB": data / 1e6,
    "folder_MB": index / 1e6,
    "build": built,
    "use": opened,
    "if_linear_to_1.18M": {
      "build_cpu_min": more * built["cpu_s"] / 60,
      "build_peak_GiB": peak / 1024,
      "folder_GB": more * index / 1e9,
      "search_cpu_p50_ms": more * opened["cpu_p50_ms"],
    },
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--products", type=int, default=50_000)
  parser.add_argument("--data", type=pathlib.Path)
  given = parser.parse_args()
  options, begun = tasks.Options(), time.perf_counter()
  shop = tasks.shop(options)
  record: dict[str, Any] = {
    "generated": {"products": shop.size, "make_s": time.perf_counter() - begun}
  }
  record["generated"] |= {"search": searches(shop)}
  record["generated"] |= {name: episodes(name, options) for name in ("solver", "greedy", "random")}
  if given.data:
    record["large"] = large(given.data)
  elif given.products:
    with tempfile.TemporaryDirectory() as folder:
      write(pathlib.Path(folder), given.products)
      record["large"] = large(pathlib.Path(folder))
  print(json.dumps(record, indent=2))


if __name__ == "__main__":
  main()
