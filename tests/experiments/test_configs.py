"""Config files turn into checked settings, and a wrong key or value is one sentence that names it."""

import json

import pytest

from experiments import base, hinting, recipes, run
from memrl_jax import methods
from memrl_jax.envs import panel

FILES = run._config_files()
EXTRA = {"darkroom": ("heldout",), "minesweeper": ("mines5",), "sokoban": ("boxes2",)}
LAMER = [m for m in methods.METHODS if m not in ("hgpo", *methods.REMEMBERING)]
WORLDS = ("rooms", "minihack", "alfworld", "webshop", "swebench", "multitask")
FROZEN = ("lab", "hints", "alfworld", "lifelong", "bigcodebench", "hle")
HINTED = ("hints", "lab", "alfworld", "lifelong", "miniwob", "webarena", "workarena")
CALLED = {
  "swebench": "swe",
  "multitask": "mix",
  "lifelong": "lifelong_db",
}  # the environment's name
TIPS = ("empo2", "grpo", "gigpo", "reflexion", "retrospex")  # where EMPO2 plays
CASES = [
  (path.stem, variant)
  for path in FILES
  for variant in ("laptop", "smoke", "paper", *EXTRA.get(path.stem.partition("_")[2], ()))
]
PAPERS = [f"mempi_{env}" for env in HINTED]


def load(name, variant="laptop", *overrides):
  return run.load(f"experiments/{name}.py:{variant}", overrides)


def settings(name, variant="laptop", *overrides):
  experiment = load(name, variant, *overrides)
  return base.settings(experiment.config, experiment.name, experiment.variant)


def test_there_is_one_file_for_each_method_and_environment():
  wanted = {f"{m}_{e}" for m in LAMER for e in EXTRA}  # hgpo: gigpo's file with two values changed
  wanted |= {f"{m}_{e}" for m in TIPS for e in recipes.TIP_ENVIRONMENTS}
  wanted |= {f"complementary_{world}" for world in WORLDS} | {f"memrl_{env}" for env in FROZEN}
  wanted |= {f"mempi_{env}" for env in HINTED} | {"memoryr1_hints"}
  assert {path.stem for path in FILES} == wanted


@pytest.mark.parametrize("name,variant", CASES)
def test_every_file_and_variant_gives_checked_settings(name, variant):
  s = settings(name, variant)
  method, _, env = name.partition("_")
  called = CALLED.get(env, env)
  assert (s.name, s.variant, s.method_name, s.env.name) == (name, variant, method, called)
  assert (s.train.updates == 0) == (s.frozen and method not in methods.REMEMBERING)
  longest = max(s.sampling.play_tokens, s.sampling.reflect_tokens)
  assert longest <= s.pack.response <= s.pack.length
  assert s.engine.buckets[-1] <= s.pack.length  # or a long prompt ends the run
  seeds = getattr(panel.load(s.eval.panel), s.eval.half)
  assert s.eval.tasks <= len(seeds)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_file_says_how_to_run_it(path):
  text = path.read_text("utf-8")
  assert f"python experiments/run.py --config=experiments/{path.name}\n" in text
  assert all(word in text for word in ("Claim ", "Paper ", "Hardware ", "Variants "))


@pytest.mark.parametrize("variant", ["laptop", "smoke", "paper"])
@pytest.mark.parametrize("env", EXTRA)
def test_lamer_and_its_baselines_play_the_same_number_of_attempts(env, variant):
  def attempts(method):
    s = settings(f"{method}_{env}", variant)
    return s.train.updates * s.train.groups * s.train.group_size * s.method.attempts

  assert {attempts(m) for m in ("gigpo", "grpo", "rloo", "ppo")} == {attempts("lamer")}


def test_the_paper_variant_has_the_paper_s_rows_per_update():
  # experiments/lamer.md 1.2: 128 trials x (3 x 7 turns + 2 reflections) = 2944 rows, RL 384 x 7 = 2688.
  for env in ("sokoban", "minesweeper"):
    lamer, gigpo = settings(f"lamer_{env}", "paper"), settings(f"gigpo_{env}", "paper")
    trials = lamer.train.groups * lamer.train.group_size
    assert trials * (3 * lamer.env.options.turns + 2) == 2944
    assert gigpo.train.groups * gigpo.train.group_size * gigpo.env.options.turns == 2688


@pytest.mark.parametrize("variant", ["laptop", "smoke"])
def test_mempi_s_baselines_are_judged_on_its_tasks_with_its_agent(variant):
  def judged(s, agent):
    e = s.eval
    panel = (e.panel, e.half, e.tasks, e.options, e.temperature, e.top_p, e.top_k)
    plays = (agent.model.checkpoint, agent.sampling.play_tokens, s.method.eval_attempts)
    return s.env.options, panel, plays

  mempi = settings("mempi_hints", variant)
  assert mempi.agent.sampling.temperature == mempi.eval.temperature
  managed = settings("memoryr1_hints", variant)
  memrl = settings("memrl_hints", variant, "env.reported=0.5")
  assert judged(mempi, mempi.agent) == judged(managed, managed.agent) == judged(memrl, memrl)


@pytest.mark.parametrize("name", PAPERS)
def test_mempi_s_paper_variant_also_trains_adapters_and_its_models_share_no_device(name):
  whole, adapted = settings(name, "paper"), settings(name, "paper", *hinting.LORA)
  assert (whole.lora.rank, whole.model.dtype) == (0, "float32")
  assert adapted.lora.rank
  for rate in (lambda s: s.optim.learning_rate, lambda s: s.method.distil_rate):
    assert rate(adapted) == pytest.approx(10 * rate(whole))
  mesh, agent = whole.mesh, whole.agent.mesh
  assert mesh.first + mesh.data * mesh.fsdp * mesh.tensor <= agent.first
  assert agent.data * agent.fsdp * agent.tensor == 4


def test_heldout_trains_and_evaluates_on_different_halves():
  s = settings("lamer_darkroom", "heldout")
  assert s.env.options.split == "train"
  assert dict(s.eval.options) == {"split": "heldout"}


def test_harder_variants_arrive_as_named_changes():
  s = settings("lamer_minesweeper", "laptop", "eval.harder.six.mines=6", "eval.harder.six.turns=9")
  assert s.eval.harder == (("six", (("mines", 6), ("turns", 9))),)


def test_an_override_arrives_with_its_type():
  s = settings(
    "lamer_darkroom",
    "laptop",
    "optim.learning_rate=1",
    "engine.buckets=(64, 128)",
    "eval.swap=random,base",
    "eval.arms=none",
    "credit.batch_scale=False",
    "eval.options.start=random",
    "env.workers=3",
  )
  assert s.optim.learning_rate == 1.0 and isinstance(s.optim.learning_rate, float)
  assert s.engine.buckets == (64, 128)
  assert (s.eval.swap, s.eval.arms) == (("random", "base"), ("none",))
  assert s.credit.batch_scale is False
  assert dict(s.eval.options) == {"start": "random"}
  assert s.env.workers == 3


def spelled(value):
  """How a value is written on the command line."""
  return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("name", ["lamer_darkroom", "ppo_sokoban", "react_minesweeper"])
def test_every_value_of_a_config_can_be_written_on_the_command_line(name):
  experiment = load(name)
  flat = {
    f"{section}.{key}": value
    for section, values in base.plain(experiment.config).items()
    if isinstance(values, dict)
    for key, value in values.items()
    if not isinstance(value, dict)
  }
  assert len(flat) > 80
  again = load(name, "laptop", *(f"{key}={spelled(value)}" for key, value in flat.items()))
  assert base.plain(again.config) == base.plain(experiment.config)


def test_the_record_is_json_and_names_the_experiment():
  record = load("gigpo_sokoban", "smoke").record()
  assert json.loads(json.dumps(record))["experiment"] == "gigpo_sokoban"
  assert record["variant"] == "smoke"


@pytest.mark.parametrize(
  "override,words",
  [
    ("optim.learning_rat=1", "did you mean config.optim.learning_rate?"),
    ("learning_rate=1", "did you mean config.optim.learning_rate?"),
    ("optimm.learning_rate=1", "did you mean config.optim.learning_rate?"),
    ("optim.zzz=1", "config.optim has learning_rate,"),
    ("zzz.zzz=1", "the sections are seed, env,"),
    ("env.mines=3", "config.env.mines is not known"),
    ("eval.options.mines=3", "config.eval.options.mines is not known"),
    ("eval.harder.big.sizee=7", "config.eval.harder.big.sizee is not known"),
    ("eval.harder.big=7", "is a section"),
    ("optim=3", "config.optim is a section"),
    ("seed=1.0", "takes a whole number, not '1.0'"),
    ("seed=", "takes a whole number"),
    ("train.updates=1e2", "takes a whole number"),
    ("optim.learning_rate=fast", "takes a number, not 'fast'"),
    ("optim.learning_rate=nan", "takes a number"),
    ("credit.batch_scale=1", "takes true or false"),
    ("model.remat=True", "choose one of none, some, all"),
    ("model.dtype=float16", "choose one of float32, bfloat16"),
    ("model.dtype=bfloat16", "train float32 ones"),
    ("lora.targets=q_proj", "choose from qkv"),
    ("engine.buckets=64,b", "takes whole numbers separated by commas"),
    ("env.name=sokoban", "use a file of sokoban instead"),
    ("seed", "write --config.seed=VALUE"),
  ],
)
def test_a_wrong_override_is_named_in_one_sentence(override, words):
  with pytest.raises(ValueError) as error:
    settings("lamer_darkroom", "laptop", override)
  assert words in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "break_it,words",
  [
    (lambda c: c.optim.update(learning_rat=1.0), "did you mean config.optim.learning_rate?"),
    (lambda c: c.update(optimizer=1), "config.optimizer is not known"),
    (lambda c: c.optim.__delattr__("beta1"), "config.optim.beta1 is missing"),
    (lambda c: c.__delattr__("guard"), "config.guard is missing"),
    (lambda c: c.method.__delattr__("name"), "config.method.name is missing"),
    (lambda c: c.eval.harder.update(big=3), "config.eval.harder.big is a section"),
  ],
)
def test_a_wrong_config_file_is_named_in_one_sentence(break_it, words):
  config = load("lamer_darkroom").config
  break_it(config)
  with pytest.raises(ValueError, match=words.replace("?", r"\?")):
    base.settings(config)


def test_lists_and_whole_numbers_in_a_file_become_tuples_and_floats():
  plain = base.plain(load("lamer_darkroom").config)
  plain["engine"]["buckets"] = [64, 128]
  plain["optim"]["learning_rate"] = 1
  s = base.settings(plain)
  assert s.engine.buckets == (64, 128)
  assert isinstance(s.optim.learning_rate, float)
