"""memory_topk: hand numbers, order of ties, what never qualifies; chunks and kernel equal ref."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memrl_kernels import memory_topk
from memrl_kernels.memory_topk import pallas

from tests.kernels import tpu


def inputs(queries=11, memories=300, features=6, seed=0):
  """Multiples of 1/4, whose sums of products are exact: equal memories have equal scores. Half of
  the bank is the other half again."""
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return np.round(4 * rng.normal(size=shape)) / 4

  bank_MD, utility_M = draw(memories, features), draw(memories)
  half = memories // 2
  bank_MD[half : 2 * half], utility_M[half : 2 * half] = bank_MD[:half], utility_M[:half]
  return dict(
    query_QD=jnp.asarray(draw(queries, features), jnp.float32),
    bank_MD=jnp.asarray(bank_MD, jnp.float32),
    utility_M=jnp.asarray(utility_M, jnp.float32),
    valid_M=jnp.asarray(rng.random(memories) < 0.7),
  )


def options(queries, **change):
  """Query 1 finds nothing, query 2 little, the others enough."""
  threshold_Q = jnp.where(jnp.arange(queries) == 1, 100.0, 0.0)
  threshold_Q = jnp.where(jnp.arange(queries) == 2, 6.0, threshold_Q)
  weights = dict(similarity_weight=0.5, utility_weight=jnp.arange(queries) / 4)
  return dict(k=5, threshold=threshold_Q) | weights | change


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_by_hand(impl):
  # Similarities of (1, 0): 1, .6, .8, -1, .6. Over .5 are memories 0, 1, 2 and 4; 2 is not valid.
  # Scores .5 sim + .25 utility: .5 + 0 = .5, .3 + .25 = .55, .3 + .25 = .55.
  found = memory_topk.memory_topk(
    jnp.array([[1.0, 0.0]]),
    jnp.array([[1.0, 0.0], [0.6, 0.8], [0.8, 0.6], [-1.0, 0.0], [0.6, -0.8]]),
    jnp.array([0.0, 1.0, 9.0, 9.0, 1.0]),
    jnp.array([True, True, False, True, True]),
    k=4,
    threshold=0.5,
    similarity_weight=0.5,
    utility_weight=0.25,
    chunk=2,
    impl=impl,
  )
  np.testing.assert_array_equal(found.id_Qk, [[1, 4, 0, -1]])
  np.testing.assert_allclose(found.score_Qk, [[0.55, 0.55, 0.5, -np.inf]], rtol=1e-6)
  np.testing.assert_allclose(found.similarity_Qk, [[0.6, 0.6, 1.0, -np.inf]], rtol=1e-6)


def test_the_gate_is_strict():
  found = memory_topk.memory_topk(
    jnp.ones((1, 1)),
    jnp.array([[0.5], [0.25]]),
    jnp.zeros(2),
    k=2,
    threshold=0.25,
    similarity_weight=1.0,
    utility_weight=1.0,
  )
  np.testing.assert_array_equal(found.id_Qk, [[0, -1]])


@pytest.mark.parametrize("chunk, k", [(1, 5), (77, 5), (300, 1), (4096, 5), (7, 40), (100, 301)])
def test_chunks_equal_ref_and_ties_go_to_the_smaller_id(chunk, k):
  batch = inputs()
  found = {
    impl: memory_topk.memory_topk(**batch, **options(11, k=k), chunk=chunk, impl=impl)
    for impl in ("ref", "xla")
  }
  np.testing.assert_array_equal(found["xla"].id_Qk, found["ref"].id_Qk)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0), *found.values())
  score_Qk, id_Qk = np.asarray(found["xla"].score_Qk), np.asarray(found["xla"].id_Qk)
  tied = (score_Qk[:, 1:] == score_Qk[:, :-1]) & (id_Qk[:, 1:] >= 0)
  assert k == 1 or tied.sum() >= 3
  assert np.all(id_Qk[:, 1:][tied] > id_Qk[:, :-1][tied])
  assert np.all(id_Qk[1] == -1) and (k == 1 or 0 < np.sum(id_Qk[2] >= 0) < k)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernel_equals_ref(monkeypatch, dtype):
  # Blocks of 8 queries and 128 memories: 11 and 300 leave odd ends. Memory 0 is one that would win
  # every query if NaN and infinity counted.
  monkeypatch.setattr(pallas, "ROWS", 8)
  monkeypatch.setattr(pallas, "WIDTHS", (128,))
  batch = inputs()
  batch["bank_MD"] = batch["bank_MD"].at[0].set(jnp.inf).astype(dtype)
  batch["query_QD"] = batch["query_QD"].astype(dtype)
  batch["valid_M"] = batch["valid_M"].at[0].set(False)
  batch["utility_M"] = batch["utility_M"].at[1].set(jnp.nan)
  run = functools.partial(memory_topk.memory_topk, **options(11))
  found = tpu.interpret(functools.partial(run, impl="pallas"), *batch.values())
  expected = run(**batch, impl="ref")
  np.testing.assert_array_equal(found.id_Qk, expected.id_Qk)
  assert not np.isin(found.id_Qk, [0, 1]).any()
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0), found, expected)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_what_is_not_valid_or_not_a_number_changes_nothing(impl):
  batch = inputs()
  run = functools.partial(memory_topk.memory_topk, **options(11), chunk=64, impl=impl)
  clean = run(**batch)
  valid_M = batch["valid_M"]
  batch["bank_MD"] = jnp.where(valid_M[:, None], batch["bank_MD"], jnp.nan)
  batch["utility_M"] = jnp.where(valid_M, batch["utility_M"], jnp.inf)
  jax.tree.map(np.testing.assert_array_equal, run(**batch), clean)


def test_weights_of_each_query_rank_as_z_scores_do():
  # MemRL: order by (1 - l) z(sim) + l z(utility) inside the pool of a query, here all that pass
  # the gate. Taking the means out of every score of a query moves none of them past another.
  batch, balance = inputs() | dict(valid_M=None), 0.3
  similarity_QM = np.asarray(batch["query_QD"] @ batch["bank_MD"].T, np.float64)
  order, weights = [], []
  for similarity_M in similarity_QM:
    pool = np.flatnonzero(similarity_M > 0.1)
    sim, utility = similarity_M[pool], np.asarray(batch["utility_M"], np.float64)[pool]
    z = (1 - balance) * (sim - sim.mean()) / sim.std()
    z = z + balance * (utility - utility.mean()) / utility.std()
    order.append(np.round(np.sort(z)[::-1][:3], 4))
    weights.append(((1 - balance) / sim.std(), balance / utility.std()))
    weights[-1] += (weights[-1][0] * sim.mean() + weights[-1][1] * utility.mean(),)
  similarity_weight, utility_weight, offset = np.array(weights, np.float32).T
  found = memory_topk.memory_topk(
    **batch,
    k=3,
    threshold=0.1,
    similarity_weight=similarity_weight,
    utility_weight=utility_weight,
    chunk=50,
  )
  np.testing.assert_allclose(found.score_Qk - offset[:, None], np.array(order), atol=2e-4)


def test_it_is_not_differentiated():
  batch = inputs(2, 8)

  def total(query_QD):
    return memory_topk.memory_topk(
      **batch | dict(query_QD=query_QD), **options(2, threshold=0.0)
    ).score_Qk.sum()

  with pytest.raises(NotImplementedError, match="stop_gradient"):
    jax.grad(total)(batch["query_QD"])
  gradient = jax.grad(lambda query_QD: total(jax.lax.stop_gradient(query_QD)))(batch["query_QD"])
  np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_pallas_is_refused_here_and_long_lists_and_vectors_everywhere():
  batch = inputs(2, 8)
  run = functools.partial(memory_topk.memory_topk, **options(2, threshold=0.0))
  with pytest.raises(NotImplementedError, match="for TPU only and this is cpu"):
    run(**batch, impl="pallas")
  with pytest.raises(ValueError, match="at most 128 memories and k is 129"):
    tpu.interpret(functools.partial(run, k=129, impl="pallas"), *batch.values())
  wide = jax.ShapeDtypeStruct((2, 100_000), jnp.float32)
  assert pallas.width(wide, wide) is None
  with pytest.raises(ValueError, match="cuda"):
    run(**batch, impl="cuda")


def test_gpu_gets_the_loop_over_chunks():
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(4, 1000).values()]
  text = tpu.lower_for_gpu(
    functools.partial(memory_topk.memory_topk, **options(4, chunk=100)), *shapes
  )
  assert "stablehlo.while" in text and "tensor<4x1000x" not in text


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(query_QD=jnp.zeros((2, 5))), r"\(2, 5\) and \(8, 6\)"),
    (dict(utility_M=jnp.zeros(7)), "bank of 8 memories"),
    (dict(valid_M=jnp.ones(8)), "validity of float32"),
    (dict(k=0), "k=0"),
    (dict(threshold=jnp.zeros(3)), "2 queries but threshold of shape"),
  ],
)
def test_wrong_arguments_are_refused_in_a_sentence(change, message):
  with pytest.raises(ValueError, match=message):
    memory_topk.memory_topk(**(inputs(2, 8) | options(2, threshold=0.0) | change))
