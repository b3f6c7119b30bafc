"""GiGPO on WebShop.

Claim     score 86.2, success 75.2 (without std) in the paper.
Paper     Table 2
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/gigpo_webshop.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("gigpo", "webshop")
  recipes.webshop(config, variant)
  recipes.gigpo(config, variant)
  return config
