"""Imported once by the fork server: everything that ranks need, without running a single torch op.

What is missing here is imported by each rank of each test again: unpickling a rank's function imports the module that holds it.
"""

import gc
import importlib
import sys

import torch._dynamo
import torch.distributed
import torch.optim.adamw
import torch.testing  # noqa: F401

import tests.checkpoint.runs
import tests.harness
import tests.parity.cases  # noqa: F401
import triaxis.engine.train
import triaxis.launch.verify.oracle
import triaxis.launch.verify.rank
import triaxis.models.gpt.chunk  # noqa: F401
from tests.cuda_stub.environment import FOLDER

if sys.prefix == str(FOLDER):
    # Most ranks on the stub compile.
    importlib.import_module("torch._inductor.compile_fx")

# The ranks' collections leave alone what is here, so its pages stay shared.
gc.freeze()
