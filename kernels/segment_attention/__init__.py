"""Attention within packed rows whose segments may share prefixes (a tree of segments a row)."""

from .ops import segment_attention

__all__ = ["segment_attention"]
