"""How MemRL uses its memory in trials, and what of that goes with which memory."""

from __future__ import annotations

import dataclasses

from memrl_jax.memory.episodic_config import EpisodicConfig

CHOICES = {
  "query": ("goal", "observation", "goal_observation"),
  "note": ("story", "tip"),
  "scope": ("env", "task"),
  "judges": ("none", "retrieve", "relevance", "both"),
  "retry": ("all", "unsolved"),
}


@dataclasses.dataclass(frozen=True)
class MemrlConfig:
  """query: what a task is filed and searched under. note: how the model sums an attempt up: asked for a
  plan or a lesson about the "story" of it, or for a "tip" in the notation of its environment, which is then
  all that is stored (the tiny models).

  reads, writes, learns: whether memories are shown, attempts become memories, and Q moves. scope: one memory
    for the "env" (of a mix: for each part), or one for each "task", of earlier attempts at that very one.
  judges: the model says whether it wants memories ("retrieve"), of each whether it is relevant
    ("relevance"), or "both" (Self-RAG without training).
  retry: whether later rounds play "all" tasks or only the "unsolved" ones; the others count as solved and
    cost nothing (Pass@k, Reflexion).
  """

  attempts: int = 1
  eval_attempts: int = 1
  query: str = "goal_observation"
  note: str = "story"
  reads: bool = True
  writes: bool = True
  learns: bool = True
  scope: str = "env"
  judges: str = "none"
  retry: str = "all"

  def __post_init__(self):
    if self.attempts < 1 or self.eval_attempts < 1:
      raise ValueError(
        f"MemRL plays at least 1 attempt in a trial, not {self.attempts} in training and "
        f"{self.eval_attempts} in evaluation (config.method.attempts, config.method.eval_attempts)"
      )
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.method.{name})"
        )
    if not self.reads and (self.learns or self.judges != "none"):
      raise ValueError(
        "where no memories are shown none is judged and nothing is learned about them; set "
        "config.method.learns=false and config.method.judges=none, or config.method.reads=true"
      )
    if self.judges != "none" and self.note == "tip":
      raise ValueError(
        "the notation of the tiny models has no words to judge memories in; set config.method.judges to "
        "none, or config.method.note to story"
      )


def check(config: MemrlConfig, how: EpisodicConfig, tasks: int) -> None:
  """Whether method and memory go together in a run that rounds over `tasks`; ValueError if not."""
  if (config.note == "tip") != (how.build == "note"):
    raise ValueError(
      "an environment's own notation for tips and memories that hold nothing else go together; set "
      "config.method.note=tip with config.episodic.build=note, or neither"
    )
  if how.gamma > 0 and config.attempts == 1 and not how.trace:
    raise ValueError(
      "after the only attempt of a trial there is no next state, so gamma would do nothing; set "
      "config.method.attempts above 1, config.episodic.trace above 0, or config.episodic.gamma to 0"
    )
  if config.retry == "unsolved" and not tasks:
    raise ValueError(
      "only a run that rounds over tasks of its own meets one again; set config.train.tasks, or "
      "config.method.retry to all"
    )
