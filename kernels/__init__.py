"""Kernels, imported as `memrl_kernels`: each folder is one operation, `ref.py` is its definition."""
