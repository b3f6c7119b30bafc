"""Mem-pi on LifelongAgentBench, tables (variants os: a shell, as the paper): a memory policy hints to a frozen agent.

Claim     some 20 points above the agent alone (the mean of four benchmarks).
Paper     Its text is not public; experiments/mempi.md has what is known
Hardware  laptop, smoke: 2 CPU cores, minutes, tiny models that cannot play it; paper: 8 accelerators.
Variants  laptop (default), smoke, paper; os, os_smoke, os_paper.
Run       python experiments/run.py --config=experiments/mempi_lifelong.py
Numbers   experiments/README.md
"""

from experiments import base, hinting


def get_config(variant: str = "laptop"):
  shell, _, size = variant.partition("_") if variant.startswith("os") else ("", "", variant)
  config = base.new("mempi", "lifelong_os" if shell else "lifelong_db")
  (hinting.lifelong_os if shell else hinting.lifelong_db)(config, size or "laptop")
  return config
