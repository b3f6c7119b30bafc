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

SURROGATES = ("ppo_clip", "dual_clip", "reinforce", "gspo", "sequence", "cispo")
AGGREGATES = ("token_mean", "sequence_mean", "dr_grpo")
OFF_POLICY = ("none", "with_tips", "without_tips")
MASK_SCOPES = ("none", "off_policy", "all")


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Which surrogate and how it is aggregated.

  surrogate: by token, but for "gspo" (one length-normalised ratio a row) and "sequence" (the ratio of the
    whole row; both are meant for aggregate "sequence_mean").

  old_logps: "sampler" takes the log-probs recorded at sampling as pi_old; "trainer" recomputes them
    before the update, and corrects for the sampler by truncated importance sampling up to `tis_cap`: for
    another program's numbers, and for older weights (config.train.max_lag).
  dual_bound: ratio bound for negative advantages (dual clip only).
  value_coef: weight of the critic's squared error (PPO); the critic has its own weights.
  off_policy: pi_old of rows that were sampled with tips and are trained without: "with_tips" is what
    sampled them (EMPO2 Table 3), "without_tips" the same weights without tips (its Algorithm 1); "none"
    where there are no such rows.
  mask_scope: whose unlikely tokens, below `mask_logp` nats, leave the surrogate but not the count:
    nobody's, those of "off_policy" rows, or "all". mask_level "turn" is the release's rule instead: a row
    with such a token under pi_old leaves both.
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
  off_policy: str = "none"
  mask_scope: str = "none"
  mask_level: str = "token"
  mask_logp: float = -5.0

  def __post_init__(self):
    for name, allowed in (
      ("surrogate", SURROGATES),
      ("aggregate", AGGREGATES),
      ("kl", ("k1", "k2", "k3")),
      ("old_logps", ("sampler", "trainer")),
      ("off_policy", OFF_POLICY),
      ("mask_scope", MASK_SCOPES),
      ("mask_level", ("token", "turn")),
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
    if self.mask_logp >= 0:
      raise ValueError(
        f"mask_logp {self.mask_logp} is a log-prob below which tokens are masked; choose it below 0 "
        "(config.loss.mask_logp)"
      )
    if min(self.entropy_coef, self.kl_coef, self.value_coef, self.tis_cap) < 0:
      raise ValueError(
        "entropy_coef, kl_coef, value_coef and tis_cap must not be negative (config.loss)"
      )


class Tokens(NamedTuple):
  """What the loss reads. `old` is pi_old's log-prob, `weight` a constant factor (1 without TIS), `off`
  True where the row was sampled from another prompt, `imitate` where its answer is to be given again, `forced`
  where nobody sampled it."""

  logp_BT: jax.Array
  old_BT: jax.Array
  weight_BT: jax.Array
  ref_BT: jax.Array
  entropy_BT: jax.Array
  mask_BT: jax.Array
  advantage_B: jax.Array
  off_B: jax.Array
  imitate_B: jax.Array | None = None
  forced_B: jax.Array | None = None


def policy_loss(
  config: LossConfig, tokens: Tokens, *, max_tokens: int
) -> tuple[masks.Open, dict[str, masks.Open]]:
  """The open loss of one micro-batch and its open metrics.

  `max_tokens` is the response budget, Dr. GRPO's constant.
  """
  tokens, keep_BT, scope_BT = _spare(config, tokens)
  mask_BT = tokens.mask_BT
  advantage_BT = jnp.broadcast_to(tokens.advantage_B[:, None], mask_BT.shape)
  surrogate = _surrogate(config, tokens, advantage_BT)
  if tokens.imitate_B is not None:
    imitated = surrogates.reinforce(tokens.logp_BT, advantage_BT, mask_BT)
    surrogate = jax.tree.map(
      lambda ours, theirs: jnp.where(tokens.imitate_B[:, None], theirs, ours), surrogate, imitated
    )
  loss_BT = tokens.weight_BT * masks.keep(surrogate.loss_BT, keep_BT)
  on_BT = mask_BT & ~tokens.off_B[:, None]  # elsewhere the ratio is between two prompts
  ratio_BT = ratios.token_ratio(tokens.logp_BT, tokens.old_BT, mask_BT)
  metrics = {
    "train/clipped": masks.open_sum(surrogate.clipped_BT.astype(jnp.float32), mask_BT),
    "train/kl_old": masks.open_sum(divergence.k3(tokens.logp_BT, tokens.old_BT, mask_BT), on_BT),
    "train/entropy": masks.open_sum(tokens.entropy_BT, mask_BT),
    "train/ratio": masks.open_sum(ratio_BT, on_BT),
  }
  if config.off_policy != "none":
    off_BT = mask_BT & tokens.off_B[:, None]
    clipped_BT = surrogate.clipped_BT.astype(jnp.float32)
    metrics["train/off_policy"] = masks.open_sum(off_BT.astype(jnp.float32), mask_BT)
    metrics["train/ratio_off"] = masks.open_sum(ratio_BT, off_BT)
    metrics["train/clipped_off"] = masks.open_sum(clipped_BT, off_BT)
  if config.mask_scope != "none":
    metrics["train/masked"] = masks.open_sum((~keep_BT).astype(jnp.float32), scope_BT)
  if config.kl_coef:
    estimator = {"k1": divergence.k1, "k2": divergence.k2, "k3": divergence.k3}[config.kl]
    kl_BT = estimator(tokens.logp_BT, tokens.ref_BT, mask_BT)
    free_BT = mask_BT  # the estimate is one under tokens of the policy's own
    if tokens.forced_B is not None:
      free_BT = mask_BT & ~tokens.forced_B[:, None]
      kl_BT = masks.keep(kl_BT, free_BT)
    loss_BT = loss_BT + config.kl_coef * kl_BT
    metrics["train/kl_ref"] = masks.open_sum(kl_BT, free_BT)
  if config.entropy_coef:
    loss_BT = loss_BT - config.entropy_coef * tokens.entropy_BT
  return _aggregate(config, loss_BT, mask_BT, max_tokens), metrics


def metric_names(config: LossConfig) -> list[str]:
  """The metrics of `policy_loss`, whose open sums are carried from micro-batch to micro-batch."""
  names = ["train/clipped", "train/kl_old", "train/entropy", "train/ratio"]
  names += ["train/kl_ref"] if config.kl_coef else []
  if config.off_policy != "none":
    names += ["train/off_policy", "train/ratio_off", "train/clipped_off"]
  return names + (["train/masked"] if config.mask_scope != "none" else [])


class _Spared(NamedTuple):
  """The tokens that count, which of them the surrogate may push, and who was looked at."""

  tokens: Tokens
  keep_BT: jax.Array
  scope_BT: jax.Array


def _spare(config: LossConfig, tokens: Tokens) -> _Spared:
  """Takes unlikely tokens out of the surrogate, or at level "turn" whole rows out of everything."""
  mask_BT = tokens.mask_BT
  if config.mask_scope == "none":
    return _Spared(tokens, mask_BT, jnp.zeros_like(mask_BT))
  scope_BT = mask_BT if config.mask_scope == "all" else mask_BT & tokens.off_B[:, None]
  if config.mask_level == "token":
    likely_BT = masks.likely(tokens.logp_BT, mask_BT, floor=config.mask_logp)
    return _Spared(tokens, mask_BT & (likely_BT | ~scope_BT), scope_BT)
  likely_BT = masks.likely_rows(tokens.old_BT, mask_BT, floor=config.mask_logp)
  keep_BT = mask_BT & (likely_BT | ~scope_BT)
  return _Spared(tokens._replace(mask_BT=keep_BT), keep_BT, scope_BT)


def _surrogate(config: LossConfig, tokens: Tokens, advantage_BT) -> surrogates.Surrogate:
  mask_BT = tokens.mask_BT
  clip = {"eps_low": config.eps_low, "eps_high": config.eps_high}
  if config.surrogate == "reinforce":
    return surrogates.reinforce(tokens.logp_BT, advantage_BT, mask_BT)
  if config.surrogate == "gspo":
    return surrogates.gspo(tokens.logp_BT, tokens.old_BT, advantage_BT, mask_BT, **clip)
  if config.surrogate == "sequence":
    whole_BT = ratios.whole_sequence_ratio(tokens.logp_BT, tokens.old_BT, mask_BT)
    return surrogates.ppo_clip(whole_BT, advantage_BT, mask_BT, **clip)
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
