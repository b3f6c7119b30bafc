"""Toy questions in the schema of Humanity's Last Exam: computed answers, some to be chosen from a list.

The exam itself may be neither published again nor trained on; nothing here is taken from it. Questions of a kind share
a way to the answer and no answer, so that remembering the way helps and copying an answer does not.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

EACH = 10  # questions of a kind
CANARY = "toy questions of memrl_jax, no part of Humanity's Last Exam"
_STREAM = 2601  # of the generator's draws
_WORDS = ("orchard", "lantern", "harbor", "meadow", "pebble", "willow", "granite", "thicket")

Draw = Callable[[int, int], int]  # a whole number from low to high, both included


class Asked(NamedTuple):
  """`choices` are wrong answers beside the right one; without any, the answer is written freely."""

  question: str
  answer: str
  why: str
  choices: tuple[str, ...] = ()


def _power(draw: Draw) -> Asked:
  base, power, modulus = draw(3, 19), draw(40, 400), draw(7, 97)
  return Asked(
    f"What is the remainder of {base}^{power} on division by {modulus}?",
    str(pow(base, power, modulus)),
    "Square and multiply, and reduce after every step.",
  )


def _divisors(draw: Draw) -> Asked:
  number = 2 ** draw(1, 6) * 3 ** draw(0, 3) * 5 ** draw(0, 2) * 7 ** draw(0, 1)
  return Asked(
    f"How many positive divisors does {number} have?",
    str(sum(number % d == 0 for d in range(1, number + 1))),
    "Add one to every exponent of the factorisation and multiply.",
  )


def _hands(draw: Draw) -> Asked:
  red, blue = draw(4, 9), draw(4, 9)
  taken = draw(2, 4)
  right, all_ = math.comb(red, taken), math.comb(red + blue, taken)
  divisor = math.gcd(right, all_)
  return Asked(
    f"A bag holds {red} red and {blue} blue marbles. {taken} are taken at once, without looking. What is the "
    "probability that all of them are red? Give a reduced fraction.",
    f"{right // divisor}/{all_ // divisor}",
    "Count the hands of red marbles and all hands.",
  )


def _series(draw: Draw) -> Asked:
  first, step, count = draw(-20, 20), draw(2, 13), draw(15, 60)
  return Asked(
    f"An arithmetic progression begins {first}, {first + step}, {first + 2 * step}. What is the sum of its first "
    f"{count} terms?",
    str(count * first + step * count * (count - 1) // 2),
    "The number of terms times the mean of the first and the last.",
  )


def _digits(draw: Draw) -> Asked:
  number, base = draw(500, 5000), draw(3, 9)
  digits, rest = "", number
  while rest:
    rest, digit = divmod(rest, base)
    digits = f"{digit}{digits}"
  return Asked(
    f"Write the decimal number {number} in base {base}. Give the digits only.",
    digits,
    "Divide again and again; the remainders are the digits from the last to the first.",
  )


def _weekday(draw: Draw) -> Asked:
  day = datetime.date(draw(1901, 2099), draw(1, 12), draw(1, 28))
  names = [f"{datetime.date(2024, 1, n):%A}" for n in range(1, 8)]  # Monday to Sunday
  return Asked(
    f"On which day of the week does {day.isoformat()} fall (Gregorian calendar)?",
    names[day.weekday()],
    "Count the days from a date whose weekday is known.",
    tuple(name for name in names if name != names[day.weekday()]),
  )


def _prime(draw: Draw) -> Asked:
  low = draw(100, 900)
  prime = next(n for n in range(low, low + 100) if all(n % d for d in range(2, n)))
  wrong = [n for n in range(prime + 2, prime + 60, 2) if any(n % d == 0 for d in (3, 7, 11, 13))]
  return Asked(
    "Which of these numbers is prime?",
    str(prime),
    "Try the primes up to the square root.",
    tuple(map(str, wrong[:4])),
  )


def _letters(draw: Draw) -> Asked:
  word, shift = _WORDS[draw(0, len(_WORDS) - 1)], draw(1, 25)
  moved = "".join(chr((ord(letter) - 97 + shift) % 26 + 97) for letter in word)
  return Asked(
    f"Every letter of an English word was moved {shift} places forward in the alphabet, going on at a after z. The "
    f"result is {moved}. What is the word?",
    word,
    "Move every letter back.",
  )


def _clock(draw: Draw) -> Asked:
  hour, minute = draw(1, 12), 5 * draw(0, 11)
  angle = abs(30 * hour + minute / 2 - 6 * minute) % 360
  angle = min(angle, 360 - angle)
  return Asked(
    f"What is the smaller angle, in degrees, between the hands of a clock at {hour}:{minute:02}?",
    f"{angle:g}",
    "The hour hand moves half a degree a minute, the minute hand six.",
  )


def _logic(draw: Draw) -> Asked:
  count = 2 * draw(5, 30) + draw(0, 1)
  right = str(math.isqrt(count))
  wrong = (str(count // 2), str(count), str(math.isqrt(count) + 1), str((count + 1) // 2 + 1))
  return Asked(
    f"{count} lamps in a row are off. In round k, for k from 1 to {count}, every k-th lamp is switched. How many are "
    "on at the end?",
    right,
    "A lamp is switched once for every divisor of its number; only squares have an odd number of them.",
    tuple(dict.fromkeys(other for other in wrong if other != right)),
  )


KINDS: dict[str, tuple[str, Callable[[Draw], Asked]]] = {
  "power": ("Math", _power),
  "divisors": ("Math", _divisors),
  "hands": ("Math", _hands),
  "series": ("Math", _series),
  "digits": ("Computer Science/AI", _digits),
  "weekday": ("Other", _weekday),
  "prime": ("Math", _prime),
  "letters": ("Humanities/Social Science", _letters),
  "clock": ("Physics", _clock),
  "lamps": ("Math", _logic),
}


def rows() -> list[dict[str, Any]]:
  """All questions as rows of the schema, `own-<kind>-<number>`; none is asked twice."""
  found: dict[str, dict[str, Any]] = {}
  for place, (kind, (category, ask)) in enumerate(KINDS.items()):
    rng, number = np.random.default_rng([_STREAM, place]), 0
    while number < EACH:
      asked = ask(lambda low, high, rng=rng: int(rng.integers(low, high + 1)))
      row = _row(f"own-{kind}-{number}", kind, category, asked, rng)
      if row["question"] not in found:
        found[row["question"]] = row
        number += 1
  return list(found.values())


def _row(
  name: str, kind: str, category: str, asked: Asked, rng: np.random.Generator
) -> dict[str, Any]:
  question, answer = asked.question, asked.answer
  if asked.choices:
    shown = [asked.answer, *asked.choices]
    shown = [shown[int(place)] for place in rng.permutation(len(shown))]
    answer = "ABCDEFGH"[shown.index(asked.answer)]
    lines = (f"{letter}. {text}" for letter, text in zip("ABCDEFGH", shown, strict=False))
    question = "\n".join([question, "", "Answer Choices:", *lines])
  return {
    "id": name,
    "question": question,
    "image": "",
    "image_preview": None,
    "answer": answer,
    "answer_type": "multipleChoice" if asked.choices else "exactMatch",
    "author_name": "memrl_jax",
    "rationale": asked.why,
    "rationale_image": None,
    "raw_subject": kind,
    "category": category,
    "canary": CANARY,
  }
