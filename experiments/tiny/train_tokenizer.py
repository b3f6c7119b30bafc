"""The tokenizer of the tiny models: 1024 pieces, one for every word an embedded environment lives by.

    python -m experiments.tiny.train_tokenizer           # from scratch: ids move, checkpoints do not fit
    python -m experiments.tiny.train_tokenizer --claim   # new SYMBOLS take reserved ids; no id moves

Layout, in this order, so that what checkpoints depend on comes first:

    special 6 | byte 256 | coordinates 100 | SYMBOLS of each environment | reserved | ASCII | learned

A sentencepiece unigram model whose scores are set, not trained: a piece costs 8 and at most 1 more by
rank, so that text becomes the fewest pieces it can (over stretches of up to 8), a symbol winning ties.
Scores are multiples of 1/64: their sums are exact in float32, and another implementation agrees to the
id. Only which English pieces are in the vocabulary is learned. No normalisation: spaces, newlines
and unknown characters (as bytes) come back as they went in.
"""

from __future__ import annotations

import argparse
import importlib
import io
import itertools
import json
import pathlib
import re
from collections.abc import Iterator, Sequence

import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as proto

from memrl_jax.models import tiny

VOCABULARY = 1024
RESERVED = 64  # for the symbols of later environments (--claim)
ENVIRONMENTS = (
  "darkroom",
  "minesweeper",
  "sokoban",
  "lab",
  "rooms",
  "hints",
)  # the order fixes ids: append only
FOUNDERS = 3  # the first of them; the others came with --claim
SPECIAL = ("<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
COORDINATES = tuple(f"({row},{column})" for row in range(10) for column in range(10))
ASCII = tuple(chr(code) for code in range(33, 127))
LEARNED = re.compile("\u2581?[A-Za-z]?[a-z]+")  # never two cells, two digits or two symbols in one
NEVER = -1e4  # a score with which a piece is never matched in text

Piece = proto.ModelProto.SentencePiece

TEMPLATE = (
  "{% for message in messages %}"
  "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# The words of the environments' prompts in full style, then common words and those of households,
# shops and dungeons, where later environments will play.
WORDS = """
the you and to of in a is are it at what every from that with on has one same which be trial row rows column columns
cell cells up down left right next open box boxes start starts action actions room top turn turns see state then inside
task step mine mines goal target targets wall win initial tags remark moves written walking play opening ends cannot once
begins shown example happened completed decisions observations reveal concrete self differently closed push pushes notice
stand leaves stays separated commas hides digit digits among off opens around without count free pulled pushed early
longer brought searched safest using trap waits went
the be to of and a in that have it for not on with he as you do at this but his by from they we say her she or an will
my one all would there their what so up out if about who get which go me when make can like time no just him know take
people into year your good some could them see other than then now look only come its over think also back after use
two how our work first well way even new want because any these give day most us is are was were has had been did does
where why here again never always each every both few more less many much such same different next last before until
while during between under above below near far left right north south east west top bottom inside behind front middle
open close door drawer shelf cabinet counter table desk chair bed sofa lamp fridge microwave oven stove sink toilet
bathtub garbage trash can box safe room kitchen bathroom bedroom floor wall window mirror towel cloth soap bottle cup
mug bowl plate pan pot knife fork spoon spatula kettle apple bread egg lettuce potato tomato pepper salt book pen pencil
laptop phone key card watch pillow blanket candle clean dirty hot cold cool heat wash cook slice cut put pick place move
push pull turn switch toggle examine inventory carry hold drop empty full find found search click buy item items price
dollar product page result results color size black white red blue green yellow brown gray pink small medium large option
options description features reviews rating cheap cost order shirt shoes dress pants jacket women men kids brand style
material cotton water glass metal plastic wood light dark heavy soft hard strong fast slow long short high low big little
old young great best better worse bad wrong true false yes maybe need needs must should may might try tried trying start
started end ended finish finished done success failed fail failure win won lose lost die died dead kill attack monster
gold coin treasure map weapon sword armor potion scroll stairs corridor level score point points reward goal target plan
action actions step steps turns trial attempt attempts episode task tasks remember remembered memory hint tip tips advice
rule rules mistake mistakes learn learned lesson instead avoid careful sure exactly already still nothing something
anything everything thing things part whole number numbers first second third one two three four five six seven eight
nine ten row column cell cells board grid mine mines hidden visited explore explored unknown known information reason
reasoning because therefore however although explain answer question think thought thoughts respond response reply list
follow following given current previous past future state observation history reflection summary content title name
type value data table query select insert update delete where file folder directory command run shell code function
return print test error message server user password time date begin wait help stop continue ask tell show read write
"""


def symbols(name: str) -> tuple[str, ...]:
  """What an environment writes in brief style, as atomic strings."""
  found = tuple(importlib.import_module(f"memrl_jax.envs.{name}").SYMBOLS)
  if "" in found:
    raise ValueError(f"an empty symbol can be no token; drop it (memrl_jax.envs.{name}.SYMBOLS)")
  return found


def corpus() -> Iterator[str]:
  """What the English pieces are learned from: every word after a space, the first ones more often."""
  for rank, word in enumerate(WORDS.split()):
    yield from [f". {word}"] * (1 + 200 // (rank + 10))


def learned(taken: set[str], count: int) -> list[str]:
  """The first `count` English pieces by byte-pair merges that are not `taken`, in their order."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=corpus(),
    model_writer=model,
    model_type="bpe",
    vocab_size=count + len(taken),
    normalization_rule_name="identity",
    add_dummy_prefix=False,
    remove_extra_whitespaces=False,
    num_threads=1,
    minloglevel=2,
  )
  trained = [piece.piece for piece in proto.ModelProto.FromString(model.getvalue()).pieces]
  fresh = [piece for piece in trained if LEARNED.fullmatch(piece) and piece not in taken]
  if len(fresh) < count:
    raise ValueError(f"{len(fresh)} English pieces were learned, {count} are needed; add WORDS")
  return fresh[:count]


def train() -> proto.ModelProto:
  """The whole vocabulary from scratch; later environments claim their symbols, as they once did."""
  founders = (symbols(name) for name in ENVIRONMENTS[:FOUNDERS])
  atoms = [*COORDINATES, *itertools.chain.from_iterable(founders)]
  atoms = list(dict.fromkeys(atom.replace(" ", "\u2581") for atom in atoms))
  single = [piece for piece in ("\u2581", "\n", *ASCII) if piece not in atoms]
  reserved = [f"<|reserved_{index}|>" for index in range(RESERVED)]
  room = VOCABULARY - len(SPECIAL) - 256 - len(atoms) - len(reserved) - len(single)
  words = learned({*atoms, *single}, room)

  pieces = [Piece(piece=text, score=0.0, type=Piece.CONTROL) for text in SPECIAL]
  pieces[1].type = Piece.UNKNOWN
  pieces += [Piece(piece=f"<0x{byte:02X}>", score=0.0, type=Piece.BYTE) for byte in range(256)]
  pieces += [_normal(text, 0, 1) for text in atoms]
  pieces += [Piece(piece=text, score=0.0, type=Piece.CONTROL) for text in reserved]
  ranked = single + words
  pieces += [_normal(text, rank, len(ranked)) for rank, text in enumerate(ranked)]
  return claim(_model(pieces))


def claim(model: proto.ModelProto) -> proto.ModelProto:
  """Gives symbols that are no piece yet the next reserved ids; no other piece changes."""
  pieces = list(model.pieces)
  known = {piece.piece for piece in pieces if piece.type == Piece.NORMAL}
  free = [index for index, piece in enumerate(pieces) if piece.piece.startswith("<|reserved_")]
  wanted = [symbol.replace(" ", "\u2581") for name in ENVIRONMENTS for symbol in symbols(name)]
  fresh = [symbol for symbol in dict.fromkeys(wanted) if symbol not in known]
  if len(fresh) > len(free):
    raise ValueError(f"{len(fresh)} new symbols and {len(free)} reserved ids; use fewer symbols")
  for index, symbol in zip(free, fresh, strict=False):
    pieces[index] = _normal(symbol, 0, 1)
  return _model(pieces)


def _normal(text: str, rank: int, ranks: int) -> Piece:
  return Piece(piece=text, score=-8 - (rank * 64 // ranks) / 64, type=Piece.NORMAL)


def _model(pieces: Sequence[Piece]) -> proto.ModelProto:
  model = proto.ModelProto(pieces=pieces)
  model.trainer_spec.model_type = proto.TrainerSpec.UNIGRAM
  model.trainer_spec.vocab_size = len(pieces)
  model.trainer_spec.byte_fallback = True
  model.trainer_spec.pad_id, model.trainer_spec.unk_id = 0, 1
  model.trainer_spec.eos_id, model.trainer_spec.bos_id = 2, -1
  model.trainer_spec.pad_piece, model.trainer_spec.unk_piece = SPECIAL[:2]
  model.trainer_spec.eos_piece = SPECIAL[2]
  model.normalizer_spec.name = "identity"
  model.normalizer_spec.add_dummy_prefix = False
  model.normalizer_spec.remove_extra_whitespaces = False
  model.normalizer_spec.escape_whitespaces = True
  return model


def transformers_config() -> dict:
  """tokenizer_config.json: what AutoTokenizer needs to know, the chat template included."""
  return {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "eos_token": "<|end|>",
    "extra_special_tokens": list(SPECIAL[3:]),
    "clean_up_tokenization_spaces": False,
    "model_max_length": 32768,
    "chat_template": TEMPLATE,
  }


def transformers_tokenizer(model: proto.ModelProto) -> dict:
  """tokenizer.json: the same model in the format of the `tokenizers` library.

  That library matches any piece in text; a score of NEVER keeps it from bytes and reserved pieces.
  Two texts differ from `chat.load`: U+2581 reads as a space there, and a special token spelled in a
  message becomes one unless split_special_tokens is set (chat.from_transformers sees to it).
  """
  space = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
  back = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
  special = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
  }
  vocab = [[p.piece, p.score if p.type == Piece.NORMAL else NEVER] for p in model.pieces]
  return {
    "version": "1.0",
    "added_tokens": [{"id": i, "content": text, **special} for i, text in enumerate(SPECIAL)],
    "normalizer": space,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    "model": {"type": "Unigram", "unk_id": 1, "vocab": vocab, "byte_fallback": True},
  }


def write(model: proto.ModelProto, directory: pathlib.Path) -> None:
  """Writes the three files of a tokenizer directory; the same model gives the same bytes."""
  directory.mkdir(parents=True, exist_ok=True)
  (directory / "tokenizer.model").write_bytes(model.SerializeToString(deterministic=True))
  for name, content in (
    ("tokenizer_config.json", transformers_config()),
    ("tokenizer.json", transformers_tokenizer(model)),
  ):
    text = json.dumps(content, ensure_ascii=True, indent=1)
    (directory / name).write_text(text + "\n", encoding="utf-8")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument(
    "--claim", action="store_true", help="keep every id; new symbols take reserved ones"
  )
  parser.add_argument("--out", type=pathlib.Path, default=tiny.tokenizer_directory())
  options = parser.parse_args()
  if options.claim:
    shipped = (tiny.tokenizer_directory() / "tokenizer.model").read_bytes()
    write(claim(proto.ModelProto.FromString(shipped)), options.out)
  else:
    write(train(), options.out)


if __name__ == "__main__":
  main()
