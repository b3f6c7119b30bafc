"""GRPO on ScienceWorld, what EMPO2 is compared with.

Claim     33.2 mean return over 18 tasks in the paper.
Paper     Table 1
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/grpo_scienceworld.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("grpo", "scienceworld")
  recipes.scienceworld(config, variant)
  recipes.grpo(config, variant)
  return config
