"""LifelongAgentBench at length: DB tasks on a real MariaDB or MySQL, OS tasks each in a machine of its own.

Needs `apt-get install mariadb-server` and `pip install PyMySQL`, and root for machines. Without one of them, only its
own tests are skipped.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from memrl_jax.envs import (
  base,
  lifelong_db,
  lifelong_machine,
  lifelong_mysql,
  lifelong_os,
  lifelong_sql,
)
from memrl_jax.envs import lifelong_tasks as tasks
from tests.envs.test_lifelong_db import CHANGE, QUESTION, STAFF, STATES, say

needs_server = pytest.mark.skipif(
  bool(lifelong_mysql.missing()), reason=f"a real database lacks {lifelong_mysql.missing()}"
)
needs_machine = pytest.mark.skipif(
  bool(lifelong_machine.refused()),
  reason=f"a machine needs root and Linux namespaces: {lifelong_machine.refused()}",
)
THINNED = 4  # one task in so many is played; all were, once, and none failed
MYSQL = {"engine": "mysql", "split": "all"}


@pytest.fixture
def database():
  made = lifelong_mysql.MySql(STAFF, seconds=2.0)
  yield made
  made.close()


@needs_server
def test_the_servers_own_hash_is_ours(database):
  query = (
    "SELECT md5(group_concat(h ORDER BY h)) FROM "
    "(SELECT substring(md5(concat_ws(',', id, name, age)), 1, 5) AS h FROM staff) AS t"
  )
  states = []
  for change in ("SELECT 1", "DELETE FROM staff WHERE id = 2", "DELETE FROM staff"):
    database.execute(change)
    states.append(database.state())
    assert str(database.rows(query)[0][0]) == states[-1]
  assert tuple(states) == STATES


@needs_server
def test_generated_tasks_mean_the_same_in_both_engines():
  for task in tasks.tasks(lifelong_db.SOURCE, "")[::THINNED]:
    real, ours = lifelong_mysql.MySql(task.table, 20.0), lifelong_sql.Sqlite(task.table, 20.0)
    try:
      found = [database.rows(task.sql) for database in (real, ours)]
      states = [database.state() for database in (real, ours)]
      assert states[0] == states[1] == (task.md5 or states[0]), task
      assert all(lifelong_db.matches(str(rows), task.direct or ()) for rows in found), task
    finally:
      real.close()
      ours.close()


@needs_server
def test_attempts_are_judged_as_with_sqlite():
  environment = lifelong_db.FAMILY.make(lifelong_db.Options(**MYSQL))
  environment.open(QUESTION)
  looked = environment.step(say("SELECT name, age / 1 FROM staff WHERE age > 0 ORDER BY age DESC"))
  assert looked.observation.text == "[(\"O'Ek\", Decimal('41.0000')), ('Ann', Decimal('30.0000'))]"
  assert environment.step(say(answer=looked.observation.text)).success
  environment.open(CHANGE)
  environment.step(say("DELETE FROM staff WHERE id = 1"))
  assert not environment.step(say(answer="done")).success
  environment.retry()
  environment.step(say("DELETE FROM `staff` ORDER BY id DESC LIMIT 1"))  # MySQL's own words
  assert environment.step(say("DESCRIBE staff")).note == ""
  assert not environment.step(say(answer="done")).success  # the wrong row
  environment.close()


@needs_server
@pytest.mark.parametrize(
  ("sql", "text"),
  [
    ("SELECT sleep(100)", "more than 2 seconds"),
    ("SELECT sleep(0.2), a.id FROM staff a, staff b, staff c", "more than 2 seconds"),
    ("SELECT * FROM staff INTO OUTFILE '/tmp/out'", "Access denied"),
    ("LOAD DATA INFILE '/etc/passwd' INTO TABLE staff", "Access denied"),
    ("LOAD DATA LOCAL INFILE '/etc/passwd' INTO TABLE staff", ""),
    ("USE mysql", "Access denied"),
    ("CREATE DATABASE other", "Access denied"),
    ("SHUTDOWN", "Access denied"),
    ("SET GLOBAL max_connections = 1", "Access denied"),
    ("SELEC 1", "1064"),
  ],
)
def test_an_account_reaches_nothing_but_its_database(database, sql, text):
  begun = time.monotonic()
  reply = database.execute(sql)
  assert reply.failed and text in reply.text
  assert time.monotonic() - begun < 15
  assert database.execute("SELECT load_file('/etc/passwd')").text == "[(None,)]"
  shown = database.execute("SHOW DATABASES").text
  assert shown.count("lab") == 1 and "'mysql'" not in shown
  assert database.state() == STATES[0]


@needs_server
def test_long_results_are_cut_and_the_next_statement_runs(database):
  many = "SELECT repeat('x', 1000) FROM " + ", ".join(f"staff s{i}" for i in range(12))
  assert (
    len(database.rows(many)) == 201
  )  # of 531,441 rows; 201,000 characters are the first over the limit
  assert database.rows("SELECT 1") == [(1,)]


@needs_server
def test_the_server_ends_with_its_process_and_leaves_nothing(tmp_path):
  code = (
    "from memrl_jax.envs import lifelong_mysql as m, lifelong_sql as s\n"
    "m.MySql(s.Table('t', (('id', 'INT'),), ((1,),)), 5.0)\n"
    "print('up', flush=True)\n"
    "import time; time.sleep(100)\n"
  )
  environment = os.environ | {"TMPDIR": str(tmp_path)}
  command = [sys.executable, "-c", code]
  with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as parent:
    assert parent.stdout.readline() == b"up\n"
    folder = next(tmp_path.glob("memrl-sql-*"))
    server = int((folder / "pid").read_text())
    assert pathlib.Path(f"/proc/{server}").exists()
    assert not any(line for line in listening(server))
    parent.send_signal(signal.SIGKILL)
  end = time.monotonic() + 30
  while list(tmp_path.iterdir()) or pathlib.Path(f"/proc/{server}").exists():
    assert time.monotonic() < end
    time.sleep(0.1)


def listening(pid):
  """The TCP sockets that a process listens on."""
  sockets = {
    os.readlink(link) for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()
  }
  for table in ("tcp", "tcp6"):
    for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
      fields = line.split()
      if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
        yield line


@needs_machine
def test_the_solver_solves_generated_os_tasks_and_doing_nothing_solves_none(tmp_path, monkeypatch):
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
  options = lifelong_os.Options(split="all")
  environment = lifelong_os.FAMILY.make(options)
  for number, task in list(enumerate(tasks.tasks(lifelong_os.SOURCE, "")))[::THINNED]:
    log = base.AttemptLog(0, environment.reset(number))
    assert not environment.step("Act: finish").success, task
    environment.retry()
    player = lifelong_os.FAMILY.players["solver"](options, np.random.default_rng(0))
    while not log.done:
      result = environment.step(player.play(base.View((), log)))
      log.steps.append(base.Step(result.action, result))
    assert log.success and log.steps[0].result.note == "exit 0", task
  assert list(tmp_path.iterdir()) == []


def test_a_parquet_file_is_read(tmp_path):
  pyarrow = pytest.importorskip("pyarrow", reason="a package: pip install pyarrow")
  parquet = pytest.importorskip("pyarrow.parquet")
  row = {
    "question": "Who?", "entity_dict": {"Ann": "m.1"}, "answer_list": ["m.2"], "skill_list": ["count"],
  }  # fmt: skip
  other = row | {
    "entity_dict": {"Bob": "m.3"}
  }  # a struct column holds every name, empty for others
  parquet.write_table(pyarrow.Table.from_pylist([row, other]), tmp_path / "a.parquet")
  from memrl_jax.envs import lifelong_kg

  first, second = tasks.tasks(lifelong_kg.SOURCE, str(tmp_path / "a.parquet"))
  assert (first.entities, second.entities) == ({"Ann": "m.1"}, {"Bob": "m.3"})
