"""Plays whole trials with scripted players; used by the tests of environments."""

import numpy as np

from memrl_jax.envs import base

MEMORIES = base.MEMORY_KINDS


def play(family, options, player, seed, attempts=3, memory="reflection_only", seen=None):
  """The attempt logs of one trial; every prompt's text is appended to `seen`."""
  environment, prompts = family.make(options), family.prompts(options)
  past, observation = [], environment.reset(seed)
  for index in range(attempts):
    log = base.AttemptLog(index, observation)
    while not log.done:
      view = base.View(tuple(past), log, memory)
      if seen is not None:
        seen.append(prompts.play(view)[0].content)
      result = environment.step(player.play(view))
      log.steps.append(base.Step(result.action, result))
    past.append(log)
    if log.success or index == attempts - 1:
      break
    view = base.View(tuple(past[:-1]), log, memory)
    if seen is not None:
      seen.append(prompts.reflect(view)[0].content)
    log.reflection, _ = prompts.parse_reflection(player.reflect(view))
    observation = environment.retry()
  return past


def pass_at(family, options, name, trials, memory="reflection_only"):
  """pass@1, 2, 3 of a player over `trials` tasks, cumulative over sequential attempts."""
  wins_K = np.zeros(3)
  for seed in range(trials):
    player = family.players[name](options, np.random.default_rng([seed, 1]))
    logs = play(family, options, player, seed, memory=memory)
    for k in range(3):
      wins_K[k] += any(log.success for log in logs[: k + 1])
  return wins_K / trials


def tokens(text, symbols):
  """Greedy longest match of a text over atomic symbols; raises where none fits."""
  found, ordered = [], sorted(symbols, key=len, reverse=True)
  while text:
    symbol = next((s for s in ordered if text.startswith(s)), None)
    if symbol is None:
      raise AssertionError(f"no symbol fits at {text[:30]!r}")
    found.append(symbol)
    text = text[len(symbol) :]
  return found
