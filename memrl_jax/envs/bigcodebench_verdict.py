"""Whether a program passes the tests of its task: all of them, in a sandbox, within the limits (pass@1's rule).

Program and tests share one process, as in the original: tests replace parts of the program and look into its
objects. What the sandbox rules out is everything outside that process. The verdict leaves it over a pipe as a line
that starts with a key drawn for this one check; a program that prints, writes files, ends early, skips tests, or
changes modules or unittest's assertions has failed. One that hunts for the key in the memory of its own process, or
answers with objects that are equal to everything, is not ruled out: a model trained on this verdict needs watching.
"""

from __future__ import annotations

import functools
import json
import pathlib
import secrets
import shlex
import subprocess
import tempfile
from typing import NamedTuple

from memrl_jax.envs import bigcodebench_runner as runner
from memrl_jax.envs import swe_sandbox as sandbox

_SOURCE = pathlib.Path(runner.__file__).read_text(encoding="utf-8")
_START = (
  "import builtins\n"
  f"exec({_SOURCE!r}, {{'__name__': 'runner', '__builtins__': dict(vars(builtins))}})"
)
_CHARS = 200_000  # of what the runner says; 20 described failures are far less


class Verdict(NamedTuple):
  """`passed` of `total` tests passed; `problem` says why they could not be run, `failures` what failed and how."""

  passed: int
  total: int
  problem: str = ""
  failures: tuple[str, ...] = ()

  @property
  def success(self) -> bool:
    return not self.problem and self.passed == self.total > 0

  @property
  def note(self) -> str:
    """The verdict in a few words."""
    return self.problem or f"{self.passed} of {self.total} tests pass"


def judge(program: str, tests: str, limits: sandbox.Limits, python: str = "") -> Verdict:
  """Runs the tests on a program with this Python or another one.

  Raises:
    RuntimeError: this machine permits no sandbox, or Python does not start in it.
    ValueError: there is no such Python.
  """
  interpreter, shown = _interpreter(python)
  key = secrets.token_hex(16)
  given = json.dumps({"program": program, "tests": tests, "key": key})
  command = f"MPLBACKEND=Agg exec {shlex.quote(interpreter)} -c {shlex.quote(_START)}"
  uid = sandbox.account()
  with tempfile.TemporaryDirectory(prefix="memrl-bcb-", ignore_cleanup_errors=True) as folder:
    sandbox.prepare(folder, uid)
    code, output = sandbox.run(
      command, folder, limits, stdin=given, uid=uid, chars=_CHARS, shown=shown
    )
  if not output.startswith(runner.READY):
    raise RuntimeError(
      f"Python did not start in the sandbox ({output.strip()[-300:] or code}); give it more time or memory "
      "(config.env.check_s, config.env.memory_mb, config.env.python)"
    )
  return _read(output, key, code, limits)


def _read(output: str, key: str, code: int | None, limits: sandbox.Limits) -> Verdict:
  if code is None:
    return Verdict(0, 0, f"stopped at the limit of {limits.seconds:g} s")
  lines = [line for line in output.splitlines() if line.startswith(f"{key} ")]
  if len(lines) != 1:  # two: the program went on in a copy of itself
    return Verdict(0, 0, "the program ended the process of its tests")
  found = json.loads(lines[0].removeprefix(key))
  if not found["error"] and not found["total"]:
    return Verdict(0, 0, "no test was run")
  return Verdict(found["passed"], found["total"], found["error"], tuple(found["failed"]))


@functools.cache
def _interpreter(python: str) -> tuple[str, tuple[str, ...]]:
  """What to call, and which folders it needs to see; "" is the Python of this process."""
  if not python:
    return "python", ()
  where = "import sys; print(sys.prefix); print(sys.base_prefix)"
  try:
    answer = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    raise ValueError(
      f"{python} is no Python that runs ({error}); name the python of an environment, such as /opt/bcb/bin/python "
      "(config.env.python)"
    ) from error
  return python, tuple(dict.fromkeys(answer.stdout.splitlines()))
