"""Who may use the service: keys, of which only hashes are kept, and for each tenant a memory of its own.

  FOLDER/keys.json          tenants and the hashes of their keys; read again whenever it has changed
  FOLDER/tenants/NAME/      the memory: its own files, numbers and versions, so that no query can cross over
  FOLDER/snapshots/NAME/    snapshots of it
  FOLDER/audit.jsonl        who did what when

Without any tenant the service is open, on this machine alone, and everybody is the tenant "default".
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import pathlib
import re
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from memrl_jax.runtime.memory import TENANT, Memory, Refused

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_KEY = re.compile(r"mk_[A-Za-z0-9_-]{43}")


class Caller(NamedTuple):
  """Who asks: a tenant and which of its keys ("": the service is open)."""

  tenant: str
  key: str


class Keys:
  """The file of keys. A key is 256 random bits, so a plain hash of it is no help to a thief."""

  def __init__(self, folder: str | os.PathLike):
    self.folder = pathlib.Path(folder).expanduser().absolute()
    self._path = self.folder / "keys.json"
    self._lock = threading.Lock()
    self._stamp: tuple[int, int, int] | None = None
    self._tenants: dict[str, dict[str, Any]] = {}
    self._callers: dict[str, Caller] = {}
    self._look()

  def tenants(self) -> dict[str, dict[str, Any]]:
    """By name: {"keys": {key id: {"sha256", "made"}}}."""
    self._look()
    return self._tenants

  def caller(self, key: str) -> Caller | None:
    """Whose key this is."""
    self._look()
    return self._callers.get(_hash(key)) if _KEY.fullmatch(key) else None

  def add(self, tenant: str) -> tuple[str, str]:
    """A new key for a tenant, old or new: (its id, the key, which nobody can look up later)."""
    if not _NAME.fullmatch(tenant):
      raise Refused(
        f"{tenant!r:.80} is no tenant's name; use up to 63 of a-z, 0-9, - and _, a letter or digit first"
      )
    key, id = f"mk_{secrets.token_urlsafe(32)}", secrets.token_hex(4)
    made = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    tenants = json.loads(json.dumps(self.tenants()))
    tenants.setdefault(tenant, {"keys": {}})["keys"][id] = {"sha256": _hash(key), "made": made}
    self._write(tenants)
    return id, key

  def revoke(self, tenant: str, id: str | None = None) -> int:
    """Takes back one key of a tenant, or all; its memory stays. Returns how many were taken back."""
    tenants = json.loads(json.dumps(self.tenants()))
    keys = tenants.get(tenant, {"keys": {}})["keys"]
    gone = [name for name in keys if id in (None, name)]
    if not gone:
      raise Refused(f"tenant {tenant!r} has no key {id or ''}".rstrip() + "; see `tenant list`")
    for name in gone:
      del keys[name]
    self._write(tenants)
    return len(gone)

  def _look(self) -> None:
    try:
      found = self._path.stat()
      stamp = found.st_mtime_ns, found.st_size, found.st_ino
    except FileNotFoundError:
      if self._stamp is not None:  # closed rather than open to everybody
        raise Refused(f"{self._path} is gone; restore it, or start the service again") from None
      return
    if stamp == self._stamp:
      return
    with self._lock:
      try:
        tenants = json.loads(self._path.read_text())["tenants"]
        callers = {
          one["sha256"]: Caller(tenant, id)
          for tenant, record in tenants.items()
          for id, one in record["keys"].items()
        }
      except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{self._path} cannot be read ({error}); restore it from a copy") from None
      self._tenants, self._callers, self._stamp = tenants, callers, stamp

  def _write(self, tenants: dict[str, Any]) -> None:
    self.folder.mkdir(parents=True, exist_ok=True)
    partial = self._path.with_name(f".keys.{os.getpid()}.partial")
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w") as file:
      json.dump({"tenants": tenants}, file, indent=2)
      file.flush()
      os.fsync(file.fileno())
    partial.replace(self._path)
    self._look()


class Memories:
  """The open memories of all tenants, each opened when it is first asked for."""

  def __init__(self, folder: pathlib.Path, open_one: Callable[[pathlib.Path], Memory]):
    self.folder, self._open_one = folder, open_one
    self._lock, self._closed = threading.Lock(), False
    self._locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
    self._open: dict[str, Memory] = {}

  def of(self, tenant: str) -> Memory:
    found = self._open.get(tenant)
    if found is not None:
      return found
    with self._lock:
      lock = self._locks[tenant]
    with lock:  # the others do not wait while one memory is read
      if self._closed:
        raise Refused("the service is stopping; ask again in a moment")
      if tenant not in self._open:
        memory = self._open_one(place(self.folder, tenant))
        others = set(memory.episodic.memory.store.tenants()) - {TENANT}
        if others:
          memory.close()
          raise Refused(
            f"the memory of tenant {tenant} holds entries of {sorted(others)[0]!r}; export that one, and "
            "import it over the service"
          )
        self._open[tenant] = memory
      return self._open[tenant]

  def close(self) -> None:
    with self._lock:
      self._closed = True
      for memory in self._open.values():
        memory.close()
      self._open.clear()


def place(folder: pathlib.Path, tenant: str) -> pathlib.Path:
  """Where a tenant's memory is; a name that is no name reaches no file."""
  if not _NAME.fullmatch(tenant):
    raise Refused(f"{tenant!r:.80} is no tenant's name")
  return folder / "tenants" / tenant


def _hash(key: str) -> str:
  return hashlib.sha256(key.encode()).hexdigest()
