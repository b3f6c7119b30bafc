"""MemRL with its model behind a server: the run of this process, and no weights in it."""

import functools
import json

import jax
import pytest

from experiments import base, memrl_lab, run
from memrl_jax.memory import store
from memrl_jax.models import tiny
from memrl_jax.sampling import chat, engine, serve
from memrl_jax.training import learner, metrics
from tests.sampling.test_remote import serving

LAB = ["--config=experiments/memrl_lab.py:smoke"]
SHORT = [
  "train.updates=4", "train.checkpoint_every=2", "eval.tasks=4", "eval.at_start=false",
  "engine.slots=8", "eval.temperature=0",
]  # fmt: skip
NO_MODEL = ["--config.model.checkpoint=no/such/model"]
LEARNER = learner.Learner
QUICK = [
  *NO_MODEL, "--config.env.turns=4", "--config.remote.retries=1", "--config.remote.backoff_s=0",
]  # fmt: skip


def flags(place, *more):
  return [*LAB, *(f"--config.{word}" for word in SHORT), f"--workdir={place}", *more]


@functools.cache
def sampler():
  """The engine of the smoke run."""
  config = memrl_lab.get_config("smoke")
  base.override(config, SHORT)
  cfg, params = tiny.load("lab")
  return cfg, engine.Engine(cfg, params, base.settings(config, "memrl_lab", "smoke").engine)


def server():
  """Our own, with the model that the smoke run has."""
  text = chat.load(tiny.tokenizer_directory(), tiny.directory("lab"))
  return serve.Server(*sampler(), text, model="tiny")


@pytest.fixture
def no_weights(monkeypatch):
  """Whoever would load weights for a run fails."""

  def refuse(*args, **kwargs):
    raise AssertionError("a learner was made")

  monkeypatch.setattr(learner, "Learner", refuse)


def trials_of(place):
  """All trials; log-probs apart, which are float32 sums over another batch."""
  found = []
  for path in sorted((place / "rollouts").glob("*.jsonl")):
    for trial in metrics.read(path):
      found.append(trial | {"turns": [turn | {"logps": None} for turn in trial["turns"]]})
  return found


def memory_of(place):
  with store.Store(place / "memory", read_only=True) as kept:
    return kept.entries(None, None)


def evals_of(place):
  return [record | {"server": None} for record in metrics.read(place / "eval.jsonl")]


def same_run(a, b):
  assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
  assert trials_of(a) == trials_of(b) and evals_of(a) == evals_of(b)
  assert memory_of(a) == memory_of(b) != []


@pytest.fixture(scope="module")
def local(tmp_path_factory):
  place = tmp_path_factory.mktemp("local") / "run"
  assert run.main(flags(place)) == 0
  return place


def test_with_ids_it_is_the_run_of_this_process_also_killed_and_resumed_elsewhere(
  local, no_weights, tmp_path, monkeypatch
):
  first, *_, last = metrics.read(local / "metrics.jsonl")
  assert first["rollout/success"] == 0 and last["epoch/last"] == 1  # memories that were read decide
  write, left = metrics.MetricsLog.write, [3]

  def killed_in_the_third_update(log, *args):
    left[0] -= 1
    if not left[0]:
      raise KeyboardInterrupt
    write(log, *args)

  with server() as first:
    monkeypatch.setattr(metrics.MetricsLog, "write", killed_in_the_third_update)
    assert run.main(flags(tmp_path, f"--config.remote.url={first.url}")) == 130
    monkeypatch.setattr(metrics.MetricsLog, "write", write)
  with server() as second:
    assert run.main(flags(tmp_path, f"--config.remote.url={second.url}", "--resume")) == 0
    same_run(tmp_path, local)


def without_tokens(place):
  """The metrics, but for those that count tokens."""
  names = ("rollout/response_tokens", "rollout/prompt_tokens", "rollout/repetition")
  return [
    {name: number for name, number in record.items() if name not in names}
    for record in metrics.read(place / "metrics.jsonl")
  ]


def test_as_text_it_needs_no_model_here_and_greedy_words_are_the_same(no_weights, tmp_path):
  greedy, here, away = "--config.sampling.temperature=0", tmp_path / "here", tmp_path / "away"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(learner, "Learner", LEARNER)
    assert run.main(flags(here, greedy)) == 0
  with server() as own:
    place = [f"--config.remote.url={own.url}", "--config.remote.api=chat", *NO_MODEL]
    assert run.main(flags(away, greedy, *place)) == 0
    assert run.main(flags(away, greedy, *place, "--mode=eval", "--config.eval.tasks=2")) == 0
  assert without_tokens(away) == without_tokens(here)
  assert memory_of(away) == memory_of(here) != []
  final, again = metrics.read(away / "eval.jsonl")
  assert final["arms"] == metrics.read(here / "eval.jsonl")[-1]["arms"]
  assert (again["label"], again["step"], again["arms"]["memory"]["trials"]) == ("eval", 4, 2)
  assert final["server"]["api"] == "chat"


class Talker:
  """A server of text that knows one answer, and loses the requests whose seed `loses` names."""

  def __init__(self, loses):
    self.loses, self.lost = loses, 0

  def __call__(self, handler, body):
    if handler.path == "/v1/models":
      return 200, {"data": [{"id": "m"}]}
    if handler.path != "/v1/chat/completions":
      return 404, {}
    seed = json.loads(body)["seed"]
    if self.loses(seed):
      self.lost += 1
      return 500, {"error": {"message": "injected"}}
    words = {
      "role": "assistant",
      "content": f"<remark>{'go hall' if seed % 2 else 'go cellar'}</remark>",
    }
    return 200, {"choices": [{"message": words, "finish_reason": "stop"}]}


def test_requests_lost_for_good_are_void_trials_and_nothing_is_compiled(no_weights, tmp_path):
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **more: compiled.append(event) if "compile" in event else None
  )
  try:
    talker = Talker(lambda seed: seed % 23 == 0)
    with serving(talker) as url:
      place = [f"--config.remote.url={url}", "--config.train.groups=4"]
      assert run.main(flags(tmp_path, *place, *QUICK)) == 0
  finally:
    jax.monitoring.clear_event_listeners()
  assert not compiled
  trials = trials_of(tmp_path)
  void = [trial for trial in trials if trial["void"]]
  assert void and len(void) < len(trials)
  assert all("remote policy: " in trial["void"] for trial in void)
  *_, timing = metrics.read(tmp_path / "timing.jsonl")
  assert timing["remote/failed"] > 0 and timing["remote/failed"] * 2 <= talker.lost
  assert [record["rollout/void"] for record in metrics.read(tmp_path / "metrics.jsonl")] != [0] * 4


def test_an_update_without_any_answer_stops_the_run_which_plays_it_again(
  no_weights, tmp_path, capsys
):
  """A server that is back is asked for the tasks that it never saw."""
  gone, written = [], tmp_path / "cut" / "metrics.jsonl"
  talker = Talker(lambda seed: gone and len(metrics.read(written)) >= 3)
  with serving(talker) as url:
    place = f"--config.remote.url={url}"
    assert run.main(flags(tmp_path / "whole", place, *QUICK)) == 0
    gone.append(True)
    assert run.main(flags(tmp_path / "cut", place, *QUICK)) == 3
    out = capsys.readouterr().out
    assert "stopped: in update 4 all 2 trials were void (remote policy:" in out
    gone.clear()
    assert run.main(flags(tmp_path / "cut", place, *QUICK, "--resume")) == 0
  assert trials_of(tmp_path / "cut") == trials_of(tmp_path / "whole")
  assert memory_of(tmp_path / "cut") == memory_of(tmp_path / "whole")


def test_what_a_server_of_ids_and_retrospex_need_is_said_before_there_is_a_run(tmp_path, capsys):
  def ids(handler, body):
    one = {"text": "x", "token_ids": [5], "logprobs": {"token_logprobs": [-1.0]}}
    listing = {"data": [{"id": "m", "owned_by": "memrl_jax"}]}
    return 200, listing if not body else {"choices": [one | {"finish_reason": "length"}]}

  with serving(ids) as url:
    assert run.main(flags(tmp_path / "run", f"--config.remote.url={url}", *NO_MODEL)) == 2
    error = capsys.readouterr().err
    assert "tokenizer of its model is needed here: no model in no/such/model" in error
    place = [
      f"--workdir={tmp_path / 'run'}",
      f"--config.remote.url={url}",
      "--config.remote.api=chat",
    ]
    assert run.main(["--config=experiments/retrospex_lab.py:smoke", *place]) == 2
    assert "weighs responses by their log-probs" in capsys.readouterr().err
  assert not (tmp_path / "run").exists()


def test_a_memory_is_filled_in_rounds_with_the_words_of_a_server(no_weights, tmp_path):
  """--mode=adapt needs a run of weights only where weights were trained."""
  with serving(Talker(lambda seed: False)) as url:
    place = [f"--config.remote.url={url}", "--mode=adapt", "--config.adapt.rounds=1"]
    size = ["--config.adapt.tasks=2", "--config.adapt.episodes=1"]
    assert run.main(flags(tmp_path, *place, *size, *QUICK)) == 0
  first, second = metrics.read(tmp_path / "adapt" / "rounds.jsonl")
  assert (first["trials"], second["trials"], first["void"] + second["void"]) == (2, 2, 0)
  assert first["tips_shown"] == 0 < second["tips_shown"]
