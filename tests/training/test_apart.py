"""A reference and a critic on devices of their own compute what they compute on the policy's."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import array

from experiments import base, door, run
from memrl_jax.training import apart, checkpoint, learner, mesh, step
from tests.training import test_step_mesh as whole

pytestmark = [whole.pytestmark, pytest.mark.usefixtures("uncached", "quick")]
quick = whole.quick
POLICY = mesh.MeshConfig(data=2, tensor=2)
CRITIC = mesh.MeshConfig(data=1, fsdp=2, first=4)
REFERENCE = mesh.MeshConfig(data=1, tensor=2, first=6)


def trainer(layout, models=step.MODELS):
  made, tx = mesh.make(layout), step.optimiser(whole.OPTIM, 10, models=models)
  return step.Trainer(whole.CFG, whole.LOSS, tx, made, max_tokens=5, layout=layout)


@functools.cache
def together():
  """All on one mesh: what updates, what scores, and where that is."""
  one = trainer(POLICY)
  return one, one.score, one.mesh


@functools.cache
def separate():
  """As `together`, each on a mesh of its own."""
  one, scorer = trainer(POLICY, ("policy",)), trainer(REFERENCE)
  pair = apart.Pair(one, trainer(CRITIC, ("critic",)))
  return pair, apart.Reference(scorer, one.mesh).score, scorer.mesh


def begun(parts):
  return parts[0].init(*whole.weights())


def updated(parts, state, batches=None):
  """The state after an update, and its metrics; the KL term refers to other weights than the first ones."""
  one, score, where = parts
  batches = whole.batches() if batches is None else batches
  start = mesh.place_params(where, jax.tree.map(lambda x: 0.8 * np.asarray(x), whole.weights()[0]))
  return one.update(state, batches, None, score(start, batches))


def far(tree, other):
  """The largest difference, relative to the largest number of an array."""
  pairs = zip(*(jax.tree.leaves(jax.device_get(one)) for one in (tree, other)), strict=True)
  return max(whole.apart(mine, theirs) for mine, theirs in pairs)


def devices(tree):
  return {device.id for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


def test_updates_are_those_of_one_mesh_wait_for_nothing_and_are_compiled_once(monkeypatch):
  mine, theirs, counts = begun(separate()), begun(together()), []
  for number in range(3):
    theirs, wanted = updated(together(), theirs)
    if number:  # what compiles may look at numbers; what dispatches may not
      monkeypatch.setattr(array.ArrayImpl, "_value", property(lambda self: pytest.fail("waits")))
    mine, metrics = updated(separate(), mine)
    monkeypatch.undo()
    counts.append(separate()[0].compiled())
    assert metrics.keys() == wanted.keys() and metrics["train/kl_ref"] > 0.01
    gaps = {name: whole.apart(np.asarray(metrics[name]), wanted[name]) for name in wanted}
    print(number, far(mine, theirs), gaps)
    assert max(far(mine, theirs), *gaps.values()) < 1e-5
  assert len(set(counts)) == 1
  values = [
    parts[0].values(state.params["critic"], whole.batches())
    for parts, state in ((separate(), mine), (together(), theirs))
  ]
  assert far(*values) < 1e-5
  assert devices(mine.params["policy"]) == {0, 1, 2, 3} and devices(mine.params["critic"]) == {4, 5}
  assert devices(mine.opt_state.inner_states["critic"]) == {4, 5}


@pytest.mark.parametrize("broken", ["advantage_BS", "value_target_BS"])
def test_a_gradient_of_either_that_is_not_finite_stops_both(broken):
  first, *rest = whole.batches()
  state = begun(separate())
  before = jax.device_get(state)
  spoilt = first._replace(**{broken: np.full_like(getattr(first, broken), np.inf)})
  state, metrics = updated(separate(), state, [spoilt, *rest])
  assert metrics["train/finite"] == 0
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_a_checkpoint_of_one_mesh_goes_on_apart_and_back(tmp_path):
  state, wanted = begun(together()), begun(together())
  with checkpoint.Checkpoints(tmp_path, keep=3, keep_every=None) as saved:
    for number, (here, there) in enumerate([(together(), separate()), (separate(), together())]):
      state, _ = updated(here, state)
      wanted, _ = updated(together(), wanted)
      saved.save(number, state._asdict(), {})
      like = begun(there)
      state = step.TrainState(**saved.restore(number, like._asdict())[1])
      assert jax.tree.structure(state) == jax.tree.structure(like)
      for mine, theirs in zip(*map(jax.tree.leaves, (state, like)), strict=True):
        assert mine.sharding == theirs.sharding
  assert far(state, wanted) < 1e-5


def learned(*wanted, **how):
  """A model that is about to learn, on the first two devices."""
  wanted = ["mesh.data=2", "pack.sequences=4", "loss.kl_coef=0.1", *wanted]
  settings = base.settings(run.load("experiments/ppo_darkroom.py:smoke", wanted).config)
  return learner.Learner(settings, seed=0, total=1, frozen=False, **how)


def test_the_weights_of_a_kl_term_lie_with_the_reference_alone_and_are_anchored_there():
  places = apart.Apart(reference=apart.ApartConfig(REFERENCE))
  one = learned("model.compute=bfloat16", places=places, first=(1, 1e-3), initial=True)
  first = one.start
  assert devices(first) == {6, 7} and one._initial is first
  assert devices(one.initial) == {0, 1} and one.initial["embedding"].dtype == jnp.float32
  one.state.params["policy"] = jax.tree.map(lambda leaf: leaf + 1, one.trained)
  one.anchor()
  assert devices(one.start) == {6, 7} and one.start["embedding"].dtype == jnp.bfloat16
  for now in zip(
    *(jax.tree.leaves(tree["final_norm"]) for tree in (one.start, one.trained)), strict=True
  ):
    np.testing.assert_array_equal(*map(np.asarray, now))
  assert one._initial is first and one.saved()["start"] is one.start
  one.load(jax.tree.map(jnp.array, one.saved()))
  assert devices(one.start) == {6, 7}


def test_weights_that_nobody_reads_are_not_kept():
  one = learned("loss.kl_coef=0", first=(1, 1e-3))
  assert one.start is None and one._initial is None and "start" not in one.saved()
  one.anchor()
  assert one.start is None
  with pytest.raises(ValueError, match="were not kept"):
    one.initial  # noqa: B018
  one = learned("lora.rank=2", "credit.estimator=grpo", "method.name=grpo")
  assert one.start.keys() == one.trained.keys() and one._initial is None


APART = ["critic.mesh.data=2", "critic.mesh.first=4"]


@pytest.mark.parametrize(
  "name, wanted, sentence",
  [
    ("ppo_darkroom", ["critic.mesh.first=4"], "so the rest of config.critic.mesh would do nothing"),
    ("ppo_darkroom", ["reference.mesh.data=1"], "without a KL term there is no reference"),
    ("grpo_darkroom", APART, "without PPO there is no critic"),
    ("ppo_darkroom", [*APART, "train.updates=0"], "without PPO there is no critic"),
    ("ppo_darkroom", [*APART, "critic.mesh.offload=start"], "the critic has no start"),
    (
      "ppo_darkroom",
      [*APART, "model.dtype=bfloat16", "optim.update=stochastic"],
      "config.optim.update to compensated",
    ),
    (
      "ppo_darkroom",
      ["loss.kl_coef=0.1", "reference.mesh.data=1", "mesh.offload=start"],
      "offload them there",
    ),
    ("ppo_darkroom", ["mesh.offload=start"], "leave start out of config.mesh.offload"),
    ("react_darkroom", ["mesh.sequence=true"], "nothing is trained here"),
    ("ppo_darkroom", ["mesh.offload=moments", "train.updates=0"], "nothing is trained here"),
    (
      "complementary_rooms",
      ["extractor.train=false", "extractor.mesh.sequence=true"],
      "config.extractor.mesh.sequence and",
    ),
  ],
)
def test_what_would_do_nothing_is_refused_in_a_sentence(name, wanted, sentence):
  config = run.load(f"experiments/{name}.py:smoke", wanted).config
  with pytest.raises(ValueError, match=sentence):
    base.settings(config)


@pytest.mark.parametrize(
  "wanted, sentence",
  [
    (["critic.mesh.data=2", "critic.mesh.first=1"], "1 devices of the critic train the policy too"),
    (["critic.mesh.data=2", "critic.mesh.first=7"], "change config.critic.mesh"),
    (["critic.mesh.data=3", "critic.mesh.first=2"], "3 data shards of the critic"),
  ],
)
def test_devices_that_are_not_there_or_taken_are_missed_at_the_door(wanted, sentence):
  more = ["mesh.data=2", "pack.sequences=4", *wanted]
  settings = base.settings(run.load("experiments/ppo_darkroom.py:smoke", more).config)
  with pytest.raises(ValueError, match=sentence):
    door.check_devices(settings)


@pytest.mark.slow
def test_a_run_goes_on_in_another_placement_as_the_run_that_never_moved(tmp_path):
  def played(name, *wanted):
    flags = [
      "--config=experiments/ppo_darkroom.py:smoke",
      f"--workdir={tmp_path / name}",
      "--resume",
    ]
    flags += [f"--config.{one}" for one in ("mesh.data=2", "pack.sequences=4", "loss.kl_coef=0.1")]
    flags += [one if one.startswith("--") else f"--config.{one}" for one in wanted]
    assert run.main(flags) == 0
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]

  places = [*APART, "reference.mesh.data=1", "reference.mesh.first=6"]
  played("moved", "train.updates=1")
  played("moved", "train.updates=2", *places)
  mine, theirs = played("moved", "train.updates=3"), played("stayed", "train.updates=3")
  assert len(mine) == len(theirs) == 3 and theirs[2]["train/kl_ref"] > 0
  for one, other in zip(mine, theirs, strict=True):
    assert one == pytest.approx(other, rel=1e-4, abs=1e-5)
  played("moved", "train.updates=3", "--mode=eval", "mesh.data=1")  # where there is one device only
