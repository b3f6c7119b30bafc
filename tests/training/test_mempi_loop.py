"""Mem-pi as a whole run, in the lab: two models, three stages, killed and resumed, other agents."""

import shutil

import pytest

from experiments import base, mempi_lab, run
from memrl_jax.memory import store
from memrl_jax.models import tiny
from memrl_jax.sampling import chat, engine, serve
from memrl_jax.training import learner, metrics

LAB = [
  "--config=experiments/mempi_lab.py:smoke", "--config.eval.tasks=4",
  "--config.method.gate=off",  # these few hints do not help, and are learned from all the same
]  # fmt: skip
GATHER, DISTIL, ADAPT = 1, 2, 2  # updates of the smoke run


def flags(place, *more):
  words = [word if word.startswith("--") else f"--config.{word}" for word in more]
  return [*LAB, f"--workdir={place}", *words]


def memory_of(place):
  with store.Store(place / "memory", read_only=True) as kept:
    return kept.entries(None, None)


def arms_of(place, label):
  return [one["arms"] for one in metrics.read(place / "eval.jsonl") if one["label"] == label]


def said(place, phase):
  """What was answered in the arm "memory" of the last evaluation, a list for each of its tasks."""
  path = place / "rollouts" / f"eval-{GATHER + DISTIL + ADAPT:06d}.jsonl"
  trials = [one for one in metrics.read(path) if one["arm"] == "memory"]
  return [[turn["text"] for turn in one["turns"] if turn["phase"] == phase] for one in trials]


def same_run(a, b):
  assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
  for path in sorted((a / "rollouts").glob("*.jsonl")):
    assert path.read_bytes() == (b / "rollouts" / path.name).read_bytes()
  assert memory_of(a) == memory_of(b) != []
  for label in ("anchor", "final"):
    assert arms_of(a, label) == arms_of(b, label) != []


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  place = tmp_path_factory.mktemp("mempi") / "run"
  assert run.main(flags(place)) == 0
  return place


def test_it_gathers_then_imitates_then_adapts(whole):
  numbers = metrics.read(whole / "metrics.jsonl")
  assert ["bank/hints" in n for n in numbers] == [True, False, False, False, False]
  assert ["study/rows" in n for n in numbers] == [False, True, True, False, False]
  assert ["mempi/alone" in n for n in numbers] == [False, False, False, True, True]
  # The KL term refers to what stage 1 left: nothing before the first step of stage 2, something after.
  assert abs(numbers[3]["train/kl_ref"]) < 1e-6 < numbers[4]["train/kl_ref"]
  assert arms_of(whole, "final")[0].keys() == {"none", "rag", "memory"}


def killed(update, monkeypatch, arguments):
  """Starts a run that dies when an update, counted from 1, has been made and not yet written."""
  write, left = metrics.MetricsLog.write, [update]

  def dies(log, *args):
    left[0] -= 1
    if not left[0]:
      raise KeyboardInterrupt
    write(log, *args)

  with monkeypatch.context() as patch:
    patch.setattr(metrics.MetricsLog, "write", dies)
    assert run.main(arguments) == 130


def test_killed_in_the_last_update_of_stage_1_and_resumed_it_is_the_same_run(
  whole, tmp_path, monkeypatch
):
  killed(GATHER + DISTIL, monkeypatch, flags(tmp_path))
  assert run.main(flags(tmp_path, "--resume")) == 0
  same_run(tmp_path, whole)


# Other agents.


def served():
  """Our own server, with the agent of the smoke run."""
  config = mempi_lab.get_config("smoke")
  cfg, params = tiny.load("lab")
  made = engine.Engine(cfg, params, base.settings(config, "mempi_lab", "smoke").agent.engine)
  text = chat.load(tiny.tokenizer_directory(), tiny.directory("lab"))
  return serve.Server(cfg, made, text, model="tiny")


@pytest.fixture
def no_agent_here(monkeypatch):
  """Whoever would load the weights of an agent fails."""
  make = learner.Learner.__init__

  def made(self, *args, frozen=False, **more):
    assert not frozen, "an agent was loaded"
    make(self, *args, frozen=frozen, **more)

  monkeypatch.setattr(learner.Learner, "__init__", made)


def test_with_its_agent_behind_a_server_it_is_the_same_run_resumed_with_another_server_too(
  whole, no_agent_here, tmp_path, monkeypatch
):
  """It dies in the first update of stage 2, so that the weights of stage 1 come from a checkpoint."""
  with served() as one:
    killed(GATHER + DISTIL + 1, monkeypatch, flags(tmp_path, f"agent.remote.url={one.url}"))
  with served() as two:
    assert run.main(flags(tmp_path, f"agent.remote.url={two.url}", "--resume")) == 0
  assert (tmp_path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
  assert memory_of(tmp_path) == memory_of(whole)
  assert arms_of(tmp_path, "final") == arms_of(whole, "final")
  assert said(tmp_path, "play") == said(whole, "play")


def test_evaluated_with_another_agent_it_gives_the_very_same_hints(whole, tmp_path):
  place = tmp_path / "run"
  shutil.copytree(whole, place)
  rooms = "agent.model.checkpoint=tiny:rooms"
  assert run.main(flags(place, "--mode=eval", rooms)) == 0
  (record,) = arms_of(place, "eval")
  assert record["memory"]["trials"] == 4
  assert said(place, "advise") == said(whole, "advise") != [[]] * 4
  assert said(place, "play") != said(whole, "play")
