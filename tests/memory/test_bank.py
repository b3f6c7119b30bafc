"""A memory against an oracle that keeps everything in dicts, and what must never happen to one."""

import concurrent.futures
import dataclasses
import itertools
import threading
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import safetensors.numpy

from memrl_jax.memory import ann, bank, embed, gate
from memrl_jax.memory.records import Add, Change, Read, Remove, StoreError, Where
from memrl_jax.memory.store import Store
from tests.models import test_encoder

folder = test_encoder.folder  # a fixture: the directory of a tiny BERT

D = 16
WORDS = ["red key", "blue key", "open door", "closed door", "red door", "lamp", "old lamp"]
EMBEDDER = embed.Hash(D)
SWITCH = ann.Policy(min_size=200, budget_ms=0, lists=4, background=False, recall=1.0, samples=300)


def brute(live, tenant, text, k, least):
  """live: {id: (tenant, key, text, score)}."""
  query = EMBEDDER.embed([text])[0].astype(float)
  mine = {number: entry for number, entry in live.items() if entry[0] == tenant}
  scored = [
    (-np.float32(EMBEDDER.embed([entry[1]])[0].astype(float) @ query), number)
    for number, entry in mine.items()
  ]
  return [
    (number, pytest.approx(-float(s), abs=1e-6), *mine[number][1:])
    for s, number in sorted(scored)
    if least is None or -s > np.float32(least)
  ][:k]


def flat(hits):
  return [(hit.id, hit.similarity, hit.entry.key, hit.entry.text, hit.entry.score) for hit in hits]


STEP = st.one_of(
  st.tuples(st.just("add"), st.sampled_from("ab"), st.lists(st.sampled_from(WORDS), max_size=6)),
  st.tuples(st.just("change"), st.integers(0, 99), st.sampled_from(WORDS), st.integers(-2, 2)),
  st.tuples(st.just("remove"), st.lists(st.integers(0, 99), min_size=1, max_size=5)),
  st.tuples(st.just("below"), st.sampled_from("ab"), st.integers(-2, 2)),
  st.tuples(st.just("rollback"), st.integers(0, 99)),
  st.tuples(st.just("discard"), st.integers(0, 99)),
  st.tuples(st.just("reopen")),
)


@hypothesis.settings(
  max_examples=25, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(steps=st.lists(STEP, max_size=12), limited=st.booleans())
@hypothesis.example(  # equal states that are written anew
  [("add", "a", ["lamp"]), ("rollback", 0), ("rollback", 1), ("rollback", 1)], False
)
def test_equals_an_oracle_after_any_calls(tmp_path_factory, steps, limited):
  path = tmp_path_factory.mktemp("memory")
  limits = bank.Limits(max_entries=7) if limited else None
  memory = bank.Memory.open(path, EMBEDDER, limits=limits)
  states, given = [{}], {0: 1}  # by version: live entries, and the next id
  for step in steps:
    live, old = dict(states[-1]), memory.version
    pick = lambda n, live=live: sorted(live)[n % len(live)]  # noqa: E731
    match step:
      case "add", tenant, words:
        ids = memory.add(tenant, [bank.Item(word, f"{word}!") for word in words])
        assert ids == list(range(given[old], given[old] + len(ids)))
        live |= {n: (tenant, word, f"{word}!", 0.0) for n, word in zip(ids, words, strict=True)}
        mine = sorted(n for n, entry in live.items() if entry[0] == tenant)
        for n in mine[: max(0, len(mine) - 7)] if limited else []:
          del live[n]
      case "change", n, word, score if live:
        memory.change(live[pick(n)][0], pick(n), key=word, score=score)
        live[pick(n)] = (live[pick(n)][0], word, live[pick(n)][2], float(score))
      case "remove", ns if live:
        gone = {pick(n) for n in ns}
        tenant = live[min(gone)][0]
        gone = {n for n in gone if live[n][0] == tenant}
        memory.remove(tenant, gone)
        live = {n: entry for n, entry in live.items() if n not in gone}
      case "below", tenant, score:
        memory.remove(tenant, Where(tenant, max_score=score))
        live = {n: e for n, e in live.items() if e[0] != tenant or e[3] > score}
      case "rollback", n:
        memory.rollback(n % len(states))
        live = states[n % len(states)]
      case "discard", n:
        memory.discard_after(n % len(states))
        states = states[: n % len(states) + 1]
        live = states[-1]
      case ("reopen",):
        memory.close()
        memory = bank.Memory.open(path, EMBEDDER, limits=limits)
    if memory.version > old:
      states.append(live)
      given[memory.version] = memory.store.next_id(memory.version)
    assert memory.version == len(states) - 1
    for tenant, k, least in itertools.product("abc", (1, 3, None), (None, 0.5)):
      text = WORDS[memory.version % len(WORDS)]
      hits = memory.search(tenant, [text], k, least)[0]
      assert flat(hits) == brute(live, tenant, text, k, least)
      assert {hit.version for hit in hits} <= {memory.version}
  assert memory.verify() == []
  memory.close()


def test_tenants_with_identical_texts_never_meet():
  with bank.Memory.open(None, EMBEDDER) as memory:
    texts = [("same key", f"text {n}") for n in range(150)]
    mine, theirs = memory.add("a", texts), memory.add("b", texts)
    assert [hit.id for hit in memory.search("a", ["same key"], None)[0]] == mine
    for call in (
      lambda: memory.remove("a", theirs[:1]),
      lambda: memory.change("a", theirs[0], score=9.0),
      lambda: memory.remove("a", Where("b", min_score=0)),
    ):
      with pytest.raises(StoreError, match=r"tenant|filter"):
        call()
    before = memory.search("b", ["same key"], None)
    memory.wipe("a")
    assert memory.search("a", ["same key"], 5) == memory.search("nobody", ["same key"], 5) == [[]]
    after = memory.search("b", ["same key"], None)
    assert flat(after[0]) == flat(before[0]) and len(after[0]) == 150
    assert memory.add("a", texts[:1])[0] > max(theirs)  # after a wipe, with an id of its own


def test_another_embedder_is_refused_until_everything_is_embedded_anew(tmp_path):
  class Other(embed.Hash):
    name = "other"

    def embed(self, texts):
      return np.roll(super().embed(texts), 3, axis=1)

  for fill in ([], [("red key", "t"), ("lamp", "u")]):
    path = tmp_path / str(len(fill))
    with bank.Memory.open(path, EMBEDDER) as memory:
      memory.commit([Add("a", *item) for item in fill], why="fill")
    for embedder in (Other(D), embed.Hash(D + 1)):
      for read_only in (False, True):
        with pytest.raises(StoreError, match=r"python -m memrl_jax\.memory reindex"):
          bank.Memory.open(path, embedder, read_only=read_only)
    with bank.Memory.open(path, EMBEDDER) as memory:
      memory.reindex(Other(D + 1))
      hits = memory.search("a", ["lamp"], 1, 0.99)[0]
      assert [hit.entry.text for hit in hits] == ["u"] * bool(fill)
      assert memory.verify() == []
      with pytest.raises(StoreError, match="was embedded by hash"):
        memory.rollback(0)
      with pytest.raises(StoreError, match="was embedded by hash"):
        memory.discard_after(0)
    with bank.Memory.open(path, Other(D + 1)) as memory:
      memory.add("a", [("red key", "new")])
    with pytest.raises(StoreError, match="to search it, open it in Python"):
      bank.open_reading(path)


def test_a_write_that_was_embedded_before_a_reindex_is_refused_and_a_search_starts_again():
  class Slow(embed.Hash):
    name = "slow"

    def embed(self, texts):
      if "late" in texts:
        memory.reindex(EMBEDDER)
      return np.roll(super().embed(texts), 3, axis=1)

  with bank.Memory.open(None, Slow(D)) as memory:
    memory.add("a", [("lamp", "t")])
    with pytest.raises(StoreError, match="embed"):
      memory.add("a", [("late", "u")])
    assert memory.verify() == [] and len(memory.entries("a")) == 1
  with bank.Memory.open(None, Slow(D)) as memory:
    memory.add("a", [("lamp", "t"), ("the late", "u")])
    [[hit]] = memory.search("a", ["late"], 1)
    a, b = EMBEDDER.embed(["late", "the late"])
    assert hit.similarity == pytest.approx(float(a @ b), abs=1e-6)


def test_a_memory_of_the_sentence_encoder_is_searched_with_its_own_weights(tmp_path, folder):
  with bank.Memory.open(tmp_path / "m", embed.MiniLM(folder, batches=(4,))) as memory:
    memory.add("a", [("push box", "1"), ("red door", "2"), ("open key", "3")])
    with pytest.warns(UserWarning, match="cut to 12 tokens"):
      memory.search("a", ["red " * 40], 1)
    assert memory.stats()["truncated"] == 1 and memory.embedder.name.startswith("minilm:")
  with pytest.raises(StoreError, match="give the directory of its weights"):
    bank.open_reading(tmp_path / "m")
  with bank.open_reading(tmp_path / "m", directory=folder) as memory:
    [hits] = memory.search("a", ["red door"], 3)
    assert hits[0].entry.text == "2" and hits[0].similarity == pytest.approx(1, abs=1e-5)
  other = test_encoder._tensors(seed=1)  # of the same shapes
  safetensors.numpy.save_file(other, folder / "model.safetensors")
  with pytest.raises(StoreError, match="reindex"):
    bank.open_reading(tmp_path / "m", directory=folder)


def test_a_reindex_starts_again_where_the_memory_has_changed_meanwhile():
  class Busy(embed.Hash):
    name, calls = "busy", 0

    def embed(self, texts):
      self.calls += 1
      if self.calls == 1:
        memory.add("b", [("blue key", "new")])
      return super().embed(texts)

  with bank.Memory.open(None, EMBEDDER) as memory:
    memory.add("a", [("lamp", "t")])
    memory.reindex(busy := Busy(D + 3))
    assert memory.embedder is busy and busy.calls == 2
    assert [hit.entry.text for hit in memory.search("b", ["blue key"], 1)[0]] == ["new"]
    assert memory.verify() == []
    other = Busy(D + 4)
    bank.reindex(memory.store, other)  # the first half of `Memory.reindex` ...
    memory.remove("a", [1])  # ... another thread before the second ...
    assert memory.search("a", ["lamp"], 1)[0][0].entry.text == "t"
    memory._mirror.load(other)
    assert memory.search("a", ["lamp"], 1) == [[]] and memory.verify() == []


def test_the_file_of_inverted_files_is_used_and_a_flipped_byte_is_not(tmp_path, monkeypatch):
  items = [(f"{WORDS[n % 7]} {n}", str(n)) for n in range(300)]
  queries = [f"{WORDS[n % 7]} {n}" for n in range(0, 300, 17)]
  with bank.Memory.open(tmp_path, EMBEDDER, policy=SWITCH) as memory:
    memory.add("a", items)
    memory.add("b", items[:10])
    memory.add("a", [(f"{WORDS[n % 7]} late {n}", str(n)) for n in range(5)])  # beside the file
    assert memory.stats()["index"] == {"a": "ivf_sq8", "b": "exact"}
    hits = memory.search("a", queries, 5)
  built, build = [], ann.Ann.build
  monkeypatch.setattr(
    ann.Ann, "build", lambda kind, *rest: built.append(kind) or build(kind, *rest)
  )
  file = tmp_path / "index.cache"
  data = file.read_bytes()
  for place in (None, 10, 80, len(data) // 2, len(data) - 1):
    file.write_bytes(data)
    if place is not None:
      damaged = bytearray(data)
      damaged[place] ^= 4
      file.write_bytes(damaged)
    with bank.Memory.open(tmp_path, EMBEDDER, policy=SWITCH) as memory:
      if place is not None:
        assert memory.stats()["index"]["a"] == "exact"
        assert ["sha256" in problem for problem in memory.verify(repair=False)] == [True]
        assert len(memory.verify()) == 1
        assert memory.verify() == []
      assert memory.search("a", queries, 5) == hits
      assert memory.stats()["index"]["a"] == "ivf_sq8"
  assert built == ["ivf_sq8"] * 4  # once for each damage, not where the file was whole
  with Store(tmp_path) as store:  # the store moves on without its memory
    vector = EMBEDDER.embed(["elsewhere"])[0]
    store.commit([Change("a", hits[0][0].id, key="elsewhere", vector=vector)])
  with bank.Memory.open(tmp_path, EMBEDDER, policy=SWITCH) as memory:
    assert memory.stats()["index"]["a"] == "exact" and memory.verify() == []
    assert memory.search("a", ["elsewhere"], 1)[0][0].id == hits[0][0].id


def test_a_switch_in_the_background_keeps_what_changes_meanwhile(monkeypatch):
  started, go, build = threading.Event(), threading.Event(), ann.Ann.build

  def slow(*args):
    started.set()
    assert go.wait(20)
    return build(*args)

  monkeypatch.setattr(ann.Ann, "build", slow)
  with bank.Memory.open(
    None, EMBEDDER, policy=dataclasses.replace(SWITCH, background=True)
  ) as memory:
    ids = memory.add("a", [(f"{WORDS[n % 7]} {n}", str(n)) for n in range(300)])
    assert started.wait(20)
    memory.remove("a", ids[:50])  # neither waits for the training
    new = memory.add("a", [("quite new", "yes")])
    assert memory.search("a", ["quite new"], 1)[0][0].id == new[0]
    go.set()
    memory._mirror.wait()
    assert memory.stats()["index"] == {"a": "ivf_sq8"}
    assert memory.search("a", ["quite new"], 1)[0][0].id == new[0]
    found = memory.search("a", WORDS, 251)
    assert all(sorted(hit.id for hit in hits) == [*ids[50:], *new] for hits in found)
    assert memory.verify() == []


def test_a_wrong_index_is_found_and_made_anew():
  with bank.Memory.open(None, EMBEDDER) as memory:
    memory.add("a", [(word, word) for word in WORDS])
    memory._mirror.tenants["a"].index.vectors._matrix[2, 3] += 0.5
    assert memory.verify(repair=False) == ["the index of tenant 'a' differs from the store"]
    assert len(memory.verify()) == 1 and memory.verify() == []


def test_a_reader_in_another_place_follows_the_writer_and_its_steps_back(tmp_path):
  with bank.Memory.open(tmp_path, EMBEDDER) as memory:
    memory.add("a", [("red key", "1")])
    reader = bank.open_reading(tmp_path)
    assert [hit.entry.text for hit in reader.search("a", ["red key"], 3)[0]] == ["1"]
    memory.add("a", [("red key", "2")])
    memory.change("a", 1, text="one")
    assert [hit.entry.text for hit in reader.search("a", ["red key"], 3)[0]] == ["one", "2"]
    memory.discard_after(1, force=True)
    for n in range(3, 6):
      memory.add("a", [("red key", str(n))])
    assert [hit.entry.text for hit in reader.search("a", ["red key"], 5)[0]] == ["1", "3", "4", "5"]
    with pytest.raises(StoreError, match="reading only"):
      reader.add("a", [("x", "y")])
    memory.reindex(embed.Hash(D + 1))
    with pytest.raises(StoreError, match="embedded anew"):
      reader.search("a", ["red key"], 1)
    reader.close()


def test_near_duplicates_merge_before_anything_is_evicted():
  limits = bank.Limits(max_entries=3, merge=bank.merge_near_duplicates)
  with bank.Memory.open(None, EMBEDDER, limits=limits) as memory:
    memory.add("a", [("red key", "x", 1.0), ("old lamp", "y", 2.0), ("open door", "z", 0.0)])
    assert memory.stats()["live_near_duplicate_rate"] == 0
    memory.add(
      "a", [("red key", "better", 5.0), ("RED KEY", "worse", 0.0), ("Old Lamp", "old", 0.0)]
    )
    assert [(e.id, e.text, e.score) for e in memory.entries("a")] == [
      (1, "better", 5.0),
      (2, "y", 2.0),
      (3, "z", 0.0),
    ]
    memory.add("a", [("something else", "w", 1.0)])  # no duplicate: the oldest goes
    assert [e.id for e in memory.entries("a")] == [2, 3, 7]
    memory.rollback(1)
    assert [e.text for e in memory.entries("a")] == ["x", "y", "z"] and memory.verify() == []
  with bank.Memory.open(None, EMBEDDER) as memory:
    memory.add("a", [("red key", "x"), ("RED KEY", "y"), ("lamp", "z"), ("open door", "z")])
    assert memory.stats()["live_near_duplicate_rate"] == 0.5


def test_reads_and_outcomes_travel_with_a_commit_and_the_same_words_are_kept_once():
  with bank.Memory.open(None, EMBEDDER) as memory:
    ids = memory.add("a", [("red key", "x"), ("lamp", "y"), ("red key", "x")], once=True)
    assert ids == [1, 2, 1]
    hit = memory.search("a", ["lamp"], 1)[0][0]
    memory.commit([Change("a", 1, score=3.0)], reads=[Read("trial", 0, hit.id, hit.version)])
    assert [read.trial for read, _ in memory.store.lineage(hit.id).reads] == ["trial"]
    memory.update("a", ids[:2], lambda entry: dataclasses.replace(entry, score=entry.score + 1))
    assert [entry.score for entry in memory.get("a", [2, 1])] == [1.0, 4.0]


def test_the_gate_holds_many_readers_or_one_writer_and_a_waiting_writer_goes_first():
  door, inside, order = gate.Gate(), [], []
  together, write_waits = threading.Barrier(3, timeout=20), threading.Event()

  def read(name, meet):
    with door.reading():
      inside.append(name)
      order.append(name)
      if meet:
        together.wait()  # both readers are inside at once
        assert write_waits.wait(20)
        time.sleep(0.05)
        assert "writer" not in inside
      inside.remove(name)

  def write():
    with door.writing():
      assert inside == []
      inside.append("writer")
      order.append("writer")
      time.sleep(0.05)
      assert inside == ["writer"]
      inside.remove("writer")

  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    calls = [pool.submit(read, f"early {n}", True) for n in range(2)]
    together.wait()
    calls.append(pool.submit(write))
    while not door._waiting:
      time.sleep(0.001)
    calls.append(pool.submit(read, "late", False))
    time.sleep(0.02)
    write_waits.set()
    for call in calls:
      call.result(20)
  assert order[2:] == ["writer", "late"]


def watch(seconds, readers):
  """Readers look while a writer moves a set of eight entries, all at once, from text to text."""
  failures, reads, stop = [], [0] * readers, threading.Event()
  limits = bank.Limits(max_entries=1000)
  with bank.Memory.open(None, EMBEDDER, limits=limits) as memory:
    ids = memory.add("a", [(f"{WORDS[n % 7]} {n}", "0", 0.0) for n in range(8)])

    def read(me):
      newest = 0
      while not stop.is_set():
        hits = memory.search("a", ["red key"], None)[0]
        same = {(hit.entry.text, hit.entry.score, hit.version) for hit in hits}
        if len(same) != 1 or len(hits) != 8 or hits[0].version < newest:
          failures.append((me, same, len(hits)))
          return
        newest = hits[0].version
        reads[me] += 1

    threads = [threading.Thread(target=read, args=(me,)) for me in range(readers)]
    for thread in threads:
      thread.start()
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end and not failures:
      n += 1
      if n % 2:
        memory.commit([Change("a", number, None, str(n), float(n)) for number in ids])
      else:  # other entries, with other vectors, in the place of all
        fresh = [Add("a", f"{WORDS[k % 7]} {n}", str(n), float(n)) for k in range(8)]
        ids = list(memory.commit([*(Remove("a", number) for number in ids), *fresh]).ids)
      found = memory.search("a", [f"red key {n}"], None)[0]
      assert {hit.entry.text for hit in found} == {str(n)}  # as soon as the write has returned
    stop.set()
    for thread in threads:
      thread.join()
    assert failures == [] and min(reads) > 0
    assert memory.version == n + 1 and memory.verify() == []  # no write was lost
  return n, sum(reads)


def test_readers_never_see_half_a_write():
  writes, _ = watch(1.5, readers=8)
  assert writes > 1


@pytest.mark.slow
def test_readers_never_see_half_a_write_for_a_minute():
  watch(60, readers=8)
