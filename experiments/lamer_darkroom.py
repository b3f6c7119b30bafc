"""LaMer on Dark Room: trained across attempts at one task, it explores first and uses it later.

Claim     pass@3 above .704, the most that any policy without memory can reach here; above GiGPO's
          by .25 or more (a prototype: .91-.99 against .34-.50).
Paper     none; Dark Room is the field's test of in-context adaptation, here as text.
Hardware  laptop: 2 CPU cores, minutes; paper: 4 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper, heldout.
Run       python experiments/run.py --config=experiments/lamer_darkroom.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("lamer", "darkroom")
  recipes.darkroom(config, variant)
  recipes.lamer(config, variant)
  return config
