"""GRPO on Dark Room: RL on single attempts, each return against its group.

Claim     pass@1 as LaMer's (.33 is the maximum), pass@3 at most .704 without memory: single-
          episode RL settles on one path and repeats it (a GiGPO prototype: .34-.50).
Paper     none; Dark Room is the field's test of in-context adaptation, here as text.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper, heldout.
Run       python experiments/run.py --config=experiments/grpo_darkroom.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("grpo", "darkroom")
  recipes.darkroom(config, variant)
  recipes.grpo(config, variant)
  return config
