"""Small Python repositories with one planted bug each, generated from a seed in SWE-bench's schema.

Every bug of `swe_modules` comes in VARIANTS repositories that differ in name and in the sound modules around
it. An id is `memrl__<module>-<bug>.<variant>`; what stands before the dot decides the split.
"""

from __future__ import annotations

import difflib
import json
from typing import Any

import numpy as np

from memrl_jax.envs import swe_modules as modules

VARIANTS = 2
COMMAND = "python -m unittest -b -v"
_NAMES = ("parcel", "harbor", "lantern", "meadow", "orchard", "pebble", "quarry", "willow")
_STREAM = 1203  # of the generator's draws


def rows(seed: int) -> list[dict[str, Any]]:
  """All repositories of a seed as rows of the schema; the files themselves in `files`."""
  return [
    _row(seed, place, module, number, variant)
    for place, module in enumerate(modules.MODULES)
    for number in range(len(module.bugs))
    for variant in range(VARIANTS)
  ]


def _row(
  seed: int, place: int, module: modules.Module, number: int, variant: int
) -> dict[str, Any]:
  rng = np.random.default_rng([_STREAM, seed, place, number, variant])
  bug, package = module.bugs[number], _NAMES[int(rng.integers(len(_NAMES)))]
  others = [other for other in modules.MODULES if other is not module]
  around = [others[int(pick)] for pick in rng.permutation(len(others))[:2]]
  path, tests = f"{package}/{module.name}.py", f"tests/test_{module.name}.py"
  broken = module.source.replace(bug.right, bug.wrong)
  files = {"README.md": _readme(package, [module, *around]), f"{package}/__init__.py": ""}
  files |= {"tests/__init__.py": ""}
  for part in sorted([module, *around]):
    files[f"{package}/{part.name}.py"] = broken if part is module else part.source
    files[f"tests/test_{part.name}.py"] = _tests(package, part, part.tests)
  official = _tests(package, module, module.tests, bug.test)
  label = f"(tests.test_{module.name}.Test{module.name.title()})"
  return {
    "instance_id": f"memrl__{module.name}-{number}.{variant}",
    "repo": f"memrl/{package}",
    "base_commit": "base",
    "problem_statement": bug.issue,
    "patch": _diff(path, broken, module.source),
    "test_patch": _diff(tests, files[tests], official),
    "FAIL_TO_PASS": json.dumps([f"test_issue {label}"]),
    "PASS_TO_PASS": json.dumps([f"test_{n} {label}" for n in range(len(module.tests))]),
    "test_command": COMMAND,
    "files": files,
  }


def _readme(package: str, parts: list[modules.Module]) -> str:
  title = package.title()
  names = "\n".join(f"- `{package}.{part.name}`" for part in sorted(parts))
  return f"# {title}\n\n{names}\n\nTests: `{COMMAND}`\n"


def _tests(package: str, module: modules.Module, bodies: tuple[str, ...], issue: str = "") -> str:
  """The test file of a module; `issue` is the body of the test that finds the bug."""
  named = {f"test_{number}": body for number, body in enumerate(bodies)}
  named |= {"test_issue": issue} if issue else {}
  blocks = [
    f"    def {name}(self):\n" + "".join(f"        {line}\n" for line in body.split("\n"))
    for name, body in named.items()
  ]
  heading = f"class Test{module.name.title()}(unittest.TestCase):\n"
  return f"import unittest\n\nfrom {package} import {module.name}\n\n\n{heading}" + "\n".join(
    blocks
  )


def _diff(path: str, before: str, after: str) -> str:
  lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
  changed = difflib.unified_diff(*lines, f"a/{path}", f"b/{path}")
  return f"diff --git a/{path} b/{path}\n" + "".join(changed)
