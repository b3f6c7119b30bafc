"""WorkArena: office work in ServiceNow (2403.07718), in a real browser through BrowserGym.

Needs browsergym-workarena and an instance of ServiceNow of one's own, which the variables SNOW_INSTANCE_URL,
SNOW_INSTANCE_UNAME and SNOW_INSTANCE_PWD name. NAMES are the 33 tasks of level 1; those of WorkArena++ (levels 2
and 3) are played by name. A task has as many instances as seeds. "unseen" has eight tasks, of every
kind but the search for knowledge.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from memrl_jax.envs import browser
from memrl_jax.envs.browser_tasks import Options as _Options
from memrl_jax.envs.browser_tasks import Suite

_NAMES = """
  all-menu create-change-request create-hardware-asset create-incident create-problem create-user
  filter-asset-list filter-change-request-list filter-hardware-list filter-incident-list
  filter-service-catalog-item-list filter-user-list impersonation knowledge-base-search
  order-apple-mac-book-pro15 order-apple-watch order-developer-laptop order-development-laptop-p-c
  order-ipad-mini order-ipad-pro order-loaner-laptop order-sales-laptop order-standard-laptop
  sort-asset-list sort-change-request-list sort-hardware-list sort-incident-list
  sort-service-catalog-item-list sort-user-list multi-chart-min-max-retrieval
  multi-chart-value-retrieval single-chart-value-retrieval single-chart-min-max-retrieval
"""
NAMES = tuple(_NAMES.split())
HELD_OUT = frozenset({
  "create-problem", "filter-user-list", "impersonation", "order-ipad-pro", "order-sales-laptop",
  "sort-hardware-list", "sort-user-list", "multi-chart-value-retrieval",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options(_Options):
  """Defaults for WorkArena: the actions of its paper, and its 15 turns."""

  tasks: tuple[str, ...] = ()
  actions: tuple[str, ...] = ("bid", "chat")
  page_chars: int = 20_000

  suite: ClassVar[Suite] = Suite("workarena", "workarena.servicenow.", NAMES, HELD_OUT, open=True)


FAMILY = browser.family("workarena", Options)
