"""What a question of Humanity's Last Exam is: options, rows of the published schema, and its verdict.

The exam's authors ask that it be neither published again nor put into training data: this package only reads a file
that its user has, for evaluation and for a memory beside a frozen model.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from memrl_jax.envs import bigcodebench_files as files
from memrl_jax.envs import hle_generated as generated
from memrl_jax.envs import hle_verdict

STYLES = ("full", "chat")
IMAGES = ("show", "skip", "refuse")
TYPES = ("exactMatch", "multipleChoice")


@dataclasses.dataclass(frozen=True)
class Options:
  """data: the exam as JSONL or parquet, or "" for the toy questions of this package.

  split: which questions a seed opens: "train", "held_out" or "all"; "auto": training seeds open train questions, others
  held-out ones. images: what becomes of questions with an image: "show" it to a model that takes images, while one that
  does not is told that it was left out; "skip" these questions; or "refuse" the whole file. judge_url, judge_model: a
  model that judges what does not match ("" = only what matches is right), from the text alone; its key is in the
  environment variable judge_key_env; judge_s: seconds to wait for it, which the limit of the pool must allow, four
  times over (config.env.timeout_s). reward_scale: what a right answer pays.
  """

  data: str = ""
  split: str = "auto"
  images: str = "show"
  judge_url: str = ""
  judge_model: str = ""
  judge_key_env: str = "MEMRL_API_KEY"
  judge_s: float = 60.0
  reward_scale: float = 1.0
  style: str = "chat"

  def __post_init__(self):
    files.one_of(
      self.style, STYLES, "style", "prompt style", " (there is no tiny model of these questions)"
    )
    files.one_of(self.split, ("auto", *files.SPLITS), "split", "split")
    files.one_of(self.images, IMAGES, "images", "treatment of images")
    if bool(self.judge_url) != bool(self.judge_model):
      raise ValueError(
        f"a judge needs an address and a model, and these are {self.judge_url!r} and {self.judge_model!r}; give both or "
        "neither (config.env.judge_url, config.env.judge_model)"
      )
    if self.judge_url:
      hle_verdict.check_url(self.judge_url)
    if not self.judge_s > 0:
      raise ValueError(
        f"no judge answers in {self.judge_s:g} s; choose a number above 0 (config.env.judge_s)"
      )
    if not (self.reward_scale > 0 and math.isfinite(self.reward_scale)):
      raise ValueError(
        f"a reward scale of {self.reward_scale} turns the task around; choose one above 0 (config.env.reward_scale)"
      )

  @property
  def judge(self) -> hle_verdict.Judge | None:
    """The judging model, None where there is none."""
    if not self.judge_url:
      return None
    return hle_verdict.Judge(self.judge_url, self.judge_model, self.judge_key_env, self.judge_s)


class Question(NamedTuple):
  """A row of the exam. `answer` is a letter where one is to be chosen; `image` is a data URL, "" where there is none."""

  id: str
  question: str
  answer: str
  answer_type: str
  category: str
  raw_subject: str
  image: str = ""


def question(row: dict[str, Any]) -> Question:
  """A row of the schema; what else it holds is not needed.

  Raises:
    ValueError: a field is missing or not what it should be.
  """
  name = row.get("id", "without id")
  texts = files.texts(row, Question._fields[:-1], name, "Humanity's Last Exam")
  found = Question(*texts, image=row.get("image") or "")
  if found.answer_type not in TYPES:
    raise ValueError(
      f"task {name} has the answer type {found.answer_type!r}; it must be one of {', '.join(TYPES)} (config.env.data)"
    )
  if not isinstance(found.image, str):
    raise ValueError(
      f"the image of task {name} is no text; give it as a data URL, as the published rows do (config.env.data)"
    )
  if found.image and not found.image.startswith(("data:image/", "http://", "https://")):
    raise ValueError(
      f"the image of task {name} begins with {found.image[:20]!r}; give a data URL, data:image/png;base64,..., or an http "
      "address (config.env.data)"
    )
  return found


@functools.lru_cache(maxsize=8)
def _all(data: str) -> tuple[Question, ...]:
  if data:
    return files.read(data, "Humanity's Last Exam", "id", question)
  return tuple(sorted(map(question, generated.rows())))


@functools.lru_cache(maxsize=8)
def questions(data: str, images: str) -> tuple[Question, ...]:
  """The questions of a file, or the toy ones; read once in a process.

  Raises:
    ValueError: the file has questions with images, and is to be refused then.
  """
  known = _all(data)
  if images == "show":
    return known
  plain = tuple(one for one in known if not one.image)
  if images == "refuse" and len(plain) < len(known):
    raise ValueError(
      f"{len(known) - len(plain)} of the {len(known)} questions of {data} have an image; set images to show for a model "
      "that takes them, or to skip to leave these questions out (config.env.images)"
    )
  return plain


def find(options: Options, name: str) -> Question:
  """The question of an id."""
  return next(one for one in questions(options.data, options.images) if one.id == name)


def image(options: Options, name: str) -> str | None:
  """The image of the question of an id, None where it has none or is no question of this exam."""
  known = questions(options.data, options.images)
  return next((one.image for one in known if one.id == name and one.image), None)


def draw(options: Options, seed: int) -> Question:
  """The question of a seed."""
  return files.draw(questions(options.data, options.images), "id", options.split, seed)


def correct(one: Question, answer: str, judge: hle_verdict.Judge | None) -> bool:
  """Whether an answer is right. A letter that was chosen decides; a judge is asked about what does not match.

  Raises:
    ConnectionError: the judge gave no verdict.
  """
  if not answer:
    return False
  if one.answer_type == "multipleChoice":
    chosen, wanted = (hle_verdict.letter(text, one.question) for text in (answer, one.answer))
    if chosen and wanted:
      return chosen == wanted
  if hle_verdict.matches(answer, one.answer):
    return True
  return judge is not None and judge.agrees(one.question, one.answer, answer)
