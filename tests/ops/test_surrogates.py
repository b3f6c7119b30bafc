"""Surrogates against hand numbers, by value, gradient and clip flag; aggregation against traps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import aggregate, masks, ratios, surrogates


def one(value):
  return jnp.full((1, 1), value)


TRUE = jnp.ones((1, 1), bool)

# ratio, advantage, loss, d loss / d log pi, clipped; eps_low .2, eps_high .3, bound 10.
# Objective min(rho A, clip(rho) A): the values of the EMPO2 note, section 2.4, with the sign of a
# loss; d rho / d log pi = rho. The last row meets the second clip: 10 instead of 20.
CLIP_TABLE = [
  (0.25, 1.0, -0.25, -0.25, False),
  (0.25, -1.0, 0.80, 0.0, True),
  (2.0, 1.0, -1.30, 0.0, True),
  (2.0, -1.0, 2.0, 2.0, False),
  (1.0, 1.0, -1.0, -1.0, False),
  (1.25, 1.0, -1.25, -1.25, False),
  (20.0, -1.0, 10.0, 0.0, True),
]


@pytest.mark.parametrize("ratio, advantage, loss, gradient, clipped", CLIP_TABLE)
def test_dual_clip_by_hand(ratio, advantage, loss, gradient, clipped):
  def run(logp):
    rho = ratios.token_ratio(logp, one(0.0), TRUE)
    return surrogates.dual_clip(rho, one(advantage), TRUE, eps_low=0.2, eps_high=0.3, bound=10.0)

  logp = one(np.log(ratio))
  np.testing.assert_allclose(run(logp).loss_BT, [[loss]], rtol=1e-5)
  np.testing.assert_allclose(
    jax.grad(lambda x: run(x).loss_BT[0, 0])(logp), [[gradient]], rtol=1e-5
  )
  assert bool(run(logp).clipped_BT[0, 0]) is clipped


@pytest.mark.parametrize("ratio, advantage, loss, gradient, clipped", CLIP_TABLE[:-1])
def test_ppo_clip_is_dual_clip_without_the_bound(ratio, advantage, loss, gradient, clipped):
  ppo = surrogates.ppo_clip(one(ratio), one(advantage), TRUE, eps_low=0.2, eps_high=0.3)
  np.testing.assert_allclose(ppo.loss_BT, [[loss]], rtol=1e-5)
  assert bool(ppo.clipped_BT[0, 0]) is clipped
  far = surrogates.ppo_clip(one(20.0), one(-1.0), TRUE, eps_low=0.2, eps_high=0.3)
  np.testing.assert_allclose(far.loss_BT, [[20.0]], rtol=1e-6)


def test_higher_clip_moves_only_the_upper_edge():
  def loss(ratio, advantage, eps_high):
    return float(
      surrogates.ppo_clip(one(ratio), one(advantage), TRUE, eps_low=0.2, eps_high=eps_high).loss_BT[
        0, 0
      ]
    )

  assert loss(1.28, 1.0, 0.2) == pytest.approx(-1.2)
  assert loss(1.28, 1.0, 0.28) == pytest.approx(-1.28)
  assert loss(0.5, -1.0, 0.2) == loss(0.5, -1.0, 0.28) == pytest.approx(0.8)


@pytest.mark.parametrize(
  "ratio, weight, clipped", [(1.5, 1.1, True), (0.5, 0.9, True), (1.05, 1.05, False)]
)
def test_cispo_clips_the_weight_and_never_the_gradient(ratio, weight, clipped):
  # d loss / d log pi = - clip(rho) A, with A = 2 and log pi = -3: loss = - weight * 2 * -3.
  def run(logp):
    rho = jnp.exp(logp + 3.0) * ratio  # follows logp: must be a constant inside
    return surrogates.cispo(rho, logp, one(2.0), TRUE, eps_low=0.1, eps_high=0.1)

  np.testing.assert_allclose(run(one(-3.0)).loss_BT, [[6 * weight]], rtol=1e-5)
  gradient = jax.grad(lambda x: run(x).loss_BT[0, 0])(one(-3.0))
  np.testing.assert_allclose(gradient, [[-2 * weight]], rtol=1e-5)
  assert bool(run(one(-3.0)).clipped_BT[0, 0]) is clipped


def test_on_policy_every_surrogate_has_the_policy_gradient():
  rng = np.random.default_rng(0)
  logp_BT = jnp.asarray(-rng.uniform(0.1, 3, (3, 4)), jnp.float32)
  advantage_BT = jnp.broadcast_to(jnp.asarray(rng.normal(size=(3, 1)), jnp.float32), (3, 4))
  mask_BT = jnp.array([[True] * 4, [True, True, False, False], [True, False, False, False]])
  eps = dict(eps_low=0.2, eps_high=0.3)

  def rho(x):
    return ratios.token_ratio(x, logp_BT, mask_BT)

  losses = {
    "reinforce": lambda x: surrogates.reinforce(x, advantage_BT, mask_BT),
    "ppo": lambda x: surrogates.ppo_clip(rho(x), advantage_BT, mask_BT, **eps),
    "dual": lambda x: surrogates.dual_clip(rho(x), advantage_BT, mask_BT, bound=3.0, **eps),
    "gspo": lambda x: surrogates.gspo(x, logp_BT, advantage_BT, mask_BT, **eps),
    "cispo": lambda x: surrogates.cispo(rho(x), x, advantage_BT, mask_BT, **eps),
  }
  expected_BT = np.where(mask_BT, -advantage_BT, 0.0)
  for name, loss in losses.items():
    gradient_BT = jax.jit(jax.grad(lambda x, f=loss: f(x).loss_BT.sum()))(logp_BT)
    np.testing.assert_allclose(gradient_BT, expected_BT, rtol=1e-5, err_msg=name)
    assert not loss(logp_BT).clipped_BT.any(), name


def test_gspo_clips_whole_rows_by_their_geometric_mean():
  # Row 0: rho 4 and 1/4, geometric mean 1, not clipped although both tokens are far outside.
  # Row 1: rho 2 and 2, clipped at 1.3 for A = 1.
  logp_BT = jnp.log(jnp.array([[4.0, 0.25], [2.0, 2.0]]))
  mask_BT = jnp.ones((2, 2), bool)
  gspo = surrogates.gspo(
    logp_BT, jnp.zeros((2, 2)), jnp.ones((2, 2)), mask_BT, eps_low=0.2, eps_high=0.3
  )
  np.testing.assert_allclose(gspo.loss_BT, [[-1.0, -1.0], [-1.3, -1.3]], rtol=1e-6)
  np.testing.assert_array_equal(gspo.clipped_BT, [[False, False], [True, True]])


@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_poison_behind_the_mask_changes_neither_loss_nor_gradient(poison):
  mask_BT = jnp.array([[True, False], [False, False]])
  eps = dict(eps_low=0.2, eps_high=0.3)
  losses = [
    lambda r, x, a: surrogates.reinforce(x, a, mask_BT),
    lambda r, x, a: surrogates.ppo_clip(r, a, mask_BT, **eps),
    lambda r, x, a: surrogates.dual_clip(r, a, mask_BT, bound=3.0, **eps),
    lambda r, x, a: surrogates.gspo(x, r, a, mask_BT, **eps),
    lambda r, x, a: surrogates.cispo(r, x, a, mask_BT, **eps),
  ]
  for loss in losses:

    def total(ratio_BT, logp_BT, advantage_BT, f=loss):
      return aggregate.token_mean(f(ratio_BT, logp_BT, advantage_BT).loss_BT, mask_BT).total

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
    clean = run(jnp.full((2, 2), 1.1), jnp.full((2, 2), -0.5), jnp.full((2, 2), 2.0))
    dirty = run(*[jnp.where(mask_BT, x, poison) for x in (1.1, -0.5, 2.0)])
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    surrogate = loss(*[jnp.where(mask_BT, x, poison) for x in (1.1, -0.5, 2.0)])
    assert np.all(np.asarray(surrogate.loss_BT)[~mask_BT] == 0)
    assert not np.any(np.asarray(surrogate.clipped_BT)[~mask_BT])


def test_advantages_are_constants():
  def total(advantage_BT):
    eps = dict(eps_low=0.2, eps_high=0.3)
    ppo = surrogates.dual_clip(one(1.1), advantage_BT, TRUE, bound=3.0, **eps)
    cispo = surrogates.cispo(one(1.1), one(-1.0), advantage_BT, TRUE, **eps)
    return jnp.sum(
      ppo.loss_BT + cispo.loss_BT + surrogates.reinforce(one(-1.0), advantage_BT, TRUE).loss_BT
    )

  np.testing.assert_array_equal(jax.grad(total)(one(-2.0)), [[0.0]])


LOSS_BT = jnp.array([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0], [99.0, 99.0, 99.0]])
LOSS_MASK_BT = jnp.array([[True, True, True], [True, False, False], [False, False, False]])


def test_aggregates_by_hand():
  # Tokens: (1 + 2 + 3 + 10) / 4 = 4. Rows: (2 + 10) / 2 = 6. Constant 8: 16 / (2 * 8) = 1.
  # The third row is padding and counts nowhere.
  assert masks.close(aggregate.token_mean(LOSS_BT, LOSS_MASK_BT)) == pytest.approx(4.0)
  assert masks.close(aggregate.sequence_mean(LOSS_BT, LOSS_MASK_BT)) == pytest.approx(6.0)
  dr_grpo = aggregate.dr_grpo(LOSS_BT, LOSS_MASK_BT, max_tokens=8)
  assert masks.close(dr_grpo) == pytest.approx(1.0)


@pytest.mark.parametrize(
  "mean",
  [
    aggregate.token_mean,
    aggregate.sequence_mean,
    functools.partial(aggregate.dr_grpo, max_tokens=8),
  ],
)
def test_micro_batches_add_up_to_the_whole_in_value_and_gradient(mean):
  rng = np.random.default_rng(1)
  loss_BT = jnp.asarray(rng.normal(size=(8, 5)), jnp.float32)
  mask_BT = jnp.asarray(np.arange(5) < rng.integers(0, 6, (8, 1)))

  def whole(loss_BT):
    return masks.close(mean(loss_BT, mask_BT))

  def parts(loss_BT):
    split = [mean(loss_BT[i : i + 2], mask_BT[i : i + 2]) for i in range(0, 8, 2)]
    return masks.close(functools.reduce(masks.add, split))

  np.testing.assert_allclose(whole(loss_BT), parts(loss_BT), rtol=1e-5)
  np.testing.assert_allclose(jax.jit(jax.grad(whole))(loss_BT), jax.grad(parts)(loss_BT), rtol=1e-5)
