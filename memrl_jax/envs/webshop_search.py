"""Search in WebShop: BM25 over the searchable text of products, by the library bm25s.

The published shop searches with Lucene's BM25 (k1 0.9, b 0.4), whose English analyser also stems; we keep
words whole, so "boots" does not find "boot". Equal scores come in the order of the catalogue.
"""

from __future__ import annotations

import array
import functools
import pathlib
import re
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

from memrl_jax.envs.webshop_data import Product

HITS = 50  # products that a search returns
K1, B = 0.9, 0.4

_WORD = re.compile(r"[a-z0-9]+")


@functools.cache
def bm25s_module() -> ModuleType:
  """bm25s, imported only now.

  Where jax is installed, bm25s imports it and runs an operation, which takes hold of the accelerator. A
  worker process must not do that, so it is told that there is no jax unless jax is there already.
  """
  known = {name for name in ("jax", "jax.lax") if name in sys.modules}
  if not known:
    sys.modules["jax"] = None  # type: ignore[assignment]
  try:
    import bm25s
  except ImportError as error:
    raise ImportError(
      "WebShop searches with bm25s, which is not installed; run pip install bm25s rapidfuzz"
    ) from error
  finally:
    if not known:
      del sys.modules["jax"]
  return bm25s


def searchable(product: Product) -> str:
  """What search can see: title, description, first bullet, options; later bullets are not in it."""
  options = ", and ".join(f"{name}: {', '.join(vs)}" for name, vs in product.options.items())
  return " ".join([product.title, product.description, *product.bullets[:1], options])


def words(text: str) -> list[str]:
  """Lower-cased runs of letters and digits, without Lucene's 33 stop words."""
  stop = _stop_words()
  return [word for word in _WORD.findall(text.lower()) if word not in stop]


@functools.cache
def _stop_words() -> frozenset[str]:
  return frozenset(bm25s_module().stopwords.STOPWORDS_EN)


class Index:
  """Positions of products by relevance. `bm25` is an indexed or loaded `bm25s.BM25`."""

  def __init__(self, bm25: Any):
    self._bm25 = bm25

  def search(self, query: str, hits: int = HITS) -> list[int]:
    """The best products first; none for a query without a known word."""
    ids = [self._bm25.vocab_dict[w] for w in words(query) if w in self._bm25.vocab_dict]
    if not ids:
      return []
    score_N = self._bm25.get_scores_from_ids(ids)
    worst = np.partition(score_N, -hits)[-hits] if len(score_N) > hits else 0
    found = np.flatnonzero(score_N >= worst if worst > 0 else score_N > 0)
    return found[np.argsort(-score_N[found], kind="stable")][:hits].tolist()

  def save(self, folder: pathlib.Path) -> None:
    """Writes the index as files of this folder."""
    self._bm25.save(folder, show_progress=False)


def build(texts: Iterable[str]) -> Index:
  """Indexes the texts, which are read once; four bytes a word are kept of each until all are read."""
  vocabulary: dict[str, int] = {}
  documents = [
    array.array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in words(text)])
    for text in texts
  ]
  vocabulary.setdefault("", len(vocabulary))  # the library wants one word at least
  bm25 = bm25s_module().BM25(k1=K1, b=B, method="lucene")
  bm25.index((documents, vocabulary), show_progress=False)
  return Index(bm25)


def load(folder: pathlib.Path) -> Index:
  """A saved index; its arrays stay on disk and are shared between processes."""
  return Index(bm25s_module().BM25.load(folder, mmap=True, show_progress=False))
