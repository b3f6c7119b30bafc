"""Mem-pi on WorkArena: a memory policy learns when a frozen agent needs a hint, and what to say.

Claim     .503, against .420.
Paper     Its text is not public; experiments/mempi.md has what is known
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it, and a ServiceNow instance; paper: 8 accelerators and a ServiceNow instance.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/mempi_workarena.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  config = base.new("mempi", "workarena")
  hinting.workarena(config, variant)
  return config
