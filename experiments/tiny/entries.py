"""Imitation data of the rooms: an actor that reads one entry of experience, and the writer of entries.

Scripted players of mixed quality play tasks of families that training never sees. An episode is shown
no entry, a good one, one that a scripted writer made of another episode of the theme, or one of another
theme. The writer's rows are such episodes with the scripted answer about them, and lists to merge.
All prompts are rendered by the code that renders rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.envs import base as env_base
from memrl_jax.envs import rooms_world as world
from memrl_jax.envs import rooms_writers as writers
from memrl_jax.envs.prompting import parse_reflection, write
from memrl_jax.types import Message, Sample, Turn

SHOWN = {"none": 0.35, "good": 0.25, "written": 0.32, "stray": 0.08}  # what an episode is shown
FIRST = 24  # episodes of a family that are only written about: every theme comes up
MERGES = 0.3  # share of the writer's rows

Tips = tuple[str, ...]


class Played(NamedTuple):
  """An episode, what it was shown, and the whole responses."""

  log: env_base.AttemptLog
  tips: Tips
  responses: list[str]


def attempt(family, options, player: env_base.Player, seed: int, shown: Tips) -> Played:
  environment = family.make(options)
  log, responses = env_base.AttemptLog(0, environment.reset(seed)), []
  while not log.done:
    responses.append(player.play(env_base.View((), log, tips=shown)))
    result = environment.step(responses[-1])
    log.steps.append(env_base.Step(result.action, result))
  return Played(log, shown, responses)


def secret(
  options: world.Options, theme: str, parts: Sequence[str] = ("key", "goal", "door")
) -> str:
  """The entry that says where things of a theme are."""
  hidden = world.secrets(options.kind, options.family, options.side)[theme]
  first = "key" if options.kind == "key" else "goal"
  places = {first: hidden.treasure, "door": hidden.door}
  facts = [f" {name}{write(cell)}" for name, cell in places.items() if cell and name in parts]
  return f"goal {theme}{''.join(facts)}"


def episodes(
  family, options: world.Options, make, count: int, rng: np.random.Generator
) -> list[Played]:
  """Episodes of one family; entries are about earlier ones of their theme."""
  played, written = [], {theme: [] for theme in world.THEMES}
  for number in range(FIRST + count):
    seed = env_base.train_seed(rng)
    theme = world.draw(options, seed).theme
    kind = "none" if number < FIRST else str(rng.choice(list(SHOWN), p=list(SHOWN.values())))
    other = str(rng.choice([name for name in world.THEMES if name != theme]))
    source = written[other if kind == "stray" else theme]
    shown: Tips = ()
    if kind == "good":
      parts = (("key", "goal", "door"), ("key", "goal", "door"), ("door",), ("key", "goal"))
      text = secret(options, theme, parts[rng.integers(4)])
      shown = (text,) if writers.read(text) else ()
    elif kind != "none" and source:
      shown = (source[rng.integers(len(source))],)
    one = attempt(family, options, make(options, rng), seed, shown)
    for useful in (0.0, 0.7):  # entries of no use, and others
      answer = writers.Writer(rng, useful, 0, 0).distill(env_base.View((), one.log))
      written[theme].append(parse_reflection(answer)[0].removeprefix("add:"))
    if number >= FIRST:
      played.append(one)
  return played


def row(messages: list[Message], answer: str, index: int, shown: Tips) -> Turn:
  sample = Sample(answer, np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32))
  return Turn(0, "play", index, messages, sample, "", True, 0.0, "", memory=shown)


def actor(family, every: Sequence[world.Options], make, count: int, seed: int) -> list[list[Turn]]:
  """The rows of `count` episodes for each options in `every`, by episode."""
  rng, units = np.random.default_rng([seed, 21]), []
  for options in every:
    prompts = family.prompts(options)
    for log, shown, responses in episodes(family, options, make, count, rng):
      before = [env_base.AttemptLog(0, log.initial, log.steps[:n]) for n in range(len(responses))]
      views = [env_base.View((), so_far, tips=shown) for so_far in before]
      units.append(
        [
          row(prompts.play(v), r, n, shown)
          for n, (v, r) in enumerate(zip(views, responses, strict=True))
        ]
      )
  return units


def writer(family, every: Sequence[world.Options], make, count: int, seed: int) -> list[list[Turn]]:
  """Rows of the writer, each a unit of its own: `count` episodes for each options, and lists to merge."""
  rng, units = np.random.default_rng([seed, 22]), []
  for options in every:
    prompts, scripted = family.prompts(options), writers.Writer(rng)
    for log, shown, _ in episodes(family, options, make, count, rng):
      view = env_base.View((), log, tips=shown)
      units.append([row(prompts.extract.distill(view), scripted.distill(view), 0, shown)])
    for _ in range(round(count * MERGES / (1 - MERGES))):
      texts = chunk(options, rng)
      units.append([row(prompts.extract.merge(texts), scripted.merge(texts), 0, ())])
  return units


def chunk(options: world.Options, rng: np.random.Generator) -> Tips:
  """2 to 5 entries as a bank may hold them: repeats, pieces that fit together, contradictions, others."""
  themes = rng.choice(world.THEMES, size=rng.integers(1, 4), replace=False)
  texts: list[str] = []
  for _ in range(rng.integers(2, 6)):
    theme = str(rng.choice(themes))
    told = secret(options if rng.random() < 0.65 else _another(options, rng), theme)
    facts = [fact.text for fact in writers.read(told).facts] + list(writers.ADVICE.values())
    cells = rng.integers(1, options.side + 1, size=(3, 2)).tolist()
    facts += [
      f" {kind}{write(cell)}" for kind, cell in zip(("start", "wall", "bad"), cells, strict=True)
    ]
    chosen = rng.permutation(len(facts))[: rng.integers(1, 3)]
    entry = writers.read(f"goal {theme}{''.join(facts[i] for i in chosen)}")
    repeat = texts and rng.random() < 0.3
    texts.append(texts[rng.integers(len(texts))] if repeat else entry.write())
  return tuple(texts)


def _another(options: world.Options, rng: np.random.Generator) -> world.Options:
  return world.Options(kind=options.kind, family=int(rng.integers(world.RESERVED, world.FAMILIES)))
