"""Reflexion on WebShop: a frozen model, three attempts with reflections.

Claim     score 58.1, success 28.8 in the paper.
Paper     Table 2
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/reflexion_webshop.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("reflexion", "webshop")
  recipes.webshop(config, variant)
  recipes.reflexion(config, variant)
  return config
