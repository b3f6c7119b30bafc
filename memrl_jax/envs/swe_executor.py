"""Where the commands of an SWE task run: a folder in a sandbox of this machine, or a Docker container.

Files are read and written by commands inside, never from outside: a link that a command left behind leads
nowhere else. A started executor holds the repository as one commit, its history left out (it could hold
the solution), or as the instance's image has it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping
from typing import Protocol

from memrl_jax.envs import swe_sandbox as sandbox
from memrl_jax.envs.swe_sandbox import WORK, Limits, Result

FILE_CHARS = 1_000_000  # longest file that is read or edited, and longest patch
OUTPUT_CHARS = 8_000


class Executor(Protocol):
  """One repository in which commands run. Everything is gone after `stop`, also after a failure."""

  def start(self) -> None:
    """Opens the repository."""

  def run(
    self, command: str, *, seconds: float | None = None, stdin: str = "", chars: int = OUTPUT_CHARS
  ) -> Result:
    """Runs bash in the repository's folder, for the usual time or for `seconds`."""

  def read(self, path: str) -> str:
    """The text of a file, or the names in a folder; OSError with the reason where there is none."""

  def write(self, path: str, text: str) -> None:
    """Writes a file and makes its folders; OSError with the reason where that is not possible."""

  def diff(self) -> str:
    """What was changed since the start, new files included, as a patch."""

  def stop(self) -> None:
    """Ends and removes everything; may be called twice."""


class _Commands:
  """Reading, writing and comparing, as commands; `run` is the executor's own."""

  def read(self, path: str) -> str:
    name = shlex.quote(path)
    listing = f"if [ -d {name} ]; then ls -Ap -- {name}; else cat -- {name}; fi"
    text = self._checked(listing, chars=FILE_CHARS + 1000)
    if len(text.encode()) > FILE_CHARS:
      raise OSError(f"{path} is longer than {FILE_CHARS} characters")
    return text

  def write(self, path: str, text: str) -> None:
    name = shlex.quote(path)
    self._checked(f'mkdir -p -- "$(dirname -- {name})" && cat > {name}', stdin=text)

  def diff(self) -> str:
    patch = self._checked(
      "export GIT_INDEX_FILE=/tmp/.diff.index\n"  # leaves alone what was staged
      f"git read-tree {self._start} && git add -A && "
      f"git diff --cached --binary --no-ext-diff {self._start}",
      chars=FILE_CHARS + 1000,
    )
    if len(patch.encode()) > FILE_CHARS:
      raise OSError(f"the patch is longer than {FILE_CHARS} characters")
    return patch

  def _checked(self, command: str, *, stdin: str = "", chars: int = OUTPUT_CHARS) -> str:
    code, output = self.run(command, stdin=stdin, chars=chars)
    if code != 0:
      raise OSError(output.strip() or "the command was killed at its time limit")
    return output


class Local(_Commands):
  """A copy of the repository in a temporary folder; every command in a sandbox of its own.

  `files` maps paths to texts. Otherwise `repository` is a clone and `commit` what is taken from it.

  Raises (start):
    RuntimeError: this machine permits no sandbox.
    ValueError: there is no such clone or commit.
  """

  def __init__(
    self,
    limits: Limits,
    *,
    files: Mapping[str, str] | None = None,
    repository: str = "",
    commit: str = "",
  ):
    self._limits, self._files = limits, files
    self._repository, self._commit = repository, commit
    self._folder: tempfile.TemporaryDirectory | None = None

  def start(self) -> None:
    self._folder = tempfile.TemporaryDirectory(prefix="memrl-swe-", ignore_cleanup_errors=True)
    self._uid = sandbox.account()
    try:
      os.mkdir(f"{self._folder.name}/testbed")
      self._fill()
      sandbox.prepare(self._folder.name, self._uid)
      commit = "git add -A -f && git commit -q --allow-empty -m base && git rev-parse HEAD"
      self._start = self._checked(f"git init -q -b main && {commit}").strip()
    except BaseException:
      self.stop()
      raise

  def run(
    self, command: str, *, seconds: float | None = None, stdin: str = "", chars: int = OUTPUT_CHARS
  ) -> Result:
    if self._folder is None:
      raise RuntimeError("the executor is not started; call start() first, and not after stop()")
    limits = self._limits if seconds is None else self._limits._replace(seconds=seconds)
    return sandbox.run(command, self._folder.name, limits, stdin=stdin, uid=self._uid, chars=chars)

  def stop(self) -> None:
    if self._folder is not None:
      self._folder.cleanup()
      self._folder = None

  def _fill(self) -> None:
    testbed = f"{self._folder.name}/testbed"
    if self._files is not None:
      for path, text in self._files.items():
        os.makedirs(os.path.dirname(f"{testbed}/{path}"), exist_ok=True)
        with open(f"{testbed}/{path}", "w", encoding="utf-8") as file:
          file.write(text)
    else:
      archive = ["git", "-C", self._repository, "archive", "--format=tar", self._commit]
      with tempfile.TemporaryFile() as tar:
        done = subprocess.run(archive, stdout=tar, stderr=subprocess.PIPE, text=True)
        if done.returncode:
          raise ValueError(
            f"{self._repository} has no commit {self._commit} to work on ({done.stderr.strip()}); clone the "
            "repository there with its history (config.env.repos)"
          )
        tar.seek(0)
        subprocess.run(["tar", "-x", "--no-same-owner", "-C", testbed], stdin=tar, check=True)


_containers = itertools.count()


class Docker(_Commands):
  """A container of an image that holds the repository in /testbed, without network.

  Driven by the docker command line. Never run against an engine yet: its calls are tested with a stand-in.

  Raises (start):
    RuntimeError: there is no docker command, no engine, or no such image.
  """

  def __init__(self, limits: Limits, *, image: str):
    self._limits, self._image, self._name = limits, image, ""

  def start(self) -> None:
    name = f"memrl-swe-{os.getpid()}-{next(_containers)}"
    memory = f"--memory={self._limits.memory_mb}m"
    limits = [memory, f"--pids-limit={sandbox.PROCESSES}", "--network=none"]
    settings = ["--rm", "--init", "--detach", f"--name={name}", f"--workdir={WORK}", *limits]
    self._docker("run", *settings, self._image, "sleep", "infinity")
    self._name = name
    try:
      self._start = self._checked("git rev-parse HEAD").strip()
    except BaseException:
      self.stop()
      raise

  def run(
    self, command: str, *, seconds: float | None = None, stdin: str = "", chars: int = OUTPUT_CHARS
  ) -> Result:
    if not self._name:
      raise RuntimeError("the executor is not started; call start() first, and not after stop()")
    seconds = self._limits.seconds if seconds is None else seconds
    watch = ["timeout", "--signal=KILL", str(seconds)]  # inside: ending `docker exec` ends nothing
    shell = [*watch, "bash", "-c", f"{_ACTIVATE}\n{command}"]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
      given.write(stdin.encode())
      given.seek(0)
      begun = time.monotonic()
      code = subprocess.run(
        ["docker", "exec", "--interactive", f"--workdir={WORK}", self._name, *shell],
        stdin=given,
        stdout=printed,
        stderr=subprocess.STDOUT,
        timeout=seconds + 30,
      ).returncode
      late = code == sandbox.KILLED and time.monotonic() - begun >= seconds
      return Result(None if late else code, sandbox.clip(printed, chars))

  def stop(self) -> None:
    name, self._name = self._name, ""
    if name:
      with contextlib.suppress(RuntimeError):
        self._docker("rm", "--force", name)

  def _docker(self, *arguments: str) -> None:
    try:
      done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    except FileNotFoundError:
      done = None
    if done is None or done.returncode:
      why = done.stderr.strip() if done else "there is no docker command"
      raise RuntimeError(
        f"docker cannot start {self._image} ({why}); install Docker, start its engine and pull the image, or "
        "choose local for repositories whose tests run under this Python (config.env.executor)"
      )


# The official images keep a repository's packages in a conda environment.
_ACTIVATE = "[ -f /opt/miniconda3/bin/activate ] && source /opt/miniconda3/bin/activate && conda activate testbed"
