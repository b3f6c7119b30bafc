"""ALFWorld games made from nothing but the floor plans and tables that its package ships.

A `Room` says what stands where and what is wanted; `problem` writes it in PDDL (planning problems, with
the package's domain), `walkthrough` solves it, `game` adds the package's domain, grammar and goal, as a
published file has them. Everything follows from the task; nothing is kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from memrl_jax.envs.alfworld_tasks import SPLITS, Task

_CONTENT = 2010_03769  # stream of the draw of what stands where
LAMP = "DeskLamp"
_LAMP_STANDS_ON = ("Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable")
_DEVICES = {"heat": "Microwave", "cool": "Fridge", "clean": "SinkBasin"}
_COPIES = (0, 1, 1, 2, 3)  # of an object that nobody asked for
_BASINS = {"Sink": "SinkBasin", "Bathtub": "BathtubBasin"}
_BURNERS = 4  # of a stove; layouts do not list them


class Rules(NamedTuple):
  """What the package knows about kinds of things: what a receptacle may hold, and what can be done.

  `able` has, of each property in PDDL ("heatable", ...), the kinds of objects that have it.
  """

  holds: Mapping[str, frozenset[str]]
  openable: frozenset[str]
  able: Mapping[str, frozenset[str]]


class Thing(NamedTuple):
  """`within` is the id of the receptacle it is in; "" for receptacles."""

  id: str
  kind: str
  within: str = ""


class Room(NamedTuple):
  """`target` is the kind of object wanted, `goal` the kind of receptacle it is wanted in ("" for the lamp)."""

  task: Task
  receptacles: tuple[Thing, ...]
  objects: tuple[Thing, ...]
  target: str
  goal: str


def furnish(task: Task, layout: list[str], seen: list[str], rules: Rules) -> Room:
  """The room of a task.

  layout: kinds of the receptacles of the floor plan, one entry each. seen: kinds of all things that it
  has; receptacles among them that the layout leaves out are added.
  """
  rng = np.random.default_rng([_CONTENT, SPLITS.index(task.split), int(task.id)])
  kinds = [_BASINS.get(kind, kind) for kind in layout]
  for kind in sorted({_BASINS.get(kind, kind) for kind in seen} - set(kinds)):
    kinds += [kind] * (_BURNERS if kind == "StoveBurner" else 1)
  kinds = [kind for kind in kinds if kind in rules.holds]
  receptacles = tuple(Thing(_id(kind, number), kind) for number, kind in enumerate(kinds))

  def places(kind: str, *without: str) -> list[Thing]:
    return [r for r in receptacles if kind in rules.holds[r.kind] and r.kind not in without]

  device = _DEVICES.get(task.kind, "")
  able = rules.able[f"{task.kind}able"] if device else None
  small = [k for k in sorted(set(seen)) if places(k) and k not in rules.able["toggleable"]]
  wanted = [k for k in small if (able is None or k in able) and len(_goals(places(k), device)) > 1]
  target = str(rng.choice(wanted))
  goal = "" if task.kind == "look" else str(rng.choice(_goals(places(target), device)))
  count = 2 if task.kind == "pick2" else int(rng.integers(1, 3))
  put = [(target, _one(rng, places(target, goal))) for _ in range(count)]
  for kind in small:
    if kind != target:
      put += [(kind, _one(rng, places(kind))) for _ in range(int(rng.choice(_COPIES)))]
  if task.kind == "look":
    put.append((LAMP, _one(rng, [r for r in receptacles if r.kind in _LAMP_STANDS_ON])))
  objects = (
    Thing(_id(kind, len(receptacles) + number), kind, place.id)
    for number, (kind, place) in enumerate(put)
  )
  return Room(task, receptacles, tuple(objects), target, goal)


def _goals(places: list[Thing], device: str) -> list[str]:
  """Kinds of receptacles where something may be wanted, never where it is heated, cooled or cleaned."""
  return sorted({place.kind for place in places} - {device})


def _one(rng: np.random.Generator, places: list[Thing]) -> Thing:
  return places[int(rng.integers(len(places)))]


def _id(kind: str, number: int) -> str:
  """As the package takes names apart: kind_bar_rest, where a basin's rest says so."""
  basin = kind.endswith("Basin")
  return f"{kind.removesuffix('Basin')}_bar__plus_{number:03d}" + (f"_bar_{kind}" if basin else "")


def problem(room: Room, rules: Rules, goal: str) -> str:
  """The planning problem; `goal` is the package's formula, which closes the definition."""
  spots = {r.id: f"loc_{number}" for number, r in enumerate(room.receptacles)}
  start = f"loc_{len(spots)}"
  kinds = sorted({r.kind for r in room.receptacles})
  contents = sorted({o.kind for o in room.objects})
  lines = [f"(define (problem {room.task.kind}_{room.task.plan}) (:domain alfred) (:objects"]
  lines += ["agent1 - agent", *(f"{spot} - location" for spot in (*spots.values(), start))]
  lines += [f"{kind}Type - rtype" for kind in kinds]
  lines += [f"{kind}Type - otype" for kind in contents]
  lines += [f"{r.id} - receptacle" for r in room.receptacles]
  lines += [f"{o.id} - object" for o in room.objects]
  lines += [")", "(:init", "(= (total-cost) 0)", f"(atLocation agent1 {start})"]
  for r in room.receptacles:
    lines += [
      f"(receptacleType {r.id} {r.kind}Type)",
      f"(receptacleAtLocation {r.id} {spots[r.id]})",
    ]
    lines += [f"(openable {r.id})"] if r.kind in rules.openable else []
  for o in room.objects:
    lines += [f"(objectType {o.id} {o.kind}Type)", f"(inReceptacle {o.id} {o.within})"]
    lines += [f"(objectAtLocation {o.id} {spots[o.within]})"]
    lines += [f"({able} {o.id})" for able, which in sorted(rules.able.items()) if o.kind in which]
    lines += [f"(pickupable {o.id})"] if o.kind not in rules.able["toggleable"] else []
  for kind in kinds:
    lines += [f"(canContain {kind}Type {o}Type)" for o in contents if o in rules.holds[kind]]
  return "\n".join([*lines, ")", goal])


def names(room: Room) -> dict[str, str]:
  """What the package calls things: of each kind, the last by id is number 1."""
  found: dict[str, str] = {}
  numbers: dict[str, int] = {}
  for thing in sorted((*room.receptacles, *room.objects), key=lambda thing: thing.id.lower())[::-1]:
    numbers[thing.kind] = numbers.get(thing.kind, 0) + 1
    found[thing.id] = f"{thing.kind.lower()} {numbers[thing.kind]}"
  return found


def walkthrough(room: Room, rules: Rules) -> list[str]:
  """Commands that solve the task: fetch, treat on the way, bring; or fetch and switch on the lamp."""
  called, places = names(room), {r.id: r for r in room.receptacles}
  commands: list[str] = []
  here, opened = None, set()

  def reach(place: Thing, *, inside: bool = True) -> str:
    nonlocal here
    if here != place:
      commands.append(f"go to {called[place.id]}")
    if inside and place.kind in rules.openable and place not in opened:
      opened.add(place)
      commands.append(f"open {called[place.id]}")
    here = place
    return called[place.id]

  def first(kind: str) -> Thing:
    return next(r for r in room.receptacles if r.kind == kind)

  targets = [o for o in room.objects if o.kind == room.target]
  for target in targets[: 2 if room.task.kind == "pick2" else 1]:
    name = called[target.id]
    commands.append(f"take {name} from {reach(places[target.within])}")
    if room.task.kind == "look":
      lamp = next(o for o in room.objects if o.kind == LAMP)
      reach(places[lamp.within], inside=False)
      commands.append(f"use {called[lamp.id]}")
      continue
    if room.task.kind in _DEVICES:
      device = reach(first(_DEVICES[room.task.kind]), inside=False)
      commands.append(f"{room.task.kind} {name} with {device}")
    commands.append(f"move {name} to {reach(first(room.goal))}")
  return commands


def sentence(room: Room, templates: list[str]) -> str:
  """What is asked for, in one of the package's own sentences."""
  rng = np.random.default_rng([_CONTENT, SPLITS.index(room.task.split), int(room.task.id), 1])
  words = {"obj": room.target, "recep": room.goal, "toggle": LAMP}
  return str(rng.choice(templates)).format(**{k: v.lower() for k, v in words.items()})
