"""An engine that reads its cache in place, or is split over a mesh, answers as one that copies on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import engine as engine_lib
from memrl_jax.sampling import programs
from memrl_jax.training import mesh

CFG = DecoderConfig.tiny(
  96, dim=32, layers=2, heads=4, kv_heads=4, head_dim=8, mlp_dim=32, sliding_window=12,
  global_every=2,
)  # fmt: skip
SHAPES = engine_lib.EngineConfig(
  slots=4, buckets=(64,), prefill_rows=(2,), prefill_chunks=(8,), round_steps=4, share=2
)


@pytest.fixture(autouse=True)
def only_full_rounds(monkeypatch):
  """Fewer programs to compile."""
  monkeypatch.setattr(engine_lib.EngineConfig, "round_rows", property(lambda self: (self.slots,)))


@functools.cache
def params(seed=0):
  return policy.init(jax.random.key(seed), CFG)


def waves():
  """Groups that begin alike, the next turns of some of them, and contexts filled to the last column."""
  rng = np.random.default_rng(0)
  common = rng.integers(0, 96, 40)

  def request(prompt, seed, **settings):
    return engine_lib.Request(np.array([seed, 7], np.uint32), np.asarray(prompt), **settings)

  first = []
  for seed in range(11):
    prompt = np.concatenate([common[: 10 + seed % 3 * 10], rng.integers(0, 96, seed % 5)])
    first.append(request(prompt, seed, max_tokens=3 + seed, stop=(3,)))
  full = [request(np.concatenate([common, [seed] * n]), seed, max_tokens=24 - n)
          for seed, n in ((31, 1), (32, 20), (33, 23), (34, 23), (35, 23))]  # fmt: skip
  return first, full


def answers(engine):
  return [answer for wave in waves() for answer in engine.generate(wave)]


@functools.cache
def wanted(seed=0):
  return answers(engine_lib.Engine(CFG, params(seed), dataclasses.replace(SHAPES, share=0)))


def assert_same(one, two):
  for first, second in zip(one, two, strict=True):
    assert first.ids.tolist() == second.ids.tolist()
    np.testing.assert_allclose(first.logps, second.logps, atol=1e-5)


def test_what_is_read_in_place_is_what_would_have_been_copied():
  engine = engine_lib.Engine(CFG, params(), SHAPES, in_place=True)
  assert_same(answers(engine), wanted())
  assert engine.stats.in_place > 100
  assert not programs.reads_in_place(params())  # on CPU copies are faster


@pytest.fixture
def grid(uncached):
  return lambda tensor: mesh.make(mesh.MeshConfig(tensor=tensor), jax.devices()[:tensor])


@pytest.mark.parametrize(
  "tensor, in_place", [pytest.param(2, False, marks=pytest.mark.slow), (4, True)]
)
def test_heads_split_over_a_mesh_give_the_answers_of_one_device_and_compile_once(
  grid, tensor, in_place
):
  chips = grid(tensor)
  placed = [mesh.place_params(chips, params(seed)) for seed in (0, 1)]
  want = wanted(), wanted(1)  # compiled before the count begins, also where this test runs alone
  engine = engine_lib.Engine(CFG, placed[0], SHAPES, in_place=in_place)
  engine.warmup()
  compiled = engine_lib.compiled()
  assert_same(answers(engine), want[0])
  engine.set_params(placed[1])
  assert_same(answers(engine), want[1])
  assert engine_lib.compiled() == compiled
  # Every device holds its part of the heads, and the engine holds what `resident` says.
  cache = engine._cache.kv
  assert cache[0].key_BKdS.sharding.shard_shape(cache[0].key_BKdS.shape)[2] == 4 // tensor
  resident = programs.resident(CFG, placed[0], SHAPES, in_place=in_place)
  for held, said in zip(
    jax.tree.leaves((engine._weights, cache)), jax.tree.leaves(tuple(resident)), strict=True
  ):
    assert (held.shape, held.dtype) == (said.shape, said.dtype)
    assert held.sharding.is_equivalent_to(said.sharding, held.ndim)


@pytest.mark.parametrize("in_place", [False, True])
def test_the_lowered_programs_take_what_is_resident_and_nothing_as_large(in_place):
  placed = mesh.place_params(mesh.make(mesh.MeshConfig(), jax.devices()[:1]), params())
  want = programs.resident(CFG, placed, SHAPES, in_place=in_place)
  lowered = programs.lowered(CFG, placed, SHAPES, in_place=in_place)
  for name, program in lowered.items():
    given = {leaf.shape for leaf in jax.tree.leaves(program.in_avals)}
    weights = want.weights if in_place or name == "decode" else placed
    assert {leaf.shape for leaf in jax.tree.leaves(weights)} <= given
    assert ({leaf.shape for leaf in jax.tree.leaves(want.cache)} <= given) == in_place


def test_heads_that_do_not_divide_lie_whole_on_every_device():
  if jax.device_count() < 4:
    pytest.skip("needs 4 devices: XLA_FLAGS=--xla_force_host_platform_device_count=4")
  chips = mesh.make(mesh.MeshConfig(tensor=4), jax.devices()[:4])
  two = dataclasses.replace(CFG, kv_heads=2)
  shapes = policy.shapes(two)
  placed = jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    shapes, mesh.param_shardings(chips, shapes),
  )  # fmt: skip
  for in_place in (False, True):
    (key, _), *_ = programs.resident(two, placed, SHAPES, in_place=in_place).cache
    assert key.sharding.is_fully_replicated and key.sharding.mesh == chips
