"""Mem-pi on ALFWorld, the real engine: a memory policy learns when a frozen agent needs a hint, and what to say.

Claim     .916, 6.3 points above the agent alone (GPT-5.4-mini).
Paper     Its text is not public; experiments/mempi.md has what is known
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/mempi_alfworld.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("mempi", "alfworld")
  hinting.alfworld(config, variant)
  return config
