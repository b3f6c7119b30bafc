"""A checkpoint comes back bit for bit, on any devices, or says why it cannot; a kill costs one step."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from memrl_jax.models import policy
from memrl_jax.rollout import pack
from memrl_jax.training import checkpoint, mesh, step
from tests.training import test_step as small

ROOT = pathlib.Path(checkpoint.__file__).parents[2]


def run_python(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
  env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
  command = [sys.executable, "-c", code, *arguments]
  return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def state():
  """Weights in two types, with bits that arithmetic would lose, and a real optimiser's state."""
  awkward = np.array([np.nan, -0.0, np.inf, 1e-45, 1 / 3, 16777217], np.float32)
  params = {
    "embed": jnp.arange(6.0).astype(jnp.bfloat16).reshape(2, 3) / 7,
    "layers": [{"w": jnp.asarray(awkward)}],
  }
  return {"params": params, "opt": optax.adamw(1e-3).init(params), "steps": np.array([3, 2**40])}


def assert_same_bits(left, right):
  assert jax.tree.structure(left) == jax.tree.structure(right)
  for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
    assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture
def saved(tmp_path):
  with checkpoint.Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
    for step in range(1, 8):
      checkpoints.save(step, state(), {"step": step, "best": 0.1, "memory": ["a", {"q": 1e300}]})
    yield checkpoints


def test_arrays_and_host_state_come_back_bit_for_bit(saved):
  like = jax.tree.map(lambda leaf: np.zeros_like(leaf), state())
  step, arrays, host = saved.restore(None, like)
  assert step == 7
  assert host == {"step": 7, "best": 0.1, "memory": ["a", {"q": 1e300}]}
  assert_same_bits(arrays, jax.tree.map(np.asarray, state()))
  shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state())
  assert_same_bits(saved.restore(4, shapes)[1], state())


def test_the_newest_and_every_fourth_are_kept(saved):
  saved.wait()
  assert saved.steps() == [4, 6, 7]
  assert saved.latest() == 7
  saved.drop_after(4)
  assert saved.steps() == [4]
  saved.save(5, state(), {})
  saved.wait()
  assert saved.latest() == 5


def test_what_cannot_be_restored_is_said(saved, tmp_path):
  with pytest.raises(ValueError, match=r"no checkpoint 3 in .*; it holds steps \[4, 6, 7\]"):
    saved.restore(3, state())
  larger = state()
  larger["params"]["embed"] = jnp.zeros((2, 5))
  larger["critic"] = jnp.zeros(3)
  del larger["steps"]
  with pytest.raises(ValueError) as caught:
    saved.restore(None, larger)
  text = str(caught.value)
  assert "critic is absent there and (3,) here" in text
  assert "params.embed is (2, 3) there and (2, 5) here" in text
  assert "steps is (2,) there and absent here" in text
  for part in (tmp_path / "6" / "arrays").rglob("d/*"):
    part.write_bytes(b"damaged")
  with pytest.raises(ValueError, match=r"checkpoint 6 .* cannot be read .* go on from \[4, 7\]"):
    saved.restore(6, state())


def test_an_empty_folder_has_no_checkpoint(tmp_path):
  with checkpoint.Checkpoints(tmp_path, keep=1, keep_every=None) as checkpoints:
    assert checkpoints.latest() is None
    with pytest.raises(ValueError, match=r"no checkpoint in .*; start the run without restoring"):
      checkpoints.restore(None, state())


def test_what_cannot_be_saved_is_said(saved):
  with pytest.raises(
    ValueError, match=r"checkpoint 7 cannot follow checkpoint 7 .*drop_after\(6\)"
  ):
    saved.save(7, state(), {})
  with pytest.raises(ValueError, match="lr is a float, not an array"):
    saved.save(8, {"lr": 0.1}, {})
  with pytest.raises(ValueError, match="keys that are no strings"):
    saved.save(8, state(), {3: "three"})
  with pytest.raises(ValueError, match="keep=0"):
    checkpoint.Checkpoints("unused", keep=0, keep_every=None)


def test_the_caller_may_change_everything_once_save_returns(tmp_path):
  add = jax.jit(lambda x: x + 1, donate_argnums=0)
  mine, device, host = np.zeros(4_000_000, np.float32), jnp.zeros(4_000_000), {"seen": [1]}
  with checkpoint.Checkpoints(tmp_path, keep=1, keep_every=None) as checkpoints:
    checkpoints.save(1, {"mine": mine, "device": device}, host)
    mine += 7
    host["seen"].append(2)
    device = add(device)
    _, arrays, restored = checkpoints.restore(1, {"mine": mine, "device": device})
  assert float(np.abs(arrays["mine"]).max()) == 0 and float(jnp.abs(arrays["device"]).max()) == 0
  assert restored == {"seen": [1]}


KILLED = """
import os, signal, sys
import numpy as np
from memrl_jax.training import checkpoint
checkpoints = checkpoint.Checkpoints(sys.argv[1], keep=3, keep_every=None)
checkpoints.save(1, {"w": np.full(3, 1.5)}, {"step": 1})
checkpoints.wait()
checkpoints.save(2, {"w": np.ones(3), "more": np.random.default_rng(0).random(20_000_000)}, {})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_in_the_middle_of_a_save_costs_that_step_only(tmp_path):
  assert run_python(KILLED, str(tmp_path)).returncode == -signal.SIGKILL
  left = sorted(path.name for path in tmp_path.iterdir())
  assert any(name.startswith("2") for name in left) and "2" not in left, f"not killed in it: {left}"
  with checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as checkpoints:
    step, arrays, host = checkpoints.restore(None, {"w": np.zeros(3)})
    assert (step, host) == (1, {"step": 1})
    assert arrays["w"].tolist() == [1.5, 1.5, 1.5]
    checkpoints.save(3, {"w": np.ones(3)}, {})
  # close() has waited, and what the killed save left is gone
  assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["1", "3"]


def test_one_device_to_four_and_back(tmp_path):
  grid = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
  split = NamedSharding(grid, PartitionSpec("data"))
  like = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=split)}
  with checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as checkpoints:
    checkpoints.save(1, {"w": jnp.arange(8.0)}, {})
  with checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as checkpoints:
    _, arrays, _ = checkpoints.restore(1, like)
    assert arrays["w"].sharding == split and len(arrays["w"].addressable_shards) == 4
    assert np.asarray(arrays["w"]).tolist() == list(range(8))
    checkpoints.save(2, {"w": arrays["w"] + 1}, {})
  with checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as checkpoints:
    _, arrays, _ = checkpoints.restore(2, {"w": jnp.zeros(8)})
  assert arrays["w"].sharding == jnp.zeros(8).sharding
  assert arrays["w"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def weights(seed):
  """Some, without the minute programs of `policy.init`."""
  rng = np.random.default_rng(seed)
  shapes = jax.eval_shape(lambda key: policy.init(key, small.CFG), jax.random.key(0))
  return jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), shapes)


EIGHT_DEVICES = """
import json, sys
import jax, numpy as np
from memrl_jax.rollout import pack
from memrl_jax.training import checkpoint, mesh
from tests.training import test_checkpoint, test_step as small
one = small.trainer(shape=mesh.MeshConfig(data=2, fsdp=2, tensor=2), devices=8)
batches = pack.pack(small.rows(24), small.PACK)
state, _ = one.update(one.init(test_checkpoint.weights(0), None), batches)
assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(state)} == {8}
with checkpoint.Checkpoints(sys.argv[1] + "/run", keep=1, keep_every=None) as checkpoints:
  checkpoints.save(1, state._asdict(), {})
  np.savez(sys.argv[1] + "/leaves.npz", *map(np.asarray, jax.tree.leaves(state)))
  _, metrics = one.update(state, batches)
print(json.dumps({name: float(value) for name, value in metrics.items()}))
"""


@pytest.fixture(scope="module")
def on_eight(tmp_path_factory):
  """(folder of a checkpoint after one step on eight devices, its leaves, metrics of the next step)."""
  folder = tmp_path_factory.mktemp("eight")
  done = run_python(
    EIGHT_DEVICES, str(folder),
    XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_ENABLE_COMPILATION_CACHE="false",
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  leaves = list(np.load(folder / "leaves.npz").values())
  return folder / "run", leaves, json.loads(done.stdout)


@pytest.mark.parametrize("shape", [mesh.MeshConfig(fsdp=2, tensor=2), mesh.MeshConfig()])
def test_saved_on_eight_devices_it_goes_on_on_four_of_another_mesh_and_on_one(
  on_eight, shape, request
):
  folder, leaves, wanted = on_eight
  devices = shape.fsdp * shape.tensor
  if devices > 1:
    request.getfixturevalue("uncached")
  one = small.trainer(shape=shape, devices=devices)
  fresh = one.init(weights(1), None)
  with checkpoint.Checkpoints(folder, keep=1, keep_every=None) as checkpoints:
    _, arrays, _ = checkpoints.restore(None, fresh._asdict())
  state = step.TrainState(**arrays)
  for leaf, like, saved in zip(*map(jax.tree.leaves, (state, fresh)), leaves, strict=True):
    assert leaf.sharding == like.sharding and leaf.dtype == saved.dtype
    assert np.asarray(leaf).tobytes() == saved.tobytes()
  _, metrics = one.update(state, pack.pack(small.rows(24), small.PACK))
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, atol=1e-5, rtol=1e-5, err_msg=name)


def test_a_signal_in_the_middle_of_a_save_loses_neither_that_step_nor_the_last(tmp_path):
  weights = np.random.default_rng(0).random(4_000_000)
  with (
    checkpoint.StopSignal() as stop,
    checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as checkpoints,
  ):
    checkpoints.save(1, {"w": weights}, {"step": 1})
    assert not (tmp_path / "1").exists(), "the save was over before the signal came"
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested == "SIGTERM"
    checkpoints.save(2, {"w": 2 * weights}, {"step": 2})  # what the loop does last
  with checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as checkpoints:
    assert checkpoints.steps() == [1, 2]
    for number in (1, 2):
      _, arrays, host = checkpoints.restore(number, {"w": weights})
      assert host == {"step": number} and np.array_equal(arrays["w"], number * weights)


def test_stop_signals_set_a_flag_and_the_second_interrupt_stops(capfd):
  before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
  with checkpoint.StopSignal() as stop:
    assert stop.requested is None
    signal.raise_signal(signal.SIGTERM)
    assert stop.requested == "SIGTERM"
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      signal.raise_signal(signal.SIGINT)
  assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
  assert "SIGTERM: stopping after this update" in capfd.readouterr().err


def test_a_stop_signal_in_another_thread_is_harmless():
  seen = []

  def work():
    with checkpoint.StopSignal() as stop:
      seen.append(stop.requested)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [None]
