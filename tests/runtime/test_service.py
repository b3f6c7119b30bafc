"""The HTTP service: its own routes, keys, isolation, limits, and how it refuses."""

import contextlib
import json
import pathlib
import socket
import threading
import time

import httpx2
import pytest

pytest.importorskip("fastapi", reason="the service needs the extra `runtime`")
pytest.importorskip("uvicorn", reason="the service needs the extra `runtime`")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memrl_jax import runtime
from memrl_jax.memory import embed
from memrl_jax.runtime import __main__ as cli
from memrl_jax.runtime import client
from memrl_jax.runtime.limits import Limits
from memrl_jax.runtime.tenants import Keys
from tests.runtime.serving import CONFIG, bearer, learn, serving

TASK = "put a clean apple in the fridge"
SECRET = "the vault opens with 4711"
GETS = ("/memories", "/versions", "/diff?a=0", "/stats", "/snapshots", "/export", "/memories/1")


def sentence(answer, code):
  """The one sentence of a refusal."""
  assert answer.status_code == code, answer.text
  error = answer.json()["error"]
  assert error["code"] == code and error["message"] and "\n" not in error["message"]
  return error["message"]


def test_the_routes_are_the_memory(tmp_path):
  with serving(tmp_path) as http, client.Client(str(http.base_url)) as own:
    assert learn(http, TASK, "wash it first")["kept"] == 1
    found = own.suggest("put a clean pear in the fridge")
    assert "wash it first" in found["prompt"] and found["memories"][0]["id"] == 1
    assert own.feedback(found["id"], 1.0)["q"] == {"1": pytest.approx(0.3)}
    assert own.feedback(found["id"], 1.0)["repeated"] is True
    assert own.memories()["memories"][0]["q"] == pytest.approx(0.3)
    assert own.memories(query="a pear")["memories"][0]["similarity"] < 1
    assert own.memories(text="nowhere")["total"] == 0
    assert [s["q"] for s in own.show(1)["q_over_time"]] == pytest.approx([0, 0.3])
    assert own.versions(limit=1)["versions"][0]["why"].startswith("feedback")
    assert own.diff(2)["changed"][0]["q"] == [0, pytest.approx(0.3)]
    assert own.stats()["memories"] == 1
    lines = list(own.export())
    assert own.rollback(1)["memories"] == 0
    assert own.import_(lines)["memories"] == 1
    assert own.snapshot("monday")["version"] == own.stats()["version"]
    assert http.get("/snapshots").json() == {"snapshots": ["monday"]}
    with pytest.raises(runtime.Refused, match="409: there is a snapshot monday"):
      own.snapshot("monday")
    with pytest.raises(runtime.Unknown, match="no memory 99"):
      own.show(99)
    assert http.get("/healthz").json() == {"status": "ok"}
    for path in ("/", "/page.js", "/page.css"):
      page = http.get(path)
      assert (
        page.status_code == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
      )
  assert (tmp_path / "snapshots/default/monday/memory.db").exists()


def test_tenants_share_nothing(tmp_path):
  keys = Keys(tmp_path)
  _, a = keys.add("a")
  _, b = keys.add("b")
  with serving(tmp_path) as http:
    learn(http, TASK, SECRET, headers=bearer(a))
    learn(http, TASK, "b's own way", headers=bearer(b))
    mine = http.post("/suggest", json={"task": TASK}, headers=bearer(a)).json()
    http.post("/snapshot", json={"name": "s"}, headers=bearer(a))
    answers = [http.get(path, headers=bearer(b)) for path in GETS]
    answers.append(http.get("/memories", params={"query": SECRET}, headers=bearer(b)))
    answers.append(http.get("/memories", params={"text": "vault"}, headers=bearer(b)))
    answers.append(http.post("/suggest", json={"task": TASK}, headers=bearer(b)))
    for answer in answers:
      assert (
        answer.status_code == 200 and "4711" not in answer.text and mine["id"] not in answer.text
      )
    # Not even how much the other has done: b's numbers are those of somebody alone.
    assert http.get("/versions", headers=bearer(b)).json()["version"] == 2
    assert http.get("/snapshots", headers=bearer(b)).json() == {"snapshots": []}
    theirs = http.post("/feedback", json={"id": mine["id"], "reward": -1}, headers=bearer(b))
    assert "no suggestion" in sentence(theirs, 404)
    assert http.post("/rollback", json={"version": 0}, headers=bearer(b)).status_code == 200
    assert http.get("/memories", headers=bearer(a)).json()["memories"][0]["q"] == 0
    export = http.get("/export", headers=bearer(a)).text
    export = export.replace('"tenant":"default"', '"tenant":"../a"')
    lines = bearer(b) | {"Content-Type": "application/x-ndjson"}
    assert http.post("/import", content=export, headers=lines).json()["memories"] == 1
    assert http.get("/memories", headers=bearer(a)).json()["total"] == 1
  assert {path.name for path in (tmp_path / "tenants").iterdir()} == {"a", "b"}


def test_keys_are_needed_hashed_and_revoked_while_it_runs(tmp_path):
  keys = Keys(tmp_path)
  id, key = keys.add("a")
  text = (tmp_path / "keys.json").read_text()
  assert key not in text and key[3:] not in text and id in text
  assert (tmp_path / "keys.json").stat().st_mode & 0o77 == 0
  with serving(tmp_path) as http:
    wrong = [
      {},
      {"Authorization": "Bearer"},
      bearer(key + "x"),
      bearer(key[:-1]),
      {"Authorization": key},
      bearer("é"),
    ]
    for headers in wrong:
      raw = {name: value.encode() for name, value in headers.items()}
      assert "key is missing or wrong" in sentence(http.get("/stats", headers=raw), 401)
    assert http.get("/stats", headers=bearer(key)).status_code == 200
    other, second = keys.add("a")
    assert http.get("/stats", headers=bearer(second)).status_code == 200
    keys.revoke("a", id)
    sentence(http.get("/stats", headers=bearer(key)), 401)
    keys.revoke("a")  # the last key: closed, not open to everybody
    sentence(http.get("/stats", headers=bearer(second)), 401)
    sentence(http.get("/stats"), 401)
    (tmp_path / "keys.json").unlink()
    sentence(http.get("/stats"), 503)
  lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
  assert {(line["who"], line["status"]) for line in lines} == {("", 401), ("a", 200), ("", 503)}
  assert {line["key"] for line in lines if line["who"]} == {id, other}
  files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
  assert not any(one[3:].encode() in file for one in (key, second) for file in files)


def test_the_audit_log_says_who_did_what_and_no_texts(tmp_path):
  _, key = Keys(tmp_path).add("a")
  with serving(tmp_path) as http:
    told = learn(http, TASK, SECRET, headers=bearer(key))
    http.post("/rollback", json={"version": 0}, headers=bearer(key))
    http.get("/memories", params={"text": SECRET}, headers=bearer(key))
  text = (tmp_path / "audit.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  assert [line["what"] for line in lines] == [
    "POST /suggest", "POST /feedback", "POST /rollback", "GET /memories"
  ]  # fmt: skip
  assert lines[1]["suggestion"] == told["id"] and lines[2]["equals"] == 0
  assert "4711" not in text and "apple" not in text and key not in text


def test_sizes_rates_and_slowness_are_limited(tmp_path):
  keys = Keys(tmp_path)
  (_, a), (_, b) = keys.add("a"), keys.add("b")
  with serving(tmp_path, body=1000, import_body=2000, rate=0.01, burst=12, body_s=1.0) as http:
    big = {"task": "x" * 1000}
    assert "over 1000 bytes" in sentence(http.post("/suggest", json=big, headers=bearer(a)), 413)

    def parts():
      for _ in range(100):
        yield b"x" * 100

    headers = bearer(a) | {"Content-Type": "application/json"}
    sentence(http.post("/suggest", content=parts(), headers=headers), 413)  # no Content-Length
    lines = bearer(a) | {"Content-Type": "application/x-ndjson"}
    sentence(http.post("/import", content=b"x" * 1500, headers=lines), 400)
    sentence(http.post("/import", content=b"x" * 2500, headers=lines), 413)
    host, port = http.base_url.host, http.base_url.port
    with socket.create_connection((host, port)) as slow:
      head = f"POST /suggest HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {a}\r\n"
      slow.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{{".encode())
      assert slow.recv(100).startswith(b"HTTP/1.1 408")
    while (answer := http.get("/snapshots", headers=bearer(a))).status_code == 200:
      pass
    assert "too many requests" in sentence(answer, 429) and int(answer.headers["Retry-After"]) > 0
    assert http.get("/snapshots", headers=bearer(b)).status_code == 200  # the other's own


def test_one_import_of_a_tenant_at_a_time(tmp_path):
  lines = {"Content-Type": "application/x-ndjson"}
  with serving(tmp_path) as http:
    host, port = http.base_url.host, http.base_url.port
    with socket.create_connection((host, port)) as slow:
      head = f"POST /import HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/x-ndjson\r\n"
      slow.sendall(f"{head}Content-Length: 50\r\n\r\n{{".encode())
      tries = 0
      while http.post("/import", content=b"x", headers=lines).status_code != 429:
        tries += 1  # the slow one has not come in yet
        assert tries < 4, "it is the rate that stops them"
        time.sleep(0.5)
      assert http.get("/stats").status_code == 200
      slow.sendall(b" " * 49)
      assert slow.recv(100).startswith(b"HTTP/1.1 400")
      assert http.post("/import", content=b"x", headers=lines).status_code == 400  # its turn


def test_a_bucket_refills_and_requests_under_way_are_counted():
  limits = Limits(rate=2.0, burst=3, inflight=2)
  assert [limits.enter("a", 0.0) for _ in range(2)] == [0, 0]
  assert limits.enter("a", 0.0) == 1.0  # two are under way
  limits.leave("a")
  assert limits.enter("a", 0.0) == 0  # the third token
  limits.leave("a")
  assert limits.enter("a", 0.0) == 0.5  # of rate 2 a second
  assert limits.enter("b", 0.0) == 0
  assert limits.enter("a", 0.5) == 0


def test_what_is_wrong_is_said_in_one_sentence(tmp_path):
  with serving(tmp_path) as http:
    post = http.post
    assert "task" in sentence(post("/suggest", json={}), 422)
    assert "tsk" in sentence(post("/suggest", json={"task": "x", "tsk": 1}), 422)
    assert "empty" in sentence(post("/suggest", json={"task": " \x00"}), 400)
    assert "reward" in sentence(post("/feedback", json={"id": "x", "reward": "1"}), 422)
    assert "no suggestion" in sentence(post("/feedback", json={"id": "x", "reward": 1}), 404)
    assert "version" in sentence(post("/rollback", json={"version": 7}), 404)
    assert "name of a snapshot" in sentence(post("/snapshot", json={"name": "../../x"}), 400)
    assert "limit" in sentence(http.get("/memories?limit=100000"), 422)
    assert "id" in sentence(http.get("/memories/x"), 422)
    assert "no such route" in sentence(http.get("/tenants/default/memory.db"), 404)
    assert "another method" in sentence(http.delete("/memories/1"), 405)
    json_ = {"Content-Type": "application/json"}
    sentence(post("/suggest", content=b'{"task": ', headers=json_), 422)
    sentence(post("/suggest", content=b"\xff", headers=json_), 400)
    assert "Content-Type" in sentence(
      post("/suggest", content=b"{}", headers={"Content-Type": "text/plain"}), 415
    )
    assert "no model" in sentence(post("/v1/chat/completions", json={"messages": []}), 501)
    for host in ("evil.example", "evil.example:80", ""):  # a web page's own name for this machine
      assert "localhost only" in sentence(http.get("/stats", headers={"Host": host}), 421)


def test_a_damaged_disk_tells_a_tenant_nothing_of_the_machine(tmp_path):
  folder = tmp_path / "tenants" / "default"
  folder.mkdir(parents=True)
  (folder / "memory.db").write_bytes(b"no database" * 1000)
  with serving(tmp_path) as http:
    words = sentence(http.post("/suggest", json={"task": "x"}), 503)
    assert "operator" in words and str(tmp_path) not in words
    assert http.get("/healthz").status_code == 200


JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(
      st.sampled_from(["task", "id", "reward", "version", "name", "x"]), inner, max_size=4
    )
  ),
  max_leaves=6,
)


@pytest.fixture(scope="module")
def open_service(tmp_path_factory):
  with serving(tmp_path_factory.mktemp("open"), rate=1e6, burst=10**6) as http:
    learn(http, TASK, SECRET)
    yield http


@settings(
  max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
  path=st.sampled_from(["/suggest", "/feedback", "/rollback", "/snapshot", "/import"]),
  body=JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20),
)
def test_no_body_makes_it_fail(open_service, path, body):
  kind = "application/x-ndjson" if path == "/import" else "application/json"
  answer = open_service.post(path, content=body, headers={"Content-Type": kind})
  assert answer.status_code in (200, 400, 404, 409, 422, 429), answer.text


@settings(
  max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
  path=st.sampled_from(["/memories", "/versions", "/diff", "/export", "/memories/1", "/memories/"]),
  query=st.dictionaries(
    st.sampled_from(["a", "b", "at", "limit", "offset", "query", "text"]),
    st.integers().map(str) | st.text(st.characters(codec="utf-8"), max_size=8),
    max_size=4,
  ),
)
def test_no_query_makes_it_fail(open_service, path, query):
  answer = open_service.get(path, params=query)
  assert answer.status_code in (200, 307, 404, 422, 429), answer.text


def test_feedback_under_way_is_finished_before_it_stops(tmp_path):
  answers, ids = {}, []

  def send(url, id):
    body = {"id": id, "reward": 1.0, "trajectory": f"t{id}"}
    with contextlib.suppress(httpx2.TransportError):
      answers[id] = httpx2.post(url, json=body, trust_env=False, timeout=30).status_code

  with serving(tmp_path) as http:
    ids = [http.post("/suggest", json={"task": f"{TASK} {n}"}).json()["id"] for n in range(8)]
    url = f"{http.base_url}/feedback".replace("//feedback", "/feedback")
    threads = [threading.Thread(target=send, args=(url, id)) for id in ids]
    [thread.start() for thread in threads]
    while not answers:
      time.sleep(0.001)
  [thread.join() for thread in threads]
  assert set(answers.values()) == {200}
  with runtime.open(tmp_path / "tenants" / "default", CONFIG, embedder=embed.Hash(64)) as memory:
    assert memory.memories()["total"] >= len(answers)
    assert all(memory.feedback(id, 1.0).repeated for id in answers)


def test_beyond_loopback_a_key_comes_first(tmp_path, capsys):
  assert cli.main(["serve", str(tmp_path), "--host", "0.0.0.0", "--port", "0"]) == 2
  error = capsys.readouterr().err
  assert "a key is needed" in error and "tenant add" in error and error.count("\n") == 1


def test_the_command_line_does_the_same_in_a_folder_and_at_a_service(tmp_path, capsys, monkeypatch):
  def run(*argv, code=0):
    assert cli.main([str(word) for word in argv]) == code
    out, err = capsys.readouterr()
    return json.loads(out) if code == 0 and out.startswith("{\n") else out + err

  folder = tmp_path / "tenants" / "a"
  key = run("tenant", "add", tmp_path, "a")["key"]
  assert list(run("tenant", "list", tmp_path)) == ["a"]
  monkeypatch.setenv("MEMRL_KEY", key)
  (tmp_path / "story.txt").write_text("wash it first")
  with serving(tmp_path) as http:
    url = str(http.base_url)
    id = run("suggest", url, TASK)["id"]
    assert run("feedback", url, id, "1", "--trajectory", tmp_path / "story.txt")["kept"] == 1
    assert run("memories", url, "--text", "wash")["total"] == 1
    exported = run("export", url)
    assert "in use by process" in run("stats", folder, code=2)  # the service has it open
  # The service's embedder has 64 numbers, the command's 384: the sentence says how to put that right.
  assert "reindex" in run("show", folder, "1", code=2)
  (tmp_path / "lines").write_text(exported)
  copy = tmp_path / "copy"
  assert run("import", copy, tmp_path / "lines")["memories"] == 1
  found = run("suggest", copy, TASK, "--set", "delta=0.2")
  assert found["memories"][0]["id"] == 1 and "wash it first" in found["prompt"]
  assert run("feedback", copy, found["id"], "-1")["q"] == {"1": -0.3}
  assert run("show", copy, 1)["q"] == -0.3
  assert run("diff", copy, 1)["changed"][0]["id"] == 1
  assert run("rollback", copy, 1)["memories"] == 1
  run("snapshot", copy, tmp_path / "kept")
  assert (tmp_path / "kept" / "memory.db").exists()
  assert "no memory in" in run("stats", tmp_path / "nowhere", code=2)
  assert "EpisodicConfig has no 'delt'" in run("stats", copy, "--set", "delt=1", code=2)
  assert run("tenant", "revoke", tmp_path, "a")["revoked"] == 1
  assert not pathlib.Path(tmp_path / "nowhere").exists()
