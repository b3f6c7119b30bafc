"""Implicit Q-learning: what actions are worth, from what was played, without asking about any other.

"Offline reinforcement learning with implicit Q-learning" (2110.06169). V leans towards the better of
the actions that were tried in a state, so that r + gamma V(s') stands for the best continuation that
the data know, and no action outside of the data is ever valued on the way.

Letters: B transitions of a batch, N stored ones, H = 2 twin critics, U distinct texts, D width of
their embeddings, K hidden units.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from memrl_jax.ops import masks

TWINS, LAYERS = 2, 3
Layers = list[tuple[jax.Array, jax.Array]]


class Critic(NamedTuple):
  """Weights: twin Q (leading H), V, and the slow copy of Q that V is fitted to and scores are read from."""

  q: Layers
  v: Layers
  slow: Layers


class Transitions(NamedTuple):
  """Texts once, as vectors; a transition names them by row. `next_N` is not read where `done_N`."""

  table_UD: Any
  state_N: Any
  action_N: Any
  next_N: Any
  reward_N: Any
  done_N: Any


def expectile(error_B: jax.Array, mask_B: jax.Array, *, tau: float) -> masks.Open:
  """Expectile regression: what lies above weighs tau, what lies below 1 - tau; tau = .5 is the mean.

      L(u) = |tau - 1[u < 0]| u^2,   u = Q(s, a) - V(s)

  IQL (2110.06169) Eq. 5; the open mean over transitions.
  """
  chex.assert_rank(error_B, 1)
  error_B = masks.keep(error_B, mask_B)
  return masks.open_sum(jnp.where(error_B < 0, 1 - tau, tau) * jnp.square(error_B), mask_B)


def target(
  reward_B: jax.Array, next_value_B: jax.Array, done_B: jax.Array, *, gamma: float
) -> jax.Array:
  """What Q is fitted to: y = r + gamma V(s'), and y = r where the attempt is over.

  IQL (2110.06169) Eq. 6; a constant for the gradient.
  """
  chex.assert_equal_shape([reward_B, next_value_B, done_B])
  return jax.lax.stop_gradient(reward_B + gamma * masks.keep(next_value_B, ~done_B))


def q_loss(q_HB: jax.Array, target_B: jax.Array, mask_B: jax.Array) -> masks.Open:
  """Squared error (y - Q_h)^2 of each twin, the open mean over twins and transitions; IQL Eq. 6."""
  chex.assert_rank(q_HB, 2)
  mask_HB = jnp.broadcast_to(mask_B[None], q_HB.shape)
  error_HB = masks.keep(target_B[None] - q_HB, mask_HB)  # before the square, or NaN has a gradient
  return masks.open_sum(jnp.square(error_HB), mask_HB)


def init(key: jax.Array, dimension: int, hidden: int) -> Critic:
  """A critic of embeddings of this dimension; its outputs start near zero."""
  q_key, v_key = jax.random.split(key)
  q = jax.vmap(lambda key: _init(key, 2 * dimension, hidden))(jax.random.split(q_key, TWINS))
  return Critic(q, _init(v_key, dimension, hidden), q)


def _init(key: jax.Array, width: int, hidden: int) -> Layers:
  sizes = [width, *[hidden] * (LAYERS - 1), 1]
  make = jax.nn.initializers.he_normal()
  return [
    (make(key, (a, b)) * (0.1 if b == 1 else 1.0), jnp.zeros((1, b)))
    for key, a, b in zip(jax.random.split(key, LAYERS), sizes[:-1], sizes[1:], strict=True)
  ]


def _value(layers: Layers, x_BD: jax.Array) -> jax.Array:
  for weight, bias in layers[:-1]:
    x_BD = jax.nn.relu(x_BD @ weight + bias)
  weight, bias = layers[-1]
  return (x_BD @ weight + bias)[:, 0]


def _twins(layers: Layers, state_BD: jax.Array, action_BD: jax.Array) -> jax.Array:
  both = jnp.concatenate([state_BD, action_BD], axis=1)
  return jax.vmap(_value, in_axes=(0, None))(layers, both)


@jax.jit
def score(critic: Critic, state_BD: jax.Array, action_BD: jax.Array) -> jax.Array:
  """Q of each pair, the lesser of the twins: q_B = min_h Q_h(s, a)."""
  return jnp.min(_twins(critic.slow, state_BD, action_BD), axis=0)


@functools.partial(jax.jit, static_argnames=("steps", "batch"))
def fit(
  critic: Critic, data: Transitions, count: jax.Array, key: jax.Array,
  *, steps: int, batch: int, tau: float, gamma: float, learning_rate: float, polyak: float,
) -> tuple[Critic, jax.Array]:  # fmt: skip
  """Goes on fitting: (critic, mean Q loss of the last tenth of the steps).

  `count` transitions are read, the first ones of `data`; all at once where a batch holds them, else a
  random batch a step. Adam, which starts anew. slow <- polyak Q + (1 - polyak) slow after each step.
  """
  optimiser = optax.adam(learning_rate)

  def losses(nets, slow, index_B):
    (q, v), mask_B = nets, index_B < count
    state_BD, action_BD, next_BD = (
      data.table_UD[rows[index_B]] for rows in (data.state_N, data.action_N, data.next_N)
    )
    best_B = jnp.min(_twins(slow, state_BD, action_BD), axis=0)
    v_part = expectile(best_B - _value(v, state_BD), mask_B, tau=tau)
    target_B = target(data.reward_N[index_B], _value(v, next_BD), data.done_N[index_B], gamma=gamma)
    q_part = masks.close(q_loss(_twins(q, state_BD, action_BD), target_B, mask_B))
    return masks.close(v_part) + q_part, q_part

  def step(carry, number):
    critic, moments = carry
    drawn_B = jax.random.randint(jax.random.fold_in(key, number), (batch,), 0, count)
    index_B = jnp.where(count <= batch, jnp.arange(batch), drawn_B)
    nets = (critic.q, critic.v)
    grads, loss = jax.grad(losses, has_aux=True)(nets, critic.slow, index_B)
    updates, moments = optimiser.update(grads, moments)
    q, v = optax.apply_updates(nets, updates)
    slow = optax.incremental_update(q, critic.slow, polyak)
    return (Critic(q, v, slow), moments), loss

  start = (critic, optimiser.init((critic.q, critic.v)))
  (critic, _), loss_S = jax.lax.scan(step, start, jnp.arange(steps))
  return critic, jnp.mean(loss_S[-max(1, steps // 10) :])
