"""Retrospex-like re-scoring on ScienceWorld: a frozen model whose actions a critic of old trials re-scores.

Claim     33.8 mean return in the paper.
Paper     Table 1 of EMPO2 (2602.23008)
Hardware  laptop, smoke: 2 CPU cores, minutes, a tiny model that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/retrospex_scienceworld.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("retrospex", "scienceworld")
  recipes.scienceworld(config, variant)
  recipes.retrospex(config, variant)
  return config
