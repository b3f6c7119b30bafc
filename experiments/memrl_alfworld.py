"""MemRL on ALFWorld: a frozen model whose memory learns which memories help.

Claim     .507 in the last round and .697 cumulative, against .324 and .456 of MemP.
Paper     Table 1
Hardware  laptop, smoke: 2 CPU cores, a minute, a tiny model that cannot play it; paper: an accelerator or an API.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/memrl_alfworld.py
Numbers   experiments/README.md
"""

from experiments import base, frozen


def get_config(variant: str = "laptop"):
  config = base.new("memrl", "alfworld")
  frozen.alfworld(config, variant)
  return config
