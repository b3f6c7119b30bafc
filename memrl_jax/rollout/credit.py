"""Credit assignment: from the rewards of finished trials to one advantage per trained turn.

The host lays the turns out in fixed shapes, `ops` does the maths under jit, the host writes back.
Letters: N trials, A attempts, T turns of an attempt, R rows (all turns, flat).

Statistics of an estimator are taken over the rows of one cluster (a group with several `trial.subgroup`s
is as many groups):
  episode term   the attempts of a group
  step term      turns of a group in the same state (and, by default, in the same attempt number)
  reflections    one cluster per group and slot, and no episode term
Reflections in the released form (`reflections="released"`) share one cluster over all slots and are
scored 0 in the episode term; experiments/lamer.md 1.5 tells what that costs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from memrl_jax.ops import advantages, anchors, returns
from memrl_jax.types import Trial

EPS = 1e-6  # added to a std before dividing; experiments/lamer.md 1.3
NORMALISE = ("mean", "mean_std", "mean_std_population")
ESTIMATORS = ("gigpo", "hgpo", "grpo", "rloo", "reinforce", "ppo")


class Shape(NamedTuple):
  """The most that one update can hold; fixes every array shape here."""

  trials: int
  attempts: int
  turns: int

  @property
  def rows(self) -> int:
    return self.trials * self.attempts * (self.turns + 1)


@dataclasses.dataclass(frozen=True)
class CreditConfig:
  """How returns become advantages. Defaults follow experiments/lamer.md 7; the release's values in brackets.

  cross_return: "paper" (Eq. 4) or "recursive" [released]; experiments/lamer.md 1.4.
  gamma_step, gamma_traj: discounts inside an attempt and from one attempt to the next.
  normalise: "mean" [released] subtracts the cluster's mean, "mean_std" also divides by its sample std,
    "mean_std_population" by that of the population.
  weighting: "trajectory" counts each attempt once, "row" each turn once [released].
  anchors: "attempt" (state and attempt number), "state" [released], or "similar".
  reflections: "slot" or "released".
  invalid_penalty: subtracted from the score of a malformed turn.
  batch_scale: divide all advantages of the batch by one std (keeps the step size comparable).

  Zero-spread rule: a group all of whose advantages are exactly 0 (equal rewards, or nobody to compare
  with) is left out of the batch, so that no entropy or KL term pulls on it, and is counted.
  """

  estimator: str = "gigpo"
  cross_return: str = "paper"
  gamma_step: float = 0.95
  gamma_traj: float = 0.9
  step_weight: float = 1.0
  normalise: str = "mean"
  weighting: str = "trajectory"
  anchors: str = "attempt"
  similarity: float = 0.95
  hgpo_contexts: int = 3
  hgpo_alpha: float = 1.0
  reflections: str = "slot"
  invalid_penalty: float = 0.5
  gae_lambda: float = 0.95
  batch_scale: bool = True

  def __post_init__(self):
    _one_of("estimator", self.estimator, ESTIMATORS)
    _one_of("cross_return", self.cross_return, ("paper", "recursive"))
    _one_of("normalise", self.normalise, NORMALISE)
    _one_of("weighting", self.weighting, ("trajectory", "row"))
    _one_of("anchors", self.anchors, ("attempt", "state", "similar"))
    _one_of("reflections", self.reflections, ("slot", "released"))
    for name in ("gamma_step", "gamma_traj", "gae_lambda", "similarity"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(f"{name} {getattr(self, name)} is not in [0, 1] (config.credit.{name})")
    if self.hgpo_contexts < 1:
      raise ValueError("hgpo needs at least 1 context length (config.credit.hgpo_contexts)")


def _one_of(name: str, value: str, allowed: Sequence[str]) -> None:
  if value not in allowed:
    raise ValueError(
      f"{name} {value!r} is not known; choose one of {', '.join(allowed)} (config.credit.{name})"
    )


class Rows(NamedTuple):
  """Flat rows of all trials, padded to a fixed length R; cluster ids are dense integers below R."""

  mask_R: np.ndarray
  play_R: np.ndarray  # True: playing; False: reflecting
  trial_R: np.ndarray
  attempt_R: np.ndarray
  index_R: np.ndarray
  group_R: np.ndarray  # task group
  slot_R: np.ndarray  # task group x attempt number x phase
  trajectory_R: np.ndarray  # trial x attempt
  anchor_KR: np.ndarray  # step clusters by context length; K is 1 but for hgpo
  penalty_R: np.ndarray
  value_R: np.ndarray  # the critic's estimate, 0 without one


def make(config: CreditConfig, shape: Shape) -> Callable[[Sequence[Trial]], dict[str, float]]:
  """The `credit` function of a method: sets `turn.advantage` and its terms, returns metrics."""
  estimate = jax.jit(functools.partial(_estimate, config, shape))

  def credit(trials: Sequence[Trial]) -> dict[str, float]:
    usable = [trial for trial in trials if trial.void is None]
    turns = [turn for trial in usable for turn in trial.turns]
    rows = layout(usable, config, shape)
    return_R, terms = jax.device_get(estimate(rows, *rewards(usable, shape)))
    total_R = np.where(rows.mask_R, np.sum(list(terms.values()), axis=0), 0.0)
    flat_R = _without_signal(config, rows, total_R)
    live_R = rows.mask_R & ~flat_R
    spread = float(total_R[live_R].std()) if live_R.any() else 0.0
    scale = 1.0 / max(spread, 1e-6) if config.batch_scale else 1.0
    for r, turn in enumerate(turns):
      turn.advantage = float(total_R[r] * scale) if turn.trained and not flat_R[r] else None
      turn.advantage_terms = {name: float(term[r]) for name, term in terms.items()}
      turn.value_target = float(total_R[r] + rows.value_R[r])
    return {
      "credit/zero_spread": _share_of_groups(rows, flat_R),
      "credit/return": float(return_R[rows.mask_R].mean()) if rows.mask_R.any() else 0.0,
      "credit/advantage_std": spread,
      "credit/cluster_size": _mean_cluster(rows),
    }

  return credit


def rewards(trials: Sequence[Trial], shape: Shape) -> tuple[np.ndarray, np.ndarray]:
  """reward_NAT of the played turns, novelty included, and mask_NAT of where there is one."""
  reward_NAT = np.zeros(shape, np.float32)
  mask_NAT = np.zeros(shape, bool)
  for n, trial in enumerate(trials):
    for turn in trial.turns:
      if turn.phase == "play":
        reward_NAT[n, turn.attempt, turn.index] = turn.reward + turn.intrinsic
        mask_NAT[n, turn.attempt, turn.index] = True
  return reward_NAT, mask_NAT


def layout(trials: Sequence[Trial], config: CreditConfig, shape: Shape) -> Rows:
  """Puts every turn of every trial in a flat row, with the clusters it belongs to."""
  turns = [turn for trial in trials for turn in trial.turns]
  owner = [n for n, trial in enumerate(trials) for _ in trial.turns]
  groups = [(trials[n].group, trials[n].subgroup) for n in owner]
  pairs = list(zip(owner, turns, strict=True))

  def pad(values: Sequence, dtype: type) -> np.ndarray:
    array = np.zeros(shape.rows, dtype)
    array[: len(values)] = values
    return array

  def ids(keys: Sequence) -> np.ndarray:
    return pad(anchors.exact_clusters(keys), np.int32)

  return Rows(
    mask_R=pad([turn.trained for turn in turns], bool),
    play_R=pad([turn.phase == "play" for turn in turns], bool),
    trial_R=pad(owner, np.int32),
    attempt_R=pad([turn.attempt for turn in turns], np.int32),
    index_R=pad([turn.index for turn in turns], np.int32),
    group_R=ids(groups),
    slot_R=ids(
      [(group, turn.attempt, turn.phase) for group, (_, turn) in zip(groups, pairs, strict=True)]
    ),
    trajectory_R=ids([(n, turn.attempt, turn.phase) for n, turn in pairs]),
    anchor_KR=np.stack([pad(row, np.int32) for row in _step_clusters(pairs, groups, config)]),
    penalty_R=pad([0.0 if turn.valid else config.invalid_penalty for turn in turns], np.float32),
    value_R=pad([turn.value for turn in turns], np.float32),
  )


def _step_clusters(
  pairs, groups: Sequence[tuple[int, str]], config: CreditConfig
) -> Sequence[np.ndarray]:
  """Cluster ids of the step term, one array per context length."""
  keys = []
  for (_, turn), group in zip(pairs, groups, strict=True):
    if turn.phase == "reflect":
      keys.append((group, turn.phase, turn.attempt if config.reflections == "slot" else None))
    else:
      keys.append((group, turn.anchor, turn.attempt if config.anchors == "attempt" else None))
  if config.estimator == "hgpo":
    trajectories = [(n, turn.attempt, turn.phase) for n, turn in pairs]
    return anchors.context_clusters(groups, trajectories, keys, contexts=config.hgpo_contexts)
  if config.anchors == "similar":
    pools = [key if key[1] == "reflect" else (key[0], "play") for key in keys]
    texts = [turn.anchor for _, turn in pairs]
    return [anchors.similarity_clusters(pools, texts, config.similarity)]
  return [anchors.exact_clusters(keys)]


def _estimate(config: CreditConfig, shape: Shape, rows: Rows, reward_NAT, mask_NAT):
  """Returns of all rows and the terms of their advantage: the jitted part."""
  cross_returns = {
    "paper": returns.cross_episode_returns_paper,
    "recursive": returns.cross_episode_returns_recursive,
  }[config.cross_return]
  cross = cross_returns(
    reward_NAT, mask_NAT, gamma_step=config.gamma_step, gamma_traj=config.gamma_traj
  )
  return_R = jnp.where(
    rows.play_R,
    cross.play_NAT[rows.trial_R, rows.attempt_R, rows.index_R],
    cross.reflect_NA[rows.trial_R, rows.attempt_R],
  )
  first_R = jnp.where(rows.play_R, cross.play_NAT[rows.trial_R, rows.attempt_R, 0], return_R)
  own_R = jnp.where(rows.play_R, reward_NAT.sum(-1)[rows.trial_R, rows.attempt_R], 0.0)
  estimator = _ESTIMATORS[config.estimator]
  paid = Paid(reward_NAT, mask_NAT, *(x - rows.penalty_R for x in (return_R, first_R, own_R)))
  return return_R, estimator(config, shape, rows, paid)


class Paid(NamedTuple):
  """What rows were paid, less the penalty of malformed ones.

  return_R: cross-episode return of this turn. first_R: of its attempt's first turn (a reflection:
  its own). own_R: undiscounted reward of its own attempt alone (a reflection: 0).
  """

  reward_NAT: jax.Array
  mask_NAT: jax.Array
  return_R: jax.Array
  first_R: jax.Array
  own_R: jax.Array


def _gigpo(config: CreditConfig, shape: Shape, rows: Rows, paid: Paid) -> dict[str, jax.Array]:
  """experiments/lamer.md 1.5: own attempt against the group, plus cross-episode return against the anchor."""
  episode_R = rows.mask_R if config.reflections == "released" else rows.mask_R & rows.play_R
  return {
    "episode": _compare(config, shape, rows, paid.own_R, rows.group_R, episode_R),
    "step": config.step_weight
    * _normalise(
      config,
      shape,
      paid.return_R,
      rows.anchor_KR[0],
      advantages.row_weights(rows.mask_R),
      rows.mask_R,
    ),
  }


def _hgpo(config: CreditConfig, shape: Shape, rows: Rows, paid: Paid) -> dict[str, jax.Array]:
  step_R = advantages.hgpo(
    paid.return_R,
    rows.anchor_KR,
    rows.mask_R,
    num_clusters=shape.rows,
    alpha=config.hgpo_alpha,
    eps=EPS,
  )
  return {"step": step_R}


def _grpo(config: CreditConfig, shape: Shape, rows: Rows, paid: Paid) -> dict[str, jax.Array]:
  """One number per attempt, its cross-episode return, against the same attempt of the group."""
  return {"episode": _compare(config, shape, rows, paid.first_R, rows.slot_R, rows.mask_R)}


def _rloo(config: CreditConfig, shape: Shape, rows: Rows, paid: Paid) -> dict[str, jax.Array]:
  advantage_R = advantages.leave_one_out(
    paid.first_R,
    rows.slot_R,
    rows.trajectory_R,
    _weights(config, shape, rows, rows.mask_R),
    rows.mask_R,
    num_groups=shape.rows,
    num_trajectories=shape.rows,
  )
  return {"episode": advantage_R}


def _reinforce(config: CreditConfig, shape: Shape, rows: Rows, paid: Paid) -> dict[str, jax.Array]:
  return {"return": jnp.where(rows.mask_R, paid.return_R, 0.0)}


def _ppo(config: CreditConfig, shape: Shape, rows: Rows, paid: Paid) -> dict[str, jax.Array]:
  """GAE over all turns of a trial, each reflection a turn at the end of its attempt.

  The discount is gamma_traj from an attempt's last turn onwards to the next attempt, paid once, and
  a reflection leads to the next attempt undiscounted. (GAE is recursive by its nature: the `paper`
  reading of the cross-episode return has no counterpart here.)
  """
  N, A, T = shape
  place_R = jnp.where(rows.play_R, rows.index_R, T)

  def lay(value_R):
    ids = (rows.trial_R, rows.attempt_R, place_R)
    return jnp.zeros((N, A, T + 1)).at[ids].add(jnp.where(rows.mask_R, value_R, 0.0))

  mask_NL = lay(jnp.ones(shape.rows)).reshape(N, -1) > 0
  play_NAT = returns.attempt_discounts(
    paid.mask_NAT, gamma_step=config.gamma_step, gamma_traj=config.gamma_traj
  ).reshape(N, A, T)
  discount_NL = jnp.pad(play_NAT, ((0, 0), (0, 0), (0, 1)), constant_values=1.0).reshape(N, -1)
  reward_R = jnp.where(
    rows.play_R, paid.reward_NAT[rows.trial_R, rows.attempt_R, rows.index_R], 0.0
  )
  reward_NL = lay(reward_R - rows.penalty_R).reshape(N, -1)
  value_NL = lay(rows.value_R).reshape(N, -1)
  gae_NL = advantages.gae_discounted(
    reward_NL, value_NL, discount_NL, mask_NL, lam=config.gae_lambda
  )
  gae_R = gae_NL.reshape(N, A, T + 1)[rows.trial_R, rows.attempt_R, place_R]
  return {"gae": jnp.where(rows.mask_R, gae_R, 0.0)}


_ESTIMATORS = {
  "gigpo": _gigpo,
  "hgpo": _hgpo,
  "grpo": _grpo,
  "rloo": _rloo,
  "reinforce": _reinforce,
  "ppo": _ppo,
}


def _weights(config: CreditConfig, shape: Shape, rows: Rows, mask_R) -> jax.Array:
  if config.weighting == "row":
    return advantages.row_weights(mask_R)
  return advantages.trajectory_weights(rows.trajectory_R, mask_R, num_trajectories=shape.rows)


def _compare(config: CreditConfig, shape: Shape, rows: Rows, score_R, cluster_R, mask_R):
  """Score against its cluster, attempts or turns weighing the same."""
  weight_R = _weights(config, shape, rows, mask_R)
  return _normalise(config, shape, score_R, cluster_R, weight_R, mask_R)


def _normalise(config: CreditConfig, shape: Shape, score_R, cluster_R, weight_R, mask_R):
  if config.normalise == "mean":
    return advantages.group_mean(score_R, cluster_R, weight_R, mask_R, num_groups=shape.rows)
  divided = {
    "mean_std": advantages.group_mean_std,
    "mean_std_population": advantages.group_mean_std_population,
  }[config.normalise]
  return divided(score_R, cluster_R, weight_R, mask_R, num_groups=shape.rows, eps=EPS)


def _without_signal(config: CreditConfig, rows: Rows, total_R: np.ndarray) -> np.ndarray:
  """Rows of the groups to which the zero-spread rule applies (see CreditConfig)."""
  if config.estimator in ("ppo", "reinforce"):  # compared with something outside the group
    return np.zeros_like(rows.mask_R)
  signal = np.bincount(rows.group_R, (total_R != 0) & rows.mask_R, len(total_R)) > 0
  return rows.mask_R & ~signal[rows.group_R]


def _share_of_groups(rows: Rows, flat_R: np.ndarray) -> float:
  groups = np.unique(rows.group_R[rows.mask_R])
  return len(np.unique(rows.group_R[flat_R])) / max(len(groups), 1)


def _mean_cluster(rows: Rows) -> float:
  """Mean size of a row's step cluster: GiGPO's health metric (1 means that no state ever recurs)."""
  ids = rows.anchor_KR[0][rows.mask_R]
  return float(np.bincount(ids)[ids].mean()) if len(ids) else 0.0
