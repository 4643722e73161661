"""Configures torch's CUDA allocator at startup, and counts how often it ran short of memory."""

import sys
import warnings
from collections.abc import Callable, Mapping

import torch

from triaxis.engine.config.schema.run import RuntimeConfig

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables with which users configure torch's allocator: today's name, then older ones. Each torch version reads some of them."""


def set_up_allocator(
    config: RuntimeConfig,
    variables: Mapping[str, str],
    device: torch.device,
    apply: Callable[[str], None] | None = None,
    allocate: Callable[[torch.device], object] | None = None,
) -> None:
    """Turn on torch's expandable CUDA segments if the config asks for them and this node has them.

    With such segments, torch 2.13's first allocation ends with an error where the driver knows nothing about NVLink fabrics
    (pytorch issue 186374). So one is tried here, and after an error the segments are turned off and a line is printed.
    An environment variable that configures the allocator takes precedence. Call this function before the first tensor is created.

    Args:
        config: the run's runtime section.
        variables: the environment.
        device: this rank's device.
        apply: function that passes settings to the allocator; None: torch's own.
        allocate: function that allocates memory on a device; None: torch's.
    """
    if not config.expandable_segments or any(variables.get(name) for name in ALLOCATOR_VARIABLES):
        return
    apply = apply or _to_the_allocator
    apply("expandable_segments:True")
    try:
        (allocate or _allocate)(device)
    except torch.OutOfMemoryError:
        return  # the next allocation reports it, with what holds the memory
    except RuntimeError as error:
        apply("expandable_segments:False")
        print(
            f"note: {device} has no expandable segments: the first allocation with them failed ({str(error).splitlines()[0]}). The "
            "run goes on without them, and may lose more memory to fragmentation. A newer driver or torch may have them; "
            "runtime.expandable_segments=false leaves this trial out.",
            file=sys.stderr,
        )


def _allocate(device: torch.device) -> None:
    torch.empty(1, device=device)


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
    # Not `memory_stats`, which flattens all statistics in Python.
    return lambda: int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))
