"""Estimators of KL(pi || ref) from tokens sampled from pi, per token, in nats.

Letters: B rows, T tokens. With d = log pi - log ref at the sampled token; masked places are 0, and
d is held within ratios.LOG_RATIO_BOUND. Source: J. Schulman, "Approximating KL Divergence" (2020).
As a loss on samples of pi itself, only k2 has the gradient of the KL in expectation: k1's is 0 and
k3's is that of KL(ref || pi).
"""

import jax
import jax.numpy as jnp

from memrl_jax.ops import ratios


def k1(logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Unbiased, high variance, may be negative: d."""
  return ratios.log_ratio(logp_BT, ref_logp_BT, mask_BT)


def k2(logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Biased, low variance, never negative: d^2 / 2."""
  return 0.5 * jnp.square(ratios.log_ratio(logp_BT, ref_logp_BT, mask_BT))


def k3(logp_BT: jax.Array, ref_logp_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
  """Unbiased, low variance, never negative: exp(-d) - 1 + d.  GRPO (2402.03300) Eq. 4."""
  difference_BT = ratios.log_ratio(logp_BT, ref_logp_BT, mask_BT)
  return jnp.expm1(-difference_BT) + difference_BT
