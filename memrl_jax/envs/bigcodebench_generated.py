"""Small programming tasks in BigCodeBench's schema: each template in a few variants that differ in one demand.

Solutions need the standard library and numpy. The variants of a template look alike and want different programs, so
that remembering one helps with the others and copying it does not.
"""

from __future__ import annotations

import json
import string
from typing import Any, NamedTuple


class Template(NamedTuple):
  """`$name` in a text stands for a value of the variant. `cases` are arguments of calls, `refused` of one that raises
  ValueError ("" = there is none). `libs` are imported, `body` is the solution."""

  name: str
  libs: tuple[str, ...]
  signature: str
  description: str
  body: str
  cases: tuple[str, ...]
  variants: tuple[dict[str, Any], ...]
  refused: str = ""


def _each(name: str, *values: Any) -> tuple[dict[str, Any], ...]:
  return tuple({name: value} for value in values)


TEMPLATES = (
  Template(
    "mean-above",
    ("statistics",),
    "numbers",
    "Return the mean of the numbers that are greater than $limit, or 0.0 if there are none, rounded to 6 digits.",
    "large = [x for x in numbers if x > $limit]\nreturn round(float(statistics.mean(large)), 6) if large else 0.0",
    ("[1, 2, 6, 12, 40]", "[]", "[-9, -3, 0, 10, 3]", "[$limit, $limit + 1]"),
    _each("limit", 0, 10, -5, 3),
  ),
  Template(
    "common-words",
    ("collections", "re"),
    "text",
    "Return the $count most common words of a text, in lower case, the most common first and words that are equally "
    "common in alphabetical order. A word is a run of the letters a to z.",
    "counted = collections.Counter(re.findall('[a-z]+', text.lower()))\n"
    "ordered = sorted(counted, key=lambda word: (-counted[word], word))\nreturn ordered[:$count]",
    ("'b a c a B d'", "'One two, two; three three THREE four'", "''", "'z y x w v u'"),
    _each("count", 1, 2, 3, 5),
  ),
  Template(
    "digest",
    ("hashlib",),
    "text",
    "Return the first $length hexadecimal digits of the $algorithm digest of a text, encoded as UTF-8.",
    "return hashlib.$algorithm(text.encode('utf-8')).hexdigest()[:$length]",
    ("''", "'abc'", "'späte Grüße'"),
    tuple(
      {"algorithm": name, "length": length}
      for name, length in (("sha256", 8), ("md5", 12), ("sha1", 6), ("sha512", 10))
    ),
  ),
  Template(
    "weekdays",
    ("datetime",),
    "year, month",
    "Return the dates of all ${day}s of a month as ISO texts, in order. Raise ValueError if the month is not one of 1 "
    "to 12.",
    "day = datetime.date(year, month, 1)\nfound = []\nwhile day.month == month:\n"
    "    if day.weekday() == $number:\n        found.append(day.isoformat())\n"
    "    day += datetime.timedelta(days=1)\nreturn found",
    ("2024, 2", "2023, 12", "2000, 7"),
    tuple(
      {"day": day, "number": number}
      for day, number in (("Monday", 0), ("Wednesday", 2), ("Friday", 4), ("Sunday", 6))
    ),
    "2024, 13",
  ),
  Template(
    "csv-column",
    ("csv", "io"),
    "text",
    "A CSV text has a header with the columns name, $column and note. Return the sum of the $column column as a float; "
    "rows in which it is empty count as $missing.",
    "rows = csv.DictReader(io.StringIO(text))\n"
    "return float(sum(float(row['$column'] or $missing) for row in rows))",
    (
      "'name,$column,note\\na,1.5,x\\nb,,\"y, z\"\\nc,2,\\n'",
      "'name,$column,note\\n'",
      "'note,name,$column\\n1,2,\\n3,4,5\\n'",
    ),
    tuple(
      {"column": column, "missing": missing}
      for column, missing in (("price", 0), ("weight", 1), ("score", -1), ("age", 10))
    ),
  ),
  Template(
    "flatten",
    ("json",),
    "text",
    "A text holds a JSON object. Return a dictionary without nested objects, in which the keys on the way to a value "
    "are joined by '$mark'. Lists are values. Raise ValueError if the text holds something else than an object.",
    "loaded = json.loads(text)\nif not isinstance(loaded, dict):\n    raise ValueError('no object')\n"
    "flat = {}\nwaiting = [('', loaded)]\nwhile waiting:\n    before, inner = waiting.pop()\n"
    "    for key, value in inner.items():\n        if isinstance(value, dict):\n"
    "            waiting.append((before + key + '$mark', value))\n        else:\n"
    "            flat[before + key] = value\nreturn flat",
    (
      '\'{"a": 1, "b": {"c": [1, 2], "d": {"e": null}}}\'',
      "'{}'",
      '\'{"x": {"y": {"z": "w"}}, "u": true}\'',
    ),
    _each("mark", ".", "/", "__", "->"),
    "'[1, 2]'",
  ),
  Template(
    "order-rows",
    ("numpy",),
    "rows",
    "Return a list of the rows of a matrix, given as a list of lists of integers, ordered by their $what, the $end "
    "first; rows that are equal in this keep their order.",
    "matrix = numpy.array(rows)\nkey = $sign * matrix.$method(axis=1)\n"
    "return matrix[numpy.argsort(key, kind='stable')].tolist()",
    ("[[3, 1], [0, 9], [2, 2]]", "[[1, 2, 3]]", "[[0, 0], [-5, 5], [4, -4], [7, 1], [1, 7]]"),
    tuple(
      {"what": what, "method": method, "sign": sign, "end": end}
      for what, method, sign, end in (
        ("sum", "sum", "1", "smallest"),
        ("largest element", "max", "-1", "largest"),
        ("smallest element", "min", "1", "smallest"),
        ("variance", "var", "-1", "largest"),
      )
    ),
  ),
  Template(
    "moving",
    ("numpy",),
    "values",
    "Return the moving $what over windows of $width consecutive values as a list of floats, rounded to 6 digits. Raise "
    "ValueError if there are fewer than $width values.",
    "if len(values) < $width:\n    raise ValueError('too few values')\n"
    "windows = numpy.lib.stride_tricks.sliding_window_view(numpy.asarray(values, float), $width)\n"
    "return numpy.round(numpy.$method(windows, axis=1), 6).tolist()",
    ("[1, 2, 3, 4, 8]", "[5, 5, 5, 5]", "[2, -1, 0.5, 7, 7, 1]"),
    tuple(
      {"what": what, "method": method, "width": width}
      for what, method, width in (
        ("average", "mean", 3),
        ("median", "median", 3),
        ("maximum", "max", 2),
        ("sum", "sum", 4),
      )
    ),
    "[1]",
  ),
  Template(
    "find",
    ("re",),
    "text",
    "Return all $what in a text, each once, in alphabetical order. $rule",
    "return sorted(set(re.findall(r'$pattern', text)))",
    (
      "'#ff00aa on 2024-01-31, 12:45 by @ann and @bob_2; #0A0b0C 2023-12-01 07:05 @ann'",
      "''",
      "'1-2-3, #12, 1:2, me@there'",
    ),
    tuple(
      {"what": what, "rule": rule, "pattern": pattern}
      for what, rule, pattern in (
        (
          "dates",
          "A date has four digits, two and two, joined by '-'.",
          r"\b\d{4}-\d{2}-\d{2}\b",
        ),
        ("times", "A time has two digits, ':' and two digits.", r"\b\d{2}:\d{2}\b"),
        ("colors", "A color is '#' and six hexadecimal digits.", r"#[0-9a-fA-F]{6}\b"),
        (
          "mentions",
          "A mention is '@' and word characters after it, with no word character before.",
          r"(?<!\w)@\w+",
        ),
      )
    ),
  ),
  Template(
    "runs",
    ("itertools",),
    "text",
    "Write a text as its runs of equal characters: every run of at least $least becomes the character followed by the "
    "length of the run, shorter runs stay as they are; all are joined by '$mark'.",
    "runs = ((char, len(list(group))) for char, group in itertools.groupby(text))\n"
    "return '$mark'.join(f'{char}{size}' if size >= $least else char * size for char, size in runs)",
    ("'aaabccdddd'", "''", "'xyz'", "'  __  '"),
    tuple({"least": least, "mark": mark} for least, mark in ((1, ""), (2, ""), (2, "|"), (3, " "))),
  ),
  Template(
    "base",
    (),
    "number",
    "Write a non-negative integer in base $base, with lower-case letters for digits above 9, as a text of at least "
    "$width digits with leading zeros. Raise ValueError if the number is negative.",
    "if number < 0:\n    raise ValueError('negative')\ndigits = ''\nwhile number:\n"
    "    number, digit = divmod(number, $base)\n"
    "    digits = '0123456789abcdefghijklmnopqrstuvwxyz'[digit] + digits\n"
    "return digits.rjust($width, '0')",
    ("0", "7", "1000", "2**40 - 1"),
    tuple({"base": base, "width": width} for base, width in ((2, 8), (3, 1), (20, 4), (36, 2))),
    "-1",
  ),
  Template(
    "files",
    ("os", "tempfile"),
    "texts",
    "Write every text of a list to a file of its own in a new temporary folder, under the names 0.$ending, 1.$ending "
    "and so on, and remove the folder at the end. Return, in order of the texts, how many $what each file has, as read "
    "back from the file.",
    "with tempfile.TemporaryDirectory() as folder:\n    counts = []\n    for number, text in enumerate(texts):\n"
    "        path = os.path.join(folder, f'{number}.$ending')\n"
    "        with open(path, 'w', encoding='utf-8', newline='') as file:\n            file.write(text)\n"
    "        with open(path, 'rb') as file:\n            counts.append($count)\n    return counts",
    ("['one\\ntwo three\\n', '', 'äö']", "[]", "['  a\\n\\n b']"),
    tuple(
      {"ending": ending, "what": what, "count": count}
      for ending, what, count in (
        ("txt", "bytes", "len(file.read())"),
        ("log", "newline characters", "file.read().count(b'\\n')"),
        ("md", "words (separated by blanks or newlines)", "len(file.read().split())"),
        ("dat", "different bytes", "len(set(file.read()))"),
      )
    ),
  ),
)


def rows() -> list[dict[str, str]]:
  """All tasks as rows of the schema, `own/<template>.<variant>`."""
  return [
    _row(template, number, values)
    for template in TEMPLATES
    for number, values in enumerate(template.variants)
  ]


def _row(template: Template, number: int, values: dict[str, Any]) -> dict[str, str]:
  def filled(text: str) -> str:
    return string.Template(text).substitute(values)

  imports = "".join(f"import {name}\n" for name in template.libs) + "\n" * bool(template.libs)
  head = f"{imports}def task_func({template.signature}):\n"
  description, solution = filled(template.description), _indented(filled(template.body))
  scope: dict[str, Any] = {}
  exec(head + solution, scope)
  calls = [f"task_func({filled(case)})" for case in template.cases]
  results = [eval(call, scope) for call in calls]
  checks = [
    f"self.assertEqual({call}, {result!r})" for call, result in zip(calls, results, strict=True)
  ]
  if template.refused:
    checks.append(f"with self.assertRaises(ValueError):\n    task_func({filled(template.refused)})")
  docstring = f"{description}\n\n>>> {calls[0]}\n{results[0]!r}".replace("\\", "\\\\")
  return {
    "task_id": f"own/{template.name}.{number}",
    "complete_prompt": head + _indented(f'"""{docstring}\n"""'),
    "instruct_prompt": (
      f"{description}\nFor example, {calls[0]} is {results[0]!r}.\n"
      f"Write self-contained code that starts with:\n```\n{head}```"
    ),
    "canonical_solution": solution,
    "code_prompt": head,
    "test": _tests(checks),
    "entry_point": "task_func",
    "doc_struct": json.dumps({"description": [description]}),
    "libs": repr(list(template.libs)),
  }


def _tests(checks: list[str]) -> str:
  methods = (
    f"    def test_{number}(self):\n{_indented(_indented(check))}"
    for number, check in enumerate(checks)
  )
  return "import unittest\n\nclass TestCases(unittest.TestCase):\n" + "\n".join(methods)


def _indented(text: str) -> str:
  return "".join(f"    {line}".rstrip() + "\n" for line in text.rstrip("\n").split("\n"))
