"""Real servers on loopback: transformers' own, with what it can and cannot give, and our command."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx2
import numpy as np
import pytest

from experiments import run
from memrl_jax.models import tiny, weights
from memrl_jax.rollout import pack, policies
from memrl_jax.sampling import images, remote
from memrl_jax.types import Message
from tests.sampling.tiny_engine import rollout, settings, turns_of

for _name in ("torch", "accelerate", "openai", "fastapi", "uvicorn"):
  pytest.importorskip(_name, reason=f"transformers serve needs {_name}: transformers[serving]")

ROOT = pathlib.Path(__file__).parents[2]
START_S = 300  # torch and transformers take a while to import on a busy machine
CHATML = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    return taken.getsockname()[1]


def wait_for(url, process, log):
  deadline = time.time() + START_S
  while True:
    assert process.poll() is None and time.time() < deadline, log.read_text()
    try:
      if httpx2.get(f"{url}/health", trust_env=False, timeout=60).status_code == 200:
        return
    except httpx2.TransportError:
      time.sleep(0.2)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
  """A Qwen3 with random weights, made by our exporter, and a tokenizer with Qwen's chat template.

  (With another template transformers' parser of Qwen3 answers returns the prompt as well.)
  """
  import jax

  from memrl_jax.models import policy

  place = tmp_path_factory.mktemp("served") / "qwen3-random"
  cfg, _ = tiny.load("darkroom")
  weights.save_directory(place, cfg, policy.init(jax.random.key(0), cfg))
  for path in tiny.tokenizer_directory().iterdir():
    shutil.copy(path, place)
  fields = json.loads((place / "tokenizer_config.json").read_text())
  (place / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": CHATML}))
  (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
  return place


@contextlib.contextmanager
def transformers_serve(model_directory, log):
  """URL of `transformers serve` with this model."""
  port = free_port()
  command = [
    str(pathlib.Path(sys.executable).with_name("transformers")), "serve", str(model_directory),
    "--host", "127.0.0.1", "--port", str(port), "--device", "cpu",
  ]  # fmt: skip
  environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
  with log.open("w") as out:
    process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
  url = f"http://127.0.0.1:{port}"
  try:
    wait_for(url, process, log)
    yield url
  finally:
    process.send_signal(signal.SIGINT)
    try:
      process.wait(timeout=30)
    except subprocess.TimeoutExpired:
      process.kill()


@pytest.fixture(scope="module")
def server(model_directory, tmp_path_factory):
  with transformers_serve(model_directory, tmp_path_factory.mktemp("log") / "serve.log") as url:
    yield url


@pytest.fixture
def client(server):
  with remote.Client(remote.RemoteConfig(url=f"{server}/v1", concurrency=1)) as made:
    yield made


def post(server, path, body):
  return httpx2.post(f"{server}{path}", json=body, trust_env=False, timeout=120)


def ask(seed, temperature=1.0, **more):
  messages = [Message("user", "(1,2) up left")]
  key = np.array([0, seed], np.uint32)
  return remote.Ask(key, 12, messages=messages, temperature=temperature, **more)


def test_who_it_is_and_what_it_gives_is_found_out(client, model_directory):
  assert client.gives == remote.Gives(
    "transformers", str(model_directory), ids=False, logps=False, tempered=False
  )
  assert client.reads_text


def test_the_table_s_line_on_transformers_is_what_it_does(server, model_directory):
  """remote.py: no ids in, no ids out, no log-probs, no weights from a path."""
  model = {"model": str(model_directory), "max_tokens": 3}
  ids_in = post(server, "/v1/completions", model | {"prompt": [1, 2, 3]})
  assert ids_in.status_code == 400 and "must be a string" in ids_in.text
  ids_out = post(server, "/v1/completions", model | {"prompt": "up", "return_token_ids": True})
  assert ids_out.status_code == 422 and "return_token_ids" in ids_out.text
  logps = post(server, "/v1/completions", model | {"prompt": "up", "logprobs": 0})
  assert logps.status_code == 200 and "logprobs" not in logps.json()["choices"][0]
  paths = httpx2.get(f"{server}/openapi.json", trust_env=False, timeout=60).json()["paths"]
  assert not [path for path in paths if "weight" in path or "rpc" in path]
  asked = model | {"messages": [{"role": "user", "content": "go"}], "temperature": 1.0}
  replies = [post(server, "/v1/chat/completions", asked | {"seed": seed}) for seed in range(4)]
  contents = {reply.json()["choices"][0]["message"]["content"] for reply in replies}
  assert len(contents) == 1  # the temperature alone leaves it greedy


def test_temperature_and_seed_decide_the_text(client):
  drawn = [client.ask(ask(seed)).text for seed in (3, 3, 4, 5)]
  assert drawn[0] == drawn[1] and len(set(drawn)) > 1
  assert client.ask(ask(1, temperature=0.0)).text == client.ask(ask(2, temperature=0.0)).text
  few = client.ask(ask(3)._replace(max_tokens=2))
  assert few.finish == "length" and len(few.text) < len(drawn[0])


def test_stop_ids_end_an_answer(client):
  long = client.ask(ask(3)._replace(max_tokens=60))
  everything = tuple(range(3, 1000))
  short = client.ask(ask(3, stop=everything)._replace(max_tokens=60))
  assert short.finish == "stop" and len(short.text) < len(long.text)


def test_an_image_that_a_model_of_text_would_lose_without_a_word_is_left_out_with_one(
  client, caplog
):
  """transformers serve answers a request with an image as if it had none: its token count tells."""
  url = "data:image/png;base64,iVBORw0KGgo="
  pictured = ask(3)._replace(messages=[Message("user", "(1,2) up left", (url,))])
  told = ask(3)._replace(messages=images.text_only(pictured.messages))
  assert client.ask(pictured).text == client.ask(told).text
  assert client.counts.images_dropped == 1 and "as many tokens without an image" in caplog.text


def test_dark_room_is_played_with_it_and_nothing_is_trained(client):
  trials = rollout(policies.RemotePolicy(client, None, settings().sampling, 64))
  assert not any(trial.void for trial in trials)
  turns = turns_of(trials)
  assert pack.trainable(turns) == [] and client.counts.untrainable == len(turns) > 0
  with pytest.raises(remote.RemoteError, match="gives no sampled ids"):
    client.check_trainable(1.0)
  with pytest.raises(remote.RemoteError, match="takes no new weights"):
    client.push("/nowhere")


def test_run_py_evaluates_it_and_refuses_to_train(server, tmp_path, capsys):
  flags = [
    "--config=experiments/lamer_darkroom.py:smoke", f"--config.remote.url={server}/v1",
    "--config.eval.tasks=4", "--config.eval.arms=memory", "--config.remote.concurrency=1",
    f"--workdir={tmp_path}",
  ]  # fmt: skip
  assert run.main([*flags, "--mode=eval"]) == 0
  record = json.loads((tmp_path / "eval.jsonl").read_text())
  assert record["server"]["api"] == "transformers"
  assert (record["arms"]["memory"]["trials"], record["arms"]["memory"]["void"]) == (4, 0)
  assert run.main(flags) == 2
  assert "gives no sampled ids with their log-probs" in capsys.readouterr().err


def test_memrl_remembers_with_it_without_a_model_here_and_goes_on_as_if_never_stopped(
  server, tmp_path
):
  """One request at a time: then its seeds decide what it says."""
  flags = [
    "--config=experiments/memrl_hle.py:smoke", f"--config.remote.url={server}/v1",
    "--config.remote.concurrency=1", "--config.model.checkpoint=no/such/model", "--config.eval.tasks=2",
  ]  # fmt: skip
  whole, parts = (f"--workdir={tmp_path / name}" for name in ("whole", "parts"))
  assert run.main([*flags, whole]) == 0
  assert run.main([*flags, parts, "--config.train.updates=3"]) == 0
  assert run.main([*flags, parts, "--resume"]) == 0
  written = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts")]
  assert written[0] == written[1]
  *_, last = map(json.loads, written[0].splitlines())
  assert last["rollout/void"] == 0 and last["epoch/rounds"] == 2 and last["memory/queries"] == 8
  assert run.main([*flags, parts, "--mode=eval", "--config.eval.arms=memory"]) == 0
  *_, evaluated = map(json.loads, (tmp_path / "parts" / "eval.jsonl").read_text().splitlines())
  assert (evaluated["step"], evaluated["server"]["api"]) == (4, "transformers")
  assert evaluated["arms"]["memory"]["trials"] == 2


def test_a_model_it_does_not_serve_is_named(server):
  with pytest.raises(remote.RemoteError, match="not 'gpt'"):
    remote.Client(remote.RemoteConfig(url=server, model="gpt"))


def test_our_command_serves_until_it_is_interrupted():
  command = [
    sys.executable, "-m", "memrl_jax.sampling.serve", "--checkpoint=tiny:darkroom", "--port=0",
    "--slots=4", "--buckets=64",
  ]  # fmt: skip
  pipe = subprocess.PIPE
  process = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
  line = process.stdout.readline()
  assert line.startswith("serving tiny:darkroom at http://127.0.0.1:"), process.stderr.read()
  url = line.split()[3].removesuffix("/v1;")
  with remote.Client(remote.RemoteConfig(url=url)) as own:
    assert own.gives == remote.Gives("memrl_jax", "tiny:darkroom", True, True, True)
  process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=60)
  assert (process.returncode, out, err) == (0, "stopped\n", "")
