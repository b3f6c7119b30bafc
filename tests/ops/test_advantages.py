"""Advantages against hand numbers, laws, and the cases that make them explode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from memrl_jax.ops import advantages, returns


def true(*shape):
  return jnp.ones(shape, bool)


def ids(*values):
  return jnp.array(values, jnp.int32)


# Two trajectories in group 0 (three rows of score 3, one row of score 1), one in group 1.
SCORE_N = jnp.array([3.0, 3.0, 3.0, 1.0, 5.0])
GROUP_N = ids(0, 0, 0, 0, 1)
TRAJECTORY_N = ids(0, 0, 0, 1, 2)


def test_weights_by_hand():
  weight_N = advantages.trajectory_weights(TRAJECTORY_N, true(5), num_trajectories=3)
  np.testing.assert_allclose(weight_N, [1 / 3, 1 / 3, 1 / 3, 1, 1], rtol=1e-6)
  mask_N = jnp.array([True, True, False, True, False])
  weight_N = advantages.trajectory_weights(TRAJECTORY_N, mask_N, num_trajectories=3)
  np.testing.assert_allclose(weight_N, [1 / 2, 1 / 2, 0, 1, 0], rtol=1e-6)
  np.testing.assert_array_equal(advantages.row_weights(mask_N), [1, 1, 0, 1, 0])


def test_trajectory_and_row_weighting_differ_as_they_should():
  # Rows: (3 + 3 + 3 + 1) / 4 = 2.5. Trajectories: (3 + 1) / 2 = 2, which is what is meant.
  by_trajectory_N = advantages.trajectory_weights(TRAJECTORY_N, true(5), num_trajectories=3)
  for weight_N, mean in ((advantages.row_weights(true(5)), 2.5), (by_trajectory_N, 2.0)):
    advantage_N = advantages.group_mean(SCORE_N, GROUP_N, weight_N, true(5), num_groups=2)
    expected = [3 - mean, 3 - mean, 3 - mean, 1 - mean, 0]
    np.testing.assert_allclose(advantage_N, expected, rtol=1e-6)


def test_std_by_hand_and_against_numpy():
  # Rows of group 0: deviations .5 .5 .5 -1.5, squares sum to 3: population sqrt(3/4), sample 1.
  # As two trajectories: deviations 1 and -1: population 1, sample sqrt(2). One alone has none.
  by_trajectory_N = advantages.trajectory_weights(TRAJECTORY_N, true(5), num_trajectories=3)
  by_row_N = advantages.row_weights(true(5))
  for weight_N, std, unbiased in ((by_row_N, 0.8660254, 1.0), (by_trajectory_N, 1.0, 1.4142135)):
    arguments = (SCORE_N, GROUP_N, weight_N, true(5))
    std_N = advantages.cluster_std(*arguments, num_clusters=2)
    np.testing.assert_allclose(std_N, [std] * 4 + [0], rtol=1e-5)
    std_N = advantages.cluster_std_unbiased(*arguments, num_clusters=2)
    np.testing.assert_allclose(std_N, [unbiased] * 4 + [0], rtol=1e-5)


def test_mean_std_by_hand():
  # Trajectory-weighted: (3 - 2) / (sqrt 2 + .1), and a group of one is 0.
  weight_N = advantages.trajectory_weights(TRAJECTORY_N, true(5), num_trajectories=3)
  advantage_N = advantages.group_mean_std(
    SCORE_N, GROUP_N, weight_N, true(5), num_groups=2, eps=0.1
  )
  a = 1 / (np.sqrt(2) + 0.1)
  np.testing.assert_allclose(advantage_N, [a, a, a, -a, 0], rtol=1e-5)


def test_a_group_of_one_trajectory_with_uneven_rows_does_not_explode():
  # One trajectory has no sample std and nothing to be compared with; ten float32 weights of 1/10
  # add to 1.0000001 and must not pass for "more than one".
  score_N, zero_N = jnp.arange(10.0), jnp.zeros(10, jnp.int32)
  weight_N = advantages.trajectory_weights(zero_N, true(10), num_trajectories=1)
  group = (score_N, zero_N, weight_N, true(10))
  assert np.all(advantages.cluster_std_unbiased(*group, num_clusters=1) == 0)
  assert np.all(advantages.group_mean_std(*group, num_groups=1, eps=1e-6) == 0)
  alone = (score_N, zero_N, zero_N, weight_N, true(10))
  assert np.all(advantages.leave_one_out(*alone, num_groups=1, num_trajectories=1) == 0)


def test_equal_scores_give_exactly_zero_whatever_rounding_does():
  # The float32 mean of seven 0.1 is not 0.1, and (0.1 - mean) / 1e-6 would be a visible advantage.
  # In the second group the order of a sum differs, by one unit in the last place.
  score_N = jnp.array(
    [0.1] * 7 + [1000.1, np.nextafter(np.float32(1000.1), 2000, dtype=np.float32)]
  )
  group_N = ids(*[0] * 7, 1, 1)
  weight_N = advantages.row_weights(true(9))
  shared = (score_N, group_N, weight_N, true(9))
  mean_N = advantages.group_mean(*shared, num_groups=2)
  mean_std_N = advantages.group_mean_std(*shared, num_groups=2, eps=1e-6)
  rloo_N = advantages.leave_one_out(
    score_N, group_N, jnp.arange(9), weight_N, true(9), num_groups=2, num_trajectories=9
  )
  for advantage_N in (mean_N, mean_std_N, rloo_N):
    np.testing.assert_array_equal(advantage_N, np.zeros(9))


def test_zero_spread_counts_groups_without_signal():
  # Groups: 0 equal, 1 different, 2 alone, 3 has no rows, 4 differs only in a masked row.
  score_N = jnp.array([1.0, 1.0, 0.0, 1.0, 7.0, 2.0, 2.0, jnp.nan])
  group_N = ids(0, 0, 1, 1, 2, 4, 4, 4)
  mask_N = jnp.array([True] * 7 + [False])
  flat_G = advantages.zero_spread(score_N, group_N, mask_N, num_groups=5)
  np.testing.assert_array_equal(flat_G, [True, False, True, False, True])


def test_leave_one_out_by_hand():
  # Scores 0, 1, 5 in one group: 0 - 3, 1 - 2.5, 5 - .5; a group of one: 0.
  advantage_N = advantages.leave_one_out(
    jnp.array([0.0, 1.0, 5.0, 9.0]),
    ids(0, 0, 0, 1),
    ids(0, 1, 2, 3),
    jnp.ones(4),
    true(4),
    num_groups=2,
    num_trajectories=4,
  )
  np.testing.assert_allclose(advantage_N, [-3.0, -1.5, 4.5, 0.0], rtol=1e-6)


def test_leave_one_out_leaves_out_the_whole_trajectory():
  # Three rows of one trajectory do not stand in each other's baseline: 3 - 1, and 1 - 3.
  weight_N = advantages.trajectory_weights(TRAJECTORY_N, true(5), num_trajectories=3)
  advantage_N = advantages.leave_one_out(
    SCORE_N, GROUP_N, TRAJECTORY_N, weight_N, true(5), num_groups=2, num_trajectories=3
  )
  np.testing.assert_allclose(advantage_N, [2, 2, 2, -2, 0], rtol=1e-5)


def test_leave_one_out_is_the_group_mean_advantage_scaled():
  # With one row a trajectory and n of them: A_loo = n / (n - 1) * (x - mean).
  score_N = jnp.asarray(np.random.default_rng(0).normal(size=8), jnp.float32)
  zero_N, one_N = jnp.zeros(8, jnp.int32), jnp.ones(8)
  rloo_N = advantages.leave_one_out(
    score_N, zero_N, jnp.arange(8), one_N, true(8), num_groups=1, num_trajectories=8
  )
  mean_N = advantages.group_mean(score_N, zero_N, one_N, true(8), num_groups=1)
  np.testing.assert_allclose(rloo_N, mean_N * 8 / 7, rtol=1e-5, atol=1e-6)


# The same board (cluster 0) seen in rows 0, 2, 3, another (cluster 1) once; row 4 is a reflection.
RETURN_N = jnp.array([4.0, 2.0, 1.0, 1.0, 6.0])
ANCHOR_N = ids(0, 1, 0, 0, 2)


def test_step_term_by_hand():
  # Cluster 0 has mean 2 and sample std sqrt((4 + 1 + 1) / 2) = sqrt 3; clusters of one are 0.
  step_N = advantages.step_term(RETURN_N, ANCHOR_N, true(5), num_clusters=5)
  np.testing.assert_allclose(step_N, [2, 0, -1, -1, 0], rtol=1e-6)
  step_N = advantages.step_term_mean_std(RETURN_N, ANCHOR_N, true(5), num_clusters=5, eps=0.0)
  np.testing.assert_allclose(step_N, np.array([2, 0, -1, -1, 0]) / np.sqrt(3), rtol=1e-5)


def test_gigpo_leaves_reflections_out_of_the_episode_term_only():
  # Play rows of one group score 10, 10, 0, 0; the reflection (row 4, score 0) has no say in their
  # mean 5 and gets step term only. The release counts it: mean 4, and -4 for the reflection.
  score_N = jnp.array([10.0, 10.0, 0.0, 0.0, 0.0])
  group_N = ids(0, 0, 0, 0, 0)
  play_N = jnp.array([True, True, True, True, False])
  gigpo = functools.partial(advantages.gigpo, num_groups=1, num_clusters=5, step_weight=0.5)

  ours_N = gigpo(
    score_N, RETURN_N, group_N, ANCHOR_N, advantages.row_weights(play_N), play_N, true(5)
  )
  np.testing.assert_allclose(ours_N, [5 + 1, 5, -5 - 0.5, -5 - 0.5, 0], rtol=1e-6)
  released_N = gigpo(
    score_N, RETURN_N, group_N, ANCHOR_N, advantages.row_weights(true(5)), true(5), true(5)
  )
  np.testing.assert_allclose(released_N, [6 + 1, 6, -4 - 0.5, -4 - 0.5, -4], rtol=1e-6)


def test_gigpo_mean_std_scales_each_term_on_its_own():
  # Episode: deviations 5 5 -5 -5, sample std sqrt(100 / 3). Steps as above.
  score_N = jnp.array([10.0, 10.0, 0.0, 0.0, 0.0])
  play_N = jnp.array([True, True, True, True, False])
  advantage_N = advantages.gigpo_mean_std(
    score_N,
    RETURN_N,
    ids(0, 0, 0, 0, 0),
    ANCHOR_N,
    advantages.row_weights(play_N),
    play_N,
    true(5),
    num_groups=1,
    num_clusters=5,
    step_weight=0.5,
    eps=0.0,
  )
  episode = np.array([5, 5, -5, -5, 0]) / np.sqrt(100 / 3)
  step = np.array([2, 0, -1, -1, 0]) / np.sqrt(3)
  np.testing.assert_allclose(advantage_N, episode + 0.5 * step, rtol=1e-5)


def test_hgpo_by_hand():
  # k=1: all four rows, returns 0 0 4 4: mean 2, population std 2: -1 -1 1 1.
  # k=2: rows 0, 2 together (0, 4): -1 and 1; rows 1 and 3 alone: nothing.
  # k=3: rows 0, 1 together, both 0: equal, nothing; rows 2, 3 both 4: nothing.
  # Weights 2 and 3 at alpha 1: every row has mean -1 or 1. With returns 0 2 4 4 they differ:
  # k=1: mean 2.5, std sqrt((6.25 + .25 + 2.25 + 2.25) / 4) = 1.6583: -1.5076 -.3015 .9045 .9045
  # k=2: rows 0, 2: -1, 1.  k=3: rows 0, 1: (0, 2): -1, 1; rows 2, 3: equal.
  # row 0: (2 * -1.5076 + 3 * -1 + 4 * -1) / 9;  row 1: (2 * -.3015 + 4 * 1) / 6
  # row 2: (2 * .9045 + 3 * 1) / 5;             row 3: .9045
  anchor_KN = jnp.array([[0, 0, 0, 0], [0, 1, 0, 2], [0, 0, 1, 1]])
  hgpo = functools.partial(advantages.hgpo, num_clusters=4, alpha=1.0, eps=0.0)
  advantage_N = hgpo(jnp.array([0.0, 0.0, 4.0, 4.0]), anchor_KN, true(4))
  np.testing.assert_allclose(advantage_N, [-1, -1, 1, 1], rtol=1e-5)
  advantage_N = hgpo(jnp.array([0.0, 2.0, 4.0, 4.0]), anchor_KN, true(4))
  np.testing.assert_allclose(advantage_N, [-1.112788, 0.566163, 0.961814, 0.904534], rtol=1e-4)


def test_hgpo_of_one_context_is_the_step_term_in_population_units():
  # Sample std = population std * sqrt(n / (n - 1)), n = 3 in the cluster of rows 0, 2, 3.
  hgpo_N = advantages.hgpo(RETURN_N, ANCHOR_N[None], true(5), num_clusters=5, alpha=1.0, eps=0.0)
  step_N = advantages.step_term_mean_std(RETURN_N, ANCHOR_N, true(5), num_clusters=5, eps=0.0)
  np.testing.assert_allclose(hgpo_N, step_N * np.sqrt(3 / 2), rtol=1e-5)


def test_hgpo_base_gives_rows_without_company_their_trajectorys_credit():
  # Scores 1 and 0 (population std .5): base +-1 of weight 1. Row 0 has no cluster: base alone.
  # Rows 1, 2 share k=1 with returns 3 and 1: +-1 of weight 2^1. Row 1: (1 * -1 + 2 * 1) / 3.
  advantage_N = advantages.hgpo_with_base(
    jnp.array([1.0, 0.0, 1.0, 0.0]),
    ids(0, 0, 0, 0),
    jnp.array([9.0, 3.0, 1.0, 9.0]),
    jnp.array([[0, 1, 1, 2]]),
    jnp.ones(4),
    true(4),
    num_groups=1,
    num_clusters=4,
    alpha=1.0,
    eps=0.0,
  )
  np.testing.assert_allclose(advantage_N, [1, 1 / 3, -1 / 3, -1], rtol=1e-5)


def test_gae_by_hand():
  # gamma .5, lam .5: delta_1 = 4 - 2 = 2, delta_0 = 1 + .5 * 2 - 1 = 1, A_0 = 1 + .25 * 2 = 1.5.
  # The second row has one turn: delta = 3 - 1 = 2, and the value behind the mask is not read.
  advantage_NT = advantages.gae(
    jnp.array([[1.0, 4.0], [3.0, 9.0]]),
    jnp.array([[1.0, 2.0], [1.0, 9.0]]),
    jnp.array([[True, True], [True, False]]),
    gamma=0.5,
    lam=0.5,
  )
  np.testing.assert_allclose(advantage_NT, [[1.5, 2.0], [2.0, 0.0]], rtol=1e-6)


def test_gae_at_lam_one_is_the_return_above_the_value_across_attempts_too():
  rng = np.random.default_rng(2)
  reward_NAT, value_NAT = rng.normal(size=(2, 3, 2, 4)).astype(np.float32)
  mask_NAT = np.arange(4) < np.array([[4, 2], [1, 3], [2, 4]])[:, :, None]
  gammas = dict(gamma_step=0.9, gamma_traj=0.6)
  discount_NAT = returns.attempt_discounts(jnp.asarray(mask_NAT), **gammas)
  flat = [x.reshape(3, 8) for x in (reward_NAT, value_NAT, discount_NAT, mask_NAT)]
  advantage_NT = advantages.gae_discounted(*flat, lam=1.0)
  cross = returns.cross_episode_returns_recursive(reward_NAT, mask_NAT, **gammas)
  expected_NAT = np.where(mask_NAT, cross.play_NAT - value_NAT, 0.0)
  np.testing.assert_allclose(advantage_NT.reshape(3, 2, 4), expected_NAT, rtol=1e-4, atol=1e-5)


def test_gae_at_lam_zero_is_the_temporal_difference():
  reward_NT, value_NT = jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[5.0, 6.0, 7.0]])
  advantage_NT = advantages.gae(reward_NT, value_NT, true(1, 3), gamma=0.5, lam=0.0)
  np.testing.assert_allclose(advantage_NT, [[1 + 3 - 5, 2 + 3.5 - 6, 3 - 7]], rtol=1e-6)


def batch(seed, rows=40):
  """Rows of 4 groups, 10 trajectories and 12 clusters, three quarters of them valid."""
  rng = np.random.default_rng(seed)
  trajectory_N = rng.integers(0, 10, rows).astype(np.int32)
  return dict(
    score_N=rng.normal(size=rows).astype(np.float32),
    return_N=rng.normal(size=rows).astype(np.float32),
    group_N=trajectory_N % 4,
    trajectory_N=trajectory_N,
    anchor_KN=rng.integers(0, 12, (3, rows)).astype(np.int32),
    mask_N=rng.uniform(size=rows) < 0.75,
  )


@jax.jit
def every_advantage(score_N, return_N, group_N, trajectory_N, anchor_KN, mask_N):
  weight_N = advantages.trajectory_weights(trajectory_N, mask_N, num_trajectories=10)
  group = (score_N, group_N, weight_N, mask_N)
  gigpo = (score_N, return_N, group_N, anchor_KN[0], weight_N, mask_N, mask_N)
  based = (score_N, group_N, return_N, anchor_KN, weight_N, mask_N)
  sizes = dict(num_groups=4, num_clusters=12)
  return dict(
    mean=advantages.group_mean(*group, num_groups=4),
    mean_std=advantages.group_mean_std(*group, num_groups=4, eps=1e-6),
    leave_one_out=advantages.leave_one_out(
      score_N, group_N, trajectory_N, weight_N, mask_N, num_groups=4, num_trajectories=10
    ),
    gigpo=advantages.gigpo(*gigpo, **sizes, step_weight=1.0),
    gigpo_mean_std=advantages.gigpo_mean_std(*gigpo, **sizes, step_weight=1.0, eps=1e-6),
    hgpo=advantages.hgpo(return_N, anchor_KN, mask_N, num_clusters=12, alpha=1.0, eps=1e-6),
    hgpo_base=advantages.hgpo_with_base(*based, **sizes, alpha=1.0, eps=1e-6),
  )


def assert_same(actual, expected, scale=1.0):
  for name, advantage_N in actual.items():
    np.testing.assert_allclose(
      advantage_N, scale * expected[name], rtol=1e-4, atol=1e-5, err_msg=name
    )


def test_the_order_of_rows_does_not_matter():
  rows = batch(3)
  order = np.random.default_rng(4).permutation(40)
  shuffled = every_advantage(**{name: x[..., order] for name, x in rows.items()})
  assert_same(shuffled, {name: x[order] for name, x in every_advantage(**rows).items()})


def test_masked_rows_change_nothing_and_jit_agrees():
  rows = batch(5)
  clean = every_advantage.__wrapped__(**rows)
  mask_N = rows["mask_N"]
  dirty = every_advantage(
    score_N=np.where(mask_N, rows["score_N"], np.nan),
    return_N=np.where(mask_N, rows["return_N"], np.inf),
    group_N=np.where(mask_N, rows["group_N"], -1),
    trajectory_N=np.where(mask_N, rows["trajectory_N"], 10**6),
    anchor_KN=np.where(mask_N, rows["anchor_KN"], -1),
    mask_N=mask_N,
  )
  assert_same(dirty, clean)
  without = every_advantage(**{name: x[..., mask_N] for name, x in rows.items()})
  assert_same({name: x[mask_N] for name, x in dirty.items()}, without)
  for name, advantage_N in dirty.items():
    assert np.all(np.asarray(advantage_N)[~mask_N] == 0), name


def test_shift_and_scale_of_the_rewards():
  # Everything is a difference, so a shift cancels; the std forms have no unit, the others scale.
  rows = batch(6)
  moved = rows | dict(score_N=3 * rows["score_N"] + 2, return_N=3 * rows["return_N"] + 2)
  before, after = every_advantage(**rows), every_advantage(**moved)
  unitless = {"mean_std", "gigpo_mean_std", "hgpo", "hgpo_base"}
  assert_same({k: after[k] for k in unitless}, before)
  assert_same({k: after[k] for k in after.keys() - unitless}, before, scale=3.0)


def test_a_nan_reward_stays_in_its_group():
  rows = batch(7)
  rows["mask_N"][:] = True
  clean = every_advantage(**rows)
  bad = int(np.flatnonzero(rows["group_N"] == 2)[0])
  rows["score_N"][bad] = np.nan
  advantage_N = every_advantage(**rows)["mean"]
  elsewhere_N = rows["group_N"] != 2
  np.testing.assert_allclose(np.asarray(advantage_N)[elsewhere_N], clean["mean"][elsewhere_N])
  assert np.isnan(advantage_N[bad])


def test_an_id_out_of_range_is_loud():
  advantage_N = advantages.group_mean(
    jnp.array([1.0, 2.0, 3.0]), ids(0, 0, 7), jnp.ones(3), true(3), num_groups=1
  )
  np.testing.assert_allclose(advantage_N, [-0.5, 0.5, np.nan])
