"""MiniWoB++: 125 small tasks on web pages (1802.08802), in a real browser through BrowserGym.

Names are those of the package (browsergym-miniwob 0.14.3); tests/real/test_browser.py compares them. A task is a
generator of pages, which has a million of them: "train" has the even ones, the held-out splits the odd ones.
HELD_OUT are a quarter of the tasks, with all their variants.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import ClassVar

import numpy as np

from memrl_jax.envs import browser
from memrl_jax.envs.browser_tasks import Options as _Options
from memrl_jax.envs.browser_tasks import Suite

PAGES = 1_000_000  # of a task
_NAMES = """
  ascending-numbers bisect-angle book-flight book-flight-nodelay buy-ticket choose-date
  choose-date-easy choose-date-medium choose-date-nodelay choose-list circle-center click-button
  click-button-sequence click-checkboxes click-checkboxes-large click-checkboxes-soft
  click-checkboxes-transfer click-collapsible click-collapsible-2 click-collapsible-2-nodelay
  click-collapsible-nodelay click-color click-dialog click-dialog-2 click-link click-menu
  click-menu-2 click-option click-pie click-pie-nodelay click-scroll-list click-shades click-shape
  click-tab click-tab-2 click-tab-2-easy click-tab-2-hard click-tab-2-medium click-test
  click-test-2 click-test-transfer click-widget copy-paste copy-paste-2 count-shape count-sides
  daily-calendar drag-box drag-circle drag-cube drag-items drag-items-grid drag-shapes
  drag-shapes-2 drag-single-shape drag-sort-numbers draw-circle draw-line email-inbox
  email-inbox-delete email-inbox-forward email-inbox-forward-nl email-inbox-forward-nl-turk
  email-inbox-important email-inbox-nl-turk email-inbox-noscroll email-inbox-reply
  email-inbox-star-reply enter-date enter-password enter-text enter-text-2 enter-text-dynamic
  enter-time find-greatest find-midpoint find-word focus-text focus-text-2 form-sequence
  form-sequence-2 form-sequence-3 generate-number grid-coordinate guess-number highlight-text
  highlight-text-2 hot-cold identify-shape login-user login-user-popup multi-layouts
  multi-orderings navigate-tree number-checkboxes odd-or-even order-food phone-book read-table
  read-table-2 resize-textarea right-angle scroll-text scroll-text-2 search-engine sign-agreement
  simple-algebra simple-arithmetic social-media social-media-all social-media-some stock-market
  terminal text-editor text-transform tic-tac-toe unicode-test use-autocomplete
  use-autocomplete-nodelay use-colorwheel use-colorwheel-2 use-slider use-slider-2 use-spinner
  visual-addition
"""
NAMES = tuple(_NAMES.split())
_HELD_OUT = (
  *("choose-date", "click-collapsible", "click-shape", "click-tab", "count-sides", "drag-shapes"),
  *("enter-password", "find-word", "login-user", "read-table", "search-engine", "simple-algebra"),
  *("social-media", "use-slider"),
)
HELD_OUT = frozenset(
  name for name in NAMES for stem in _HELD_OUT if name == stem or name.startswith(f"{stem}-")
)


def seed(level: int, held_out: bool) -> int:
  """The package's seed of a page: of 64 in a row, the first that draws an even page, or an odd one."""
  for candidate in itertools.count(64 * level):
    if np.random.RandomState(candidate).randint(0, PAGES) % 2 == held_out:
      return candidate
  raise AssertionError("unreachable")


@dataclasses.dataclass(frozen=True)
class Options(_Options):
  """Defaults for MiniWoB: its actions are those on elements, and all elements are marked, as many of its
  pages are drawn. Tasks that need a place in a picture are out of reach without actions=("bid", "coord")."""

  tasks: tuple[str, ...] = ()
  turns: int = 10
  actions: tuple[str, ...] = ("bid",)
  page_chars: int = 6000
  mark: str = "all"
  settle_s: float = 0.05

  suite: ClassVar[Suite] = Suite("miniwob", "miniwob.", NAMES, HELD_OUT, seed=seed)


FAMILY = browser.family("miniwob", Options)
