"""Ours and the peers on the same work, in turn, on one pinned core: prints a table of ratios.

    python experiments/bench/run.py                                    # ours alone
    python experiments/bench/run.py --tunix=VENV/bin/python            # and google-tunix, where it is

Every round runs each side in a process of its own, one after the other, under the default malloc and
under huge pages for it (XLA's temporaries go back to the system after each call, so that page faults
are part of the cost). Compared are medians of process CPU time, which another job on the machine
disturbs least; what counts is the lower of the two ratios. `README.md` holds the table and how it was
made. `--cold` times a first step with an empty compilation cache, and one with a full one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HUGE = "glibc.malloc.hugetlb=1"

# name -> (case of ours, case of the peer, bar, goal): ratio of CPU seconds, theirs over ours.
CASES = {
  "decode": ("decode", "decode", 1.5, 1.75),
  "decode_4096": ("decode_4096", "decode_4096", 12.0, 15.0),
  "top_p": ("top_p", "top_p", 2.5, 3.3),
  "rollout": ("step.rollout", "step.rollout", 2.5, 3.3),
  "reference": ("step.reference", "step.reference", 2.0, 2.5),
  "update": ("step.update", "step.update", 2.0, 2.5),
  "plain update": ("plain.update_plain", "step.update", 1.3, 1.5),
  "GRPO step": ("step.step", "step.step", 2.2, 2.8),
}


@dataclasses.dataclass(frozen=True)
class Side:
  """Who is measured: the Python that has it, and which script knows which of the cases."""

  name: str
  python: str
  scripts: dict[str, tuple[str, ...]]

  def measure(self, cases: set[str], reps: int, core: int, env: dict[str, str]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for script, known in self.scripts.items():
      wanted = [case for case in known if case in cases]
      if wanted:
        words = [self.python, str(HERE / script), "--cases", ",".join(wanted), "--reps", str(reps)]
        measured = run_pinned(words, core, env)
        measured[f"peak_gib.{script}"] = measured.pop("peak_gib", None)
        figures |= measured
    return figures


OURS = {"decode.py": ("decode", "decode_4096", "top_p"), "update.py": ("step", "plain")}
TUNIX = {"peer_tunix.py": ("decode", "decode_4096", "top_p", "step")}


def run_pinned(words: list[str], core: int | None, env: dict[str, str]) -> dict[str, Any]:
  """The JSON object on the last line that a process pinned to one core (None: to no core) prints.

  Raises:
    RuntimeError: the process failed; with the end of what it said.
  """
  done = subprocess.run(
    words if core is None else ["taskset", "-c", str(core), *words],
    env=os.environ | {"JAX_PLATFORMS": "cpu"} | env,
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(f"{' '.join(words)} failed: {done.stderr.strip()[-2000:]}")
  return json.loads(done.stdout.strip().splitlines()[-1])


def seconds(figures: dict[str, Any], case: str) -> float | None:
  """Median CPU seconds of a call; of "step.update", the part `update` of the case `step`."""
  entry = figures.get(case.rpartition(".")[2])
  return entry and entry["cpu_s_median"]


def table(
  measured: dict[tuple[str, str], list[dict[str, Any]]], names: list[str], peer: str
) -> str:
  """One line a case: CPU seconds of both sides under both mallocs, ratios, bar and goal."""
  lines = [
    f"| CPU seconds a call | ours | {peer} | ratio | ours, huge pages | {peer}, huge pages | ratio "
    "| **lower ratio** | bar (goal) |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for name in names:
    ours_case, peer_case, bar, goal = CASES[name]
    cells, ratios = [], []
    for malloc in ("default", "huge"):
      ours = middle(measured.get(("ours", malloc), []), ours_case)
      theirs = middle(measured.get((peer, malloc), []), peer_case)
      ratio = theirs / ours if ours and theirs else None
      ratios += [ratio] if ratio else []
      cells += [number(ours, 3), number(theirs, 3), number(ratio, 2)]
    lower = number(min(ratios), 2) if ratios else "-"
    lines.append(f"| {name} | {' | '.join(cells)} | **{lower}** | {bar} ({goal}) |")
  return "\n".join(lines)


def middle(rounds: list[dict[str, Any]], case: str) -> float | None:
  """The median over rounds."""
  found = [value for one in rounds if (value := seconds(one, case)) is not None]
  return statistics.median(found) if found else None


def number(value: float | None, digits: int) -> str:
  return "-" if value is None else f"{value:.{digits}f}"


def first_steps(core: int) -> list[str]:
  """The first GRPO step with an empty compilation cache and with the one it left, on one core and on all."""
  lines = []
  for pinned, place in ((core, "one core"), (None, "all cores")):
    with tempfile.TemporaryDirectory() as cache:
      env = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
      for label in ("empty", "filled"):
        words = [sys.executable, str(HERE / "update.py"), "--cases", "step", "--reps", "1"]
        figures = run_pinned(words, pinned, env)
        first = figures["step"]
        lines.append(
          f"first step, {place}, {label} compilation cache: {first['first_cpu_s']:.1f} s CPU, "
          f"{first['first_s']:.1f} s wall; peak {figures['peak_gib']:.2f} GiB"
        )
  return lines


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--tunix", metavar="PYTHON", help="a Python that has google-tunix")
  parser.add_argument("--cases", default=",".join(CASES), help=f"some of {', '.join(CASES)}")
  parser.add_argument("--rounds", type=int, default=2)
  parser.add_argument("--reps", type=int, default=6, help="timed calls of each case in a round")
  parser.add_argument("--core", type=int, default=0)
  parser.add_argument("--cold", action="store_true", help="also time the first step")
  arguments = parser.parse_args()
  names = [name.strip() for name in arguments.cases.split(",")]
  names = list(CASES) if arguments.cases == ",".join(CASES) else names
  for name in names:
    if name not in CASES:
      parser.error(f"case {name!r} is not known; choose from {'; '.join(CASES)}")
  sides = [Side("ours", sys.executable, OURS)]
  if arguments.tunix:
    sides.append(Side("Tunix", arguments.tunix, TUNIX))
  cases = {
    "ours": {CASES[name][0].partition(".")[0] for name in names},
    "Tunix": {CASES[name][1].partition(".")[0] for name in names},
  }
  measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
  for number_ in range(arguments.rounds):
    for malloc, env in (("default", {}), ("huge", {"GLIBC_TUNABLES": HUGE})):
      for side in sides:
        print(f"round {number_ + 1}, {malloc} malloc: {side.name}", file=sys.stderr, flush=True)
        figures = side.measure(cases[side.name], arguments.reps, arguments.core, env)
        measured.setdefault((side.name, malloc), []).append(figures)
  print(table(measured, names, "Tunix"))
  for (name, malloc), rounds in measured.items():
    peaks = {key: value for key, value in rounds[-1].items() if key.startswith("peak_gib")}
    print(f"{name}, {malloc} malloc: {json.dumps(rounds[-1]['versions'] | peaks)}")
  if arguments.cold:
    print("\n".join(first_steps(arguments.core)))


if __name__ == "__main__":
  main()
