"""What the hints are for: a scripted reader with MemRL's memory, whose utilities choose where similarity cannot."""

import dataclasses

import numpy as np

from memrl_jax.envs import base, hints
from memrl_jax.envs import hints_world as world
from memrl_jax.memory import embed, episodic

TASKS, EPOCHS, BATCH = 48, 5, 12


def accuracy(config, seed):
  """Share of TASKS opened in the last epoch; remarks are the memories, intents their keys."""
  options, rng = world.Options(families=3), np.random.default_rng(seed)
  seeds = rng.integers(*base.TRAIN_SEEDS, size=TASKS).tolist()
  with episodic.Episodic.open(None, embed.Hash(), config) as memory:
    for epoch in range(EPOCHS):
      order, won = rng.permutation(TASKS), []
      for batch in np.split(order, TASKS // BATCH):
        paid, written = [], []
        for index in batch.tolist():
          name = f"{epoch}-{index}"
          first, found, log, remark = attempt(options, seeds[index], memory, [seed, epoch, index])
          reads = tuple(one.read for one in found)
          paid.append(episodic.Feedback(name, reads=reads, success=log.success))
          written.append(episodic.Episode(name, first.goal, "-", log.success, reads, note=remark))
          won.append(log.success)
        memory.feedback("t", paid)
        memory.remember("t", written)
  return np.mean(won)


def attempt(options, seed, memory, key):
  environment, prompts = hints.Hints(options), hints.FAMILY.prompts(options)
  first = environment.reset(seed)
  found = memory.suggest("t", first.goal)
  tips = tuple(one.text[: one.learned].rpartition(": ")[2] for one in found)  # "Plan: ", "Lesson: "
  player = hints.FAMILY.players["reader"](options, np.random.default_rng(key))
  log = base.AttemptLog(0, first)
  while not log.done:
    result = environment.step(player.play(base.View((), log, tips=tips)))
    log.steps.append(base.Step(result.action, result))
  return first, found, log, prompts.parse_reflection(player.reflect(base.View((), log)))[0]


def test_utilities_find_the_memory_that_helps_and_similarity_stays_with_the_first():
  every = [world.draw(world.Options(families=3), seed) for seed in range(200)]
  goals = sorted({hints.goal(world.Options(), task) for task in every})
  learns = episodic.calibrate(embed.Hash(), goals).into(episodic.EpisodicConfig())
  alike = dataclasses.replace(learns, lambda_=0.0)
  pairs = np.array([(accuracy(learns, seed), accuracy(alike, seed)) for seed in range(4)])
  assert pairs[:, 0].min() >= 0.9
  assert pairs[:, 1].mean() <= pairs[:, 0].mean() - 0.15
