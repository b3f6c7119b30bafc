"""Memories out of an export, which may come from anybody: every field is looked at before it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from memrl_jax.memory import episodic_write, transfer
from memrl_jax.memory.episodic import EpisodicConfig
from memrl_jax.memory.episodic_prompt import plain
from memrl_jax.memory.records import Add, StoreError

_FIELDS = {  # of `data`: what an episodic memory relies on
  "success": lambda v: isinstance(v, bool),
  "learned": lambda v: _whole(v),
  "visits": lambda v: _whole(v),
  "wins": lambda v: _whole(v),
  "parents": lambda v: isinstance(v, list) and len(v) < 1000 and all(_whole(p) and p for p in v),
}
_OPTIONAL = {
  "last": lambda v: v is None or _number(v),
  "trial": lambda v: v is None or isinstance(v, str),
  "images": lambda v: isinstance(v, list) and all(isinstance(i, str) for i in v),
}


def read_lines(
  lines: Iterable[str], tenant: str, config: EpisodicConfig, *, keep_ids: bool
) -> list[Add]:
  """What `memory.transfer.export_lines` wrote, for this tenant, without its vectors.

  Raises:
    StoreError: a line is not what an episodic memory exports; nothing of it may be used then.
  """
  lines = iter(lines)
  transfer.read_head(next(lines, ""))
  found, least = [], 0
  for number, line in enumerate(lines, 2):
    if not line.strip():
      continue
    try:
      one = _add(json.loads(line), tenant, config, keep_ids)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
      raise StoreError(f"line {number} is not an exported memory: {_say(error)}.") from None
    if one.id is not None:
      if one.id <= least:
        raise StoreError(f"line {number} has id {one.id} after {least}; ids must rise.")
      least = one.id
    found.append(one)
  return found


def _add(fields: dict, tenant: str, config: EpisodicConfig, keep_ids: bool) -> Add:
  id, score, given = fields["id"], fields["score"], fields["data"]
  if not (_whole(id) and id):
    raise ValueError("its id is no positive number")
  if not (_number(score) and abs(score) <= 1e6):
    raise ValueError("its score is no finite number")
  if not isinstance(given, dict) or not isinstance(fields["text"], str):
    raise ValueError("its text or its data is missing")
  data = {}
  for name, good in (_FIELDS | _OPTIONAL).items():
    if name not in given and name in _OPTIONAL:
      continue
    if not good(given[name]):
      raise ValueError(f"its {name} is not what it must be")
    data[name] = given[name]
  if data["wins"] > data["visits"]:
    raise ValueError("it has more wins than visits")
  text = plain(fields["text"])
  # Cut at the end of what was learned, each part by itself: characters that go must not move the border.
  head = plain(fields["text"][: data["learned"]])
  data["learned"] = len(head) if text.startswith(head) else 0
  data |= {name: plain(data[name]) for name in ("trial",) if isinstance(data.get(name), str)}
  if "images" in data:
    data["images"] = [plain(image) for image in data["images"]]
  if not keep_ids:
    data["parents"] = []
  key = episodic_write.intent(config, fields["key"])
  return Add(tenant, key, text, float(score), data, id=id if keep_ids else None)


def _whole(value: object) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62


def _number(value: object) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _say(error: BaseException) -> str:
  return f"it has no {error}" if isinstance(error, KeyError) else str(error)[:200].rstrip(".")
