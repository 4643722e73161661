"""Opens a checkpoint for reading in Python, without its run or a process group."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from triaxis.engine.checkpoint.directory import find
from triaxis.engine.checkpoint.import_weights import read_weights
from triaxis.engine.checkpoint.inspect.weights import WhichWeights, check_weights


class Checkpoint(Mapping[str, torch.Tensor]):
    """A checkpoint's weights by name. Each access reads the tensor from disk.

    Attributes:
        path: folder of the checkpoint, step_<number>.
        step: number of optimizer steps before the checkpoint was saved.
        config: the run's resolved configuration; an import has only its `model` section and tokenizer.
        shapes: tensor shapes by name, without vocabulary padding.
    """

    def __init__(self, path: str | Path, weights: WhichWeights = "trained") -> None:
        self._found = find(Path(path))
        check_weights(self._found, weights)
        self._which: WhichWeights = weights
        manifest = self._found.manifest
        self.path: Path = self._found.folder
        self.step: int = manifest.state.step
        self.config: Mapping[str, Any] = manifest.config
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(info.shape) for name, info in manifest.tensors.items()
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read a whole tensor on the CPU, in its saved dtype.

        Raises:
            KeyError: the checkpoint has no such tensor.
            CheckpointError: files are missing or damaged.
        """
        if name not in self.shapes:
            raise KeyError(name)
        return read_weights(self._found, name, self._which)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step {self.step}, {len(self):,} tensors)"


def open_checkpoint(path: str | Path, weights: WhichWeights = "trained") -> Checkpoint:
    """Open a checkpoint for reading.

    Args:
        path: a checkpoint, a folder of checkpoints (its latest is opened), or a run directory.
        weights: `trained`, or `ema` for the moving average, which needs a run with `optimizer.ema`.

    Raises:
        CheckpointError: there is no checkpoint, or the checkpoint is damaged or has no moving average.
    """
    return Checkpoint(path, weights)
