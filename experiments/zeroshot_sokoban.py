"""Zero-shot on Sokoban: the untrained model, three attempts without memory.

Claim     the floor: no training, no memory.
Paper     LaMer (2512.16848) Table 1, Qwen3-4B, pass@1/2/3: 6.8 / 9.8 / 12.9 %.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/zeroshot_sokoban.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("zeroshot", "sokoban")
  recipes.sokoban(config, variant)
  recipes.zeroshot(config, variant)
  return config
