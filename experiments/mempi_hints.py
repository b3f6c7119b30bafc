"""Mem-pi on the hints: a memory policy learns when a frozen agent needs a hint, and what to say.

Claim     stage 2 above stage 1 above retrieval above no memory, with fewer hint tokens than stage 1, silent where a
          report tells the agent all it needs.
Paper     none
Hardware  laptop: 2 CPU cores, four minutes.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/mempi_hints.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("mempi", "hints")
  hinting.hints(config, variant)
  return config
