"""What a config is: a ConfigDict with the sections of `training.settings.Settings`, and back.

`new` fills it with the defaults of the engine's own dataclasses (there is no second list of them),
a config file sets its values, `override` applies `--config.a.b=value`, and `settings` turns it into
frozen dataclasses that check themselves. Whatever is wrong is one sentence in a ValueError.

    config.seed
    config.env      name, how it is run, and the options of that environment
    config.method   name, and the options of that method
    config.eval     `options` and `harder.<name>` hold options of the environment; so does config.adapt
    config.model, lora, sampling, engine, remote, credit, loss, optim, pack, mesh, replicas, reference,
    critic, memory, tips, novelty, episodic, experience, manager, extractor (with sections of its own), train, guard
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

import ml_collections

from memrl_jax import methods
from memrl_jax.envs import base as env_base
from memrl_jax.training import sections
from memrl_jax.training import settings as settings_lib

# Sections that are one dataclass each; env, method and eval need a word more.
SECTIONS = {
  name: kind
  for name, kind in typing.get_type_hints(settings_lib.Settings).items()
  if dataclasses.is_dataclass(kind) and name not in ("env", "method", "eval", "adapt")
}
_ENV = {  # of EnvSettings, what is neither the name nor the environment's own options
  name: kind
  for name, kind in typing.get_type_hints(sections.EnvSettings).items()
  if name not in ("name", "options")
}


def new(method: str, env: str) -> ml_collections.ConfigDict:
  """A config of this method in this environment: defaults, the shipped tiny model and panel."""
  given = {
    "model": {"checkpoint": f"tiny:{env}"},
    "engine": {"slots": 128},
    "eval": {"panel": f"{env}-v1", "harder": {}, "options": {}},
  }
  options = _defaults(env_base.family(env).options)
  env_defaults = {k: v for k, v in _defaults(sections.EnvSettings).items() if k in _ENV}
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "env": {"name": env, **env_defaults, **options},
      "method": {"name": method, **_defaults(methods.config_type(method))},
      **{name: _section(kind) | given.get(name, {}) for name, kind in SECTIONS.items()},
      "eval": _defaults(sections.EvalSettings) | given["eval"],
      "adapt": _defaults(sections.AdaptSettings) | {"options": {}},
    }
  )


def _section(kind: type) -> dict[str, Any]:
  """All fields of a section, a section inside it as a dict of its own."""
  made = {
    field.name: dataclasses.asdict(field.default_factory())
    for field in dataclasses.fields(kind)
    if field.default_factory is not dataclasses.MISSING
  }
  return _defaults(kind) | made


def _types(kind: Any) -> Any:
  """The types of a section's keys; of a section inside it, as a dict."""
  if not dataclasses.is_dataclass(kind):
    return kind
  return {name: _types(inner) for name, inner in typing.get_type_hints(kind).items()}


def _made(kind: Any, values: Any) -> Any:
  """The dataclass of a section, those inside it first."""
  hints = typing.get_type_hints(kind)
  inner = {n: _made(hints[n], v) for n, v in values.items() if dataclasses.is_dataclass(hints[n])}
  return kind(**values | inner)


def _defaults(kind: type) -> dict[str, Any]:
  """Field -> default, of the fields that have one."""
  return {
    field.name: field.default
    for field in dataclasses.fields(kind)
    if field.default is not dataclasses.MISSING
  }


def schema(config: Mapping[str, Any]) -> dict[str, Any]:
  """The type of every key, as nested dicts; under "*" what any name may hold.

  Raises:
    ValueError: the config's environment or method is not known.
  """
  options = _options(config["env"]["name"])
  return {
    "seed": int,
    "env": {"name": str, **_ENV, **options},
    "method": {"name": str, **typing.get_type_hints(methods.config_type(config["method"]["name"]))},
    **{name: _types(kind) for name, kind in SECTIONS.items()},
    "eval": typing.get_type_hints(sections.EvalSettings)
    | {"options": options, "harder": {"*": options}},
    "adapt": typing.get_type_hints(sections.AdaptSettings) | {"options": options},
  }


def _options(env: str) -> dict[str, Any]:
  """The types of an environment's options; what its class says of all of them is none."""
  kinds = typing.get_type_hints(env_base.family(env).options)
  return {k: v for k, v in kinds.items() if typing.get_origin(v) is not typing.ClassVar}


# Overrides.


def override(config: ml_collections.ConfigDict, assignments: Iterable[str]) -> None:
  """Applies assignments such as "optim.learning_rate=3e-4" in order, in place.

  Raises:
    ValueError: a key is not known, or a value does not have the key's type.
  """
  for assignment in assignments:
    key, equals, text = assignment.partition("=")
    if not equals:
      raise ValueError(f"--config.{key} has no value; write --config.{key}=VALUE")
    if key == "env.name" and text != config.env.name:
      raise ValueError(
        f"config.env.name is {config.env.name} in this config file, as are its options and sizes; "
        f"use a file of {text} instead (--help lists them)"
      )
    kind = _kind_of(key, schema(config))
    *sections, name = key.split(".")
    place = config
    for section in sections:
      if section not in place:
        place[section] = ml_collections.ConfigDict()
      place = place[section]
    place[name] = parse(key, kind, text)


def _kind_of(key: str, known: dict[str, Any]) -> Any:
  """The type at a dotted key; ValueError, with the nearest known key, if there is none."""
  kind: Any = known
  for name in key.split("."):
    if not isinstance(kind, dict) or not (name in kind or ("*" in kind and name)):
      raise ValueError(_unknown(key, known))
    kind = kind[name] if name in kind else kind["*"]
  if isinstance(kind, dict):
    inside = ", ".join("NAME.OPTION" if name == "*" else name for name in kind)
    raise ValueError(f"config.{key} is a section; set one of its keys: {inside}")
  return kind


def _unknown(key: str, known: dict[str, Any]) -> str:
  """The sentence about an unknown key, with the nearest known one or what its section holds."""
  section, _, name = key.rpartition(".")
  keys = list(_dotted(known))
  of_section = [k.rpartition(".")[2] for k in keys if k.rpartition(".")[0] == section]
  near = [f"{section}.{n}".lstrip(".") for n in difflib.get_close_matches(name, of_section, 1)]
  near += difflib.get_close_matches(key, keys, 1, cutoff=0.8)
  near += [k for k in keys if k.rpartition(".")[2] == name and "*" not in k]
  if near:
    return f"config.{key} is not known; did you mean config.{near[0]}?"
  if of_section:
    return f"config.{key} is not known; config.{section or 'FILE'} has {', '.join(of_section)}"
  return f"config.{key} is not known; the sections are {', '.join(known)}"


def _dotted(known: dict[str, Any], prefix: str = "") -> Iterable[str]:
  for name, kind in known.items():
    if isinstance(kind, dict):
      yield from _dotted(kind, f"{prefix}{name}.")
    else:
      yield f"{prefix}{name}"


def parse(key: str, kind: Any, text: str) -> Any:
  """The value that `text` spells for a key of this type: bool, int, float, str or a tuple of one.

  Raises:
    ValueError: it spells none.
  """
  if _optional(kind) is not None:
    return None if text.lower() == "none" else parse(key, _optional(kind), text)
  if kind is str:
    return text
  if kind is bool and text.lower() in ("true", "false"):
    return text.lower() == "true"
  if typing.get_origin(kind) is tuple:
    element = typing.get_args(kind)[0]
    inner = text.strip().removeprefix("(").removesuffix(")").strip().removesuffix(",")
    parts = [part.strip().strip("'\"") for part in inner.split(",")] if inner else []
    if element is str or all(_number(element, part) is not None for part in parts):
      return tuple(parts if element is str else (element(part) for part in parts))
  if kind in (int, float) and (value := _number(kind, text)) is not None:
    return value
  raise ValueError(f"config.{key} takes {_expected(kind)}, not {text!r}")


def _optional(kind: Any) -> Any:
  """X, where the type is X or None; None for any other."""
  parts = typing.get_args(kind) if isinstance(kind, types.UnionType) else ()
  return parts[0] if len(parts) == 2 and parts[1] is type(None) else None


def _number(kind: type, text: str) -> int | float | None:
  """The finite number that `text` spells; None if it spells none."""
  try:
    value = kind(text)
  except ValueError:
    return None
  return value if math.isfinite(value) else None


def _expected(kind: Any) -> str:
  if _optional(kind) is not None:
    return f"{_expected(_optional(kind))}, or none"
  if typing.get_origin(kind) is tuple:
    words = {int: "whole numbers", float: "numbers", str: "words"}
    return f"{words[typing.get_args(kind)[0]]} separated by commas"
  return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[kind]


# To frozen dataclasses.


def settings(
  config: ml_collections.ConfigDict, name: str = "experiment", variant: str = "laptop"
) -> settings_lib.Settings:
  """The checked settings of a config.

  Raises:
    ValueError: a key is missing, unknown or of a wrong type, or values do not fit each other.
  """
  values = plain(config)
  for key in ("env", "method"):
    if "name" not in values.get(key, {}):
      raise ValueError(f"config.{key}.name is missing; start from experiments.base.new")
  known = schema(values)
  for key in values:
    if key not in known:
      raise ValueError(_unknown(key, known))
  values = {key: _checked(key, values, kind, known) for key, kind in known.items()}
  env, method, evaluation = values["env"], values["method"], values["eval"]
  family = env_base.family(env["name"])
  options = {k: v for k, v in env.items() if k != "name" and k not in _ENV}
  method_name = method.pop("name")
  adapt = values["adapt"] | {"options": tuple(values["adapt"]["options"].items())}
  evaluation["options"] = tuple(evaluation["options"].items())
  evaluation["harder"] = tuple((k, tuple(v.items())) for k, v in evaluation["harder"].items())
  return settings_lib.Settings(
    name=name,
    variant=variant,
    seed=values["seed"],
    env=sections.EnvSettings(
      name=env["name"], options=family.options(**options), **{k: env[k] for k in _ENV}
    ),
    method_name=method_name,
    method=methods.config_type(method_name)(**method),
    eval=sections.EvalSettings(**evaluation),
    adapt=sections.AdaptSettings(**adapt),
    **{section: _made(kind, values[section]) for section, kind in SECTIONS.items()},
  )


def plain(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """The config as nested dicts, for JSON and for hashing."""
  return config.to_dict() if isinstance(config, ml_collections.ConfigDict) else dict(config)


def _checked(key: str, parent: Mapping[str, Any], kind: Any, known: dict[str, Any]) -> Any:
  """The value at the last part of `key`, of the right type; a section has exactly its keys."""
  name = key.rpartition(".")[2]
  if name not in parent:
    raise ValueError(f"config.{key} is missing; start from experiments.base.new")
  value = parent[name]
  if not isinstance(kind, dict):
    return _typed(key, kind, value)
  if not isinstance(value, Mapping):
    raise ValueError(f"config.{key} is a section, not {value!r}; set its keys instead")
  for inside in value:
    if inside not in kind and "*" not in kind:
      raise ValueError(_unknown(f"{key}.{inside}", known))
  partial = key in ("eval.options", "adapt.options") or key.startswith(
    "eval.harder"
  )  # changes only
  names = value if partial else kind
  return {n: _checked(f"{key}.{n}", value, kind.get(n, kind.get("*")), known) for n in names}


def _typed(key: str, kind: Any, value: Any) -> Any:
  """The value; a whole number becomes a float, and a list a tuple, where the type asks for it."""
  if _optional(kind) is not None:
    return None if value is None else _typed(key, _optional(kind), value)
  if typing.get_origin(kind) is tuple and isinstance(value, list | tuple):
    return tuple(_typed(key, typing.get_args(kind)[0], part) for part in value)
  if kind is float and isinstance(value, int) and not isinstance(value, bool):
    return float(value)
  if isinstance(kind, type) and not isinstance(kind, types.GenericAlias) and type(value) is kind:
    return value
  raise ValueError(f"config.{key} takes {_expected(kind)}, not {value!r}")
