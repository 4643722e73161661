"""A stand-in for Transformer Engine on a CPU: the functions that the engine calls, with TE's signatures, computed by torch.

`tests/engine/kernels/test_te_contract.py` compares the signatures with TE's own sources.
"""

__version__ = "2.20.2"
