"""BigCodeBench: rows, splits, from answers to programs, and whole attempts."""

import dataclasses
import io
import json
import types
import unittest

import numpy as np
import pytest

from memrl_jax.envs import base, bigcodebench, bigcodebench_generated, pool, swe_sandbox
from memrl_jax.envs import bigcodebench_tasks as tasks

OPTIONS = tasks.Options()
OWN = tasks.tasks("")
needs_sandbox = pytest.mark.skipif(
  bool(swe_sandbox._refusal()), reason=f"needs Linux namespaces: {swe_sandbox._refusal()}"
)

ROW = {
  "task_id": "BigCodeBench/7",
  "complete_prompt": 'import math\n\ndef task_func(x):\n    """Return the root of x."""\n',
  "instruct_prompt": "Return the root of x.",
  "canonical_solution": "    return math.sqrt(x)\n",
  "code_prompt": "import math\n\ndef task_func(x):\n",
  "test": "import unittest\nclass TestCases(unittest.TestCase):\n"
  "    def test_a(self):\n        self.assertEqual(task_func(9), 3)\n"
  "    def test_b(self):\n        self.assertEqual(task_func(0), 0)\n",
  "entry_point": "task_func",
  "doc_struct": '{"description": ["Return the root of x."]}',
  "libs": "['math']",
}


def passes(program, test):
  """Whether a program of this package passes, in this process."""
  module = types.ModuleType("tried")
  exec(program, module.__dict__)
  exec(test, module.__dict__)
  suite = unittest.TestLoader().loadTestsFromTestCase(module.TestCases)
  return unittest.TextTestRunner(io.StringIO()).run(suite).wasSuccessful()


# Tasks.


def test_own_tasks_are_solved_by_their_solutions_and_not_by_those_of_their_siblings():
  for one in OWN:
    assert passes(one.complete_prompt + one.canonical_solution, one.test), one.task_id
  for one in OWN:
    siblings = [
      o for o in OWN if o != one and o.task_id.partition(".")[0] == one.task_id.partition(".")[0]
    ]
    assert len(siblings) == 3
    for other in siblings:
      assert not passes(one.code_prompt + other.canonical_solution, one.test), (one, other)


def test_own_tests_expect_what_was_worked_out_by_hand():
  expected = {
    "own/mean-above.1": "task_func([1, 2, 6, 12, 40]), 26.0)",  # above 10: 12 and 40
    "own/common-words.1": "THREE four'), ['three', 'two'])",  # three times, twice
    "own/weekdays.0": "['2024-02-05', '2024-02-12', '2024-02-19', '2024-02-26'])",  # leap year
    "own/csv-column.2": ", 2.5)",  # 1.5 + 2 and -1 for the empty one
    "own/moving.0": "task_func([1, 2, 3, 4, 8]), [2.0, 3.0, 5.0])",
    "own/order-rows.1": "[2, 2]]), [[0, 9], [3, 1], [2, 2]])",  # 9, 3, 2
    "own/find.1": "@ann'), ['07:05', '12:45'])",
    "own/digest.0": "('abc'), 'ba7816bf')",  # FIPS 180-2, B.1
    "own/flatten.1": "{'a': 1, 'b/c': [1, 2], 'b/d/e': None})",
    "own/runs.2": "('aaabccdddd'), 'a3|b|c2|d4')",
    "own/base.2": "(1000), '02a0')",  # 2 * 400 + 10 * 20 + 0
    "own/files.0": "'', 'äö']), [14, 0, 4])",  # two bytes for each umlaut
  }
  for name, part in expected.items():
    assert part in tasks.find(OPTIONS, name).test, name


def test_training_and_evaluation_seeds_open_different_tasks_and_each_split_goes_through_all_of_its():
  assert len(OWN) == len(bigcodebench_generated.rows()) == 48
  train = {tasks.draw(OPTIONS, seed).task_id for seed in range(len(OWN))}
  first = base.EVAL_SEEDS[0]
  held_out = {tasks.draw(OPTIONS, first + n).task_id for n in range(len(OWN))}
  assert train | held_out == {one.task_id for one in OWN} and not train & held_out
  assert 8 <= len(held_out) <= 20
  everything = dataclasses.replace(OPTIONS, split="all")
  assert len({tasks.draw(everything, seed).task_id for seed in range(len(OWN))}) == len(OWN)
  # Most held-out tasks have a relative to learn from.
  names = {name.partition(".")[0] for name in train}
  assert sum(name.partition(".")[0] in names for name in held_out) >= len(held_out) * 0.7


def test_a_published_file_is_read_whatever_the_order_of_its_rows(tmp_path):
  rows = [ROW | {"task_id": f"BigCodeBench/{n}"} for n in range(30)]
  paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
  for path, order in zip(paths, (rows, rows[::-1]), strict=True):
    path.write_text("\n".join(map(json.dumps, order)) + "\n")
  one, other = (dataclasses.replace(OPTIONS, data=str(path)) for path in paths)
  for seed in (0, 5, 70_000, 70_003):
    assert tasks.draw(one, seed) == tasks.draw(other, seed)
  assert tasks.draw(one, 0).canonical_solution == ROW["canonical_solution"]


@pytest.mark.parametrize(
  ("content", "match"),
  [
    (json.dumps(ROW) + "\n" + json.dumps(ROW), "2 rows with 1 different values of task_id"),
    (json.dumps(ROW | {"test": None}), "BigCodeBench/7 has no text as test; give rows in BigCode"),
    (json.dumps(ROW) + "\n{broken", "line 2 of .* is no JSON object"),
    ("", "0 rows"),
  ],
)
def test_files_that_are_not_what_they_should_be_are_refused(tmp_path, content, match):
  path = tmp_path / "data.jsonl"
  path.write_text(content)
  with pytest.raises(ValueError, match=match):
    tasks.tasks(str(path))


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"style": "brief"}, "no tiny model"),
    ({"mode": "chat"}, "choose one of instruct, complete"),
    ({"split": "test"}, "choose one of auto, train, held_out, all"),
    ({"check_s": 0.0}, "no program passes its tests in 0 s"),
    ({"reward_scale": float("inf")}, "turns the task around"),
  ],
)
def test_options_check_themselves(options, match):
  with pytest.raises(ValueError, match=match):
    tasks.Options(**options)
  with pytest.raises(ValueError, match=r"there is no file nowhere\.jsonl"):
    tasks.draw(tasks.Options(data="nowhere.jsonl"), 0)


# Answers.

WHOLE = "import math\ndef task_func(x):\n    return math.sqrt(x)"


@pytest.mark.parametrize(
  ("response", "wanted"),
  [
    (f"Here:\n```python\n{WHOLE}\n```\nDone.", WHOLE),
    (f"```\nprint(1)\n```\n```py\n{WHOLE}\n```\n```python\ntask_func(9)\n```", WHOLE),
    (f"<think>```python\ndef task_func(x): wrong\n```</think>```python\n{WHOLE}\n```", WHOLE),
    (f"```python\n{WHOLE}", WHOLE),  # cut off at the end
    ("```python\ntask_func = abs\n```", "task_func = abs"),
    (WHOLE, WHOLE),
    ("    return math.sqrt(x)\n", "    return math.sqrt(x)"),  # the rest of the function
    ("```python\n    return 1\n```", "    return 1"),
    ("I do not know.", ""),
    ("```python\n\n```", ""),
    ("", ""),
  ],
)
def test_the_code_of_an_answer(response, wanted):
  assert tasks.code(response, "task_func") == wanted


def test_a_rest_becomes_whole_and_calibration_lends_the_imports():
  one, bare = tasks.task(ROW), tasks.Options(calibrated=False)
  rest, forgetful = "    return math.sqrt(x)", "def task_func(x):\n    return math.sqrt(x)"
  for options in (OPTIONS, bare):
    assert passes(tasks.program(one, rest, options), one.test)
    assert passes(tasks.program(one, WHOLE, options), one.test)
  assert passes(tasks.program(one, forgetful, OPTIONS), one.test)
  assert not passes(tasks.program(one, forgetful, bare), one.test)


# Attempts.


@needs_sandbox
def test_an_attempt_is_one_answer_paid_if_all_tests_pass():
  environment = bigcodebench.FAMILY.make(tasks.Options(reward_scale=2.0, show_errors=True))
  first = environment.open(tasks.task(ROW))
  assert (first.text, first.goal, first.task) == (ROW["instruct_prompt"],) * 2 + (ROW["task_id"],)
  solved = environment.step(f"```python\n{WHOLE}\n```")
  assert (solved.reward, solved.success, solved.score, solved.done) == (2.0, True, 1.0, True)
  assert (solved.valid, solved.action, solved.note) == (True, WHOLE, "passed")
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step(WHOLE)
  assert environment.retry() == first
  wrong = environment.step("```python\ndef task_func(x):\n    return 0\n```")
  assert (wrong.reward, wrong.success, wrong.score, wrong.done) == (0.0, False, 0.5, True)
  assert wrong.observation.text == (
    "The attempt is over: 1 of 2 tests pass.\ntest_a: AssertionError: 0 != 3"
  )
  assert len({first.anchor, solved.observation.anchor, wrong.observation.anchor}) == 3
  environment.retry()
  nothing = environment.step("I cannot do this.")
  assert (nothing.valid, nothing.action, nothing.reward, nothing.done) == (False, "", 0.0, True)
  quiet = bigcodebench.FAMILY.make(OPTIONS)
  quiet.open(tasks.task(ROW))
  assert "0 != 3" not in quiet.step("def task_func(x):\n    return 0").observation.text


@pytest.mark.parametrize("style", tasks.STYLES)
@pytest.mark.parametrize("mode", tasks.MODES)
def test_prompts_show_the_request_and_neither_tests_nor_solution(style, mode):
  options = tasks.Options(style=style, mode=mode)
  prompts = bigcodebench.FAMILY.prompts(options)
  log = base.AttemptLog(0, bigcodebench.FAMILY.make(options).open(tasks.task(ROW)))
  text = "\n".join(m.content for m in prompts.play(base.View((), log)))
  assert ROW[f"{mode}_prompt"] in text and "```python" in text
  assert "sqrt" not in text and "TestCases" not in text
  past = dataclasses.replace(log, reflection="roots need math")
  told = "\n".join(m.content for m in prompts.play(base.View((past,), log)))
  assert "roots need math" in told and len(told) > len(text)


@needs_sandbox
def test_the_solver_wins_and_the_random_player_loses_in_a_pool():
  family, wins = bigcodebench.FAMILY, {}
  with pool.EnvPool(family, OPTIONS, workers=2, timeout_s=60) as environments:
    handles = [environments.open() for _ in range(4)]
    for name in ("solver", "random"):
      seeds = (1, 2, base.EVAL_SEEDS[0], base.EVAL_SEEDS[0] + 3)
      opened = environments.run(
        [pool.Call(h, "reset", seed) for h, seed in zip(handles, seeds, strict=True)]
      )
      player = family.players[name](OPTIONS, np.random.default_rng(0))
      answers = [player.play(base.View((), base.AttemptLog(0, first))) for first in opened]
      played = environments.run(
        [pool.Call(h, "step", answer) for h, answer in zip(handles, answers, strict=True)]
      )
      assert all(result.valid for result in played)
      wins[name] = sum(result.success for result in played)
  assert wins == {"solver": 4, "random": 0}
