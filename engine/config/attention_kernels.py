"""One record per choice of `kernels.attention`: what it has, where, and when `auto` takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

AttentionKernelName = Literal["sdpa", "flash", "cudnn", "efficient", "varlen", "te", "blocks", "explicit"]

PLAIN_ALONE: frozenset[str] = frozenset()
WITHOUT_CAP = frozenset({"windows", "documents", "sinks", "parts"})
ALL = WITHOUT_CAP | {"softcap"}
"""Fields of `triaxis.engine.config.attention_kinds.AttentionPattern`."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The facts on which `auto` takes a choice before those of later rows.

    Attributes:
        is_half: the run's dtype has 16 bits.
        capability: the lowest compute capability of a GPU; None: a CPU or any GPU.
        capabilities: the only ones; empty: all.
        torch: the lowest version (major, minor).
        above_cudnn: cuDNN is newer than this version, in torch's form.
        in_deterministic_mode: torch has it there too.
        for_plain: also where causal attention alone is asked.
    """

    is_half: bool = False
    capability: tuple[int, int] | None = None
    capabilities: tuple[tuple[int, int], ...] = ()
    torch: tuple[int, int] = (0, 0)
    above_cudnn: int = -1
    in_deterministic_mode: bool = True
    for_plain: bool = True


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """The abilities of a choice, and where it is found.

    Attributes:
        has: the fields of a pattern that it computes, by type of device.
        made_by: "module:name" of what makes its `Kernel` (`engine/kernels/masked_attention.py`) from a mask, a scale and a cap of
            the logits; "": it has none. It is imported when it is called, since this room is below.
        made_for: type of the device for which that is made; "": for any, and torch refuses it where it does not run.
        backend: name of torch's backend for causal attention alone; "": torch chooses; None: that is done by its own kernel too.
        has_value_size: takes values of another size than queries and keys; for others they are padded with zeros.
        auto: when `auto` takes it; None: never.
    """

    has: Mapping[str, frozenset[str]]
    made_by: str = ""
    made_for: str = ""
    backend: str | None = None
    has_value_size: bool = False
    auto: Auto | None = None

    def lacks(self, asked: frozenset[str]) -> str:
        """Return what is asked and it has on no device, as "no documents, sinks"; "": nothing."""
        lacked = sorted(asked.difference(*self.has.values()))
        return f"no {', '.join(_WORDS.get(name, name) for name in lacked)}" if lacked else ""


_WORDS = {"softcap": "cap of the logits", "parts": "parts of a row"}

_CPU_FLASH = "triaxis.engine.kernels.masked_attention:CpuFlash"

ATTENTION_KERNELS: Mapping[str, AttentionKernel] = MappingProxyType(
    {
        "varlen": AttentionKernel(
            {"cpu": PLAIN_ALONE, "cuda": WITHOUT_CAP},
            made_by="triaxis.engine.kernels.flash_attention:varlen",
            backend="FLASH_ATTENTION",
            auto=Auto(is_half=True, capability=(8, 0), for_plain=False),
        ),
        # Torch itself puts cuDNN's attention first on these GPUs, from these versions on, and refuses it in deterministic mode.
        "cudnn": AttentionKernel(
            {"cuda": PLAIN_ALONE},
            backend="CUDNN_ATTENTION",
            auto=Auto(
                is_half=True,
                capabilities=((9, 0), (10, 0)),
                torch=(2, 11),
                above_cudnn=91500,
                in_deterministic_mode=False,
            ),
        ),
        "flash": AttentionKernel(
            {"cpu": WITHOUT_CAP, "cuda": PLAIN_ALONE},
            made_by=_CPU_FLASH,
            made_for="cpu",
            backend="FLASH_ATTENTION",
            auto=Auto(is_half=True, capability=(8, 0)),
        ),
        "sdpa": AttentionKernel(
            {"cpu": WITHOUT_CAP, "cuda": PLAIN_ALONE}, made_by=_CPU_FLASH, made_for="cpu", backend="", auto=Auto()
        ),
        "blocks": AttentionKernel(
            {"cpu": ALL, "cuda": ALL},
            made_by="triaxis.engine.kernels.masked_attention:Blocks",
            has_value_size=True,
            auto=Auto(),
        ),
        "explicit": AttentionKernel({"cpu": ALL, "cuda": ALL}, has_value_size=True),
        "efficient": AttentionKernel({"cuda": PLAIN_ALONE}, backend="EFFICIENT_ATTENTION"),
        "te": AttentionKernel({"cuda": frozenset({"windows"})}),
        # For decoding alone, which no configuration names.
        "math": AttentionKernel({"cpu": PLAIN_ALONE, "cuda": PLAIN_ALONE}, backend="MATH", has_value_size=True),
    }
)
"""The records, those that `auto` takes in the order of their speed; the last of these runs anywhere."""
