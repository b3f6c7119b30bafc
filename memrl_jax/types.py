"""Host records of a rollout, and the one device batch that training sees.

Glossary, one meaning each:
  task      one instance of an environment: (environment, seed). All its attempts replay it.
  group     the trials of one update that play the same task.
  trial     up to N attempts at one task, with what the agent remembers between them.
  attempt   one episode, from the initial state to its end.
  turn      one prompt and one sampled response; playing, reflecting, or about experience.
  row       a turn as training data: prompt ids + sampled ids.
  token     what the tokenizer makes; only sampled tokens carry loss.

Letters: B packed sequences, T positions, S rows in one sequence, K sampled tokens in a row, N segment ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, Literal, NamedTuple

import numpy as np

Phase = Literal["play", "reflect", "judge", "advise"]  # who advises is another model


class Message(NamedTuple):
  """One chat message; `role` is "system", "user" or "assistant".

  `images` go with it: data URLs (data:image/png;base64,...) or http addresses, for a model that takes them.
  """

  role: str
  content: str
  images: tuple[str, ...] = ()


class Sample(NamedTuple):
  """What a policy answered: the ids it read and sampled, and their log-probs when it sampled them.

  `logps` are nats under softmax(logits / temperature), one per id in `ids`; the stop id is kept.
  A scripted player leaves all arrays empty: such a turn can never be trained on. `forced`: how many of the
  last ids of the prompt are the beginning of the answer, which was put into the policy's mouth.
  """

  text: str
  prompt_ids: np.ndarray
  ids: np.ndarray
  logps: np.ndarray
  finish: str = "stop"
  temperature: float = 1.0
  forced: int = 0


class Recall(NamedTuple):
  """Read the memory: in which of its parts, and for what.

  `draw` says who asks, for a memory that draws lots: what it draws must not depend on who else asks, and when.
  """

  scope: str
  query: str
  draw: tuple[int, ...] = ()


class Memo(NamedTuple):
  """A memory as it was read: which entry, in which version, and what of it goes into the prompt.

  `score` is what it is known to be worth, in the units of the environment's reward; `similarity` of
  the query is a cosine. `images` go with the text, as in `Message`.
  """

  id: int
  version: int
  text: str
  score: float
  similarity: float
  images: tuple[str, ...] = ()


class Story(NamedTuple):
  """A finished trial as the extractor reads it: about what (`scope`, `query`), which entries guided it,
  as (entry, version), and the prompt. `verdict` is how the actor judged them: "", or accept, refine,
  reject."""

  scope: str
  query: str
  shown: tuple[tuple[int, int], ...]
  messages: list[Message]
  verdict: str = ""


@dataclasses.dataclass
class Turn:
  """One prompt and its response, with everything credit assignment needs."""

  attempt: int
  phase: Phase
  index: int
  messages: list[Message]
  sample: Sample
  action: str
  valid: bool
  reward: float
  anchor: str
  memory: tuple[str, ...] = ()
  key: str = ""  # under which a memory is asked about this turn, and remembers it
  reads: tuple[tuple[int, int], ...] = ()  # (entry, version) of the memories that were read for it
  trained: bool = True
  sampled: bool = True  # False: the answer was put into the policy's mouth
  here: bool = True  # False: another host has its prompt and log-probs, and trains on it
  plain: list[Message] | None = None  # the prompt without memories, where training is to see that
  plain_ids: np.ndarray | None = None  # its ids; None: trained on the prompt it was sampled from
  intrinsic: float = 0.0  # novelty reward, beside `reward`
  imitate: float = 0.0  # weight with which `plain` is also trained to give this very answer
  advantage: float | None = None  # None: not in the batch. 0.0: in it, without a policy gradient.
  value: float = 0.0  # the critic's estimate at the end of the prompt, 0 without a critic
  value_target: float = 0.0
  advantage_terms: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def prompt_ids(self) -> np.ndarray:
    """The prompt that training sees."""
    return self.sample.prompt_ids if self.plain_ids is None else self.plain_ids


@dataclasses.dataclass
class Attempt:
  """How one attempt ended. `score` is 0-1 progress, `success` the environment's own verdict."""

  success: bool
  score: float
  reward: float
  turns: int


@dataclasses.dataclass
class Trial:
  """Up to N attempts at one task. `void` names the failure of a trial that must not be trained on.

  `mode` is how a method with a memory uses it in this trial, `subgroup` those of its group that
  it is compared with, `task` the stable name of the task and its variation, known once the environment is
  open, `tip` what the agent wrote about the trial, `story` what a second model will read about it,
  and `update` when it was played.
  """

  env: str
  seed: int
  group: int
  index: int
  turns: list[Turn] = dataclasses.field(default_factory=list)
  attempts: list[Attempt] = dataclasses.field(default_factory=list)
  void: str | None = None
  mode: str = ""
  subgroup: str = ""
  task: str = ""
  tip: str = ""
  story: Story | None = None
  update: int = 0

  @property
  def name(self) -> str:
    """Unique in a run."""
    return f"{self.update}.{self.group}.{self.index}"

  def success_by(self, attempts: int) -> bool:
    """Whether one of the first `attempts` attempts succeeded (sequential, cumulative)."""
    return any(attempt.success for attempt in self.attempts[:attempts])

  def to_json(self, with_ids: bool = True) -> dict[str, Any]:
    """A JSON-ready record; ids and log-probs exactly as sampled."""
    return {
      "env": self.env,
      "seed": self.seed,
      "group": self.group,
      "index": self.index,
      "mode": self.mode,
      "task": self.task,
      "tip": self.tip,
      "void": self.void,
      "attempts": [dataclasses.asdict(attempt) for attempt in self.attempts],
      "turns": [_turn_json(turn, with_ids) for turn in self.turns],
    }


def _turn_json(turn: Turn, with_ids: bool) -> dict[str, Any]:
  record = {
    "attempt": turn.attempt,
    "phase": turn.phase,
    "index": turn.index,
    "messages": [[message.role, message.content] for message in turn.messages],
    "text": turn.sample.text,
    "finish": turn.sample.finish,
    "action": turn.action,
    "valid": turn.valid,
    "reward": turn.reward,
    "anchor": turn.anchor,
    "memory": list(turn.memory),
    "key": turn.key,
    "reads": [list(read) for read in turn.reads],
    "intrinsic": turn.intrinsic,
    "off_policy": turn.plain is not None,
    "trained": turn.trained,
    "advantage": turn.advantage,
    "advantage_terms": turn.advantage_terms,
  }
  pictured = [
    {"message": number} | image_reference(url)
    for number, message in enumerate(turn.messages)
    for url in message.images
  ]
  if pictured:
    record["images"] = pictured
  if with_ids:
    record |= {
      "prompt_ids": turn.sample.prompt_ids.tolist(),
      "ids": turn.sample.ids.tolist(),
      "logps": [float(value) for value in turn.sample.logps],
    }
  return record


def image_reference(url: str) -> dict[str, str]:
  """What a record keeps of an image, which may have megabytes: its kind, and the SHA-256 of its URL's text."""
  kind = url[len("data:") :].partition(",")[0].partition(";")[0] if url.startswith("data:") else ""
  return {"media_type": kind, "sha256": hashlib.sha256(url.encode()).hexdigest()}


class TokenBatch(NamedTuple):
  """Packed rows of one micro-batch; every array leads with B, so B alone is sharded.

  The tokens of a sequence form a forest of segments, each a stretch of tokens that the same rows
  share; a row is the path from a root to the token before its last one, which is only a target.
  Segment ids are 1, 2, ... in depth-first order (0 is padding) and `parent_BN[b, n]` is the segment
  that segment n continues, 0 for none. A token sees the tokens before it in its own segment and in
  the segments that lead to it. Without `parent_BN` every segment stands alone.

  `gather_BSK[b, s, k]` is the position in `tokens_BT[b]` whose hidden state predicts
  `target_BSK[b, s, k]`; rows that branch there share it. `mask_BSK` is True exactly on sampled
  tokens, the stop token included.
  """

  tokens_BT: Any
  segment_BT: Any
  position_BT: Any  # depth in the tree, which is the position in the row
  gather_BSK: Any
  target_BSK: Any
  mask_BSK: Any
  behaviour_BSK: Any  # log-probs recorded when sampled, nats
  advantage_BS: Any
  temperature_BS: Any
  value_target_BS: Any  # returns for a critic; zeros without one
  value_index_BS: Any  # position of the row's last prompt token, where a critic reads the state
  parent_BN: Any = None
  off_BS: Any = None  # True: sampled with memories in the prompt that `tokens_BT` leaves out
  imitate_BS: Any = None  # True: the loss is -advantage log pi, whatever the surrogate
  forced_BS: Any = None  # True: nobody sampled the tokens, so they estimate no KL
