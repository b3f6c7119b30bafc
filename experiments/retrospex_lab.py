"""Retrospex-like re-scoring on the lab: a frozen model whose actions a critic of old trials re-scores.

Claim     re-scored, above the model alone; far below EMPO2, which moves the weights.
Paper     none
Hardware  laptop: 2 CPU cores, minutes; paper: 4-8 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/retrospex_lab.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("retrospex", "lab")
  recipes.lab(config, variant)
  recipes.retrospex(config, variant)
  return config
