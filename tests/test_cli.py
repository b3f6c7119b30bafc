"""The command line answers every wrong input with one sentence, and overwrites nothing.

Training itself is replaced by a stand-in; whatever comes before it is real.
"""

import errno
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

from experiments import run
from memrl_jax.envs import panel
from memrl_jax.training import loop, sections

EMPO2 = "--config=experiments/empo2_lab.py:smoke"
LAMER = "--config=experiments/lamer_darkroom.py:smoke"
MEMRL = "--config=experiments/memrl_hle.py:smoke"
SERVED = "--config.remote.url=http://127.0.0.1:1/v1"  # where nobody listens


@pytest.fixture
def calls(monkeypatch, tmp_path):
  """What would have been trained or evaluated; a trained run leaves checkpoints 1 and 2."""
  made = []

  def train(settings, folder, *, client=None):
    made.append(("train", settings))
    for step in ("1", "2", "3.orbax-checkpoint-tmp-0"):
      (folder.checkpoints / step).mkdir(exist_ok=True)
    folder.metrics.write_text("{}\n")
    return "finished"

  def evaluate(settings, folder, step, *, client=None):
    made.append(("eval", settings, step))

  monkeypatch.setattr(loop, "train", train)
  monkeypatch.setattr(loop, "evaluate_checkpoint", evaluate)
  monkeypatch.setattr(sections.ModelSettings, "directory", lambda self: tmp_path)
  return made


def refused(capsys, *argv):
  """The sentence with which this command line is refused."""
  assert run.main(argv) == 2
  out = capsys.readouterr()
  assert out.out == ""
  assert out.err.startswith("error: ") and out.err.count("\n") == 1, out.err
  assert "Traceback" not in out.err
  return out.err


def contents(folder):
  return {
    path.relative_to(folder): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file() and path.name != "lock"
  }


def test_adapters_that_do_not_fit_the_model_are_refused_before_there_is_a_run_folder(
  capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  words = "LoRA rank 4096 does not lie between 1 and"
  assert words in refused(capsys, LAMER, "--config.lora.rank=4096")
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
  "argv,words",
  [
    ((), "--config"),
    (("--config=experiments/lamer_darkrom.py",), "did you mean experiments/lamer_darkroom.py?"),
    (("--config=README.md",), "no config file README.md"),
    (("--config=experiments/run.py",), "no get_config"),
    (("--config=experiments/lamer_darkroom.py:lapto",), "laptop, smoke, paper, heldout"),
    (("--config=experiments/lamer_sokoban.py:heldout",), "'heldout' is not known"),
    ((LAMER, "--mode=test"), "--mode"),
    ((LAMER, "--resum"), "--resum"),
    ((LAMER, "--checkpoint=2"), "--checkpoint belongs to --mode=eval"),
    ((LAMER, "--config.optim.learning_rat=1"), "config.optim.learning_rate?"),
    ((LAMER, "--config.seed=x"), "a whole number, not 'x'"),
    ((LAMER, "--config.seed"), "--config.seed=VALUE"),
    ((LAMER, "--config.seed=-1"), "seed -1 is negative"),
    ((LAMER, "--config.eval.arms=memory,non"), "'non' is not known"),
    ((LAMER, "--config.eval.harder.big.size=99"), "99x99"),
    ((LAMER, "--config.eval.tasks=4000"), "fewer than 4000"),
    ((LAMER, "--config.eval.panel=darkroom-v99"), "there is no panel"),
    ((LAMER, "--config.eval.panel=sokoban-v1"), "holds tasks of sokoban"),
    ((LAMER, "--config.sampling.top_p=0.9"), "top_p 0.9"),
    ((LAMER, "--config.train.group_size=1"), "group of 1"),
    ((LAMER, "--config.pack.response=4"), "config.pack.response"),
    ((LAMER, "--config.novelty.kind=prototypes"), "lamer pays no novelty reward"),
    ((LAMER, "--mode=adapt", "--config.remote.url=http://127.0.0.1:1/v1"), "that lamer trained"),
    ((EMPO2, "--mode=eval", "--config.remote.url=http://127.0.0.1:1/v1"), "memory of its run"),
    ((MEMRL, "--config.memory.embedder=policy", SERVED), "behind config.remote.url"),
    ((MEMRL, "--config.model.checkpoint=nowhere", SERVED), "start one (python -m"),
    ((EMPO2, "--config.loss.off_policy=none"), "config.loss.off_policy"),
    ((EMPO2, "--config.tips.rank=best"), "choose one of score, similarity"),
    ((EMPO2, "--config.env.family=door-1"), "family 'door-1' is not known"),
    ((EMPO2, "--config.memory.embedder=minilm"), "config.memory.directory"),
    ((LAMER, "--config.method.name=gig"), "choose one of lamer, empo2"),
    (("--config=experiments/lamer_sokoban.py", "--config.env.boxes=30"), "30 boxes need 61"),
    (("--config=experiments/lamer_minesweeper.py", "--config.env.mines=36"), "36 mines"),
    (("--config=experiments/react_sokoban.py", "--config.train.updates=3"), "frozen model"),
  ],
)
def test_wrong_input_is_refused_before_anything_starts(
  argv, words, calls, capsys, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  assert words in refused(capsys, *argv)
  assert not calls
  assert not list(tmp_path.iterdir())  # no run folder either


def test_a_model_that_is_not_there_is_named(capsys, tmp_path):
  argv = ("--config=experiments/lamer_sokoban.py:paper", f"--workdir={tmp_path / 'run'}")
  assert "no model in path/to/Qwen3-4B" in refused(capsys, *argv)
  assert not (tmp_path / "run").exists()


def test_a_changed_panel_is_refused(calls, capsys, tmp_path):
  record = json.loads((panel.FOLDER / "darkroom-v1.json").read_text())
  record["seeds"][0] += 1
  changed = tmp_path / "mine.json"
  changed.write_text(json.dumps(record))
  assert "sha256" in refused(capsys, LAMER, f"--config.eval.panel={changed}")


def test_a_config_file_that_cannot_be_read_is_named(calls, capsys, tmp_path):
  broken = tmp_path / "broken.py"
  broken.write_text("def get_config(:\n")
  assert "SyntaxError" in refused(capsys, f"--config={broken}")


def test_a_run_lands_in_a_folder_named_after_its_config(calls, capsys, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert run.main([LAMER]) == 0
  assert run.main([LAMER, "--config.seed=1"]) == 0
  names = sorted(path.name for path in (tmp_path / "runs").iterdir())
  assert len(names) == 2
  assert all(name.startswith("lamer_darkroom-smoke-") and len(name) == 29 for name in names)
  assert "report.html" in capsys.readouterr().out


def test_a_folder_that_holds_a_run_is_kept(calls, capsys, tmp_path):
  workdir = f"--workdir={tmp_path}"
  assert run.main([LAMER, workdir]) == 0
  capsys.readouterr()
  before = contents(tmp_path)
  assert "add --resume" in refused(capsys, LAMER, workdir)
  another = refused(capsys, LAMER, workdir, "--config.optim.learning_rate=1", "--resume")
  assert "another config" in another and "optim.learning_rate" in another
  assert 'experiment is "lamer_darkroom" there' in refused(
    capsys, "--config=experiments/gigpo_darkroom.py:smoke", workdir, "--resume"
  )
  assert contents(tmp_path) == before
  assert len(calls) == 1


def test_resume_goes_on_only_where_updates_are_left(calls, capsys, tmp_path):
  workdir = f"--workdir={tmp_path}"
  assert run.main([LAMER, workdir, "--resume"]) == 0  # an empty folder: starts
  assert run.main([LAMER, workdir, "--resume"]) == 0
  assert "all 2 updates are done" in capsys.readouterr().out
  assert len(calls) == 1
  assert run.main([LAMER, workdir, "--resume", "--config.train.updates=3"]) == 0
  assert calls[1][1].train.updates == 3


@pytest.mark.parametrize(
  "change, said",
  [
    ("config.mesh.data=99", "needs 99 devices and"),
    ("config.replicas.tensor=99", "change config.replicas.tensor"),
  ],
)
def test_devices_that_are_not_here_are_missed_before_there_is_a_folder(
  tmp_path, capsys, change, said
):
  place, more = tmp_path / "run", "--config.pack.sequences=99"
  assert said in refused(capsys, LAMER, f"--workdir={place}", f"--{change}", more)
  assert not place.exists()


def test_a_place_that_cannot_be_written_is_named(calls, capsys, tmp_path, monkeypatch):
  (tmp_path / "file").write_text("mine")
  assert "is a file" in refused(capsys, LAMER, f"--workdir={tmp_path / 'file'}")
  assert "cannot be written" in refused(capsys, LAMER, f"--workdir={tmp_path / 'file' / 'run'}")

  def read_only(*args, **kwargs):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))

  monkeypatch.setattr(tempfile, "TemporaryFile", read_only)  # root may write anywhere: simulated
  assert "Read-only file system" in refused(capsys, LAMER, f"--workdir={tmp_path}")
  assert (tmp_path / "file").read_text() == "mine"
  assert not calls


def test_evaluation_needs_a_run_and_its_checkpoint(calls, capsys, tmp_path):
  workdir, eval_mode = f"--workdir={tmp_path}", "--mode=eval"
  assert "there is no run in" in refused(capsys, LAMER, workdir, eval_mode)
  assert run.main([LAMER, workdir]) == 0
  capsys.readouterr()
  before = contents(tmp_path)
  assert "it holds [1, 2]" in refused(capsys, LAMER, workdir, eval_mode, "--checkpoint=7")
  assert "another config" in refused(capsys, LAMER, workdir, eval_mode, "--config.seed=5")
  for step in ("1", "2"):
    (tmp_path / "checkpoints" / step).rmdir()
  assert "no checkpoint in" in refused(capsys, LAMER, workdir, eval_mode)
  assert contents(tmp_path) == before
  (tmp_path / "config.json").write_text("{}")
  (tmp_path / "checkpoints" / "1").mkdir()
  assert "not the config of a run" in refused(capsys, LAMER, workdir, eval_mode)


def test_evaluation_may_change_what_is_evaluated_and_keeps_the_run_s_config(
  calls, capsys, tmp_path
):
  workdir = f"--workdir={tmp_path}"
  assert run.main([LAMER, workdir]) == 0
  before = (tmp_path / "config.json").read_bytes()
  more = ("--config.eval.swap=random", "--config.eval.harder.big.size=7", "--checkpoint=1")
  assert run.main([LAMER, workdir, "--mode=eval", *more]) == 0
  kind, evaluated, step = calls[-1]
  assert (kind, step, evaluated.eval.swap) == ("eval", 1, ("random",))
  assert evaluated.eval.harder == (("big", (("size", 7),)),)
  assert (tmp_path / "config.json").read_bytes() == before


def test_exit_codes_tell_stopped_interrupted_and_broken_apart(calls, capsys, tmp_path, monkeypatch):
  def ends(how):
    def train(settings, folder, *, client=None):
      if isinstance(how, str):
        return how
      raise how

    monkeypatch.setattr(loop, "train", train)
    return [LAMER, "--resume", f"--workdir={tmp_path}"]

  assert run.main(ends("stopped by SIGTERM after update 1; add --resume to go on")) == 3
  assert run.main(ends(KeyboardInterrupt())) == 130
  assert "--resume" in capsys.readouterr().err
  monkeypatch.setattr(loop, "train", lambda *args, **kwargs: json.loads("{"))
  with pytest.raises(json.JSONDecodeError):  # a library's error is a bug: it keeps its traceback
    run.main([LAMER, "--resume", f"--workdir={tmp_path}"])


def test_a_missing_package_is_named_with_the_command(calls, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "memrl_jax.training.folder", None)  # ours: a bug, shown as one
  monkeypatch.delattr("memrl_jax.training.folder")
  with pytest.raises(ModuleNotFoundError):
    run.main([LAMER])
  monkeypatch.undo()

  def load(*args):
    raise ModuleNotFoundError("No module named 'ml_collections'", name="ml_collections")

  monkeypatch.setattr(run, "load", load)
  assert "ml_collections is not installed" in refused(capsys, LAMER)


def test_debug_shows_the_traceback_of_a_refusal(monkeypatch):
  monkeypatch.setenv("MEMRL_DEBUG", "1")
  with pytest.raises(ValueError, match="no config file"):
    run.main(["--config=nowhere.py"])


def test_help_shows_the_command_and_lists_every_config_file(capsys):
  with pytest.raises(SystemExit) as end:
    run.main(["--help"])
  text = capsys.readouterr().out
  assert end.value.code == 0
  assert all(f"experiments/{path.name}" in text for path in run._config_files())
  for word in (
    "--workdir",
    "--mode",
    "--checkpoint",
    "--resume",
    "--config.a.b=value",
    "examples:",
  ):
    assert word in text


def test_it_works_from_any_directory_and_reads_the_command_before_it_loads_jax(tmp_path):
  script = pathlib.Path(run.__file__)
  where = {"cwd": tmp_path, "capture_output": True, "text": True}
  done = subprocess.run(
    [sys.executable, script, "--config=experiments/lamer_sokoban.py", "--config.env.boxes=30"],
    **where,
  )
  assert (done.returncode, done.stdout) == (2, "")
  assert done.stderr.startswith("error: 30 boxes") and done.stderr.count("\n") == 1
  code = (
    f"import runpy, sys; sys.argv = ['run.py', '--config=nowhere.py']\n"
    f"try: runpy.run_path({str(script)!r}, run_name='__main__')\n"
    f"except SystemExit as end: print(end.code, 'jax' in sys.modules)"
  )
  done = subprocess.run([sys.executable, "-c", code], **where)
  assert done.stdout == "2 False\n"
  assert not list(tmp_path.iterdir())
