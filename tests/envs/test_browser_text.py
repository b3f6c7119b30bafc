"""Pages as text, and answers as calls: what is read of a page, and what of an answer is carried out."""

import json

import hypothesis
import pytest
from hypothesis import strategies

from memrl_jax.envs import browser_calls, browser_page, browser_text

# Pages, as BrowserGym writes them.

FORM = "\n".join(
  [
    "RootWebArea 'It\\'s a form', focused",
    "\t[3] LabelText '', clickable, visible",
    "\t\t[4] checkbox 'Gh, visible', clickable, visible, checked='false'",
    "\t\tStaticText 'Gh, visible'",
    "\tStaticText ''",
    '\t[5] textbox "Name" value="O\'Neill", clickable, visible, focused, required',
    "\t[6] image '', clickable, visible, class='trash'",
    "\t[7] combobox '' value='2', hasPopup='menu', expanded=False",
    "\t[8] button 'Send', clickable",
  ]
)
WRITTEN = "\n".join(
  [
    """RootWebArea "It's a form", focused""",
    " [3] LabelText, clickable",
    "  [4] checkbox 'Gh, visible', checked='false'",
    "  StaticText 'Gh, visible'",
    """ [5] textbox 'Name' value="O'Neill", focused, required""",
    " [6] image, clickable, class='trash'",
    " [7] combobox value='2', hasPopup='menu', expanded=False",
    " [8] button 'Send'",
  ]
)


def test_a_page_is_written_in_short_and_read_again():
  assert browser_text.page(FORM, 10_000) == WRITTEN
  read = browser_text.elements(WRITTEN)
  assert [str(each) for each in read] == WRITTEN.split("\n")
  assert [each.bid for each in read if each.actable] == ["3", "4", "5", "6", "7", "8"]
  assert [each.bid for each in browser_text.elements(FORM) if each.visible] == ["3", "4", "5", "6"]
  assert read[4][:5] == (1, "5", "textbox", "Name", "O'Neill")


def test_places_are_told_where_they_are_asked_for():
  tree = "RootWebArea ''\n\t[3] image '', center=\"(5,7)\", clickable, visible\n\t[4] button 'B', center=\"(1,2)\", clickable"
  assert browser_text.page(tree, 1000) == (
    ' [3] image, center="(5,7)", clickable\n [4] button \'B\', center="(1,2)"'
  )
  image, button = browser_text.elements(tree)
  assert (image.actable, image.visible, button.actable, button.visible) == (True, True, True, False)


def long_page(texts=40, buttons=20, hidden=20):
  lines = ["RootWebArea 'Long'"]
  lines += [f"\tStaticText 'text number {n}'" for n in range(texts)]
  lines += [f"\t[h{n}] button 'hidden {n}', clickable" for n in range(hidden)]
  lines += [f"\t[v{n}] button 'seen {n}', clickable, visible" for n in range(buttons)]
  return "\n".join(lines)


def test_a_long_page_keeps_its_head_and_what_is_in_view_and_says_what_is_missing():
  tree = long_page()
  whole = browser_text.page(tree, 10_000).split("\n")
  assert len(whole) == 81
  # A line of text has 27 characters with its end, a button in view 22, a hidden one 24: of 600, the head takes 19,
  # buttons fill 400 (17 of 20 in view, 390 or so), and text the rest.
  *shown, said = browser_text.page(tree, 600).split("\n")
  assert sum(len(line) + 1 for line in shown) <= 600
  assert said == f"({81 - len(shown)} of 81 lines are left out; scroll to see others)"
  assert shown[0] == "RootWebArea 'Long'" and shown == [line for line in whole if line in shown]
  kinds = {kind: sum(kind in line for line in shown) for kind in ("text", "hidden", "seen")}
  assert kinds["seen"] >= 16 and kinds["hidden"] == 0 and 7 <= kinds["text"] <= 9
  assert [line for line in whole if "text" in line][: kinds["text"]] == [
    line for line in shown if "text" in line
  ]


def test_room_that_text_does_not_need_goes_to_elements():
  shown = browser_text.page(long_page(texts=0, buttons=20, hidden=40), 800)
  assert sum(len(line) + 1 for line in shown.split("\n")[:-1]) > 770
  assert "seen 19" in shown and "hidden 5" in shown


@hypothesis.given(
  strategies.integers(200, 4000), strategies.integers(0, 60), strategies.integers(0, 60)
)
@hypothesis.settings(max_examples=30, deadline=None)
def test_a_page_never_takes_more_room_than_it_is_given(chars, texts, buttons):
  *shown, last = browser_text.page(long_page(texts, buttons, texts), chars).split("\n")
  shown += [] if last.startswith("(") else [last]
  assert sum(len(line) + 1 for line in shown) <= chars


def test_one_endless_name_is_cut():
  (line,) = browser_text.page(f"[1] link '{'x' * 5000}', clickable", 10_000).split("\n")
  assert len(line) == browser_text.LINE_CHARS and line.endswith("…")


def test_failures_are_one_line_and_say_what_was_in_the_way():
  said = (
    "TimeoutError: Locator.click: Timeout 500ms exceeded.\nCall log:\n\x1b[2m  - waiting\x1b[0m\n"
    '  -   <div id="mask"></div> intercepts pointer events\n  - retrying'
  )
  assert browser_text.failure(said) == (
    "TimeoutError: Locator.click: Timeout 500ms exceeded.; "
    '<div id="mask"></div> intercepts pointer events'
  )
  assert browser_text.failure("") == ""


def test_addresses_of_files_name_no_machine():
  assert browser_text.address("file:///home/me/miniwob/click-test.html") == "click-test.html"
  assert browser_text.address("http://shop.example/a?b=c") == "http://shop.example/a?b=c"


def test_what_has_no_name_is_told_by_its_class_and_what_reacts_is_clickable():
  strings = ["bid", "7", "class", "trash", "8", "9", "id", "x"]
  nodes = [
    {"role": {"value": "generic"}, "name": {"value": ""}, "browsergym_id": "7"},
    {"role": {"value": "button"}, "name": {"value": "OK"}, "browsergym_id": "8"},
    {"role": {"value": "generic"}, "name": {"value": ""}, "browsergym_id": "9"},
  ]
  plain = json.loads(json.dumps(nodes))
  dom = {
    "strings": strings,
    "documents": [{"nodes": {"attributes": [[0, 1, 2, 3], [0, 4, 2, 3], [0, 5, 6, 7]]}}],
  }
  properties = {"7": {"clickable": True}, "8": {"clickable": True}, "9": {"clickable": False}}
  browser_page._name(nodes, properties, dom)
  assert nodes[0]["role"]["value"] == "clickable"
  assert nodes[0]["properties"] == [{"name": "class", "value": {"value": "trash"}}]
  assert nodes[1:] == plain[1:]


# Calls.

ALL = browser_calls.allowed(browser_calls.GROUPS)


def parsed(said, names=ALL, style="full"):
  return browser_calls.parse(said, style, names)


@pytest.mark.parametrize(
  ("said", "call"),
  [
    ("<action>click('12')</action>", "click('12')"),
    ("no <action>click('1')</action> but <action>\n`click(\"a12\")`\n</action>", "click('a12')"),
    ("<action>click(12)", "click('12')"),
    ("<action>```python\nfill(bid='4', value='Ana Lí')\n```</action>", "fill('4', 'Ana Lí')"),
    ("<action>fill('4', 7)</action>", "fill('4', '7')"),
    ("<action>fill('4', 'Ti', True)</action>", "fill('4', 'Ti', True)"),
    ("<action>fill('4', 'x', enable_autocomplete_menu=False)</action>", "fill('4', 'x')"),
    ("<action>click('b2', button='right')</action>", "click('b2', 'right')"),
    ("<action>click('b2', modifiers=['Shift'])</action>", "click('b2', 'left', ['Shift'])"),
    ("<action>select_option('5', ['a', 'b'])</action>", "select_option('5', ['a', 'b'])"),
    ("<action>scroll(0, -200.5)</action>", "scroll(0, -200.5)"),
    ("<action>noop()</action>", "noop()"),
    ("<action>noop(1000)</action>", "noop()"),
    ("<action>goto('https://shop.example/')</action>", "goto('https://shop.example/')"),
    ("<action>send_msg_to_user('it is \"4\"\\n')</action>", "send_msg_to_user('it is \"4\"\\n')"),
  ],
)
def test_calls_are_written_in_one_way(said, call):
  assert parsed(said) == (call, "")
  assert parsed(f"<action>{call}</action>") == (call, "")


@pytest.mark.parametrize(
  ("said", "why"),
  [
    ("click('12')", "no action was given"),
    ("<action> </action>", "no action was given"),
    ("<action>click('1'); click('2')</action>", "not one call"),
    ("<action>click('1')\nclick('2')</action>", "not one call"),
    ("<action>__import__('os').abort()</action>", "not one call"),
    ("<action>click(open('/etc/passwd').read())</action>", "not one call"),
    ("<action>click(f'{1}')</action>", "not one call"),
    ("<action>fill('1', 'a' * 10**9)</action>", "not one call"),
    ("<action>click(*['1'])</action>", "not one call"),
    ("<action>click(**{'bid': '1'})</action>", "not one call"),
    ("<action>" + "(" * 3000 + "</action>", "not one call"),
    ("<action>\0</action>", "not one call"),
    ("<action>fill('1', '" + "x" * 4000 + "')</action>", "at most 4000 characters, this one"),
    ("<action>exec('1')</action>", "there is no action exec; choose one of click, "),
    ("<action>upload_file('1', '/etc/passwd')</action>", "there is no action upload_file"),
    ("<action>click()</action>", "click(bid, button='left', modifiers=[]): bid is missing"),
    ("<action>click('1', 'left', [], 4)</action>", "too many values"),
    ("<action>click('1', bid='1')</action>", "bid does not belong there"),
    ("<action>click('OK')</action>", "bid must be an id from the page"),
    ("<action>click(True)</action>", "bid must be an id from the page"),
    ("<action>click('1', 'top')</action>", "button must be one of left, middle, right"),
    ("<action>noop(1e9)</action>", "wait_ms must be 0 to 5000 milliseconds"),
    ("<action>scroll(0, 1e999)</action>", "delta_y must be a number of pixels"),
    ("<action>goto('file:///etc/passwd')</action>", "url must be an address that begins with http"),
    ("<action>goto('javascript:alert(1)')</action>", "url must be an address"),
    ("<action>tab_focus(-1)</action>", "index must be the number of an open tab"),
    ("<action>fill('1', None)</action>", "value must be a string"),
  ],
)
def test_what_is_no_call_is_told_why(said, why):
  call, note = parsed(said)
  assert call == "" and why in note and "\n" not in note


def test_only_actions_of_the_groups_are_calls_and_the_manual_lists_those():
  names = browser_calls.allowed(("bid",))
  assert "click" in names and "noop" in names and "goto" not in names
  assert parsed("<action>goto('http://a.b')</action>", names)[0] == ""
  lines = browser_calls.manual(names).split("\n")
  assert len(lines) == len(names) == 11
  assert "- noop(wait_ms=1000): wait, in milliseconds" in lines


def test_in_chat_style_a_bare_call_will_do():
  assert parsed("click('1')", style="chat") == ("click('1')", "")
  assert parsed("<action></action> click('1')", style="chat")[0] == ""


@hypothesis.given(strategies.text(max_size=60))
@hypothesis.settings(max_examples=150, deadline=None)
def test_any_answer_is_a_call_of_plain_values_or_none(said):
  call, note = parsed(f"<action>{said}</action>")
  assert bool(call) != bool(note)
  call, _ = parsed(f"<action>fill('1', {said!r})</action>")
  assert call == f"fill('1', {said!r})"
