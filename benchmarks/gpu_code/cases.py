"""The runs whose fused functions are compiled: the models of `benchmarks.gpu`, and variants that have the other functions."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_contenders.shapes import SHAPES, base_words, overridden, resolve, write_config
from triaxis.engine.config.tree import Config

MODELS: Mapping[str, tuple[int, ...]] = {
    "gpt-1.3b": (8,),
    "gpt-2.7b": (4,),
    "llama-8b-4k-12l": (2, 1),
    "llama-8b-4k": (1,),
}
"""Shapes of `benchmarks.gpu` and their micro batch sizes; the roofline is of these."""

IN_FP8 = ("precision.fp8.recipe=tensorwise",)
"""Overrides for a run in FP8."""

FEATURES: Mapping[str, tuple[str, int, tuple[str, ...]]] = {
    "dropout, relu2": ("gpt-1.3b", 8, ("model.hidden_dropout=0.1", "model.activation=relu2")),
    "gelu, sgd, average": (
        *("gpt-1.3b", 8),
        ("model.activation=gelu", "optimizer.name=sgd", "optimizer.ema.decay=0.999"),
    ),
    "norm of 1 + w, geglu_tanh, capped logits": (
        *("llama-8b-4k", 1),
        ("model.norm=rmsnorm_1p", "model.activation=geglu_tanh", "model.logit_softcap=30"),
    ),
    "geglu, half of a head rotated, norm of each head, z-loss": (
        *("llama-8b-4k", 1),
        ("model.activation=geglu", "model.rotary_share=0.5", "model.qk_norm=true", "model.z_loss=1e-5"),
    ),
    "norm of all heads, experts": (
        *("llama-8b-4k", 1),
        (
            *("model.qk_norm=all_heads", "model.layers=[moe]"),
            *("model.moe.num_experts=8", "model.moe.top_k=2", "model.moe.ffn_hidden_size=14336"),
        ),
    ),
    "fp8, scales of blocks": ("llama-8b-4k", 1, ("precision.fp8.recipe=blockwise",)),
}
"""(shape, micro batch size, overrides) of what the models above lack."""


@dataclass(frozen=True, slots=True)
class Case:
    """A run of one layer and one microbatch."""

    name: str
    config: Config


def run_of(
    shape_name: str, micro_batch_size: int, words: Sequence[str] = (), *, num_layers: int = 1, num_microbatches: int = 1
) -> Config:
    """Return ours as `benchmarks.gpu` runs a shape on one GPU, with other numbers of layers and microbatches."""
    shape = SHAPES[shape_name]
    samples = micro_batch_size * num_microbatches
    sizes = [f"model.num_layers={num_layers}", f"train.global_batch_size={samples}", "parallel.dp=1"]
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


def cases() -> Iterator[Case]:
    """Yield every case: of the models those with the largest micro batch, since another has the smaller ones' shapes.

    Cards without FP8 do not run its cases.
    """
    for name, (size, *_) in MODELS.items():
        yield Case(name, run_of(name, size))
        yield Case(f"{name}, fp8", run_of(name, size, IN_FP8))
    for name, (shape, size, words) in FEATURES.items():
        yield Case(name, run_of(shape, size, words))
