"""The service under 64 clients and kill -9, with 10,000 memories: nothing acknowledged is lost.

MEMRL_LOAD_S=300 MEMRL_LOAD_KILLS=10 is the whole of it; by default some seconds of the same.
"""

import asyncio
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the service needs the extra `runtime`")
pytest.importorskip("uvicorn", reason="the service needs the extra `runtime`")

from memrl_jax import runtime
from memrl_jax.memory import check
from tests.runtime.serving import Model, listening

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = float(os.environ.get("MEMRL_LOAD_S", "15"))
KILLS = int(os.environ.get("MEMRL_LOAD_KILLS", "3"))
CLIENTS, MEMORIES = 64, 10_000
WORDS = (
  "apple",
  "pear",
  "plum",
  "map",
  "cellar",
  "fridge",
  "shelf",
  "lamp",
  "door",
  "key",
  "book",
  "table",
)


def task(rng):
  return "put the " + " ".join(rng.choices(WORDS, k=6))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Ten thousand memories of one tenant."""
  place, rng = tmp_path_factory.mktemp("load"), random.Random(0)
  with runtime.open(place / "tenants" / "default") as memory:
    head = next(iter(memory.export()))
    data = {"success": True, "learned": 0, "visits": 0, "wins": 0, "parents": []}
    lines = [
      json.dumps(
        {"id": n, "key": f"{task(rng)} {n}", "text": f"story {n}", "score": 0.0, "data": data}
      )
      for n in range(1, MEMORIES + 1)
    ]
    assert memory.import_([head, *lines])["memories"] == MEMORIES
  return place


class Service:
  def __init__(self, folder, *options):
    with socket.create_server(("127.0.0.1", 0)) as free:
      self.port = free.getsockname()[1]
    self.url = f"http://127.0.0.1:{self.port}"
    self._command = [
      sys.executable, "-m", "memrl_jax.runtime", "serve", str(folder), f"--port={self.port}",
      "--rate=1000000", "--burst=1000000", "--inflight=128", "--set=delta=0.3", *options,
    ]  # fmt: skip
    self.start()

  def start(self):
    self.process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert self.process.stdout.readline().startswith("serving at")

  def stop(self, number):
    self.process.send_signal(number)
    out = self.process.communicate(timeout=60)[0]
    return self.process.returncode, out


def percentiles(ms):
  ms = sorted(ms)
  return {f"p{p}": round(ms[int(p / 100 * (len(ms) - 1))], 1) for p in (50, 99)} | {"n": len(ms)}


async def clients(service, acknowledged, times):
  """64 clients that suggest and give feedback, and send again until they have an answer."""
  end = time.monotonic() + SECONDS

  async def ask(http, path, body):
    while True:
      start = time.perf_counter()
      try:
        answer = await http.post(path, json=body)
      except httpx2.TransportError:
        await asyncio.sleep(0.05)
        continue
      assert answer.status_code == 200, answer.text
      times[path].append(1e3 * (time.perf_counter() - start))
      return answer.json()

  async def one(number):
    rng = random.Random(number)
    async with httpx2.AsyncClient(base_url=service.url, trust_env=False, timeout=60) as http:
      while time.monotonic() < end:
        id = (await ask(http, "/suggest", {"task": task(rng)}))["id"]
        if rng.random() < 0.7:
          story = f"client {number}" if rng.random() < 0.1 else None
          body = {"id": id, "reward": rng.choice([1.0, -1.0]), "trajectory": story}
          await ask(http, "/feedback", body)
          acknowledged[id] = body["reward"]

  async def kill():
    for _ in range(KILLS):
      await asyncio.sleep(SECONDS / (KILLS + 1))
      await asyncio.to_thread(service.stop, signal.SIGKILL)
      await asyncio.to_thread(service.start)

  await asyncio.gather(kill(), *map(one, range(CLIENTS)))


def test_64_clients_and_kills_lose_nothing_and_q_is_the_replayed_log(folder):
  acknowledged, times = {}, {"/suggest": [], "/feedback": []}
  service = Service(folder)
  try:
    asyncio.run(clients(service, acknowledged, times))
  finally:
    code, out = service.stop(signal.SIGTERM)
  assert (code, out) == (0, "stopped\n")
  print({path: percentiles(ms) for path, ms in times.items()}, f"{KILLS} kills, {SECONDS:g} s")
  place = folder / "tenants" / "default"
  assert check.verify(place) == [] and len(acknowledged) > 10
  with runtime.open(place) as memory:
    store, paid = memory.episodic.memory.store, 0
    for entry in memory.episodic.memory.entries("default"):
      if not entry.data["visits"]:
        continue
      q = 0.0
      reads = store.lineage(entry.id).reads
      for _, outcome in reads:
        q += 0.3 * (outcome.reward - q)
      paid += len(reads)
      assert (entry.score, entry.data["visits"]) == (pytest.approx(q, abs=1e-12), len(reads))
    for id, reward in acknowledged.items():
      assert memory.feedback(id, -reward).repeated
    assert sum(e.data["visits"] for e in memory.episodic.memory.entries("default")) == paid > 0


def cpu_s(process):
  """Seconds of CPU that a process has used."""
  fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_proxied_call_costs_little_more_at_ten_thousand_memories(folder):
  """Within 10 ms, in CPU time: what it takes on a machine that has nothing else to do. Latency is printed."""
  model, rng, calls = Model(), random.Random(1), 200
  with listening(model.app) as upstream:
    service = Service(folder, f"--upstream={upstream}")
    try:
      with httpx2.Client(trust_env=False, timeout=60) as http:
        took = {upstream: [], service.url: []}
        for n in range(-20, calls):
          if n == 0:
            before = cpu_s(service.process)
          body = {"model": "fake", "messages": [{"role": "user", "content": task(rng)}]}
          for url, ms in took.items():
            start = time.perf_counter()
            assert http.post(f"{url}/v1/chat/completions", json=body).status_code == 200
            ms.append(1e3 * (time.perf_counter() - start))
        cost = 1e3 * (cpu_s(service.process) - before) / calls
    finally:
      service.stop(signal.SIGTERM)
  direct, through = (percentiles(ms) for ms in took.values())
  print(f"direct {direct}, through the proxy {through} ms; {cost:.1f} ms of CPU a call")
  assert cost < 10.0
