"""A generated shop in the schema of WebShop's published files, with look-alikes that are wrong.

Products come in families of six that share their title words: a first product, three that differ from it
in one attribute each, one whose options differ, and one that is too expensive for the price limits of the first.
Each product has three attributes, one of each type of its kind; which of them stand in the description, in
the first feature (both searchable) and in a later feature (only on its page) is drawn for each family.
"""

from __future__ import annotations

import json
import pathlib
import random
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

FAMILY = 6  # products that share a title
RANGED = 0.3  # share of products with a range of prices
FIELDS = ("items_shuffle.json", "items_ins_v2.json", "items_human_ins.json")


class Kind(NamedTuple):
  """`attributes` and `options` are typed: values of one type exclude one another. `line` ends every title."""

  category: str
  query: str
  path: str
  line: str
  nouns: tuple[str, ...]
  attributes: tuple[tuple[str, ...], ...]
  options: dict[str, tuple[str, ...]]
  prices: tuple[int, int]


_COLORS = ("black", "white", "red", "green", "purple", "orange", "pink", "yellow", "silver", "teal")
_SHADES = ("walnut", "espresso", "white", "charcoal", "cream", "slate", "copper", "olive")
_SCENTS = ("coconut", "lavender", "eucalyptus", "citrus", "unscented", "jasmine", "cedar", "honey")
_SHOE_SIZES = ("5", "6", "7", "8", "9", "10", "11", "12")
_SIZES = ("small", "medium", "large", "petite", "plus", "tall")

KINDS = (
  Kind(
    "fashion",
    "women's boots",
    "Clothing, Shoes & Jewelry › Women › Shoes › Boots",
    "women footwear",
    ("ankle boots", "riding boots", "snow boots", "chelsea boots"),
    (
      ("genuine leather", "vegan suede", "waxed canvas", "knitted wool"),
      ("rubber sole", "memory foam", "cork footbed", "steel shank"),
      ("lace closure", "side zipper", "pull on", "buckle strap"),
    ),
    {"color": _COLORS, "size": _SHOE_SIZES},
    (25, 120),
  ),
  Kind(
    "fashion",
    "men's shirts",
    "Clothing, Shoes & Jewelry › Men › Clothing › Shirts",
    "men apparel",
    ("oxford shirt", "flannel shirt", "polo shirt", "dress shirt"),
    (
      ("organic cotton", "brushed linen", "bamboo fiber", "recycled polyester"),
      ("machine wash", "dry clean", "hand wash", "wrinkle free"),
      ("slim fit", "relaxed cut", "tapered waist", "boxy shape"),
    ),
    {"color": _COLORS, "size": _SIZES},
    (15, 80),
  ),
  Kind(
    "beauty",
    "hair treatments",
    "Beauty & Personal Care › Hair Care › Hair Treatments",
    "salon care",
    ("hair mask", "hair oil", "scalp serum", "leave in conditioner"),
    (
      ("sulfate free", "paraben free", "silicone free", "alcohol free"),
      ("dry hair", "curly locks", "damaged ends", "fine strands"),
      ("argan extract", "shea butter", "keratin protein", "aloe gel"),
    ),
    {"scent": _SCENTS, "size": ("travel bottle", "family jug", "refill pouch", "salon tub")},
    (8, 45),
  ),
  Kind(
    "beauty",
    "face moisturizers",
    "Beauty & Personal Care › Skin Care › Face › Moisturizers",
    "skin care",
    ("face cream", "night lotion", "day moisturizer", "gel cream"),
    (
      ("cruelty free", "dermatologist tested", "plant powered", "clinically proven"),
      ("oily skin", "sensitive cheeks", "mature complexion", "acne prone"),
      ("hyaluronic acid", "vitamin c", "green tea", "niacinamide boost"),
    ),
    {"scent": _SCENTS, "size": ("travel bottle", "family jug", "refill pouch", "glass jar")},
    (9, 60),
  ),
  Kind(
    "grocery",
    "snack bars",
    "Grocery & Gourmet Food › Snack Foods › Bars",
    "pantry snack",
    ("protein bars", "granola bars", "fruit bars", "oat bars"),
    (
      ("gluten free", "dairy free", "nut free", "soy free"),
      ("low sugar", "high fiber", "zero sodium", "keto friendly"),
      ("individually wrapped", "resealable bag", "bulk carton", "compostable sleeve"),
    ),
    {
      "flavor name": ("peanut", "dark chocolate", "lemon", "blueberry", "maple", "salted caramel"),
      "size": ("single", "twin", "dozen", "value case"),
    },
    (9, 50),
  ),
  Kind(
    "grocery",
    "coffee",
    "Grocery & Gourmet Food › Beverages › Coffee",
    "pantry roast",
    ("ground coffee", "whole bean coffee", "coffee pods", "instant coffee"),
    (
      ("fair trade", "rainforest certified", "single origin", "small batch"),
      ("low acid", "extra caffeine", "naturally decaffeinated", "mold tested"),
      ("nitrogen flushed", "tin packed", "paper wrapped", "vacuum sealed"),
    ),
    {
      "flavor name": ("vanilla", "hazelnut", "original", "mocha", "cinnamon", "irish"),
      "size": ("sampler", "one pound", "half kilo", "barista crate"),
    },
    (7, 60),
  ),
  Kind(
    "electronics",
    "headphones",
    "Electronics › Headphones › Over-Ear Headphones",
    "audio gear",
    ("wireless headphones", "gaming headset", "studio headphones", "kids headphones"),
    (
      ("noise cancelling", "open back", "bone conduction", "spatial audio"),
      ("fast charging", "solar powered", "replaceable battery", "wired backup"),
      ("hands free", "voice control", "touch panel", "inline remote"),
    ),
    {"color": _COLORS},
    (19, 190),
  ),
  Kind(
    "electronics",
    "phone chargers",
    "Electronics › Accessories › Chargers",
    "mobile gear",
    ("wall charger", "car charger", "charging dock", "power bank"),
    (
      ("quick charge", "trickle mode", "wireless pad", "magnetic snap"),
      ("overheat protection", "surge guard", "waterproof shell", "child lock"),
      ("foldable plug", "braided cord", "retractable cable", "swivel head"),
    ),
    {"color": _COLORS, "style": ("usb port", "lightning tip", "dual outlet", "triple hub")},
    (9, 70),
  ),
  Kind(
    "garden",
    "end tables",
    "Home & Kitchen › Furniture › Living Room Furniture › Tables",
    "home furniture",
    ("side table", "coffee table", "console table", "nesting tables"),
    (
      ("solid wood", "tempered glass", "brushed metal", "woven rattan"),
      ("easy assemble", "tool free", "ships assembled", "snap together"),
      ("storage drawer", "open shelf", "lift top", "hidden wheels"),
    ),
    {"color": _SHADES, "size": ("compact", "standard", "oversized", "bar height")},
    (35, 260),
  ),
  Kind(
    "garden",
    "table lamps",
    "Home & Kitchen › Lighting › Lamps › Table Lamps",
    "home lighting",
    ("table lamp", "desk lamp", "bedside lamp", "floor lamp"),
    (
      ("linen shade", "frosted globe", "paper lantern", "mesh drum"),
      ("dimmable light", "motion sensor", "pull chain", "timer switch"),
      ("marble base", "ceramic foot", "bronze stand", "oak tripod"),
    ),
    {"color": _SHADES, "size": ("compact", "standard", "oversized", "mini")},
    (18, 140),
  ),
)

_BRANDS = re.findall(
  r"\w+",
  "Norvik Lumora Peakline Oaken Brightwell Tessel Halden Mirro Quillon Ferrand Sablewood Corvia Dunmore "
  "Elstree Farrow Glenhart Ilyra Jorvik Kestrel Lindqvist Marlow Nimbra Orsino Pellham",
)
_STYLES = re.findall(
  r"\w+",
  "Classic Heritage Alpine Urban Coastal Signature Everyday Premium Vintage Nordic Harvest Studio",
)

_REQUESTS = (
  "i am looking for {noun} with {attributes}",
  "find me {attributes} {noun}",
  "i need {noun} that come with {attributes}",
  "please get me some {noun}, {attributes}",
)
_WANTED = (", in {}", " and i would like {}", ", preferably {}")


def make(seed: int, products: int) -> tuple[list[dict], dict[str, dict], dict[str, list[dict]]]:
  """(items, attributes, human instructions) of a shop, as the three published files hold them."""
  rng = random.Random(seed)
  items, attributes, human = [], {}, {}
  while len(items) < products:
    kind = KINDS[len(items) // FAMILY % len(KINDS)]
    noun = rng.choice(kind.nouns)
    for item, described in _family(rng, kind, noun):
      if item["asin"] in attributes:
        continue
      items.append(item)
      attributes[item["asin"]] = _entry(rng, noun, described)
      human[item["asin"]] = [
        _request(rng, noun, item, described, wording) for wording in rng.sample(_REQUESTS, 2)
      ]
  del items[products:]
  rng.shuffle(items)  # or the order would tell members of a family apart
  return items, attributes, human


def write(folder: pathlib.Path, seed: int, products: int) -> None:
  """Writes a shop as three files with the published names."""
  for name, content in zip(FIELDS, make(seed, products), strict=True):
    (folder / name).write_text(json.dumps(content, ensure_ascii=False), "utf-8")


def _family(rng: random.Random, kind: Kind, noun: str) -> Iterator[tuple[dict, list[str]]]:
  """Six look-alikes: (item, its attributes by type)."""
  title = f"{rng.choice(_BRANDS)} {rng.choice(_STYLES)} {noun}, {kind.line}"
  base = [rng.choice(values) for values in kind.attributes]
  offered = {name: rng.sample(values, len(values)) for name, values in kind.options.items()}
  price = rng.uniform(*kind.prices)
  places = rng.sample(range(3), 3)
  for member in range(FAMILY):
    attributes, first, cost = list(base), True, price * rng.uniform(0.95, 1.05)
    if 1 <= member <= 3:
      others = [value for value in kind.attributes[member - 1] if value != base[member - 1]]
      attributes[member - 1] = rng.choice(others)
    elif member == 4:
      first = False
    elif member == 5:
      cost += rng.uniform(45, 80)  # a limit is at most 40 above a price
    options = {n: vs[: len(vs) // 2] if first else vs[len(vs) // 2 :] for n, vs in offered.items()}
    yield _item(rng, kind, noun, title, [attributes[p] for p in places], options, cost), attributes


def _item(
  rng: random.Random,
  kind: Kind,
  noun: str,
  title: str,
  told: list[str],
  options: dict[str, list[str]],
  cost: float,
) -> dict[str, Any]:
  brand = title.split()[0]
  price = f"${cost:.2f}" if rng.random() >= RANGED else f"${cost:.2f}${cost * 1.1:.2f}"
  return {
    "asin": "B" + "".join(rng.choices("0123456789ABCDEFGHJKLMNPQRSTUVWXYZ", k=9)),
    "name": title,
    "category": kind.category,
    "query": kind.query,
    "product_category": kind.path,
    "full_description": f"{brand} has made {noun} since {rng.randint(1950, 2015)}. {told[0].capitalize()}.",
    "small_description": [
      f"{told[1].capitalize()}: what sets these {noun} apart",
      f"By {brand}, questions are answered within a day",
      f"{told[2].capitalize()}, as always from {brand}",
    ],
    "pricing": price,
    "images": [""],
    "customization_options": {
      name: [{"value": value, "image": None} for value in sorted(values)]
      for name, values in options.items()
    },
  }


def _entry(rng: random.Random, noun: str, attributes: list[str]) -> dict[str, Any]:
  wanted = rng.sample(attributes, 2)
  text = f"find me {wanted[0]}, {wanted[1]} {noun}"
  return {"attributes": attributes, "instruction": text, "instruction_attributes": wanted}


def _request(
  rng: random.Random, noun: str, item: dict[str, Any], attributes: list[str], wording: str
) -> dict[str, Any]:
  """What a person might ask for to get this item: two or three attributes and every option."""
  wanted = rng.sample(attributes, rng.choice((2, 3)))
  picked = {
    name: rng.choice(choices)["value"] for name, choices in item["customization_options"].items()
  }
  text = wording.format(noun=noun, attributes=" and ".join(wanted))
  said = " and ".join(f"{name.removesuffix(' name')} {value}" for name, value in picked.items())
  return {
    "instruction": text + rng.choice(_WANTED).format(said) + ".",
    "instruction_attributes": wanted,
    "instruction_options": list(picked.values()),
  }
