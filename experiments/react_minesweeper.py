"""ReAct on MineSweeper: the untrained model, asked for a thought before each action.

Claim     near zero-shot; the tiny model has never seen a thought, so `laptop` shows no gain.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 6.3 / 7.0 / 10.9 %.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper, mines5.
Run       python experiments/run.py --config=experiments/react_minesweeper.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("react", "minesweeper")
  recipes.minesweeper(config, variant)
  recipes.react(config, variant)
  return config
