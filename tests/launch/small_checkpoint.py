"""A small model of bytes as a checkpoint, for the commands that read one; and what such a command says, without a process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.command_line import OTHER_RUNS
from tests.offered import require_readable
from tests.oracle import oracle_weights
from triaxis.engine.checkpoint.format.manifest import TrainingState
from triaxis.engine.checkpoint.import_weights import whole, write_checkpoint
from triaxis.engine.config.tree import Config
from triaxis.launch import cli
from triaxis.models.specs import model_specs

END_OF_DOCUMENT = 256

LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 24,
    "seq_length": 32,
    "vocab_size": 257,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": "none",
    "tie_embeddings": False,
}
GPT: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 32,
    "vocab_size": 257,
    "position": "learned",
}


@dataclass(frozen=True)
class Saved:
    """A checkpoint, and what is in it."""

    folder: Path
    config: Config
    weights: dict[str, torch.Tensor]


def save(
    folder: Path, model: dict[str, Any], changed: dict[str, torch.Tensor] | None = None, tokenizer: str = "bytes"
) -> Saved:
    """Random weights in float64, some of them replaced, saved as if a sequence-parallel run of eight ranks had."""
    config = Config.model_validate(
        {
            "model": model,
            "data": {"train": "gone", "tokenizer": tokenizer},
            "train": {"steps": 5, "global_batch_size": 8},
            "parallel": {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
            "precision": {"dtype": "float64"},
            "runtime": {"ranks_per_node": 8},
        }
    )
    drawn = oracle_weights({spec.name: spec.shape for spec in model_specs(config.model)}, seed=5)
    weights = {name: weight.detach() for name, weight in drawn.items()} | (changed or {})
    write_checkpoint(
        folder / "checkpoints",
        [whole(name, weight) for name, weight in weights.items()],
        TrainingState.at_start(),
        config=config.model_dump(mode="json"),
        source="a test",
    )
    return Saved(folder, config, weights)


@dataclass(frozen=True)
class Said:
    """How a command ended in this process."""

    exit_code: int
    out: str
    err: str


def say(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: object) -> Said:
    """Run a command here, on one thread and without the variables of other runs."""
    for name in OTHER_RUNS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    exit_code = cli.main([str(word) for word in words])
    shown = capsys.readouterr()
    require_readable(shown.out + shown.err)
    return Said(exit_code, shown.out, shown.err)
