"""The shapes that are measured, ours in each of them, and the optimisations that are turned off one by one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triaxis.engine.config.load import load_config
from triaxis.engine.config.tree import Config
from triaxis.engine.config.write import to_yaml

GPT: dict[str, Any] = {
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "position": "learned",
    "bias": "all",
    "tie_embeddings": True,
}
LLAMA: dict[str, Any] = {
    "norm": "rmsnorm",
    "activation": "swiglu",
    "position": "rope",
    "rope_base": 500000.0,
    "bias": "none",
    "tie_embeddings": False,
}
LLAMA_8B: dict[str, Any] = LLAMA | {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": 128256,
}
LEARNING_RATE = 1e-4
"""Constant. The tokens are random, so the loss stays where it begins; no speed depends on it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One model and batch.

    Attributes:
        model: the config's section.
        tokens_per_step: of an optimizer step; whole samples.
        micro_batch_sizes: to try, the largest first, until one fits.
        target: the r that is wanted of ours; None: nothing is.
        fp8_target: the wanted tokens per second of ours in FP8, over those in bf16; None: nothing is.
        ours_alone: other contenders do not run it.
        settings: of ours, `section.key=value`.
    """

    model: Mapping[str, Any]
    tokens_per_step: int
    micro_batch_sizes: tuple[int, ...]
    target: float | None = None
    fp8_target: float | None = None
    ours_alone: bool = False
    settings: tuple[str, ...] = ()

    @property
    def samples_per_step(self) -> int:
        return self.tokens_per_step // self.model["seq_length"]


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**GPT, **sizes, "seq_length": 2048, "vocab_size": 50257}


def _llama_8b(layers: int, seq_length: int, micro_batch_sizes: tuple[int, ...], **more: Any) -> Shape:
    model = {**LLAMA_8B, "num_layers": layers, "seq_length": seq_length}
    return Shape(model, 2**16, micro_batch_sizes, target=0.69, fp8_target=1.40, **more)


NARROW_STATE = ("precision.masters=split", "precision.moments=bf16")
"""12 bytes per parameter instead of 18: what lets all 32 layers of the 8B stand on one H200."""

SHAPES: Mapping[str, Shape] = {
    "gpt-1.3b": Shape(_gpt(24, 2048, 16), 2**16, (8, 4, 2, 1), target=0.62, fp8_target=1.15),
    "gpt-2.7b": Shape(_gpt(32, 2560, 20), 2**16, (4, 2, 1), target=0.65),
    "llama-8b-4k-12l": _llama_8b(12, 4096, (2, 1)),
    "llama-8b-8k-12l": _llama_8b(12, 8192, (1,)),
    "llama-8b-4k": _llama_8b(32, 4096, (1,), ours_alone=True, settings=NARROW_STATE),
    "llama-8b-8k": _llama_8b(32, 8192, (1,), ours_alone=True, settings=NARROW_STATE),
    "tiny": Shape(
        {**_gpt(2, 64, 2), "seq_length": 32, "vocab_size": 300},
        128,
        (2,),
    ),
    "tiny-llama": Shape(
        {
            **LLAMA,
            "num_layers": 2,
            "hidden_size": 256,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 384,
            "seq_length": 64,
            "vocab_size": 300,
        },
        256,
        (2,),
    ),
}
"""Those that begin with `tiny` show on any device that everything runs; all widths of `tiny-llama` are whole FP8 blocks."""


@dataclass(frozen=True, slots=True)
class Optimisation:
    """Something that makes ours faster, by `section.key=value` words.

    Attributes:
        name: in the table.
        on: how ours runs.
        off: how ours runs in the row that shows what it gave.
        needs_cuda: on a CPU ours runs without `on`.
    """

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    needs_cuda: bool = False


OPTIMISATIONS: tuple[Optimisation, ...] = (
    Optimisation("cudnn-attention", ("kernels.attention=cudnn",), ("kernels.attention=flash",), needs_cuda=True),
    Optimisation(
        "compiled-elementwise", ("kernels.elementwise=compiled",), ("kernels.elementwise=eager",), needs_cuda=True
    ),
    Optimisation(
        "fused-weight-gradients", ("kernels.weight_grad=fused",), ("kernels.weight_grad=separate",), needs_cuda=True
    ),
    Optimisation("compiled-optimizer", ("kernels.optimizer=compiled",), ("kernels.optimizer=torch",), needs_cuda=True),
    Optimisation("kept-activations", ("recompute.granularity=none",), ("recompute.granularity=selective",)),
    Optimisation("quiet-collector", ("runtime.gc_interval=100",), ("runtime.gc_interval=1",)),
)
"""One line each; a test holds their words to the fields of the configuration."""


def base_words(shape: Shape, device: str) -> tuple[str, ...]:
    """Return the settings of ours with every optimisation on, and those of the shape."""
    applied = [one for one in OPTIMISATIONS if device == "cuda" or not one.needs_cuda]
    return overridden([word for one in applied for word in one.on], shape.settings)


def overridden(words: Sequence[str], later: Sequence[str]) -> tuple[str, ...]:
    """Reduce settings to one word for each field: the later one."""
    return tuple({word.partition("=")[0]: word for word in (*words, *later)}.values())


def write_config(
    folder: Path, shape: Shape, *, corpus: Path, micro_batch_size: int, num_steps: int, dtype: str, device: str
) -> Path:
    """Write a config.yaml for `triaxis.launch.pretrain_gpt`: the whole of a run of ours but for the words of `base_words`."""
    tree = {
        "model": dict(shape.model),
        "data": {"train": str(corpus), "split": [1.0, 0.0, 0.0]},
        "train": {
            "steps": num_steps,
            "global_batch_size": shape.samples_per_step,
            "micro_batch_size": micro_batch_size,
            "seed": 1,
        },
        "optimizer": {"lr": LEARNING_RATE, "lr_schedule": "constant"},
        "precision": {"dtype": dtype},
        "checkpoint": {"interval": "never"},
        "runtime": {"device": device, "runs_dir": str(folder / "runs"), "name": "ours"},
    }
    path = folder / "config.yaml"
    path.write_text(to_yaml(Config.model_validate(tree)))
    return path


def resolve(path: Path, words: Sequence[str]) -> Config:
    """Resolve the config of a file and its words for one rank.

    Raises:
        ConfigError: all problems at once.
    """
    return load_config(path, words, {}, world_size=1, ranks_per_node=1)
