"""Reflexion on MineSweeper: LaMer's play and reflect loop with a frozen model.

Claim     no training, so near zero-shot: reflections help only a policy that reads them.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 5.5 / 7.2 / 9.8 %.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper, mines5.
Run       python experiments/run.py --config=experiments/reflexion_minesweeper.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("reflexion", "minesweeper")
  recipes.minesweeper(config, variant)
  recipes.reflexion(config, variant)
  return config
