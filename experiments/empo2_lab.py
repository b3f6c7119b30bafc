"""EMPO2 on the lab: novelty and tips find the chain, off-policy updates move it into the weights.

Claim     evaluated without memory, above GRPO with as many episodes; GRPO learns to touch nothing.
Paper     none; in kind section 9 of the toy exploration that its authors describe
Hardware  laptop: 2 CPU cores, minutes; paper: 4-8 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/empo2_lab.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("empo2", "lab")
  recipes.lab(config, variant)
  recipes.empo2(config, variant)
  return config
