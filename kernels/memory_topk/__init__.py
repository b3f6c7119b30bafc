"""The k best memories by similarity and utility, in one pass over the bank."""

from .ops import memory_topk
from .ref import MemoryTopk

__all__ = ["MemoryTopk", "memory_topk"]
