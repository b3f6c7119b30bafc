"""Several servers are one sampler: who answers, dies or comes back changes no answer."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from memrl_jax.models import lora
from memrl_jax.sampling import fleet, remote, serve
from memrl_jax.training import learner
from tests.sampling import test_remote as one
from tests.sampling.tiny_engine import model, new_engine, settings, text


def new_server(port=0):
  return serve.Server(model()[0], new_engine(), text(), model="tiny", port=port)


@contextlib.contextmanager
def connect(*urls, **options):
  config = remote.RemoteConfig(url=",".join(urls), **(one.QUICK | options))
  with fleet.connect(config) as client:
    yield client


def asks(groups=4, each=4):
  made = one.asks(groups * each)
  return [ask._replace(home=index // each) for index, ask in enumerate(made)]


def ids(replies):
  return [reply.ids.tolist() for reply in replies]


@pytest.fixture(scope="module")
def servers():
  with new_server() as first, new_server() as second:
    yield first, second


@pytest.fixture(scope="module")
def wanted(servers):
  with connect(servers[0].url) as client:
    assert isinstance(client, remote.Client)
    return ids(one.answers(client, asks()))


def through(server, seen, dies=lambda count: False):
  """A proxy that notes the seeds it was asked for, and hangs up once `dies` of how many it answered."""

  def fault(ticket, attempt):
    return "drop" if dies(len(seen)) else seen.append(ticket)

  return one.faulty(server.url, fault)


def test_groups_stay_together_and_answers_are_those_of_one_server(servers, wanted):
  before = [server.counts.sampled for server in servers]
  with connect(*(server.url for server in servers)) as client:
    assert ids(one.answers(client, asks())) == wanted
    assert (client.counts.asked, client.counts.answered, client.counts.lost) == (16, 16, 0)
    assert client.counts.ids == sum(map(len, wanted))
    for group in range(4):
      counts = [server.counts.sampled for server in servers]
      one.answers(client, [ask for ask in asks() if ask.home == group])
      now = [server.counts.sampled for server in servers]
      assert [b - a for a, b in zip(counts, now, strict=True)] == [
        4 * (group % 2 == i) for i in (0, 1)
      ]
  assert all(s.counts.sampled > b for s, b in zip(servers, before, strict=True))


@pytest.mark.parametrize("survives", [0, 3])
def test_the_requests_of_a_server_that_dies_go_to_the_other(servers, wanted, survives):
  seen = []
  with (
    through(servers[0], seen, lambda count: count >= survives) as dying,
    connect(dying, servers[1].url) as client,
  ):
    assert ids(one.answers(client, asks())) == wanted
    assert client.counts.failed == 0 and client.counts.answered == 16
    assert client.counts.lost == 1 and client.counts.retried >= 1
  assert len(seen) == survives


def test_a_request_fails_only_where_nobody_is_left(servers):
  with contextlib.ExitStack() as stack:
    dead = [stack.enter_context(through(s, [], lambda count: True)) for s in servers]
    client = stack.enter_context(connect(*dead))
    (failure,) = one.answers(client, asks()[:1])
    assert "none of 2 servers is left" in failure.reason and "broke off" in failure.reason
    assert client.counts.failed == 1 and client.counts.answered == 0


def test_what_all_would_refuse_is_asked_once_and_nobody_is_given_up(servers):
  with connect(*(server.url for server in servers)) as client:
    (failure,) = one.answers(client, [asks()[0]._replace(max_tokens=10_000)])
    assert "answered 400" in failure.reason
    assert client.counts.lost == client.counts.retried == 0


def test_weights_go_to_all_and_who_comes_back_has_them_before_it_is_asked(tmp_path, monkeypatch):
  monkeypatch.setattr(fleet, "_LOOK_S", 0.0)
  _, params = model()
  other = jax.tree.map(lambda leaf: leaf * 0.9, params)
  with new_server() as stays, contextlib.ExitStack() as stack:
    goes = stack.enter_context(new_server())
    port = int(goes.url.rsplit(":")[-1])
    with connect(stays.url, goes.url, weights=str(tmp_path)) as client:
      before = ids(one.answers(client, asks()))
      one.push(client, other)
      assert stays.worker.version == goes.worker.version == 1
      wanted = ids(one.answers(client, asks()))
      assert wanted != before
      assert client.counts.pushed_bytes > 0 and client.push_s > 0
      stack.close()
      assert ids(one.answers(client, asks())) == wanted  # alone
      again = stack.enter_context(new_server(port))  # with the weights it came with
      assert ids(one.answers(client, asks())) == wanted
      assert again.worker.version == 1 and again.counts.sampled
      assert ids(one.answers(client, asks())) == wanted
      assert again.counts.sampled >= 8  # all of its groups
      assert client.counts.lost == 1 and client.counts.failed == 0
      stack.close()
      one.push(client, params)  # nobody waits for the dead
      assert stays.worker.version == 2 and client.counts.lost == 2
      assert ids(one.answers(client, asks())) == before


def test_servers_of_two_kinds_and_a_name_twice_are_refused_in_a_sentence(servers):
  with one.serving(one.sglang([], lambda: "0")) as url:
    with pytest.raises(remote.RemoteError, match="serve one model in one way") as caught:
      connect(servers[0].url, url).__enter__()
    assert "\n" not in str(caught.value)
  with pytest.raises(ValueError, match="names a server twice"):
    remote.RemoteConfig(url="http://a:1, http://a:1/v1")
  with pytest.raises(ValueError, match="'b:2' is no server's address"):
    remote.RemoteConfig(url="http://a:1,b:2")


def test_closing_wakes_who_waits_for_a_server_that_never_answers():
  import threading

  release = threading.Event()

  def answer(handler, body):
    if not body:
      return 200, {"data": [{"id": "m"}]}
    release.wait(20)
    return 500, {}

  with one.serving(answer) as url, connect(url) as client:
    client.submit(remote.Ask(np.zeros(2, np.uint32), 4, messages=one.MESSAGES))
    heard = []

    def wait():
      with pytest.raises(remote.RemoteError, match="nobody waits") as caught:
        client.poll()
      heard.append(caught)

    thread = threading.Thread(target=wait)
    thread.start()
    client.close()
    thread.join(timeout=5)
    release.set()
    assert heard


def test_weights_may_travel_in_half_the_bytes(tmp_path):
  """Where the server samples in bfloat16, nothing is lost: it would round to the same numbers."""
  cfg, params = model()
  own = serve.Server(cfg, sampler := new_engine(), text(), model="tiny")
  with own, connect(own.url, weights=str(tmp_path), dtype="bfloat16") as client:
    made = learner.Learner(settings(), seed=0, total=1, frozen=False, client=client)
    made.sync(jax.tree.map(lambda leaf: leaf * 0.9, made.trained))
    assert client.counts.pushed_bytes == pytest.approx(2 * cfg.parameters, rel=0.02)
    for got, came in zip(jax.tree.leaves(sampler._params), jax.tree.leaves(params), strict=True):
      np.testing.assert_array_equal(got, (came * 0.9).astype("bfloat16").astype("float32"))


def test_adapters_travel_alone_and_are_merged_where_they_arrive(tmp_path):
  """The server's weights are the learner's to the bit, for a few percent of the bytes."""
  s = settings("lora.rank=2", "loss.old_logps=trainer", "remote.adapters=true")
  cfg, params = model()
  own = serve.Server(cfg, sampler := new_engine(), text(), model="tiny", base=params)
  with own, connect(own.url, weights=str(tmp_path), adapters=True) as client:
    made = learner.Learner(s, seed=0, total=1, frozen=False, client=client)
    moved = jax.tree.map(lambda leaf: leaf + 0.03, made.trained)
    made.state = made.state._replace(params={"policy": moved})
    made.sync()
    for got, here in zip(
      jax.tree.leaves(sampler._params), jax.tree.leaves(made.params), strict=True
    ):
      np.testing.assert_array_equal(got, here)
    assert float(abs(sampler._params["layers"]["qkv"] - params["layers"]["qkv"]).max()) > 1e-3
    assert client.counts.pushed_bytes < 0.05 * 4 * cfg.parameters
    with pytest.raises(remote.RemoteError, match="start from the same checkpoint"):
      one.servers.push(client, lambda path: lora.save(path, moved, s.lora, "01234567"))
    one.push(client, params)  # whole weights: nothing is left to merge into
    with pytest.raises(remote.RemoteError, match="restart the server"):
      made.sync(jax.tree.map(jnp.copy, moved))
  with pytest.raises(ValueError, match="no adapters are trained"):
    settings("remote.adapters=true")
