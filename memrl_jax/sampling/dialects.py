"""How each kind of server is spoken to: what is asked, how its reply is read, how it takes weights.

What a server can give; `remote.Client.gives` measures it when it connects and believes no table:

  server             ids in, out   log-probs of softmax(z/T)  same seed, same text  weights from a path
  memrl_jax (serve)  yes, yes      yes                        yes                   yes, with version
  transformers 5.24  no, no        no                         one at a time         no
  vLLM               yes, yes      T = 1; else (1)            yes, but for batching yes (2), no version
  SGLang             yes, yes      yes (3)                    (4)                   yes, with version
  SGLang-JAX         yes, yes      yes                        (5)                   no

  (1) --logprobs-mode processed_logprobs; its default, raw_logprobs, ignores the temperature
  (2) VLLM_SERVER_DEV_MODE=1: POST /collective_rpc, reload_weights with weights_path
  (3) unless SGLANG_RETURN_ORIGINAL_LOGPROB is set
  (4) --enable-deterministic-inference, then sampling_seed   (5) --enable-deterministic-sampling

Lines 1 and 2 are measured (tests/sampling/test_serve.py, tests/real/test_remote_server.py): of
transformers, that it refuses a prompt of ids, ignores `logprobs`, and samples only where the field
generation_config says so, seeding one generator for all requests. The others are read, not run:
vLLM, docs.vllm.ai (OpenAI-compatible server, v1/sample/sampler, layerwise reload) and its
entrypoints/openai/completion/protocol.py; SGLang, docs.sglang.io (native API, sampling parameters,
SGLang for RL); SGLang-JAX, srt/entrypoints/http_server.py and srt/layers/sampler.py at cddbf6f.
Servers that list another owner (llama.cpp, Ollama, hosted ones) are spoken to as text chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from memrl_jax.sampling import images
from memrl_jax.types import Message


class RemoteError(OSError):
  """The server cannot be used like this; the message is one sentence with what to change."""


class Transient(Exception):
  """May pass; `wait_s` is how long the server asks to be left alone. `gone`: it may not be what it was."""

  def __init__(self, reason: str, wait_s: float = 0.0, *, gone: bool = False):
    super().__init__(reason)
    self.wait_s, self.gone = wait_s, gone


class Ask(NamedTuple):
  """One prompt and how to answer it: `prompt` as ids, or `messages` where the server reads text (and images).

  `key` is uint32 [2], as of `engine.Request`; a server's seed is made from it. Prompts of one `home` begin
  alike: they go to one server, where there are several.
  """

  key: np.ndarray
  max_tokens: int
  prompt: np.ndarray | None = None
  messages: Sequence[Message] = ()
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  stop: tuple[int, ...] = ()
  home: int = 0

  def seed(self, bits: int = 64) -> int:
    """The key as one signed whole number of so many bits; of 31 or fewer, a positive one."""
    high, low = (int(part) for part in self.key)
    number = high << 32 | low
    if bits < 64:
      return (number ^ number >> 32) & (1 << bits) - 1
    return number - (1 << 64) if number >> 63 else number


class Reply(NamedTuple):
  """What was sampled. `logps` are nats under softmax(logits / T), one per id, or both are empty.

  `finish` is "stop" where the last id is one of the request's stop ids, else the server's word.
  `version` counts the weight updates before it was sampled.
  """

  text: str
  ids: np.ndarray
  logps: np.ndarray
  finish: str
  version: int


class Dialect(NamedTuple):
  """How to speak to a kind of server.

  `body(ask, model, request id)` is posted to `path`, and `read(reply, ask)` understands the answer.
  `push(directory, version)` names the calls that load weights; `hint` says what to do where they
  fail. `text`: it reads messages, not ids.
  """

  path: str
  body: Callable[[Ask, str, str], dict[str, Any]]
  read: Callable[[dict[str, Any], Ask], Reply]
  push: Callable[[str, int], list[tuple[str, Any]]] | None
  hint: str = ""
  text: bool = False


def _completions_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  return {
    "model": model,
    "prompt": np.asarray(ask.prompt).tolist(),
    "max_tokens": ask.max_tokens,
    "temperature": ask.temperature,
    "top_p": ask.top_p,
    "top_k": ask.top_k,
    "seed": ask.seed(),
    "stop_token_ids": list(ask.stop),
    "logprobs": 0,
    "return_token_ids": True,
  }


def _vllm_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  # Versions without return_token_ids ignore it and write the ids into logprobs.tokens.
  return _completions_body(ask, model, name) | {"return_tokens_as_token_ids": True}


def _read_completion(reply: dict[str, Any], ask: Ask) -> Reply:
  (choice,) = reply["choices"]
  logprobs = choice.get("logprobs") or {}
  ids = choice.get("token_ids")
  if ids is None:
    marked = [word.partition("token_id:")[2] for word in logprobs.get("tokens") or ()]
    ids = [int(word) for word in marked] if all(marked) else []
  logps = logprobs.get("token_logprobs") or []
  return _reply(
    choice["text"], ids, logps, choice["finish_reason"], reply.get("weight_version"), ask
  )


def _sglang_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  return {
    "input_ids": np.asarray(ask.prompt).tolist(),
    "sampling_params": {
      "max_new_tokens": ask.max_tokens,
      "temperature": ask.temperature,
      "top_p": ask.top_p,
      "top_k": ask.top_k or -1,
      "stop_token_ids": list(ask.stop),
      "sampling_seed": ask.seed(31),
    },
    "return_logprob": True,
    "rid": name,
  }


def _read_sglang(reply: dict[str, Any], ask: Ask) -> Reply:
  about = reply["meta_info"]
  pairs = about.get("output_token_logprobs") or []
  finish = about["finish_reason"]["type"]
  if finish == "abort":
    raise Transient(f"the server gave the request up: {about['finish_reason'].get('message')}")
  version = about.get("weight_version")
  logps, ids = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
  return _reply(reply.get("text") or "", ids, logps, finish, version, ask)


def _chat_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  if ask.top_k:
    raise RemoteError(
      f"a text chat has no top_k, and {ask.top_k} was asked for; set top_k to 0 "
      "(config.sampling, config.eval)"
    )
  return {
    "model": model,
    "messages": [images.wire(message) for message in ask.messages],
    "max_tokens": ask.max_tokens,
    "temperature": ask.temperature,
    "top_p": ask.top_p,
    "seed": ask.seed(31),
  }


def _transformers_body(ask: Ask, model: str, name: str) -> dict[str, Any]:
  generation = {
    "do_sample": ask.temperature > 0,  # the field `temperature` alone leaves it greedy
    "temperature": ask.temperature or 1.0,
    "top_p": ask.top_p,
    "top_k": ask.top_k,
    "max_new_tokens": ask.max_tokens,
  }
  if ask.stop:
    generation["eos_token_id"] = list(ask.stop)
  return {
    "model": model,
    "messages": [images.wire(message) for message in ask.messages],
    "seed": ask.seed(31),
    "generation_config": json.dumps(generation),
  }


def _read_chat(reply: dict[str, Any], ask: Ask) -> Reply:
  (choice,) = reply["choices"]
  text = choice["message"].get("content") or ""
  return _reply(text, [], [], choice["finish_reason"] or "stop", reply.get("weight_version"), ask)


def _reply(
  text: str, ids: list[int], logps: list[float], finish: str, version: Any, ask: Ask
) -> Reply:
  """A reply of checked arrays; whoever parsed it raises what a malformed one raises."""
  if not isinstance(text, str) or len(ids) > ask.max_tokens:
    raise ValueError(f"{len(ids)} tokens where {ask.max_tokens} were allowed")
  if ids and logps and len(ids) != len(logps):
    raise ValueError(f"{len(ids)} ids with {len(logps)} log-probs")
  logps_K = np.array(logps, np.float32)
  if not np.all(np.isfinite(logps_K)):
    raise ValueError("a log-prob that is not finite")
  if ids and ask.stop and ids[-1] in ask.stop:
    finish = "stop"
  known = isinstance(version, int) or (isinstance(version, str) and version.isdigit())
  return Reply(text, np.array(ids, np.int32), logps_K, finish, int(version) if known else -1)


DIALECTS: dict[str, Dialect] = {
  "memrl_jax": Dialect(
    "/v1/completions",
    _completions_body,
    _read_completion,
    lambda path, version: [("/update_weights", {"path": path, "version": version})],
  ),
  "vllm": Dialect(
    "/v1/completions",
    _vllm_body,
    _read_completion,
    lambda path, version: [
      ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}}),
      ("/reset_prefix_cache", {}),
    ],
    hint="start it with VLLM_SERVER_DEV_MODE=1",
  ),
  "sglang": Dialect(
    "/generate",
    _sglang_body,
    _read_sglang,
    lambda path, version: [
      ("/update_weights_from_disk", {"model_path": path, "weight_version": str(version)})
    ],
    hint="SGLang-JAX has no such call; restart it with the new weights",
  ),
  "transformers": Dialect("/v1/chat/completions", _transformers_body, _read_chat, None, text=True),
  "chat": Dialect("/v1/chat/completions", _chat_body, _read_chat, None, text=True),
}
