"""Reflexion on Sokoban: LaMer's play and reflect loop with a frozen model.

Claim     no training, so near zero-shot: reflections help only a policy that reads them.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 6.4 / 9.8 / 12.1 %.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/reflexion_sokoban.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("reflexion", "sokoban")
  recipes.sokoban(config, variant)
  recipes.reflexion(config, variant)
  return config
