"""The command line: one config file in, one run folder out. `python experiments/run.py --help`

Own flags instead of ml_collections.config_flags, whose answers to a wrong key or value take several
lines and which cannot check values against the dataclasses' types (a tuple, `eval.harder.NAME`).

Exit codes: 0 finished, 1 a bug (with its traceback) or a plan that does not fit, 2 wrong input (one sentence), 3 stopped early and
saved (a signal, the collapse guard), 75 another host was lost (--resume goes on), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXPERIMENTS = ROOT / "experiments"

# Python put experiments/ on the path, not the root: decided here, once, for config files as well.
if str(ROOT) not in sys.path:
  sys.path.insert(0, str(ROOT))

# Compiled programs are kept between runs; set before jax is imported, and the user's own choice wins.
_CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE / "memrl_jax" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

USAGE = """
  python experiments/run.py --config=FILE[:VARIANT] [--config.a.b=value ...] [--workdir=DIR]
                            [--mode=train|eval|adapt|export|plan] [--checkpoint=STEP] [--resume]
                            [--topology=NAME[,NAME ...]]
                            [--hosts=auto|N --coordinator=HOST:PORT --host=I]
"""
EXAMPLES = """
examples:
  python experiments/run.py --config=experiments/lamer_darkroom.py
  python experiments/run.py --config=experiments/lamer_darkroom.py:smoke --workdir=/tmp/smoke
  python experiments/run.py --config=experiments/lamer_darkroom.py --config.seed=1 \\
      --config.credit.gamma_traj=0 --config.eval.swap=random,base
  python experiments/run.py --config=experiments/lamer_darkroom.py --resume
  python experiments/run.py --config=experiments/lamer_sokoban.py --workdir=DIR --mode=eval \\
      --config.eval.harder.boxes3.boxes=3
  python experiments/run.py --config=experiments/empo2_lab.py --workdir=DIR --mode=adapt \
      --config.adapt.options.family=lamp-1
  python experiments/run.py --config=experiments/lamer_sokoban.py --workdir=DIR --mode=export
  python experiments/run.py --config=experiments/lamer_darkroom.py --mode=eval \\
      --config.remote.url=http://127.0.0.1:8000/v1   (python -m memrl_jax.sampling.serve --help)
  python experiments/run.py --config=experiments/memrl_hle.py:paper --config.env.data=FILE \\
      --config.remote.url=https://HOST/v1 --config.remote.model=NAME   (its key in MEMRL_API_KEY)
  python experiments/run.py --config=experiments/lamer_sokoban.py:paper --mode=plan \\
      --topology=v5p:2x2x1 --config.model.checkpoint=DIR   (a config.json in it is enough)

Behind a server that reads text, a method that trains nothing needs no model here; one that takes token ids
(ours, vLLM, SGLang) needs the tokenizer in config.model.checkpoint, or config.remote.api=chat.

FILE may be relative to the current folder or to the project. A wrong key is answered with the nearest
right one; the whole config of a run stands in its config.json.
"""


class Arguments(NamedTuple):
  """What the command line says, before any of it is looked up."""

  config: str
  overrides: list[str]
  workdir: str | None
  mode: str
  checkpoint: int | None
  resume: bool
  topologies: tuple[str, ...]
  hosts: Hosts | None = None


class Hosts(NamedTuple):
  """Which of several hosts this process is; all None: as its surroundings say."""

  coordinator: str | None
  count: int | None
  index: int | None
  seconds: int


class _Parser(argparse.ArgumentParser):
  """Answers a wrong flag like every other wrong input: in one sentence."""

  def error(self, message: str) -> NoReturn:
    raise ValueError(f"{message}; see --help")


def parse(argv: Sequence[str]) -> Arguments:
  """Reads the command line; ValueError says what is wrong with it."""
  parser = _Parser(
    "run.py",
    usage=USAGE.strip(),
    description="Trains or evaluates one experiment and leaves a run folder with a report. "
    "--config.a.b=value changes one value of its config.",
    epilog=f"{EXAMPLES}\nconfig files:\n{_listing()}\nexit codes: "
    + __doc__.partition("Exit codes: ")[2],
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument
  add(
    "--config", metavar="FILE[:VARIANT]", required=True, help="laptop (default), smoke, paper, ..."
  )
  add("--workdir", metavar="DIR", help="run folder; default runs/<experiment>-<variant>-<hash>")
  add(
    "--mode",
    choices=("train", "eval", "adapt", "export", "plan"),
    default="train",
    help="eval plays the panel again, adapt fills a memory with the weights frozen, export writes the "
    "weights for transformers, plan says what the run would need on other chips",
  )
  add("--checkpoint", metavar="STEP", type=int, help="with eval, adapt, export; default the newest")
  add("--resume", action="store_true", help="go on with the run in the folder, if there is one")
  add(
    "--topology",
    metavar="NAME[,NAME ...]",
    default="",
    help="with plan: chips that need not be here, as v5e:4x4 or v5p:8x8x8, or here",
  )
  add(
    "--hosts",
    metavar="auto|N",
    help="with train, eval: this is one of N processes of one run (experiments/pods.md); auto asks a TPU pod, "
    "Slurm or MPI how many and which",
  )
  add("--coordinator", metavar="HOST:PORT", help="with --hosts=N: a free port of host 0")
  add("--host", metavar="I", type=int, help="with --hosts=N: the number of this one, from 0")
  add(
    "--host_timeout",
    metavar="SECONDS",
    type=int,
    default=45,
    help="a host that is silent for so long is lost, and the others end (45)",
  )
  flags = [word for word in argv if not word.startswith("--config.")]
  overrides = [word.removeprefix("--config.") for word in argv if word.startswith("--config.")]
  for word in overrides:
    if "=" not in word:
      raise ValueError(f"--config.{word} has no value; write --config.{word}=VALUE")
  known = parser.parse_args(flags)
  if bool(known.topology) != (known.mode == "plan"):
    raise ValueError(
      "--mode=plan and --topology belong together; for example --mode=plan --topology=v5p:4x4x4"
    )
  if known.checkpoint is not None and known.mode in ("train", "plan"):
    raise ValueError(
      "--checkpoint belongs to --mode=eval, adapt or export; to train on from the newest use --resume"
    )
  topologies = tuple(known.topology.split(",")) if known.topology else ()
  return Arguments(
    known.config,
    overrides,
    known.workdir,
    known.mode,
    known.checkpoint,
    known.resume,
    topologies,
    _hosts(known),
  )


def _hosts(known: argparse.Namespace) -> Hosts | None:
  """What the flags say about hosts; None where this process is alone."""
  named = known.coordinator is not None or known.host is not None
  if known.hosts in (None, "1") and not named:
    return None
  if known.mode not in ("train", "eval"):
    raise ValueError(f"--mode={known.mode} is work for one process; leave --hosts out")
  if known.host_timeout < 5:
    raise ValueError(f"--host_timeout={known.host_timeout} is too short to tell; use 5 or more")
  if known.hosts == "auto" and not named:
    return Hosts(None, None, None, known.host_timeout)
  if not (known.hosts or "").isdigit() or known.coordinator is None or known.host is None:
    raise ValueError(
      "several hosts need --hosts=N, --coordinator=HOST:PORT and --host=I on each, or --hosts=auto alone"
    )
  if known.host not in range(int(known.hosts)) or ":" not in known.coordinator:
    raise ValueError(
      f"--host={known.host} must be in 0..{int(known.hosts) - 1} and --coordinator={known.coordinator} a HOST:PORT"
    )
  return Hosts(known.coordinator, int(known.hosts), known.host, known.host_timeout)


def _config_files() -> list[pathlib.Path]:
  return sorted(p for p in EXPERIMENTS.glob("*_*.py") if not p.name.startswith("_"))


def _listing() -> str:
  """The config files, one method a line."""
  by_method: dict[str, list[str]] = {}
  for path in _config_files():
    by_method.setdefault(path.stem.partition("_")[0], []).append(f"experiments/{path.name}")
  return "".join(f"  {'  '.join(names)}\n" for names in by_method.values())


# The config file.


class Experiment(NamedTuple):
  """A config with its overrides applied, and what it is called."""

  name: str
  variant: str
  config: Any

  def record(self) -> dict[str, Any]:
    """What config.json holds."""
    return {"experiment": self.name, "variant": self.variant, **self.config.to_dict()}


def load(spec: str, overrides: Sequence[str]) -> Experiment:
  """The experiment of FILE[:VARIANT]; ValueError says what is wrong with it."""
  text, _, variant = spec.partition(":")
  variant = variant or "laptop"
  path = _find(text)
  from experiments import base  # imports jax: not before the command line has been read

  module_spec = importlib.util.spec_from_file_location(f"experiments.{path.stem}", path)
  module = importlib.util.module_from_spec(module_spec)
  try:
    module_spec.loader.exec_module(module)
  except Exception as error:  # somebody's own file may raise anything
    raise ValueError(f"{path} cannot be read ({type(error).__name__}: {error})") from error
  if not hasattr(module, "get_config"):
    raise ValueError(f"{path} is no config file: it has no get_config(variant)")
  config = module.get_config(variant)
  base.override(config, overrides)
  return Experiment(path.stem, variant, config)


def _find(text: str) -> pathlib.Path:
  for path in (pathlib.Path(text).expanduser(), ROOT / text):
    if path.is_file() and path.suffix == ".py":
      return path.absolute()
  import difflib

  names = [f"experiments/{path.name}" for path in _config_files()]
  wanted = f"experiments/{pathlib.Path(text).stem}.py"
  near = difflib.get_close_matches(wanted, names, 1)
  hint = f"did you mean {near[0]}?" if near else "--help lists them"
  raise ValueError(f"there is no config file {text}; {hint}")


# The run.


def run(arguments: Arguments) -> int:
  """Checks everything that can be checked at once, then trains or evaluates; returns the exit code."""
  if arguments.hosts is not None:
    from memrl_jax.training import hosts

    coordinator, count, index, seconds = arguments.hosts
    hosts.join(coordinator, count, index, seconds=seconds)
  experiment = load(arguments.config, arguments.overrides)
  from experiments import base, door
  from memrl_jax.envs import base as env_base
  from memrl_jax.training import folder

  settings = base.settings(experiment.config, experiment.name, experiment.variant)
  if arguments.mode not in ("export", "plan"):  # which play nothing
    env_base.family(settings.env.name).door(settings.env.options)
  served = bool(settings.remote.url) and arguments.mode not in ("export", "plan")
  trains = settings.trains and arguments.mode == "train"
  if served and not trains:
    door.check_served(settings, arguments.mode)
  door.check(settings, models=trains or not served)
  if arguments.mode != "plan" and (trains or not served):
    door.check_devices(settings)
  door.check_hosts(settings, experiment.record())
  name = f"{experiment.name}-{experiment.variant}-{folder.config_hash(experiment.record())}"
  path = pathlib.Path(arguments.workdir or pathlib.Path("runs") / name)
  works = {"train": _train, "eval": _evaluate, "adapt": _adapt, "export": _export, "plan": _plan}
  work = works[arguments.mode]
  with door.connected(settings, trains) if served else contextlib.nullcontext() as client:
    return work(arguments, experiment, settings, path, client)


def _train(
  arguments: Arguments, experiment: Experiment, settings: Any, path: pathlib.Path, client: Any
) -> int:
  """Trains; `client` samples in place of an engine here."""
  from memrl_jax.training import folder, hosts, loop

  with folder.RunFolder.create(
    path,
    experiment.record(),
    arguments.resume,
    may_differ=_ON_RESUME,
    seeds={"run": settings.seed},
  ) as run_folder:
    done = max(_checkpoints(run_folder), default=0)
    if settings.train.updates and done >= settings.train.updates:
      status = f"finished before: all {done} updates are done; raise config.train.updates to go on"
      run_folder.end_session(status, done)
    else:
      status = loop.train(settings, run_folder, client=client)
    if hosts.first():
      print(f"{status}\nreport: {run_folder.report}")
  return 0 if status.startswith("finished") else 3


def _evaluate(
  arguments: Arguments, experiment: Experiment, settings: Any, path: pathlib.Path, client: Any
) -> int:
  """Plays the panel with a checkpoint. Another evaluation section is welcome, another run is not.

  Behind a server a method that remembers nothing needs no run.
  """
  from memrl_jax import methods
  from memrl_jax.training import loop

  needs_run = client is None or settings.method_name in methods.REMEMBERING
  work = functools.partial(loop.evaluate_checkpoint, client=client)
  return _in_folder(arguments, experiment, settings, path, work, "evaluated", needs_run)


def _adapt(
  arguments: Arguments, experiment: Experiment, settings: Any, path: pathlib.Path, client: Any
) -> int:
  """Fills a memory in rounds; a frozen method needs no run to start from."""
  from memrl_jax.training import adapt

  work, needs_run = functools.partial(adapt.adapt, client=client), not settings.frozen
  return _in_folder(arguments, experiment, settings, path, work, "adapted", needs_run)


def _export(
  arguments: Arguments, experiment: Experiment, settings: Any, path: pathlib.Path, client: None
) -> int:
  """Writes the weights of a checkpoint as a Hugging Face directory inside the run folder."""
  from memrl_jax.training import export

  return _in_folder(
    arguments, experiment, settings, path, export.export_checkpoint, "exported", True
  )


def _plan(
  arguments: Arguments, experiment: Experiment, settings: Any, path: pathlib.Path, client: None
) -> int:
  """Says what the run would need on each topology, and whether it fits; its folder gets plan.json only."""
  from memrl_jax.training import folder, plan

  for name in arguments.topologies:  # before the first program is compiled, which takes minutes
    plan.check(settings, name)
  plans = [plan.make(settings, name, print) for name in arguments.topologies]
  print(*plan.table(plans), sep="\n")
  path.mkdir(parents=True, exist_ok=True)
  record = {"config": experiment.record(), "plans": [one.record() for one in plans]}
  folder.write_atomic(path / "plan.json", json.dumps(record, indent=2) + "\n")
  print(f"plan: {path / 'plan.json'}")
  return 0 if all(one.fits for one in plans) else 1


def _in_folder(
  arguments: Arguments,
  experiment: Experiment,
  settings: Any,
  path: pathlib.Path,
  work: Callable[[Any, Any, int | None], Any],
  status: str,
  needs_run: bool,
) -> int:
  """Does `work` in the folder of a run, with the checkpoint that was asked for if it `needs_run`."""
  from memrl_jax.training import folder, hosts

  record = experiment.record()
  newest = _newest_checkpoint(arguments, settings, path) if needs_run else 0
  if folder.RunFolder(path).config.is_file():
    record = _as_trained(record, folder.RunFolder(path))
  with folder.RunFolder.create(
    path, record, resume=True, seeds={"run": settings.seed}
  ) as run_folder:
    made = work(settings, run_folder, arguments.checkpoint)
    run_folder.end_session(status, arguments.checkpoint or newest)
    if hosts.first():
      print(f"weights: {made}" if status == "exported" else f"report: {run_folder.report}")
  return 0


def _newest_checkpoint(arguments: Arguments, settings: Any, path: pathlib.Path) -> int:
  """The newest checkpoint of the folder; ValueError if it, or the one asked for, is not there."""
  from memrl_jax.training import folder

  run_folder = folder.RunFolder(path)
  if not run_folder.config.is_file():
    raise ValueError(f"there is no run in {run_folder.path}; name its folder with --workdir")
  steps = _checkpoints(run_folder)
  if not steps:
    why = (
      f"{settings.method_name} trains nothing and --mode=train evaluates it"
      if settings.frozen
      else "train first (--mode=train)"
    )
    raise ValueError(f"no checkpoint in {run_folder.checkpoints}; {why}")
  if arguments.checkpoint is not None and arguments.checkpoint not in steps:
    raise ValueError(
      f"no checkpoint {arguments.checkpoint} in {run_folder.checkpoints}; it holds {steps}"
    )
  return steps[-1]


# What may change when a run goes on: its length, where its server listens and how it is waited for, its devices.
_SERVER = ("url", "key_env", "concurrency", "connect_s", "read_s", "retries", "backoff_s")
_MESH = ("data", "fsdp", "tensor", "first", "rules", "sequence", "offload")  # a checkpoint fits any
_ON_RESUME = (
  "train.updates",
  *(f"{place}.{key}" for place in ("remote", "agent.remote") for key in _SERVER),
  *(f"{place}mesh.{key}" for place in ("", "reference.", "critic.") for key in _MESH),
)

# What an evaluation may change: training does not depend on it, or has read it already.
_OF_EVALUATION = (
  "eval",
  "remote",
  "agent",
  "adapt",
  "tips",
  "memory",
  "mesh",
  "reference",
  "critic",
)


def _as_trained(record: dict[str, Any], run_folder: Any) -> dict[str, Any]:
  """The config of an evaluation, with what may differ from the training run as it was there."""
  try:
    stored = json.loads(run_folder.config.read_text("utf-8"))
    # Not all of them are in the folders of before there were any.
    record |= {key: stored[key] for key in _OF_EVALUATION if key in stored}
    record["train"]["updates"] = stored["train"]["updates"]
  except (json.JSONDecodeError, KeyError):
    raise ValueError(f"{run_folder.config} is not the config of a run; correct --workdir") from None
  return record


def _checkpoints(run_folder: Any) -> list[int]:
  """Steps in the folder, oldest first; a half-written one has another name."""
  if not run_folder.checkpoints.is_dir():
    return []
  return sorted(int(p.name) for p in run_folder.checkpoints.iterdir() if p.name.isdigit())


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; errors of ours become one sentence on stderr (MEMRL_DEBUG=1: all of it)."""
  try:
    return run(parse(sys.argv[1:] if argv is None else argv))
  except (ValueError, OSError) as error:
    if os.environ.get("MEMRL_DEBUG") or not _ours(error):
      raise
    print(f"error: {_sentence(error)}", file=sys.stderr)
    return 2
  except ModuleNotFoundError as error:
    if os.environ.get("MEMRL_DEBUG") or (ROOT / str(error.name).partition(".")[0]).exists():
      raise  # a module of ours that is missing is a bug
    print(
      f"error: the package {error.name} is not installed here ({sys.executable}); run `make setup` and "
      f"use {ROOT / '.venv/bin/python'}, or pip install -e {ROOT}",
      file=sys.stderr,
    )
    return 2
  except KeyboardInterrupt:
    print("interrupted; the last checkpoint is kept, and --resume goes on from it", file=sys.stderr)
    return 130


def _ours(error: BaseException) -> bool:
  """Whether our own code raised it: a message for the user, not a bug in the depths of a library."""
  raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename)
  return any(raised_in.is_relative_to(ROOT / part) for part in ("experiments", "memrl_jax"))


def _sentence(error: BaseException) -> str:
  return " ".join(str(error).split())


def _alone(code: int) -> int:
  """Ends one of several hosts, which never comes back; alone, nothing but the code."""
  # Not imported for an error in the command line.
  hosts = sys.modules.get("memrl_jax.training.hosts")
  return code if hosts is None else hosts.leave(code)


if __name__ == "__main__":
  sys.exit(_alone(main()))
