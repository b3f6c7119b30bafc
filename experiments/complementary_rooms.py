"""Complementary RL on Rooms: an actor and an extractor of experience that learn together.

Claim     co-evolved above no experience at equal episodes, with and without experience, and above a frozen extractor.
Paper     section 4 in kind; its KeyRoom and Maze
Hardware  laptop: 2 CPU cores, minutes; paper: 8 accelerators of 80 GB, days.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/complementary_rooms.py
Numbers   experiments/README.md
"""

from experiments import base, worlds


def get_config(variant: str = "laptop"):
  config = base.new("complementary", "rooms")
  worlds.rooms(config, variant)
  worlds.complementary(config, variant)
  return config
