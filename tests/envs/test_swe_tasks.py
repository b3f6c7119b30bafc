"""SWE instances: the schema, generated repositories, splits, and the grammar of actions and outcomes."""

import builtins
import dataclasses
import json
import types
import unittest

import pytest

from memrl_jax.envs import base, swe, swe_modules, swe_repos, swe_tasks, swe_verdict
from memrl_jax.envs.swe import Action, parse

OPTIONS = swe_tasks.Options()
BUGS = [(module, bug) for module in swe_modules.MODULES for bug in module.bugs]

ROW = {
  "instance_id": "me__thing-1",
  "repo": "me/thing",
  "base_commit": "abc",
  "problem_statement": "It is broken.",
  "patch": "",
  "test_patch": "--- a/t.py\n+++ b/t.py\n@@ -1 +1 @@\n-a\n+b\n",
  "FAIL_TO_PASS": '["t.py::test_a"]',
  "PASS_TO_PASS": "[]",
  "hints_text": "not used",
}


def passes(module, source, body):
  loaded = types.ModuleType(module.name)
  exec(source, loaded.__dict__)
  scope = {module.name: loaded, "self": unittest.TestCase(), "__builtins__": builtins}
  try:
    exec(body, scope)
  except Exception:
    return False
  return True


@pytest.mark.parametrize(("module", "bug"), BUGS, ids=lambda value: value[0])
def test_a_planted_bug_breaks_its_own_test_and_no_other(module, bug):
  assert module.source.count(bug.right) == 1 and bug.right != bug.wrong
  broken = module.source.replace(bug.right, bug.wrong)
  assert not passes(module, broken, bug.test) and passes(module, module.source, bug.test)
  assert all(passes(module, broken, body) for body in module.tests)
  assert all(passes(module, module.source, body) for body in module.tests)


def test_generated_repositories_do_not_show_the_test_that_judges_and_no_bug_is_in_both_splits():
  made = swe_tasks.instances("", 0)
  assert len(made) == len(BUGS) * swe_repos.VARIANTS == 48
  sides = {True: set(), False: set()}
  for one in made:
    shown = "".join(one.files.values()) + one.problem_statement
    assert "test_issue" not in shown and "test_issue" in one.test_patch
    assert (
      one.test_patch.count("\n-") == 1
    )  # only its header: official tests are added to the old ones
    sides[swe_tasks.held_out(one)].add((one.problem_statement, one.instance_id.partition(".")[0]))
  assert sides[True] and len(sides[False]) > 2 * len(sides[True])
  assert not {text for text, _ in sides[True]} & {text for text, _ in sides[False]}
  assert swe_repos.rows(0) == swe_repos.rows(0) != swe_repos.rows(1)


def test_seeds_go_through_a_whole_split_and_training_never_sees_a_held_out_instance():
  train = {swe_tasks.draw(OPTIONS, seed).instance_id for seed in range(38)}
  test = {swe_tasks.draw(OPTIONS, seed).instance_id for seed in range(65_536, 65_546)}
  assert (len(train), len(test)) == (38, 10) and not train & test
  every = dataclasses.replace(OPTIONS, split="all")
  assert {swe_tasks.draw(every, seed).instance_id for seed in range(48)} == train | test


def written(path, *rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return str(path)


def test_rows_of_the_schema_are_read_with_tests_as_lists_or_as_text(tmp_path):
  listed = ROW | {"instance_id": "a__b-2", "FAIL_TO_PASS": ["x", "y"], "PASS_TO_PASS": ["z"]}
  first, second = swe_tasks.load(written(tmp_path / "a.jsonl", ROW, listed))
  assert (first.instance_id, first.fail_to_pass, first.pass_to_pass) == (
    "a__b-2",
    ("x", "y"),
    ("z",),
  )
  assert (second.fail_to_pass, second.files, second.test_command) == (
    ("t.py::test_a",),
    None,
    swe_tasks.PYTEST,
  )
  assert swe_verdict.test_files(second) == ["t.py"]
  alone = swe_tasks.Options(data=str(tmp_path / "a.jsonl"), split="all")
  assert swe_tasks.draw(alone, 1) == second


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"FAIL_TO_PASS": "[]"}, "has no FAIL_TO_PASS test"),
    ({"FAIL_TO_PASS": "t.py::test_a"}, "give a list of names, or one as JSON text"),
    ({"repo": None}, "me__thing-1 lacks repo; give rows in SWE-bench's schema"),
    ({"files": {"../up.py": ""}}, "outside its repository"),
    ({}, "2 rows with 1 different instance_ids"),
  ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path, change, sentence):
  with pytest.raises(ValueError, match=sentence):
    swe_tasks.load(written(tmp_path / "a.jsonl", ROW | change, ROW))


def test_what_is_missing_is_said_in_one_sentence(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r"nothing is downloaded.*config\.env\.data"):
    swe_tasks.load(str(tmp_path / "none.jsonl"))
  file = written(tmp_path / "one.jsonl", ROW)
  sides = [swe_tasks.Options(data=file, split=split) for split in ("train", "held_out")]
  with pytest.raises(ValueError, match="none of the 1 instances is on the"):
    [swe_tasks.draw(side, 0) for side in sides]
  with pytest.raises(ValueError, match=r"needs a clone of me/thing; name a folder.*me__thing"):
    swe_tasks.executor(swe_tasks.Options(data=file), swe_tasks.instance(ROW))
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  (tmp_path / "a.parquet").touch()
  with pytest.raises(ImportError, match="pip install pyarrow"):
    swe_tasks.load(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
  ("options", "sentence"),
  [
    ({"style": "brief"}, "there is no tiny model of SWE tasks"),
    ({"split": "test"}, "choose one of auto, train, held_out, all"),
    ({"executor": "docker"}, "have no images"),
    ({"data": "x", "repos_seed": 1}, "leave one out"),
    ({"command_s": 0}, "choose numbers above 0"),
    ({"reward_scale": float("nan")}, "choose one above 0"),
  ],
)
def test_options_check_themselves(options, sentence):
  with pytest.raises(ValueError, match=sentence):
    swe_tasks.Options(**options)


def test_the_official_image_of_an_instance():
  docker = swe_tasks.executor(
    swe_tasks.Options(data="x", executor="docker"),
    swe_tasks.instance(ROW | {"instance_id": "Django__django-11099"}),
  )
  assert docker._image == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"


EDIT = "replace a.py\n<old>\n  x = 1\n</old>\n<new>\n  x = 2\n</new>"


@pytest.mark.parametrize(
  ("response", "wanted"),
  [
    (
      "<think><action>submit</action></think><action>bash ls\npwd\n</action>",
      Action("bash", "", "ls\npwd"),
    ),
    ("<action>\nbash\nls</action>", Action("bash", "", "ls")),
    ("a <action>view x</action> b <action>submit</action>", Action("submit")),
    ("<action>view a b.py 2 9</action>", Action("view", "a b.py 2 9")),
    ("<action>create a.py\n\n x\n</action>", Action("create", "a.py", "\n x")),
    (f"<action>{EDIT}</action>", Action("replace", "a.py", EDIT.partition("\n")[2])),
    ("<action>insert a.py 0\nx</action>", Action("insert", "a.py 0", "x")),
    ("<action>insert a.py\nx</action>", None),
    ("<action>replace a.py\nx</action>", None),
    ("<action>bash</action>", None),
    ("<action>view</action>", None),
    ("<action>dance a.py</action>", None),
    ("</action>submit<action>", None),
    ("submit", None),
  ],
)
def test_actions_are_read_from_the_last_tags(response, wanted):
  assert parse(response) == wanted
  if wanted:  # the canonical form is an action again: players and histories write it
    assert parse(f"<action>{wanted.text}</action>") == wanted


def test_outcomes_of_both_runners():
  output = "\n".join(
    [
      "PASSED t.py::test_a[x y]",
      "FAILED t.py::test_b - assert 1 == 2",
      "XFAIL t.py::test_c - why",
      "SKIPPED [1] t.py:3: no",
      "test_d (tests.t.T.test_d) ... ok",
      "test_d (tests.u.T) ... FAIL",
      "test_e (tests.t.T.test_e) ... ERROR",
      "PASSED t.py::test_f",
      "ERROR t.py::test_f - at teardown",
    ]
  )
  assert swe_verdict.outcomes(output) == {
    "t.py::test_a[x y]": True,
    "t.py::test_a[x": True,  # SWE-bench's names end at the first blank
    "t.py::test_b": False,
    "t.py::test_c": True,
    "[1] t.py:3: no": False,
    "[1]": False,
    "test_d (tests.t.T)": True,
    "test_d (tests.u.T)": False,
    "test_e (tests.t.T)": False,
    "t.py::test_f": False,
  }


@pytest.mark.parametrize("style", swe_tasks.STYLES)
def test_prompts_name_every_tool_and_the_limits(style):
  options = swe_tasks.Options(turns=7, command_s=3, style=style)
  seen = base.Observation("Issue:\nall is lost", "a", goal="all is lost", task="t")
  text = swe.FAMILY.prompts(options).play(base.View((), base.AttemptLog(0, seen)))[0].content
  for tool in ("bash", "view", "create", "replace", "insert", "submit"):
    assert f"<action>{tool}" in text
  assert "7 turns" in text and "3 seconds" in text and "all is lost" in text
