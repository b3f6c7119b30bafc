"""The gates of the rooms' warm starts: what an actor makes of an entry, a writer of an attempt."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from experiments.tiny import entries, tips
from memrl_jax.envs import base as env_base
from memrl_jax.envs import prompting
from memrl_jax.envs import rooms_world as world
from memrl_jax.envs import rooms_writers as writers
from memrl_jax.memory import replies
from memrl_jax.models import tiny, weights
from memrl_jax.rollout import policies
from memrl_jax.sampling import chat, engine
from memrl_jax.types import Message

TEMPERATURES = (1.0, 0.7)
ARMS = ("none", "perfect", "place", "useless", "skill", "stray", "written", "chosen")
CHARS = 200  # of an entry


def actor(
  family: env_base.Family,
  options: world.Options,
  sampler: engine.Engine,
  text: chat.Chat,
  seeds: Sequence[int],
  seed: int,
  arms: Sequence[str] = ARMS,
  temperatures: Sequence[float] = TEMPERATURES,
) -> dict[str, dict[str, float]]:
  """Single attempts by the entry in the prompt and the temperature ("perfect 0.7").

  none; perfect: all places of the theme; place: only the key or the hatch; useless: one or two true facts of
  an earlier attempt that change from task to task; skill: that kicking does nothing; stray: all places of
  another theme; written, chosen: by the shipped writer from a random attempt, any or only useful ones.
  """
  every = [world.draw(options, s).theme for s in seeds]
  logs = random_logs(family, options, seeds, seed)
  useless = [
    prompting.parse_reflection(writers.Writer(rng, 0, 0, 0).distill(env_base.View((), log)))[0][4:]
    for rng, log in ((np.random.default_rng([seed, n]), log) for n, log in enumerate(logs))
  ]
  given = {
    "none": [()] * len(seeds),
    "perfect": [(entries.secret(options, theme),) for theme in every],
    "place": [(entries.secret(options, theme, ("key", "goal")),) for theme in every],
    "useless": [(entry,) for entry in useless],
    "skill": [(f"goal {theme} kick bad",) for theme in every],
    "stray": [
      (entries.secret(options, world.THEMES[world.THEMES.index(theme) - 1]),) for theme in every
    ],
  }
  if "rooms_writer" in tiny.shipped() and {"written", "chosen"} & set(arms):
    given |= bank(family, options, text, seeds, seed)
  result = {}
  for temperature in temperatures:
    sampling = policies.SamplingConfig(temperature, 1.0, 0, 16, 24)
    policy = policies.LanguagePolicy(sampler, text, sampling, max(sampler.config.buckets))
    for name in filter(given.get, arms):
      trials, _ = tips.run(
        family, options, policy, seeds, dict(enumerate(given[name])), (seed, 99), remark=False
      )
      attempts = [trial.attempts[0] for trial in trials]
      turns = [turn for trial in trials for turn in trial.turns]
      result[f"{name} {temperature}"] = {
        "success": float(np.mean([attempt.success for attempt in attempts])),
        "score": float(np.mean([attempt.score for attempt in attempts])),
        "turns": float(np.mean([attempt.turns for attempt in attempts])),
        "valid": float(np.mean([turn.valid for turn in turns])),
        "longest": max(len(turn.sample.prompt_ids) for turn in turns),
      }
  return result


def random_logs(family, options, seeds: Sequence[int], seed: int) -> list[env_base.AttemptLog]:
  """Attempts of the mixture at other tasks, one for each of these, of its theme."""
  logs = []
  for number, s in enumerate(seeds):
    theme = world.draw(options, s).theme
    rng = np.random.default_rng([seed, number, 41])
    player = family.players["mixture"](options, rng)
    logs.append(entries.attempt(family, options, player, log_seed(options, theme, rng), ()).log)
  return logs


def ask(
  sampler: engine.Engine,
  text: chat.Chat,
  prompts: Sequence[list[Message]],
  seed: int,
  temperature: float = 1.0,
) -> list[str]:
  """The writer's answers."""
  keys = jax.random.key_data(jax.random.split(jax.random.key(seed), len(prompts)))
  requests = [
    engine.Request(np.asarray(key), text.encode(prompt), 28, temperature, stop=text.stop_ids)
    for key, prompt in zip(keys, prompts, strict=True)
  ]
  return [text.decode(done.ids) for done in sampler.generate(requests)]


def body(answer: str) -> str:
  return prompting.parse_reflection(answer)[0]


def bank(
  family, options, text: chat.Chat, seeds: Sequence[int], seed: int
) -> dict[str, list[tuple[str, ...]]]:
  """What the shipped writer makes of random attempts at the themes of these tasks: any answer, and the first
  useful one of its theme."""
  sampler = engine.Engine(
    *weights.load_directory(tiny.directory("rooms_writer")), engine.EngineConfig(slots=128)
  )
  prompts = family.prompts(options)
  logs = random_logs(family, options, seeds, seed + 1)
  answers = ask(
    sampler, text, [prompts.extract.distill(env_base.View((), log)) for log in logs], seed
  )
  written = [tuple(op.text for op in operations(answer, 0)[:1]) for answer in answers]
  useful: dict[str, list[str]] = {}
  for (line,) in filter(None, written):
    entry = writers.read(line)
    if entry and entry.useful:
      useful.setdefault(entry.theme, []).append(line)
  rng = np.random.default_rng([seed, 5])
  chosen = []
  for s in seeds:
    found = useful.get(world.draw(options, s).theme, [])
    chosen.append((found[rng.integers(len(found))],) if found else ())
  return {"written": written, "chosen": chosen}


def writer(
  family,
  options: world.Options,
  sampler: engine.Engine,
  text: chat.Chat,
  seeds: Sequence[int],
  seed: int,
) -> dict[str, dict[str, float]]:
  """Answers about attempts of the mixture, with and without a shown entry, and about lists to merge.

  parsable; `true`: share of stated facts that stand in the log (or in the entry that is updated); `useful`:
  share of written entries that help with later tasks; `updates`, `returns`: share of answers;
  Merges: `parsable`, and `scripted`: word for word as the scripted writer.
  """
  prompts = family.prompts(options)
  free = [env_base.View((), log) for log in random_logs(family, options, seeds, seed)]
  views = {
    "free": free,
    "guided": [guided(family, options, view, seed + n) for n, view in enumerate(free)],
  }
  result, answers = {}, []
  for name in views:
    requests = [prompts.extract.distill(view) for view in views[name]]
    answers += ask(sampler, text, requests, seed + len(answers))
    result[name] = _judged(answers[-len(requests) :], views[name])
  result["both"] = _judged(answers, views["free"] + views["guided"])
  rng = np.random.default_rng([seed, 44])
  chunks = [entries.chunk(options, rng) for _ in seeds]
  answers = ask(sampler, text, [prompts.extract.merge(texts) for texts in chunks], seed + 1)
  result["merge"] = {
    "parsable": float(np.mean([_merges(a, len(c)) for a, c in zip(answers, chunks, strict=True)])),
    "scripted": float(
      np.mean([a == writers.merged(c) for a, c in zip(answers, chunks, strict=True)])
    ),
    "longest": max(len(text.encode(prompts.extract.merge(texts))) for texts in chunks),
  }
  return result


def guided(
  family: env_base.Family, options: world.Options, free: env_base.View, seed: int
) -> env_base.View:
  """An attempt at another task of the theme that is shown all its places, or an entry about `free`."""
  rng = np.random.default_rng([seed, 43])
  theme = writers.theme(free.current)
  told = body(writers.Writer(rng, 0.5, 0, 0).distill(free)).removeprefix("add:")
  shown = (entries.secret(options, theme) if rng.random() < 0.5 else told,)
  player = family.players["mixture"](options, rng)
  at = log_seed(options, theme, rng)
  return env_base.View((), entries.attempt(family, options, player, at, shown).log, tips=shown)


def log_seed(options: world.Options, theme: str, rng: np.random.Generator) -> int:
  """A training seed of this theme."""
  return next(
    seed
    for seed in iter(lambda: env_base.train_seed(rng), None)
    if world.draw(options, seed).theme == theme
  )


def operations(answer: str, shown: int) -> Sequence[replies.Operation]:
  """What the answer about an attempt does to a bank."""
  return replies.parse(answer, shown, max_ops=1, chars=CHARS).operations


def _judged(answers: Sequence[str], views: Sequence[env_base.View]) -> dict[str, float]:
  parsed, facts, useful, kinds = [], [], [], []
  for answer, view in zip(answers, views, strict=True):
    read = replies.parse(answer, len(view.tips), max_ops=1, chars=CHARS)
    entries_ = [writers.read(op.text) for op in read.operations]
    parsed.append(not read.reason and None not in entries_)
    kinds.append(read.operations[0].kind if read.operations else "return")
    if parsed[-1] and entries_:
      (entry,), (op,) = entries_, read.operations
      old = writers.read(view.tips[op.places[0]]) if op.places else None
      stands = [*writers.known(view.current), *(old.facts if old else ())]
      mine = entry.theme == writers.theme(view.current)
      facts += [mine and fact in stands for fact in entry.facts]
      useful.append(entry.useful)
  return {
    "parsable": float(np.mean(parsed)),
    "true": float(np.mean(facts)),
    "useful": float(np.mean(useful)),
    "updates": float(np.mean([kind == "update" for kind in kinds])),
    "returns": float(np.mean([kind == "return" for kind in kinds])),
  }


def _merges(answer: str, shown: int) -> bool:
  """Whether the answer can be applied, and all that it writes are entries."""
  read = replies.parse_merge(answer, shown, chars=CHARS)
  texts = [op.text for op in read.operations if op.kind == "merge"]
  return not read.reason and all(writers.read(text) for text in texts)
