"""The runs whose fused functions are compiled: the models of `benchmarks.gpu`, and variants that have the other functions."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_contenders.shapes import SHAPES, base_words, overridden, resolve, write_config
from triaxis.engine.config.tree import Config

Words = tuple[str, ...]
IN_FP8: tuple[Words, ...] = ((), ("precision.fp8.recipe=tensorwise",))
EXPERTS: Words = (
    *("model.layers=[moe]", "model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.ffn_hidden_size=14336"),
    *("model.moe.balance.bias_rate=0.001", "model.moe.balance.sequence_loss=0.001"),
)
CASES: tuple[tuple[str, int, tuple[Words, ...]], ...] = (
    (
        *("gpt-1.3b", 8),
        (
            *IN_FP8,
            ("model.hidden_dropout=0.1", "model.activation=relu2"),
            ("model.activation=gelu", "optimizer.name=sgd", "optimizer.ema.decay=0.999"),
        ),
    ),
    ("gpt-2.7b", 4, IN_FP8),
    ("llama-8b-4k-12l", 2, IN_FP8),
    (
        *("llama-8b-4k", 1),
        (
            *IN_FP8,
            ("precision.fp8.recipe=blockwise",),
            (
                "model.norm=rmsnorm_1p",
                "model.activation=geglu_tanh",
                *("model.logit_softcap=30", "model.attention_softcap=50", "kernels.attention=blocks"),
            ),
            ("model.activation=geglu", "model.rotary_share=0.5", "model.qk_norm=true", "model.z_loss=1e-5"),
            ("model.qk_norm=all_heads", *EXPERTS, "kernels.dispatch=all_to_all"),
            (*EXPERTS, "kernels.dispatch=all_gather"),
        ),
    ),
)
"""Shapes of `benchmarks.gpu`, their micro batch sizes, and overrides: each of a run."""


def run_of(shape_name: str, micro_batch_size: int, words: Sequence[str]) -> Config:
    """Return ours as `benchmarks.gpu` runs a shape on one GPU, with one layer and one microbatch."""
    shape = SHAPES[shape_name]
    sizes = ["model.num_layers=1", f"train.global_batch_size={micro_batch_size}", "parallel.dp=1"]
    settings = overridden(base_words(shape, "cuda"), words)
    with tempfile.TemporaryDirectory(prefix="triaxis-") as folder:
        path = write_config(
            Path(folder),
            shape,
            corpus=Path(folder),
            micro_batch_size=micro_batch_size,
            num_steps=1,
            dtype="bf16",
            device="cuda",
        )
        return resolve(path, [*sizes, *settings])


def cases() -> Iterator[Config]:
    """Yield every run, of one layer and one microbatch. Cards without FP8 do not run some."""
    for shape, size, variants in CASES:
        for words in variants:
            yield run_of(shape, size, words)
