"""Imitation data and gate of the hints' warm start: a frozen model that follows a hint in its prompt.

Scripted players play a town's tasks one after the other. A player is shown up to three remarks about its
kind of container, of any worth, some about another kind; or its own attempt before, as a retry; or
nothing. Every attempt ends with a remark. The rows are rendered by the code that renders rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.tiny import entries, tips
from memrl_jax.envs import base as env_base
from memrl_jax.envs import hints_players, prompting
from memrl_jax.envs import hints_world as world
from memrl_jax.rollout import policies
from memrl_jax.sampling import chat, engine
from memrl_jax.types import Turn

FIRST = 24  # attempts of a town before any is imitated; they write its first remarks
ALONE, RETRY = 0.3, 0.1  # shares of attempts: nothing shown; the attempt before at the same task
MOST = 3  # remarks in a prompt
STRAY = 0.3  # share of shown remarks that are about another kind
TEMPERATURES = (0.7, 1.0)
ARMS = ("none", "right", "misleading", "irrelevant", "held", "jammed", "right first", "right last")


def line(kin: world.Kin, procedure: world.Procedure) -> str:
  """What is remembered of a container that a procedure opened."""
  return f"won {kin.container} {kin.room} {' '.join(procedure)}"


def body(answer: str) -> str:
  return prompting.parse_reflection(answer)[0]


def episodes(
  family: env_base.Family, every: Sequence[world.Options], make, count: int, seed: int
) -> list[list[Turn]]:
  """The rows of `count` attempts for each options in `every`, by attempt."""
  rng, units = np.random.default_rng([seed, 23]), []
  for options in every:
    prompts = family.prompts(options)
    written: dict[world.Kin, list[str]] = {kin: [] for kin in world.town(options.town)}
    for number in range(FIRST + count):
      task_seed = env_base.train_seed(rng)
      kin = world.draw(options, task_seed).kin
      shown = choose(kin, written, rng) if number >= FIRST else ()
      retry = not shown and number >= FIRST and rng.random() < RETRY / ALONE
      player, past = make(options, rng), ()
      if retry:
        past = (attempt(family, options, player, task_seed).log,)
      one = attempt(family, options, player, task_seed, shown, past)
      answer = player.reflect(env_base.View(past, one.log))
      written[kin].append(body(answer))
      if number >= FIRST:
        memory = env_base.MEMORY_KINDS[rng.integers(3)]
        units.append(rows(prompts, one, past, memory, answer))
  return units


def attempt(
  family, options, player, seed: int, shown: tips.Tips = (), past: tuple = ()
) -> entries.Played:
  """An attempt; its log remembers what the player wrote of it."""
  environment = family.make(options)
  log, responses = env_base.AttemptLog(len(past), environment.reset(seed)), []
  while not log.done:
    responses.append(player.play(env_base.View(past, log, tips=shown)))
    result = environment.step(responses[-1])
    log.steps.append(env_base.Step(result.action, result))
  log.reflection = body(hints_players.remark(env_base.View((), log)))
  return entries.Played(log, shown, responses)


def rows(
  prompts: env_base.Prompts, one: entries.Played, past: tuple, memory: str, answer: str
) -> list[Turn]:
  found = []
  for n, response in enumerate(one.responses):
    so_far = env_base.AttemptLog(len(past), one.log.initial, one.log.steps[:n])
    view = env_base.View(past, so_far, memory, tips=one.tips)
    found.append(entries.row(prompts.play(view), response, n, one.tips))
  ended = prompts.tip(env_base.View(past, one.log))
  return [*found, entries.row(ended, answer, len(found), one.tips)]


def choose(
  kin: world.Kin, written: dict[world.Kin, list[str]], rng: np.random.Generator
) -> tips.Tips:
  """Remarks of earlier attempts in any order; as often the procedure of the family is one of them."""
  if rng.random() < ALONE:
    return ()
  others = [one for one in written if one != kin]
  found = []
  for _ in range(rng.integers(1, MOST + 1)):
    of = others[rng.integers(len(others))] if rng.random() < STRAY else kin
    right = rng.random() < 0.3 or not written[of]
    found.append(line(of, of.procedure) if right else written[of][rng.integers(len(written[of]))])
  return tuple(dict.fromkeys(filter(None, found)))


def gate(
  family: env_base.Family,
  options: world.Options,
  sampler: engine.Engine,
  text: chat.Chat,
  seeds: Sequence[int],
  seed: int,
  arms: Sequence[str] = (*ARMS, "own won", "own lost"),
  temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, dict[str, float]]:
  """Single attempts by the remarks in the prompt and the temperature ("right 0.7").

  right: the family's procedure won; misleading: what the report by another container of the family said
  won; irrelevant: right for another kind; held: a failure whose tool took hold; jammed: one whose tool was
  wrong; right first, right last: right before, or behind, two that mislead; own won, own lost: what the
  model wrote itself about attempts of "none" at other tasks of the family. `faithful`: remarks written word for
  word as the scripted one.
  """
  result = {}
  for temperature in temperatures:
    given = shown(options, seeds, seed)
    sampling = policies.SamplingConfig(temperature, 1.0, 0, 16, 24)
    policy = policies.LanguagePolicy(sampler, text, sampling, max(sampler.config.buckets))
    for name in arms:
      played, logs = tips.run(
        family, options, policy, seeds, dict(enumerate(given[name])), (seed, 99)
      )
      if name == "none":
        given |= own(options, seeds, played)
      attempts = [trial.attempts[0] for trial in played]
      turns = [turn for trial in played for turn in trial.turns]
      said = [body(hints_players.remark(env_base.View((), logs[t.group]))) for t in played]
      result[f"{name} {temperature}"] = {
        "success": float(np.mean([attempt.success for attempt in attempts])),
        "score": float(np.mean([attempt.score for attempt in attempts])),
        "valid": float(np.mean([turn.valid for turn in turns])),
        "faithful": float(np.mean([t.tip == s for t, s in zip(played, said, strict=True)])),
        "longest": max(len(turn.sample.prompt_ids) for turn in turns),
      }
  return result


def shown(options: world.Options, seeds: Sequence[int], seed: int) -> dict[str, list[tips.Tips]]:
  """What stands in each prompt of an arm that needs no model."""
  given: dict[str, list[tips.Tips]] = {arm: [] for arm in ARMS}
  kins = world.town(options.town)[: options.families]
  for number, task_seed in enumerate(seeds):
    rng = np.random.default_rng([seed, number, 45])
    task = world.draw(options, task_seed)
    kin, (tool, digit) = task.kin, task.kin.procedure
    tools = [one for one in world.TOOLS if one != tool]
    digits = [one for one in world.DIGITS if one != digit]
    wrong = [(t, d) for t in tools for d in world.DIGITS if (t, d) != task.report]
    right = line(kin, kin.procedure)
    lures = [line(kin, wrong[i]) for i in rng.permutation(len(wrong))[:2]]
    others = [one for one in kins if one != kin] or [kin]
    other = others[rng.integers(len(others))]
    where = f"lost {kin.container} {kin.room}"
    given["none"].append(())
    given["right"].append((right,))
    given["misleading"].append((lures[0],))
    given["irrelevant"].append((line(other, other.procedure),))
    given["held"].append((f"{where} {tool} {rng.choice(digits)} bad",))
    given["jammed"].append((f"{where} {rng.choice(tools)} bad",))
    given["right first"].append((right, *lures))
    given["right last"].append((*lures, right))
  return given


def own(options: world.Options, seeds: Sequence[int], played) -> dict[str, list[tips.Tips]]:
  """What the model wrote about other tasks of the family, of successes and of failures."""
  found: dict[tuple[world.Kin, bool], list[tuple[str, str]]] = {}
  for trial, task_seed in zip(played, seeds, strict=True):
    key = world.draw(options, task_seed).kin, trial.attempts[0].success
    found.setdefault(key, []).append((trial.task, trial.tip))
  given: dict[str, list[tips.Tips]] = {"own won": [], "own lost": []}
  for number, task_seed in enumerate(seeds):
    task = world.draw(options, task_seed)
    for name, success in (("own won", True), ("own lost", False)):
      others = [
        tip for other, tip in found.get((task.kin, success), []) if other != task.name and tip
      ]
      given[name].append((others[number % len(others)],) if others else ())
  return given
