"""Mem-pi's decision and content advantages against hand vectors, and what their loss does to a policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.ops import aggregate, counterfactual, masks, ratios, surrogates

FULL = jnp.ones((1, 4), bool)


def paid(*rewards, mask=None, **options):
  reward_NJ = jnp.array([rewards], jnp.float32)
  mask_NJ = jnp.ones(reward_NJ.shape, bool) if mask is None else jnp.array([mask])
  return jax.tree.map(np.asarray, counterfactual.advantages(reward_NJ, mask_NJ, **options))


def test_both_signals_of_a_group_by_hand():
  # r_0 = 0, hints 1, 1, 0: V = 2/3, std of all 1/2, of the hints sqrt(2)/3.
  one = paid(0, 1, 1, 0)
  np.testing.assert_allclose(one.delta_N, [2 / 3], rtol=1e-5)
  np.testing.assert_allclose(one.decision_NJ, [[-4 / 3, 4 / 3, 4 / 3, 4 / 3]], rtol=1e-4)
  np.testing.assert_allclose(one.content_NJ, [[0, 2**-0.5, 2**-0.5, -(2**0.5)]], rtol=1e-4)
  plain = paid(0, 1, 1, 0, normalise=False)
  np.testing.assert_allclose(plain.decision_NJ[0, :2], [-2 / 3, 2 / 3], rtol=1e-5)
  np.testing.assert_allclose(plain.content_NJ, [[0, 1 / 3, 1 / 3, -2 / 3]], rtol=1e-5)


def test_where_hints_do_not_help_nothing_is_learned_about_their_content():
  for rewards in ((1, 1, 1, 0), (0.5, 1, 0, 0.5)):  # Delta -1/3 and 0
    one = paid(*rewards)
    np.testing.assert_array_equal(one.content_NJ, 0)
    assert (one.decision_NJ[0, 0] > 0.5) == (
      rewards[0] == 1
    )  # and abstaining is, where it is better


def test_gates():
  rewards = (0.5, 1, 0.4, 0)  # Delta -1/30
  assert not paid(*rewards).open_NJ.any()
  np.testing.assert_array_equal(paid(*rewards, gate="rollout").open_NJ, [[0, 1, 0, 0]])
  np.testing.assert_array_equal(paid(*rewards, gate="off").open_NJ, [[0, 1, 1, 1]])
  soft = paid(*rewards, gate="soft", temperature=1 / 30).open_NJ[0, 1:]
  np.testing.assert_allclose(soft, 1 / (1 + np.e), rtol=1e-4)
  assert paid(*rewards, threshold=-0.1).open_NJ.any()
  with pytest.raises(ValueError, match=r"gate 'on' is not known; choose one of group, rollout"):
    paid(*rewards, gate="on")


def test_equal_rewards_and_missing_branches_are_worth_nothing():
  for one in (paid(1, 1, 1, 1), paid(0, 1, 0, 1, mask=(False, True, True, True)),
              paid(0, 1, 1, 1, mask=(True, False, False, False))):  # fmt: skip
    assert not one.used_N.any()
    assert not one.decision_NJ.any() and not one.content_NJ.any()
  # A void hint takes part in nothing, whatever its reward was.
  with_void = paid(0, 1, 0, np.nan, mask=(True, True, True, False))
  without = paid(0, 1, 0)
  np.testing.assert_allclose(with_void.decision_NJ[:, :3], without.decision_NJ, rtol=1e-6)
  np.testing.assert_allclose(with_void.content_NJ[:, :3], without.content_NJ, rtol=1e-6)
  assert with_void.decision_NJ[0, 3] == 0


def test_the_decision_sees_the_hints_through_their_mean_only():
  spread, even = paid(0, 1, 0, 0.5, normalise=False), paid(0, 0.5, 0.5, 0.5, normalise=False)
  np.testing.assert_allclose(spread.decision_NJ, even.decision_NJ, rtol=1e-6)


def test_of_two_hints_that_work_the_shorter_is_better():
  length_NJ = jnp.array([[99, 4, 9, 9]])
  reward_NJ = counterfactual.regularised(
    jnp.array([[0.0, 1, 1, 0]]), length_NJ, weight=0.1, longest=10
  )
  np.testing.assert_allclose(reward_NJ, [[0, 0.96, 0.91, -0.09]], rtol=1e-5)
  content = counterfactual.advantages(reward_NJ, FULL).content_NJ[0]
  assert content[1] > content[2] > 0 > content[3]


def loss(logit, advantages, lengths, content_logp):
  """One batch of a group's rows, as training sees it: a mean over tokens of scaled advantages.

  A decision is one token: to abstain with probability 1 - sigmoid(logit), to speak with sigmoid(logit).
  """
  decision_NJ = jnp.ones_like(lengths)
  factors = counterfactual.balance(decision_NJ, lengths, decision_weight=1.0, content_weight=1.0)
  J, T = lengths.shape[1], int(lengths.max())
  spoke_J = jnp.arange(J) > 0
  decided_J = jnp.where(spoke_J, jax.nn.log_sigmoid(logit), jax.nn.log_sigmoid(-logit))
  logp_RT = jnp.zeros((2 * J, T)).at[:J, 0].set(decided_J).at[J:].set(content_logp)
  token_RT = jnp.arange(T)[None] < jnp.concatenate([jnp.ones(J), lengths[0]])[:, None]
  advantage_R = jnp.concatenate(
    [
      advantages.decision_NJ[0] * factors.decision_NJ[0],
      advantages.content_NJ[0] * factors.content_NJ[0],
    ]
  )
  ratio_RT = ratios.token_ratio(logp_RT, jax.lax.stop_gradient(logp_RT), token_RT)
  parts = surrogates.ppo_clip(
    ratio_RT, jnp.broadcast_to(advantage_R[:, None], token_RT.shape), token_RT,
    eps_low=0.2, eps_high=0.28,
  )  # fmt: skip
  return masks.close(aggregate.token_mean(parts.loss_BT, token_RT))


@pytest.mark.parametrize("p", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("lengths", [(0, 1, 1, 1), (0, 9, 2, 140)])
def test_the_decisions_gradient_is_half_its_advantage_however_collapsed_it_is(p, lengths):
  lengths_NJ = jnp.array([lengths])
  group = counterfactual.advantages(jnp.array([[0.0, 1, 1, 0]]), FULL)
  logit = jnp.log(p / (1 - p))
  slope = jax.grad(loss)(logit, group, lengths_NJ, jnp.zeros((4, max(lengths))))
  np.testing.assert_allclose(-slope, group.decision_NJ[0, 1] / 2, rtol=1e-3)


def test_content_is_a_mean_over_the_groups_tokens_and_an_abstention_has_none():
  lengths_NJ = jnp.array([[0, 3, 2, 5]])
  group = counterfactual.advantages(jnp.array([[0.0, 1, 1, 0]]), FULL)
  slope_JT = jax.grad(loss, argnums=3)(jnp.array(0.3), group, lengths_NJ, jnp.zeros((4, 5)))
  expected_J = -group.content_NJ[0] / 10
  mask_JT = np.arange(5) < np.array([0, 3, 2, 5])[:, None]
  np.testing.assert_allclose(slope_JT, np.where(mask_JT, expected_J[:, None], 0), rtol=1e-4)


def test_a_policy_learns_when_to_speak_and_what_to_say():
  """Four contexts as in experiments/mempi.md: the agent alone succeeds with .95, 0, .5 and .5; the good hint
  (one of four) makes that .95, .9, .6 and .2, any other .9, .1, .1 and .1. Tabular, G = 8, Bernoulli rewards."""
  alone = np.array([0.95, 0.0, 0.5, 0.5])
  hinted = np.array([[0.95, 0.9, 0.9, 0.9], [0.9, 0.1, 0.1, 0.1], [0.6, 0.1, 0.1, 0.1], [0.2] * 4])
  rng = np.random.default_rng(0)
  speak, says = np.full(4, 2.0), np.zeros((4, 4))  # p(speak) = .88 at the start
  advantages = jax.jit(counterfactual.advantages)
  for _ in range(1500):
    p = np.exp(says) / np.exp(says).sum(1, keepdims=True)
    hint = np.stack([rng.choice(4, size=7, p=p[x]) for x in range(4)])
    win = rng.random((4, 8)) < np.concatenate(
      [alone[:, None], np.take_along_axis(hinted, hint, 1)], axis=1
    )
    group = jax.tree.map(
      np.asarray, advantages(jnp.array(win, jnp.float32), jnp.ones((4, 8), bool))
    )
    speak += 0.1 * group.decision_NJ[:, 1] / 2
    for x in range(4):
      for j in range(7):
        step = -p[x].copy()
        step[hint[x, j]] += 1
        says[x] += 0.1 * group.content_NJ[x, j + 1] * step / 7
  rate = 1 / (1 + np.exp(-speak))
  best = np.exp(says[1, 0]) / np.exp(says[1]).sum()
  assert rate[1] > 0.95 and best > 0.9  # the agent fails alone: it speaks, and says the right thing
  assert rate[0] < 0.4 and rate[3] < 0.05  # the agent succeeds alone, or hints hurt: it abstains
