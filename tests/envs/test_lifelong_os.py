"""OS tasks: verdicts by check scripts in machines of their own, limits, scripted players."""

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
import time

import numpy as np
import pytest

from memrl_jax.envs import base, lifelong_machine, lifelong_os, pool
from memrl_jax.envs import lifelong_tasks as tasks

FAMILY = lifelong_os.FAMILY
OPTIONS = lifelong_os.Options(split="all", command_s=10.0)

needs_machine = pytest.mark.skipif(
  bool(lifelong_machine.refused()),
  reason=f"a machine needs root and Linux namespaces: {lifelong_machine.refused()}",
)


def item(script, name="bash"):
  return {"command_name": name, "script": script}


ROW = {
  "instruction": "Only ann may read and write /srv/note.txt, and nobody else may do anything with it.",
  "initialization_command_item": item("useradd ann && echo hi > /srv/note.txt"),
  "evaluation_info": {
    "evaluation_command_item": item('[ "$(stat -c %U:%a /srv/note.txt)" = ann:600 ]'),
    "ground_truth_command_item": item("chown ann /srv/note.txt && chmod 600 /srv/note.txt"),
  },
  "skill_list": ["chown", "chmod"],
  "raw_entry_hash": "0" * 64,
}
FINISH = "Act: finish"


def bash(*blocks):
  return "I do it.\nAct: bash\n" + "\n".join(f"```bash\n{block}\n```" for block in blocks)


@pytest.mark.parametrize(
  ("response", "script"),
  [
    (bash("cd /tmp\nls"), "cd /tmp\nls"),
    (bash("ls", "pwd"), "ls\n\npwd"),
    ("act: finish\nAct:Bash", ""),
    ("<think>Act: finish</think>\nAct: bash\n```bash\nls\n```", "ls"),
    ("Act: FINISH.", None),
    ("Act: bash", ""),
  ],
)
def test_responses_are_read_as_published(response, script):
  assert lifelong_os.parse(response) == lifelong_os.Action(script)
  assert lifelong_os.parse(lifelong_os.Action(script).text) == lifelong_os.Action(script)


@pytest.mark.parametrize("response", ["", "ls", "```bash\nls\n```", "Act: sleep", "Act:"])
def test_a_response_without_an_action_is_none(response):
  assert lifelong_os.parse(response) is None


def test_only_known_interpreters_are_read():
  strange = ROW | {"initialization_command_item": item("ls", "perl")}
  with pytest.raises(ValueError, match="'perl' is none of bash, python, c, cpp"):
    lifelong_os.read("x", strange)


@pytest.fixture
def home(tmp_path, monkeypatch):
  """An empty folder for temporary files: machines make none."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
  (tmp_path / "folders").mkdir()
  return tmp_path / "folders"


@pytest.fixture
def note(home):
  """Opens the task above."""
  environment = FAMILY.make(dataclasses.replace(OPTIONS, reward_scale=2.0))
  environment.open(lifelong_os.read("note", ROW))
  yield environment
  environment.close()
  assert list(home.iterdir()) == []


def test_a_machine_can_be_made_where_plain_commands_can_do_what_it_takes(tmp_path):
  """Otherwise a fault in making machines would skip their tests."""
  steps = (
    f"mount -t tmpfs t {tmp_path} && cd {tmp_path} && mkdir upper work root && "
    "mount -t overlay -o lowerdir=/usr,upperdir=upper,workdir=work o root && "
    "mount -t tmpfs -o mode=755 t work && mknod work/null c 1 3"
  )
  alone = ["unshare", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork"]
  if os.geteuid() == 0 and shutil.which("unshare"):
    plain = subprocess.run([*alone, "sh", "-c", steps], capture_output=True, text=True)
    assert not lifelong_machine.refused() or plain.returncode
  else:
    assert lifelong_machine.refused()


@needs_machine
def test_the_check_script_judges_what_stands_at_the_end(note):
  looked = note.step(bash("cat /srv/note.txt; exit 4"))
  assert (looked.done, looked.observation.text, looked.note) == (False, "hi", "exit 4")
  note.step(bash("chown ann /srv/note.txt", "chmod 600 /srv/note.txt"))
  right = note.step(FINISH)
  assert (right.done, right.success, right.reward, right.score) == (True, True, 2.0, 1.0)
  with pytest.raises(RuntimeError, match="the attempt is over"):
    note.step(FINISH)
  note.retry()
  note.step(bash("chown ann /srv/note.txt; chmod 644 /srv/note.txt"))
  wrong = note.step(FINISH)
  assert (wrong.done, wrong.success, wrong.reward) == (True, False, 0.0)
  note.retry()
  assert not note.step(FINISH).success


@needs_machine
def test_the_state_is_judged_however_the_attempt_ends(note):
  note.step(bash("chown ann /srv/note.txt; chmod 600 /srv/note.txt"))
  unread = note.step("All done.")
  assert (unread.done, unread.valid, unread.success, unread.action) == (True, False, True, "")
  note.retry()
  for turn in range(5):
    last = note.step(bash("ls" if turn < 4 else "chown ann /srv/note.txt; chmod 600 /srv/note.txt"))
    assert last.done == (turn == 4)
  assert last.success


@needs_machine
def test_a_hanging_command_or_check_is_stopped_and_fails(note):
  note._options = dataclasses.replace(OPTIONS, command_s=1.0)
  note.retry()
  begun = time.monotonic()
  hung = note.step(bash("echo up; sleep 100"))
  assert (hung.done, hung.note) == (False, "stopped") and "more than 1 seconds" in hung.observation.text  # fmt: skip
  note.step(bash("rm /srv/note.txt; mkfifo /srv/note.txt"))
  assert not note.step(FINISH).success
  judged = ROW["evaluation_info"] | {"evaluation_command_item": item("sleep 100")}
  note.open(lifelong_os.read("slow", ROW | {"evaluation_info": judged}))
  assert not note.step(FINISH).success
  assert time.monotonic() - begun < 60


@needs_machine
def test_a_retry_is_a_fresh_machine_and_equal_commands_lead_to_equal_anchors(note):
  first = note.retry()
  assert (first.goal, first.task) == (ROW["instruction"], "note")
  touched = note.step(bash("touch /here")).observation
  assert note.retry() == first
  assert note.step(bash("ls /here")).note != "exit 0"
  note.retry()
  assert note.step(bash("touch /here")).observation.anchor == touched.anchor != first.anchor


@needs_machine
def test_scripts_in_other_languages_and_machines_that_cannot_be_prepared(note, home):
  languages = [("python", "import os, sys; sys.exit(not os.path.exists('/it''s'))")]
  if shutil.which("gcc"):
    languages.append(("c", '#include <unistd.h>\nint main() { return access("/its", F_OK) != 0; }'))
  for name, script in languages:
    judged = ROW["evaluation_info"] | {"evaluation_command_item": item(script, name)}
    note.open(lifelong_os.read("other", ROW | {"evaluation_info": judged}))
    note.step(bash("touch /its"))
    assert note.step(FINISH).success
    note.retry()
    assert not note.step(FINISH).success
  with pytest.raises(RuntimeError, match=r"cannot be prepared \(no luck, exit 3\)"):
    broken = ROW | {"initialization_command_item": item("echo no luck; exit 3")}
    note.open(lifelong_os.read("broken", broken))
  assert list(home.iterdir()) == []


@needs_machine
def test_the_solver_solves_generated_tasks_that_nobody_solves_by_doing_nothing(home):
  """A dozen of the mixed tasks; tests/real/test_lifelong.py plays all."""
  every = tasks.tasks(lifelong_os.SOURCE, "")
  environment = FAMILY.make(OPTIONS)
  for number in range(0, len(every), 35):
    wins = []
    for name in ("solver", "random"):
      player = FAMILY.players[name](OPTIONS, np.random.default_rng(number))
      log = base.AttemptLog(0, environment.reset(number))
      while not log.done:
        result = environment.step(player.play(base.View((), log)))
        assert result.valid
        log.steps.append(base.Step(result.action, result))
      wins.append(log.success)
    assert wins == [True, False], every[number]
  assert list(home.iterdir()) == []


@needs_machine
def test_a_file_is_played_in_a_pool_whose_end_removes_everything(home, tmp_path):
  (tmp_path / "entry_dict.json").write_text(json.dumps({"0": ROW}))
  options = dataclasses.replace(OPTIONS, data=str(tmp_path / "entry_dict.json"))
  truth = ROW["evaluation_info"]["ground_truth_command_item"]["script"]
  with pool.EnvPool(FAMILY, options, workers=2, timeout_s=60) as environments:
    one, other = environments.open(), environments.open()
    environments.run([pool.Call(one, "reset", 0), pool.Call(other, "reset", 1)])
    environments.run([pool.Call(one, "step", bash(truth))])
    right, wrong = environments.run([pool.Call(h, "step", FINISH) for h in (one, other)])
    environments.run([pool.Call(one, "retry")])
    assert (right.success, wrong.success) == (True, False)
  assert list(home.iterdir()) == []


def test_prompts_show_the_task_and_what_was_done_in_the_grammar_that_is_parsed():
  observation = base.Observation("Task: tidy up", "a", goal="tidy up", task="x")
  action = lifelong_os.Action("ls /srv").text
  result = base.StepResult(
    base.Observation("a b", "b"), 0.0, False, False, 0.0, True, action, "exit 0"
  )
  log = base.AttemptLog(0, observation, [base.Step(action, result)])
  for style in tasks.STYLES:
    prompts = FAMILY.prompts(lifelong_os.Options(style=style))
    text = "\n".join(message.content for message in prompts.play(base.View((), log)))
    for part in ("tidy up", action, "a b (exit 0)" if style == "chat" else "a b", "5 turns"):
      assert part in text
