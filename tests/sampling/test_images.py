"""An image reaches a model that takes it, and is never left out without a word."""

import json
import logging
import threading

import numpy as np
import pytest

from memrl_jax.envs import base, hle, hle_tasks, pool
from memrl_jax.models import tiny
from memrl_jax.rollout import collect, policies, trial
from memrl_jax.sampling import chat, dialects, images, remote
from memrl_jax.types import Message, Trial
from tests.sampling.test_remote import connect, serving, vllm

PIXEL = "data:image/png;base64,AAAA"
PICTURE = "data:image/png;base64," + "A" * 3_000_000
ROW = {"id": "seen", "question": "What is shown?", "answer": "a cat", "image": PICTURE,
       "answer_type": "exactMatch", "category": "c", "raw_subject": "s"}  # fmt: skip
PICTURED = [Message("system", "s"), Message("user", "look", (PIXEL, "http://a/b.png"))]
PARTS = [{"type": "text", "text": "look"},
         {"type": "image_url", "image_url": {"url": PIXEL}},
         {"type": "image_url", "image_url": {"url": "http://a/b.png"}}]  # fmt: skip


def ask(messages, **more):
  return remote.Ask(np.array([0, 7], np.uint32), 4, messages=messages, **more)


def model(calls, reads="images", fails=lambda body: None):
  """A text chat whose model reads images, does not ("text"), or loses them without a word ("loses")."""
  lock = threading.Lock()

  def answer(handler, body):
    if handler.path == "/v1/models":
      return 200, {"data": [{"id": "m", "owned_by": "somebody"}]}
    if handler.path == "/openapi.json":
      return 404, {"detail": "Not Found"}
    with lock:
      calls.append(json.loads(body))
    parts = [m["content"] for m in calls[-1]["messages"] if isinstance(m["content"], list)]
    pictures = sum(part["type"] == "image_url" for content in parts for part in content)
    if fails(calls[-1]) or (pictures and reads == "text"):
      return fails(calls[-1]) or (400, {"error": {"message": "m is not a multimodal model"}})
    tokens = 9 + 70 * pictures * (reads == "images")
    choice = {"message": {"content": "<action>a cat</action>"}, "finish_reason": "stop"}
    return 200, {"choices": [choice], "usage": {"prompt_tokens": tokens}}

  return answer


# What is sent.


@pytest.mark.parametrize(("api", "fields"), [("chat", 6), ("transformers", 4)])
def test_without_images_a_body_is_what_it_always_was_and_with_them_content_comes_in_parts(
  api, fields
):
  body = dialects.DIALECTS[api].body
  plain = [Message("system", "s"), Message("user", "look")]
  sent = body(ask(plain), "m", "")
  told = [{"role": "system", "content": "s"}, {"role": "user", "content": "look"}]
  assert json.dumps(sent["messages"]) == json.dumps(told) and len(sent) == fields
  pictured = body(ask(PICTURED), "m", "")
  assert pictured["messages"] == [told[0], {"role": "user", "content": PARTS}]
  assert pictured | {"messages": told} == sent  # nothing else knows of an image


def test_text_only_puts_a_line_in_place_of_every_image_and_left_out_counts_them():
  first, second = images.text_only(PICTURED)
  assert first is PICTURED[0]
  assert second == Message("user", f"look\n{images.LEFT_OUT}\n{images.LEFT_OUT}")
  assert images.left_out([first, second]) == 2 and images.left_out(PICTURED) == 0
  assert images.text_only([first, second]) == [first, second]


# Whether a server takes images.


def test_a_model_that_takes_images_gets_them_and_one_without_images_is_asked_nothing(caplog):
  calls = []
  with serving(model(calls)) as url, connect(url) as client:
    client.ask(ask([Message("user", "hi")]))
    assert len(calls) == 1
    for _ in range(2):
      client.ask(ask(PICTURED))
    *probes, first, second = calls[1:]
    assert len(probes) == 2 and all(probe["max_tokens"] == 16 for probe in probes)
    assert first == second and first["messages"][1]["content"] == PARTS
    assert client.counts.images_dropped == 0
  assert caplog.text == ""


@pytest.mark.parametrize(
  ("reads", "options", "reason", "probes"),
  [
    ("text", {}, "takes none (", 2),
    ("loses", {}, "reads as many tokens without an image as with it", 2),
    ("images", {"images": "no"}, "config.remote.images is no", 0),
  ],
)
def test_where_the_model_takes_none_the_prompt_the_counts_and_the_log_say_so(
  reads, options, reason, probes, caplog
):
  calls = []
  with serving(model(calls, reads)) as url, connect(url, **options) as client:
    for _ in range(3):
      client.ask(ask(PICTURED))
    assert len(calls) == probes + 3 and client.counts.images_dropped == 6
  for body in calls[probes:]:
    assert body["messages"][1] == {
      "role": "user", "content": f"look\n{images.LEFT_OUT}\n{images.LEFT_OUT}"
    }  # fmt: skip
  (record,) = caplog.records  # once, not three times
  assert record.levelno == logging.WARNING and reason in record.getMessage()


def test_a_server_that_could_not_be_asked_is_asked_again_and_told_nothing_false():
  """Busy while it is asked about images, then not: the images stay in."""
  calls = []
  busy = lambda body: (503, {}) if len(calls) == 1 else None  # noqa: E731
  with serving(model(calls, fails=busy)) as url, connect(url) as client:
    client.ask(ask(PICTURED))
    assert calls[1]["messages"][1]["content"] == PARTS  # the first was the question, which failed
    client.ask(ask(PICTURED))
    assert len(calls) == 5 and client.counts.images_dropped == 0


def test_a_refused_image_is_named_in_the_failure():
  calls = []
  large = lambda body: (413, {"error": "too large"}) if "http://a" in str(body) else None  # noqa: E731
  with serving(model(calls, fails=large)) as url:
    for option in ("auto", "yes"):
      with connect(url, images=option) as client, pytest.raises(remote.RemoteError) as caught:
        client.ask(ask(PICTURED))
      assert "413: too large (the request carried 2 images" in str(caught.value)
      assert "config.remote.images" in str(caught.value)
    with connect(url) as client, pytest.raises(remote.RemoteError) as caught:
      client.ask(ask([Message("user", "http://a")]))
    assert "413" in str(caught.value) and "image" not in str(caught.value)


def test_token_ids_carry_no_image_and_yes_is_refused_there():
  with serving(vllm([])) as url:
    with pytest.raises(
      remote.RemoteError, match=r"carry no images; set config\.remote\.api to chat"
    ):
      connect(url, images="yes")
    with connect(url) as client:
      client.ask(ask(PICTURED, prompt=np.array([3, 4], np.int32)))
      assert client.counts.images_dropped == 2
  with pytest.raises(ValueError, match="choose one of auto, yes, no"):
    remote.RemoteConfig(images="maybe")


# From a question to its model.


def answered(policy, data):
  """The trial of an HLE question that is asked once."""
  options = hle_tasks.Options(data=str(data), split="all")
  made = Trial("hle", 0, 0, 0)

  async def program(ctx):
    await trial.play(ctx, base.AttemptLog(0, await ctx.open()), (), "reflection_only")

  with pool.EnvPool(hle.FAMILY, options) as envs:
    collect.collect(
      [made], program, lambda trial, request: policy, envs, hle.FAMILY.prompts(options),
      horizon=1, seed=(0,),
    )  # fmt: skip
  return made


@pytest.fixture
def exam(tmp_path):
  path = tmp_path / "hle.jsonl"
  path.write_text(json.dumps(ROW) + "\n")
  return path


def test_a_question_s_image_arrives_at_the_model_and_its_record_stays_small(exam):
  calls = []
  with serving(model(calls)) as url, connect(url) as client:
    sampling = policies.SamplingConfig(play_tokens=8)
    made = answered(policies.RemotePolicy(client, None, sampling, 64), exam)
  assert made.void is None and made.attempts[0].success
  (content,) = [message["content"] for message in calls[-1]["messages"]]
  assert content[1:] == [{"type": "image_url", "image_url": {"url": PICTURE}}]
  assert ROW["question"] in content[0]["text"] and images.LEFT_OUT not in content[0]["text"]
  record = json.loads(json.dumps(made.to_json()))
  (turn,) = record["turns"]
  assert turn["messages"] == [["user", content[0]["text"]]]  # pairs, as in every older file
  (kept,) = turn["images"]
  assert kept["message"] == 0 and kept["media_type"] == "image/png" and len(kept["sha256"]) == 64
  assert len(json.dumps(record)) < 4000
  made.turns[0].messages = [Message(*message) for message in turn["messages"]]
  assert "images" not in made.to_json()["turns"][0]


def test_a_prompt_of_token_ids_says_that_its_image_was_left_out(exam, caplog):
  options = hle_tasks.Options(data=str(exam), split="all")
  log = base.AttemptLog(0, hle.FAMILY.make(options).reset(0))
  request = trial.Generate("play", 0, 0, hle.FAMILY.prompts(options).play, base.View((), log))
  text = chat.load(tiny.tokenizer_directory(), tiny.directory("darkroom"))
  for _ in range(2):
    _, _, prompt = policies.fit(request, text, 10_000)
  (message,) = request.build(request.view)
  bare = text.encode([message._replace(images=())])
  assert text.decode(prompt) == f"{text.decode(bare)}\n{images.LEFT_OUT}"
  assert len(caplog.records) == 1 and "images are left out" in caplog.text
