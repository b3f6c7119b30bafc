"""Answers to imitate as rows of training: supervised learning with the packing and the trainer of RL."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memrl_jax.sampling.chat import Chat
from memrl_jax.types import Message, Sample, Turn


class Lesson(NamedTuple):
  """Say `text` after `messages` and the beginning `begun` of an answer, and then stop if it `ends` there.

  `term` is the part of the loss to which it belongs, `weight` what each of its tokens counts in it.
  """

  messages: list[Message]
  begun: str
  text: str
  term: str
  weight: float = 1.0
  ends: bool = True


def rows(
  lessons: Sequence[Lesson], text: Chat, terms: Mapping[str, float], *, longest: int | None = None
) -> list[Turn]:
  """Rows whose mean over all tokens is the loss

      sum over terms of c_term sum_i w_i sum_t -log pi / sum_i w_i |y_i|

  Lessons of more than `longest` tokens are left out: an agent with words of its own may write longer hints than
  the policy could say. Behaviour log-probs are NaN until the trainer has scored them (training.learner.Learner.rescore).
  """
  made = [_row(one, text) for one in lessons]
  fits = [longest is None or len(row.sample.ids) <= longest for row in made]
  lessons, made = list(itertools.compress(lessons, fits)), list(itertools.compress(made, fits))
  whole = sum(len(row.sample.ids) for row in made)
  count = dict.fromkeys(terms, 0.0)
  for one, row in zip(lessons, made, strict=True):
    count[one.term] += one.weight * len(row.sample.ids)
  for one, row in zip(lessons, made, strict=True):
    row.advantage = terms[one.term] * one.weight * whole / count[one.term]
  return [row for row in made if row.advantage]


def _row(one: Lesson, text: Chat) -> Turn:
  begun = text.reply(one.begun)[:-1] if one.begun else np.zeros(0, np.int32)
  ids = text.reply(one.text) if one.ends else text.reply(one.text)[:-1]
  prompt = np.concatenate([text.encode(one.messages), begun]).astype(np.int32)
  sample = Sample(one.text, prompt, ids, np.full(len(ids), np.nan, np.float32))
  return Turn(0, "advise", 0, one.messages, sample, "", True, 0.0, one.term, imitate=1.0)
