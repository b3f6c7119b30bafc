"""In front of every route: whose key, how often, how large, how long; and a line in the audit log.

An ASGI middleware. A refusal is one sentence in the shape that OpenAI's clients read. What comes through has
`scope["caller"]`, and its whole body is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders

from memrl_jax.runtime.audit import Audit
from memrl_jax.runtime.config import ServiceConfig
from memrl_jax.runtime.limits import Limits
from memrl_jax.runtime.memory import TENANT, Refused
from memrl_jax.runtime.tenants import Caller, Keys
from memrl_jax.sampling import remote

_LOG = logging.getLogger("memrl_jax.runtime")
PUBLIC = ("/", "/page.js", "/page.css", "/healthz", "/openapi.json")
LINES = "application/x-ndjson"
_SAFE = {
  "X-Content-Type-Options": "nosniff",
  "X-Frame-Options": "DENY",
  "Referrer-Policy": "no-referrer",
  "Cache-Control": "no-store",
  "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}


class Stop(Exception):
  """An answer other than 200, with one sentence."""

  def __init__(self, code: int, message: str, headers: dict[str, str] | None = None):
    super().__init__(message)
    self.code, self.headers = code, headers or {}


def error_body(code: int, message: str) -> bytes:
  kinds = {401: "authentication_error", 429: "rate_limit_error"}
  kind = kinds.get(code, "server_error" if code >= 500 else "invalid_request_error")
  return json.dumps({"error": {"message": message, "type": kind, "code": code}}).encode()


class Gate:
  def __init__(self, app: Any, *, keys: Keys, audit: Audit, config: ServiceConfig):
    self._app, self._keys, self._audit, self._config = app, keys, audit, config
    self._limits = Limits(rate=config.rate, burst=config.burst, inflight=config.inflight)
    self._imports = Limits(rate=1, burst=5, inflight=1)  # large bodies, one at a time
    # Wrong keys: enough for people; a flood of them is answered, and leaves no more lines.
    self._strangers = Limits(rate=5, burst=50, inflight=1)

  async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
      return await self._app(scope, receive, send)
    if scope["type"] != "http":  # a websocket: there is none here
      return await send({"type": "websocket.close", "code": 1000})
    status = 500
    started = time.monotonic()
    caller: Caller | None = None
    headers = Headers(scope=scope)

    async def answer(message: dict[str, Any]) -> None:
      nonlocal status
      if message["type"] == "http.response.start":
        status = message["status"]
        MutableHeaders(scope=message).update(_SAFE)
      await send(message)

    entered: list[Limits] = []
    try:
      self._check_host(headers)
      if scope["path"] in PUBLIC:
        return await self._app(scope, receive, answer)
      caller = self._caller(headers)
      for limits in (self._limits, self._imports)[: 2 if scope["path"] == "/import" else 1]:
        self._wait(limits.enter(caller.tenant, started))
        entered.append(limits)
      scope["caller"] = caller
      body = await self._body(scope, headers, receive)
      await self._app(scope, _replay(body, receive), answer)
    except Stop as error:
      await refuse(answer, error.code, str(error), error.headers)
    except Refused as error:
      _LOG.error("nobody is let in: %s", error)
      await refuse(answer, 503, "the service cannot read its keys; tell its operator", {})
    finally:
      for limits in entered:
        limits.leave(caller.tenant)
      if scope["path"] not in PUBLIC and not (caller is None and status == 429):
        self._audit.write(
          caller.tenant if caller else "",
          caller.key if caller else "",
          f"{scope['method']} {scope['path'][:200]}",
          status=status,
          ms=round(1e3 * (time.monotonic() - started), 1),
          client=(scope.get("client") or ("",))[0],
          **scope.get("audit", {}),
        )

  def _check_host(self, headers: Headers) -> None:
    """Without keys the service is for programs of this machine, not for web pages under another name."""
    if self._keys.tenants():
      return
    host = headers.get("host", "")
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if not remote.is_loopback(name):
      raise Stop(
        421, "without keys this service answers to localhost only; make a key, or use 127.0.0.1"
      )

  def _caller(self, headers: Headers) -> Caller:
    if not self._keys.tenants():
      return Caller(TENANT, "")
    scheme, _, key = headers.get("authorization", "").partition(" ")
    caller = self._keys.caller(key.strip()) if scheme.lower() == "bearer" else None
    if caller is None:
      self._wait(self._strangers.enter("", time.monotonic()))
      self._strangers.leave("")
      sentence = "the key is missing or wrong; send it as Authorization: Bearer KEY"
      raise Stop(401, sentence, {"WWW-Authenticate": "Bearer"})
    return caller

  def _wait(self, seconds: float) -> None:
    if seconds:
      after = max(1, math.ceil(seconds))
      sentence = f"too many requests at once; try again in {after} s"
      raise Stop(429, sentence, {"Retry-After": str(after)})

  async def _body(self, scope: dict[str, Any], headers: Headers, receive: Any) -> bytes:
    """The whole body, or a refusal before more of it is read than may come."""
    if scope["method"] not in ("POST", "PUT", "PATCH"):
      return b""
    imports = scope["path"] == "/import"
    wanted = LINES if imports else "application/json"
    most = self._config.import_body if imports else self._config.body
    # A web page may send plain text anywhere without asking, but neither of these.
    if headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
      raise Stop(415, f"the body must come with Content-Type: {wanted}")
    long = Stop(413, f"the body is over {most} bytes; send less at once", {"Connection": "close"})
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
      raise long
    parts, size = [], 0
    try:
      async with asyncio.timeout(self._config.body_s):
        while True:
          message = await receive()
          if message["type"] == "http.disconnect":
            raise Stop(400, "the connection ended in the middle of the body")
          parts.append(message.get("body", b""))
          size += len(parts[-1])
          if size > most:
            raise long
          if not message.get("more_body"):
            return b"".join(parts)
    except TimeoutError:
      sentence = f"the body did not arrive within {self._config.body_s:g} s; send it again"
      raise Stop(408, sentence, {"Connection": "close"}) from None


def _replay(body: bytes, receive: Any) -> Any:
  """A `receive` that gives the body, then what really comes: that the client has gone."""
  given = False

  async def again() -> dict[str, Any]:
    nonlocal given
    if given:
      return await receive()
    given = True
    return {"type": "http.request", "body": body, "more_body": False}

  return again


async def refuse(send: Any, code: int, message: str, headers: dict[str, str]) -> None:
  data = error_body(code, message)
  pairs = {"Content-Type": "application/json", "Content-Length": str(len(data))} | headers
  raw = [(name.lower().encode(), value.encode()) for name, value in pairs.items()]
  await send({"type": "http.response.start", "status": code, "headers": raw})
  await send({"type": "http.response.body", "body": data})
