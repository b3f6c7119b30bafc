"""What a purchase is worth in WebShop (Yao et al. 2022, 2207.01206, section 3.1 and the release).

    reward = r_type * (attributes matched + options matched + [price <= limit])
             / (attributes wanted + options wanted + 1)

Two texts are alike when their token set ratio, rounded, is above 85 (thefuzz's scale, computed by rapidfuzz).
r_type compares the kind of product, by the query it was found with, its category and the nouns of its title. Nouns
come from a tagger: spaCy as in the release, or a rule on words that needs nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memrl_jax.envs.webshop_data import Goal, Product

ALIKE = 85  # texts with a higher token set ratio match
TAGGERS = ("rule", "spacy")
SPACY_MODELS = ("en_core_web_lg", "en_core_web_md", "en_core_web_sm")

# Colour words; a text stands for the first one, in this order, that it contains.
COLORS = tuple(
  re.findall(
    r"\w+",
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo "
    "caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal "
    "dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey heather indigo ivory "
    "ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom "
    "mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire "
    "seashell silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white "
    "wine yellow",
  )
)

_FUNCTION_WORDS = frozenset(
  re.findall(
    r"\w+",
    "about above after again all also and any are best big cheap classic clean comfortable cool cute each easy every extra "
    "fit for free fresh from full good great has have her high his hot into its large light long low made make more most "
    "much natural new nice not off only one open original our out over own perfect premium pure really round same short "
    "simple small soft some such super than that the their them these they this those three two under up very warm was wear "
    "were when which will with without you your",
  )
)

Nouns = Callable[[str], tuple[str, ...]]


class Reward(NamedTuple):
  """The parts of a reward; `total` is in 0-1."""

  total: float
  type: float
  attributes: int
  options: int
  price: bool


def reward(
  bought: Product,
  price: float,
  chosen: Iterable[str],
  goal: Goal,
  wanted: Product,
  limit: float,
  nouns: Nouns,
) -> Reward:
  """The equation above. `chosen` are the option values set on the item page, prices are in dollars."""
  factor = type_factor(bought, wanted, nouns)
  attributes = sum(has_attribute(bought, attribute) for attribute in goal.attributes)
  values = [color(value) for value in chosen]
  options = sum(any(alike(value, color(option)) for value in values) for option in goal.options)
  parts = len(goal.attributes) + len(goal.options) + 1
  total = factor * (attributes + options + (price <= limit)) / parts
  return Reward(total, factor, attributes, options, price <= limit)


def type_factor(bought: Product, wanted: Product, nouns: Nouns) -> float:
  """1 for the same kind of product, .5 for another, .1 and 0 where titles hardly or never meet.

  Same kind: the same query, two parts of the category in common, or a title score above .2. A title score below
  .1 overrides that. The title score is the number of common nouns over all nouns of the wanted title.
  """
  wanted_nouns, common = nouns(wanted.title), set(nouns(bought.title))
  score = len(common & set(wanted_nouns)) / len(wanted_nouns) if wanted_nouns else 0.2
  if score == 0:
    return 0.0
  if score < 0.1:
    return 0.1
  same = bought.query == wanted.query or len(_parts(bought) & _parts(wanted)) >= 2
  return 1.0 if same or score > 0.2 else 0.5


def _parts(product: Product) -> set[str]:
  return {part.strip() for part in product.product_category.split("›")}


def has_attribute(product: Product, attribute: str) -> bool:
  """Whether one of its attributes is alike, or its title, features or description say it word for word."""
  texts = (product.title, " ".join(product.bullets), product.description)
  return any(alike(own, attribute) for own in product.attributes) or any(
    attribute in text.lower() for text in texts
  )


def color(text: str) -> str:
  """The first of COLORS that the text contains, or the text."""
  return next((word for word in COLORS if word in text), text)


@functools.lru_cache(maxsize=1 << 14)
def alike(one: str, other: str) -> bool:
  """Whether the token set ratio is above 85: case, order and extra words of one side do not count."""
  try:
    from rapidfuzz import fuzz, utils
  except ImportError as error:
    raise ImportError(
      "WebShop compares texts with rapidfuzz, which is not installed; run pip install bm25s rapidfuzz"
    ) from error
  return round(fuzz.token_set_ratio(one, other, processor=utils.default_process)) > ALIKE


# Nouns of a title.


def nouns_by_rule(title: str) -> tuple[str, ...]:
  """Lower-cased words of three letters or more that are no function words and no common adjectives."""
  found = re.findall(r"[a-z]+", title.lower())
  return tuple(word for word in found if len(word) > 2 and word not in _FUNCTION_WORDS)


def tagger(name: str) -> Nouns:
  """The function that finds nouns.

  Raises:
    ValueError: spacy is asked for and not installed, or has no English model.
  """
  if name == "rule":
    return nouns_by_rule
  found = _spacy()
  if found is None:
    raise ValueError(
      "there is no spaCy with an English model here; install spacy and en_core_web_lg, or choose "
      "rule (config.env.tagger)"
    )
  return found


def installed_tagger() -> str:
  """spacy where it can be loaded, else rule."""
  return "rule" if _spacy() is None else "spacy"


@functools.cache
def _spacy() -> Nouns | None:
  model = next((name for name in SPACY_MODELS if importlib.util.find_spec(name)), None)
  if model is None or importlib.util.find_spec("spacy") is None:
    return None
  parse = importlib.import_module(model).load()

  @functools.lru_cache(maxsize=1 << 14)
  def nouns(title: str) -> tuple[str, ...]:
    return tuple(word.text.lower() for word in parse(title) if word.pos_ in ("NOUN", "PROPN"))

  return nouns
