"""The HTTP service: an OpenAI-compatible proxy that remembers, and a memory's own routes.

  POST /v1/chat/completions  as the model's own, with memories in its messages; `memrl` in the body steers it
  GET  /v1/models            the model's own
  POST /suggest, /feedback   the two calls of a memory
  GET  /memories, /memories/ID, /versions, /diff, /stats, /snapshots, /export
  POST /rollback, /snapshot, /import
  GET  /, /healthz           the page; whether it lives

Every route but the last line's needs a tenant's key where there are keys, and sees that tenant's memory only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import re
import sqlite3
from collections.abc import Callable
from typing import Annotated, Any

import anyio
import anyio.to_thread
import fastapi
import pydantic
from fastapi.exceptions import RequestValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response, StreamingResponse

from memrl_jax.memory import lock
from memrl_jax.memory.records import Locked, StoreError
from memrl_jax.runtime import chat, upstream, views
from memrl_jax.runtime.audit import Audit
from memrl_jax.runtime.config import ServiceConfig
from memrl_jax.runtime.gate import LINES, Gate, Stop, error_body
from memrl_jax.runtime.memory import Memory, Refused, Suggestions, Told, Unknown
from memrl_jax.runtime.tenants import Caller, Keys, Memories

_LOG = logging.getLogger("memrl_jax.runtime")
_PAGE = pathlib.Path(__file__).parent / "page"
_LABEL = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_INT = 2**63 - 1
_THREADS = 160


def _its(request: fastapi.Request) -> Memory:
  """The memory of whoever asks; opening it may take a moment, so this runs in a thread."""
  return request.app.state.service.of(request.scope["caller"])


Its = Annotated[Memory, fastapi.Depends(_its)]
Limit = Annotated[int, fastapi.Query(ge=1, le=500)]
Offset = Annotated[int, fastapi.Query(ge=0, le=10_000_000)]
Version = Annotated[int, fastapi.Query(ge=0, le=_INT)]
Text = Annotated[str, fastapi.Query(max_length=4096)]
Id = Annotated[int, fastapi.Path(ge=1, le=_INT)]


class _Body(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class SuggestBody(_Body):
  task: str
  frozen: bool = False


class FeedbackBody(_Body):
  id: str
  reward: Annotated[float, pydantic.Field(allow_inf_nan=False)]
  trajectory: str | None = None
  success: bool | None = None


class RollbackBody(_Body):
  version: Annotated[int, pydantic.Field(ge=0, le=_INT)]


class SnapshotBody(_Body):
  name: str


class Steer(_Body):
  """The field `memrl` of a chat request: what the task is, an earlier suggestion, or no memories at all."""

  task: str | None = None
  suggestion: str | None = None
  inject: bool = True


class Service:
  """The application over one folder; `app` is ASGI. `close` it, or let the server's lifespan do it."""

  def __init__(
    self,
    folder: str | pathlib.Path,
    open_one: Callable[[pathlib.Path], Memory],
    config: ServiceConfig,
  ):
    self.folder = pathlib.Path(folder).expanduser().absolute()
    self.folder.mkdir(parents=True, exist_ok=True)
    self.config, self.keys = config, Keys(self.folder)
    self._lock = lock.Lock(self.folder / "service.lock", exclusive=True)
    self.memories = Memories(self.folder, open_one)
    self.audit = Audit(self.folder / "audit.jsonl")
    self.upstream = upstream.Upstream(config) if config.upstream else None
    self.app = Gate(self._routes(), keys=self.keys, audit=self.audit, config=config)

  def close(self) -> None:
    self.memories.close()
    self._lock.close()

  def of(self, caller: Caller) -> Memory:
    return self.memories.of(caller.tenant)

  def _routes(self) -> fastapi.FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: fastapi.FastAPI):
      # Feedbacks wait in threads for their common commit; suggestions must not wait behind them.
      anyio.to_thread.current_default_thread_limiter().total_tokens = _THREADS
      yield
      if self.upstream is not None:
        await self.upstream.close()
      await run_in_threadpool(self.close)

    app = fastapi.FastAPI(
      title="memrl_jax.runtime", docs_url=None, redoc_url=None, lifespan=lifespan
    )
    app.state.service = self
    _errors(app, self.folder)
    _look(app, self)
    _change(app, self)
    _proxy(app, self)
    return app


def _look(app: fastapi.FastAPI, service: Service) -> None:
  """Routes that read."""

  @app.get("/healthz")
  def healthz() -> dict[str, str]:
    return {"status": "ok"}

  for path, kind in (
    ("/", "text/html"),
    ("/page.js", "text/javascript"),
    ("/page.css", "text/css"),
  ):
    app.add_api_route(path, _file(path, kind), include_in_schema=False)

  @app.get("/memories")
  def memories(
    memory: Its, query: Text = "", text: Text = "", limit: Limit = 50, offset: Offset = 0
  ) -> dict[str, Any]:
    """By Q; with `query` the nearest to it, with `text` those that contain it."""
    return memory.memories(query=query, text=text, limit=limit, offset=offset)

  @app.get("/memories/{id}")
  def show(memory: Its, id: Id) -> dict[str, Any]:
    return memory.show(id)

  @app.get("/versions")
  def versions(memory: Its, limit: Limit = 50, offset: Offset = 0) -> dict[str, Any]:
    return memory.versions(limit=limit, offset=offset)

  @app.get("/diff")
  def diff(memory: Its, a: Version, b: Version | None = None) -> dict[str, Any]:
    return memory.diff(a, b)

  @app.get("/stats")
  def stats(memory: Its) -> dict[str, Any]:
    return memory.stats()

  @app.get("/snapshots")
  def snapshots(request: fastapi.Request) -> dict[str, Any]:
    return {"snapshots": _snapshots(service, request.scope["caller"])}

  @app.get("/export", response_class=Response)
  def export(memory: Its, at: Version | None = None) -> Response:
    """The memories as JSON lines, for /import."""
    return StreamingResponse(memory.export(at), media_type=LINES)


def _change(app: fastapi.FastAPI, service: Service) -> None:
  """Routes that write."""

  @app.post("/suggest")
  def suggest(memory: Its, body: SuggestBody, request: fastapi.Request) -> dict[str, Any]:
    found = memory.suggest(body.task, frozen=body.frozen)
    request.scope["audit"] = {"suggestion": found.id}
    return suggested(found)

  @app.post("/feedback")
  def feedback(memory: Its, body: FeedbackBody, request: fastapi.Request) -> dict[str, Any]:
    """Once it is answered it is kept. Sent again it changes nothing, so send it until it is answered."""
    found = memory.feedback(body.id, body.reward, body.trajectory, success=body.success)
    request.scope["audit"] = {"suggestion": found.id, "version": found.version}
    return told(found)

  @app.post("/rollback")
  def rollback(memory: Its, body: RollbackBody, request: fastapi.Request) -> dict[str, Any]:
    found = memory.rollback(body.version)
    request.scope["audit"] = {"version": found["version"], "equals": body.version}
    return found

  @app.post("/snapshot")
  def snapshot(memory: Its, body: SnapshotBody, request: fastapi.Request) -> dict[str, Any]:
    """Kept beside the memory under this name; its operator can restore it."""
    caller = request.scope["caller"]
    if not _LABEL.fullmatch(body.name):
      raise Refused(
        "the name of a snapshot is up to 63 of a-z, 0-9, - and _, a letter or digit first"
      )
    there = _snapshots(service, caller)
    if body.name in there:
      raise Stop(409, f"there is a snapshot {body.name} already; choose another name")
    if len(there) >= service.config.snapshots:
      raise Stop(409, f"{len(there)} snapshots are kept, and no more; let the operator remove some")
    request.scope["audit"] = {"name": body.name}
    return memory.snapshot(_snapshot_folder(service, caller) / body.name) | {"name": body.name}

  lines = {"requestBody": {"required": True, "content": {LINES: {"schema": {"type": "string"}}}}}

  @app.post("/import", openapi_extra=lines)
  async def import_(request: fastapi.Request) -> dict[str, Any]:
    """Adds what /export gave."""
    body = await request.body()
    try:
      given = body.decode().split("\n")
    except UnicodeDecodeError:
      raise Refused("the export is no UTF-8; is it the right file?") from None
    found = await run_in_threadpool(lambda: service.of(request.scope["caller"]).import_(given))
    request.scope["audit"] = {"version": found["version"], "given": found["given"]}
    return found


def _proxy(app: fastapi.FastAPI, service: Service) -> None:
  """The model's routes."""
  config = service.config

  def there() -> upstream.Upstream:
    if service.upstream is None:
      raise Stop(501, "no model stands behind this service; start it with --upstream")
    return service.upstream

  @app.get("/v1/models")
  async def models() -> Response:
    return await there().models()

  schema = {
    "type": "object",
    "required": ["messages"],
    "properties": {"messages": {"type": "array"}},
  }
  content = {"application/json": {"schema": schema}}

  @app.post("/v1/chat/completions", openapi_extra={"requestBody": {"content": content}})
  async def completions(request: fastapi.Request) -> Response:
    model, caller = there(), request.scope["caller"]
    body = _parsed(await request.body())
    steer = Steer.model_validate(body.pop("memrl", {}))
    try:
      messages = chat.check(body.get("messages"))
    except ValueError as error:
      raise Refused(str(error)) from None
    task = steer.task or chat.task(messages, config.task)
    headers = upstream.request_id(caller.tenant, request.headers.get("x-request-id", ""))
    if not steer.inject or not task.strip():
      return await model.chat(body, headers, None, _ignore)

    def prepare() -> tuple[Memory, Suggestions]:
      memory = service.of(caller)
      again = steer.suggestion is not None
      return memory, memory.again(steer.suggestion) if again else memory.suggest(task)

    memory, found = await run_in_threadpool(prepare)
    request.scope["audit"] = {"suggestion": found.id}
    body["messages"] = chat.inject(messages, found.prompt, config.place, config.task)

    async def seen(message: dict[str, Any]) -> None:
      await run_in_threadpool(memory.saw, found.id, chat.trajectory(messages, message))

    field = chat.field(found.id, [one.id for one in found.memories])
    return await model.chat(body, headers, field, seen)


async def _ignore(message: dict[str, Any]) -> None:
  pass


def _parsed(raw: bytes) -> dict[str, Any]:
  def refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON")

  try:
    body = json.loads(raw, parse_constant=refuse)
  except (ValueError, RecursionError) as error:
    raise Refused(f"the body is not JSON ({str(error)[:100]})") from None
  if not isinstance(body, dict):
    raise Refused("the body must be a JSON object")
  return body


def suggested(found: Suggestions) -> dict[str, Any]:
  return {
    "id": found.id,
    "prompt": found.prompt,
    "memories": [views.suggestion(one) for one in found.memories],
  }


def told(found: Told) -> dict[str, Any]:
  return found._asdict() | {"q": {str(id): q for id, q in found.q.items()}}


def _snapshot_folder(service: Service, caller: Caller) -> pathlib.Path:
  return service.folder / "snapshots" / caller.tenant


def _snapshots(service: Service, caller: Caller) -> list[str]:
  folder = _snapshot_folder(service, caller)
  return sorted(path.name for path in folder.glob("[!.]*")) if folder.is_dir() else []


def _file(path: str, kind: str) -> Callable[[], FileResponse]:
  file = _PAGE / ("page.html" if path == "/" else path[1:])
  return lambda: FileResponse(file, media_type=kind)


def _errors(app: fastapi.FastAPI, folder: pathlib.Path) -> None:
  """What goes wrong becomes a status and one sentence, which tells a tenant nothing of the machine."""

  def answer(code: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(error_body(code, message), code, headers, "application/json")

  @app.exception_handler(Stop)
  async def stop(request: fastapi.Request, error: Stop) -> Response:
    return answer(error.code, str(error), error.headers)

  @app.exception_handler(Refused)
  async def refused(request: fastapi.Request, error: Refused) -> Response:
    return answer(404 if isinstance(error, Unknown) else 400, str(error))

  @app.exception_handler(sqlite3.Error)
  @app.exception_handler(OSError)
  @app.exception_handler(StoreError)
  async def store(request: fastapi.Request, error: Exception) -> Response:
    own = isinstance(error, StoreError) and not isinstance(error, Locked)
    if (
      own
      and not isinstance(error.__cause__, sqlite3.Error | OSError)
      and str(folder) not in str(error)
    ):
      return answer(400, str(error).rstrip("."))
    _LOG.error("a memory could not be used", exc_info=error)
    return answer(503, "the memory cannot do this now; its operator finds the reason in the log")

  @app.exception_handler(RequestValidationError)
  @app.exception_handler(pydantic.ValidationError)
  async def invalid(request: fastapi.Request, error: Any) -> Response:
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query", "path"))
    return answer(422, f"{where or 'the request'}: {first['msg'][:200]}")

  @app.exception_handler(HTTPException)
  async def http(request: fastapi.Request, error: HTTPException) -> Response:
    words = {404: "there is no such route here", 405: "this route takes another method"}
    return answer(error.status_code, words.get(error.status_code, str(error.detail)), error.headers)

  @app.exception_handler(Exception)
  async def bug(request: fastapi.Request, error: Exception) -> Response:
    _LOG.error("a request failed", exc_info=error)
    return answer(
      500, "the service failed at this request; its operator finds the reason in the log"
    )
