"""Configures torch's CUDA allocator at startup, and counts how often it ran short of memory."""

import warnings
from collections.abc import Callable, Mapping

import torch

from triaxis.engine.config.run import RuntimeConfig

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with which users configure torch's allocator: today's name, then older ones. Each torch version reads some of them."""


def set_up_allocator(
    config: RuntimeConfig, variables: Mapping[str, str], apply: Callable[[str], None] | None = None
) -> None:
    """Turn on torch's expandable CUDA segments if `config` says so and no environment variable configures the allocator.

    Call it before the first tensor is created. Setting an environment variable instead would not work: torch reads the variables
    during its import, before this function runs. Also, torch 2.9 ignores the newest variable name for this option.

    Args:
        config: the run's runtime section.
        variables: the environment.
        apply: function that passes settings to the allocator; None: torch's own.
    """
    if config.expandable_segments and not any(variables.get(name) for name in ALLOCATOR_VARIABLES):
        (apply or _to_the_allocator)("expandable_segments:True")


def _to_the_allocator(settings: str) -> None:
    with warnings.catch_warnings():
        # Newer versions warn that there is a newer name; this one works in every version.
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings(settings)


def retry_counter(device: torch.device) -> Callable[[], int]:
    """Return a function that counts how often torch's allocator had to free its cache and ask the device again."""
    if device.type != "cuda":
        return int  # 0: a CPU has no such allocator
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
