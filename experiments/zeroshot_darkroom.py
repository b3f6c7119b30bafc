"""Zero-shot on Dark Room: the untrained model, three attempts without memory.

Claim     the floor: no training, no memory; the start of the RL curves.
Paper     none; Dark Room is the field's test of in-context adaptation, here as text.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper, heldout.
Run       python experiments/run.py --config=experiments/zeroshot_darkroom.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("zeroshot", "darkroom")
  recipes.darkroom(config, variant)
  recipes.zeroshot(config, variant)
  return config
