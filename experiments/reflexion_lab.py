"""Reflexion on the lab: a frozen model, three attempts with reflections.

Claim     reflections of lost attempts name what was found; a little above the start.
Paper     none
Hardware  laptop: 2 CPU cores, minutes; paper: 4-8 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/reflexion_lab.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("reflexion", "lab")
  recipes.lab(config, variant)
  recipes.reflexion(config, variant)
  return config
