"""The sentence encoder: texts in, vectors out.

Texts are tokenized, sorted by length and computed in batches of a few fixed shapes, so that nothing
compiles after each shape was met once; what was computed is kept in a bounded cache.

Letters: N texts, T positions, D width.
"""

from __future__ import annotations

import collections
import hashlib
import os
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from memrl_jax.models import bert, encoder_files

LENGTHS = (16, 32, 64, 128, 256, 512)  # tokens; a text is padded to the next one
BATCHES = (1, 8, 32)  # texts; one row serves a query, and beyond 32 a CPU gains nothing


class Embedded(NamedTuple):
  """Vectors, one row a text, in the order given; how many texts were cut; how many were cached."""

  vectors_ND: np.ndarray
  truncated: int
  hits: int


class Stats(NamedTuple):
  """Counts since the encoder was made. `tokens` were computed in shapes that hold `padded`."""

  texts: int = 0
  hits: int = 0
  computed: int = 0
  truncated: int = 0
  tokens: int = 0
  padded: int = 0


class _Entry(NamedTuple):
  vector_D: np.ndarray
  cut: bool


class Encoder:
  """One encoder with its compiled shapes and its cache; safe to share between threads."""

  def __init__(
    self,
    cfg: bert.BertConfig,
    params: bert.Params,
    tokenize: Callable[[Sequence[str]], list[tuple[list[int], int]]],
    *,
    max_tokens: int,
    name: str,
    fingerprint: str,
    lengths: Sequence[int] = LENGTHS,
    batches: Sequence[int] = BATCHES,
    cache: int = 16384,
  ):
    """`tokenize` gives, for each text, its ids (at most `max_tokens`) and how many it really has.

    `cache`: texts kept, least recently used dropped first; 4 D bytes each.
    """
    if cache < 0 or not batches or not lengths or min(*batches, *lengths) < 1:
      raise ValueError(
        f"lengths {tuple(lengths)} and batches {tuple(batches)} must hold sizes >= 1, and cache = "
        f"{cache} must be >= 0"
      )
    self.cfg, self.name, self.fingerprint, self.max_tokens = cfg, name, fingerprint, max_tokens
    self._params, self._tokenize, self._capacity = params, tokenize, cache
    self._lengths = tuple(sorted({size for size in lengths if size < max_tokens} | {max_tokens}))
    self._batches = tuple(sorted(set(batches)))
    self._embed = jax.jit(lambda params, tokens, length: bert.embed(params, cfg, tokens, length))
    self._kept: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()
    self._lock = threading.Lock()
    self.stats = Stats()

  @classmethod
  def load(
    cls, directory: str | os.PathLike[str], *, name: str | None = None, **options: Any
  ) -> Encoder:
    """The encoder of a directory; `name` (for people; default: the folder's) and options of `Encoder`.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the directory asks for something that this encoder does not do, or is damaged.
    """
    files = encoder_files.read(directory)
    return cls(
      files.cfg,
      files.params,
      files.tokenize,
      max_tokens=files.max_tokens,
      name=files.name if name is None else name,
      fingerprint=files.fingerprint,
      **options,
    )

  @property
  def dimension(self) -> int:
    """Width of a vector."""
    return self.cfg.dim

  def embed(self, texts: Sequence[str]) -> np.ndarray:
    """Vectors [N, D], float32, in the order of the texts; warns if a text was cut."""
    return self._encode(texts).vectors_ND

  def encode(self, texts: Sequence[str]) -> Embedded:
    """`embed`, with the counts. Each distinct text is computed once; a cached one not at all.

    A text's vector does not depend on the texts beside it, up to rounding (1e-6).
    """
    return self._encode(texts)

  def warmup(self) -> None:
    """Compiles every shape there is; without it, a shape compiles when it is first met."""
    for rows in self._batches:
      for length in self._lengths:
        self._run(np.zeros((rows, length), np.int32), np.ones(rows, np.int32))

  def compiled(self) -> int:
    """Programs compiled so far; at most len(lengths) * len(batches)."""
    return self._embed._cache_size()

  def _encode(self, texts: Sequence[str]) -> Embedded:
    if isinstance(texts, str):
      raise ValueError("embed takes a list of texts, not one text; write embed([text])")
    for index, text in enumerate(texts):
      if not isinstance(text, str):
        raise ValueError(f"text {index} is a {type(text).__name__}, not a string")
    keys = [self._key(index, text) for index, text in enumerate(texts)]
    with self._lock:
      entries = {key: self._kept[key] for key in keys if key in self._kept}
      hits = sum(key in entries for key in keys)
      fresh = {key: text for key, text in zip(keys, texts, strict=True) if key not in entries}
      entries |= self._compute(fresh)
      truncated = sum(entries[key].cut for key in keys)
      self._keep(entries)
      self.stats = self.stats._replace(
        texts=self.stats.texts + len(keys),
        hits=self.stats.hits + hits,
        truncated=self.stats.truncated + truncated,
      )
    vectors = [entries[key].vector_D for key in keys]
    vectors_ND = np.stack(vectors) if vectors else np.zeros((0, self.dimension), np.float32)
    return Embedded(vectors_ND, truncated, hits)

  def _key(self, index: int, text: str) -> bytes:
    try:
      data = text.encode("utf-8")
    except UnicodeEncodeError as error:
      raise ValueError(
        f"text {index} is no Unicode text at character {error.start} (half of a surrogate pair); "
        "decode it with errors='replace'"
      ) from error
    return hashlib.blake2b(data, digest_size=16, key=self.fingerprint.encode()[:64]).digest()

  def _keep(self, entries: dict[bytes, _Entry]) -> None:
    for key, entry in entries.items():
      self._kept[key] = entry
      self._kept.move_to_end(key)
    while len(self._kept) > self._capacity:
      self._kept.popitem(last=False)

  def _compute(self, texts: dict[bytes, str]) -> dict[bytes, _Entry]:
    """Tokenizes and embeds; the longest texts first, so that batches hold texts of like length."""
    read = dict(zip(texts, self._tokenize(list(texts.values())), strict=True))
    cut = {key: total for key, (ids, total) in read.items() if total > len(ids)}
    if cut:
      warnings.warn(
        f"{len(cut)} of {len(texts)} texts were cut to {self.max_tokens} tokens before embedding "
        f"(the longest has {max(cut.values())}); what comes after is not searched",
        stacklevel=4,  # who called embed or encode
      )
    sizes = {key: self._length(len(ids)) for key, (ids, _) in read.items()}
    waiting = collections.Counter(sizes.values())
    queue = collections.deque(sorted(read, key=lambda key: -len(read[key][0])))
    entries = {}
    while queue:
      length = sizes[queue[0]]
      rows = self._rows(waiting[length])
      part = [queue.popleft() for _ in range(min(rows, len(queue)))]  # shorter texts fill it up
      waiting.subtract(sizes[key] for key in part)
      tokens_NT, length_N = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
      for row, key in enumerate(part):
        ids = read[key][0]
        tokens_NT[row, : len(ids)], length_N[row] = ids, len(ids)
      vectors_ND = self._run(tokens_NT, length_N)
      for row, key in enumerate(part):
        entries[key] = _Entry(vectors_ND[row].copy(), key in cut)
      self.stats = self.stats._replace(
        computed=self.stats.computed + len(part),
        tokens=self.stats.tokens + int(length_N.sum()),
        padded=self.stats.padded + tokens_NT.size,
      )
    return entries

  def _length(self, tokens: int) -> int:
    return next(size for size in self._lengths if size >= tokens)

  def _rows(self, waiting: int) -> int:
    """The smallest batch that holds all that wait and is at most a quarter empty; else the largest
    that they fill. (One text a batch costs a CPU about twice as much per token as eight.)"""
    for rows in self._batches:
      if waiting <= rows and 4 * waiting >= 3 * rows:
        return rows
    return max((rows for rows in self._batches if rows <= waiting), default=self._batches[0])

  def _run(self, tokens_NT: np.ndarray, length_N: np.ndarray) -> np.ndarray:
    return np.asarray(self._embed(self._params, tokens_NT, length_N))
