"""GGUF files written here by llama.cpp's conventions, read back by us.

Letters: D width, H query heads, K key-value heads, d head width, M MLP width, L layers, V vocabulary.
"""

import json
import re
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy

gguf_package = pytest.importorskip("gguf", reason="the gguf package is not installed")

from memrl_jax.models import gguf, weights  # noqa: E402
from memrl_jax.models.config import RopeScaling  # noqa: E402
from memrl_jax.sampling import chat  # noqa: E402
from memrl_jax.types import Message  # noqa: E402

D, H, K, d, M, L = 32, 4, 2, 16, 64, 2
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁t", "he", "▁the", "in", "▁a", "ing", "▁", "t", "h", "e", "i", "n", "g", "a", "s", "é"]
SPECIAL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
USER = ["\n", "\n\n", "  ", "   "]  # llama.cpp stores a run of spaces as spaces
TOKENS = SPECIAL + USER + BYTES + PIECES
V = len(TOKENS)

NAMES = {  # Hugging Face -> llama.cpp, written out from the "standardized tensor names" of its docs
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
  "post_attention_layernorm": "post_attention_norm",
  "pre_feedforward_layernorm": "ffn_norm",
  "post_feedforward_layernorm": "post_ffw_norm",
}
COMMON = {
  "vocab_size": V,
  "hidden_size": D,
  "num_hidden_layers": L,
  "num_attention_heads": H,
  "num_key_value_heads": K,
  "intermediate_size": M,
  "rms_norm_eps": 1e-6,
}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS = {
  "gemma3": COMMON
  | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": d,
    "query_pre_attn_scalar": d,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "final_logit_softcapping": 30.0,
  },
  "llama": COMMON
  | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": d,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 8192} | SCALING,
  },
  "qwen2": COMMON
  | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
  },
  "qwen3": COMMON
  | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": d,
    "rope_theta": 1e6,
  },
}


def metadata(name):
  """The metadata llama.cpp's converter writes for CONFIGS[name]."""
  fields = CONFIGS[name]
  keys = {
    "context_length": 4096,
    "embedding_length": D,
    "block_count": L,
    "feed_forward_length": M,
    "attention.head_count": H,
    "attention.head_count_kv": K,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": fields["rope_theta"],
  }
  if "head_dim" in fields:
    keys |= {"attention.key_length": d, "attention.value_length": d}
  if name == "gemma3":
    keys |= {
      "attention.sliding_window": 8,
      "attention.sliding_window_pattern": 2,
      "rope.scaling.type": "linear",
      "rope.scaling.factor": 8.0,
      "final_logit_softcapping": 30.0,
    }
  if name == "llama":
    keys |= {"vocab_size": V, "rope.dimension_count": d}
  return {f"{name}.{key}": value for key, value in keys.items()}


def tokenizer_metadata():
  types = [3] * len(SPECIAL) + [4] * len(USER) + [6] * len(BYTES) + [1] * len(PIECES)
  types[3] = 2  # unknown
  special = len(SPECIAL) + len(USER) + len(BYTES)
  return {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-1000.0] * special + [-float(i) for i in range(len(PIECES))],
    "tokenizer.ggml.token_type": types,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_eos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
  }


def hugging_face_tensors(name, seed=0):
  rng = np.random.default_rng(seed)
  fields = CONFIGS[name]
  width = fields.get("head_dim", D // H)
  layer = {
    "self_attn.q_proj.weight": (H * width, D),
    "self_attn.k_proj.weight": (K * width, D),
    "self_attn.v_proj.weight": (K * width, D),
    "self_attn.o_proj.weight": (D, H * width),
    "mlp.gate_proj.weight": (M, D),
    "mlp.up_proj.weight": (M, D),
    "mlp.down_proj.weight": (D, M),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
  }
  if name == "qwen2":
    layer |= {f"self_attn.{p}_proj.bias": layer[f"self_attn.{p}_proj.weight"][:1] for p in "qkv"}
  if name in ("qwen3", "gemma3"):
    layer |= {"self_attn.q_norm.weight": (width,), "self_attn.k_norm.weight": (width,)}
  if name == "gemma3":
    layer |= {f"{p}_feedforward_layernorm.weight": (D,) for p in ("pre", "post")}
  shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
  if name in ("llama", "qwen3"):
    shapes["lm_head.weight"] = (V, D)
  for index in range(L):
    shapes |= {f"model.layers.{index}.{key}": shape for key, shape in layer.items()}
  # Multiples of 1/256 below 2: exact in float32 also after 1 is added and subtracted.
  return {
    key: rng.integers(-511, 512, shape).astype(np.float32) / 256 for key, shape in shapes.items()
  }


def llama_cpp_tensors(name, tensors):
  """What llama.cpp's converter makes of them: `modify_tensors` in its `conversion/`."""
  outer = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
  }
  names = GEMMA_NAMES if name == "gemma3" else NAMES
  written = {}
  for key, array in tensors.items():
    if name == "gemma3" and key.endswith("norm.weight"):
      array = array + 1
    if name == "llama" and ("q_proj" in key or "k_proj" in key):
      heads = H if "q_proj" in key else K
      halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
      array = halves.swapaxes(1, 2).reshape(array.shape)
    if key in outer:
      written[outer[key]] = array
    else:
      _, _, index, rest = key.split(".", 3)
      stem, _, suffix = rest.rpartition(".")
      written[f"blk.{index}.{names[stem]}.{suffix}"] = array
  if name == "llama":
    written["rope_freqs.weight"] = llama3_factors(**SCALING)
  return written


def llama3_factors(factor, low_freq_factor, high_freq_factor, original=8192, theta=5e5):
  """`generate_extra_tensors` of llama.cpp's LlamaModel, line by line."""
  factors = []
  for i in range(0, d, 2):
    wavelength = 2 * np.pi * theta ** (i / d)
    if wavelength < original / high_freq_factor:
      factors.append(1.0)
    elif wavelength > original / low_freq_factor:
      factors.append(factor)
    else:
      smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
      factors.append(1 / ((1 - smooth) / factor + smooth))
  return np.array(factors, np.float32)


def write(path, name, tensors, keys=None, kinds=None):
  """A GGUF of `tensors` by llama.cpp's names; `kinds` quantises some of them."""
  writer = gguf_package.GGUFWriter(path, name)
  for key, value in (metadata(name) if keys is None else keys).items():
    if isinstance(value, list):
      writer.add_array(key, value)
    elif isinstance(value, bool):
      writer.add_bool(key, value)
    else:
      add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
      add[type(value)](key, value)
  for stored, array in tensors.items():
    kind = (kinds or {}).get(stored)
    if kind is None:
      writer.add_tensor(stored, np.ascontiguousarray(array))
    elif array.dtype == np.uint8:
      writer.add_tensor(stored, array, raw_dtype=kind)
    else:
      writer.add_tensor(stored, gguf_package.quantize(array, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("name", CONFIGS)
def test_gguf_equals_the_directory_it_was_converted_from(tmp_path, name):
  """Names, Gemma's norms, Llama's rotary order, biases, heads and every field of the config."""
  tensors = hugging_face_tensors(name)
  (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
  safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
  expected_cfg, expected = weights.load_directory(tmp_path)
  cfg, params = gguf.load(write(tmp_path / "m.gguf", name, llama_cpp_tensors(name, tensors)))
  assert cfg == expected_cfg
  jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_llama3_rope_table_becomes_its_four_numbers(tmp_path):
  written = llama_cpp_tensors("llama", hugging_face_tensors("llama"))
  cfg, _ = gguf.load(write(tmp_path / "a.gguf", "llama", written))
  assert cfg.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
  # The same factor over another original length is another function: refused, not approximated.
  written["rope_freqs.weight"] = llama3_factors(**SCALING, original=4096)
  with pytest.raises(ValueError, match=r"rope_freqs.weight is not the table of Llama 3.1"):
    gguf.load(write(tmp_path / "b.gguf", "llama", written))


def test_quantised_weights_stay_within_half_a_step(tmp_path):
  """Q8_0: blocks of 32 share the step max|w| / 127, so rounding moves a weight by half of it."""
  tensors = hugging_face_tensors("qwen3")
  written = llama_cpp_tensors("qwen3", tensors)
  kinds = {key: gguf_package.GGMLQuantizationType.Q8_0 for key in written if "norm" not in key}
  _, params = gguf.load(write(tmp_path / "m.gguf", "qwen3", written, kinds=kinds))
  exact = tensors["model.embed_tokens.weight"]
  step = np.abs(exact).max(axis=1, keepdims=True) / 127  # D = 32: a row is a block
  error = np.abs(np.asarray(params["embedding"]) - exact)
  assert error.max() > 0  # it was quantised
  assert np.all(error <= step * (0.5 + 2**-10) + exact.max() * 2**-10)  # the step is a float16


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
  """Tensors and metadata of a good file, to break."""
  return llama_cpp_tensors("qwen3", hugging_face_tensors("qwen3")), metadata("qwen3")


def test_dtype_and_place_reach_every_parameter(tmp_path, qwen3):
  written, keys = qwen3
  last = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
  _, params = gguf.load(
    write(tmp_path / "m.gguf", "qwen3", written, keys),
    dtype="bfloat16",
    place=lambda path, leaf: last,
  )
  for leaf in jax.tree.leaves(params):
    assert leaf.dtype == "bfloat16" and leaf.sharding == last


def without(values, name):
  return {key: value for key, value in values.items() if key != name}


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path, qwen3):
  written, _ = qwen3
  stored = "blk.1.ffn_up.weight"
  cases = {
    r"lacks the tensor blk\.1\.ffn_up\.weight": without(written, stored),
    r"first blk\.0\.ffn_gate_inp\.weight": written | {"blk.0.ffn_gate_inp.weight": np.ones((8, D))},
    r"mlp\.up_proj": written | {stored: np.ones((M + 1, D), np.float32)},
  }
  for number, (message, tensors) in enumerate(cases.items()):
    with pytest.raises(ValueError, match=message):
      gguf.load(write(tmp_path / f"{number}.gguf", "qwen3", tensors))


def test_unsupported_quantisation_is_named(tmp_path, qwen3):
  written, _ = qwen3
  kind = gguf_package.GGMLQuantizationType.Q8_1  # llama.cpp's for activations; rows of one block
  size = gguf_package.GGML_QUANT_SIZES[kind][1]
  written = written | {"blk.0.attn_v.weight": np.zeros((K * d, size), np.uint8)}
  path = write(tmp_path / "m.gguf", "qwen3", written, kinds={"blk.0.attn_v.weight": kind})
  with pytest.raises(ValueError, match=r"quantisation Q8_1 of blk\.0\.attn_v\.weight"):
    gguf.load(path)


def test_metadata_that_changes_the_function_is_refused_by_name(tmp_path, qwen3):
  written, keys = qwen3
  cases = {
    r"qwen3\.attention\.head_count\b": without(keys, "qwen3.attention.head_count"),
    r"qwen3\.expert_count = 8": keys | {"qwen3.expert_count": 8},
    r"qwen3\.attention\.value_length = 8": keys | {"qwen3.attention.value_length": 8},
    r"qwen3\.attention\.clamp_kqv": keys | {"qwen3.attention.clamp_kqv": 8.0},
    r"yarn": keys | {"qwen3.rope.scaling.type": "yarn", "qwen3.rope.scaling.factor": 4.0},
    r"one of 3 parts": keys | {"split.count": 3},
  }
  for number, (message, changed) in enumerate(cases.items()):
    with pytest.raises(ValueError, match=message):
      gguf.load(write(tmp_path / f"{number}.gguf", "qwen3", written, changed))


def test_files_that_are_no_gguf_of_ours(tmp_path, qwen3, monkeypatch):
  written, keys = qwen3
  with pytest.raises(FileNotFoundError, match="there is no file"):
    gguf.load(tmp_path / "none.gguf")
  (tmp_path / "page.gguf").write_text("<html>not found</html>")
  with pytest.raises(ValueError, match="is not a GGUF file"):
    gguf.load(tmp_path / "page.gguf")
  whole = write(tmp_path / "whole.gguf", "qwen3", written, keys).read_bytes()
  for size in (4, 300, len(whole) - 64):
    (tmp_path / "cut.gguf").write_bytes(whole[:size])
    with pytest.raises(ValueError, match="is it complete"):
      gguf.load(tmp_path / "cut.gguf")
  other = write(tmp_path / "other.gguf", "mamba", {"token_embd.weight": np.ones((4, 4))}, {})
  with pytest.raises(ValueError, match="architecture 'mamba' is not supported; known: gemma3"):
    gguf.load(other)
  monkeypatch.setitem(sys.modules, "gguf", None)
  with pytest.raises(ModuleNotFoundError, match="pip install gguf"):
    gguf.load(tmp_path / "whole.gguf")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
  """A Gemma with a tokenizer, and the directory written from it."""
  folder = tmp_path_factory.mktemp("gguf")
  keys = metadata("gemma3") | tokenizer_metadata()
  keys |= {"general.name": "Tiny", "general.license": "gemma"}
  tensors = llama_cpp_tensors("gemma3", hugging_face_tensors("gemma3"))
  path = write(folder / "tiny.gguf", "gemma3", tensors, keys)
  (folder / "TERMS.html").write_text("the terms")
  notice = gguf.export_directory(path, folder / "out")
  return path, folder / "out", notice


def test_exported_directory_holds_the_same_model(exported):
  path, folder, _ = exported
  cfg, params = gguf.load(path)
  again_cfg, again = weights.load_directory(folder)
  assert again_cfg == cfg
  jax.tree.map(np.testing.assert_array_equal, again, params)
  fields = json.loads((folder / "config.json").read_text())
  assert fields["max_position_embeddings"] == 4096
  assert fields["eos_token_id"] == [1, 5] and fields["bos_token_id"] == 2


def test_licence_is_shown_and_travels(exported):
  _, folder, notice = exported
  assert "Tiny" in notice and "https://ai.google.dev/gemma/terms" in notice
  assert (folder / "NOTICE.txt").read_text() == notice
  assert (folder / "TERMS.html").read_text() == "the terms"


def test_ids_equal_sentencepiece_on_the_same_pieces(exported):
  """The oracle is the library whose vocabulary the file lists (spaces as it writes them)."""
  pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="needs protobuf")
  import sentencepiece

  keys = tokenizer_metadata()
  model = pb2.ModelProto()
  for piece, score, kind in zip(
    TOKENS,
    keys["tokenizer.ggml.scores"],
    keys["tokenizer.ggml.token_type"],
    strict=True,
  ):
    text = piece.replace(" ", "▁") if kind == 4 else piece
    model.pieces.add(piece=text, score=score, type=kind)
  spec = model.trainer_spec
  spec.model_type, spec.byte_fallback, spec.unk_id = 2, True, 3
  spec.pad_id, spec.eos_id, spec.bos_id = 0, 1, 2
  model.normalizer_spec.add_dummy_prefix = False
  model.normalizer_spec.remove_extra_whitespaces = False
  model.normalizer_spec.name = "identity"
  oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
  text = chat.from_transformers(exported[1])
  rng = np.random.default_rng(0)
  letters = [*"thingase", " ", " ", "  ", "\n", "\n\n", "é", "本", "\t", "x", " the", "ing"]
  for size in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55):
    sample = re.sub(
      " {4,}", "   ", "".join(rng.choice(letters, size))
    )  # longer runs are cut freely
    ids = text.reply(sample).tolist()[:-1]
    assert ids == oracle.encode(sample), repr(sample)
    assert text.decode(ids) == sample


def test_base_model_gets_a_plain_chat_and_every_stop(exported):
  text = chat.from_transformers(exported[1])
  ids = text.encode([Message("user", "the <eos>"), Message("assistant", "a")])
  assert ids[0] == 2 and np.sum(ids == 2) == 1  # one bos, by the template
  assert 1 not in ids  # text never becomes a special token
  assert text.decode(ids) == "User: the <eos>\n\nAssistant: a\n\nAssistant:"
  assert set(text.stop_ids) == {1, 5}  # <eos>, <end_of_turn>
  assert text.pad_id == 0


def test_command_line_keeps_the_chat_template_and_takes_a_dtype(tmp_path, capsys):
  keys = metadata("gemma3") | tokenizer_metadata()
  keys["tokenizer.chat_template"] = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m['content'] }}<end_of_turn>{% endfor %}"
  )
  tensors = llama_cpp_tensors("gemma3", hugging_face_tensors("gemma3"))
  path = write(tmp_path / "m.gguf", "gemma3", tensors, keys)
  assert gguf.main([str(path), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
  assert f"--config.model.checkpoint={tmp_path / 'out'}" in capsys.readouterr().out
  stored = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
  assert {array.dtype.name for array in stored.values()} == {"bfloat16"}
  ids = chat.from_transformers(tmp_path / "out").encode([Message("user", " the")])
  assert ids.tolist() == [2, 4, TOKENS.index("▁the"), 5]


def test_byte_level_tokenizer_splits_as_qwen_does(tmp_path):
  """Digits one by one (Qwen's splitting): the merge "12" of the file is never used."""
  from tokenizers import pre_tokenizers

  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokens = ["<|endoftext|>", "<|im_end|>", *alphabet, "12", "ab", "Ġab"]
  tokens += [f"[PAD{i}]" for i in range(V - len(tokens))]
  keys = metadata("qwen3") | {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
    "tokenizer.ggml.merges": ["1 2", "a b", "Ġ ab"],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.add_bos_token": False,
  }
  tensors = llama_cpp_tensors("qwen3", hugging_face_tensors("qwen3"))
  path = write(tmp_path / "m.gguf", "qwen3", tensors, keys)
  gguf.export_directory(path, tmp_path / "out")
  text = chat.from_transformers(tmp_path / "out")
  ids = text.reply("ab ab12").tolist()
  shown = ["ab", "Ġab", "1", "2", "<|im_end|>"]
  assert ids == [tokens.index(token) for token in shown]
  assert text.decode(ids) == "ab ab12"
  assert set(text.stop_ids) == {0, 1}
  keys["tokenizer.ggml.pre"] = "chameleon"
  path = write(tmp_path / "n.gguf", "qwen3", tensors, keys)
  with pytest.raises(ValueError, match="splitting 'chameleon' is not supported"):
    gguf.export_directory(path, tmp_path / "other")


def test_command_line_answers_in_one_sentence(tmp_path, capsys):
  assert gguf.main([str(tmp_path / "no.gguf"), str(tmp_path / "out")]) == 2
  assert capsys.readouterr().err.startswith("error: there is no file")
  assert gguf.main(["no_such_package", str(tmp_path / "out")]) == 2
  assert "pip install no-such-package" in capsys.readouterr().err
