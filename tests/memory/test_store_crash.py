"""A memory among processes: killed while it writes, read while it is written, opened twice."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from memrl_jax.memory import check, records
from memrl_jax.memory.records import Add
from memrl_jax.memory.store import Store

ROOT = pathlib.Path(__file__).parents[2]
KILLS = 50

# Commit v adds the two halves of v and takes away one half of every earlier pair but the last.
WRITER = """
import os, sys
from memrl_jax.memory.records import Add, Remove
from memrl_jax.memory.store import Store
with Store(sys.argv[1]) as store:
  last = [entry.id for entry in store.entries("a")][-2:]
  os.write(1, b"%d\\n" % store.version)
  while True:
    v = store.version + 1
    halves = [Add("a", f"{v} {half}", "text" * 500, v) for half in "lr"]
    last = store.commit([*halves, *(Remove("a", id) for id in last[:1])]).ids
    os.write(1, b"%d\\n" % v)
"""


def python(*args, **kwargs):
  return subprocess.Popen(
    [sys.executable, "-S", "-c", *map(str, args)], cwd=ROOT, text=True, **kwargs
  )


def expected(version):
  """Keys at a version of WRITER: the right halves of all, the left half of the newest."""
  return [f"{v} r" for v in range(1, version)] + [f"{version} l", f"{version} r"] * (version > 0)


def test_killed_50_times_it_holds_exactly_what_was_acknowledged(tmp_path):
  rng = random.Random(0)
  acknowledged, grown = 0, 0
  for _ in range(KILLS):
    child = python(WRITER, tmp_path, stdout=subprocess.PIPE)
    lines = [child.stdout.readline() for _ in range(1 + rng.randrange(5))]  # first: it has opened
    time.sleep(rng.uniform(0, 0.01))  # a commit takes about this long
    child.send_signal(signal.SIGKILL)
    lines += child.stdout.read().split()
    child.wait()
    child.stdout.close()
    before, acknowledged = acknowledged, int(lines[-1])
    grown += acknowledged > before
    assert check.verify(tmp_path) == []
    with Store(tmp_path, read_only=True) as store:
      assert store.version in (acknowledged, acknowledged + 1)
      acknowledged = store.version
      assert [entry.key for entry in store.entries("a")] == expected(acknowledged)
      old = rng.randrange(acknowledged + 1)
      assert [entry.key for entry in store.entries("a", at=old)] == expected(old)
  assert grown > KILLS // 2


HOLDER = """
import sys, time
from memrl_jax.memory.store import Store
with Store(sys.argv[1]) as store:
  print("open", flush=True)
  sys.stdin.readline()
"""


def test_a_second_process_is_told_who_writes_and_takes_over_from_the_dead(tmp_path):
  child = python(HOLDER, tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
  child.stdout.readline()
  with pytest.raises(records.Locked, match=rf"process {child.pid} since 2.*read_only=True"):
    Store(tmp_path)
  with Store(tmp_path, read_only=True) as reader:
    assert reader.version == 0
    with pytest.raises(records.StoreError, match="for reading only"):
      reader.commit([Add("a", "k", "t")])
  child.kill()
  child.wait()
  child.stdin.close()
  child.stdout.close()
  with Store(tmp_path) as store:
    assert store.commit([Add("a", "k", "t")]).version == 1
    with Store(tmp_path, read_only=True), pytest.raises(records.Locked, match="force=True"):
      store.discard_after(0)
    store.discard_after(0)
    assert store.version == 0 and check.verify(tmp_path) == []


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path):
  """A child that outlives its parent would else lock everybody out."""
  script = """
import os, sys, time
from memrl_jax.memory.store import Store
store = Store(sys.argv[1])
if os.fork() == 0:
  try:
    store.commit([])
  except ValueError as error:
    print(error, flush=True)
  time.sleep(60)
os._exit(0)
"""
  parent = python(script, tmp_path, stdout=subprocess.PIPE, start_new_session=True)
  try:
    assert "open it in this one" in parent.stdout.readline()
    parent.wait()
    Store(tmp_path).close()
  finally:
    os.killpg(parent.pid, signal.SIGKILL)
    parent.stdout.close()


READER = """
import json, sys, time
from memrl_jax.memory.store import Store
seen, last = 0, 0
with Store(sys.argv[1], read_only=True) as store:
  end = time.monotonic() + float(sys.argv[2])
  while time.monotonic() < end:
    entries = store.entries("a")
    scores = {entry.score for entry in entries}
    version = max(entry.version for entry in entries)
    assert len(entries) == 20 and len(scores) == 1, "half a commit"
    assert scores == {float(version)} and version >= last, "time ran backwards"
    seen, last = seen + (version > last), version
print(seen)
"""


def readers_and_a_writer(folder, seconds):
  """Every commit gives 20 entries its own number; 8 processes must always see one number."""
  with Store(folder) as store:
    store.commit([Add("a", f"{i}", "t", 1.0) for i in range(20)])
    readers = [python(READER, folder, seconds, stdout=subprocess.PIPE) for _ in range(8)]
    while any(reader.poll() is None for reader in readers):
      score = float(store.version + 1)
      store.commit([records.Change("a", id, score=score) for id in range(1, 21)])
      time.sleep(0.001)
    seen = [int(reader.stdout.read()) for reader in readers]
    [reader.stdout.close() for reader in readers]
    assert all(reader.returncode == 0 for reader in readers)
    versions = store.version
    for at in range(1, versions + 1, max(1, versions // 50)):
      assert {entry.score for entry in store.entries("a", at=at)} == {float(at)}
  assert check.verify(folder) == []
  return seen, versions


def test_8_readers_never_see_half_a_commit(tmp_path):
  seen, versions = readers_and_a_writer(tmp_path, 2)
  assert min(seen) > 1 and versions > 5


@pytest.mark.slow
def test_8_readers_never_see_half_a_commit_in_a_minute(tmp_path):
  seen, versions = readers_and_a_writer(tmp_path, 60)
  assert min(seen) > 100 and versions > 1000
