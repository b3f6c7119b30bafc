"""The ScienceWorld simulator in Java processes: one simulator a process, lent to one environment at a time.

Starting one takes about two seconds, so a process that is given back is kept for the next borrower. All
of them end with this process, however it ends: the simulator stops when its standard input closes.

The simulator draws from a global generator, numbers objects from a global counter and orders them by
identity hash codes, so by itself it never shows the same variation twice in the same order. Here every
load seeds the generator, resets the counter, and hash codes are constant: an episode is a function of
its task and actions, in any process and after anything else. Constant hash codes cost a fifth of the
simulator's speed (experiments/bench/scienceworld.py); `exact=False` leaves them as they are.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import socket
import threading
from typing import Any, NamedTuple

# An answer that takes longer will not come. Actions take milliseconds; a start two seconds, or a minute
# on a crowded machine. An EnvPool has a shorter limit of its own (config.env.timeout_s).
CALL_S = 300.0


class Kind(NamedTuple):
  """What a simulator is started with: the most its heap takes, and whether replays are exact."""

  heap_mb: int = 256
  exact: bool = True

  def flags(self) -> list[str]:
    hashes = ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"] if self.exact else []
    return [f"-Xmx{self.heap_mb}m", "-XX:+UseSerialGC", *hashes]


_lock = threading.Lock()
_idle: list[Jvm] = []
_lent = 0


def borrow(kind: Kind, most: int) -> Jvm:
  """A simulator of our own until `give_back` or `discard`.

  Raises:
    RuntimeError: `most` are lent already.
    ImportError: the package or Java is missing.
  """
  global _lent
  with _lock:
    if _lent >= most:
      raise RuntimeError(
        f"{most} ScienceWorld simulators are in use in this process; play fewer trials at once "
        "(config.train.concurrency), use more workers (config.env.workers) or allow more "
        "(config.env.jvms)"
      )
    _lent += 1
    alive = [jvm for jvm in _idle if jvm.alive()]
    chosen = next((jvm for jvm in alive if jvm.kind == kind), None)
    kept = [jvm for jvm in alive if jvm is not chosen][: most - _lent]
    ended = [jvm for jvm in _idle if jvm is not chosen and jvm not in kept]
    _idle[:] = kept
  for jvm in ended:
    jvm.kill()
  try:
    return chosen or Jvm(kind)
  except BaseException:
    with _lock:
      _lent -= 1
    raise


def give_back(jvm: Jvm) -> None:
  """Ends a loan; the simulator waits for the next."""
  global _lent
  with _lock:
    _lent -= 1
    _idle.append(jvm)


def discard(jvm: Jvm) -> None:
  """Ends a loan of a simulator that must not be used again."""
  global _lent
  with _lock:
    _lent -= 1
  jvm.kill()


def shutdown() -> None:
  """Ends all simulators that nobody uses; they are started again when needed."""
  with _lock:
    jvms, _idle[:] = list(_idle), []
  for jvm in jvms:
    jvm.kill()


def _forget() -> None:
  """A forked child shares our sockets: it must not talk to our simulators, nor end them."""
  global _lent
  _idle.clear()
  _lent = 0


atexit.register(shutdown)
if hasattr(os, "register_at_fork"):
  os.register_at_fork(after_in_child=_forget)


class Jvm:
  """One Java process with one simulator. Not for two threads at a time."""

  def __init__(self, kind: Kind):
    gateway, jar = _packages()
    if shutil.which("java") is None:
      raise ImportError(
        "ScienceWorld runs in Java and there is no java on the PATH; apt-get install "
        "openjdk-17-jre-headless"
      )
    self.kind = kind
    try:
      port, self._process = gateway.launch_gateway(
        classpath=jar,
        cwd=os.path.dirname(jar),
        javaopts=kind.flags(),
        die_on_exit=True,
        return_proc=True,
      )
    except ValueError:  # it said no port
      raise RuntimeError(
        f"java ended as it started; check that `java {' '.join(kind.flags())} -version` works"
      ) from None
    try:
      self._connect(gateway, port)
    except BaseException:
      self.kill()
      raise

  def _connect(self, gateway: Any, port: int) -> None:
    parameters = gateway.GatewayParameters(port=port, read_timeout=CALL_S)
    self._client = _client(gateway)(gateway_parameters=parameters)
    java = gateway.JavaGateway(gateway_client=self._client).jvm
    self.server = java.scienceworld.runtime.pythonapi.PythonInterface()
    self._random = _singleton(java, "scala.util.Random$")
    self._count = getattr(_singleton(java, "util.UniqueIdentifier$"), "count_$eq")

  @property
  def pid(self) -> int:
    return self._process.pid

  def alive(self) -> bool:
    return self._process.poll() is None

  def load(self, task: str, variation: int, simplifications: str, gold: bool = False) -> str:
    """Opens a variation and returns the first look around; `gold` also works out a solution."""
    self._random.setSeed(variation)
    self._count(0)
    self.server.load(task, variation, simplifications, gold)
    return self.server.step("look around")  # without it the score is the last episode's

  def kill(self) -> None:
    """Ends the process; it holds nothing that is worth a farewell."""
    self._process.kill()
    self._process.wait()
    with contextlib.suppress(OSError):
      self._process.stdin.close()
    self._client.close()
    self._client.is_connected = False  # or py4j tells the dead, loudly, which objects to forget


def _packages() -> tuple[Any, str]:
  try:
    import scienceworld.constants
    from py4j import java_gateway
  except ImportError:
    raise ImportError(
      "ScienceWorld's simulator is not installed; pip install 'memrl_jax[scienceworld]' (or scienceworld==1.2.3)"
    ) from None
  return java_gateway, scienceworld.constants.JAR_PATH


def _singleton(java: Any, name: str) -> Any:
  return java.java.lang.Class.forName(name).getField("MODULE$").get(None)


def _client(gateway: Any) -> type:
  """A py4j client that never repeats a command (a step might be played twice) and never waits for an
  acknowledgement: answers longer than a packet would take 40 ms (Nagle's algorithm)."""

  class Client(gateway.GatewayClient):
    def _create_connection(self):
      connection = super()._create_connection()
      connection.stream = io.BufferedReader(_quick(connection.socket), 8192)
      return connection

    def send_command(self, command, retry=True, binary=False):
      connection = self._get_connection()
      try:
        answer = connection.send_command(command)
      except gateway.Py4JNetworkError as error:
        connection.close(reset=True)
        raise RuntimeError(f"the ScienceWorld simulator is gone ({error})") from error
      except BaseException:  # interrupted: its answer would be read as that of the next command
        connection.close(reset=True)
        raise
      self._give_back_connection(connection)
      return answer

  return Client


def _quick(sock: socket.socket) -> io.RawIOBase:
  class Quick(socket.SocketIO):
    def readinto(self, buffer):
      if hasattr(socket, "TCP_QUICKACK"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
      return super().readinto(buffer)

  sock._io_refs += 1  # what socket.makefile does, so that close() waits for the stream
  return Quick(sock, "r")
