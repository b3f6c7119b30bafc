"""EMPO2 on WebShop: the generated shop, or the published data files.

Claim     with a 7 B model: score 88.3, success 76.9 in the paper, within noise of GiGPO.
Paper     Table 2
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/empo2_webshop.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("empo2", "webshop")
  recipes.webshop(config, variant)
  recipes.empo2(config, variant)
  return config
