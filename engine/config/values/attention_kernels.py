"""One record per `kernels.attention` choice: what it supports, on which device, and when `auto` takes it."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

AttentionKernelName = Literal["sdpa", "flash", "cudnn", "efficient", "varlen", "flex", "te", "blocks", "explicit"]

PLAIN_ALONE: frozenset[str] = frozenset()
WITHOUT_CAP = frozenset({"windows", "documents", "sinks", "parts"})
ALL = WITHOUT_CAP | {"softcap"}
"""What a kernel supports beyond causal attention: fields of AttentionPattern (`engine/config/quantities/attention_pattern.py`)."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The conditions under which `auto` takes a kernel; the first kernel in `ATTENTION_KERNELS` that meets its conditions wins.

    Attributes:
        is_half: True if the run's dtype must have 16 bits.
        capability: lowest GPU compute capability; None: a CPU or any GPU.
        capabilities: the only compute capabilities allowed; empty: all.
        torch: lowest torch version (major, minor).
        above_cudnn: cuDNN version, in torch's form, that the installed one must exceed.
        in_deterministic_mode: True if torch supports the kernel in deterministic mode too.
        for_plain: True if `auto` takes the kernel for plain causal attention too; False: only for other patterns.
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
    """One value of `kernels.attention`: what the kernel supports, and where its implementation is.

    Attributes:
        has: features beyond plain causal attention that it supports, by device type; a device that is missing is not supported.
        made_by: "module:name" of the factory that builds its `Kernel` (`engine/kernels/masked_attention.py`) from a mask, a scale
            and a logit cap; "": there is none. The module is imported on the first call, since `engine/config` is a lower layer.
        made_for: device type that the `Kernel` is built for; "": any, and torch refuses it on devices where it does not run.
        backend: torch's backend for plain causal attention; "": torch chooses one; None: torch's attention is not used.
        has_value_size: True if values may differ in size from queries and keys; otherwise values are padded with zeros.
        is_compiled: True if it is compiled as elementwise functions are, and has no other form.
        auto: conditions under which `auto` takes the kernel; None: never.
    """

    has: Mapping[str, frozenset[str]]
    made_by: str = ""
    made_for: str = ""
    backend: str | None = None
    has_value_size: bool = False
    is_compiled: bool = False
    auto: Auto | None = None

    @property
    def suits_plain(self) -> bool:
        """Whether `auto` may take it for plain causal attention."""
        return self.auto is not None and self.auto.for_plain

    def lacks(self, asked: frozenset[str]) -> str:
        """List the features in `asked` that the kernel supports on no device, as "no documents, sinks"; "" if it has all."""
        lacked = sorted(asked.difference(*self.has.values()))
        return f"no {', '.join(_WORDS.get(name, name) for name in lacked)}" if lacked else ""


_WORDS = {"softcap": "cap of the logits", "parts": "parts of a row"}

_CPU_FLASH = "triaxis.engine.kernels.masked_attention:CpuFlash"

ATTENTION_KERNELS: Mapping[str, AttentionKernel] = MappingProxyType(
    {
        # Torch itself prefers cuDNN's attention on these GPUs, from these versions on, and refuses it in deterministic mode.
        "cudnn": AttentionKernel(
            {"cuda": frozenset({"parts"})},
            made_by="triaxis.engine.kernels.cudnn_attention:Cudnn",
            made_for="cuda",
            backend="CUDNN_ATTENTION",
            auto=Auto(
                is_half=True,
                capabilities=((9, 0), (10, 0)),
                torch=(2, 11),
                above_cudnn=91500,
                in_deterministic_mode=False,
            ),
        ),
        "varlen": AttentionKernel(
            {"cpu": PLAIN_ALONE, "cuda": WITHOUT_CAP},
            made_by="triaxis.engine.kernels.flash_attention:Varlen",
            backend="FLASH_ATTENTION",
            auto=Auto(is_half=True, capability=(8, 0), for_plain=False),
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
        "flex": AttentionKernel(
            {"cuda": frozenset({"windows", "sinks", "softcap"})},
            made_by="triaxis.engine.kernels.flex_attention:Flex",
            made_for="cuda",
            has_value_size=True,
            is_compiled=True,
            auto=Auto(is_half=True, capability=(8, 0), torch=(2, 11), in_deterministic_mode=False, for_plain=False),
        ),
        "blocks": AttentionKernel(
            {"cpu": ALL, "cuda": ALL},
            made_by="triaxis.engine.kernels.block_attention:Blocks",
            has_value_size=True,
            auto=Auto(),
        ),
        "explicit": AttentionKernel({"cpu": ALL, "cuda": ALL}, has_value_size=True),
        "efficient": AttentionKernel({"cuda": PLAIN_ALONE}, backend="EFFICIENT_ATTENTION"),
        "te": AttentionKernel({"cuda": frozenset({"windows"})}),
        # Only decoding uses it; no configuration names it.
        "math": AttentionKernel({"cpu": PLAIN_ALONE, "cuda": PLAIN_ALONE}, backend="MATH", has_value_size=True),
    }
)
"""The records by name. Those that `auto` may take come in order of speed, fastest first; the last of them runs anywhere."""
