"""ReAct on Sokoban: the untrained model, asked for a thought before each action.

Claim     near zero-shot; the tiny model has never seen a thought, so `laptop` shows no gain.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 7.2 / 9.6 / 12.5 %.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/react_sokoban.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("react", "sokoban")
  recipes.sokoban(config, variant)
  recipes.react(config, variant)
  return config
