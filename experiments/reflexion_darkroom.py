"""Reflexion on Dark Room: LaMer's play and reflect loop with a frozen model.

Claim     how much memory helps before any training; the start of LaMer's curve.
Paper     none; Dark Room is the field's test of in-context adaptation, here as text.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper, heldout.
Run       python experiments/run.py --config=experiments/reflexion_darkroom.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("reflexion", "darkroom")
  recipes.darkroom(config, variant)
  recipes.reflexion(config, variant)
  return config
