"""GRPO on the lab: without novelty or memory, what EMPO2 is compared with.

Claim     it learns not to focus early, then its groups have equal rewards and it stands still.
Paper     none
Hardware  laptop: 2 CPU cores, minutes; paper: 4-8 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/grpo_lab.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("grpo", "lab")
  recipes.lab(config, variant)
  recipes.grpo(config, variant)
  return config
