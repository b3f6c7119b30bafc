"""Our engine as a server: token ids in; ids, log-probs and the version of the weights out.

    python -m memrl_jax.sampling.serve --checkpoint=tiny:darkroom --port=8000

  POST /v1/completions       prompt of token ids; temperature, top_p, top_k, seed, stop_token_ids
  POST /v1/chat/completions  messages in, text out; images are refused
  POST /update_weights       {"path": a directory of weights or of adapters, "version": a larger number}
  GET  /v1/models, /health

Requests that arrive together are sampled together: a single thread drives the engine, and what waits
joins its next round. A request's seed alone decides what is sampled (its 64 bits are the engine's
key), so concurrency changes nothing. A request that comes again under the same X-Request-Id gets the
answer of the first, not a second sample.

The standard library's HTTP server, one thread a connection, does this: nothing else is needed where
every request waits for the engine anyway. It listens on this machine alone; elsewhere it wants a key.
"""

from __future__ import annotations

import argparse
import contextlib
import hmac
import http.server
import json
import os
import pathlib
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from memrl_jax.models import lora, policy, tiny, weights
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import chat, engine, remote
from memrl_jax.sampling.worker import Answer, Counts, Memory, Refusal, Worker
from memrl_jax.types import Message

_MAX_BODY = 16 << 20  # bytes
_IDLE_S = 600.0  # a connection without requests is closed then


class Server:
  """The HTTP side of one engine; `url` is where it listens. Use it as a context manager.

  Raises:
    ValueError: the address is not this machine's alone and there is no key.
  """

  def __init__(
    self,
    cfg: DecoderConfig,
    sampler: engine.Engine,
    text: chat.Chat,
    *,
    model: str,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str = "",
    dtype: weights.Dtype = "float32",
    base: policy.Params | None = None,
  ):
    """base: the weights that the engine has, for adapters to be merged into."""
    if not key and not remote.is_loopback(host):
      raise ValueError(
        f"{host} can be reached from other machines, so the server needs a key; put one into the "
        "environment variable that --key-env names, or listen on 127.0.0.1"
      )
    self.cfg, self.chat, self.model, self.key = cfg, text, model, key.encode()
    self.worker = Worker(sampler)
    self.memory = Memory(self.worker.counts)
    self._dtype = dtype  # of weights that replace these
    self._base = base
    self._http = _Http((host, port), self)
    self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
    shown = f"[{host}]" if ":" in host else host
    self.url = f"http://{shown}:{self._http.server_address[1]}"

  def start(self) -> None:
    self.worker.start()
    self._thread.start()

  def stop(self) -> None:
    """Refuses what is under way and closes every connection."""
    self._http.shutdown()
    self.worker.stop()
    self._http.close_all()

  def __enter__(self) -> Server:
    self.start()
    return self

  def __exit__(self, *exc_info) -> None:
    self.stop()

  @property
  def counts(self) -> Counts:
    return self.worker.counts

  def complete(self, body: dict[str, Any], name: str, raw: bytes) -> dict[str, Any]:
    """/v1/completions."""
    fields = _fields(body, _COMPLETION)
    if fields["logprobs"] not in (None, 0):
      raise Refusal(400, "logprobs above 0 asks for other tokens, which are not kept; use 0")
    prompt = np.array(_ids("prompt", fields["prompt"]), np.int64)
    answer = self._sample(fields, prompt, name, raw)
    ids, logps = answer.done.ids.tolist(), answer.done.logps.tolist()
    choice = {"index": 0, "text": self.chat.decode(ids), "finish_reason": answer.done.finish}
    if fields["return_token_ids"]:
      choice |= {"token_ids": ids, "prompt_token_ids": prompt.tolist()}
    choice["logprobs"] = (
      None
      if fields["logprobs"] is None
      else {"tokens": [f"token_id:{index}" for index in ids], "token_logprobs": logps}
    )
    return self._reply("text_completion", name, choice, len(prompt), answer)

  def converse(self, body: dict[str, Any], name: str, raw: bytes) -> dict[str, Any]:
    """/v1/chat/completions."""
    fields = _fields(body, _CHAT)
    try:
      messages = [Message(str(m["role"]), _text(m["content"])) for m in fields["messages"]]
      prompt = self.chat.encode(messages)
    except (KeyError, TypeError):
      raise Refusal(
        400, "messages is a list of {role, content}, and content a text or a list of parts"
      ) from None
    except ValueError as error:
      raise Refusal(400, str(error)) from None
    answer = self._sample(fields, prompt, name, raw)
    message = {"role": "assistant", "content": self.chat.decode(answer.done.ids)}
    choice = {"index": 0, "message": message, "finish_reason": answer.done.finish}
    return self._reply("chat.completion", name, choice, len(prompt), answer)

  def _sample(self, fields: dict[str, Any], prompt: np.ndarray, name: str, raw: bytes) -> Answer:
    stop = fields["stop_token_ids"]
    request = engine.Request(
      key=_key(fields["seed"]),
      prompt=prompt,
      max_tokens=fields["max_tokens"],
      temperature=fields["temperature"],
      top_p=fields["top_p"],
      top_k=fields["top_k"],
      stop=self.chat.stop_ids if stop is None else tuple(_ids("stop_token_ids", stop)),
    )
    return self.memory.future(name, raw, lambda: self.worker.sample(request)).result()

  def _reply(
    self, kind: str, name: str, choice: dict[str, Any], prompt: int, answer: Answer
  ) -> dict[str, Any]:
    sampled = len(answer.done.ids)
    return {
      "id": name or secrets.token_hex(8),
      "object": kind,
      "created": int(time.time()),
      "model": self.model,
      "weight_version": answer.version,
      "choices": [choice],
      "usage": {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
      },
    }

  def update(self, body: dict[str, Any], name: str, raw: bytes) -> dict[str, Any]:
    """/update_weights. The same version may come again: the reply to the first may have been lost."""
    fields = _fields(body, _UPDATE)
    path = pathlib.Path(fields["path"])
    try:
      if (path / lora.FILE).is_file():
        params = self._with_adapters(path)
      else:
        cfg, params = weights.load_directory(path, dtype=self._dtype)
        if cfg != self.cfg:
          raise Refusal(400, f"{path} holds another architecture than {self.model}")
        self._base = None
    except (OSError, ValueError) as error:
      raise Refusal(400, str(error)) from None
    try:
      self.worker.update(params, fields["version"]).result()
    except ValueError as error:
      raise Refusal(400, str(error)) from None
    return {"success": True, "weight_version": fields["version"]}

  def _with_adapters(self, path: pathlib.Path) -> policy.Params:
    if self._base is None:
      raise Refusal(400, "the weights that adapters belong to were replaced; restart the server")
    return lora.load_merged(path, self._base, self.cfg)

  def models(self) -> dict[str, Any]:
    """/v1/models."""
    entry = {"id": self.model, "object": "model", "created": 0, "owned_by": "memrl_jax"}
    return {"object": "list", "data": [entry | {"weight_version": self.worker.version}]}

  def health(self) -> dict[str, Any]:
    """/health."""
    if self.worker.broken:
      raise Refusal(503, self.worker.broken)
    return {"status": "ok", "weight_version": self.worker.version}


# Field -> (types, default); a field without a default must be there.
_NEEDED = object()
_SAMPLING: dict[str, tuple[tuple[type, ...], Any]] = {
  "model": ((str,), None),
  "max_tokens": ((int,), 16),
  "temperature": ((int, float), 1.0),
  "top_p": ((int, float), 1.0),
  "top_k": ((int,), 0),
  "seed": ((int, type(None)), None),
  "stop_token_ids": ((list, type(None)), None),
  "n": ((int,), 1),
  "stream": ((bool,), False),
}
_COMPLETION = _SAMPLING | {
  "prompt": ((list,), _NEEDED),
  "logprobs": ((int, type(None)), None),
  "return_token_ids": ((bool,), False),
}
_CHAT = _SAMPLING | {"messages": ((list,), _NEEDED)}
_UPDATE = {"path": ((str,), _NEEDED), "version": ((int,), _NEEDED)}


def _fields(body: dict[str, Any], known: dict[str, tuple[tuple[type, ...], Any]]) -> dict[str, Any]:
  """All known fields of a request; a field that would do nothing is refused by name."""
  for name in body:
    if name not in known:
      raise Refusal(400, f"field {name!r} is not known here; known are {', '.join(known)}")
  values = {}
  for name, (kinds, default) in known.items():
    value = body.get(name, default)
    if value is _NEEDED:
      raise Refusal(400, f"field {name!r} is missing")
    right = type(value) in kinds or (name not in body and value is default)
    if not right:
      words = " or ".join(kind.__name__ for kind in kinds)
      raise Refusal(400, f"field {name!r} takes {words}, not {json.dumps(value)[:80]}")
    values[name] = value
  if values.get("n", 1) != 1 or values.get("stream"):
    raise Refusal(400, "one whole answer a request: n must be 1 and stream false")
  return values


def _text(content: Any) -> str:
  """A message's content, which may come in parts; nothing but text can be read here."""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    raise TypeError
  for part in content:
    if part["type"] != "text":
      raise Refusal(400, f"the model here reads text only; leave out the part {part['type']!r}")
  return "\n".join([part["text"] for part in content])


def _ids(name: str, values: list[Any]) -> list[int]:
  if not values and name == "prompt":
    raise Refusal(400, "the prompt is empty")
  if not all(type(value) is int and 0 <= value < 1 << 31 for value in values):
    raise Refusal(400, f"{name} is a list of token ids; text goes to /v1/chat/completions")
  return values


def _key(seed: int | None) -> np.ndarray:
  """The engine's key: the seed's 64 bits, drawn by the system where there is none."""
  number = secrets.randbits(64) if seed is None else seed
  if not -(1 << 63) <= number < 1 << 64:
    raise Refusal(400, f"seed {seed} has more than 64 bits")
  number %= 1 << 64
  return np.array([number >> 32, number & 0xFFFFFFFF], np.uint32)


class _Http(http.server.ThreadingHTTPServer):
  """Knows its open connections, so that stopping leaves none behind."""

  daemon_threads = True
  request_queue_size = 512

  def __init__(self, address: tuple[str, int], owner: Server):
    if ":" in address[0]:
      self.address_family = socket.AF_INET6
    super().__init__(address, _Handler)
    self.owner = owner
    self._open: set[socket.socket] = set()

  def process_request(self, request: Any, client_address: Any) -> None:
    self._open.add(request)
    super().process_request(request, client_address)

  def shutdown_request(self, request: Any) -> None:
    self._open.discard(request)
    super().shutdown_request(request)

  def close_all(self) -> None:
    self.server_close()
    for request in list(self._open):
      with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """A client that went away is no error of ours; anything else is shown."""
    if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
      super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: _Http
  timeout = _IDLE_S
  wbufsize = (
    -1
  )  # one packet a reply: header and body apart would wait for each other's acknowledgement
  disable_nagle_algorithm = True

  def log_message(self, format: str, *args: Any) -> None:
    """Prompts, keys and addresses stay out of the log."""

  def do_GET(self) -> None:
    owner = self.server.owner
    routes = {"/v1/models": owner.models, "/health": owner.health}
    self._answer(routes, lambda route: route())

  def do_POST(self) -> None:
    owner = self.server.owner
    routes = {
      "/v1/completions": owner.complete,
      "/v1/chat/completions": owner.converse,
      "/update_weights": owner.update,
    }
    self._answer(routes, self._post)

  def _post(self, route: Callable[[dict[str, Any], str, bytes], Any]) -> Any:
    # A web page may send text to this machine, but not JSON: no page can drive a server without key.
    if not self.headers.get("Content-Type", "").startswith("application/json"):
      raise Refusal(415, "the body must be JSON, with Content-Type: application/json")
    try:
      body = json.loads(self._raw)
    except ValueError as error:
      raise Refusal(400, f"the body is not JSON ({error})") from None
    if not isinstance(body, dict):
      raise Refusal(400, "the body must be a JSON object")
    model = body.get("model")
    if model is not None and model != self.server.owner.model:
      raise Refusal(404, f"the model here is {self.server.owner.model}, not {model}")
    return route(body, self.headers.get("X-Request-Id", ""), self._raw)

  def _answer(self, routes: dict[str, Any], run: Callable[[Any], Any]) -> None:
    try:
      self._raw = self._body()
      path = self.path.partition("?")[0]
      if path not in routes:
        raise Refusal(404, f"there is no {self.command} {path} here; there is {', '.join(routes)}")
      if path != "/health":
        self._check_key()
      code, reply = 200, run(routes[path])
    except Refusal as error:
      code, reply = error.code, {"error": {"message": str(error), "code": error.code}}
    except ConnectionError:
      raise
    except Exception as error:  # a bug: the client must hear of it, and so must the console
      traceback.print_exc()
      code, reply = 500, {"error": {"message": f"{type(error).__name__}: {error}", "code": 500}}
    data = json.dumps(reply).encode()
    self.send_response(code)
    self.send_header("Content-Type", "application/json")
    self.send_header("Content-Length", str(len(data)))
    self.end_headers()
    self.wfile.write(data)
    self.wfile.flush()

  def _body(self) -> bytes:
    """The body, read before anything is refused: or it would be taken for the next request."""
    length = self.headers.get("Content-Length", "0")
    if not length.isdigit() or int(length) > _MAX_BODY or "Transfer-Encoding" in self.headers:
      self.close_connection = True
      raise Refusal(413, f"a body needs a Content-Length of at most {_MAX_BODY} bytes")
    return self.rfile.read(int(length))

  def _check_key(self) -> None:
    key = self.server.owner.key
    given = self.headers.get("Authorization", "").removeprefix("Bearer ").encode("latin-1")
    if key and not hmac.compare_digest(given, key):
      raise Refusal(401, "the key is missing or wrong; send it as Authorization: Bearer KEY")


def load(checkpoint: str, dtype: weights.Dtype) -> tuple[DecoderConfig, Any, chat.Chat]:
  """(config, params, chat) of "tiny:<family>" or of a directory with weights and tokenizer."""
  if checkpoint.startswith("tiny:"):
    directory = tiny.directory(checkpoint.removeprefix("tiny:"))
  else:
    directory = pathlib.Path(checkpoint).expanduser()
  cfg, params = weights.load_directory(directory, dtype=dtype)
  if tiny.is_tiny(directory):
    return cfg, params, chat.load(tiny.tokenizer_directory(), directory)
  return cfg, params, chat.from_transformers(directory)


def main(argv: Sequence[str] | None = None) -> int:
  """The command; 0 after Ctrl-C or SIGTERM, 2 with one sentence where it cannot start."""
  parser = argparse.ArgumentParser(
    "memrl_jax.sampling.serve",
    description="Serves one model over HTTP: token ids in; ids and log-probs out.",
    allow_abbrev=False,
  )
  add = parser.add_argument
  add("--checkpoint", required=True, metavar="DIR", help="a directory, or tiny:darkroom, ...")
  add("--host", default="127.0.0.1", help="127.0.0.1: this machine alone; others need a key")
  add("--port", type=int, default=8000, help="0: any free one")
  add("--slots", type=int, default=64, help="requests sampled together")
  add(
    "--buckets",
    type=lambda text: tuple(map(int, text.split(","))),
    default=engine.EngineConfig(slots=1).buckets,
    metavar="N,N",
    help="context lengths, tokens; prompt and answer must fit the last",
  )
  add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
  add("--name", help="the model's name in replies; default the checkpoint's")
  add(
    "--key-env",
    default="MEMRL_API_KEY",
    metavar="NAME",
    help="environment variable with the key that requests must carry",
  )
  known = parser.parse_args(argv)
  if not jax.config.jax_compilation_cache_dir:
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(cache / "memrl_jax" / "xla"))
  for number in (signal.SIGINT, signal.SIGTERM):  # also while it loads, and in the background
    signal.signal(number, signal.default_int_handler)
  try:
    cfg, params, text = load(known.checkpoint, known.dtype)
    sampler = engine.Engine(
      cfg, params, engine.EngineConfig(slots=known.slots, buckets=known.buckets)
    )
    sampler.warmup()
    server = Server(
      cfg,
      sampler,
      text,
      model=known.name or known.checkpoint,
      host=known.host,
      port=known.port,
      key=os.environ.get(known.key_env, ""),
      dtype=known.dtype,
      base=params,
    )
    with server:
      print(f"serving {server.model} at {server.url}/v1; Ctrl-C stops it", flush=True)
      threading.Event().wait()
  except (OSError, ValueError) as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    print("stopped", flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
