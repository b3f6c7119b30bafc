"""A small Linux machine for one attempt at an OS task: root inside, without network, gone with its owner.

The file system is an overlay over a root folder (an image), or over this machine's /usr with an /etc of its own; all
changes go to a tmpfs of limited size that only the machine's namespaces can see. Processes, memory, time and files
are limited. Its root is the host's with few capabilities, as in Docker, but without Docker's filter of system calls:
this keeps honest and careless agents in, and is no jail against exploits of the kernel.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import select
import subprocess
import sys
import time
from typing import Any

from memrl_jax.envs import lifelong_jail
from memrl_jax.envs import swe_sandbox as sandbox
from memrl_jax.envs.swe_sandbox import Limits, Result

DISK_MB = 256
GRACE_S = 10.0  # what the machine may take beyond a command's limit of time before it is given up
ENVIRONMENT = {
  "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
  "HOME": "/root",
  "LANG": "C.UTF-8",
  "TZ": "UTC",
  "TERM": "dumb",
}


class Machine:
  """One machine. What a command leaves running goes on until `stop`; a command that exceeds a limit ends all of it.

  `limits.memory_mb` holds for each process and for all of them together. Of a longer output the first and last
  `chars` / 2 are kept.

  Raises (start):
    RuntimeError: this machine permits no such namespaces.
  """

  def __init__(self, limits: Limits, *, image: str = "", chars: int = 4000):
    self._limits, self._image, self._chars = limits, image, chars
    self._process: subprocess.Popen[bytes] | None = None

  def start(self) -> None:
    if refusal := refused():
      raise RuntimeError(
        f"OS tasks run only in a machine of their own, and this system permits none ({refusal}); run as root where "
        "namespaces, overlay file systems and device nodes are permitted"
      )
    self._start()

  def run(self, script: str, *, seconds: float | None = None) -> Result:
    """Runs bash as root in /; the code is None where a limit ended it, which the end of the output then says."""
    if self._process is None:
      raise RuntimeError("the machine is not running; call start() first, and not after stop()")
    seconds = self._limits.seconds if seconds is None else seconds
    request = json.dumps({"script": script, "seconds": seconds}).encode() + b"\n"
    try:
      self._process.stdin.write(request)
      self._process.stdin.flush()
      reply = self._answer(seconds + GRACE_S)
    except (OSError, RuntimeError) as error:
      self.stop()
      raise RuntimeError(f"the machine of an OS task is gone ({error})") from error
    ended = {"time": f"it took more than {seconds:g} seconds", "processes": "too many processes"}
    ended["memory"] = f"more than {self._limits.memory_mb} MB of memory"
    why = f"\n[stopped: {ended[reply['why']]}]" if reply["why"] else ""
    return Result(reply["code"], reply["output"] + why)

  def stop(self) -> None:
    """Ends and removes everything; may be called twice."""
    process, self._process = self._process, None
    if process is not None:
      with contextlib.suppress(BrokenPipeError):
        process.stdin.close()  # its first process ends, and with it the machine
      try:
        process.wait(GRACE_S)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
      process.stdout.close()

  def _start(self) -> None:
    settings = {
      "image": self._image,
      "disk_mb": DISK_MB,
      "processes": sandbox.PROCESSES,
      "memory_mb": self._limits.memory_mb,
      "file_mb": sandbox.FILE_MB,
      "chars": self._chars,
      "environment": ENVIRONMENT,
    }
    first = [sys.executable, "-I", "-S", lifelong_jail.__file__, json.dumps(settings)]
    alone = ["--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child=KILL"]
    try:
      self._process = subprocess.Popen(
        ["unshare", *alone, *first],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={},
        start_new_session=True,
      )
      error = self._answer(60.0)["error"]
      if error:
        raise RuntimeError(error)
    except BaseException:
      self.stop()
      raise

  def _answer(self, seconds: float) -> Any:
    """The next line of the machine, read as JSON."""
    end, line = time.monotonic() + seconds, b""
    file = self._process.stdout.fileno()
    while not line.endswith(b"\n"):
      ready, _, _ = select.select([file], [], [], max(0.0, end - time.monotonic()))
      data = os.read(file, 1 << 16) if ready else b""
      if not data:
        said = line.decode(errors="replace").strip()
        raise RuntimeError(said or ("it does not answer" if not ready else "it has ended"))
      line += data
    try:
      return json.loads(line)
    except json.JSONDecodeError:
      raise RuntimeError(line.decode(errors="replace").strip()) from None


@functools.cache
def refused() -> str:
  """Why no machine can be made here; "" when one can."""
  if sys.platform != "linux" or os.geteuid() != 0:
    return "it is no Linux" if sys.platform != "linux" else "we are not root"
  if not pathlib.Path("/usr/bin/unshare").exists():
    return "it lacks util-linux"
  machine = Machine(Limits(30.0, 512))
  try:
    machine._start()
    result = machine.run("echo alive")
    return "" if result == Result(0, "alive\n") else result.output.strip() or "it was killed"
  except (OSError, RuntimeError) as error:
    return str(error)
  finally:
    machine.stop()
