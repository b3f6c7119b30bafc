"""What our side does with a simulator's answers; the simulator is played by a script, no Java."""

import json
import sys

import numpy as np
import pytest

from memrl_jax.envs import base, jvm, pool, scienceworld
from memrl_jax.envs.scienceworld_tasks import Options

HALL = "This room is called the hallway. In it, you see: \n\ta box\n"
MENU = (
  "Ambiguous request: Please enter the number for the action you intended (or blank to cancel):\n"
  "0:\tpick up cup (in box)\n1:\tpick up cup (in hallway)\n"
)
VALID = ("go to kitchen", "pick up cup (in box)", "pick up cup (in hallway)", "focus on box")


class Server:
  """Answers as the simulator does: while a menu is open, an input is the choice."""

  def __init__(self):
    self.inputs, self.score, self.done, self.menu = [], 0.08, False, False

  def step(self, text):
    self.inputs.append(text)
    if self.menu:
      self.menu = False
      return "You move the cup to the inventory." if text == "0" else "Unknown action."
    if text == "pick up cup":
      self.menu = True
      return MENU
    if text == "boom":
      raise RuntimeError("the ScienceWorld simulator is gone")
    replies = {
      "focus on box": ("You focus on the box.", -1.0, False),
      "go to kitchen": ("You move to the kitchen.", 0.17, False),
      "finish": ("Done.", 1.0, True),
      "nearly": ("Done.", 0.99, True),
      "look around": (HALL, self.score, False),
    }
    if text not in replies:
      return "No known action matches that input."
    reply, self.score, self.done = replies[text]
    return reply

  getScore = lambda self: self.score  # noqa: E731
  getCompleted = lambda self: self.done  # noqa: E731
  getTaskDescription = lambda self: "Find  a\nbox."  # noqa: E731
  freeActionLook = lambda self: HALL  # noqa: E731
  freeActionInventory = lambda self: "In your inventory, you see:\n\tan orange\n"  # noqa: E731

  def getValidActionObjectCombinationsJSON(self):
    return json.dumps({"validActions": [{"action": action} for action in VALID]})


class FakeJvm:
  def __init__(self):
    self.server, self.loads, self.kind, self.dead = Server(), [], jvm.Kind(), False

  def load(self, *what):
    self.loads.append(what)
    self.server.__init__()
    return self.server.step("look around")

  def alive(self):
    return not self.dead

  def kill(self):
    self.dead = True


@pytest.fixture
def started(monkeypatch):
  """Every simulator that was started, in order."""
  made = []

  def start(kind):
    made.append(FakeJvm())
    return made[-1]

  monkeypatch.setattr(jvm, "Jvm", start)
  yield made
  assert jvm._lent == 0
  jvm.shutdown()


@pytest.fixture
def opened(started):
  made = []

  def make(**changes):
    environment = scienceworld.ScienceWorld(Options(**changes))
    made.append(environment)
    return environment, environment.reset(0)

  yield make
  for environment in made:
    environment.close()


def test_observations_tell_reply_room_and_inventory_and_the_state_is_bare(opened):
  environment, first = opened(split="test")
  assert first.text.startswith("Find a box.\nThis room is called the hallway.")
  assert first.text.endswith("In your inventory, you see:\n\tan orange")
  assert (first.goal, first.task, first.admissible) == ("Find a box.", "find-animal/225", None)
  moved = environment.step("go to kitchen").observation
  assert (
    moved.text == "You move to the kitchen.\n" + first.anchor
  )  # nothing of the goal or the reply
  assert environment.step("look around").observation.text == first.anchor  # not told twice


def test_rewards_are_score_differences_and_a_wrong_focus_ends_at_minus_100(opened):
  environment, _ = opened()
  gained = environment.step("go to kitchen")
  lost = environment.step("focus on box")
  # 8 -> 17 -> -100: the sum is final minus first, -108, and progress is cut at 0.
  assert (gained.reward, gained.score, gained.done) == (9.0, 0.17, False)
  assert (lost.reward, lost.score, lost.done, lost.success) == (-117.0, 0.0, True, False)
  with pytest.raises(RuntimeError, match="the attempt is over"):
    environment.step("look around")


@pytest.mark.parametrize(("last", "won"), [("finish", True), ("nearly", False)])
def test_only_100_is_a_success(opened, last, won):
  result = opened()[0].step(last)
  assert result.done and result.success is won


def test_unknown_and_empty_inputs_count_as_calls(opened):
  environment, _ = opened(max_calls=3)
  one, two, three = (environment.step(text) for text in ("fly", "", "fly"))
  assert (one.valid, one.action, one.note) == (False, "fly", "unknown action")
  assert (two.valid, two.action, two.note) == (False, "", "")
  assert [one.done, two.done, three.done] == [False, False, True] and not three.success


def test_a_question_back_never_eats_the_next_action(opened, started):
  environment, _ = opened()
  taken = environment.step("pick up cup")
  assert taken.observation.text.startswith("You move the cup") and "ambiguous" in taken.note
  assert environment.step("go to kitchen").reward == 9.0
  assert started[0].server.inputs[1:] == ["pick up cup", "0", "go to kitchen"]
  cautious, _ = opened(ambiguous="cancel")
  asked = cautious.step("pick up cup")
  assert "pick up cup (in hallway)" in asked.observation.text and "nothing was done" in asked.note
  assert cautious.step("go to kitchen").reward == 9.0


def test_corrections_are_off_by_default_noted_and_counted(opened):
  plain, _ = opened()
  assert plain.step("walk to the kitchen").note == "unknown action" and plain.corrections == 0
  corrected, _ = opened(correction=True)
  # words {walk, to, the, kitchen} and {go, to, kitchen}: 2 of 5 shared; no other action shares one.
  result = corrected.step("walk to the kitchen")
  assert (result.action, result.valid, result.reward) == ("go to kitchen", True, 9.0)
  assert result.note == "corrected from 'walk to the kitchen'"
  assert corrected.step("go to kitchen").note == "" and corrected.corrections == 1


def test_similarity_is_shared_words_over_all_words():
  # "a b": {a,b} & {a,b,c,d} is 2/4, & {a} is 1/2, & {b,e} is 1/3: a tie, and the first of equals wins.
  assert scienceworld.most_similar("a b", ("a b c d", "a", "b e")) == "a b c d"
  assert scienceworld.most_similar("a b", ("a", "a b c d")) == "a"
  assert scienceworld.most_similar("x", ("a", "b")) == "x"


@pytest.mark.parametrize(
  ("response", "chat", "full"),
  [
    ("Go to Kitchen", "go to kitchen", ""),
    ("\n go to  kitchen\nbecause", "go to kitchen", ""),
    ("I think. <action>Open\tdoor</action>", "open door", "open door"),
    ("x" * 400, "x" * 300, ""),
    ("", "", ""),
    ("<action></action>", "", ""),
  ],
)
def test_actions_are_read_in_both_styles(response, chat, full):
  assert scienceworld.parse(response, "chat") == chat
  assert scienceworld.parse(response, "full") == full


def test_a_retry_loads_the_same_variation_again(opened, started):
  environment, first = opened(split="test")
  environment.step("go to kitchen")
  assert environment.retry() == first
  assert started[0].loads == [("find-animal", 225, "easy")] * 2


def test_a_broken_simulator_voids_one_trial_and_is_not_lent_again(started):
  family = base.family("scienceworld")
  with pool.EnvPool(family, Options(), workers=2, isolation="inline") as envs:
    one, two = envs.open(), envs.open()
    envs.run([pool.Call(one, "reset", 0), pool.Call(two, "reset", 1)])
    broken, fine = envs.run(
      [pool.Call(one, "step", "boom"), pool.Call(two, "step", "go to kitchen")]
    )
    assert isinstance(broken, pool.Failure) and "simulator is gone" in broken.text
    assert fine.reward == 9.0 and started[0].dead and not started[1].dead
    envs.release(one)
    third = envs.open()
    assert isinstance(envs.run([pool.Call(third, "reset", 0)])[0], base.Observation)
  assert len(started) == 3 and [j.dead for j in started] == [True, False, False]


def test_simulators_are_kept_between_trials_and_bounded(started):
  for seed in range(5):
    environment = scienceworld.ScienceWorld(Options(jvms=1))
    environment.reset(seed)
    with pytest.raises(RuntimeError, match="1 ScienceWorld simulators are in use"):
      scienceworld.ScienceWorld(Options(jvms=1)).reset(0)
    environment.close()
  assert len(started) == 1
  started[0].dead = True  # killed while nobody used it
  environment.reset(0)
  environment.close()
  assert len(started) == 2


def test_random_plays_admissible_actions_without_focus(opened):
  _, first = opened(admissible=True)
  assert first.admissible == tuple(sorted(VALID))
  player = scienceworld.Random(Options(admissible=True), np.random.default_rng(0))
  said = {player.play(base.View((), base.AttemptLog(0, first))) for _ in range(60)}
  assert said == {f"<action>{action}</action>" for action in VALID if "focus" not in action}
  with pytest.raises(ValueError, match=r"env\.admissible=True"):
    scienceworld.Random(Options(), np.random.default_rng(0))


def test_what_is_missing_is_said_with_the_command(monkeypatch):
  monkeypatch.setitem(sys.modules, "scienceworld", None)
  monkeypatch.setitem(sys.modules, "scienceworld.constants", None)
  with pytest.raises(ImportError, match=r"pip install 'memrl_jax\[scienceworld\]'"):
    jvm.Jvm(jvm.Kind())
  monkeypatch.setattr(jvm, "_packages", lambda: (None, ""))
  monkeypatch.setenv("PATH", "")
  with pytest.raises(ImportError, match="apt-get install openjdk"):
    jvm.Jvm(jvm.Kind())
