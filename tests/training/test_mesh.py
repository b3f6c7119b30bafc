"""Rules that place weights: what they mean, what they refuse, and what lies in the host's memory."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from experiments import base, run
from memrl_jax.models import lora, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.training import checkpoint, learner, mesh, step
from tests.training import test_step as one_device

CFG = DecoderConfig.tiny(
  64, dim=32, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=48, tie_embeddings=False
)


def specs(tree, shape=(1, 2, 2), rules=()):
  config = mesh.MeshConfig(*shape, rules=rules)
  made = mesh.make(config, jax.devices()[: np.prod(shape)])
  found = mesh.param_shardings(made, tree, config.table)
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): where.spec
    for path, where in jax.tree_util.tree_leaves_with_path(found)
  }


def test_every_matrix_is_cut_by_heads_words_or_width_over_tensor_and_over_fsdp():
  found = specs(policy.shapes(CFG))
  assert {name: spec for name, spec in found.items() if "norm" not in name} == {
    "embedding": P("tensor", "fsdp"),
    "head": P("tensor", "fsdp"),
    "layers.qkv": P(None, "fsdp", "tensor"),
    "layers.out": P(None, "tensor", None, None, "fsdp"),
    "layers.gate_up": P(None, "fsdp", None, "tensor"),
    "layers.down": P(None, "tensor", "fsdp"),
  }
  assert {spec for name, spec in found.items() if "norm" in name} == {P()}


def test_moments_and_critics_lie_as_their_weights_and_adapters_as_what_they_change():
  shapes = {"policy": policy.shapes(CFG)}
  shapes["critic"] = jax.eval_shape(lambda p: step.init_critic(p, CFG), shapes["policy"])
  moments = jax.eval_shape(step.optimiser(step.OptimConfig(), 10).init, shapes)
  cut = [spec for name, spec in specs(moments).items() if name.endswith("layers.down")]
  assert cut == [P(None, "tensor", "fsdp")] * 4  # two moments each
  config = lora.LoraConfig(rank=4, targets=lora.TARGETS)
  adapters = jax.eval_shape(lambda: lora.init(jax.random.key(0), CFG, config))
  found = specs(adapters)
  assert found["out.a"] == P(None, "tensor") and found["out.b"] == P(None, None, "fsdp")
  assert found["head.a"] == P("fsdp") and found["head.b"] == P(None, "tensor")


def test_rules_are_changed_by_config_and_what_does_not_divide_stays_whole():
  shapes = policy.shapes(CFG)
  found = specs(shapes, rules=("embed=", "mlp=tensor+fsdp"))
  assert found["embedding"] == P("tensor") and found["layers.qkv"] == P(None, None, "tensor")
  assert found["layers.down"] == P(None, ("tensor", "fsdp"))
  three = specs(policy.shapes(dataclasses.replace(CFG, vocab=63)))
  assert three["embedding"] == P(None, "fsdp")
  assert set(specs(shapes, (2, 1, 1)).values()) == {P()}


@pytest.mark.parametrize(
  "rules, sentence",
  [
    (("embed=tensor",), "tensor would split both vocab and embed of embedding"),
    (("vocab=fsdp+tensor",), "fsdp would split both vocab and embed of embedding"),
    (("widht=fsdp",), "no weight has a dimension 'widht'"),
    (("mlp=experts",), "mlp cannot be split over 'experts'"),
  ],
)
def test_rules_that_cannot_be_are_refused_in_a_sentence(rules, sentence):
  with pytest.raises(ValueError, match=sentence):
    mesh.MeshConfig(rules=rules)


def test_a_weight_of_a_new_kind_needs_a_rule():
  with pytest.raises(ValueError, match="dimension experts of router has no rule"):
    mesh.check(mesh.RULES, {"router": ("embed", "experts")})


@pytest.mark.slow
def test_what_lies_on_the_host_is_used_and_saved_as_if_it_did_not(tmp_path):
  wanted = ["mesh.offload=moments,start", "model.compute=bfloat16", "loss.kl_coef=0.1"]
  settings = base.settings(run.load("experiments/lamer_darkroom.py:smoke", wanted).config)
  one = learner.Learner(settings, seed=0, total=10, frozen=False, initial=True)
  metrics = one.learn(one_device.family(2, 2), 1, np.random.default_rng(0))
  # The weights have not moved yet: one reference, kept as it computes, and no difference to it.
  assert metrics["train/finite"] == 1 and 0 <= metrics["train/kl_ref"] < 1e-4
  moments = [leaf for leaf in jax.tree.leaves(one.state.opt_state) if leaf.ndim]
  kept = jax.tree.leaves((one.start, one._initial))
  assert {leaf.sharding.memory_kind for leaf in moments + kept} == {mesh.HOST}
  assert {leaf.dtype.name for leaf in kept} == {"bfloat16", "float32"}  # norms stay
  here = jax.tree.leaves((one.initial, one.state.params))
  assert {leaf.sharding.memory_kind for leaf in here} == {mesh.DEVICE}
  assert {leaf.dtype.name for leaf in here} == {"float32"}
  saved = checkpoint.Checkpoints(tmp_path, keep=1, keep_every=None)
  saved.save(1, one.saved(), {})
  back = step.TrainState(**saved.restore(1, one.saved())[1])
  for mine, theirs in zip(*map(jax.tree.leaves, (back, one.state)), strict=True):
    np.testing.assert_array_equal(mine, theirs)
    assert mine.sharding == theirs.sharding
