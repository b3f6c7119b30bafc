"""Images of a chat: parts of a message for a server that takes them, a line of text for who reads text only.

No model of this process takes an image, and no prompt of token ids can carry one. What is left out is never
left out silently: the prompt says so in place of the image, and `left_out` counts these lines.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from memrl_jax.types import Message

LEFT_OUT = "[An image belongs here. It was left out, because you are shown text only.]"
# A white square on black, 64 by 64: large enough for every model that takes images.
PROBE = (
  "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAJklEQVR42u3MAQ0AAAgD"
  "oPcvrQmcAQ4BSAAO8xAIBAKBQNAXALUWde/8LgGr+O4AAAAASUVORK5CYII="
)
_LOG = logging.getLogger("memrl_jax.sampling")


def count(messages: Sequence[Message]) -> int:
  """How many images the messages carry."""
  return sum(len(message.images) for message in messages)


def text_only(messages: Sequence[Message]) -> list[Message]:
  """The messages with a line in place of every image; those without any as they are."""
  return [
    Message(one.role, "\n".join([one.content, *[LEFT_OUT] * len(one.images)]))
    if one.images
    else one
    for one in messages
  ]


def left_out(messages: Sequence[Message]) -> int:
  """How many images `text_only` left out of these messages."""
  return sum(message.content.split("\n").count(LEFT_OUT) for message in messages)


def wire(message: Message) -> dict[str, Any]:
  """A message in OpenAI's JSON: plain text without images, else the text and each image as a part."""
  if not message.images:
    return {"role": message.role, "content": message.content}
  pictures = [{"type": "image_url", "image_url": {"url": url}} for url in message.images]
  return {
    "role": message.role,
    "content": [{"type": "text", "text": message.content}, *pictures],
  }


class TextOnly:
  """`text_only` for one model; the first image that it leaves out is told to the log, with the reason."""

  def __init__(self, why: str):
    self._why, self._said = why, False

  def __call__(self, messages: Sequence[Message]) -> list[Message]:
    if not self._said and count(messages):
      self._said = True
      say(self._why)
    return text_only(messages)


def say(why: str) -> None:
  """One sentence to whoever runs this; nothing else that happens to an image is as easy to overlook."""
  _LOG.warning("images are left out of prompts, a line stands in place of each: %s", why)
