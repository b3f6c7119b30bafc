"""Weights of bfloat16 move as float32 ones would, and what computes in bfloat16 is rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import base, recipes
from memrl_jax.models import policy
from memrl_jax.rollout import pack
from memrl_jax.training import mesh, objective, precision, step
from tests.training import test_step as one_device

CFG = one_device.CFG


def moved(update, steps=2000, size=1e-4):
  """By which factor weights have grown after so many updates of `size` times what they began with."""
  start = {"w": jnp.linspace(1, 2, 4096).astype(jnp.bfloat16), "f": jnp.ones(4)}
  one = precision.UPDATES[update](optax.sgd(1.0))

  def again(carry, _):
    grads = jax.tree.map(lambda leaf: -size * leaf.astype(jnp.float32), start)
    return one.step(grads, *carry[::-1])[0:2], None

  (params, _), _ = jax.jit(lambda carry: jax.lax.scan(again, carry, None, steps))(
    (start, one.init(start))
  )
  assert params["w"].dtype == jnp.bfloat16 and params["f"].dtype == jnp.float32
  np.testing.assert_allclose(params["f"], 1 + steps * size, rtol=1e-4)
  return np.asarray(params["w"], np.float32) / np.asarray(start["w"], np.float32)


def test_small_updates_move_bfloat16_weights_only_if_what_is_cut_off_counts():
  # 1e-4 is a twentieth of half the distance between two bfloat16 numbers; 2000 of them are 0.2.
  np.testing.assert_array_equal(moved("plain"), 1.0)
  compensated = moved("compensated")
  assert np.abs(compensated - 1.2).max() < 1.2 / 256  # the last rounding: each weight is right
  stochastic = moved("stochastic")
  # A step is rounded by at most 2^-7 of a weight, so 2000 scatter by less than sqrt(2000) / 2 of that,
  # and the mean of 4096 weights by a 64th.
  assert abs(stochastic.mean() - 1.2) < 4 * np.sqrt(2000) / 2 * 2**-7 / 64
  assert 0.01 < stochastic.std() < 0.2


def test_stochastic_rounding_repeats_and_differs_between_steps_and_weights():
  one = precision.stochastic(optax.sgd(1.0))
  start = {name: jnp.ones(512, jnp.bfloat16) for name in "ab"}
  grads = {name: jnp.full(512, 1e-3) for name in "ab"}
  first, state = one.step(grads, one.init(start), start)
  again, _ = one.step(grads, one.init(start), start)
  second, _ = one.step(grads, state, start)
  np.testing.assert_array_equal(first["a"], again["a"])
  assert (first["a"] != second["a"]).any() and (first["a"] != first["b"]).any()


def test_a_float32_is_its_bfloat16_and_the_rest():
  special = [0.0, -0.0, 1e-40, 3.4e38, np.inf, -np.inf]
  x = np.concatenate([np.random.default_rng(0).normal(size=4096), special]).astype(np.float32)
  narrow, rest = precision.parted(x)
  np.testing.assert_array_equal(precision.joined(narrow, rest), x)
  # The nearest: within half of the last of 8 bits. (The largest float32 has none, and rounds to inf.)
  gap = np.abs(np.asarray(narrow, np.float32)[:4096] - x[:4096])
  assert (gap <= 2**-8 * np.abs(x[:4096])).all()


def trainer(**options):
  chips = mesh.make(mesh.MeshConfig(), jax.devices()[:1])
  tx = step.optimiser(step.OptimConfig(), 10)
  return step.Trainer(CFG, objective.LossConfig(), tx, chips, max_tokens=5, **options)


def test_compensated_weights_and_what_they_leave_out_are_those_that_adamw_makes_of_float32_ones():
  tx = step.optimiser(step.OptimConfig(learning_rate=1e-4), 10)
  narrow = {"policy": {"w": jax.random.normal(jax.random.key(0), (64,), jnp.bfloat16)}}
  wide = optax.tree.cast(narrow, jnp.float32)
  plain, one = precision.plain(tx), precision.compensated(tx)
  theirs, mine = plain.init(wide), one.init(narrow)
  for n in range(3):
    grads = {"policy": {"w": jax.random.normal(jax.random.key(n), (64,))}}
    wide, theirs = plain.step(grads, theirs, wide)
    narrow, mine = one.step(grads, mine, narrow)
  both = precision.joined(narrow["policy"]["w"], mine["rest"]["policy"]["w"])
  np.testing.assert_array_equal(both, wide["policy"]["w"])
  assert (both != narrow["policy"]["w"]).mean() > 0.9


@pytest.mark.parametrize("update", ["stochastic", "compensated"])
def test_a_trainer_of_bfloat16_weights_keeps_gradients_and_moments_in_float32(update):
  one = trainer(update=update)
  narrow = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), policy.shapes(CFG)
  )
  state = one.init(narrow, None)
  sums = jax.eval_shape(one._zeros_fn, state.params)
  added = jax.eval_shape(one._accumulate_fn, {}, state.params, sums, *_batch())
  after, _ = jax.eval_shape(one._apply_fn, state, added)
  assert jax.tree.map(_kind, after) == jax.tree.map(_kind, state)
  assert {leaf.dtype for leaf in jax.tree.leaves(added.grads)} == {jnp.dtype("float32")}
  assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("bfloat16")}
  numbers = [x for x in jax.tree.leaves(after.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)]
  assert len(numbers) == 2 * len(jax.tree.leaves(narrow))
  assert {leaf.dtype for leaf in numbers} == {jnp.dtype("float32")}


def _kind(leaf):
  return leaf.shape, leaf.dtype


def _batch():
  batch = pack.empty(one_device.PACK_TREE)
  return batch, batch.behaviour_BSK, batch.behaviour_BSK


def test_a_bfloat16_first_moment_changes_a_step_by_its_rounding_and_the_second_is_left_alone():
  start = {"policy": {"w": jnp.ones(4096)}}
  ends = {}
  for moments in precision.MOMENTS:
    one = precision.plain(step.optimiser(step.OptimConfig(1e-3, moments=moments), 10))
    params, state = start, one.init(start)
    for n in range(3):
      grads = {"policy": {"w": jax.random.normal(jax.random.key(n), (4096,))}}
      params, state = one.step(grads, state, params)
    sizes = sorted(leaf.dtype.itemsize for leaf in jax.tree.leaves(state) if leaf.shape)
    assert sizes == ([2, 4] if moments == "bfloat16" else [4, 4])
    ends[moments] = jax.tree.map(jnp.subtract, params, start)
  assert 0 < one_device.distance(ends["bfloat16"], ends["float32"]) < 2**-8


def test_what_a_kl_term_refers_to_scores_the_same_when_it_is_kept_as_it_computes():
  params = policy.init(jax.random.key(0), CFG)
  kept = precision.kept(params, "bfloat16")
  assert kept["embedding"].dtype == kept["layers"]["qkv"].dtype == jnp.bfloat16
  assert kept["final_norm"]["weight"].dtype == jnp.float32
  batches = pack.pack(one_device.family(), one_device.PACK_TREE)
  one = trainer(compute="bfloat16")
  whole, rounded = one.score(params, batches)[0], one.score(kept, batches)[0]
  np.testing.assert_array_equal(whole, rounded)
  exact = trainer().score(params, batches)[0]
  assert whole.dtype == jnp.float32 and 1e-4 < np.abs(whole - exact).max() < 0.1


def test_settings_refuse_precisions_that_lose_or_do_nothing():
  def wrong(match, **values):
    config = base.new("lamer", "darkroom")
    recipes.lamer(config, "laptop")
    for key, value in values.items():
      section, _, name = key.partition("_")
      config[section][name] = value
    with pytest.raises(ValueError, match=match):
      base.settings(config)

  wrong("updates of this size vanish in bfloat16", model_dtype="bfloat16")
  wrong("config.optim.update to plain", optim_update="stochastic")
  wrong("adapters compute in the dtype", model_compute="bfloat16", lora_rank=4)
  wrong("cannot compute in 'float16'", model_compute="float16")
  wrong("moments 'int8' is not known", optim_moments="int8")
  wrong("update 'kahan' is not known", optim_update="kahan")
