"""GiGPO on the lab: GRPO and a term for turns in the same state.

Claim     as GRPO: states recur, but their returns are equal.
Paper     none
Hardware  laptop: 2 CPU cores, minutes; paper: 4-8 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/gigpo_lab.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("gigpo", "lab")
  recipes.lab(config, variant)
  recipes.gigpo(config, variant)
  return config
