"""Runs a shell command so that it sees one folder, no network, and little of the machine's resources.

Every command gets fresh Linux namespaces: no network device at all, its own process table (which dies with it),
and a file system made for it: /usr, /etc and this Python read-only, its own folder as /testbed, /tmp and
/home/agent, nothing else. It runs without privileges, under an account of its own where we are root. Where
namespaces are refused nothing runs. This keeps honest and careless programs in; it is no jail against
exploits of the kernel, and the sum of memory and disk over processes is limited only by their number.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, NamedTuple

WORK = "/testbed"  # where SWE-bench's images hold the repository
WRITABLE = {
  "testbed": WORK,
  "tmp": "/tmp",
  "home": "/home/agent",
}  # in the folder -> in the sandbox

PROCESSES = 128  # processes and threads
FILE_MB = 64  # largest file, and largest output
GRACE_S = (
  5.0  # how long after its limit a command that ended its own watchdog is killed from outside
)

ENVIRONMENT = {
  "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
  "HOME": "/home/agent",
  "TMPDIR": "/tmp",
  "LANG": "C.UTF-8",
  "TZ": "UTC",
  "PAGER": "cat",
  "OMP_NUM_THREADS": "1",
  "PYTHONHASHSEED": "0",
  "PYTHONDONTWRITEBYTECODE": "1",  # compiled files would show up in the diff
  **{f"GIT_{who}_NAME": "agent" for who in ("AUTHOR", "COMMITTER")},
  **{f"GIT_{who}_EMAIL": "agent@localhost" for who in ("AUTHOR", "COMMITTER")},
  **{f"GIT_{who}_DATE": "2000-01-01T00:00:00Z" for who in ("AUTHOR", "COMMITTER")},
}


class Limits(NamedTuple):
  """Wall-clock and CPU seconds of a command, and the address space of each of its processes."""

  seconds: float
  memory_mb: int


class Result(NamedTuple):
  """What a command printed, both streams together. `code` is its exit status, None where the limit of time ended it."""

  code: int | None
  output: str


# Namespaces by util-linux. The new root is a small tmpfs; the old one is unmounted before anything runs.
_BUILD = """
set -e
mount -t tmpfs -o size=1m,mode=755,nosuid tmpfs "$root"
cd "$root"
mkdir -p old proc dev/shm
for pair in $writable; do
  mkdir -p ".${pair#*:}"
  mount -o bind,nosuid,nodev "$folder/${pair%%:*}" ".${pair#*:}"
done
for path in $readable; do
  mkdir -p ".$path"
  mount -o bind,ro,nosuid,nodev "$path" ".$path"
done
[ -z "$links" ] || cp -P $links .
for name in null zero full random urandom; do
  : > "dev/$name"
  mount --bind "/dev/$name" "dev/$name"
done
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o size=64m,mode=1777,nosuid,nodev tmpfs dev/shm
mount -t proc -o nosuid,nodev,noexec proc proc
mount -o bind,ro,nosuid,nodev,noexec proc/sys proc/sys
pivot_root . old
umount -l old
rmdir old
mount -o remount,ro,nosuid tmpfs /
cd /testbed
set +e
"$@"
"""

_accounts = itertools.count()


def account() -> int:
  """A user id of its own for each of 100 sandboxes of a process: limits on processes count by user."""
  return 1_000_000_000 + os.getpid() % 10_000_000 * 100 + next(_accounts) % 100


def run(
  command: str,
  folder: str,
  limits: Limits,
  *,
  stdin: str = "",
  uid: int,
  chars: int,
  shown: tuple[str, ...] = (),
) -> Result:
  """Runs bash on a command in the sandbox of a folder, which holds the folders of WRITABLE.

  Of a longer output the first and last `chars` / 2 are kept. `shown` are further folders of this machine
  that the command may read.

  Raises:
    RuntimeError: this machine does not permit namespaces.
  """
  refusal = _refusal()
  if refusal:
    raise RuntimeError(
      f"the sandbox runs nothing unprotected, and this machine permits no Linux namespaces ({refusal}); run as root or "
      "with unprivileged user namespaces, install bubblewrap, or, for SWE tasks, choose docker (config.env.executor)"
    )
  return _run(command, folder, limits, stdin, uid, chars, shown)


@functools.cache
def _refusal() -> str:
  """Why no sandbox can be built here; "" when one can."""
  if sys.platform != "linux":
    return f"it runs {sys.platform}"
  with tempfile.TemporaryDirectory(prefix="memrl-swe-") as folder:
    prepare(folder, uid := account())
    try:
      result = _run("echo alive", folder, Limits(30.0, 512), "", uid, 500)
    except FileNotFoundError as error:
      return str(error)
  return "" if result == Result(0, "alive\n") else result.output.strip() or "it was killed"


@functools.cache
def _rooted() -> bool:
  """Whether we are root and may run as any account: a container's root often may not."""
  if os.geteuid() != 0:
    return False
  with open("/proc/self/uid_map", encoding="ascii") as accounts:
    return accounts.read().split() == ["0", "0", str(2**32 - 1)]


def prepare(folder: str, uid: int) -> None:
  """Makes the folders of WRITABLE, which belong to the sandbox's account."""
  for name in ("root", *WRITABLE):
    os.makedirs(f"{folder}/{name}", exist_ok=True)
  own(folder, uid)


def own(path: str, uid: int) -> None:
  """Gives a folder and what is in it to a sandbox's account."""
  if _rooted():
    subprocess.run(["chown", "-R", "-h", f"{uid}:{uid}", path], check=True)


def _run(
  command: str,
  folder: str,
  limits: Limits,
  stdin: str,
  uid: int,
  chars: int,
  shown: tuple[str, ...] = (),
) -> Result:
  inner = ["prlimit", *_rlimits(limits), "bash", "-c", command]
  rooted, bubblewrap = _rooted(), shutil.which("bwrap")
  if not rooted and bubblewrap:
    argv = [bubblewrap, *_bubblewrap(folder, shown), *_watch(limits), *inner]
  else:
    drop = ["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    drop += [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if rooted else []
    argv = [*_unshare(rooted, folder, shown), *_watch(limits), *drop, *inner]
  begun = time.monotonic()
  with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
    given.write(stdin.encode())
    given.seek(0)
    process = subprocess.Popen(
      argv,
      stdin=given,
      stdout=printed,
      stderr=subprocess.STDOUT,
      cwd="/",
      env=ENVIRONMENT,
      start_new_session=True,
    )
    try:
      code: int | None = process.wait(limits.seconds + GRACE_S)
    except subprocess.TimeoutExpired:
      code = None
    finally:
      if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # a namespace ends with its first process
        process.wait()
    late = code == KILLED and time.monotonic() - begun >= limits.seconds
    return Result(None if late else code, clip(printed, chars))


KILLED = 128 + signal.SIGKILL


def _watch(limits: Limits) -> list[str]:
  """The watchdog within the namespace: when it ends the namespace, the kernel has ended all of it."""
  return ["timeout", "--signal=KILL", str(limits.seconds)]


def _rlimits(limits: Limits) -> list[str]:
  return [
    f"--cpu={int(limits.seconds) + 1}",
    f"--as={limits.memory_mb << 20}",
    f"--fsize={FILE_MB << 20}",
    f"--nproc={PROCESSES}",
    "--core=0",
  ]


def _readable(shown: tuple[str, ...]) -> list[str]:
  """What is shown read-only: the system's programs, this Python where it lies elsewhere, and `shown`."""
  system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc"]
  pythons = sorted({os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix})
  found: list[str] = []
  for path in [*filter(os.path.exists, system), *pythons, *sorted(shown)]:
    if not any(path == above or path.startswith(f"{above}/") for above in found):
      found.append(path)
  return found


def _linked(path: str) -> bool:
  """Whether it is a link of the root folder, as /bin is where it belongs to /usr."""
  return os.path.dirname(path) == "/" and os.path.islink(path)


def _unshare(rooted: bool, folder: str, shown: tuple[str, ...]) -> list[str]:
  readable = _readable(shown)
  user = [] if rooted else ["--user", "--map-root-user"]
  named = {
    "root": f"{folder}/root",
    "folder": folder,
    "writable": " ".join(f"{name}:{path}" for name, path in WRITABLE.items()),
    "readable": " ".join(path for path in readable if not _linked(path)),
    "links": " ".join(filter(_linked, readable)),
  }
  return [
    *("setpriv", "--pdeathsig=KILL"),  # the sandbox ends with us, however we end
    *("unshare", *user, "--net", "--mount", "--pid", "--ipc", "--uts", "--fork"),
    *("--kill-child=KILL", "env", *(f"{key}={value}" for key, value in named.items())),
    *("sh", "-c", _BUILD, "sh", "env", *(f"--unset={key}" for key in named)),
  ]


def _bubblewrap(folder: str, shown: tuple[str, ...]) -> list[str]:
  visible = [
    part
    for path in _readable(shown)
    for part in (
      ("--symlink", os.readlink(path), path) if _linked(path) else ("--ro-bind", path, path)
    )
  ]
  own = [part for name, path in WRITABLE.items() for part in ("--bind", f"{folder}/{name}", path)]
  alone = ["--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
  return [
    *alone,
    "--dev",
    "/dev",
    "--proc",
    "/proc",
    *own,
    *visible,
    "--remount-ro",
    "/",
    "--chdir",
    WORK,
  ]


def clip(printed: IO[bytes], chars: int) -> str:
  """The text of a file, its middle left out where it is longer than `chars`."""
  size = printed.seek(0, os.SEEK_END)
  printed.seek(0)
  if size <= chars:
    return printed.read().decode(errors="replace")
  head = printed.read(chars // 2)
  printed.seek(size - chars // 2)
  cut = f"\n[{size - chars // 2 * 2} characters left out]\n"
  return head.decode(errors="replace") + cut + printed.read().decode(errors="replace")
