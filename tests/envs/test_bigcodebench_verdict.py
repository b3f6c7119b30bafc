"""Verdicts on programs, honest and not, and that nothing of them stays behind."""

import os
import pathlib
import socket
import sys
import tempfile
import time

import pytest

from memrl_jax.envs import bigcodebench_verdict, swe_sandbox
from memrl_jax.envs.bigcodebench_verdict import Verdict, judge

if swe_sandbox._refusal():
  pytest.skip(
    f"the sandbox needs Linux namespaces: {swe_sandbox._refusal()}", allow_module_level=True
  )

LIMITS = swe_sandbox.Limits(20.0, 512)
HEAD = "def task_func(x):\n"
TESTS = """import unittest
class TestCases(unittest.TestCase):
  def test_two(self):
    self.assertEqual(task_func(2), 4)
  def test_text(self):
    self.assertEqual(task_func("ab"), "abab")
  def test_refused(self):
    with self.assertRaises(TypeError):
      task_func(None)
"""
RIGHT = f"{HEAD}  return x + x\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
  """An empty folder in which the sandboxes' own folders are made; it is empty again at the end."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
  (tmp_path / "folders").mkdir()
  yield tmp_path / "folders"
  assert list((tmp_path / "folders").iterdir()) == []
  assert str(tmp_path) not in pathlib.Path("/proc/mounts").read_text()


def test_a_program_passes_if_it_passes_every_test():
  assert judge(RIGHT, TESTS, LIMITS) == Verdict(3, 3)
  assert judge(RIGHT, TESTS, LIMITS).success
  half = judge(f"{HEAD}  return 2 * (x or 0)\n", TESTS, LIMITS)  # None gives 0, and no TypeError
  assert (half.passed, half.total, half.success) == (2, 3, False)
  assert half.note == "2 of 3 tests pass"
  assert half.failures == ("test_refused: AssertionError: TypeError not raised",)


BROKEN = {
  "syntax": ("def task_func(x) return", "SyntaxError"),
  "no function": ("x = 1", "0 of 3|1 of 3"),
  "at import": ("import nothing_like_it", "ModuleNotFoundError"),
  "swallows the tests": (f'{RIGHT}\nlost = """', "SyntaxError"),
  "exit": (f"{RIGHT}\nimport sys\nsys.exit(0)", "SystemExit"),
  "hard exit": (f"{HEAD}  import os\n  os._exit(0)", "ended the process"),
  "crash": (f"{HEAD}  import os\n  os.abort()", "ended the process"),
  "memory": (f"{HEAD}  return [0] * 10**10", "0 of 3"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_tested_has_failed_and_says_why(name):
  program, why = BROKEN[name]
  verdict = judge(program, TESTS, LIMITS)
  assert not verdict.success and any(part in verdict.note for part in why.split("|")), verdict


@pytest.mark.parametrize(
  "harm",
  ["while True: pass", "import time; time.sleep(99)", "import os\n  while True: os.fork()"],
)
def test_endless_programs_and_fork_bombs_are_stopped_at_the_limit(harm):
  begun = time.monotonic()
  verdict = judge(f"{HEAD}  {harm}", TESTS, swe_sandbox.Limits(1.5, 512))
  assert not verdict.success and time.monotonic() - begun < 30
  if "fork" not in harm:  # which the limit on processes may end earlier
    assert verdict == Verdict(0, 0, "stopped at the limit of 1.5 s")


# Each would work on a judge that lacks one precaution. The program passes one of two tests by itself.
ASSERTS = """import unittest
class TestCases(unittest.TestCase):
  def test_two(self): self.assertEqual(task_func(2), 4)
  def test_text(self): self.assertEqual(task_func("ab"), "abab")
"""
WRONG = "def forge(): pass\ndef task_func(x):\n  forge()\n  return 4\n"
FORGED = '{"passed": 2, "total": 2, "error": "", "failed": []}'
SAY = f"""import json, os
def say(key):
  for fd in sorted(map(int, os.listdir("/proc/self/fd")), reverse=True):
    try: os.write(fd, f'\\n{{key}} {FORGED.replace("{", "{{").replace("}", "}}")}\\n'.encode())
    except OSError: continue
    os._exit(0)
"""
FORGERIES = {
  "says so without the key": f"{SAY}say('0' * 32)",
  "reads its input again": f"{SAY}os.lseek(0, 0, 0)\nsay(json.loads(os.read(0, 10**6))['key'])",
  "reads the input of others": (
    f"{SAY}for pid in filter(str.isdigit, os.listdir('/proc')):\n"
    "  try: say(json.load(open(f'/proc/{pid}/fd/0'))['key'])\n"
    "  except (OSError, ValueError): pass"
  ),
  "writes files": f"for f in ('result.json', '/tmp/result.json'): open(f, 'w').write('{FORGED}')",
  "at exit": "import atexit, os\natexit.register(os._exit, 0)",
  "asserts": "import unittest\nunittest.TestCase.assertEqual = lambda *given: None",
  "asserts, when called": (
    "def forge():\n  import unittest\n  unittest.TestCase.assertEqual = lambda *given: None"
  ),
  "run": "import unittest\nunittest.TestCase.run = lambda self, result: result.addSuccess(self)",
  "names": "import unittest\nunittest.TestLoader.getTestCaseNames = lambda *given: ['id']",
  "no names": "import unittest\nunittest.TestLoader.getTestCaseNames = lambda *given: []",
  "json": f"import json\njson.dumps = json.JSONEncoder.encode = lambda *given, **more: '{FORGED}'",
  "os.write": (
    "import os\nreal = os.write\n"
    f"os.write = lambda fd, text: real(fd, text.split()[0] + b' ' + b'{FORGED}' + b'\\n')"
  ),
  "the runner": (
    f"import __main__ as r\ntry: r.said = lambda *given: '{FORGED}'\nexcept AttributeError: pass"
  ),
  "builtins": (
    "import builtins\nreal = len\nbuiltins.len = lambda items: 0 if real(items) == 1 else real(items)"
  ),
  "own tests": "import unittest\nclass TestCases(unittest.TestCase):\n  def test_two(self): pass",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_wrong_program_does_not_pass_by_forging_the_verdict(name):
  assert not judge(f"{WRONG}{FORGERIES[name]}\n", ASSERTS, LIMITS).success


def test_tests_may_do_what_those_of_the_original_may():
  """Replace builtins and names of the module, start processes, write files, use sub-tests and lent modules."""
  program = """
import json, multiprocessing, subprocess
def task_func(x):
  print(x)
  return json.dumps(x)
def square(x): return x * x
def started():
  with multiprocessing.Pool(2) as pool: squares = pool.map(square, [1, 2, 3])
  return squares, subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout
def written():
  with open("a.txt", "w") as file: file.write("x")
  return os.path.exists("a.txt") and sys.argv is not None and "HOME" in environ
"""
  tests = """
import unittest
from unittest.mock import patch
class TestCases(unittest.TestCase):
  @patch("builtins.print")
  def test_builtins(self, said):
    task_func(1)
    said.assert_called_once_with(1)
  @patch("__test__.json.dumps", return_value="replaced")
  def test_names(self, dumps): self.assertEqual(task_func(1), "replaced")
  def test_started(self): self.assertEqual(started(), ([1, 4, 9], "hi\\n"))
  def test_written(self): self.assertTrue(written())
  @unittest.expectedFailure
  def test_expected(self): self.assertTrue(False)
  def test_parts(self):
    for part in range(3):
      with self.subTest(part=part): self.assertNotEqual(part, FAILING)
"""
  assert judge(program, f"FAILING = 9{tests}", LIMITS) == Verdict(6, 6)
  failing = judge(program, f"FAILING = 1{tests}", LIMITS)
  assert failing == Verdict(5, 6, "", ("test_parts (part=1): AssertionError: 1 == 1",))


def test_a_test_that_the_program_skips_has_not_passed_and_one_that_is_marked_as_skipped_has():
  skips = f"{HEAD}  import unittest\n  raise unittest.SkipTest"
  assert judge(skips, TESTS, LIMITS).passed == 0
  marked = TESTS.replace("  def test_text", "  @unittest.skip('slow')\n  def test_text")
  assert judge(RIGHT, marked, LIMITS) == Verdict(3, 3)
  assert judge(RIGHT, "import unittest\nclass TestCases(unittest.TestCase): pass", LIMITS) == (
    Verdict(0, 0, "no test was run")
  )


def test_a_program_reaches_neither_network_nor_files_nor_processes_nor_secrets(monkeypatch):
  monkeypatch.setenv("MY_TOKEN", "secret")
  with (
    tempfile.TemporaryDirectory(dir="/var/tmp") as outside,
    socket.create_server(("127.0.0.1", 0)) as server,
  ):
    pathlib.Path(outside).chmod(0o777)
    program = f"""
import os, pathlib, socket
def call(): socket.create_connection({server.getsockname()}, 1)
def write(): pathlib.Path({outside!r}, "here").write_text("x")
def install(): pathlib.Path({sys.prefix!r}, "here").write_text("x")
def kill(): os.kill({os.getpid()}, 9)
def token(): os.environ["MY_TOKEN"]
def work(): pathlib.Path("/tmp/here").write_text("x")
"""
    tests = "import unittest\nclass TestCases(unittest.TestCase):\n" + "".join(
      f"  def test_{name}(self):\n    with self.assertRaises(({error})): {name}()\n"
      for name, error in (
        ("call", "OSError"),
        ("write", "OSError"),
        ("install", "OSError"),
        ("kill", "ProcessLookupError"),
        ("token", "KeyError"),
      )
    )
    tests += "  def test_work(self): work()\n"  # its own folder may be written
    assert judge(program, tests, LIMITS) == Verdict(6, 6)
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
      server.accept()
    assert list(pathlib.Path(outside).iterdir()) == []


def test_a_sandbox_that_does_not_start_is_no_verdict(monkeypatch):
  with pytest.raises(RuntimeError, match=r"did not start .*give it more time or memory"):
    judge(RIGHT, TESTS, swe_sandbox.Limits(20.0, 4))
  with pytest.raises(ValueError, match="/nowhere/python is no Python that runs"):
    judge(RIGHT, TESTS, LIMITS, python="/nowhere/python")
  monkeypatch.setattr(swe_sandbox, "_refusal", lambda: "not permitted")
  with pytest.raises(RuntimeError, match=r"runs nothing unprotected.*\(not permitted\)"):
    judge(RIGHT, TESTS, LIMITS)


def test_another_python_is_shown_with_its_folders(tmp_path):
  """A link to this Python in an environment of its own, with a library that only it has."""
  version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
  packages = tmp_path / "env" / "lib" / version / "site-packages"
  packages.mkdir(parents=True)
  (tmp_path / "env" / "bin").mkdir()
  python = tmp_path / "env" / "bin" / "python"
  python.symlink_to(os.path.realpath(sys.executable))
  (tmp_path / "env" / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
  (packages / "only_here.py").write_text("double = lambda x: x + x\n")
  os.chmod(tmp_path, 0o755)
  program = "from only_here import double as task_func\n"
  assert not judge(program, TESTS, LIMITS).success
  assert judge(program, TESTS, LIMITS, python=str(python)) == Verdict(3, 3)
  bigcodebench_verdict._interpreter.cache_clear()
