"""The chat proxy: what reaches the model, what comes back, and what fails as what it is."""

import asyncio
import json
import time

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra `runtime`")
pytest.importorskip("uvicorn", reason="the service needs the extra `runtime`")

from starlette.responses import Response

from memrl_jax import runtime
from memrl_jax.memory.episodic import EpisodicConfig
from memrl_jax.runtime import chat, upstream
from memrl_jax.runtime.tenants import Keys
from tests.runtime.serving import (
  Model,
  bearer,
  completion,
  failing,
  learn,
  listening,
  serving,
  sse,
)

TASK = "put a clean apple in the fridge"
PATH = "/v1/chat/completions"
TOOLS = [
  {"type": "function", "function": {"name": "open", "parameters": {"x": [1.5, None, 2**60]}}}
]


@pytest.fixture
def model():
  made = Model()
  with listening(made.app) as made.url:
    yield made


def body(*messages, **more):
  return {"model": "fake", "messages": list(messages) or [user(TASK)]} | more


def user(content):
  return {"role": "user", "content": content}


def test_a_request_without_memories_passes_word_for_word(tmp_path, model):
  with serving(tmp_path, upstream=f"{model.url}/v1", upstream_key="up") as http:
    asked = body(
      {"role": "system", "content": "s", "name": "n"}, user(TASK), tools=TOOLS, seed=2**53 + 1,
      logit_bias={"5": -0.1}, tool_choice="auto", metadata={"a": {"b": []}}, temperature=1e-7,
    )  # fmt: skip
    answer = http.post(PATH, json=asked, headers={"X-Request-Id": "r1", "X-Private": "p"})
    assert model.asked == [asked]
    found = answer.json()
    id = answer.headers["X-Memrl-Suggestion"]
    assert found.pop("memrl") == {"suggestion": id, "memories": []} and found == completion("fine")
    sent = model.headers[0]
    assert sent["authorization"] == "Bearer up" and "x-private" not in sent
    assert sent["x-request-id"] not in ("", "r1") and "X-Secret" not in answer.headers
    assert http.get("/v1/models").json()["data"][0]["id"] == "fake"


def test_memories_go_into_the_messages_and_the_loop_closes(tmp_path, model):
  with serving(tmp_path, upstream=model.url) as http:
    model.answer = lambda _: Response(json.dumps(completion("wash it </memory> first")))
    first = http.post(PATH, json=body())
    told = http.post("/feedback", json={"id": first.json()["memrl"]["suggestion"], "reward": 1})
    assert told.json()["kept"] == 1  # what the proxy saw is the trajectory
    asked = body({"role": "system", "content": "be brief"}, user("put a clean pear in the fridge"))
    second = http.post(PATH, json=asked)
    assert second.json()["memrl"]["memories"] == [1]
    system, task = model.asked[1]["messages"]
    assert task == asked["messages"][1]
    assert system["content"].startswith("be brief\n\nWhat worked") and system["content"].endswith(
      "</memory>"
    )
    assert "assistant: wash it ‹/memory> first" in system["content"]
    assert system["content"].count("</memory>") == 1
    id = second.headers["X-Memrl-Suggestion"]
    assert http.post("/feedback", json={"id": id, "reward": -1}).json()["q"] == {"1": -0.3}


def test_the_field_memrl_steers_and_never_reaches_the_model(tmp_path, model):
  with serving(tmp_path, upstream=model.url, task="first") as http:
    learn(http, TASK, "wash it")
    first = http.post(PATH, json=body(user(TASK), user("the fridge is open")))
    id = first.json()["memrl"]["suggestion"]
    http.post("/rollback", json={"version": 0})
    turn = body(user("something else"), memrl={"suggestion": id})
    assert http.post(PATH, json=turn).headers["X-Memrl-Suggestion"] == id
    assert (
      model.asked[1]["messages"][0] == model.asked[0]["messages"][0]
    )  # the same block, turn by turn
    off = http.post(PATH, json=body(memrl={"inject": False}))
    assert "X-Memrl-Suggestion" not in off.headers and off.json() == completion("fine")
    assert model.asked[2] == body()
    assert all("memrl" not in asked for asked in model.asked)
    for steer, code in (({"x": 1}, 422), ({"suggestion": "unknown"}, 404), (7, 422), (None, 422)):
      answer = http.post(PATH, json=body(memrl=steer))
      assert answer.status_code == code and answer.json()["error"]["message"]
    assert len(model.asked) == 3
    for bad in (b"[]", b"{", b'{"messages": [{}]}', b'{"messages": NaN}', b"[" * 99999):
      answer = http.post(PATH, content=bad, headers={"Content-Type": "application/json"})
      assert answer.status_code == 400, answer.text


def test_a_stream_passes_event_by_event_with_our_field_in_the_first(tmp_path, model):
  with serving(tmp_path, upstream=model.url) as http:
    model.answer = lambda _: model.stream(["wash", " it", " – ä"], pause=0.05)
    times, raw = [], b""
    with http.stream("POST", PATH, json=body(stream=True)) as answer:
      id = answer.headers["X-Memrl-Suggestion"]
      assert answer.headers["Content-Type"].startswith("text/event-stream")
      for part in answer.iter_raw():
        times.append(time.monotonic())
        raw += part
    lines = raw.decode().split("\n")
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [e.pop("memrl", None) for e in events] == [
      {"suggestion": id, "memories": []},
      None,
      None,
    ]
    assert "".join(e["choices"][0]["delta"]["content"] for e in events) == "wash it – ä"
    assert lines[-5:] == [": a comment", "", "data: [DONE]", "", ""]
    assert times[-1] - times[0] > 0.08, "it was held back until its end"
    told = http.post("/feedback", json={"id": id, "reward": 1}).json()
    assert "assistant: wash it – ä" in http.get(f"/memories/{told['kept']}").json()["text"]


def test_failures_of_the_model_are_what_they_are(tmp_path, model):
  with serving(tmp_path, upstream=model.url) as http:
    for status, words in (
      (400, "bad tool"),
      (401, "no quota"),
      (429, "slow down"),
      (503, "loading"),
    ):
      error = {"error": {"message": words, "param": "p"}}
      model.answer = lambda _, s=status, e=error: failing(
        s, e, {"Retry-After": "7", "X-Secret": "s"}
      )
      for stream in (False, True):
        answer = http.post(PATH, json=body(stream=stream))
        assert (answer.status_code, answer.json()) == (status, error)
        assert answer.headers["Retry-After"] == "7" and "X-Secret" not in answer.headers

    async def crash():
      raise OSError("cable")

    model.answer = lambda _: model.stream(["one"], then=crash)
    broken = http.post(PATH, json=body(stream=True)).text
    assert '"one"' in broken and "broke off" in broken and "[DONE]" not in broken
    model.answer = lambda _: Response("no JSON at all", media_type="text/plain")
    assert http.post(PATH, json=body()).text == "no JSON at all"
  with serving(tmp_path, upstream=model.url, read_s=0.4) as http:
    model.answer = lambda _: asyncio.sleep(1.5, Response())
    late = http.post(PATH, json=body())
    assert late.status_code == 504 and "said nothing for 0.4 s" in late.json()["error"]["message"]
    model.answer = lambda _: model.stream(["one"], then=lambda: asyncio.sleep(1.5))
    assert "said nothing" in http.post(PATH, json=body(stream=True)).text
  with serving(tmp_path, upstream="http://127.0.0.1:9/v1") as http:
    nobody = http.post(PATH, json=body())
    assert nobody.status_code == 502 and "does not answer" in nobody.json()["error"]["message"]
    assert http.get("/v1/models").status_code == 502


def test_a_client_that_leaves_ends_the_model_s_stream(tmp_path, model):
  with serving(tmp_path, upstream=model.url) as http:
    model.answer = lambda _: model.stream(["word"] * 10_000, pause=0.01)
    with http.stream("POST", PATH, json=body(stream=True)) as answer:
      next(answer.iter_raw())
    assert model.gone.wait(10)


def test_tenants_meet_neither_in_prompts_nor_at_the_model(tmp_path, model):
  keys = Keys(tmp_path)
  (_, a), (_, b) = keys.add("a"), keys.add("b")
  with serving(tmp_path, upstream=model.url) as http:
    learn(http, TASK, "the vault opens with 4711", headers=bearer(a))
    same = {"X-Request-Id": "same"}
    http.post(PATH, json=body(), headers=bearer(b) | same)
    http.post(PATH, json=body(), headers=bearer(a) | same)
    assert "4711" not in json.dumps(model.asked[0]) and "4711" in json.dumps(model.asked[1])
    assert model.headers[0]["x-request-id"] != model.headers[1]["x-request-id"]
    for sent in model.headers:
      assert not any(key in value for value in sent.values() for key in (a, b))
    assert http.post(PATH, json=body()).status_code == 401 and len(model.asked) == 2


def test_the_model_itself_sums_episodes_up(tmp_path, model):
  settings = runtime.ServiceConfig(upstream=model.url, upstream_key="up")
  paper = runtime.RuntimeConfig(episodic=EpisodicConfig(delta=0.3))
  model.answer = lambda _: Response(json.dumps(completion("1. wash it")))
  with serving(tmp_path, paper, upstream.writer(settings, "fake"), upstream=model.url) as http:
    assert learn(http, TASK, "washed it, stored it")["kept"] is None  # answered before it is asked
    while http.get("/stats").json()["suggestions"]["settled"] != 1:
      time.sleep(0.02)
    assert "Plan: 1. wash it" in http.post("/suggest", json={"task": TASK}).json()["prompt"]
  assert "washed it, stored it" in model.asked[0]["messages"][1]["content"]
  assert model.headers[0]["authorization"] == "Bearer up"


def test_content_parts_are_read_and_the_block_is_one_more():
  parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "u"}}]
  messages = [
    {"role": "developer", "content": parts},
    user(parts),
    {"role": "user", "content": None},
  ]
  assert chat.task(messages, "last") == chat.task(messages, "first") == "look"
  block = {"type": "text", "text": "B"}
  assert chat.inject(messages, "B", "system", "last")[0]["content"] == [*parts, block]
  assert chat.inject(messages, "B", "user", "last")[1]["content"] == [block, *parts]
  assert chat.inject(messages[1:], "B", "system", "last")[0] == {"role": "system", "content": "B"}
  assert chat.inject(messages, "", "system", "last") is messages
  assert messages[0]["content"] is parts and len(parts) == 2


@pytest.mark.parametrize("place", ["system", "user"])
def test_images_pass_to_the_model_and_words_alone_meet_the_memory(tmp_path, model, place):
  """An image of 3 MB fits; neither the search nor what is remembered sees a byte of it."""
  picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 3_000_000}}
  asked = body(user([picture, {"type": "text", "text": TASK}]))
  block = "Rinse it under the tap first."
  with serving(tmp_path, upstream=model.url, place=place) as http:
    first = http.post(PATH, json=asked)
    assert first.status_code == 200 and model.asked == [asked]  # no memory yet: word for word
    told = {"id": first.headers["X-Memrl-Suggestion"], "reward": 1.0}
    assert http.post("/feedback", json=told).status_code == 200
    (kept,) = http.get("/memories").json()["memories"]
    assert f"user: {TASK}\n[image]\nassistant: fine" in kept["text"] and "AAAA" not in kept["text"]
    learn(http, TASK, block)
    assert http.post(PATH, json=asked).status_code == 200
  *system, task = model.asked[1]["messages"]
  if place == "system":
    assert task == asked["messages"][0] and block in system[0]["content"]
  else:
    added, *rest = task["content"]
    assert rest == asked["messages"][0]["content"] and block in added["text"] and not system


def test_a_stream_cut_anywhere_is_the_same_stream():
  call = {"index": 0, "function": {"name": "open", "arguments": '{"x"'}}
  more = {"index": 0, "function": {"arguments": ": 1}"}}
  raw = b'event: x\r\ndata: {"choices": []}\r\n\r\ndata: [1]\n\ndata: oops\n\n'
  raw += sse({"choices": [{"delta": {"content": "é"}}]}).replace(b"\\u00e9", "é".encode())
  raw += sse({"choices": [{"delta": {"tool_calls": [call]}}]})
  raw += sse({"choices": [{"delta": {"tool_calls": [more]}}]}) + b"data: [DONE]"
  whole = chat.Stream({"s": 1})
  wanted = whole.feed(raw) + whole.end()
  assert wanted.count(b'"memrl"') == 1 and wanted.replace(b', "memrl": {"s": 1}', b"") == raw
  assert whole.message()["content"] == "é"
  assert whole.message()["tool_calls"][0]["function"] == {"name": "open", "arguments": '{"x": 1}'}
  for size in (1, 2, 7):
    cut = chat.Stream({"s": 1})
    parts = [cut.feed(raw[n : n + size]) for n in range(0, len(raw), size)]
    assert b"".join(parts) + cut.end() == wanted and cut.message() == whole.message() and cut.done
