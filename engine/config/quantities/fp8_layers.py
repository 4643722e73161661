"""The layers and linear layers of a run with FP8 operands, and what their sizes are multiples of."""

from triaxis.engine.config.quantities.layer_products import layer_products
from triaxis.engine.config.schema.fp8 import BLOCKS, TILE
from triaxis.engine.config.schema.layer_kinds import LayerKind
from triaxis.engine.config.tree import Config


def fp8_layers(config: Config) -> range:
    """The layers whose linear layers are in FP8; multi-token prediction layers (`model.mtp`) never are."""
    fp8 = config.precision.fp8
    if fp8 is None:
        return range(0)
    first, last = fp8.bf16_layers
    return range(first, config.model.num_layers - last)


def fp8_line(config: Config, backend: str) -> str:
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


def linears_of(config: Config, layer: int) -> list[str]:
    """List the names of a layer's linear layers that may be in FP8: in its attention, and in its MLP or shared experts."""
    model = config.model
    names = [product.name for product in layer_products(model, model.layer_kind(layer)) if product.may_be_fp8]
    return [name.replace(".up", ".gate_up") for name in names] if model.activation_kind.is_gated else names


def fp8_kinds(config: Config) -> set[LayerKind]:
    """The kinds of the layers that have FP8."""
    return {config.model.layer_kind(layer) for layer in fp8_layers(config)}


def fp8_multiple(config: Config) -> int:
    """What the sides of a rank's matrices are multiples of in FP8 GEMMs, a block or a tile; 0 if the run's GEMMs take any sides."""
    fp8 = config.precision.fp8
    if fp8 is None or not fp8_layers(config) or (fp8.recipe == "tensorwise" and fp8.backend == "emulated"):
        return 0
    return BLOCKS.get(fp8.recipe, TILE)
