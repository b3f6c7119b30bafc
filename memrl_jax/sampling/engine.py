"""The engine: requests in, sampled ids with their log-probs out, by continuous batching.

A round admits what waits into free slots, computes the prompts' keys and values that no slot holds
yet, and decodes every live row for a bounded number of steps. Requests that begin alike share that
beginning: it is computed once and, where that is cheaper, read by all of them in one place. The host
decides with NumPy arrays, in a fixed order; all device work runs in few shapes, so that nothing
compiles after `warmup`.

Letters: S slots, R rows of one call, N steps of a round (or tokens of a prefill chunk), P lanes of W
rows that read a shared beginning.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from memrl_kernels import target

from memrl_jax.models import decoder, policy
from memrl_jax.models.config import DecoderConfig
from memrl_jax.sampling import cache as slot_cache
from memrl_jax.sampling import programs, sampler
from memrl_jax.sampling import requests as requests_lib
from memrl_jax.sampling.programs import compiled as compiled
from memrl_jax.sampling.requests import Completion, EngineConfig, Request, Stats

_MIN_SHARE = 8  # tokens that waiting for another request's prefill must save
_WANTED = 1 << 40  # rounds by which a slot with somebody's prefix looks younger
_FILLED = 1.34  # a prefill chunk may be this much longer than what is left to compute
_MAX_LEVEL = 2  # how often such waits may follow each other


class _Fill(NamedTuple):
  """Prompt tokens start..end-1 of a slot that still have to be computed."""

  slot: int
  start: int
  end: int


class _Split(NamedTuple):
  """A round in which rows read a common beginning, W rows a lane, and how much of it is copied."""

  common: programs.Common
  columns: int  # of the leads
  own: int  # of the rows


class _Plan(NamedTuple):
  """How a request gets its prompt: `shared` columns from `source`, the rest up to `length` computed.

  Level 0 reads slots as they were before the wave; level n waits for what level n - 1 fills. `moves`
  are the copies to make for it.
  """

  slot: int
  source: int
  shared: int
  length: int
  level: int
  moves: list[slot_cache.Move]


class Engine:
  """Continuous batching of one policy. Not thread-safe: one caller drives it."""

  def __init__(
    self,
    cfg: DecoderConfig,
    params: policy.Params,
    config: EngineConfig,
    *,
    in_place: bool | None = None,
  ):
    """`in_place`: the slot cache is read where it lies, not copied for each round; None: where there
    are kernels for it. See `programs`."""
    self.cfg, self.config = cfg, config
    self.in_place = programs.reads_in_place(params) if in_place is None else in_place
    self.stats = Stats()
    S = config.slots
    self._rows = programs.Rows(
      *(np.zeros(S, np.int32) for _ in range(4)),
      key=np.zeros((S, 2), np.uint32),
      temperature=np.ones(S, np.float32),
      top_p=np.ones(S, np.float32),
      top_k=np.zeros(S, np.int32),
      stop=np.full((S, config.max_stop), -1, np.int32),
    )
    self._ticket_S = np.full(S, -1, np.int64)
    self._used_S = np.zeros(S, np.int64)  # round in which a slot was last used
    self._ids_SC = np.zeros((S, config.buckets[-1]), np.int32)
    self._logps_SC = np.zeros((S, config.buckets[-1]), np.float32)
    self._waiting: collections.deque[tuple[int, Request]] = collections.deque()
    self._tickets = 0
    self._cache: slot_cache.SlotCache | None = None
    self.version = -1
    self.set_params(params)

  @property
  def pending(self) -> int:
    """Requests that wait or run."""
    return len(self._waiting) + int(np.sum(self._ticket_S >= 0))

  def set_params(self, params: policy.Params) -> None:
    """Use other weights from now on, and forget every cached prefix: it belongs to the old ones.

    `version` counts the weights; what is cached is always that of the present ones.
    """
    running = int(np.sum(self._ticket_S >= 0))
    if running:
      raise ValueError(
        f"{running} requests are half sampled; run the engine until they end before new weights"
      )
    self._weights = None  # gone before the others come
    self._params = None if self.in_place else params
    self._mesh = target.mesh_of(params["embedding"])
    self._weights = programs.weights(self.cfg, params, in_place=self.in_place)
    self.version += 1
    self._reset()

  def _reset(self) -> None:
    """An empty cache, and no memory of which slot was used when.

    What comes next then depends on nothing that went before: a resumed run samples what an
    uninterrupted one does, bit for bit.
    """
    self._used_S[:] = 0
    if self._cache is not None:
      self._cache.clear()
      return
    config = self.config
    weight = self._weights.embedding_VD
    # In place a wide array costs no time, so there is nothing to grow for.
    buckets = config.buckets[-1:] if self.in_place else config.buckets
    self._cache = slot_cache.SlotCache(
      self.cfg, config.slots, buckets, config.round_steps, weight.dtype, weight.sharding,
      apart=self.in_place,
    )  # fmt: skip

  def submit(self, request: Request) -> int:
    """Queue a request; its ticket comes back from `run_round` with the completion."""
    prompt = requests_lib.check(request, self.cfg, self.config)
    self._waiting.append((self._tickets, request._replace(prompt=prompt)))
    self._tickets += 1
    return self._tickets - 1

  def generate(self, requests: Sequence[Request]) -> list[Completion]:
    """Complete all requests, in their order."""
    return requests_lib.generate(self, requests)

  def run_round(self) -> list[tuple[int, Completion]]:
    """Admit, prefill, decode at most `round_steps` tokens a row; what has finished comes back."""
    self._admit()
    return self._decode()

  def warmup(self) -> None:
    """Compile every shape; takes seconds, and leaves an empty cache of the smallest bucket."""
    if self.pending:
      raise ValueError(f"{self.pending} requests are in flight; warm up an idle engine")
    config = self.config
    self._cache = None
    self._reset()
    buckets = self._cache.buckets
    for allocated in buckets:
      self._cache.warm_growth(allocated)
      for columns in (bucket for bucket in buckets if bucket <= allocated):
        for size in config.round_rows:
          slot_R = np.zeros(size, np.int32)
          self._run_decode(slot_R, 0, columns, None)
          for own in config.own_columns(columns) if config.can_share(size) else ():
            lanes = _no_lanes(size, config.share)
            common = programs.Common(lanes.member_PW[:, 0], lanes, slot_R)
            self._run_decode(slot_R, 0, columns, _Split(common, columns, own))
        for size in config.prefill_rows:
          for chunk in config.prefill_chunks:
            none = np.zeros((0, chunk), np.int32)
            self._run_prefill(none[:, 0], none[:, 0], none, size, columns)
            if chunk == config.prefill_chunks[-1]:
              self._run_prefill(none[:, 0], none[:, 0], none, size, 0)
        self._cache.warm_clone(columns)
    self._cache = None
    self._reset()

  def _admit(self) -> None:
    """Move waiting requests into free slots, oldest first, and compute their prompts."""
    count = min(len(self._waiting), int(np.sum(self._ticket_S < 0)))
    wave = [self._waiting.popleft() for _ in range(count)]
    if not wave:
      return
    self._cache.reserve(max(len(request.prompt) + request.max_tokens for _, request in wave))
    plans = self._plan([request.prompt[:-1] for _, request in wave])
    for (ticket, request), plan in zip(wave, plans, strict=True):
      self._occupy(plan.slot, ticket, request)
    for level in range(1 + max(plan.level for plan in plans)):
      now = [plan for plan in plans if plan.level == level]
      moves = [move for plan in now for move in plan.moves]
      if moves:
        self._cache.clone(moves)
      self._fill([_Fill(plan.slot, plan.shared, plan.length) for plan in now])
    slots = [plan.slot for plan in plans if plan.source != plan.slot]
    self.stats = self.stats._replace(
      reused=self.stats.reused + sum(plan.shared for plan in plans),
      in_place=self.stats.in_place + int(self._cache.base_S[slots].sum()),
    )

  def _plan(self, prefixes: list[np.ndarray]) -> list[_Plan]:
    """Give every prompt of a wave a slot and the slot that shares most of its first tokens.

    Prompts with the longest match choose first. A free slot with the longest match is taken as it
    is; otherwise the free slot that is wanted least and was used longest ago follows the busy slot
    that has the columns, or gets a copy of them where they are a small part of the prompt. A slot
    that is filled in this wave can be a source too, one level later, where that saves at least
    _MIN_SHARE tokens: equal prompts are computed once.
    """
    cache, config = self._cache, self.config
    length_W = np.array([len(prefix) for prefix in prefixes])
    prefix_WP = np.full((len(prefixes), length_W.max() + 1), -2, np.int32)
    prefix_WP[np.arange(prefix_WP.shape[1]) < length_W[:, None]] = np.concatenate(prefixes)
    match_WS = np.stack([cache.match(prefix_P) for prefix_P in prefix_WP])
    wanted_S = np.bincount(match_WS.argmax(axis=1), minlength=config.slots) > 0
    free_S = self._ticket_S < 0
    ready_S = np.zeros(config.slots, np.int32)  # the level at which a slot can be read
    open_W = np.ones(len(prefixes), bool)
    plans: dict[int, _Plan] = {}
    for index in np.argsort(-match_WS.max(axis=1), kind="stable"):
      match_S = match_WS[index]
      settled = int(np.max(match_S, where=ready_S == 0, initial=0))
      late_S = (ready_S > 0) & ((ready_S > _MAX_LEVEL) | (match_S < settled + _MIN_SHARE))
      match_S = np.where(late_S, 0, match_S)
      shared = int(match_S.max())
      best_S = match_S == shared
      if shared and np.any(best_S & free_S):
        slot = source = int(np.argmin(np.where(best_S & free_S, self._used_S, np.inf)))
      else:
        cost_S = np.where(wanted_S, self._used_S + _WANTED, self._used_S)
        slot = int(np.argmin(np.where(free_S, cost_S, np.inf)))
        source = int(np.argmin(np.where(best_S, ready_S, np.inf))) if shared else slot
      level, length = int(ready_S[source]), int(length_W[index])
      free_S[slot], ready_S[slot] = False, level + 1
      open_W[index] = False
      if len(cache.followers(slot)):
        keep = shared if slot == source else 0
        needed_S = ~free_S | np.any(match_WS[open_W] > keep, axis=0)
        handed, forgotten = cache.hand_over(slot, keep, needed_S)
        if handed:
          cache.clone(handed)
        match_WS[:, forgotten] = np.minimum(match_WS[:, forgotten], keep)
      moves = []
      if slot == source:
        cache.shorten(slot, shared)
      else:
        in_place = config.share > 0 and shared >= max(_MIN_SHARE, length // 2)
        moves = cache.follow(slot, source, shared, in_place=in_place)
      plans[index] = _Plan(slot, source, shared, length, level, moves)
      cache.record(slot, prefixes[index])
      match_WS[:, slot] = cache.match(prefix_WP, slot)
    return [plans[index] for index in range(len(prefixes))]

  def _occupy(self, slot: int, ticket: int, request: Request) -> None:
    rows = self._rows
    self._ticket_S[slot] = ticket
    rows.token[slot], rows.length[slot] = request.prompt[-1], len(request.prompt) - 1
    rows.done[slot], rows.budget[slot] = 0, request.max_tokens
    rows.key[slot] = request.key
    rows.temperature[slot], rows.top_p[slot] = request.temperature, request.top_p
    rows.top_k[slot] = request.top_k
    rows.stop[slot] = -1
    rows.stop[slot, : len(request.stop)] = request.stop

  def _fill(self, todo: list[_Fill]) -> None:
    """Compute prompts in calls of few shapes: longest first, a large chunk only where all fill it."""
    rows, chunks = self.config.prefill_rows, self.config.prefill_chunks
    todo = [fill for fill in todo if fill.start < fill.end]
    while todo:
      todo.sort(key=lambda fill: fill.start - fill.end)
      part = todo[: rows[-1]]
      size = next(size for size in rows if size >= len(part))
      shortest = part[-1].end - part[-1].start
      fitting = [chunk for chunk in chunks if chunk <= _FILLED * shortest]
      chunk = max(fitting, default=chunks[0])
      slot_R = np.array([fill.slot for fill in part], np.int32)
      # Near the end of the cache a chunk starts earlier and computes some columns again.
      start_R = np.array([fill.start for fill in part], np.int32)
      start_R = np.minimum(start_R, self._cache.width - chunk)
      tokens_RN = self._cache.tokens_SC[slot_R[:, None], start_R[:, None] + np.arange(chunk)]
      first = chunk == chunks[-1] and not start_R.any()
      columns = 0 if first else self._cache.bucket(int(start_R.max()))
      self._run_prefill(slot_R, start_R, np.maximum(tokens_RN, 0), size, columns)
      useful = sum(min(chunk, fill.end - fill.start) for fill in part)
      self.stats = self.stats._replace(
        prefilled=self.stats.prefilled + useful,
        padded=self.stats.padded + size * chunk - useful,
      )
      ahead = [fill._replace(start=fill.start + chunk) for fill in part]
      todo = [fill for fill in ahead + todo[len(part) :] if fill.start < fill.end]

  def _run_prefill(
    self,
    slot_R: np.ndarray,
    start_R: np.ndarray,
    tokens_RN: np.ndarray,
    size: int,
    columns: int,
  ) -> None:
    more = (0, size - len(slot_R))
    slot_R, start_R = np.pad(slot_R, more), np.pad(start_R, more)
    tokens_RN = np.pad(tokens_RN, (more, (0, 0)))
    if self.in_place:
      cache = self._cache
      common = cache.lead_S[slot_R], cache.base_S[slot_R]
      new = programs.prefill_in_place(
        self._weights, self.cfg, cache.kv, slot_R, common, start_R, tokens_RN, mesh=self._mesh
      )
    else:
      context = self._cache.fetch_stacked(slot_R, columns) if columns else None
      new = programs.prefill(self._params, self.cfg, context, start_R, tokens_RN)
    self._cache.store(slot_R, start_R, size - more[1], new)

  def _decode(self) -> list[tuple[int, Completion]]:
    """One round of all live rows; the completions of those that ended."""
    live_R = np.flatnonzero(self._ticket_S >= 0).astype(np.int32)
    if not len(live_R):
      return []
    rows = self._rows
    columns = self._cache.bucket(int(rows.length[live_R].max()))
    size = next(size for size in self.config.round_rows if size >= len(live_R))
    slot_R = np.pad(live_R, (0, size - len(live_R)), mode="edge")
    split = self._split(live_R, slot_R, columns)
    if split is None:
      self._cache.settle(live_R)
    result = self._run_decode(slot_R, len(live_R), columns, split)
    token_RN, logp_RN, taken_R, stopped_R = (array[: len(live_R)] for array in result[:4])
    if not np.isfinite(logp_RN).all():
      self._cache = None  # what is not finite would spoil even columns that nobody may see
      raise FloatingPointError("the policy's logits are not finite; look at the weights")

    row, step = np.nonzero(np.arange(self.config.round_steps) < taken_R[:, None])
    slot, at = live_R[row], rows.done[live_R][row] + step
    self._ids_SC[slot, at] = token_RN[row, step]
    self._logps_SC[slot, at] = logp_RN[row, step]
    fed_RN = np.concatenate([rows.token[live_R, None], token_RN[:, :-1]], axis=1)
    self._cache.append(slot, rows.length[slot] + step, fed_RN[row, step])
    rows.token[live_R] = token_RN[np.arange(len(live_R)), taken_R - 1]
    rows.length[live_R] += taken_R
    rows.done[live_R] += taken_R
    rows.budget[live_R] -= taken_R
    self._used_S[live_R] = self.stats.rounds
    self.stats = self.stats._replace(
      rounds=self.stats.rounds + 1,
      steps=self.stats.steps + int(result[4]),
      sampled=self.stats.sampled + int(taken_R.sum()),
    )
    ended_R = stopped_R | (rows.budget[live_R] == 0)
    return [
      self._release(int(slot), "stop" if stopped else "length")
      for slot, stopped in zip(live_R[ended_R], stopped_R[ended_R], strict=True)
    ]

  def _split(self, live_R: np.ndarray, slot_R: np.ndarray, columns: int) -> _Split | None:
    """How the live rows read shared beginnings in place; None where copies are cheaper."""
    cache, config, size = self._cache, self.config, len(slot_R)
    lead_R = cache.lead_S[live_R]
    if not config.can_share(size) or not np.any(lead_R != live_R):
      return None
    W, length_R = config.share, self._rows.length[live_R]
    base_S = np.zeros(config.slots, np.int32)
    np.maximum.at(base_S, lead_R, cache.base_S[live_R])
    # A lead reads what its followers read; a row that nobody follows puts all it has in a lane.
    alone_R = (lead_R == live_R) & (base_S[live_R] == 0)
    base_R = np.where(lead_R == live_R, base_S[live_R], cache.base_S[live_R])
    base_R = np.where(alone_R, length_R, base_R)
    order = np.argsort(lead_R, kind="stable")
    index = np.arange(len(order))
    starts = np.diff(lead_R[order], prepend=-1) != 0
    rank = index - np.maximum.accumulate(np.where(starts, index, 0))
    lane = np.cumsum(rank % W == 0) - 1
    shared, own = cache.bucket(int(base_R.max())), int((length_R - base_R).max())
    own = next((width for width in config.own_columns(shared) if width >= own), None)
    P = size // W
    if lane[-1] >= P:
      return None
    if not self.in_place and (own is None or P * shared + size * own >= size * columns):
      return None
    lead_P, member_PW = np.zeros(P, np.int32), np.zeros((P, W), np.int32)
    lead_P[lane], member_PW[lane, rank % W] = lead_R[order], order
    place_R = np.zeros(len(order), np.int32)
    place_R[order] = lane * W + rank % W
    more = (0, size - len(live_R))
    place_R, base_R = (np.pad(array, more, mode="edge") for array in (place_R, base_R))
    common = programs.Common(lead_P, decoder.Lanes(member_PW, place_R), base_R)
    return _Split(common, shared, own)

  def _run_decode(
    self, slot_R: np.ndarray, count: int, columns: int, split: _Split | None
  ) -> tuple[np.ndarray, ...]:
    smaller = [size for size in self.config.round_rows if size < len(slot_R)]
    floor = max(smaller, default=0)
    if self._waiting:  # somebody takes the place of those who end
      floor = max(floor, count - 1 - count // 4)
    rows = programs.Rows(*(array[slot_R] for array in self._rows))
    uniform_RN2 = sampler.uniforms(rows.key, rows.done, self.config.round_steps)
    controls = rows, uniform_RN2, np.int32(count), np.int32(floor)
    cache = self._cache
    if self.in_place:
      sampled, fresh = programs.decode_in_place(
        self._weights,
        self.cfg,
        cache.kv,
        slot_R,
        *controls,
        split and split.common,
        mesh=self._mesh,
      )
    else:
      context, shared = self._copied(slot_R, columns, split)
      sampled, fresh = programs.decode(
        self._weights, self.cfg, context, *controls, shared, mesh=self._mesh
      )
    cache.store(slot_R, rows.length, count, fresh)
    return jax.device_get(sampled)

  def _copied(
    self, slot_R: np.ndarray, columns: int, split: _Split | None
  ) -> tuple[list[decoder.KV], policy.Shared | None]:
    """What the rows read on their own, and together."""
    if split is None:
      return self._cache.fetch(slot_R, columns), None
    lead_P, lanes, base_R = split.common
    context, offset_R = [], base_R
    if split.own:
      context, offset_R = self._cache.fetch_from(slot_R, base_R, split.own)
    blocks = self._cache.fetch(lead_P, split.columns)
    return context, policy.Shared(blocks, lanes, base_R, offset_R)

  def _release(self, slot: int, finish: str) -> tuple[int, Completion]:
    ticket, done = int(self._ticket_S[slot]), self._rows.done[slot]
    self._ticket_S[slot] = -1
    ids, logps = self._ids_SC[slot, :done].copy(), self._logps_SC[slot, :done].copy()
    return ticket, Completion(ids, logps, finish)


def _no_lanes(rows: int, width: int) -> decoder.Lanes:
  return decoder.Lanes(np.zeros((rows // width, width), np.int32), np.zeros(rows, np.int32))
