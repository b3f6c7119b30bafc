"""The values of Mem-pi (2605.21463). [S] is experiments/mempi.md, which says what is known and what is our definition."""

from __future__ import annotations

import dataclasses

from memrl_jax.ops import counterfactual

CHOICES = {
  "invocation": ("episode", "step"),
  "reward": ("success", "score"),
  "judge": ("success", "score"),
  "keep": ("all", "helped"),
  "gate": counterfactual.GATES,
}


@dataclasses.dataclass(frozen=True)
class MempiConfig:
  """When the memory policy is asked, what its bank is made of, and how both stages are paid.

  invocation: once an "episode", about what the agent sees first, or before every "step"; the bank, and with it
    stage 1, has what was seen then.
  reward: R(x, m) is the mean over `episodes` of the agent's success, or of its score.
  Bank. bank: a file of hints (memory.hintbank.read), or "": the first `gather` updates play for them. Their
    groups play tasks alone, write a hint, and play again with it. judge: a hint helped where it raised the agent's
    "success" [S], or its "score", which also counts a hint that brings the task on and not to its end. keep:
    whether "all" hints are imitated, and retrieved by the baseline, or those that "helped".
  Stage 1, the `distil` updates after, at the learning rate `distil_rate`. hints: drawn from the bank for an update. decisions: weight of the decision's
    cross-entropy (eta_d), whose labels are smoothed by `smoothing`; where nothing is known, or with 0, it is taught to speak, so smoothed as well.
  Stage 2, all others. gate, gate_above (delta_g), gate_temperature, normalise: ops.counterfactual.advantages.
    settled: a decision that is not likelier is not pushed down any more; 0 is the definition to the letter, under which
    the logit of a decision that was made long ago goes on falling. brevity: beta_len, what a hint of Lmax tokens costs; decision_weight, content_weight: w_d, w_c. Lmax is
    config.sampling.reflect_tokens.
  show: how many hints the baseline that retrieves from the bank gives; near: none of them whose context has a lower
    cosine with what is seen. eval_attempts: in an evaluation, with one
    hint for all.
  """

  attempts: int = 1
  eval_attempts: int = 1
  invocation: str = "episode"
  reward: str = "success"
  judge: str = "success"
  episodes: int = 1
  bank: str = ""
  gather: int = 0
  distil: int = 0
  distil_rate: float = 1e-5
  hints: int = 64
  keep: str = "all"
  decisions: float = 1.0
  smoothing: float = 0.1
  gate: str = "group"
  gate_above: float = 0.0
  gate_temperature: float = 0.1
  normalise: bool = True
  settled: float = 0.01
  brevity: float = 0.05
  decision_weight: float = 1.0
  content_weight: float = 1.0
  show: int = 3
  near: float = -1.0

  def __post_init__(self):
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        self._refuse(name, f"choose one of {', '.join(allowed)}")
    for name in ("eval_attempts", "episodes", "hints", "show"):
      self._need(name, getattr(self, name) >= 1, "it must be at least 1")
    self._need(
      "attempts", self.attempts == 1, "episodes says how often the agent plays; leave it 1"
    )
    for name in (
      "gather",
      "distil",
      "distil_rate",
      "brevity",
      "decisions",
      "decision_weight",
      "content_weight",
    ):
      self._need(name, getattr(self, name) >= 0, "it must not be negative")
    self._need("near", -1 <= self.near <= 1, "a cosine lies in [-1, 1]")
    self._need("smoothing", 0 <= self.smoothing < 0.5, "a smoothed label is still right: below .5")
    self._need("gate_temperature", self.gate_temperature > 0, "it must be above 0")
    self._need(
      "gather", not (self.bank and self.gather), "a bank is given; set one of them to nothing"
    )
    self._need(
      "distil", not self.distil or bool(self.bank or self.gather), "stage 1 needs a bank, or gather"
    )

  def _need(self, name: str, good: bool, why: str) -> None:
    if not good:
      self._refuse(name, why)

  def _refuse(self, name: str, why: str) -> None:
    raise ValueError(f"{name} is {getattr(self, name)!r}; {why} (config.method.{name})")

  def stage(self, update: int) -> str:
    """ "gather", "distil" or "adapt": what an update does."""
    if update < self.gather:
      return "gather"
    return "distil" if update < self.gather + self.distil else "adapt"
