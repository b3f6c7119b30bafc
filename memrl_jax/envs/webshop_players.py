"""Scripted shoppers for WebShop: one that knows what was meant, one in a hurry, one at random."""

from __future__ import annotations

import numpy as np

from memrl_jax.envs import base
from memrl_jax.envs import webshop_catalogue as catalogues
from memrl_jax.envs import webshop_data as data
from memrl_jax.envs import webshop_reward as rewards
from memrl_jax.envs.webshop_tasks import BACK, BUY, NEXT, PREVIOUS, Options, shop


class Shopper:
  """What all players share: the shape of their answers, and reflections."""

  def __init__(self, options: Options, rng: np.random.Generator):
    self._options, self._rng = options, rng

  def play(self, view: base.View) -> str:
    return f"<action>{self.choose(view.current)}</action>"

  def reflect(self, view: base.View) -> str:
    actions = [step.action or "nothing" for step in view.current.steps]
    score = view.current.steps[-1].result.score if actions else 0.0
    return f"<remark>{', then '.join(actions[-4:])} gave a score of {score:.2f}</remark>"

  def choose(self, attempt: base.AttemptLog) -> str:
    """The next action."""
    raise TypeError(f"{type(self).__name__} is no player: it lacks this method")


class Random(Shopper):
  """Searches for three words of the instruction, then clicks whatever there is."""

  def choose(self, attempt):
    clicks = attempt.now.admissible
    if not clicks:
      said = attempt.initial.goal.split()
      places = sorted(self._rng.permutation(len(said))[:3])
      return f"search[{' '.join(said[place] for place in places)}]"
    return clicks[int(self._rng.integers(len(clicks)))]


class Greedy(Shopper):
  """Searches for the whole instruction, opens the first product and buys it as it is."""

  def choose(self, attempt):
    clicks = attempt.now.admissible
    if f"click[{BUY}]" in clicks:
      return f"click[{BUY}]"
    products = [
      click for click in clicks if click[len("click[") : -1] not in (BACK, PREVIOUS, NEXT)
    ]
    return products[0] if products else f"search[{attempt.initial.goal}]"


class Solver(Shopper):
  """Knows which product the goal was written for: finds it, chooses its options, buys."""

  def choose(self, attempt):
    store, now = shop(self._options), attempt.now
    goal = store.goal_of(attempt.initial.task)
    wanted = store.find(goal.asin)
    if not now.anchor.startswith(("results", "item")):
      return f"search[{_finds(store, wanted)}]"
    if now.anchor.startswith("results"):
      code = f"click[{wanted.asin}]"
      return code if code in now.admissible else f"click[{NEXT}]"
    clicked = {step.action for step in attempt.steps}
    wishes = [f"click[{value}]" for value in picks(wanted, goal)]
    return next((wish for wish in wishes if wish not in clicked), f"click[{BUY}]")


def picks(product: data.Product, goal: data.Goal) -> list[str]:
  """The option values to choose on this product's page for a goal, at most one a group."""

  def best(group: str, values: tuple[str, ...]) -> str | None:
    exact = [v for v in values if v in goal.options or f"{group} {v}" in goal.options]
    alike = [
      value
      for value in values
      if any(rewards.alike(rewards.color(value), rewards.color(o)) for o in goal.options)
    ]
    return next(iter([*exact, *alike]), None)

  chosen = [best(group, values) for group, values in product.options.items()]
  return [value for value in chosen if value is not None]


def _finds(store: catalogues.Catalogue, product: data.Product) -> str:
  """A query whose hits contain the product; its title where none does."""
  bullets = " ".join(product.bullets[:1])
  queries = (product.title, f"{product.title} {bullets} {product.description}")
  for query in queries:
    if any(store.product(hit).asin == product.asin for hit in store.search(query)):
      return query
  return product.title
