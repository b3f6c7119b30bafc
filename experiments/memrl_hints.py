"""MemRL on the hints: of memories that look alike, Q tells which one is worth following.

Claim     with Q in the ranking a frozen clone opens more containers than with similarity alone, forgets no
          more, and recovers a good memory that an unlucky start has buried.
Paper     none
Hardware  laptop: 2 CPU cores, a minute.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/memrl_hints.py
Numbers   experiments/README.md
"""

from experiments import base, frozen


def get_config(variant: str = "laptop"):
  config = base.new("memrl", "hints")
  frozen.hints(config, variant)
  return config
