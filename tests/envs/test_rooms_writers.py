import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memrl_jax.envs import base, prompting
from memrl_jax.envs import rooms_world as world
from memrl_jax.envs import rooms_writers as writers
from memrl_jax.envs.rooms import FAMILY, Options
from memrl_jax.memory import replies
from tests.envs.test_rooms import MAZE, WRONG, episode, walk


def body(answer):
  return prompting.parse_reflection(answer)[0]


@st.composite
def entries(draw):
  cell = st.builds(lambda r, c: f"({r},{c})", st.integers(0, 9), st.integers(0, 9))
  places = st.builds(
    lambda kind, at: writers.Fact(kind, f" {kind}{at}"),
    st.sampled_from(("key", "door", "goal", "bad", "start", "wall")),
    cell,
  )
  advice = st.sampled_from([writers.Fact(kind, text) for kind, text in writers.ADVICE.items()])
  facts = draw(st.lists(places | advice, min_size=1, max_size=2))
  return writers.Entry(draw(st.sampled_from(world.THEMES)), tuple(facts))


@given(entries())
def test_an_entry_is_read_as_it_was_written(entry):
  again = writers.read(entry.write())
  assert again.theme == entry.theme and sorted(again.facts) == sorted(entry.facts)
  assert again.useful == entry.useful and len(entry.write().split()) <= 6


@pytest.mark.parametrize(
  "text",
  ["", "goal red", "red key(2,3)", "goal grey key(2,3)", "goal red key(2,3) and more",
   "goal red key(2,3) door(0,4) kick bad", "goal red key (2,3)", "goal red kick ok"],
)  # fmt: skip
def test_anything_else_is_no_entry(text):
  assert writers.read(text) is None


def test_a_log_shows_what_was_found_and_not_what_is_merely_likely():
  log = walk(["kick", *WRONG, "open"])
  found = [fact.text for fact in writers.known(log)]
  assert found == [" start(5,1)", " kick bad", " key(2,4)", " bad(4,0)"]  # no door is known to fit
  log = walk(["go(2,4)", "go(2,4)", "take", "go(0,4)", "open"])
  assert " door(0,4)" in [fact.text for fact in writers.known(log)]
  log = walk(["go(3,1)", "go(2,1)", "go(2,4)", "go(2,4)", "open"], MAZE)
  assert [fact.text for fact in writers.known(log) if fact.kind == "goal"] == [" goal(2,4)"]


@pytest.mark.parametrize("kind", world.KINDS)
def test_entries_are_true_of_the_hidden_task_and_about_a_third_help(kind):
  useful, stated = [], set()
  for seed in range(150):
    options = Options(kind=kind, family=seed % 8)
    log, task = episode(options, "mixture", seed), world.draw(options, seed)
    answer = writers.Writer(np.random.default_rng(seed), lazy=0).distill(base.View((), log))
    entry = writers.read(body(answer).removeprefix("add:"))
    places = {
      "key": [task.treasure], "goal": [task.treasure], "door": [task.right], "bad": task.others,
      "start": [task.start], "wall": task.walls,
    }  # fmt: skip
    for fact in entry.facts:
      cell = prompting.cells(fact.text)
      assert not cell or cell[0] in places[fact.kind]
      stated.add(fact.kind)
    assert entry.theme == task.theme
    assert (
      len({fact.kind in writers.USEFUL for fact in entry.facts}) == 1
    )  # what helps, or the rest
    useful.append(entry.useful)
  assert 0.15 <= np.mean(useful) <= 0.5
  assert stated >= {
    "kick",
    "bad",
    "start",
    "wall",
    "search",
    *{"key": ["key"], "maze": ["goal"]}[kind],
  }


def test_an_update_extends_or_corrects_what_was_shown():
  log = walk(["go(2,4)", "go(2,4)", "take", "go(0,4)", "open"])
  sure = lambda seed: writers.Writer(np.random.default_rng(seed), useful=1, lazy=0, update=1)  # noqa: E731
  said = {
    body(sure(seed).distill(base.View((), log, tips=("goal red kick bad", shown))))
    for seed in range(30)
    for shown in ("goal amber key(1,1)",)
  }
  assert "update 2:goal amber key(2,4) door(0,4)" in said
  assert not any("key(1,1)" in text for text in said)  # the log knows better
  other = body(sure(0).distill(base.View((), log, tips=("goal red kick bad",))))
  assert other.startswith("add:goal amber")  # an entry of another theme is not updated


@pytest.mark.parametrize(
  ("texts", "answer"),
  [
    (["goal red key(2,3)", "goal blue kick bad"], "keep 1 2"),
    (["goal red key(2,3)", "goal red key(2,3)"], "merge 1 2:goal red key(2,3)"),
    (
      ["goal red door(0,4)", "goal blue door(0,4)", "goal red key(2,3)"],
      "merge 1 3:goal red key(2,3) door(0,4)",
    ),
    (
      ["goal red key(2,3) kick bad", "goal blue kick bad", "goal red kick bad"],
      "merge 1 3:goal red key(2,3) kick bad",
    ),
    (["goal red key(2,3)", "goal red key(4,4)"], "discard 1"),  # the older of the two
    (["goal red key(2,3)", "goal red wall(4,4)"], "keep 1 2"),  # nothing to do with each other
    (["goal red key(2,3)", "nonsense", "goal red key(5,5)"], "discard 2"),
    (
      ["goal red key(2,3)", "goal red key(5,5)", "goal red key(5,5)"],
      "discard 1",
    ),
  ],
)
def test_merging_joins_what_belongs_together_and_discards_what_is_contradicted(texts, answer):
  said = writers.merged(texts)
  assert body(said) == answer
  assert not replies.parse_merge(said, len(texts), chars=200).reason


def test_reflections_are_entries_that_the_next_attempt_can_read():
  options = Options()
  player = FAMILY.players["explorer"](options, np.random.default_rng(0))
  log = episode(options, "explorer", 3)
  text = body(player.reflect(base.View((), log)))
  assert re.match(r"goal \w+ ", text) and writers.read(text).theme == writers.theme(log)
