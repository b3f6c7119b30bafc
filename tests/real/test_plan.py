"""Plans for TPUs that are not here, by the real compiler: a small model on four chips of two generations."""

import json

import pytest

from experiments import base, run
from memrl_jax.training import ahead, plan, roofline

pytest.importorskip("libtpu", reason="compiling for TPU needs the libtpu wheel: pip install libtpu")

# Wide enough for the kernels' blocks; its arrays are large beside the padding of their tiles.
FIELDS = {
  "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 512, "head_dim": 128,
  "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 1024,
  "vocab_size": 4096, "rope_theta": 1000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  folder = tmp_path_factory.mktemp("model")
  (folder / "config.json").write_text(json.dumps(FIELDS))
  return folder


def settings(checkpoint, *changes):
  wanted = [f"model.checkpoint={checkpoint}", "mesh.data=-1", *changes]
  return base.settings(run.load("experiments/lamer_darkroom.py:smoke", wanted).config)


def test_a_chip_holds_its_part_of_the_weights_and_the_programs_hold_the_kernels(
  checkpoint, monkeypatch
):
  texts, compiled = [], ahead.compiled

  def remembered(lowered):
    program, seconds = compiled(lowered)
    texts.append(program.as_text())
    return program, seconds

  monkeypatch.setattr(ahead, "compiled", remembered)
  wanted = settings(checkpoint, "mesh.fsdp=2", "mesh.tensor=2")
  made = plan.make(wanted, "v5e:2x2")
  assert made.fits and made.chips == 4 and made.split == (1, 2, 2)
  # Norms are not split; everything else is, four ways.
  weights = made.parameters * 4 / 4
  assert made.resident["weights"] == pytest.approx(weights, rel=0.01)
  assert made.resident["moments"] == pytest.approx(2 * weights, rel=0.01)
  # The sampler's copy, from which it prefills too, has them once; of its cache a chip has one of two heads.
  assert made.resident["sliced"] == pytest.approx(weights, rel=0.01)
  e = wanted.engine
  columns = -(-(e.buckets[-1] + e.round_steps) // 128) * 128
  assert made.resident["cache"] == e.slots * columns * 2 * 1 * 128 * 2 * 4
  accumulate, apply = made.programs["accumulate"], made.programs["apply"]
  assert accumulate.arguments == pytest.approx(2 * weights, rel=0.05)  # and gradients
  assert apply.aliased == pytest.approx(3 * weights, rel=0.05)
  for name, program in made.programs.items():
    assert program.compiled and program.need <= made.need, name
    assert program.seconds == max(
      program.flops / 197e12, program.memory / 819e9, program.sent / 200e9
    )
  # 16 slots decode 8 tokens each in the seconds of a round.
  e = wanted.engine
  rate = e.slots * e.round_steps / made.programs["decode"].seconds
  assert (e.slots, e.round_steps, made.decode_tokens_s) == (16, 8, pytest.approx(rate))
  kernels = ("segment_attention", "token_logprob_backward", "decode_attention")
  assert [[k for k in kernels if f"/{k}" in text] for text in texts] == [
    ["segment_attention", "token_logprob_backward"], [], ["decode_attention"], ["decode_attention"],
  ]  # fmt: skip


def test_adapters_need_no_moments_of_the_base(checkpoint):
  changes = ("lora.rank=8", "model.dtype=bfloat16", "mesh.fsdp=4", "pack.sequences=8")
  made = plan.make(settings(checkpoint, *changes), "v6e:2x2")
  base_bytes = made.parameters * 2 / 4
  assert made.fits and made.resident["base"] == pytest.approx(base_bytes, rel=0.02)
  assert made.resident["moments"] < 0.2 * base_bytes
  # The gradient's arguments: the base, adapters and their gradients.
  wanted = made.resident["base"] + 2 * made.resident["weights"]
  assert made.programs["accumulate"].arguments == pytest.approx(wanted, rel=0.1)


def test_what_exceeds_a_chip_exits_with_1_and_says_what_to_change(checkpoint, tmp_path, capsys):
  command = [
    "--config=experiments/zeroshot_darkroom.py", "--mode=plan", "--topology=v5p:2x2x1,v5e:2x2",
    f"--config.model.checkpoint={checkpoint}", "--config.mesh.data=-1", f"--workdir={tmp_path}",
    "--config.engine.buckets=4096", "--config.engine.slots=1100", "--config.engine.share=0",
  ]  # fmt: skip
  # A slot is 2 layers x 2 heads x 128 x 2 x 4 bytes x 33 tiles of 128 columns = 17.3 MB, in the cache alone:
  # a round reads it in place. 1100 are 19 GB, which is less than a v5p has and more than a v5e.
  assert run.main(command) == 1
  assert "change: the cache takes" in capsys.readouterr().out
  large, small = json.loads((tmp_path / "plan.json").read_text())["plans"]
  assert large["fits"] and large["slots"] > 1100 and large["context"] > 4096 and not large["change"]
  assert not small["fits"] and not small["programs"]["decode"]["compiled"]
  assert small["slots"] < 1100 and "accumulate" not in small["programs"]
  assert large["programs"]["decode"]["need"] == pytest.approx(1100 * 33 * 128 * 4096, rel=0.03)


def test_an_impossible_shape_is_one_sentence(checkpoint):
  with pytest.raises(ValueError, match="there is no topology v5e:3x5"):
    plan.check(settings(checkpoint), "v5e:3x5")
  assert len(ahead.devices("v5p:8x8x8")) == 512
  assert plan.chip("v5p:8x8x8", None) == (95e9, roofline.CHIPS["v5p"])
