"""Runs inside the sandbox: a program, then the tests on it. Needs the standard library of Python 3.8 only.

Standard input holds {"program", "tests", "key"} as JSON. READY is written once this runs, so that a sandbox that
failed is told from a program that did; then, as the last line, the key and what came of the tests. The program's own
output goes nowhere, and a line without the key says nothing. It runs as no module, and with builtins of its own: a
program that changes modules or builtins changes nothing here (`bigcodebench_verdict` starts it so).
"""

import builtins
import json
import os
import sys
import types
import unittest

READY = "memrl: the tests begin"
TOLD = 20  # failures described
CHARS = 300  # of each description


class Outcome(unittest.TestResult):
  """Which tests passed. A test that the program itself skips has not passed; one that is marked as skipped has."""

  def __init__(self):
    super().__init__()
    self.passed, self.failed, self.error = 0, [], ""

  def fail(self, test, why):
    name = test.id().replace("__test__.TestCases.", "", 1)
    self.failed.append(f"{name}: {why}"[:CHARS])

  def failure(self, test, err):
    self.fail(test, f"{err[0].__name__}: {err[1]}")

  def addSuccess(self, test):
    self.passed += 1

  def addError(self, test, err):
    self.failure(test, err)

  def addFailure(self, test, err):
    self.failure(test, err)

  def addSubTest(self, test, subtest, err):
    if err is not None:
      self.failure(subtest, err)

  def addUnexpectedSuccess(self, test):
    self.fail(test, "it was expected to fail")

  def addExpectedFailure(self, test, err):
    self.passed += 1

  def addSkip(self, test, reason):
    method = getattr(type(test), getattr(test, "_testMethodName", ""), None)
    if getattr(method, "__unittest_skip__", False) or getattr(test, "__unittest_skip__", False):
      self.passed += 1
    else:
      self.fail(test, "the program skipped it")


CANARIES = 4


class Canary(unittest.TestCase):
  """Tests that have to fail: where one passes, the program has changed what the tests are judged with."""

  def test_unequal(self):
    self.assertEqual(1, 2)

  def test_untrue(self):
    self.assertTrue(False)

  def test_unraised(self):
    with self.assertRaises(ValueError):
      pass

  def test_broken(self):
    raise ValueError


def check(program, tests):
  """What came of the tests; `error` says why they could not be run, "" if they were."""
  module = types.ModuleType("__test__")  # the name under which the published tests run
  module.__file__ = "__test__.py"
  module.__builtins__ = builtins  # the real ones, which tests replace parts of
  module.os, module.sys, module.environ = os, sys, os.environ  # the original lends these names
  sys.modules["__test__"] = module
  outcome, canary, load = Outcome(), Outcome(), unittest.TestLoader().loadTestsFromTestCase
  try:
    exec(compile(program, "program.py", "exec"), module.__dict__)
    exec(compile(tests, "tests.py", "exec"), module.__dict__)
    load(module.TestCases).run(outcome)
    load(Canary).run(canary)
    if canary.passed or len(canary.failed) != CANARIES:
      outcome.error = "the program changed unittest"
  except BaseException as error:
    outcome.error = f"{type(error).__name__}: {error}"[:CHARS]
  return outcome


def said(outcome, quote):
  """What came of the tests, as JSON: written by hand, since the program could have changed json by now."""
  failed = ", ".join([quote(text) for text in outcome.failed[:TOLD]])
  return (
    f'{{"passed": {outcome.passed}, "total": {outcome.passed + len(outcome.failed)}, '
    f'"error": {quote(outcome.error)}, "failed": [{failed}]}}'
  )


def main():
  given = json.loads(sys.stdin.buffer.read())
  write, leave, quote = os.write, os._exit, json.encoder.c_encode_basestring_ascii
  answers = os.dup(1)  # not inherited by processes that the program starts
  write(answers, f"{READY}\n".encode())
  nowhere = os.open(os.devnull, os.O_RDWR)
  for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
  os.close(nowhere)
  outcome = check(given["program"], given["tests"])
  write(answers, f"\n{given['key']} {said(outcome, quote)}\n".encode())
  leave(0)  # neither threads nor exit handlers of the program have a say


if __name__ == "runner":
  main()
