"""A language model behind HTTP: token ids go out, sampled ids and their log-probs come back.

`Client` keeps up to `concurrency` requests under way in threads and hands every ticket exactly one
reply. A request that is sent again has the same id and the same seed, so that it samples the same and
is sampled once where the server remembers ids (ours does). Without ids and log-probs of the sampled
distribution a reply is text only: good for evaluation and frozen policies, never for training.

What a server can give; `Client.gives` measures it when it connects and believes no table:

  server             ids in, out   log-probs of softmax(z/T)  same seed, same text  weights from a path
  memrl_jax (serve)  yes, yes      yes                        yes                   yes, with version
  transformers 5.24  no, no        no                         one at a time         no
  vLLM               yes, yes      T = 1; else (1)            yes, but for batching yes (2), no version
  SGLang             yes, yes      yes (3)                    (4)                   yes, with version
  SGLang-JAX         yes, yes      yes                        (5)                   no

  (1) --logprobs-mode processed_logprobs; its default, raw_logprobs, ignores the temperature
  (2) VLLM_SERVER_DEV_MODE=1: POST /collective_rpc, reload_weights with weights_path
  (3) unless SGLANG_RETURN_ORIGINAL_LOGPROB is set
  (4) --enable-deterministic-inference, then sampling_seed   (5) --enable-deterministic-sampling

Lines 1 and 2 are measured (tests/sampling/test_serve.py, tests/real/test_remote_server.py): of
transformers, that it refuses a prompt of ids, ignores `logprobs`, and samples only where the field
generation_config says so, seeding one generator for all requests. The others are read, not run:
vLLM, docs.vllm.ai (OpenAI-compatible server, v1/sample/sampler, layerwise reload) and its
entrypoints/openai/completion/protocol.py; SGLang, docs.sglang.io (native API, sampling parameters,
SGLang for RL); SGLang-JAX, srt/entrypoints/http_server.py and srt/layers/sampler.py at cddbf6f.
Servers that list another owner (llama.cpp, Ollama, hosted ones) are spoken to as text chats.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import pathlib
import queue
import secrets
import shutil
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx2
import numpy as np

from memrl_jax.types import Message

_NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32)
_LONGEST_WAIT_S = 30.0
_PROBES = 8


class RemoteError(OSError):
  """The server cannot be used like this; the message is one sentence with what to change."""


class _Transient(Exception):
  """May pass; `wait_s` is how long the server asks to be left alone."""

  def __init__(self, reason: str, wait_s: float = 0.0):
    super().__init__(reason)
    self.wait_s = wait_s


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
  """Where the model runs. An empty `url` is the engine of this process.

  url          of the server, with or without /v1
  api          how to speak to it: "auto" asks the server who it is
  model        its name there; "" where the server has only one
  key_env      environment variable with the server's key, if it wants one
  concurrency  most requests under way
  connect_s    seconds to connect; read_s: to wait for a whole reply
  retries      how often a request is sent again; backoff_s: first wait, doubled every time
  max_lag      by how many weight updates a reply may be old
  weights      directory that this process and the server see, for new weights
  """

  url: str = ""
  api: str = "auto"
  model: str = ""
  key_env: str = "MEMRL_API_KEY"
  concurrency: int = 64
  connect_s: float = 5.0
  read_s: float = 300.0
  retries: int = 4
  backoff_s: float = 0.5
  max_lag: int = 0
  weights: str = ""

  def __post_init__(self):
    if self.url and urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
      raise ValueError(
        f"{self.url!r} is no server's address; write http://HOST:PORT/v1 (config.remote.url)"
      )
    if self.api not in ("auto", *DIALECTS):
      raise ValueError(
        f"api {self.api!r} is not known; choose auto or one of {', '.join(DIALECTS)} "
        "(config.remote.api)"
      )
    if self.concurrency < 1 or self.retries < 0 or self.max_lag < 0:
      raise ValueError("concurrency must be >= 1, retries and max_lag >= 0 (config.remote)")
    if self.connect_s <= 0 or self.read_s <= 0 or self.backoff_s < 0:
      raise ValueError("connect_s and read_s must be above 0, backoff_s >= 0 (config.remote)")


class Ask(NamedTuple):
  """One prompt and how to answer it: `prompt` as ids, or `messages` where the server reads text.

  `key` is uint32 [2], as of `engine.Request`; a server's seed is made from it.
  """

  key: np.ndarray
  max_tokens: int
  prompt: np.ndarray | None = None
  messages: Sequence[Message] = ()
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stop: tuple[int, ...] = ()

  def seed(self, bits: int = 64) -> int:
    """The key as one signed whole number of so many bits; of 31 or fewer, a positive one."""
    high, low = (int(part) for part in self.key)
    number = high << 32 | low
    if bits < 64:
      return (number ^ number >> 32) & (1 << bits) - 1
    return number - (1 << 64) if number >> 63 else number


class Reply(NamedTuple):
  """What was sampled. `logps` are nats under softmax(logits / T), one per id, or both are empty.

  `finish` is "stop" where the last id is one of the request's stop ids, else the server's word.
  `version` counts the weight updates before it was sampled.
  """

  text: str
  ids: np.ndarray
  logps: np.ndarray
  finish: str
  version: int


class Failure(NamedTuple):
  """There will be no reply; why not."""

  reason: str


class Gives(NamedTuple):
  """What this server was seen to give. `tempered`: its log-probs follow the temperature."""

  api: str
  model: str
  ids: bool
  logps: bool
  tempered: bool

  @property
  def trainable(self) -> bool:
    return self.ids and self.logps


@dataclasses.dataclass
class Counts:
  """Of a client: requests asked, answered and failed for good; ids answered; sent again; replies
  dropped because their weights were too old; answers that were text only."""

  asked: int = 0
  answered: int = 0
  failed: int = 0
  ids: int = 0
  retried: int = 0
  stale: int = 0
  untrainable: int = 0


# What differs between servers.


class Dialect(NamedTuple):
  """How to speak to a kind of server. `push` names the calls that load weights, or is None."""

  path: str
  body: Callable[[Ask, str, str], dict[str, Any]]
  read: Callable[[dict[str, Any], Ask], Reply]
  push: Callable[[str, int], list[tuple[str, Any]]] | None
  hint: str = ""


def _completions_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  return {
    "model": model,
    "prompt": np.asarray(ask.prompt).tolist(),
    "max_tokens": ask.max_tokens,
    "temperature": ask.temperature,
    "top_p": ask.top_p,
    "top_k": ask.top_k,
    "seed": ask.seed(),
    "stop_token_ids": list(ask.stop),
    "logprobs": 0,
    "return_token_ids": True,
  }


def _vllm_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  # Versions without return_token_ids ignore it and write the ids into logprobs.tokens.
  return _completions_body(ask, model, name) | {"return_tokens_as_token_ids": True}


def _read_completion(reply: dict[str, Any], ask: Ask) -> Reply:
  (choice,) = reply["choices"]
  logprobs = choice.get("logprobs") or {}
  ids = choice.get("token_ids")
  if ids is None:
    marked = [word.partition("token_id:")[2] for word in logprobs.get("tokens") or ()]
    ids = [int(word) for word in marked] if all(marked) else []
  logps = logprobs.get("token_logprobs") or []
  return _reply(
    choice["text"], ids, logps, choice["finish_reason"], reply.get("weight_version"), ask
  )


def _sglang_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  return {
    "input_ids": np.asarray(ask.prompt).tolist(),
    "sampling_params": {
      "max_new_tokens": ask.max_tokens,
      "temperature": ask.temperature,
      "top_p": ask.top_p,
      "top_k": ask.top_k or -1,
      "stop_token_ids": list(ask.stop),
      "sampling_seed": ask.seed(31),
    },
    "return_logprob": True,
    "rid": name,
  }


def _read_sglang(reply: dict[str, Any], ask: Ask) -> Reply:
  about = reply["meta_info"]
  pairs = about.get("output_token_logprobs") or []
  finish = about["finish_reason"]["type"]
  if finish == "abort":
    raise _Transient(f"the server gave the request up: {about['finish_reason'].get('message')}")
  version = about.get("weight_version")
  logps, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
  return _reply(reply.get("text") or "", ids, logps, finish, version, ask)


def _chat_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  if ask.top_k:
    raise RemoteError(
      f"a text chat has no top_k, and {ask.top_k} was asked for; set top_k to 0 "
      "(config.sampling, config.eval)"
    )
  return {
    "model": model,
    "messages": [message._asdict() for message in ask.messages],
    "max_tokens": ask.max_tokens,
    "temperature": ask.temperature,
    "top_p": ask.top_p,
    "seed": ask.seed(31),
  }


def _transformers_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  generation = {
    "do_sample": ask.temperature > 0,  # the field `temperature` alone leaves it greedy
    "temperature": ask.temperature or 1.0,
    "top_p": ask.top_p,
    "top_k": ask.top_k,
    "max_new_tokens": ask.max_tokens,
  }
  if ask.stop:
    generation["eos_token_id"] = list(ask.stop)
  return {
    "model": model,
    "messages": [message._asdict() for message in ask.messages],
    "seed": ask.seed(31),
    "generation_config": json.dumps(generation),
  }


def _read_chat(reply: dict[str, Any], ask: Ask) -> Reply:
  (choice,) = reply["choices"]
  text = choice["message"].get("content") or ""
  return _reply(text, [], [], choice["finish_reason"] or "stop", reply.get("weight_version"), ask)


def _reply(
  text: str, ids: list[int], logps: list[float], finish: str, version: Any, ask: Ask
) -> Reply:
  """A reply of checked arrays; whoever parsed it raises what a malformed one raises."""
  if not isinstance(text, str) or len(ids) > ask.max_tokens:
    raise ValueError(f"{len(ids)} tokens where {ask.max_tokens} were allowed")
  if ids and logps and len(ids) != len(logps):
    raise ValueError(f"{len(ids)} ids with {len(logps)} log-probs")
  logps_K = np.array(logps, np.float32)
  if not np.all(np.isfinite(logps_K)):
    raise ValueError("a log-prob that is not finite")
  if ids and ask.stop and ids[-1] in ask.stop:
    finish = "stop"
  known = isinstance(version, int) or (isinstance(version, str) and version.isdigit())
  return Reply(text, np.array(ids, np.int32), logps_K, finish, int(version) if known else -1)


DIALECTS: dict[str, Dialect] = {
  "memrl_jax": Dialect(
    "/v1/completions",
    _completions_body,
    _read_completion,
    lambda path, version: [("/update_weights", {"path": path, "version": version})],
  ),
  "vllm": Dialect(
    "/v1/completions",
    _vllm_body,
    _read_completion,
    lambda path, version: [
      ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}),
      ("/reset_prefix_cache", {}),
    ],
    hint="start it with VLLM_SERVER_DEV_MODE=1",
  ),
  "sglang": Dialect(
    "/generate",
    _sglang_body,
    _read_sglang,
    lambda path, version: [
      ("/update_weights_from_disk", {"model_path": path, "weight_version": str(version)})
    ],
    hint="SGLang-JAX has no such call; restart it with the new weights",
  ),
  "transformers": Dialect("/v1/chat/completions", _transformers_body, _read_chat, None),
  "chat": Dialect("/v1/chat/completions", _chat_body, _read_chat, None),
}


class Client:
  """Requests to one server, many at a time.

  Raises:
    RemoteError: when it is made, the server does not answer, refuses the key or has not the model.
  """

  def __init__(self, config: RemoteConfig):
    parts = urllib.parse.urlsplit(config.url)
    self.config, self.counts, self.version = config, Counts(), 0
    self.url = config.url.rstrip("/").removesuffix("/v1")
    self._key = os.environ.get(config.key_env) or ""
    self._http = httpx2.Client(
      base_url=self.url,
      headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
      timeout=httpx2.Timeout(config.read_s, connect=config.connect_s),
      limits=httpx2.Limits(max_connections=config.concurrency + 1),
      trust_env=not is_loopback(parts.hostname or ""),  # no proxy for this machine itself
    )
    self._run = secrets.token_hex(8)  # tickets of another client are other requests
    self._inbox: queue.SimpleQueue[tuple[int, Ask] | None] = queue.SimpleQueue()
    self._outbox: queue.SimpleQueue[tuple[int, Reply | Failure | Exception]] = queue.SimpleQueue()
    self._lock, self._closed = threading.Lock(), threading.Event()
    self._threads: list[threading.Thread] = []
    self._pending = self._tickets = 0
    try:
      self.gives = self._look()
    except BaseException:
      self.close()
      raise

  def __repr__(self) -> str:
    return f"Client({self.url}, {self.gives})"

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Gives up what is under way."""
    self._closed.set()
    for _ in self._threads:
      self._inbox.put(None)
    self._http.close()

  @property
  def pending(self) -> int:
    """Requests whose answer `poll` has not handed out."""
    return self._pending

  @property
  def reads_text(self) -> bool:
    """Whether requests carry messages, because the server takes no ids."""
    return DIALECTS[self.gives.api].read is _read_chat

  def submit(self, ask: Ask) -> int:
    """Sends a request in the background; its ticket comes back from `poll` with the answer."""
    ticket = self._ticket()
    self._pending += 1
    if len(self._threads) < min(self._pending, self.config.concurrency):
      thread = threading.Thread(target=self._work, daemon=True)
      self._threads.append(thread)
      thread.start()
    self._inbox.put((ticket, ask))
    return ticket

  def poll(self) -> list[tuple[int, Reply | Failure]]:
    """Waits for an answer and returns it with all others that are there; none without requests."""
    done = []
    while self._pending and (not done or not self._outbox.empty()):
      ticket, answer = self._outbox.get()
      self._pending -= 1
      if isinstance(answer, Exception):
        raise answer
      done.append((ticket, answer))
    return done

  def ask(self, ask: Ask) -> Reply:
    """One request, waited for; RemoteError where it fails for good."""
    answer = self._answer(self._ticket(), ask)
    if isinstance(answer, Failure):
      raise RemoteError(answer.reason)
    return answer

  def push(self, directory: str | os.PathLike[str], version: int | None = None) -> None:
    """Lets the server load the safetensors in this directory, which it must see, as this version.

    Raises:
      ValueError: requests are under way.
      RemoteError: this kind of server cannot, or it failed.
    """
    dialect, version = DIALECTS[self.gives.api], self.version + 1 if version is None else version
    if self._pending:
      raise ValueError(
        f"{self._pending} requests are under way; poll their answers before new weights"
      )
    if dialect.push is None:
      raise RemoteError(
        f"{self.url} ({self.gives.api}) takes no new weights over HTTP; restart it with them, or "
        "serve with memrl_jax.sampling.serve, vLLM or SGLang"
      )
    for path, body in dialect.push(str(pathlib.Path(directory).absolute()), version):
      try:
        done = self._patiently(lambda path=path, body=body: self._call("POST", path, body))
      except RemoteError as error:
        raise RemoteError(f"{error}; {dialect.hint}" if dialect.hint else str(error)) from None
      if isinstance(done, dict) and done.get("success") is False:
        raise RemoteError(f"{self.url} did not load {directory}: {done.get('message')}")
    self.version = version

  def push_params(self, cfg: Any, params: Any) -> None:
    """Writes params to `config.weights`, lets the server load them, and removes those before."""
    from memrl_jax.models import weights  # imports jax: a client alone does not need it

    if not self.config.weights:
      raise RemoteError(
        "new weights need a directory that the server sees too; name one (config.remote.weights)"
      )
    place = pathlib.Path(self.config.weights).expanduser().absolute()
    before, after = (place / f"{self.version + more:06d}" for more in (0, 1))
    weights.save_directory(after, cfg, params)
    self.push(after, self.version + 1)
    shutil.rmtree(before, ignore_errors=True)

  def check_trainable(self, temperature: float) -> None:
    """RemoteError where replies at this temperature could not be trained on."""
    if not self.gives.trainable:
      raise RemoteError(
        f"{self.url} ({self.gives.api}) gives no sampled ids with their log-probs, so nothing can be "
        "trained on its replies; use it with --mode=eval, or serve the model with "
        "memrl_jax.sampling.serve, vLLM or SGLang (config.remote.url)"
      )
    if temperature != 1 and not self.gives.tempered:
      raise RemoteError(
        f"{self.url} gives log-probs at temperature 1 whatever it samples at, and this run samples at "
        f"{temperature}; set config.sampling.temperature to 1, or start vLLM with "
        "--logprobs-mode processed_logprobs"
      )

  # Inside.

  def _ticket(self) -> int:
    with self._lock:
      self.counts.asked += 1
      self._tickets += 1
      return self._tickets

  def _look(self) -> Gives:
    """Who the server is, and what one-token requests show that it gives."""
    try:
      listing = self._call("GET", "/v1/models")
      models = {entry["id"]: entry.get("owned_by") for entry in listing["data"]}
    except _Transient as error:
      raise RemoteError(
        f"{error}; start one (python -m memrl_jax.sampling.serve --help) or correct config.remote.url"
      ) from None
    except (KeyError, TypeError):
      raise RemoteError(
        f"{self.url}/v1/models lists no models; is this the right server?"
      ) from None
    model = self.config.model or (next(iter(models)) if len(models) == 1 else "")
    if model not in models:
      shown = ", ".join(list(models)[:5]) + (", ..." if len(models) > 5 else "")
      raise RemoteError(
        f"{self.url} serves {shown or 'no model'}, not {model!r}; name one of them "
        "(config.remote.model)"
      )
    api = self.config.api
    if api == "auto":
      api = models[model] if models[model] in DIALECTS else "chat"
      if api == "chat" and self._is_transformers():
        api = "transformers"
    self.gives = Gives(api, model, ids=False, logps=False, tempered=False)
    if self.reads_text:
      return self.gives
    reply = self._probe(0, 1.0)
    self.version = max(reply.version, 0)
    gives = self.gives._replace(ids=len(reply.ids) == 1, logps=len(reply.logps) == 1)
    return gives._replace(tempered=gives.trainable and self._follows_temperature())

  def _is_transformers(self) -> bool:
    try:
      return "/load_model" in self._call("GET", "/openapi.json")["paths"]
    except (_Transient, RemoteError, KeyError, TypeError):
      return False

  def _follows_temperature(self) -> bool:
    """Whether one id's log-prob differs between T = 1 and T = 2: not so where it was computed at 1."""
    for index in range(_PROBES):
      cool, warm = self._probe(index, 1.0), self._probe(index, 2.0)
      if cool.ids[0] == warm.ids[0] and abs(cool.logps[0]) > 1e-4:
        return abs(float(cool.logps[0] - warm.logps[0])) > 1e-5
    return False

  def _probe(self, index: int, temperature: float) -> Reply:
    """One token after a prompt of one, for the same key at any temperature."""
    key, prompt = np.array([index, 1], np.uint32), np.array([index + 1], np.int32)
    ask = Ask(key, max_tokens=1, prompt=prompt, temperature=temperature)
    name = f"{self._run}-probe-{index}-{temperature:g}"
    return self._patiently(lambda: self._once(name, ask))

  def _work(self) -> None:
    while (item := self._inbox.get()) is not None:
      ticket, ask = item
      try:
        self._outbox.put((ticket, self._answer(ticket, ask)))
      except Exception as error:  # a bug of ours: poll raises it where it can be seen
        self._outbox.put((ticket, error))

  def _answer(self, ticket: int, ask: Ask) -> Reply | Failure:
    """The reply to a request, however often it has to be sent; a failure where that was in vain."""
    asked = self.version
    fresh = 0  # after a stale reply it is another request: the server may remember the old answer

    def once() -> Reply:
      nonlocal fresh
      reply = self._once(f"{self._run}-{ticket}-{fresh}", ask)
      reply = reply._replace(version=asked if reply.version < 0 else reply.version)
      if reply.version < self.version - self.config.max_lag:
        fresh += 1
        with self._lock:
          self.counts.stale += 1
        raise _Transient(
          f"{self.url} answers with weights {reply.version}, and {self.version} were pushed"
        )
      return reply

    try:
      reply = self._patiently(once)
    except RemoteError as error:
      with self._lock:
        self.counts.failed += 1
      return Failure(str(error))
    if not self.reads_text and ask.temperature not in (0, 1) and not self.gives.tempered:
      reply = reply._replace(logps=_NOTHING[1])
    if not (len(reply.ids) and len(reply.logps)):
      reply = reply._replace(ids=_NOTHING[0], logps=_NOTHING[1])
    with self._lock:
      self.counts.answered += 1
      self.counts.ids += len(reply.ids)
      self.counts.untrainable += not len(reply.ids)
    return reply

  def _once(self, name: str, ask: Ask) -> Reply:
    """Sends one request once."""
    dialect = DIALECTS[self.gives.api]
    data = self._call("POST", dialect.path, dialect.body(ask, self.gives.model, name), name)
    try:
      reply = dialect.read(data, ask)
      missing = (self.gives.ids and not len(reply.ids)) or (
        self.gives.logps and not len(reply.logps)
      )
      if missing:
        raise ValueError("it lacks the sampled ids or log-probs that the server gave before")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
      raise _Transient(
        f"malformed reply from {self.url} ({type(error).__name__}: {error})"
      ) from None
    return reply

  def _patiently(self, act: Callable[[], Any]) -> Any:
    """Tries again after what may pass, waiting twice as long every time; at last a RemoteError."""
    for attempt in range(self.config.retries + 1):
      try:
        return act()
      except _Transient as error:
        if attempt == self.config.retries or self._closed.is_set():
          tries = f" ({attempt + 1} tries)" if attempt else ""
          raise RemoteError(f"{error}{tries}") from None
        with self._lock:
          self.counts.retried += 1
        wait = max(self.config.backoff_s * 2**attempt, error.wait_s)
        self._closed.wait(min(wait, _LONGEST_WAIT_S))
    raise AssertionError("unreachable")

  def _call(self, method: str, path: str, body: Any = None, name: str = "") -> Any:
    """One HTTP call and its JSON. Errors name the server and never the key."""
    try:
      response = self._http.request(
        method, path, json=body, headers={"X-Request-Id": name} if name else {}
      )
    except (httpx2.ConnectError, httpx2.ConnectTimeout):
      raise _Transient(f"no server answers at {self.url}") from None
    except httpx2.TimeoutException:
      raise _Transient(f"{self.url}{path} took over {self.config.read_s:g} s") from None
    except (httpx2.TransportError, RuntimeError) as error:  # RuntimeError: closed under our feet
      raise _Transient(f"{self.url}{path} broke off ({type(error).__name__})") from None
    code = response.status_code
    if code in (408, 429) or code >= 500:
      wait = response.headers.get("Retry-After", "")
      raise _Transient(
        f"{self.url}{path} answered {code}: {self._message(response)}",
        float(wait) if wait.isdigit() else 0.0,
      )
    if code in (401, 403):
      raise RemoteError(
        f"{self.url} refuses the key ({code}); put the server's key into the environment variable "
        f"{self.config.key_env} (config.remote.key_env)"
      )
    if code >= 300:
      raise RemoteError(f"{self.url}{path} answered {code}: {self._message(response)}")
    try:
      return response.json() if response.content else {}
    except ValueError:
      raise _Transient(f"malformed reply from {self.url}{path}: no JSON") from None

  def _message(self, response: httpx2.Response) -> str:
    """What an error reply says, in any of the usual forms, without our key."""
    try:
      data = response.json()
    except ValueError:
      data = response.text
    for name in ("error", "detail", "message"):
      data = data[name] if isinstance(data, dict) and name in data else data
    text = " ".join(str(data).split())[:300]
    return text.replace(self._key, "***") if self._key else text


def is_loopback(host: str) -> bool:
  """Whether this name or address is this machine itself."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
