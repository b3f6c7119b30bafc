"""GiGPO on MineSweeper: RL on single attempts, the strongest baseline of the LaMer paper.

Claim     a higher pass@1 than the start, with little gain from attempts 2 and 3.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 52.0 / 54.9 / 55.1 %.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper, mines5.
Run       python experiments/run.py --config=experiments/gigpo_minesweeper.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("gigpo", "minesweeper")
  recipes.minesweeper(config, variant)
  recipes.gigpo(config, variant)
  return config
