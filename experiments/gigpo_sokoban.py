"""GiGPO on Sokoban: RL on single attempts, the strongest baseline of the LaMer paper.

Claim     a higher pass@1 than the start, with little gain from attempts 2 and 3.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 41.6 / 43.6 / 44.1 %.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/gigpo_sokoban.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("gigpo", "sokoban")
  recipes.sokoban(config, variant)
  recipes.gigpo(config, variant)
  return config
