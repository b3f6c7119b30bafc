"""Complementary RL on WebShop: an actor and an extractor of experience that learn together.

Claim     above no experience at equal episodes.
Paper     Figure 4, Table 1
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/complementary_webshop.py
Numbers   experiments/README.md
"""

from experiments import base, worlds


def get_config(variant: str = "laptop"):
  config = base.new("complementary", "webshop")
  worlds.webshop(config, variant)
  worlds.complementary(config, variant)
  return config
