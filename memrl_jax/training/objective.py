"""The loss of one micro-batch, as open (total, count) sums over its sampled tokens.

    L = surrogate(ratio, A) + kl_coef KL(pi || ref) - entropy_coef H(pi)          per token

aggregated over tokens, rows or a constant, and divided once when all micro-batches and devices have
spoken. Letters: B rows (all rows of the micro-batch), T sampled tokens of a row.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from memrl_jax.ops import aggregate, divergence, masks, ratios, surrogates

SURROGATES = ("ppo_clip", "dual_clip", "reinforce", "gspo", "cispo")
AGGREGATES = ("token_mean", "sequence_mean", "dr_grpo")


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Which surrogate and how it is aggregated.

  old_logps: "sampler" takes the log-probs recorded at sampling as pi_old; "trainer" recomputes them
    before the update, and corrects for the sampler by truncated importance sampling up to `tis_cap`.
  dual_bound: ratio bound for negative advantages (dual clip only).
  value_coef: weight of the critic's squared error (PPO); the critic has its own weights.
  """

  surrogate: str = "dual_clip"
  eps_low: float = 0.2
  eps_high: float = 0.2
  dual_bound: float = 3.0
  aggregate: str = "token_mean"
  entropy_coef: float = 0.0
  kl_coef: float = 0.0
  kl: str = "k3"
  old_logps: str = "sampler"
  tis_cap: float = 2.0
  value_coef: float = 0.5

  def __post_init__(self):
    for name, allowed in (
      ("surrogate", SURROGATES),
      ("aggregate", AGGREGATES),
      ("kl", ("k1", "k2", "k3")),
      ("old_logps", ("sampler", "trainer")),
    ):
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.loss.{name})"
        )
    if not (0 < self.eps_low < 1 and self.eps_high > 0):
      raise ValueError(
        f"clip range needs 0 < eps_low < 1 and eps_high > 0, not {self.eps_low} and {self.eps_high} "
        "(config.loss.eps_low, config.loss.eps_high)"
      )
    if self.dual_bound <= 1 + self.eps_high:
      raise ValueError(
        f"dual_bound {self.dual_bound} must be above 1 + eps_high = {1 + self.eps_high} "
        "(config.loss.dual_bound)"
      )
    if min(self.entropy_coef, self.kl_coef, self.value_coef, self.tis_cap) < 0:
      raise ValueError(
        "entropy_coef, kl_coef, value_coef and tis_cap must not be negative (config.loss)"
      )


class Tokens(NamedTuple):
  """What the loss reads. `old` is pi_old's log-prob, `weight` a constant factor (1 without TIS)."""

  logp_BT: jax.Array
  old_BT: jax.Array
  weight_BT: jax.Array
  ref_BT: jax.Array
  entropy_BT: jax.Array
  mask_BT: jax.Array
  advantage_B: jax.Array


def policy_loss(
  config: LossConfig, tokens: Tokens, *, max_tokens: int
) -> tuple[masks.Open, dict[str, masks.Open]]:
  """The open loss of one micro-batch and its open metrics.

  `max_tokens` is the response budget, Dr. GRPO's constant.
  """
  mask_BT = tokens.mask_BT
  advantage_BT = jnp.broadcast_to(tokens.advantage_B[:, None], mask_BT.shape)
  surrogate = _surrogate(config, tokens, advantage_BT)
  loss_BT = tokens.weight_BT * surrogate.loss_BT
  metrics = {
    "train/clipped": masks.open_sum(surrogate.clipped_BT.astype(jnp.float32), mask_BT),
    "train/kl_old": masks.open_sum(divergence.k3(tokens.logp_BT, tokens.old_BT, mask_BT), mask_BT),
    "train/entropy": masks.open_sum(tokens.entropy_BT, mask_BT),
    "train/ratio": masks.open_sum(
      ratios.token_ratio(tokens.logp_BT, tokens.old_BT, mask_BT), mask_BT
    ),
  }
  if config.kl_coef:
    estimator = {"k1": divergence.k1, "k2": divergence.k2, "k3": divergence.k3}[config.kl]
    kl_BT = estimator(tokens.logp_BT, tokens.ref_BT, mask_BT)
    loss_BT = loss_BT + config.kl_coef * kl_BT
    metrics["train/kl_ref"] = masks.open_sum(kl_BT, mask_BT)
  if config.entropy_coef:
    loss_BT = loss_BT - config.entropy_coef * tokens.entropy_BT
  return _aggregate(config, loss_BT, mask_BT, max_tokens), metrics


def _surrogate(config: LossConfig, tokens: Tokens, advantage_BT) -> surrogates.Surrogate:
  mask_BT = tokens.mask_BT
  clip = {"eps_low": config.eps_low, "eps_high": config.eps_high}
  if config.surrogate == "reinforce":
    return surrogates.reinforce(tokens.logp_BT, advantage_BT, mask_BT)
  if config.surrogate == "gspo":
    return surrogates.gspo(tokens.logp_BT, tokens.old_BT, advantage_BT, mask_BT, **clip)
  ratio_BT = ratios.token_ratio(tokens.logp_BT, tokens.old_BT, mask_BT)
  if config.surrogate == "cispo":
    return surrogates.cispo(ratio_BT, tokens.logp_BT, advantage_BT, mask_BT, **clip)
  if config.surrogate == "ppo_clip":
    return surrogates.ppo_clip(ratio_BT, advantage_BT, mask_BT, **clip)
  return surrogates.dual_clip(ratio_BT, advantage_BT, mask_BT, bound=config.dual_bound, **clip)


def _aggregate(config: LossConfig, loss_BT, mask_BT, max_tokens: int) -> masks.Open:
  if config.aggregate == "token_mean":
    return aggregate.token_mean(loss_BT, mask_BT)
  if config.aggregate == "sequence_mean":
    return aggregate.sequence_mean(loss_BT, mask_BT)
  return aggregate.dr_grpo(loss_BT, mask_BT, max_tokens=max_tokens)


def value_loss(value_B: jax.Array, target_B: jax.Array, row_B: jax.Array) -> masks.Open:
  """Squared error of the critic at the end of each prompt, 1/2 (V - G)^2."""
  return masks.open_sum(0.5 * jnp.square(value_B - target_B), row_B)
