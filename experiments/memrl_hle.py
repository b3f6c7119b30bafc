"""MemRL on Humanity's Last Exam: a frozen model whose memory learns which memories help.

Claim     .573 in the last round, against .528 of MemP.
Paper     Table 1
Hardware  laptop, smoke: 2 CPU cores, a minute, a tiny model that cannot play it; paper: an accelerator or an API.
Variants  laptop (default), smoke, paper.
Run       python experiments/run.py --config=experiments/memrl_hle.py
Numbers   experiments/README.md
"""

from experiments import base, frozen


def get_config(variant: str = "laptop"):
  config = base.new("memrl", "hle")
  frozen.hle(config, variant)
  return config
