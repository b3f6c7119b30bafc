"""The package's games: made by id, opened by seed, and their folders swept.

Each game works in a temporary folder of its own, which closing it removes and a killed process leaves.
So a folder holds a file that its process keeps locked, and the first game of a process removes the
folders whose lock nobody holds any more.
"""

from __future__ import annotations

import difflib
import fcntl
import pathlib
import shutil
import tempfile
import threading
import weakref
from typing import Any

from memrl_jax.envs import minihack_text

MISSING = (
  "MiniHack is not installed: run pip install 'memrl_jax[minihack]' 'setuptools<81' (it imports "
  "pkg_resources, which later setuptools lack)"
)
LOCK = "memrl_jax.lock"
_CANNOT = {
  "Boxoban": "its levels are drawn outside the game and cannot be repeated",
  "CrossingS": "the package cannot make it with present versions of minigrid",
  "-Custom": "it is a frame for levels of one's own",
}
_making = threading.Lock()  # registering ids and compiling levels is not for two threads at a time
_swept = False


def start(name: str) -> Any:
  """The package's game of this name, without gymnasium's wrappers; `close()` ends it.

  Raises:
    ImportError: the package is missing.
    ValueError: it has no such task, or one of the 15 that cannot be played.
  """
  global _swept
  with _making:
    try:
      import gymnasium
      import minihack  # noqa: F401 (registers the ids)
    except ImportError as error:
      raise ImportError(MISSING) from error
    if f"MiniHack-{name}" not in gymnasium.registry:
      known = [each[9:] for each in gymnasium.registry if each.startswith("MiniHack-")]
      near = difflib.get_close_matches(name, known, n=5, cutoff=0)
      raise ValueError(
        f"MiniHack has no task {name!r} among its {len(known)}; nearest are {', '.join(near)} "
        "(config.env.task)"
      )
    for part, why in _CANNOT.items():
      if part in name:
        raise ValueError(
          f"MiniHack task {name!r} cannot be played: {why}; choose another (config.env.task)"
        )
    if not _swept:
      sweep(pathlib.Path(tempfile.gettempdir()))
      _swept = True
    game = gymnasium.make(
      f"MiniHack-{name}",
      observation_keys=minihack_text.KEYS,
      disable_env_checker=True,
      fix_moon_phase=True,  # by seed; else luck and night follow the calendar
    ).unwrapped
    _hold(game)
    return game


def seed(game: Any, number: int) -> dict[str, Any]:
  """Opens the level of a game's seed; what is seen of it at first."""
  if hasattr(game, "minigrid_env"):  # draws its rooms itself, and its own seed() is out of date
    game.minigrid_env.reset(seed=number)
  game.nethack.set_initial_seeds(number, number, False)
  return game.reset()[0]


def sweep(folder: pathlib.Path) -> None:
  """Removes the games' folders whose processes are gone."""
  for path in folder.glob(f"nle*/{LOCK}"):
    try:
      with open(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path.parent, ignore_errors=True)
    except OSError:  # somebody plays there, or swept it first, or owns it and not us
      continue


def _hold(game: Any) -> None:
  """Locks the game's folder for as long as the game lives."""
  folder = pathlib.Path(game.nethack._vardir)
  lock = open(folder / f"{LOCK}.new", "w")  # noqa: SIM115 (closed with the game)
  fcntl.flock(lock, fcntl.LOCK_EX)
  (folder / f"{LOCK}.new").rename(folder / LOCK)  # never seen unlocked
  weakref.finalize(game, lock.close)
