"""Mem-pi on MiniWoB, small tasks in a real browser: a memory policy learns when a frozen agent needs a hint, and what to say.

Claim     above the agent alone and above retrieval on tasks that are never played.
Paper     none
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it, and a Chromium; paper: 8 accelerators.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/mempi_miniwob.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("mempi", "miniwob")
  hinting.miniwob(config, variant)
  return config
