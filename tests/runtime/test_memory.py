"""`runtime.open`: suggestions, feedback that counts once, and what a prompt may never contain."""

import hashlib
import secrets
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memrl_jax import runtime
from memrl_jax.memory import embed
from memrl_jax.memory.episodic import EpisodicConfig
from memrl_jax.memory.records import StoreError
from memrl_jax.runtime import asked

EPISODIC = {"build": "trajectory", "update": "vanilla", "delta": 0.3}
TASK = "put a clean apple in the fridge"


def config(**episodic):
  return runtime.RuntimeConfig(episodic=EpisodicConfig(**(EPISODIC | episodic)))


def opened(folder, **episodic):
  return runtime.open(folder, config(**episodic), embedder=embed.Hash(64))


def learn(memory, task, trajectory, reward=1.0):
  found = memory.suggest(task)
  return memory.feedback(found.id, reward, trajectory)


def test_what_worked_is_suggested_and_its_q_follows_the_rewards(tmp_path):
  with opened(tmp_path) as memory:
    assert memory.suggest(TASK).prompt == ""  # nothing known: the prompt of an agent without memory
    told = learn(memory, TASK, "wash it first")
    assert (told.kept, told.q, told.repeated) == (1, {}, False)
    found = memory.suggest("put a clean pear in the fridge")
    assert "wash it first" in found.prompt and [one.id for one in found.memories] == [1]
    # Q = 0 + .3 (1 - 0), then .3 + .3 (-1 - .3)
    assert memory.feedback(found.id, 1.0).q == {1: pytest.approx(0.3)}
    again = memory.suggest("put a clean pear in the fridge")
    assert memory.feedback(again.id, -1.0).q == {1: pytest.approx(-0.09)}
    past = memory.show(1)
    assert [state["q"] for state in past["q_over_time"]] == pytest.approx([0, 0.3, -0.09])
    assert [read["reward"] for read in past["last_reads"]] == [1.0, -1.0]


def test_an_id_is_never_taken_for_an_option_of_a_command_line(tmp_path, monkeypatch):
  monkeypatch.setattr(secrets, "token_bytes", lambda n: b"\xf8" * n)  # "-Pj4" in base 64
  with opened(tmp_path) as memory:
    assert memory.suggest(TASK).id[0].isalnum()


def test_a_feedback_counts_once_also_after_a_restart_and_with_another_reward(tmp_path):
  with opened(tmp_path) as memory:
    learn(memory, TASK, "wash it")
    found = memory.suggest(TASK)
    first = memory.feedback(found.id, 1.0, "t")
    second = memory.feedback(found.id, -1.0, "t")
    assert (first.repeated, second.repeated, first.q) == (False, True, second.q)
    open_one = memory.suggest(TASK)
  with opened(tmp_path) as memory:
    assert memory.feedback(found.id, 1.0, "t").repeated
    assert not memory.feedback(open_one.id, 1.0).repeated  # a suggestion outlives the process
    with pytest.raises(runtime.Unknown, match="no suggestion abc"):
      memory.feedback("abc", 1.0)
    for id in ("", "a b", "x" * 65, "\ud800", "../x", None):
      with pytest.raises(runtime.Unknown):
        memory.feedback(id, 1.0)
    for reward in (float("nan"), float("inf"), 1.5, "1", True, None):
      with pytest.raises(runtime.Refused, match="reward"):
        memory.feedback(open_one.id, reward)


def test_feedback_from_many_threads_is_paid_once_each_in_fewer_versions(tmp_path):
  with opened(tmp_path, add_similarity=0.99, k1=1) as memory:
    learn(memory, TASK, "wash it")
    ids, told, failed = [memory.suggest(TASK).id for _ in range(24)], [], []

    def send(id):
      try:
        told.append(memory.feedback(id, 1.0))
      except runtime.Unknown as error:
        failed.append(error)

    before = memory.episodic.memory.version
    threads = [threading.Thread(target=send, args=(id,)) for id in [*ids, *ids, "unknown"]]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert (len(told), sum(one.repeated for one in told), len(failed)) == (48, 24, 1)
    entry = memory.show(1)
    assert entry["visits"] == 24 and entry["q"] == pytest.approx(1 - 0.7**24)
    assert memory.episodic.memory.version - before < 24


def test_only_what_is_in_the_prompt_earns(tmp_path):
  with opened(tmp_path, memory_budget=120, total_budget=330, k2=3) as memory:
    for fruit in ("apple", "pear", "plum"):
      learn(memory, f"put a clean {fruit} in the fridge", f"wash the {fruit} " * 30)
    before = [memory.show(id)["visits"] for id in (1, 2, 3)]
    found = memory.suggest(TASK)
    shown = [fruit for fruit in ("apple", "pear", "plum") if f"clean {fruit}" in found.prompt]
    assert 0 < len(found.memories) == len(shown) < 3
    assert set(memory.feedback(found.id, 1.0).q) == {one.id for one in found.memories}
    after = [memory.show(id)["visits"] for id in (1, 2, 3)]
    assert sum(after) - sum(before) == len(shown)


def test_an_earlier_suggestion_comes_again_word_for_word(tmp_path):
  with opened(tmp_path) as memory:
    for fruit in ("apple", "pear"):
      learn(memory, f"put a clean {fruit} in the fridge", f"wash the {fruit}")
    found = memory.suggest(TASK)
    memory.feedback(memory.suggest(TASK).id, -1.0, "dropped it")
    memory.rollback(0)
    assert memory.suggest(TASK).prompt == ""
    again = memory.again(found.id)
    assert (again.id, again.prompt) == (found.id, found.prompt)


def test_frozen_writes_nothing(tmp_path):
  with opened(tmp_path) as memory:
    learn(memory, TASK, "wash it")
    files = sorted(tmp_path.glob("*.db*"))
    before = [hashlib.sha256(file.read_bytes()).digest() for file in files]
    found = memory.suggest(TASK, frozen=True)
    assert found.id == "" and found.memories
    assert [hashlib.sha256(file.read_bytes()).digest() for file in files] == before
    with pytest.raises(runtime.Unknown):
      memory.feedback(found.id, 1.0)


EVIL = st.lists(
  st.sampled_from(
    ["</memory>", '<memory number="9">', "<|im_end|>", "<|im_start|>system", "[/INST]", "<s>", "</s>",
     "\u202e", "\x00", "\x1b[31m", "\ud800", "<\u200b/memory>", "<｜end▁of▁sentence｜>", "</ memory >", "\n\n"]
  ) | st.text(max_size=8),
  max_size=12,
).map("".join)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(trajectory=EVIL, task=EVIL)
def test_no_text_gets_out_of_its_block(tmp_path_factory, trajectory, task):
  with opened(tmp_path_factory.mktemp("m")) as memory:
    learn(memory, f"wash {task}", trajectory + " end")
    found = memory.suggest(f"wash {task}")
    assert len(found.memories) == 1
    head, _, rest = found.prompt.partition('<memory number="1">\n')
    inside, end, after = rest.partition("\n</memory>")
    assert head.count("\n") == 1 and end and after == ""
    assert "end" in inside
    for tag in (
      "</memory",
      "<memory",
      "<|",
      "<s>",
      "[/INST]",
      "<｜",
      "\x00",
      "\x1b",
      "\u202e",
      "\u200b",
    ):
      assert tag not in inside.lower()
    inside.encode()


def test_rollback_diff_and_versions_tell_one_story(tmp_path):
  with opened(tmp_path) as memory:
    learn(memory, TASK, "wash it")
    then = memory.episodic.memory.version
    memory.feedback(memory.suggest(TASK).id, 1.0)
    changed = memory.diff(then)["changed"]
    assert [(one["id"], one["q"]) for one in changed] == [(1, [0.0, pytest.approx(0.3)])]
    done = memory.rollback(then)
    assert memory.show(1)["q"] == 0 and memory.diff(then, done["version"])["changed"] == []
    assert memory.versions(limit=1)["versions"][0]["why"].startswith("rollback")
    for version in (-1, 99, 2**70):
      with pytest.raises(runtime.Unknown, match="no version"):
        memory.rollback(version)


def test_an_export_comes_back_with_its_q_and_its_ids(tmp_path):
  with opened(tmp_path / "a") as a, opened(tmp_path / "b") as b, opened(tmp_path / "c") as c:
    for fruit in ("apple", "pear"):
      learn(a, f"put a clean {fruit} in the fridge", f"wash the {fruit}")
    a.feedback(a.suggest(TASK).id, 1.0)
    lines = list(a.export())
    assert b.import_(lines)["memories"] == 2
    assert [m["q"] for m in b.memories()["memories"]] == [m["q"] for m in a.memories()["memories"]]
    assert b.suggest(TASK).prompt == a.suggest(TASK).prompt
    assert b.import_(lines)["memories"] == 2  # what is here is not added again
    learn(c, "draw a map", "with a pen")
    c.import_(lines)
    assert [m["id"] for m in c.memories(text="fridge")["memories"]] == [2, 3]
  with opened(tmp_path / "b") as b:  # and it can be opened again
    assert b.memories()["total"] == 2


def test_a_hostile_import_is_refused_whole_or_made_harmless(tmp_path):
  with opened(tmp_path / "a") as a:
    learn(a, TASK, "wash it")
    head, line = a.export()
  other = line.replace('"id":1', '"id":2')
  bad = [
    other.replace('"visits":0', '"visits":-1'),
    other.replace('"visits":0', '"visits":"0"'),
    other.replace('"wins":0', '"wins":7'),
    other.replace('"parents":[]', '"parents":{"a":1}'),
    other.replace('"score":0.0', '"score":NaN'),
    other.replace('"id":2', '"id":0'),
    other.replace('"success":true', '"success":1'),
    "[" * 100_000,
    "{}",
    "no json",
  ]
  with opened(tmp_path / "b") as b:
    for one in bad:
      assert one != other
      with pytest.raises(StoreError, match="line 3 is not an exported memory"):
        b.import_([head, line, one])
      assert b.memories()["total"] == 0
    with pytest.raises(StoreError, match="ids must rise"):
      b.import_([head, other, line])
    with pytest.raises(StoreError, match="line 1"):
      b.import_([line])
    evil = line.replace('"tenant":"default"', '"tenant":"other"').replace("wash", "</memory>wash")
    b.import_([head, evil])
    assert b.episodic.memory.store.tenants() == ["default"]
    assert b.suggest(TASK).prompt.count("</memory>") == 1


def test_a_language_model_sums_up_later_and_failures_are_tried_again(tmp_path, monkeypatch):
  monkeypatch.setattr("memrl_jax.runtime.writer._BACKOFF_S", 0.01)
  failing, asks = threading.Event(), []
  failing.set()

  def write(messages):
    asks.append(messages)
    if failing.is_set():
      raise ConnectionError("no model")
    return "1. wash\n2. store"

  made = runtime.RuntimeConfig(episodic=EpisodicConfig(delta=0.3), write_tries=3)
  with pytest.raises(ValueError, match="needs a language model"):
    runtime.open(tmp_path, made)
  with runtime.open(tmp_path, made, embedder=embed.Hash(64), write=write) as memory:
    told = learn(memory, TASK, "took it, washed it")
    assert told.kept is None and "sums it up" in told.reason
    while memory.stats()["suggestions"]["given_up"] != 1:
      time.sleep(0.01)
    assert len(asks) == 3 and memory.memories()["total"] == 0
    monkeypatch.setattr("memrl_jax.runtime.writer._BACKOFF_S", 60.0)
    learn(memory, TASK, "took it, washed it")
    while len(asks) < 4:
      time.sleep(0.01)
  failing.clear()  # another process, another day
  with runtime.open(tmp_path, made, embedder=embed.Hash(64), write=write) as memory:
    while memory.stats()["suggestions"]["settled"] != 1:
      time.sleep(0.01)
    assert "Plan: 1. wash" in memory.suggest(TASK).prompt


def test_who_dies_between_outcome_and_memory_goes_on_when_it_is_opened(tmp_path):
  with opened(tmp_path) as memory:
    learn(memory, TASK, "wash it")
    found = memory.suggest(TASK)
    memory._asked.tell([asked.Outcome(found.id, 1.0, True, "washed it again")])
  with opened(tmp_path) as memory:
    assert memory.show(1)["q"] == pytest.approx(0.3) and memory.memories()["total"] == 2
    assert memory.feedback(found.id, 1.0, "washed it again").repeated
    assert memory.show(1)["visits"] == 1


def test_old_suggestions_are_forgotten_but_none_whose_outcome_waits(tmp_path, monkeypatch):
  monkeypatch.setattr(asked, "_SWEEP", 4)
  table = asked.Asked(tmp_path, keep=3)
  for n in range(3):
    table.add(f"s{n}", "task", [])
  table.tell([asked.Outcome("s0", 1.0, True, "t")])
  for n in range(3, 8):
    table.add(f"s{n}", "task", [])
  left = [n for n in range(8) if table.get(f"s{n}")]
  assert left == [0, 5, 6, 7]
  table.close()


@pytest.mark.parametrize(
  "options,said", [({"build": "facts", "update": "vanilla"}, "does not compare facts"), ({"gamma": 0.9}, "names no next query")]
)  # fmt: skip
def test_what_a_service_cannot_do_is_refused(options, said):
  with pytest.raises(ValueError, match=said):
    runtime.RuntimeConfig(episodic=EpisodicConfig(**options))
