"""A language model behind HTTP: token ids go out, sampled ids and their log-probs come back.

`Client` keeps up to `concurrency` requests under way in threads and hands every ticket exactly one
reply. A request that is sent again has the same id and the same seed, so that it samples the same and
is sampled once where the server remembers ids (ours does). Without ids and log-probs of the sampled
distribution a reply is text only: good for evaluation and frozen policies, never for training.
`dialects` has the table of what each kind of server gives. Images reach a model behind a text chat that
takes them; everywhere else a line says that they were left out, and they are counted.
"""

from __future__ import annotations

import ipaddress
import os
import pathlib
import secrets
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import numpy as np

from memrl_jax.sampling import desk, images
from memrl_jax.sampling.asked import Asked, Counts, Failure, Gives, RemoteConfig
from memrl_jax.sampling.dialects import DIALECTS, Ask, RemoteError, Reply, Transient
from memrl_jax.types import Message

_NOTHING = np.zeros(0, np.int32), np.zeros(0, np.float32)
_LONGEST_WAIT_S = 30.0
_WARM_PROBES = 8


class Refused(RemoteError):
  """The server understood a request and will not answer it, whatever the key."""


class Client(Asked):
  """Requests to one server, many at a time.

  Raises:
    RemoteError: when it is made, the server does not answer, refuses the key or has not the model.
  """

  def __init__(self, config: RemoteConfig, *, others: bool = False):
    """others: there are other servers, so that who does not answer is not asked again."""
    self.config, self.counts, self.version, self._others = config, Counts(), 0, others
    self._handed = False  # whether its weights are ours
    (self.url,) = config.urls
    self.push_s = 0.0  # spent on new weights so far, seconds
    self._key = os.environ.get(config.key_env) or ""
    self._http = httpx2.Client(
      base_url=self.url,
      headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
      timeout=httpx2.Timeout(config.read_s, connect=config.connect_s),
      limits=httpx2.Limits(max_connections=config.concurrency + 1),
      trust_env=not is_loopback(
        urllib.parse.urlsplit(self.url).hostname or ""
      ),  # no proxy for this machine itself
    )
    self._run = secrets.token_hex(8)  # tickets of another client are other requests
    self._desk = desk.Desk(self._answer, config.concurrency)
    self._closed = threading.Event()
    self._images_lock = threading.Lock()
    self._no_images: str | None = (
      None  # why they are left out, "" where they are not, None: unknown
    )
    self._probes = 0
    try:
      self.gives = self._look()
      if config.images == "yes" and not self.reads_text:
        raise RemoteError(
          f"{self.url} is sent token ids ({self.gives.api}), which carry no images; set "
          "config.remote.api to chat, or config.remote.images to auto"
        )
    except BaseException:
      self.close()
      raise

  def close(self) -> None:
    super().close()
    self._http.close()

  @property
  def reads_text(self) -> bool:
    """Whether requests carry messages, because the server takes no ids."""
    return DIALECTS[self.gives.api].text

  def shown(self, messages: Sequence[Message]) -> list[Message]:
    """The messages as the model here reads them: with images where it takes them, else a line for each.

    Where the server could not be asked whether it does, the images stay.
    """
    found = images.count(messages)
    if not found or not self._leaves_images_out():
      return list(messages)
    self.counts.add(images_dropped=found)
    return images.text_only(messages)

  def submit(self, ask: Ask) -> int:
    """Sends a request in the background; its ticket comes back from `poll` with the answer."""
    self.counts.add(asked=1)
    return self._desk.submit(ask)

  def ask(self, ask: Ask) -> Reply:
    """One request, waited for; RemoteError where it fails for good."""
    self.counts.add(asked=1)
    return self._reply(self._desk.ticket(), ask)

  def push(self, directory: str | os.PathLike[str], version: int | None = None) -> None:
    """Lets the server load the safetensors in this directory, which it must see, as this version.

    Raises:
      ValueError: requests are under way.
      RemoteError: this kind of server cannot, or it failed.
    """
    dialect, version = DIALECTS[self.gives.api], self.version + 1 if version is None else version
    if self.pending:
      raise ValueError(
        f"{self.pending} requests are under way; poll their answers before new weights"
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
    self.counts.add(pushed_bytes=size(directory))
    self.adopt(directory, version)

  def adopt(self, directory: str | os.PathLike[str], version: int) -> None:
    """Knows that somebody else let the server load this directory as this version."""
    self.version, self._handed = version, True

  def look_again(self) -> int:
    """The version of the weights that the server has now, -1 where it does not say.

    Raises:
      Transient, RemoteError: it does not answer, or is not what it was.
    """
    try:
      models = [entry["id"] for entry in self._call("GET", "/v1/models")["data"]]
    except (KeyError, TypeError):
      models = []
    if self.gives.model not in models:
      raise RemoteError(f"{self.url} does not serve {self.gives.model} any more")
    return -1 if self.reads_text else self._probe(0, 1.0).version

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

  def _look(self) -> Gives:
    """Who the server is, and what one-token requests show that it gives."""
    try:
      listing = self._call("GET", "/v1/models")
      models = {entry["id"]: entry.get("owned_by") for entry in listing["data"]}
    except Transient as error:
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
    except (Transient, RemoteError, KeyError, TypeError):
      return False

  def _follows_temperature(self) -> bool:
    """Whether one id's log-prob differs between T = 1 and T = 2: not so where it was computed at 1."""
    for index in range(_WARM_PROBES):
      cool, warm = self._probe(index, 1.0), self._probe(index, 2.0)
      if cool.ids[0] == warm.ids[0] and abs(cool.logps[0]) > 1e-4:
        return abs(float(cool.logps[0] - warm.logps[0])) > 1e-5
    return False

  def _probe(self, index: int, temperature: float) -> Reply:
    """One token after a prompt of one, for the same key at any temperature."""
    key, prompt = np.array([index, 1], np.uint32), np.array([index + 1], np.int32)
    ask = Ask(key, max_tokens=1, prompt=prompt, temperature=temperature)
    self._probes += 1  # never asked before: the weights may be others
    name = f"{self._run}-probe-{self._probes}"
    return self._patiently(lambda: self._once(name, ask))

  def _leaves_images_out(self) -> bool:
    with self._images_lock:
      if self._no_images is None:
        try:
          self._no_images = self._why_no_images()
        except (Transient, RemoteError):  # the request itself will meet it, and say so
          return False
        if self._no_images:
          images.say(self._no_images)
      return bool(self._no_images)

  def _why_no_images(self) -> str:
    """Why this server cannot be sent images, "" where it can; asked with the same words twice."""
    ways = "config.remote.images decides it by hand"
    if not self.reads_text:
      return (
        f"{self.url} is sent token ids; as a text chat it may take images (config.remote.api=chat)"
      )
    if self.config.images != "auto":
      return "" if self.config.images == "yes" else "config.remote.images is no"
    try:
      pictured = self._prompt_tokens((images.PROBE,))
    except Refused as error:
      self._prompt_tokens(())  # one that refuses everything has said nothing about images
      return f"{self.gives.model} at {self.url} takes none ({error}); {ways}"
    if pictured is not None and pictured == self._prompt_tokens(()):
      # transformers serve does so with a model of text: the image vanishes without a word.
      return (
        f"{self.gives.model} at {self.url} reads as many tokens without an image as with it; {ways}"
      )
    return ""

  def _prompt_tokens(self, pictures: tuple[str, ...]) -> int | None:
    """How many tokens the server counts in a short prompt; None where it does not say."""
    messages = [Message("user", "What is this?", pictures)]
    ask, dialect = Ask(np.zeros(2, np.uint32), 16, messages=messages), DIALECTS[self.gives.api]
    reply = self._call("POST", dialect.path, dialect.body(ask, self.gives.model, ""))
    usage = reply.get("usage") if isinstance(reply, dict) else None
    return usage.get("prompt_tokens") if isinstance(usage, dict) else None

  def _answer(self, ticket: int, ask: Ask) -> Reply | Failure:
    try:
      return self._reply(ticket, ask)
    except RemoteError as error:
      return Failure(str(error))

  def _reply(self, ticket: int, ask: Ask) -> Reply:
    """The reply to a request, however often it has to be sent; RemoteError where that was in vain."""
    asked = self.version
    ask = ask._replace(messages=self.shown(ask.messages))
    fresh = 0  # after a stale reply it is another request: the server may remember the old answer

    def once() -> Reply:
      nonlocal fresh
      reply = self._once(f"{self._run}-{ticket}-{fresh}", ask)
      reply = reply._replace(version=asked if reply.version < 0 else reply.version)
      if reply.version < self.version:
        fresh += 1
        self.counts.add(stale=1)
        raise Transient(
          f"{self.url} answers with weights {reply.version}, and {self.version} were pushed",
          gone=True,
        )
      if self._handed and reply.version > self.version:
        raise RemoteError(
          f"{self.url} has weights {reply.version}, and {self.version} were pushed: another run uses this server"
        )
      return reply

    try:
      reply = self._patiently(once)
    except RemoteError:
      self.counts.add(failed=1)
      raise
    if not self.reads_text and ask.temperature not in (0, 1) and not self.gives.tempered:
      reply = reply._replace(logps=_NOTHING[1])
    if not (len(reply.ids) and len(reply.logps)):
      reply = reply._replace(ids=_NOTHING[0], logps=_NOTHING[1])
    self.counts.add(answered=1, ids=len(reply.ids), untrainable=not len(reply.ids))
    return reply

  def _once(self, name: str, ask: Ask) -> Reply:
    """Sends one request once."""
    dialect = DIALECTS[self.gives.api]
    try:
      data = self._call("POST", dialect.path, dialect.body(ask, self.gives.model, name), name)
    except Refused as error:
      if not (carried := images.count(ask.messages) if dialect.text else 0):
        raise
      raise RemoteError(
        f"{error} (the request carried {carried} image{'s' * (carried > 1)}; where the model takes none, set "
        "config.remote.images to no)"
      ) from None
    try:
      reply = dialect.read(data, ask)
      missing = (self.gives.ids and not len(reply.ids)) or (
        self.gives.logps and not len(reply.logps)
      )
      if missing:
        raise ValueError("it lacks the sampled ids or log-probs that the server gave before")
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
      raise Transient(
        f"malformed reply from {self.url} ({type(error).__name__}: {error})"
      ) from None
    return reply

  def _patiently(self, act: Callable[[], Any]) -> Any:
    """Tries again after what may pass, waiting twice as long every time; at last a RemoteError."""
    for attempt in range(self.config.retries + 1):
      try:
        return act()
      except Transient as error:
        if attempt == self.config.retries or self._closed.is_set() or (error.gone and self._others):
          tries = f" ({attempt + 1} tries)" if attempt else ""
          raise RemoteError(f"{error}{tries}") from None
        self.counts.add(retried=1)
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
      raise Transient(f"no server answers at {self.url}", gone=True) from None
    except httpx2.TimeoutException:
      raise Transient(f"{self.url}{path} took over {self.config.read_s:g} s", gone=True) from None
    except (httpx2.TransportError, RuntimeError) as error:  # RuntimeError: closed under our feet
      raise Transient(f"{self.url}{path} broke off ({type(error).__name__})", gone=True) from None
    code = response.status_code
    if code in (408, 429) or code >= 500:
      wait = response.headers.get("Retry-After", "")
      raise Transient(
        f"{self.url}{path} answered {code}: {self._message(response)}",
        float(wait) if wait.isdigit() else 0.0,
      )
    if code in (401, 403):
      raise RemoteError(
        f"{self.url} refuses the key ({code}); put the server's key into the environment variable "
        f"{self.config.key_env} (config.remote.key_env)"
      )
    if code >= 300:
      raise Refused(f"{self.url}{path} answered {code}: {self._message(response)}")
    try:
      return response.json() if response.content else {}
    except ValueError:
      raise Transient(f"malformed reply from {self.url}{path}: no JSON") from None

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


def size(directory: str | os.PathLike[str]) -> int:
  """Bytes of the files there."""
  return sum(file.stat().st_size for file in pathlib.Path(directory).glob("*"))


def is_loopback(host: str) -> bool:
  """Whether this name or address is this machine itself."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"
