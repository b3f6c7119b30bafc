"""The model on its TPU kernels, interpreted, is the model on CPU; and so it is split over a mesh."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from memrl_kernels import target

from memrl_jax.models import attention, decoder, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.training import mesh
from memrl_jax.types import TokenBatch
from tests.kernels import tpu

# A local and a global layer, soft caps, groups of two, heads narrower than a line of lanes.
CFG = DecoderConfig.tiny(
  64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=32, sliding_window=6,
  global_every=2, attention_soft_cap=2.0, final_soft_cap=3.0, embed_scale=5.0,
)  # fmt: skip


@functools.cache
def params():
  return policy.init(jax.random.key(0), CFG)


def tree_batch(B=4, K=3):
  """Sequences of segments 1 (9 tokens) > 2 (6) > 3 (4), 2 > 4 (5), 5 alone (7), then padding."""
  rng = np.random.default_rng(0)
  lengths, starts = [9, 6, 4, 5, 7, 2], [0, 9, 15, 15, 0, 0]
  segment = np.repeat([1, 2, 3, 4, 5, 0], lengths)
  position = np.concatenate([a + np.arange(n) for a, n in zip(starts, lengths, strict=True)])
  ends = np.cumsum(lengths)[2:5]  # rows end in 3, 4 and 5
  gather = np.stack([ends - 1 - k for k in range(K)], axis=1)
  mask = rng.random((B, 3, K)) < 0.8

  def each(array):
    return np.tile(array, (B, *(1,) * np.ndim(array))).astype(np.int32)

  return TokenBatch(
    tokens_BT=rng.integers(0, 64, (B, len(segment))).astype(np.int32),
    segment_BT=each(segment),
    position_BT=each(position),
    parent_BN=each(np.array([0, 0, 1, 2, 2, 0])),
    gather_BSK=each(gather),
    target_BSK=rng.integers(0, 64, mask.shape).astype(np.int32),
    mask_BSK=mask,
    behaviour_BSK=np.zeros(mask.shape, np.float32),
    advantage_BS=rng.normal(size=(B, 3)).astype(np.float32),
    temperature_BS=rng.uniform(0.7, 1.3, (B, 3)).astype(np.float32),
    value_target_BS=np.zeros((B, 3), np.float32),
    value_index_BS=np.zeros((B, 3), np.int32),
  )


def value_and_gradient(params, batch, remat="some"):
  def loss(params):
    logp, entropy = policy.logprobs(params, CFG, batch, entropy=True, remat=remat)
    return jnp.sum(logp * batch.advantage_BS[..., None] + 0.1 * entropy), logp

  return jax.value_and_grad(loss, has_aux=True)(params)


def assert_close(got, want, atol=2e-5):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), got, want)


def test_log_probs_and_gradient_of_packed_trees_by_kernel_are_those_on_cpu():
  batch = tree_batch(B=2)
  want = jax.jit(value_and_gradient)(params(), batch)
  kept = functools.partial(value_and_gradient, remat=False)  # the interpreter cannot recompute
  assert_close(tpu.interpret(kept, params(), batch), want)


def decoded(params, context, common, fresh):
  """Logits of the second step of a round, whose rows read their own columns and a common beginning."""
  # Lane 0 reads block 0 for rows 2 and 0, lane 1 block 1 for rows 1 and 3, each as far as its base.
  lanes = decoder.Lanes(jnp.array([[2, 0], [1, 3]]), jnp.array([1, 2, 0, 3]))
  base_R, offset_R = jnp.array([7, 5, 9, 9]), jnp.array([7, 4, 6, 9])
  shared = policy.Shared(common, lanes, base_R, offset_R)
  length_R = jnp.array([11, 5, 13, 10])
  weights, token_R = policy.decode_weights(params, CFG), jnp.array([3, 9, 4, 1])
  return policy.decode(weights, CFG, context, length_R, fresh, jnp.int32(1), token_R, shared)[0]


def cache():
  """Own columns of 4 rows, common ones of 2 lanes, and a round's new ones."""
  rng = np.random.default_rng(1)
  blocks = [policy.empty_kv(CFG, rows, columns) for rows, columns in ((4, 8), (2, 9), (4, 3))]
  return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), blocks)


def test_decoding_by_kernel_over_shared_own_and_new_columns_is_that_on_cpu():
  want = jax.jit(decoded)(params(), *cache())
  assert_close(tpu.interpret(decoded, params(), *cache()), want)


STARTS_R, BASE_R = jnp.array([11, 0, 7]), jnp.array([4, 0, 7])
SLOT_R, LEAD_R = jnp.array([5, 1, 2], jnp.int32), jnp.array([3, 1, 0], jnp.int32)
TOKENS_RN = jnp.array([[3, 9, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8], [9, 7, 9, 3, 2, 3]])


def slots(poison=0.0):
  """A slot cache; `poison` in every column that none of the three rows may see."""
  rng = np.random.default_rng(2)
  column_1C = jnp.arange(24)[None]
  seen_SC = jnp.zeros((6, 24), bool)
  seen_SC = seen_SC.at[SLOT_R].set((BASE_R[:, None] <= column_1C) & (column_1C < STARTS_R[:, None]))
  seen_SC = seen_SC.at[LEAD_R].set(seen_SC[LEAD_R] | (column_1C < BASE_R[:, None]))
  return [
    decoder.KV(
      jnp.where(seen_SC[:, None, None, :], jnp.asarray(rng.normal(size=(6, 2, 8, 24)), "f4"), poison),
      jnp.where(seen_SC[:, None, :, None], jnp.asarray(rng.normal(size=(6, 2, 24, 8)), "f4"), poison),
    )
    for _ in range(CFG.layers)
  ]  # fmt: skip


def prefilled_in_place(params, blocks):
  cached = policy.Slots(blocks, SLOT_R, LEAD_R, BASE_R)
  weights = policy.decode_weights(params, CFG)
  return policy.prefill_slots(weights, CFG, cached, STARTS_R, TOKENS_RN)


def prefilled_by_copies():
  """`policy.prefill`, jitted, and its arguments: the same columns, put together row by row."""
  followed_RC = (jnp.arange(24)[None] < BASE_R[:, None])[:, None, None, :]
  layers = [
    decoder.KV(
      jnp.where(followed_RC, key[LEAD_R], key[SLOT_R]),
      jnp.where(followed_RC.swapaxes(2, 3), value[LEAD_R], value[SLOT_R]),
    )
    for key, value in slots()
  ]
  context = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
  return jax.jit(lambda *given: policy.prefill(given[0], CFG, *given[1:])), (
    params(), context, STARTS_R, TOKENS_RN
  )  # fmt: skip


@functools.cache
def want_prefilled():
  prefill, arguments = prefilled_by_copies()
  return prefill(*arguments)


@pytest.mark.parametrize("lines", [2048, 8])  # all queries of a row at once, or two of six
def test_a_prefill_in_place_is_that_of_copied_columns(monkeypatch, lines):
  monkeypatch.setattr(attention, "_LINES", lines)
  got = jax.jit(lambda *given: prefilled_in_place(*given))(params(), slots(poison=np.nan))
  assert_close(got, want_prefilled())


def test_a_prefill_in_place_by_kernel_is_that_of_copied_columns(monkeypatch):
  monkeypatch.setattr(attention, "_LINES", 8)
  got = tpu.interpret(prefilled_in_place, params(), slots(poison=np.nan))
  assert_close(got, want_prefilled())


def test_scores_that_would_be_large_are_made_some_queries_at_a_time(monkeypatch):
  want = want_prefilled()
  # 3 rows of 4 heads and 24 + 6 columns are 1440 bytes a position: two positions at a time.
  monkeypatch.setattr(decoder, "_SCORES", 3000)
  prefill, arguments = prefilled_by_copies()
  lowered = prefill.lower(*arguments)
  assert "tensor<6x4x24xf32>" in lowered.as_text()  # rows x heads, positions x groups, columns
  assert "tensor<6x12x24xf32>" not in lowered.as_text()
  assert_close(prefill(*arguments), want)


@pytest.fixture
def grid(monkeypatch, uncached):
  """Four CPU devices over which `target` splits arrays as it does over TPUs."""

  def splits():
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and not mesh.manual_axes

  def over(mesh):
    known = mesh is not None
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh) if known else contextlib.nullcontext()

  monkeypatch.setattr(target, "splits", splits)
  monkeypatch.setattr(target, "over", over)
  return lambda **axes: mesh.make(mesh.MeshConfig(**axes), jax.devices()[:4])


@pytest.mark.parametrize("axes", [dict(fsdp=2, tensor=2)])
def test_kernels_split_over_a_mesh_give_the_gradient_of_one_device(grid, axes):
  # Rows over data and fsdp; 2 key-value heads over tensor 2, and whole on every device at tensor 4.
  batch, chips = tree_batch(), grid(**axes)
  want = jax.jit(value_and_gradient)(params(), batch)
  placed = mesh.place_params(chips, params()), mesh.place_batch(chips, batch)
  lowered = mesh.jit(chips, value_and_gradient).lower(*placed)
  assert "manual_computation" in lowered.as_text()
  got = lowered.compile()(*placed)
  assert_close(jax.device_get(got), want)


def test_decoding_split_over_a_mesh_is_that_of_one_device(grid):
  chips = grid(data=2, tensor=2)
  want = jax.jit(decoded)(params(), *cache())
  everywhere = jax.device_put(cache(), jax.NamedSharding(chips, jax.P()))
  got = mesh.jit(chips, decoded)(mesh.place_params(chips, params()), *everywhere)
  assert_close(got, want)


def test_a_prefill_in_place_split_over_a_mesh_is_that_of_one_device(grid):
  chips = grid(fsdp=2, tensor=2)
  blocks = jax.device_put(slots(), jax.NamedSharding(chips, jax.P(None, "tensor")))
  lowered = mesh.jit(chips, prefilled_in_place).lower(mesh.place_params(chips, params()), blocks)
  assert "manual_computation" in lowered.as_text()
  got = lowered.compile()(mesh.place_params(chips, params()), blocks)
  assert_close(got, want_prefilled())
