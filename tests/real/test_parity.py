"""The four families against transformers on the CPU: same config.json, same files, same logits.

Every model is made by transformers with random weights, saved by it and read by us. Weights are
larger than its own initialisation, or a wrong norm or rotary base would hide in small numbers.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch: pip install torch==2.13.0")

import transformers  # noqa: E402

from memrl_jax.models import huggingface, policy, weights  # noqa: E402
from memrl_jax.sampling import engine  # noqa: E402
from memrl_jax.types import TokenBatch  # noqa: E402

torch.set_num_threads(1)
VOCAB, TOLERANCE = 300, 1e-4

SIZES = dict(
  vocab_size=VOCAB,
  hidden_size=32,
  intermediate_size=48,
  num_hidden_layers=2,
  num_attention_heads=4,
  num_key_value_heads=2,
  max_position_embeddings=4096,
  bos_token_id=1,
  eos_token_id=2,
  pad_token_id=0,
)
LLAMA3 = dict(
  rope_type="llama3",
  factor=8.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=64,
  rope_theta=1000.0,
)


def gemma_ropes(**full):
  return {
    "full_attention": dict(rope_type="default", rope_theta=5000.0) | full,
    "sliding_attention": dict(rope_type="default", rope_theta=100.0),
  }


GEMMA = dict(
  num_hidden_layers=7,
  head_dim=16,
  sliding_window=5,
  query_pre_attn_scalar=20,
  rope_parameters=gemma_ropes(),
)


def default_rope(theta):
  return {"rope_parameters": dict(rope_type="default", rope_theta=theta)}


# name -> (family, what its config says beyond SIZES)
CASES = {
  "qwen2": ("Qwen2", default_rope(5000.0)),
  "qwen2 tied": ("Qwen2", default_rope(1e6) | dict(tie_word_embeddings=True)),
  "qwen2 windows": (
    "Qwen2",
    dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    | default_rope(5000.0),
  ),
  "qwen3": ("Qwen3", dict(head_dim=16) | default_rope(5000.0)),
  "qwen3 tied": ("Qwen3", dict(head_dim=8, tie_word_embeddings=True) | default_rope(1e6)),
  "llama": ("Llama", dict(rope_parameters=LLAMA3, rms_norm_eps=1e-5)),
  "llama tied": ("Llama", dict(rope_parameters=LLAMA3, head_dim=16, tie_word_embeddings=True)),
  "llama linear": (
    "Llama",
    dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=5000.0)),
  ),
  "gemma3": ("Gemma3", GEMMA),
  "gemma3 scaled": (
    "Gemma3",
    GEMMA
    | dict(
      rope_parameters=gemma_ropes(rope_type="linear", factor=8.0),
      final_logit_softcapping=5.0,
      layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
    ),
  ),
  "gemma3 untied": ("Gemma3", GEMMA | dict(num_hidden_layers=6, tie_word_embeddings=False)),
}
every_case = pytest.mark.parametrize("case", CASES)
one_of_each = pytest.mark.parametrize("case", ["qwen2", "qwen3 tied", "llama", "gemma3"])


def config_of(family, fields):
  name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
  return getattr(transformers, name)(**(SIZES | fields), attn_implementation="eager")


def theirs_of(family, config):
  return getattr(transformers, f"{family}ForCausalLM")(config).eval()


@functools.cache
def random_model(case):
  """transformers' model of a case, every weight away from zero and one."""
  family, fields = CASES[case]
  torch.manual_seed(0)
  model = theirs_of(family, config_of(family, fields))
  with torch.no_grad():
    for name, parameter in model.named_parameters():
      noise = torch.randn(parameter.shape)
      if "norm" in name:
        parameter.copy_(0.3 * noise + (0.0 if family == "Gemma3" else 1.0))
      elif parameter.ndim == 1:
        parameter.copy_(0.3 * noise)
      else:
        parameter.copy_(noise * parameter.shape[-1] ** -0.5)
  return model


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  """case -> (our config, our params), through the files that transformers wrote; two of them for some."""

  @functools.cache
  def load(case):
    folder = tmp_path_factory.mktemp("model")
    random_model(case).save_pretrained(folder, max_shard_size="60KB")
    assert (folder / "model.safetensors.index.json").is_file()
    return weights.load_directory(folder)

  return load


@functools.partial(jax.jit, static_argnames="cfg")
def ours(params, cfg, tokens_BT, segment_BT, position_BT):
  return policy.logits(params, cfg, policy.hidden(params, cfg, tokens_BT, segment_BT, position_BT))


def theirs(model, tokens_BT, segment_BT, position_BT):
  with torch.no_grad():
    return (
      model(
        torch.tensor(tokens_BT, dtype=torch.long),
        attention_mask=torch.tensor(segment_BT, dtype=torch.long),
        position_ids=torch.tensor(position_BT, dtype=torch.long),
        use_cache=False,
      )
      .logits.float()
      .numpy()
    )


def padded(rng, lengths, width, side):
  """Tokens, segment ids (1, or 0 for padding) and positions that count from a row's first token."""
  tokens = rng.integers(3, VOCAB, (len(lengths), width))
  column = np.arange(width)[None]
  length = np.array(lengths)[:, None]
  segment = (column < length) if side == "right" else (column >= width - length)
  position = np.maximum(np.cumsum(segment, axis=1) - 1, 0)
  return tokens.astype(np.int32), segment.astype(np.int32), position.astype(np.int32)


def differs(one, two, segment):
  return np.abs(np.where(segment[..., None] > 0, one - two, 0)).max()


@every_case
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_padded_rows_are_transformers(loaded, case, side):
  cfg, params = loaded(case)
  rows = padded(np.random.default_rng(0), (24, 17, 3), 24, side)
  want = theirs(random_model(case), *rows)
  assert np.std(want) > 0.2
  assert differs(ours(params, cfg, *rows), want, rows[1]) < TOLERANCE


@pytest.mark.parametrize("case", ["qwen2", "qwen3", "llama", "gemma3", "gemma3 scaled"])
def test_logits_beyond_position_1000_are_transformers(loaded, case):
  cfg, params = loaded(case)
  rows = padded(np.random.default_rng(1), (1200,), 1216, "left")
  want = theirs(random_model(case), *rows)
  assert differs(ours(params, cfg, *rows), want, rows[1]) < TOLERANCE
  far = (*rows[:2], rows[2] + 2000)  # rotary angles are relative: the same up to their rounding
  assert differs(ours(params, cfg, *far), want, rows[1]) < 10 * TOLERANCE


@every_case
def test_logprobs_of_packed_rows_are_transformers(loaded, case):
  # Two rows in one sequence, which transformers gets one after the other.
  cfg, params = loaded(case)
  rng = np.random.default_rng(2)
  lengths, temperatures = (19, 12), (0.7, 1.0)
  rows = [rng.integers(3, VOCAB, length).astype(np.int32) for length in lengths]
  tokens = np.concatenate([*rows, np.zeros(5, np.int32)])[None]
  segment = np.repeat([1, 2, 0], [*lengths, 5])[None].astype(np.int32)
  position = np.concatenate([*map(np.arange, lengths), np.zeros(5)])[None].astype(np.int32)
  gather = np.array([[np.arange(10, 18), 19 + np.arange(3, 11)]], np.int32)
  batch = TokenBatch(
    tokens_BT=tokens,
    segment_BT=segment,
    position_BT=position,
    gather_BSK=gather,
    target_BSK=tokens[0][gather + 1],
    mask_BSK=np.ones(gather.shape, bool),
    behaviour_BSK=np.zeros(gather.shape, np.float32),
    advantage_BS=np.zeros((1, 2), np.float32),
    temperature_BS=np.array([temperatures], np.float32),
    value_target_BS=np.zeros((1, 2), np.float32),
    value_index_BS=np.zeros((1, 2), np.int32),
  )
  got = policy.logprobs(params, cfg, batch, entropy=False)[0]
  for s, (row, at) in enumerate(zip(rows, (range(10, 18), range(3, 11)), strict=True)):
    one = np.ones((1, len(row)), np.int32)
    logits = theirs(random_model(case), row[None], one, np.arange(len(row))[None])[0]
    full = torch.log_softmax(torch.tensor(logits / temperatures[s]), dim=-1).numpy()
    want = [full[i, row[i + 1]] for i in at]
    np.testing.assert_allclose(got[0, s], want, atol=TOLERANCE)


@one_of_each
def test_what_the_engine_samples_has_the_logprobs_of_transformers(loaded, case):
  # Prefill in chunks, then decoding from the cache, with rows of different lengths in one round.
  cfg, params = loaded(case)
  config = engine.EngineConfig(
    slots=2, buckets=(1040,), prefill_rows=(2,), prefill_chunks=(16, 256), round_steps=12
  )
  sampler = engine.Engine(cfg, params, config)
  rng = np.random.default_rng(3)
  prompts = [rng.integers(3, VOCAB, length).astype(np.int32) for length in (1010, 23)]
  done = sampler.generate(
    [engine.Request(np.array([0, n], np.uint32), prompt, 12) for n, prompt in enumerate(prompts)]
  )
  for prompt, completion in zip(prompts, done, strict=True):
    assert len(completion.ids) == 12
    row = np.concatenate([prompt, completion.ids])
    one = np.ones((1, len(row)), np.int32)
    logits = theirs(random_model(case), row[None], one, np.arange(len(row))[None])[0]
    full = torch.log_softmax(torch.tensor(logits[len(prompt) - 1 : -1]), dim=-1).numpy()
    want = full[np.arange(12), completion.ids]
    np.testing.assert_allclose(completion.logps, want, atol=TOLERANCE)


def _rope(**changes):
  return {"rope_parameters": LLAMA3 | changes}


# case -> fields that change the function without changing the shape of any weight
CHANGES = {
  "qwen2": [
    dict(rms_norm_eps=0.3),
    dict(hidden_act="gelu_pytorch_tanh"),
    dict(num_attention_heads=8, num_key_value_heads=4),
    dict(rope_parameters=dict(rope_type="default", rope_theta=200.0)),
    dict(rope_parameters=dict(rope_type="linear", rope_theta=5000.0, factor=3.0)),
    dict(use_sliding_window=True, sliding_window=3, max_window_layers=1),
  ],
  "qwen2 windows": [
    dict(sliding_window=4),
    dict(max_window_layers=2),
    dict(use_sliding_window=False),
    dict(layer_types=["full_attention", "full_attention", "sliding_attention"]),
  ],
  "qwen3": [
    dict(rms_norm_eps=0.3),
    dict(hidden_act="gelu_pytorch_tanh"),
    dict(rope_parameters=dict(rope_type="default", rope_theta=200.0)),
    dict(use_sliding_window=True, sliding_window=3, max_window_layers=0),
  ],
  "llama": [
    dict(rms_norm_eps=0.3),
    dict(hidden_act="gelu_pytorch_tanh"),
    dict(num_attention_heads=8, num_key_value_heads=4),
    _rope(rope_theta=200.0),
    _rope(factor=2.0),
    _rope(low_freq_factor=0.1),
    _rope(high_freq_factor=20.0),
    _rope(original_max_position_embeddings=16),
    dict(rope_parameters=dict(rope_type="default", rope_theta=1000.0)),
  ],
  "gemma3": [
    dict(rms_norm_eps=0.3),
    dict(hidden_activation="silu"),
    dict(query_pre_attn_scalar=5),
    dict(sliding_window=3),
    dict(layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"]),
    dict(final_logit_softcapping=2.0),
    dict(rope_parameters=gemma_ropes(rope_theta=200.0)),
    dict(rope_parameters=gemma_ropes(rope_type="linear", factor=8.0)),
    dict(
      rope_parameters=gemma_ropes()
      | {"sliding_attention": dict(rope_type="default", rope_theta=9.0)}
    ),
  ],
}


@pytest.mark.parametrize(
  ("case", "change"),
  [(case, change) for case, changes in CHANGES.items() for change in changes],
  ids=lambda value: value if isinstance(value, str) else ",".join(map(str, value)),
)
def test_every_field_that_matters_changes_the_logits_as_in_transformers(loaded, case, change):
  cfg, params = loaded(case)
  family, fields = CASES[case]
  config = config_of(family, fields | change)
  model = theirs_of(family, config)
  model.load_state_dict(random_model(case).state_dict())
  said = json.loads(config.to_json_string(use_diff=False))
  changed = huggingface.config_from_fields(
    said | {"architectures": [f"{family}ForCausalLM"]}, source="config.json"
  )
  assert changed != cfg
  rows = padded(np.random.default_rng(4), (40,), 40, "right")
  if (changed.heads, changed.kv_heads) != (cfg.heads, cfg.kv_heads):
    # Heads are an axis of ours: read the same tensors under the new config.
    tensors = weights.to_tensors(cfg, params)
    params_changed = weights.from_reader(changed, tensors, tensors.get, source="memory")
  else:
    params_changed = params
  before, after = ours(params, cfg, *rows), ours(params_changed, changed, *rows)
  assert np.abs(before - after).max() > 100 * TOLERANCE
  assert differs(after, theirs(model, *rows), rows[1]) < TOLERANCE


def test_attention_soft_cap_is_eager_attention_with_one(loaded, monkeypatch):
  # transformers reads attn_logit_softcapping for Gemma 3 but never hands it to its attention.
  from transformers.models.gemma3 import modeling_gemma3

  cfg, params = loaded("gemma3")
  fields = CASES["gemma3"][1] | dict(attn_logit_softcapping=0.5)
  said = json.loads(config_of("Gemma3", fields).to_json_string(use_diff=False))
  capped = huggingface.config_from_fields(
    said | {"architectures": ["Gemma3ForCausalLM"]}, source="config.json"
  )
  rows = padded(np.random.default_rng(5), (30,), 30, "right")
  plain = functools.partial(modeling_gemma3.eager_attention_forward, softcap=0.5)
  monkeypatch.setattr(modeling_gemma3, "eager_attention_forward", plain)
  got = ours(params, capped, *rows)
  assert np.abs(got - ours(params, cfg, *rows)).max() > 100 * TOLERANCE
  assert differs(got, theirs(random_model("gemma3"), *rows), rows[1]) < TOLERANCE


@every_case
@pytest.mark.parametrize("shard_bytes", [10**9, 50_000], ids=["single", "sharded"])
def test_what_we_export_transformers_loads(loaded, tmp_path, case, shard_bytes):
  cfg, params = loaded(case)
  source, out = tmp_path / "source", tmp_path / "out"
  random_model(case).save_pretrained(source)
  (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "top_k": 20}))
  weights.save_directory(out, cfg, params, shard_bytes=shard_bytes, source=source)
  model, report = transformers.AutoModelForCausalLM.from_pretrained(
    out, attn_implementation="eager", output_loading_info=True
  )
  assert not report["missing_keys"] and not report["unexpected_keys"]
  assert type(model) is type(random_model(case))
  rows = padded(np.random.default_rng(6), (30,), 30, "right")
  np.testing.assert_array_equal(theirs(model, *rows), theirs(random_model(case), *rows))
  assert model.generation_config.eos_token_id == [2, 7]
  assert model.config.pad_token_id == 0


def test_the_text_part_of_a_multimodal_gemma_is_read(tmp_path):
  family, fields = CASES["gemma3"]
  text = config_of(family, fields)
  vision = dict(
    model_type="siglip_vision_model",
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
  )
  config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
  torch.manual_seed(1)
  model = transformers.Gemma3ForConditionalGeneration(config).eval()
  model.model.language_model.load_state_dict(random_model("gemma3").model.state_dict())
  model.save_pretrained(tmp_path)
  cfg, params = weights.load_directory(tmp_path)
  rows = padded(np.random.default_rng(7), (30,), 30, "right")
  want = theirs(random_model("gemma3"), *rows)
  assert differs(ours(params, cfg, *rows), want, rows[1]) < TOLERANCE


@one_of_each
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(tmp_path, case):
  model = random_model(case)
  rows = padded(np.random.default_rng(8), (60,), 60, "right")
  model.save_pretrained(tmp_path)
  cfg, params = weights.load_directory(tmp_path, dtype="bfloat16")
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
  rounded = theirs_of(CASES[case][0], model.config)
  rounded.load_state_dict(model.state_dict())
  rounded = rounded.to(torch.bfloat16)
  exact = theirs_of(CASES[case][0], model.config)
  exact.load_state_dict({k: v.float() for k, v in rounded.state_dict().items()}, strict=False)
  want = theirs(exact, *rows)
  got = ours(params, cfg, *rows)
  assert got.dtype == np.float32
  mine, his = np.abs(got - want), np.abs(theirs(rounded, *rows) - want)
  assert np.sqrt(np.mean(mine**2)) < 1.25 * np.sqrt(np.mean(his**2))
