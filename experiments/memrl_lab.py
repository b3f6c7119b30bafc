"""MemRL on the lab, in small: a frozen model whose memory learns which memories help.

Claim     success of a frozen clone rises from .02 to above .8 on variations it never saw.
Paper     none
Hardware  laptop: 2 CPU cores, a minute.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/memrl_lab.py
Numbers   experiments/README.md
"""

from experiments import base, frozen


def get_config(variant: str = "laptop"):
  config = base.new("memrl", "lab")
  frozen.lab(config, variant)
  return config
