"""Mem-pi on WebArena: a memory policy learns when a frozen agent needs a hint, and what to say.

Claim     .431; stage 1 alone .350.
Paper     Its text is not public; experiments/mempi.md has what is known
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it, and the six web sites; paper: 8 accelerators and the six web sites.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/mempi_webarena.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("mempi", "webarena")
  hinting.webarena(config, variant)
  return config
