"""The server changes nothing: the same keys give the engine's ids, alone, together and asked again."""

import concurrent.futures
import contextlib
import dataclasses
import json
import socket
import threading

import httpx2
import jax
import numpy as np
import pytest

from memrl_jax.models import weights
from memrl_jax.rollout import pack, policies
from memrl_jax.sampling import engine, remote, serve
from memrl_jax.types import Message
from tests.sampling.tiny_engine import model, new_engine, rollout, settings, text, turns_of


def new_server(params=None, **options):
  cfg, _ = model()
  return serve.Server(cfg, new_engine(params), text(), model="tiny", **options)


@pytest.fixture(scope="module")
def server():
  with new_server() as running:
    yield running


@pytest.fixture
def client(server):
  with remote.Client(remote.RemoteConfig(url=server.url)) as made:
    yield made


def asks(count, seed=0):
  """Requests of all kinds; keys use all 64 bits."""
  rng = np.random.default_rng(seed)
  made = []
  for index in range(count):
    made.append(
      remote.Ask(
        key=rng.integers(0, 1 << 32, 2, np.uint32),
        max_tokens=int(rng.integers(1, 12)),
        prompt=rng.integers(3, 400, rng.integers(1, 30)).astype(np.int32),
        temperature=(0.7, 1.0, 0.0)[index % 3],
        top_p=(1.0, 0.9)[index % 2],
        top_k=(0, 5)[index % 5 == 4],
        stop=text().stop_ids,
      )
    )
  return made


def as_requests(made):
  return [
    engine.Request(a.key, a.prompt, a.max_tokens, a.temperature, a.top_p, a.top_k, a.stop)
    for a in made
  ]


def answers(client, made):
  """Replies in the order of the requests, all under way at once."""
  order = [client.submit(ask) for ask in made]
  found = {}
  while client.pending:
    found.update(client.poll())
  return [found[ticket] for ticket in order]


def same(replies, completions):
  for reply, done in zip(replies, completions, strict=True):
    np.testing.assert_array_equal(reply.ids, done.ids)
    # Who is sampled together, and in which shapes, moves a float32 logit by a few 1e-6.
    np.testing.assert_allclose(reply.logps, done.logps, atol=1e-5, rtol=0)
    assert reply.finish == done.finish


def without_probes(own):
  """A client that has sent nothing yet."""
  client = remote.Client(remote.RemoteConfig(url=own.url, api="chat"))
  client.gives = client.gives._replace(api="memrl_jax", ids=True, logps=True, tempered=True)
  return client


def test_one_after_the_other_they_are_the_engine_s_bit_for_bit():
  made = asks(8, seed=3)
  local = new_engine()
  with new_server() as own, without_probes(own) as client:
    for ask, request in zip(made, as_requests(made), strict=True):
      reply, (done,) = client.ask(ask), local.generate([request])
      assert reply.ids.tobytes() == done.ids.tobytes()
      assert reply.logps.tobytes() == done.logps.tobytes()


class Parrot:
  """An engine that answers every request with one completion."""

  def __init__(self, done):
    self._done, self._tickets = done, []

  @property
  def pending(self):
    return len(self._tickets)

  def submit(self, request):
    self._tickets.append(len(self._tickets))
    return self._tickets[-1]

  def run_round(self):
    tickets, self._tickets = self._tickets, []
    return [(ticket, self._done) for ticket in tickets]


def test_ids_and_log_probs_travel_without_losing_a_bit():
  rng = np.random.default_rng(0)
  logps = -rng.random(64, np.float32) * 10.0 ** rng.integers(-30, 2, 64).astype(np.float32)
  done = engine.Completion(np.arange(64, dtype=np.int32), logps, "length")
  with (
    serve.Server(model()[0], Parrot(done), text(), model="parrot") as own,
    without_probes(own) as client,
  ):
    reply = client.ask(remote.Ask(np.zeros(2, np.uint32), 64, np.array([1])))
  np.testing.assert_array_equal(reply.ids, done.ids)
  assert reply.logps.tobytes() == done.logps.tobytes()


def test_the_same_keys_give_the_ids_and_log_probs_of_the_engine(client):
  made = asks(24)
  assert any(int(ask.key[0]) >> 31 for ask in made)  # negative as a signed 64-bit number
  completions = new_engine().generate(as_requests(made))
  same(answers(client, made), completions)
  same([client.ask(ask) for ask in made[:6]], completions[:6])  # alone as in company
  assert {done.finish for done in completions} == {"stop", "length"}


def test_a_rollout_through_the_server_is_the_local_rollout_and_trains_the_same(client):
  context = max(settings().engine.buckets)
  sampling = settings().sampling
  local = rollout(policies.LanguagePolicy(new_engine(), text(), sampling, context))
  away = rollout(policies.RemotePolicy(client, text(), sampling, context))
  for here, there in zip(local, away, strict=True):
    a, b = here.to_json(), there.to_json()
    for x, y in zip(a["turns"], b["turns"], strict=True):
      np.testing.assert_allclose(x.pop("logps"), y.pop("logps"), atol=1e-5, rtol=0)
    assert json.dumps(a) == json.dumps(b)
  assert {turn.phase for turn in turns_of(away)} == {"play", "reflect"}
  rows = pack.trainable(turns_of(away))
  assert len(rows) == len(pack.trainable(turns_of(local))) > 0
  assert client.counts.untrainable == client.counts.failed == 0
  assert client.counts.answered == len(turns_of(away))


def post(server, path, body, name="", key=""):
  headers = {"X-Request-Id": name} if name else {}
  headers |= {"Authorization": f"Bearer {key}"} if key else {}
  url = f"{server.url}{path}"
  return httpx2.post(url, json=body, headers=headers, trust_env=False, timeout=60)


BODY = {"prompt": [5, 6, 7], "max_tokens": 6, "seed": 3, "logprobs": 0, "return_token_ids": True}


def test_a_request_that_comes_again_is_answered_from_memory(server):
  before = dataclasses.replace(server.counts)
  with concurrent.futures.ThreadPoolExecutor(4) as threads:  # also while the first is under way
    replies = list(threads.map(lambda _: post(server, "/v1/completions", BODY, "once"), range(4)))
  assert len({json.dumps(reply.json()["choices"]) for reply in replies}) == 1
  assert server.counts.sampled == before.sampled + 1
  assert server.counts.repeated == before.repeated + 3
  other = post(server, "/v1/completions", BODY | {"seed": 4}, "once")
  assert other.status_code == 409 and "another request" in other.json()["error"]["message"]


@pytest.mark.parametrize(
  ("path", "change", "code", "words"),
  [
    ("/v1/completions", {"prompt": "text"}, 400, "'prompt' takes list"),
    ("/v1/completions", {"prompt": ["a"]}, 400, "list of token ids"),
    ("/v1/completions", {"prompt": []}, 400, "empty"),
    ("/v1/completions", {"prompt": [4000]}, 400, "vocabulary"),
    ("/v1/completions", {"max_tokens": 4000}, 400, "context"),
    ("/v1/completions", {"temperature": "hot"}, 400, "'temperature' takes"),
    ("/v1/completions", {"temperature": -1}, 400, "temperature >= 0"),
    ("/v1/completions", {"presence_penalty": 1}, 400, "'presence_penalty' is not known"),
    ("/v1/completions", {"logprobs": 5}, 400, "use 0"),
    ("/v1/completions", {"stream": True}, 400, "stream false"),
    ("/v1/completions", {"seed": 1 << 64}, 400, "64 bits"),
    ("/v1/completions", {"model": "gpt"}, 404, "the model here is tiny"),
    ("/v1/answers", {}, 404, "there is no POST /v1/answers"),
    ("/v1/chat/completions", {}, 400, "'prompt' is not known"),
    ("/update_weights", {}, 400, "'prompt' is not known"),
  ],
)
def test_what_cannot_be_answered_truthfully_is_refused_in_a_sentence(
  server, path, change, code, words
):
  reply = post(server, path, BODY | change)
  assert (reply.status_code, words in reply.json()["error"]["message"]) == (code, True), reply.text
  assert post(server, "/v1/completions", BODY).status_code == 200


def test_a_web_page_cannot_drive_the_server(server):
  # A page may send "simple" requests anywhere, but application/json makes the browser ask first.
  reply = httpx2.post(
    f"{server.url}/update_weights",
    content=json.dumps({"path": "/x", "version": 1}),
    headers={"Content-Type": "text/plain"},
    trust_env=False,
    timeout=60,
  )
  assert reply.status_code == 415


def test_a_key_is_asked_for_and_beyond_this_machine_needed():
  with new_server(key="secret") as guarded:
    assert post(guarded, "/v1/completions", BODY).status_code == 401
    assert post(guarded, "/v1/completions", BODY, key="wrong").status_code == 401
    assert post(guarded, "/v1/completions", BODY, key="secret").status_code == 200
    assert httpx2.get(f"{guarded.url}/health", trust_env=False, timeout=60).status_code == 200
  with pytest.raises(ValueError, match="needs a key"):
    new_server(host="0.0.0.0")


def test_new_weights_change_answers_and_version_and_older_ones_are_refused(tmp_path):
  cfg, params = model()
  other = jax.tree.map(lambda leaf: leaf * 0.9, params)
  weights.save_directory(tmp_path / "other", cfg, other)
  made = asks(8, seed=1)
  requests = as_requests(made)
  before, after = (new_engine(p).generate(requests) for p in (params, other))
  with new_server() as own, remote.Client(remote.RemoteConfig(url=own.url)) as client:
    replies = answers(client, made)
    same(replies, before)
    assert {reply.version for reply in replies} == {0}
    client.push(tmp_path / "other")
    assert client.version == 1
    replies = answers(client, made)
    same(replies, after)
    assert {reply.version for reply in replies} == {1}
    assert any(a.ids.tolist() != b.ids.tolist() for a, b in zip(before, after, strict=True))
    update = {"path": str(tmp_path / "other"), "version": 0}
    assert post(own, "/update_weights", update).status_code == 409
    missing = post(own, "/update_weights", {"path": str(tmp_path / "none"), "version": 2})
    assert missing.status_code == 400 and "none" in missing.json()["error"]["message"]
    assert (
      httpx2.get(f"{own.url}/health", trust_env=False, timeout=60).json()["weight_version"] == 1
    )


def test_what_is_half_sampled_ends_with_the_weights_it_began_with(tmp_path):
  cfg, params = model()
  weights.save_directory(tmp_path, cfg, jax.tree.map(lambda leaf: leaf * 0.9, params))
  long = [ask._replace(max_tokens=30, stop=()) for ask in asks(8, seed=2)]
  completions = new_engine().generate(as_requests(long))
  worker_params = weights.load_directory(tmp_path)[1]
  with new_server() as own:
    futures = [own.worker.sample(request) for request in as_requests(long)]
    own.worker.update(worker_params, 1).result()
    found = [future.result() for future in futures]
  assert {answer.version for answer in found} == {0}
  same([answer.done for answer in found], completions)


def test_weights_that_are_not_finite_break_the_server_loudly(capsys):
  poisoned = jax.tree.map(lambda leaf: leaf * np.nan, model()[1])
  with new_server(poisoned) as own:
    reply = post(own, "/v1/completions", BODY)
    assert reply.status_code == 503 and "not finite" in reply.json()["error"]["message"]
    assert httpx2.get(f"{own.url}/health", trust_env=False, timeout=60).status_code == 503
  assert "FloatingPointError" in capsys.readouterr().err


def test_new_weights_come_in_the_precision_of_the_old(tmp_path):
  cfg, params = model()
  weights.save_directory(tmp_path, cfg, params)
  parrot = Parrot(None)
  parrot.set_params = lambda params: setattr(parrot, "params", params)
  with serve.Server(cfg, parrot, text(), model="parrot", dtype="bfloat16") as own:
    update = {"path": str(tmp_path), "version": 1}
    assert post(own, "/update_weights", update).json() == {"success": True, "weight_version": 1}
  assert {str(leaf.dtype) for leaf in jax.tree.leaves(parrot.params)} == {"bfloat16"}


def test_a_chat_is_the_engine_s_answer_as_text(server):
  messages = [{"role": "user", "content": "(1,2) up"}]
  reply = post(server, "/v1/chat/completions", {"messages": messages, "seed": 9, "max_tokens": 2})
  prompt = text().encode([Message("user", "(1,2) up")])
  request = engine.Request(np.array([0, 9], np.uint32), prompt, 2, stop=text().stop_ids)
  (done,) = new_engine().generate([request])
  (choice,) = reply.json()["choices"]
  assert choice["message"] == {"role": "assistant", "content": text().decode(done.ids)}
  assert reply.json()["usage"]["prompt_tokens"] == len(prompt)


def test_a_chat_s_parts_are_read_as_text_and_an_image_is_refused_and_then_left_out(server, caplog):
  parts = [{"type": "text", "text": "(1,2)"}, {"type": "text", "text": "up"}]
  for more, code in (([], 200), ([{"type": "image_url", "image_url": {"url": "data:,"}}], 400)):
    asked = {"messages": [{"role": "user", "content": parts + more}], "seed": 9, "max_tokens": 2}
    reply = post(server, "/v1/chat/completions", asked)
    assert reply.status_code == code, reply.text
    if more:
      assert "reads text only; leave out the part 'image_url'" in reply.text
    else:
      assert reply.json()["usage"]["prompt_tokens"] == len(
        text().encode([Message("user", "(1,2)\nup")])
      )
  for content in (None, 3, [{"type": "text"}], ["up"], [{"type": "text", "text": None}]):
    asked = {"messages": [{"role": "user", "content": content}]}
    assert post(server, "/v1/chat/completions", asked).status_code == 400
  with remote.Client(remote.RemoteConfig(url=server.url, api="chat")) as client:
    message = Message("user", "(1,2) up", ("data:image/png;base64,AA==",))
    client.ask(remote.Ask(np.array([0, 9], np.uint32), 2, messages=[message]))
    assert client.counts.images_dropped == 1 and "reads text only" in caplog.text


def test_stopping_refuses_those_who_wait_and_leaves_no_connection():
  own = new_server()
  own.worker._engine.run_round = lambda: threading.Event().wait(0.05) or []  # never ends a request
  own.start()
  with concurrent.futures.ThreadPoolExecutor(1) as threads:
    waiting = threads.submit(post, own, "/v1/completions", BODY)
    while not own.worker._jobs:
      threading.Event().wait(0.01)
    own.stop()
    with contextlib.suppress(httpx2.TransportError):  # closed before the refusal was written
      assert waiting.result().status_code == 503
  with pytest.raises(httpx2.ConnectError):
    post(own, "/v1/completions", BODY)


def test_the_command_says_in_a_sentence_why_it_cannot_start(capsys):
  assert serve.main(["--checkpoint=tiny:chess"]) == 2
  assert "no tiny checkpoint" in capsys.readouterr().err
  with socket.create_server(("127.0.0.1", 0)) as taken:
    cfg, params, text_ = serve.load("tiny:darkroom", "float32")
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match="in use"):
      serve.Server(cfg, new_engine(params), text_, model="tiny", port=port)
