"""What Mem-pi's memory policy is paid: for speaking at all, and for what it says.

Mem-pi (2605.21463), whose text is not public; the definition is that of experiments/mempi.md. A group is
one context x: member 0 is forced to abstain, the others to generate a hint m_j.

    r_0 = R(x, nothing),  r_j = R(x, m_j) - beta |m_j| / Lmax,  V = mean_j r_j,  Delta = V - r_0
    decision   A_d(y_j) = Delta / std(r_0 .. r_{G-1}),  A_d(y_0) = -Delta / std(r_0 .. r_{G-1})
    content    A_c,j = (r_j - V) / std(r_1 .. r_{G-1}), let through by the gate g

Standard deviations are of the population. Letters: N groups, J members. Masks are boolean; a member
whose trial was void takes part in nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from memrl_jax.ops import masks

GATES = ("group", "rollout", "soft", "off")
EPS = 1e-6  # a spread below it is none; added before dividing


class Advantages(NamedTuple):
  """`used_N`: both branches were played and their rewards differ; all else is 0 where not.

  `open_NJ` is the gate as it was applied, 0 for member 0.
  """

  decision_NJ: jax.Array
  content_NJ: jax.Array
  open_NJ: jax.Array
  delta_N: jax.Array
  used_N: jax.Array


def regularised(
  return_NJ: jax.Array, length_NJ: jax.Array, *, weight: float, longest: int
) -> jax.Array:
  """The reward with the length regulariser, r_j - weight |m_j| / longest; an abstention has no length."""
  length_NJ = jnp.asarray(length_NJ).at[:, 0].set(0)
  return return_NJ - weight * length_NJ / longest


def advantages(
  reward_NJ: jax.Array,
  mask_NJ: jax.Array,
  *,
  gate: str = "group",
  threshold: float = 0.0,
  temperature: float = 0.1,
  normalise: bool = True,
) -> Advantages:
  """A_d and g A_c of every member.

  gate: "group" 1[Delta > threshold], "rollout" 1[r_j - r_0 > threshold], "soft"
    sigmoid((Delta - threshold) / temperature), "off" 1.
  normalise: divide by the standard deviations; without, A_d is Delta and A_c is r_j - V.
  """
  chex.assert_rank(reward_NJ, 2)
  chex.assert_equal_shape([reward_NJ, mask_NJ])
  if gate not in GATES:
    raise ValueError(f"gate {gate!r} is not known; choose one of {', '.join(GATES)}")
  reward_NJ, mask_NJ = masks.keep(reward_NJ, mask_NJ), jnp.asarray(mask_NJ)
  speaks_NJ = mask_NJ.at[:, 0].set(False)
  base_N, value_N = reward_NJ[:, 0], _mean(reward_NJ, speaks_NJ)
  delta_N = value_N - base_N
  spread_N, spread_hints_N = _std(reward_NJ, mask_NJ), _std(reward_NJ, speaks_NJ)
  used_N = mask_NJ[:, 0] & jnp.any(speaks_NJ, axis=1) & (spread_N >= EPS)
  decision_N = delta_N / (spread_N + EPS) if normalise else delta_N
  decision_NJ = jnp.where(speaks_NJ, decision_N[:, None], -decision_N[:, None])
  content_NJ = reward_NJ - value_N[:, None]
  if normalise:
    content_NJ = content_NJ / (spread_hints_N + EPS)[:, None]
  content_NJ = jnp.where((spread_hints_N >= EPS)[:, None], content_NJ, 0.0)
  open_NJ = {
    "group": jnp.broadcast_to((delta_N > threshold)[:, None], mask_NJ.shape),
    "rollout": reward_NJ - base_N[:, None] > threshold,
    "soft": jnp.broadcast_to(
      jax.nn.sigmoid((delta_N - threshold) / temperature)[:, None], mask_NJ.shape
    ),
    "off": mask_NJ,
  }[gate].astype(jnp.float32)
  used_NJ = used_N[:, None] & mask_NJ
  open_NJ = masks.keep(open_NJ, used_NJ & speaks_NJ)
  return Advantages(
    decision_NJ=masks.keep(decision_NJ, used_NJ),
    content_NJ=open_NJ * masks.keep(content_NJ, used_NJ & speaks_NJ),
    open_NJ=open_NJ,
    delta_N=jnp.where(used_N, delta_N, 0.0),
    used_N=used_N,
  )


class Factors(NamedTuple):
  """By what the advantages of each member's two rows are multiplied."""

  decision_NJ: jax.Array
  content_NJ: jax.Array


def balance(
  decision_NJ: jax.Array,
  content_NJ: jax.Array,
  *,
  decision_weight: float,
  content_weight: float,
) -> Factors:
  """Factors that make one mean over all tokens of the batch the mean over groups of

      w_d 1/2 [clip-term(y_0) + mean_j clip-term(y_j)]  +  w_c sum_j sum_t clip-term / sum_j |m_j|

  so that the gradient of the decision's logit is half of A_d however long the hints are, and however
  likely it is to speak. `decision_NJ` and `content_NJ` count the tokens of the rows that are in the
  batch (0: the row is not). Exact for every surrogate, all of which are linear in A > 0 and in A < 0.
  """
  chex.assert_equal_shape([decision_NJ, content_NJ])
  decision_NJ, content_NJ = jnp.asarray(decision_NJ, float), jnp.asarray(content_NJ, float)
  whole = jnp.sum(decision_NJ) + jnp.sum(content_NJ)
  in_batch_N = jnp.any(decision_NJ > 0, axis=1) | jnp.any(content_NJ > 0, axis=1)
  groups = jnp.maximum(jnp.sum(in_batch_N), 1)
  speaks_NJ = (decision_NJ > 0).at[:, 0].set(False)
  number_N = jnp.maximum(jnp.sum(speaks_NJ, axis=1), 1)
  share_NJ = jnp.where(speaks_NJ, 1 / number_N[:, None], 1.0)  # of the branch, for each member
  branch_NJ = decision_weight / 2 * share_NJ * whole / groups
  tokens_N = jnp.maximum(jnp.sum(content_NJ, axis=1), 1)
  said_N = content_weight * whole / (groups * tokens_N)
  return Factors(
    masks.keep(branch_NJ / jnp.maximum(decision_NJ, 1), decision_NJ > 0),
    masks.keep(jnp.broadcast_to(said_N[:, None], content_NJ.shape), content_NJ > 0),
  )


def _mean(value_NJ: jax.Array, mask_NJ: jax.Array) -> jax.Array:
  total_N = jnp.sum(masks.keep(value_NJ, mask_NJ), axis=1)
  return total_N / jnp.maximum(jnp.sum(mask_NJ, axis=1), 1)


def _std(value_NJ: jax.Array, mask_NJ: jax.Array) -> jax.Array:
  """Of the population, 0 for one or none."""
  centred_NJ = value_NJ - _mean(value_NJ, mask_NJ)[:, None]
  return jnp.sqrt(_mean(jnp.square(centred_NJ), mask_NJ))
