"""Servers that sample for a run: who of several hosts asks which, and how new weights reach all of them.

With at least as many servers as hosts each host asks a share of them of its own, with fewer all hosts ask all.
Who answers changes nothing that is sampled (sampling/fleet).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import pathlib
import shutil
import time
from collections.abc import Callable, Iterable

from memrl_jax.sampling import fleet, remote
from memrl_jax.sampling.dialects import RemoteError
from memrl_jax.training import hosts

Client = remote.Client | fleet.Fleet


def asked(config: remote.RemoteConfig) -> remote.RemoteConfig:
  """The same with the servers that this host asks."""
  urls = config.urls
  if len(urls) < hosts.count():
    return config
  return dataclasses.replace(config, url=",".join(hosts.mine(urls)))


def connect(config: remote.RemoteConfig) -> Client:
  """The server or the servers that this host asks.

  Raises:
    RemoteError: one of any host does not answer, or is of another kind than those of host 0.
  """
  with contextlib.ExitStack() as doors:
    client = hosts.together(
      lambda: doors.enter_context(fleet.connect(asked(config))), "others to find their servers"
    )
    kinds = hosts.gather([client.gives], "what the servers give")
    if odd := hosts.differing(kinds):
      raise RemoteError(
        f"the servers of host {odd[0]} give {kinds[odd[0]]} and those of host 0 {kinds[0]}; serve one model "
        "in one way (config.remote.url)"
      )
    doors.pop_all()
  return client


def push(client: Client, save: Callable[[pathlib.Path], None], read: Iterable[object] = ()) -> None:
  """Lets all servers load what `save` puts into a folder of `config.weights`; the one before is removed.

  All hosts come, once their own requests are answered, and none goes before every server has the weights. The
  first writes; a server that several hosts ask is told by the first of them alone.

  read: what `save` takes its arrays from; all hosts hold parts of them, so all go through it to the end.

  Raises:
    ValueError: requests are under way.
    RemoteError, OSError: the folder cannot be written, or the servers of any host took nothing; on all hosts.
  """
  began, config = time.perf_counter(), client.config
  if not config.weights:
    raise RemoteError(
      "new weights need a directory that the server sees too; name one (config.remote.weights)"
    )
  known = hosts.gather([(client.version, config.urls)], "the versions of the servers")
  version = 1 + max(one for one, _ in known)
  place = pathlib.Path(config.weights).expanduser().absolute()
  before, after = (place / f"{number:06d}" for number in (version - 1, version))

  def write() -> None:
    try:
      if hosts.first():
        shutil.rmtree(after, ignore_errors=True)  # of a session that was cut off
        save(after)
    finally:  # whatever became of the file: the others wait for this host's part of each array
      collections.deque(read, maxlen=0)

  hosts.together(write, "the new weights")
  tells = [urls for _, urls in known].index(config.urls) == hosts.index()
  tell = client.push if tells else client.adopt
  try:
    hosts.together(lambda: tell(after, version), "servers to load new weights")
  finally:
    if hosts.first():
      shutil.rmtree(before, ignore_errors=True)
  client.push_s += time.perf_counter() - began
