"""Embedders: texts in, one unit vector each out, so that an inner product is the cosine.

`Hash` needs no download and no jax; `MiniLM` is the sentence encoder on real weights; `Policy` pools
the language model's own hidden states; `Remote` asks a server. A memory's manifest stores `name` and
`dimension`: vectors of two embedders are never compared.

Every embedder has a limit on the length of a text. What is longer loses its END (write the newest
text of a key first), is counted in `truncated` and warned about once.

Letters: N texts, T tokens, D width.
"""

from __future__ import annotations

import collections
import itertools
import math
import os
import re
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np


class Embedder(Protocol):
  """What a memory needs: `name` says which vectors may be compared; safe to call from threads."""

  name: str
  dimension: int
  truncated: int

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    """Vectors [N, D] in the order of the texts: float32, C-contiguous, of length 1."""
    ...


class Guard:
  """Counts the texts that an embedder cut, and warns about the first."""

  def __init__(self, name: str, limit: int, unit: str):
    if limit < 1:
      raise ValueError(f"the limit of the {name} embedder is {limit} {unit}; make it at least 1")
    self.name, self.limit, self.unit, self.cut = name, limit, unit, 0

  def __call__(self, items: Sequence[Sequence]) -> list:
    """The items (texts or lists of ids), each at most `limit` long."""
    longest, cut = max(map(len, items), default=0), 0
    if longest > self.limit:
      cut = sum(len(item) > self.limit for item in items)
      if not self.cut:
        warnings.warn(
          f"the {self.name} embedder cut a text of {longest} {self.unit} to {self.limit}; what comes "
          "after is not searched, so put the newest text of a key first (counted in `truncated`)",
          stacklevel=3,
        )
      self.cut += cut
    return [item[: self.limit] for item in items]


def normalised(vectors_ND: np.ndarray, name: str) -> np.ndarray:
  """Rows of length 1, float32, C-contiguous.

  Raises:
    ValueError: a row is not finite, or all zeros, so it has no direction.
  """
  vectors_ND = np.asarray(vectors_ND, np.float64)
  length_N = np.sqrt(np.einsum("nd,nd->n", vectors_ND, vectors_ND))
  if len(length_N) and not (length_N.min() > 0 and length_N.max() < np.inf):  # NaN is neither
    row = int(np.flatnonzero(~((length_N > 0) & (length_N < np.inf)))[0])
    raise ValueError(
      f"the {name} embedder gave text {row} a vector of length {length_N[row]}; it must be finite "
      "and not zero"
    )
  return (vectors_ND / length_N[:, None]).astype(np.float32)


# --- hash ----------------------------------------------------------------------------------------

_TOKEN = re.compile(r"\w{1,32}|[^\w\s]{1,32}")  # words, and runs of signs (grids, punctuation)


_MIX = np.uint64(0x9E3779B97F4A7C15)  # CRC is linear; a multiplication mixes its bits


class _Word(NamedTuple):
  code: int  # for its pairs
  index_F: np.ndarray  # in [0, D): the word, and the characters inside
  weight_F: np.ndarray  # signed


class Hash:
  """Feature hashing of words, the characters inside words, and pairs of neighbours.

      v[h(g)] += s(g) * w(g) * (1 + ln tf)  for every distinct gram g;  v / |v|

  h and s are bits of CRC-32, the same in every process. w = 1 for a word; its marked 3- and 4-grams
  share a weight of 1 (1/sqrt(number) each), so that forms of one word stay close; a pair counts
  1, once. Case does not count.
  Weinberger et al. 2009 (0902.2206) for signed hashing; fastText (1607.04606) for marked n-grams.
  """

  name = "hash"

  def __init__(self, dimension: int = 384, *, max_chars: int = 20_000, cache: int = 1 << 16):
    """`cache`: words kept with their hashes, 0.3 KB each; all are dropped when it is full."""
    if dimension < 2:
      raise ValueError(f"a hash embedding of {dimension} numbers says nothing; use 64 or more")
    self.dimension, self._capacity = dimension, cache
    self._guard = Guard(self.name, max_chars, "characters")
    self._kept: dict[str, _Word] = {}

  @property
  def truncated(self) -> int:
    return self._guard.cut

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    if not texts:
      return np.zeros((0, self.dimension), np.float32)
    found: list[_Word] = []
    tf, start, left, right, pair_start = [], [], [], [], []
    for row, text in enumerate(self._guard(texts)):
      words = _TOKEN.findall(text.lower()) or [""]
      counts = collections.Counter(words)
      known = {word: self._kept.get(word) or self._word(word) for word in counts}
      found += known.values()
      tf += counts.values()
      start += [row * self.dimension] * len(counts)
      pairs = dict.fromkeys(itertools.pairwise(words))
      left += [known[word].code for word, _ in pairs]
      right += [known[word].code for _, word in pairs]
      pair_start += [row * self.dimension] * len(pairs)
    index_F = np.concatenate([word.index_F for word in found])
    weight_F = np.concatenate([word.weight_F for word in found])
    of_F = np.repeat(np.arange(len(found)), [len(word.index_F) for word in found])
    index_F += np.array(start)[of_F]
    weight_F *= (1 + np.log(tf))[of_F]
    pair_P, sign_P = self._place(np.array(left, "u8") * _MIX ^ np.array(right, "u8"))
    total = np.bincount(
      np.concatenate([index_F, pair_P + np.array(pair_start, np.int64)]),
      np.concatenate([weight_F, sign_P]),
      minlength=len(texts) * self.dimension,
    )
    vectors_ND = total.reshape(len(texts), self.dimension)
    vectors_ND[~vectors_ND.any(axis=1), 0] = 1.0  # all features cancelled: as good as any direction
    return normalised(vectors_ND, self.name)

  def _place(self, code_F: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a gram is added, and its sign."""
    code_F = code_F * _MIX
    index_F = (code_F >> np.uint64(16)) % np.uint64(self.dimension)
    return index_F.view(np.int64), 1.0 - 2.0 * (code_F >> np.uint64(63))

  def _word(self, word: str) -> _Word:
    marked = f"<{word}>"
    inner = [marked[i : i + n] for n in (3, 4) for i in range(len(marked) - n + 1)]
    codes = [zlib.crc32(gram.encode("utf-8", "surrogatepass")) for gram in (f"word {word}", *inner)]
    index_F, sign_F = self._place(np.array(codes, "u8"))
    sign_F[1:] /= math.sqrt(max(1, len(inner)))
    if len(self._kept) >= self._capacity:
      self._kept.clear()
    made = self._kept[word] = _Word(codes[0], index_F, sign_F)
    return made


# --- models --------------------------------------------------------------------------------------


class MiniLM:
  """The sentence encoder of a directory (`models.encoder`): mean-pooled BERT, cut at its own limit.

  The name holds the fingerprint of weights and tokenizer, so other weights are another embedder.
  """

  def __init__(self, directory: str | os.PathLike[str], **options):
    from memrl_jax.models import encoder  # imports jax, which the hash embedder must not

    self._encoder = encoder.Encoder.load(directory, **options)
    self.name = f"minilm:{self._encoder.fingerprint[:12]}"
    self.dimension = self._encoder.dimension

  @property
  def truncated(self) -> int:
    return self._encoder.stats.truncated

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    if not texts:
      return np.zeros((0, self.dimension), np.float32)
    return normalised(self._encoder.embed(texts), self.name)


class Policy:
  """The language model's own hidden states, averaged over the tokens of a text.

  v = mean_t hidden_t;  v / |v|
  """

  def __init__(
    self,
    tokenize: Callable[[Sequence[str]], list[list[int]]],
    hidden: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    dimension: int,
    label: str,
    max_tokens: int = 512,
    batch: int = 8,
  ):
    """`hidden(tokens_NT, length_N)` gives hidden_NTD; texts are padded on the right with id 0.

    `label` names the weights: they change in training, and an old vector means nothing to new
    weights. Lengths are padded to powers of two and rows to `batch`, so few shapes compile.
    """
    self.name, self.dimension = f"policy:{label}", dimension
    self._tokenize, self._hidden, self._batch = tokenize, hidden, batch
    self._guard = Guard(self.name, max_tokens, "tokens")

  @property
  def truncated(self) -> int:
    return self._guard.cut

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    ids = self._guard([list(row) or [0] for row in self._tokenize(texts)])
    out_ND = np.zeros((len(texts), self.dimension))
    order = sorted(range(len(ids)), key=lambda n: len(ids[n]))  # like lengths share a batch
    for start in range(0, len(order), self._batch):
      part = order[start : start + self._batch]
      longest = len(ids[part[-1]])
      tokens_NT = np.zeros((self._batch, max(16, 1 << (longest - 1).bit_length())), np.int32)
      length_N = np.ones(self._batch, np.int32)
      for row, n in enumerate(part):
        tokens_NT[row, : len(ids[n])], length_N[row] = ids[n], len(ids[n])
      hidden_NTD = np.asarray(self._hidden(tokens_NT, length_N), np.float64)
      inside_NT = np.arange(tokens_NT.shape[1]) < length_N[:, None]
      mean_ND = np.where(inside_NT[..., None], hidden_NTD, 0).sum(1) / length_N[:, None]
      out_ND[part] = mean_ND[: len(part)]
    return normalised(out_ND, self.name)


class Remote:
  """A server with an OpenAI-compatible `/v1/embeddings`.

  A request that fails in a way that may pass (no connection, 429, 5xx) is sent again after
  `backoff_s`, doubled every time. The key is read from the environment variable `key_env`.
  """

  def __init__(
    self,
    url: str,
    model: str,
    *,
    dimension: int | None = None,
    key_env: str = "MEMRL_API_KEY",
    max_chars: int = 20_000,
    batch: int = 64,
    retries: int = 4,
    backoff_s: float = 0.5,
    read_s: float = 60.0,
  ):
    """`dimension`: of its vectors; asked for when not given."""
    import httpx2

    key = os.environ.get(key_env, "")
    self._http = httpx2.Client(
      headers={"Authorization": f"Bearer {key}"} if key else {},
      timeout=httpx2.Timeout(read_s, connect=5.0),
    )
    self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1/embeddings"
    self._model, self._batch, self._retries, self._backoff_s = model, batch, retries, backoff_s
    self.name = f"remote:{model}"
    self._guard = Guard(self.name, max_chars, "characters")
    self.dimension = dimension or len(self._ask(["dimension"])[0])

  @property
  def truncated(self) -> int:
    return self._guard.cut

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    texts = self._guard(texts)
    rows = []
    for start in range(0, len(texts), self._batch):
      rows += self._ask(texts[start : start + self._batch])
    if any(len(row) != self.dimension for row in rows):
      raise ValueError(
        f"{self._url} gave vectors of {sorted({len(row) for row in rows})} numbers, not "
        f"{self.dimension}; check the model's name and the dimension"
      )
    return normalised(np.array(rows).reshape(-1, self.dimension), self.name)

  def _ask(self, texts: list[str]) -> list[list[float]]:
    import httpx2

    for attempt in range(self._retries + 1):
      if attempt:
        time.sleep(self._backoff_s * 2 ** (attempt - 1))
      try:
        reply = self._http.post(self._url, json={"model": self._model, "input": texts})
      except httpx2.TransportError as error:
        failure = f"{type(error).__name__}: {error}"
        continue
      if reply.status_code == 200:
        data = sorted(reply.json()["data"], key=lambda item: item["index"])
        if [item["index"] for item in data] != list(range(len(texts))):
          raise ValueError(f"{self._url} gave {len(data)} vectors for {len(texts)} texts")
        return [item["embedding"] for item in data]
      failure = f"HTTP {reply.status_code}: {reply.text[:200]}"
      if reply.status_code != 429 and reply.status_code < 500:
        break
    raise ConnectionError(
      f"no embeddings of model {self._model!r} from {self._url} after {attempt + 1} attempts "
      f"({failure}); check the address, the model's name and the key"
    )


class Cached:
  """Another embedder with the last `size` texts kept; each distinct text of a call is made once."""

  def __init__(self, embedder: Embedder, size: int = 8192):
    if size < 1:
      raise ValueError(f"a cache of {size} texts keeps nothing; leave Cached away instead")
    self.embedder, self.name, self.dimension = embedder, embedder.name, embedder.dimension
    self.hits = 0
    self._size, self._lock = size, threading.Lock()
    self._kept: collections.OrderedDict[str, np.ndarray] = collections.OrderedDict()

  @property
  def truncated(self) -> int:
    return self.embedder.truncated

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    with self._lock:
      known = {text: self._kept[text] for text in texts if text in self._kept}
      self.hits += sum(text in known for text in texts)
    fresh = [text for text in dict.fromkeys(texts) if text not in known]
    if fresh:  # outside the lock: a slow model holds up nobody who asks for known texts
      made = dict(zip(fresh, self.embedder.embed(fresh), strict=True))
      known |= made
    with self._lock:
      for text in texts:
        self._kept[text] = known[text]
        self._kept.move_to_end(text)
      while len(self._kept) > self._size:
        self._kept.popitem(last=False)
    if not texts:
      return np.zeros((0, self.dimension), np.float32)
    return np.stack([known[text] for text in texts])
