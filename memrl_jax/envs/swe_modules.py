"""The parts that generated repositories are made of: small modules, their tests, and bugs to plant in them.

A bug turns `right` into `wrong`, both of which stand for one place in the source, breaks `test` and none
of the module's other tests. Its issue describes what a user saw, and never names the place.
"""

from __future__ import annotations

from typing import NamedTuple


class Bug(NamedTuple):
  """`kind` says what sort of mistake it is, `test` is the body of a test that finds it."""

  kind: str
  right: str
  wrong: str
  issue: str
  test: str


class Module(NamedTuple):
  """`tests` are the bodies of tests that pass with every one of the bugs."""

  name: str
  source: str
  tests: tuple[str, ...]
  bugs: tuple[Bug, ...]


INTERVALS = Module(
  "intervals",
  '''"""Half-open intervals of integers, as (start, end) pairs."""


def merge(pairs):
    """The union of intervals as sorted disjoint pairs; touching ones become one."""
    merged = []
    for start, end in sorted(pairs):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(pairs, start, end):
    """What intervals leave free between start and end."""
    free = []
    for first, last in merge(pairs):
        if first > start:
            free.append((start, min(first, end)))
        start = max(start, last)
    if start < end:
        free.append((start, end))
    return free


def length(pairs):
    """How many integers lie in any of the intervals."""
    return sum(end - start for start, end in merge(pairs))
''',
  (
    "self.assertEqual(intervals.merge([(5, 7), (1, 3)]), [(1, 3), (5, 7)])",
    "self.assertEqual(intervals.gaps([], 2, 4), [(2, 4)])",
    "self.assertEqual(intervals.length([(1, 4), (6, 7)]), 4)",
  ),
  (
    Bug(
      "comparison",
      "start <= merged[-1][1]",
      "start < merged[-1][1]",
      "Neighbouring intervals stay apart\n\nMerging (1, 3) and (3, 5) should give (1, 5), since they touch. I get "
      "two pairs back.",
      "self.assertEqual(intervals.merge([(1, 3), (3, 5)]), [(1, 5)])",
    ),
    Bug(
      "missing case",
      "max(merged[-1][1], end)",
      "end",
      "An interval inside another one shortens it\n\nmerge([(0, 10), (2, 4)]) loses everything after 4. The longer "
      "interval should win.",
      "self.assertEqual(intervals.merge([(0, 10), (2, 4)]), [(0, 10)])",
    ),
    Bug(
      "double counting",
      "for start, end in merge(pairs))",
      "for start, end in pairs)",
      "Length counts some numbers twice\n\nThe length of [(0, 4), (2, 6)] is reported as 8, but only six integers lie "
      "in them.",
      "self.assertEqual(intervals.length([(0, 4), (2, 6)]), 6)",
    ),
  ),
)

WORDING = Module(
  "wording",
  '''"""Small jobs on English text."""


def wrap(text, width):
    """Lines of at most `width` characters, broken between words."""
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if len(longer) <= width:
            line = longer
        else:
            lines.append(line)
            line = word
    if line:
        lines.append(line)
    return lines


def slug(title):
    """A title as a part of an address: lower-case words joined by single hyphens."""
    kept = "".join(c if c.isalnum() else " " for c in title.lower())
    return "-".join(kept.split())


def shorten(text, limit):
    """The text, or its beginning and "..." with at most `limit` characters in all."""
    if len(text) <= limit:
        return text
    return text[: limit - 3] + "..."
''',
  (
    'self.assertEqual(wording.wrap("", 5), [])',
    'self.assertEqual(wording.slug("hello"), "hello")',
    'self.assertEqual(wording.shorten("short", 9), "short")',
  ),
  (
    Bug(
      "comparison",
      "len(longer) <= width",
      "len(longer) < width",
      "Lines break one word too early\n\nWrapping 'ab cd ef' to 5 characters gives three lines although 'ab cd' fits "
      "exactly.",
      'self.assertEqual(wording.wrap("ab cd ef", 5), ["ab cd", "ef"])',
    ),
    Bug(
      "wrong call",
      '"-".join(kept.split())',
      'kept.replace(" ", "-")',
      "Addresses with double hyphens\n\nA title such as 'Rock & Roll!' becomes 'rock---roll-'. We promise single "
      "hyphens between words and none at the ends.",
      'self.assertEqual(wording.slug("Rock & Roll!"), "rock-roll")',
    ),
    Bug(
      "off by one",
      "text[: limit - 3]",
      "text[:limit]",
      "Shortened texts are too long\n\nI asked for at most 8 characters and got 11, dots included.",
      'self.assertEqual(wording.shorten("a long sentence", 8), "a lon...")',
    ),
  ),
)

MONEY = Module(
  "money",
  '''"""Amounts of money as whole cents."""


def split(cents, people):
    """Fair shares that add up: the first ones get the odd cents."""
    share, rest = divmod(cents, people)
    return [share + 1] * rest + [share] * (people - rest)


def parse(text):
    """"12.5" or "12" as cents; a leading minus is a debt."""
    sign = -1 if text.startswith("-") else 1
    whole, _, part = text.lstrip("-").partition(".")
    return sign * (int(whole) * 100 + int(part.ljust(2, "0")[:2] or 0))


def show(cents):
    """Cents as text with two decimals."""
    sign = "-" if cents < 0 else ""
    whole, part = divmod(abs(cents), 100)
    return f"{sign}{whole}.{part:02d}"
''',
  (
    "self.assertEqual(money.split(90, 3), [30, 30, 30])",
    'self.assertEqual(money.parse("12.34"), 1234)',
    'self.assertEqual(money.show(1234), "12.34")',
  ),
  (
    Bug(
      "lost remainder",
      "[share + 1] * rest + [share] * (people - rest)",
      "[share] * people",
      "Cents vanish when a bill is split\n\nThree people share 100 cents and pay 99 together. Somebody has to pay the "
      "odd cent; the documentation says who.",
      "self.assertEqual(money.split(100, 3), [34, 33, 33])",
    ),
    Bug(
      "wrong padding",
      'part.ljust(2, "0")',
      'part.rjust(2, "0")',
      "'12.5' is read as twelve and five cents\n\nPeople type 12.5 and mean 12.50. We store 1205 cents.",
      'self.assertEqual(money.parse("12.5"), 1250)',
    ),
    Bug(
      "sign",
      "divmod(abs(cents), 100)",
      "divmod(cents, 100)",
      "Debts are displayed wrongly\n\nMinus 150 cents shows as --2.50 instead of -1.50.",
      'self.assertEqual(money.show(-150), "-1.50")',
    ),
  ),
)

STATS = Module(
  "stats",
  '''"""Plain statistics of lists of numbers."""


def median(values):
    """The middle value, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2


def rolling(values, size):
    """The means of all windows of `size` neighbours."""
    return [sum(values[i : i + size]) / size for i in range(len(values) - size + 1)]


def modes(values):
    """The most frequent values, in the order in which they first appear."""
    counts = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    most = max(counts.values(), default=0)
    return [value for value in counts if counts[value] == most]
''',
  (
    "self.assertEqual(stats.median([1, 2, 3]), 2)",
    "self.assertEqual(stats.rolling([], 2), [])",
    "self.assertEqual(stats.modes([4, 4, 1]), [4])",
  ),
  (
    Bug(
      "missing sort",
      "ordered = sorted(values)",
      "ordered = list(values)",
      "Median depends on the order of the data\n\nThe median of 9, 1, 5 should be 5 however they are listed. I get 1.",
      "self.assertEqual(stats.median([9, 1, 5]), 5)",
    ),
    Bug(
      "off by one",
      "range(len(values) - size + 1)",
      "range(len(values) - size)",
      "The last window is missing from rolling means\n\nFour values have three windows of two, and I only see two "
      "means.",
      "self.assertEqual(stats.rolling([1, 3, 5, 7], 2), [2, 4, 6])",
    ),
    Bug(
      "missing case",
      "max(counts.values(), default=0)",
      "max(counts.values())",
      "Crash on empty data\n\nAsking for the most frequent values of an empty list raises ValueError; it should say "
      "that there are none.",
      "self.assertEqual(stats.modes([]), [])",
    ),
  ),
)

STORE = Module(
  "store",
  '''"""A store that forgets what was not used for longest."""


class Store:
    """Keeps at most `size` entries."""

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def put(self, key, value):
        """Adds or replaces an entry, which counts as used."""
        self.entries.pop(key, None)
        self.entries[key] = value
        while len(self.entries) > self.size:
            self.entries.pop(next(iter(self.entries)))

    def get(self, key, default=None):
        """The value of a key, which counts as used; `default` where there is none."""
        if key not in self.entries:
            return default
        value = self.entries.pop(key)
        self.entries[key] = value
        return value

    def keys(self):
        """The keys, least recently used first."""
        return list(self.entries)
''',
  (
    "box = store.Store(2)\nself.assertIsNone(box.get(1))",
    "box = store.Store(2)\nbox.put(1, 'a')\nself.assertEqual(box.get(1), 'a')",
  ),
  (
    Bug(
      "state not updated",
      "value = self.entries.pop(key)\n        self.entries[key] = value\n        return value",
      "return self.entries[key]",
      "Entries disappear although they are used all the time\n\nI read an entry before every write, and it was dropped "
      "all the same. Reading is supposed to count as use.",
      "box = store.Store(2)\nbox.put(1, 'a')\nbox.put(2, 'b')\nbox.get(1)\nbox.put(3, 'c')\n"
      "self.assertEqual(box.keys(), [1, 3])",
    ),
    Bug(
      "off by one",
      "len(self.entries) > self.size",
      "len(self.entries) > self.size + 1",
      "The store grows beyond its size\n\nA store for two entries holds three.",
      "box = store.Store(2)\nfor key in (1, 2, 3):\n    box.put(key, key)\nself.assertEqual(box.keys(), [2, 3])",
    ),
    Bug(
      "wrong value",
      "return default",
      "return None",
      "The fallback value is ignored\n\nReading a missing key with a fallback of 0 gives None.",
      "self.assertEqual(store.Store(1).get('missing', 0), 0)",
    ),
  ),
)

SETTINGS = Module(
  "settings",
  '''"""Reads settings that are written one `key = value` a line."""


def read(text):
    """Keys and values as texts. Lines that begin with # are comments; a later line counts."""
    found = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, _, value = line.partition("=")
        found[key.strip()] = value.strip()
    return found


def flag(found, key):
    """Whether a setting is on: yes, true, on or 1, in any case."""
    return found.get(key, "").lower() in ("yes", "true", "on", "1")


def numbers(found, key, into=None):
    """The numbers of a setting that lists them with commas, appended to `into` or to a new list."""
    into = [] if into is None else into
    into.extend(int(part) for part in found.get(key, "").split(",") if part.strip())
    return into
''',
  (
    'self.assertEqual(settings.read("a=1"), {"a": "1"})',
    'self.assertTrue(settings.flag({"a": "yes"}, "a"))',
    'self.assertFalse(settings.flag({}, "a"))',
  ),
  (
    Bug(
      "wrong call",
      'key, _, value = line.partition("=")',
      'key, value = line.split("=")[:2]',
      "Values with an equals sign are cut\n\nThe line 'filter = a=b' should give the value 'a=b'. We get only 'a'.",
      'self.assertEqual(settings.read("filter = a=b"), {"filter": "a=b"})',
    ),
    Bug(
      "missing case",
      'found.get(key, "").lower() in',
      'found.get(key, "") in',
      "'Yes' does not switch anything on\n\nOnly lower-case words work, and the documentation says any case.",
      'self.assertTrue(settings.flag({"a": "Yes"}, "a"))',
    ),
    Bug(
      "shared default",
      "into=None):",
      "into=[]):",
      "Numbers of an earlier call come back\n\nAsking twice for the same list of numbers gives them twice the second "
      "time.",
      'settings.numbers({"a": "1,2"}, "a")\nself.assertEqual(settings.numbers({"a": "1,2"}, "a"), [1, 2])',
    ),
  ),
)

ROUTES = Module(
  "routes",
  '''"""Walks over graphs that are given as {node: [neighbours]}."""


def shortest(graph, start, goal):
    """The nodes of a shortest path, both ends included; None where there is no path."""
    paths, seen = [[start]], {start}
    while paths:
        path = paths.pop(0)
        if path[-1] == goal:
            return path
        for node in graph.get(path[-1], []):
            if node not in seen:
                seen.add(node)
                paths.append([*path, node])
    return None


def reachable(graph, start):
    """All nodes that can be reached, the start included."""
    seen, waiting = {start}, [start]
    while waiting:
        for node in graph.get(waiting.pop(), []):
            if node not in seen:
                seen.add(node)
                waiting.append(node)
    return seen


def reverse(graph):
    """The graph with every edge turned round; nodes without edges are kept."""
    turned = {node: [] for node in graph}
    for node, neighbours in graph.items():
        for other in neighbours:
            turned.setdefault(other, []).append(node)
    return turned
''',
  (
    'self.assertEqual(routes.shortest({"a": ["b"]}, "a", "b"), ["a", "b"])',
    'self.assertEqual(routes.reachable({"a": ["b"], "b": []}, "a"), {"a", "b"})',
    "self.assertEqual(routes.reverse({}), {})",
  ),
  (
    Bug(
      "wrong end",
      "paths.pop(0)",
      "paths.pop()",
      "Paths are not the shortest\n\nWith a direct connection from a to c and a detour over b, I am sent on the detour "
      "in some graphs.",
      'graph = {"a": ["c", "b"], "b": ["d"], "d": ["e"], "c": ["e"]}\n'
      'self.assertEqual(routes.shortest(graph, "a", "e"), ["a", "c", "e"])',
    ),
    Bug(
      "missing case",
      "graph.get(waiting.pop(), [])",
      "graph[waiting.pop()]",
      "KeyError for nodes without neighbours\n\nNodes that only appear as somebody's neighbour crash the search for "
      "reachable nodes.",
      'self.assertEqual(routes.reachable({"a": ["z"]}, "a"), {"a", "z"})',
    ),
    Bug(
      "missing case",
      "{node: [] for node in graph}",
      "{}",
      "Turning a graph round loses nodes\n\nA node that nobody points to is gone afterwards. It should be there with no "
      "neighbours.",
      'self.assertEqual(routes.reverse({"a": ["b"]}), {"a": [], "b": ["a"]})',
    ),
  ),
)

DATES = Module(
  "dates",
  '''"""Dates as (year, month, day)."""

_DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def leap(year):
    """Whether a year has a 29th of February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def month_days(year, month):
    """How many days a month has."""
    return 29 if month == 2 and leap(year) else _DAYS[month - 1]


def next_day(date):
    """The day after."""
    year, month, day = date
    if day < month_days(year, month):
        return year, month, day + 1
    if month < 12:
        return year, month + 1, 1
    return year + 1, 1, 1
''',
  (
    "self.assertTrue(dates.leap(2024))",
    "self.assertEqual(dates.month_days(2023, 2), 28)",
    "self.assertEqual(dates.next_day((2023, 5, 8)), (2023, 5, 9))",
  ),
  (
    Bug(
      "missing case",
      "year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
      "year % 4 == 0",
      "1900 was no leap year\n\nCenturies are leap years only every 400 years. We accept the 29th of February 1900.",
      "self.assertFalse(dates.leap(1900))",
    ),
    Bug(
      "wrong variable",
      "return year + 1, 1, 1",
      "return year, 1, 1",
      "New Year's Eve leads back to January of the same year\n\nThe day after (2023, 12, 31) should lie in 2024.",
      "self.assertEqual(dates.next_day((2023, 12, 31)), (2024, 1, 1))",
    ),
    Bug(
      "comparison",
      "month == 2 and leap(year)",
      "month <= 2 and leap(year)",
      "Rent is off by two days in some years\n\nIn 2024 our January ends on the 29th.",
      "self.assertEqual([dates.month_days(2024, month) for month in (1, 2)], [31, 29])",
    ),
  ),
)

MODULES = (INTERVALS, WORDING, MONEY, STATS, STORE, SETTINGS, ROUTES, DATES)
