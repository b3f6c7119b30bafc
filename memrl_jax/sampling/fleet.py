"""One model on several servers: what a `remote.Client` does, with whoever is there.

    connect(RemoteConfig(url="http://a:8000,http://b:8000"))

Requests that begin alike go to one server (`Ask.home`), where that is cached. What is sampled
depends on a request's key and on the weights alone, so who answers changes nothing. New weights go to all
servers at once. One that does not answer is given up, and its requests go to the others; a request fails where
nobody is left. Whoever was given up is looked at again after a while: it is asked only once it has the present
weights.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence

from memrl_jax.sampling import desk, remote
from memrl_jax.sampling.asked import Asked
from memrl_jax.sampling.dialects import Ask, RemoteError, Reply, Transient
from memrl_jax.types import Message

_LOG = logging.getLogger("memrl_jax.sampling")
_LOOK_S = 10.0  # between two looks at a server that was given up


def connect(config: remote.RemoteConfig) -> remote.Client | Fleet:
  """The server, or the servers, of this config; RemoteError where there is none."""
  return Fleet(config) if len(config.urls) > 1 else remote.Client(config)


@dataclasses.dataclass
class _Server:
  """`down` says why it was given up, "" where it was not; `look_at` is when to look again."""

  client: remote.Client
  down: str = ""
  look_at: float = 0.0
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Fleet(Asked):
  """Requests to several servers of one model, many at a time.

  Raises:
    RemoteError: when it is made, a server does not answer or is of another kind than the first.
  """

  def __init__(self, config: remote.RemoteConfig):
    self.config, self._counts, self.push_s = config, remote.Counts(), 0.0
    self.url = ", ".join(config.urls)
    self._servers: list[_Server] = []
    self._present: tuple[str | os.PathLike[str], int] | None = None  # weights that were pushed
    self._closed, self._marking = threading.Event(), threading.Lock()
    self._desk = desk.Desk(self._answer, config.concurrency, lanes=len(config.urls))
    try:
      for url in config.urls:
        one = dataclasses.replace(config, url=url)
        self._servers.append(_Server(remote.Client(one, others=True)))
        if self._servers[-1].client.gives != self.gives:
          raise RemoteError(
            f"{url} gives {self._servers[-1].client.gives} and {config.urls[0]} {self.gives}; serve one "
            "model in one way, or name one of them (config.remote.url)"
          )
    except BaseException:
      self.close()
      raise
    self.version = max(server.client.version for server in self._servers)

  def close(self) -> None:
    super().close()
    for server in self._servers:
      server.client.close()

  @property
  def gives(self) -> remote.Gives:
    return self._servers[0].client.gives

  @property
  def reads_text(self) -> bool:
    return self._servers[0].client.reads_text

  @property
  def counts(self) -> remote.Counts:
    """Of the fleet: a request that went to several servers was asked once, and sent again."""
    total = dataclasses.replace(self._counts)
    for server in self._servers:
      for name in ("retried", "stale", "images_dropped"):
        setattr(total, name, getattr(total, name) + getattr(server.client.counts, name))
    return total

  def shown(self, messages: Sequence[Message]) -> list[Message]:
    """The messages as the model reads them."""
    return self._servers[0].client.shown(messages)

  def check_trainable(self, temperature: float) -> None:
    """RemoteError where replies at this temperature could not be trained on."""
    self._servers[0].client.check_trainable(temperature)

  def submit(self, ask: Ask) -> int:
    """Sends a request in the background; its ticket comes back from `poll` with the answer."""
    self._counts.add(asked=1)
    return self._desk.submit(ask, ask.home % len(self._servers))

  def push(self, directory: str | os.PathLike[str], version: int | None = None) -> None:
    """Lets every server load the safetensors in this directory, which all must see, as this version.

    Raises:
      ValueError: requests are under way.
      RemoteError: no server did.
    """
    if self.pending:
      raise ValueError(
        f"{self.pending} requests are under way; poll their answers before new weights"
      )
    self._present = directory, self.version + 1 if version is None else version
    with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as threads:
      list(threads.map(self._hand, self._servers))
    if all(server.down for server in self._servers):
      raise RemoteError(f"no server took new weights: {self._why()}")
    self.version = self._present[1]
    self._counts.add(pushed_bytes=remote.size(directory))

  def adopt(self, directory: str | os.PathLike[str], version: int) -> None:
    """Knows that somebody else let the servers load this directory as this version."""
    self._present, self.version = (directory, version), version
    for server in self._servers:
      server.client.adopt(directory, version)

  # Inside.

  def _hand(self, server: _Server) -> None:
    """Gives one server the present weights, or gives it up."""
    try:
      server.client.push(*self._present)
      server.down = ""
    except RemoteError as error:
      self._give_up(server, error)

  def _give_up(self, server: _Server, error: Exception) -> None:
    with self._marking:
      first, server.down, server.look_at = not server.down, str(error), time.monotonic() + _LOOK_S
    if first:
      self._counts.add(lost=1)
      _LOG.warning("%s is given up for now: %s", server.client.url, error)

  def _answer(self, ticket: int, ask: Ask) -> Reply | remote.Failure:
    """The reply of the server at home, or of the next that is there; looks at all before it says that none is."""
    first = ask.home % len(self._servers)
    order = self._servers[first:] + self._servers[:first]
    for attempt in range(self.config.retries + 1):
      for server in order:
        if not self._is_there(server, at_once=attempt > 0):
          continue
        try:
          reply = server.client.ask(ask)
        except remote.Refused as error:  # and so would the others
          self._counts.add(failed=1)
          return remote.Failure(str(error))
        except RemoteError as error:
          self._counts.add(retried=1)
          self._give_up(server, error)
        else:
          self._counts.add(answered=1, ids=len(reply.ids), untrainable=not len(reply.ids))
          return reply
      if attempt < self.config.retries and not self._closed.is_set():
        self._closed.wait(self.config.backoff_s * 2**attempt)
    self._counts.add(failed=1)
    return remote.Failure(f"none of {len(self._servers)} servers is left: {self._why()}")

  def _is_there(self, server: _Server, at_once: bool) -> bool:
    """Whether a server may be asked. One that was given up is looked at, by one thread at a time."""
    if not server.down:
      return True
    if self._closed.is_set() or not (at_once or time.monotonic() >= server.look_at):
      return False
    known = server.look_at
    if not server.lock.acquire(blocking=at_once):
      return False
    try:
      if server.down and server.look_at == known:  # else somebody else has just looked
        version = server.client.look_again()
        if self._present is not None and version != self._present[1]:
          server.client.push(*self._present)
        server.down = ""
      return not server.down
    except (Transient, RemoteError) as error:
      self._give_up(server, error)
      return False
    finally:
      server.lock.release()

  def _why(self) -> str:
    return "; ".join(server.down for server in self._servers if server.down)
