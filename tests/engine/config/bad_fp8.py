"""Sections `precision.fp8` that must be refused, in the form of `bad_configs.BAD`."""

from collections.abc import Sequence

BAD_FP8: dict[str, tuple[Sequence[str], dict[str, int], Sequence[str]]] = {
    "FP8 in no layer": (
        ["precision.fp8={bf16_layers: [20, 20]}"],
        {},
        ["precision.fp8.bf16_layers = [20, 20]", "must leave one of the", "no effect", "bf16_layers = [0, 0]"],
    ),
    "FP8 of fp16": (
        ["precision={dtype: fp16, fp8: {recipe: tensorwise}}"],
        {},
        ["precision.dtype = fp16", "not combined with precision.fp8", "overflow", "precision.dtype = bf16"],
    ),
    "FP8 of float64 by a GEMM that sums in fp32": (
        ["precision={dtype: float64, fp8: {backend: torch}}"],
        {},
        ["precision.fp8.backend = torch", "sums in fp32", "exact", "backend = emulated"],
    ),
    "scales of blocks by torch on a CPU": (
        ["precision.fp8={recipe: mxfp8, backend: torch}", "runtime.device=cpu"],
        {},
        ["precision.fp8.backend = torch", "on GPUs alone", "runtime.device = cpu", "backend = emulated"],
    ),
    "FP8 copies of weights that are cut": (
        ["precision.fp8={}", "parallel.zero=3"],
        {},
        ["parallel.zero = 3", "FP8 copies", "parallel.zero = 2", "precision.fp8 = null"],
    ),
    "gradients of blocks in e5m2": (
        ["precision.fp8={recipe: mxfp8, format: hybrid}"],
        {},
        ["precision.fp8.format = hybrid", "e4m3 alone", "precision.fp8.format = auto", "recipe = tensorwise"],
    ),
    "a hidden size between blocks": (
        ["precision.fp8={recipe: mxfp8}", "model.hidden_size=80", "model.num_attention_heads=4", "model.head_dim=32"],
        {},
        [
            "model.hidden_size = 80",
            "80 numbers per token",
            "mxfp8 takes multiples of 32",
            "model.hidden_size = 64 or 96",
        ],
    ),
    "tokens of two samples between blocks": (
        ["precision.fp8={recipe: mxfp8}", "model.seq_length=24", "train.micro_batch_size=2"],
        {},
        ["model.seq_length = 24", "48 tokens of a microbatch", "model.seq_length = 32 or 64."],
    ),
    "an inner width that a rank has in part of a block": (
        [
            "precision.fp8={recipe: blockwise}",
            "model.hidden_size=128",
            "model.head_dim=32",
            "model.seq_length=64",
            "model.ffn_hidden_size=640",
            "parallel.tp=2",
        ],
        {},
        [
            "model.ffn_hidden_size = 640",
            "320 numbers of the MLP's inner width on a rank",
            "blockwise takes multiples of 128",
        ],
    ),
    "a block of tokens from both parts of a cp rank": (
        [
            "precision.fp8={recipe: mxfp8}",
            "parallel.cp=2",
            "model.seq_length=64",
            "train.micro_batch_size=1",
        ],
        {},
        [
            "model.seq_length = 64",
            "16 tokens of a microbatch in each part of the sequence that a rank has",
            "model.seq_length = 128",
        ],
    ),
    "FP8 with heads that several ranks hold": (
        ["precision.fp8={backend: emulated}", "parallel.tp=2", "model.num_kv_heads=1"],
        {},
        ["parallel.tp = 2", "model.num_kv_heads = 1 with precision.fp8", "rounded in parts", "precision.fp8 = null"],
    ),
    "blocks that are rounded before a gather": (
        ["precision.fp8={recipe: mxfp8, gather: fp8}", "parallel.sequence_parallel=true"],
        {},
        ["precision.fp8.gather = fp8", "one scale for a tensor", "in other blocks", "precision.fp8.gather = bf16"],
    ),
    "FP8 on its way where nothing is gathered": (
        ["precision.fp8={gather: fp8}"],
        {},
        ["precision.fp8.gather = fp8", "sequence_parallel is off", "no effect", "parallel.sequence_parallel = true"],
    ),
    "scales that a replay would communicate": (
        [
            "precision.fp8={backend: emulated}",
            "parallel.cp=2",
            "recompute={granularity: selective, modules: [norm, mlp]}",
        ],
        {},
        ["recompute.modules", "recomputing it would communicate", "modules = [norm, activation]"],
    ),
}
