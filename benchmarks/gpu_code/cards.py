"""The GPUs for which code is written and assembled without one: what inductor and Triton ask a device for."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from triaxis.engine.kernels.fp8.products import FIRST_CAPABILITY
from triaxis.models.predict.device import load_device


@dataclass(frozen=True, slots=True)
class Card:
    """A compute capability, and a device of it.

    Attributes:
        device: of configs/devices.
        shared_bytes: shared memory that one block may have.
        l2_bytes: of the second-level cache.
    """

    capability: tuple[int, int]
    device: str
    shared_bytes: int
    l2_bytes: int

    @property
    def arch(self) -> int:
        """Return the capability as one number, 90 for (9, 0)."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def has_fp8(self) -> bool:
        """Return whether the card multiplies FP8 numbers; triton makes no others for it."""
        return self.capability >= FIRST_CAPABILITY

    def properties(self) -> SimpleNamespace:
        """Return what `torch.cuda.get_device_properties` would: its fields, and no more."""
        device, (major, minor) = load_device(self.device), self.capability
        return SimpleNamespace(
            name=self.device,
            major=major,
            minor=minor,
            multi_processor_count=device.processors,
            total_memory=int(device.memory_gb * 1e9),
            warp_size=32,
            max_threads_per_block=1024,
            max_threads_per_multi_processor=2048,
            regs_per_multiprocessor=65536,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=self.shared_bytes,
            shared_memory_per_multiprocessor=self.shared_bytes + 1024,
            L2_cache_size=self.l2_bytes,
            gcnArchName="",
        )


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; second-level caches: white papers of A100 and H100.
CARDS: Mapping[str, Card] = {
    "sm_90": Card((9, 0), "H100-SXM-80GB", 227 << 10, 50 << 20),
    "sm_80": Card((8, 0), "A100-SXM-80GB", 163 << 10, 40 << 20),
}


@contextmanager
def pretended(card: Card) -> Iterator[None]:
    """Let torch answer as if the card were its only GPU; no tensor can be computed on it.

    Caches of torch keep the answers, so one process pretends one card and does nothing else.
    """
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers

    properties, seed = card.properties(), torch.zeros(16, dtype=torch.uint8)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: card.capability,
        "get_rng_state": lambda device=0: seed,
        "set_rng_state": lambda state, device=0: None,
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    with ExitStack() as patches:
        for name, answer in answers.items():
            patches.enter_context(patch.object(torch.cuda, name, answer))
        patches.enter_context(patch.object(CudaInterface, "get_device_properties", answers["get_device_properties"]))
        patches.enter_context(patch.object(torch.version, "cuda", "13.0"))
        # A build for CPUs lacks this one; generated code imports it.
        patches.enter_context(patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        patches.enter_context(patch.object(triton_helpers, "set_driver_to_gpu", lambda: None))
        yield
