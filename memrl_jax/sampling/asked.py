"""Servers in a few records: where they are, what they give, what was asked of them; and who can be asked at all.

`remote` asks one, `fleet` several.
"""

from __future__ import annotations

import dataclasses
import threading
import urllib.parse
from typing import NamedTuple, Self

from memrl_jax.sampling import desk
from memrl_jax.sampling.dialects import DIALECTS, RemoteError, Reply

_IMAGES = ("auto", "yes", "no")
_COUNTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class RemoteConfig:
  """Where the model runs. An empty `url` is the engine of this process.

  url          of the server, with or without /v1; of several, separated by commas, see sampling/fleet, and
               training/servers where several hosts ask
  api          how to speak to it: "auto" asks the server who it is
  model        its name there; "" where the server has only one
  key_env      environment variable with the server's key, if it wants one
  concurrency  most requests under way (at each server)
  connect_s    seconds to connect; read_s: to wait for a whole reply
  retries      how often a request is sent again; backoff_s: first wait, doubled every time
  weights      directory that this process and the server see, for new weights
  dtype        in which they are written; bfloat16 is all that a server needs that samples so
  adapters     where adapters are trained, they alone are sent: the server is ours and was started with the
               checkpoint that they belong to, in the same precision
  images       whether the model takes images: "yes", "no", or "auto", which asks the server about a
               tiny one before the first is sent (two requests of a few tokens, none without images)
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
  weights: str = ""
  dtype: str = "float32"
  adapters: bool = False
  images: str = "auto"

  def __post_init__(self):
    for url in self.urls if self.url else ():
      if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise ValueError(
          f"{url!r} is no server's address; write http://HOST:PORT/v1 (config.remote.url)"
        )
    if len(set(self.urls)) < len(self.urls):
      raise ValueError(f"{self.url} names a server twice; name each once (config.remote.url)")
    if self.dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"dtype {self.dtype!r} is not known; choose float32 or bfloat16 (config.remote.dtype)"
      )
    if self.api not in ("auto", *DIALECTS):
      raise ValueError(
        f"api {self.api!r} is not known; choose auto or one of {', '.join(DIALECTS)} "
        "(config.remote.api)"
      )
    if self.images not in _IMAGES:
      raise ValueError(
        f"images {self.images!r} is not known; choose one of {', '.join(_IMAGES)} (config.remote.images)"
      )
    if self.concurrency < 1 or self.retries < 0:
      raise ValueError("concurrency must be >= 1, retries >= 0 (config.remote)")
    if self.connect_s <= 0 or self.read_s <= 0 or self.backoff_s < 0:
      raise ValueError("connect_s and read_s must be above 0, backoff_s >= 0 (config.remote)")

  @property
  def urls(self) -> tuple[str, ...]:
    """The addresses one by one, without /v1."""
    return tuple(url.strip().rstrip("/").removesuffix("/v1") for url in self.url.split(","))


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
  dropped because their weights were too old; answers that were text only; images left out of prompts; bytes of
  new weights; how often one of several servers was given up."""

  asked: int = 0
  answered: int = 0
  failed: int = 0
  ids: int = 0
  retried: int = 0
  stale: int = 0
  untrainable: int = 0
  images_dropped: int = 0
  pushed_bytes: int = 0
  lost: int = 0

  def add(self, **more: int) -> None:
    """Counts so many more of each."""
    with _COUNTING:
      for name, number in more.items():
        setattr(self, name, getattr(self, name) + number)


class Asked:
  """Whom one asks many things at a time; a context manager, which gives up what is under way."""

  url: str
  gives: Gives
  _desk: desk.Desk
  _closed: threading.Event

  def __repr__(self) -> str:
    return f"{type(self).__name__}({self.url}, {self.gives})"

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info) -> None:
    self.close()

  def close(self) -> None:
    """Gives up what is under way."""
    self._closed.set()
    self._desk.close(RemoteError(f"nobody waits for {self.url} any more"))

  @property
  def pending(self) -> int:
    """Requests whose answer `poll` has not handed out."""
    return self._desk.pending

  def poll(self) -> list[tuple[int, Reply | Failure]]:
    """Waits for an answer and returns it with all others that are there; none without requests."""
    return self._desk.poll()
