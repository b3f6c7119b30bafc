"""What a WebShop task is: options, the shop they name, and which goal a seed opens."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from memrl_jax.envs import base, panel
from memrl_jax.envs import webshop_catalogue as catalogues
from memrl_jax.envs import webshop_data as data
from memrl_jax.envs import webshop_reward as rewards

STYLES = ("full", "chat")
SPLIT_RULES = ("id", "published")
BACK, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews")

_PANEL_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Options:
  """data_dir: a folder with the published files, or "" for the generated shop of these `products` and
  `catalogue_seed`. cache_dir: where their index goes, "" = beside them. goals: "human" or "synthetic".

  split: whose goals a seed opens. "auto": training seeds open train goals, seeds of the dev half of the
  packaged panel open dev goals, all others test goals. split_rule: "id" splits by a hash of each goal,
  "published" by the release's shuffle (500 test, 1000 dev, the rest train). price_seed: fixes prices within
  ranges, and price limits. tagger: "rule", "spacy", or "auto" (spaCy for published data where installed).
  reward_scale: what a perfect purchase pays; trainers of GiGPO's family pay 10. list_actions: whether a
  prompt names what can be clicked, as theirs do, or leaves it to the text of the page.
  """

  data_dir: str = ""
  cache_dir: str = ""
  products: int = 1200
  catalogue_seed: int = 0
  goals: str = "human"
  split: str = "auto"
  split_rule: str = "id"
  price_seed: int = 0
  tagger: str = "auto"
  turns: int = 15
  reward_scale: float = 10.0
  list_actions: bool = True
  style: str = "full"

  def __post_init__(self):
    _one_of(self.style, STYLES, "style", "prompt style", " (there is no tiny model of WebShop)")
    _one_of(self.goals, data.GOAL_KINDS, "goals", "kind of goals")
    _one_of(self.split, ("auto", *data.SPLITS), "split", "split")
    _one_of(self.split_rule, SPLIT_RULES, "split_rule", "split rule")
    _one_of(self.tagger, ("auto", *rewards.TAGGERS), "tagger", "tagger")
    if self.data_dir and (self.products, self.catalogue_seed) != (1200, 0):
      raise ValueError(
        "products and catalogue_seed describe the generated shop, and data_dir names another; leave one out "
        "(config.env.data_dir, config.env.products, config.env.catalogue_seed)"
      )
    if self.cache_dir and not self.data_dir:
      raise ValueError(
        "the generated shop is kept in memory; leave config.env.cache_dir empty or name config.env.data_dir"
      )
    if self.turns < 1 or self.products < 1:
      raise ValueError(
        f"{self.turns} turns in a shop of {self.products} products leave nothing to do; choose at least 1 of "
        "each (config.env.turns, config.env.products)"
      )
    if not (self.reward_scale > 0 and math.isfinite(self.reward_scale)):
      raise ValueError(
        f"a reward scale of {self.reward_scale} turns the task around; choose one above 0 "
        "(config.env.reward_scale)"
      )


def _one_of(value: str, known: tuple[str, ...], field: str, what: str, why: str = "") -> None:
  if value not in known:
    raise ValueError(
      f"{what} {value!r} is not known{why}; choose one of {', '.join(known)} (config.env.{field})"
    )


# Tasks.


class Task(NamedTuple):
  """A goal, the product it was written for, and its price limit in dollars."""

  goal: data.Goal
  wanted: data.Product
  limit: float

  @property
  def instruction(self) -> str:
    return data.instruction(self.goal, self.limit)


def shop(options: Options) -> catalogues.Catalogue:
  """The shop of these options, opened once in a process."""
  if options.data_dir:
    return catalogues.stored(options.data_dir, options.cache_dir, options.goals)
  return catalogues.embedded(options.catalogue_seed, options.products, options.goals)


def tagger(options: Options) -> str:
  """The tagger's name: the generated shop's titles are made for the rule."""
  if options.tagger != "auto":
    return options.tagger
  return rewards.installed_tagger() if options.data_dir else "rule"


def split(options: Options, seed: int) -> str:
  """train, dev or test: the split that this seed draws from."""
  if options.split != "auto":
    return options.split
  if seed < base.TRAIN_SEEDS[1]:
    return "train"
  return "dev" if seed in _dev_seeds() else "test"


@functools.cache
def _dev_seeds() -> frozenset[int]:
  return frozenset(panel.draw("webshop", _PANEL_VERSION)[panel.SIDE :])


@functools.lru_cache(maxsize=1024)
def draw(options: Options, seed: int) -> Task:
  """The task of a seed; consecutive seeds go through all goals of a split before one comes again."""
  store = shop(options)
  number_G = store.goal_numbers(split(options, seed), options.split_rule)
  goal = store.goal(int(number_G[seed % len(number_G)]))
  wanted = store.find(goal.asin)
  price = data.price(wanted, options.price_seed)
  return Task(goal, wanted, data.limit(goal, price, options.price_seed))
