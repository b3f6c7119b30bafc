"""DB tasks: MySQL's words in SQLite, what a statement cannot do, verdicts by rows and by state, scripted players."""

import dataclasses
import time

import numpy as np
import pytest

from memrl_jax.envs import base, lifelong_db, lifelong_sql, pool
from memrl_jax.envs import lifelong_tasks as tasks

FAMILY, OPTIONS = lifelong_db.FAMILY, lifelong_db.Options(split="all")
STAFF = lifelong_sql.Table(
  "staff",
  (("id", "INT"), ("name", "TEXT"), ("age", "INT")),
  ((1, "Ann", 30), (2, "O'Ek", 41), (3, "Ünal", None)),
)
# Of this table, of it without its second row, and of it empty, as MariaDB 10.11 gives them for the release's query
# (tests/real/test_lifelong.py asks a server again).
STATES = ("ffc21e14275116a30a09b70b8d631083", "f7cd99fb22bd2315c87fb6651d8c5f6f", "None")

QUESTION = lifelong_db.Task(
  "q", "Who is how old?", ("select",), STAFF, None, (("O'Ek", 41), ("Ann", 30)),
  "SELECT name, age FROM staff WHERE age > 0 ORDER BY age DESC",
)  # fmt: skip
CHANGE = QUESTION._replace(md5=STATES[1], direct=None, sql="DELETE FROM staff WHERE id = 2")


@pytest.fixture
def database():
  made = lifelong_sql.Sqlite(STAFF, seconds=1.0)
  yield made
  made.close()


def test_the_hash_of_a_table_is_the_releases(database):
  states = [database.state()]
  for change in ("DELETE FROM staff WHERE id = 2", "DELETE FROM staff"):
    assert database.execute(change) == ("[]", False)
    states.append(database.state())
  assert tuple(states) == STATES
  database.execute("INSERT INTO staff VALUES (3, 'Ünal', NULL), (2, 'O''Ek', 41), (1, 'Ann', 30)")
  assert database.state() == STATES[0]  # the order of rows does not count
  database.execute("DROP TABLE staff")
  assert database.state() not in STATES


@pytest.mark.parametrize(
  ("sql", "text"),
  [
    ('SELECT id FROM `staff` WHERE name = "ann";', "[(1,)]"),  # a text, without regard to case
    ('SELECT id FROM staff WHERE name = "name"', "[]"),  # and no column
    ("SELECT id FROM staff WHERE name = 'O\\'Ek' OR name = \"O'Ek\"", "[(2,)]"),
    ("SELECT 7 / 2, 1 / 0, 'a/b;c'", "[(3.5, None, 'a/b;c')]"),
    ("SELECT 1; -- two; statements\n SELECT 2 # three", "[(2,)]"),
    ("SELECT COUNT(*) FROM staff GROUP BY age > 0 LIMIT 1, 1", "[(2,)]"),
    ("", "[]"),
  ],
)
def test_statements_mean_what_they_mean_in_mysql(database, sql, text):
  assert database.execute(sql) == (text, False)


def test_every_statement_is_kept_and_an_error_ends_a_sequence(database):
  assert database.execute("BEGIN; DELETE FROM staff WHERE id = 2").failed is False
  assert database.execute("ROLLBACK").failed  # nothing is left open
  assert database.state() == STATES[1]
  failed = database.execute("DELETE FROM staff WHERE id = 1; SELEC 1; DELETE FROM staff")
  assert failed.failed and "syntax error" in failed.text
  assert database.rows("SELECT id FROM staff") == [(3,)]


ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"


@pytest.mark.parametrize(
  ("sql", "text"),
  [
    ("ATTACH DATABASE '{file}' AS x; CREATE TABLE x.t (a)", "not authorized"),
    ("VACUUM INTO '{file}'", "authorization denied"),
    ("PRAGMA writable_schema = 1", "not authorized"),
    ("SELECT * FROM pragma_database_list", "not authorized"),
    ("SELECT load_extension('{file}')", "not authorized"),
    ("CREATE VIRTUAL TABLE f USING fts5(a)", "not authorized"),
    (f"{ENDLESS} SELECT COUNT(*) FROM c", "more than 1 seconds"),
    (f"{ENDLESS} SELECT x FROM c ORDER BY x DESC", "more than 1 seconds"),
    ("SELECT length(zeroblob(1000000000))", "too big"),
    (f"CREATE TABLE z AS {ENDLESS} SELECT hex(randomblob(9999)) FROM c", "full"),
    ("SELECT '\ud800'", "surrogates"),
    ("SELECT '\0'", "null character"),
  ],
)
def test_a_statement_cannot_leave_its_database_or_go_on_for_ever(database, tmp_path, sql, text):
  begun = time.monotonic()
  reply = database.execute(sql.format(file=tmp_path / "out"))
  assert reply.failed and text in reply.text
  assert time.monotonic() - begun < 20
  assert list(tmp_path.iterdir()) == []
  assert database.state() == STATES[0] and database.rows("SELECT 1") == [(1,)]


def test_long_results_are_cut_before_they_fill_the_memory(database):
  assert len(database.rows(f"{ENDLESS} SELECT x FROM c")) == lifelong_sql.FETCHED_ROWS
  wide = database.rows(f"{ENDLESS} SELECT zeroblob(90000) FROM c")
  assert len(wide) == 3  # 270,000 characters: the first that exceed 200,000


@pytest.mark.parametrize(
  ("answer", "right"),
  [
    ("[(\"O'Ek\", 41), ('Ann', 30)]", True),
    ("[(O'Ek, 41), (Ann, 30)]", True),  # texts without quotes
    ("[['O\\'Ek', '41.0000001'], ['Ann', Decimal('30')]]", True),
    ("('O'Ek', 41), ('Ann', 30)", True),
    ("[('Ann', 30), (\"O'Ek\", 41)]", False),  # another order
    ("[(41, \"O'Ek\"), (30, 'Ann')]", False),
    ('[("O\'Ek", 41)]', False),
    ("[(\"O'Ek\", 41.1), ('Ann', 30)]", False),
    ("[(\"o'ek\", 41), ('ann', 30)]", False),
    ("[]", False),
    ("(" * 5000, False),
    ("\0", False),
  ],
)
def test_answers_are_compared_as_published(answer, right):
  assert lifelong_db.judge(OPTIONS, QUESTION, STATES[0], answer) == right


def test_one_row_may_stand_alone_and_no_row_is_an_answer_too():
  assert lifelong_db.matches("3", ((3,),)) and lifelong_db.matches("[3]", ((3,),))
  assert lifelong_db.matches("Ann, 30", (("Ann", 30),)) and lifelong_db.matches("[]", ())
  assert lifelong_db.matches("[(datetime.date(2024, 1, 5),)]", (("2024-01-05",),))
  assert not lifelong_db.matches("3", ((3,), (4,))) and not lifelong_db.matches("0", ())
  nothing = QUESTION._replace(direct=(), sql="SELECT 1 WHERE 0")
  assert not lifelong_db.judge(OPTIONS, nothing, STATES[0], None)  # silence is no answer


def test_what_the_reference_gives_in_this_engine_is_right_too():
  mysql = QUESTION._replace(direct=((23.6667,),), sql="SELECT SUM(age) / COUNT(*) FROM staff")
  assert lifelong_db.judge(OPTIONS, mysql, "", "[(23.6667,)]")
  assert lifelong_db.judge(OPTIONS, mysql, "", "[(23.666666666666668,)]")
  assert not lifelong_db.judge(OPTIONS, mysql, "", "[(23.66,)]")
  other = CHANGE._replace(md5="made by another engine")
  assert lifelong_db.judge(OPTIONS, other, STATES[1], None)
  assert not lifelong_db.judge(OPTIONS, other, STATES[0], None)
  foreign = other._replace(sql="UPDATE staff SET age = 0 LIMIT 1")  # no statement of SQLite
  assert not lifelong_db.judge(OPTIONS, foreign, STATES[0], None)


@pytest.mark.parametrize(
  ("response", "action"),
  [
    ("I look.\nAction: Operation\n```sql\nSELECT *\nFROM staff;\n```", ("SELECT * FROM staff;", "")),
    ("Action: Operation\n```sql\nSELECT 1\n```\n```sql\nSELECT 2\n```", ("SELECT 1", "")),
    ("<think>Action: Answer</think>Action: Operation\n```sql\nSELECT 1\n```", ("SELECT 1", "")),
    ("Action: Answer\nFinal Answer: [(1,)]\nThanks", (None, "[(1,)]")),
    ("Action: Answer", None),
    ("Final Answer: [(1,)]", None),
    ("Action: Operation\nSELECT 1", None),
    ("Action: Operation\n```sql\n\n```", None),
    ("", None),
  ],
)  # fmt: skip
def test_responses_are_read_as_published(response, action):
  assert lifelong_db.parse(response) == (action and lifelong_db.Action(*action))


def say(sql=None, answer=""):
  return lifelong_db.Action(sql, answer).text


@pytest.fixture
def environment():
  made = FAMILY.make(dataclasses.replace(OPTIONS, reward_scale=5.0))
  yield made
  made.close()


def test_a_question_is_paid_for_its_rows_and_a_change_for_its_table(environment):
  first = environment.open(QUESTION)
  assert "Who is how old?" in first.text and "name (TEXT), age (INT)" in first.text
  assert "Ann" not in first.text
  looked = environment.step(say(QUESTION.sql))
  assert (looked.done, looked.observation.text) == (False, "[(\"O'Ek\", 41), ('Ann', 30)]")
  paid = environment.step(say(answer=looked.observation.text))
  assert (paid.done, paid.success, paid.reward, paid.score) == (True, True, 5.0, 1.0)
  environment.retry()
  unpaid = environment.step(say(answer="[('Ann', 30)]"))
  assert (unpaid.done, unpaid.success, unpaid.reward) == (True, False, 0.0)
  environment.open(CHANGE)
  assert not environment.step(say("DELETE FROM staff WHERE id = 2")).done
  assert environment.step(say(answer="done")).success
  assert environment.retry().text == environment.open(CHANGE).text
  environment.step(say("DELETE FROM staff WHERE id = 1"))
  assert not environment.step(say(answer="done")).success


def test_the_state_is_judged_however_an_attempt_ends_and_an_answer_must_be_given(environment):
  environment.open(CHANGE)
  environment.step(say(CHANGE.sql))
  unread = environment.step("All done!")
  assert (unread.done, unread.valid, unread.success, unread.action) == (True, False, True, "")
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step(say("SELECT 1"))
  environment.retry()
  ends = [environment.step(say(sql)) for sql in ("SELEC 1", "SELECT 1", CHANGE.sql)]
  assert [(end.done, end.success, end.note) for end in ends] == [
    (False, False, "error"),
    (False, False, ""),
    (True, True, ""),  # the third turn is the last
  ]
  environment.open(QUESTION)
  ends = [environment.step(say(QUESTION.sql)) for _ in range(3)]
  assert ends[-1].done and not ends[-1].success


def test_equal_states_have_equal_anchors_and_outputs_are_cut(environment):
  environment.open(CHANGE)
  nothing = environment.step(say("UPDATE staff SET age = 0 WHERE id = 9")).observation
  changed = environment.step(say(CHANGE.sql)).observation
  environment.retry()
  assert environment.step(say(CHANGE.sql)).observation.anchor == changed.anchor != nothing.anchor
  long = environment.step(say("SELECT hex(zeroblob(9000))")).observation.text
  assert len(long) < OPTIONS.output_chars + 50 and "(18007 characters)" in long


def test_the_solver_solves_every_generated_task_and_the_random_player_none():
  environment, wins = FAMILY.make(OPTIONS), {"solver": 0, "random": 0}
  number = len(tasks.tasks(lifelong_db.SOURCE, ""))
  for name in wins:
    for seed in range(number):
      player = FAMILY.players[name](OPTIONS, np.random.default_rng(seed))
      log = base.AttemptLog(0, environment.reset(seed))
      while not log.done:
        result = environment.step(player.play(base.View((), log)))
        assert result.valid
        log.steps.append(base.Step(result.action, result))
      wins[name] += log.success
  assert wins["solver"] == number and wins["random"] < number / 20


def test_many_are_played_in_a_pool():
  with pool.EnvPool(FAMILY, OPTIONS, workers=2, timeout_s=60) as environments:
    handles = [environments.open() for _ in range(6)]
    environments.run([pool.Call(h, "reset", seed) for seed, h in enumerate(handles)])
    results = environments.run([pool.Call(h, "step", say("SELECT 1")) for h in handles])
    assert [result.observation.text for result in results] == ["[(1,)]"] * 6
