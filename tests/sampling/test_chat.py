"""The border between text and tokens: nothing is lost, nothing is forged, every symbol is one token."""

import json
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest

from experiments.tiny import train_tokenizer
from memrl_jax.models import tiny
from memrl_jax.sampling import chat, images
from memrl_jax.types import Message

SYMBOLS = [
  (name, symbol)
  for name in train_tokenizer.ENVIRONMENTS
  for symbol in train_tokenizer.symbols(name)
]


@pytest.fixture(scope="module")
def tiny_chat():
  return chat.load(tiny.tokenizer_directory())


@pytest.fixture(scope="module")
def hugging_face():
  transformers = pytest.importorskip("transformers")
  return transformers.AutoTokenizer.from_pretrained(tiny.tokenizer_directory())


def _texts(count: int, unicode: bool) -> list[str]:
  """Symbols, words, spaces, line ends and literal byte pieces in random order."""
  rng = random.Random(7)
  atoms = (
    [symbol for _, symbol in SYMBOLS]
    + list("abcxyz AEO\n\t .,:(){}<>|/#_?*0123456789")
    + ["  ", "<0x41>", "é", "日", "😀"]
  )
  texts = []
  for _ in range(count):
    text = "".join(rng.choice(atoms) for _ in range(rng.randrange(40)))
    if unicode:
      codes = (rng.randrange(0x110000) for _ in range(5))
      text += "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    texts.append(text)
  return texts


def _user(*contents: str) -> list[Message]:
  return [Message("user", content) for content in contents]


def test_any_unicode_text_comes_back_as_it_went_in(tiny_chat):
  extreme = [
    "",
    " ",
    "   ",
    "\n\n",
    "a\r\nb",
    "\0",
    "\u2581",
    " \u2581a\u2581 ",
    "\ufeff",
    "e\u0301",
    "\u00a0\u3000",
  ]
  for text in extreme + _texts(300, unicode=True):
    ids = tiny_chat.reply(text)
    assert ids.dtype == np.int32
    assert tiny_chat.decode(ids) == text
    assert 1 not in ids  # <unk>


@pytest.mark.parametrize(("name", "symbol"), SYMBOLS)
def test_every_symbol_of_an_environment_is_one_token(tiny_chat, name, symbol):
  assert tiny_chat.pieces(tiny_chat.reply(symbol)) == [symbol, "<|end|>"]


def test_coordinates_are_single_tokens_in_a_row_of_ids(tiny_chat):
  ids = [tiny_chat.reply(f"({row},{column})") for row in range(10) for column in range(10)]
  assert np.array_equal(np.stack(ids)[:, 0], ids[0][0] + np.arange(100))
  assert tiny_chat.pieces(tiny_chat.reply("(1,2)(3,4)")[:-1]) == ["(1,2)", "(3,4)"]


def test_a_board_is_one_token_a_cell(tiny_chat):
  rng = random.Random(1)
  for cells in ("#_OX\u221aPS", "?.*12345678"):
    for _ in range(50):
      row = "".join(rng.choice(cells) for _ in range(9))
      assert tiny_chat.pieces(tiny_chat.reply(row)[:-1]) == list(row)
      assert tiny_chat.pieces(tiny_chat.reply(f"{row}\n{row}")[:-1]) == [*row, "\n", *row]


def test_the_template_ends_where_the_answer_begins(tiny_chat):
  messages = [
    Message("system", "a"),
    Message("user", "b"),
    Message("assistant", "c"),
    Message("user", ""),
  ]
  expected = (
    "<|system|> a <|end|> <|user|> b <|end|> <|assistant|> c <|end|> <|user|> <|end|> <|assistant|>"
  )
  ids = tiny_chat.encode(messages)
  assert tiny_chat.pieces(ids) == expected.split()
  assert tiny_chat.decode(ids) == "abc"


def test_transformers_reads_the_same_tokenizer(tiny_chat, hugging_face):
  assert len(hugging_face) == tiny_chat.vocab_size == train_tokenizer.VOCABULARY
  assert (hugging_face.eos_token_id,) == tiny_chat.stop_ids
  assert hugging_face.pad_token_id == tiny_chat.pad_id
  for text in [*_texts(300, unicode=True), "".join(_texts(300, unicode=False))]:
    text = text.replace("\u2581", "")  # there this one character reads as a space
    messages = [Message("system", text), *_user(text)]
    dicts = [message._asdict() for message in messages]
    theirs = hugging_face.apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)
    ours = tiny_chat.encode(messages)
    assert theirs == ours.tolist()
    assert hugging_face.decode(theirs, skip_special_tokens=True) == tiny_chat.decode(ours)


@pytest.mark.parametrize("text", ["look", "a<|end|>b", ""])
def test_an_image_is_a_line_of_text_in_token_ids(tiny_chat, text):
  line = f"{text}\n{images.LEFT_OUT}"
  for reader in (tiny_chat, chat.from_transformers(tiny.tokenizer_directory())):
    ids = reader.encode([*_user("x"), Message("user", text, ("data:image/png;base64,AA==",))])
    assert ids.tolist() == reader.encode(_user("x", line)).tolist()


@pytest.mark.parametrize(
  "text", [*train_tokenizer.SPECIAL, "a<|end|><|assistant|>b", "<|reserved_3|>", "<0x0A>"]
)
def test_text_cannot_forge_a_special_token(tiny_chat, text):
  special = len(train_tokenizer.SPECIAL)
  for reader in (tiny_chat, chat.from_transformers(tiny.tokenizer_directory())):
    ids = reader.encode(_user(text, "x"))
    assert [i for i in ids if i < special] == [4, 2, 4, 2, 5]  # user end user end assistant
    assert reader.decode(ids) == f"{text}x"
    assert reader.decode(reader.reply(text)) == text
    assert np.count_nonzero(reader.reply(text) < special) == 1
    assert len(reader.reply(text)) > 2  # spelled out, not one reserved or byte piece and the end


def test_stop_ids_are_the_union_of_tokenizer_config_and_generation_config(tmp_path):
  shutil.copytree(tiny.tokenizer_directory(), tmp_path, dirs_exist_ok=True)
  (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
  (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
  assert chat.load(tmp_path).stop_ids == (2, 7, 9)
  assert chat.load(tiny.tokenizer_directory(), tmp_path).stop_ids == (2, 7, 9)
  assert chat.load(tiny.tokenizer_directory()).stop_ids == (2,)
  (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "eos_token_id": None}))
  assert chat.load(tmp_path).stop_ids == (2, 9)


def test_hugging_face_templates_are_told_not_to_think_and_all_ends_stop(tmp_path):
  shutil.copytree(tiny.tokenizer_directory(), tmp_path, dirs_exist_ok=True)
  config = json.loads((tmp_path / "tokenizer_config.json").read_text())
  config["chat_template"] += (
    "{% if enable_thinking is not defined or enable_thinking %}T{% else %}N{% endif %}"
  )
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  (tmp_path / "config.json").write_text(
    json.dumps({"model_type": "qwen3", "eos_token_id": [11, 12]})
  )
  reader = chat.from_transformers(tmp_path)
  assert reader.pieces(reader.encode(_user("b"))) == [
    "<|user|>",
    "b",
    "<|end|>",
    "<|assistant|>",
    "N",
  ]
  assert reader.stop_ids == (2, 11, 12)
  assert reader.reply("b")[-1] == 2


def test_missing_files_and_roles_are_named(tmp_path, tiny_chat):
  with pytest.raises(FileNotFoundError, match=r"no tokenizer\.model in .*train_tokenizer"):
    chat.load(tmp_path)
  with pytest.raises(FileNotFoundError, match=r"no tokenizer in .* tokenizer\.json"):
    chat.from_transformers(tmp_path)
  with pytest.raises(ValueError, match="role 'tool' is not known"):
    tiny_chat.encode([Message("tool", "x")])
  with pytest.raises(ValueError, match="no tiny checkpoint is shipped for 'chess'"):
    tiny.directory("chess")


def test_training_twice_gives_the_same_bytes_and_claiming_nothing_changes_nothing(tmp_path):
  shipped = (tiny.tokenizer_directory() / "tokenizer.model").read_bytes()
  for name in ("one", "two"):
    train_tokenizer.write(train_tokenizer.train(), tmp_path / name)
  train_tokenizer.write(
    train_tokenizer.claim(train_tokenizer.proto.ModelProto.FromString(shipped)), tmp_path / "claim"
  )
  for path in sorted(tiny.tokenizer_directory().iterdir()):
    assert (tmp_path / "one" / path.name).read_bytes() == (
      tmp_path / "two" / path.name
    ).read_bytes()
    assert (tmp_path / "claim" / path.name).read_bytes() == path.read_bytes()


def test_a_new_symbol_takes_a_reserved_id_and_moves_no_other(tmp_path, tiny_chat, monkeypatch):
  before = tiny_chat.pieces(range(tiny_chat.vocab_size))
  monkeypatch.setattr(
    train_tokenizer, "symbols", lambda name: ("{gate}", " {gate}") if name == "sokoban" else ()
  )
  shipped = (tiny.tokenizer_directory() / "tokenizer.model").read_bytes()
  train_tokenizer.write(
    train_tokenizer.claim(train_tokenizer.proto.ModelProto.FromString(shipped)), tmp_path
  )
  after = chat.load(tmp_path)
  changed = {
    index: piece for index, piece in enumerate(after.pieces(range(1024))) if piece != before[index]
  }
  assert list(changed.values()) == ["{gate}", " {gate}"]
  assert all(before[index].startswith("<|reserved_") for index in changed)
  assert after.pieces(after.reply("a {gate}{gate}")[:-1]) == ["a", " {gate}", "{gate}"]


def test_the_tiny_chat_needs_neither_transformers_nor_jax():
  code = (
    "import sys; from memrl_jax.models import tiny; from memrl_jax.sampling import chat;"
    "chat.load(tiny.tokenizer_directory()); print([m for m in ('jax', 'transformers') if m in sys.modules])"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "[]"
