"""ReAct on Dark Room: the untrained model, asked for a thought before each action.

Claim     as zero-shot; the tiny model has never seen a thought, so `laptop` shows no gain.
Paper     none; Dark Room is the field's test of in-context adaptation, here as text.
Hardware  laptop: 2 CPU cores, about a minute; paper: 4 accelerators of 80 GB, minutes.
Variants  laptop (default), smoke, paper, heldout.
Run       python experiments/run.py --config=experiments/react_darkroom.py
Numbers   experiments/README.md
"""

from experiments import base, recipes


def get_config(variant: str = "laptop"):
  config = base.new("react", "darkroom")
  recipes.darkroom(config, variant)
  recipes.react(config, variant)
  return config
