"""What a command in the local executor can and cannot do, and that nothing of it stays behind."""

import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time

import pytest

from memrl_jax.envs import swe_executor, swe_sandbox

if swe_sandbox._refusal():
  pytest.skip(
    f"the sandbox needs Linux namespaces: {swe_sandbox._refusal()}", allow_module_level=True
  )

LIMITS = swe_executor.Limits(seconds=20.0, memory_mb=512)
FILES = {"code.py": "x = 1\n", "sub/note.txt": "hi\n"}


@pytest.fixture
def home(tmp_path, monkeypatch):
  """An empty folder in which the executors' own folders are made."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
  (tmp_path / "folders").mkdir()
  return tmp_path / "folders"


@pytest.fixture
def local(home):
  executor = swe_executor.Local(LIMITS, files=FILES)
  executor.start()
  yield executor
  executor.stop()


def marked(number):
  """A time to sleep that no other process of this machine sleeps: `running` finds it."""
  return f"{number}{os.getpid():07}"


def running(marker):
  """Whether any process of this machine sleeps for this time."""
  for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      command = entry.read_bytes().split(b"\0")
    except OSError:
      continue
    if command[:2] == [b"sleep", marker.encode()]:
      return True
  return False


def test_files_and_the_patch_hold_what_was_done_and_leave_the_staging_area_alone(local):
  assert local.read("code.py") == "x = 1\n" and local.read("sub") == "note.txt\n"
  assert local.diff() == ""
  local.write("new/deep é.py", "y = 'ü'\n")
  local.write("code.py", "x = 2\n")
  assert local.read("new/deep é.py") == "y = 'ü'\n"
  patch = local.diff()
  assert "-x = 1\n+x = 2" in patch and "+y = 'ü'" in patch
  assert local.run("git diff --cached --stat").output == ""
  local.run("git add -A && git commit -q -m mine && echo z > more")
  later = local.diff()  # against the start, not the last commit
  assert "-x = 1\n+x = 2" in later and "+z" in later
  other = swe_executor.Local(LIMITS, files=FILES)
  other.start()
  try:
    assert other.run("git apply -", stdin=patch).code == 0
    assert other.diff() == patch
  finally:
    other.stop()
  with pytest.raises(OSError, match="No such file"):
    local.read("nothing.py")
  with pytest.raises(OSError, match="Is a directory"):
    local.write("sub", "text")


@pytest.fixture
def outside():
  """A file that everybody may write, in a folder that the sandbox has no folder of its own for."""
  with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
    pathlib.Path(folder).chmod(0o777)
    secret = pathlib.Path(folder, "secret.txt")
    secret.write_text("secret")
    secret.chmod(0o666)
    yield secret


def test_nothing_outside_its_folders_can_be_written_or_seen(local, outside):
  secret = outside
  targets = [
    secret,
    "/usr/bin/new",
    "/etc/passwd",
    "/new",
    f"{sys.prefix}/new",
  ]
  for target in targets:
    assert local.run(f"echo broken >> {target}").code != 0
    with pytest.raises(OSError):
      local.write(str(target), "broken")
  assert secret.read_text() == "secret" and not pathlib.Path("/usr/bin/new").exists()
  with pytest.raises(OSError, match="No such file"):
    local.read(str(secret))
  local.run(f"ln -s {secret} link; ln -s / root")  # a link is followed inside, where nothing is
  for path in ("link", f"root{secret}"):
    with pytest.raises(OSError):
      local.read(path)
    with pytest.raises(OSError):
      local.write(path, "broken")
  assert secret.read_text() == "secret"
  writable = {
    point
    for _, point, kind, options, *_ in map(str.split, local.read("/proc/mounts").splitlines())
    if options.split(",")[0] == "rw" and kind != "proc" and not point.startswith("/dev")
  }
  assert writable == {"/testbed", "/tmp", "/home/agent"}
  assert local.run("mount -o remount,rw /usr || umount /usr").code != 0
  leaves = (
    "unshare --user --map-root-user --mount sh -c 'mount -o remount,rw,bind /usr && touch /usr/new'"
  )
  assert local.run(leaves).code != 0 and not pathlib.Path("/usr/new").exists()


def test_it_sees_neither_the_network_nor_our_environment_nor_other_processes(local, monkeypatch):
  monkeypatch.setenv("MY_TOKEN", "secret")
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    code = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    with socket.create_connection(("127.0.0.1", port), 2):  # anybody else gets through
      server.accept()[0].close()
    result = local.run(f'python -c "{code}"')
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
      server.accept()
  assert result.code != 0 and ("unreachable" in result.output or "refused" in result.output)
  assert "secret" not in local.run("env").output
  assert local.run(f"kill -0 {os.getpid()}").code != 0
  privileges = local.run("grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status").output.split()
  assert privileges == ["CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


def test_a_hanging_command_is_killed_at_its_limit_with_all_its_children(local, home):
  begun, long, longer = time.monotonic(), marked(1), marked(2)
  result = local.run(f"trap '' TERM; setsid sleep {long} & echo up; sleep {long}", seconds=1.5)
  assert result.code is None and result.output.startswith("up\n")
  assert 1.5 <= time.monotonic() - begun < 60
  assert not running(long)
  local.run(
    f"nohup sleep {longer} > /dev/null 2>&1 &"
  )  # a command that ends takes its children along
  _wait(lambda: not running(longer))
  local.run("mkdir -p locked/in && chmod 0 locked /tmp")
  local.stop()
  local.stop()
  assert list(home.iterdir()) == []
  assert str(home) not in pathlib.Path("/proc/mounts").read_text()
  with pytest.raises(RuntimeError, match="not started"):
    local.run("echo")


def test_memory_files_processes_and_output_are_limited(local):
  assert "MemoryError" in local.run("python -c 'bytearray(1 << 30)'").output
  size = f"head -c {(swe_sandbox.FILE_MB + 1) << 20} /dev/zero > big; stat -c %s big"
  assert f"\n{swe_sandbox.FILE_MB << 20}\n" in "\n" + local.run(size).output
  many = local.run("for i in $(seq 300); do sleep 2 & done; jobs -p | wc -l")
  assert "Resource temporarily unavailable" in many.output
  long = local.run("seq 100000", chars=100)
  assert long.output.startswith("1\n2\n") and long.output.endswith("\n99999\n100000\n")
  assert len(long.output) < 160 and "characters left out" in long.output


def test_a_sandbox_ends_with_the_process_that_runs_it(tmp_path):
  long = marked(3)
  code = (
    "from memrl_jax.envs import swe_executor as s\n"
    "e = s.Local(s.Limits(60, 512), files={})\n"
    "e.start()\n"
    f"e.run('sleep {long}')\n"
  )
  environment = os.environ | {"TMPDIR": str(tmp_path)}
  parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
  try:
    _wait(lambda: running(long))
  finally:
    parent.send_signal(signal.SIGKILL)
    parent.wait()
  _wait(lambda: not running(long))


def _wait(condition, seconds=30):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


def test_a_commit_of_a_clone_comes_without_the_history_that_holds_its_solution(home, tmp_path):
  def git(*arguments):
    settings = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    command = ["git", "-C", str(clone), *settings, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

  clone = tmp_path / "me__thing"
  clone.mkdir()
  git("init", "-q")
  for text in ("broken", "solution"):
    (clone / "code.py").write_text(text)
    (clone / ".gitignore").write_text("kept.txt\n")
    (clone / "kept.txt").write_text("tracked all the same")
    git("add", "-A", "-f")
    git("commit", "-q", "-m", text)
  first = git("rev-parse", "HEAD~")
  executor = swe_executor.Local(LIMITS, repository=str(clone), commit=first)
  executor.start()
  try:
    assert executor.read("code.py") == "broken" and executor.diff() == ""
    assert executor.run(
      "git log --all --format=%s; git grep solution $(git rev-list --all)"
    ).output == ("base\n")
  finally:
    executor.stop()
  wrong = swe_executor.Local(LIMITS, repository=str(clone), commit="0" * 40)
  with pytest.raises(ValueError, match="no commit 0000"):
    wrong.start()
  assert list(home.iterdir()) == []


def test_where_no_sandbox_can_be_built_nothing_runs(home, monkeypatch):
  monkeypatch.setattr(swe_sandbox, "_refusal", lambda: "not permitted")
  executor = swe_executor.Local(LIMITS, files=FILES)
  with pytest.raises(RuntimeError, match=r"runs nothing unprotected.*\(not permitted\)"):
    executor.start()
  assert list(home.iterdir()) == []


def test_docker_is_asked_for_a_container_without_network_and_removes_it(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  docker = swe_executor.Docker(LIMITS, image="some/image")
  with pytest.raises(RuntimeError, match=r"cannot start some/image \(there is no docker command\)"):
    docker.start()
  log = tmp_path / "log"
  stand_in = tmp_path / "docker"  # answers as the command line does, and runs nothing
  stand_in.write_text(f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = exec ] && echo abc\nexit 0\n')
  stand_in.chmod(stand_in.stat().st_mode | stat.S_IEXEC)
  docker.start()
  assert docker.run("ls", seconds=3) == (0, "abc\n")
  docker.stop()
  docker.stop()
  calls = log.read_text()
  started = calls.partition("\n")[0]
  assert "--network=none" in started and "--memory=512m" in started
  assert started.endswith("some/image sleep infinity")
  assert "timeout --signal=KILL 3 bash -c" in calls and calls.count("rm --force memrl-swe-") == 1
