"""Imported once by the fork server: everything that ranks need, without running a single torch op."""

import torch._dynamo
import torch.distributed
import torch.optim.adamw
import torch.testing  # noqa: F401

import engine.train  # noqa: F401
import models.gpt  # noqa: F401
