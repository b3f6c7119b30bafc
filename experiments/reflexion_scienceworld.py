"""Reflexion on ScienceWorld: a frozen model, three attempts with reflections.

Claim     17.1 mean return in the paper.
Paper     Table 1
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/reflexion_scienceworld.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("reflexion", "scienceworld")
  recipes.scienceworld(config, variant)
  recipes.reflexion(config, variant)
  return config
