"""Facts of episodes (memory.facts): what a language model may decide about them, and what becomes of it."""

import pytest

from memrl_jax.memory import embed, facts
from memrl_jax.memory.episodic import Episode, Episodic, EpisodicConfig
from memrl_jax.memory.facts import Operation, Told

CONFIG = EpisodicConfig(delta=0.1, alpha=0.0, lambda_=0.0, build="facts", update="vanilla")
KNOWN = [(7, "the key is red"), (9, "the lamp is off")]


def answer(text):
  return f"<answer>{text}</answer>"


def told(name, *operations, success=True):
  return Told(name, success, ((3, 1),), operations)


def filled(*texts):
  memory = Episodic.open(None, embed.Hash(64), CONFIG)
  memory.revise("a", [told("0", *(Operation("add", text) for text in texts))])
  return memory


def texts(memory, tenant="a"):
  return {entry.id: entry.text for entry in memory.memory.entries(tenant)}


def test_facts_are_read_from_an_answer_or_not_at_all():
  both = answer('[{"op":"add","experience":"a is b"},{"op":"add","experience":"c is d"}]')
  assert facts.listed(f"<think>hm</think>{both}") == ["a is b", "c is d"]
  assert facts.listed(answer("[]")) == []
  many = ",".join(['{"op":"add","experience":"x"}'] * (facts.MOST + 1))
  for wrong in ("a is b", answer("a is b"), answer(f"[{many}]"), answer('[{"op":"add"}]')):
    assert facts.listed(wrong) is None
  # an update has nothing to name yet
  assert facts.listed(answer('[{"op":"update","index":1,"experience":"x"}]')) is None


@pytest.mark.parametrize(
  "said,made",
  [
    ('[{"op":"add","experience":"new"}]', [Operation("add", "new")]),
    (
      '[{"op":"update","index":2,"experience":"the lamp is on"}]',
      [Operation("update", "the lamp is on", 9, "the lamp is off")],
    ),
    (
      '[{"op":"discard","indices":[1,2]}]',
      [Operation("delete", "", *KNOWN[0]), Operation("delete", "", *KNOWN[1])],
    ),
    (
      '[{"op":"discard","indices":[1]},{"op":"add","experience":"the key is blue"}]',
      [Operation("delete", "", *KNOWN[0]), Operation("add", "the key is blue")],
    ),
    ("[]", [Operation("nothing")]),
    ('[{"op":"update","index":3,"experience":"x"}]', None),  # nobody was shown a third
    ('[{"op":"discard","indices":[1]},{"op":"update","index":1,"experience":"x"}]', None),
    ('[{"op":"merge","indices":[1,2],"experience":"x"}]', None),
    ('{"op":"add"}', None),
  ],
)
def test_a_decision_names_what_it_was_shown_or_is_void(said, made):
  assert facts.decided(answer(said), KNOWN) == made
  if made:
    assert facts.load(facts.dump(made)) == tuple(made)


def test_an_update_keeps_the_id_is_found_by_its_new_words_and_leaves_the_old_version_in_history():
  memory = filled("the key is red")
  ((id, text),) = texts(memory).items()
  counts = memory.revise("a", [told("1", Operation("update", "a door needs a code", id, text))])
  assert counts["updated"] == 1 and texts(memory) == {id: "a door needs a code"}
  (found,) = memory.suggest("a", "a door needs a code")
  assert found.similarity == pytest.approx(1) and found.key == "a door needs a code"
  past = [state.text for state, _ in memory.memory.store.history(id)]
  assert past == ["the key is red", "a door needs a code"]
  memory.revise("a", [told("2", Operation("delete", "", id, "a door needs a code"))])
  assert texts(memory) == {} and memory.suggest("a", "a door needs a code") == []


def test_what_another_episode_changed_meanwhile_is_left_alone():
  memory = filled("the key is red", "the lamp is off")
  (key, red), (lamp, off) = texts(memory).items()
  counts = memory.revise(
    "a",
    [
      told(
        "1", Operation("update", "the key is blue", key, red), Operation("delete", "", lamp, off)
      ),
      told("2", Operation("delete", "", key, red), Operation("update", "lamp", lamp, off)),
    ],
  )
  assert texts(memory) == {key: "the key is blue"}
  assert (counts["updated"], counts["deleted"], counts["stale"]) == (1, 1, 2)
  late = memory.revise("a", [told("3", Operation("delete", "", key, red))])  # an update later
  assert late["stale"] == 1 and texts(memory) == {key: "the key is blue"}


def test_a_fact_is_added_once_however_many_say_it_and_an_episode_counts_once():
  memory = filled("the key is red")
  same = told("1", Operation("add", "the key is red"), Operation("add", "the lamp is off"))
  again = told("2", Operation("add", "the lamp is off"))
  counts = memory.revise("a", [same, again])
  assert sorted(texts(memory).values()) == ["the key is red", "the lamp is off"]
  assert (counts["added"], counts["nothing"]) == (1, 2)
  version = memory.memory.version
  assert set(memory.revise("a", [same, again]).values()) == {0}
  assert memory.memory.version == version and texts(memory, "b") == {}


def test_a_memory_of_facts_takes_no_episode_as_it_is():
  with pytest.raises(ValueError, match="revise"):
    filled().remember("a", [Episode("1", "task", "text", True)])
  with pytest.raises(ValueError, match="validation"):
    EpisodicConfig(build="facts")
