"""Complementary RL on ALFWorld, the real engine: an actor and an extractor of experience that learn together.

Claim     1.3x the success of no experience, 2x fewer actions.
Paper     Figure 4, Table 1
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/complementary_alfworld.py
Numbers   experiments/README.md
"""

from experiments import base, worlds


def get_config(variant: str = "laptop"):
  config = base.new("complementary", "alfworld")
  worlds.alfworld(config, variant)
  worlds.complementary(config, variant)
  return config
