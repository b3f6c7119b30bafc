"""A server may fail in any way: an answer is right and counted once, or there is none and it says why."""

import contextlib
import functools
import http.server
import json
import logging
import socket
import threading
import time

import httpx2
import numpy as np
import pytest

from experiments import run
from memrl_jax.methods import lamer
from memrl_jax.models import weights
from memrl_jax.rollout import pack, policies
from memrl_jax.sampling import remote, serve
from memrl_jax.training import evaluate, servers
from memrl_jax.types import Message
from tests.sampling.tiny_engine import model, new_engine, rollout, settings, text, turns_of

QUICK = {"backoff_s": 0.01, "retries": 2}
MESSAGES = [Message("user", "(1,2) up")]


class Handler(http.server.BaseHTTPRequestHandler):
  """Answers with `server.answer(self, body)`: (code, JSON), or None to hang up without a word."""

  protocol_version = "HTTP/1.1"

  def log_message(self, *args):
    pass

  def do_GET(self):
    self._reply(b"")

  def do_POST(self):
    self._reply(self.rfile.read(int(self.headers["Content-Length"])))

  def _reply(self, body):
    answer = self.server.answer(self, body)
    if answer is None:
      self.close_connection = True
      return
    code, data, *headers = answer
    data = data if isinstance(data, bytes) else json.dumps(data).encode()
    self.send_response(code)
    for name, value in headers:
      self.send_header(name, value)
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    with contextlib.suppress(ConnectionError):
      self.wfile.write(data)


@contextlib.contextmanager
def serving(answer):
  """A server on loopback that answers by this function."""
  server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  server.answer, server.daemon_threads = answer, True
  thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
  thread.start()
  yield f"http://127.0.0.1:{server.server_address[1]}"
  server.shutdown()
  server.server_close()


@contextlib.contextmanager
def faulty(target, fault):
  """A proxy in front of `target`; `fault(ticket, attempt)` names what goes wrong, or None."""
  tries: dict[str, int] = {}

  def answer(handler, body):
    name = handler.headers.get("X-Request-Id", "")
    attempt = tries[name] = tries.get(name, -1) + 1
    ticket = int(name.split("-")[1]) if name and "probe" not in name else None
    kind = fault(ticket, attempt) if ticket is not None else None
    if kind == "drop":
      return None
    if kind in (429, 500, 503):
      return kind, {"error": {"message": "injected"}}, ("Retry-After", "0")
    headers = {"X-Request-Id": name, "Content-Type": "application/json"}
    url = f"{target}{handler.path}"
    reply = httpx2.request(
      handler.command, url, content=body, headers=headers, trust_env=False, timeout=60
    )
    if kind == "lost":
      return None
    if kind == "slow":
      time.sleep(4)
    if kind == "garbage":
      return 200, reply.content[:-7]
    data = reply.json()
    if kind == "short":
      data["choices"][0]["logprobs"]["token_logprobs"].pop()
    if kind == "bare":
      del data["choices"][0]["token_ids"], data["choices"][0]["logprobs"]
    return reply.status_code, data

  with serving(answer) as url:
    yield url


FAULTS = ("drop", "lost", "slow", "garbage", "short", "bare", 429, 500, 503)


@pytest.fixture(scope="module")
def server():
  cfg, _ = model()
  with serve.Server(cfg, new_engine(), text(), model="tiny") as running:
    yield running


def asks(count):
  rng = np.random.default_rng(5)
  return [
    remote.Ask(rng.integers(0, 1 << 32, 2, np.uint32), 6, rng.integers(3, 400, 9).astype(np.int32))
    for _ in range(count)
  ]


def answers(client, made):
  order = [client.submit(ask) for ask in made]
  found = {}
  while client.pending:
    found.update(client.poll())
  return [found[ticket] for ticket in order]


def push(client, params):
  write = functools.partial(weights.save_directory, cfg=model()[0], params=params)
  servers.push(client, functools.partial(write, dtype=client.config.dtype))


def connect(url, **options):
  return remote.Client(remote.RemoteConfig(url=url, **(QUICK | options)))


def test_any_fault_once_changes_no_answer_and_samples_nothing_twice(server):
  made = asks(2 * len(FAULTS))
  with connect(server.url) as client:
    clean = answers(client, made)
  sampled, repeated = server.counts.sampled, server.counts.repeated
  plan = lambda ticket, attempt: None if attempt else FAULTS[ticket % len(FAULTS)]  # noqa: E731
  with faulty(server.url, plan) as url, connect(url, read_s=3.0, retries=6) as client:
    probes = server.counts.sampled - sampled
    found = answers(client, made)
    for a, b in zip(found, clean, strict=True):
      assert a.ids.tolist() == b.ids.tolist()
      np.testing.assert_allclose(a.logps, b.logps, atol=1e-5, rtol=0)
    assert server.counts.sampled - sampled - probes == len(made)
    # drop and the three codes never reached the server; the other five were answered from memory
    # (or more, where a busy machine takes longer than 3 s).
    assert server.counts.repeated - repeated >= 2 * 5
    counts = client.counts
    assert (counts.asked, counts.answered, counts.failed) == (len(made), len(made), 0)
    assert counts.retried >= len(made)
    assert counts.ids == sum(len(reply.ids) for reply in found)


def records(trials):
  made = [trial.to_json() for trial in trials]
  for turn in (turn for record in made for turn in record["turns"]):
    del turn["logps"], turn["advantage"], turn["advantage_terms"]  # of the whole group
  return made


def test_a_server_that_fails_for_good_voids_the_trials_it_failed_and_no_other(server):
  context, sampling = max(settings().engine.buckets), settings().sampling
  with connect(server.url) as client:
    clean = rollout(policies.RemotePolicy(client, text(), sampling, context))
  always = lambda ticket, attempt: 500 if ticket % 17 == 3 else None  # noqa: E731
  with faulty(server.url, always) as url, connect(url) as client:
    found = rollout(policies.RemotePolicy(client, text(), sampling, context))
    void = [trial for trial in found if trial.void]
    assert 0 < len(void) == client.counts.failed < len(found)
  for trial in void:
    assert "remote policy" in trial.void and "500: injected (3 tries)" in trial.void
  good = [index for index, trial in enumerate(found) if not trial.void]
  assert [records(found)[i] for i in good] == [records(clean)[i] for i in good]
  assert all(turn.advantage is None for turn in turns_of(void))  # no reward of 0


def test_replies_with_ids_are_trained_on_and_text_is_left_out_and_counted(server):
  """The same model, spoken to as a text chat."""
  context, sampling = max(settings().engine.buckets), settings().sampling
  with connect(server.url) as client:
    trials = rollout(policies.RemotePolicy(client, text(), sampling, context))
    assert pack.trainable(turns_of(trials)) and not client.counts.untrainable
    client.check_trainable(1.0)
  with connect(server.url, api="chat") as client:
    trials = rollout(policies.RemotePolicy(client, None, sampling, context))
    turns = turns_of(trials)
    assert not any(trial.void for trial in trials) and all(turn.sample.text for turn in turns)
    for turn in turns:
      sample = turn.sample
      assert len(sample.ids) == len(sample.logps) == len(sample.prompt_ids) == 0
    assert any(turn.advantage for turn in turns)  # credit alone would have trained on them
    assert pack.trainable(turns) == []
    assert client.counts.untrainable == client.counts.answered == len(turns)
    with pytest.raises(remote.RemoteError, match="nothing can be trained on its replies"):
      client.check_trainable(1.0)


def test_a_server_of_ids_needs_the_tokenizer(server):
  with connect(server.url) as client, pytest.raises(ValueError, match="tokenizer"):
    policies.RemotePolicy(client, None, settings().sampling, 64)


def test_errors_at_the_door_are_one_sentence(server, monkeypatch):
  with socket.create_server(("127.0.0.1", 0)) as free:
    closed = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
  other = lambda handler, body: (200, {"hello": "world"})  # noqa: E731
  busy = lambda handler, body: (429, {"error": {"message": "slow down"}})  # noqa: E731
  refusing = lambda handler, body: (403, {"detail": "no"})  # noqa: E731
  with serving(other) as wrong, serving(busy) as full, serving(refusing) as locked:
    for url, options, words in (
      (closed, {}, "no server answers at"),
      (server.url, {"model": "gpt"}, "serves tiny, not 'gpt'"),
      (wrong, {}, "lists no models"),
      (full, {}, "answered 429: slow down"),
      (locked, {"key_env": "SOME_KEY"}, "environment variable SOME_KEY"),
    ):
      with pytest.raises(remote.RemoteError) as caught:
        connect(url, **options)
      assert words in str(caught.value) and "\n" not in str(caught.value)
  for options, words in (
    ({"url": "localhost:8000"}, "no server's address"),
    ({"url": "http://x", "api": "grpc"}, "'grpc' is not known"),
    ({"concurrency": 0}, "concurrency must be"),
    ({"read_s": 0.0}, "read_s must be"),
  ):
    with pytest.raises(ValueError, match=words):
      remote.RemoteConfig(**options)


def test_the_key_is_sent_and_never_shown(monkeypatch, caplog):
  seen = []

  def answer(handler, body):
    seen.append(handler.headers.get("Authorization"))
    if handler.path == "/v1/models":
      return 200, {"data": [{"id": "m", "owned_by": "somebody"}]}
    return 400, {"error": {"message": f"bad request by {seen[-1]}"}}  # some servers echo it

  monkeypatch.setenv("MEMRL_API_KEY", "sk-very-secret")
  with caplog.at_level(logging.DEBUG), serving(answer) as url, connect(url) as client:
    (failure,) = answers(client, [remote.Ask(np.zeros(2, np.uint32), 4, messages=MESSAGES)])
  assert set(seen) == {"Bearer sk-very-secret"}
  shown = f"{failure} {client!r} {client.config!r} {caplog.text}"
  assert "bad request by Bearer ***" in shown and "secret" not in shown


# The dialects, spoken as the servers' documentation has them, with a toy policy behind.

LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0])


def toy(seed, temperature, count):
  """(ids, log-probs at T, log-probs at 1) of `count` draws from softmax(LOGITS / T)."""

  def logp(T):
    return LOGITS / T - np.log(np.sum(np.exp(LOGITS / T)))

  rng = np.random.default_rng(seed % (1 << 63))
  ids = [int(i) for i in rng.choice(5, count, p=np.exp(logp(temperature)))]
  return ids, [float(logp(temperature)[i]) for i in ids], [float(logp(1.0)[i]) for i in ids]


def vllm(calls, raw=True, old=False):
  def answer(handler, body):
    if handler.path == "/v1/models":
      return 200, {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]}
    body = json.loads(body)
    calls.append((handler.path, body))
    if handler.path == "/collective_rpc":
      return 200, {"results": [None]}
    if handler.path == "/reset_prefix_cache":
      return 200, b""
    ids, warm, cold = toy(body["seed"], body["temperature"], body["max_tokens"])
    choice = {"index": 0, "text": "x", "finish_reason": "length", "stop_reason": None}
    logps = cold if raw else warm
    choice["logprobs"] = {"tokens": [f"token_id:{i}" for i in ids], "token_logprobs": logps}
    return 200, {"choices": [choice if old else choice | {"token_ids": ids}]}

  return answer


def sglang(calls, version, updates=True):
  def answer(handler, body):
    if handler.path == "/v1/models":
      return 200, {"object": "list", "data": [{"id": "m", "owned_by": "sglang"}]}
    body = json.loads(body)
    calls.append((handler.path, body))
    if handler.path == "/update_weights_from_disk" and updates:
      return 200, {"success": True, "message": "Succeeded to update model weights."}
    if handler.path != "/generate":
      return 404, {"detail": "Not Found"}
    sampling = body["sampling_params"]
    ids, warm, _ = toy(
      sampling["sampling_seed"], sampling["temperature"], sampling["max_new_tokens"]
    )
    meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "weight_version": version()}
    meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(warm, ids, strict=True)]
    return 200, {"text": "x", "output_ids": ids, "meta_info": meta}

  return answer


ASK = remote.Ask(np.array([1 << 31, 7], np.uint32), 4, np.array([3, 4], np.int32), stop=(2,))


def test_seeds_carry_the_key():
  assert ASK.seed() == 7 - (1 << 63)  # its 64 bits as a signed number
  assert ASK.seed(31) == 7  # the high half folded onto the low one, cut to 31 bits
  assert len({ASK._replace(key=np.array(k, np.uint32)).seed(31) for k in ((1, 0), (0, 0))}) == 2


@pytest.mark.parametrize("old", [False, True])
def test_vllm_s_log_probs_are_used_at_the_temperature_they_belong_to(old):
  calls = []
  with serving(vllm(calls, raw=True, old=old)) as url, connect(url) as client:
    assert client.gives == remote.Gives("vllm", "m", ids=True, logps=True, tempered=False)
    ids, _, cold = toy(ASK.seed(), 1.0, 4)
    reply = client.ask(ASK)
    assert reply.ids.tolist() == ids
    np.testing.assert_allclose(reply.logps, cold, atol=1e-6)
    warm = client.ask(ASK._replace(temperature=0.7))
    assert len(warm.ids) == len(warm.logps) == 0 and client.counts.untrainable == 1
    client.check_trainable(1.0)
    with pytest.raises(remote.RemoteError, match="processed_logprobs"):
      client.check_trainable(0.7)
  sent = calls[-1][1]
  assert (sent["prompt"], sent["stop_token_ids"], sent["return_token_ids"]) == ([3, 4], [2], True)
  with serving(vllm(calls, raw=False)) as url, connect(url) as client:
    assert client.gives.tempered
    ids, tempered, _ = toy(ASK.seed(), 0.7, 4)
    reply = client.ask(ASK._replace(temperature=0.7))
    assert reply.ids.tolist() == ids
    np.testing.assert_allclose(reply.logps, tempered, atol=1e-6)


def test_sglang_s_native_call_gives_ids_and_log_probs():
  calls = []
  with serving(sglang(calls, lambda: "default")) as url, connect(f"{url}/v1/") as client:
    assert client.gives == remote.Gives("sglang", "m", ids=True, logps=True, tempered=True)
    reply = client.ask(ASK._replace(temperature=0.7))
    ids, tempered, _ = toy(ASK.seed(31), 0.7, 4)
    assert (reply.ids.tolist(), reply.version) == (ids, 0)
    np.testing.assert_allclose(reply.logps, tempered, atol=1e-6)
  assert calls[-1][1]["sampling_params"]["top_k"] == -1  # its word for "all"


def test_new_weights_go_to_each_server_in_its_own_words(tmp_path):
  path = str(tmp_path)
  calls = []
  with serving(vllm(calls)) as url, connect(url) as client:
    client.push(tmp_path)
  rpc = {"method": "reload_weights", "kwargs": {"weights_path": path}}
  assert calls[-2:] == [("/collective_rpc", rpc), ("/reset_prefix_cache", {})]
  calls = []
  with serving(sglang(calls, lambda: "0")) as url, connect(url) as client:
    client.push(tmp_path, 5)
    assert client.version == 5
  update = {"model_path": path, "weight_version": "5"}
  assert calls[-1] == ("/update_weights_from_disk", update)
  with serving(sglang([], lambda: "0", updates=False)) as url, connect(url) as client:
    with pytest.raises(remote.RemoteError, match=r"404.*SGLang-JAX has no such call"):
      client.push(tmp_path)
    assert client.version == 0
  chat = lambda handler, body: (200, {"data": [{"id": "m"}]})  # noqa: E731
  refused = pytest.raises(remote.RemoteError, match="takes no new weights over HTTP")
  with serving(chat) as url, connect(url) as client, refused:
    client.push(tmp_path)


def test_params_are_pushed_through_a_shared_directory(server, tmp_path):
  import jax

  cfg, params = model()
  other = jax.tree.map(lambda leaf: leaf * 0.9, params)
  own = serve.Server(cfg, new_engine(), text(), model="tiny")
  with own, connect(own.url, weights=str(tmp_path)) as client:
    made = asks(4)
    before = answers(client, made)
    client.submit(made[0])
    with pytest.raises(ValueError, match="1 requests are under way"):
      push(client, other)
    client.poll()
    push(client, other)
    after = answers(client, made)
    assert {reply.version for reply in after} == {1}
    assert [r.ids.tolist() for r in after] != [r.ids.tolist() for r in before]
    push(client, params)
    again = answers(client, made)
    assert {reply.version for reply in again} == {2}
    assert [r.ids.tolist() for r in again] == [r.ids.tolist() for r in before]
    assert [place.name for place in tmp_path.iterdir()] == ["000002"]
  with (
    connect(server.url) as client,
    pytest.raises(remote.RemoteError, match=r"config\.remote\.weights"),
  ):
    push(client, params)


def test_replies_of_old_weights_are_dropped_and_counted(tmp_path):
  versions = []
  calls = []
  versions_or_2 = lambda: versions.pop(0) if versions else "2"  # noqa: E731
  with serving(sglang(calls, versions_or_2)) as url, connect(url) as client:
    client.push(tmp_path, 2)
    versions += ["1", "0"]  # what two replicas that missed an update would say
    assert client.ask(ASK).version == 2
    assert (client.counts.stale, client.counts.answered) == (2, 1)
    names = [body["rid"] for path, body in calls if path == "/generate"][-3:]
    assert len(set(names)) == 3  # a server that remembers ids must not repeat the old answer
    versions += ["1"] * 3
    (failure,) = answers(client, [ASK])
    assert "answers with weights 1, and 2 were pushed" in failure.reason
    versions += ["3"]
    (failure,) = answers(client, [ASK])
    assert "another run uses this server" in failure.reason


def test_a_text_chat_refuses_what_it_cannot_be_told():
  chat = lambda handler, body: (200, {"data": [{"id": "m"}]})  # noqa: E731
  with serving(chat) as url, connect(url) as client:
    ask = remote.Ask(np.zeros(2, np.uint32), 4, messages=MESSAGES, top_k=3)
    (failure,) = answers(client, [ask])
    assert "a text chat has no top_k" in failure.reason


# Through the command line.

LAMER = ["--config=experiments/lamer_darkroom.py:smoke", "--config.eval.tasks=8"]


def test_an_evaluation_through_run_py_equals_the_local_one(server, tmp_path, capsys):
  place = [f"--workdir={tmp_path}", f"--config.remote.url={server.url}/v1"]
  assert run.main([*LAMER, "--mode=eval", *place]) == 0
  assert "report: " in capsys.readouterr().out
  (record,) = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
  assert record["server"]["api"] == "memrl_jax" and record["label"] == "remote"
  s = settings("eval.tasks=8")
  sampling = policies.SamplingConfig(
    s.eval.temperature, 1.0, 0, s.sampling.play_tokens, s.sampling.reflect_tokens
  )
  local = policies.LanguagePolicy(new_engine(), text(), sampling, max(s.engine.buckets))
  arms = {"memory": lamer.trial(s.method)}
  evaluator = evaluate.Evaluator(settings("eval.tasks=8", "eval.arms=memory"), arms)
  wanted, _ = evaluator.run(local, step=0, label="local")
  assert record["arms"]["memory"] == wanted["arms"]["memory"]
  assert record["arms"]["memory"]["void"] == 0


def test_training_on_a_server_is_refused_where_it_cannot_be_true(server, tmp_path, capsys):
  place = [f"--workdir={tmp_path}", f"--config.remote.url={server.url}/v1"]
  assert run.main([*LAMER, *place, "--config.remote.api=chat"]) == 2
  error = capsys.readouterr().err
  assert "gives no sampled ids with their log-probs" in error and error.count("\n") == 1
  assert run.main([*LAMER, *place]) == 2
  assert "(config.remote.weights)" in capsys.readouterr().err
  assert run.main([*LAMER, *place, "--config.eval.swap=base", "--mode=eval"]) == 2
  assert "leave base out" in capsys.readouterr().err


def test_an_evaluation_whose_server_is_gone_ends_in_a_sentence(server, tmp_path, capsys):
  with faulty(server.url, lambda ticket, attempt: 500) as url:
    place = [f"--workdir={tmp_path}", f"--config.remote.url={url}/v1"]
    quick = ["--config.remote.retries=1", "--config.remote.backoff_s=0.01"]
    assert run.main([*LAMER, "--mode=eval", *place, *quick]) == 2
  assert "trials were void (remote policy:" in capsys.readouterr().err
