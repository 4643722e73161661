"""Floating-point operations of a training step, and what a device could do.

A multiplication and an addition count as two. Forward 2 per weight and token, backward twice that: 6. Per token:

    model, causal      6 N + 6 L a d s      N: weights of all GEMMs, LM head once; a query sees s/2 keys on average
    experts            of N, those that a token goes through: the router, k experts and the shared ones ("active")
    multi-token        each of its layers is one more of the L, with a projection of 2 h^2, and the head once more, in N
    model, non-causal  6 N + 12 L a d s     as if every query saw all s keys (2205.05198, NVIDIA's published tables)
    hardware           causal, plus forwards that recompute repeats, plus the padded columns of the head
    a window W         W - W^2 / 2s keys instead of s/2: of the first W queries as many as without it (causal only)
    documents          with `data.attention: within`, the same of each document in place of s (`engine/data/document_statistics.py`)

MFU divides model FLOPs by the peak, HFU hardware FLOPs. The four numbers that papers call "MFU" differ by up to a third:
a printed one needs its convention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from triaxis.engine.config.activations import RecomputeConfig
from triaxis.engine.config.model import ModelConfig
from triaxis.engine.config.stage_work import (
    flops_of_a_key,
    layer_weights,
    made_from_latents,
    mlp_width,
    projection_weights,
)
from triaxis.engine.data.document_statistics import DocumentStatistics, one_document_per_sample

CONVENTION = "6 x GEMM weights + 6 x layers x heads x head size x sequence (causal)"
"""The formula of `model_flops_per_token`, to be printed with it, for queries and values of one size."""


def gemm_weights(model: ModelConfig) -> int:
    """Count weights that a token is multiplied with: all linear layers, and the head, tied or not (logical vocabulary).

    Of experts, those of one token count ("active"). The head counts once, and again for each layer of multi-token prediction.
    """
    heads = (1 + model.num_mtp_layers) * model.vocab_size * model.hidden_size
    return sum(layer_weights(model, kind) + projection_weights(model, kind) for kind in model.kinds) + heads


def model_flops_per_token(
    model: ModelConfig, *, causal: bool = True, documents: DocumentStatistics | None = None
) -> int:
    """Count FLOPs that the mathematics of a forward and backward needs, per token, whatever the engine does.

    The vocabulary is the logical one: padding it is the engine's choice. Norms, activations, embedding look-ups and the
    softmax are left out, as in every published formula (2104.04473 appendix, 2205.05198 appendix A).

    Args:
        model: sizes.
        causal: count the half of the attention matrix that a causal mask leaves; False: all of it.
        documents: within which tokens attend; None: across them.
    """
    return 3 * (2 * gemm_weights(model) + sum(core_flops_forward(model, documents, causal=causal)))


def convention(model: ModelConfig, documents: DocumentStatistics | None = None) -> str:
    """Return the formula of `model_flops_per_token`, with the share of attention that windows and documents leave."""
    seen, whole = sum(core_flops_forward(model, documents)), sum(core_flops_forward(model, None, causal=False)) // 2
    # A score is a product of one query's elements, the weighted sum of one value's.
    sizes = "head size" if model.value_size == model.head_size else "mean size of queries and values"
    stated = CONVENTION.replace("head size", sizes)
    stated = stated.replace("GEMM weights", "active GEMM weights") if model.has_experts else stated
    if seen == whole:
        return stated
    within = "windows" if documents is None else "documents"
    return f"{stated}, {seen / whole:.0%} of the latter within {within}"


def attention_share(model: ModelConfig, documents: DocumentStatistics) -> float:
    """Return the FLOPs of attention within documents over those across them."""
    return sum(core_flops_forward(model, documents)) / sum(core_flops_forward(model, None))


def cost_of_imbalance(model: ModelConfig, documents: DocumentStatistics) -> float:
    """Return the FLOPs that the dp rank with most attention work has beyond the mean of all ranks, as a share of the mean."""
    cores = zip(core_flops_forward(model, documents), model.kinds, strict=True)
    more = {kind.window: documents.imbalance(kind.window) - 1 for kind in set(model.kinds)}
    return 3 * sum(core * more[kind.window] for core, kind in cores) / model_flops_per_token(model, documents=documents)


def cost_of_cp_imbalance(model: ModelConfig, documents: DocumentStatistics, imbalance: float) -> float:
    """Return the FLOPs of attention that the fullest cp rank has beyond the mean, as a share of the mean rank's FLOPs.

    Args:
        model: sizes.
        documents: within which tokens attend.
        imbalance: the fullest rank over the mean (`triaxis.engine.context_parallel.imbalance`).
    """
    attention = 3 * sum(core_flops_forward(model, documents))
    return (imbalance - 1) * attention / model_flops_per_token(model, documents=documents)


def hardware_flops_per_token(
    model: ModelConfig,
    recompute: RecomputeConfig,
    layers_per_chunk: Sequence[int],
    documents: DocumentStatistics | None = None,
) -> int:
    """Count FLOPs that are executed, per token: causal, padded vocabulary, recomputed forwards included.

    Not in it: the scores that flash attention computes again in its backward, kv projections of replicated heads, what each rank
    makes from the latents of others (context parallelism) or computes of latents as all of tp do (without sequence parallelism).

    Args:
        model: sizes.
        recompute: never `auto`, but what it came to. full, uniform repeats every layer's forward; full, block: that of the first
            `num_layers` layers of every chunk; of the other layers, attention's core and the MLP's first GEMM are repeated where
            they are among the parts (other parts have no GEMM). With `head_tokens`, the head's forward is repeated too.
        layers_per_chunk: transformer layers of each of the pp x vpp chunks, in the order of the model.
        documents: within which tokens attend; None: across them.
    """
    heads = 1 + model.num_mtp_layers
    padding = heads * 3 * 2 * (model.padded_vocab_size - model.vocab_size) * model.hidden_size
    again = sum(layer.again for layer in layer_flops(model, recompute, layers_per_chunk, documents))
    if recompute.head_tokens is not None:
        again += heads * head_flops(model)
    return model_flops_per_token(model, documents=documents) + padding + again


class LayerFlops(NamedTuple):
    """FLOPs of one layer per token.

    Attributes:
        gemms: of its linear layers' forward; their input gradients, and their weight gradients, take as many.
        attention: of the forward of scores and weighted sum; their gradients take twice as many, and none is a weight's.
        again: of what recomputation repeats.
    """

    gemms: int
    attention: int
    again: int


def layer_flops(
    model: ModelConfig,
    recompute: RecomputeConfig,
    layers_per_chunk: Sequence[int],
    documents: DocumentStatistics | None = None,
) -> list[LayerFlops]:
    """Count FLOPs of each layer, in the order of the model; arguments as of `hardware_flops_per_token`."""
    cores = core_flops_forward(model, documents)
    assert recompute.granularity != "auto", "triaxis.models.predict.rank_memory.resolve_recompute comes first"
    limit = 0
    if recompute.granularity == "full":
        limit = recompute.num_layers if recompute.method == "block" else len(model.kinds)
    place_in_chunk = [place for layers in layers_per_chunk for place in range(layers)]
    layers = []
    for place, core, kind in zip(place_in_chunk, cores, model.kinds, strict=True):
        gemms = 2 * (layer_weights(model, kind) + projection_weights(model, kind))
        first_gemm = 2 * model.activation_kind.num_inputs * mlp_width(model, kind) * model.hidden_size
        in_part = {"attention": core + 2 * made_from_latents(model), "mlp": first_gemm}
        parts = sum(in_part.get(part, 0) for part in recompute.parts)
        layers.append(LayerFlops(gemms, core, gemms + core if place < limit else parts))
    return layers


def head_flops(model: ModelConfig) -> int:
    """Count FLOPs of the head's forward per token, padded columns included."""
    return 2 * model.padded_vocab_size * model.hidden_size


def core_flops_forward(
    model: ModelConfig, documents: DocumentStatistics | None = None, *, causal: bool = True
) -> list[int]:
    """Count FLOPs of each layer's scores and weighted sum per token: 2 GEMMs of keys x a d, every key without a causal mask."""
    of_a_key = flops_of_a_key(model)
    if not causal:
        return [of_a_key * model.seq_length] * len(model.kinds)
    statistics = documents or one_document_per_sample(model.seq_length)
    kinds = model.kinds
    keys = {window: statistics.keys_per_query(window) for window in {kind.window for kind in kinds}}
    return [round(of_a_key * keys[kind.window]) for kind in kinds]


@dataclass(frozen=True, slots=True)
class PeakRate:
    """A device's dense peak in TFLOP/s, and its source."""

    tflops: float
    source: str


# Dense bf16 = dense fp16 on tensor cores with fp32 accumulation. Data sheets often print the number with 2:4 sparsity: half
# of that stands here. The first entry counts whose words are all in the device's name, so longer names come first.
_PEAKS: tuple[tuple[str, PeakRate], ...] = (
    ("GB300", PeakRate(2500.0, "NVIDIA GB300 NVL72 page: 5 PFLOPS sparse per GPU")),
    ("B300", PeakRate(2250.0, "NVIDIA HGX B300 page: 36 PFLOPS sparse per 8 GPUs")),
    ("GB200", PeakRate(2500.0, "NVIDIA GB200 NVL72 data sheet: 5 PFLOPS sparse per GPU")),
    ("B200", PeakRate(2250.0, "NVIDIA HGX B200 data sheet: 36 PFLOPS sparse per 8 GPUs")),
    ("GH200", PeakRate(989.4, "NVIDIA GH200 data sheet: 1,979 sparse")),
    ("H200 NVL", PeakRate(835.5, "NVIDIA H200 data sheet: 1,671 sparse")),
    ("H200", PeakRate(989.4, "NVIDIA H200 data sheet: 1,979 sparse")),
    ("H100 NVL", PeakRate(835.5, "NVIDIA H100 data sheet: 1,671 sparse")),
    ("H100 PCIe", PeakRate(756.5, "NVIDIA H100 data sheet: 1,513 sparse")),
    ("H100", PeakRate(989.4, "NVIDIA H100 architecture white paper, SXM5")),
    ("H800 PCIe", PeakRate(756.5, "NVIDIA H800 data sheet: 1,513 sparse")),
    ("H800", PeakRate(989.4, "NVIDIA H800 data sheet: 1,979 sparse")),
    ("A100", PeakRate(312.0, "NVIDIA A100 data sheet")),
    ("A800", PeakRate(312.0, "NVIDIA A800 data sheet")),
    ("A30", PeakRate(165.0, "NVIDIA A30 data sheet")),
    ("A40", PeakRate(149.7, "NVIDIA A40 data sheet")),
    ("L40S", PeakRate(362.05, "NVIDIA L40S data sheet")),
    ("L40", PeakRate(181.05, "NVIDIA L40 data sheet")),
    ("L4", PeakRate(121.0, "NVIDIA L4 data sheet: 242 sparse")),
    ("RTX 4090", PeakRate(165.2, "NVIDIA Ada architecture white paper, fp32 accumulation")),
    ("RTX 3090", PeakRate(71.0, "NVIDIA GA102 architecture white paper, fp32 accumulation")),
)


_WITHOUT_FP8 = ("A100", "A800", "A30", "A40", "RTX 3090")
"""Devices of the table before Ada and Hopper; all later ones multiply FP8 at twice the rate of bf16, by the same sources."""


def known_peak(device_name: str, dtype: str, *, in_fp8: bool = False) -> PeakRate | None:
    """Return the peak of a device with its source; None where the table lacks it.

    Args:
        device_name: as `torch.cuda.get_device_name` says ("NVIDIA H100 80GB HBM3").
        dtype: of the GEMMs, as in `precision.dtype`; fp32 and float64 have no entry, since whether they run on tensor cores
            is a setting of the process, not of the device. A MIG slice has none: it is a part of its GPU.
        in_fp8: that of FP8 GEMMs, which some of the run's are.
    """
    words = device_name.replace("-", " ").split()
    if dtype not in ("bf16", "fp16") or "MIG" in words:
        return None
    # Whole words: an A10G is no A10. The form factor may stand apart from the model ("NVIDIA H100 80GB PCIe").
    found = next(((name, peak) for name, peak in _PEAKS if all(word in words for word in name.split())), None)
    if found is None or (in_fp8 and found[0] in _WITHOUT_FP8):
        return None
    peak = found[1]
    return PeakRate(2 * peak.tflops, f"FP8, twice the bf16 of {peak.source}") if in_fp8 else peak
