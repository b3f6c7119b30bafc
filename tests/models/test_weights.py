"""Weight files: Hugging Face's names and layouts, and one sentence for each way a file can be wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from memrl_jax.models import decoder, policy, tiny, weights
from memrl_jax.models.config import DecoderConfig, RopeScaling
from memrl_jax.training import mesh

CFG = DecoderConfig.tiny(96, dim=64, layers=2)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def params():
  return policy.init(jax.random.key(0), CFG)


FAMILIES = {
  "qwen2": dict(qk_norm=False, qkv_bias=True, sliding_window=5, local_from=1),
  "qwen3": dict(tie_embeddings=False),
  "llama": dict(qk_norm=False, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64)),
  "gemma3": dict(
    layers=3,
    sliding_window=5,
    global_every=2,
    local_rope_theta=100.0,
    rope_factor=8.0,
    final_soft_cap=3.0,
    embed_scale=64**0.5,
    post_norms=True,
    norm_offset=True,
    query_scale=20**-0.5,
    activation="gelu_tanh",
  ),
}


def noisy(cfg):
  """Random weights, norms and biases included."""
  leaves, tree = jax.tree.flatten(policy.shapes(cfg))
  rng = np.random.default_rng(0)
  return jax.tree.unflatten(tree, [rng.normal(size=x.shape).astype(np.float32) for x in leaves])


@pytest.mark.parametrize("shard_bytes", [10**9, 100_000], ids=["single", "sharded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_comes_back_bit_for_bit(tmp_path, monkeypatch, family, shard_bytes):
  monkeypatch.setattr(weights, "_SMALL", 0 if shard_bytes == 100_000 else 10**9)
  cfg = DecoderConfig.tiny(96, **(dict(dim=64, layers=2) | FAMILIES[family]))
  params = noisy(cfg)
  weights.save_directory(tmp_path, cfg, params, shard_bytes=shard_bytes)
  loaded_cfg, loaded = weights.load_directory(tmp_path)
  assert loaded_cfg == cfg
  assert jax.tree.map(np.shape, loaded) == jax.tree.map(np.shape, policy.shapes(cfg))
  jax.tree.map(np.testing.assert_array_equal, loaded, params)
  assert json.loads((tmp_path / "config.json").read_text())["model_type"].startswith(family)
  names = sorted(path.name for path in tmp_path.iterdir())
  if shard_bytes == 10**9:
    assert names == ["config.json", "model.safetensors"]
    return
  count = len(names) - 2
  shards = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
  assert names == sorted(["config.json", "model.safetensors.index.json", *shards])
  assert count > 2
  held = [safetensors.numpy.load_file(tmp_path / name) for name in shards]
  size = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in held]
  assert all(one <= shard_bytes or len(t) == 1 for one, t in zip(size, held, strict=True))
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert index["metadata"]["total_size"] == sum(size)


def test_an_export_over_another_leaves_no_file_of_the_old_one(tmp_path, params):
  for shard_bytes in (30_000, 10**9, 60_000):
    weights.save_directory(tmp_path, CFG, params, shard_bytes=shard_bytes)
    where = {"model.safetensors"}
    if shard_bytes < 10**9:
      where = set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values())
    assert {path.name for path in tmp_path.glob("*.safetensors")} == where
    assert (tmp_path / INDEX).is_file() == (shard_bytes < 10**9)


@pytest.mark.parametrize("family", tiny.shipped())
def test_the_shipped_checkpoints_load_as_the_numbers_in_their_files(family):
  file = safetensors.numpy.load_file(tiny.directory(family) / "model.safetensors")
  tensors = weights.to_tensors(*tiny.load(family))
  assert tensors.keys() == file.keys()
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(tensor, file[name].astype(np.float32))


@pytest.mark.parametrize("small", [0, 10**9], ids=["layer by layer", "at once"])
def test_weights_go_to_the_sharding_they_are_given(tmp_path, monkeypatch, small):
  cfg = DecoderConfig.tiny(96, dim=64, layers=2, tie_embeddings=False)
  weights.save_directory(tmp_path, cfg, noisy(cfg))
  grid = mesh.make(mesh.MeshConfig(fsdp=2, tensor=2))

  def place(path, leaf):
    nested = leaf
    for key in reversed(path):
      nested = {key.key: nested}
    return jax.tree.leaves(mesh.param_shardings(grid, nested))[0]

  monkeypatch.setattr(weights, "_SMALL", small)
  got = weights.load_directory(tmp_path, place=place)[1]
  want = mesh.place_params(grid, weights.load_directory(tmp_path)[1])
  jax.tree.map(np.testing.assert_array_equal, got, want)
  for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert one.sharding == two.sharding
  assert (
    got["layers"]["gate_up"].addressable_shards[0].data.size * 4 == got["layers"]["gate_up"].size
  )


def test_loading_asks_for_each_tensor_once_and_layer_after_layer():
  cfg = DecoderConfig.tiny(96, dim=64, layers=3, tie_embeddings=False)
  tensors, asked = weights.to_tensors(cfg, noisy(cfg)), []

  def read(name):
    asked.append(name)
    return tensors[name]

  weights.from_reader(cfg, tensors, read, source="memory")
  assert sorted(asked) == sorted(tensors)
  layers = [int(name.split(".")[2]) for name in asked if ".layers." in name]
  assert layers == sorted(layers)


def test_loading_as_bfloat16_keeps_the_bits_of_a_bfloat16_file(tmp_path):
  weights.save_directory(tmp_path, CFG, noisy(CFG), dtype="bfloat16")
  cfg, params = weights.load_directory(tmp_path, dtype="bfloat16")
  assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
  tensors = weights.to_tensors(cfg, params)
  for name, tensor in safetensors.numpy.load_file(tmp_path / "model.safetensors").items():
    np.testing.assert_array_equal(tensor, tensors[name])
  with pytest.raises(ValueError, match="parameters cannot be 'float8'; choose float32 or bfloat16"):
    weights.load_directory(tmp_path, dtype="float8")


def test_a_stored_copy_of_a_tied_head_is_read_and_another_head_is_refused(tmp_path, params):
  weights.save_directory(tmp_path, CFG, params)
  _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
  jax.tree.map(np.testing.assert_array_equal, weights.load_directory(tmp_path)[1], params)
  _rewrite(tmp_path, lambda t: t.update({"lm_head.weight": 2 * t["lm_head.weight"]}))
  with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
    weights.load_directory(tmp_path)


def test_an_export_takes_the_tokenizer_and_the_ends_of_its_source_along(tmp_path, params):
  source, out = tmp_path / "source", tmp_path / "out"
  weights.save_directory(source, CFG, params)
  _set_field(source, "eos_token_id", [5, 6])
  _set_field(source, "max_position_embeddings", 777)
  for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "notes.txt"):
    (source / name).write_text(name)
  weights.save_directory(out, CFG, params, source=source)
  names = {"tokenizer.json", "generation_config.json", "chat_template.jinja"}
  assert {path.name for path in out.iterdir()} == names | {"config.json", "model.safetensors"}
  assert all((out / name).read_text() == name for name in names)
  fields = json.loads((out / "config.json").read_text())
  assert (fields["eos_token_id"], fields["max_position_embeddings"]) == ([5, 6], 777)
  assert weights.load_directory(out)[0] == CFG


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
  "field that nobody knows": (
    lambda f: _set_field(f, "use_qk_bias", True),
    "use_qk_bias = True is not supported for qwen3",
  ),
  "quantised": (
    lambda f: _rewrite(f, lambda t: t.update({NORM: np.ones(64, np.int8)})),
    f"{NORM} is int8, which is no plain floating point",
  ),
  "config not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
}


def _index(folder, change):
  content = json.loads((folder / INDEX).read_text())
  change(content)
  (folder / INDEX).write_text(json.dumps(content))


def _shard_of(folder, name):
  return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def _cut(file):
  file.write_bytes(file.read_bytes()[:-8])


BROKEN_SHARDS = {
  "missing shard": (
    lambda f: _shard_of(f, NORM).unlink(),
    r"has no model-\d{5}-of-\d{5}.safetensors, where model.safetensors.index.json puts .* first model",
  ),
  "index naming an absent file": (
    lambda f: _index(f, lambda c: c["weight_map"].update({NORM: "gone.safetensors"})),
    f"has no gone.safetensors, where {INDEX} puts 1 tensors, first {NORM}",
  ),
  "index naming the wrong file": (
    lambda f: _index(
      f, lambda c: c["weight_map"].update({NORM: c["weight_map"]["model.embed_tokens.weight"]})
    ),
    f"lacks {NORM}, which {INDEX} puts there",
  ),
  "index without a tensor": (
    lambda f: _index(f, lambda c: c["weight_map"].pop(NORM)),
    f"lacks 1 of .* first {NORM}",
  ),
  "index without a map": (lambda f: _index(f, lambda c: c.clear()), "has no weight_map"),
  "cut shard": (lambda f: _cut(_shard_of(f, NORM)), "not a safetensors file, or was cut short"),
}


@pytest.mark.parametrize("case", BROKEN_SHARDS)
def test_broken_shards_are_named_in_a_sentence(tmp_path, params, case):
  damage, sentence = BROKEN_SHARDS[case]
  weights.save_directory(tmp_path, CFG, params, shard_bytes=60_000)
  damage(tmp_path)
  with pytest.raises((ValueError, FileNotFoundError), match=sentence):
    weights.load_directory(tmp_path)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_is_named_in_a_sentence(tmp_path, params, case):
  damage, sentence = BROKEN[case]
  weights.save_directory(tmp_path, CFG, params)
  damage(tmp_path)
  with pytest.raises((ValueError, FileNotFoundError), match=sentence):
    weights.load_directory(tmp_path)


def test_what_no_architecture_can_say_is_not_saved(tmp_path):
  cfg = DecoderConfig.tiny(96, dim=64, layers=2, final_soft_cap=30.0)
  with pytest.raises(ValueError, match=r"no architecture of .* describes this decoder"):
    weights.save_directory(tmp_path, cfg, policy.init(jax.random.key(0), cfg))
  assert not list(tmp_path.iterdir())


def test_a_bfloat16_norm_is_widened_before_one_is_added():
  # Gemma stores w - 1. In bfloat16 1 + 2^-10 is 1, so the sum must be float32: rms(3, 4) = sqrt(12.5).
  weight = jnp.array([2**-10, -(2**-10)], jnp.bfloat16)
  got = decoder.rms_norm(jnp.array([[3.0, 4.0]]), weight, eps=0.0, offset=1.0)
  want = np.array([[3 * (1 + 2**-10), 4 * (1 - 2**-10)]]) / np.sqrt(12.5)
  np.testing.assert_allclose(got, want, rtol=1e-6)
