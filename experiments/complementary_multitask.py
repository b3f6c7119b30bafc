"""Complementary RL on several tasks at once: an actor and an extractor of experience that learn together.

Claim     .82 with experience, .78 without, .74 for no experience, and a static bank below that.
Paper     Table 1
Hardware  laptop: 2 CPU cores, minutes; paper: 16 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/complementary_multitask.py
Numbers   experiments/README.md
"""

from experiments import base, worlds


def get_config(variant: str = "laptop"):
  config = base.new("complementary", "mix")
  worlds.mix(config, variant)
  worlds.complementary(config, variant)
  return config
