"""GiGPO on ScienceWorld.

Claim     the paper has no such row.
Paper     none
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/gigpo_scienceworld.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("gigpo", "scienceworld")
  recipes.scienceworld(config, variant)
  recipes.gigpo(config, variant)
  return config
