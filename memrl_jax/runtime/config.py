"""What a deployed memory and its service may use: sizes, rates and waits, which check themselves."""

from __future__ import annotations

import dataclasses
import math
import urllib.parse

from memrl_jax.memory.episodic import EpisodicConfig

_EPISODIC = EpisodicConfig(build="trajectory", update="vanilla", capacity=100_000)


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
  """One memory.

  episodic: how it is searched, valued and written. The default keeps trajectories as they are; the paper's
    plans and reflections need a language model (`write` of `runtime.open`).
  reward: largest size of a reward. suggestions: how many stay known, so that feedback can name them; the
    oldest are forgotten first, never those with feedback that is not in the memory yet.
  task, trajectory: most characters of each that are taken; a longer one is refused.
  write_workers: calls of the language model at a time; write_tries: for one episode, before it is given up.
  """

  episodic: EpisodicConfig = _EPISODIC
  reward: float = 1.0
  suggestions: int = 100_000
  task: int = 100_000
  trajectory: int = 1_000_000
  write_workers: int = 4
  write_tries: int = 5

  def __post_init__(self):
    if self.episodic.build == "facts":
      raise ValueError(
        'a service does not compare facts; choose another build, such as "trajectory" (--set=build=...)'
      )
    if self.episodic.gamma > 0 and not self.episodic.trace:
      raise ValueError(
        "feedback names no next query, so gamma would do nothing; set trace above 0, or gamma to 0 (--set)"
      )
    if not 0 < self.reward < math.inf:
      raise ValueError(f"reward is {self.reward}; give the largest size of one, above 0")
    _at_least_one(self, "suggestions", "task", "trajectory", "write_workers", "write_tries")

  @property
  def needs_write(self) -> bool:
    return self.episodic.build != "trajectory" or self.episodic.update == "adjustment"


@dataclasses.dataclass(frozen=True)
class ServiceConfig:
  """The HTTP service; sizes in bytes, waits in seconds.

  upstream: address of the OpenAI-compatible model, with or without /v1; "": no proxy. upstream_key: for it.
  task: which user message of a chat is the task, the "last" or the "first".
  place: memories go into the "system" message, or in front of the task ("user") for models without one.
  rate, burst: requests a second of a tenant, and how many at once after a pause. inflight: most requests of
    a tenant under way. body, import_body: largest. body_s: to send one. connect_s, read_s: of the upstream,
    read_s without any byte. snapshots: most that are kept for a tenant.
  """

  upstream: str = ""
  upstream_key: str = dataclasses.field(default="", repr=False)
  task: str = "last"
  place: str = "system"
  rate: float = 50.0
  burst: int = 200
  inflight: int = 64
  body: int = 16 << 20
  import_body: int = 64 << 20
  body_s: float = 30.0
  connect_s: float = 5.0
  read_s: float = 300.0
  snapshots: int = 20

  def __post_init__(self):
    if self.upstream and urllib.parse.urlsplit(self.upstream).scheme not in ("http", "https"):
      raise ValueError(
        f"{self.upstream!r} is no server's address; write http://HOST:PORT/v1 (--upstream)"
      )
    for name, allowed in (("task", ("last", "first")), ("place", ("system", "user"))):
      if getattr(self, name) not in allowed:
        raise ValueError(f"{name} is {getattr(self, name)!r}; choose {' or '.join(allowed)}")
    _at_least_one(self, "burst", "inflight", "body", "import_body", "snapshots")
    for name in ("rate", "body_s", "connect_s", "read_s"):
      if not 0 < getattr(self, name) < math.inf:
        raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")


def _at_least_one(config, *names: str) -> None:
  for name in names:
    if getattr(config, name) < 1:
      raise ValueError(f"{name} is {getattr(config, name)}; it must be at least 1")
