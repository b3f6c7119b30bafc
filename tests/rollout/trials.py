"""Hand-made trials for tests of credit and packing."""

import numpy as np

from memrl_jax.types import Attempt, Message, Sample, Trial, Turn


def sample(prompt=(1, 2, 3), ids=(4, 5), temperature=1.0) -> Sample:
  logps = -0.5 * np.arange(1, len(ids) + 1, dtype=np.float32)
  return Sample(
    "x", np.array(prompt, np.int32), np.array(ids, np.int32), logps, "stop", temperature
  )


def turn(attempt, phase, index, reward=0.0, anchor="s", valid=True, **kw) -> Turn:
  anchor = "reflect" if phase == "reflect" else anchor
  return Turn(
    attempt,
    phase,
    index,
    [Message("user", "q")],
    kw.pop("sample", sample()),
    "a",
    valid,
    reward,
    anchor,
    **kw,
  )


def trial(group, index, rewards, anchors=None, success=False) -> Trial:
  """A trial from rewards per attempt, with a reflection between two attempts."""
  out = Trial("test", group, group, index)
  for a, attempt in enumerate(rewards):
    for t, reward in enumerate(attempt):
      anchor = anchors[a][t] if anchors else f"{a}.{t}"
      out.turns.append(turn(a, "play", t, reward, anchor))
    last = a == len(rewards) - 1
    out.attempts.append(Attempt(success and last, 0.0, sum(attempt), len(attempt)))
    if not last:
      out.turns.append(turn(a, "reflect", 0))
  return out
