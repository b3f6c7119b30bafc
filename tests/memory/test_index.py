"""Exact search is the definition, whatever is added and removed; an inverted file is not seen."""

import dataclasses

import faiss
import numpy as np
import pytest

from memrl_jax.memory import ann, index

D = 16
SMALL = ann.Policy(min_size=600, budget_ms=0, lists=8, background=False)


def unit(rng, n, topics=20, spread=0.35, shift=0):
  """Unit vectors around topic centres; another `shift`, other topics."""
  centres = np.random.default_rng(100 + shift).normal(size=(topics, D))
  made = centres[rng.integers(topics, size=n)] + spread * rng.normal(size=(n, D))
  return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


def oracle(live, query, k=None, least=None):
  """(-similarity, id) over a dict of vectors, in float64."""
  scored = [
    (np.float32(v.astype(float) @ query.astype(float)), number) for number, v in live.items()
  ]
  scored = sorted((-s, number) for s, number in scored if least is None or s > np.float32(least))
  return [number for _, number in scored][:k], [-s for s, _ in scored][:k]


def assert_equal(found, want):
  assert found.ids.tolist() == want[0]
  np.testing.assert_allclose(found.similarity, want[1], rtol=0, atol=1e-7)


def filled(policy, vectors):
  made = index.Index(D, policy)
  made.add(range(1, 1 + len(vectors)), vectors)
  return made


def switch(made):
  """One switch, as a memory does it; whether there was one."""
  kind = made.due()
  if kind is None:
    return False
  return made.swap(ann.Ann.build(kind, *made.begin(), made.policy))


def test_equals_brute_force_over_random_changes_with_many_ties():
  rng = np.random.default_rng(0)
  pool = unit(rng, 12)  # few distinct vectors: the k-th place is nearly always a tie
  made, live, next_id = index.Index(D, ann.Policy()), {}, 1
  for _ in range(60):
    if rng.random() < 0.6 or not live:
      ids = list(range(next_id, next_id + int(rng.integers(1, 9))))
      next_id = ids[-1] + 1
    else:
      ids = rng.choice(
        list(live), int(rng.integers(1, 1 + len(live) // 2 + 1)), replace=False
      ).tolist()
    if rng.random() < 0.4:
      made.remove([*ids, 10_000])
      live = {number: vector for number, vector in live.items() if number not in ids}
    else:
      vectors = pool[rng.integers(len(pool), size=len(ids))]
      made.add(ids, vectors)
      live |= dict(zip(ids, vectors, strict=True))
    assert len(made) == len(live)
    query = pool[rng.integers(len(pool))]
    for k, least in ((1, None), (5, None), (None, 0.5), (7, float(pool[0] @ query)), (None, None)):
      assert_equal(made.search_batch(query[None], k, least)[0], oracle(live, query, k, least))


def test_equal_vectors_rank_by_id_however_their_rows_lie():
  made = filled(ann.Policy(), np.repeat(unit(np.random.default_rng(0), 1), 100, 0))
  made.remove(range(2, 61, 2))  # 1, then a high id in the row of 2, then 3, ...
  found = made.search_batch(made.vectors.matrix_ND[:1], 12)[0]
  assert found.ids.tolist() == list(range(1, 25, 2))


@pytest.mark.parametrize("count", [1, 64])  # FAISS sums one query and many in different orders
def test_a_threshold_is_exclusive_and_the_same_number_on_every_path(count):
  rng = np.random.default_rng(1)
  vectors = unit(rng, 900)
  exact, approximate = filled(ann.Policy(), vectors), filled(SMALL, vectors)
  assert switch(approximate)
  query = vectors[3]
  edge = exact.search_batch(query[None], 20)[0].similarity[9]
  for made in (exact, approximate):
    for k in (20, None):
      found = made.search_batch(np.repeat(query[None], count, 0), k, float(edge))
      assert {len(best.ids) for best in found} == {9}


@pytest.mark.parametrize("kind", ann.KINDS)
def test_an_inverted_file_gives_the_exact_results_and_survives_changes(kind):
  rng = np.random.default_rng(2)
  vectors = unit(rng, 1200)
  policy = dataclasses.replace(SMALL, kind=kind)
  made, live = filled(policy, vectors[:1000]), dict(enumerate(vectors[:1000], 1))
  kind, snapshot = made.due(), made.begin()
  made.remove(range(1, 200))  # while it is built
  made.add(range(1001, 1101), vectors[1000:1100])
  made.add([500], vectors[1:2])
  assert made.due() is None  # one at a time
  assert made.swap(ann.Ann.build(kind, *snapshot, policy))
  made.add(range(1101, 1150), vectors[1100:1149])
  made.remove(range(1101, 1111))
  assert len(made.fresh) == 0  # a tenth of the size: they went into the file
  made.add(range(1150, 1180), vectors[1149:1179])  # these are scanned beside it
  made.remove(range(1150, 1160))
  assert len(made.fresh) == 20
  found = made.search_batch(vectors[1149:1179], 1)
  assert [best.ids[0] for best in found][10:] == list(range(1160, 1180))
  live |= {1001 + n: vectors[1000 + n] for n in range(149)} | {500: vectors[1]}
  live |= {1160 + n: vectors[1159 + n] for n in range(20)}
  live = {n: v for n, v in live.items() if not (n < 200 or 1101 <= n < 1111)}
  assert len(made) == len(live) == len(made.ann) + len(made.fresh)
  queries = unit(rng, 50)
  found = made.search_batch(queries, 10)
  exact = [oracle(live, query, 10) for query in queries]
  assert ann.overlap([ids for ids, _ in exact], [best.ids for best in found]) >= 0.95
  for query, best in zip(queries, found, strict=True):
    assert len(set(best.ids.tolist())) == 10 and set(best.ids.tolist()) <= set(live)
    for number, similarity in zip(best.ids.tolist(), best.similarity, strict=True):
      assert similarity == np.float32(live[number].astype(float) @ query.astype(float))
    assert np.all(np.diff(best.similarity) <= 0)
  made.remove(list(live)[5:])
  assert_equal(
    made.search_batch(queries[:1], 10)[0], oracle(dict(list(live.items())[:5]), queries[0])
  )


def test_topics_that_move_bring_the_scan_back_and_then_another_inverted_file():
  rng = np.random.default_rng(3)
  made = filled(SMALL, unit(rng, 700))
  assert switch(made)
  queries = unit(rng, 50, shift=1)
  for start in range(701, 2100, 100):  # other topics, until it is noticed
    made.add(range(start, start + 100), unit(rng, 100, topics=2, spread=0.05, shift=1))
    assert made.recall(queries) >= 0.95 or made.ann is None
    if made.ann is None:
      break
  assert made.ann is None
  made.search_batch(
    queries, 10
  )  # most are of topics that no entry has: the least likely to be found
  assert switch(made) and made.recall(queries) >= 0.95


def test_no_switch_without_size_time_and_recall():
  rng = np.random.default_rng(4)
  policy = ann.Policy(min_size=600, lists=8, budget_ms=5, background=False)
  assert policy.kind_for(599, [1.0] * 64) is None
  assert policy.kind_for(600, [0.001] * 60 + [1.0] * 3) is None  # p95 of 63: below
  assert policy.kind_for(600, [0.001] * 60 + [1.0] * 4) == "ivf_sq8"
  assert dataclasses.replace(policy, lists=16).kind_for(623, [1.0] * 64) is None  # 39 * 16 = 624
  assert policy.kind_for(3_000_000, [1.0] * 64) == "ivf_pq"
  assert ann.Policy().lists_for(100_000) == 1264 and ann.Policy().lists_for(1000) == 25
  # Noise in PQ codes of 2 bytes: no number of lists reaches a recall of 1, and the scan stays.
  noise = rng.normal(size=(700, D)).astype(np.float32)
  noise /= np.linalg.norm(noise, axis=1, keepdims=True)
  made = filled(dataclasses.replace(SMALL, kind="ivf_pq", recall=1.0), noise)
  assert not switch(made) and made.ann is None and made.due() is None
  assert_equal(made.search_batch(noise[:1], 10)[0], oracle(dict(enumerate(noise, 1)), noise[0], 10))


@pytest.mark.parametrize("kind", ann.KINDS)
def test_an_inverted_file_is_the_same_bytes_whatever_the_threads(kind):
  vectors = unit(np.random.default_rng(6), 3000)
  policy = dataclasses.replace(SMALL, kind=kind, recall=0.5)
  dumps, threads = [], faiss.omp_get_max_threads()
  for count in (1, 4, 2):
    faiss.omp_set_num_threads(count)
    built = ann.Ann.build(kind, np.arange(1, 3001), vectors, vectors[:0], policy)
    dumps.append(built.dump().tobytes())
    assert faiss.omp_get_max_threads() == count
  faiss.omp_set_num_threads(threads)
  assert dumps[0] == dumps[1] == dumps[2]


def test_vectors_in_a_mapped_file_are_the_same_and_damage_is_refused():
  rng = np.random.default_rng(5)
  vectors = unit(rng, 300)
  mapped = filled(ann.Policy(mapped_above=100), vectors)
  assert isinstance(mapped.vectors._matrix, np.memmap)
  for ours, theirs in zip(
    mapped.search_batch(vectors[:9], 7),
    filled(ann.Policy(), vectors).search_batch(vectors[:9], 7),
    strict=True,
  ):
    assert ours.ids.tolist() == theirs.ids.tolist()
    assert ours.similarity.tolist() == theirs.similarity.tolist()
  for ids, bad, why in (
    ([900], np.full((1, D), np.nan, np.float32), "NaN"),
    ([900], np.zeros((1, D + 1), np.float32), "shape"),
    ([900, 900], vectors[:2], "twice"),
  ):
    with pytest.raises(ValueError, match=why):
      mapped.add(ids, bad)
  with pytest.raises(ValueError, match="NaN"):
    mapped.search_batch(np.full((1, D), np.inf, np.float32), 1)
  assert len(mapped) == 300
