"""Weights that were trained in one layout sample alike in another, on replicas and in half precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import base, lamer_darkroom, mempi_hints
from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import engine, replicas
from memrl_jax.training import handover, mesh

pytestmark = pytest.mark.usefixtures("uncached")
CFG = DecoderConfig.tiny(32, dim=16, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_dim=32)
CONFIG = engine.EngineConfig(2, (16,), prefill_rows=(2,), prefill_chunks=(8,), round_steps=4)


def made(config):
  """Weights on a mesh of four devices as training has them, and their handover."""
  trained = mesh.make(mesh.MeshConfig(fsdp=2, tensor=2))
  params = mesh.place_params(trained, policy.init(jax.random.key(0), CFG))
  return params, handover.Handover(config, handover.grid(config, trained, jax.devices()))


def requests():
  """Two homes, whose prompts begin alike, more than two slots hold."""
  rng = np.random.default_rng(0)
  begin = rng.integers(0, 32, (2, 5))
  return [
    engine.Request(
      np.array([1, n], np.uint32), np.append(begin[n % 2], rng.integers(0, 32, 2)), 6, home=n % 2
    )
    for n in range(8)
  ]


@pytest.mark.slow
@pytest.mark.parametrize(
  "config, count",
  [
    (handover.ReplicaConfig(tensor=2), 2),
    (handover.ReplicaConfig(tensor=1, first=1, devices=2), 2),
    (handover.ReplicaConfig(tensor=1), 4),
    (handover.ReplicaConfig(devices=2), 1),
  ],
)
def test_replicas_sample_what_one_engine_samples_where_the_weights_are_trained(config, count):
  params, hand = made(config)
  want = engine.Engine(CFG, params, CONFIG).generate(requests())
  views = hand(params)
  assert len(views) == hand.views == count
  devices = [view["embedding"].sharding.device_set for view in views]
  assert len(set().union(*devices)) == sum(map(len, devices))  # nobody shares a device
  several = replicas.Replicas(CFG, views, CONFIG)
  for version in (0, 1):
    got = several.generate(requests())
    for one, other in zip(got, want, strict=True):
      np.testing.assert_array_equal(one.ids, other.ids)
      np.testing.assert_allclose(one.logps, other.logps, atol=1e-5)
    assert several.version == version and not several.pending
    several.set_params(hand(params))


def test_a_sampler_in_half_precision_gets_the_cast_weights():
  params, hand = made(handover.ReplicaConfig(tensor=1, devices=1, dtype="bfloat16"))
  (view,) = hand(params)
  assert {leaf.dtype for leaf in jax.tree.leaves(view)} == {jnp.dtype("bfloat16")}
  cast = jax.tree.map(lambda leaf: np.asarray(leaf).astype(jnp.bfloat16), params)
  jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, view), cast)
  got = engine.Engine(CFG, view, CONFIG).generate(requests())
  assert all(np.isfinite(one.logps).all() for one in got)


def test_a_home_stays_with_its_engine_until_it_would_wait_there():
  params, hand = made(handover.ReplicaConfig(tensor=2))
  several = replicas.Replicas(CFG, hand(params), CONFIG)
  loads = []
  for request in [r for r in requests() if r.home == 0][:3]:  # an engine has two slots
    several.submit(request)
    loads.append([one.pending for one in several._engines])
  assert loads == [[1, 0], [2, 0], [2, 1]]


@pytest.mark.parametrize(
  "config, sentence",
  [
    (handover.ReplicaConfig(tensor=3), "4 devices of 1 hosts cannot be divided into replicas of 3"),
    (handover.ReplicaConfig(first=6, devices=3), "3 devices from number 6 on .* 8 are there"),
  ],
)
def test_devices_that_cannot_be_divided_are_named(config, sentence):
  with pytest.raises(ValueError, match=sentence):
    made(config)


@pytest.mark.parametrize("section", ["", "agent."])
def test_replicas_of_what_a_server_samples_are_refused(section):
  method = mempi_hints if section else lamer_darkroom
  config = method.get_config("smoke")
  base.override(config, [f"{section}remote.url=http://127.0.0.1:1", f"{section}replicas.tensor=1"])
  with pytest.raises(ValueError, match=f"so config.{section}replicas would do nothing"):
    base.settings(config)


def test_by_default_the_engine_reads_the_trained_arrays_themselves():
  params, hand = made(handover.ReplicaConfig())
  (view,) = hand(params)
  assert view is params
