"""How the experience bank of Complementary RL is searched, kept and turned into training samples."""

from __future__ import annotations

import dataclasses

CHOICES = {
  "key": ("entry", "query"),
  "evict": ("fifo", "utility"),
  "cooled": ("return", "drop"),
}


@dataclasses.dataclass(frozen=True)
class ExperienceConfig:
  """How experience is found, kept and turned into training samples.

  key: what is searched, the "entry" itself (paper) or the "query" of the episode that led to it
    (release). pool: entries looked at for each that is shown. window: an entry shown fewer steps ago is
    recent; 0: none is. sample: draw by softmax of s instead of taking the best.
  evict: beyond `capacity` entries of a scope the oldest goes, or by "utility" the one whose readers
    earned least; an untried one counts as average.
  cool_down: in updates of the extractor; they stand still while fewer than `batch` samples have cooled
    down, so trials must read some cool_down * batch different generations (`stats`: "cooling").
    cooled: samples that cool down "return" to the buffer or "drop".
  batch: samples an update. buffer: how many may wait.
  merge_every: in steps of the actor, 0: never; merge_lanes: how many chains of chunks there are (paper: 1,
    one chunk after the other). chars: what is kept of a text. cache: embeddings that are kept.
  """

  key: str = "entry"
  top: int = 1
  lambda_: float = 0.4
  pool: int = 16
  window: int = 1
  sample: bool = False
  seed: int = 0
  capacity: int = 20_000
  evict: str = "fifo"
  alpha: float = 0.5
  cool_down: int = 3
  cooled: str = "return"
  batch: int = 64
  buffer: int = 256
  merge_every: int = 5
  merge_chunk: int = 5
  merge_lanes: int = 1
  max_ops: int = 3
  chars: int = 4000
  cache: int = 8192

  def __post_init__(self):
    for name, allowed in CHOICES.items():
      if getattr(self, name) not in allowed:
        raise ValueError(
          f"{name} {getattr(self, name)!r} is not known; choose one of {', '.join(allowed)} "
          f"(config.experience.{name})"
        )
    for name in ("top", "pool", "capacity", "batch", "merge_lanes", "max_ops", "chars", "cache"):
      if getattr(self, name) < 1:
        raise ValueError(
          f"{name} is {getattr(self, name)}; it must be at least 1 (config.experience.{name})"
        )
    for name in ("lambda_", "window", "alpha", "cool_down", "merge_every"):
      if not getattr(self, name) >= 0:
        raise ValueError(
          f"{name} is {getattr(self, name)}; it must not be negative (config.experience.{name})"
        )
    if self.merge_chunk < 2:
      raise ValueError(
        f"a chunk of {self.merge_chunk} has nothing to merge; show at least 2 entries "
        "(config.experience.merge_chunk)"
      )
    if self.buffer < self.batch:
      raise ValueError(
        f"a buffer of {self.buffer} never holds a batch of {self.batch}; choose buffer >= batch "
        "(config.experience.buffer, config.experience.batch)"
      )
