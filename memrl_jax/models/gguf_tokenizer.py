"""The tokenizer inside a GGUF: its metadata -> the tokenizer files of a Hugging Face directory.

A GGUF lists tokens, scores or merges, and the kind of every token; normaliser and splitting of text
are not in it. transformers has them per kind of vocabulary (`transformers.integrations.gguf`), and
this file only says what of it we trust, and adds what a chat needs: a template and the stop ids.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

_KEY = "tokenizer.ggml."
_MERGED = ("qwen2", "llama-bpe", "llama3", "llama-v3")  # byte-level splittings that are known
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_STOPS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>")

# A base model knows no chat. Plain text with a name before each message is what it has seen most.
_PLAIN = (
  "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n"
  "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def build(path: pathlib.Path, architecture: str, metadata: Mapping[str, Any]) -> Any:
  """A fast tokenizer of transformers, chat template included; about 20 s for 262,144 tokens.

  Raises:
    ValueError: the file holds no tokenizer, or one whose splitting of text is not known here.
  """
  kind, pre = metadata.get(f"{_KEY}model"), metadata.get(f"{_KEY}pre")
  if kind not in ("llama", "gpt2") or (kind == "gpt2" and pre not in _MERGED):
    raise ValueError(
      f"{path}: the tokenizer {kind!r} with splitting {pre!r} is not supported; take the tokenizer "
      "of the model's Hugging Face directory"
    )
  import transformers  # takes seconds
  from transformers.integrations import gguf as integration

  tokens = metadata[f"{_KEY}tokens"]
  fields = {
    "tokenizer_type": kind,
    "pre_tokenizer_type": pre,
    "tokens": tokens,
    **{
      name: metadata[_KEY + name]
      for name in ("scores", "token_type", "merges")
      if _KEY + name in metadata
    },
  }
  backend, _ = integration.convert_gguf_tokenizer(architecture, fields)
  ids = {name: metadata.get(f"{_KEY}{long}_token_id") for name, long in _SPECIAL.items()}
  # llama.cpp: a sentencepiece vocabulary that does not say otherwise begins with bos.
  add_bos = metadata.get(f"{_KEY}add_bos_token", kind == "llama")
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    add_bos_token=add_bos,
    add_eos_token=metadata.get(f"{_KEY}add_eos_token", False),
    clean_up_tokenization_spaces=False,
    **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
  )
  plain = ("{{ bos_token }}" if add_bos else "") + _PLAIN
  tokenizer.chat_template = metadata.get("tokenizer.chat_template", plain)
  return tokenizer


def save(tokenizer: Any, metadata: Mapping[str, Any], folder: pathlib.Path) -> None:
  """Tokenizer files, chat template and `generation_config.json`, which says what ends an answer."""
  tokenizer.save_pretrained(folder)
  text = json.dumps(token_ids(metadata), indent=2, sort_keys=True) + "\n"
  (folder / "generation_config.json").write_text(text, "utf-8")


def token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Special ids as a Hugging Face config has them; all of `eos_token_id` stop an answer.

  They are eos, then the ends of a turn: those the file names, and those llama.cpp knows by their text.
  """
  named = [metadata.get(f"{_KEY}{name}_token_id") for name in ("eos", "eot", "eom")]
  known = [i for i, token in enumerate(metadata[f"{_KEY}tokens"]) if token in _STOPS]
  stops = list(dict.fromkeys(i for i in (*named, *known) if i is not None))
  ids = {"bos": metadata.get(f"{_KEY}bos_token_id"), "pad": metadata.get(f"{_KEY}padding_token_id")}
  ids["eos"] = stops or None
  return {f"{name}_token_id": value for name, value in ids.items() if value is not None}
