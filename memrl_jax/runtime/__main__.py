"""A deployed memory at the command line: python -m memrl_jax.runtime COMMAND ...

PLACE is a service's address (its key in MEMRL_KEY), or the folder of one memory that no service has open:
FOLDER/tenants/NAME of a service's FOLDER. Answers are JSON. Tables, restore, verify and reindex:
python -m memrl_jax.memory. Exit code 2 with one sentence where it cannot be done.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from memrl_jax.memory import embed
from memrl_jax.memory.episodic import EpisodicConfig
from memrl_jax.runtime.audit import Audit
from memrl_jax.runtime.client import Client
from memrl_jax.runtime.config import RuntimeConfig, ServiceConfig
from memrl_jax.runtime.memory import Memory, Refused, Suggestions, Told, open_memory
from memrl_jax.runtime.tenants import Keys
from memrl_jax.sampling import remote


def serve(args: argparse.Namespace) -> None:
  """the HTTP service over a folder, until Ctrl-C or SIGTERM"""
  try:
    import uvicorn

    from memrl_jax.runtime import service, upstream
  except ImportError as error:
    raise Refused(
      f"{error.name} is missing; install the service with pip install 'memrl_jax[runtime]'"
    ) from None
  config = ServiceConfig(
    upstream=args.upstream,
    upstream_key=os.environ.get(args.upstream_key_env, ""),
    **{name: getattr(args, name) for name in _SERVICE},
  )
  has_keys = any(record["keys"] for record in Keys(args.folder).tenants().values())
  if not has_keys and not remote.is_loopback(args.host):
    raise Refused(
      f"{args.host} can be reached from other machines, so a key is needed; make one with "
      f"`python -m memrl_jax.runtime tenant add {args.folder} NAME`, or listen on 127.0.0.1"
    )
  if args.writer and not args.upstream:
    raise Refused("--writer names a model of the upstream; give --upstream too")
  write = upstream.writer(config, args.writer) if args.writer else None
  opened = functools.partial(
    open_memory, config=_config(args, bool(write)), embedder=_embedder(args), write=write
  )
  made = service.Service(args.folder, opened, config)
  settings = uvicorn.Config(
    made.app,
    host=args.host,
    port=args.port,
    log_level="warning",
    access_log=False,  # the audit log has it, without addresses that hold texts
    server_header=False,
    timeout_keep_alive=75,
    timeout_graceful_shutdown=args.grace,
  )
  server = _Server(settings)
  # uvicorn ends requests in peace, then raises the signal again for whoever was there before it.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  try:
    with contextlib.suppress(KeyboardInterrupt, SystemExit):  # the latter: it cannot listen
      server.run()
  finally:
    made.close()
  if not server.started:
    raise Refused(f"nothing can listen at {args.host}:{args.port}; is the port taken?")
  print("stopped", flush=True)


def _Server(settings: Any) -> Any:
  """uvicorn's server, which says where it listens."""
  import uvicorn

  class Server(uvicorn.Server):
    async def startup(self, sockets=None) -> None:
      await super().startup(sockets=sockets)
      if self.started and self.servers:
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving at http://{shown}:{port}; Ctrl-C stops it", flush=True)

  return Server(settings)


def tenant(args: argparse.Namespace) -> Any:
  """tenants and their keys: add, list, revoke"""
  keys, audit = Keys(args.folder), Audit(pathlib.Path(args.folder) / "audit.jsonl")
  if args.action == "list":
    found = keys.tenants()
    return {n: {id: one["made"] for id, one in r["keys"].items()} for n, r in found.items()}
  if not args.name:
    raise Refused(f"tenant {args.action} needs a name")
  if args.action == "add":
    id, key = keys.add(args.name)
    audit.write("operator", "", "tenant add", tenant=args.name, made=id)
    return {"tenant": args.name, "key_id": id, "key": key}
  gone = keys.revoke(args.name, args.key_id)
  audit.write("operator", "", "tenant revoke", tenant=args.name, keys=gone)
  return {"tenant": args.name, "revoked": gone}


def suggest(args, memory) -> Any:
  """what helped with tasks like this one"""
  return memory.suggest(args.task, frozen=args.frozen)


def feedback(args, memory) -> Any:
  """how a suggestion's task ended"""
  trajectory = None if args.trajectory is None else _read(args.trajectory)
  return memory.feedback(args.id, args.reward, trajectory)


def memories(args, memory) -> Any:
  """the memories: by Q, nearest to a query, or with a text"""
  return memory.memories(query=args.query, text=args.text, limit=args.limit, offset=args.offset)


def show(args, memory) -> Any:
  """one memory, with its past"""
  return memory.show(args.id)


def versions(args, memory) -> Any:
  """what happened, the newest first"""
  return memory.versions(limit=args.limit, offset=args.offset)


def diff(args, memory) -> Any:
  """what changed from version A to B (default: to now)"""
  return memory.diff(args.a, args.b)


def stats(args, memory) -> Any:
  """sizes, utilities, counts, the values in use"""
  return memory.stats()


def rollback(args, memory) -> Any:
  """make a new version that equals an old one"""
  return memory.rollback(args.version)


def snapshot(args, memory) -> Any:
  """copy it with its history: to a new folder, or under a name at the service"""
  return memory.snapshot(args.to)


def export(args, memory) -> None:
  """the memories as JSON lines, on standard output"""
  sys.stdout.reconfigure(encoding="utf-8", newline="\n")
  sys.stdout.writelines(memory.export(args.at))


def import_(args, memory) -> Any:
  """add exported memories"""
  return memory.import_(_read(args.file).splitlines(keepends=True))


_SERVICE = {  # of ServiceConfig, which says what they mean
  "task": str,
  "place": str,
  "rate": float,
  "burst": int,
  "inflight": int,
  "body": int,
  "import_body": int,
  "body_s": float,
  "connect_s": float,
  "read_s": float,
  "snapshots": int,
}
_PAGES = (
  ("--limit", {"type": int, "default": 50}),
  ("--offset", {"type": int, "default": 0}),
)
COMMANDS = {
  "suggest": (suggest, ("task", {}), ("--frozen", {"action": "store_true"})),
  "feedback": (
    feedback,
    ("id", {}),
    ("reward", {"type": float}),
    ("--trajectory", {"metavar": "FILE", "help": "what was done; - reads standard input"}),
  ),
  "memories": (memories, ("--query", {"default": ""}), ("--text", {"default": ""}), *_PAGES),
  "show": (show, ("id", {"type": int})),
  "versions": (versions, *_PAGES),
  "diff": (diff, ("a", {"type": int}), ("b", {"type": int, "nargs": "?"})),
  "stats": (stats,),
  "rollback": (rollback, ("version", {"type": int})),
  "snapshot": (snapshot, ("to", {})),
  "export": (export, ("--at", {"type": int, "metavar": "VERSION"})),
  "import": (import_, ("file", {"help": "- reads standard input"})),
}


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
    raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
  made = _Parser(prog="python -m memrl_jax.runtime", description=__doc__, allow_abbrev=False)
  made.formatter_class = argparse.RawDescriptionHelpFormatter
  commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
  one = commands.add_parser("serve", help=serve.__doc__, description=ServiceConfig.__doc__)
  one.add_argument("folder", type=pathlib.Path)
  one.add_argument("--upstream", default="", help="http://HOST:PORT/v1 of the model")
  one.add_argument("--upstream-key-env", default="MEMRL_API_KEY", metavar="NAME")
  one.add_argument(
    "--writer", default="", metavar="MODEL", help="sums episodes up, as the paper does"
  )
  one.add_argument(
    "--host", default="127.0.0.1", help="127.0.0.1: this machine alone; others need keys"
  )
  one.add_argument("--port", type=int, default=8080, help="0: any free one")
  one.add_argument("--grace", type=int, default=30, help="seconds that requests may take to end")
  default = ServiceConfig()
  for name, kind in _SERVICE.items():
    one.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(default, name))
  _memory_options(one)
  one = commands.add_parser("tenant", help=tenant.__doc__, description=tenant.__doc__)
  one.add_argument("action", choices=("add", "list", "revoke"))
  one.add_argument("folder", type=pathlib.Path)
  one.add_argument("name", nargs="?")
  one.add_argument("--key-id", help="revoke this key alone")
  for name, (run, *options) in COMMANDS.items():
    one = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
    one.add_argument("place", metavar="PLACE")
    for option, settings in options:
      one.add_argument(option, **settings)
    _memory_options(one)
  return made


def _memory_options(one: argparse.ArgumentParser) -> None:
  one.add_argument("--embedder", default="hash", help="hash, or minilm:DIRECTORY of its weights")
  one.add_argument(
    "--set",
    action="append",
    default=[],
    metavar="NAME=VALUE",
    help="a value of EpisodicConfig, as JSON: delta=0.4",
  )


def _config(args: argparse.Namespace, paper: bool) -> RuntimeConfig:
  """The configuration with --set; `paper`: plans and reflections, which a language model writes."""
  values = dataclasses.asdict(RuntimeConfig().episodic)
  if paper:
    values |= {"build": "proceduralization", "update": "adjustment"}
  for pair in args.set:
    name, _, value = pair.partition("=")
    if name not in values:
      raise Refused(f"EpisodicConfig has no {name!r}; it has {', '.join(values)}")
    try:
      values[name] = json.loads(value)
    except ValueError:
      values[name] = value
  try:
    return RuntimeConfig(episodic=EpisodicConfig(**values))
  except TypeError as error:
    raise Refused(f"--set gives a value of another type ({error}); numbers are bare") from None


def _embedder(args: argparse.Namespace) -> embed.Embedder:
  kind, _, directory = args.embedder.partition(":")
  if kind == "minilm" and directory:
    return embed.MiniLM(directory)
  if args.embedder != "hash":
    raise Refused(f"{args.embedder!r} is no embedder; give hash or minilm:DIRECTORY")
  return embed.Hash()


def _open(args: argparse.Namespace) -> Memory | Client:
  if args.place.startswith(("http://", "https://")):
    return Client(args.place, os.environ.get("MEMRL_KEY", ""))
  folder = pathlib.Path(args.place)
  if not (folder / "memory.db").exists() and args.command not in ("suggest", "import"):
    raise Refused(f"there is no memory in {folder}; a service keeps its in FOLDER/tenants/NAME")
  return open_memory(folder, _config(args, False), embedder=_embedder(args))


def _read(name: str) -> str:
  return sys.stdin.read() if name == "-" else pathlib.Path(name).read_text(encoding="utf-8")


def _plain(found: Any) -> Any:
  if isinstance(found, Suggestions):
    memories = [one._asdict() for one in found.memories]
    return {"id": found.id, "prompt": found.prompt, "memories": memories}
  return found._asdict() if isinstance(found, Told) else found


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; its exit code. What is wrong becomes one sentence on stderr."""
  try:
    args = parser().parse_args(argv)
    if args.command in ("serve", "tenant"):
      found = {"serve": serve, "tenant": tenant}[args.command](args)
    else:
      with _open(args) as memory:
        found = COMMANDS[args.command][0](args, memory)
    if found is not None:
      print(json.dumps(_plain(found), indent=2))
    sys.stdout.flush()
  except SystemExit as end:  # argparse: help, or a wrong argument
    return int(end.code or 0)
  except (ValueError, OSError) as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:
    return 130
  return 0


if __name__ == "__main__":
  # One search on one core: requests are many, and the threads of FAISS spin while they wait for each other
  # (24 instead of 5 ms of CPU a call on a busy machine). OpenMP looks at this when it is loaded.
  if sys.argv[1:2] == ["serve"] and "OMP_NUM_THREADS" not in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "memrl_jax.runtime", *sys.argv[1:]])
  sys.exit(main())
