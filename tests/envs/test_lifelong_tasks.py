"""LifelongAgentBench's tasks: files of the published schema, splits, and what is said of files that do not fit."""

import json

import pytest

from memrl_jax.envs import base, lifelong_db, lifelong_kg, lifelong_os
from memrl_jax.envs import lifelong_tasks as tasks

MODULES = (lifelong_db, lifelong_kg, lifelong_os)
LABELS = {  # the benchmark's labels of skills that generated tasks use: 22 of 22, 7 of 7, 26 of 29
  "lifelong_db": 22,
  "lifelong_kg": 7,
  "lifelong_os": 26,
}
ROW = {
  "instruction": "How many are older than 30?",
  "table_info": {
    "name": "staff",
    "row_list": [[1, "Ann", 31], [2, "O'Ek", 29]],
    "column_info_list": [{"name": n, "type": t} for n, t in (("id", "INT"), ("name", "TEXT"), ("age", "INT"))],
  },
  "answer_info": {"md5": None, "direct": [[1]], "sql": "SELECT COUNT(*) FROM staff WHERE age > 30"},
  "skill_list": ["select", "where_single_condition"],
}  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_generated_tasks_are_many_labelled_and_split_without_overlap(module):
  source, options = module.SOURCE, module.Options()
  every = tasks.tasks(source, "")
  train, held = (tasks.side(source, "", split) for split in ("train", "held_out"))
  assert len(every) >= 300 and len(train) + len(held) == len(every)
  assert not {t.instruction for t in train} & {t.instruction for t in held}
  assert 0.2 < len(held) / len(every) < 0.4
  assert len({skill for task in every for skill in task.skills}) == LABELS[source.family]
  assert {s for t in held for s in t.skills} <= {s for t in train for s in t.skills}
  drawn = [tasks.draw(source, options, seed) for seed in range(len(train))]
  assert drawn == list(train)  # a stream in its own order
  assert tasks.draw(source, options, base.EVAL_SEEDS[0]) in held
  assert tasks.find(source, options, every[7].name) == every[7]


def test_the_three_forms_of_a_file_give_the_same_tasks(tmp_path):
  flat = ROW | {
    "table_info": json.dumps(ROW["table_info"]),  # a table format may hold objects as text,
    "answer_info": str(ROW["answer_info"]),  # also as Python writes them
    "skill_list": str(ROW["skill_list"]),
  }
  entries, lines, listed = (tmp_path / name for name in ("entry_dict.json", "a.jsonl", "b.json"))
  entries.write_text(json.dumps({"0": ROW, "17": ROW}))
  lines.write_text("".join(json.dumps(row) + "\n" for row in (ROW, flat)))
  listed.write_text(json.dumps([flat, ROW]))
  read = {path: tasks.tasks(lifelong_db.SOURCE, str(path)) for path in (entries, lines, listed)}
  assert [task.name for task in read[entries]] == ["lifelong_db/0", "lifelong_db/17"]
  bare = {task._replace(name="") for found in read.values() for task in found}
  assert bare == {lifelong_db.read("", ROW)}
  assert bare.pop().table.rows == ((1, "Ann", 31), (2, "O'Ek", 29))


@pytest.mark.parametrize(
  ("change", "sentence"),
  [
    ({"skill_list": None}, r"row 3 of .*not of the schema of lifelong_db \(TypeError"),
    ({"answer_info": {"md5": None, "direct": None, "sql": "x"}}, "needs one of direct and md5"),
    ({"answer_info": {"md5": "a", "direct": [], "sql": "x"}}, "needs one of direct and md5"),
    ({"table_info": "{]"}, "SyntaxError"),
    ({"table_info": {}}, r"KeyError: 'column_info_list'"),
  ],
)
def test_rows_that_cannot_be_used_are_refused(tmp_path, change, sentence):
  (tmp_path / "a.json").write_text(json.dumps({"3": ROW | change}))
  with pytest.raises(ValueError, match=sentence):
    tasks.tasks(lifelong_db.SOURCE, str(tmp_path / "a.json"))


def test_what_is_missing_is_said_in_one_sentence(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match=r"nothing is downloaded.*config\.env\.data"):
    tasks.tasks(lifelong_db.SOURCE, str(tmp_path / "none.json"))
  (tmp_path / "empty.json").write_text("{}")
  with pytest.raises(ValueError, match="holds no tasks"):
    tasks.tasks(lifelong_db.SOURCE, str(tmp_path / "empty.json"))
  (tmp_path / "one.json").write_text(json.dumps([ROW]))
  with pytest.raises(ValueError, match="none of the 1 tasks is on the"):
    [tasks.side(lifelong_db.SOURCE, str(tmp_path / "one.json"), s) for s in ("train", "held_out")]
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  (tmp_path / "a.parquet").touch()
  with pytest.raises(ImportError, match="pip install pyarrow"):
    tasks.tasks(lifelong_db.SOURCE, str(tmp_path / "a.parquet"))
  monkeypatch.setattr("shutil.which", lambda name, path=None: "/usr/sbin/mysqld")
  with pytest.raises(ValueError, match=r"lacks its client \(pip install PyMySQL\)"):
    lifelong_db.Options(engine="mysql")
  monkeypatch.setattr("shutil.which", lambda name, path=None: None)
  with pytest.raises(ValueError, match="apt-get install mariadb-server"):
    lifelong_db.Options(engine="mysql")


@pytest.mark.parametrize(
  ("module", "options", "sentence"),
  [
    (lifelong_db, {"style": "brief"}, "there is no tiny model"),
    (lifelong_db, {"split": "test"}, "choose one of auto, train"),
    (lifelong_db, {"turns": 0}, "leave nothing to do"),
    (lifelong_db, {"engine": "postgres"}, "choose one of sqlite, mysql"),
    (lifelong_db, {"statement_s": 0.0}, "choose more than 0"),
    (lifelong_os, {"reward_scale": -1.0}, "turns the task around"),
    (lifelong_os, {"memory_mb": 1}, "at least 64 MB"),
    (lifelong_os, {"image": "/nowhere"}, "no root folder of a system with bash"),
    (lifelong_kg, {"graph": "/facts"}, "give both data and graph, or neither"),
  ],
)
def test_options_check_themselves(module, options, sentence):
  with pytest.raises(ValueError, match=sentence):
    module.Options(**options)


@pytest.mark.parametrize("module", (lifelong_db, lifelong_kg))
def test_prompts_show_the_task_in_the_grammar_that_is_parsed(module):
  for style in tasks.STYLES:
    options = module.Options(style=style)
    environment, prompts = module.FAMILY.make(options), module.FAMILY.prompts(options)
    log = base.AttemptLog(0, environment.reset(0))
    player = module.FAMILY.players["solver"](options, None)
    for _ in range(2):
      said = player.play(base.View((), log))
      result = environment.step(said)
      assert result.valid and module.parse(result.action) == module.parse(said)  # canonical
      log.steps.append(base.Step(result.action, result))
    text = "\n".join(m.content for m in prompts.play(base.View((), log, "history_only")))
    assert log.initial.goal in text and log.steps[0].action in text
    assert log.steps[0].result.observation.text in text
    environment.close()
