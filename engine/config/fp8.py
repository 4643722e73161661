"""The `precision.fp8` section and its rules: linear layers whose GEMMs take FP8 operands."""

from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from triaxis.engine.config.counts import Count
from triaxis.engine.config.layer_products import layer_products
from triaxis.engine.config.section import LAYOUT, MEANT, OnResume, Problem, Rule, Section, Subject, divisors, multiples

if TYPE_CHECKING:  # the tree imports every section
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
    backend: Annotated[Literal["auto", "te", "torch", "emulated"], LAYOUT] = Field(
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


def fp8_has_layers(subject: Subject) -> Iterator[Problem]:
    fp8, num_layers = subject.config.precision.fp8, subject.config.model.num_layers
    if fp8 is not None and sum(fp8.bf16_layers) >= num_layers:
        yield subject.problem(
            "precision.fp8.bf16_layers",
            f"must leave one of the {num_layers} layers: none would have FP8 operands, and precision.fp8 no effect",
            {"precision.fp8.bf16_layers": [[0, 0]]},
        )


def fp8_format_has_the_recipe(subject: Subject) -> Iterator[Problem]:
    fp8 = subject.config.precision.fp8
    if fp8 is not None and fp8.recipe in BLOCKS and fp8.format == "hybrid":
        yield subject.problem(
            "precision.fp8.format",
            f"is not combined with precision.fp8.recipe = {fp8.recipe}: its GEMMs take e4m3 alone",
            {"precision.fp8.format": ["auto"], "precision.fp8.recipe": ["tensorwise"]},
        )


def fp8_has_a_wide_dtype(subject: Subject) -> Iterator[Problem]:
    precision = subject.config.precision
    if precision.fp8 is None:
        return
    if precision.dtype == "fp16":
        yield subject.problem(
            "precision.dtype",
            "is not combined with precision.fp8: gradients of fp16 overflow before they are scaled for FP8",
            {"precision.dtype": ["bf16"]},
        )
    elif precision.fp8.backend in ("te", "torch") and precision.dtype == "float64":
        yield subject.problem(
            "precision.fp8.backend",
            "sums in fp32, and precision.dtype = float64 is for exact comparisons: they would not be exact",
            {"precision.fp8.backend": ["emulated"]},
        )


def fp8_backend_has_the_recipe(subject: Subject) -> Iterator[Problem]:
    fp8, device = subject.config.precision.fp8, subject.config.runtime.device
    if fp8 is not None and fp8.recipe in BLOCKS and fp8.backend == "torch" and device == "cpu":
        yield subject.problem(
            "precision.fp8.backend",
            f"has scales of blocks on GPUs alone, and runtime.device = {device}",
            {"precision.fp8.backend": ["emulated"], "precision.fp8.recipe": ["tensorwise"]},
        )


def fp8_shapes_fit(subject: Subject) -> Iterator[Problem]:
    """Yield a problem for each side of a GEMM's matrices, on one rank, that does not divide into blocks or tiles."""
    config, fp8 = subject.config, subject.config.precision.fp8
    if fp8 is None or not fp8_layers(config) or (fp8.recipe == "tensorwise" and fp8.backend == "emulated"):
        return
    block = BLOCKS.get(fp8.recipe, TILE)
    why = "ranks would share a block and its scale" if fp8.recipe in BLOCKS else "an FP8 GEMM takes no other shapes"
    for side in _sides(config):
        if side.size % (block * side.ranks) == 0:
            continue
        nearest = list(islice(multiples(block * side.ranks, side.size), 2))
        named = nearest if side.is_field else []
        yield Problem(
            side.key,
            side.value,
            f"makes {side.size / side.ranks:g} {side.what}, and precision.fp8.recipe = {fp8.recipe} takes multiples of {block}: "
            f"{why}",
            {side.key: named},
            "" if named else f"Nearest that fit in all: {' or '.join(map(str, nearest))}.",
        )


def fp8_gradients_are_whole(subject: Subject) -> Iterator[Problem]:
    model, parallel = subject.config.model, subject.config.parallel
    if subject.config.precision.fp8 is not None and model.mla is None and model.kv_heads < parallel.tp:
        yield subject.problem(
            "parallel.tp",
            f"must be at most model.num_kv_heads = {model.kv_heads} with precision.fp8: gradients of a head's keys and values that "
            "several ranks hold would be rounded in parts, unlike in other layouts",
            {"parallel.tp": divisors(model.kv_heads, model.kv_heads), "precision.fp8": [None]},
        )


def fp8_copies_are_whole(subject: Subject) -> Iterator[Problem]:
    if subject.config.precision.fp8 is not None and subject.config.parallel.zero > 2:
        yield subject.problem(
            "parallel.zero",
            "must be at most 2 with precision.fp8: every rank keeps FP8 copies of all its weights, 2 bytes each, so cutting the "
            "weights would save nothing",
            {"parallel.zero": [2], "precision.fp8": [None]},
        )


def fp8_scales_are_not_made_twice(subject: Subject) -> Iterator[Problem]:
    config, fp8 = subject.config, subject.config.precision.fp8
    if fp8 is None or fp8.recipe in BLOCKS or config.parallel.cp == 1 or "mlp" not in config.recompute.parts:
        return
    yield subject.problem(
        "recompute.modules",
        f"has mlp, but with parallel.cp = {config.parallel.cp} and one FP8 scale per tensor, recomputing it would communicate",
        {
            "recompute.modules": [["activation" if name == "mlp" else name for name in config.recompute.modules or []]],
            "precision.fp8.recipe": ["mxfp8", "blockwise"],
        },
    )


def fp8_gathers_what_is_one_tensor(subject: Subject) -> Iterator[Problem]:
    config, fp8 = subject.config, subject.config.precision.fp8
    if fp8 is None or fp8.gather == "bf16":
        return
    if fp8.recipe in BLOCKS:
        yield subject.problem(
            "precision.fp8.gather",
            f"needs one scale for a tensor, and precision.fp8.recipe = {fp8.recipe}: numbers that were rounded for the forward "
            "would be rounded once more, in other blocks, for the gradient of the weight",
            {"precision.fp8.gather": ["bf16"], "precision.fp8.recipe": ["tensorwise"]},
        )
    elif not config.parallel.sequence_parallel:
        yield subject.problem(
            "precision.fp8.gather",
            "is about what sequence parallelism gathers, and parallel.sequence_parallel is off: it would have no effect",
            {"precision.fp8.gather": ["bf16"], "parallel.sequence_parallel": [True]},
        )


def fp8_shares_are_of_fp8(subject: Subject) -> Iterator[Problem]:
    config = subject.config
    if config.telemetry.fp8_interval is not None and config.precision.fp8 is None:
        yield subject.problem(
            "telemetry.fp8_interval",
            "counts the numbers that FP8 loses, but precision.fp8 is off: it would count none",
            {"telemetry.fp8_interval": [None]},
        )


class _Side(NamedTuple):
    """One side of the matrices in FP8 GEMMs.

    Attributes:
        key: dotted name of the field that decides the size.
        value: the field's value.
        size: length of the side, before it is cut over ranks.
        ranks: number of ranks that the side is cut over.
        what: noun phrase for the part on one rank, for the message.
        is_field: True if the field's value is the size itself.
    """

    key: str
    value: int
    size: int
    ranks: int
    what: str
    is_field: bool = True


def _sides(config: "Config") -> Iterator[_Side]:
    model, tp = config.model, config.parallel.tp
    layers = [model.layer_kind(layer) for layer in fp8_layers(config)]
    yield _Side("model.hidden_size", model.hidden_size, model.hidden_size, 1, "numbers per token")
    heads, kv_heads, mla = model.num_attention_heads, model.kv_heads, model.mla
    of_heads = "numbers of a token's heads on a rank"
    yield _Side(
        "model.num_attention_heads", heads, heads * model.value_size, tp, f"{of_heads} that attention returns", False
    )
    if mla is None:
        yield _Side(
            "model.num_attention_heads", heads, heads * model.head_size, tp, f"{of_heads} that are queries", False
        )
        # With fewer heads than ranks, each rank has one whole head.
        yield _Side(
            "model.num_kv_heads",
            kv_heads,
            kv_heads * model.head_size,
            min(tp, kv_heads),
            f"{of_heads} that are keys",
            False,
        )
    else:
        if mla.q_lora_rank is not None:
            yield _Side("model.mla.q_lora_rank", mla.q_lora_rank, mla.q_lora_rank, 1, "numbers of a latent")
        yield _Side("model.mla.kv_lora_rank", mla.kv_lora_rank, mla.kv_lora_rank, 1, "numbers of a latent")
        yield _Side(
            "model.mla.qk_rope_head_dim", mla.qk_rope_head_dim, mla.qk_rope_head_dim, 1, "numbers of a rotated key"
        )
        yield _Side(
            "model.num_attention_heads", heads, heads * mla.qk_head_dim, tp, f"{of_heads} that are queries", False
        )
    if any(not kind.has_experts for kind in layers):
        yield _Side(
            "model.ffn_hidden_size", model.ffn_size, model.ffn_size, tp, "numbers of the MLP's inner width on a rank"
        )
    if model.moe is not None and model.moe.shared_experts and any(kind.has_experts for kind in layers):
        yield _Side(
            "model.moe.shared_experts",
            model.moe.shared_experts,
            model.moe.shared_size,
            tp,
            "numbers of their inner width on a rank",
            False,
        )
    micro, cp = config.train.micro_batch_size, config.parallel.cp
    # A cp rank has one part from the sequence's front and one from its back; a block holds neighbouring tokens.
    parts, what = (
        (1, "tokens of a microbatch") if cp == 1 else (2 * cp, "tokens of a microbatch in one of a cp rank's two parts")
    )
    yield _Side("model.seq_length", model.seq_length, micro * model.seq_length, parts, what, micro == 1)


FP8_RULES: tuple[Rule, ...] = (
    fp8_has_layers,
    fp8_has_a_wide_dtype,
    fp8_format_has_the_recipe,
    fp8_backend_has_the_recipe,
    fp8_shapes_fit,
    fp8_gradients_are_whole,
    fp8_copies_are_whole,
    fp8_scales_are_not_made_twice,
    fp8_gathers_what_is_one_tensor,
    fp8_shares_are_of_fp8,
)
