"""token_logprob: hand numbers; tiles, kernels and split vocabularies equal ref; no [N, V] array."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from memrl_kernels import token_logprob
from memrl_kernels.token_logprob import pallas

from tests.kernels import tpu


def inputs(rows, vocabulary=23, features=6, seed=0):
  rng = np.random.default_rng(seed)
  return dict(
    hidden_ND=jnp.asarray(rng.normal(size=(rows, features)), jnp.float32),
    embedding_VD=jnp.asarray(rng.normal(size=(vocabulary, features)), jnp.float32),
    label_N=jnp.asarray(rng.integers(0, vocabulary, rows), jnp.int32),
    temperature_N=jnp.asarray(rng.uniform(0.5, 2.0, rows), jnp.float32),
  )


def loss(hidden_ND, embedding_VD, label_N, temperature_N, mask_N=None, **options):
  """A scalar in which every row's log-prob and entropy has a gradient of its own."""
  scored = token_logprob.token_logprob(
    hidden_ND, embedding_VD, label_N, mask_N, temperature_N=temperature_N, entropy=True, **options
  )
  row_N = jnp.arange(1.0, label_N.shape[0] + 1)
  return jnp.sum(row_N * scored.logp_N) + jnp.sum(jnp.sqrt(row_N) * scored.entropy_N)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_by_hand(impl):
  # Logits (log 1, log 2, log 5) at T = 1: p = 1/8, 2/8, 5/8. At T = 1/2 they are squared:
  # 1/30, 4/30, 25/30. Entropy of the first: .125 log 8 + .25 log 4 + .625 log 1.6 = .900256.
  embedding_VD = jnp.log(jnp.array([[1.0], [2.0], [5.0]]))
  scored = token_logprob.token_logprob(
    jnp.ones((2, 1)),
    embedding_VD,
    jnp.array([1, 2]),
    temperature_N=jnp.array([1.0, 0.5]),
    entropy=True,
    impl=impl,
  )
  np.testing.assert_allclose(scored.logp_N, np.log([2 / 8, 25 / 30]), rtol=1e-5)
  assert scored.entropy_N[0] == pytest.approx(0.900256, abs=1e-5)


@pytest.mark.parametrize("impl", ["ref", "xla"])
def test_the_soft_cap_comes_before_the_temperature(impl):
  # Logits 0 and 4, cap 2: 2 tanh(2) = 1.928055, over T = .5: 3.856110;
  # logp of the second = - log(1 + exp(-3.856110)) = -.0209284.
  scored = token_logprob.token_logprob(
    jnp.array([[4.0]]),
    jnp.array([[0.0], [1.0]]),
    jnp.array([1]),
    temperature_N=jnp.array([0.5]),
    soft_cap=2.0,
    entropy=False,
    impl=impl,
  )
  np.testing.assert_allclose(scored.logp_N, [-0.0209284], rtol=1e-4)
  assert scored.entropy_N is None


@pytest.mark.parametrize("rows, chunk", [(1, 512), (7, 3), (13, 4), (16, 4), (5, 1), (6, 512)])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_chunks_equal_ref_in_value_and_gradient(rows, chunk, soft_cap):
  batch = inputs(rows)
  arrays = ("hidden_ND", "embedding_VD", "temperature_N")

  def run(impl):
    def of(arrays):
      return loss(**(batch | arrays), soft_cap=soft_cap, chunk=chunk, impl=impl)

    return jax.jit(jax.value_and_grad(of))({name: batch[name] for name in arrays})

  (value, gradient), (expected, expected_gradient) = run("xla"), run("ref")
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for name in arrays:
    np.testing.assert_allclose(
      gradient[name], expected_gradient[name], rtol=1e-4, atol=1e-4, err_msg=name
    )


def test_rows_keep_their_order():
  batch = inputs(11)
  scored = token_logprob.token_logprob(**batch, entropy=True, chunk=4)
  order_N = np.random.default_rng(1).permutation(11)
  moved = {k: x if k == "embedding_VD" else x[order_N] for k, x in batch.items()}
  shuffled = token_logprob.token_logprob(**moved, entropy=True, chunk=11)
  np.testing.assert_allclose(shuffled.logp_N, scored.logp_N[order_N], rtol=1e-5)
  np.testing.assert_allclose(shuffled.entropy_N, scored.entropy_N[order_N], rtol=1e-5)


def test_probabilities_of_all_labels_add_to_one_and_give_the_entropy():
  batch = inputs(1)
  wide = {k: x if k == "embedding_VD" else jnp.repeat(x, 23, 0) for k, x in batch.items()}
  wide["label_N"] = jnp.arange(23)
  scored = token_logprob.token_logprob(**wide, entropy=True, chunk=5)
  p = np.exp(scored.logp_N)
  assert p.sum() == pytest.approx(1.0, abs=1e-5)
  np.testing.assert_allclose(scored.entropy_N, -np.sum(p * scored.logp_N) * np.ones(23), rtol=1e-5)


@pytest.mark.parametrize("impl", ["ref", "xla"])
@pytest.mark.parametrize("poison", [np.nan, 1e30])
def test_masked_rows_are_zero_and_leave_no_gradient(impl, poison):
  batch = inputs(7)
  mask_N = jnp.array([True, False, True, True, False, False, True])

  def run(hidden_ND, embedding_VD, temperature_N, label_N):
    return loss(hidden_ND, embedding_VD, label_N, temperature_N, mask_N, chunk=3, impl=impl)

  gradients = jax.jit(jax.value_and_grad(run, argnums=(0, 1, 2)))
  clean = gradients(
    jnp.where(mask_N[:, None], batch["hidden_ND"], 0.0),
    batch["embedding_VD"],
    batch["temperature_N"],
    batch["label_N"],
  )
  dirty = gradients(
    jnp.where(mask_N[:, None], batch["hidden_ND"], poison),
    batch["embedding_VD"],
    jnp.where(mask_N, batch["temperature_N"], 0.0),
    jnp.where(mask_N, batch["label_N"], -100),
  )
  jax.tree.map(np.testing.assert_array_equal, dirty, clean)
  assert np.all(np.asarray(dirty[1][0])[~mask_N] == 0)
  scored = token_logprob.token_logprob(**batch, mask_N=mask_N, entropy=True, impl=impl)
  assert np.all(np.asarray(scored.logp_N)[~mask_N] == 0)
  assert np.all(np.asarray(scored.entropy_N)[~mask_N] == 0)
  assert np.all(np.asarray(scored.logp_N)[mask_N] < 0)


@pytest.mark.parametrize("label", [-1, -100, 23])
def test_a_label_outside_the_vocabulary_is_loud(label):
  batch = inputs(2) | dict(label_N=jnp.array([0, label]))
  logp_N = token_logprob.token_logprob(**batch, entropy=False, chunk=1).logp_N
  assert np.isfinite(logp_N[0]) and np.isnan(logp_N[1])


def test_bfloat16_chunks_add_their_gradient_in_float32():
  # One row a chunk, each adding the same gradient to the embedding: a bfloat16 sum of 512 equal
  # parts stops growing at about 256 of them.
  rows = 512
  batch = inputs(1)
  many = {k: x if k == "embedding_VD" else jnp.repeat(x, rows, 0) for k, x in batch.items()}
  many["hidden_ND"] = many["hidden_ND"].astype(jnp.bfloat16)
  embedding_VD = many.pop("embedding_VD").astype(jnp.bfloat16)

  def gradient(impl):
    def total(embedding_VD):
      scored = token_logprob.token_logprob(
        embedding_VD=embedding_VD, **many, entropy=False, chunk=1, impl=impl
      )
      assert scored.logp_N.dtype == jnp.float32
      return scored.logp_N.sum()

    return np.asarray(jax.jit(jax.grad(total))(embedding_VD), np.float32)

  chunked, whole = gradient("xla"), gradient("ref")
  assert np.abs(chunked - whole).max() < 0.02 * np.abs(whole).max()


def test_no_array_of_rows_times_vocabulary_in_forward_or_backward():
  rows, vocabulary, chunk = 96, 1000, 16
  batch = inputs(rows, vocabulary)

  def largest(impl):
    run = jax.jit(jax.grad(functools.partial(loss, chunk=chunk, impl=impl), argnums=(0, 1)))
    text = run.lower(*batch.values()).compile().as_text()
    shapes = re.findall(r"f32\[([\d,]+)\]", text)
    return max(int(np.prod([int(n) for n in shape.split(",")])) for shape in shapes)

  assert largest("ref") >= rows * vocabulary
  assert largest("xla") <= chunk * vocabulary


def everything(hidden_ND, embedding_VD, label_N, mask_N, temperature_N, *, entropy, **options):
  """(log-probs and entropies, gradients of `loss`-like weights on them)."""

  def of(hidden_ND, embedding_VD, temperature_N):
    scored = token_logprob.token_logprob(
      hidden_ND,
      embedding_VD,
      label_N,
      mask_N,
      temperature_N=temperature_N,
      entropy=entropy,
      **options,
    )
    row_N = jnp.arange(1.0, label_N.shape[0] + 1)
    total = jnp.sum(row_N * scored.logp_N)
    return total + (jnp.sum(jnp.sqrt(row_N) * scored.entropy_N) if entropy else 0.0), scored

  gradient = jax.grad(of, argnums=(0, 1, 2), has_aux=True)
  return gradient(hidden_ND, embedding_VD, temperature_N)[::-1]


@pytest.mark.parametrize(
  "dtype, entropy, soft_cap", [("float32", True, 3.0), ("bfloat16", False, None)]
)
def test_the_kernels_equal_ref_in_value_and_gradient(monkeypatch, dtype, entropy, soft_cap):
  # Blocks of 8 rows and 128 entries: 13 rows and 300 entries leave odd ends, and two slices of the
  # vocabulary (chunk 7 of 13 rows) one more. Padding holds NaN; row 3 has a label that is not there.
  monkeypatch.setattr(pallas, "BLOCKS", ((8, 128),))
  batch = inputs(13, vocabulary=300, features=6)
  mask_N = np.ones(13, bool)
  mask_N[[1, 5, 12]] = False
  arrays = (
    jnp.where(mask_N[:, None], batch["hidden_ND"], jnp.nan).astype(dtype),
    batch["embedding_VD"].astype(dtype),
    jnp.where(mask_N, batch["label_N"].at[3].set(300), -100),
    jnp.asarray(mask_N),
    jnp.where(mask_N, batch["temperature_N"], 0.0),
  )
  options = dict(entropy=entropy, soft_cap=soft_cap, chunk=7)
  result = tpu.interpret(functools.partial(everything, **options, impl="pallas"), *arrays)
  expected = jax.jit(functools.partial(everything, **options, impl="ref"))(*arrays)

  assert np.isnan(result[0].logp_N).tolist() == [n == 3 for n in range(13)]
  jax.tree.map(lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), result, expected)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
  jax.tree.map(close, result[0], expected[0])
  # bfloat16: the gradient of a logit has 8 bits before it is multiplied on.
  share = 1e-2 if dtype == "bfloat16" else 1e-5
  for x, y in zip(result[1], expected[1], strict=True):
    x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
    np.testing.assert_allclose(x, y, rtol=0, atol=share * np.abs(y).max())


def test_rows_that_are_all_masked_give_zero_from_the_kernels_too(monkeypatch):
  monkeypatch.setattr(pallas, "BLOCKS", ((8, 128),))
  batch = inputs(3, vocabulary=130)
  batch["hidden_ND"] = jnp.full_like(batch["hidden_ND"], jnp.nan)
  result = tpu.interpret(
    functools.partial(everything, entropy=True, impl="pallas"),
    batch["hidden_ND"],
    batch["embedding_VD"],
    batch["label_N"],
    jnp.zeros(3, bool),
    batch["temperature_N"],
  )
  jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), result)


def test_a_label_of_another_device_is_not_found_in_what_a_block_reads_past_the_end(monkeypatch):
  # 130 entries in blocks of 128: labels 130 and 255 are columns of the second block all the same.
  monkeypatch.setattr(pallas, "BLOCKS", ((8, 128),))
  batch = inputs(3, vocabulary=130)
  found = tpu.interpret(
    functools.partial(pallas.forward, soft_cap=None, entropy=False),
    batch["hidden_ND"],
    batch["embedding_VD"],
    jnp.array([[129], [130], [255]]),
    jnp.ones((3, 1)),
  )
  score = batch["hidden_ND"][0] @ batch["embedding_VD"][129]
  np.testing.assert_allclose(found.chosen_N1[:, 0], [score, 0.0, 0.0], rtol=1e-5)


@pytest.mark.parametrize("check", [True, False])
def test_a_vocabulary_split_over_devices_equals_the_whole(check):
  # 2 x 2 devices: rows over one axis, vocabulary over the other; 3 of 8 rows are padding.
  devices = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
  batch = inputs(8, vocabulary=22)
  mask_N = jnp.arange(8) % 3 != 1

  def run(hidden_ND, embedding_WD, label_N, mask_N, temperature_N):
    scored = token_logprob.token_logprob_split(
      hidden_ND,
      embedding_WD,
      label_N,
      mask_N,
      axis="tensor",
      temperature_N=temperature_N,
      entropy=True,
      chunk=3,
    )
    return scored.logp_N, scored.entropy_N

  split = jax.shard_map(
    run,
    mesh=devices,
    in_specs=(P("data"), P("tensor"), P("data"), P("data"), P("data")),
    out_specs=(P("data"), P("data")),
    check_vma=check,
  )

  def whole(hidden_ND, embedding_VD, label_N, mask_N, temperature_N):
    return token_logprob.token_logprob(
      hidden_ND,
      embedding_VD,
      label_N,
      mask_N,
      temperature_N=temperature_N,
      entropy=True,
      impl="ref",
    )

  def gradients(function):
    def of(hidden_ND, embedding_VD, temperature_N):
      logp_N, entropy_N = function(hidden_ND, embedding_VD, batch["label_N"], mask_N, temperature_N)
      row_N = jnp.arange(1.0, 9)
      return jnp.sum(row_N * logp_N) + jnp.sum(jnp.sqrt(row_N) * entropy_N), (logp_N, entropy_N)

    arrays = (batch["hidden_ND"], batch["embedding_VD"], batch["temperature_N"])
    return jax.jit(jax.grad(of, argnums=(0, 1, 2), has_aux=True))(*arrays)

  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
  jax.tree.map(close, gradients(split), gradients(whole))


def test_auto_is_xla_here_and_pallas_is_refused():
  batch = inputs(3)
  chosen = token_logprob.token_logprob(**batch, entropy=False)
  named = token_logprob.token_logprob(**batch, entropy=False, impl="xla")
  np.testing.assert_array_equal(chosen.logp_N, named.logp_N)
  with pytest.raises(NotImplementedError, match="for TPU only and this is cpu"):
    token_logprob.token_logprob(**batch, entropy=False, impl="pallas")
  with pytest.raises(ValueError, match="cuda"):
    token_logprob.token_logprob(**batch, entropy=False, impl="cuda")


def test_rows_too_wide_for_fast_memory_are_refused_in_a_sentence():
  wide = jax.ShapeDtypeStruct((256, 100_000), jnp.float32)
  with pytest.raises(ValueError, match="D = 100000 features"):
    pallas.blocks(wide, wide)
  assert pallas.fits(*[jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)] * 2)  # Llama 3 70B


def test_gpu_gets_the_loop_over_tiles():
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(64, 1000).values()]
  run = jax.grad(functools.partial(loss, chunk=16), argnums=(0, 1))
  text = tpu.lower_for_gpu(run, *shapes)
  assert "stablehlo.while" in text and "tensor<64x1000xf32>" not in text


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(embedding_VD=jnp.zeros((6, 23))), "transpose a head"),
    (dict(label_N=jnp.zeros(2, jnp.int32)), "3 rows"),
    (dict(mask_N=jnp.ones(3)), "float32"),
    (dict(chunk=0), "chunk=0"),
  ],
)
def test_wrong_shapes_are_refused_in_a_sentence(change, message):
  with pytest.raises(ValueError, match=message):
    token_logprob.token_logprob(**(inputs(3) | change), entropy=False)
