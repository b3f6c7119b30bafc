"""Mem-pi on the lab: a memory policy learns what a frozen agent that searches a house must be told.

Claim     stage 2 above stage 1 above retrieval above no memory, on variations that training never showed.
Paper     none
Hardware  laptop: 2 CPU cores, five minutes.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/mempi_lab.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("mempi", "lab")
  hinting.lab(config, variant)
  return config
