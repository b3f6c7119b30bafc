"""The proxy with OpenAI's own client library, unchanged, and in front of our own sampler."""

import pytest

pytest.importorskip("openai", reason="the client library comes with the extra `real`")
pytest.importorskip("fastapi", reason="the service needs the extra `runtime`")
pytest.importorskip("uvicorn", reason="the service needs the extra `runtime`")

import openai
from starlette.responses import JSONResponse

from memrl_jax.runtime import client
from memrl_jax.sampling import serve
from tests.runtime.serving import CONFIG, Model, completion, failing, learn, listening, serving
from tests.sampling import tiny_engine

TASK = "put a clean apple in the fridge"
CALL = {
  "id": "call1",
  "type": "function",
  "function": {"name": "open", "arguments": '{"what": "fridge"}'},
}
TOOL = {"type": "function", "function": {"name": "open", "parameters": {"type": "object"}}}


@pytest.fixture
def model():
  made = Model()
  with listening(made.app) as made.url:
    yield made


@pytest.fixture
def http(tmp_path, model):
  with serving(tmp_path, upstream=f"{model.url}/v1") as made:
    yield made


@pytest.fixture
def ai(http):
  url = f"{str(http.base_url).rstrip('/')}/v1"
  with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
    yield made


def ask(ai, **more):
  messages = [{"role": "user", "content": TASK}]
  return ai.chat.completions.create(model="fake", messages=messages, **more)


def test_an_answer_a_tool_call_and_the_list_of_models(ai, http, model):
  learn(http, TASK, "wash it")
  model.answer = lambda _: JSONResponse(completion(None, tool_calls=[CALL]))
  answer = ask(ai, tools=[TOOL], tool_choice="auto", temperature=0.5)
  call = answer.choices[0].message.tool_calls[0]
  assert call.function.name == "open" and answer.usage.total_tokens == 2
  assert answer.memrl["memories"] == [1]
  assert model.asked[0]["tools"] == [TOOL] and model.asked[0]["temperature"] == 0.5
  assert "wash it" in model.asked[0]["messages"][0]["content"]
  told = http.post("/feedback", json={"id": answer.memrl["suggestion"], "reward": 1}).json()
  kept = http.get(f"/memories/{told['kept']}").json()
  assert 'calls open {"what": "fridge"}' in kept["text"] and kept["parents"] == [1]
  assert [one.id for one in ai.models.list()] == ["fake"]


def test_a_stream_with_its_suggestion_in_header_and_first_chunk(ai, http, model):
  model.answer = lambda _: model.stream(["wash", " it"])
  raw = ai.chat.completions.with_raw_response.create(
    model="fake", messages=[{"role": "user", "content": TASK}], stream=True
  )
  chunks = list(raw.parse())
  assert "".join(one.choices[0].delta.content for one in chunks) == "wash it"
  assert chunks[0].memrl["suggestion"] == raw.headers["X-Memrl-Suggestion"]
  model.answer = lambda _: JSONResponse(completion("fine"))
  turn = ask(ai, extra_body={"memrl": {"suggestion": chunks[0].memrl["suggestion"]}})
  assert turn.memrl == chunks[0].memrl


def test_failures_are_the_library_s_own_exceptions(ai, http, model):
  model.answer = lambda _: failing(429, {"error": {"message": "slow"}}, {"Retry-After": "7"})
  with pytest.raises(openai.RateLimitError, match="slow"):
    ask(ai)
  model.answer = lambda _: failing(400, {"error": {"message": "bad tool"}})
  with pytest.raises(openai.BadRequestError, match="bad tool"):
    ask(ai, stream=True)

  async def crash():
    raise OSError("cable")

  model.answer = lambda _: model.stream(["one"], then=crash)
  with pytest.raises(openai.APIError, match="broke off"):
    list(ask(ai, stream=True))
  with pytest.raises(openai.NotFoundError, match="no suggestion"):
    ask(ai, extra_body={"memrl": {"suggestion": "gone"}})


def test_in_front_of_our_own_sampler_a_memory_enters_what_is_sampled_from(tmp_path):
  cfg, _ = tiny_engine.model()
  own = serve.Server(cfg, tiny_engine.new_engine(), tiny_engine.text(), model="tiny")
  with own, serving(tmp_path, CONFIG, upstream=own.url) as http:
    url = str(http.base_url).rstrip("/")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as ai:

      def say():
        message = {"role": "user", "content": "(1,2) up left"}
        return ai.chat.completions.create(model="tiny", messages=[message], max_tokens=4, seed=3)

      first = say()
      assert first.choices[0].message.content is not None and first.memrl["memories"] == []
      with client.Client(url) as memory:
        assert memory.feedback(first.memrl["suggestion"], 1.0)["kept"] == 1
      second = say()
      assert second.memrl["memories"] == [1]
      assert second.usage.prompt_tokens > first.usage.prompt_tokens
      with pytest.raises(openai.BadRequestError, match="stream false"):
        ai.chat.completions.create(
          model="tiny", messages=[{"role": "user", "content": "go"}], stream=True
        )
      assert ai.models.list().data[0].id == "tiny"
