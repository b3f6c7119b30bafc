"""WebShop's reward against numbers worked by hand from its formula."""

import sys

import pytest

from memrl_jax.envs import webshop_data as data

pytest.importorskip("rapidfuzz", reason="WebShop compares texts with rapidfuzz")

from memrl_jax.envs import webshop_reward as rewards

WANTED = data.Product(
  asin="B000000001",
  title="Norvik ankle boots women footwear",  # 5 nouns by the rule
  description="Boots.",
  bullets=("Made to last", "Waterproof to the ankle"),
  options={"color": ("navy blue", "black"), "size": ("8", "9")},
  attributes=("rubber sole", "lace closure"),
  query="women's boots",
  category="fashion",
  product_category="Clothing › Women › Shoes › Boots",
  prices=(49.0,),
  tag="$49.0",
)
# 2 attributes + 2 options + 1 for the price: every reward is a multiple of 1/5, times the type factor.
GOAL = data.make_goal(WANTED.asin, "boots", ("rubber sole", "waterproof"), ("navy blue", "8"))


def pay(bought=WANTED, price=49.0, chosen=("navy blue", "8"), goal=GOAL, wanted=WANTED):
  return rewards.reward(bought, price, chosen, goal, wanted, 50.0, rewards.nouns_by_rule)


def test_the_right_item_with_its_options_below_the_limit_is_exactly_one():
  # "rubber sole" is listed, "waterproof" stands in a feature: (2 + 2 + 1) / 5
  assert pay() == rewards.Reward(1.0, 1.0, 2, 2, True)


@pytest.mark.parametrize(("price", "total"), [(50.0, 1.0), (50.01, 0.8)])
def test_the_price_counts_up_to_the_limit(price, total):
  assert pay(price=price).total == total  # above: (2 + 2 + 0) / 5


@pytest.mark.parametrize(
  ("attributes", "matched"),
  [
    (("Rubber-Sole",), True),  # the same without case and punctuation: 100
    (("rubber soles",), True),  # 11 of 11 and 12 letters in common: 22/23 = 96
    (("a very thick rubber sole",), True),  # a superset of the words: 100
    (("rubber heel",), False),  # "rubber" is in both: at most 2*8/22 = 73
    ((), False),
  ],
)
def test_attributes_match_by_their_words(attributes, matched):
  # (matched + 1 by the feature + 2 + 1) / 5
  assert pay(WANTED._replace(attributes=attributes)).total == pytest.approx((4 + matched) / 5)


@pytest.mark.parametrize(
  ("change", "matched"),
  [
    ({"title": "Norvik WATERPROOF ankle boots women footwear"}, True),
    ({"description": "Keeps its waterproofing"}, True),  # a substring
    ({"bullets": ("Not water", "proof")}, False),  # joined by a blank: "water proof"
  ],
)
def test_attributes_match_where_the_text_says_them(change, matched):
  bought = WANTED._replace(**{"bullets": ("Made to last",)} | change)
  assert pay(bought).attributes == 1 + matched


@pytest.mark.parametrize(
  ("chosen", "matched"),
  [
    (("navy blue", "8"), 2),
    (("Dark Blue Heather".lower(), "8"), 2),  # both stand for "blue", the first colour they contain
    (("navy", "8"), 1),  # "navy" is another colour word than "blue"
    (("black", "8"), 1),
    (("blue", "8 wide"), 2),  # "8" is a subset of the words of "8 wide": 100
    (("blue", "80"), 1),  # 2*1/3 = 67
    (("8",), 1),
    ((), 0),
    (("8", "8", "8"), 1),  # wanted options are counted, not chosen ones
  ],
)
def test_options_match_by_their_colour_or_words(chosen, matched):
  # (2 + matched + 1) / 5
  reward = pay(chosen=chosen)
  assert (reward.options, reward.total) == (matched, pytest.approx((3 + matched) / 5))


def test_case_does_not_count():
  goal = GOAL._replace(options=("XL",))
  assert pay(chosen=("xl",), goal=goal).options == 1


def test_the_ratio_is_rounded_before_it_is_compared():
  # 23 of 27 letters in common on both sides: 46/54 = 85.19, which the release's library calls 85: no match
  assert not rewards.alike("a" * 23 + "bcde", "a" * 23 + "fghi")
  # 6 of 7: 85.71, called 86: a match
  assert rewards.alike("abcdefx", "abcdefy")


FAR = {"query": "tents", "product_category": "Sports › Camping › Tents"}
ELEVEN = WANTED._replace(
  title="norvik alder birch cedar dogwood elm fir ginkgo hazel ironwood juniper"
)


@pytest.mark.parametrize(
  ("change", "wanted", "factor"),
  [
    ({}, WANTED, 1.0),
    # one noun of five in common is a title score of .2, which is not above .2
    ({"title": "Norvik tent", **FAR}, WANTED, 0.5),
    ({"title": "Norvik tent", **FAR, "query": "women's boots"}, WANTED, 1.0),
    ({"title": "Norvik tent", **FAR, "product_category": "Shoes › Boots"}, WANTED, 1.0),
    ({"title": "Norvik tent", **FAR, "product_category": "Boots › Tents"}, WANTED, 0.5),
    ({"title": "Norvik ankle tent", **FAR}, WANTED, 1.0),  # 2 of 5 = .4
    # one of eleven = .09: below .1, even though the query is the same
    ({"title": "Norvik tent"}, ELEVEN, 0.1),
    ({"title": "tent"}, WANTED, 0.0),  # nothing in common, even though the query is the same
    # no nouns are wanted: a score of .2
    ({"title": "tent", **FAR}, WANTED._replace(title="the very best"), 0.5),
    ({"title": "tent"}, WANTED._replace(title="the very best"), 1.0),
  ],
)
def test_type_factors(change, wanted, factor):
  bought = WANTED._replace(**change)
  assert rewards.type_factor(bought, wanted, rewards.nouns_by_rule) == factor
  assert pay(bought, wanted=wanted).total == pytest.approx(factor)  # all else matches: factor * 5/5


def test_all_parts_together():
  # another kind of product (.5) with one attribute by its text, one option, in the price: .5 * (1 + 1 + 1) / 5
  bought = WANTED._replace(title="Norvik tent", attributes=("polyester",), **FAR)
  assert pay(bought, chosen=("black", "8")) == rewards.Reward(pytest.approx(0.3), 0.5, 1, 1, True)


def test_spacy_is_used_where_it_has_a_model(tmp_path, monkeypatch):
  assert rewards.tagger("rule") is rewards.nouns_by_rule
  rewards._spacy.cache_clear()
  if rewards.installed_tagger() == "rule":
    with pytest.raises(ValueError, match="there is no spaCy with an English model here"):
      rewards.tagger("spacy")
  (tmp_path / "spacy.py").write_text("")
  (tmp_path / "en_core_web_lg.py").write_text(
    "import types\n"
    "word = lambda t: types.SimpleNamespace(text=t, pos_='NOUN' if t.islower() else 'PROPN')\n"
    "load = lambda: lambda title: [word(t) for t in title.split()] + [types.SimpleNamespace(text='of', pos_='ADP')]"
  )
  for name in ("spacy", "en_core_web_lg"):
    monkeypatch.delitem(sys.modules, name, raising=False)
  monkeypatch.syspath_prepend(tmp_path)
  rewards._spacy.cache_clear()
  try:
    assert rewards.installed_tagger() == "spacy"
    assert rewards.tagger("spacy")("Norvik boots") == ("norvik", "boots")
  finally:
    rewards._spacy.cache_clear()
