"""Attention of one new token a row over keys and values in a cache of ragged lengths."""

from .ops import decode_attention
from .ref import Part, merge

__all__ = ["Part", "decode_attention", "merge"]
