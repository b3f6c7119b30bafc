"""What a plan counts by hand, against XLA's own count of one layer, and a whole plan on CPU."""

import dataclasses
import json
from typing import NamedTuple

import jax
import numpy as np
import pytest

from experiments import base, run
from memrl_jax.models import policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack
from memrl_jax.sampling import engine
from memrl_jax.training import ahead, mesh, objective, plan, roofline, step

# One layer: XLA counts the body of a scan once. Wide, so that norms and softmax are small beside matmuls.
CFG = DecoderConfig.tiny(2048, dim=256, layers=1, heads=4, kv_heads=2, head_dim=64, mlp_dim=1024)
PACK = pack.PackConfig(sequences=2, length=64, rows=2, response=16)
ONE = roofline.Split(1, 1, 1)
FIELDS = {
  "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "head_dim": 16,
  "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32,
  "vocab_size": 64, "rope_theta": 1000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def counted(lowered):
  return lowered.cost_analysis()["flops"]


@pytest.mark.parametrize(
  "remat, critic", [("none", False), ("some", False), ("all", False), ("all", True)]
)
def test_the_flops_of_a_gradient_are_those_that_xla_counts_in_one_layer(remat, critic):
  how = {"none": False, "some": "some", "all": True}[remat]
  chips = mesh.make(mesh.MeshConfig(), jax.devices()[:1])
  tx = step.optimiser(step.OptimConfig(), 1)
  one = step.Trainer(CFG, objective.LossConfig(), tx, chips, max_tokens=16, remat=how)
  params = {"policy": policy.shapes(CFG)}
  if critic:
    params["critic"] = jax.eval_shape(lambda p: step.init_critic(p, CFG), params["policy"])
  xla = counted(one.lower(params, pack.empty(PACK)))
  trained = CFG.parameters  # does not count here
  ours = roofline.accumulate(CFG, PACK, ONE, 4, remat=remat, trained=trained, critic=critic).flops
  assert ours == pytest.approx(xla, rel=0.04)


def test_the_flops_of_prefill_and_of_a_decoding_step_are_those_that_xla_counts_in_two():
  cfg, columns = dataclasses.replace(CFG, layers=2), 96
  kv = jax.eval_shape(lambda: policy.empty_kv(cfg, 4, columns))
  i32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)  # noqa: E731
  weights = jax.eval_shape(lambda: policy.decode_weights(policy.init(jax.random.key(0), cfg), cfg))
  fresh = jax.eval_shape(lambda: policy.empty_kv(cfg, 4, 1))
  decode = jax.jit(policy.decode, static_argnums=1).lower(
    weights, cfg, kv, i32(4), fresh, i32(), i32(4)
  )
  assert roofline.decode(cfg, 4, 1, columns, ONE, 4, in_place=False).flops == pytest.approx(
    counted(decode), rel=0.04
  )
  stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), kv[0])
  params = policy.shapes(cfg)
  prefill = jax.jit(policy.prefill, static_argnums=1).lower(
    params, cfg, stacked, i32(4), i32(4, 32)
  )
  ours = roofline.prefill(cfg, 4, 32, columns, ONE, 4, in_place=False).flops
  assert ours == pytest.approx(counted(prefill), rel=0.04)


def test_a_round_in_place_reads_weights_and_cache_once_a_step_and_copies_nothing():
  cfg, columns, steps = dataclasses.replace(CFG, layers=2), 96, 8
  numbers = 2 * cfg.layers * 4 * columns * cfg.kv_heads * cfg.head_dim  # of 4 rows' cached tokens
  work = [
    roofline.decode(cfg, 4, steps, columns, ONE, 2, in_place=in_place) for in_place in (True, False)
  ]
  assert work[1].memory - work[0].memory == 2 * 2 * numbers
  matmuls = (
    2 * cfg.parameters - 2 * (2 * cfg.layers + 1) * cfg.dim
  )  # bytes of all weights but norms
  assert work[0].memory == pytest.approx(steps * (matmuls + 2 * numbers), rel=0.01)
  # Two sums of 4 rows of 256 numbers a layer, of which a chip of two sends as much as it has.
  split = roofline.decode(cfg, 4, steps, columns, roofline.Split(1, 1, 2), 2, in_place=True)
  assert split.sent == steps * 2 * 2 * 4 * 256 * 2


def test_a_token_sees_as_many_keys_as_a_loop_counts():
  cfg = dataclasses.replace(CFG, layers=3, sliding_window=5, global_every=3)
  for T in (3, 5, 12):
    local = sum(min(i + 1, 5) for i in range(T)) / T
    whole = sum(i + 1 for i in range(T)) / T
    assert roofline.seen(cfg, T) == pytest.approx(2 * local + whole)


def test_splitting_shares_the_work_and_only_then_is_anything_sent():
  def work(*split):
    return roofline.accumulate(
      CFG, PACK, roofline.Split(*split), 4, remat="all", trained=CFG.parameters
    )

  whole = work(1, 1, 1)
  assert whole.sent == 0
  for split in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
    assert 2 * work(*split).flops == pytest.approx(whole.flops)
    assert work(*split).sent > 0
  # 459 TFLOP at 459 TFLOP/s and 5530 GB at 2765 GB/s: the memory is the roof.
  assert roofline.Work(459e12, 5530e9, 0).seconds(roofline.CHIPS["v5p"]) == pytest.approx(2.0)


@pytest.mark.parametrize(
  "changes, moved, crossed",
  [
    ((), 28, 0),  # 3 numbers of 4 bytes read and written, a gradient read
    (("optim.moments=bfloat16",), 24, 0),
    # 2 of a weight, 2 and 4 of its moments, in and out, and 4 of the gradient; the remainder's 2 more.
    (("model.dtype=bfloat16", "optim.update=stochastic", "optim.moments=bfloat16"), 20, 0),
    (("model.dtype=bfloat16", "optim.update=compensated", "optim.moments=bfloat16"), 24, 0),
    # Moments of 8 bytes come from the host, and go back: written and read here once more.
    (("mesh.offload=moments",), 28 + 16, 8),
  ],
)
def test_an_update_moves_the_bytes_of_the_types_that_it_keeps(model, changes, moved, crossed):
  made = settings(model, "mesh.data=-1", "pack.sequences=8", *changes)
  chips = jax.devices()
  grid = ahead.grid(made, ahead.HERE, chips)
  found = ahead.model(made, grid, ahead.replica(made, ahead.HERE, grid, chips))
  # Embedding 64 x 32; of the layer 32 x 4 x 16, 2 x 16 x 32, 32 x 2 x 32 and 32 x 32; norms 3 x 32 + 2 x 16.
  numbers = 2048 + 2048 + 1024 + 2048 + 1024 + 128
  work = plan._work(made, found, plan._split(grid))["apply"]
  assert work.memory == pytest.approx(moved * numbers, abs=200)  # and counts of steps
  assert work.host == pytest.approx(crossed * numbers, abs=50)


def test_what_crosses_the_hosts_link_takes_time_where_its_rate_is_published():
  # 2 layers, 128 tokens, and of each an input of 256 numbers and an attention of 4 x 64, in 4 bytes.
  cfg = dataclasses.replace(CFG, layers=2)
  kinds = ("all", "offload")
  kept, away = (roofline.accumulate(cfg, PACK, ONE, 4, remat=kind, trained=0) for kind in kinds)
  assert away == kept._replace(host=2 * 128 * 512 * 4)
  work = roofline.Work(0.0, 0.0, 0.0, 64e9)
  assert work.seconds(roofline.GPUS["NVIDIA H100 80GB HBM3"]) == 1.0
  assert work.seconds(roofline.CHIPS["v5e"]) == 0.0


def test_a_card_is_known_by_its_whole_name_and_says_itself_what_it_holds():
  class Card(NamedTuple):
    device_kind: str

    def memory_stats(self):
      return {"bytes_limit": 60_000}

  assert plan.chip(ahead.HERE, Card("NVIDIA H200")) == (60_000, roofline.GPUS["NVIDIA H200"])
  assert plan.chip(ahead.HERE, Card("NVIDIA GH200 480GB")) == (60_000, None)  # other peaks


def test_a_step_with_fewer_rows_than_sequences_is_told_how_much_is_padding(model):
  # 2 groups of 2 trials of 3 attempts, of 4 turns and a reflection: 60 rows, in 4 steps of 15.
  sizes = ("train.groups=2", "train.group_size=2", "train.minibatches=4", "env.turns=4")
  made = settings(model, *sizes, "method.attempts=3", "pack.sequences=20")
  assert plan.rows(made) == 15
  (said,) = plan._filled(made, 20)
  assert "at least 25% of them are padding" in said and "config.train.minibatches, now 4" in said
  assert not plan._filled(settings(model, *sizes, "method.attempts=3", "pack.sequences=15"), 15)


@pytest.mark.parametrize("rows, gradient", [(2, 1000), (2, 500_000), (90, 1000)])
def test_the_room_for_the_cache_is_used_to_the_last_slot_and_column(rows, gradient):
  """Where decoding, the gradient or a prefill of many rows needs most."""
  token, other, capacity, steps = 100, 70_000, 1_000_000, 8

  def need(slots, columns):
    cache = other + token * slots * (columns + steps)
    return {
      "accumulate": cache + gradient,
      "prefill": cache + token * rows * columns,
      "decode": cache + token * slots * columns,
    }

  config = engine.EngineConfig(4, (64,), prefill_rows=(rows,))
  columns, slots = plan.room(need(4, 64), capacity, config, token, in_place=False)
  assert max(need(slots, 64).values()) <= capacity < max(need(slots + 1, 64).values())
  assert max(need(4, columns).values()) <= capacity < max(need(4, columns + 1).values())
  # Nothing is left where everything else fills the chip.
  assert plan.room(need(4, 64), other, config, token, in_place=False) == (0, 0)


def test_a_cache_that_is_read_in_place_has_room_for_whole_tiles_of_columns():
  # 4 slots of 64 + 8 columns take 128 each; what is left, 1_000_000 - 512 tokens of 100 bytes, is 9488
  # tokens more, so 10_000: 2500 columns a slot, of which 19 tiles = 2432 are whole; or 78 slots of 128.
  config = engine.EngineConfig(4, (64,))
  need = {"prefill": 51_200.0, "decode": 51_200.0}
  assert plan.room(need, 1_000_000, config, 100, in_place=True) == (2432 - 8, 78)


@pytest.fixture
def model(tmp_path):
  (tmp_path / "model").mkdir()
  (tmp_path / "model" / "config.json").write_text(json.dumps(FIELDS))
  return tmp_path / "model"


def settings(model, *more):
  wanted = [f"model.checkpoint={model}", *more]
  return base.settings(run.load("experiments/lamer_darkroom.py:smoke", wanted).config)


def arguments(model, *more):
  return [
    "--config=experiments/lamer_darkroom.py:smoke", "--mode=plan", f"--config.model.checkpoint={model}",
    f"--workdir={model.parent / 'run'}", *more,
  ]  # fmt: skip


def test_a_plan_of_what_is_here_stands_in_the_folder_and_fails_where_it_does_not_fit(
  model, monkeypatch, capsys
):
  here = arguments(model, "--topology=here", "--config.mesh.data=-1", "--config.engine.slots=4")
  here += ["--config.train.max_lag=1", "--config.pack.sequences=8"]
  make, kept = plan.make, []
  monkeypatch.setattr(plan, "make", lambda *given: kept.append(make(*given)) or kept[-1])
  assert run.main(here) == 0
  made = json.loads((model.parent / "run" / "plan.json").read_text())["plans"][0]
  assert made["chips"] == jax.device_count() and made["fits"] and not made["change"]
  assert set(made["programs"]) == {"accumulate", "apply", "prefill", "decode"}
  weights, apply = 4 * made["parameters"], made["programs"]["apply"]
  assert made["resident"]["weights"] == weights
  assert 2 * weights <= made["resident"]["moments"] <= 2 * weights + 64  # and counts of steps
  # What a gradient needs: what the compiler says, and what lies there and is no argument of it.
  one = made["programs"]["accumulate"]
  others = ("moments", "behind", "sliced", "cache")
  assert made["resident"]["behind"] == 2 * weights
  assert "start" not in made["resident"]  # nobody reads it
  assert one["need"] == (
    one["arguments"] + one["temporaries"] + one["outputs"] - one["aliased"]
    + sum(made["resident"][part] for part in others)
  )  # fmt: skip
  # A slot keeps a key and a value of 16 numbers in each of 128 + 8 columns, on every device.
  assert made["resident"]["cache"] == 4 * (128 + 8) * 2 * 16 * 4
  # The state is donated: weights and moments are written where they were.
  assert 3 * weights <= apply["aliased"] <= 3 * weights + 64
  monkeypatch.setattr(plan, "make", lambda *_: kept[0]._replace(fits=False, change=["fewer"]))
  capsys.readouterr()
  assert run.main(here) == 1
  assert "change: fewer" in capsys.readouterr().out


def test_what_a_reference_and_a_critic_hold_lies_in_the_plan_or_is_said_to_lie_elsewhere(model):
  def planned(*wanted):
    wanted = [
      f"model.checkpoint={model}",
      "mesh.data=-1",
      "pack.sequences=8",
      "loss.kl_coef=0.1",
      *wanted,
    ]
    settings = base.settings(run.load("experiments/ppo_darkroom.py:smoke", wanted).config)
    chips = ahead.devices("here")
    made = ahead.grid(settings, "here", chips)
    shapes = ahead.model(settings, made, ahead.replica(settings, "here", made, chips))
    return plan._resident(shapes, settings), plan._notes(settings, shapes, None), shapes

  places = ["reference.mesh.data=1", "reference.mesh.first=8", "critic.mesh.data=1"]
  places += ["critic.mesh.first=9", "critic.mesh.fsdp=2"]
  (whole, said, shapes), (policy, more, apart) = planned(), planned(*places)
  weights = 4 * shapes.cfg.parameters
  assert whole["start"] == weights and whole["critic"] > weights and len(more) == len(said) + 2
  assert policy.keys() == whole.keys() - {"start", "critic"}
  assert policy["moments"] == pytest.approx(whole["moments"] / 2, rel=0.01)
  assert plan._bytes(apart.elsewhere["reference"]) == weights
  # Weights and two moments, half of each matrix on either chip: norms, counts and the head are whole.
  assert 1.5 * weights < plan._bytes(apart.elsewhere["critic"]) < 1.6 * weights


@pytest.mark.parametrize(
  "more, said",
  [
    ((), "--mode=plan and --topology belong together"),
    (("--topology=h100:8",), "topology 'h100:8' is not known"),
    (
      ("--topology=here", "--config.mesh.data=-1", "--config.mesh.fsdp=3"),
      "cannot be split into fsdp 3 x tensor 1",
    ),
    (("--topology=here",), "set config.mesh.data to 8, or -1"),
    (("--topology=here", "--config.mesh.data=-1", "--config.pack.sequences=6"), "6 sequences"),
  ],
)
def test_what_cannot_be_planned_is_said_in_one_sentence(model, capsys, more, said):
  assert run.main(arguments(model, *more)) == 2
  assert said in capsys.readouterr().err
  assert not (model.parent / "run").exists()


def test_what_does_not_fit_is_told_what_to_change():
  experiment = run.load("experiments/lamer_sokoban.py:paper", [])
  settings = base.settings(experiment.config)
  sizes = {"weights": 4, "moments": 8, "start": 4, "sliced": 4, "cache": 1}

  def said(capacity, split=(1, 1, 1), **needs):
    programs = {
      name: plan.Program(True, need, *(0,) * 8, None, 0.0) for name, need in needs.items()
    }
    shape = roofline.Split(*split)
    made = plan.Plan("x", 1, shape, 1, 1, capacity, sizes, programs, 0, False, None, 1, None, 0, 3, [], [])  # fmt: skip
    return plan.advice(made, settings)

  assert "config.mesh.fsdp" in said(20, accumulate=21)[0]
  assert "config.pack.sequences" in said(100, accumulate=121)[0]
  assert "config.mesh.tensor" in said(100, (8, 1, 1), accumulate=121)[0]
  cheaper = said(100, (4, 1, 2), accumulate=121)[0]
  assert "config.model.compute" in cheaper and "config.mesh.sequence" in cheaper
  assert "keep moments and start in the host's memory" in said(20, accumulate=21)[0]
  assert "config.engine.prefill_rows" in said(100, prefill=121)[0]
  assert "at most 3 slots" in said(100, decode=121)[0]


def test_nothing_is_compiled_for_a_topology_before_all_are_known(model, monkeypatch):
  monkeypatch.setattr(ahead, "compiled", lambda *_: pytest.fail("compiled"))
  wrong = arguments(model, "--topology=here,nowhere", "--config.mesh.data=-1")
  assert run.main(wrong) == 2
