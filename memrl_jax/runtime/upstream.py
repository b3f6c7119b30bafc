"""The model behind the proxy: any OpenAI-compatible server, asked as the client asked, its answers as they are.

Its failures pass on with their status and words. What has no status gets one: 502 where nobody answers or
the answer breaks off, 504 where it takes too long.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx2
from starlette.responses import Response, StreamingResponse

from memrl_jax.memory.episodic_write import Write
from memrl_jax.runtime import chat
from memrl_jax.runtime.config import ServiceConfig
from memrl_jax.runtime.gate import Stop, error_body
from memrl_jax.sampling import images, remote

SUGGESTION = "X-Memrl-Suggestion"
_PASSED = (
  "content-type",
  "retry-after",
  "openai-processing-ms",
)  # none tells of other tenants' use
Seen = Callable[[dict[str, Any]], Awaitable[None]]


class Upstream:
  """One server. Keys of tenants never reach it; its own key reaches no tenant."""

  def __init__(self, config: ServiceConfig):
    self._config = config
    self.url = config.upstream.rstrip("/").removesuffix("/v1")
    self._http = httpx2.AsyncClient(
      base_url=self.url,
      headers={"Authorization": f"Bearer {config.upstream_key}"} if config.upstream_key else {},
      timeout=httpx2.Timeout(config.read_s, connect=config.connect_s),
      limits=httpx2.Limits(max_connections=None, max_keepalive_connections=64),
      trust_env=not remote.is_loopback(httpx2.URL(config.upstream).host),
    )

  async def close(self) -> None:
    await self._http.aclose()

  async def models(self) -> Response:
    return _whole(await self._send("GET", "/v1/models"))

  async def chat(
    self, body: dict[str, Any], headers: dict[str, str], field: dict[str, Any] | None, seen: Seen
  ) -> Response:
    """The answer to a chat request, with our field in it; `seen` gets the message of a good one.

    field None: nothing was suggested, and the answer passes as it is.
    """
    stream = body.get("stream") is True
    content = json.dumps(body).encode()
    response = await self._send("POST", "/v1/chat/completions", content, headers, stream=stream)
    mark = {SUGGESTION: field["suggestion"]} if field else {}
    kind = response.headers.get("content-type", "")
    if stream and response.status_code == 200 and kind.startswith("text/event-stream"):
      parts = self._events(response, field, seen)
      return StreamingResponse(parts, 200, headers=_headers(response) | mark)
    if stream:
      await self._read(response)
    answer = _whole(response)
    answer.headers.update(mark)
    if response.status_code == 200 and field:
      try:
        found = response.json()
      except ValueError:
        return answer
      if isinstance(found, dict):
        answer = Response(
          json.dumps(found | {"memrl": field}), 200, headers=_headers(response) | mark
        )
        message = chat.reply(found)
        if message is not None:
          await seen(message)
    return answer

  async def _events(
    self, response: httpx2.Response, field: dict[str, Any] | None, seen: Seen
  ) -> AsyncIterator[bytes]:
    events, told = chat.Stream(field or {}), False
    try:
      async for data in response.aiter_bytes():
        out = events.feed(data) if field else data
        if events.done and not told:
          told = True
          await seen(events.message())  # before the client can know that it is over
        if out:
          yield out
      if rest := events.end():
        yield rest
      if field and not told:
        await seen(events.message())
    except httpx2.TransportError as error:  # too late for a status: an event that clients raise
      late = isinstance(error, httpx2.TimeoutException)
      stop = _broken(error, self._config)
      yield b"\n\ndata: " + error_body(504 if late else 502, str(stop)) + b"\n\n"
    finally:
      await response.aclose()

  async def _send(
    self,
    method: str,
    path: str,
    content: bytes | None = None,
    headers: dict[str, str] | None = None,
    *,
    stream: bool = False,
  ) -> httpx2.Response:
    more = {"Content-Type": "application/json"} if content is not None else {}
    request = self._http.build_request(
      method, path, content=content, headers=more | (headers or {})
    )
    try:
      return await self._http.send(request, stream=stream)
    except (httpx2.TransportError, httpx2.DecodingError) as error:
      raise _broken(error, self._config) from None

  async def _read(self, response: httpx2.Response) -> None:
    try:
      await response.aread()
    except (httpx2.TransportError, httpx2.DecodingError) as error:
      raise _broken(error, self._config) from None
    finally:
      await response.aclose()


def request_id(tenant: str, given: str) -> dict[str, str]:
  """A client's X-Request-Id, made its own tenant's: a server may answer equal ids with equal answers."""
  if not given:
    return {}
  return {"X-Request-Id": hashlib.sha256(f"{tenant}\n{given}".encode()).hexdigest()[:32]}


def writer(config: ServiceConfig, model: str, max_tokens: int = 1024) -> Write:
  """Asks the upstream's model to sum an episode up, for `runtime.open(write=...)`."""
  url = config.upstream.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
  client = httpx2.Client(
    headers={"Authorization": f"Bearer {config.upstream_key}"} if config.upstream_key else {},
    timeout=httpx2.Timeout(config.read_s, connect=config.connect_s),
    trust_env=not remote.is_loopback(httpx2.URL(config.upstream).host),
  )

  def write(messages) -> str:
    said = [images.wire(message) for message in messages]
    asked = {"model": model, "messages": said, "max_tokens": max_tokens}
    response = client.post(url, json=asked)
    response.raise_for_status()
    return chat.text((chat.reply(response.json()) or {}).get("content"))

  return write


def _headers(response: httpx2.Response) -> dict[str, str]:
  return {name: response.headers[name] for name in _PASSED if name in response.headers}


def _whole(response: httpx2.Response) -> Response:
  return Response(response.content, response.status_code, headers=_headers(response))


def _broken(error: Exception, config: ServiceConfig) -> Stop:
  """What went wrong on the way, without the address: it is nothing of the tenant's."""
  if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
    return Stop(502, "the model's server does not answer; try again later")
  if isinstance(error, httpx2.TimeoutException):
    return Stop(504, f"the model's server said nothing for {config.read_s:g} s; try again later")
  return Stop(502, f"the model's server broke off ({type(error).__name__}); try again")
