"""The experience bank: replies that may hold anything, retrieval that moves on, pay that adds up."""

import contextlib
import json
import pathlib
import tempfile

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from memrl_jax.memory import embed, experience, replies, retrieval
from memrl_jax.memory.experience import Ended, Shown
from memrl_jax.memory.experience_config import ExperienceConfig
from memrl_jax.memory.records import Outcome, Read, StoreError
from memrl_jax.types import Sample

FAST = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None  # no law is about the disk
LIMITS = {"max_ops": 3, "chars": 40}


def says(*operations):
  return f"<think>[1] {{</think> so <answer>{json.dumps(operations)}</answer>"


def add(text):
  return {"op": "add", "experience": text}


def update(index, text):
  return {"op": "update", "index": index, "experience": text}


def sample(text="", ids=(1, 2)):
  ids = np.array(ids, np.int32)
  return Sample(text, np.arange(3, dtype=np.int32), ids, -0.5 * np.ones(len(ids), np.float32))


def open_bank(path=None, **options):
  options = {"batch": 2, "buffer": 4, "cool_down": 1} | options
  return experience.ExperienceBank.open(path, embed.Hash(64), ExperienceConfig(**options))


@pytest.fixture
def make(monkeypatch):
  """Banks that go with the test."""
  monkeypatch.setattr(tempfile, "tempdir", FAST)
  made = []

  def one(**options):
    made.append(open_bank(**options))
    return made[-1]

  yield one
  for bank in made:
    bank.close()


def put(bank, *texts, step=0):
  """Each text from a generation of its own; returns (ids, generations)."""
  ids, generations = [], []
  for text in texts:
    generations.append(bank.record(sample(text), extractor=0, step=step))
    parsed = replies.parse(says(add(text)), 0, **LIMITS)
    ids += bank.apply("s", parsed, (), generations[-1], query="q", trial="t").ids
  return ids, generations


def end(bank, trial, success, *ids, asked=(), version=None):
  version = bank.memory.version if version is None else version
  reads = tuple(Read(trial, step, id, version) for step, id in enumerate(ids))
  bank.credit([Ended("s", Outcome(trial, float(success), success), reads, asked)])


# --- equations -----------------------------------------------------------------------------------


def test_score_by_hand():
  # Shown five times and just now: -.4 ln 6 - 1 = -1.717, below the next rank, fresh, at -1.
  score_P = retrieval.score(np.array([5, 0]), np.array([True, False]), lambda_=0.4)
  np.testing.assert_allclose(score_P, [-0.4 * np.log(6) - 1, -1.0])
  assert score_P[0] == pytest.approx(-1.717, abs=5e-4) and retrieval.best(score_P, 1) == [1]
  # Without recency it takes exp(1 / .4) - 1 = 11.2 retrievals, that is 12, to lose a rank.
  for count, first in ((11, 0), (12, 1)):
    score_P = retrieval.score(np.array([count, 0]), np.zeros(2, bool), lambda_=0.4)
    assert retrieval.best(score_P, 1) == [first]


def test_weight_by_hand():
  # delta 3: t - t_last = 2 cools down; 3 with c = 3 is (1 + 3)^-.5; a new one is 1.
  weight_N = retrieval.weight(np.array([1, 3, 0]), np.array([2, 3, np.inf]), cool_down=3, alpha=0.5)
  np.testing.assert_allclose(weight_N, [0, 0.5, 1])


def test_drawn_places_follow_the_softmax():
  score_P = np.log([0.5, 0.3, 0.2])
  rng = np.random.default_rng(0)
  first = [retrieval.drawn(score_P, 2, rng) for _ in range(4000)]
  share = np.bincount([places[0] for places in first], minlength=3) / 4000
  np.testing.assert_allclose(share, [0.5, 0.3, 0.2], atol=0.03)  # 3 standard errors: .024
  assert all(len(set(places)) == 2 for places in first)


# --- replies -------------------------------------------------------------------------------------


def test_replies_are_taken_as_a_whole_or_not_at_all():
  assert replies.parse(says(add("a"), update(2, "b")), 2, **LIMITS).operations == (
    replies.Operation("add", (), "a"),
    replies.Operation("update", (1,), "b"),
  )
  stopped = replies.parse(says(add("a"), {"op": "return"}, update(9, "b")), 2, **LIMITS)
  assert [o.text for o in stopped.operations] == ["a"]
  for reply, reason in (
    (says(add("a"), update(3, "b")), "not among the 2"),
    (says(add("a"), update(0, "b")), "not among the 2"),  # 1-based: 0 is not the last one
    (says(add("a"), update(True, "b")), "not among the 2"),
    (says(add("a"), add(" <answer> ")), "no text"),
    (says(add("a"), add("\ud800")), "no text"),  # no Unicode: the store would refuse it
    (says(add("a"), {"op": "delete", "index": 1}), "is none of"),
    (says(*[add("a")] * 4), "at most 3"),
    (says(add("a")).replace("</think>", ""), "does not end"),
    ("<think></think>" + json.dumps([add("a")]), "no answer tag"),
    ("<answer>{'op': 1}</answer>", "not JSON"),
    ("<answer>" + "[" * 100_000 + "</answer>", "not JSON"),
  ):
    parsed = replies.parse(reply, 2, **LIMITS)
    assert not parsed.operations and reason in parsed.reason, reply[:80]
  fenced = f"<answer>\n```json\n{json.dumps([add('a')])}\n```\n</answer>"
  assert replies.parse(fenced, 0, **LIMITS).operations[0].text == "a"
  # A thought may hold an answer; only what is said after it counts.
  assert replies.parse(f"{says(add('no'))} </think> {says(add('yes'))}", 0, **LIMITS).operations[
    0
  ] == (replies.Operation("add", (), "yes"))


def test_merge_replies_name_each_entry_once():
  merge = {"op": "merge", "indices": [1, 3], "experience": "both"}
  parsed = replies.parse_merge(says(merge, {"op": "discard", "indices": [2]}), 3, chars=40)
  assert [(o.kind, o.places) for o in parsed.operations] == [("merge", (0, 2)), ("discard", (1,))]
  for wrong in (
    {"op": "discard", "indices": [3]},
    {"op": "merge", "indices": [2], "experience": "x"},
  ):
    assert not replies.parse_merge(says(merge, wrong), 3, chars=40).operations


JSON = st.recursive(
  st.none() | st.booleans() | st.integers(-2, 5) | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["op", "index", "indices", "experience"]), inner, max_size=4)
  ),
  max_leaves=8,
)
NEAR = st.fixed_dictionaries(
  {"op": st.sampled_from(["add", "update", "merge", "discard", "keep", "return"]) | JSON},
  optional={
    "index": st.integers(0, 4) | JSON,
    "indices": st.lists(st.integers(0, 4), max_size=3) | JSON,
    "experience": st.text(st.characters()) | JSON,  # lone surrogates as well
  },
)


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(st.lists(NEAR, max_size=4) | JSON, st.integers(0, 3), st.text(max_size=10))
def test_no_reply_breaks_the_parser_or_gets_past_it(listed, shown, around):
  reply = f"{around}<answer>{json.dumps(listed)}</answer>{around}"
  for parsed in (
    replies.parse(reply, shown, **LIMITS),
    replies.parse_merge(reply, shown, chars=40),
  ):
    assert not (parsed.operations and parsed.reason)
    for operation in parsed.operations:
      assert all(0 <= place < shown for place in operation.places)
      assert len(operation.text) <= 40 and "<answer" not in operation.text
      operation.text.encode()  # a lone surrogate would stop the store


# --- retrieval -----------------------------------------------------------------------------------


def test_queries_are_counted_one_by_one_and_recency_ends(make):
  bank = make(window=2)
  (a, b), _ = put(bank, "red key opens red door", "red key lies in the cellar")
  query = ["red key opens red door"]

  def first(step, n=1, **how):
    return [hits[0].id for hits in bank.search("s", query * n, step, **how)]

  # Step 0: a (0 against -1); then a is recent (-.28 - 1) and b wins (-1); then both are recent.
  scratch = {}
  assert first(0, n=3, scratch=scratch) == [a, b, a] and first(0, scratch=scratch) == [a]
  assert first(0, scratch={}) == [a]  # another evaluation: nothing of the first is left
  assert first(0, n=3) == [a, b, a]
  # Step 1: both recent, -.4 ln 3 - 1 = -1.44 against -2.28. Step 2: b, last shown at step 0, is not
  # recent any more: -1.28 against -.4 ln 4 - 1 = -1.55.
  assert first(1) == [a] and first(2) == [b]
  assert bank.search("other", query, 2) == [[]]


def test_asks_in_the_middle_find_the_same_in_any_order_and_count_in_the_end(make):
  query, found = "red key opens red door", []
  for order in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
    bank = make(window=2)
    (a, b), _ = put(bank, query, "red key lies in the cellar")
    bank.search("s", [query], 0)  # a
    draws, asides = [(0, 3, 0, 1), (0, 3, 1, 1), (0, 3, 0, 2)], {}
    for number in order:
      bank.search_aside("s", [query], 0, [draws[number]], asides)
    # As above: both trials take b, a is recent; who asks again has had b (-1 - .28 - 1) and takes a (-1.28).
    assert [asides[draw][0][0] for draw in draws] == [b, b, a]
    assert bank.state()[1]["shown"] == [[a, 1, 0]]  # nothing is counted yet
    bank.count_asides(asides, 0)
    assert sorted(bank.state()[1]["shown"]) == [[a, 2, 0], [b, 2, 0]]
    found.append(bank.state()[1])
  assert found[0] == found[1] == found[2] and found[0]["queries"] == 4


def test_sampling_is_seeded_and_spreads(make):
  texts = [f"red key {n}" for n in range(5)]
  found = []
  for seed in (0, 0, 1):
    bank = make(sample=True, seed=seed, window=0, lambda_=0.0)
    put(bank, *texts)
    found.append([hits[0].id for hits in bank.search("s", ["red key"] * 40, 0)])
  assert found[0] == found[1] != found[2] and len(set(found[0])) > 2


# --- writing -------------------------------------------------------------------------------------


def test_update_keeps_id_and_usage_and_a_stale_one_is_added(make):
  bank = make()
  (a,), (first,) = put(bank, "red key opens red door")
  (hit,), shown = bank.search("s", ["red key"], 0)[0], Shown(a, bank.memory.version)
  end(bank, "t0", True, a)  # the score moves, the text does not: not stale
  texts = ("better", "also better")
  made = [bank.record(sample(), extractor=0, step=1) for _ in texts]
  done = [
    bank.apply(
      "s", replies.parse(says(update(1, text)), 1, **LIMITS), [shown], g, query="q", trial="u"
    )
    for text, g in zip(texts, made, strict=True)
  ]
  assert done[0] == experience.Applied((a,), 0) and done[1].stale == 1
  now, added = bank.memory.entries("s")
  assert (now.id, now.text, now.data["generation"]) == (a, "better", made[0])
  assert (added.text, added.data["parents"]) == ("also better", [a])
  history = [entry.text for entry, _ in bank.memory.store.history(a)]
  assert history == ["red key opens red door"] * 2 + ["better"]
  assert bank.state()[1]["shown"] == [[a, 1, 0]] and bank.state()[1]["paid"] == [[a, 1.0, 1]]
  # A trial that still plays with the old text pays the generation that wrote the old text.
  end(bank, "t1", False, a, version=hit.version)
  assert bank.state()[1]["samples"]["buffer"] == [[first, 0.0, 2]]


def test_merge_keeps_the_oldest_and_what_all_of_them_earned(make):
  bank = make(merge_chunk=3)
  (a, b, c, d), _ = put(bank, "one", "two", "three", "four")
  bank.search("s", ["one", "three", "three"], 7)
  end(bank, "t", True, a, c)
  chunk = bank.chunk("s")
  assert [entry.id for entry in chunk] == [a, b, c]
  assert [step for step in range(11) if bank.merge_due(step)] == [5, 10]
  shown = [Shown(entry.id, entry.version) for entry in chunk]
  merge = {"op": "merge", "indices": [3, 1], "experience": "one and three"}
  parsed = replies.parse_merge(says(merge, {"op": "discard", "indices": [2]}), 3, chars=40)
  number = bank.record(sample(), extractor=0, step=1)
  version = bank.memory.version
  assert bank.merge("s", parsed, shown, number, trial="m").ids == (a,)
  assert bank.memory.version == version + 1  # nobody sees half of it
  now = {entry.id: entry for entry in bank.memory.entries("s")}
  assert list(now) == [a, d] and now[a].text == "one and three" and now[a].data["parents"] == [a, c]
  assert now[a].score == 1.0 and bank.state()[1]["paid"] == [[a, 2.0, 2]]
  # The next chunk holds what was merged, then the rest; and there it ends.
  assert [entry.id for entry in bank.chunk("s", (a,), after=c)] == [a, d]
  assert bank.chunk("s", (a,), after=d) == []
  # Optimistic: b is gone, so a chunk that was shown with it is kept as it is.
  assert bank.merge("s", parsed, shown, number, trial="m").stale == 1
  assert list(now) == [entry.id for entry in bank.memory.entries("s")]


def test_capacity_evicts_the_oldest_or_the_least_useful(make):
  for evict, stay in (("fifo", ["two", "three"]), ("utility", ["one", "three"])):
    bank = make(capacity=2, evict=evict)
    (a, b), _ = put(bank, "one", "two")
    for n, success in enumerate((True, True, False)):
      end(bank, f"t{n}", success, b, *[a] * success)
    put(bank, "three")  # untried: the average of 1 and 1/3, so not the first to go
    assert [entry.text for entry in bank.memory.entries("s")] == stay
    assert a in dict(bank._paid) or evict == "fifo"


def test_keys_of_two_kinds_never_mix(tmp_path):
  bank = open_bank(tmp_path, key="query")
  put(bank, "text")
  assert bank.memory.entries("s")[0].key == "q"
  bank.close()
  with pytest.raises(StoreError, match="filed under 'query'"):
    open_bank(tmp_path, key="entry")


@pytest.mark.parametrize(
  "wrong", [{"key": "both"}, {"buffer": 1}, {"alpha": -1}, {"merge_chunk": 1}]
)
def test_config_checks_itself(wrong):
  with pytest.raises(ValueError, match=rf"config\.experience\.{next(iter(wrong))}"):
    ExperienceConfig(**{"batch": 2} | wrong)


# --- what trains ---------------------------------------------------------------------------------


def test_reward_is_the_mean_over_pairs_since_last_trained(make):
  bank = make()
  (a, b, c), (g, h, _) = put(bank, "one", "two", "three")
  end(bank, "t0", True, a, a, b)  # a twice in a trial is one pair
  end(bank, "t1", False, a)
  end(bank, "t2", True, a)
  assert bank.ready()
  batch = bank.take()
  assert batch.generations == (g, h) and not bank.ready() and bank.take() is None
  np.testing.assert_allclose(batch.reward_N, [1 / 3, 1.0])
  np.testing.assert_array_equal(batch.pairs_N, [3, 1])
  np.testing.assert_array_equal(batch.weight_N, [1, 1])
  assert batch.samples[0].sample.text == "one"
  end(bank, "t3", False, a)  # while it is in training
  bank.trained(batch)
  assert bank.state()[1]["samples"]["buffer"] == [[g, -1.0, 1]]
  with pytest.raises(StoreError, match="not in training"):
    bank.trained(batch)
  end(bank, "t4", True, c)
  again = bank.take()  # cool_down 1: the next update may have it, at 2^-.5
  np.testing.assert_allclose(again.weight_N, [2**-0.5, 1])
  bank.give_back(again)
  assert bank.take().generations == again.generations


@pytest.mark.parametrize("cooled,pairs", [("return", 3), ("drop", 1)])
def test_samples_cool_down_for_updates_of_the_extractor(make, cooled, pairs):
  bank = make(cool_down=3, cooled=cooled)
  ids, generations = put(bank, *"abcdef")
  for n in range(3):  # updates 1, 2, 3: two fresh samples each, and a new pair for the first two
    end(bank, f"t{n}", True, *ids[2 * n : 2 * n + 2])
    batch = bank.take()
    assert batch.generations == tuple(generations[2 * n : 2 * n + 2])
    bank.trained(batch)
    end(bank, f"u{n}", False, *ids[:2])
    assert bank.stats()["cooling"] == (2 if n < 2 else 0)  # update 4 is three after update 1
  batch = bank.take()
  assert batch.generations == tuple(generations[:2])
  np.testing.assert_array_equal(batch.pairs_N, [pairs] * 2)
  np.testing.assert_allclose(batch.weight_N, [2**-0.5] * 2)


def test_a_full_buffer_loses_what_waits_longest_and_scripted_samples_never_wait(make):
  bank = make()
  ids, generations = put(bank, *"abcdef")
  end(bank, "t", True, *ids)
  assert [row[0] for row in bank.state()[1]["samples"]["buffer"]] == generations[2:]
  assert bank.stats()["lost"] == 2
  scripted = bank.record(sample(ids=()), extractor=0, step=0)
  answer = bank.record(sample(), extractor=0, step=0)
  end(bank, "u", False, asked=(scripted, answer, answer))
  waiting = bank.state()[1]["samples"]["buffer"]
  assert waiting[-1] == [answer, -1.0, 1] and scripted not in [row[0] for row in waiting]


def test_entries_put_by_hand_are_found_and_pay_nobody(make):
  bank = make(key="query")
  (a,) = bank.put("s", [("where is the key", "in the cellar")])
  assert bank.search("s", ["where is the key"], 0)[0][0].entry.text == "in the cellar"
  end(bank, "t", True, a)
  assert bank.memory.entries("s")[0].score == 1.0 and bank.stats()["waiting"] == 0


def test_only_generations_that_nobody_needs_are_forgotten(make):
  bank = make()
  (a, b, c), (g, h, k) = put(bank, "one", "two", "three")
  bank.search("s", ["three"], 5)
  end(bank, "t", True, a)
  bank.memory.remove("s", [a, b, c])
  assert bank.prune(before=5) == 1  # h; g waits to be trained, k was shown at step 5
  assert bank.generation(g) and bank.generation(k)
  with pytest.raises(KeyError):
    bank.generation(h)
  assert bank.state()[1]["shown"] == bank.state()[1]["paid"] == []


def live(bank, start, stop, seed=3):
  """A life of a bank, each step a function of its number; what was shown and trained on."""
  seen = []
  for step in range(start, stop):
    rng = np.random.default_rng([seed, step])
    hits = [found[0] for found in bank.search("s", ["key", "door"], step) if found]
    reads = tuple(Read(f"t{step}", n, hit.id, hit.version) for n, hit in enumerate(hits))
    bank.credit([Ended("s", Outcome(f"t{step}", 0.0, bool(rng.integers(2))), reads)])
    generation = bank.record(sample(f"g{step}", rng.integers(9, size=3)), extractor=step, step=step)
    operation = update(1, f"door {step}") if hits and step % 3 == 0 else add(f"key {step}")
    shown = [Shown(hit.id, hit.version) for hit in hits]
    parsed = replies.parse(says(operation), len(shown), **LIMITS)
    bank.apply("s", parsed, shown, generation, query="q", trial=f"t{step}")
    batch = bank.take()
    if batch is not None:
      seen.append((batch.generations, batch.reward_N.tolist(), batch.weight_N.tolist()))
      bank.trained(batch)
    seen.append([hit.entry.text for hit in hits])
  return seen


def test_a_resumed_bank_goes_on_as_if_nothing_had_happened(tmp_path):
  options = {"sample": True, "capacity": 5, "evict": "utility", "window": 2}
  bank = open_bank(tmp_path, **options)
  live(bank, 0, 9)
  end(bank, "more", True, *[entry.id for entry in bank.memory.entries("s")])
  batch = bank.take()  # a checkpoint in the middle of an update
  arrays, rest = bank.state()
  rest = json.loads(json.dumps(rest))
  bank.give_back(batch)
  after = live(bank, 9, 18)
  expected = bank.state()
  live(bank, 18, 20)  # what was written after the checkpoint is forgotten
  bank.close()
  resumed = open_bank(tmp_path, **options)
  resumed.load(arrays, rest)
  assert live(resumed, 9, 18) == after and any(isinstance(x, tuple) for x in after)
  got = resumed.state()
  assert got[1] == expected[1]
  resumed.close()
  for name, array in expected[0].items():
    np.testing.assert_array_equal(got[0][name], array)
    assert got[0][name].dtype == array.dtype


@pytest.mark.parametrize(
  ("reply", "operations"),
  [
    ("<remark>add:go left</remark>", [("add", (), "go left")]),
    ("<remark>update 2:go left</remark>", [("update", (1,), "go left")]),
    ("x<remark>\nadd:a\nupdate 1:b\n</remark>", [("add", (), "a"), ("update", (0,), "b")]),
    ("<remark>return</remark>", []),
    ("<remark>add:a\nreturn\nnonsense</remark>", [("add", (), "a")]),
  ],
)
def test_the_short_notation_says_what_json_says(reply, operations):
  parsed = replies.parse(reply, 2, max_ops=3, chars=100)
  assert not parsed.reason and [tuple(op) for op in parsed.operations] == operations


@pytest.mark.parametrize(
  "reply",
  ["<remark>add:</remark>", "<remark>update:a</remark>", "<remark>update 3:a</remark>", "add:a",
   "<remark>add:a\nmerge 1 2:b</remark>", "<remark>go (1,2)</remark>", "<remark></remark>"],
)  # fmt: skip
def test_a_reply_in_the_short_notation_is_valid_as_a_whole_or_not_at_all(reply):
  parsed = replies.parse(reply, 2, max_ops=3, chars=100)
  assert parsed.reason and not parsed.operations


def test_merges_in_the_short_notation():
  parsed = replies.parse_merge("<remark>merge 1 3:both\ndiscard 2\nkeep 4</remark>", 4, chars=100)
  found = [(op.kind, op.places, op.text) for op in parsed.operations]
  assert found == [("merge", (0, 2), "both"), ("discard", (1,), ""), ("keep", (3,), "")]
  assert replies.parse_merge("<remark>merge 1:one</remark>", 4, chars=100).reason


def test_lanes_share_the_entries_of_a_scope_out():
  config = ExperienceConfig(merge_lanes=2, merge_chunk=3)
  with contextlib.closing(experience.ExperienceBank.open(None, embed.Hash(64), config)) as bank:
    ids = bank.put("s", [("q", f"entry {n}") for n in range(8)])
    chunks = [bank.chunk("s", lane=lane) for lane in (0, 1)]
    assert [[e.id % 2 for e in chunk] for chunk in chunks] == [[0] * 3, [1] * 3]
    later = bank.chunk("s", after=max(e.id for e in chunks[0]), lane=0)
    assert later == [] and len(ids) == 8  # one alone is left
    carried = bank.chunk("s", (chunks[0][0].id,), chunks[0][-1].id, 0)
    assert carried[0].id == chunks[0][0].id
