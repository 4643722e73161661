"""The `kernels` section: which implementation computes each operation."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from triaxis.engine.config.schema.moe import DispatchName
from triaxis.engine.config.schema.section import LAYOUT, OnResume, Section
from triaxis.engine.config.values.attention_kernels import AttentionKernelName


def _switch(value: object) -> object:
    """YAML reads the words on and off as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class KernelsConfig(Section):
    """The implementation for each operation. `auto` takes the fastest that runs on the device; the banner names it."""

    on_resume: ClassVar[OnResume | None] = LAYOUT

    attention: Literal["auto", AttentionKernelName] = Field(
        "auto",
        description="sdpa: torch chooses; blocks, explicit: operators; others: that",
    )
    elementwise: Literal["auto", "eager", "compiled"] = Field(
        "auto",
        description="norms, RoPE, gates, dropout, cross-entropy: eager operators, or fused by inductor",
    )
    weight_grad: Literal["auto", "separate", "fused"] = Field(
        "auto", description="fused: the GEMM adds to the fp32 main grad itself (CUDA); separate: a second pass adds"
    )
    linear: Literal["torch", "te"] = Field(
        "torch", description="GEMMs of the linear layers: torch's, or Transformer Engine's (CUDA; the extra `te`)"
    )
    optimizer: Literal["auto", "torch", "compiled", "apex"] = Field(
        "auto",
        description="torch's fused operator; one pass by inductor, for every form of state; apex's FusedAdam",
    )
    experts: Literal["auto", "loop", "grouped"] = Field(
        "auto", description="loop: a GEMM per expert; grouped: torch's grouped GEMM (bf16, fp16, fp32)"
    )
    graphs: Annotated[Literal["auto", "off", "on"], BeforeValidator(_switch)] = Field(
        "auto", description="replay each microbatch's forward and backward as CUDA graphs (CUDA); auto: off"
    )
    dispatch: Literal["auto", DispatchName] = Field(
        "auto",
        description="tokens to experts: gather all of them, or exchange rows; auto: all_gather up to ep = top_k",
    )
