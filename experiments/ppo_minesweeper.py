"""PPO on MineSweeper: RL on single attempts with a critic.

Claim     a higher pass@1 than the start, with little gain from attempts 2 and 3.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 29.7 / 34.2 / 35.5 %.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper, mines5.
Run       python experiments/run.py --config=experiments/ppo_minesweeper.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("ppo", "minesweeper")
  recipes.minesweeper(config, variant)
  recipes.ppo(config, variant)
  return config
