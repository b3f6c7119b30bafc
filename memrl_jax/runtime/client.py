"""The same memory behind a service: what `Memory` does, over HTTP, for another process or machine."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import httpx2

from memrl_jax.runtime.memory import Refused, Unknown
from memrl_jax.sampling import remote


class Client:
  """One tenant's memory at `url`. Errors are those of `Memory`: `Unknown` or `Refused` with a sentence."""

  def __init__(self, url: str, key: str = "", *, read_s: float = 60.0):
    self._http = httpx2.Client(
      base_url=url.rstrip("/"),
      headers={"Authorization": f"Bearer {key}"} if key else {},
      timeout=httpx2.Timeout(read_s, connect=5.0),
      trust_env=not remote.is_loopback(httpx2.URL(url).host),
    )

  def close(self) -> None:
    self._http.close()

  def __enter__(self) -> Client:
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def suggest(self, task: str, *, frozen: bool = False) -> dict[str, Any]:
    return self._ask("POST", "/suggest", json={"task": task, "frozen": frozen})

  def feedback(
    self, id: str, reward: float, trajectory: str | None = None, *, success: bool | None = None
  ) -> dict[str, Any]:
    body = {"id": id, "reward": reward, "trajectory": trajectory, "success": success}
    return self._ask("POST", "/feedback", json=body)

  def memories(self, **query: Any) -> dict[str, Any]:
    return self._ask("GET", "/memories", params=query)

  def show(self, id: int) -> dict[str, Any]:
    return self._ask("GET", f"/memories/{int(id)}")

  def versions(self, **query: Any) -> dict[str, Any]:
    return self._ask("GET", "/versions", params=query)

  def diff(self, a: int, b: int | None = None) -> dict[str, Any]:
    return self._ask("GET", "/diff", params={"a": a} | ({} if b is None else {"b": b}))

  def stats(self) -> dict[str, Any]:
    return self._ask("GET", "/stats")

  def rollback(self, version: int) -> dict[str, Any]:
    return self._ask("POST", "/rollback", json={"version": version})

  def snapshot(self, name: str | pathlib.Path) -> dict[str, Any]:
    """name: how the service calls it; it stays there."""
    return self._ask("POST", "/snapshot", json={"name": str(name)})

  def export(self, at: int | None = None) -> Iterator[str]:
    text = self._send("GET", "/export", params={} if at is None else {"at": at}).text
    yield from (f"{line}\n" for line in text.split("\n") if line)

  def import_(self, lines: Iterable[str]) -> dict[str, Any]:
    headers = {"Content-Type": "application/x-ndjson"}
    return self._ask("POST", "/import", content="".join(lines).encode(), headers=headers)

  def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
    return self._send(method, path, **more).json()

  def _send(self, method: str, path: str, **more: Any) -> httpx2.Response:
    try:
      response = self._http.request(method, path, **more)
    except httpx2.TransportError as error:
      raise Refused(
        f"no service answers at {self._http.base_url} ({type(error).__name__})"
      ) from None
    if response.status_code == 200:
      return response
    try:
      message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
      message = response.text[:200] or "nothing"
    kind = Unknown if response.status_code == 404 else Refused
    raise kind(f"the service answered {response.status_code}: {message}")
