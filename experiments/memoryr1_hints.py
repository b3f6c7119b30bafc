"""Memory-R1-like on the hints: a manager learns what becomes of each new fact from what the agent then does.

Claim     the facts that it keeps let a frozen agent open more containers than none; Mem-pi's baseline, on its tasks.
Paper     none: Memory-R1 (2508.19828) answers questions about dialogues
Hardware  laptop: 2 CPU cores, four minutes.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/memoryr1_hints.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("memoryr1", "hints")
  hinting.managed(config, variant)
  return config
