"""The `precision.fp8` section: linear layers whose GEMMs take FP8 operands."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from triaxis.engine.config.counts import Count
from triaxis.engine.config.layer_products import layer_products
from triaxis.engine.config.section import LAYOUT, MEANT, OnResume, Section

if TYPE_CHECKING:  # the tree imports every section
    from triaxis.engine.config.attention_kinds import LayerKind
    from triaxis.engine.config.tree import Config

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


def without_gather(tree: dict[str, Any]) -> None:
    """Set `precision.fp8.gather` to bf16, in place, if the configuration tree has FP8 but no sequence parallelism."""
    if tree["precision"]["fp8"] is not None and not tree["parallel"]["sequence_parallel"]:
        tree["precision"]["fp8"]["gather"] = "bf16"


def fp8_layers(config: "Config") -> range:
    """The layers whose linear layers are in FP8; multi-token prediction layers (`model.mtp`) never are."""
    fp8 = config.precision.fp8
    if fp8 is None:
        return range(0)
    first, last = fp8.bf16_layers
    return range(first, config.model.num_layers - last)


def fp8_line(config: "Config", backend: str) -> str:
    """Describe a run's FP8: recipe, backend, how many linear layers have FP8 operands, and which layers stay in the run's dtype."""
    model, fp8 = config.model, config.precision.fp8
    assert fp8 is not None, "the run has FP8"
    per_layer = [len(linears_of(config, layer)) for layer in range(model.num_layers)]
    in_fp8 = sum(per_layer[layer] for layer in fp8_layers(config))
    # The head is one more, and in latent attention one weight stays in the run's dtype.
    total = sum(per_layer) + (model.num_layers if model.mla is not None else 0) + 1
    first, last = fp8.bf16_layers
    ends = [
        f"{which} layer" if count == 1 else f"{which} {count} layers"
        for which, count in (("first", first), ("last", last))
        if count
    ]
    others = [*ends, "head"]
    others += [
        *(["values and keys from latents"] if model.mla is not None else []),
        *(["experts"] if model.has_experts else []),
    ]
    others += ["layers of tokens ahead"] if model.mtp is not None else []
    recipe = f"{fp8.recipe}, e4m3" if fp8.recipe not in BLOCKS and fp8.format == "e4m3" else fp8.recipe
    return f"{recipe} ({backend}) in {in_fp8} of {total} linears; {config.precision.dtype}: {', '.join(others)}"


def fp8_linears(config: "Config") -> tuple[str, ...]:
    """Names of the model's linear layers in FP8, as in the communication ledger (`engine/comm/ledger.py`)."""
    return tuple(f"layers.{layer}.{name}" for layer in fp8_layers(config) for name in linears_of(config, layer))


def linears_of(config: "Config", layer: int) -> list[str]:
    """List the names of a layer's linear layers that may be in FP8: in its attention, and in its MLP or shared experts."""
    model = config.model
    names = [product.name for product in layer_products(model, model.layer_kind(layer)) if product.may_be_fp8]
    return [name.replace(".up", ".gate_up") for name in names] if model.activation_kind.is_gated else names


def fp8_kinds(config: "Config") -> set["LayerKind"]:
    """The kinds of the layers that have FP8."""
    return {config.model.layer_kind(layer) for layer in fp8_layers(config)}


def fp8_multiple(config: "Config") -> int:
    """What the sides of a rank's matrices are multiples of in FP8 GEMMs, a block or a tile; 0 if the run's GEMMs take any sides."""
    fp8 = config.precision.fp8
    if fp8 is None or not fp8_layers(config) or (fp8.recipe == "tensorwise" and fp8.backend == "emulated"):
        return 0
    return BLOCKS.get(fp8.recipe, TILE)
