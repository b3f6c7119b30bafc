"""The training step: its gradient is that of the whole batch, on the sampled tokens and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.training import mesh, objective, step
from tests.rollout import trials as make

CFG = DecoderConfig.tiny(64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=48)
PACK = pack.PackConfig(sequences=4, length=24, rows=3, response=5)
LOSS = objective.LossConfig(entropy_coef=0.01)


@pytest.fixture(scope="module")
def params():
  return policy.init(jax.random.key(0), CFG)


@pytest.fixture
def uncached():
  """Compiles anew: programs with collectives that come from the compilation cache hang and abort."""
  from jax._src import compilation_cache

  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()
  yield
  jax.config.update("jax_enable_compilation_cache", True)
  compilation_cache.reset_cache()


def rows(count, seed=0):
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(count):
    sample = make.sample(
      rng.integers(1, 64, rng.integers(2, 9)), rng.integers(1, 64, rng.integers(1, 5))
    )
    sample = sample._replace(logps=rng.normal(-4, 0.3, len(sample.ids)).astype(np.float32))
    out.append(
      dataclasses.replace(make.turn(0, "play", 0), sample=sample, advantage=float(rng.normal()))
    )
  return out


def trainer(config=LOSS, shape=None, devices=1):
  tx = step.optimiser(step.OptimConfig(learning_rate=1e-3), 10)
  grid = mesh.make(shape or mesh.MeshConfig(), jax.devices()[:devices])
  return step.Trainer(CFG, config, tx, grid, max_tokens=PACK.response)


def gradients(turns, params, config=LOSS, shape=None, devices=1, packing=PACK):
  one = trainer(config, shape, devices)
  placed = mesh.place_params(one.mesh, {"policy": params})
  return jax.device_get(one.gradients(placed, pack.pack(turns, packing)))


def close(a, b, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), a, b)


@pytest.mark.parametrize("aggregate", objective.AGGREGATES)
def test_micro_batches_of_any_size_give_one_gradient(params, aggregate):
  # Mean of micro-batch means would differ: rows and tokens are spread unevenly over the parts.
  config = dataclasses.replace(LOSS, aggregate=aggregate)
  turns = rows(17)
  small = dataclasses.replace(PACK, sequences=1)
  close(gradients(turns, params, config), gradients(turns, params, config, packing=small))


@pytest.mark.parametrize(
  "shape",
  [mesh.MeshConfig(data=4), mesh.MeshConfig(data=2, fsdp=2), mesh.MeshConfig(fsdp=2, tensor=2)],
  ids=["data4", "data2 fsdp2", "fsdp2 tensor2"],
)
def test_the_gradient_on_four_devices_is_that_on_one(params, shape, uncached):
  if jax.device_count() < 4:
    pytest.skip("needs 4 devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
  turns = rows(17)
  close(gradients(turns, params), gradients(turns, params, shape=shape, devices=4))


def test_prompt_environment_and_padding_logits_have_exactly_zero_gradient(params):
  """With all logits laid open, the loss moves only those that predict a sampled token."""
  (batch,) = pack.pack(rows(5), PACK)
  hidden_BTD = policy.hidden(params, CFG, batch.tokens_BT, batch.segment_BT, batch.position_BT)
  logits_BTV = policy.logits(params, CFG, hidden_BTD)

  def loss(logits_BTV):
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    B, S, K = batch.mask_BSK.shape
    b = np.arange(B)[:, None, None]
    logp = logp_BTV[b, batch.gather_BSK, batch.target_BSK].reshape(B * S, K)
    entropy = -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, -1)[b, batch.gather_BSK].reshape(B * S, K)
    old = batch.behaviour_BSK.reshape(B * S, K)
    tokens = objective.Tokens(
      logp,
      old,
      jnp.ones_like(old),
      old,
      entropy,
      batch.mask_BSK.reshape(B * S, K),
      batch.advantage_BS.reshape(-1),
    )
    return objective.policy_loss(LOSS, tokens, max_tokens=5)[0].total

  moved_BT = np.abs(jax.grad(loss)(logits_BTV)).sum(-1) > 0
  predicts_BT = np.zeros_like(moved_BT)
  b, s, k = np.nonzero(batch.mask_BSK)
  predicts_BT[b, batch.gather_BSK[b, s, k]] = True
  np.testing.assert_array_equal(moved_BT, predicts_BT)


def test_poison_in_padding_changes_nothing(params):
  batches = pack.pack(rows(5), PACK)
  one = trainer()
  clean = one.gradients({"policy": params}, batches)
  poisoned = []
  for batch in batches:
    pad_BT, off_BSK = batch.segment_BT == 0, ~batch.mask_BSK
    empty_BS = ~batch.mask_BSK.any(-1)
    poisoned.append(
      batch._replace(
        tokens_BT=np.where(pad_BT, 63, batch.tokens_BT),
        position_BT=np.where(pad_BT, 10_000, batch.position_BT),
        gather_BSK=np.where(off_BSK, 23, batch.gather_BSK),
        target_BSK=np.where(off_BSK, 63, batch.target_BSK),
        behaviour_BSK=np.where(off_BSK, np.nan, batch.behaviour_BSK),
        advantage_BS=np.where(empty_BS, np.nan, batch.advantage_BS),
      )
    )
  close(clean, one.gradients({"policy": params}, poisoned), atol=0)


def test_an_empty_micro_batch_changes_nothing(params):
  one = trainer()
  batches = pack.pack(rows(5), PACK)
  clean = one.gradients({"policy": params}, batches)
  close(clean, one.gradients({"policy": params}, [*batches, pack.empty(PACK)]), atol=0)


def test_an_update_moves_the_log_prob_with_the_sign_of_the_advantage(params):
  turns = rows(8)
  one = trainer(dataclasses.replace(LOSS, entropy_coef=0.0))
  batches = pack.pack(turns, PACK)
  before = one.score(params, batches)
  on_policy = [b._replace(behaviour_BSK=s) for b, s in zip(batches, before, strict=True)]
  state, metrics = one.update(one.init(params, None), on_policy)
  after = one.score(state.params["policy"], batches)
  change = sum(
    float(((a - b) * batch.advantage_BS[..., None] * batch.mask_BSK).sum())
    for a, b, batch in zip(after, before, batches, strict=True)
  )
  assert change > 0
  assert metrics["train/clipped"] == 0 and metrics["train/logp_gap_max"] < 1e-5


def test_a_non_finite_gradient_leaves_the_weights_alone(params):
  turns = rows(4)
  turns[0].advantage = float("inf")
  one = trainer()
  state, metrics = one.update(one.init(params, None), pack.pack(turns, PACK))
  assert metrics["train/finite"] == 0
  close(state.params["policy"], params, atol=0)


def test_the_critic_learns_returns_and_leaves_the_policy_alone(params):
  turns = rows(8)
  for turn in turns:
    turn.advantage, turn.value_target = 0.0, 3.0
  one = trainer(dataclasses.replace(LOSS, entropy_coef=0.0))
  one = step.Trainer(
    CFG,
    one.loss,
    step.optimiser(step.OptimConfig(learning_rate=0.0, critic_learning_rate=1e-2), 100),
    one.mesh,
    max_tokens=5,
  )
  state = one.init(params, step.init_critic(params, CFG))
  batches = pack.pack(turns, PACK)
  start = one.values(state.params["critic"], batches)[0]
  assert (start == 0).all()
  for _ in range(40):
    state, _ = one.update(state, batches)
  values = one.values(state.params["critic"], batches)
  for value, batch in zip(values, batches, strict=True):
    np.testing.assert_allclose(value[batch.mask_BSK.any(-1)], 3.0, atol=0.5)
  close(state.params["policy"], params, atol=0)


def test_trainer_old_log_probs_make_the_first_ratio_one_and_weigh_by_the_sampler(params):
  config = dataclasses.replace(LOSS, old_logps="trainer", tis_cap=1.5, entropy_coef=0.0)
  one = trainer(config)
  batches = pack.pack(rows(6), PACK)
  old = one.score(params, batches)
  _, metrics = one.update(one.init(params, None), batches, old=old)
  assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-6)


def test_a_mesh_that_does_not_fit_says_how_many_devices_it_needs():
  with pytest.raises(ValueError, match="needs 64 devices"):
    mesh.make(mesh.MeshConfig(data=8, fsdp=8))
