"""Random lives of a memory against the simplest thing that could be right: a list of dicts."""

import array
import pathlib
import shutil
import tempfile

import hypothesis
import pytest
from hypothesis import stateful, strategies

from memrl_jax.memory import check, records
from memrl_jax.memory.store import Store

FAST = "/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None  # no law is about the disk
MANIFEST = records.Manifest("hash", 2, False)
TENANTS = strategies.sampled_from(["a", "b"])
WORDS = strategies.one_of(
  strategies.sampled_from(["x", "y"]),
  strategies.text(strategies.characters(exclude_categories=["Cs"]), max_size=9),
)
SCORES = strategies.sampled_from([-1.0, -0.0, 0.5, 2.0])
DATA = strategies.sampled_from([{}, {"trial": "t"}, {"n": 1, "deep": [True, None]}])
VECTORS = strategies.sampled_from([[0.0, 1.0], [0.5, -3.0]]).map(lambda v: array.array("f", v))
LIMITS = strategies.sampled_from([None, records.Limits(3), records.Limits(3, "lowest_score")])


def fields(entry):
  return (entry.tenant, entry.key, entry.text, entry.score, entry.data, entry.vector)


class Life(stateful.RuleBasedStateMachine):
  """`states[v]` is {id: fields} at version v, and `next_ids[v]` the first id not given by then."""

  @stateful.initialize(limits=LIMITS)
  def open(self, limits):
    self.folder = pathlib.Path(tempfile.mkdtemp(dir=FAST))
    self.limits = limits
    self.store = Store(self.folder, MANIFEST, limits=limits)
    self.states, self.next_ids = [{}], [1]

  def teardown(self):
    if hasattr(self, "store"):
      for version, state in enumerate(self.states):
        found = {entry.id: fields(entry) for entry in self.store.entries(None, at=version)}
        assert found == state
      self.store.close()
      assert check.verify(self.folder) == []
      shutil.rmtree(self.folder)

  def put(self, state, next_id):
    self.states.append(state)
    self.next_ids.append(next_id)

  @stateful.rule(
    adds=strategies.lists(
      strategies.tuples(TENANTS, WORDS, WORDS, SCORES, DATA, VECTORS), min_size=1, max_size=5
    ),
    once=strategies.booleans(),
  )
  def add(self, adds, once):
    state, next_id, expected = dict(self.states[-1]), self.next_ids[-1], []
    for tenant, key, text, score, data, vector in adds:
      twins = [id for id, old in state.items() if old[:3] == (tenant, key, text)]
      if once and twins:
        expected.append(min(twins))
        continue
      state[next_id] = (tenant, key, text, score, data, vector.tobytes())
      expected.append(next_id)
      next_id += 1
    new = set(state) - set(self.states[-1])
    for tenant in {state[id][0] for id in new} if self.limits else ():
      mine = sorted(id for id in state if state[id][0] == tenant)
      if self.limits.evict == "lowest_score":
        mine.sort(key=lambda id: state[id][3])
      for id in mine[: max(0, len(mine) - self.limits.max_entries)]:
        del state[id]
    done = self.store.commit([records.Add(*fields) for fields in adds], once=once)
    assert list(done.ids) == expected
    self.put(state, next_id)

  @stateful.rule(data=strategies.data(), text=WORDS, score=SCORES, twice=strategies.booleans())
  def change(self, data, text, score, twice):
    if self.states[-1]:
      state = dict(self.states[-1])
      id = data.draw(strategies.sampled_from(sorted(state)))
      tenant, key, _, _, kept, vector = state[id]
      state[id] = (tenant, key, text, score, kept, vector)
      first = [records.Change(tenant, id, text="first")] if twice else []
      self.store.commit([*first, records.Change(tenant, id, text=text, score=score)])
      self.put(state, self.next_ids[-1])

  @stateful.rule(data=strategies.data())
  def remove(self, data):
    if self.states[-1]:
      state = dict(self.states[-1])
      id = data.draw(strategies.sampled_from(sorted(state)))
      self.store.commit([records.Remove(state.pop(id)[0], id)])
      self.put(state, self.next_ids[-1])

  @stateful.rule(tenant=TENANTS, least=SCORES)
  def remove_where(self, tenant, least):
    self.store.remove_where(records.Where(tenant, min_score=least))
    state = self.states[-1].items()
    state = {id: old for id, old in state if old[0] != tenant or old[3] < least}
    self.put(state, self.next_ids[-1])

  @stateful.rule(tenant=TENANTS)
  def fail(self, tenant):
    """An operation that is refused takes the good ones before it along."""
    good = records.Add(tenant, "k", "good", vector=bytes(8))
    with pytest.raises(records.StoreError):
      self.store.commit([good, records.Remove(tenant, 10**9)])

  @stateful.rule(data=strategies.data(), tenant=strategies.sampled_from([None, "a", "b"]))
  def rollback(self, data, tenant):
    version = data.draw(strategies.integers(0, len(self.states) - 1))
    then, now = self.states[version].items(), self.states[-1].items()
    state = {id: old for id, old in now if tenant is not None and old[0] != tenant}
    state |= {id: old for id, old in then if tenant is None or old[0] == tenant}
    assert self.store.rollback(version, tenant).version == len(self.states)
    self.put(state, self.next_ids[-1])

  @stateful.rule(data=strategies.data())
  def discard(self, data):
    version = data.draw(
      strategies.integers(max(0, len(self.states) - 4), max(0, len(self.states) - 2))
    )
    known = self.store.fingerprint(version)
    self.store.discard_after(version)
    assert self.store.fingerprint() == known
    del self.states[version + 1 :], self.next_ids[version + 1 :]

  @stateful.rule()
  def reopen(self):
    self.store.close()
    self.store = Store(self.folder, limits=self.limits)

  @stateful.invariant()
  def agrees(self):
    if hasattr(self, "store"):
      assert self.store.version == len(self.states) - 1
      assert self.store.next_id() == self.next_ids[-1]
      assert {e.id: fields(e) for e in self.store.entries(None)} == self.states[-1]
      for tenant in "ab":
        mine = {id for id, old in self.states[-1].items() if old[0] == tenant}
        assert {entry.id for entry in self.store.entries(tenant)} == mine
        assert self.store.count(tenant) == len(mine)


TestLife = Life.TestCase
TestLife.settings = hypothesis.settings(
  max_examples=80, stateful_step_count=30, deadline=None, derandomize=True, database=None
)
