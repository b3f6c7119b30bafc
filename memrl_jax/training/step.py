"""The training step: gradients of open sums over micro-batches and devices, divided once, one update.

The same program runs on one device or a mesh: batches are split along their leading axis, the sums
of the loss and of its count run over all of it. Buffers of gradients and state are donated.

Of each trained weight a device holds its part of: the weight, two moments, and, from the first
micro-batch to the update, the gradient's sum. The update makes no other copy of any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from memrl_jax.models import policy
from memrl_jax.models import spread as spread_lib
from memrl_jax.models.config import DecoderConfig
from memrl_jax.ops import masks, ratios
from memrl_jax.training import mesh as meshes
from memrl_jax.training import objective, precision
from memrl_jax.types import TokenBatch

SCHEDULES = ("constant", "cosine")
MODELS = ("policy", "critic")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
  """AdamW. Units: learning rates per optimiser step; warm-up in optimiser steps.

  update: how bfloat16 weights are moved (`precision`), "stochastic" or "compensated"; "plain" for float32.
  moments: dtype of the first moment: "bfloat16" saves 2 bytes a weight and rounds it, in every step, by up to
    1/512. The second, which moves by thousandths, stays float32.
  """

  learning_rate: float = 1e-6
  critic_learning_rate: float = 1e-5
  schedule: str = "constant"
  warmup: int = 0
  beta1: float = 0.9
  beta2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  clip_norm: float = 1.0
  update: str = "plain"
  moments: str = "float32"

  def __post_init__(self):
    for name, known in (("update", tuple(precision.UPDATES)), ("moments", precision.MOMENTS)):
      if getattr(self, name) not in known:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(known)} "
          f"(config.optim.{name})"
        )
    if self.schedule not in SCHEDULES:
      raise ValueError(
        f"schedule {self.schedule!r} is not known; choose one of {', '.join(SCHEDULES)} "
        "(config.optim.schedule)"
      )
    if self.learning_rate < 0 or self.critic_learning_rate < 0 or self.clip_norm <= 0:
      raise ValueError("learning rates must be >= 0 and clip_norm > 0 (config.optim)")
    if self.warmup < 0 or self.weight_decay < 0:
      raise ValueError("warmup and weight_decay must be >= 0 (config.optim)")


class TrainState(NamedTuple):
  """params holds "policy" and, for PPO, "critic"; opt_state is that of a `precision.Stepper`."""

  params: dict[str, Any]
  opt_state: Any


class Sums(NamedTuple):
  """What micro-batches add up to before one optimiser step."""

  grads: dict[str, Any]
  policy: masks.Open
  value: masks.Open
  metrics: dict[str, masks.Open]
  gap_max: jax.Array  # largest |trainer - sampler| log-prob, nats


def optimiser(
  config: OptimConfig,
  total_steps: int,
  first: tuple[int, float] = (0, 0.0),
  models: Sequence[str] = MODELS,
) -> optax.GradientTransformation:
  """Clipping over all weights of a model together, then AdamW on its schedule.

  first: so many steps at this rate come before it. models: those that it has a state for.
  """

  def adamw(peak: float) -> optax.GradientTransformation:
    return optax.chain(
      optax.clip_by_global_norm(config.clip_norm),
      optax.adamw(
        after(first, learning_rate(config, peak, total_steps - first[0])),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mu_dtype=None if config.moments == "float32" else config.moments,
      ),
    )

  rates = {"policy": config.learning_rate, "critic": config.critic_learning_rate}
  return optax.partition(
    {name: adamw(rates[name]) for name in models},
    lambda params: {name: jax.tree.map(lambda _, n=name: n, tree) for name, tree in params.items()},
  )


def after(first: tuple[int, float], schedule: optax.Schedule) -> optax.Schedule:
  """The schedule, behind a number of steps at a constant rate."""
  steps, rate = first
  return (
    optax.join_schedules([optax.constant_schedule(rate), schedule], [steps]) if steps else schedule
  )


def learning_rate(config: OptimConfig, peak: float, total_steps: int) -> optax.Schedule:
  """Linear warm-up from 0, then constant or cosine to a tenth of the peak."""
  rest = max(total_steps - config.warmup, 1)
  after = {
    "constant": optax.constant_schedule(peak),
    "cosine": optax.cosine_decay_schedule(peak, rest, alpha=0.1),
  }[config.schedule]
  warm = optax.linear_schedule(0.0, peak, max(config.warmup, 1))
  return optax.join_schedules([warm, after], [config.warmup]) if config.warmup else after


def init_critic(params: Any, cfg: DecoderConfig) -> dict[str, Any]:
  """A critic: a copy of the policy's body, and a value head that starts at zero."""
  return {"body": jax.tree.map(jnp.copy, params), "value": jnp.zeros(cfg.dim)}


def critic_values(
  critic: dict[str, Any],
  cfg: DecoderConfig,
  batch: TokenBatch,
  *,
  spread: spread_lib.Spread | None = None,
  **kw,
) -> jax.Array:
  """V [B, S]: the critic's estimate of the return at the end of each row's prompt."""
  hidden_BTD = policy.hidden(
    critic["body"],
    cfg,
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    batch.parent_BN,
    spread=spread,
    **kw,
  )
  return policy.gather(hidden_BTD, batch.value_index_BS, spread) @ critic["value"]


class Trainer:
  """The jitted functions of one model, loss and mesh; holds no state that training changes.

  It trains what is there of the policy and its critic: both, or one, and the other elsewhere (`apart`).
  With adapters, what is trained is not the weights: `join(base, trained)` makes the weights of the
  policy inside every function, and only `trained` has gradients and an optimiser. `keep`: `update` leaves
  the old state readable, and holds both for a moment. compute: dtype of every forward and backward pass
  (`precision.computing`). update: a name of `precision.UPDATES`. layout: what of its section concerns
  training; `mesh` is made already.
  """

  def __init__(
    self,
    cfg: DecoderConfig,
    loss: objective.LossConfig,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    max_tokens: int,
    remat: bool | str = True,
    keep: bool = False,
    base: Any | None = None,
    join: Callable[[Any, Any], Any] | None = None,
    compute: str = "",
    update: str = "plain",
    layout: meshes.MeshConfig | None = None,
  ):
    layout = layout or meshes.MeshConfig()
    self.cfg, self.loss, self.mesh, self._rules = cfg, loss, mesh, layout.table
    self._base = {} if base is None else meshes.place_params(mesh, base, self._rules)
    self._join = (lambda base, trained: trained) if join is None else join
    self._steps, self._max_tokens = precision.UPDATES[update](tx), max_tokens
    self._compute, self._offloaded = compute, "moments" in layout.offload
    spread = spread_lib.Spread(mesh, meshes.placement(mesh, self._rules), layout.sequence)
    self._how = {
      "spread": spread if mesh.size > 1 else None
    }  # of every pass through the layers; a gradient's also has:
    self._kept = {"remat": remat, **self._how}
    self._accumulate = meshes.jit(mesh, self._accumulate_fn, donate_argnums=2)
    self.apply = meshes.jit(mesh, self._apply_fn, donate_argnums=() if keep else 0)
    self._zeros = meshes.jit(mesh, self._zeros_fn)
    self._score = meshes.jit(mesh, self._score_fn)
    self._old = meshes.jit(mesh, self._old_fn)
    self._values = meshes.jit(mesh, self._values_fn)
    self.health = meshes.jit(mesh, self._health_fn)

  def init(self, params: Any | None, critic: Any | None) -> TrainState:
    """Places the weights on the mesh and starts the optimiser; of shapes, says where they would lie."""
    given = {"policy": params, "critic": critic}
    tree = {name: given[name] for name in MODELS if given[name] is not None}
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
      placed = meshes.place_params(self.mesh, tree, self._rules)
      moments = jax.eval_shape(self._steps.init, tree)
    else:
      # Copies: the state is donated, and the caller's arrays must survive that.
      placed = meshes.place_params(self.mesh, jax.tree.map(jnp.array, tree), self._rules)
      moments = self._steps.init(placed)
    memory = meshes.HOST if self._offloaded else None
    moments = meshes.place_params(self.mesh, moments, self._rules, memory=memory)
    return TrainState(placed, moments)

  def compiled(self) -> int:
    """Programs compiled so far; must not grow after the first update."""
    jitted = (self._accumulate, self.apply, self._zeros, self._score, self._old, self._values)
    return sum(function._cache_size() for function in (*jitted, self.health))

  def score(self, params: Any, batches: Sequence[TokenBatch]) -> list[jax.Array]:
    """Log-probs [B, S, K] of the sampled tokens under `params`, one array per micro-batch.

    They stay on the device and nothing waits for them, as in `update`.
    """
    return [self._score(self._base, params, self._place(batch)) for batch in batches]

  def old(self, params: Any, batches: Sequence[TokenBatch], *, off: bool) -> list[jax.Array] | None:
    """pi_old's log-probs as the loss wants them, before the first optimiser step changes `params`.

    None where they are all as recorded. Rows that were sampled with tips and are trained without
    have those of the sampler, or those of `params` without tips (`off_policy`). `off`: there are such rows,
    on this host or another.
    """
    off = off and self.loss.off_policy == "without_tips"
    if self.loss.old_logps == "sampler" and not off:
      return None
    return [self._old(self._base, params, self._place(batch)) for batch in batches]

  def values(self, critic: Any, batches: Sequence[TokenBatch]) -> list[jax.Array]:
    """The critic's estimates [B, S], one array per micro-batch."""
    return [self._values(critic, self._place(batch)) for batch in batches]

  def update(
    self,
    state: TrainState,
    batches: Sequence[TokenBatch],
    old: Sequence[jax.Array] | None = None,
    ref: Sequence[jax.Array] | None = None,
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step over the micro-batches; `state` is consumed, unless made with `keep`.

    Args:
      old: pi_old's log-probs recomputed by the trainer, if the loss asks for them.
      ref: the reference policy's log-probs, if there is a KL term.
    """
    return self.apply(state, self.sums(state.params, batches, old, ref))

  def sums(
    self,
    params: dict[str, Any],
    batches: Sequence[TokenBatch],
    old: Sequence[jax.Array] | None = None,
    ref: Sequence[jax.Array] | None = None,
  ) -> Sums:
    """What the micro-batches of an `update` add up to."""
    sums = self._zeros(params)
    for i, batch in enumerate(batches):
      sums = self._accumulate(
        self._base,
        params,
        sums,
        self._place(batch),
        self._place(batch.behaviour_BSK if old is None else old[i]),
        self._place(batch.behaviour_BSK if ref is None else ref[i]),
      )
    return sums

  def gradients(self, params: Any, batches: Sequence[TokenBatch]) -> Any:
    """The gradient of the closed loss, for tests and inspection."""
    return _closed(self.sums(params, batches))

  def lower(self, params: Any, batch: TokenBatch) -> jax.stages.Lowered:
    """The program of a micro-batch's gradient, to look into; shapes are enough."""
    behaviour = batch.behaviour_BSK
    sums = self._shapes(params)
    return self._accumulate.lower(self._base, params, sums, batch, behaviour, behaviour)

  def lowered(self, state: TrainState, batch: TokenBatch) -> dict[str, jax.stages.Lowered]:
    """The programs of an update, from what `init` makes of shapes and from a batch's shapes."""
    batch = meshes.place_batch(self.mesh, batch)
    apply = self.apply.lower(state, self._shapes(state.params))
    return {"accumulate": self.lower(state.params, batch), "apply": apply}

  def _shapes(self, params: Any) -> Any:
    """The shapes of a gradient's sums, where they lie."""
    return meshes.place_params(self.mesh, jax.eval_shape(self._zeros_fn, params), self._rules)

  def _place(self, tree: Any) -> Any:
    return meshes.place_batch(self.mesh, tree)

  def _computing(self, params: Any) -> Any:
    """Weights as a pass through the layers takes them: narrow before they are gathered, not after."""
    return self._pinned(precision.computing(params, self._compute)) if self._compute else params

  def _score_fn(self, base, params, batch):
    weights = self._computing(self._join(base, params))
    return policy.logprobs(weights, self.cfg, batch, entropy=False, **self._how)[0]

  def _old_fn(self, base, params, batch):
    fresh_BS = jnp.where(
      _off(batch), self.loss.off_policy == "without_tips", self.loss.old_logps == "trainer"
    )
    fresh_BSK = self._score_fn(base, params, batch)
    return jnp.where(fresh_BS[..., None], fresh_BSK, batch.behaviour_BSK)

  def _values_fn(self, critic, batch):
    return self._critic(critic, batch, **self._how)

  def _critic(self, critic, batch, **how):
    body = self._computing(critic["body"])
    return critic_values(critic | {"body": body}, self.cfg, batch, **how)

  def _zeros_fn(self, params) -> Sums:
    zero = masks.Open(jnp.zeros(()), jnp.zeros(()))
    names = []
    if "policy" in params:
      names = [*objective.metric_names(self.loss), "train/logp_gap"]
      names += ["train/truncated"] if self.loss.old_logps == "trainer" else []
    grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), params)  # float32, of any weights
    return self._pinned(Sums(grads, zero, zero, dict.fromkeys(names, zero), jnp.zeros(())))

  def _loss_fn(self, params, base, batch: TokenBatch, old_BSK, ref_BSK):
    """The total of the policy's loss and of the critic's; their weights are disjoint."""
    nothing = masks.Open(jnp.zeros(()), jnp.zeros(()))
    loss, value, metrics, gap = nothing, nothing, {}, jnp.zeros(())
    if "policy" in params:
      loss, metrics, gap = self._policy_loss(params["policy"], base, batch, old_BSK, ref_BSK)
    total = loss.total
    if "critic" in params:
      value = self._value_loss(params["critic"], batch)
      total = total + self.loss.value_coef * value.total
    return total, (loss, value, metrics, gap)

  def _value_loss(self, critic, batch: TokenBatch) -> masks.Open:
    value_BS = self._critic(critic, batch, **self._kept)
    row_BS = jnp.any(batch.mask_BSK, axis=2)
    return objective.value_loss(*(x.reshape(-1) for x in (value_BS, batch.value_target_BS, row_BS)))

  def _policy_loss(self, params, base, batch: TokenBatch, old_BSK, ref_BSK):
    """The open loss of the policy, its open metrics, and the largest gap between sampler and trainer."""
    B, S, K = batch.mask_BSK.shape
    weights = self._computing(self._join(base, params))
    logp_BSK, entropy_BSK = policy.logprobs(weights, self.cfg, batch, entropy=True, **self._kept)

    def rows(value_BSK):
      return value_BSK.reshape(B * S, K)

    mask_RK, logp_RK = rows(batch.mask_BSK), rows(logp_BSK)
    behaviour_RK, old_RK = rows(batch.behaviour_BSK), rows(old_BSK)
    off_R = _off(batch).reshape(B * S)
    on_RK = mask_RK & ~off_R[:, None]  # what the sampler and the trainer read alike
    weight_RK = jnp.ones_like(logp_RK)
    if self.loss.old_logps == "trainer":
      weight_RK = ratios.truncated_importance_weight(
        old_RK, behaviour_RK, on_RK, cap=self.loss.tis_cap
      )
    tokens = objective.Tokens(
      logp_RK,
      old_RK,
      weight_RK,
      rows(ref_BSK),
      rows(entropy_BSK),
      mask_RK,
      batch.advantage_BS.reshape(B * S),
      off_R,
      _flag(batch.imitate_BS, batch).reshape(B * S),
      _flag(batch.forced_BS, batch).reshape(B * S),
    )
    loss, metrics = objective.policy_loss(self.loss, tokens, max_tokens=self._max_tokens)
    gap_RK = jnp.abs(masks.keep(logp_RK, on_RK) - masks.keep(behaviour_RK, on_RK))
    metrics["train/logp_gap"] = masks.open_sum(gap_RK, on_RK)
    if self.loss.old_logps == "trainer":
      over_RK = ratios.token_ratio(old_RK, behaviour_RK, on_RK) > self.loss.tis_cap
      metrics["train/truncated"] = masks.open_sum(over_RK.astype(jnp.float32), on_RK)
    return loss, metrics, jnp.max(gap_RK)

  def _accumulate_fn(self, base, params, sums: Sums, batch, old_BSK, ref_BSK) -> Sums:
    grads, (loss, value, metrics, gap) = jax.grad(self._loss_fn, has_aux=True)(
      params, base, batch, old_BSK, ref_BSK
    )
    loss, value, metrics, gap = jax.lax.stop_gradient((loss, value, metrics, gap))
    added = Sums(
      jax.tree.map(jnp.add, sums.grads, grads),
      masks.add(sums.policy, loss),
      masks.add(sums.value, value),
      {name: masks.add(sums.metrics[name], mean) for name, mean in metrics.items()},
      jnp.maximum(sums.gap_max, gap),
    )
    return self._pinned(added)

  def _pinned(self, tree: Any) -> Any:
    """Keeps a result where the rules say: in another place it would compile its readers once more."""
    return jax.lax.with_sharding_constraint(tree, self._shardings(tree))

  def _shardings(self, tree: Any, **options) -> Any:
    return meshes.param_shardings(self.mesh, tree, self._rules, **options)

  def _health_fn(self, sums: Sums) -> jax.Array:
    """A number that is finite where all that an optimiser's step takes from `sums` is."""
    return sum(_norms(_closed(sums)).values()) + sums.policy.total

  def _apply_fn(
    self, state: TrainState, sums: Sums, *others: jax.Array
  ) -> tuple[TrainState, dict[str, jax.Array]]:
    """The optimiser's step; others: the `health` of what is trained elsewhere, which stops with it."""
    grads = _closed(sums)
    norms = _norms(grads)
    finite = jnp.isfinite(sum(norms.values()) + sums.policy.total + sum(others))
    if self._offloaded:
      here = self._shardings(state.opt_state, memory=meshes.DEVICE)
      state = state._replace(opt_state=jax.device_put(state.opt_state, here))
    fresh = TrainState(*self._steps.step(grads, state.opt_state, state.params))
    # A non-finite gradient must not touch the weights: the loop stops and can dump them.
    kept = jax.tree.map(lambda new, was: jnp.where(finite, new, was), fresh, state)
    kept = self._pinned(kept)
    if self._offloaded:
      there = self._shardings(kept.opt_state, memory=meshes.HOST)
      kept = kept._replace(opt_state=jax.device_put(kept.opt_state, there))
    metrics = {name: masks.close(mean) for name, mean in sums.metrics.items()}
    if "policy" in grads:
      metrics |= {
        "train/loss": masks.close(sums.policy),
        "train/grad_norm": norms["policy"],
        "train/logp_gap_max": sums.gap_max,
        "train/finite": finite.astype(jnp.float32),
      }
    if "critic" in grads:
      metrics |= {
        "train/value_loss": masks.close(sums.value),
        "train/critic_grad_norm": norms["critic"],
      }
    return kept, metrics


def _off(batch: TokenBatch) -> jax.Array:
  """Which rows were sampled from another prompt, bool [B, S]."""
  return _flag(batch.off_BS, batch)


def _flag(flag_BS: jax.Array | None, batch: TokenBatch) -> jax.Array:
  return jnp.zeros_like(batch.advantage_BS, bool) if flag_BS is None else flag_BS


def _closed(sums: Sums) -> dict[str, Any]:
  """Gradients of the means: each model's total divided by its own count."""
  counts = {"policy": sums.policy.count, "critic": sums.value.count}
  return {
    name: jax.tree.map(lambda leaf, n=name: leaf / jnp.maximum(counts[n], 1.0), tree)
    for name, tree in sums.grads.items()
  }


def _norms(grads: dict[str, Any]) -> dict[str, jax.Array]:
  return {name: optax.global_norm(tree) for name, tree in grads.items()}
