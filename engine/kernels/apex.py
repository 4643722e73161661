"""Runs AdamW for many tensors in one launch, by apex's FusedAdam kernel.

    g <- g inv_scale,  m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2
    w <- w - lr (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w)             (1711.05101, algorithm 2)

The kernel reads the learning rate, step, scale and skip flag on the device. It computes in fp32, including bias corrections. In
fp32, 1 - 0.999 has a relative error of 5e-5, so the first updates may differ from torch's by that much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

from triaxis.engine.kernels.trial import failure

ADAMW_MODE = 1
"""apex's mode for decoupled weight decay; 0 is L2."""
CHUNK = 2048 * 32
"""Elements per thread block, as in apex's own applier."""
MOST = 2**30
"""Maximum elements per tensor in a call, because apex counts them in 32 bits."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Apex:
    """The update functions from an installed apex.

    Attributes:
        adam: `amp_C.multi_tensor_adam_capturable`, over lists [g, w, m, v].
        adam_with_masters: `amp_C.multi_tensor_adam_capturable_master`, over lists [g, parameters, m, v, w]. The fp32 master is w;
            the parameters are its copy in the gradients' dtype.
    """

    adam: Callable[..., None]
    adam_with_masters: Callable[..., None]

    def update(
        self,
        lists: Sequence[Tensors],
        *,
        lr: torch.Tensor,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        step: torch.Tensor,
        scale: torch.Tensor,
        skip: torch.Tensor,
    ) -> None:
        """Update flat tensors [n] in place, and scale the gradients in place.

        If `skip` is 1, nothing changes.

        Args:
            lists: tensor lists in the order that `adam` (4) or `adam_with_masters` (5) takes; moments are fp32.
            lr, scale: learning rate and gradient factor, fp32 [1].
            betas, eps, decay: AdamW hyperparameters.
            step: update number from 1, int32 [1].
            skip: 1 to skip the update, else 0, int32 [1].
        """
        kernel = self.adam_with_masters if len(lists) == 5 else self.adam
        pieces = [[piece for tensor in tensors for piece in tensor.split(MOST)] for tensors in lists]
        corrects_bias = 1
        kernel(CHUNK, skip, pieces, lr, *betas, eps, step, ADAMW_MODE, corrects_bias, decay, scale)


def open_apex() -> Apex:
    """Import apex's kernels.

    Raises:
        ImportError: the kernels are not installed; the message names the reason.
    """
    try:
        kernels = import_module("amp_C")
        return Apex(kernels.multi_tensor_adam_capturable, kernels.multi_tensor_adam_capturable_master)
    except (ImportError, AttributeError) as error:
        raise ImportError(_reason(error)) from error


def apex_failure(device: torch.device) -> str:
    """Compare a small apex update with torch's; return the reason if it fails or differs, else ""."""
    generator = torch.Generator().manual_seed(1)
    g, w, m = (torch.randn(64, generator=generator).to(device) for _ in range(3))
    v = m.square()
    scale, lr, decay, (beta1, beta2) = 0.5, 1e-2, 0.1, (0.9, 0.95)
    mean, square = beta1 * m + (1 - beta1) * scale * g, beta2 * v + (1 - beta2) * (scale * g).square()
    direction = mean / (1 - beta1**2) / ((square / (1 - beta2**2)).sqrt() + 1e-8)
    wanted = w - lr * (direction + decay * w)
    numbers = {"lr": lr, "scale": scale}

    def run() -> None:
        open_apex().update(
            [[g], [w], [m], [v]],
            **{name: torch.full((1,), value, device=device) for name, value in numbers.items()},
            betas=(beta1, beta2),
            eps=1e-8,
            decay=decay,
            step=torch.full((1,), 2, dtype=torch.int32, device=device),
            skip=torch.zeros(1, dtype=torch.int32, device=device),
        )
        if not (w - wanted).norm() < 1e-4 * lr * wanted.norm():
            raise RuntimeError("its update is not that of AdamW")

    return failure(run)


def apex_refusal(device: torch.device, reason: str) -> str:
    """Write the config error for `kernels.optimizer = apex` on a device where it does not run."""
    return (
        f"kernels.optimizer = apex does not run here, on {device.type} ({reason}). Another kernel would have other bits than what "
        "was asked for. NVIDIA's apex is built from its sources (github.com/NVIDIA/apex, with its C++ and CUDA extensions). "
        "kernels.optimizer=compiled updates in one pass too, and kernels.optimizer=torch runs anywhere."
    )


def _reason(error: Exception) -> str:
    found = find_spec("apex")
    if found is None:
        return "apex is not installed"
    folders = [Path(each) for each in found.submodule_search_locations or []]
    if not any((folder / "optimizers" / "fused_adam.py").exists() for folder in folders):
        return "the apex that is installed is the package index's, another project of that name, and not NVIDIA's"
    return f"apex is installed without its CUDA kernels: {error}"
