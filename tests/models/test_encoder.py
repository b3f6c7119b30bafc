"""The sentence encoder against BERT's equations in NumPy, and its batches, cache and directory."""

import json
import math
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy

from memrl_jax.models import bert, encoder, encoder_files

WORDS = [
  "push",
  "pull",
  "box",
  "wall",
  "north",
  "south",
  "east",
  "west",
  "key",
  "door",
  "open",
  "shut",
  "red",
  "blue",
]
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZES = dict(vocab=len(VOCAB), dim=16, layers=2, heads=2, mlp_dim=24, positions=20)
CONFIG = {
  "model_type": "bert",
  "vocab_size": len(VOCAB),
  "hidden_size": 16,
  "num_hidden_layers": 2,
  "num_attention_heads": 2,
  "intermediate_size": 24,
  "max_position_embeddings": 20,
  "type_vocab_size": 2,
  "layer_norm_eps": 1e-12,
  "hidden_act": "gelu",
  "hidden_dropout_prob": 0.1,
}
MODULES = [
  {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
  for i, (path, kind) in enumerate(
    (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
  )
]


def _tensors(seed=0):
  rng = np.random.default_rng(seed)
  shapes = encoder_files.tensor_shapes(bert.BertConfig(**SIZES))
  tensors = {
    name: rng.normal(size=shape).astype(np.float32) * 0.4 for name, shape in shapes.items()
  }
  extra = {"pooler.dense.weight": np.ones((16, 16), np.float32)}
  return tensors | extra


@pytest.fixture
def folder(tmp_path):
  """A directory as sentence-transformers saves one, with a vocabulary of 14 words."""
  (tmp_path / "1_Pooling").mkdir()
  _write(tmp_path / "config.json", CONFIG)
  _write(tmp_path / "modules.json", MODULES)
  _write(tmp_path / "sentence_bert_config.json", {"max_seq_length": 12, "do_lower_case": False})
  pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
  _write(tmp_path / "1_Pooling" / "config.json", pooling | {"pooling_mode_cls_token": False})
  _write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "BertTokenizer"})
  (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
  safetensors.numpy.save_file(_tensors(), tmp_path / "model.safetensors")
  return tmp_path


def _write(path, value):
  path.write_text(json.dumps(value))


def _change(path, **fields):
  _write(path, json.loads(path.read_text()) | fields)


# The equations, one text and one head at a time, in float64.


def _norm(x, tensors, name):
  centred = x - x.mean(-1, keepdims=True)
  scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
  return scaled * tensors[f"{name}.weight"] + tensors[f"{name}.bias"]


def _linear(x, tensors, name):
  return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


ACTIVATIONS = {
  "gelu": lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
  "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
  "relu": lambda x: np.maximum(x, 0),
}


def _reference(cfg, tensors, ids):
  tensors = {name: np.float64(tensor) for name, tensor in tensors.items()}
  x = tensors["embeddings.word_embeddings.weight"][ids]
  x = x + tensors["embeddings.position_embeddings.weight"][: len(ids)]
  x = _norm(
    x + tensors["embeddings.token_type_embeddings.weight"][0], tensors, "embeddings.LayerNorm"
  )
  d = cfg.dim // cfg.heads
  for layer in range(cfg.layers):
    at = f"encoder.layer.{layer}."
    q, k, v = (_linear(x, tensors, f"{at}attention.self.{n}") for n in ("query", "key", "value"))
    heads = []
    for h in range(cfg.heads):
      part = slice(h * d, (h + 1) * d)
      score = np.exp(q[:, part] @ k[:, part].T / math.sqrt(d))
      heads.append(score / score.sum(-1, keepdims=True) @ v[:, part])
    out = _linear(np.concatenate(heads, -1), tensors, f"{at}attention.output.dense")
    x = _norm(x + out, tensors, f"{at}attention.output.LayerNorm")
    wide = ACTIVATIONS[cfg.activation](_linear(x, tensors, f"{at}intermediate.dense"))
    out = _linear(wide, tensors, f"{at}output.dense")
    x = _norm(x + out, tensors, f"{at}output.LayerNorm")
  vector = x[0] if cfg.pooling == "cls" else x.mean(0)
  return vector / np.linalg.norm(vector) if cfg.normalize else vector


@pytest.mark.parametrize(
  "variant",
  [
    {},
    {"activation": "gelu_tanh", "pooling": "cls"},
    {"activation": "relu", "normalize": False},
  ],
)
def test_vectors_follow_the_equations_and_padding_is_not_seen(variant):
  cfg, tensors = bert.BertConfig(**SIZES, **variant), _tensors()
  params = encoder_files.from_tensors(cfg, tensors, source="test")
  assert jax.tree.structure(params) == jax.tree.structure(bert.shapes(cfg))
  texts = [[2, 7, 9, 3], [2, 3], [2, 5, 5, 6, 8, 10, 3]]
  tokens = np.full((4, 9), 11)  # padding holds another word; row 3 is all padding
  for row, ids in enumerate(texts):
    tokens[row, : len(ids)] = ids
  vectors = jax.jit(lambda p, x, n: bert.embed(p, cfg, x, n))(
    params, tokens, np.array([4, 2, 7, 0])
  )
  for row, ids in enumerate(texts):
    np.testing.assert_allclose(vectors[row], _reference(cfg, tensors, ids), atol=2e-6)
  assert np.all(np.isfinite(vectors))


def test_text_to_vector_through_the_directory(folder):
  made = encoder.Encoder.load(folder)
  # "lava" is not in the vocabulary: [UNK] = 1.  push = 5, box = 7, north = 9.
  [vector] = made.embed(["Push lava box north"])
  cfg = bert.BertConfig(**SIZES)
  np.testing.assert_allclose(vector, _reference(cfg, _tensors(), [2, 5, 1, 7, 9, 3]), atol=2e-6)
  assert (made.dimension, made.max_tokens, made.name) == (16, 12, folder.name)
  assert vector.dtype == np.float32


TEXTS = ["push", "push box", "key door open " * 3, "", "red " * 40, "push box", "west " * 6]


def test_a_vector_does_not_depend_on_order_or_company(folder):
  together = encoder.Encoder.load(folder, lengths=(4, 8), batches=(1, 4))
  with pytest.warns(UserWarning, match="1 of 6 texts were cut to 12 tokens .* longest has 42"):
    vectors = together.embed(TEXTS)
  alone = encoder.Encoder.load(folder, lengths=(12,), batches=(1,))
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for text, vector in zip(TEXTS, vectors, strict=True):
      np.testing.assert_allclose(alone.embed([text])[0], vector, atol=1e-6)
  assert together.stats.computed == 6  # seven texts, one of them twice
  assert together.embed([]).shape == (0, 16)


def test_cut_texts_are_counted_always_and_warned_of_once(folder):
  made = encoder.Encoder.load(folder, lengths=(12,), batches=(1,))
  whole, long = "red " * 10, "red " * 10 + "blue door"  # 12 tokens with [CLS] and [SEP]; 14
  with pytest.warns(UserWarning, match="1 of 2 texts"):
    first = made.encode([whole, long])
  np.testing.assert_array_equal(first.vectors_ND[0], first.vectors_ND[1])
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    again = made.encode([long, whole, long])
  assert (first.truncated, again.truncated, again.hits, made.stats.truncated) == (1, 2, 3, 3)


def test_nothing_compiles_after_warm_up(folder):
  made = encoder.Encoder.load(folder, lengths=(4,), batches=(1, 4))
  made.warmup()
  assert made.compiled() == 4  # lengths 4 and 12, batches 1 and 4
  rng = np.random.default_rng(0)
  for count in (1, 2, 3, 4, 5, 9):
    made.embed([" ".join(rng.choice(WORDS, rng.integers(0, 10))) for _ in range(count)])
  assert made.compiled() == 4
  assert made.stats.padded >= made.stats.tokens > 0


def test_batches_waste_little(folder):
  made = encoder.Encoder.load(folder, lengths=(4,), batches=(1, 4))
  made.embed(["red " * 10, *(f"{a} {b}" for a in WORDS[:3] for b in WORDS[:3])])
  # One row of 12; nine texts of 4 tokens: two batches of four rows, then one row.
  assert made.stats.padded == 12 + 9 * 4


def test_the_cache_is_bounded_and_drops_the_least_recently_used(folder):
  made = encoder.Encoder.load(folder, lengths=(4,), batches=(1,), cache=2)
  made.embed(["push", "pull"])
  made.embed(["push"])  # pull is now the oldest
  made.embed(["box"])
  before = made.stats
  assert made.encode(["push", "box"]).hits == 2
  assert made.encode(["pull"]).hits == 0
  assert made.stats.computed == before.computed + 1
  none = encoder.Encoder.load(folder, lengths=(4,), batches=(1,), cache=0)
  assert [none.encode(["push"]).hits for _ in range(2)] == [0, 0]


def test_the_fingerprint_is_of_the_function(folder):
  first = encoder.Encoder.load(folder).fingerprint
  # The same function, as newer versions of sentence-transformers spell it, without the unused pooler.
  pooling = {"embedding_dimension": 16, "pooling_mode": "mean", "include_prompt": True}
  _write(folder / "1_Pooling" / "config.json", pooling)
  tensors = _tensors()
  del tensors["pooler.dense.weight"]
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")
  assert encoder.Encoder.load(folder).fingerprint == first
  for change in (
    lambda: _change(folder / "sentence_bert_config.json", max_seq_length=11),
    lambda: _write(folder / "modules.json", MODULES[:2]),
    lambda: (folder / "vocab.txt").write_text("\n".join([*VOCAB[:-2], "blue", "red"]) + "\n"),
    lambda: safetensors.numpy.save_file(_tensors(seed=1), folder / "model.safetensors"),
  ):
    change()
    other = encoder.Encoder.load(folder).fingerprint
    assert other != first
    first = other


def _drop(tensors, name):
  return {key: tensor for key, tensor in tensors.items() if key != name}


def _save(folder, tensors):
  safetensors.numpy.save_file(tensors, folder / "model.safetensors")


WEIGHT = "encoder.layer.1.output.dense.weight"
BROKEN = {
  "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
  "no modules": (lambda f: (f / "modules.json").unlink(), "has no modules.json"),
  "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
  "no tokenizer": (lambda f: (f / "vocab.txt").unlink(), "has no tokenizer"),
  "not JSON": (lambda f: (f / "config.json").write_text("{"), "is not JSON"),
  "other model": (lambda f: _change(f / "config.json", model_type="mpnet"), "model_type = 'mpnet'"),
  "relative positions": (
    lambda f: _change(f / "config.json", position_embedding_type="relative_key"),
    "position_embedding_type = 'relative_key' is not supported",
  ),
  "unknown field": (lambda f: _change(f / "config.json", rope_theta=1e4), "rope_theta = 10000.0"),
  "activation": (lambda f: _change(f / "config.json", hidden_act="silu"), "hidden_act = 'silu'"),
  "max pooling": (
    lambda f: _change(
      f / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, pooling_mode_max_tokens=True
    ),
    "pooling_mode = 'max'",
  ),
  "two poolings": (
    lambda f: _change(f / "1_Pooling" / "config.json", pooling_mode_max_tokens=True),
    r"pooling_mode = \['mean', 'max'\]",
  ),
  "dense": (
    lambda f: _write(f / "modules.json", [*MODULES[:2], MODULES[2] | {"type": "models.Dense"}]),
    "Transformer, Pooling, Dense are not supported",
  ),
  "prompt": (
    lambda f: _write(f / "config_sentence_transformers.json", {"default_prompt_name": "query"}),
    "default_prompt_name = 'query'",
  ),
  "length": (
    lambda f: _change(f / "sentence_bert_config.json", max_seq_length=99),
    "max_seq_length = 99, but config.json has 20 positions",
  ),
  "missing tensor": (lambda f: _save(f, _drop(_tensors(), WEIGHT)), f"lacks 1 .* first {WEIGHT}"),
  "wrong shape": (
    lambda f: _save(f, _tensors() | {WEIGHT: np.zeros((24, 16), np.float32)}),
    r"has shape \(24, 16\), but config.json asks for \(16, 24\)",
  ),
  "unknown tensor": (lambda f: _save(f, _tensors() | {"lora": np.zeros(1)}), "does not name: lora"),
  "cut file": (
    lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-8]),
    "is not a safetensors file",
  ),
  "vocabulary": (lambda f: (f / "vocab.txt").open("a").write("more\n"), "has 20 tokens"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_supported_or_damaged_is_named_in_a_sentence(folder, case):
  damage, sentence = BROKEN[case]
  damage(folder)
  with pytest.raises((ValueError, FileNotFoundError), match=sentence):
    encoder.Encoder.load(folder)


@pytest.mark.parametrize(
  ("texts", "sentence"),
  [
    ("push box", "list of texts, not one text"),
    (["push", 3], "text 1 is a int"),
    (["push\ud800"], "text 0 is no Unicode text at character 4"),
  ],
)
def test_what_is_no_text_is_refused(folder, texts, sentence):
  with pytest.raises(ValueError, match=sentence):
    encoder.Encoder.load(folder).embed(texts)
