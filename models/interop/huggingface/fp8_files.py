"""Read FP8 weight files with one scale per block as bf16, such as DeepSeek-V3's.

    name                [out, in]  F8_E4M3
    name_scale_inv      [out / 128, in / 128]  F32, each dim rounded up      w[i, j] = fp8[i, j] x scale_inv[i / 128, j / 128]

Here a block has 128 x 128 elements; i / 128 and j / 128 are rounded down. Products are computed in fp32 and rounded to bf16 once.

Source: 2412.19437, section 3.3.2, and `weight_dequant` in DeepSeek-V3's inference/kernel.py.
"""

from collections.abc import Iterator

import torch

from triaxis.engine.checkpoint.format.store import TORCH_DTYPES
from triaxis.engine.errors import CheckpointError
from triaxis.engine.numerics.precision import accumulate
from triaxis.models.interop.huggingface.files import TensorPlan, WeightFiles

FP8 = "F8_E4M3"
"""The dtype's name in a safetensors file."""

SCALE = "_scale_inv"
"""Suffix that turns a weight's name into its scales' name."""


class Fp8Files:
    """Weight files whose FP8 tensors appear as bf16.

    `block` is the numbers of rows and columns that share a scale.

    Attributes:
        tensors: shape and dtype of each tensor as `read` returns it, by its name; scales are left out.
        notes: how many tensors were expanded, as text for the user.

    Raises:
        CheckpointError: a weight's scales are missing or have the wrong shape.
    """

    def __init__(self, files: WeightFiles, block: tuple[int, int]) -> None:
        self.folder = files.folder
        self._files, self._block = files, block
        self._scales = {name: f"{name}{SCALE}" for name, plan in files.tensors.items() if plan.dtype == FP8}
        if problems := list(self._problems()):
            raise CheckpointError(
                f"{self.folder}: {problems[0]} ({len(problems)} such weights): they would be of another size. Get the folder again."
            )
        scales = set(self._scales.values())
        self.tensors = {
            name: TensorPlan(name, plan.shape, "BF16") if name in self._scales else plan
            for name, plan in files.tensors.items()
            if name not in scales
        }
        size = " x ".join(map(str, block))
        count = len(self._scales)
        self.notes = (
            (f"{count:,} tensors are FP8 with a scale per {size} block and were expanded to bf16",) if count else ()
        )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor to the CPU, in the dtype that `tensors` states."""
        values = self._files.read(name)
        if name not in self._scales:
            return values
        scales = accumulate(self._files.read(self._scales[name]))
        (rows, columns), (height, width) = values.shape[-2:], self._block
        of_rows = scales.repeat_interleave(height, dim=-2)[..., :rows, :]
        return (accumulate(values) * of_rows.repeat_interleave(width, dim=-1)[..., :columns]).to(
            TORCH_DTYPES["bfloat16"]
        )

    def _problems(self) -> Iterator[str]:
        for name, scale in self._scales.items():
            *others, rows, columns = self._files.tensors[name].shape
            wanted = (*others, -(-rows // self._block[0]), -(-columns // self._block[1]))
            there = self._files.tensors.get(scale)
            if there is None or there.shape != wanted:
                what = "is missing" if there is None else f"has the shape {list(there.shape)}"
                yield f"{scale} {what}, and {name} has {list(wanted)} blocks of {list(self._block)}"
