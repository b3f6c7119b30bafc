"""Servers of several hosts: new weights are written once, whole, and every server is told once, or nobody goes on."""

import os
import pathlib
import socket
import subprocess
import sys

from memrl_jax.sampling import remote
from memrl_jax.training import hosts, servers

ROOT = pathlib.Path(hosts.__file__).parents[2]


def urls_of(monkeypatch, url, count):
  found = []
  for host in range(count):
    monkeypatch.setattr(hosts, "_job", hosts._Job(count, host, 45.0))
    found.append(servers.asked(remote.RemoteConfig(url=url)).url)
  return found


def test_each_host_asks_servers_of_its_own_where_there_are_enough(monkeypatch):
  three = "http://a:1,http://b:1,http://c:1"
  assert urls_of(monkeypatch, three, 2) == ["http://a:1", "http://b:1,http://c:1"]
  assert urls_of(monkeypatch, three, 3) == three.split(",")
  assert urls_of(monkeypatch, three, 4) == [three] * 4


PAIR = """
import contextlib, pathlib, sys
import jax, numpy as np
from memrl_jax.models import tiny, weights
from memrl_jax.sampling import remote
from memrl_jax.training import hosts, mesh, servers
address, me, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hosts.join(address, 2, me, seconds=20)

place = mesh.placement(mesh.make(mesh.MeshConfig(fsdp=2)))
cfg, split = weights.load_directory(tiny.directory("darkroom"), place=place)
_, whole = tiny.load("darkroom")
assert not split["layers"]["qkv"].is_fully_replicated
assert weights.fingerprint(split) == weights.fingerprint(whole)

class Stub:
  def __init__(self, url, version, gone=False):
    self.config = remote.RemoteConfig(url=url, weights=folder)
    self.version, self.push_s, self.said, self._gone = version, 0.0, [], gone

  def push(self, directory, version):
    if self._gone:
      raise remote.RemoteError(f"no server answers at {self.config.url}")
    (pathlib.Path(directory) / "model.safetensors").stat()
    self.said.append("told")
    self.version = version

  def adopt(self, directory, version):
    self.said.append("knows")
    self.version = version

def push(client, save=None):
  named = weights.tensors(cfg, split)
  write = lambda path: weights.save_tensors(path, cfg, named)
  servers.push(client, (lambda path: save(named)) if save else write, named)

def fails(kind, said, *arguments):
  try:
    push(*arguments)
  except kind as error:
    assert str(error) == said, error
  else:
    raise SystemExit("nothing was raised")

own = Stub(f"http://host{me}:1", version=3 * me)
push(own)
assert own.said == ["told"] and own.version == 4, (own.said, own.version)
shared = Stub("http://a:1,http://b:1", version=own.version)
push(shared)
assert shared.said == [["told", "knows"][me]] and shared.version == 5
assert me or [path.name for path in pathlib.Path(folder).iterdir()] == ["000005"]
_, back = weights.load_directory(pathlib.Path(folder) / "000005")
jax.tree.map(np.testing.assert_array_equal, back, whole)

def full(named):  # in the middle, while the other host goes on to read
  next(named)
  raise OSError("disk full")
fails(OSError, "disk full", shared, full)
gone = Stub(f"http://host{me}:1", version=5, gone=me == 1)
fails(remote.RemoteError, "no server answers at http://host1:1", gone)
push(shared)  # all hosts are where they were
assert shared.version == 6

closed = []

@contextlib.contextmanager
def opened(config):
  if me:
    raise remote.RemoteError(f"no server answers at {config.url}")
  try:
    yield shared
  finally:
    closed.append(config.url)

servers.fleet.connect = opened
try:
  servers.connect(remote.RemoteConfig(url="http://a:1,http://b:1"))
except remote.RemoteError as error:
  assert str(error) == "no server answers at http://b:1", error
else:
  raise SystemExit("nothing was raised")
assert closed == ["http://a:1"][me:]
hosts.leave(0)
"""


def test_two_hosts_write_once_tell_each_server_once_and_fail_together(tmp_path):
  with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
  env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
  processes = [
    subprocess.Popen(
      [sys.executable, "-c", PAIR, f"127.0.0.1:{port}", str(me), str(tmp_path)],
      env=env, stderr=subprocess.PIPE, text=True,
    )
    for me in range(2)
  ]  # fmt: skip
  errors = [process.communicate(timeout=120)[1] for process in processes]
  assert [process.returncode for process in processes] == [0, 0], errors
