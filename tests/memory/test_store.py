"""What a memory promises: versions, tenants, caps, lineage, checksums, transfer, refusals."""

import array
import dataclasses
import os
import random
import sqlite3
import threading

import pytest

from memrl_jax.memory import check, records, schema, transfer
from memrl_jax.memory.records import Add, Change, Limits, Manifest, Outcome, Read, Remove, Where
from memrl_jax.memory.store import Store

MANIFEST = Manifest("hash", 2, True)


def vector(x=1.0):
  return array.array("f", [x, 0.0])


def add(text, tenant="a", score=0.0, **data):
  return Add(tenant, f"key of {text}", text, score, data, vector(score))


def export(store, tenant=None, at=None):
  return "".join(transfer.export_lines(store, tenant, at))


def texts(store, tenant="a", at=None):
  return [entry.text for entry in store.entries(tenant, at)]


@pytest.fixture
def store(tmp_path):
  with Store(tmp_path / "memory", MANIFEST) as store:
    yield store


def test_delete_150_of_150_then_add(store):
  ids = store.commit([add(f"{i}") for i in range(150)]).ids
  assert store.remove_where(Where("a", max_score=0.0)).version == 2
  assert store.entries("a") == [] and store.count("a") == 0
  assert store.commit([add("again")]).ids == (151,)
  assert store.count("a", at=1) == 150 and len(store.get("a", ids, at=1)) == 150


def test_wiping_a_tenant_leaves_the_other_byte_identical(store):
  same = [add(f"{i}", tenant, i) for i in range(20) for tenant in "ab"]
  store.commit(same)
  before = export(store, "b")
  store.wipe("a")
  assert export(store, "b") == before and store.tenants() == ["b"]
  store.commit([add("new", "a")])
  store.rollback(1, tenant="a")
  store.rollback(0, tenant="a")
  assert export(store, "b") == before


def test_a_tenant_is_a_hard_partition(store):
  mine, theirs = store.commit([add("x", "a"), add("x", "b")]).ids
  for op in (Change("a", theirs, score=9.0), Remove("a", theirs)):
    with pytest.raises(records.StoreError, match="not in tenant 'a'"):
      store.commit([op])
  with pytest.raises(records.StoreError, match="not in tenant 'a'"):
    store.commit([Change("b", theirs, score=1.0), Remove("a", theirs)])
  assert store.get("a", [theirs]) == []
  assert store.get("b", [theirs])[0].score == 0.0
  assert store.commit([add("x", "b")], once=True).ids == (theirs,)
  assert store.commit([add("x", "c")], once=True).ids == (theirs + 1,)
  with pytest.raises(records.StoreError, match="wipe"):
    store.remove_where(Where("a"))
  assert store.get("a", [mine])


def test_ids_never_come_again_over_reopen_delete_and_export(tmp_path):
  given = []
  for _ in range(3):
    with Store(tmp_path / "m", MANIFEST) as store:
      given += store.commit([add("x"), add("y")]).ids
      store.wipe("a")
      text = export(store)
  assert given == [1, 2, 3, 4, 5, 6]
  with Store(tmp_path / "other", MANIFEST) as other:
    transfer.import_lines(other, text.splitlines(keepends=True))
    assert other.commit([add("z")]).ids == (7,)


def test_a_filter_meets_all_its_conditions(store):
  store.commit([add("old low", score=0.0, env="lab"), add("old high", score=5.0, env="lab")])
  store.commit([add("new low", score=0.0, env="shop"), add("new high", score=5.0, env="lab")])
  named = {entry.id: entry.text for entry in store.entries("a")}
  for where, expected in (
    (Where("a", min_age=1), {"old low", "old high"}),
    (Where("a", max_age=0, min_score=5.0), {"new high"}),
    (Where("a", data={"env": "lab"}, max_score=4.0), {"old low"}),
    (Where("a", data={"none": None}), set()),
  ):
    assert {named[id] for id in store.select(where)} == expected


def test_the_cap_holds_in_every_version(tmp_path):
  limits = Limits(3, "lowest_score")
  with Store(tmp_path / "m", MANIFEST, limits=limits) as store:
    done = store.commit([add(f"{score}", score=score) for score in (5, 1, 4, 2, 3)])
    assert texts(store) == ["5", "4", "3"] and done.evicted == (2, 4)
    store.commit([Change("a", 1, score=0.0), add("9", score=9)])
    assert texts(store) == ["4", "3", "9"]
    late = store.commit([add("0", score=0)])
    assert late.evicted == late.ids and store.history(late.ids[0])[0][1] == late.version
    store.commit([add(f"{i}", "b", i) for i in range(3)])
    assert store.count("a") == store.count("b") == 3
    assert store.stats()["evicted"] == 4
    store.commit([Change("a", 5, score=8.0), add("7", score=7)])  # was the lowest, is not now
    assert texts(store) == ["3", "9", "7"]
  with Store(tmp_path / "m", limits=Limits(2)) as store:
    store.commit([add("10", score=-9)])
    assert texts(store) == ["7", "10"] and store.count("b") == 3
  assert check.verify(tmp_path / "m") == []


def twins(entries):
  """Keeps the first of entries with equal text, with the higher score."""
  ops, first = [], {}
  for entry in entries:
    if entry.text in first:
      ops += [Remove(entry.tenant, entry.id)]
      ops += [Change(entry.tenant, first[entry.text], score=entry.score)]
    first.setdefault(entry.text, entry.id)
  return ops


def test_near_duplicates_are_merged_before_anything_is_evicted(tmp_path):
  with Store(tmp_path / "m", MANIFEST, limits=Limits(2, merge=twins)) as store:
    store.commit([add("x", score=1), add("y", score=2)])
    done = store.commit([add("x", score=7)], near_duplicates=2)
    assert done.merged == done.ids == (3,) and done.evicted == ()
    assert [(e.text, e.score) for e in store.entries("a")] == [("x", 7.0), ("y", 2.0)]
    stats = store.stats()
    assert (stats["merged"], stats["evicted"], stats["near_duplicates"]) == (1, 0, 2)
    assert stats["near_duplicate_rate"] == 3 / 5  # 1 merged + 2 reported, of 3 added + 2 reported


def test_a_merge_of_entries_that_changed_meanwhile_is_dropped(tmp_path):
  def slow(entries):
    store.limits = None
    store.commit([Change("a", 1, score=50.0)])  # another thread: the hook holds no lock
    store.limits = limits
    return twins(entries)

  limits = Limits(2, merge=slow)
  with Store(tmp_path / "m", MANIFEST, limits=limits) as store:
    store.commit([add("x", score=1), add("y", score=2)])
    done = store.commit([add("x", score=7)])
    assert done.merged == () and done.evicted == (1,)  # the cap holds all the same
    assert store.history(1)[-1][0].score == 50.0
    assert [(e.text, e.score) for e in store.entries("a")] == [("y", 2.0), ("x", 7.0)]


def test_a_merge_knows_nothing_of_what_its_own_commit_changed(tmp_path):
  with Store(tmp_path / "m", MANIFEST, limits=Limits(2, merge=twins)) as store:
    store.commit([add("x", score=1), add("y", score=2)])
    done = store.commit([Change("a", 1, text="not x"), add("x", score=7)])
    assert done.merged == () and done.evicted == (1,)


def test_a_merge_hook_that_names_a_stranger_fails_the_commit(tmp_path):
  limits = Limits(1, merge=lambda entries: [Remove("b", 2)])
  with Store(tmp_path / "m", MANIFEST, limits=limits) as store:
    store.commit([add("x"), add("x", "b")])
    with pytest.raises(records.StoreError, match="not shown"):
      store.commit([add("y")])
    assert store.count("b") == 1 and store.version == 1


def test_once_means_once_among_what_lives_when_it_is_added(store):
  x, y = store.commit([add("x"), add("y")]).ids
  old = store.get("a", [x])[0]
  done = store.commit(
    [Change("a", x, text="other"), add("x"), Remove("a", y), add("y"), add("y")], once=True
  )
  assert done.ids == (3, 4, 4) and texts(store) == ["other", "x", "y"]
  assert store.commit([dataclasses.replace(add("x"), text="other")], once=True).ids == (x,)
  assert old.text == "x" and store.stats()["repeated"] == 2


def test_lineage_and_its_return_by_discard(store):
  store.commit([add("tip", trial="writer")])
  store.record_reads([Read("r1", 0, 1, 1), Read("r1", 4, 1, 1), Read("r2", 2, 1, 1)])
  store.record_outcomes([Outcome("r1", 1.0, True), Outcome("r2", 0.0, False)])
  kept = store.fingerprint()
  assert store.lineage(1).mean_reward == 0.5  # over trials, not over reads
  store.commit([Remove("a", 1)], reads=[Read("r3", 0, 1, 3)], outcomes=[Outcome("r2", 3.0, True)])
  lineage = store.lineage(1)
  assert lineage.writer == "writer" and lineage.mean_reward == 2.0  # r2 was corrected
  assert [(read.trial, known and known.reward) for read, known in lineage.reads] == [
    ("r1", 1.0), ("r1", 1.0), ("r2", 3.0), ("r3", None),
  ]  # fmt: skip
  with pytest.raises(records.StoreError, match="not live"):
    store.record_reads([Read("r4", 0, 1, 4)])
  store.discard_after(3)
  assert store.lineage(1).mean_reward == 0.5 and len(store.lineage(1).reads) == 3
  assert store.fingerprint() == kept and check.verify(store.path) == []


def test_rollback_is_a_new_version_and_diff_shows_it(store):
  store.commit([add("x"), add("y")])
  store.commit([Change("a", 1, text="x2", score=3.0), Remove("a", 2), add("z")])
  diff = store.diff(1)
  assert [entry.text for entry in diff.added] == ["z"]
  assert [entry.text for entry in diff.removed] == ["y"]
  assert [(a.text, b.text, b.score) for a, b in diff.changed] == [("x", "x2", 3.0)]
  assert store.rollback(1).version == 3
  assert export(store).replace('"next_id":4', '"next_id":3') == export(store, at=1)
  assert texts(store, at=2) == ["x2", "z"]
  assert store.diff(1, 3) == records.Diff([], [], [])
  assert store.diff(3, 2).added == diff.added


def test_a_rollback_leaves_alone_what_is_equal_already(store):
  """So that a diff of one version shows every entry that it wrote."""
  store.commit([add("x"), add("y")])
  store.commit([Change("a", 1, score=1.0), Change("a", 2, score=1.0)])
  store.commit([Change("a", 1, score=0.0)])
  store.rollback(1)
  assert [(e.score, e.version) for e in store.entries("a")] == [(0.0, 3), (0.0, 4)]
  assert [after.id for _, after in store.diff(3).changed] == [2]


def test_a_slow_reader_and_a_writer_do_not_wait_for_each_other(store):
  store.commit([add("x")])
  with Store(store.path, read_only=True) as reader, reader._reading() as db:
    count = "SELECT count(*) FROM states"
    assert db.execute(count).fetchone() == (1,)
    store.commit([add("y")])
    assert db.execute(count).fetchone() == (1,) and store.count("a") == reader.count("a") == 2


def test_an_update_is_not_lost_between_reading_and_writing(store):
  """8 writers x 10 increments of one score; each could overwrite another's."""
  store.commit([add("x")])

  def work():
    for _ in range(10):
      store.update("a", [1], lambda entry: dataclasses.replace(entry, score=entry.score + 1))

  threads = [threading.Thread(target=work) for _ in range(8)]
  [thread.start() for thread in threads]
  [thread.join() for thread in threads]
  assert store.get("a", [1])[0].score == 80.0
  with pytest.raises(records.Conflict, match="read it again"):
    store.commit([add("y"), Change("a", 1, score=0.0, expect=1)])
  assert store.count("a") == 1


def test_a_commit_that_fails_in_the_database_leaves_all_as_it_was(store):
  store.commit([add("x")])
  before = export(store), store.fingerprint(), store.versions()
  other = sqlite3.connect(store.path / schema.FILE)
  trigger = "CREATE TRIGGER no BEFORE INSERT ON states WHEN NEW.entry = 3 BEGIN SELECT RAISE(ABORT, 'no room'); END"
  other.execute(trigger)
  with pytest.raises(records.StoreError, match="no room"):
    store.commit([Change("a", 1, score=4.0), add("y"), add("z")])
  assert (export(store), store.fingerprint(), store.versions()) == before
  other.execute("DROP TRIGGER no")
  other.close()
  assert store.commit([add("y")]).ids == (2,)  # and the id that failed was not used up


def test_a_full_disk_leaves_all_as_it_was(store):
  store.commit([add("x")])
  before = export(store), store.fingerprint()
  pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
  store._writer.execute(f"PRAGMA max_page_count={pages}")
  with pytest.raises(records.StoreError, match="full"):
    store.commit([add("long " * 10_000)])
  assert (export(store), store.fingerprint()) == before
  store._writer.execute("PRAGMA max_page_count=1000000")
  assert store.commit([add("long " * 10_000)]).version == 2


@pytest.mark.parametrize(
  ("op", "sentence"),
  [
    (Add("a", "k", "t", vector=array.array("f", [1.0])), "has 1 numbers and this memory keeps 2"),
    (Add("a", "k", "t", vector=array.array("f", [1.0, float("nan")])), "NaN or infinity"),
    (Add("a", "k", "t", vector=array.array("d", [1.0])), "float32"),
    (Add("a", "k", "half \ud800", vector=vector()), "not Unicode"),
    (Add("", "k", "t", vector=vector()), "no tenant"),
    (Add("a", "k", "t", score=float("inf"), vector=vector()), "not finite"),
    (Add("a", "k", "t", data={"x": float("nan")}, vector=vector()), "plain JSON"),
    (Change("a", 1, key="new"), "embed the key"),
  ],
)
def test_what_no_memory_should_hold_is_refused_whole(store, op, sentence):
  store.commit([add("x")])
  with pytest.raises(records.StoreError, match=sentence):
    store.commit([add("y"), op])
  assert texts(store) == ["x"] and store.version == 1


def test_another_embedder_is_refused_until_everything_is_embedded_anew(store, tmp_path):
  store.commit([add("x"), add("y", "b")])
  store.close()
  new = Manifest("minilm", 1, True)
  same_size = Manifest("other", 2, True)
  for manifest in (new, same_size):
    with pytest.raises(records.StoreError, match=r"memrl_jax.memory reindex .* --embedder"):
      Store(store.path, manifest)
  with Store(store.path) as store:
    one = array.array("f", [1.0])
    with pytest.raises(records.StoreError, match="1 have no new vector"):
      store.commit([Change("a", 1, vector=one)], manifest=new)
    store.commit([Change("a", 1, vector=one), Change("b", 2, vector=one)], manifest=new)
    assert store.manifest == new and store.manifest_at(1) == MANIFEST
    with pytest.raises(records.StoreError, match="all tenants"):
      store.rollback(1, tenant="a")
    store.rollback(1)
    assert store.manifest == MANIFEST and len(store.entries("a")[0].vector) == 8


def test_export_and_import_round_trip_byte_identical(store, tmp_path):
  nasty = 'a "quote"\n\x00\x1f\u2028 \\u0041 é 漢 🙂'
  store.commit([add(nasty), add("gone"), add("y", "b", 0.1, deep=[1, {"z": None}])])
  store.commit([Remove("a", 2), Change("a", 1, data={"b": 1, "a": 2})])
  transfer.export_jsonl(store, tmp_path / "one.jsonl")
  assert '"data":{"a":2,"b":1}' in export(store)  # in one order, whatever the dict's
  with Store(tmp_path / "copy", MANIFEST) as copy:
    assert transfer.import_jsonl(copy, tmp_path / "one.jsonl").version == 1
    transfer.export_jsonl(copy, tmp_path / "two.jsonl")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    with pytest.raises(records.StoreError, match="import with new ids"):
      transfer.import_jsonl(copy, tmp_path / "one.jsonl")
    again = transfer.import_jsonl(copy, tmp_path / "one.jsonl", new_ids=True)
    assert again.ids == (4, 5) and texts(copy, "a") == [nasty, nasty]
  with Store(tmp_path / "third", Manifest("minilm", 2)) as third:
    with pytest.raises(records.StoreError, match="reindex"):
      transfer.import_jsonl(third, tmp_path / "one.jsonl")
    with pytest.raises(records.StoreError, match="line 1"):
      transfer.import_lines(third, ["{}"])


def test_a_flipped_byte_is_found_or_harmless(store):
  """Any byte of the file: either verify tells, or nothing that was stored reads otherwise."""
  store.commit([add(f"text {i}" * 9, score=i, n=i) for i in range(40)])
  store.commit([Change("a", 3, score=9.0), Remove("a", 4)], reads=[Read("reader-9", 1, 3, 1)])
  store.close()
  original = (store.path / schema.FILE).read_bytes()
  assert check.verify(store.path) == []

  def flipped(at):
    broken = bytearray(original)
    broken[at] ^= 1 << rng.randrange(8)
    (store.path / schema.FILE).write_bytes(broken)
    return check.verify(store.path)

  rng = random.Random(0)
  for payload in (b"text 17", b"key of text 8", b'"n":23', vector(21.0).tobytes(), b"reader-9"):
    assert flipped(original.index(payload) + rng.randrange(len(payload))), payload
  found = 0
  for _ in range(150):
    if flipped(rng.randrange(len(original))):
      found += 1
    else:
      with Store(store.path, read_only=True) as same:
        state = [(e.id, e.text, e.score, e.data, e.vector) for e in same.entries("a")]
        assert same.lineage(3).reads[0][0] == Read("reader-9", 1, 3, 1)
      (store.path / schema.FILE).write_bytes(original)
      with Store(store.path, read_only=True) as right:
        entries = right.entries("a")
      assert state == [(e.id, e.text, e.score, e.data, e.vector) for e in entries]
  assert found > 30  # much of a young file is empty pages and free space


@pytest.mark.parametrize(
  "change",
  [
    "states SET died = 2 WHERE entry = 1",  # removed behind our back, at a version that exists
    "states SET died = NULL WHERE entry = 2 AND died = 2",
    "states SET score = 0.5 WHERE entry = 1",
    "states SET tenant = 'b' WHERE entry = 1",
    "states SET data = '{}' WHERE entry = 1",
    "states SET content = 2 WHERE entry = 1",
    "contents SET text = 'y' WHERE content = 1",
    "contents SET vector = zeroblob(8) WHERE content = 1",
    "versions SET next_id = 9 WHERE version = 1",
    "versions SET why = 'me' WHERE version = 1",
    "reads SET entry = 2",
    "outcomes SET reward = 1",
  ],
)
def test_a_value_that_is_changed_by_hand_is_found(store, change):
  store.commit([add("x", score=1, n=1), add("y")])
  store.commit([Remove("a", 2)], reads=[Read("r", 0, 1, 1)], outcomes=[Outcome("r", 0.0, False)])
  store.close()
  other = sqlite3.connect(store.path / schema.FILE)
  assert other.execute(f"UPDATE {change}").rowcount == 1
  other.commit()
  other.close()
  assert check.verify(store.path)


def test_a_snapshot_is_whole_and_restores_with_a_way_back(store, tmp_path):
  store.commit([add("x")], why="first")
  assert transfer.snapshot(store, tmp_path / "saved") == 1
  with pytest.raises(records.StoreError, match="exists already"):
    transfer.snapshot(store, tmp_path / "saved")
  store.commit([add("later")])
  fingerprint = store.fingerprint()
  with pytest.raises(records.Locked, match="close it first"):
    transfer.restore(tmp_path / "saved", store.path)
  store.close()
  with pytest.raises(records.StoreError, match="is a snapshot"):
    Store(tmp_path / "saved")
  kept = transfer.restore(tmp_path / "saved", store.path)
  with Store(store.path) as back:
    assert texts(back) == ["x"] and back.versions()[1]["why"] == "first"
    back.commit([add("other")])
  transfer.restore(kept, store.path)
  with Store(store.path) as back:
    assert back.fingerprint() == fingerprint and texts(back) == ["x", "later"]
  assert check.verify(store.path) == check.verify(kept) == check.verify(tmp_path / "saved") == []


def test_a_damaged_snapshot_is_refused_and_a_damaged_memory_is_replaced(store, tmp_path):
  store.commit([add("x")])
  transfer.snapshot(store, tmp_path / "good")
  transfer.snapshot(store, tmp_path / "bad")
  store.close()
  file = tmp_path / "bad" / schema.FILE
  for at in (30, file.stat().st_size // 2, file.stat().st_size - 1):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    assert any("sha256" in problem for problem in check.verify(tmp_path / "bad"))
    with pytest.raises(records.StoreError, match="cannot be restored"):
      transfer.restore(tmp_path / "bad", store.path)
    data[at] ^= 1
    file.write_bytes(data)
  assert check.verify(tmp_path / "bad") == []
  (store.path / schema.FILE).write_bytes(b"no database at all")
  kept = transfer.restore(tmp_path / "good", store.path)
  assert (kept / schema.FILE).read_bytes() == b"no database at all"
  with Store(store.path) as back:
    assert texts(back) == ["x"]


def test_a_file_of_schema_1_is_brought_up_and_a_newer_one_is_refused(tmp_path):
  """Schema 1 knew no lineage; its checksums stay valid."""
  folder = tmp_path / "old"
  with Store(folder, MANIFEST) as store:
    store.commit([add("x", trial="t")])
    fingerprint = store.fingerprint()
  old = sqlite3.connect(folder / schema.FILE, isolation_level=None)
  old.executescript("DROP TABLE reads; DROP TABLE outcomes; PRAGMA user_version=1;")
  old.close()
  assert check.verify(folder) == []
  with pytest.raises(records.StoreError, match="open it once for writing"):
    Store(folder, read_only=True)
  with Store(folder) as store:
    assert store.fingerprint() == fingerprint and store.manifest == MANIFEST
    store.record_reads([Read("r", 0, 1, 1)])
    assert store.lineage(1).writer == "t"
  assert check.verify(folder) == []
  new = sqlite3.connect(folder / schema.FILE)
  new.execute(f"PRAGMA user_version={records.SCHEMA + 1}")
  new.close()
  with pytest.raises(records.StoreError, match="upgrade memrl_jax"):
    Store(folder)


def test_a_folder_that_may_not_be_written_is_read_without_a_trace(store, monkeypatch):
  store.commit([add("x")])
  store.close()
  files = set(os.listdir(store.path)) | {"readers.lock"}
  monkeypatch.setattr(os, "access", lambda *_: False)  # the tests may run as root
  with Store(store.path, read_only=True) as reader:
    assert texts(reader) == ["x"] and set(os.listdir(store.path)) == files


def test_one_merge_hook_sees_what_is_about_to_come(tmp_path):
  seen = []
  limits = Limits(1, merge=lambda entries: seen.append([(e.id, e.text) for e in entries]) or [])
  with Store(tmp_path / "m", MANIFEST, limits=limits) as store:
    store.commit([add("x"), add("b's", "b")])
    assert seen == []  # nobody is over
    store.commit([add("b's", "b"), add("y")], once=True)
  assert seen == [[(1, "x"), (-2, "y")]]


def test_a_merge_hook_sees_what_is_added_once_and_may_remove_it(tmp_path):
  limits = Limits(2, merge=lambda entries: [Remove("a", e.id) for e in entries if e.id < 0][1:])
  with Store(tmp_path / "m", MANIFEST, limits=limits) as store:
    store.commit([add("x"), add("y")])
    done = store.commit([add("u"), add("v"), add("v"), add("u")], once=True)
    assert done.merged == (4,) and done.ids == (3, 4, 4, 3)
    assert "u" in texts(store) and "v" not in texts(store)
