"""DB tasks on a real MySQL or MariaDB: a private server of this process, reached through a socket file alone.

It is started with the first database and removed with the process, however that ends. Every database has an account
of its own, which may do anything there and nothing elsewhere: no files, no other databases, no shutdown.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any

from memrl_jax.envs import lifelong_sql as sql

_START_S = 60.0
_SERVERS = ("mariadbd", "mysqld")  # the first that is installed
_FOLDERS = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/libexec"

# Ends the server and removes its folder when the process that holds the other end of its input is gone.
_KEEPER = """
folder=$1; shift
"$@" & server=$!
cat > /dev/null
kill -KILL $server; wait $server; rm -rf "$folder"
"""


def missing() -> str:
  """What of a server and its client is not installed here; "" when nothing is."""
  if not any(shutil.which(name, path=_FOLDERS) for name in _SERVERS):
    return "a server (apt-get install mariadb-server)"
  return "" if importlib.util.find_spec("pymysql") else "its client (pip install PyMySQL)"


class Server:
  """A running server; `connect` gives connections of its administrator or of an account.

  Raises:
    RuntimeError: it does not start.
  """

  def __init__(self):
    self._folder = tempfile.mkdtemp(prefix="memrl-sql-")
    binary = next(filter(None, (shutil.which(name, path=_FOLDERS) for name in _SERVERS)))
    data, self._socket = f"{self._folder}/data", f"{self._folder}/s"
    account = ["--user=root"] if os.geteuid() == 0 else []
    if os.path.basename(binary) == "mariadbd":
      make = ["mariadb-install-db", "--no-defaults", "--auth-root-authentication-method=normal"]
      make += ["--skip-test-db", f"--datadir={data}", *account]
    else:
      make = [binary, "--no-defaults", "--initialize-insecure", f"--datadir={data}", *account]
    done = subprocess.run(make, capture_output=True, text=True)
    if done.returncode:
      self._fail(done.stdout + done.stderr)
    run = [binary, "--no-defaults", f"--datadir={data}", f"--socket={self._socket}", *account]
    run += [f"--pid-file={self._folder}/pid", f"--tmpdir={self._folder}", "--skip-networking"]
    run += ["--skip-log-bin", "--local-infile=0", "--secure-file-priv=/dev/null"]
    run += ["--innodb-buffer-pool-size=16M", "--innodb-flush-log-at-trx-commit=0"]
    with open(f"{self._folder}/log", "wb") as log:
      keeper = ["sh", "-c", _KEEPER, "sh", self._folder, *run]
      self._keeper = subprocess.Popen(
        keeper, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
      )
    self.admin = self._wait()

  def connect(self, user: str = "root", password: str = "", seconds: float = 30.0, base: str = ""):
    """A connection whose calls fail after a time."""
    import pymysql

    settings = {"unix_socket": self._socket, "charset": "utf8mb4", "autocommit": True}
    limits = {"read_timeout": seconds, "write_timeout": seconds}
    return pymysql.connect(
      user=user, password=password, database=base or None, **settings, **limits
    )

  def _wait(self) -> Any:
    import pymysql

    end = time.monotonic() + _START_S
    while True:
      try:
        return self.connect()
      except pymysql.Error as error:
        if time.monotonic() > end:
          with open(f"{self._folder}/log", encoding="utf-8", errors="replace") as log:
            text = log.read()
          self._keeper.stdin.close()
          self._fail(f"{error} {text}")
        time.sleep(0.05)

  def _fail(self, why: str) -> None:
    shutil.rmtree(self._folder, ignore_errors=True)
    raise RuntimeError(
      f"the database server does not start ({why.strip()[-500:]}); repair its installation, or choose sqlite "
      "(config.env.engine)"
    )


@functools.cache
def server() -> Server:
  """The server of this process."""
  return Server()


_one_at_a_time = threading.Lock()  # starts the server, and uses its administrator's connection
_numbers = itertools.count()


class MySql:
  """A database of the private server. `seconds` limits every statement."""

  def __init__(self, table: sql.Table, seconds: float):
    self._table, self._seconds = table, seconds
    with _one_at_a_time:
      self._server, self._base = server(), f"lab{next(_numbers)}"
    password = secrets.token_hex(8)
    create = f"CREATE DATABASE {self._base} CHARACTER SET utf8mb4"
    user = f"{self._base}@localhost"
    self._admin(create, f"CREATE USER {user} IDENTIFIED BY '{password}'")
    self._admin(f"GRANT ALL ON {self._base}.* TO {user}")
    self._login = {"user": self._base, "password": password, "base": self._base}
    self._connection: Any = None
    columns = ", ".join(f"{sql.quoted(name)} {kind}" for name, kind in table.columns)
    marks = ", ".join(["%s"] * len(table.columns))
    cursor = self._open().cursor()
    cursor.execute(f"CREATE TABLE {sql.quoted(table.name)} ({columns})")
    cursor.executemany(f"INSERT INTO {sql.quoted(table.name)} VALUES ({marks})", table.rows)

  def execute(self, text: str) -> sql.Reply:
    import pymysql

    try:
      return sql.Reply(str(self._run(text)), False)
    except TimeoutError as error:
      return sql.Reply(str(error), True)
    except (pymysql.Error, UnicodeError) as error:
      return sql.Reply(_said(error), True)

  def rows(self, text: str) -> list[tuple[Any, ...]] | None:
    import pymysql

    try:
      return self._run(text)
    except (pymysql.Error, TimeoutError):
      return None

  def state(self) -> str:
    columns = ", ".join(sql.quoted(name) for name, _ in self._table.columns)
    found = self.rows(f"SELECT {columns} FROM {sql.quoted(self._table.name)}")
    return "the table is gone" if found is None else sql.state_of(found)

  def close(self) -> None:
    base, self._base = self._base, ""
    if base:
      self._end_session()
      self._admin(f"DROP DATABASE {base}", f"DROP USER {base}@localhost")

  def _run(self, text: str) -> list[tuple[Any, ...]]:
    """The rows of the last statement; the server itself ends what takes too long."""
    import pymysql.cursors

    found: list[tuple[Any, ...]] = []
    late = threading.Event()
    watch = threading.Timer(self._seconds, lambda: (late.set(), self._kill()))
    watch.start()
    cursor = None
    try:
      for statement in sql.statements(text):
        cursor = self._open().cursor(pymysql.cursors.SSCursor)  # fetches rows as they are asked for
        cursor.execute(statement)
        found = sql.fetched(cursor)
        if sql.is_cut(found):
          self._end_session(cursor)
        else:
          cursor.close()
          self._connection.commit()
    except pymysql.Error as error:
      if late.is_set() or error.args[0] in _LOST:
        self._end_session(cursor)
      if late.is_set():
        raise TimeoutError(
          f"the statement took more than {self._seconds:g} seconds and was stopped"
        ) from error
      raise
    finally:
      watch.cancel()
    return found

  def _open(self) -> Any:
    if self._connection is None:
      self._connection = self._server.connect(seconds=self._seconds + 10, **self._login)
    return self._connection

  def _end_session(self, cursor: Any = None) -> None:
    """Leaves the session, with the rows that a cursor has not fetched; the next statement begins another."""
    if self._connection is not None:
      self._kill()
      if cursor is not None and cursor._result is not None:
        cursor._result.unbuffered_active = False  # or closing it would wait for the rows
      if self._connection.open:
        self._connection.close()
      self._connection = None

  def _kill(self) -> None:
    """Ends the session on the server, with the statement that it may be running."""
    import pymysql

    connection = self._connection
    if connection is not None:
      with contextlib.suppress(pymysql.Error):  # it has ended
        self._admin(f"KILL {connection.thread_id()}")

  def _admin(self, *given: str) -> None:
    for statement in given:
      with _one_at_a_time:
        self._server.admin.cursor().execute(statement)


_LOST = (2006, 2013, 1927)  # MySQL's error numbers for a session that has ended


def _said(error: Exception) -> str:
  """An error as the client of the release prints it: its message, with its number."""
  return f"{error.args[0]}: {error.args[1]}" if len(error.args) > 1 else str(error)
