"""The fence between readers, writer and trainer: nothing lost, nothing twice, whatever the order."""

import copy
import json
import pathlib
import tempfile
import threading
import time

import numpy as np
import pytest

from memrl_jax.memory import embed, experience, manager
from memrl_jax.memory.experience import Ended, Shown
from memrl_jax.memory.experience_config import ExperienceConfig
from memrl_jax.memory.records import Outcome, Read, StoreError
from memrl_jax.types import Recall, Sample

FAST = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None  # no law is about the disk


def says(*operations):
  return f"<answer>{json.dumps(operations)}</answer>"


def add(text):
  return {"op": "add", "experience": text}


def sample(text, ids=(1, 2)):
  ids = np.array(ids, np.int32)
  return Sample(text, np.arange(2, dtype=np.int32), ids, -np.ones(len(ids), np.float32))


def open_manager(**options):
  config = ExperienceConfig(batch=1, buffer=64, cool_down=1)
  bank = experience.ExperienceBank.open(None, embed.Hash(32), config)
  return manager.ExperienceManager(manager.ManagerConfig(**options), bank)


@pytest.fixture(scope="module")
def shared():
  disk, tempfile.tempdir = tempfile.tempdir, FAST
  made = {mode: open_manager(deterministic=mode) for mode in (True, False)}
  tempfile.tempdir = disk
  yield made
  for one in made.values():
    one.close()


@pytest.fixture
def calm(shared):
  shared[True].reset()
  return shared[True]


def distill(one, text, shown=()):
  one.submit("distill", "s", shown, trial=text)
  ticket = one.next()
  one.finish(ticket, sample(says(add(text))), extractor=one.serving)
  return ticket


def texts(one):
  return [entry.text for entry in one.bank.memory.entries("s")]


# --- tickets -------------------------------------------------------------------------------------


def test_an_answer_is_applied_once_and_in_the_order_of_the_tickets(calm):
  first, second = (calm.submit("distill", "s", trial=name) for name in "ab")
  assert calm.next() is first and calm.next() is second and calm.next() is None
  calm.finish(second, sample(says(add("second"))), extractor=0)
  assert calm.flush() == []  # the first one may still come
  calm.finish(first, sample(says(add("first"))), extractor=0)
  with pytest.raises(StoreError, match="not out"):
    calm.finish(first, sample(says(add("again"))), extractor=0)
  with pytest.raises(StoreError, match="not out"):
    calm.fail(second)
  assert [ticket for ticket, _ in calm.flush()] == [first, second]
  assert calm.flush() == [] and texts(calm) == ["first", "second"]
  assert calm.stats()["refused"] == 2


def test_an_answer_of_weights_that_never_served_is_refused_and_one_that_failed_holds_up_nobody(
  calm,
):
  lost, kept = (calm.submit("distill", "s") for _ in "ab")
  assert calm.next() is lost and calm.next() is kept
  with pytest.raises(StoreError, match="version 1 of the extractor"):
    calm.finish(lost, sample(says(add("future"))), extractor=1)
  calm.fail(lost)
  calm.finish(kept, sample("no answer at all"), extractor=0)
  ((_, applied),) = calm.flush()
  assert applied.ids == () and "no answer tag" in applied.reason and texts(calm) == []


def test_merges_pass_the_same_fence(calm):
  for name in ("one", "two"):
    distill(calm, name)
  calm.flush()
  chunk = calm.bank.chunk("s")
  calm.submit("merge", "s", [Shown(entry.id, entry.version) for entry in chunk], trial="m")
  merge = {"op": "merge", "indices": [1, 2], "experience": "both"}
  calm.finish(calm.next(), sample(says(merge)), extractor=0)
  ((_, applied),) = calm.flush()
  assert applied.ids == (chunk[0].id,) and texts(calm) == ["both"]


# --- training ------------------------------------------------------------------------------------


def guide(one, trial, success, *queries):
  """A trial that reads for each query and ends."""
  reads = [
    Read(trial, n, memo.id, memo.version)
    for n, query in enumerate(queries)
    for memo in one.recall([Recall("s", query)])[0]
  ]
  outcome = Outcome(trial, float(success), success)
  one.bank.credit([Ended("s", outcome, tuple(reads))])


def test_nothing_is_written_between_begin_and_sync_and_searches_go_on(calm):
  for name in ("red key", "blue door"):
    distill(calm, name)
  assert calm.begin() is None  # what waited is applied, and no sample has been paid
  guide(calm, "t", True, "red key", "blue door")
  distill(calm, "before")
  training = calm.begin()
  assert texts(calm) == ["red key", "blue door", "before"] and training.base == 0
  distill(calm, "during")
  assert calm.begin() is None and calm.flush() == [] and calm.stats()["pending"] == 1
  assert calm.recall([Recall("s", "before")], scratch={})[0][0].text == "before"
  with pytest.raises(StoreError, match="not at this point"):
    calm.sync(training)
  assert calm.done(training) == 1 and calm.serving == 0 and calm.flush() == []
  for again in (calm.done, calm.abandon):
    with pytest.raises(StoreError, match="not at this point"):
      again(training)
  assert calm.sync(training) == 1 == calm.serving
  with pytest.raises(StoreError, match="not at this point"):
    calm.sync(training)
  assert [applied.ids for _, applied in calm.flush()] == [(4,)]


def test_an_abandoned_update_gives_its_samples_back(calm):
  for name in ("red key", "blue door"):
    distill(calm, name)
  calm.flush()
  guide(calm, "t", True, "red key", "blue door")
  training = calm.begin()
  calm.abandon(training)
  again = calm.begin()
  assert again.batch.generations == training.batch.generations and calm.weights == 0
  with pytest.raises(StoreError, match="not at this point"):
    calm.done(training)
  calm.abandon(again)


class World:
  """A run around the manager that keeps its own books: what must be in the bank and in the weights.

  weights: one number for each update of the extractor that was kept, the pairs that it trained on.
  owed: name of each job that must be applied once. pairs: how many were paid.
  """

  def __init__(self, one, rng):
    self.manager, self.rng = one, rng
    self.weights, self.owed, self.failed, self.pairs, self.names = [], [], [], 0, 0
    self.out, self.training, self.late = [], None, []
    self.save()

  def save(self):
    arrays, rest = self.manager.state()
    # Trained weights that are not served yet are in the checkpoint, and the manager says so.
    assert rest["weights"] == len(self.weights)
    mine = (self.weights, self.owed, self.failed, self.pairs, self.names)
    self.kept = arrays, json.dumps(rest), copy.deepcopy(mine)

  def crash(self):
    self.late += [(self.manager.finish, ticket) for ticket in self.out]
    if self.training is not None:
      self.late += [(self.manager.done, self.training), (self.manager.sync, self.training)]
    arrays, rest, mine = self.kept
    self.manager.load(arrays, json.loads(rest))
    self.weights, self.owed, self.failed, self.pairs, self.names = copy.deepcopy(mine)
    self.out, self.training = [], None

  def submit(self):
    self.names += 1
    self.owed.append(f"job {self.names}")
    self.manager.submit("distill", "s", trial=self.owed[-1])

  def take(self):
    ticket = self.manager.next()
    if ticket is not None:
      self.out.append(ticket)

  def answer(self):
    if self.out:
      ticket = self.out.pop(self.rng.integers(len(self.out)))
      reply = sample(says(add(ticket.trial)))
      self.manager.finish(ticket, reply, extractor=self.manager.serving)
      self.late.append((self.manager.finish, ticket))

  def lose(self):
    if self.out and self.rng.random() < 0.3:
      ticket = self.out.pop()
      self.manager.fail(ticket)
      self.owed.remove(ticket.trial)
      self.failed.append(ticket.trial)

  def flush(self):
    self.manager.flush()

  def play(self):
    self.names += 1
    memos = self.manager.recall([Recall("s", f"job {self.rng.integers(9)}")])[0]
    name = f"trial {self.names}"
    reads = tuple(Read(name, 0, memo.id, memo.version) for memo in memos)
    success = bool(self.rng.integers(2))
    self.manager.bank.credit([Ended("s", Outcome(name, 0.0, success), reads)])
    self.pairs += len(memos)

  def train(self):
    """One step of the update of the extractor, whatever comes next."""
    if self.training is None:
      self.training = self.manager.begin()
    elif len(self.weights) == self.training.base:
      if self.rng.random() < 0.3:
        self.manager.abandon(self.training)
        self.late.append((self.manager.done, self.training))
        self.training = None
      else:
        self.manager.done(self.training)
        self.weights.append(int(self.training.batch.pairs_N.sum()))
    else:
      self.manager.sync(self.training)
      self.late.append((self.manager.sync, self.training))
      self.training = None

  def trouble(self):
    """Something that comes late is tried again."""
    if self.late:
      call, what = self.late[self.rng.integers(len(self.late))]
      arguments = (what, sample(says(add("twice"))))
      with pytest.raises(StoreError):
        if call == self.manager.finish:
          call(*arguments, extractor=0)
        else:
          call(what)

  def end(self):
    while self.training is not None:
      self.train()
    self.take()
    while self.out:
      self.answer()
      self.take()
    self.flush()


@pytest.mark.parametrize("block", range(4))
def test_no_update_is_lost_or_doubled_in_200_random_orders(shared, block):
  trained = resumed = 0
  for seed in range(50 * block, 50 * block + 50):
    rng = np.random.default_rng([7, seed])
    one = shared[bool(seed % 2)]
    one.reset()
    world = World(one, rng)
    moves = [world.submit, world.take, world.answer, world.play, world.train] * 4
    moves += [world.train, world.flush, world.flush, world.lose, world.trouble]
    moves += [world.save, world.save, world.crash]
    for _ in range(100):
      move = moves[rng.integers(len(moves))]
      resumed += move == world.crash
      move()
    world.end()
    # Each job that was submitted and not given up stands in the bank once, and nothing else does.
    assert sorted(texts(one)) == sorted(world.owed), seed
    assert one.stats()["out"] == one.stats()["queue"] == one.stats()["pending"] == 0
    # Every pair was trained on once or still waits; every update is in the weights once.
    waiting = sum(row[2] for row in one.bank.state()[1]["samples"]["buffer"])
    assert sum(world.weights) + waiting == world.pairs, seed
    assert len(world.weights) == one.weights == one.serving == one.bank.stats()["updates"], seed
    trained += len(world.weights)
  assert trained > 50 and resumed > 50  # or nothing was tested


# --- threads -------------------------------------------------------------------------------------


def test_queries_of_many_threads_share_searches(shared):
  one = shared[False]
  one.reset()
  for n in range(20):
    distill(one, f"lesson number {n}")
  one.flush()
  calls, search = [], one.bank.search
  one.bank.search = lambda *a, **k: calls.append(len(a[1])) or search(*a, **k)
  found, scratch = {}, {}
  go = threading.Barrier(32)

  def ask(n):
    go.wait()
    asks = [Recall("s", f"lesson number {n % 20}"), Recall("nobody", "x")]
    found[n] = one.recall(asks, None if n % 2 else scratch)

  threads = [threading.Thread(target=ask, args=(n,)) for n in range(32)]
  patient = manager.ManagerConfig(batch=64, wait_s=0.5, deterministic=False)
  one.config, config = patient, one.config
  try:
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(20)
  finally:
    one.config, one.bank.search = config, search
  assert all(len(found[n][0]) == 1 and found[n][1] == () for n in range(32))
  assert sum(calls) == 64 and len(calls) < 32  # 4 (two scopes, counted or not) if all met
  assert sum(row[1] for row in one.bank.state()[1]["shown"]) == 16  # evaluations are not counted


def test_an_error_reaches_everybody_who_waits_for_the_same_search(shared):
  one = shared[False]
  one.reset()
  search, one.bank.search = one.bank.search, lambda *a, **k: 1 / 0
  errors = []

  def ask():
    try:
      one.recall([Recall("s", "x")])
    except ZeroDivisionError as error:
      errors.append(error)

  threads = [threading.Thread(target=ask, daemon=True) for _ in range(8)]
  try:
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(2)
  finally:
    one.bank.search = search
  assert len(errors) == 8


def test_readers_never_see_half_a_job_and_lose_no_write(shared):
  """A job adds two entries: a reader finds both or none."""
  one = shared[False]
  one.reset()
  stop, sizes, found = threading.Event(), set(), [0] * 4

  def read(n):
    while not stop.is_set():
      sizes.add(len(texts(one)))
      found[n] += len(one.recall([Recall("s", "left 3")])[0])
      one.stats()

  threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
  for thread in threads:
    thread.start()
  try:
    for n in range(30):
      one.submit("distill", "s", trial=str(n))
      reply = says(add(f"left {n}"), add(f"right {n}"))
      one.finish(one.next(), sample(reply), extractor=0)
      if n % 3 == 2:
        one.flush()
        one.bank.prune(before=n)
      time.sleep(0)
  finally:
    stop.set()
    for thread in threads:
      thread.join(20)
  assert len(texts(one)) == 60 and min(found) > 0
  assert len(sizes) > 2 and all(size % 2 == 0 for size in sizes)
  shown = sum(row[1] for row in one.bank.state()[1]["shown"])
  assert shown == sum(found)  # no count was lost among the threads


def test_a_writer_embeds_before_it_takes_the_fence(shared):
  """A sentence encoder takes its time: nobody who submits or finishes must stand there for it."""
  one = shared[False]
  one.reset()
  cached = one.bank.memory.embedder
  plain, asked = cached.embedder, []

  class Watched:
    def embed(self, texts):
      asked.extend((text, one._fence._is_owned(), one.bank._writing._is_owned()) for text in texts)
      return plain.embed(texts)

  cached.embedder = Watched()
  try:
    distill(one, "a text that nobody has seen")
    one.flush()
    one.recall([Recall("s", "asked twice")] * 2)
  finally:
    cached.embedder = plain
  assert asked == [("a text that nobody has seen", False, False), ("asked twice", False, False)]


def test_searches_go_on_while_a_disk_writes(shared):
  one = shared[False]
  one.reset()
  distill(one, "first")
  one.flush()
  distill(one, "second")
  store = one.bank.memory.store
  commit = store.commit
  writing, written, done = threading.Event(), threading.Event(), threading.Event()

  def slow(*a, **k):
    writing.set()
    written.wait(3)
    done.set()
    return commit(*a, **k)

  store.commit, thread = slow, threading.Thread(target=one.flush)
  try:
    thread.start()
    assert writing.wait(20)
    assert one.recall([Recall("s", "first")])[0][0].text == "first"
    assert not done.is_set()
  finally:
    written.set()
    thread.join(20)
    store.commit = commit
  assert texts(one) == ["first", "second"]


def test_a_slow_extractor_does_not_hold_up_searches(shared):
  one = shared[False]
  one.reset()
  distill(one, "first")
  one.flush()
  one.submit("distill", "s", trial="slow")
  ticket, thinking = one.next(), threading.Event()

  def extract():
    thinking.wait(20)
    one.finish(ticket, sample(says(add("slow"))), extractor=0)

  thread = threading.Thread(target=extract)
  thread.start()
  for _ in range(5):  # no lock is held while the extractor thinks
    assert one.recall([Recall("s", "first")])[0][0].text == "first"
  assert one.flush() == []
  thinking.set()
  thread.join(20)
  assert len(one.flush()) == 1


# --- replay --------------------------------------------------------------------------------------


def test_the_same_calls_give_the_same_bank_bit_for_bit(calm):
  def life(start, stop):
    seen = []
    for n in range(start, stop):
      rng = np.random.default_rng([1, n])
      calm.step = n
      guide(calm, f"t{n}", bool(rng.integers(2)), f"job {n - 1}", f"job {n // 2}")
      calm.submit("distill", "s", trial=f"job {n}", payload={"n": n})
      if n % 3 == 2:  # the answers come in another order than the questions
        tickets = [calm.next() for _ in range(3)]
        for ticket in reversed([ticket for ticket in tickets if ticket]):
          ids = rng.integers(9, size=2)
          calm.finish(ticket, sample(says(add(ticket.trial)), ids), extractor=calm.serving)
      training = calm.begin()
      if training is not None:
        seen.append((training.batch.generations, training.batch.reward_N.tolist()))
        calm.done(training)
        calm.sync(training)
      seen.append(texts(calm))
    return seen

  first = life(0, 10)  # ends with a job that waits
  arrays, rest = calm.state()
  saved = json.dumps(rest)
  second = life(10, 20)
  expected_arrays, expected = calm.state()
  calm.load(arrays, json.loads(saved))
  assert life(10, 20) == second
  calm.reset()
  assert life(0, 10) == first and life(10, 20) == second
  got_arrays, got = calm.state()
  assert got == expected and any(isinstance(item, tuple) for item in second)
  for name, array in expected_arrays.items():
    np.testing.assert_array_equal(got_arrays[name], array)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"wait_s": 2.0}])
def test_config_checks_itself(wrong):
  with pytest.raises(ValueError, match=r"config\.manager"):
    manager.ManagerConfig(**wrong)
