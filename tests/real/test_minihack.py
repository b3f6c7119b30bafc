"""The real MiniHack through our environment: levels, a player that solves them, replay, memory, speed.

Needs `pip install nle==1.3.0 minihack==1.0.2 "minigrid>=3" "setuptools<81"`.
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest

from memrl_jax.envs import base, minihack, minihack_game, minihack_text, pool
from memrl_jax.envs.minihack import FAMILY
from memrl_jax.envs.minihack_tasks import PAPER_TASKS, Options

gymnasium = pytest.importorskip("gymnasium", reason="comes with nle: pip install nle==1.3.0")
pytest.importorskip(
  "minihack", reason="a package: pip install nle==1.3.0 minihack==1.0.2 'setuptools<81'"
)
pytestmark = pytest.mark.filterwarnings("ignore:pkg_resources is deprecated")
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def opened():
  made = []

  def make(**changes):
    made.append(minihack.MiniHack(Options(**changes)))
    return made[-1]

  yield make
  for environment in made:
    environment.close()


def play(environment, options, name, seed):
  """The log of one attempt by a scripted player."""
  player = FAMILY.players[name](options, np.random.default_rng(seed))
  log = base.AttemptLog(0, environment.reset(seed))
  while not log.done:
    result = environment.step(player.play(base.View((), log)))
    log.steps.append(base.Step(result.action, result))
  return log


# Of 20 training levels. In Room-Ultimate two die, among monsters and traps; in River-Narrow two boulders
# have to be moved to one place, for which 30 turns mostly do not suffice (4 of 20).
@pytest.mark.parametrize(
  ("task", "turns", "crop", "wins"),
  [
    ("Room-Ultimate-5x5-v0", 30, 4, 18),
    ("MazeWalk-9x9-v0", 30, 4, 20),
    ("KeyRoom-Dark-S5-v0", 30, 4, 20),
    ("River-Narrow-v0", 100, 12, 20),
    ("Room-5x5-v0", 30, 4, 20),
  ],
)
def test_a_scripted_player_solves_the_tasks_from_their_text(opened, task, turns, crop, wins):
  options = Options(task=f"MiniHack-{task}", turns=turns, crop=crop, status=True)
  environment = opened(**vars(options))
  logs = [play(environment, options, "explorer", seed) for seed in range(20)]
  assert (
    sum(log.success for log in logs) >= wins - 1
  )  # exact here; one for another build of the game
  assert all(step.result.valid for log in logs for step in log.steps)
  assert all(sum(s.result.reward for s in log.steps) == log.success for log in logs)
  assert len({log.initial.anchor + log.initial.text for log in logs}) > 10


def trace(**changes):
  """Everything that an agent sees of some episodes."""
  options = Options(status=True, **changes)
  environment = minihack.MiniHack(options)
  lines = []
  for seed in (3, 70_000, 2**32 - 2):
    log = play(environment, options, "random", seed)
    lines += [repr(log.initial), *(repr(step.result) for step in log.steps)]
  environment.close()
  return lines


# MultiRoom draws its rooms in another package, with a generator of its own.
TASKS = (*PAPER_TASKS, "MultiRoom-N2-v0")


def test_a_level_is_the_same_in_another_process():
  code = (
    "import hashlib\nfrom tests.real.test_minihack import TASKS, trace\n"
    "print(*(hashlib.sha256(repr(trace(task=task)).encode()).hexdigest() for task in TASKS))"
  )
  outputs = {
    subprocess.run(
      [sys.executable, "-W", "ignore", "-c", code],
      env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": salt},
      capture_output=True,
      text=True,
      check=True,
    ).stdout
    for salt in ("1", "2")
  }
  assert len(outputs) == 1 and len(set(outputs.pop().split())) == len(TASKS)


@pytest.mark.parametrize("task", TASKS)
def test_a_retry_is_the_same_level_and_answers_the_same(opened, task):
  environment, other = opened(task=task, status=True), opened(task=task, status=True)
  first = environment.reset(11)
  actions = np.random.default_rng(0).choice(environment._actions[:8], 12)
  seen = []
  for attempt in range(3):
    assert (environment.retry() if attempt else first) == first
    seen.append([])
    for action in actions:
      seen[-1].append(environment.step(f"<action>{action}</action>"))
      if seen[-1][-1].done:
        break
  assert seen[0] == seen[1] == seen[2]
  other.reset(12)  # after another level, in another game
  assert other.reset(11) == first


def test_the_splits_show_different_levels(opened):
  levels = {}
  for split in ("train", "heldout"):
    environment = opened(task="River-Narrow-v0", split=split, status=True, crop=20)
    levels[split] = {environment.reset(seed).text for seed in range(30)}
  assert len(levels["train"]) == len(levels["heldout"]) == 30
  assert not levels["train"] & levels["heldout"]
  # The moon is the seed's, not the calendar's: by date all of them or none would name it.
  assert 0 < sum("moon tonight" in text for text in levels["train"]) < 30


def test_actions_have_different_names_in_every_task():
  import minihack as package  # noqa: F401 (registers the ids)
  from nle.env.base import FULL_ACTIONS

  names = [minihack_text.name(type(kind).__name__, kind.name) for kind in FULL_ACTIONS]
  assert len(set(names)) == len(names) > 70
  for name in names:
    assert minihack_text.named(name, tuple(names)) == name


def test_other_tasks_open_and_unknown_ones_say_what_there_is(opened):
  for task in ("Eat-v0", "Corridor-R2-v0", "HideNSeek-v0", "LockedDoor-v0", "Sokoban1a-v1"):
    environment = opened(task=task)
    assert "@ you" in environment.reset(0).text
    assert environment.step("<action>1</action>").valid
  with pytest.raises(ValueError, match=r"has no task 'Rom-5x5-v0'.*nearest are Room-5x5-v0"):
    opened(task="Rom-5x5-v0").reset(0)
  for task, why in (
    ("Boxoban-Medium-v0", "drawn outside the game"),
    ("LavaCrossingS9N1-v0", "versions of minigrid"),
    ("Skill-Custom-v0", "levels of one's own"),
  ):
    with pytest.raises(ValueError, match=f"cannot be played: .*{why}"):
      opened(task=task).reset(0)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_pool_plays_as_one_environment_does(opened, isolation, tmp_path, monkeypatch):
  options = Options(task="KeyRoom-Dark-S5-v0")
  alone = opened(task="KeyRoom-Dark-S5-v0")
  alone.reset(0)
  monkeypatch.setenv("TMPDIR", str(tmp_path))
  monkeypatch.setattr(tempfile, "tempdir", None)  # asked again, here and in the processes
  with pool.EnvPool(FAMILY, options, workers=2, isolation=isolation, timeout_s=120) as envs:
    handles = [envs.open() for _ in range(6)]
    for method, argument in (("reset", 5), ("step", "<action>south</action>"), ("retry", None)):
      answers = envs.run([pool.Call(handle, method, argument) for handle in handles])
      wanted = alone.retry() if method == "retry" else getattr(alone, method)(argument)
      assert answers == [wanted] * 6
    assert not envs.failures
    assert len(list(tmp_path.glob("nle*"))) == 6
  assert not list(tmp_path.iterdir())


def test_what_a_killed_process_left_is_swept_and_nothing_else(opened, tmp_path):
  code = (
    "import os\nfrom memrl_jax.envs import minihack_game as g\n"
    "game = g.start('Room-5x5-v0')\nprint(game.nethack._vardir, flush=True)\nos.kill(os.getpid(), 9)"
  )
  environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
  ran = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True
  )
  left = pathlib.Path(ran.stdout.strip())
  assert (left / minihack_game.LOCK).is_file() and left.parent == tmp_path
  (tmp_path / "nle-of-others").mkdir()
  mine = opened()
  mine.reset(0)
  lock = pathlib.Path(mine._game.nethack._vardir) / minihack_game.LOCK
  (tmp_path / "nle-mine").symlink_to(lock.parent)
  minihack_game.sweep(tmp_path)
  assert not left.exists() and lock.exists()
  assert (tmp_path / "nle-of-others").exists()


def rss_mb():
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.split("VmRSS:")[1].split()[0]) / 1024


def test_resets_and_new_games_leave_memory_bounded(opened):
  environment, sizes = opened(), []
  for number in range(120):
    environment.reset(number)
    while not environment.step("<action>east</action>").done:
      pass
    sizes.append(rss_mb())
  assert sizes[-1] - sizes[20] < 5, (sizes[20], sizes[-1])
  sizes = []
  for number in range(40):
    environment = minihack.MiniHack(Options())
    environment.reset(number)
    environment.close()
    sizes.append(rss_mb())
  assert sizes[-1] - sizes[10] < 15, (sizes[10], sizes[-1])


def test_a_turn_with_its_text_costs_no_more_than_a_step_of_the_package(opened):
  environment = opened(task="MazeWalk-9x9-v0", turns=10**6)
  environment.reset(0)
  stock = gymnasium.make("MiniHack-MazeWalk-9x9-v0")
  moves = np.random.default_rng(0).integers(0, 8, 100).tolist()
  answers = [f"<action>{environment._actions[move]}</action>" for move in moves]

  def seconds(work, arguments):
    begun = time.process_time()
    for argument in arguments:
      work(argument)
    return time.process_time() - begun

  ratios = []
  for _ in range(15):
    environment.retry()
    stock.unwrapped.seed(0, 0, reseed=False)
    stock.reset()
    ratios.append(seconds(environment.step, answers) / seconds(stock.step, moves))
  stock.close()
  # 0.73: our text costs less than the package's own arrays that we do not ask it for
  # (experiments/bench/minihack.py, which also compares with the game without them).
  assert np.median(ratios) < 1.1, ratios
