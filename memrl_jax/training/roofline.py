"""What a chip can do at best, and what each program asks of it: FLOPs and bytes, counted by hand.

XLA's own cost analysis counts the body of a scan once and does not see into kernels. A count here is
that of the busiest chip and a lower bound of its time: it takes matmuls at the peak of bfloat16 (what
TPUs use for float32 operands too), computing, reading and sending at the same time, and batches without
padding. Attention is causal, as if nothing were shared; shared prefixes make it less.

Letters: D width, H query heads, K key-value heads, d head width, M MLP width, L layers, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from memrl_jax.models.config import DecoderConfig
from memrl_jax.rollout import pack


class Chip(NamedTuple):
  """Published peaks: bfloat16 FLOP/s, bytes/s of its memory, bytes of memory, bytes/s it sends, and bytes/s
  that its host's link carries each way; None where nobody has published it."""

  flops: float
  memory_rate: float
  memory: float
  link_rate: float
  host_rate: float | None = None


# cloud.google.com/tpu/docs, pages v5e, v5p and v6e, which do not say how a chip is linked to its host; a
# link both ways at once sends half.
CHIPS = {
  "v5e": Chip(197e12, 819e9, 16e9, 200e9),
  "v5p": Chip(459e12, 2765e9, 95e9, 600e9),
  "v6e": Chip(918e12, 1640e9, 32e9, 400e9),
}
# By the name that a card gives itself: its siblings (PCIe, NVL, GH200) have other peaks. NVIDIA's data sheets,
# SXM, dense bfloat16; NVLink both ways at once sends half, and so does PCIe (64 GB/s of generation 4, 128 of 5).
GPUS = {
  "NVIDIA A100-SXM4-80GB": Chip(312e12, 2039e9, 80e9, 300e9, 32e9),
  "NVIDIA H100 80GB HBM3": Chip(989e12, 3350e9, 80e9, 450e9, 64e9),
  "NVIDIA H200": Chip(989e12, 4800e9, 141e9, 450e9, 64e9),
}


class Split(NamedTuple):
  """Chips along each axis of the mesh."""

  data: int
  fsdp: int
  tensor: int

  @property
  def rows(self) -> int:
    """Into how many parts a batch is cut."""
    return self.data * self.fsdp

  @property
  def weights(self) -> int:
    """Into how many parts the weights are cut."""
    return self.fsdp * self.tensor


class Work(NamedTuple):
  """Of one chip: FLOPs, bytes that its memory reads or writes, bytes that it sends to other chips, and
  bytes that cross the host's link in the direction that has more of them."""

  flops: float
  memory: float
  sent: float
  host: float = 0.0

  def seconds(self, chip: Chip) -> float:
    """The roofline: max(FLOPs / peak, bytes / rate, sent / rate). Williams et al. (CACM 2009).

    A host's link of unknown rate is taken to be no limit.
    """
    times = [self.flops / chip.flops, self.memory / chip.memory_rate, self.sent / chip.link_rate]
    return max(*times, self.host / chip.host_rate if chip.host_rate else 0.0)


class _Layer(NamedTuple):
  """Weights of a layer's matmuls, and the numbers that it writes for one token."""

  qkv: int
  out: int
  wide: int
  down: int
  whole: int  # numbers as wide as the model, which every tensor shard has
  cut: int  # numbers that the tensor axis splits

  @property
  def weights(self) -> int:
    return self.qkv + self.out + self.wide + self.down


def _layer(cfg: DecoderConfig) -> _Layer:
  heads, both = cfg.heads * cfg.head_dim, (cfg.heads + 2 * cfg.kv_heads) * cfg.head_dim
  D, M = cfg.dim, cfg.mlp_dim
  return _Layer(D * both, heads * D, 2 * D * M, M * D, 2 * D, both + heads + 3 * M)


def seen(cfg: DecoderConfig, length: int) -> float:
  """Keys that a token of a causal sequence sees, mean over tokens, summed over layers.

  Of T tokens the i-th sees i, in a local layer at most the window w: (T + 1) / 2, and
  (w (w + 1) / 2 + (T - w) w) / T for T > w.
  """

  def mean(window: int) -> float:
    w = min(window, length)
    return (w * (w + 1) / 2 + (length - w) * w) / length

  return sum(mean(cfg.sliding_window if local else length) for local in cfg.local_layers)


def kept(cfg: DecoderConfig, itemsize: int) -> int:
  """Bytes of one cached token: a key and a value in every layer."""
  return 2 * cfg.layers * cfg.kv_heads * cfg.head_dim * itemsize


def score(cfg: DecoderConfig, config: pack.PackConfig, split: Split, itemsize: int) -> Work:
  """Log-probs of one micro-batch: a forward pass, 2 FLOPs a weight and token, 4 H d a pair of tokens."""
  return _pass(cfg, config, split, itemsize, forward=1, again=0, backward=0)


def accumulate(
  cfg: DecoderConfig,
  config: pack.PackConfig,
  split: Split,
  itemsize: int,
  *,
  remat: str,
  trained: int,
  critic: bool = False,
  sequence: bool = False,
) -> Work:
  """The gradient of one micro-batch, added to the others: `trained` numbers of 4 bytes.

  Backward: twice the matmuls, 5 matmuls of attention for 2 (scores again), and the logits again. A critic
  is one more body, without logits. Offloaded, a layer's input and its attention go to the host and come back.
  """
  layer = _layer(cfg)
  again = {"none": 0, "some": layer.qkv + layer.out, "all": layer.qkv + layer.out + layer.wide}
  again["offload"] = again["all"]
  bodies = [
    _pass(cfg, config, split, itemsize, forward=1, again=again[remat], backward=1, scored=scored)
    for scored in ((True, False) if critic else (True,))
  ]
  work = Work(*map(sum, zip(*bodies, strict=True)))
  own, other = 4 * trained / split.weights, 4 * trained / split.tensor
  # A gradient is written, cut to the chip's own part, and added to the sum.
  sent = other * (split.fsdp - 1) / split.fsdp + 2 * own * (split.data - 1) / split.data
  host = 0.0
  if remat == "offload":
    cut = split.tensor if sequence else 1
    numbers = cfg.layers * (cfg.dim / cut + cfg.heads * cfg.head_dim / split.tensor)
    host = len(bodies) * itemsize * numbers * config.sequences * config.length / split.rows
  return Work(work.flops, work.memory + 2 * other + 3 * own, work.sent + sent, host)


def _pass(
  cfg: DecoderConfig,
  config: pack.PackConfig,
  split: Split,
  itemsize: int,
  *,
  forward: int,
  again: int,
  backward: int,
  scored: bool = True,
) -> Work:
  """`again`: weights of a layer whose matmuls the backward pass computes once more; `scored`: with logits."""
  layer, L = _layer(cfg), cfg.layers
  tokens = config.sequences * config.length / split.rows
  words = cfg.vocab if scored else 0
  targets = config.sequences * min(config.length, config.rows * config.response) / split.rows
  passes = forward + 2 * backward
  matmuls = 2 * tokens * L * (passes * layer.weights + again)
  pairs = tokens * seen(cfg, config.length)
  attention = 4 * cfg.heads * cfg.head_dim * pairs * (forward + 2.5 * backward)
  logits = 2 * targets * cfg.dim * words * (passes + backward)
  reads = passes + (again > 0)
  weights = itemsize * (L * layer.weights + cfg.dim * words) / split.tensor
  moved = 2 * itemsize * tokens * L * (layer.whole + layer.cut / split.tensor)
  gathers = weights * (forward + backward) * (split.fsdp - 1) / split.fsdp
  # Two sums over the tensor axis a layer and pass, of which the recomputation needs the first only.
  sums = 2 * (forward + backward) + (again > 0)
  ring = 2 * (split.tensor - 1) / split.tensor
  return Work(
    (matmuls + attention + logits) / split.tensor,
    reads * (weights + moved),
    gathers + sums * L * tokens * cfg.dim * itemsize * ring,
  )


def apply(split: Split, trained: int, weights: float, moments: float, *, offloaded: bool) -> Work:
  """AdamW: weights and moments read and written, the gradient's sum of 4 bytes a number read.

  weights, moments: bytes of a chip's part, in the types that they are kept in; a compensated update's
  remainders are among the moments. Offloaded, these are written and read once more as they come and go.
  """
  own = trained / split.weights
  moved = 2 * (weights + moments) + 4 * own
  if offloaded:
    return Work(15 * own, moved + 2 * moments, 0.0, moments)
  return Work(15 * own, moved, 0.0)


def prefill(
  cfg: DecoderConfig,
  rows: int,
  chunk: int,
  columns: int,
  split: Split,
  itemsize: int,
  *,
  in_place: bool,
) -> Work:
  """A chunk of every row behind `columns` cached ones. Every data shard computes the same rows.

  Unless a kernel reads the cache in place, scores and softmax weights, float32, are written and read. Of the
  last layer only the keys and values are wanted.
  """
  layer, whole, tokens = _layer(cfg), cfg.layers - 1, rows * chunk
  pairs = whole * tokens * (columns + chunk)
  read = whole * layer.weights + layer.qkv
  flops = 2 * tokens * read + 4 * cfg.heads * cfg.head_dim * pairs
  scores = 0 if in_place else 4 * 4 * cfg.heads * pairs
  weights = itemsize * read
  cached = kept(cfg, itemsize) * rows * (columns + chunk)
  return Work(
    flops / split.weights,
    weights / split.weights + (cached + scores) / split.tensor,
    _sums(cfg, tokens, split, itemsize),
  )


def decode(
  cfg: DecoderConfig,
  rows: int,
  steps: int,
  columns: int,
  split: Split,
  itemsize: int,
  *,
  in_place: bool,
) -> Work:
  """A round: `steps` tokens of every row, and, unless it reads the cache in place, a copy of that.

  At best a chip reads its own part of the weights in each step, and its rows and heads of the cache.
  """
  layer, L = _layer(cfg), cfg.layers
  body = L * layer.weights + cfg.dim * cfg.vocab
  cached = kept(cfg, itemsize) * rows * columns
  heads = split.tensor if cfg.kv_heads % split.tensor == 0 else 1
  cut = heads * (split.rows if rows % split.rows == 0 else 1)
  flops = 2 * rows * body / split.weights
  flops += 4 * L * cfg.heads * cfg.head_dim * rows * columns / cut
  copied = 0 if in_place else 2 * cached
  read = itemsize * body / split.weights + cached / cut
  return Work(steps * flops, copied + steps * read, steps * _sums(cfg, rows, split, itemsize))


def _sums(cfg: DecoderConfig, tokens: int, split: Split, itemsize: int) -> float:
  """Bytes that a chip sends for the two sums of a layer over the tensor axis, forward only."""
  ring = 2 * (split.tensor - 1) / split.tensor
  return 2 * cfg.layers * tokens * cfg.dim * itemsize * ring
