"""Complementary RL on SWE tasks: an actor and an extractor of experience that learn together.

Claim     3 points above no experience, with more actions (fewer premature answers).
Paper     Figure 4
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it; paper: 8 accelerators and Docker.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/complementary_swebench.py
Numbers   experiments/README.md
"""

from experiments import base, worlds


def get_config(variant: str = "laptop"):
  config = base.new("complementary", "swe")
  worlds.swe(config, variant)
  worlds.complementary(config, variant)
  return config
