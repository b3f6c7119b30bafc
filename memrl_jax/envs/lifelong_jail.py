"""The first process of a small Linux machine: builds its file system, gives up its rights, and runs commands as root.

`lifelong_machine` starts it in fresh namespaces (mounts, processes, network, IPC, host name). It reads requests, one
JSON object a line, and answers each with one; when its input ends, it ends, and the kernel ends everything in the
machine with it. Once the old root is gone nothing is imported any more: whatever lies in the machine is the agent's.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import sys
import time

SYSTEM = (
  "usr",
  "bin",
  "sbin",
  "lib",
  "lib32",
  "lib64",
)  # shown as an overlay where no image is given
FOLDERS = (
  *("etc", "home", "media", "mnt", "opt", "root", "run/lock", "srv"),
  *("var/lib", "var/log", "var/spool/mail", "var/tmp"),
)
SETTINGS = (  # of /etc, copied where no image is given; no accounts, keys or passwords of the host
  *("alternatives", "bash.bashrc", "adduser.conf", "deluser.conf", "debian_version", "default"),
  *("host.conf", "issue", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "login.defs"),
  *("nsswitch.conf", "os-release", "pam.conf", "pam.d", "profile", "security", "shells", "skel"),
  *("terminfo", "vim", "inputrc", "protocols", "services", "mime.types"),
)
ACCOUNTS = {
  "passwd": "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
  "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
  "group": "root:x:0:\ndaemon:x:1:\nadm:x:4:\nsudo:x:27:\nusers:x:100:\nnogroup:x:65534:\n",
  "shadow": "root:*:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
  "gshadow": "root:*::\ndaemon:*::\nadm:*::\nsudo:*::\nusers:*::\nnogroup:*::\n",
  "hostname": "machine\n",
  "hosts": "127.0.0.1 localhost machine\n",
}
# Docker's capabilities, without devices, chroot and the network: chown, dac_override, fowner, fsetid, kill, setgid,
# setuid, audit_write.
KEPT = (0, 1, 3, 4, 5, 6, 7, 29)
HIDDEN = ("sys", "sysrq-trigger", "irq", "bus", "fs", "acpi", "scsi", "mtrr")  # of /proc: read-only
DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}

NOSUID, NODEV, NOEXEC, READ_ONLY, REMOUNT, BIND, REC = 2, 4, 8, 1, 32, 4096, 16384
DETACH = 2
SET_DUMPABLE, DROP_BOUND, NO_NEW_PRIVS = 4, 24, 38  # of prctl

POLL_S = 0.05
LIBC = ctypes.CDLL(None, use_errno=True)


def call(name, *arguments):
  """A system call by its C name; OSError where it fails."""
  given = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
  if getattr(LIBC, name)(*given) != 0:
    number = ctypes.get_errno()
    raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source, target, kind=None, flags=0, options=None):
  """mount(2) with texts."""
  texts = [text and os.fsencode(text) for text in (source, target, kind)]
  call("mount", *texts, flags, options and os.fsencode(options))


# The file system.


def build(image, disk_mb):
  """Makes the machine's files in a tmpfs and turns it into the root; the host's files are gone afterwards."""
  scratch = (
    "/proc"  # any folder does, since nobody else sees these mounts, and this one is always there
  )
  mount("tmpfs", scratch, "tmpfs", NOSUID | NODEV, f"size={disk_mb}m,nr_inodes=200000,mode=755")
  root = f"{scratch}/root"
  os.mkdir(root)
  if image:
    overlay(image, scratch, root)
  else:
    mount(root, root, None, BIND)
    furnish(root, scratch)
  os.chdir(root)
  call("pivot_root", b".", b".")
  call("umount2", b".", DETACH)
  os.chdir("/")
  for folder in ("proc", "dev", "tmp"):
    os.makedirs(f"/{folder}", exist_ok=True)
  os.chmod("/tmp", 0o1777)
  mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
  for path in (f"/proc/{name}" for name in HIDDEN):
    if os.path.exists(path):
      mount(path, path, None, BIND | REC)
      mount(path, path, None, BIND | REMOUNT | READ_ONLY | NOSUID | NODEV | NOEXEC)
  mount("tmpfs", "/dev", "tmpfs", NOSUID | NOEXEC, "size=16m,mode=755")
  for name, minor in DEVICES.items():
    os.mknod(f"/dev/{name}", 0o20666, os.makedev(1, minor))
    os.chmod(f"/dev/{name}", 0o666)
  for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
    os.symlink(f"/proc/self/fd{target}", f"/dev/{name}")
  os.mkdir("/dev/shm")
  os.chmod("/dev/shm", 0o1777)
  call("sethostname", b"machine", 7)


def overlay(lower, scratch, target):
  """Mounts a folder at `target` so that changes to it go to the tmpfs."""
  layers = f"{scratch}/layers/{os.path.basename(target)}"
  for name in ("upper", "work"):
    os.makedirs(f"{layers}/{name}")
  os.makedirs(target, exist_ok=True)
  options = f"lowerdir={lower},upperdir={layers}/upper,workdir={layers}/work"
  mount("overlay", target, "overlay", NOSUID | NODEV, options)


def furnish(root, scratch):
  """A root folder from this machine's programs, with accounts and settings of its own."""
  for name in SYSTEM:
    if os.path.islink(f"/{name}"):
      os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    elif os.path.isdir(f"/{name}"):
      overlay(f"/{name}", scratch, f"{root}/{name}")
  for name in FOLDERS:
    os.makedirs(f"{root}/{name}")
  os.chmod(f"{root}/root", 0o700)
  os.chmod(f"{root}/var/tmp", 0o1777)
  for name in SETTINGS:
    if os.path.isdir(f"/etc/{name}"):
      shutil.copytree(f"/etc/{name}", f"{root}/etc/{name}", symlinks=True)
    elif os.path.lexists(f"/etc/{name}"):
      shutil.copy2(f"/etc/{name}", f"{root}/etc/{name}", follow_symlinks=False)
  for name, text in ACCOUNTS.items():
    with open(f"{root}/etc/{name}", "w", encoding="ascii") as file:
      file.write(text)
    os.chmod(f"{root}/etc/{name}", 0o600 if "shadow" in name else 0o644)


def give_up_rights():
  """Keeps the capabilities of KEPT, for itself and for whatever it runs, and cannot be traced."""
  for capability in range(64):
    if capability not in KEPT:
      LIBC.prctl(
        DROP_BOUND, ctypes.c_ulong(capability), *[ctypes.c_ulong(0)] * 3
      )  # newest are unknown
  call("prctl", NO_NEW_PRIVS, 1, 0, 0, 0)
  bits = sum(1 << capability for capability in KEPT)
  header = (ctypes.c_uint32 * 2)(0x20080522, 0)
  words = (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0)  # effective, permitted, inheritable, twice
  call("capset", header, words)
  call("prctl", SET_DUMPABLE, 0, 0, 0, 0)


# Commands.


class Machine:
  """Runs commands, and ends what exceeds its limits."""

  def __init__(self, settings):
    self._processes, self._memory = settings["processes"], settings["memory_mb"] << 20
    self._file, self._chars = settings["file_mb"] << 20, settings["chars"]
    self._environment = settings["environment"]
    self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    self._page = resource.getpagesize()

  def run(self, script, seconds):
    """Runs bash on a script: its exit status, or None and why it was ended, and its output."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    child = os.fork()
    if child == 0:
      self._become(script, writing, seconds)
    os.close(writing)
    output, end = Output(self._chars), time.monotonic() + seconds
    code, ended = None, ""
    while code is None and not ended:
      ready, _, _ = select.select([0, reading], [], [], POLL_S)
      if 0 in ready:  # nothing is asked for meanwhile, so the input has ended
        os._exit(0)
      output.take(reading)
      code = reap(child)
      if code is None:
        ended = "time" if time.monotonic() > end else self.exceeded()
        if not output.open:
          time.sleep(POLL_S / 10)  # it closed its output, which is readable ever since, and goes on
    if ended:
      self.end_all()
    output.take(reading)
    os.close(reading)
    return {"code": code, "why": ended, "output": output.text()}

  def _become(self, script, output, seconds):
    try:
      os.setsid()
      os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
      os.dup2(output, 1)
      os.dup2(output, 2)
      for name, limit in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, self._memory),
        (resource.RLIMIT_FSIZE, self._file),
        (resource.RLIMIT_NPROC, self._processes),  # counts for everybody but root
        (resource.RLIMIT_NOFILE, 1024),
        (resource.RLIMIT_CORE, 0),
      ):
        resource.setrlimit(name, (limit, limit))
      for number in (signal.SIGPIPE, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
      os.umask(0o022)
      os.execve("/bin/bash", ["bash", "-c", script], self._environment)
    except (OSError, ValueError) as error:
      os.write(2, f"the command cannot be run: {error}\n".encode())
    finally:
      os._exit(126)

  def others(self):
    """The processes of the machine besides this one."""
    return [name for name in os.listdir(self._proc) if name.isdigit() and name != "1"]

  def exceeded(self):
    """Which limit all processes together exceed, "" where none; root has no limit of processes in the kernel."""
    names = self.others()
    if len(names) > self._processes:
      return "processes"
    used = 0
    for name in names:
      try:
        file = os.open(f"{name}/statm", os.O_RDONLY, dir_fd=self._proc)
        try:
          _, resident, shared, *_ = os.read(file, 200).split()
        finally:
          os.close(file)
      except (OSError, ValueError):  # it has ended
        continue
      used += (int(resident) - int(shared)) * self._page
    return "memory" if used > self._memory else ""

  def end_all(self):
    """Kills everything but this process, until nothing is left."""
    while self.others():
      with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
      if reap_others():
        return
      time.sleep(0.001)


class Output:
  """The beginning and the end of what is printed."""

  def __init__(self, chars):
    self._half, self._head, self._tail, self._size = chars // 2, b"", b"", 0
    self.open = True

  def take(self, file):
    """Reads what is there, at most 1 MiB."""
    for _ in range(16):
      try:
        data = os.read(file, 1 << 16)
      except BlockingIOError:
        return
      self.open = bool(data)
      if not data:
        return
      self._size += len(data)
      room = self._half - len(self._head)
      self._head += data[:room]
      self._tail = (self._tail + data[room:])[-self._half :]

  def text(self):
    """What was kept, with a remark on what was left out."""
    cut = self._size - len(self._head) - len(self._tail)
    remark = f"\n[{cut} characters left out]\n".encode() if cut else b""
    return (self._head + remark + self._tail).decode("utf-8", "replace")


def reap(child):
  """The exit status of a child that has ended, None before; others that have ended are forgotten."""
  code = None
  while True:
    try:
      found, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
      return code
    if found == 0:
      return code
    if found == child:
      code = os.waitstatus_to_exitcode(status)
      code = code if code >= 0 else 128 - code


def reap_others():
  """Forgets children that have ended; whether none is left."""
  while True:
    try:
      if os.waitpid(-1, os.WNOHANG)[0] == 0:
        return False
    except ChildProcessError:
      return True


def requests(machine):
  """The requests, one after another; meanwhile what still runs is watched."""
  waiting = b""
  while True:
    while b"\n" not in waiting:
      ready, _, _ = select.select([0], [], [], POLL_S if machine.others() else None)
      if ready:
        data = os.read(0, 1 << 16)
        if not data:
          return
        waiting += data
      else:
        reap_others()
        if machine.exceeded():
          machine.end_all()
    line, _, waiting = waiting.partition(b"\n")
    yield json.loads(line)


def answer(value):
  """Writes an answer, whole."""
  data = json.dumps(value).encode() + b"\n"
  while data:
    data = data[os.write(1, data) :]


def main():
  """Serves until the input ends."""
  settings = json.loads(sys.argv[1])
  signal.signal(
    signal.SIGINT, signal.SIG_DFL
  )  # a first process hears no signal that it has no handler for
  try:
    build(settings["image"], settings["disk_mb"])
    sys.path.clear()
    sys.meta_path.clear()
    give_up_rights()
    machine = Machine(settings)
  except OSError as error:
    answer({"error": str(error)})
    return
  answer({"error": ""})
  for request in requests(machine):
    answer(machine.run(request["script"], request["seconds"]))


if __name__ == "__main__":
  main()
