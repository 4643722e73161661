"""Writes the checkpoint of format version 1 that every later Triaxis must still read (`tests/golden/checkpoint_v1`).

    python -m tests.engine.checkpoint.format.golden FOLDER

It was run once, when the format was released, and is kept to say what is in it. A new format gets a folder of its own.
"""

import math
import sys
from pathlib import Path

import torch

from tests.engine.checkpoint.samples import Cut, shard, write_folder
from triaxis.engine.checkpoint.directory import CheckpointDirectory
from triaxis.engine.checkpoint.format.manifest import Ancestor, Kind, TrainingState
from triaxis.engine.checkpoint.format.store import Shard
from triaxis.engine.config.values.optimizer_kinds import OPTIMIZERS

STEP = 7
SHAPES = {
    "embedding.word.weight": (11, 8),
    "layers.0.attention.kv.weight": (2, 2, 4, 8),
    "layers.0.mlp.down.weight": (8, 12),
    "final_norm.weight": (8,),
}
STATE = TrainingState(
    step=STEP,
    consumed_samples=56,
    consumed_tokens=896,
    num_updates=7,
    lr=0.00025,
    rng={"seed": 1234},
    data={"train": "c0ffee"},
    wandb_id="abc123",
)


def values(name: str, kind: Kind) -> torch.Tensor:
    """Numbers that fp32 holds exactly, different in every tensor and kind, without a generator that may change."""
    shape = SHAPES[name]
    offset = 100 * list(SHAPES).index(name) + 10 * OPTIMIZERS["adamw"].state_kinds.index(kind)
    return (
        ((torch.arange(math.prod(shape)) * 37 + offset) % 1009 - 500)
        .to(torch.float64)
        .div(64)
        .to(torch.float32)
        .view(shape)
    )


def files() -> list[list[Shard]]:
    """Two tensor-parallel ranks, each with two data-parallel owners of unequal parts."""
    boxes: dict[str, list[tuple[tuple[int, int], ...]]] = {
        "embedding.word.weight": [((0, 6), (0, 8)), ((6, 11), (0, 8))],
        "layers.0.attention.kv.weight": [((0, 2), (0, 1), (0, 4), (0, 8)), ((0, 2), (1, 2), (0, 4), (0, 8))],
        "layers.0.mlp.down.weight": [((0, 8), (0, 6)), ((0, 8), (6, 12))],
        "final_norm.weight": [((0, 8),)],
    }
    ranks: list[list[Shard]] = [[] for _ in range(4)]
    for kind in OPTIMIZERS["adamw"].state_kinds:
        for name, its_boxes in boxes.items():
            for tp_index, box in enumerate(its_boxes):
                numel = math.prod(stop - start for start, stop in box)
                middle = numel // 3
                cuts: list[Cut] = [(box, 0, middle), (box, middle, numel)]
                for dp_index, cut in enumerate(cuts):
                    ranks[2 * dp_index + tp_index].append(shard(name, values(name, kind), cut, kind))
    return ranks


def main(folder: Path) -> None:
    directory = CheckpointDirectory(folder)
    partial = directory.partial(STEP, 1)
    write_folder(
        partial,
        files(),
        attempt=1,
        piece_bytes=256,
        state=STATE,
        layout={"tp": 2, "pp": 1, "dp": 2},
        config={"model": {"num_layers": 1, "hidden_size": 8}},
        lineage=(
            Ancestor(
                path="runs/before/checkpoints/step_00000003", step=3, loaded="weights", fingerprint={"master": "0" * 16}
            ),
        ),
    )
    directory.commit(partial, STEP)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
