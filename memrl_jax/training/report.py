"""One HTML page about a run, made from the files of its folder alone; it loads nothing from elsewhere.

The page (report.html beside this file) draws; this file decides what is on it: the head, evaluations,
curves, void trials, and a sample of trials to read, small enough to send by mail.
"""

from __future__ import annotations

import collections
import datetime
import json
import math
import pathlib
import re
import shlex
from typing import Any

from memrl_jax.training import folder as run_folder
from memrl_jax.training import metrics

TEMPLATE = pathlib.Path(__file__).with_name("report.html")
UPDATES_SHOWN = 6
EVALS_SHOWN = 2
TRIALS_SHOWN = 48  # an update
ROLLOUT_BYTES = 3_000_000  # of all embedded trials, so that the page stays under 4 MB
POINTS = 400  # a curve; longer runs are averaged over equal stretches of updates
VOIDS_SHOWN = 200

# What a reader wants to see first, and the words for it; other metrics follow under their own names.
TITLES = {
  "rollout/success": "Success while training",
  "rollout/success_": "Success by attempt",
  "rollout/pass@": "pass@k while training",
  "rollout/pass_": "pass@k while training",
  "rollout/valid": "Valid actions",
  "rollout/void": "Void trials",
  "rollout/guided_success": "Success of guided trials",
  "rollout/free_success": "Success of free trials",
  "epoch/last": "Success in the last round over all tasks",
  "epoch/cumulative": "Tasks solved so far",
  "epoch/forgotten": "Tasks solved in one round and not in the next",
  "memory/pearson": "Correlation of Q and success",
  "mempi/hinted": "Success with a forced hint",
  "mempi/alone": "Success without",
  "mempi/speaks_solved": "How likely it is to speak where the agent alone succeeds",
  "mempi/speaks_failed": "How likely it is to speak where the agent alone fails",
  "mempi/hint_tokens": "Tokens of a hint",
  "bank/entries": "Entries in the bank",
  "extractor/reward": "What experience earns (+1 a guided success, -1 a failure)",
  "train/loss": "Loss",
  "train/entropy": "Entropy (nats a token)",
  "train/kl": "KL to the reference (nats a token)",
  "train/logp_gap_max": "Sampler against trainer, largest log-prob difference (nats)",
  "train/logp_gap_mean": "Sampler against trainer, mean log-prob difference (nats)",
  "train/grad_norm": "Gradient norm",
  "train/clipped": "Clipped tokens",
  "credit/zero_spread": "Groups without spread",
}
PREFIXES = (
  "epoch",
  "mempi",
  "memoryr1",
  "rollout",
  "train",
  "credit",
  "memory",
  "bank",
  "extractor",
)
SECONDS = ("seconds/", "time/")  # timing under these prefixes is one update's time, part by part


def write_report(folder: run_folder.RunFolder | str | pathlib.Path) -> pathlib.Path:
  """Writes report.html into the run folder and returns its path; missing files are left out."""
  if not isinstance(folder, run_folder.RunFolder):
    folder = run_folder.RunFolder(folder)
  if not folder.path.is_dir():
    raise ValueError(f"{folder.path} is no folder; give the --workdir of a run")
  data = json.dumps(_finite(contents(folder)), separators=(",", ":"), allow_nan=False)
  # In a script element only "<" can end it early: "</script>" in a model's answer.
  page = TEMPLATE.read_text("utf-8").replace("{{data}}", data.replace("<", "\\u003c"), 1)
  run_folder.write_atomic(folder.report, page)
  return folder.report


def contents(folder: run_folder.RunFolder) -> dict[str, Any]:
  """Everything on the page, as JSON."""
  config = _read_json(folder.config)
  manifest = _read_json(folder.manifest)
  numbers, timing = metrics.read(folder.metrics), metrics.read(folder.timing)
  evals = metrics.read(folder.eval)
  return {
    "title": _title(config, folder.path),
    "head": _head(folder, config, manifest, numbers, timing),
    "sessions": manifest.get("sessions", []),
    "config": run_folder.flatten(config),
    "headline": _headline(evals),
    "evals": evals,
    "sections": _adaptation(folder) + _sections(numbers, timing, evals),
    "voids": _voids(folder),
    "reader": _reader(folder),
  }


def _title(config: dict[str, Any], path: pathlib.Path) -> str:
  names = [
    config[key] for key in ("experiment", "name", "title") if isinstance(config.get(key), str)
  ]
  return names[0] if names else path.name


def _head(
  folder: run_folder.RunFolder,
  config: dict[str, Any],
  manifest: dict[str, Any],
  numbers: list[dict[str, Any]],
  timing: list[dict[str, Any]],
) -> list[tuple[str, str]]:
  """(label, text) of what is known about the run."""
  flat = run_folder.flatten(config)
  last = manifest.get("sessions", [{}])[-1]
  done = numbers[-1]["step"] if numbers else 0
  planned = flat.get("train.updates")
  git = last.get("git")
  seeds = manifest.get("seeds", {})
  versions = {"python": last.get("python"), **last.get("packages", {})}
  rows = {
    "method": _name(config, "method"),
    "environment": _name(config, "env") or _name(config, "environment"),
    "updates": f"{done} of {planned}" if planned is not None else str(done),
    "duration": _duration(manifest.get("sessions", []), timing),
    "status": last.get("status", ""),
    "seeds": ", ".join(f"{name} {seed}" for name, seed in seeds.items()),
    "config hash": manifest.get("config_hash", ""),
    "device": last.get("device", ""),
    "git": f"{git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else "",
    "command": shlex.join(last.get("command", [])),
    "versions": ", ".join(f"{name} {version}" for name, version in versions.items() if version),
    "folder": str(folder.path),
  }
  return [(label, text) for label, text in rows.items() if text]


def _name(config: dict[str, Any], key: str) -> str:
  value = config.get(key, "")
  return str(value.get("name", "")) if isinstance(value, dict) else str(value)


def _duration(sessions: list[dict[str, Any]], timing: list[dict[str, Any]]) -> str:
  """Time of all sessions; one that was killed ends with its last update."""
  starts = [_clock(session["start"]) for session in sessions]
  total = 0.0
  for session, start, following in zip(sessions, starts, [*starts[1:], math.inf], strict=False):
    times = [record["time"] for record in timing if start <= record["time"] < following]
    total += (_clock(session["end"]) if "end" in session else max(times, default=start)) - start
  text = metrics.duration(total)
  return text if len(sessions) < 2 else f"{text} in {len(sessions)} sessions"


def _clock(text: str) -> float:
  return datetime.datetime.fromisoformat(text).timestamp()


def _headline(evals: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """For each panel and arm: pass@N of its last evaluation, and of its first if there were two."""
  seen = collections.defaultdict(list)
  for record in evals:
    for arm, result in record["arms"].items():
      seen[record["panel"], arm].append((record, result))
  return [
    {
      "panel": panel,
      "arm": arm,
      "tasks": found[-1][0]["tasks"],
      "step": found[-1][0]["step"],
      "attempts": len(found[-1][1]["pass"]),
      "last": found[-1][1]["pass"][-1],
      "low": found[-1][1]["low"][-1],
      "high": found[-1][1]["high"][-1],
      "first": found[0][1]["pass"][-1] if len(found) > 1 else None,
      "first_step": found[0][0]["step"],
    }
    for (panel, arm), found in seen.items()
  ]


def _sections(
  numbers: list[dict[str, Any]], timing: list[dict[str, Any]], evals: list[dict[str, Any]]
) -> list[dict[str, Any]]:
  """The curves: [{"name", "charts": [{"title", "metric", "series": [...]}]}], important ones first."""
  sections = [{"name": "evaluation", "charts": _eval_charts(evals)}]
  charts = collections.defaultdict(list)
  for base, series in _families(_columns(numbers)).items():
    charts[base.split("/")[0] if "/" in base else "other"].append(_chart(base, series))
  rank = {prefix: place for place, prefix in enumerate(PREFIXES)}
  order = {base: place for place, base in enumerate(TITLES)}
  for prefix in sorted(charts, key=lambda name: (rank.get(name, len(rank)), name)):
    found = sorted(charts[prefix], key=lambda c: (order.get(c["metric"], len(order)), c["metric"]))
    sections.append({"name": prefix, "charts": found})
  sections.append({"name": "time", "charts": _time_charts(_columns(timing))})
  return [section for section in sections if section["charts"]]


def _columns(records: list[dict[str, Any]]) -> dict[str, dict[str, list[Any]]]:
  """Records as {name: {"x": steps, "y": values}}, averaged to at most POINTS points a curve."""
  columns = collections.defaultdict(lambda: {"x": [], "y": []})
  for record in records:
    for name, value in record.items():
      if name not in ("step", "time"):
        columns[name]["x"].append(record["step"])
        columns[name]["y"].append(value)
  return {name: _thin(**column) for name, column in columns.items()}


def _thin(x: list[int], y: list[float | None]) -> dict[str, Any]:
  """Means over equal stretches, at the middle step of each; None where a stretch has no number."""
  width = math.ceil(len(x) / POINTS)
  thin = {"x": [], "y": [], "mean_of": width}
  for start in range(0, len(x), width):
    known = [value for value in y[start : start + width] if value is not None]
    stretch = x[start : start + width]
    thin["x"].append(stretch[len(stretch) // 2])
    thin["y"].append(_short(sum(known) / len(known)) if known else None)
  return thin


def _short(value: float) -> float:
  return float(f"{value:.5g}")


def _families(columns: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
  """Curves that differ in a final number (success_1, success_2; pass@1, ...) share one chart."""
  families = collections.defaultdict(list)
  for name, column in columns.items():
    numbered = re.fullmatch(r"(.+[_@])(\d+)", name)
    base, label = (numbered[1], numbered[2]) if numbered else (name, "")
    if numbered:
      label = f"@{label}" if base.endswith("@") or "pass" in base else f"attempt {label}"
    families[base].append({"label": label, **column})
  return families


def _chart(base: str, series: list[dict[str, Any]]) -> dict[str, Any]:
  return {"title": TITLES.get(base, base), "metric": base, "series": series, "stacked": False}


def _eval_charts(evals: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """pass@k over updates with its interval, one chart for each panel and k, one line an arm."""
  charts = collections.defaultdict(dict)
  for record in evals:
    for arm, result in record["arms"].items():
      for k in range(len(result["pass"])):
        line = charts[record["panel"], k].setdefault(arm, {"x": [], "y": [], "low": [], "high": []})
        if line["x"] and line["x"][-1] == record["step"]:
          continue  # evaluated twice after the same update: on starting again, or as the final one
        line["x"].append(record["step"])
        for target, source in (("y", "pass"), ("low", "low"), ("high", "high")):
          line[target].append(_short(result[source][k]))
  return [
    _chart(f"pass@{k + 1}, {panel}", [{"label": arm, **line} for arm, line in lines.items()])
    for (panel, k), lines in charts.items()
    if any(len(line["x"]) > 1 for line in lines.values())
  ]


def _adaptation(folder: run_folder.RunFolder) -> list[dict[str, Any]]:
  """--mode=adapt: success and reward by round, the weights as they were."""
  records = metrics.read(folder.adapt / "rounds.jsonl")
  if not records:
    return []
  rounds = [record["round"] for record in records]

  def line(pick, label: str) -> dict[str, Any]:
    return {"label": label, "x": rounds, "y": [_short(pick(record)) for record in records]}

  success = line(lambda record: record["pass"][-1], "")
  for end in ("low", "high"):
    success[end] = [_short(record[end][-1]) for record in records]
  changes = ", ".join(f"{name}={value}" for name, value in records[0]["options"].items())
  charts = [
    {"title": f"Success by round ({changes or 'the same tasks'})", "series": [success]},
    {"title": "Reward by round", "series": [line(lambda record: record["reward"], "")]},
    {"title": "Tips in a prompt", "series": [line(lambda record: record["tips_shown"], "")]},
  ]
  return [
    {
      "name": "adaptation of the memory, weights frozen (x: round)",
      "charts": [{"metric": "adapt", "stacked": False, **chart} for chart in charts],
    }
  ]


def _time_charts(columns: dict[str, Any]) -> list[dict[str, Any]]:
  """The parts of an update's seconds, stacked; then every other timing number."""
  parts, charts = [], []
  for name, column in columns.items():
    prefix = next((prefix for prefix in SECONDS if name.startswith(prefix)), None)
    if prefix is None:
      charts.append(_chart(name, [{"label": "", **column}]))
    elif name.removeprefix(prefix) not in ("update", "total"):  # these are the sum of the parts
      parts.append({"label": name.removeprefix(prefix), **column})
  if parts:
    title = {"title": "Seconds an update", "metric": "", "stacked": True}
    charts.insert(0, {**title, "series": parts})
  return charts


def _rollout_files(folder: run_folder.RunFolder) -> dict[int, pathlib.Path]:
  """Files of training trials by update."""
  return {int(path.stem): path for path in sorted(folder.rollouts.glob("[0-9]*.jsonl"))}


def _eval_files(folder: run_folder.RunFolder) -> dict[str, pathlib.Path]:
  """Files of evaluation trials by what the reader calls them."""
  paths = sorted(folder.rollouts.glob("eval-*.jsonl"))
  return {f"evaluation at {int(path.stem.removeprefix('eval-'))}": path for path in paths}


def _voids(folder: run_folder.RunFolder) -> dict[str, Any]:
  """Counts by reason over the whole run, and the first VOIDS_SHOWN void trials."""
  reasons, listed = collections.Counter(), []
  for step, path in _rollout_files(folder).items():
    with open(path, encoding="utf-8") as lines:
      # Inside a string the quotes would be escaped, so this is the field; most lines are not parsed.
      suspects = [line for line in lines if '"void": null' not in line and line.endswith("\n")]
    for trial in map(json.loads, suspects):
      if trial["void"] is not None:
        reasons[trial["void"]] += 1
        place = {key: trial[key] for key in ("env", "seed", "group", "index", "void")}
        listed.append({"step": step, **place})
  return {"count": len(listed), "reasons": reasons.most_common(20), "trials": listed[:VOIDS_SHOWN]}


def _reader(folder: run_folder.RunFolder) -> dict[str, Any]:
  """Trials of a few evenly spaced updates. Texts stand once in "texts" and are referred to by place."""
  trained, evaluated = _rollout_files(folder), _eval_files(folder)
  files = trained | evaluated
  steps = evenly(list(trained), UPDATES_SHOWN) + evenly(list(evaluated), EVALS_SHOWN)
  texts: dict[str, int] = {}
  updates = []
  for step in steps:
    trials = sorted(metrics.read(files[step]), key=lambda t: (t["group"], t["index"], t.get("arm")))
    shown, room = [], ROLLOUT_BYTES // len(steps)
    for trial in trials[:TRIALS_SHOWN]:
      known = len(texts)
      brief = _brief(trial, texts)
      added = list(texts)[known:]
      room -= len(json.dumps(brief)) + sum(len(json.dumps(text)) for text in added)
      if room < 0:
        for text in added:
          del texts[text]
        break
      shown.append(brief)
    left_out = len(trials) - len(shown)
    updates.append({"step": step, "file": files[step].name, "left_out": left_out, "trials": shown})
  return {"updates": updates, "of": len(files), "texts": list(texts)}


def evenly(items: list[Any], count: int) -> list[Any]:
  """At most `count` of `items`, evenly spaced, the first and the last among them."""
  if len(items) <= count:
    return items
  return [items[round(place * (len(items) - 1) / (count - 1))] for place in range(count)]


def _brief(trial: dict[str, Any], texts: dict[str, int]) -> dict[str, Any]:
  """A trial without token ids, its long texts replaced by their place in `texts`."""

  def place(text: str) -> int:
    return texts.setdefault(text, len(texts))

  keys = ("attempt", "phase", "index", "valid", "finish", "trained", "reward", "advantage")
  turns = [
    {key: turn[key] for key in keys}
    | {"terms": turn["advantage_terms"], "action": place(turn["action"])}
    | {"prompt": [[role, place(content)] for role, content in turn["messages"]]}
    | {"text": place(turn["text"]), "anchor": place(turn["anchor"])}
    | {"memory": [place(text) for text in turn["memory"]]}
    | ({"intrinsic": turn["intrinsic"]} if turn.get("intrinsic") else {})
    for turn in trial["turns"]
  ]
  head = {key: trial[key] for key in ("env", "seed", "group", "void", "attempts")}
  head["index"] = trial.get("arm", trial["index"])  # an evaluation plays a task once in each arm
  return {**head, "turns": turns}


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text("utf-8")) if path.exists() else {}


def _finite(value: Any) -> Any:
  """The same JSON value with null for every number that is not finite."""
  if isinstance(value, dict):
    return {key: _finite(item) for key, item in value.items()}
  if isinstance(value, list | tuple):
    return [_finite(item) for item in value]
  return None if isinstance(value, float) and not math.isfinite(value) else value
