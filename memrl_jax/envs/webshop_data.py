"""Products and goals of WebShop (Yao et al. 2022, 2207.01206): the published files, read a piece at a time.

Three JSON files make a shop: `items_shuffle*.json`, a list of products; `items_ins_v2*.json`, attributes and
a synthetic instruction by asin; `items_human_ins.json`, instructions that people wrote, by asin. Only the
fields that stand here are read. Where the published code draws at random, we draw from a hash of content
and a seed, so that a price or a price limit never moves from run to run or from worker to worker.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

GOAL_KINDS = ("human", "synthetic")
SPLITS = ("train", "dev", "test")

UNPRICED = 100.0  # dollars of a product without a price
LIMITS = tuple(10.0 * tens for tens in range(1, 100))  # price limits that an instruction may state
NO_LIMIT = 1_000_000.0
NO_ATTRIBUTES = ("DUMMY_ATTR",)
TEST_SHARE, DEV_SHARE = 0.15, 0.15

_CHUNK = 1 << 22  # characters read at a time


class Product(NamedTuple):
  """`prices` is one price or the two ends of a range, `tag` how it is shown."""

  asin: str
  title: str
  description: str
  bullets: tuple[str, ...]
  options: dict[str, tuple[str, ...]]
  attributes: tuple[str, ...]
  query: str
  category: str
  product_category: str
  prices: tuple[float, ...]
  tag: str


class Goal(NamedTuple):
  """What is wanted. `options` are texts to match; `id` is a hash of all the rest, prices apart."""

  id: str
  asin: str
  text: str
  attributes: tuple[str, ...]
  options: tuple[str, ...]


# Files.


def stream(path: pathlib.Path) -> Iterator[Any]:
  """Values of the JSON list in a file, or the (key, value) pairs of its object, one at a time.

  Raises:
    ValueError: the file is neither, or is cut short.
  """
  decode = json.JSONDecoder().raw_decode
  with path.open(encoding="utf-8") as file:
    while (text := file.read(1)).isspace():
      pass
    if text not in ("[", "{"):
      raise ValueError(
        f"{path} is neither a JSON list nor an object; give the published file (config.env.data_dir)"
      )
    keyed, place, key = text == "{", 1, None
    while True:
      place = _skip(text, place)
      if text[place : place + 1] in ("]", "}"):
        return
      try:
        value, place_after = decode(text, place)
      except json.JSONDecodeError:
        more = file.read(_CHUNK)
        if not more:
          raise ValueError(
            f"{path} ends in the middle of an entry; fetch it again (config.env.data_dir)"
          ) from None
        text, place = text[place:] + more, 0
        continue
      place = place_after
      if not keyed:
        yield value
      elif key is None:
        key = value
      else:
        yield key, value
        key = None


_BETWEEN = re.compile(r"[\s,:]*")


def _skip(text: str, place: int) -> int:
  return _BETWEEN.match(text, place).end()


# Products.


def prices_of(pricing: str | None) -> tuple[float, ...]:
  """One price, or the two ends of a range, from "$1,299.00" or "$10.00$20.00"; 100 without any."""
  found = [re.sub(r"[^\d.]", "", piece) for piece in str(pricing or "").split("$")[1:]]
  numbers = [float(piece) for piece in found if re.fullmatch(r"\d+\.?\d*|\.\d+", piece)]
  return tuple(numbers[:2]) or (UNPRICED,)


def product(item: Mapping[str, Any], attributes: Mapping[str, Any]) -> Product | None:
  """The product of one entry of items_shuffle and its entry of items_ins_v2; None where there is none.

  Entries without an asin of at most 10 characters are no products, as in the published loader.
  """
  asin = str(item.get("asin") or "nan")
  if asin == "nan" or len(asin) > 10:
    return None
  bullets = item.get("small_description") or ()
  prices = prices_of(item.get("pricing"))
  return Product(
    asin=asin,
    title=_text(item, "name"),
    description=_text(item, "full_description"),
    bullets=tuple(map(str, bullets)) if isinstance(bullets, list | tuple) else (str(bullets),),
    options=_options(item.get("customization_options") or {}),
    attributes=tuple(attributes.get("attributes", NO_ATTRIBUTES)),
    query=_text(item, "query").lower().strip(),
    category=_text(item, "category"),
    product_category=_text(item, "product_category"),
    prices=prices,
    tag=" to ".join(f"${price}" for price in prices),
  )


def _text(item: Mapping[str, Any], field: str) -> str:
  return str(item.get(field) or "")


def _options(groups: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
  """Values by lower-cased option name; groups without values are left out."""
  return {
    name.lower(): tuple(
      str(choice["value"]).strip().replace("/", " | ").lower()
      for choice in choices
      if choice.get("value")
    )
    for name, choices in groups.items()
    if choices
  }


def price(product: Product, seed: int) -> float:
  """What it costs, in dollars: its price, or a uniform draw from its range, fixed by asin and seed."""
  low, high = product.prices[0], product.prices[-1]
  return low + (high - low) * unit(seed, "price", product.asin)


# Goals.


def goals(
  product: Product, synthetic: Mapping[str, Any], human: list[Mapping[str, Any]], kind: str
) -> Iterator[Goal]:
  """Human goals: one for each instruction with attributes. Synthetic: one for each choice of options."""
  if kind == "human":
    for entry in human:
      if entry.get("instruction_attributes"):
        options = tuple(map(str, entry.get("instruction_options") or ()))
        text = str(entry["instruction"]).strip(".")
        yield make_goal(product.asin, text, tuple(entry["instruction_attributes"]), options)
    return
  attributes = tuple(synthetic.get("instruction_attributes") or ())
  if not synthetic.get("instruction") or not attributes:
    return
  names = sorted(product.options)
  text = str(synthetic["instruction"]).strip(".")
  for values in itertools.product(*(product.options[name] for name in names)):
    pairs = list(zip(names, values, strict=True))
    wanted = ", and ".join(f"{name}: {value}" for name, value in pairs)
    said = f"{text} with {wanted}" if wanted else text
    yield make_goal(product.asin, said, attributes, tuple(f"{n} {v}" for n, v in pairs))


def make_goal(asin: str, text: str, attributes: tuple[str, ...], options: tuple[str, ...]) -> Goal:
  """The goal with its id."""
  content = json.dumps([asin, text, attributes, options])
  return Goal(hashlib.sha256(content.encode()).hexdigest()[:16], asin, text, attributes, options)


def limit(goal: Goal, price: float, seed: int) -> float:
  """The most that the goal allows, in dollars: the larger of two of the next four multiples of 10.

  NO_LIMIT where fewer than two multiples up to 990 are above the price.
  """
  pairs = list(itertools.combinations([tens for tens in LIMITS if tens > price][:4], 2))
  return pairs[int(unit(seed, "limit", goal.id) * len(pairs))][1] if pairs else NO_LIMIT


def instruction(goal: Goal, limit: float) -> str:
  """The goal in words, the price limit included."""
  return goal.text + (f", and price lower than {limit:.2f} dollars" if limit < NO_LIMIT else "")


def split_of(goal_id: str) -> str:
  """train, dev or test by the goal's content alone: no position and no shuffle can leak it."""
  place = int(goal_id[:8], 16) / 2**32
  if place < TEST_SHARE:
    return "test"
  return "dev" if place < TEST_SHARE + DEV_SHARE else "train"


def unit(*parts: Any) -> float:
  """A number in [0, 1) that looks random and is a function of its arguments."""
  digest = hashlib.sha256(json.dumps(parts).encode()).digest()
  return int.from_bytes(digest[:8], "big") / 2**64
