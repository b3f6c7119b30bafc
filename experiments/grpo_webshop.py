"""GRPO on WebShop, what EMPO2 is compared with.

Claim     score 79.3, success 66.1 in the paper.
Paper     Table 2
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/grpo_webshop.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("grpo", "webshop")
  recipes.webshop(config, variant)
  recipes.grpo(config, variant)
  return config
