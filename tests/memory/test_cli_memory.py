"""`python -m memrl_jax.memory`: what it shows, what it changes, and how it refuses."""

import array
import os
import pathlib
import pty
import subprocess
import sys

import pytest

from memrl_jax.memory import __main__ as cli
from memrl_jax.memory import embed, schema, transfer
from memrl_jax.memory.records import Add, Change, Manifest, Outcome, Read
from memrl_jax.memory.store import Store

ROOT = pathlib.Path(__file__).parents[2]
EVIL = "Open \x1b[31m[bold]the\nbox[/bold]\t\x00"


@pytest.fixture
def folder(tmp_path):
  """Two tenants, four versions, embedded by the hash of 384 numbers."""
  hash = embed.Hash(384)

  def add(tenant, text, score, **data):
    return Add(tenant, text, text, score, data, array.array("f", hash.embed([text])[0]))

  with Store(tmp_path / "m", Manifest("hash", 384, True)) as store:
    store.commit([add("a", "boil the water on the stove", 1.0, trial="t1"), add("a", EVIL, 2.0)])
    store.commit([add("b", "walk north to the wall", -1.0)])
    store.commit([Change("a", 1, score=5.0)])
    store.commit(reads=[Read("t7", 3, 1, 3)], outcomes=[Outcome("t7", 0.5, True)])
  return tmp_path / "m"


def table(capsys, *argv):
  assert cli.main([str(word) for word in argv]) == 0
  return [line.split("\t") for line in capsys.readouterr().out.splitlines()]


def refused(capsys, *argv):
  assert cli.main([str(word) for word in argv]) == 2
  out = capsys.readouterr()
  assert out.out == "" and out.err.startswith("error: ") and out.err.count("\n") == 1, out.err
  return out.err


def test_list_is_by_score_of_a_tenant_and_of_a_version(capsys, folder):
  assert [row[0] for row in table(capsys, "list", folder)] == ["id", "1", "2", "3"]
  assert [row[0] for row in table(capsys, "list", folder, "--at", 1)] == ["id", "2", "1"]
  assert [row[0] for row in table(capsys, "list", folder, "--tenant", "b")] == ["id", "3"]
  assert len(table(capsys, "list", folder, "--limit", 1)) == 2


def test_search_by_meaning_and_by_text(capsys, folder):
  rows = table(capsys, "search", folder, "stove with water")
  assert rows[0][0] == "similarity" and rows[1][1] == "1" and float(rows[1][0]) > float(rows[2][0])
  assert [row[0] for row in table(capsys, "search", folder, "WALL", "--text")] == ["id", "3"]
  assert table(capsys, "search", folder, "wall", "--text", "--tenant", "a")[1:] == []
  assert "--text" in refused(capsys, "search", folder, "x", "--at", 1)


def test_show_tells_history_and_lineage(capsys, folder):
  rows = [tuple(row) for row in table(capsys, "show", folder, 1)]
  assert ("written by", "t1") in rows
  assert rows.index(("versions 1 to 2", "score 1")) < rows.index(
    ("versions 3 to now (4)", "score 5")
  )
  assert ("  t7 step 3", "at version 3: reward 0.5, success True") in rows
  assert "no entry 9" in refused(capsys, "show", folder, 9)


def test_no_control_character_reaches_the_output(capsys, folder):
  cli.main(["list", str(folder)])
  out = capsys.readouterr().out
  assert "\x1b" not in out and "\x00" not in out
  assert r"Open \x1b[31m[bold]the\nbox[/bold]\t\x00" in out


def test_diff_and_rollback(capsys, folder):
  assert table(capsys, "diff", folder, 1)[1:] == [
    ["+", "3", "b", "-1", "walk north to the wall"],
    ["~", "1", "a", "1 -> 5", "boil the water on the stove"],
  ]
  assert table(capsys, "rollback", folder, 1, "--tenant", "a") == [
    ["version 5 equals version 1: 2 entries"]
  ]
  assert table(capsys, "diff", folder, 4)[1:] == [
    ["~", "1", "a", "5 -> 1", "boil the water on the stove"]
  ]
  assert table(capsys, "versions", folder)[1][:2] == ["5", "rollback of a to 1"]


def test_export_import_snapshot_restore(capsys, folder, tmp_path):
  cli.main(["export", str(folder)])
  printed = capsys.readouterr().out
  table(capsys, "export", folder, tmp_path / "file.jsonl")
  assert (tmp_path / "file.jsonl").read_text(encoding="utf-8") == printed
  table(capsys, "import", tmp_path / "new", tmp_path / "file.jsonl")
  with Store(tmp_path / "new", read_only=True) as store:
    assert "".join(transfer.export_lines(store)) == printed
  table(capsys, "snapshot", folder, tmp_path / "saved")
  table(capsys, "rollback", folder, 0)
  assert "before it is" in table(capsys, "restore", folder, tmp_path / "saved")[0][0]
  assert len(table(capsys, "list", folder)) == 4


def test_verify_answers_with_its_exit_code(capsys, folder):
  assert table(capsys, "verify", folder) == [["all is well"]]
  file = folder / schema.FILE
  file.write_bytes(file.read_bytes().replace(b"walk north", b"walk sorth"))
  assert cli.main(["verify", str(folder)]) == 1
  assert "entry 3" in capsys.readouterr().out


def test_the_command_that_a_refusal_names_embeds_anew(capsys, folder):
  other = Manifest("hash", 32, True)
  with pytest.raises(ValueError) as refusal:
    Store(folder, other)
  command = str(refusal.value).partition("python -m memrl_jax.memory ")[2].partition("`")[0]
  assert table(capsys, *command.split())[0][0].startswith("version 5: 3 entries")
  Store(folder, other).close()
  assert "give --weights" in refused(capsys, "reindex", folder, "--embedder", "minilm")
  assert "in Python" in refused(capsys, "reindex", folder, "--embedder", "policy:x")


def test_wrong_input_is_one_sentence_and_makes_nothing(capsys, folder, tmp_path):
  nowhere = tmp_path / "nowhere"
  for command in ("list", "stats", "rollback", "reindex"):
    more = {"rollback": [0], "reindex": ["--embedder", "hash"]}.get(command, [])
    assert "no memory" in refused(capsys, command, nowhere, *more)
  assert "has 0 to 4" in refused(capsys, "rollback", folder, 9)
  (tmp_path / "other.json").write_text("[]")
  assert "line 1" in refused(capsys, "import", nowhere, tmp_path / "other.json")
  assert not nowhere.exists()
  refused(capsys, "list")
  refused(capsys, "lst", folder)
  with Store(folder):
    assert f"process {os.getpid()}" in refused(capsys, "rollback", folder, 1)
    assert len(table(capsys, "list", folder)) == 4  # reading goes on


def test_a_closed_pipe_and_a_terminal(folder):
  command = [sys.executable, "-m", "memrl_jax.memory", "export", folder]
  closed = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  closed.stdout.close()
  assert closed.stderr.read() == b""
  closed.stderr.close()
  closed.wait()
  ours, theirs = pty.openpty()
  command[3] = "list"
  environment = os.environ | {"TERM": "xterm", "COLUMNS": "60"}
  subprocess.run(command, cwd=ROOT, stdout=theirs, env=environment, check=True)
  os.close(theirs)
  shown = os.read(ours, 10_000).decode()
  os.close(ours)
  assert "\x1b[1m" in shown and r"\x1b[31m[bold]the" in shown and "\x1b[31m" not in shown
