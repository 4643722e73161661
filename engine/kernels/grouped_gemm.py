"""Multiplies rows, ordered by expert, by their experts' matrices.

    rows   | expert 0 ..  | expert 1 .. |  | expert 3 ..  | unused |         ends = [e0, e1, e1, e3], cumulative

    loop      a GEMM per expert, in any dtype on any device; the host reads the ends
    grouped   one call for all experts, in 16- and 32-bit dtypes; the device reads the ends

A result's unused rows are uninitialised. `loop` is the reference.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from triaxis.engine.kernels.trial import failure
from triaxis.engine.kernels.weight_grad import WeightGradKernel, add, add_matmul

ExpertKernel = Literal["loop", "grouped"]


@dataclass(slots=True)
class Ends:
    """The exclusive end of each expert's rows.

    Attributes:
        device: cumulative ends, int32 [experts].
        host: the same ends on the host, or None until they are read.
        reading: function () -> context manager in which the host reads `device`; the communication ledger uses it.
    """

    device: torch.Tensor
    host: Sequence[int] | None = None
    reading: Callable[[], AbstractContextManager[None]] = nullcontext

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yield (expert's index, slice of its rows). If `host` is None, wait for the device first."""
        if self.host is None:
            with self.reading():
                self.host = self.device.tolist()
        start = 0
        for expert, stop in enumerate(self.host):
            yield expert, slice(start, stop)
            start = stop


def grouped_product(rows: torch.Tensor, matrices: torch.Tensor, ends: Ends, kernel: ExpertKernel) -> torch.Tensor:
    """Multiply each expert's rows by its matrix. The shapes are rows [R, in], matrices [experts, in, out] -> [R, out]."""
    if kernel == "grouped":
        product: torch.Tensor = F.grouped_mm(rows, matrices, offs=ends.device)
        return product
    out = rows.new_empty(rows.shape[0], matrices.shape[-1])
    for expert, where in ends.slices():
        torch.mm(rows[where], matrices[expert], out=out[where])
    return out


def add_grouped_products(
    main_grads: torch.Tensor,
    grad: torch.Tensor,
    rows: torch.Tensor,
    ends: Ends,
    kernel: ExpertKernel,
    *,
    overwrite: bool,
    weight_grad: WeightGradKernel = "separate",
) -> None:
    """Add dY^T X over each expert's rows to the expert's main grad, or assign it.

    An expert without rows contributes zeros.

    Args:
        main_grads: the experts' main grads, [experts, out, in].
        grad: output gradient dY, [R, out].
        rows: input rows X, [R, in].
        ends: end of each expert's rows.
        kernel: `loop` or `grouped`.
        overwrite: whether to assign instead of add.
        weight_grad: kernel for each GEMM in the loop.
    """
    if kernel == "grouped":
        add(main_grads, F.grouped_mm(grad.t(), rows, offs=ends.device), overwrite=overwrite)
        return
    for expert, where in ends.slices():
        if where.stop > where.start:
            add_matmul(main_grads[expert], grad[where], rows[where], overwrite=overwrite, kernel=weight_grad)
        elif overwrite:
            main_grads[expert].zero_()


_TRIED_SIDE = 16
_TRIED_ENDS = (0, 16, 16, 32, 32)
"""Ends for experts with and without rows. For an expert without rows, torch's kernel for compute capability 10.0 may leave the
gradient unwritten (PyTorch issue 172439)."""


def grouped_gemm_failure(dtype: torch.dtype, device: torch.device) -> str:
    """Compare torch's grouped GEMM with the loop on small matrices.

    Returns:
        The reason if the GEMM fails or differs, else "".
    """
    ends = Ends(torch.tensor(_TRIED_ENDS, dtype=torch.int32, device=device))

    def run() -> None:
        grouped, loop = (_tried(dtype, ends, kernel) for kernel in ("grouped", "loop"))
        if not all(torch.equal(one, other) for one, other in zip(grouped, loop, strict=True)):
            raise RuntimeError("its products are not the loop's, of experts without rows or of all")

    return failure(run)


def _tried(dtype: torch.dtype, ends: Ends, kernel: ExpertKernel) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute products and gradients on small all-ones matrices, where sums are exact in every dtype."""
    rows = torch.ones(_TRIED_ENDS[-1], _TRIED_SIDE, dtype=dtype, device=ends.device.device)
    matrices = rows.new_ones(len(_TRIED_ENDS), _TRIED_SIDE, _TRIED_SIDE)
    product, grads = grouped_product(rows, matrices, ends, kernel), torch.zeros_like(matrices)
    # torch's allocator reuses this memory for the next tensor of equal size, so elements that a kernel leaves unwritten are NaN.
    torch.full_like(matrices, torch.nan)
    add_grouped_products(grads, rows, rows, ends, kernel, overwrite=True)
    return product, grads


def grouped_gemm_refusal(dtype: torch.dtype, device: torch.device, reason: str) -> str:
    """Write the config error for `kernels.experts = grouped` on a device where it does not run."""
    return (
        f"kernels.experts = grouped does not run here, in {str(dtype).removeprefix('torch.')} on {device.type} (torch says: "
        f"{reason}). Another kernel would have other speed than what was asked for. kernels.experts=loop runs anywhere."
    )
