"""The report says what the files say, whatever a model wrote into them, and stays small."""

import json
import re

import numpy as np
import pytest

from memrl_jax import types
from memrl_jax.training import folder as run_folder
from memrl_jax.training import metrics, report

CONFIG = {"experiment": "LaMer on Sokoban", "method": {"name": "lamer"}, "train": {"updates": 4}}
NASTY = "</script><script>alert(1)</script><!-- {{data}} \u2028 \ud800 & 'é'"


def trial(group: int, index: int, *, void: str | None = None, text: str = "right", prompt="state"):
  empty = np.zeros(0, np.int32)
  turn = types.Turn(
    attempt=0,
    phase="play",
    index=0,
    messages=[types.Message("user", prompt)],
    sample=types.Sample(text, empty, empty, np.zeros(0, np.float32)),
    action=text,
    valid=True,
    reward=1.0,
    anchor="anchor",
    memory=("a tip",),
    advantage=0.5,
    advantage_terms={"episode": 0.25},
  )
  attempts = [types.Attempt(success=True, score=1.0, reward=1.0, turns=1)]
  return types.Trial("sokoban", 7, group, index, [turn], attempts, void).to_json()


def evaluation(step: int, value: float, label: str):
  arm = {
    "pass": [value, value],
    "low": [value - 0.1] * 2,
    "high": [value + 0.1] * 2,
    "score": value,
  }
  arm |= {"turns": 5.0, "valid": 0.9, "success_by_attempt": [value, 0.0], "diversity": None}
  arms = {"lamer": arm | {"void": 0, "trials": 8}}
  return {"step": step, "panel": "test", "tasks": 8, "arms": arms, "label": label}


@pytest.fixture
def run(tmp_path):
  with run_folder.RunFolder.create(tmp_path / "run", CONFIG, False) as folder:
    yield folder


def embedded(page: str) -> dict:
  """The data as a browser finds it: the script element ends at the first "</script"."""
  return json.loads(re.search(r'id="data">(.*?)</script', page, re.DOTALL)[1])


def test_an_empty_run_and_a_folder_without_a_run_have_a_page(run, tmp_path):
  data = embedded(report.write_report(run).read_text())
  assert data["title"] == "LaMer on Sokoban"
  assert ["updates", "0 of 4"] in data["head"] and ["method", "lamer"] in data["head"]
  (tmp_path / "bare").mkdir()
  assert embedded(report.write_report(tmp_path / "bare").read_text())["title"] == "bare"
  with pytest.raises(ValueError, match="is no folder; give the --workdir of a run"):
    report.write_report(tmp_path / "absent")


def test_no_text_can_leave_its_place_and_nothing_is_loaded(run):
  with metrics.MetricsLog(run) as log:
    log.write_rollouts(0, [trial(0, 0, text=NASTY, prompt=NASTY), trial(0, 1, void=NASTY)])
  page = report.write_report(run).read_text()
  data = embedded(page)
  assert (
    data["reader"]["texts"][data["reader"]["updates"][0]["trials"][0]["turns"][0]["text"]] == NASTY
  )
  assert data["voids"]["trials"][0]["void"] == NASTY
  assert page.count("<script") == 2  # the data and the code
  assert "innerHTML" not in page
  assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a name


def test_a_trial_is_told_turn_by_turn(run):
  with metrics.MetricsLog(run) as log:
    log.write_rollouts(3, [trial(1, 0, text="up"), trial(0, 0, text="down")])
  reader = report.contents(run)["reader"]
  (update,) = reader["updates"]
  assert (update["step"], update["file"], update["left_out"]) == (3, "000003.jsonl", 0)
  assert [found["group"] for found in update["trials"]] == [0, 1]
  turn = update["trials"][0]["turns"][0]
  texts = reader["texts"]
  assert texts[turn["text"]] == "down" and texts[turn["anchor"]] == "anchor"
  assert [(role, texts[place]) for role, place in turn["prompt"]] == [("user", "state")]
  assert [texts[place] for place in turn["memory"]] == ["a tip"]
  assert (turn["reward"], turn["advantage"], turn["terms"]) == (1.0, 0.5, {"episode": 0.25})
  assert texts.count("state") == 1  # both trials read it


def test_a_long_run_stays_small_and_says_what_is_left_out(run):
  with metrics.MetricsLog(run) as log:
    for step in range(0, 20, 2):
      prompts = (f"{step} {index} " + "x" * 30_000 for index in range(60))
      log.write_rollouts(step, [trial(0, i, prompt=prompt) for i, prompt in enumerate(prompts)])
  path = report.write_report(run)
  assert path.stat().st_size < 4_000_000
  reader = embedded(path.read_text())["reader"]
  assert reader["of"] == 10
  assert [update["step"] for update in reader["updates"]] == [0, 4, 8, 10, 14, 18]
  # 3,000,000 / 6 updates is room for 16 trials of 30 kB
  assert [(len(u["trials"]), u["left_out"]) for u in reader["updates"]] == [(16, 44)] * 6
  assert sum(len(text) > 30_000 for text in reader["texts"]) == 6 * 16  # no text of the others


def test_at_most_48_trials_of_an_update(run):
  with metrics.MetricsLog(run) as log:
    log.write_rollouts(0, [trial(g, i) for g in range(8) for i in range(8)])
  (update,) = report.contents(run)["reader"]["updates"]
  assert len(update["trials"]) == 48 and update["left_out"] == 16


def test_void_trials_of_every_update_are_counted_by_reason(run):
  with metrics.MetricsLog(run) as log:
    for step in range(10):
      void = "hung" if step % 2 else None
      log.write_rollouts(
        step, [trial(0, 0, void=void), trial(0, 1, text='"void": null', void="crash")]
      )
  compact = json.dumps(trial(0, 0), separators=(",", ":"))  # as another writer may leave it
  run.rollout(10).write_text(compact + "\n")
  found = report.contents(run)["voids"]
  assert found["count"] == 15
  assert found["reasons"] == [("crash", 10), ("hung", 5)]
  assert found["trials"][1] == {
    "step": 1, "env": "sokoban", "seed": 7, "group": 0, "index": 0, "void": "hung"
  }  # fmt: skip


def test_important_curves_come_first_and_attempts_share_a_chart(run):
  with metrics.MetricsLog(run) as log:
    numbers = {"zeta": 1.0, "train/aaa": 1.0, "train/loss": float("nan"), "credit/zero_spread": 0.5}
    numbers |= {"rollout/success_1": 0.1, "rollout/success_2": 0.2, "rollout/success": 0.3}
    log.write(0, numbers, {"seconds/rollout": 2.0, "seconds/update": 3.0, "tokens": 5.0})
    log.write_eval(evaluation(0, 0.25, "start"))
    log.write_eval(evaluation(4, 0.5, "final"))
  data = report.contents(run)
  assert [
    (section["name"], [chart["title"] for chart in section["charts"]])
    for section in data["sections"]
  ] == [
    ("evaluation", ["pass@1, test", "pass@2, test"]),
    ("rollout", ["Success while training", "Success by attempt"]),
    ("train", ["Loss", "train/aaa"]),
    ("credit", ["Groups without spread"]),
    ("other", ["zeta"]),
    ("time", ["Seconds an update", "tokens"]),
  ]
  charts = {c["title"]: c for section in data["sections"] for c in section["charts"]}
  assert [s["label"] for s in charts["Success by attempt"]["series"]] == ["attempt 1", "attempt 2"]
  assert charts["Loss"]["series"][0]["y"] == [None]
  assert [s["label"] for s in charts["Seconds an update"]["series"]] == ["rollout"]
  (line,) = charts["pass@2, test"]["series"]
  assert (line["x"], line["y"], line["low"]) == ([0, 4], [0.25, 0.5], [0.15, 0.4])
  (tile,) = data["headline"]
  assert (tile["arm"], tile["first"], tile["last"], tile["attempts"]) == ("lamer", 0.25, 0.5, 2)


def test_a_long_curve_is_averaged_over_equal_stretches():
  thin = report._thin(list(range(1000)), [None] * 3 + [float(i) for i in range(3, 1000)])
  # 1000 points at most 400: stretches of 3; the first holds nothing, the second 3, 4, 5
  assert len(thin["x"]) == 334 and thin["mean_of"] == 3
  assert (thin["x"][:2], thin["y"][:2]) == ([1, 4], [None, 4.0])


def test_the_duration_counts_sessions_and_not_the_night_between_them():
  sessions = [{"start": "2026-01-01T10:00:00+00:00"}, {"start": "2026-01-02T10:00:00+00:00"}]
  sessions[1]["end"] = "2026-01-02T10:20:00+00:00"
  first = 1767261600.0  # 2026-01-01T10:00:00Z
  timing = [{"step": 0, "time": first + 300}, {"step": 1, "time": first + 600}]
  assert report._duration(sessions, timing) == "30 min in 2 sessions"  # 10, then killed; 20
  sessions.append({"start": "2026-01-03T10:00:00+00:00"})  # killed before its first update
  assert report._duration(sessions, timing) == "30 min in 3 sessions"


def test_a_number_that_is_not_finite_is_null_on_the_page(run):
  with metrics.MetricsLog(run) as log:
    log.write_eval(evaluation(0, 0.25, "start") | {"tasks": float("nan")})
  assert embedded(report.write_report(run).read_text())["evals"][0]["tasks"] is None
