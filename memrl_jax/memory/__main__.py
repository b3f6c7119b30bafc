"""Looks into a memory, and puts it right: python -m memrl_jax.memory COMMAND FOLDER ...

Tables on a terminal, tab-separated lines into a pipe or a file. A memory that is being written can
be read. Exit code 0; 1 where verify found something; 2 with one sentence where it cannot be done.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import signal
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import rich.console
import rich.table
import rich.text

from memrl_jax.memory import check, transfer
from memrl_jax.memory.records import Entry, StoreError
from memrl_jax.memory.store import Store

LONG = 300  # characters of a text in a table on a terminal; `show` gives all of it
Table = tuple[Sequence[str], list[Sequence[Any]]]  # head, rows


def list_(args: argparse.Namespace) -> Table:
  """the entries, best scores first"""
  with Store(args.folder, read_only=True) as store:
    entries = store.entries(args.tenant, args.at)
  entries.sort(key=lambda entry: (-entry.score, entry.id))
  return _entries(entries[: args.limit])


def search(args: argparse.Namespace) -> Table:
  """the entries nearest to a text, or with --text those that contain it"""
  if args.text:
    wanted = args.query.casefold()
    with Store(args.folder, read_only=True) as store:
      entries = store.entries(args.tenant, args.at)
    found = [e for e in entries if wanted in e.text.casefold() or wanted in e.key.casefold()]
    return _entries(found[: args.limit])
  if args.at is not None:
    raise StoreError("a search by meaning sees the newest version only; add --text, or drop --at.")
  from memrl_jax.memory import bank  # imports FAISS, which nothing else here needs

  with bank.open_reading(args.folder, directory=args.weights) as memory:
    tenants = memory.store.tenants() if args.tenant is None else [args.tenant]
    hits = [hit for name in tenants for hit in memory.search(name, [args.query], args.limit)[0]]
  hits.sort(key=lambda hit: (-hit.similarity, hit.id))
  head, rows = _entries([hit.entry for hit in hits[: args.limit]])
  return ("similarity", *head), [
    (f"{hit.similarity:.3f}", *row) for hit, row in zip(hits, rows, strict=False)
  ]


def show(args: argparse.Namespace) -> Table:
  """one entry: every state it had, who wrote it, who read it"""
  with Store(args.folder, read_only=True) as store:
    states, lineage = store.history(args.id), store.lineage(args.id)
    now = store.version
  rows: list[Sequence[Any]] = [("tenant", states[0][0].tenant), ("written by", lineage.writer)]
  for entry, died in states:
    until = f"{died - 1}" if died else f"now ({now})"
    rows += [(f"versions {entry.version} to {until}", f"score {entry.score:g}")]
    rows += [("  key", entry.key), ("  text", entry.text), ("  data", json.dumps(entry.data))]
  rows += [("mean reward of readers", lineage.mean_reward), ("reads", len(lineage.reads))]
  for read, outcome in lineage.reads[: args.limit]:
    end = f"reward {outcome.reward:g}, success {outcome.success}" if outcome else "outcome unknown"
    rows.append((f"  {read.trial} step {read.step}", f"at version {read.version}: {end}"))
  return ("what", f"entry {args.id}"), rows


def diff(args: argparse.Namespace) -> Table:
  """what changed from version A to B (default: to now)"""
  with Store(args.folder, read_only=True) as store:
    found = store.diff(args.a, args.b, args.tenant)
  rows = [("+", e.id, e.tenant, f"{e.score:g}", e.text) for e in found.added]
  rows += [("-", e.id, e.tenant, f"{e.score:g}", e.text) for e in found.removed]
  for a, b in found.changed:
    score = f"{a.score:g}" if a.score == b.score else f"{a.score:g} -> {b.score:g}"
    rows.append(
      ("~", a.id, a.tenant, score, a.text if a.text == b.text else f"{a.text} -> {b.text}")
    )
  return ("", "id", "tenant", "score", "text"), rows


def versions(args: argparse.Namespace) -> Table:
  """the newest versions and what they did"""
  with Store(args.folder, read_only=True) as store:
    found = store.versions()[::-1][: args.limit]
  return ("version", "why", "what"), [
    (v.pop("version"), v.pop("why"), ", ".join(f"{name} {n}" for name, n in v.items()))
    for v in found
  ]


def stats(args: argparse.Namespace) -> Table:
  """sizes and totals"""
  with Store(args.folder, read_only=True) as store:
    found = dataclasses.asdict(store.manifest) | store.stats()
  tenants = found.pop("tenants")
  rows = [
    (name, f"{value:.3g}" if isinstance(value, float) else value) for name, value in found.items()
  ]
  return ("what", "value"), rows + [(f"entries of {name}", n) for name, n in tenants.items()]


def rollback(args: argparse.Namespace) -> str:
  """make a new version that equals an old one"""
  with Store(_existing(args.folder)) as store:
    done = store.rollback(args.version, args.tenant)
    count = store.count(args.tenant)
  return f"version {done.version} equals version {args.version}: {count} entries"


def export(args: argparse.Namespace) -> str | None:
  """write the entries as JSON lines, to standard output or a file"""
  with Store(args.folder, read_only=True) as store:
    if args.file != "-":
      transfer.export_jsonl(store, args.file, args.tenant, args.at)
      return f"{store.count(args.tenant, args.at)} entries are in {args.file}"
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    sys.stdout.writelines(transfer.export_lines(store, args.tenant, args.at))
  return None


def import_(args: argparse.Namespace) -> str:
  """add exported entries, in one version, to a memory or to a new folder"""
  if args.file == "-":
    sys.stdin.reconfigure(encoding="utf-8", newline="\n")
    lines = list(sys.stdin)
  else:
    lines = transfer.read_lines(args.file)
  new = not (args.folder / "memory.db").exists()
  manifest = transfer.read_head(lines[0] if lines else "")[0] if new else None
  with Store(args.folder, manifest) as store:
    done = transfer.import_lines(store, lines, new_ids=args.new_ids)
  return f"version {done.version} adds {len(done.ids)} entries"


def verify(args: argparse.Namespace) -> Table | str:
  """check every byte of a memory or a snapshot"""
  problems = check.verify(args.folder)
  if (args.folder / "index.cache").exists():
    from memrl_jax.memory import index_file  # imports FAISS

    problems += filter(None, [index_file.problem(args.folder)])
  return (("problem",), [(problem,) for problem in problems]) if problems else "all is well"


def snapshot(args: argparse.Namespace) -> str:
  """copy the memory with its history to a new folder"""
  with Store(args.folder, read_only=True) as store:
    version = transfer.snapshot(store, args.to)
  return f"{args.to} holds version {version}"


def restore(args: argparse.Namespace) -> str:
  """put a snapshot in the place of a memory; what was there is kept"""
  kept = transfer.restore(args.snapshot, args.folder)
  return f"{args.folder} is restored" + (f"; before it is {kept}" if kept else "")


def reindex(args: argparse.Namespace) -> str:
  """embed every entry anew with another embedder, as a new version"""
  from memrl_jax.memory import bank, embed

  kind = args.embedder.partition(":")[0]
  if kind == "hash":
    made = embed.Hash(args.dimension or 384)
  elif kind == "minilm" and args.weights:
    made = embed.MiniLM(args.weights)
  elif kind == "minilm":
    raise StoreError("minilm needs its weights; give --weights DIRECTORY.")
  else:
    raise StoreError(
      f"{args.embedder} is not an embedder that can be made from its name (hash, minilm); make it "
      "in Python and call memrl_jax.memory.bank.reindex."
    )
  if args.embedder not in (kind, made.name):
    raise StoreError(f"{args.weights} is {made.name} and not {args.embedder}; give its weights.")
  with Store(_existing(args.folder)) as store:
    done = bank.reindex(store, made)
    return f"version {done.version}: {store.count(None)} entries are embedded by {made.name}"


def _existing(folder: pathlib.Path) -> pathlib.Path:
  if not (folder / "memory.db").exists():  # a Store that may write would make one
    raise StoreError(f"there is no memory in {folder}; check the path.")
  return folder


def _entries(entries: Iterable[Entry]) -> Table:
  return ("id", "tenant", "version", "score", "text"), [
    (e.id, e.tenant, e.version, f"{e.score:g}", e.text) for e in entries
  ]


# --- the terminal --------------------------------------------------------------------------------


def visible(value: Any, *, lines: bool) -> str:
  """Text that no terminal takes for a command: control characters as escapes."""
  text = "-" if value is None else str(value)
  return "".join(
    c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode()
    for c in text
  )


def _print(found: Table | str | None, *, whole: bool) -> None:
  if found is None:
    return
  if isinstance(found, str):
    print(found)
    return
  head, rows = found
  if not sys.stdout.isatty():
    for row in [head, *rows]:
      print("\t".join(visible(cell, lines=False) for cell in row))
    return
  table = rich.table.Table(box=None, pad_edge=False, header_style="bold")
  for name in head:
    wide = name == head[-1]
    table.add_column(name, overflow="fold" if wide else "ellipsis", no_wrap=not wide)
  for row in rows:
    cells = [visible(cell, lines=True) for cell in row]
    if not whole:
      cells = [cell if len(cell) <= LONG else cell[:LONG] + "…" for cell in cells]
    table.add_row(*map(rich.text.Text, cells))
  rich.console.Console().print(table)


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    print(f"error: {message}; see {self.prog} --help", file=sys.stderr)
    raise SystemExit(2)


TENANT = ("--tenant", {"help": "only this tenant"})
AT = ("--at", {"type": int, "metavar": "VERSION", "help": "the memory as of this version"})
LIMIT = ("--limit", {"type": int, "default": 20, "metavar": "N", "help": "rows (default 20)"})
WEIGHTS = ("--weights", {"metavar": "DIRECTORY", "help": "of a real sentence encoder"})
COMMANDS = {
  "list": (list_, TENANT, AT, LIMIT),
  "search": (
    search,
    ("query", {}),
    ("--text", {"action": "store_true", "help": "as a part of the text, not by meaning"}),
    TENANT,
    AT,
    LIMIT,
    WEIGHTS,
  ),
  "show": (show, ("id", {"type": int}), LIMIT),
  "diff": (diff, ("a", {"type": int}), ("b", {"type": int, "nargs": "?"}), TENANT),
  "versions": (versions, LIMIT),
  "stats": (stats,),
  "rollback": (rollback, ("version", {"type": int}), TENANT),
  "export": (export, ("file", {"nargs": "?", "default": "-"}), TENANT, AT),
  "import": (import_, ("file", {}), ("--new-ids", {"action": "store_true"})),
  "verify": (verify,),
  "snapshot": (snapshot, ("to", {"type": pathlib.Path})),
  "restore": (restore, ("snapshot", {"type": pathlib.Path})),
  "reindex": (
    reindex,
    ("--embedder", {"required": True, "help": "hash or minilm"}),
    ("--dimension", {"type": int, "help": "of a hash (default 384)"}),
    WEIGHTS,
  ),
}


def parser() -> argparse.ArgumentParser:
  made = _Parser(prog="python -m memrl_jax.memory", description=__doc__.split("\n\n")[0])
  commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
  for name, (run, *options) in COMMANDS.items():
    one = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
    one.add_argument("folder", type=pathlib.Path)
    for option, settings in options:
      one.add_argument(option, **settings)
  return made


def main(argv: Sequence[str] | None = None) -> int:
  """Runs one command; its exit code. What is wrong becomes one sentence on stderr."""
  try:
    args = parser().parse_args(argv)
    found = COMMANDS[args.command][0](args)
    _print(found, whole=args.command == "show")
    sys.stdout.flush()
  except SystemExit as end:  # argparse: help, or a wrong argument
    return int(end.code or 0)
  except (ValueError, OSError) as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2
  return 1 if args.command == "verify" and not isinstance(found, str) else 0


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends us quietly
  sys.exit(main())
