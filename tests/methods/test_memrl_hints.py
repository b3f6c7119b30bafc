"""MemRL on the hints with its frozen clone: Q chooses where similarity cannot, and exploration digs up a good memory."""

import chex
import jax
import numpy as np
import pytest

from experiments import base
from experiments import run as command
from memrl_jax.envs import hints_world, pool
from memrl_jax.memory.episodic import Episode, Feedback
from memrl_jax.training import runs

UPDATES = 12


def started(*overrides, seed=0):
  """A run whose memory holds two memories for each family: one that opens all its containers and was unlucky
  three times, and one that names the right tool only."""
  made = command.load(
    "experiments/memrl_hints.py",
    [f"seed={seed}", "method.writes=false", "episodic.k2=1", "env.reported=0", "env.isolation=inline",
     "train.tasks=48", "train.groups=24", *overrides],
  )  # fmt: skip
  run = runs.Run(base.settings(made.config))
  memory = run.method.memory.memory
  for number, kin in enumerate(hints_world.town(run.settings.env.options.town)):
    tool, digit = kin.procedure
    wrong = next(one for one in hints_world.DIGITS if one != digit)
    said = f"{kin.container} {kin.room} {tool}"
    task = f"goal open red {kin.container} at {kin.room}"
    notes = [(True, f"won {said} {digit}"), (False, f"lost {said} {wrong} bad")]
    kept = memory.remember(
      "hints",
      [Episode(f"{number}.{n}", task, "", won, note=note) for n, (won, note) in enumerate(notes)],
    )
    good = memory.memory.get("hints", [kept[0].id])[0]
    for n in range(3):
      paid = Feedback(f"{number}.{n}", False, [(good.id, good.version)])
      memory.feedback("hints", [paid])
      good = memory.memory.get("hints", [good.id])[0]
  return run


def played(run):
  """Success in the last updates, and of how many of the six families the good memory is worth more by then."""
  envs = pool.EnvPool(run.family, run.settings.env.options, isolation="inline")
  weights = jax.device_get(run.actor.params)
  success = []
  try:
    for update in range(UPDATES):
      trials = run.rollout(update, envs)
      run.remember(update, trials)
      success.append(np.mean([one.success_by(1) for one in trials]))
  finally:
    envs.close()
  chex.assert_trees_all_equal(weights, jax.device_get(run.actor.params))  # to the bit
  entries = run.method.memory.memory.memory.entries("hints")
  good, middling = (
    {e.key: e.score for e in entries if e.data["success"] is won} for won in (True, False)
  )
  run.close()
  return np.mean(success[-4:]), sum(good[key] > middling[key] for key in good)


@pytest.mark.slow
def test_without_exploration_an_unlucky_memory_stays_buried_and_each_option_digs_it_up():
  found = {
    name: played(started(*(f"episodic.{one}" for one in options)))
    for name, options in {
      "none": (),
      "epsilon": ("explore=epsilon", "explore_rate=0.2"),
      "ucb": ("explore=ucb", "explore_rate=1.0"),
      "thompson": ("explore=thompson", "explore_rate=1.0"),
    }.items()
  }
  print(found)
  success, dug = found.pop("none")
  assert dug <= 3  # the others were never shown again
  for name, (better, number) in found.items():
    assert number >= 5 and better > success + 0.1, name
