"""Retrospex-like re-scoring on WebShop: a frozen model whose actions a critic of old trials re-scores.

Claim     score 73.1, success 60.4 in the paper.
Paper     Table 2 of EMPO2 (2602.23008)
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/retrospex_webshop.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("retrospex", "webshop")
  recipes.webshop(config, variant)
  recipes.retrospex(config, variant)
  return config
