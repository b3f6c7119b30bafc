"""LoRA against torch: the low-rank path on transformers' own layers, and the merged export it loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch: pip install torch==2.13.0")

import transformers  # noqa: E402

from memrl_jax.models import lora, policy, weights  # noqa: E402
from memrl_jax.models.config import DecoderConfig  # noqa: E402

torch.set_num_threads(1)
CFG = DecoderConfig.tiny(
  60, dim=32, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_dim=48, tie_embeddings=False
)
CONFIG = lora.LoraConfig(rank=3, alpha=6.0, targets=lora.TARGETS)
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8]])


@pytest.fixture(scope="module")
def base():
  return jax.jit(lambda key: policy.init(key, CFG))(jax.random.key(0))


@pytest.fixture(scope="module")
def adapters():
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: lora.init(jax.random.key(1), CFG, CONFIG))
  return jax.tree.map(lambda leaf: jnp.float32(0.2 * rng.normal(size=leaf.shape)), shapes)


@pytest.fixture(scope="module")
def ours(base, adapters):
  """Logits with adapters attached, as training computes them."""

  @jax.jit
  def logits(base, adapters):
    params = lora.attach(base, adapters, CFG, CONFIG)
    position = jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape)
    segment = jnp.ones(TOKENS.shape, jnp.int32)
    return policy.logits(
      params, CFG, policy.hidden(params, CFG, TOKENS, segment, position, remat=True)
    )

  return np.asarray(logits(base, adapters))


def _torch_logits(model):
  with torch.no_grad():
    return model(torch.tensor(TOKENS)).logits.numpy()


def _load(folder):
  return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _pairs(adapters):
  """Module name -> (A [r, in], B [out, r]) as torch's Linear would hold them."""
  G, r = CFG.groups, CONFIG.rank
  pairs = {"lm_head": (adapters["head"]["a"].T, adapters["head"]["b"].T)}
  for layer in range(CFG.layers):
    one = jax.tree.map(lambda leaf, layer=layer: np.asarray(leaf[layer]), adapters)
    qkv, gate_up = one["qkv"], one["gate_up"]
    for name, a, b in (
      ("self_attn.q_proj", qkv["a"], qkv["b"][:, :, :G]),
      ("self_attn.k_proj", qkv["a"], qkv["b"][:, :, G]),
      ("self_attn.v_proj", qkv["a"], qkv["b"][:, :, G + 1]),
      ("self_attn.o_proj", one["out"]["a"], one["out"]["b"]),
      ("mlp.gate_proj", gate_up["a"], gate_up["b"][:, 0]),
      ("mlp.up_proj", gate_up["a"], gate_up["b"][:, 1]),
      ("mlp.down_proj", one["down"]["a"], one["down"]["b"]),
    ):
      pairs[f"model.layers.{layer}.{name}"] = (a.reshape(-1, r).T, b.reshape(r, -1).T)
  return {
    name: tuple(torch.tensor(np.array(side)) for side in pair) for name, pair in pairs.items()
  }


def test_adapters_equal_peft_s_forward_on_transformers_layers(base, adapters, ours, tmp_path):
  """PEFT's Linear: y + (x A^T) B^T * alpha / r, added to every projection of the base in torch."""
  weights.save_directory(tmp_path, CFG, base)
  model = _load(tmp_path)
  plain = _torch_logits(model)
  pairs = _pairs(adapters)
  assert set(pairs) == {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
  for name, (a, b) in pairs.items():
    model.get_submodule(name).register_forward_hook(
      lambda module, args, out, a=a, b=b: out + args[0] @ a.T @ b.T * (6.0 / 3)
    )
  np.testing.assert_allclose(ours, _torch_logits(model), atol=1e-4)
  assert np.abs(ours - plain).max() > 0.1


def test_transformers_loads_the_merged_export_with_equal_logits(base, adapters, ours, tmp_path):
  weights.save_directory(tmp_path, CFG, lora.merge(base, adapters, CFG, CONFIG))
  np.testing.assert_allclose(_torch_logits(_load(tmp_path)), ours, atol=1e-4)


def test_a_merged_quantized_base_is_exported_too(base, adapters, tmp_path):
  pytest.importorskip("qwix", reason="a quantized base needs qwix: pip install qwix")
  config = lora.LoraConfig(rank=3, alpha=6.0, targets=lora.TARGETS, base="int8", block=16)
  merged = lora.merge(lora.quantize(base, config), adapters, CFG, config)
  weights.save_directory(tmp_path, CFG, merged)
  state = _load(tmp_path).state_dict()["model.layers.1.mlp.down_proj.weight"].numpy()
  np.testing.assert_array_equal(state.T, merged["layers"]["down"][1])
