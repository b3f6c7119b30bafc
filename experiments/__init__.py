"""Experiments: one file a claim; `run.py` is the way in."""
