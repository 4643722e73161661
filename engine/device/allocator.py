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
    """Turn on torch's expandable CUDA segments if the config asks for them.

    An environment variable that configures the allocator takes precedence. Call this function before the first tensor is created.

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
    """Return a function () -> number of the allocator's retries in this process so far, always 0 on a CPU.

    A retry frees the allocator's cache and asks the device for memory again.
    """
    if device.type != "cuda":
        return int  # 0: a CPU has no such allocator
    return lambda: int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
