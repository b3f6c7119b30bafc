"""The page in a real browser: Debian's chromium, driven over its own debugging pipe."""

import contextlib
import json
import os
import shutil
import subprocess
import time

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra `runtime`")
pytest.importorskip("uvicorn", reason="the service needs the extra `runtime`")

from memrl_jax.runtime.tenants import Keys
from tests.runtime.serving import bearer, learn, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser; apt-get install chromium")
WAIT_S = 60
EVIL = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"


class Browser:
  """One tab. The protocol is JSON messages, each ended by a zero byte, over two pipes."""

  def __init__(self, profile):
    (self._from, out), (into, self._to) = os.pipe(), os.pipe()
    flags = (
      f"--headless --no-sandbox --disable-gpu --user-data-dir={profile} --remote-debugging-pipe"
    )
    command = f'exec "$0" {flags} about:blank 3<&{into} 4>&{out}'
    self._process = subprocess.Popen(
      ["bash", "-c", command, CHROMIUM], pass_fds=(into, out), stderr=subprocess.DEVNULL
    )
    os.close(into)
    os.close(out)
    self._rest, self._number, self.events = b"", 0, []
    target = self.send("Target.createTarget", url="about:blank")["targetId"]
    self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.send(f"{domain}.enable")

  def close(self):
    self._session = None
    with contextlib.suppress(OSError, AssertionError):
      self.send("Browser.close")
    try:
      self._process.wait(20)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    os.close(self._from)
    os.close(self._to)

  def send(self, method, **params):
    self._number += 1
    message = {"id": self._number, "method": method, "params": params}
    if getattr(self, "_session", None):
      message["sessionId"] = self._session
    os.write(self._to, json.dumps(message).encode() + b"\0")
    while True:
      answer = self._read()
      if answer.get("id") == self._number:
        assert "error" not in answer, answer
        return answer["result"]
      self.events.append(answer)

  def _read(self):
    while b"\0" not in self._rest:
      part = os.read(self._from, 1 << 16)
      assert part, "the browser is gone"
      self._rest += part
    one, _, self._rest = self._rest.partition(b"\0")
    return json.loads(one)

  def js(self, code):
    found = self.send("Runtime.evaluate", expression=code, returnByValue=True)
    assert "exceptionDetails" not in found, found
    return found["result"].get("value")

  def go(self, url):
    self.send("Page.navigate", url=url)
    self.until("document.body?.dataset.ready >= 1")

  def act(self, code):
    """Does something that makes the page ask the service, and waits until that has ended."""
    before = int(self.js("document.body.dataset.ready"))
    self.js(code)
    self.until(f"document.body.dataset.ready > {before}")

  def until(self, code):
    deadline = time.time() + WAIT_S
    while not self.js(code):
      assert time.time() < deadline, (code, self.js("document.body.innerText"))
      time.sleep(0.02)

  def click(self, selector):
    """A real click at the middle of an element, as a mouse makes it."""
    self.js(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
    place = self.js(
      f"(r => [r.x + r.width / 2, r.y + r.height / 2])(document.querySelector({json.dumps(selector)})"
      ".getBoundingClientRect())"
    )
    for kind in ("mousePressed", "mouseReleased"):
      where = {"x": place[0], "y": place[1]}
      self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

  def type(self, selector, text):
    self.js(f"document.querySelector({json.dumps(selector)}).focus()")
    self.send("Input.insertText", text=text)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
  made = Browser(tmp_path_factory.mktemp("profile"))
  yield made
  made.close()


def cells(browser, body):
  return browser.js(
    f"[...document.querySelectorAll('#{body} tr')].map(r => [...r.cells].map(c => c.innerText))"
  )


def test_memories_are_browsed_with_q_lineage_search_and_diff(browser, tmp_path):
  with serving(tmp_path) as http:
    learn(http, "put a clean apple in the fridge", "wash it first")
    learn(http, "draw a map of the cellar", "walk along the walls")
    then = http.get("/versions").json()["version"]
    learn(http, "put a clean pear in the fridge", f"wash it {EVIL}", -1.0)
    url = str(http.base_url)
    browser.events.clear()
    browser.go(url)
    assert browser.js("document.querySelector('#summary').innerText") == "3 memories"
    rows = cells(browser, "rows")
    assert [row[0] for row in rows] == ["2", "3", "1"] and rows[2][1:4] == [
      "-0.300",
      "1",
      "success",
    ]
    # A real click opens a memory: its text, its Q as a staircase of two steps, its child.
    before = browser.js("document.body.dataset.ready")
    browser.click('tr[data-id="1"] td:last-child')
    browser.until(f"document.body.dataset.ready > {before}")
    assert "wash it first" in browser.js("document.querySelector('#text').innerText")
    points = browser.js("document.querySelector('#chart polyline').getAttribute('points')").split()
    heights = [float(point.split(",")[1]) for point in points]
    assert len(points) == 4 and heights[0] == heights[1] < heights[2] == heights[3]
    assert "children: #3" in browser.js("document.querySelector('#lineage').innerText")
    assert cells(browser, "reads")[0][2] == "-1"
    browser.act("document.querySelector('#lineage button').click()")
    assert browser.js("document.querySelector('#title').innerText").startswith("Memory 3:")
    assert EVIL in browser.js("document.querySelector('#text').innerText")  # a text, and no more
    # Search by meaning and by text.
    browser.type("#words", "a pear for the fridge")
    browser.act("document.querySelector('#search button').click()")
    assert cells(browser, "rows")[0][0] == "3"
    browser.js("document.querySelector('#words').value = 'walls'")
    browser.js("document.querySelector('input[value=text]').click()")
    browser.act("document.querySelector('#search button').click()")
    assert [row[0] for row in cells(browser, "rows")] == ["2"]
    # What changed since.
    browser.type("#a", str(then))
    browser.act("document.querySelector('#compare button').click()")
    assert [row[:3] for row in cells(browser, "diff")] == [
      ["+", "#3", "0.000"],
      ["~", "#1", "0.000 → -0.300"],
    ]
    browser.js("document.querySelector('#a').value = 99")
    browser.act("document.querySelector('#compare button').click()")
    assert "no version 99" in browser.js("document.querySelector('#message').innerText")
    assert browser.js("document.title") == "Memories"
    asked = [
      e["params"]["request"]["url"]
      for e in browser.events
      if e["method"] == "Network.requestWillBeSent"
    ]
    assert asked and all(one.startswith(url) or "favicon" in one for one in asked), asked
    assert not [e for e in browser.events if e["method"] == "Runtime.exceptionThrown"]


def test_a_key_opens_one_s_own_memories_only(browser, tmp_path):
  keys = Keys(tmp_path)
  (_, a), (_, b) = keys.add("a"), keys.add("b")
  with serving(tmp_path) as http:
    learn(http, "put a clean apple in the fridge", "the vault opens with 4711", headers=bearer(a))
    browser.go(str(http.base_url))
    assert "key is missing" in browser.js("document.querySelector('#message').innerText")
    for key, number in ((b, 0), (a, 1)):
      browser.type("#key", key)
      browser.act("document.querySelector('#login button').click()")
      assert browser.js("document.querySelector('#summary').innerText") == f"{number} memories"
      assert key not in browser.js("document.documentElement.outerHTML + location.href")
