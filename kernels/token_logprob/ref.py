"""Definition of token_logprob: the whole [N, V] array of logits, written as the equation.

Letters: N rows (tokens to score), D features, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLogprob(NamedTuple):
  """Log-prob of each label, and the entropy of its distribution (None unless asked for), in nats."""

  logp_N: jax.Array
  entropy_N: jax.Array | None


def token_logprob(
  hidden_ND: jax.Array,
  embedding_VD: jax.Array,
  label_N: jax.Array,
  mask_N: jax.Array,
  *,
  temperature_N: jax.Array,
  soft_cap: float | None,
  entropy: bool,
) -> TokenLogprob:
  """Log-probs under the distribution that was sampled from.

      z = h E^T,   z <- cap tanh(z / cap),   logp = log softmax(z / T)[label]
      entropy = - sum_v p_v log p_v

  The matmul runs in the dtype of `hidden_ND` and adds in float32; all that follows is float32.
  Masked rows are 0 and have no gradient, whatever they hold. A label outside [0, V) gives NaN.
  """
  hidden_ND = jnp.where(mask_N[:, None], hidden_ND, 0)
  temperature_N = jnp.where(mask_N, temperature_N, 1.0).astype(jnp.float32)
  logits_NV = jnp.einsum(
    "nd,vd->nv",
    hidden_ND,
    embedding_VD.astype(hidden_ND.dtype),
    preferred_element_type=jnp.float32,
  )
  if soft_cap is not None:
    logits_NV = soft_cap * jnp.tanh(logits_NV / soft_cap)
  logits_NV = logits_NV / temperature_N[:, None]

  normaliser_N = jax.nn.logsumexp(logits_NV, axis=1)
  vocabulary = embedding_VD.shape[0]
  label_N = jnp.where(mask_N, label_N, 0)
  label_N = jnp.where(label_N < 0, vocabulary, label_N)  # a negative index would wrap
  chosen_N = jnp.take_along_axis(
    logits_NV, label_N[:, None], axis=1, mode="fill", fill_value=jnp.nan
  )[:, 0]
  logp_N = jnp.where(mask_N, chosen_N - normaliser_N, 0.0)
  if not entropy:
    return TokenLogprob(logp_N, None)
  every_NV = logits_NV - normaliser_N[:, None]
  entropy_N = -jnp.sum(jnp.exp(every_NV) * every_NV, axis=1)
  return TokenLogprob(logp_N, jnp.where(mask_N, entropy_N, 0.0))
