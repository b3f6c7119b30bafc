"""The chat: the only border between text and tokens.

Whoever has messages gets prompt ids here, whoever has sampled ids gets their text here, and nobody
else knows a tokenizer. What was sampled is never encoded again (types.Sample keeps the ids).
Text of a message never becomes a special token, whatever a user or an environment writes. Token ids carry
no image: a line says that it was left out.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import sentencepiece

from memrl_jax.sampling import images
from memrl_jax.types import Message

SPACE = "\u2581"  # how sentencepiece writes a space inside a piece
END = "<|end|>"
ROLES = ("system", "user", "assistant")
_NO_IMAGES = "prompts of token ids are text; a server of text chats may take images (config.remote)"


class Chat(NamedTuple):
  """The functions of one tokenizer and its chat template.

  encode(messages) -> int32 ids that end where the assistant's answer begins;
  reply(text) -> int32 ids of a whole answer, stop id included (for imitation, never for samples);
  decode(ids) -> text, special tokens dropped; bytes that are no UTF-8 become U+FFFD;
  pieces(ids) -> what to show for each id;
  shown(messages) -> the messages as `encode` reads them: a line in place of every image.
  `stop_ids` end an answer; `pad_id` only fills arrays and carries no meaning.
  """

  encode: Callable[[Sequence[Message]], np.ndarray]
  reply: Callable[[str], np.ndarray]
  decode: Callable[[Iterable[int]], str]
  pieces: Callable[[Iterable[int]], list[str]]
  stop_ids: tuple[int, ...]
  vocab_size: int
  pad_id: int
  shown: Callable[[Sequence[Message]], list[Message]]


def load(directory: pathlib.Path, checkpoint: pathlib.Path | None = None) -> Chat:
  """The chat of a sentencepiece directory (the tiny models'); a message is `<|role|>content<|end|>`.

  Args:
    directory: holds `tokenizer.model`.
    checkpoint: holds the model's `config.json`, read for its stop ids; `directory` when left out.

  Raises:
    FileNotFoundError: there is no `tokenizer.model`.
    ValueError: the tokenizer lacks a special token of the template.
  """
  path = pathlib.Path(directory) / "tokenizer.model"
  if not path.is_file():
    raise FileNotFoundError(
      f"no tokenizer.model in {directory}; name a directory that experiments/tiny/train_tokenizer.py "
      "wrote, or read a Hugging Face directory with chat.from_transformers"
    )
  model = sentencepiece.SentencePieceProcessor(model_file=str(path))
  role_ids = {role: _special(model, f"<|{role}|>") for role in ROLES}
  end = _special(model, END)
  surfaces = [_surface(model, index) for index in range(len(model))]
  pieces = [
    surfaces[i].decode("utf-8") if _whole(model, i) else model.id_to_piece(i)
    for i in range(len(model))
  ]
  shown = images.TextOnly(_NO_IMAGES)
  space = list(model.piece_to_id([f"<0x{byte:02X}>" for byte in SPACE.encode()]))

  def text_ids(text: str) -> list[int]:
    first, *rest = [model.encode(part) for part in text.split(SPACE)]  # U+2581 itself is no space
    return first + [index for part in rest for index in (*space, *part)]

  def encode(messages: Sequence[Message]) -> np.ndarray:
    ids: list[int] = []
    for role, content, _ in shown(messages):
      if role not in role_ids:
        raise ValueError(
          f"role {role!r} is not known to the chat template; use one of {', '.join(ROLES)}"
        )
      ids += [role_ids[role], *text_ids(content), end]
    return np.array([*ids, role_ids["assistant"]], np.int32)

  return Chat(
    encode=encode,
    reply=lambda text: np.array([*text_ids(text), end], np.int32),
    decode=lambda ids: b"".join([surfaces[i] for i in ids]).decode("utf-8", errors="replace"),
    pieces=lambda ids: [pieces[i] for i in ids],
    stop_ids=_stop_ids(end, pathlib.Path(checkpoint or directory)),
    vocab_size=len(model),
    pad_id=model.pad_id(),
    shown=shown,
  )


def _special(model: sentencepiece.SentencePieceProcessor, piece: str) -> int:
  index = model.piece_to_id(piece)
  if not model.is_control(index):
    raise ValueError(f"the tokenizer has no special token {piece}; retrain it (experiments/tiny)")
  return index


def _whole(model: sentencepiece.SentencePieceProcessor, index: int) -> bool:
  return not (model.is_control(index) or model.is_unknown(index) or model.is_byte(index))


def _surface(model: sentencepiece.SentencePieceProcessor, index: int) -> bytes:
  """The bytes that a piece stands for; none for a special one."""
  piece = model.id_to_piece(index)
  if model.is_byte(index):
    return bytes([int(piece[3:5], 16)])
  return piece.replace(SPACE, " ").encode("utf-8") if _whole(model, index) else b""


def from_transformers(directory: pathlib.Path) -> Chat:
  """The chat of a Hugging Face directory, with its own template; thinking off where it can be.

  A message that spells out a special token is encoded around it, as plain text.

  Raises:
    FileNotFoundError: the directory, the tokenizer's files or its chat template are missing.
    ValueError: nothing says which token ends an answer.
  """
  directory = pathlib.Path(directory)
  names = ("tokenizer.json", "tokenizer.model", "vocab.json")
  if not any((directory / name).is_file() for name in names):
    raise FileNotFoundError(f"no tokenizer in {directory}; it needs one of {', '.join(names)}")
  import transformers  # takes seconds, and the tiny models never need it

  tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
  template = tokenizer.chat_template
  if not template:
    raise FileNotFoundError(
      f"no chat template in {directory}; copy chat_template.jinja of the instruct model there"
    )
  options = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
  stop_ids = _stop_ids(tokenizer.eos_token_id, directory)
  special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
  reserved = re.compile("|".join(map(re.escape, special)) or r"(?!)")
  shown = images.TextOnly(_NO_IMAGES)

  def render(messages: Sequence[Message]) -> str:
    chat = [images.wire(message) for message in messages]
    return tokenizer.apply_chat_template(
      chat, tokenize=False, add_generation_prompt=True, **options
    )

  def text_ids(text: str, plain: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, split_special_tokens=plain)

  def encode(messages: Sequence[Message]) -> np.ndarray:
    messages = shown(messages)
    if not any(reserved.search(message.content) for message in messages):
      return np.array(text_ids(render(messages)), np.int32)
    return np.array(_encode_around(messages, reserved, render, text_ids), np.int32)

  return Chat(
    encode=encode,
    reply=lambda text: np.array([*text_ids(text, plain=True), stop_ids[0]], np.int32),
    decode=lambda ids: tokenizer.decode(list(map(int, ids)), skip_special_tokens=True),
    pieces=lambda ids: [tokenizer.decode([int(index)]) for index in ids],
    stop_ids=stop_ids,
    vocab_size=len(tokenizer),
    pad_id=stop_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    shown=shown,
  )


def _encode_around(
  messages: Sequence[Message],
  reserved: re.Pattern[str],
  render: Callable[[Sequence[Message]], str],
  text_ids: Callable[..., list[int]],
) -> list[int]:
  """Encodes a rendered chat whose contents spell special tokens, those as plain text.

  Each spelled token travels through the template as a private-use character and its number.
  """
  mark = next(
    c for c in map(chr, range(0xE000, 0xF8FF)) if not any(c in m.content for m in messages)
  )
  spelled: list[str] = []

  def hide(match: re.Match[str]) -> str:
    spelled.append(match.group())
    return f"{mark}{len(spelled) - 1}{mark}"

  text = render([Message(one.role, reserved.sub(hide, one.content)) for one in messages])
  ids: list[int] = []
  for index, part in enumerate(text.split(mark)):  # odd parts are numbers of spelled tokens
    ids += text_ids(spelled[int(part)], plain=True) if index % 2 else text_ids(part)
  return ids


def _stop_ids(end: int | None, checkpoint: pathlib.Path) -> tuple[int, ...]:
  """The tokenizer's end, then those of config.json and generation_config.json: any of them stops."""
  found = [] if end is None else [end]
  for name in ("config.json", "generation_config.json"):
    path = checkpoint / name
    declared: Any = (
      json.loads(path.read_text("utf-8")).get("eos_token_id") if path.is_file() else None
    )
    found += declared if isinstance(declared, list) else [] if declared is None else [declared]
  if not found:
    raise ValueError(
      f"nothing in {checkpoint} says which token ends an answer; set eos_token_id in config.json"
    )
  return tuple(dict.fromkeys(found))
