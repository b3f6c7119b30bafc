"""LoRA: the identity at the start, the low-rank equation, the chain rule, memory, and export."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.models import lora, policy, weights
from memrl_jax.models.config import DecoderConfig

CFG = DecoderConfig.tiny(
  48, dim=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=24, tie_embeddings=False
)
CONFIG = lora.LoraConfig(rank=3, alpha=6.0, targets=lora.TARGETS)
TOKENS = jnp.array([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 0, 0]])
SEGMENT = jnp.array([[1] * 8, [1] * 6 + [0] * 2])
POSITION = jnp.broadcast_to(jnp.arange(8), (2, 8))
FAN_IN = {"qkv": 16, "out": 32, "gate_up": 16, "down": 24, "head": 16}
SHAPES = {"qkv": (16, 2, 4, 8), "out": (2, 2, 8, 16), "gate_up": (16, 2, 24), "down": (24, 16)}


@pytest.fixture(scope="module")
def base():
  return jax.jit(lambda key: policy.init(key, CFG))(jax.random.key(0))


@pytest.fixture(scope="module")
def fresh():
  return jax.jit(lambda key: lora.init(key, CFG, CONFIG))(jax.random.key(1))


@pytest.fixture(scope="module")
def trained(fresh):
  """Adapters away from their start: B is not 0."""
  rng = np.random.default_rng(0)
  return jax.tree.map(lambda leaf: jnp.float32(0.3 * rng.normal(size=leaf.shape)), fresh)


_merge = jax.jit(lora.merge, static_argnums=(2, 3))


@jax.jit
def _logits(params):
  hidden = policy.hidden(params, CFG, TOKENS, SEGMENT, POSITION, remat=True)
  # Padding attends to nothing in particular; its logits and their gradient mean nothing.
  return jnp.where(SEGMENT[..., None] > 0, policy.logits(params, CFG, hidden), 0.0)


def _float(params):
  return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def test_fresh_adapters_change_nothing(base, fresh):
  jax.tree.map(np.testing.assert_array_equal, _merge(base, fresh, CFG, CONFIG), base)
  np.testing.assert_array_equal(_logits(lora.attach(base, fresh, CFG, CONFIG)), _logits(base))
  for target, fan_in in FAN_IN.items():
    a = np.abs(fresh[target]["a"])
    assert 0.8 * fan_in**-0.5 < a.max() <= fan_in**-0.5
  # By hand, rank 3: layers (2) x inputs and outputs of each target, and the head's.
  by_hand = 2 * 3 * ((16 + 64) + (32 + 16) + (16 + 48) + (24 + 16)) + 3 * (16 + 48)
  assert lora.count(fresh) == by_hand


def test_merged_weights_are_the_low_rank_path(base, trained):
  """x W' = x W + s (x A) B for every target, in float64, with s = 6 / 3."""
  merged, plain, pairs = (
    _float(_merge(base, trained, CFG, CONFIG)),
    _float(base),
    _float(trained),
  )
  rng = np.random.default_rng(0)
  for target, shape in SHAPES.items():
    axes = lora.INPUTS[target]
    x = rng.normal(size=shape[:axes])
    for layer in range(CFG.layers):
      a, b = pairs[target]["a"][layer], pairs[target]["b"][layer]
      low = np.tensordot(np.tensordot(x, a, axes), b, 1)
      want = np.tensordot(x, plain["layers"][target][layer], axes) + 2.0 * low
      got = np.tensordot(x, merged["layers"][target][layer], axes)
      np.testing.assert_allclose(got, want, atol=1e-5)
  x = rng.normal(size=16)
  want = plain["head"] @ x + 2.0 * (x @ pairs["head"]["a"] @ pairs["head"]["b"])
  np.testing.assert_allclose(merged["head"] @ x, want, atol=1e-5)
  for name in ("embedding", "final_norm"):
    jax.tree.map(np.testing.assert_array_equal, merged[name], plain[name])


def test_attached_and_merged_are_one_function(base, trained):
  merged = _logits(_merge(base, trained, CFG, CONFIG))
  np.testing.assert_allclose(_logits(lora.attach(base, trained, CFG, CONFIG)), merged, atol=1e-5)
  assert np.abs(merged - _logits(base)).max() > 0.1


def test_the_gradient_is_the_chain_rule_and_the_true_slope(base, trained):
  """dA = s dW B^T, dB = s A^T dW, where dW is the merged weight's own gradient; and differences."""
  part = dataclasses.replace(CONFIG, targets=("out", "down"))
  adapters = {target: trained[target] for target in part.targets}

  def loss(params):
    return jnp.mean(jnp.square(_logits(params)))

  slope = jax.jit(jax.value_and_grad(lambda pair: loss(lora.attach(base, pair, CFG, part))))
  _, grads = slope(adapters)
  dense = jax.jit(jax.grad(loss))(_merge(base, adapters, CFG, part))
  assert jax.tree.structure(grads) == jax.tree.structure(adapters)
  flat = jax.tree.map(np.float64, (grads, adapters, dense["layers"]))
  for target, rows in (("out", 32), ("down", 24)):
    da, db, a, b, dw = (
      leaf.reshape(CFG.layers, *size)
      for leaf, size in (
        (flat[0][target]["a"], (rows, 3)),
        (flat[0][target]["b"], (3, 16)),
        (flat[1][target]["a"], (rows, 3)),
        (flat[1][target]["b"], (3, 16)),
        (flat[2][target], (rows, 16)),
      )
    )
    np.testing.assert_allclose(da, 2.0 * dw @ b.swapaxes(1, 2), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(db, 2.0 * a.swapaxes(1, 2) @ dw, rtol=1e-3, atol=1e-5)
  # Along the gradient itself, at a step of 1e-2 of unit length: slope = |g|.
  norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(flat[0])))
  ahead, behind = (
    slope(jax.tree.map(lambda x, g, e=e: x + np.float32(e / norm) * g, adapters, grads))[0]
    for e in (1e-2, -1e-2)
  )
  np.testing.assert_allclose((ahead - behind) / 2e-2, norm, rtol=2e-2)
  # At the start, B = 0: A has no gradient yet, B has.
  start = {target: {"a": pair["a"], "b": 0 * pair["b"]} for target, pair in adapters.items()}
  first = slope(start)[1]["out"]
  assert not np.any(first["a"]) and np.any(first["b"])


def test_scales():
  assert lora.LoraConfig(rank=4, alpha=8.0).scale == 2.0
  assert lora.LoraConfig(rank=4, alpha=8.0, rank_stabilised=True).scale == 4.0


def test_attached_gradients_never_hold_all_layers_at_once():
  """8 layers of 0.4 MB: merging in the loss costs two trees of them more, attaching about one layer."""
  cfg = DecoderConfig.tiny(32, dim=64, layers=8, mlp_dim=256)
  config = lora.LoraConfig(rank=2)
  base, adapters = jax.eval_shape(
    lambda: (policy.init(jax.random.key(0), cfg), lora.init(jax.random.key(1), cfg, config))
  )
  tree = sum(base["layers"][name].size * 4 for name in lora.INPUTS)

  def temporaries(join):
    def loss(adapters, base):
      params = join(base, adapters, cfg, config)
      hidden = policy.hidden(params, cfg, TOKENS % 32, SEGMENT, POSITION, remat=True)
      return jnp.sum(hidden**2)

    compiled = jax.jit(jax.grad(loss)).lower(adapters, base).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  merged, attached = temporaries(lora.merge), temporaries(lora.attach)
  assert merged > 1.5 * tree
  assert attached < 0.6 * tree


def test_a_merged_model_is_an_ordinary_checkpoint(tmp_path, base, trained):
  merged = _merge(base, trained, CFG, CONFIG)
  weights.save_directory(tmp_path, CFG, merged)
  loaded = weights.load_directory(tmp_path)
  assert loaded[0] == CFG
  attached = _logits(lora.attach(base, trained, CFG, CONFIG))
  np.testing.assert_allclose(_logits(loaded[1]), attached, atol=1e-5)


def test_bfloat16_bases_stay_bfloat16(base, trained):
  """The change is added in float32 and rounded once."""
  config = dataclasses.replace(CONFIG, targets=("down",))
  pair = {"down": trained["down"]}
  half = {**base, "layers": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), base["layers"])}
  merged = _merge(half, pair, CFG, config)["layers"]["down"]
  change = 2.0 * np.float32(pair["down"]["a"]) @ np.float32(pair["down"]["b"])
  want = np.float32(half["layers"]["down"]) + change
  assert merged.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.float32(merged), want, rtol=2**-8, atol=1e-6)


# QLoRA.


def _quantized(base, kind, block=8):
  pytest.importorskip("qwix", reason="a quantized base needs qwix: pip install qwix")
  config = dataclasses.replace(CONFIG, base=kind, block=block)
  return config, lora.quantize(base, config)


def test_int8_is_within_half_a_step_of_its_block(base):
  _, small = _quantized(base, "int8")
  w = np.asarray(base["layers"]["down"]).reshape(2, 3, 8, 16)  # 24 inputs in blocks of 8
  got = np.asarray(lora._dense(small["layers"]["down"])).reshape(w.shape)
  step = np.abs(w).max(axis=2, keepdims=True) / 127
  assert np.all(np.abs(got - w) <= 0.51 * step)
  stored = sum(leaf.nbytes for leaf in jax.tree.leaves(small["layers"]["down"]))
  assert stored == base["layers"]["down"].nbytes * (1 / 4 + 1 / 8)
  assert small["embedding"] is base["embedding"]


def test_nf4_has_sixteen_levels_a_block(base):
  _, small = _quantized(base, "nf4", block=24)
  got = np.asarray(lora._dense(small["layers"]["down"]))
  scaled = got / np.abs(got).max(axis=1, keepdims=True)
  assert len(np.unique(np.round(scaled, 4))) <= 16
  w = np.asarray(base["layers"]["down"])
  assert np.linalg.norm(got - w) < 0.12 * np.linalg.norm(w)


def test_adapters_train_on_a_quantized_base(base, trained):
  config, small = _quantized(base, "nf4")

  def loss(adapters):
    logits = _logits(lora.attach(small, adapters, CFG, config))
    return jnp.mean(logits**2), logits

  grads, logits = jax.jit(jax.grad(loss, has_aux=True))(trained)
  np.testing.assert_allclose(logits, _logits(_merge(small, trained, CFG, config)), atol=1e-5)
  assert all(np.any(leaf) and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(grads))


def test_a_quantized_weight_without_an_adapter_is_read_too(base, trained):
  config, small = _quantized(base, "int8")
  config = dataclasses.replace(config, targets=("qkv",))
  adapters = {"qkv": trained["qkv"]}
  merged = _merge(small, adapters, CFG, config)
  np.testing.assert_array_equal(merged["layers"]["down"], lora._dense(small["layers"]["down"]))
  attached = _logits(lora.attach(small, adapters, CFG, config))
  np.testing.assert_allclose(attached, _logits(merged), atol=1e-5)


# Errors.


@pytest.mark.parametrize(
  ("changes", "sentence"),
  [
    ({"rank": -1}, "rank >= 0"),
    ({"alpha": 0.0}, "alpha > 0"),
    ({"targets": ("qkv", "embedding")}, "target 'embedding' is not known; choose from qkv, out"),
    ({"targets": ("qkv", "qkv")}, "each named once"),
    ({"targets": ()}, "at least one target"),
    ({"base": "int3"}, "base 'int3' is not known; choose one of float, int8, nf4"),
    ({"rank": 0, "base": "int8"}, "cannot be trained itself"),
  ],
)
def test_impossible_settings_are_refused(changes, sentence):
  with pytest.raises(ValueError, match=sentence):
    dataclasses.replace(CONFIG, **changes)


def test_ranks_and_heads_that_do_not_fit_are_refused():
  key = jax.random.key(0)
  with pytest.raises(ValueError, match=r"rank 17 .* between 1 and 16, .* of qkv \(16 x 64\)"):
    lora.check(CFG, dataclasses.replace(CONFIG, rank=17))
  with pytest.raises(ValueError, match="rank 0 does not lie between 1"):
    lora.init(key, CFG, lora.LoraConfig())
  with pytest.raises(ValueError, match="head is its input embedding"):
    lora.init(key, dataclasses.replace(CFG, tie_embeddings=True), CONFIG)


def test_adapters_of_another_config_are_named(base, trained):
  with pytest.raises(ValueError, match=r"adapter down\.a has shape \(2, 24, 3\).*rank = 5"):
    lora.attach(base, trained, CFG, dataclasses.replace(CONFIG, rank=5))
  with pytest.raises(ValueError, match=r"adapters are of .*head.*names qkv"):
    lora.merge(base, trained, CFG, dataclasses.replace(CONFIG, targets=("qkv",)))
  with pytest.raises(TypeError, match=r"read whole, as w\[\.\.\.\]"):
    lora.attach(base, trained, CFG, CONFIG)["layers"]["qkv"][0]


def test_blocks_that_do_not_fit_are_refused(base):
  sentence = "blocks of 5 weights do not divide the 16 inputs of qkv"
  with pytest.raises(ValueError, match=sentence):
    _quantized(base, "int8", block=5)
  with pytest.raises(ValueError, match=sentence):  # before any weight is read
    lora.check(CFG, dataclasses.replace(CONFIG, base="int8", block=5))
