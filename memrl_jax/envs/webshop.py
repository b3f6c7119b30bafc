"""WebShop in text: search a shop, open products, choose options, buy (Yao et al. 2022, 2207.01206).

Pages, actions and the reward are the published ones, without browser, server or Java; products come from the
published files (config.env.data_dir) or from a generated shop (`webshop_generated`). An observation is the
visible texts of a page joined by " [SEP] ". Only buying pays, and ends the attempt.
"""

from __future__ import annotations

import dataclasses
import re

from memrl_jax.envs import base, prompting, webshop_players
from memrl_jax.envs import webshop_data as data
from memrl_jax.envs import webshop_reward as rewards
from memrl_jax.envs.webshop_tasks import (
  BACK,
  BUY,
  NEXT,
  PREVIOUS,
  SUB_PAGES,
  Options,
  Task,
  draw,
  shop,
  tagger,
)

PAGE = 10  # products on a page of results
SEPARATOR = " [SEP] "
INVALID = "no such action here"


# The environment.


class Webshop(base.Seeded):
  """The environment. The page is "search", "results", "item", one of SUB_PAGES or "done"."""

  def __init__(self, options: Options):
    super().__init__(options, draw, options.turns)
    self._shop = shop(options)
    self._nouns = rewards.tagger(tagger(options))

  def _begin(self, task: Task) -> base.Observation:
    self._page, self._query, self._number, self._hits = "search", "", 1, []
    self._item: data.Product | None = None
    self._chosen: dict[str, str] = {}
    self._paid: rewards.Reward | None = None
    return self._observe()

  def step(self, response: str) -> base.StepResult:
    self._check_open()
    action, note = self._act(*(parse(response) or ("", "")))
    self._turn += 1
    self._done = self._paid is not None or self._turn >= self._options.turns
    total = self._paid.total if self._paid else 0.0
    return base.StepResult(
      observation=self._observe(),
      reward=total * self._options.reward_scale,
      done=self._done,
      success=total == 1,
      score=total,
      valid=note != INVALID,
      action=action,
      note=note,
    )

  def _act(self, verb: str, argument: str) -> tuple[str, str]:
    """Plays an action: its canonical form and what came of it. What does not exist here changes nothing."""
    if verb == "search":
      self._query = argument
      self._hits = self._shop.search(argument)
      self._results(1)
      return f"search[{argument}]", ""
    names = {" ".join(name.lower().split()): name for name in self._clickable()}
    if argument in names:
      return f"click[{names[argument]}]", self._click(names[argument])
    return f"{verb}[{argument}]" if verb else "", INVALID

  def _click(self, name: str) -> str:
    if name == BACK:
      self._results(1)
      self._page, self._query, self._hits = "search", "", []
    elif name == NEXT:
      self._results(self._number + 1)
    elif name == PREVIOUS and self._page == "results":
      self._results(self._number - 1)
    elif name == PREVIOUS and self._page == "item":
      self._results(self._number)
    elif name == PREVIOUS:
      self._page = "item"
    elif self._page == "results":
      self._page, self._item = "item", self._shop.find(name)
    elif name == BUY:
      self._buy()
      return "bought"
    elif name in SUB_PAGES:
      self._page = name
    else:
      group = self._groups()[name]
      self._chosen[group] = name
      return f"{group}: {name} chosen"
    return ""

  def _results(self, number: int) -> None:
    self._page, self._number, self._item, self._chosen = "results", number, None, {}

  def _buy(self) -> None:
    seed = self._options.price_seed
    price, chosen = data.price(self._item, seed), self._chosen.values()
    goal, wanted, limit = self._task
    self._paid = rewards.reward(self._item, price, chosen, goal, wanted, limit, self._nouns)
    self._page = "done"

  def _groups(self) -> dict[str, str]:
    """Option value -> its group; of a value in two groups the later one counts, as in the release."""
    return {value: group for group, values in self._item.options.items() for value in values}

  def _shown(self) -> list[data.Product]:
    hits = self._hits[(self._number - 1) * PAGE : self._number * PAGE]
    return [self._shop.product(hit) for hit in hits]

  def _clickable(self) -> tuple[str, ...]:
    if self._page in ("search", "done"):
      return ()
    if self._page == "results":
      turns = [PREVIOUS] * (self._number > 1) + [NEXT] * (self._number * PAGE < len(self._hits))
      return (BACK, *turns, *(product.asin for product in self._shown()))
    if self._page == "item":
      return (BACK, PREVIOUS, *self._groups(), *SUB_PAGES, BUY)
    return (BACK, PREVIOUS)

  def _texts(self) -> list[str]:
    """The visible texts of the page, in order."""
    if self._page == "done":
      score = f"{self._paid.total:.4g}"
      return ["Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", score]
    opening = ["Instruction:", self._task.instruction]
    if self._page == "search":
      return ["WebShop", *opening, "Search"]
    clicks, item = self._clickable(), self._item
    if self._page == "results":
      page = f"Page {self._number} (Total results: {len(self._hits)})"
      turns = [name for name in clicks if name in (PREVIOUS, NEXT)]
      rows = [(product.asin, product.title, product.tag) for product in self._shown()]
      return [*opening, BACK, page, *turns, *(text for row in rows for text in row)]
    if self._page == "item":
      options = [text for name, values in item.options.items() for text in (name, *values)]
      about = [item.title, f"Price: {item.tag}", "Rating: N.A."]
      return [*opening, BACK, PREVIOUS, *options, *about, *SUB_PAGES, BUY]
    content = {"Description": [item.description], "Features": list(item.bullets), "Reviews": []}
    return [*opening, BACK, PREVIOUS, *content[self._page]]

  def _observe(self) -> base.Observation:
    parts = [self._page.lower()]
    if self._page not in ("search", "done"):
      parts += [repr(self._query), f"page {self._number}"]
    if self._item:
      parts += [self._item.asin, repr(sorted(self._chosen.items()))]
    return base.Observation(
      text=SEPARATOR.join(self._texts()),
      anchor=" | ".join(parts),
      admissible=tuple(f"click[{name}]" for name in self._clickable()),
      goal=self._task.instruction,
      task=self._task.goal.id,
    )


_ACTION = re.compile(r"\s*(search|click)\s*\[\s*(.+?)\s*\]\s*", re.IGNORECASE | re.DOTALL)
_BARE = re.compile(r"\b(?:search|click)\s*\[[^\[\]\n]+\]", re.IGNORECASE)


def parse(response: str) -> tuple[str, str] | None:
  """("search", words) or ("click", name) in lower case, of the last action tags or the last bare action.

  None when there is none. What is inside <think> does not count; text that is in action tags but no action is
  not searched for one elsewhere.
  """
  said = response.rpartition("</think>")[2]
  end = said.rfind("</action>")
  start = said.rfind("<action>", 0, max(end, 0))
  if 0 <= start < end:
    body = said[start + len("<action>") : end]
  else:
    bare = _BARE.findall(said)
    body = bare[-1] if bare else ""
  match = _ACTION.fullmatch(body)
  return (match[1].lower(), " ".join(match[2].lower().split())) if match else None


# Prompts.


def _wording(options: Options) -> prompting.Wording:
  return prompting.Wording(
    rules=(
      "You shop in a web store that is made of text. Your instruction says what to buy: what kind of product, "
      "which attributes it must have, which options to choose (a colour, a size, ...) and what it may cost at most. "
      "search[words] looks for products from any page and shows them ten a page; click[name] follows a "
      "link, where a name is a product's code, an option's value, or one of "
      f"{BACK}, {PREVIOUS}, {NEXT}, {', '.join(SUB_PAGES)} and {BUY}. The texts of a page are separated by [SEP]. "
      "On a product's page you choose options by clicking their values; its Description and Features tell "
      "more about it than its title. Products that look the same may differ in what matters. Buying ends the "
      "trial, and is all that counts: the score is the share of wanted attributes, options and price that "
      f"you got right, if the kind of product is right. A trial has {options.turns} turns. The instruction and "
      "the store are the same in every trial."
    ),
    request=(
      "First think, inside <think> </think>, about what is still missing and where it can be found. Then give "
      "exactly one action inside tags, for example <action>search[red wool scarf]</action> or "
      f"<action>click[{BUY}]</action>."
    ),
    show=str,
  )


def prompts(options: Options) -> base.Prompts:
  """Prompts in the style of the options."""
  style = prompting.full if options.style == "full" else prompting.chat
  plain = style(_wording(options))
  if not options.list_actions:
    return plain
  return plain._replace(
    play=lambda view: plain.play(_listed(view)),
    reflect=lambda view: plain.reflect(_listed(view)),
    tip=lambda view: plain.tip(_listed(view)),
  )


def _listed(view: base.View) -> base.View:
  """The view with what can be clicked written under every page."""

  def observation(seen: base.Observation) -> base.Observation:
    names = " | ".join(action[len("click[") : -1] for action in seen.admissible or ())
    text = f"{seen.text}\nClickable: {names}" if names else seen.text
    return dataclasses.replace(seen, text=text)

  def attempt(log: base.AttemptLog) -> base.AttemptLog:
    steps = [
      step._replace(
        result=dataclasses.replace(step.result, observation=observation(step.result.observation))
      )
      for step in log.steps
    ]
    return dataclasses.replace(log, initial=observation(log.initial), steps=steps)

  return view._replace(past=tuple(map(attempt, view.past)), current=attempt(view.current))


def _describe(options: Options, seed: int) -> str:
  task = draw(options, seed)
  return "\n".join(
    [
      f"{task.instruction} (goal {task.goal.id}, limit {task.limit}, nouns by {tagger(options)})",
      f"attributes {task.goal.attributes}, options {task.goal.options}",
      f"{task.wanted}, costs {data.price(task.wanted, options.price_seed)}",
    ]
  )


FAMILY = base.Family(
  name="webshop",
  options=Options,
  make=Webshop,
  prompts=prompts,
  players={
    "random": webshop_players.Random,
    "greedy": webshop_players.Greedy,
    "solver": webshop_players.Solver,
  },
  describe=_describe,
)
