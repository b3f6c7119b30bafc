"""A shop: products, their search index and the goals, in memory or as a folder built once from the data.

A folder holds `shop.sqlite` (products and goals), `bm25/` and `manifest.json`. It is built in one pass, with
one product in memory at a time, beside its final place, and renamed when it is whole. What is read back is
checked: products by zlib, goals by their id, which is a hash, the index by the checksums in the manifest.

    python -m memrl_jax.envs.webshop_catalogue DATA_DIR     # builds the folder, and measures searches
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import pathlib
import random
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.envs import webshop_data as data
from memrl_jax.envs import webshop_generated as generated
from memrl_jax.envs import webshop_search as search

FORMAT = 1  # raise it when what a folder holds changes
SHUFFLE = 233  # the seed that the published split shuffles goals with
PUBLISHED = {"test": slice(0, 500), "dev": slice(500, 1500), "train": slice(1500, None)}
UNASKED_BYTES = (
  64 << 20
)  # a larger catalogue is not indexed by whichever environment opens it first

_SCHEMA = """
CREATE TEMP TABLE attributes (asin TEXT PRIMARY KEY, body TEXT) WITHOUT ROWID;
CREATE TABLE products (position INTEGER PRIMARY KEY, asin TEXT UNIQUE, body BLOB);
CREATE TABLE goals (number INTEGER PRIMARY KEY, id TEXT, split TEXT, body TEXT);
CREATE INDEX goals_by_id ON goals (id);
"""
_OPENING = threading.RLock()


class Catalogue:
  """One shop, open for reading; safe to share between threads. `where` is said when it is damaged."""

  def __init__(self, database: sqlite3.Connection, index: search.Index, where: str):
    self._database, self._where, self._lock = database, where, threading.Lock()
    self.search = index.search
    self.size = self._row("SELECT COUNT(*) FROM products")[0]
    self.product = functools.lru_cache(maxsize=4096)(self._product)
    self.goal_numbers = functools.cache(self._goal_numbers)

  def _product(self, position: int) -> data.Product:
    """The product at this position, as `search` counts them."""
    (body,) = self._row("SELECT body FROM products WHERE position = ?", position)
    try:
      fields = json.loads(zlib.decompress(body))
    except zlib.error as error:
      raise ValueError(f"product {position} in {self._where} is damaged; {_AGAIN}") from error
    product = data.Product(*(tuple(f) if isinstance(f, list) else f for f in fields))
    return product._replace(options={name: tuple(vs) for name, vs in product.options.items()})

  def find(self, asin: str) -> data.Product:
    """The product of this code. KeyError without one."""
    row = self._row("SELECT position FROM products WHERE asin = ?", asin)
    if row is None:
      raise KeyError(asin)
    return self.product(row[0])

  def goal(self, number: int) -> data.Goal:
    """The goal of this number, as `goal_numbers` gives them."""
    return self._read_goal(self._row("SELECT id, body FROM goals WHERE number = ?", number))

  def goal_of(self, goal_id: str) -> data.Goal:
    """The goal of this id. KeyError without one."""
    row = self._row("SELECT id, body FROM goals WHERE id = ? LIMIT 1", goal_id)
    if row is None:
      raise KeyError(goal_id)
    return self._read_goal(row)

  def _read_goal(self, row: tuple[str, str]) -> data.Goal:
    asin, text, attributes, options = json.loads(row[1])
    goal = data.make_goal(asin, text, tuple(attributes), tuple(options))
    if goal.id != row[0]:
      raise ValueError(f"goal {row[0]} in {self._where} is damaged; {_AGAIN}")
    return goal

  def _goal_numbers(self, split: str, rule: str) -> np.ndarray:
    """The goals of a split in a fixed order.

    rule "id": by the hash of each goal. "published": goals in the order of the catalogue, shuffled as
    `random.shuffle` does after `random.seed(233)`; the first 500 are test, the next 1000 dev, the rest train.
    """
    with self._lock:
      if rule == "id":
        rows = self._database.execute(
          "SELECT number FROM goals WHERE split = ? ORDER BY id", [split]
        )
      else:
        rows = self._database.execute("SELECT number FROM goals ORDER BY number")
      number_G = np.fromiter((row[0] for row in rows), np.int64)
    if rule == "published":
      order = list(range(len(number_G)))
      random.Random(SHUFFLE).shuffle(order)
      number_G = number_G[order[PUBLISHED[split]]]
    if not len(number_G):
      raise ValueError(
        f"there are no {split} goals by the {rule} rule; choose another split, or split_rule=id "
        "(config.env.split, config.env.split_rule)"
      )
    return number_G

  def _row(self, query: str, *values: Any) -> Any:
    with self._lock:
      return self._database.execute(query, values).fetchone()


_AGAIN = "delete that folder and build it again"


def _fill(
  database: sqlite3.Connection,
  items: Iterable[Mapping[str, Any]],
  attributes: Iterable[tuple[str, Any]],
  human: Mapping[str, Any],
  kind: str,
) -> search.Index:
  """Writes products and goals into an empty database and indexes the products, in one pass.

  Of products with the same asin the first counts, as in the published loader.
  """
  database.executescript(_SCHEMA)
  database.executemany(
    "INSERT OR REPLACE INTO attributes VALUES (?, ?)",
    ((asin, json.dumps(entry)) for asin, entry in attributes),
  )

  def texts() -> Iterator[str]:
    position = 0
    for item in items:
      found = database.execute("SELECT body FROM attributes WHERE asin = ?", [item.get("asin")])
      synthetic = json.loads((found.fetchone() or ("{}",))[0])
      product = data.product(item, synthetic)
      if product is None:
        continue
      row = (position, product.asin, zlib.compress(json.dumps(product).encode(), 1))
      if not database.execute("INSERT OR IGNORE INTO products VALUES (?, ?, ?)", row).rowcount:
        continue
      position += 1
      goals = data.goals(product, synthetic, human.get(product.asin, []), kind)
      database.executemany(
        "INSERT INTO goals (id, split, body) VALUES (?, ?, ?)",
        ((goal.id, data.split_of(goal.id), json.dumps(goal[1:])) for goal in goals),
      )
      yield search.searchable(product)

  index = search.build(texts())
  database.commit()
  return index


# The embedded shop.


@functools.lru_cache(maxsize=4)
def embedded(seed: int, products: int, kind: str) -> Catalogue:
  """The generated shop of this seed, kept in this process."""
  items, attributes, human = generated.make(seed, products)
  database = sqlite3.connect(":memory:", check_same_thread=False)
  index = _fill(database, items, attributes.items(), human, kind)
  return Catalogue(database, index, "the generated shop")


# A shop in a folder.


class Files(NamedTuple):
  """The published files of a shop; `human` is None where there are no human instructions."""

  items: pathlib.Path
  attributes: pathlib.Path
  human: pathlib.Path | None


def files(data_dir: str, kind: str) -> Files:
  """The three files in a folder, or those beside an items_shuffle*.json that is named itself.

  Raises:
    ValueError: one of them is missing, or there are several catalogues to choose from.
  """
  place = pathlib.Path(data_dir)
  found = [place] if place.is_file() else sorted(place.glob("items_shuffle*.json"))
  if len(found) != 1:
    have = ", ".join(path.name for path in found) or "none"
    raise ValueError(
      f"{place} should hold one items_shuffle*.json, it has {have}; name one of them, or another folder "
      "(config.env.data_dir)"
    )
  folder, suffix = found[0].parent, found[0].name.removeprefix("items_shuffle")
  attributes = [folder / f"items_ins_v2{suffix}", folder / "items_ins_v2.json"]
  human = folder / "items_human_ins.json"
  missing = [] if any(path.is_file() for path in attributes) else [attributes[0].name]
  missing += [human.name] if kind == "human" and not human.is_file() else []
  if missing:
    raise ValueError(
      f"{folder} lacks {' and '.join(missing)}; copy it there, or choose synthetic goals where only human "
      "instructions are missing (config.env.data_dir, config.env.goals)"
    )
  first = next(path for path in attributes if path.is_file())
  return Files(found[0], first, human if human.is_file() else None)


def signature(sources: Files, kind: str) -> str:
  """A hash of names, sizes and the first and last MiB of the files, and of how they are read."""
  digest = hashlib.sha256(json.dumps([FORMAT, kind, search.K1, search.B]).encode())
  for path in filter(None, sources):
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
      digest.update(file.read(1 << 20))
      file.seek(max(0, size - (1 << 20)))
      digest.update(file.read())
  return digest.hexdigest()[:16]


def stored(data_dir: str, cache_dir: str, kind: str, build_any: bool = False) -> Catalogue:
  """The shop of the published files, from its folder, which is built first where there is none.

  Processes that need it at the same time build it once. A large one is only built when `build_any`
  says so: an environment should not make everybody wait for an hour without a word.

  Raises:
    ValueError: files are missing, damaged, or large and not indexed yet.
  """
  with _OPENING:
    return _stored(data_dir, cache_dir, kind, build_any)


@functools.lru_cache(maxsize=4)
def _stored(data_dir: str, cache_dir: str, kind: str, build_any: bool) -> Catalogue:
  sources = files(data_dir, kind)
  parent = pathlib.Path(cache_dir) if cache_dir else sources.items.parent
  folder = parent / f"webshop-{kind}-{signature(sources, kind)}"
  if not (folder / "manifest.json").is_file():
    if not build_any and sources.items.stat().st_size > UNASKED_BYTES:
      where = f" --cache={cache_dir}" if cache_dir else ""
      raise ValueError(
        f"{sources.items} is large and not indexed yet; run python -m memrl_jax.envs.webshop_catalogue "
        f"{data_dir} --goals={kind}{where} once"
      )
    try:
      parent.mkdir(parents=True, exist_ok=True)
      with _alone(parent / f"{folder.name}.lock"):
        if not (folder / "manifest.json").is_file():
          _build(sources, folder, kind)
    except PermissionError as error:
      raise ValueError(
        f"nothing can be written to {parent}; name a folder for the index (config.env.cache_dir)"
      ) from error
  return _open(folder)


def _build(sources: Files, folder: pathlib.Path, kind: str) -> None:
  human = json.loads(sources.human.read_text("utf-8")) if sources.human else {}
  unfinished = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
  try:
    with contextlib.closing(sqlite3.connect(unfinished / "shop.sqlite")) as database:
      attributes = data.stream(sources.attributes)
      index = _fill(database, data.stream(sources.items), attributes, human, kind)
    index.save(unfinished / "bm25")
    sums = {path.name: _sum(path) for path in sorted((unfinished / "bm25").iterdir())}
    manifest = {"format": FORMAT, "goals": kind, "sha256": sums}
    (unfinished / "manifest.json").write_text(json.dumps(manifest) + "\n")
    unfinished.chmod(0o755)  # mkdtemp keeps it to one user
    unfinished.rename(folder)
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def _open(folder: pathlib.Path) -> Catalogue:
  stated = json.loads((folder / "manifest.json").read_text())["sha256"]
  for name, checksum in stated.items():
    if _sum(folder / "bm25" / name) != checksum:
      raise ValueError(f"{folder / 'bm25' / name} is damaged; {_AGAIN}")
  uri = f"{(folder / 'shop.sqlite').absolute().as_uri()}?mode=ro&immutable=1"
  database = sqlite3.connect(uri, uri=True, check_same_thread=False)
  return Catalogue(database, search.load(folder / "bm25"), str(folder))


def _sum(path: pathlib.Path) -> str:
  with path.open("rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _alone(path: pathlib.Path) -> Iterator[None]:
  """Holds this lock file, waiting for whoever has it; the system frees it when a process dies."""
  with path.open("w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    yield


def main(arguments: list[str] | None = None) -> None:
  """Builds the folder of a data set and says how long a search takes."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument(
    "data_dir", help="folder with the published files, or one items_shuffle*.json"
  )
  parser.add_argument("--goals", choices=data.GOAL_KINDS, default="human")
  parser.add_argument(
    "--cache", default="", help="where to put the index (default: beside the data)"
  )
  given = parser.parse_args(arguments)
  begun = time.perf_counter()
  try:
    shop = stored(given.data_dir, given.cache, given.goals, build_any=True)
  except ValueError as error:
    sys.exit(str(error))
  counts = {split: len(shop.goal_numbers(split, "id")) for split in data.SPLITS}
  print(f"{shop.size} products, goals {counts}, ready in {time.perf_counter() - begun:.1f} s")
  print(f"a search takes {1000 * search_seconds(shop):.2f} ms (p50 of 100 instructions)")


def search_seconds(shop: Catalogue, searches: int = 100) -> float:
  """Median time of a search for the text of a training goal."""
  taken = []
  for number in shop.goal_numbers("train", "id")[:searches]:
    text = shop.goal(int(number)).text
    begun = time.perf_counter()
    shop.search(text)
    taken.append(time.perf_counter() - begun)
  return statistics.median(taken)


if __name__ == "__main__":
  main()
