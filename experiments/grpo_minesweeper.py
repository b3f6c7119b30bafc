"""GRPO on MineSweeper: RL on single attempts, each return against its group.

Claim     a higher pass@1 than the start, with little gain from attempts 2 and 3.
Paper     LaMer (2512.16848) Table 1; its numbers are not known to us.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper, mines5.
Run       python experiments/run.py --config=experiments/grpo_minesweeper.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("grpo", "minesweeper")
  recipes.minesweeper(config, variant)
  recipes.grpo(config, variant)
  return config
