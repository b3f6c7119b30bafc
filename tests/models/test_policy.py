"""The decoder against its equations, the isolation of packed rows, and the cached functions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.models import decoder, policy
from memrl_jax.models.config import DecoderConfig, RopeScaling, rope_frequencies
from memrl_jax.types import TokenBatch
from tests.models import reference

QWEN3 = DecoderConfig.tiny(128, dim=64, layers=2)
QWEN2 = DecoderConfig.tiny(128, dim=64, layers=2, qk_norm=False, qkv_bias=True)
LLAMA = DecoderConfig.tiny(128, dim=64, layers=2, qk_norm=False, tie_embeddings=False)
GEMMA3 = DecoderConfig.tiny(
  128,
  dim=64,
  layers=3,
  sliding_window=5,
  global_every=3,
  local_rope_theta=100.0,
  attention_soft_cap=2.0,
  final_soft_cap=3.0,
  embed_scale=8.0,
  post_norms=True,
  norm_offset=True,
  query_scale=0.3,
  activation="gelu_tanh",
)
FAMILIES = {"qwen3": QWEN3, "qwen2": QWEN2, "llama": LLAMA, "gemma3": GEMMA3}
every_family = pytest.mark.parametrize("cfg", FAMILIES.values(), ids=FAMILIES)


@functools.cache
def params_of(cfg):
  """Random weights, norms and biases included, so that none is a silent one or zero."""
  rng = np.random.default_rng(1)
  return jax.tree.map(  # in NumPy: the reference takes slices, and each would be a program
    lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32),
    jax.device_get(initial(cfg)),
  )


@functools.partial(jax.jit, static_argnums=0)
def initial(cfg):
  return policy.init(jax.random.key(0), cfg)


def packed(rng, lengths, width, vocab=128):
  """One sequence of several segments with padding at its end."""
  tokens, segment, position = (np.zeros(width, np.int32) for _ in range(3))
  tokens[:] = rng.integers(0, vocab, width)
  at = 0
  for number, length in enumerate(lengths, 1):
    segment[at : at + length], position[at : at + length] = number, np.arange(length)
    at += length
  return tokens[None], segment[None], position[None]


@functools.partial(jax.jit, static_argnames=("cfg", "remat"))
def forward(params, cfg, tokens_BT, segment_BT, position_BT, parent_BN=None, remat=False):
  hidden = policy.hidden(params, cfg, tokens_BT, segment_BT, position_BT, parent_BN, remat=remat)
  return policy.logits(params, cfg, hidden)


@every_family
def test_logits_are_the_equations(cfg):
  rng = np.random.default_rng(0)
  tokens, segment, position = packed(rng, (7, 11), 20)
  got = forward(params_of(cfg), cfg, tokens, segment, position)[0]
  np.testing.assert_allclose(
    got[:7], reference.logits(cfg, params_of(cfg), tokens[0, :7]), atol=2e-5
  )
  np.testing.assert_allclose(
    got[7:18], reference.logits(cfg, params_of(cfg), tokens[0, 7:18]), atol=2e-5
  )


@every_family
def test_parameter_count_is_the_hand_count(cfg):
  assert sum(leaf.size for leaf in jax.tree.leaves(policy.shapes(cfg))) == cfg.parameters


def test_layers_change_nothing_in_the_size_of_the_program():
  def size(layers):
    cfg = DecoderConfig.tiny(128, dim=64, layers=layers)
    tokens = jnp.zeros((1, 8), jnp.int32)
    step = functools.partial(policy.hidden, remat=True)
    lowered = jax.jit(step, static_argnums=1).lower(policy.shapes(cfg), cfg, tokens, tokens, tokens)
    return len(lowered.as_text().splitlines())

  assert size(3) == size(12)


@every_family
def test_hidden_state_depends_on_earlier_tokens_of_its_own_segment_only(cfg):
  params = params_of(cfg)
  tokens, segment, position = packed(np.random.default_rng(1), (6, 9), 18)
  table = params["embedding"]

  def moved(shift_TD, at):
    # An extra token per position, so that the gradient tells the positions apart.
    extended = params | {"embedding": jnp.concatenate([table[tokens[0]] + shift_TD, table])}
    index = jnp.arange(18)[None]
    return jnp.sum(jnp.sin(policy.hidden(extended, cfg, index, segment, position)[0, at]))

  zero, slope = np.zeros((18, cfg.dim), np.float32), jax.jit(jax.grad(moved))
  for at, seen in ((3, range(0, 4)), (6, range(6, 7)), (12, range(6, 13))):
    size_T = np.abs(slope(zero, at)).max(axis=1)
    assert set(np.flatnonzero(size_T)) == set(seen)


@every_family
def test_a_branch_of_a_tree_of_segments_has_the_logits_of_a_row_of_its_own(cfg):
  # Segments 1 (6 tokens) > 2 (4) > 3 (3), 4 (5);  1 > 5 (8);  6 (4) stands alone.
  parent = np.array([[0, 0, 1, 2, 2, 1, 0]], np.int32)
  lengths = [6, 4, 3, 5, 8, 4]
  segment = np.repeat(np.arange(1, 7), lengths)[None].astype(np.int32)
  starts = [0, 6, 10, 10, 6, 0]
  position = np.concatenate([a + np.arange(n) for a, n in zip(starts, lengths, strict=True)])[None]
  tokens = np.random.default_rng(8).integers(0, 128, segment.shape).astype(np.int32)
  params = params_of(cfg)
  tree = np.asarray(forward(params, cfg, tokens, segment, position, parent, remat=True))[0]
  for branch in ([1, 2, 3], [1, 2, 4], [1, 5], [6]):
    here = np.flatnonzero(np.isin(segment[0], branch))
    np.testing.assert_allclose(
      tree[here], reference.logits(cfg, params, tokens[0, here]), atol=2e-5
    )


@pytest.mark.parametrize("cfg", [QWEN3, GEMMA3], ids=["plain", "window and cap"])
def test_attention_in_blocks_is_dense_attention_in_value_and_gradient(cfg):
  B, T, K, G, d = 2, 150, cfg.kv_heads, cfg.groups, cfg.head_dim  # blocks of 96 and 54 queries
  segment = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [70, 30, 40, 10], axis=1).astype(np.int32)
  parent = np.array([[0, 0, 1, 1, 0], [0, 0, 1, 2, 0]], np.int32)
  position = np.stack([np.r_[:100, 70:120], np.r_[:140, :10]])
  kin = np.zeros((B, 5, 5), bool)
  for b, s, a in ((0, 2, 1), (0, 3, 1), (1, 2, 1), (1, 3, 1), (1, 3, 2)):
    kin[b, s, a] = True
  kin[:, range(1, 5), range(1, 5)] = True
  allowed = kin[np.arange(B)[:, None, None], segment[:, :, None], segment[:, None, :]]
  allowed &= np.tril(np.ones((T, T), bool))
  if cfg.sliding_window:
    allowed &= position[:, :, None] - position[:, None, :] < cfg.sliding_window
  rng = np.random.default_rng(9)
  query, key, value = (
    rng.normal(size=(B * T, *shape)).astype(np.float32) for shape in ((K, G, d), (K, d), (K, d))
  )
  pull = rng.normal(size=(B, T, K, G, d)) * (segment > 0)[:, :, None, None, None]

  def blocks(query, key, value):
    see = decoder.sight(segment, parent, position)
    out = decoder.attend_packed(cfg, query, key, value, see, cfg.sliding_window)
    return out.reshape(pull.shape)

  def dense(query, key, value):
    query, key, value = (array.reshape(B, T, *array.shape[1:]) for array in (query, key, value))
    score = cfg.attention_scale * jnp.einsum("btkgd,bskd->bkgts", query, key)
    if cfg.attention_soft_cap is not None:
      score = cfg.attention_soft_cap * jnp.tanh(score / cfg.attention_soft_cap)
    weight = jax.nn.softmax(jnp.where(allowed[:, None, None], score, -1e9))
    return jnp.einsum("bkgts,bskd->btkgd", weight, value)

  for got, want in zip(
    *(
      jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(f(*a) * pull), argnums=(0, 1, 2)))(
        query, key, value
      )
      for f in (blocks, dense)
    ),
    strict=True,
  ):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5, rtol=1e-4), got, want)


def test_the_gradient_of_the_gated_activation_is_the_derivative():
  wide = jax.random.normal(jax.random.key(0), (5, 12))
  for name, act in (("silu", jax.nn.silu), ("gelu_tanh", jax.nn.gelu)):
    got = jax.jit(jax.grad(lambda w, name=name: jnp.sum(jnp.sin(decoder.gated(name, w)))))(wide)
    want = jax.jit(jax.grad(lambda w, act=act: jnp.sum(jnp.sin(act(w[:, :6]) * w[:, 6:]))))(wide)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_sliding_window_hides_what_lies_further_back():
  # One local layer with window 5: position 9 sees 5..9. Two would see further through the stack.
  cfg = DecoderConfig.tiny(128, dim=64, layers=1, sliding_window=5)
  params = initial(cfg)
  tokens, segment, position = packed(np.random.default_rng(2), (12,), 12)
  before = forward(params, cfg, tokens, segment, position)
  for changed, same in ((4, True), (5, False)):
    other = tokens.copy()
    other[0, changed] = (other[0, changed] + 1) % 128
    after = forward(params, cfg, other, segment, position)
    assert np.array_equal(before[0, 9], after[0, 9]) == same


def test_padding_changes_nothing():
  params = params_of(QWEN3)
  tokens, segment, position = packed(np.random.default_rng(3), (6, 9), 18)
  poisoned, moved = tokens.copy(), position.copy()
  poisoned[0, 15:], moved[0, 15:] = 127, 9999
  first = forward(params, QWEN3, tokens, segment, position)[0, :15]
  second = forward(params, QWEN3, poisoned, segment, moved)[0, :15]
  np.testing.assert_array_equal(first, second)


def batch_of(rng, B=2, T=24):
  """Two packed sequences with two rows each, the second row of the second one empty."""
  parts = [packed(rng, (10, 9), T), packed(rng, (12,), T)]
  tokens, segment, position = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
  gather = np.zeros((B, 2, 3), np.int32)
  mask = np.zeros((B, 2, 3), bool)
  for b, s, start, count in ((0, 0, 6, 3), (0, 1, 15, 2), (1, 0, 10, 1)):
    gather[b, s, :count] = start + np.arange(count)
    mask[b, s, :count] = True
  target = np.take_along_axis(tokens, (gather + 1).reshape(B, -1), axis=1).reshape(gather.shape)
  return TokenBatch(
    tokens_BT=tokens,
    segment_BT=segment,
    position_BT=position,
    gather_BSK=gather,
    target_BSK=np.where(mask, target, 0),
    mask_BSK=mask,
    behaviour_BSK=np.zeros(mask.shape, np.float32),
    advantage_BS=np.zeros((B, 2), np.float32),
    temperature_BS=np.array([[0.7, 1.0], [1.3, 1.0]], np.float32),
    value_target_BS=np.zeros((B, 2), np.float32),
    value_index_BS=np.zeros((B, 2), np.int32),
  )


@every_family
def test_logprobs_are_a_tempered_softmax_at_the_gathered_positions(cfg):
  batch = batch_of(np.random.default_rng(4))
  params = params_of(cfg)
  score = functools.partial(policy.logprobs, cfg=cfg, batch=batch)
  logp_BSK, entropy_BSK = jax.device_get(jax.jit(lambda p: score(p, entropy=True))(params))
  all_logits = np.asarray(
    forward(params, cfg, batch.tokens_BT, batch.segment_BT, batch.position_BT), np.float64
  )
  for b, s, k in np.argwhere(batch.mask_BSK):
    row = all_logits[b, batch.gather_BSK[b, s, k]] / batch.temperature_BS[b, s]
    full = row - np.log(np.sum(np.exp(row)))
    assert logp_BSK[b, s, k] == pytest.approx(full[batch.target_BSK[b, s, k]], abs=1e-5)
    assert entropy_BSK[b, s, k] == pytest.approx(-np.sum(np.exp(full) * full), abs=1e-4)
  assert not np.any(np.where(batch.mask_BSK, 0, logp_BSK))
  assert jax.eval_shape(functools.partial(score, entropy=False), params)[1] is None


def test_scoring_only_as_many_entries_as_positions_changes_nothing():
  batch = batch_of(np.random.default_rng(4))
  wide = (*batch.mask_BSK.shape[:2], 40)  # S * K = 80 entries of T = 24 positions, 3 of them real
  sparse = np.zeros(wide, np.int32)
  sparse[..., 10:34:8] = 1
  at = np.nonzero(sparse)

  def spread(array):
    out = np.zeros(wide, array.dtype)
    out[at] = array.reshape(-1)
    return out

  big = batch._replace(
    gather_BSK=spread(batch.gather_BSK),
    target_BSK=spread(batch.target_BSK),
    mask_BSK=spread(batch.mask_BSK),
  )
  score = jax.jit(lambda params, batch: policy.logprobs(params, QWEN3, batch, entropy=True))
  for small, large in zip(*(score(params_of(QWEN3), one) for one in (batch, big)), strict=True):
    np.testing.assert_allclose(np.asarray(large)[at], small.reshape(-1), atol=1e-5)
    assert np.count_nonzero(large) == batch.mask_BSK.sum()


def test_masked_entries_send_no_gradient_whatever_they_hold():
  batch = batch_of(np.random.default_rng(5))
  junk = batch._replace(
    gather_BSK=np.where(batch.mask_BSK, batch.gather_BSK, 10**6),
    target_BSK=np.where(batch.mask_BSK, batch.target_BSK, -5),
    temperature_BS=np.where(batch.mask_BSK.any(2), batch.temperature_BS, np.nan),
  )

  def loss(params, batch):
    return jnp.sum(policy.logprobs(params, QWEN3, batch, entropy=False, remat=True)[0])

  gradient = jax.jit(jax.grad(loss))
  clean, dirty = (gradient(params_of(QWEN3), one) for one in (batch, junk))
  jax.tree.map(np.testing.assert_array_equal, clean, dirty)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(dirty))


def test_recomputation_changes_no_gradient():
  batch = batch_of(np.random.default_rng(6))

  def grad(remat):
    def loss(params):
      return jnp.sum(policy.logprobs(params, GEMMA3, batch, entropy=False, remat=remat)[0])

    return jax.jit(jax.grad(loss))(params_of(GEMMA3))

  jax.tree.map(
    lambda one, two: np.testing.assert_allclose(one, two, atol=2e-5), grad(False), grad(True)
  )


@every_family
def test_prefill_in_chunks_then_decode_gives_the_logits_of_the_full_forward(cfg):
  params = params_of(cfg)
  tokens = np.random.default_rng(7).integers(0, 128, (2, 11)).astype(np.int32)
  position = np.tile(np.arange(11), (2, 1))
  want = forward(params, cfg, tokens, np.ones_like(tokens), position)
  poison = functools.partial(jax.tree.map, lambda leaf: leaf + 1e4)  # unused columns must not count
  context = poison(policy.empty_kv(cfg, 2, 16))
  for start in (0, 4):
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *context)
    chunk = tokens[:, start : start + 4]
    new = jax.jit(policy.prefill, static_argnums=1)(
      params, cfg, stacked, np.full(2, start, np.int32), chunk
    )
    context = [
      type(old)(
        old.key_BKdS.at[..., start : start + 4].set(more.key_BKdS),
        old.value_BKSd.at[..., start : start + 4, :].set(more.value_BKSd),
      )
      for old, more in zip(context, new, strict=True)
    ]
  weights = policy.decode_weights(params, cfg)
  fresh = poison(policy.empty_kv(cfg, 2, 4))
  decode = jax.jit(policy.decode, static_argnums=1)
  for step in range(3):
    length = np.full(2, 8, np.int32)
    got, fresh = decode(weights, cfg, context, length, fresh, step, tokens[:, 8 + step])
    np.testing.assert_allclose(got, want[:, 8 + step], atol=1e-5)


def test_llama_scaling_keeps_high_and_stretches_low_frequencies():
  # Wavelength 2 pi / f against 8192 tokens: f = 1 turns 1304 times (kept), the slowest pair,
  # f = 500000^(-62/64) = 3e-6, turns 0.004 times (divided by 8).
  cfg = DecoderConfig.tiny(
    128,
    head_dim=64,
    rope_theta=500_000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
  )
  plain = 500_000.0 ** (-2 * np.arange(32) / 64)
  got = np.array(rope_frequencies(cfg, local=False))
  turns = 8192 * plain / (2 * np.pi)
  np.testing.assert_allclose(got[turns > 4], plain[turns > 4])
  np.testing.assert_allclose(got[turns < 1], plain[turns < 1] / 8)
  between = (turns > 1) & (turns < 4)
  assert between.any()
  assert np.all((got < plain)[between] & (got > plain / 8)[between])


@every_family
def test_config_survives_json(cfg):
  assert DecoderConfig.from_json(cfg.to_json()) == cfg


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    (dict(heads=3, kv_heads=2), "3 query heads cannot share 2"),
    (dict(head_dim=31), "even head_dim"),
    (dict(layers=0), "layers >= 1"),
    (dict(global_every=6), "need a sliding_window"),
    (dict(activation="relu"), "unknown activation"),
    (dict(final_soft_cap=0.0), "final_soft_cap must be positive"),
  ],
)
def test_impossible_configs_are_refused_in_a_sentence(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    DecoderConfig.tiny(128, **changes)


def test_unknown_config_field_is_refused():
  text = QWEN3.to_json().replace('"vocab"', '"vocabulary"')
  with pytest.raises(ValueError, match="unknown decoder fields"):
    DecoderConfig.from_json(text)
