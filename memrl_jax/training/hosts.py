"""Several hosts that run one program: who is who, what they tell each other, how they end together.

Each host is one process of `jax.distributed` with environments, a sampler and devices of its own. All
make the same plan and play a share of it; then they exchange what they played, so that credit, memory and
metrics are computed alike everywhere, from the same records in the same order. Whatever decides how a run
goes on is a function of such records, or was gathered.

Until `join` this process is alone: one host, whose `gather` gives back what it was given. H hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import pickle
import signal
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from memrl_jax.training import mesh as mesh_lib
from memrl_jax.types import Trial, Turn

if TYPE_CHECKING:
  from memrl_jax.training.sections import ExtractorSettings
  from memrl_jax.training.settings import Settings

LOST = 75  # exit code (EX_TEMPFAIL): another host was lost; --resume goes on from the checkpoint
PATIENCE = 40  # times the time-out: the longest wait for hosts that are alive
_BLOCK = 1 << 18  # bytes that hosts exchange at once: one shape, so one program
_SIZE = 8  # bytes at the beginning of an exchange that say how long it is
_ABSENT = np.dtype([])  # arrays of it have a length and no content: whoever reads them fails
_MARKS = ("Gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "oordination")

T = TypeVar("T")


class _Job(NamedTuple):
  count: int
  index: int
  seconds: float


class _Wait(NamedTuple):
  what: str
  since: float


_job: _Job | None = None
_wait: _Wait | None = None
_update: int | None = None
_checkpoints: pathlib.Path | None = None
_aborted: Any = None  # kept: ctypes frees a handler that nobody holds


# Who is who.


def count() -> int:
  """How many hosts run this program."""
  return 1 if _job is None else _job.count


def index() -> int:
  """Which of them this one is."""
  return 0 if _job is None else _job.index


def first() -> bool:
  """Whether this is the host that writes what all share."""
  return index() == 0


def join(address: str | None, hosts: int | None, host: int | None, *, seconds: int) -> None:
  """Makes this process one of several hosts, before anything touches a device.

  With None for all three the surroundings say who is who (a TPU pod, Slurm, MPI). A host that is silent
  for `seconds` is lost, and then the others end. Nobody joins twice.

  Raises:
    OSError: the surroundings say nothing, or the others are not there.
  """
  global _job, _wait
  jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is the loop's
  _job, _wait = _Job(hosts or 0, host or 0, float(seconds)), _Wait("others to start", _now())
  _say_before_abort()
  try:
    jax.distributed.initialize(
      address, hosts, host, heartbeat_timeout_seconds=seconds, shutdown_timeout_seconds=seconds
    )
  except (ValueError, RuntimeError) as error:
    _job = None
    if hosts is None:
      raise OSError(
        f"--hosts=auto finds no TPU pod, Slurm or MPI here ({_short(error)}); give --hosts=N, --coordinator and "
        "--host on every host"
      ) from error
    raise OSError(
      f"host {host} of {hosts} found no others at {address} ({_short(error)}); start the same command on every "
      "host, each with its own --host, and let --coordinator be reachable"
    ) from error
  _job, _wait = None, None
  if jax.process_count() > 1:
    _job = _Job(jax.process_count(), jax.process_index(), float(seconds))
    threading.Thread(target=_watch, name="hosts", daemon=True).start()
    sys.excepthook = _uncaught


def leave(code: int) -> int:
  """Ends this process with `code`, together with the others where all is well; alone, only returns it.

  After an error nobody is waited for: that this host is gone is what the others will notice.
  """
  if _job is None:
    return code
  if code in (0, 3):
    with waiting("the end of the other hosts"):
      jax.distributed.shutdown()
  elif (
    first()
  ):  # the others end with their coordinator: time to say why, if they end for the same reason
    time.sleep(2.0)
  _exit(code)


def check(settings: Settings) -> None:
  """What several hosts need of a run; ValueError says what to change."""
  if _job is None:
    return
  if settings.method_name == "complementary":
    _check_share(settings)
  if settings.extracts:
    _check_extractor(settings.extractor)
  for part, config in settings.places._asdict().items():
    if config.wanted:
      raise ValueError(
        f"on several hosts the mesh holds all their devices, and none is left for a {part} of its own; set "
        f"config.{part}.mesh.data to 0, for the policy's mesh"
      )
  _check_mesh(settings, "config")


def _check_mesh(parts: Settings | ExtractorSettings, section: str) -> None:
  """A model that lies on all devices; `section` has its settings."""
  mesh, chips = parts.mesh, jax.device_count()
  inner = mesh.fsdp * mesh.tensor
  data = chips // inner if mesh.data == -1 else mesh.data
  if data * inner != chips or mesh.first:
    raise ValueError(
      f"a mesh of data {mesh.data} x fsdp {mesh.fsdp} x tensor {mesh.tensor} from device {mesh.first} on does not "
      f"hold all {chips} devices of {count()} hosts; set {section}.mesh.data to -1 and {section}.mesh.first to 0"
    )
  if jax.local_device_count() % mesh.tensor:
    raise ValueError(
      f"tensor {mesh.tensor} does not divide the {jax.local_device_count()} devices of a host, and each host "
      f"brings rows of its own; lower {section}.mesh.tensor"
    )
  if parts.pack.sequences % (data * mesh.fsdp):
    raise ValueError(
      f"{parts.pack.sequences} sequences cannot be split over {data * mesh.fsdp} data shards; choose "
      f"{section}.pack.sequences divisible by that"
    )
  sampling = parts.replicas
  chosen = jax.devices()[sampling.first :][: sampling.devices or None]
  if len({device.process_index for device in chosen}) < count():
    raise ValueError(
      f"{len(chosen)} devices from number {sampling.first} on are to sample, and not every host has one of them; "
      f"set {section}.replicas.devices and {section}.replicas.first to 0"
    )


def _check_share(settings: Settings) -> None:
  """Trials that read one after the other must all have begun before one is answered."""
  train = settings.train
  share = -(-max(train.groups * train.group_size, settings.eval.tasks) // count())
  if share > train.concurrency:
    raise ValueError(
      f"a host plays up to {share} trials, which read the bank one after the other and must begin at once; set "
      f"config.train.concurrency to at least {share}, not {train.concurrency}"
    )


def _check_extractor(parts: ExtractorSettings) -> None:
  """A second model is on all devices, as the first is, or on some of host 0."""
  grid = mesh_lib.make(parts.mesh)
  if grid.size == jax.device_count():
    if parts.schedule != "interleaved":
      raise ValueError(
        f"an extractor on the devices of all hosts cannot work beside the actor (schedule {parts.schedule}): both "
        "would compute with the other hosts in two orders; set config.extractor.schedule to interleaved, or "
        "config.extractor.mesh to devices of host 0"
      )
    _check_mesh(parts, "config.extractor")
    return
  chosen = list(grid.devices.flat)
  chosen += jax.devices()[parts.replicas.first :][: parts.replicas.devices]
  if any(device.process_index for device in chosen):
    raise ValueError(
      f"the extractor's {grid.size} devices are not all {jax.device_count()} and not all of host 0; set "
      f"config.extractor.mesh to data -1 and first 0, or to some of the first {jax.local_device_count()} devices, and "
      "config.extractor.replicas likewise"
    )


# What they tell each other.


def share(number: int, host: int | None = None) -> range:
  """Which of so many things in a row belong to a host (this one): a block, of a size that differs by 1 at most."""
  host = index() if host is None else host
  return range(number * host // count(), number * (host + 1) // count())


def mine(things: Sequence[T]) -> Sequence[T]:
  """This host's share of what all hosts know."""
  part = share(len(things))
  return things[part.start : part.stop]


def gather(things: Sequence[T], what: str) -> list[T]:
  """The things of all hosts in the hosts' order; all must ask. They travel by pickle."""
  if _job is None:
    return list(things)
  with waiting(what):
    said = zlib.compress(pickle.dumps(list(things), protocol=5), 1)
    said = len(said).to_bytes(_SIZE, "little") + said
    blocks, longest = [], 1
    while len(blocks) * _BLOCK < longest:
      start, block = len(blocks) * _BLOCK, np.zeros(_BLOCK, np.uint8)
      part = np.frombuffer(said[start : start + _BLOCK], np.uint8)
      block[: len(part)] = part
      blocks.append(multihost_utils.process_allgather(block))
      if len(blocks) == 1:
        sizes = [int.from_bytes(row[:_SIZE].tobytes(), "little") for row in blocks[0]]
        longest = max(sizes) + _SIZE
  heard = [row.tobytes()[_SIZE:] for row in np.concatenate(blocks, axis=1)]
  return [
    thing
    for text, size in zip(heard, sizes, strict=True)
    for thing in pickle.loads(zlib.decompress(text[:size]))
  ]


def of_first(work: Callable[[], T], what: str) -> T:
  """What the first host makes of `work`, on every host, or the ValueError or OSError it raises there."""
  if _job is None:
    return work()
  made: list[tuple[Any, Exception | None]] = []
  if first():
    try:
      made = [(work(), None)]
    except (ValueError, OSError) as error:
      made = [(None, error)]
  ((value, error),) = gather(made, what)
  if error is not None:
    raise error
  return value


def together(work: Callable[[], T], what: str) -> T:
  """What this host makes of `work`; where any host fails, on all the ValueError or OSError of the first that does."""
  if _job is None:
    return work()
  value, failed = None, None
  try:
    value = work()
  except (ValueError, OSError) as error:
    failed = error
  for error in gather([failed], what):
    if error is not None:
      raise error
  return value


def differing(values: Sequence[Any]) -> list[int]:
  """The hosts whose value is not that of the first."""
  return [host for host, value in enumerate(values) if value != values[0]]


def exchange(trials: Sequence[Trial], what: str) -> Sequence[Trial]:
  """All trials, once every host has played its share of them: its own as they are, the others slim.

  Own trials keep every token. Of others all comes along that credit, memories and metrics read; their
  turns are not `here`, and have no prompt and no log-probs, of which only the lengths are right. An answer of
  another model, which is not trained here but may be there, comes whole.
  """
  if _job is None:
    return trials
  part = share(len(trials))
  told = gather([_slim(trial) for trial in mine(trials)], what)
  return [*told[: part.start], *trials[part.start : part.stop], *told[part.stop :]]


def _slim(trial: Trial) -> Trial:
  return dataclasses.replace(trial, turns=[_slim_turn(turn) for turn in trial.turns])


def _slim_turn(turn: Turn) -> Turn:
  sample = turn.sample
  if turn.phase != "advise" or turn.trained:
    sample = sample._replace(
      prompt_ids=np.zeros(len(sample.prompt_ids), _ABSENT),
      logps=np.zeros(len(sample.logps), _ABSENT),
    )
  plain = None if turn.plain is None else []
  return dataclasses.replace(turn, messages=[], memory=(), sample=sample, plain=plain, here=False)


# How they end together.


@contextlib.contextmanager
def during(update: int) -> Iterator[None]:
  """Around an update: a connection that breaks in it, wherever that shows, ends this host in one sentence."""
  global _update
  _update = update
  with _connected():
    yield
  _update = None


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
  """Around a wait for the other hosts, or for what devices compute with theirs; the watch looks at its time."""
  global _wait
  if _job is None:
    yield
    return
  outer, _wait = _wait, _Wait(what, _now())
  try:
    with _connected():
      yield
  finally:
    _wait = outer


@contextlib.contextmanager
def _connected() -> Iterator[None]:
  try:
    yield
  except Exception as error:
    _end_if_broken(error)
    raise


def _end_if_broken(error: BaseException) -> None:
  broken = isinstance(error, RuntimeError | ValueError) and any(m in str(error) for m in _MARKS)
  if _job is not None and broken:
    end(f"the connection to the others broke ({_short(error)})")


def keeps_checkpoints(folder: pathlib.Path) -> None:
  """Where they lie, to be named when this host has to end."""
  global _checkpoints
  _checkpoints = folder


def end(reason: str) -> NoReturn:
  """Ends this process at once, with one sentence and LOST: what waits for the others would hang."""
  wait = _wait
  doing = "" if _update is None else f" in update {_update}"
  if wait is not None:
    doing += f" while it waited for {wait.what}, since {_now() - wait.since:.0f} s"
  kept = _newest_checkpoint()
  text = f"host {index()} of {count() or 'several'} ends: {reason}{doing}; {kept}\n"
  os.write(2, text.encode())  # not print(): this may be any thread, in the middle of another print
  _exit(LOST)


def _newest_checkpoint() -> str:
  folder = _checkpoints
  names = os.listdir(folder) if folder is not None and folder.is_dir() else []
  steps = [int(name) for name in names if name.isdigit()]
  if not steps:
    return "there is no checkpoint yet, and --resume begins anew"
  return f"the newest complete checkpoint is {folder}/{max(steps)}, and --resume goes on from it"


def _watch() -> None:
  """A thread: nobody waits for ever, not even for hosts that are alive."""
  limit = PATIENCE * _job.seconds
  while True:
    time.sleep(min(1.0, limit / 4))
    wait = _wait
    if wait is not None and _now() - wait.since > limit:
      end("the others are alive and did not come")


def _say_before_abort() -> None:
  """The client of jax.distributed has one answer to a lost host, abort(), from a thread of its own."""
  global _aborted

  def said(number: int) -> None:
    end("native code stopped, as it does where a host is lost (its own words stand above)")

  _aborted = ctypes.CFUNCTYPE(None, ctypes.c_int)(said)
  # Not signal.signal, whose handlers run in the main thread, and later: abort() does not come back.
  libc = ctypes.CDLL(None)
  libc.signal.restype = ctypes.c_void_p
  libc.signal(ctypes.c_int(signal.SIGABRT), _aborted)


def _exit(code: int) -> NoReturn:
  """Not sys.exit: jax.distributed would wait at exit for hosts that may be gone."""
  with contextlib.suppress(Exception):
    sys.stdout.flush()
    sys.stderr.flush()
  os._exit(code)


def _uncaught(kind, error, trace) -> None:
  """An error nobody expected is shown as ever, and then nobody is waited for."""
  _end_if_broken(error)
  sys.__excepthook__(kind, error, trace)
  _exit(1)


def _now() -> float:
  return time.monotonic()


def _short(error: BaseException) -> str:
  return " ".join(str(error).split())[:160]
