"""LaMer on MineSweeper: trained across attempts at one task, it explores first and uses it later.

Claim     pass@3 above GiGPO's, at the price of some pass@1. On a laptop expect it with 5 mines
          (`mines5`); with 3 mines a prototype found next to nothing (+.027, standard error .02).
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 44.1 / 66.4 / 74.4 %.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper, mines5.
Run       python experiments/run.py --config=experiments/lamer_minesweeper.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("lamer", "minesweeper")
  recipes.minesweeper(config, variant)
  recipes.lamer(config, variant)
  return config
