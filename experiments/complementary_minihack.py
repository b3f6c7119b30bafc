"""Complementary RL on MiniHack, the real game: an actor and an extractor of experience that learn together.

Claim     1.3x the success of no experience on Room, 1.5x fewer actions.
Paper     Figures 3 and 4
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/complementary_minihack.py
Numbers   experiments/README.md
"""

from experiments import base, worlds


def get_config(variant: str = "laptop"):
  config = base.new("complementary", "minihack")
  worlds.minihack(config, variant)
  worlds.complementary(config, variant)
  return config
