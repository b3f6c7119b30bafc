"""config.json of the models people use, as their makers wrote it, and every field that could be lost."""

import pytest

from memrl_jax.models import huggingface
from memrl_jax.models.config import DecoderConfig, RopeScaling

QWEN25 = {  # Qwen2.5-7B-Instruct, transformers 4.43
  "architectures": ["Qwen2ForCausalLM"],
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "hidden_act": "silu",
  "hidden_size": 3584,
  "initializer_range": 0.02,
  "intermediate_size": 18944,
  "max_position_embeddings": 32768,
  "max_window_layers": 28,
  "model_type": "qwen2",
  "num_attention_heads": 28,
  "num_hidden_layers": 28,
  "num_key_value_heads": 4,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 131072,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.43.1",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 152064,
}
QWEN3 = {  # Qwen3-4B, transformers 4.51
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 2560,
  "initializer_range": 0.02,
  "intermediate_size": 9728,
  "max_position_embeddings": 40960,
  "max_window_layers": 36,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 36,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": True,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.51.0",
  "use_cache": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
LLAMA = {  # Llama-3.1-8B-Instruct, transformers 4.42
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3",
  "use_cache": True,
  "vocab_size": 128256,
}
GEMMA_4B = {  # gemma-3-4b-it says no more than this about its text model
  "architectures": ["Gemma3ForConditionalGeneration"],
  "boi_token_index": 255999,
  "eoi_token_index": 256000,
  "eos_token_id": [1, 106],
  "image_token_index": 262144,
  "initializer_range": 0.02,
  "mm_tokens_per_image": 256,
  "model_type": "gemma3",
  "text_config": {
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gemma3_text",
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
  },
  "torch_dtype": "bfloat16",
  "transformers_version": "4.50.0.dev0",
  "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA_270M = {  # gemma-3-270m-it, transformers 4.55, its layer types left to the pattern
  "_sliding_window_pattern": 6,
  "architectures": ["Gemma3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attn_logit_softcapping": None,
  "bos_token_id": 2,
  "eos_token_id": 1,
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 640,
  "initializer_range": 0.02,
  "intermediate_size": 2048,
  "max_position_embeddings": 32768,
  "model_type": "gemma3_text",
  "num_attention_heads": 4,
  "num_hidden_layers": 18,
  "num_key_value_heads": 1,
  "pad_token_id": 0,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000.0,
  "rope_scaling": None,
  "rope_theta": 1000000.0,
  "sliding_window": 512,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.55.0.dev0",
  "use_bidirectional_attention": False,
  "use_cache": True,
  "vocab_size": 262144,
}
GEMMA = dict(
  qk_norm=True,
  rope_theta=1e6,
  local_rope_theta=1e4,
  global_every=6,
  post_norms=True,
  norm_offset=True,
  activation="gelu_tanh",
)
REAL = {
  "Qwen2.5-7B": (
    QWEN25,
    DecoderConfig(
      152064, 3584, 28, 28, 4, 128, 18944, rope_theta=1e6, qkv_bias=True, tie_embeddings=False
    ),
    7_615_616_512,
  ),
  "Qwen3-4B": (
    QWEN3,
    DecoderConfig(151936, 2560, 36, 32, 8, 128, 9728, rope_theta=1e6, qk_norm=True),
    4_022_468_096,
  ),
  "Llama-3.1-8B": (
    LLAMA,
    DecoderConfig(
      128256,
      4096,
      32,
      32,
      8,
      128,
      14336,
      rope_theta=500_000.0,
      rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
      norm_eps=1e-5,
      tie_embeddings=False,
    ),
    8_030_261_248,
  ),
  "gemma-3-4b": (
    GEMMA_4B,
    DecoderConfig(
      262208,
      2560,
      34,
      8,
      4,
      256,
      10240,
      sliding_window=1024,
      rope_factor=8.0,
      embed_scale=2560**0.5,
      **GEMMA,
    ),
    3_880_263_168,
  ),
  "gemma-3-270m": (
    GEMMA_270M,
    DecoderConfig(
      262144, 640, 18, 4, 1, 256, 2048, sliding_window=512, embed_scale=640**0.5, **GEMMA
    ),
    268_098_176,
  ),
}
every_model = pytest.mark.parametrize("model", REAL)


def read(fields, **changes):
  return huggingface.config_from_fields(fields | changes, source="config.json")


@every_model
def test_real_configs_are_the_decoders_their_makers_describe(model):
  fields, cfg, parameters = REAL[model]
  assert read(fields) == cfg
  # The number of parameters that the safetensors on the Hub declare (of Gemma 4B: the text part).
  assert cfg.parameters == parameters
  shapes = huggingface.tensor_shapes(cfg).values()
  assert sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes) == parameters


@every_model
def test_an_exported_config_describes_the_same_decoder_in_both_styles(model):
  cfg = REAL[model][1]
  fields = huggingface.fields_from_config(cfg, "bfloat16")
  assert read(fields) == cfg
  older = {name: fields[name] for name in fields if name != "rope_parameters"}
  assert read(older) == cfg
  newer = {name: fields[name] for name in fields if name not in ("rope_theta", "rope_scaling")}
  assert read({name: newer[name] for name in newer if name != "rope_local_base_freq"}) == cfg


def test_layer_types_and_max_window_layers_say_which_layers_are_local():
  few = QWEN3 | dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=9)
  assert read(few, max_window_layers=1).local_layers == (False, True, True, True)
  assert read(few, max_window_layers=4) == read(few, use_sliding_window=False)
  kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
  assert read(few, layer_types=kinds).local_layers == (False, True, True, False)
  gemma = GEMMA_270M | dict(num_hidden_layers=4)
  assert read(gemma, sliding_window_pattern=2).local_layers == (True, False, True, False)
  assert read(gemma, layer_types=["full_attention"] * 4).sliding_window is None
  assert read(gemma).local_layers == (True,) * 4


def test_missing_head_counts_are_those_of_transformers():
  assert read(LLAMA | {"num_key_value_heads": None}).kv_heads == 32
  assert read({k: v for k, v in QWEN3.items() if k != "head_dim"}, hidden_size=1024).head_dim == 128
  assert read(QWEN25 | {"hidden_size": 1792}).head_dim == 64


NESTED = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
REFUSED = [
  (
    LLAMA,
    dict(architectures=["MixtralForCausalLM"]),
    "unknown architecture .'MixtralForCausalLM'.",
  ),
  (LLAMA, dict(architectures=None, model_type="mamba"), "unknown architecture mamba; known: Qwen2"),
  (LLAMA, dict(model_type="qwen2"), "model_type 'qwen2' does not belong"),
  (LLAMA, dict(attention_bias=True), "attention_bias = True is not supported; expected False"),
  (LLAMA, dict(mlp_bias=True), "mlp_bias = True"),
  (LLAMA, dict(hidden_act="relu"), "hidden_act = 'relu' is not supported"),
  (LLAMA, dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
  (LLAMA, dict(quantization_config={"bits": 4}), "quantization_config = .* could change what"),
  (LLAMA, dict(auto_map={"AutoModel": "x.Y"}), "auto_map"),
  (LLAMA, dict(num_local_experts=8), "num_local_experts = 8 is not supported for llama"),
  (LLAMA, dict(sliding_window=4096), "sliding_window = 4096 is not supported for llama"),
  (LLAMA, dict(rope_scaling={"type": "yarn", "factor": 4.0}), "rope_type 'yarn' is not supported"),
  (LLAMA, dict(rope_scaling={"type": "dynamic", "factor": 4.0}), "rope_type 'dynamic'"),
  (LLAMA, dict(rope_scaling={"type": "linear"}), "factor is missing with rope_type 'linear'"),
  (LLAMA, dict(rope_scaling={"type": "linear", "factor": "8"}), "factor = '8' should be a number"),
  (LLAMA, dict(rope_parameters={"rope_theta": 1e4}), "rope_theta = 10000.0 contradicts"),
  (LLAMA, dict(rope_parameters={"factor": 2.0}), "rope_scaling.factor = 8.0 contradicts"),
  (QWEN25, dict(rope_scaling={"mrope_section": [1, 2]}), "mrope_section = .* means nothing"),
  (QWEN25, dict(use_mrope=True), "use_mrope = True"),
  (QWEN25, dict(vocab_size=None), "lacks the field 'vocab_size'"),
  (QWEN25, dict(vocab_size="many"), "vocab_size = 'many' should be a number"),
  (QWEN25, dict(tie_word_embeddings=None), "tie_word_embeddings = None should be true or false"),
  (QWEN25, dict(num_key_value_heads=5), "config.json: 28 query heads cannot share 5"),
  (QWEN25, dict(layer_types=["full_attention"]), "layer_types should name"),
  (QWEN25, dict(layer_types=["sliding_attention"] * 28), "but use_sliding_window = False"),
  (
    GEMMA_270M,
    dict(layer_types=["sliding_attention", "full_attention", "full_attention"] * 6),
    "after the first sliding layer",
  ),
  (GEMMA_270M, dict(use_bidirectional_attention=True), "use_bidirectional_attention = True"),
  (GEMMA_270M, dict(sliding_window=None), "lacks the field 'sliding_window'"),
  (GEMMA_270M, dict(rope_parameters={"rope_type": "default"}), "rope_parameters.rope_type"),
  (
    GEMMA_270M,
    dict(rope_parameters=NESTED | {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}),
    "scaled rotary angles of sliding layers",
  ),
  (GEMMA_4B, dict(text_config=None), "lacks the field 'text_config'"),
  (GEMMA_4B, dict(quantization_config={"bits": 4}), "quantization_config"),
]


@pytest.mark.parametrize(("fields", "change", "sentence"), REFUSED)
def test_what_would_be_lost_is_refused_by_name(fields, change, sentence):
  with pytest.raises(ValueError, match=sentence):
    read(fields, **change)


def test_multimodal_names_lose_their_prefix_and_images_are_left_out():
  names = [
    "language_model.model.layers.0.mlp.up_proj.weight",
    "model.language_model.layers.1.mlp.up_proj.weight",
    "language_model.lm_head.weight",
    "vision_tower.vision_model.post_layernorm.bias",
    "model.vision_tower.vision_model.post_layernorm.bias",
    "multi_modal_projector.mm_soft_emb_norm.weight",
    "model.layers.0.self_attn.rotary_emb.inv_freq",
  ]
  assert huggingface.text_names(names) == {
    "model.layers.0.mlp.up_proj.weight": names[0],
    "model.layers.1.mlp.up_proj.weight": names[1],
    "lm_head.weight": names[2],
  }
