"""The `precision.fp8` section: linear layers whose GEMMs take FP8 operands."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.schema.section import LAYOUT, MEANT, OnResume, Section
from triaxis.engine.config.values.counts import Count

Fp8RecipeName = Literal["tensorwise", "blockwise", "mxfp8"]
Fp8Backend = Literal["te", "torch", "emulated"]

BLOCKS: Mapping[Fp8RecipeName, int] = MappingProxyType({"blockwise": 128, "mxfp8": 32})
"""Length of a block, along a GEMM's contracted dim, whose numbers share a scale, by recipe."""

TILE = 16
"""Every matrix side in a scaled GEMM must be a multiple of this (cuBLAS: 16 bytes). With backend `auto` the rule applies on a CPU
too, which does not need it, so that the same configuration runs on a GPU."""


class Fp8Config(Section):
    """FP8 operands for the GEMMs in attention's and the MLP's linear layers; other layers have none."""

    on_resume: ClassVar[OnResume | None] = MEANT

    recipe: Fp8RecipeName = Field("tensorwise", description="numbers that share a scale: a tensor, or blocks of it")
    format: Literal["auto", "hybrid", "e4m3"] = Field(
        "auto",
        description="gradients: e5m2 (hybrid) or e4m3; all other tensors are e4m3; auto: hybrid with one scale per tensor",
    )
    backend: Annotated[Literal["auto", Fp8Backend], LAYOUT] = Field(
        "auto",
        description="te: Transformer Engine's GEMMs; torch: scaled GEMMs; emulated: plain operators on rounded numbers",
    )
    gather: Annotated[Literal["bf16", "fp8"], LAYOUT] = Field(
        "bf16", description="sequence parallelism: what linear layers gather travels in the run's dtype, or in FP8"
    )
    bf16_layers: list[Annotated[Count, Field(ge=0)]] = Field(
        [0, 0], min_length=2, max_length=2, description="first and last layers that stay in the run's dtype"
    )
