"""MemRL on LifelongAgentBench, tables (variants os: a shell): a frozen model whose memory learns which memories help.

Claim     .960 in the last round (shell: .794), against .960 (.736) of MemP.
Paper     Table 1
Hardware  laptop, smoke: 2 CPU cores, a minute, a tiny model that cannot play it; paper: an accelerator or an API.
Variants  laptop (default), smoke, paper; os, os_smoke, os_paper.
Run       python experiments/run.py --config=experiments/memrl_lifelong.py
Numbers   experiments/README.md
"""

from experiments import base, frozen


def get_config(variant: str = "laptop"):
  shell, _, size = variant.partition("_") if variant.startswith("os") else ("", "", variant)
  config = base.new("memrl", "lifelong_os" if shell else "lifelong_db")
  (frozen.lifelong_os if shell else frozen.lifelong_db)(config, size or "laptop")
  return config
