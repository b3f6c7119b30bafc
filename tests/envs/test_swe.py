"""SWE tasks played for real: the verdict on patches, the tools, retries, scripted players."""

import dataclasses
import json
import pathlib
import socket
import tempfile
import time

import numpy as np
import pytest

from memrl_jax.envs import base, pool, swe, swe_sandbox, swe_tasks

if swe_sandbox._refusal():
  pytest.skip(
    f"the sandbox needs Linux namespaces: {swe_sandbox._refusal()}", allow_module_level=True
  )

FAMILY, OPTIONS = swe.FAMILY, swe_tasks.Options(command_s=20.0, turns=4)

CODE = "def double(x):\n    return x + x + 1\n\n\ndef name():\n    return 'calc'\n"
TESTS = (
  "import calc\n\n\ndef test_name():\n    assert calc.name() == 'calc'\n"
  "\n\ndef test_old():\n    assert True\n"
)
NEW = "\n\ndef test_two():\n    assert calc.double(2) == 4\n\n\ndef test_odd():\n    assert calc.double(1) % 2 == 0\n"
ROW = {
  "instance_id": "me__calc-1",
  "repo": "me/calc",
  "base_commit": "base",
  "problem_statement": "double(2) is 5",
  "patch": "",
  "test_patch": "--- a/test_calc.py\n+++ b/test_calc.py\n@@ -7,2 +7,10 @@\n def test_old():\n     assert True\n"
  + "".join(f"+{line}\n" for line in NEW.splitlines()),
  "FAIL_TO_PASS": ["test_calc.py::test_two", "test_calc.py::test_odd"],
  "PASS_TO_PASS": ["test_calc.py::test_name", "test_calc.py::test_old"],
  "test_command": f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {swe_tasks.PYTEST}",  # faster
  "files": {"calc.py": CODE, "test_calc.py": TESTS, "conftest.py": ""},
}
FIX = "<action>bash sed -i 's/ + 1//' calc.py</action>"
SUBMIT = "<action>submit</action>"


@pytest.fixture
def home(tmp_path, monkeypatch):
  """An empty folder in which the environments' own folders are made."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
  (tmp_path / "folders").mkdir()
  return tmp_path / "folders"


@pytest.fixture
def calc(home):
  """Opens the repository above."""
  environment = FAMILY.make(OPTIONS)
  environment.open(swe_tasks.instance(ROW))
  yield environment
  environment.close()
  assert list(home.iterdir()) == []


def submit(environment, *responses):
  """The last result, of submitting after these responses."""
  for response in responses:
    assert environment.step(response).valid
  return environment.step(SUBMIT)


def body(text):
  """An action that replaces the body of double()."""
  return (
    f"<action>replace calc.py\n<old>\n    return x + x + 1\n</old>\n<new>\n{text}\n</new></action>"
  )


def test_a_correct_patch_is_paid_and_a_wrong_one_is_not(calc):
  solved = submit(calc, body("    return 2 * x"))
  assert (solved.reward, solved.success, solved.score, solved.done) == (1.0, True, 1.0, True)
  calc.retry()
  half = submit(calc, body("    return x + x + 2"))  # even, but not 4
  assert (half.reward, half.success, half.score) == (0.0, False, 0.5)
  assert "1 of 2 failing tests pass" in half.observation.text
  calc.retry()
  broken = submit(calc, FIX, "<action>bash sed -i s/calc/clac/ calc.py</action>")
  assert (broken.reward, broken.score) == (0.0, 0.0)
  assert "1 of 2 others fail" in broken.observation.text


def test_changed_tests_neither_help_nor_hurt(calc):
  cheat = (
    "def test_two(): pass\ndef test_odd(): pass\ndef test_name(): pass\ndef test_old(): pass\n"
  )
  hook = "import pytest\n@pytest.fixture(autouse=True)\ndef f():\n    pytest.skip()\n"
  result = submit(
    calc,
    f"<action>create test_calc.py\n{cheat}</action>",
    f"<action>create sub/conftest.py\n{hook}</action>",
    "<action>bash mv sub/conftest.py conftest.py && git add -A && git commit -qm done</action>",
  )
  assert (result.success, result.score) == (False, 0.0)
  calc.retry()
  hooked = f"<action>create conftest.py\n{hook}</action>"
  assert submit(
    calc, FIX, hooked, "<action>bash rm test_calc.py; mkdir test_calc.py</action>"
  ).success


def test_a_patch_that_hangs_is_killed_at_the_limit_and_fails(calc):
  calc._options = dataclasses.replace(OPTIONS, command_s=3.0)
  calc.retry()
  begun = time.monotonic()
  result = submit(calc, body("    while True: pass"))
  assert time.monotonic() - begun < 60
  assert (result.success, result.score) == (False, 0.0)
  assert "stopped at their time limit" in result.observation.text


def test_a_patch_that_writes_outside_or_calls_home_is_stopped(calc):
  with (
    tempfile.TemporaryDirectory(dir="/var/tmp") as outside,
    socket.create_server(("127.0.0.1", 0)) as server,
  ):
    pathlib.Path(outside).chmod(0o777)
    address = server.getsockname()
    writes = f"    open('{outside}/here', 'w').write('x')\n    return 2 * x"
    calls = f"    import socket\n    socket.create_connection({address}, 1)\n    return 2 * x"
    for harm in (writes, calls):
      calc.retry()
      assert submit(calc, body(harm)).score == 0.0
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
      server.accept()
    assert list(pathlib.Path(outside).iterdir()) == []


def test_what_cannot_be_judged_has_failed_and_an_unchanged_repository_too(calc):
  assert "nothing was changed" in submit(calc).observation.text
  calc.retry()
  lost = submit(calc, FIX, "<action>bash rm -rf .git</action>")
  assert not lost.success and "patch" in lost.observation.text
  calc.retry()
  for _ in range(3):
    assert not calc.step(FIX).done
  late = calc.step("nonsense")  # the last turn is judged without submitting
  assert (late.done, late.success, late.valid) == (True, True, False)


def test_the_editor_changes_exactly_what_it_says(calc):
  calc.horizon = 99

  def shown(response):
    result = calc.step(f"<action>{response}</action>")
    assert result.valid and result.note in ("done", "failed", "exit 0", "exit 3")
    return result.observation.text

  assert shown("view calc.py 1 2") == "     1\tdef double(x):\n     2\t    return x + x + 1"
  assert "test_calc.py" in shown("view .")
  assert "2 times" in shown("replace calc.py\n<old>return</old>\n<new>yield</new>")
  assert "0 times" in shown("replace calc.py\n<old>nothing</old>\n<new></new>")
  assert "No such file" in shown("view gone.py")
  assert "Read-only" in shown("create /usr/lib/x.py\nx")
  shown(
    "replace calc.py\n<old>\n    return x + x + 1\n</old>\n<new>\n    y = x\n    return y\n</new>"
  )
  shown("insert calc.py 0\n# top")
  assert "has 8 lines" in shown("insert calc.py 9\n# no")
  assert shown("bash head -4 calc.py; exit 3").endswith(
    "# top\ndef double(x):\n    y = x\n    return y"
  )
  shown("create new/file.txt\n  two\nlines")
  assert shown("bash cat new/file.txt") == "  two\nlines"
  long = shown("bash seq 100000")
  assert len(long) < OPTIONS.output_chars + 100 and "characters left out" in long


def test_a_retry_is_the_same_task_and_equal_states_have_equal_anchors(calc):
  first = calc.retry()
  assert (first.goal, first.task) == ("double(2) is 5", "me__calc-1")
  assert "calc.py" in first.text and "x + x" not in first.text
  fixed = calc.step(FIX).observation
  invalid = calc.step("what?")
  assert not invalid.valid and invalid.action == "" and invalid.observation.anchor == fixed.anchor
  again = calc.step("<action>bash true</action>").observation
  assert calc.retry() == first
  assert calc.step("<action>bash true</action>").observation.anchor != again.anchor
  assert calc.retry() == first
  assert calc.step(FIX).observation.anchor == fixed.anchor != first.anchor


@pytest.mark.parametrize("seed", [17, 65_540])
def test_the_solver_solves_generated_repositories_and_the_random_player_does_not(home, seed):
  environment, options = FAMILY.make(OPTIONS), OPTIONS
  wins = {}
  for name in ("solver", "random"):
    log = base.AttemptLog(0, environment.reset(seed))
    player = FAMILY.players[name](options, np.random.default_rng(seed))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      assert result.valid
      log.steps.append(base.Step(result.action, result))
    wins[name] = log.success
    assert FAMILY.prompts(options).parse_reflection(player.reflect(base.View((), log)))[1]
  assert wins == {"solver": True, "random": False}
  assert list(home.iterdir()) == []


def test_a_file_of_instances_is_played_in_a_pool_and_closing_it_removes_everything(home, tmp_path):
  data = tmp_path / "data.jsonl"
  data.write_text(json.dumps(ROW) + "\n")
  options = dataclasses.replace(OPTIONS, data=str(data), split="all", reward_scale=10.0)
  with pool.EnvPool(FAMILY, options, workers=2, timeout_s=30) as environments:
    one, other = environments.open(), environments.open()
    environments.run([pool.Call(one, "reset", 0), pool.Call(other, "reset", 5)])
    environments.run([pool.Call(one, "step", FIX)])
    paid, unpaid = environments.run([pool.Call(h, "step", SUBMIT) for h in (one, other)])
    environments.run([pool.Call(one, "retry")])
    assert (paid.reward, unpaid.reward) == (10.0, 0.0)
    assert len(list(home.iterdir())) == 1  # the retried one is open
  assert list(home.iterdir()) == []
