"""What root in a machine of an OS task can and cannot do, and that nothing of it stays behind."""

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from memrl_jax.envs import lifelong_machine, swe_sandbox
from memrl_jax.envs.swe_sandbox import Limits

if lifelong_machine.refused():
  pytest.skip(
    f"a machine needs root and Linux namespaces: {lifelong_machine.refused()}",
    allow_module_level=True,
  )

LIMITS = Limits(seconds=20.0, memory_mb=256)


@pytest.fixture
def home(tmp_path, monkeypatch):
  """An empty folder for temporary files: machines make none."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "folders"))
  (tmp_path / "folders").mkdir()
  return tmp_path / "folders"


@pytest.fixture
def machine(home):
  made = lifelong_machine.Machine(LIMITS)
  made.start()
  yield made
  made.stop()


def marked(number):
  """A time to sleep that no other process of this machine sleeps: `running` finds it."""
  return f"{number}{os.getpid():07}"


def running(marker):
  """Whether any process of the host's machine sleeps for this time."""
  for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
      command = entry.read_bytes().split(b"\0")
    except OSError:
      continue
    if command[:2] == [b"sleep", marker.encode()]:
      return True
  return False


def wait(condition, seconds=30):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.02)


def test_root_makes_users_and_files_that_stay_until_the_end(machine):
  assert machine.run("groupadd devs && useradd -m -g devs ann && touch /data").code == 0
  assert machine.run("chown ann:devs /data && chmod 640 /data && cd /opt").code == 0
  assert machine.run("stat -c %U:%G:%a /data; pwd; id -un").output == "ann:devs:640\n/\nroot\n"
  assert machine.run("su ann -c 'echo x > /data; id -un; cat /etc/shadow'").output.startswith(
    "ann\n"
  )
  assert machine.run("printf hi; printf lo >&2; exit 3") == (3, "hilo")
  assert machine.run("kill -TERM $$").code == 128 + signal.SIGTERM


def test_the_host_is_neither_changed_nor_seen(machine, tmp_path):
  secret = tmp_path / "secret.txt"
  secret.write_text("secret")
  before = os.stat("/dev/null").st_mode, pathlib.Path("/etc/passwd").read_text()
  machine.run(
    "useradd eve; echo x > /usr/bin/new-program; chmod 0 /dev/null; rm -rf /usr/share/doc"
  )
  assert machine.run("test -e /usr/bin/new-program && ! test -e /usr/share/doc").code == 0
  after = os.stat("/dev/null").st_mode, pathlib.Path("/etc/passwd").read_text()
  assert after == before and not pathlib.Path("/usr/bin/new-program").exists()
  assert pathlib.Path("/usr/share/doc").exists()
  for path in (secret, __file__, sys.prefix + "/pyvenv.cfg", "/etc/ssl"):
    assert machine.run(f"cat {path}").code != 0
  assert machine.run("env").output.count("\n") < 12
  # A link to the host leads nowhere, also for what is set up in the next machine.
  assert machine.run(f"ln -s {secret} /link; cat /link").code != 0


@pytest.mark.parametrize(
  "command",
  [
    "mount -t tmpfs x /mnt",
    "umount /proc",
    "mknod /tmp/disk b 8 0",
    "chroot /",
    "hostname other",
    "date -s 2001-01-01",
    "nice -n -5 true 2>&1 | grep -v denied",
    "nsenter -t 1 -m true",
    "cat /proc/1/environ",
    "ls /proc/1/root",
    "echo 1 > /proc/sys/kernel/panic",
    "dd if=/dev/mem count=1",
    "dmesg",
    "kill -0 {pid}",
    "test $(ls /proc | grep -c '^[0-9]') -gt 20",
  ],
)
def test_root_in_a_machine_is_not_root_of_the_host(machine, command):
  assert machine.run(command.format(pid=os.getpid())).code not in (0, None)


def test_its_first_process_hears_no_signals_and_has_few_rights(machine):
  machine.run("kill -KILL 1; kill -INT 1; kill -TERM 1; kill -STOP 1")
  status = machine.run("cat /proc/1/status /proc/self/status").output
  kept = sum(1 << number for number in (0, 1, 3, 4, 5, 6, 7, 29))
  found = re.findall(r"Cap(?:Prm|Eff|Bnd):\s*(\w+)", status)
  assert len(found) == 6 and {int(bits, 16) for bits in found} == {kept}
  assert re.findall(r"NoNewPrivs:\s*(\d)", status) == ["1", "1"]


def test_there_is_no_network(machine):
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port), 2):  # anybody else gets through
      server.accept()[0].close()
    assert machine.run(f"exec 3<>/dev/tcp/127.0.0.1/{port}").code != 0
    server.settimeout(0.1)
    with pytest.raises(TimeoutError):
      server.accept()
  assert machine.run("cat /proc/net/dev | tail -n +3 | grep -v lo:").output == ""


def test_what_exceeds_a_limit_is_ended_with_all_its_children(machine):
  begun, long, longer = time.monotonic(), marked(1), marked(2)
  late = machine.run(f"trap '' TERM; setsid sleep {long} & echo up; sleep {longer}", seconds=1.0)
  assert late.code is None and late.output == "up\n\n[stopped: it took more than 1 seconds]"
  assert not running(long) and not running(longer) and time.monotonic() - begun < 30
  bomb = machine.run("f() { f | f & }; f; sleep 15")
  assert bomb.code is None and bomb.output.endswith("[stopped: too many processes]")
  hog = "python3 -c \"x = 'a' * (150 << 20); import time; time.sleep(15)\" &"
  assert machine.run(f"{hog} {hog} {hog} wait").output.endswith("more than 256 MB of memory]")
  assert machine.run("head -c 300000000 /dev/zero > /tmp/big").code != 0
  size = int(machine.run("stat -c %s /tmp/big").output)
  assert size <= swe_sandbox.FILE_MB << 20
  assert (
    "No space left"
    in machine.run(
      "for i in 1 2 3 4 5 6; do head -c 60000000 /dev/zero > /tmp/f$i; done; rm /tmp/f?"
    ).output
  )
  long = lifelong_machine.Machine(LIMITS, chars=100)
  long.start()
  output = long.run("seq 100000").output
  long.stop()
  assert output.startswith("1\n2\n") and output.endswith("\n99999\n100000\n")
  assert len(output) < 160 and "characters left out" in output
  assert machine.run("echo still there").output == "still there\n"


def test_what_runs_on_is_watched_and_ends_with_the_machine(machine, home):
  long, longer = marked(3), marked(4)
  assert machine.run(f"sleep {long} & echo started").output == "started\n"
  wait(lambda: running(long))
  assert machine.run("pgrep -c sleep || ls -d /proc/[0-9]* | wc -l").output != "0\n"
  many = f"for i in $(seq 300); do sleep {longer} & done > /dev/null 2>&1"
  machine.run(f"(sleep 0.3; {many}) & true")  # grows when nobody waits for it
  wait(lambda: not running(long))
  wait(lambda: not running(longer))
  machine.run(f"sleep {long} & true")
  machine.run("mkdir -p /locked/in && chmod 0 /locked /tmp")
  machine.stop()
  machine.stop()
  assert not running(long)
  assert list(home.iterdir()) == []
  assert "lowerdir=/usr" not in pathlib.Path("/proc/mounts").read_text()
  with pytest.raises(RuntimeError, match="not running"):
    machine.run("true")


def test_a_machine_ends_with_the_process_that_holds_it(tmp_path):
  long, longer = marked(5), marked(6)
  code = (
    "from memrl_jax.envs import lifelong_machine as m\n"
    "machine = m.Machine(m.Limits(60, 512))\n"
    "machine.start()\n"
    f"machine.run('sleep {long} & true')\n"
    f"machine.run('sleep {longer}')\n"
  )
  environment = os.environ | {"TMPDIR": str(tmp_path)}
  parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
  try:
    wait(lambda: running(long) and running(longer))
  finally:
    parent.send_signal(signal.SIGKILL)
    parent.wait()
  wait(lambda: not running(long) and not running(longer))
  assert list(tmp_path.iterdir()) == []


def test_programs_and_modules_of_the_machine_cannot_take_over_its_first_process(machine):
  program = "#!/bin/sh\necho taken > /taken\n"
  machine.run(
    f"for name in bash python3 env unshare; do printf '{program}' > /usr/local/bin/$name; done"
  )
  machine.run("chmod +x /usr/local/bin/*; for name in json os zlib encodings; do echo 'open(\"/taken\", \"w\")' "
              f"> /tmp/$name.py; mkdir -p {sys.prefix}; cp /tmp/$name.py {sys.prefix}; done; echo /x > /etc/ld.so.preload")  # fmt: skip
  assert machine.run("! test -e /taken").code == 0
  assert machine.run("grep CapBnd /proc/1/status").output.strip().endswith("200000fb")


def test_an_image_is_the_lower_layer_and_stays_as_it_is(home, tmp_path):
  image = tmp_path / "image"
  (image / "bin").mkdir(parents=True)
  programs = [shutil.which(name) for name in ("bash", "cat", "ls")]
  for program in programs:
    shutil.copy(program, image / "bin")
    for library in re.findall(r"(/\S+) \(", subprocess.check_output(["ldd", program], text=True)):
      (image / library[1:]).parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(library, image / library[1:])
  (image / "note").write_text("from the image\n")
  machine = lifelong_machine.Machine(LIMITS, image=str(image))
  machine.start()
  try:
    assert machine.run("cat /note; echo changed > /note; cat /note").output == (
      "from the image\nchanged\n"
    )
    assert machine.run("ls /usr/bin").code != 0
  finally:
    machine.stop()
  assert (image / "note").read_text() == "from the image\n"


def test_where_no_machine_can_be_made_the_reason_is_said(home, monkeypatch):
  monkeypatch.setattr(lifelong_machine, "refused", lambda: "we are not root")
  with pytest.raises(RuntimeError, match=r"permits none \(we are not root\); run as root"):
    lifelong_machine.Machine(LIMITS).start()
  broken = lifelong_machine.Machine(LIMITS, image="/nowhere")
  with pytest.raises(RuntimeError, match="No such file"):
    broken._start()
  assert list(home.iterdir()) == []
