"""Embedders: unit vectors, the same in every process, and what was cut is told."""

import contextlib
import hashlib
import http.server
import json
import pathlib
import subprocess
import sys
import threading
import warnings
import zlib

import numpy as np
import pytest

from memrl_jax.memory import embed

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXTS = ["Open the door to the kitchen.", "#####\n#@$.#", "été 東京 3 + 4", "", "a a a b"]


def digest(vectors):
  return hashlib.sha256(np.round(vectors.astype(np.float64), 4).tobytes()).hexdigest()[:16]


def test_hash_is_the_same_in_every_process_and_needs_no_jax():
  code = (
    "import hashlib, sys, numpy as np; from memrl_jax.memory import bank, embed;"
    f"v = embed.Hash().embed({TEXTS!r}); assert 'jax' not in sys.modules;"
    "print(hashlib.sha256(np.round(v.astype(np.float64), 4).tobytes()).hexdigest()[:16])"
  )
  done = subprocess.run(
    [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
  )
  # From this code when the scheme was fixed: another scheme needs another `Hash.name`, because
  # memories on disk hold its vectors.
  assert done.stdout.strip() == digest(embed.Hash().embed(TEXTS)) == "18829f7cee8b21ba"


def test_hash_vectors_are_unit_and_do_not_depend_on_their_neighbours():
  embedder = embed.Hash()
  together = embedder.embed(TEXTS)
  assert together.dtype == np.float32 and together.flags["C_CONTIGUOUS"]
  np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
  alone = np.concatenate([embed.Hash().embed([text]) for text in TEXTS])
  assert np.array_equal(together, alone)
  assert embedder.embed([]).shape == (0, 384)


def test_hash_is_nearer_for_shared_words_forms_of_a_word_and_order():
  def cosine(a, b):
    return float(np.dot(*embed.Hash().embed([a, b])))

  said = "take the red key from the kitchen table"
  assert cosine(said, said.upper()) == pytest.approx(1, abs=1e-6)
  assert cosine(said, "take the red key from the table") > 0.8
  assert cosine(said, "from kitchen take table the red the key") < 0.8  # the same words
  assert cosine("heating water", "heated waters") > 0.2 > 0.1 > cosine("heating water", "cold oil")
  # Repetition counts as its logarithm: a, <a>, b, <b>, "a b" are 1 in one text; in the other a and
  # <a> are 1 + ln 8 and "a a" is there: (2 (1 + ln 8) + 3) / sqrt(5 (2 (1 + ln 8)^2 + 4)).
  assert cosine("a b", "a a a a a a a a b") == pytest.approx(0.8547, abs=1e-4)


def test_hash_by_hand():
  # One word of one letter: "word x" with weight 1 and its only 3-gram "<x>" with weight 1/sqrt(1).
  embedder = embed.Hash(dimension=64)
  vector = embedder.embed(["X"])[0]
  index, sign = embedder._place(np.array([_crc("word x"), _crc("<x>")], "u8"))
  want = np.zeros(64)
  np.add.at(want, index, sign)
  np.testing.assert_allclose(vector, want / np.linalg.norm(want), atol=1e-6)
  # x x: no new place but the pair "x x", which counts 1 beside 1 + ln 2.
  pair, pair_sign = embedder._place(
    np.array([_crc("word x")], "u8") * embed._MIX ^ np.array([_crc("word x")], "u8")
  )
  want = (1 + np.log(2)) * want
  want[pair] += pair_sign
  np.testing.assert_allclose(embedder.embed(["x X"])[0], want / np.linalg.norm(want), atol=1e-6)


def _crc(text):
  return zlib.crc32(text.encode())


def test_what_is_cut_is_the_end_and_is_counted_and_warned_about_once():
  embedder = embed.Hash(max_chars=20)
  newest = "you see a red door. "
  with pytest.warns(UserWarning, match="60 characters to 20"):
    cut = embedder.embed([newest + "what was seen earlier, and long ago.... ", "short"])
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    embedder.embed([newest * 2, newest * 3])
  assert embedder.truncated == 3
  assert np.array_equal(cut[0], embed.Hash().embed([newest])[0])


def test_policy_pools_over_the_tokens_of_a_text_alone_and_cuts_at_its_limit():
  seen = []

  def hidden(tokens_NT, length_N):
    seen.append((tokens_NT.shape, length_N.tolist()))
    out = np.full((*tokens_NT.shape, 3), np.nan)  # padding is poison
    for row, length in enumerate(length_N):
      out[row, :length] = [[token, token**2, 1.0] for token in tokens_NT[row, :length]]
    return out

  embedder = embed.Policy(
    lambda texts: [[len(word) for word in text.split()] for text in texts],
    hidden,
    dimension=3,
    label="tiny",
    max_tokens=20,
    batch=2,
  )
  with pytest.warns(UserWarning, match="30 tokens to 20"):
    vectors = embedder.embed(["aa bbb", "z " * 30, ""])
  want = np.array(
    [[2.5, 6.5, 1], [1, 1, 1], [0, 0, 1]]
  )  # means of 2, 3; of ones; of the padding id
  np.testing.assert_allclose(vectors, want / np.linalg.norm(want, axis=1, keepdims=True), atol=1e-6)
  assert embedder.truncated == 1 and embedder.name == "policy:tiny"
  assert [shape for shape, _ in seen] == [(2, 16), (2, 32)]  # few shapes, short texts together


def test_cached_computes_each_text_once_and_forgets_the_oldest():
  asked = []

  class Counting(embed.Hash):
    def embed(self, texts):
      asked.append(list(texts))
      return super().embed(texts)

  cached = embed.Cached(Counting(), 2)
  first = cached.embed(["a", "b", "a"])
  assert np.array_equal(first[0], first[2])
  assert np.array_equal(cached.embed(["b", "a"]), first[[1, 0]])
  cached.embed(["c"])  # b, not a, is the oldest now
  cached.embed(["a"])
  cached.embed(["b"])
  assert asked == [["a", "b"], ["c"], ["b"]] and cached.hits == 3
  assert cached.embed([]).shape == (0, 384)


@contextlib.contextmanager
def serving(answer):
  """A server on loopback: `answer(path, headers, body)` is (code, JSON), or None to hang up."""

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
      body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
      reply = answer(self.path, self.headers, body)
      if reply is not None:
        data = json.dumps(reply[1]).encode()
        self.send_response(reply[0])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
      pass

  with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_remote_repeats_what_may_pass_sorts_what_comes_and_says_what_fails(monkeypatch):
  monkeypatch.setenv("SOME_KEY", "secret")
  asked = []

  def answer(path, headers, body):
    if path != "/v1/embeddings" or headers["Authorization"] != "Bearer secret":
      return 404, {"error": "wrong"}
    texts = body["input"]
    asked.append(texts)
    if len(asked) in (2, 3):
      return None if len(asked) == 2 else (503, {"error": "busy"})
    if "refuse" in texts:
      return 400, {"error": "no such model"}
    if "poison" in texts:
      return 200, {"data": [{"index": 0, "embedding": [0.0, 0.0]}]}
    data = [{"index": n, "embedding": [3.0 * len(text), 4.0]} for n, text in enumerate(texts)]
    return 200, {"data": data[::-1]}

  with serving(answer) as url:
    embedder = embed.Remote(url, "small", key_env="SOME_KEY", batch=2, backoff_s=0.01)
    assert embedder.dimension == 2 and embedder.name == "remote:small"
    vectors = embedder.embed(["a", "bbbb", "a"])
    np.testing.assert_allclose(vectors[[0, 2]], [[0.6, 0.8]] * 2, atol=1e-6)
    np.testing.assert_allclose(vectors[1], np.array([3, 1]) / 10**0.5, atol=1e-6)
    assert asked[1:] == [["a", "bbbb"]] * 3 + [["a"]]
    with pytest.raises(ConnectionError, match=r"1 attempts .*no such model"):
      embedder.embed(["refuse"])
    with pytest.raises(ValueError, match=r"length 0\.0"):
      embedder.embed(["poison"])
