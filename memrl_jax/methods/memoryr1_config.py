"""The values of the Memory-R1-like manager (2508.19828)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class MemoryR1Config:
  """How the manager is paid.

  attempts: an agent's, before and after the operation. eval_attempts: in an evaluation, from the same memories.
  teach: so many updates first teach the words of the operations, whatever they earn, to a model that does not follow
    the request by itself: every operation is as good as the others. teach_rate: learning rate of these.
  reward: the agent's "success" afterwards, or its "score". show: memories that the manager and the agent read.
  settled: an operation that is not likelier is not pushed down any more: what is put into the manager's mouth does
    not become rarer as it becomes unlikely, and its logit would fall for ever.
  """

  attempts: int = 2
  eval_attempts: int = 1
  teach: int = 0
  teach_rate: float = 1e-5
  reward: str = "success"
  show: int = 3
  settled: float = 0.01

  def __post_init__(self):
    if self.attempts != 2:
      self._refuse("attempts", "it plays once before and once after the operation; leave it 2")
    if self.reward not in ("success", "score"):
      self._refuse("reward", "choose one of success, score")
    for name in ("teach", "teach_rate"):
      if getattr(self, name) < 0:
        self._refuse(name, "it must not be negative")
    for name in ("eval_attempts", "show"):
      if getattr(self, name) < 1:
        self._refuse(name, "it must be at least 1")
    if not 0 <= self.settled < 0.25:
      self._refuse("settled", "of four operations one is always likelier than a quarter: 0 to .25")

  def _refuse(self, name: str, why: str) -> None:
    raise ValueError(f"{name} is {getattr(self, name)!r}; {why} (config.method.{name})")
