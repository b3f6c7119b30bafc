"""Whether a patch resolves an instance: every FAIL_TO_PASS and PASS_TO_PASS test passes (SWE-bench's rule).

The patch is judged in a fresh executor. Test files of the patch are put back to the official version, so
editing tests does not help. What a patch does inside the process of the tests cannot be ruled out, neither here
nor in the original: a model that is trained on this verdict needs watching for it.
"""

from __future__ import annotations

import re
import shlex
from typing import NamedTuple

from memrl_jax.envs.swe_executor import FILE_CHARS, Executor
from memrl_jax.envs.swe_tasks import Instance

_IS_TEST = re.compile(r"(?:^|/)(?:test_[^/]*\.py|[^/]*_test\.py|conftest\.py)$")


class Verdict(NamedTuple):
  """`fixed` of `wanted` FAIL_TO_PASS tests pass; `broken` PASS_TO_PASS tests do not. `note` says it in words."""

  fixed: int
  wanted: int
  broken: int
  note: str

  @property
  def resolved(self) -> bool:
    return self.fixed == self.wanted and not self.broken

  @property
  def score(self) -> float:
    """The share of FAIL_TO_PASS tests that pass; 0 where anything else broke."""
    return 0.0 if self.broken else self.fixed / self.wanted


def judge(fresh: Executor, task: Instance, patch: str) -> Verdict:
  """Judges a patch in an executor that was started and not used; the caller stops it."""
  if not patch:
    return Verdict(0, len(task.fail_to_pass), 0, "nothing was changed")
  problem = _apply(fresh, patch) or _restore(fresh, task) or _apply(fresh, task.test_patch)
  if problem:
    return Verdict(0, len(task.fail_to_pass), 0, problem)
  named = " ".join(map(shlex.quote, test_files(task)))
  code, output = fresh.run(f"{task.test_command} {named}", chars=FILE_CHARS)
  passed = outcomes(output)
  fixed = sum(passed.get(test, False) for test in task.fail_to_pass)
  broken = sum(not passed.get(test, False) for test in task.pass_to_pass)
  note = f"{fixed} of {len(task.fail_to_pass)} failing tests pass"
  note += f", {broken} of {len(task.pass_to_pass)} others fail" if broken else ""
  note += "; the tests were stopped at their time limit" if code is None else ""
  return Verdict(fixed, len(task.fail_to_pass), broken, note)


def _apply(executor: Executor, patch: str) -> str:
  """Applies a patch; what went wrong, "" when nothing did."""
  code, output = executor.run("git apply --whitespace=nowarn -", stdin=patch)
  return "" if code == 0 else f"a patch does not apply: {output.strip()}"


def _restore(executor: Executor, task: Instance) -> str:
  """Puts every test file back to its official state, removing those that were not there."""
  official = set(test_files(task))
  code, names = executor.run(
    "git add -A && git diff --cached --name-only --no-renames -z HEAD", chars=FILE_CHARS
  )
  changed = [n for n in names.split("\0") if n in official or _IS_TEST.search(n)]
  for name in map(shlex.quote, changed):
    back = f"git rm -r -q --cached --ignore-unmatch -- {name} && rm -rf -- {name}"
    code, names = executor.run(f"{back} && {{ git checkout -q HEAD -- {name} || true; }} 2>&1")
    if code != 0:
      break
  return "" if code == 0 else f"the tests cannot be restored: {names.strip()}"


def test_files(task: Instance) -> list[str]:
  """The files that `test_patch` leaves behind: what the tests are run from."""
  names = re.findall(r"^\+\+\+ b/(.+?)(?:\t.*)?$", task.test_patch, re.MULTILINE)
  return sorted({name for name in names if name.endswith(".py")})


_PYTEST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS) (\S+.*?)(?: - .*)?$")
_UNITTEST = re.compile(r"^(\w+) \(([\w.]+?)(?:\.\1)?\) \.\.\. (.*)$")


def outcomes(output: str) -> dict[str, bool]:
  """Test -> whether it passed, from what pytest -rA or unittest -v print.

  unittest's names are written `test (module.Class)`, as SWE-bench does, whatever the version of Python. A name of
  pytest's with blanks is listed whole and up to the first one, where SWE-bench cuts it. Tests that share a name passed
  only if all did; an expected failure counts as passed, as in SWE-bench.
  """
  found: dict[str, bool] = {}
  for line in output.splitlines():
    if match := _PYTEST.match(line):
      names, passed = {match[2], match[2].split()[0]}, match[1] in ("PASSED", "XFAIL")
    elif match := _UNITTEST.match(line):
      names, passed = {f"{match[1]} ({match[2]})"}, match[3] in ("ok", "expected failure")
    else:
      continue
    for name in names:
      found[name] = found.get(name, True) and passed
  return found
