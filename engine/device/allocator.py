"""Torch's CUDA allocator: its setting at a start, and how often it ran short."""

import warnings
from collections.abc import Callable, Mapping

import torch

from triaxis.engine.config.run import RuntimeConfig

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""With which a user sets up torch's allocator: the name of today, those of before. Each version of torch reads some of them."""


def set_up_allocator(
    config: RuntimeConfig, variables: Mapping[str, str], apply: Callable[[str], None] | None = None
) -> None:
    """Let CUDA's segments grow, unless the user's environment sets up the allocator.

    It has to be done before the first tensor. It is not done by a variable: torch reads those while it is imported, which has
    happened where torchrun starts a rank, and 2.9 ignores the newer name for this option.

    Args:
        apply: hands settings to the allocator; None: torch's own.
    """
    if config.expandable_segments and not any(variables.get(name) for name in ALLOCATOR_VARIABLES):
        (apply or _to_the_allocator)("expandable_segments:True")


def _to_the_allocator(settings: str) -> None:
    with warnings.catch_warnings():
        # Newer versions warn of a newer name; this one works in each version.
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(settings)


def retry_counter(device: torch.device) -> Callable[[], int]:
    """Return what counts how often torch's allocator has had to free its cache and ask the device again."""
    if device.type != "cuda":
        return int  # 0: a CPU has no such allocator
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
