"""LaMer on Sokoban: trained across attempts at one task, it explores first and uses it later.

Claim     pass@3 above GiGPO's. On a laptop reported whatever comes out; held-out pass@3 must end
          above its start.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 42.4 / 52.0 / 55.9 %.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/lamer_sokoban.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("lamer", "sokoban")
  recipes.sokoban(config, variant)
  recipes.lamer(config, variant)
  return config
