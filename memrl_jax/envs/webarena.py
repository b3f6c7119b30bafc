"""WebArena: 812 tasks on six web sites (2307.13854), in a real browser through BrowserGym.

Needs browsergym-webarena (which fetches data of nltk when it is first imported) and the sites, which the
variables WA_SHOPPING, WA_SHOPPING_ADMIN, WA_REDDIT, WA_GITLAB, WA_WIKIPEDIA, WA_MAP and WA_HOMEPAGE name. A
task is its number. All tasks change the same sites: reset those between runs, and play with one worker where
tasks must not see what others did. "unseen" is a quarter of the templates from which the intents were made; "seen" are the training tasks themselves.
"""

from __future__ import annotations

import dataclasses
import zlib
from typing import ClassVar

from memrl_jax.envs import browser
from memrl_jax.envs.browser_tasks import Options as _Options
from memrl_jax.envs.browser_tasks import Suite

# The template of each task in order, with how many follow one another: "279x7" are tasks 0 to 6.
_RUNS = """
  279x7 79x4 288x5 73x5 222x6 33x5 78x4 77x5 285x3 303 300x2 197x5 68x5 69x5 276x4 17x4 70x4 65x3
  277x3 72x4 64x5 67x5 274x2 193 120 66x4 349x5 270x5 245x5 161 151 250x5 159x3 1001 1002x4 322x5
  51x4 162x5 155x5 36x5 290 255 171x5 136x5 289x5 310x5 500x5 368x5 214x5 367x5 366x7 320x3 364x5
  249x5 41x3 35x4 135 370x5 213x5 39x2 138x5 244x5 46x5 501x5 325 312 211x5 85x4 139x5 212x5 204x4
  210 207x3 47 234x5 329x5 180x5 321x5 323x5 134 324x5 160x5 208x5 147x5 169x5 299x5 248x5 298x2
  137x5 49 291 206x5 58x5 188 52x5 266x2 182 59x5 781 782 666x2 1355 1356x2 348x5 352x5 6x5 22x5
  23x2 355x4 360x3 361x5 237 371x7 145x5 156x5 308x5 999x2 331x5 242x5 247x6 251 186x5 257x5 292x5
  293 294x5 275x5 280x5 284x5 287x5 172x3 216x2 189x5 196x5 199 352 354x5 154x5 330x5 240x5 251x4
  252x5 84x4 87x6 88x5 293x4 165x5 351x4 7x5 194x5 339x5 4x5 3765x5 5x5 9x5 11x5 12x5 13x5 15x5
  6100x5 16x5 19x5 23x3 153x5 327x3 328x5 335x3 337x2 101x5 253x5 116x3 117x5 163x5 256x5 258x5
  268x5 271x5 24x5 25x6 1510x6 27x5 355 94x5 332x5 2100x5 332x5 42x4 54x2 75x5 241x3 243 246x5
  742x6 351 316x5 328 246 84 172x2 191x5 600x5 999 335x3 327x2 999x2
"""
TEMPLATES = tuple(
  template
  for template, _, times in (run.partition("x") for run in _RUNS.split())
  for _ in range(int(times or 1))
)
NAMES = tuple(str(number) for number in range(len(TEMPLATES)))
HELD_OUT = frozenset(name for name in NAMES if zlib.crc32(TEMPLATES[int(name)].encode()) % 4 == 0)


@dataclasses.dataclass(frozen=True)
class Options(_Options):
  """Defaults for WebArena: its own actions, and its 30 turns."""

  tasks: tuple[str, ...] = ()
  turns: int = 30
  actions: tuple[str, ...] = ("bid", "nav", "tab", "chat", "infeas")

  suite: ClassVar[Suite] = Suite("webarena", "webarena.", NAMES, HELD_OUT, instances=1)


FAMILY = browser.family("webarena", Options)
