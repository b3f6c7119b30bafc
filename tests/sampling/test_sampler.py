"""The sampler against hand-computed supports, log-probs and frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.sampling import sampler

PROBS = np.array([0.15, 0.5, 0.05, 0.3])  # the nucleus grows as tokens 1, 3, 0, 2
sample = jax.jit(sampler.sample)


def controls(rows, temperature=1.0, top_p=1.0, top_k=0):
  return sampler.Controls(
    jnp.full(rows, temperature, jnp.float32),
    jnp.full(rows, top_p, jnp.float32),
    jnp.full(rows, top_k, jnp.int32),
  )


def keys(rows, seed=0):
  return np.random.default_rng(seed).integers(0, 2**32, (rows, 2), dtype=np.uint32)


def draws(logits_V, rows=20_000, **settings):
  """Independent draws from one distribution: one row, with its own key, a draw."""
  logits_RV = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (rows, len(logits_V)))
  uniform_R2 = sampler.uniforms(keys(rows), np.zeros(rows, np.int32), 1)[:, 0]
  return sample(logits_RV, uniform_R2, controls(rows, **settings))


def chi_square(tokens, probs):
  """Pearson's statistic per degree of freedom: about 1 if `tokens` come from `probs`."""
  expected = len(tokens) * probs
  counts = np.bincount(tokens, minlength=len(probs))
  kept = expected > 0
  assert not counts[~kept].any()
  return np.sum((counts - expected)[kept] ** 2 / expected[kept]) / (kept.sum() - 1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("vocab", [4, 11, 300])
def test_frequencies_are_the_tempered_softmax(vocab, temperature):
  logits = np.random.default_rng(vocab).normal(size=vocab)
  tokens, logps = draws(logits, temperature=temperature)
  full = np.asarray(jax.nn.log_softmax(logits / temperature))
  # Standard deviation of chi2/dof is sqrt(2/dof): 0.82 at 3 degrees, 0.08 at 299.
  assert chi_square(np.asarray(tokens), np.exp(full)) < 1 + 3.5 * np.sqrt(2 / (vocab - 1))
  np.testing.assert_allclose(logps, full[tokens], atol=2e-6)


@pytest.mark.parametrize(
  ("settings", "support"),
  [
    (dict(top_p=0.45), {1}),
    (dict(top_p=0.75), {1, 3}),  # .5 < .75 <= .8
    (dict(top_p=0.9), {0, 1, 3}),  # .8 < .9 <= .95
    (dict(top_p=0.97), {0, 1, 2, 3}),
    (dict(top_k=1), {1}),
    (dict(top_k=3), {0, 1, 3}),
    (dict(top_k=9), {0, 1, 2, 3}),
    (dict(top_k=3, top_p=0.5), {1}),  # of the mass .95 of three: .5 / .95 = .53 >= .5
    (dict(top_k=2, top_p=0.65), {1, 3}),  # .5 / .8 = .625 < .65
  ],
)
def test_top_k_and_top_p_draw_from_their_support_and_keep_the_full_log_prob(settings, support):
  tokens, logps = draws(np.log(PROBS), **settings)
  kept = np.array([p if token in support else 0.0 for token, p in enumerate(PROBS)])
  assert set(np.unique(tokens)) == support
  if len(support) > 1:
    assert chi_square(np.asarray(tokens), kept / kept.sum()) < 1 + 3.5 * np.sqrt(2)
  np.testing.assert_allclose(logps, np.log(PROBS)[tokens], atol=1e-6)


def test_nucleus_is_the_sorted_nucleus():
  rng = np.random.default_rng(0)
  weight_RV = rng.random((50, 200)).astype(np.float32) ** 6
  top_p_R = rng.uniform(0.05, 0.99, 50).astype(np.float32)
  setting = sampler.Controls(np.ones(50), top_p_R, np.zeros(50, np.int32))
  got_RV = np.asarray(sampler.restrict(jnp.asarray(weight_RV), setting)) > 0
  for weight, top_p, got in zip(weight_RV.astype(np.float64), top_p_R, got_RV, strict=True):
    order = np.argsort(-weight)
    mass_before = np.cumsum(weight[order]) - weight[order]
    want = order[mass_before < top_p * weight.sum() - 1e-9]
    assert set(np.flatnonzero(got)) == set(want)


def test_rows_of_one_call_keep_their_own_settings():
  logits_RV = jnp.tile(jnp.log(jnp.asarray(PROBS, jnp.float32)), (3, 1))
  setting = sampler.Controls(
    jnp.array([0.0, 1.0, 0.5]), jnp.array([1.0, 0.45, 1.0]), jnp.array([0, 0, 0])
  )
  tokens, logps = sample(logits_RV, jnp.full((3, 2), 0.999), setting)
  # Row 2: probabilities go with the square: .0225 .25 .0025 .09 of .365; the end of the CDF is 3.
  assert tokens.tolist() == [1, 1, 3]
  np.testing.assert_allclose(logps, np.log([0.5, 0.5, 0.09 / 0.365]), atol=1e-6)


def test_greedy_takes_the_first_of_equal_maxima():
  logits_RV = jnp.array([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
  tokens, _ = sample(logits_RV, jnp.full((2, 2), 0.9), controls(2, temperature=0.0))
  assert tokens.tolist() == [1, 0]


def test_impossible_tokens_are_never_drawn_at_either_end_of_the_cdf():
  logits_V = jnp.array([-jnp.inf, 0.0, -jnp.inf, 0.0, -jnp.inf])
  ends = jnp.array([[0.0, 0.0], [0.9999999, 0.9999999]])
  tokens, _ = sample(jnp.tile(logits_V, (2, 1)), ends, controls(2))
  assert tokens.tolist() == [1, 3]


def test_random_numbers_belong_to_the_key_and_the_index_of_the_token():
  key_R2 = keys(3)
  all_of_them = sampler.uniforms(key_R2, np.zeros(3, np.int32), 6)
  some = sampler.uniforms(key_R2[1:], np.array([4, 2], np.int32), 2)
  np.testing.assert_array_equal(some, [all_of_them[1, 4:6], all_of_them[2, 2:4]])
  key = jax.random.wrap_key_data(jnp.asarray(key_R2[2]), impl="threefry2x32")
  np.testing.assert_array_equal(
    all_of_them[2, 5], jax.random.uniform(jax.random.fold_in(key, 5), (2,))
  )
