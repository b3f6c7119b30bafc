"""Kernels, imported as `memrl_kernels`: each folder is one operation.

`ref.py` is its definition, `xla.py` the same in bounded memory for any platform, `pallas.py` for
TPU, and `ops.py`, of the same signature, chooses. `target.py` knows where the code will run.
"""
