"""Retrospex-like re-scoring: a frozen model proposes, a critic fitted to old trials has a say.

"Retrospex: language agent meets offline reinforcement learning critic" (2505.11807), reduced to what
EMPO2 (2602.23008) compares with: without the hand-made rules of its ScienceWorld agent. Trials are
played by the model as it is and kept; Q(state, action) is fitted to them offline (`ops.iql`); at test
time the model samples some responses a turn, and the one with the largest

    S = alpha_t p + (1 - alpha_t) Q,   alpha_t = max(floor, decay^t),   t = 0, 1, ... the turn

is played. p is a response's likelihood divided by the sum over the candidates, Q is min-max normalised
over them. So turn 0 is the model's alone, and the critic's say grows to 1 - floor.

Where ours differs from the published form: candidates are sampled, there they are beams, mapped to
admissible actions; p is the sequence's probability (likelihood="token": the geometric mean of its
tokens, as there, which long answers need), there min-max normalised too; Q reads embeddings of texts,
there an encoder of its own; Q - V there is Q here, which differ by a constant that min-max removes; no
reward is spread over the steps of a trial. An attempt that runs out of turns is over as any other.

Letters: C candidates of a turn. A transition is one turn: (state, action, reward, next state).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from memrl_jax.envs import prompting
from memrl_jax.envs.base import AttemptLog
from memrl_jax.memory import transitions
from memrl_jax.memory.embed import Embedder
from memrl_jax.methods import base
from memrl_jax.ops import iql
from memrl_jax.rollout import credit
from memrl_jax.rollout.trial import (
  Answer,
  Context,
  Generate,
  Program,
  Reading,
  VoidTrial,
  play,
)
from memrl_jax.types import Memo, Recall, Trial, Turn

LIKELIHOODS = ("sequence", "token")
_ROWS = (
  64  # pairs are scored, and texts padded, in powers of two from here on: few shapes to compile
)


@dataclasses.dataclass(frozen=True)
class RetrospexConfig:
  """How candidates are weighed, and how Q is fitted.

  fit_every: updates between fits of `steps` steps, each going on from the last; 0: one, at the end.
  capacity: transitions kept, the newest. polyak: the pace of the slow copy of Q.
  """

  attempts: int = 1
  eval_attempts: int = 1
  candidates: int = 4
  likelihood: str = "sequence"
  floor: float = 0.5
  decay: float = 0.9
  expectile: float = 0.7
  gamma: float = 0.99
  steps: int = 2000
  batch: int = 128
  learning_rate: float = 1e-3
  polyak: float = 0.005
  hidden: int = 128
  capacity: int = 65_536
  fit_every: int = 0

  def __post_init__(self):
    if self.attempts != 1 or self.eval_attempts < 1:
      raise ValueError(
        f"Retrospex plays 1 attempt in a training trial and at least 1 in evaluation, not "
        f"{self.attempts} and {self.eval_attempts} (config.method.attempts, config.method.eval_attempts)"
      )
    if self.likelihood not in LIKELIHOODS:
      raise ValueError(
        f"likelihood {self.likelihood!r} is not known; choose one of {', '.join(LIKELIHOODS)} "
        "(config.method.likelihood)"
      )
    for name in ("floor", "decay", "gamma"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(
          f"{name} {getattr(self, name)} is not in [0, 1]; change config.method.{name}"
        )
    for name in ("expectile", "polyak"):
      if not 0 < getattr(self, name) < 1:
        raise ValueError(
          f"{name} {getattr(self, name)} is not between 0 and 1; change config.method.{name}"
        )
    for name in ("candidates", "steps", "batch", "hidden", "capacity"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"{name} must be at least 1, not {getattr(self, name)} (config.method.{name})"
        )
    if self.learning_rate <= 0 or self.fit_every < 0:
      raise ValueError(
        f"learning_rate must be above 0 and fit_every at least 0, not {self.learning_rate} and "
        f"{self.fit_every} (config.method)"
      )


# Choosing.


def state(log: AttemptLog) -> str:
  """The situation that an action is valued in: what is seen, then the goal."""
  return f"{log.now.text}\n{log.initial.goal}".strip()


def action(response: str) -> str:
  """The action that a response says, as text: what the action tags hold, or all of it.

  Not `turn.action`, which is known only of a response that was played: tried and proposed actions
  must be spelled alike.
  """
  body = prompting.action_body(response)
  return " ".join((response.lower() if body is None else body).split())


def alpha(turn: int, *, floor: float, decay: float) -> float:
  """The weight of the model's own likelihood, max(floor, decay^t)."""
  return max(floor, decay**turn)


def rescore(logp_C: np.ndarray, q_C: np.ndarray, weight: float) -> np.ndarray:
  """S = weight p + (1 - weight) (Q - min Q) / (max Q - min Q),   p = e^logp / sum e^logp.

  Where all Q are equal they say nothing: 0 for all.
  """
  p_C = np.exp(logp_C - logp_C.max())
  spread = q_C.max() - q_C.min()
  value_C = (q_C - q_C.min()) / spread if spread > 0 else np.zeros_like(q_C)
  return weight * p_C / p_C.sum() + (1 - weight) * value_C


class Chooser(Context):
  """A trial's context that answers with the best of several samples; `terms` says why, turn by turn."""

  def __init__(self, ctx: Context, config: RetrospexConfig):
    super().__init__(ctx.trial, ctx.prompts, ctx.horizon)
    self.config, self.terms = config, []

  async def ask(self, request: Generate) -> Answer:
    """Samples `candidates` answers, of which the first is the one that a plain context gets."""
    config, found = self.config, {}
    for draw in range(config.candidates):
      answer = await super().ask(request._replace(draw=draw))
      said, logp = action(answer.sample.text), self._logp(answer)
      if said not in found or logp > found[said][0]:  # its likeliest response stands for an action
        found[said] = (logp, answer)
    situation = state(request.view.current)
    memos = [memo for said in found for memo in await self.recall(situation, said)]
    q_C = np.array([memo.score for memo in memos] or [0.0] * len(found))
    logp_C = np.array([logp for logp, _ in found.values()])
    weight = alpha(request.turn, floor=config.floor, decay=config.decay)
    best = int(np.argmax(rescore(logp_C, q_C, weight)))
    self.terms.append(
      {
        "candidates": float(len(found)),
        "alpha": weight,
        "q": float(q_C[best]),
        "changed": float(best != int(np.argmax(logp_C))),
      }
    )
    return list(found.values())[best][1]

  def _logp(self, answer: Answer) -> float:
    logps = answer.sample.logps
    if not len(logps):
      raise VoidTrial("re-scoring needs the log-probs of responses; use a policy that returns them")
    return float(np.sum(logps) if self.config.likelihood == "sequence" else np.mean(logps))


def trial(config: RetrospexConfig, *, attempts: int, rescored: bool) -> Program:
  """Independent attempts at a task until the first success, by the model alone or `rescored`."""

  async def run(ctx: Context) -> None:
    chooser = Chooser(ctx, config)
    player = chooser if rescored else ctx
    for number in range(attempts):
      attempt = AttemptLog(number, await player.open())
      await play(player, attempt, (), "reflection_only", reading=Reading(key=state))
      if attempt.success:
        break
    if rescored:
      for turn, terms in zip(ctx.trial.turns, chooser.terms, strict=True):
        turn.advantage_terms = terms

  return run


def summary(trials: Sequence[Trial]) -> dict[str, float]:
  """Of the turns that were re-scored: the share whose choice is not the likeliest candidate."""
  terms = [
    turn.advantage_terms
    for trial in trials
    if trial.void is None
    for turn in trial.turns
    if "changed" in turn.advantage_terms
  ]
  return {"changed": float(np.mean([one["changed"] for one in terms]))} if terms else {}


# Remembering.


class Remembered:
  """Transitions and the critic fitted to them (base.Remembered); answers what an action is worth.

  Rewards are fitted in units of the largest one, and Q is given back in the environment's.
  """

  def __init__(self, config: RetrospexConfig, embedder: Embedder, seed: int, updates: int):
    self.config, self._embedder, self._updates = config, embedder, updates
    self._key = jax.random.key(seed)
    self._kept = transitions.Transitions(embedder, config.capacity)
    self.reset()

  @property
  def reader(self) -> Remembered:
    return self

  observer = reader  # reading leaves no trace

  def write(self, trials: Sequence[Trial]) -> dict[str, float]:
    """Keeps the transitions of one update, fits where it is due; returns metrics. Void trials never."""
    for one in trials:
      if one.void is None:
        for _, attempt in itertools.groupby(one.turns, key=lambda turn: turn.attempt):
          self._append([turn for turn in attempt if turn.phase == "play"])
    self._kept.trim()
    self._done += 1
    numbers = {
      "memory/transitions": float(len(self._kept)),
      "memory/texts": float(self._kept.texts),
    }
    every = self.config.fit_every
    if len(self._kept) and (self._done == self._updates or (every and self._done % every == 0)):
      numbers["memory/q_loss"] = self._fit()
    return numbers

  def _append(self, turns: Sequence[Turn]) -> None:
    actions = [action(turn.sample.text) for turn in turns]
    self._kept.append([turn.key for turn in turns], actions, [turn.reward for turn in turns])

  def _fit(self) -> float:
    c, kept = self.config, self._kept
    self._scale = float(np.abs(kept.rewards_N).max()) or 1.0
    state_N, action_N, next_N, over_N = _padded(kept.links_N4, c.capacity).T
    data = iql.Transitions(
      _padded(kept.table_UD, _size(kept.texts)),
      state_N,
      action_N,
      next_N,
      _padded(kept.rewards_N / np.float32(self._scale), c.capacity),
      over_N.astype(bool),
    )
    self._critic, loss = iql.fit(
      self._critic, data, len(kept), jax.random.fold_in(self._key, self._done),
      steps=c.steps, batch=min(c.batch, c.capacity), tau=c.expectile, gamma=c.gamma,
      learning_rate=c.learning_rate, polyak=c.polyak,
    )  # fmt: skip
    self._fits += 1
    return float(loss)

  def recall(self, asks: Sequence[Recall]) -> list[tuple[Memo, ...]]:
    """What an action (`query`) is worth in a state (`scope`); () before the first fit."""
    if not self._fits:
      return [()] * len(asks)
    size = _size(len(asks))
    states = _padded(self._embedder.embed([ask.scope for ask in asks]), size)
    actions = _padded(self._embedder.embed([ask.query for ask in asks]), size)
    q = np.asarray(iql.score(self._critic, states, actions))[: len(asks)] * self._scale
    return [
      (Memo(0, self._fits, ask.query, float(value), 1.0),)
      for ask, value in zip(asks, q, strict=True)
    ]

  def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    leaves = jax.tree.leaves(self._critic)
    weights = {f"critic{n}": np.asarray(leaf) for n, leaf in enumerate(leaves)}
    rest = {"done": self._done, "fits": self._fits, "scale": self._scale}
    return self._kept.state() | weights, rest

  def load(self, arrays: dict[str, np.ndarray], rest: dict[str, Any]) -> None:
    self._done, self._fits, self._scale = rest["done"], rest["fits"], rest["scale"]
    self._kept.load(arrays)
    tree = jax.tree.structure(self._critic)
    self._critic = tree.unflatten([arrays[f"critic{n}"] for n in range(tree.num_leaves)])

  def reset(self) -> None:
    self._done, self._fits, self._scale = 0, 0, 1.0
    self._kept.clear()
    self._critic = iql.init(self._key, self._embedder.dimension, self.config.hidden)

  def close(self) -> None:
    """Nothing is held open."""


def _size(rows: int) -> int:
  return max(_ROWS, 1 << max(rows - 1, 0).bit_length())


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
  out = np.zeros((size, *rows.shape[1:]), rows.dtype)
  out[: len(rows)] = rows
  return out


def make(
  config: RetrospexConfig,
  credit_config: credit.CreditConfig,
  shape: credit.Shape,
  memory: Remembered,
) -> base.Method:
  """The method; the arms differ only in which of the candidates is played."""
  n = config.eval_attempts
  return base.Method(
    trial=trial(config, attempts=1, rescored=False),
    credit=credit.make(credit_config, shape),
    remember=memory.write,
    arms={
      "none": trial(config, attempts=n, rescored=False),
      "memory": trial(config, attempts=n, rescored=True),
    },
    memory=memory,
    summary=summary,
  )
