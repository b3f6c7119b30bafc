"""A service and a fake model's server in this process, on loopback, for tests."""

import asyncio
import contextlib
import json
import threading
import time

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from memrl_jax import runtime
from memrl_jax.memory import embed
from memrl_jax.memory.episodic import EpisodicConfig
from memrl_jax.runtime import memory, service

CONFIG = runtime.RuntimeConfig(
  episodic=EpisodicConfig(build="trajectory", update="vanilla", delta=0.3)
)


@contextlib.contextmanager
def listening(app):
  """The address of an ASGI application."""
  server = uvicorn.Server(
    uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=5)
  )
  thread = threading.Thread(target=server.run)
  thread.start()
  while not server.started:
    assert thread.is_alive()
    time.sleep(0.005)
  try:
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
  finally:
    server.should_exit = True
    thread.join()


@contextlib.contextmanager
def serving(folder, config=CONFIG, write=None, **settings):
  """A service over `folder`, and a client of it."""
  made = service.Service(
    folder,
    lambda place: memory.open_memory(place, config, embedder=embed.Hash(64), write=write),
    runtime.ServiceConfig(**settings),
  )
  with listening(made.app) as url, httpx2.Client(base_url=url, trust_env=False, timeout=30) as http:
    yield http


class Model:
  """An OpenAI-compatible server that keeps what it was asked and answers what it is told to."""

  def __init__(self):
    self.asked, self.headers, self.gone = [], [], threading.Event()
    self.answer = lambda body: JSONResponse(completion("fine"), headers={"X-Secret": "upstream"})
    routes = [
      Route("/v1/models", self._models),
      Route("/v1/chat/completions", self._chat, methods=["POST"]),
    ]
    self.app = Starlette(routes=routes)

  async def _models(self, request):
    return JSONResponse({"object": "list", "data": [{"id": "fake", "object": "model"}]})

  async def _chat(self, request):
    self.headers.append(dict(request.headers))
    self.asked.append(json.loads(await request.body()))
    answer = self.answer(self.asked[-1])
    return await answer if asyncio.iscoroutine(answer) else answer

  def stream(self, words, *, then=None, pause=0.0):
    """Events with these words; `then` raises in the middle, or waits for ever."""

    async def events():
      try:
        for n, word in enumerate(words):
          yield sse(chunk(word, n))
          await asyncio.sleep(pause)
        if then is not None:
          await then()
        yield b": a comment\n\ndata: [DONE]\n\n"
      finally:
        self.gone.set()

    return StreamingResponse(events(), media_type="text/event-stream")


def sse(value):
  return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(word, n):
  choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
  return {
    "id": "c1",
    "object": "chat.completion.chunk",
    "created": n,
    "model": "fake",
    "choices": [choice],
  }


def completion(text, **message):
  choice = {
    "index": 0,
    "message": {"role": "assistant", "content": text} | message,
    "finish_reason": "stop",
  }
  return {"id": "c1", "object": "chat.completion", "created": 1, "model": "fake", "choices": [choice],
          "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}  # fmt: skip


def failing(status, body, headers=None):
  return Response(json.dumps(body), status, headers, "application/json")


def bearer(key):
  return {"Authorization": f"Bearer {key}"}


def learn(http, task, trajectory, reward=1.0, **more):
  """One suggestion with its feedback; the feedback's answer."""
  found = http.post("/suggest", json={"task": task}, **more)
  assert found.status_code == 200, found.text
  body = {"id": found.json()["id"], "reward": reward, "trajectory": trajectory}
  told = http.post("/feedback", json=body, **more)
  assert told.status_code == 200, told.text
  return told.json()
