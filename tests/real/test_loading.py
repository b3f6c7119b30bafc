"""Loading a checkpoint of 395 MB in 4 files: what the host holds besides the model."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from memrl_jax.models import huggingface
from memrl_jax.models.config import DecoderConfig

CFG = DecoderConfig(
  32_000, 1024, 12, 16, 8, 64, 2560, rope_theta=1e6, qk_norm=True, tie_embeddings=False
)
SHARD = 110_000_000

# Anonymous memory alone: the pages of a mapped file belong to the page cache and can be dropped.
LOAD = """
import sys, threading
import jax
from memrl_jax.models import weights

def anonymous():
  with open("/proc/self/status") as file:
    return 1024 * next(int(line.split()[1]) for line in file if line.startswith("RssAnon"))

jax.numpy.zeros(8).block_until_ready()
before, peak, done = anonymous(), 0, threading.Event()

def watch():
  global peak
  while not done.wait(0.002):
    peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
cfg, params = weights.load_directory(sys.argv[1], dtype=sys.argv[2])
jax.block_until_ready(params)
done.set()
watcher.join()
print(sum(leaf.nbytes for leaf in jax.tree.leaves(params)), peak - before)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
  folder, rng = tmp_path_factory.mktemp("checkpoint"), np.random.default_rng(0)
  parts, where = {}, {}
  shapes = huggingface.tensor_shapes(CFG)
  for name, shape in shapes.items():
    parts[name] = rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    if sum(tensor.nbytes for tensor in parts.values()) > SHARD or name == list(shapes)[-1]:
      file = f"model-{len(list(folder.glob('*.safetensors'))):05}.safetensors"
      safetensors.numpy.save_file(parts, folder / file)
      where |= dict.fromkeys(parts, file)
      parts = {}
  index = {"metadata": {}, "weight_map": where}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  fields = huggingface.fields_from_config(CFG, "bfloat16")
  (folder / "config.json").write_text(json.dumps(fields))
  return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 2), ("float32", 4)])
def test_the_host_holds_about_one_shard_besides_the_model(checkpoint, dtype, width):
  done = subprocess.run(
    [sys.executable, "-c", LOAD, str(checkpoint), dtype],
    capture_output=True,
    text=True,
    check=True,
  )
  model, peak = map(int, done.stdout.split())
  assert model == width * CFG.parameters
  shard = SHARD * width // 2  # of a file in this type
  compiler = 60_000_000  # XLA and its one program that fills the layers
  print(f"{dtype}: model {model / 1e6:.0f} MB, peak {(peak - model) / 1e6:.0f} MB above it")
  assert peak - model < 1.5 * shard + compiler
