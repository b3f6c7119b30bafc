"""The training step: its gradient is that of the whole batch, on the sampled tokens and nothing else."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import base, recipes
from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.training import mesh, objective, step
from tests.rollout import trials as make

CFG = DecoderConfig.tiny(64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=48)
PACK = pack.PackConfig(sequences=4, length=24, rows=3, response=5)
PACK_TREE = pack.PackConfig(sequences=3, length=96, rows=6, response=5)
LOSS = objective.LossConfig(entropy_coef=0.01)


@pytest.fixture(scope="module")
def params():
  return policy.init(jax.random.key(0), CFG)


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


def family(trials=3, turns=4, seed=0):
  """Rows of trials at one task: the rules first, then what was said and seen so far."""
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(trials):
    prompt = np.arange(1, 15)
    for _ in range(turns):
      ids = rng.integers(20, 23, rng.integers(1, 5))
      sample = make.sample(prompt, ids)
      sample = sample._replace(
        logps=rng.normal(-4, 0.3, len(ids)).astype(np.float32), temperature=rng.uniform(0.7, 1.3)
      )
      out.append(
        dataclasses.replace(
          make.turn(0, "play", 0),
          sample=sample,
          advantage=float(rng.normal()),
          value_target=float(rng.normal()),
        )
      )
      prompt = np.concatenate([prompt, ids, rng.integers(30, 32, 3)])
  return out


def trainer(config=LOSS, shape=None, devices=1, cfg=CFG):
  tx = step.optimiser(step.OptimConfig(learning_rate=1e-3), 10)
  grid = mesh.make(shape or mesh.MeshConfig(), jax.devices()[:devices])
  return step.Trainer(cfg, config, tx, grid, max_tokens=PACK.response)


def gradients(turns, params, config=LOSS, shape=None, devices=1, packing=PACK):
  one = trainer(config, shape, devices)
  placed = mesh.place_params(one.mesh, {"policy": params})
  return jax.device_get(one.gradients(placed, pack.pack(turns, packing)))


def close(a, b, atol=1e-6):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=1e-4), a, b)


def test_shared_prefixes_give_the_loss_and_gradient_of_separate_rows():
  cfg = dataclasses.replace(CFG, sliding_window=7, global_every=2)  # a local and a global layer
  params = policy.init(jax.random.key(0), cfg)
  tree = {"policy": params, "critic": step.init_critic(params, cfg)}
  tree["critic"]["value"] = jax.random.normal(jax.random.key(1), (cfg.dim,))  # 0 sends nothing down
  config = dataclasses.replace(LOSS, kl_coef=0.1)
  turns, one, found = family(), trainer(config, cfg=cfg), {}
  for share in pack.SHARE:
    packed = pack.pack_with_places(turns, dataclasses.replace(PACK_TREE, share=share))
    grads = one.gradients(tree, packed.batches)
    _, metrics = one.update(one.init(params, tree["critic"]), packed.batches)
    found[share] = packed.tokens, grads, metrics
  (shared, mine, metrics), (apart, plain, wanted) = found["prefix"], found["none"]
  relative = {name: distance(mine[name], plain[name]) for name in plain}
  print(f"tokens {shared} instead of {apart}; gradients differ by {relative}")
  assert shared < 0.6 * apart
  assert max(relative.values()) < 1e-5
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def distance(tree, other):
  """|a - b| / |b| over all weights."""
  gap = jax.tree.map(lambda a, b: a - b, tree, other)
  return float(optax.global_norm(gap) / optax.global_norm(other))


def test_the_step_holds_no_array_of_positions_times_vocabulary(params):
  # V is so large that nothing else comes near: the embedding has V * 32, a chunk of logits at most
  # B * S * K = 60 of the B * T = 384 positions.
  cfg = dataclasses.replace(CFG, vocab=4096)
  one = trainer(cfg=cfg)
  packing = dataclasses.replace(PACK, length=96)
  batch = pack.empty(packing)
  compiled = one.lower({"policy": policy.shapes(cfg)}, batch).compile()
  shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", compiled.as_text())
  largest = max(math.prod(map(int, shape.split(","))) for shape in shapes)
  everywhere = packing.sequences * packing.length * 4096
  assert 4096 * 32 <= largest < everywhere
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * everywhere


@pytest.mark.parametrize("aggregate", objective.AGGREGATES)
def test_micro_batches_of_any_size_give_one_gradient(params, aggregate):
  # Mean of micro-batch means would differ: rows and tokens are spread unevenly over the parts.
  config = dataclasses.replace(LOSS, aggregate=aggregate)
  turns = rows(17)
  small = dataclasses.replace(PACK, sequences=1)
  close(gradients(turns, params, config), gradients(turns, params, config, packing=small))


def test_prompt_environment_and_padding_logits_have_exactly_zero_gradient(params):
  """With all logits laid open, the loss moves only those that predict a sampled token."""
  (batch,) = pack.pack(rows(5), PACK)
  hidden_BTD = policy.hidden(
    params, CFG, batch.tokens_BT, batch.segment_BT, batch.position_BT, batch.parent_BN
  )
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
      batch.off_BS.reshape(-1),
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
  """A sampler with half the probability weighs 2, cut to 1.5, one with four times weighs 1/4: as advantages do."""
  config = dataclasses.replace(LOSS, old_logps="trainer", tis_cap=1.5, entropy_coef=0.0)
  one, weights = trainer(config), np.array([1.5, 0.25, 1.0, 1.5, 0.25, 1.0])
  apart = np.log([0.5, 4.0, 1.0, 0.5, 4.0, 1.0])  # log pi_sampler - log pi_trainer

  def stepped(apart, weights):
    made = rows(6)
    (scored,) = one.score(params, batches := pack.pack(made, PACK))
    places = pack.pack_with_places(made, PACK).places
    for turn, (_, b, s), d, w in zip(made, places, apart, weights, strict=True):
      logps = np.asarray(scored[b, s, : len(turn.sample.ids)]) + d
      turn.sample, turn.advantage = turn.sample._replace(logps=logps), turn.advantage * w
    batches = pack.pack(made, PACK)
    state, metrics = one.update(
      one.init(params, None), batches, old=one.old(params, batches, off=False)
    )
    return state, jax.device_get(metrics), [len(turn.sample.ids) for turn in made]

  state, metrics, lengths = stepped(apart, np.ones(6))
  wanted, plain, _ = stepped(np.zeros(6), weights)
  assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-6)
  assert metrics["train/loss"] == pytest.approx(plain["train/loss"], rel=1e-5)
  assert metrics["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
  close(state.params["policy"], wanted.params["policy"], atol=1e-6)
  share = (lengths[0] + lengths[3]) / sum(lengths)
  assert (
    metrics["train/truncated"] == pytest.approx(share, rel=1e-6) and not plain["train/truncated"]
  )
  assert metrics["train/logp_gap_max"] == pytest.approx(np.log(4), rel=1e-4)


def test_on_policy_every_ratio_is_one_at_any_temperature(params):
  one = trainer()
  batches = pack.pack(family(), PACK_TREE)
  scored = one.score(params, batches)
  on_policy = [b._replace(behaviour_BSK=s) for b, s in zip(batches, scored, strict=True)]
  _, metrics = one.update(one.init(params, None), on_policy)
  assert metrics["train/ratio"] == pytest.approx(1.0, abs=1e-6)
  assert metrics["train/logp_gap_max"] < 1e-5 and metrics["train/clipped"] == 0


@pytest.mark.parametrize("field", ["top_p", "top_k", "temperature"])
@pytest.mark.parametrize("method", ["lamer", "ppo", "grpo", "rloo", "gigpo"])
def test_no_method_trains_on_a_truncated_distribution(method, field):
  config = base.new(method, "darkroom")
  getattr(recipes, method)(config, "laptop")
  config.sampling[field] = {"top_p": 0.9, "top_k": 20, "temperature": 0.0}[field]
  with pytest.raises(ValueError, match="need temperature > 0, top_p 1 and top_k 0"):
    base.settings(config)


def test_a_mesh_that_does_not_fit_says_how_many_devices_it_needs():
  with pytest.raises(ValueError, match="needs 64 devices"):
    mesh.make(mesh.MeshConfig(data=8, fsdp=8))
