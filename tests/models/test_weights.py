"""Weight files: Hugging Face's names and layouts, and one sentence for each way a file can be wrong."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from memrl_jax.models import policy, weights
from memrl_jax.models.config import DecoderConfig

CFG = DecoderConfig.tiny(96, dim=64, layers=2)


@pytest.fixture(scope="module")
def params():
  return policy.init(jax.random.key(0), CFG)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, tied):
  cfg = DecoderConfig.tiny(96, dim=64, layers=2, tie_embeddings=tied)
  params = policy.init(jax.random.key(1), cfg)
  weights.save_directory(tmp_path, cfg, params)
  loaded_cfg, loaded = weights.load_directory(tmp_path)
  assert loaded_cfg == cfg
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_bfloat16_halves_the_file_and_rounds_to_eight_bits(tmp_path, params):
  weights.save_directory(tmp_path / "full", CFG, params)
  weights.save_directory(tmp_path / "half", CFG, params, dtype="bfloat16")
  full, half = ((tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "half"))
  assert half < 0.55 * full
  loaded = weights.load_directory(tmp_path / "half")[1]
  for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=2**-8)


def test_tensors_multiply_as_hugging_face_multiplies_them(params):
  # nn.Linear computes x W^T with W [out, in]; query head h belongs to key-value head h // G.
  tensors = weights.to_tensors(CFG, params)
  x = np.random.default_rng(0).normal(size=CFG.dim).astype(np.float32)
  qkv = np.einsum("d,dkgh->kgh", x, params["layers"]["qkv"][1])
  query = (tensors["model.layers.1.self_attn.q_proj.weight"] @ x).reshape(CFG.heads, -1)
  for head in range(CFG.heads):
    k, g = divmod(head, CFG.groups)
    np.testing.assert_allclose(query[head], qkv[k, g], atol=1e-5)
  key = tensors["model.layers.1.self_attn.k_proj.weight"] @ x
  np.testing.assert_allclose(key.reshape(CFG.kv_heads, -1), qkv[:, CFG.groups], atol=1e-5)
  value = tensors["model.layers.1.self_attn.v_proj.weight"] @ x
  np.testing.assert_allclose(value.reshape(CFG.kv_heads, -1), qkv[:, CFG.groups + 1], atol=1e-5)
  assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (64, CFG.heads * CFG.head_dim)
  assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (64, CFG.mlp_dim)
  gate = tensors["model.layers.0.mlp.gate_proj.weight"]
  np.testing.assert_array_equal(gate.T, params["layers"]["gate_up"][0][:, 0])
  assert "lm_head.weight" not in tensors


def _rewrite(folder, change):
  file = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(file)
  change(tensors)
  safetensors.numpy.save_file(tensors, file)


def _set_field(folder, name, value):
  file = folder / "config.json"
  file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))


NORM = "model.layers.1.input_layernorm.weight"
BROKEN = {
  "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
  "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
  "missing tensor": (lambda f: _rewrite(f, lambda t: t.pop(NORM)), f"lacks 1 of .* first {NORM}"),
  "extra tensor": (
    lambda f: _rewrite(f, lambda t: t.update(extra=np.zeros(1, np.float32))),
    "does not name, first extra",
  ),
  "wrong shape": (
    lambda f: _rewrite(f, lambda t: t.update({NORM: np.ones(3, np.float32)})),
    r"shape \(3,\), but config.json asks for \(64,\)",
  ),
  "cut file": (
    lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
    "is not a safetensors file",
  ),
  "other architecture": (
    lambda f: _set_field(f, "architectures", ["MambaForCausalLM"]),
    "unknown architecture",
  ),
  "field we would ignore": (
    lambda f: _set_field(f, "rope_scaling", {"factor": 8.0}),
    "factor = 8.0 means nothing with rope_type 'default'",
  ),
  "sliding window": (lambda f: _set_field(f, "use_sliding_window", True), "use_sliding_window"),
  "config not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named_in_a_sentence(tmp_path, params, case):
  damage, sentence = BROKEN[case]
  weights.save_directory(tmp_path, CFG, params)
  damage(tmp_path)
  with pytest.raises((ValueError, FileNotFoundError), match=sentence):
    weights.load_directory(tmp_path)


def test_what_qwen3_cannot_say_is_not_saved(tmp_path):
  cfg = DecoderConfig.tiny(96, dim=64, layers=2, final_soft_cap=30.0)
  with pytest.raises(ValueError, match="no architecture of .* describes this decoder"):
    weights.save_directory(tmp_path, cfg, policy.init(jax.random.key(0), cfg))
  assert not list(tmp_path.iterdir())
