"""EMPO2 on ScienceWorld, the real simulator (extra `scienceworld`, Java).

Claim     with a 7 B model: 75.9 against 33.2 for GRPO, mean return over 18 tasks [2602.23008, Table 1].
Paper     Table 1
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/empo2_scienceworld.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("empo2", "scienceworld")
  recipes.scienceworld(config, variant)
  recipes.empo2(config, variant)
  return config
